"""No placement of the devices in the mesh is cheaper than the mapper's: every one is priced."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings, strategies as st

from holmesjax.plan.plan import Axis
from holmesjax.planner.mesh_order import Paths, place
from holmesjax.topology.fabrics import FABRICS
from holmesjax.topology.machines import (
    Cluster,
    Collective,
    DeviceKind,
    Link,
    Measured,
    Nic,
    Node,
    Topology,
)
from tests.cases import cases

TRAFFIC = {Axis.DATA: 1.0, Axis.FSDP: 3.0, Axis.CONTEXT: 10.0, Axis.EXPERT: 30.0, Axis.TENSOR: 99.0}


def make_node(name, num_devices, *, nvlink=100.0, nic=10.0, fabric="infiniband", count=1):
    link = Link(fabric="nvlink", bandwidth_bytes_per_s=nvlink, latency_s=1e-6)
    device = DeviceKind(
        name=f"gpu-{nvlink:g}",
        peak_flop_per_s={"float32": 1e12},
        memory_bytes=1e9,
        memory_bandwidth_bytes_per_s=1e11,
        link=link,
    )
    nics = (
        Nic(name="nic", fabric=fabric, rate_bytes_per_s=nic, latency_s=1e-6, count=count),
        Nic(name="eth", fabric="ethernet", rate_bytes_per_s=0.5, latency_s=1e-5, count=1),
    )
    return Node(name=name, device=device, num_devices=num_devices, nics=nics)


def make_topology(*nodes):
    cluster = Cluster(name="c", fabric=nodes[0].nics[0].fabric, nodes=nodes)
    return Topology(name="test", clusters=(cluster,), links={})


def uniform(*counts, **speeds):
    return make_topology(*(make_node(f"n{i}", num, **speeds) for i, num in enumerate(counts)))


def devices_of(topology):
    numbers = itertools.count()
    return {
        node.name: tuple(itertools.islice(numbers, node.num_devices))
        for cluster in topology.clusters
        for node in cluster.nodes
    }


def s_per_byte(topology):
    """Between devices on two nodes: the network and both devices' own links, the slowest."""
    nodes = [node.name for cluster in topology.clusters for node in cluster.nodes]
    speed = lambda a, b: topology.effective_link(a, b).bandwidth_bytes_per_s
    return {(a, b): 1 / min(speed(a, b), speed(a, a), speed(b, b)) for a in nodes for b in nodes}


def pairs_in_groups(shape):
    """For every axis, the pairs of row-major positions that differ in its coordinate only."""
    index = list(enumerate(itertools.product(*map(range, shape))))
    pairs = [[] for _ in shape]
    for (m, i), (n, j) in itertools.combinations(index, 2):
        differs = [axis for axis in range(len(shape)) if i[axis] != j[axis]]
        if len(differs) == 1:
            pairs[differs[0]].append((m, n))
    return pairs


def price_of(cost, pairs, seats, weights):
    """The definition, for devices on the nodes `seats`: the slowest pair of any group counts."""
    return sum(
        weight * max((cost[seats[m], seats[n]] for m, n in axis_pairs), default=0.0)
        for weight, axis_pairs in zip(weights, pairs, strict=True)
    )


def distinct_orders(items):
    """All orders of items of which some are equal, each once."""
    if not items:
        yield ()
    for first in sorted(set(items)):
        rest = list(items)
        rest.remove(first)
        yield from ((first, *order) for order in distinct_orders(rest))


def cheapest(topology, sizes, traffic):
    seats = [n.name for c in topology.clusters for n in c.nodes for _ in range(n.num_devices)]
    cost, pairs = s_per_byte(topology), pairs_in_groups(tuple(sizes.values()))
    weights = [traffic[axis] for axis in sizes]
    return min(price_of(cost, pairs, order, weights) for order in distinct_orders(seats))


