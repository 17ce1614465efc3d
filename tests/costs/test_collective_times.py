"""Collectives, against a ring and a tree run by hand on real arrays, and against NCCL's times."""

import dataclasses
import math

import numpy as np
import pytest

from holmesjax.costs import collective_times
from holmesjax.costs.collective_times import Group, Groups, Reached
from holmesjax.topology.fabrics import FABRICS
from holmesjax.topology.machines import Collective, Link

LINK = Link(fabric="nvlink", bandwidth_bytes_per_s=100.0, latency_s=3.0)
NIC = Link(fabric="infiniband", bandwidth_bytes_per_s=40.0, latency_s=5.0)


def on_one_node(n, link=LINK):
    return Group(size=n, nodes=1, inside=link if n > 1 else None, between=None)


def run_ring(arrays, num_rounds, first_offset, adds, link):
    """`num_rounds` of a ring by hand: all ranks send one chunk to the next, at the same time."""
    n, time_s = len(arrays), 0.0
    chunks = [np.array_split(array, n) for array in arrays]
    for step in range(num_rounds):
        sent = [chunks[r][(r + first_offset - step) % n].copy() for r in range(n)]
        time_s += link.time_s(max(chunk.nbytes for chunk in sent))
        for r in range(n):
            mine = chunks[(r + 1) % n][(r + first_offset - step) % n]
            mine[:] = mine + sent[r] if adds else sent[r]
    return chunks, time_s


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_collectives_take_the_time_of_a_ring_that_gives_the_right_result(n):
    arrays = [
        np.random.default_rng(r).integers(9, size=24 * 5).astype(np.float64) for r in range(n)
    ]
    num_bytes, total = arrays[0].nbytes, sum(arrays)
    chunks, scatter_s = run_ring([a.copy() for a in arrays], n - 1, 0, True, LINK)
    for r in range(n):
        mine = (r + 1) % n
        np.testing.assert_array_equal(chunks[r][mine], np.array_split(total, n)[mine])
    start_s = collective_times.START_S if n > 1 else 0.0
    group = on_one_node(n)
    assert collective_times.reduce_scatter_s(num_bytes, group) == pytest.approx(start_s + scatter_s)
    reduced = [np.concatenate(chunks[r]) for r in range(n)]
    chunks, gather_s = run_ring(reduced, n - 1, 1, False, LINK)
    for r in range(n):
        np.testing.assert_array_equal(np.concatenate(chunks[r]), total)
    assert collective_times.all_gather_s(num_bytes, group) == pytest.approx(start_s + gather_s)
    ring_s = start_s + scatter_s + gather_s
    assert collective_times.all_reduce_s(num_bytes, group) <= ring_s * (1 + 1e-12)
    large = 1e6 * num_bytes  # there the steps are nothing, and a ring sends fewer bytes
    expected_s = start_s + 2 * (n - 1) * (3.0 + large / n / 100.0)
    assert collective_times.all_reduce_s(large, group) == pytest.approx(expected_s)


def run_tree(arrays, per_node, inside, between):
    """A chain in each node, a binary tree over the first devices; seconds without the bytes."""
    nodes = [arrays[i : i + per_node] for i in range(0, len(arrays), per_node)]
    time_s = (per_node - 1) * inside.latency_s
    sums = [np.sum(node, axis=0) for node in nodes]
    while len(sums) > 1:
        time_s += between.latency_s
        sums = [np.sum(sums[i : i + 2], axis=0) for i in range(0, len(sums), 2)]
    return sums[0], 2 * time_s


@pytest.mark.parametrize("nodes, per_node", [(1, 8), (2, 4), (5, 2), (16, 1)])
def test_small_arrays_are_summed_in_a_tree(nodes, per_node):
    arrays = [np.full(3, r, np.float64) for r in range(nodes * per_node)]
    total, steps_s = run_tree(arrays, per_node, LINK, NIC)
    np.testing.assert_array_equal(total, sum(arrays))
    group = Group(
        size=nodes * per_node,
        nodes=nodes,
        inside=LINK if per_node > 1 else None,
        between=NIC if nodes > 1 else None,
    )
    levels = math.ceil(math.log2(nodes))
    steps_s += 2 * levels * FABRICS["infiniband"].step_s
    slowest = NIC if nodes > 1 else LINK
    sent_s = 2 * 24 / slowest.bandwidth_bytes_per_s
    tree_s = collective_times.START_S + steps_s + sent_s
    step_s = max(3.0, 5.0 + FABRICS["infiniband"].step_s) if nodes > 1 else 3.0
    n = nodes * per_node
    ring_s = collective_times.START_S + 2 * (n - 1) * (
        step_s + 24 / n / slowest.bandwidth_bytes_per_s
    )
    assert collective_times.all_reduce_s(24, group) == pytest.approx(min(tree_s, ring_s))
    assert nodes == 1 or collective_times.all_reduce_s(24, group) < ring_s


FUNCTIONS = {
    "all_reduce": collective_times.all_reduce_s,
    "reduce_scatter": collective_times.reduce_scatter_s,
    "all_gather": collective_times.all_gather_s,
}


@pytest.mark.parametrize("kind", collective_times.KINDS)
@pytest.mark.parametrize("sizes", [(2**16, 2**20, 2**24), (2**16, 2**20)])
def test_collectives_take_the_time_that_was_measured(kind, sizes):
    """The software starts slowly, and fills two thirds of the link."""
    num_nodes, step_s = 4, 1e-4
    link = Link(fabric="ethernet", bandwidth_bytes_per_s=3e6, latency_s=step_s)
    hops = (2 if kind == "all_reduce" else 1) * (num_nodes - 1)
    seconds = lambda num_bytes: 4e-3 + hops * (step_s + num_bytes / num_nodes / 2e6)
    measured = [
        Collective(
            cluster="a",
            num_nodes=num_nodes,
            kind=kind,
            size_bytes=size,
            bandwidth_bytes_per_s=collective_times.sent_bytes(kind, num_nodes, size)
            / seconds(size),
        )
        for size in sizes
    ]
    software = collective_times.reached(measured, step_s)
    group = Group(size=4, nodes=4, inside=None, between=link, software=software)
    for num_bytes in (*sizes, 5e6):
        found_s = FUNCTIONS[kind](num_bytes, group)
        # A tree may be faster than what was measured as a ring.
        low = 0.7 if kind == "all_reduce" else 1 - 1e-9
        assert low * seconds(num_bytes) <= found_s <= (1 + 1e-9) * seconds(num_bytes)
        both = Groups.of([group, None])
        assert FUNCTIONS[kind](num_bytes, both).tolist() == [found_s, 0.0]
    others = {other: software[other] for other in collective_times.KINDS if other != kind}
    assert set(others.values()) == {Reached()}  # nobody measured those
    # Inside a node, nothing of it counts.
    alone = Group(size=4, nodes=1, inside=link, between=None, software=software)
    assert FUNCTIONS[kind](1e6, alone) == FUNCTIONS[kind](1e6, on_one_node(4, link))


def test_one_measurement_or_a_strange_one_gives_a_bandwidth_alone():
    rate = lambda size, bandwidth: Collective(
        cluster="a",
        num_nodes=2,
        kind="all_gather",
        size_bytes=size,
        bandwidth_bytes_per_s=bandwidth,
    )
    one = collective_times.reached([rate(2**20, 1e6)], 0.0)["all_gather"]
    assert one == Reached(start_s=0.0, bandwidth_bytes_per_s=pytest.approx(1e6))
    falls = [rate(2**20, 2e6), rate(2**24, 1e6), rate(2**16, 2e6)]  # as gloo's on two nodes
    found = collective_times.reached(falls, 0.0)["all_gather"]
    assert found == Reached(start_s=0.0, bandwidth_bytes_per_s=pytest.approx(1e6))


def test_one_device_sends_nothing():
    assert (
        collective_times.all_reduce_s(1e9, None)
        == collective_times.reduce_scatter_s(1e9, None)
        == 0.0
    )
    assert collective_times.all_reduce_s(1e9, on_one_node(1)) == 0.0
    with pytest.raises(AssertionError, match="a single device has no link"):
        _ = on_one_node(1).slowest


def test_a_group_has_the_links_that_it_needs():
    with pytest.raises(AssertionError):
        Group(size=2, nodes=1, inside=None, between=None)
    with pytest.raises(AssertionError):
        Group(size=2, nodes=2, inside=None, between=None)


def test_the_slower_of_two_links_sets_the_pace():
    group = Group(size=4, nodes=2, inside=LINK, between=NIC)
    assert group.slowest == NIC
    slow_inside = dataclasses.replace(LINK, bandwidth_bytes_per_s=1.0)
    assert dataclasses.replace(group, inside=slow_inside).slowest == slow_inside


# GB/s that each of 8 A100 sends (`busbw` of nccl-tests): VIA-Research/vTrain@f8dda84,
# trace/a100/AR_GPU8_1M_1024M_LUT.
NCCL_US = {2**20: 92.79, 24 * 2**20: 265.3, 384 * 2**20: 3147.1}


@pytest.mark.parametrize("num_bytes", NCCL_US)
def test_all_reduces_in_a_node_take_the_time_that_nccl_took(num_bytes):
    nvlink = Link(fabric="nvlink", bandwidth_bytes_per_s=0.77 * 300e9, latency_s=3.5e-6)
    predicted_s = collective_times.all_reduce_s(num_bytes, on_one_node(8, nvlink))
    assert predicted_s == pytest.approx(1e-6 * NCCL_US[num_bytes], rel=0.15)


# Share of the bandwidth that all-reduces reach on nodes of 8 GPUs: aliyun/SimAI@cef83f9,
# nic_ratio.csv.
SIMAI = {(2**24, 16): 0.32, (2**24, 256): 0.044, (2**24, 1024): 0.0087, (2**34, 256): 0.957}


@pytest.mark.parametrize("num_bytes, n", SIMAI)
def test_a_ring_reaches_the_share_of_the_bandwidth_that_was_measured(num_bytes, n):
    nics = Link(fabric="infiniband", bandwidth_bytes_per_s=0.96 * 50e9, latency_s=2e-6)
    fast = Link(fabric="nvlink", bandwidth_bytes_per_s=231e9, latency_s=3.5e-6)
    group = Group(size=n, nodes=n // 8, inside=fast, between=nics)
    ideal_s = 2 * (n - 1) / n * num_bytes / 50e9
    share = ideal_s / (2 * collective_times.reduce_scatter_s(num_bytes, group))
    assert share == pytest.approx(SIMAI[num_bytes, n], rel=0.3)