def check(topology, sizes, traffic=TRAFFIC):
    """Places the stage, prices it by the definition, and compares with every other placement."""
    devices = devices_of(topology)
    placement = place(Paths.between(topology, list(devices)), devices, sizes, traffic)
    node_of = {number: node for node, numbers in devices.items() for number in numbers}
    assert sorted(placement.devices) == sorted(node_of)
    assert dict(placement.sizes) == dict(sizes)
    seats = [node_of[number] for number in placement.devices]
    weights = [traffic[axis] for axis in placement.sizes]
    pairs = pairs_in_groups(tuple(placement.sizes.values()))
    price = price_of(s_per_byte(topology), pairs, seats, weights)
    # Sums of the same few numbers, in another order: a few roundings of float64.
    assert placement.price_s == pytest.approx(price, rel=1e-12)
    assert price == pytest.approx(cheapest(topology, sizes, traffic), rel=1e-12)
    return placement


MESHES = {
    4: [{Axis.DATA: 4, Axis.TENSOR: 1}, {Axis.DATA: 2, Axis.TENSOR: 2}],
    6: [{Axis.DATA: 3, Axis.TENSOR: 2}, {Axis.DATA: 2, Axis.TENSOR: 3}],
    8: [{Axis.DATA: 2, Axis.FSDP: 2, Axis.TENSOR: 2}, {Axis.DATA: 2, Axis.TENSOR: 4}],
}
COUNTS = {
    4: [(4,), (2, 2), (1, 1, 2), (3, 1), (1, 1, 1, 1)],
    6: [(4, 2), (3, 3), (2, 2, 2), (1, 5), (1, 2, 3), (6,)],
    8: [(4, 4), (2, 6), (2, 2, 4), (3, 5), (2, 2, 2, 2), (7, 1), (1, 3, 4)],
}


@cases(
    "counts, sizes",
    [(counts, sizes) for n in MESHES for counts in COUNTS[n] for sizes in MESHES[n]],
)
def test_no_placement_is_cheaper_on_nodes_of_unequal_size(counts, sizes):
    check(uniform(*counts), sizes)
    check(uniform(*counts), sizes, {**TRAFFIC, Axis.DATA: 500.0})


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_no_placement_is_cheaper_on_any_cluster(data):
    sizes = data.draw(
        st.sampled_from(
            [
                {Axis.DATA: 2, Axis.TENSOR: 2},
                {Axis.TENSOR: 2, Axis.DATA: 3},
                {Axis.DATA: 6, Axis.TENSOR: 1},
                {Axis.DATA: 2, Axis.EXPERT: 3},
                {Axis.FSDP: 2, Axis.CONTEXT: 2, Axis.TENSOR: 2},
            ]
        )
    )
    left, nodes = math.prod(sizes.values()), []
    while left:
        num = data.draw(st.integers(1, min(left, 4)))
        nvlink = data.draw(st.sampled_from([5.0, 50.0, 100.0]))  # 5: slower than the network
        nic, count = data.draw(st.sampled_from([(10.0, 1), (10.0, 4), (20.0, 1), (2.0, 2)]))
        nodes.append(make_node(f"n{len(nodes)}", num, nvlink=nvlink, nic=nic, count=count))
        left -= num
    weights = st.sampled_from([0.0, 1.0, 2.0, 7.0, 100.0])
    check(make_topology(*nodes), sizes, {axis: data.draw(weights) for axis in sizes})


def test_tensor_lies_inside_the_nodes_and_data_across_them():
    placement = check(uniform(4, 4), {Axis.DATA: 4, Axis.TENSOR: 2})
    assert list(placement.sizes) == [Axis.DATA, Axis.TENSOR]
    assert placement.fabrics == {Axis.DATA: "infiniband", Axis.TENSOR: "nvlink"}
    assert placement.devices == tuple(range(8))
    # Data groups 0 2 4 6 and 1 3 5 7 share the interfaces of each node.
    data, tensor = placement.groups[Axis.DATA], placement.groups[Axis.TENSOR]
    nvlink, nic = FABRICS["nvlink"].reached * 100.0, FABRICS["infiniband"].reached * 10.0
    assert (data.size, data.nodes, tensor.size, tensor.nodes) == (4, 2, 2, 1)
    assert data.between.bandwidth_bytes_per_s == nic / 2
    assert data.inside.bandwidth_bytes_per_s == tensor.inside.bandwidth_bytes_per_s == nvlink
    assert tensor.between is None


def test_a_group_between_nodes_is_no_faster_than_its_own_devices():
    placement = check(uniform(2, 2, nvlink=1.0, nic=10.0), {Axis.DATA: 2, Axis.TENSOR: 2})
    own = FABRICS["nvlink"].reached * 1.0
    slowest = {group.slowest.bandwidth_bytes_per_s for group in placement.groups.values()}
    assert slowest == {own}
    assert placement.fabrics == {Axis.DATA: "infiniband", Axis.TENSOR: "nvlink"}


def test_the_axis_order_is_turned_where_only_the_other_axis_fits_in_nodes():
    # Nodes of 3: pairs cannot lie inside them, triples can.
    placement = check(uniform(3, 3), {Axis.DATA: 3, Axis.TENSOR: 2})
    assert list(placement.sizes) == [Axis.TENSOR, Axis.DATA]
    assert placement.fabrics == {Axis.TENSOR: "infiniband", Axis.DATA: "nvlink"}


def test_nodes_with_equally_fast_interfaces_are_neighbours():
    nodes = [make_node(f"n{i}", 1, nic=nic) for i, nic in enumerate([10.0, 2.0, 10.0, 2.0])]
    placement = check(make_topology(*nodes), {Axis.DATA: 2, Axis.TENSOR: 2})
    assert placement.devices == (0, 2, 1, 3)


def test_equal_prices_keep_the_given_order():
    sizes = {Axis.DATA: 2, Axis.TENSOR: 2}
    assert list(check(uniform(1, 1, 1, 1), sizes).sizes) == [Axis.DATA, Axis.TENSOR]
    assert list(check(uniform(4), {Axis.DATA: 4, Axis.TENSOR: 1}).sizes) == [Axis.DATA, Axis.TENSOR]
    turned = {Axis.TENSOR: 2, Axis.DATA: 2}
    assert list(check(uniform(4), turned).sizes) == [Axis.TENSOR, Axis.DATA]


def test_an_axis_of_one_device_has_no_link():
    placement = place(
        Paths.between(uniform(1), ["n0"]), {"n0": (0,)}, {Axis.DATA: 1, Axis.TENSOR: 1}, TRAFFIC
    )
    assert placement.fabrics == {Axis.DATA: "local", Axis.TENSOR: "local"}
    assert placement.groups == {}
    assert placement.price_s == 0.0


def test_a_stage_may_use_some_devices_of_a_node():
    topology = uniform(4, 4)
    devices = {"n0": (2, 3), "n1": (4, 5)}
    placement = place(
        Paths.between(topology, list(devices)), devices, {Axis.DATA: 2, Axis.TENSOR: 2}, TRAFFIC
    )
    assert placement.devices == (2, 3, 4, 5)
    assert placement.fabrics[Axis.TENSOR] == "nvlink"


def test_an_axis_across_clusters_has_their_link():
    infiniband = Cluster(name="a", fabric="infiniband", nodes=(make_node("a-0", 2),))
    roce = Cluster(name="b", fabric="roce", nodes=(make_node("b-0", 2, fabric="roce"),))
    ethernet = Link(fabric="ethernet", bandwidth_bytes_per_s=1.0, latency_s=1e-4)
    topology = Topology(
        name="two",
        clusters=(infiniband, roce),
        links={("a", "b"): ethernet, ("b", "a"): ethernet},
    )
    sizes = {Axis.TENSOR: 2, Axis.DATA: 2}
    paths = Paths.between(topology, list(devices_of(topology)))
    placement = place(paths, devices_of(topology), sizes, TRAFFIC)
    assert placement.fabrics == {Axis.DATA: "ethernet", Axis.TENSOR: "nvlink"}
    # The nodes' NICs have half of the link, reach 94% of that, and two rings share it.
    slowest = placement.groups[Axis.DATA].slowest
    assert slowest.bandwidth_bytes_per_s == pytest.approx(0.5 * 0.94 / 2)


def test_a_thousand_devices_are_placed_at_once():
    topology = uniform(*[8] * 128)
    sizes = {Axis.DATA: 8, Axis.FSDP: 4, Axis.CONTEXT: 2, Axis.EXPERT: 2, Axis.TENSOR: 8}
    placement = place(
        Paths.between(topology, list(devices_of(topology))), devices_of(topology), sizes, TRAFFIC
    )
    assert placement.fabrics[Axis.TENSOR] == "nvlink"
    assert [placement.fabrics[axis] for axis in list(sizes)[:-1]] == ["infiniband"] * 4


def test_a_group_has_its_share_of_what_collectives_reach():
    """Two groups leave each of two nodes; in the other cluster nothing was measured."""
    clusters = tuple(
        Cluster(name=name, fabric="infiniband", nodes=tuple(make_node(n, 2) for n in nodes))
        for name, nodes in (("a", ("a0", "a1")), ("b", ("b0", "b1")))
    )
    between = Link(fabric="ethernet", bandwidth_bytes_per_s=0.4, latency_s=1e-5)
    gathered = Collective(
        cluster="a", num_nodes=2, kind="all_gather", size_bytes=8.0, bandwidth_bytes_per_s=4.0
    )
    topology = Topology(
        name="test",
        clusters=clusters,
        links={("a", "b"): between, ("b", "a"): between},
        measured=Measured(date="2026-01-01", pairs={}, collectives=(gathered,)),
    )
    own = devices_of(topology)
    rates = {}
    for names in (("a0", "a1"), ("b0", "b1"), ("a0", "b0")):
        used = {name: own[name] for name in names}
        sizes = {Axis.DATA: 2, Axis.TENSOR: 2}
        group = place(Paths.between(topology, names), used, sizes, TRAFFIC).groups[Axis.DATA]
        for kind in ("all_gather", "reduce_scatter"):
            rates[names[0], names[1], kind] = group.reached(kind).bandwidth_bytes_per_s
    full = FABRICS["infiniband"].reached * 10.0 / 2
    assert rates == {
        ("a0", "a1", "all_gather"): pytest.approx(4.0 / 2),
        ("a0", "a1", "reduce_scatter"): pytest.approx(full),
        ("b0", "b1", "all_gather"): pytest.approx(full),
        ("b0", "b1", "reduce_scatter"): pytest.approx(full),
        ("a0", "b0", "all_gather"): pytest.approx(FABRICS["ethernet"].reached * 0.4 / 2),
        ("a0", "b0", "reduce_scatter"): pytest.approx(FABRICS["ethernet"].reached * 0.4 / 2),
    }


def test_what_groups_of_as_many_nodes_reach_counts():
    """Or of the next more, or else of the most that were measured."""
    topology = uniform(1, 1, 1, 1, 1, 1)
    rates = {2: 1.0, 4: 3.0}
    measured = tuple(
        Collective(
            cluster="c",
            num_nodes=num_nodes,
            kind="all_gather",
            size_bytes=8.0,
            bandwidth_bytes_per_s=rate,
        )
        for num_nodes, rate in rates.items()
    )
    of_groups = Measured(date="2026-01-01", pairs={}, collectives=measured)
    topology = dataclasses.replace(topology, measured=of_groups)
    own = devices_of(topology)
    found = {}
    for count in (2, 3, 4, 6):
        used = dict(itertools.islice(own.items(), count))
        paths = Paths.between(topology, list(used))
        group = place(paths, used, {Axis.DATA: count}, TRAFFIC).groups[Axis.DATA]
        found[count] = group.reached("all_gather").bandwidth_bytes_per_s
    assert found == pytest.approx({2: 1.0, 3: 3.0, 4: 3.0, 6: 3.0})
