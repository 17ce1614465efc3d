"""Exchanges of tokens: their rounds against routers drawn at random, and their seconds."""

import dataclasses
import itertools

import numpy as np
import pytest

from holmesjax.config import ExpertsConfig, ModelConfig
from holmesjax.costs import expert_exchange
from holmesjax.costs.collective_times import OVERLAP_SLOWDOWN, Group, Groups, all_to_all_s
from holmesjax.costs.expert_exchange import (
    CHUNKS,
    LOAD_VARIATION,
    exchange_s,
    peak_load,
    round_s,
    rounds,
)
from holmesjax.costs.expert_placement import greedy
from holmesjax.costs.products import train_flop
from holmesjax.costs.stage_times import stage_times
from holmesjax.topology.machines import DeviceKind, Link
from kernels.expert_slots import slots_of_each
from tests.shapes import shape_of


@pytest.mark.parametrize(
    "count, active, num_tokens, n, is_placed",
    [
        (128, 8, 4096, 8, False),
        (128, 8, 4096, 32, False),
        (8, 2, 4096, 4, False),
        (128, 8, 4096, 32, True),
        (64, 6, 4096, 16, True),
    ],
)
def test_loads_are_those_of_drawn_routers(count, active, num_tokens, n, is_placed):
    """Experts have loads that vary, and each device draws the choices of its tokens."""
    rng, peaks, found = np.random.default_rng(0), [], []
    for _ in range(200):
        share = np.maximum(rng.normal(1, LOAD_VARIATION, count), 0)
        if is_placed:  # by their loads of a step before
            share = share[greedy(share.tolist(), n)]
        choices = rng.multinomial(num_tokens * active, share / share.sum(), size=n)
        sent = choices.reshape(n, n, -1).sum(-1)  # from each device to each
        peaks.append(sent.sum(0).max() / (num_tokens * active))
        found.append(np.ceil(sent.max() / slots_of_each(num_tokens * active, n)))
    experts = ExpertsConfig(count=count, active=active)
    peak = peak_load(experts, n, is_placed=is_placed)
    assert float(peak) == pytest.approx(np.mean(peaks), rel=0.02)
    expected = rounds(experts, num_tokens, n, is_placed=is_placed)
    assert float(expected) == pytest.approx(np.mean(found), abs=0.12)


def shortest_round_s(sent_s, products_s, back_s, num_chunks):
    """The least time of every order in which a link can carry chunks there and back."""
    there, back = range(num_chunks), range(num_chunks, 2 * num_chunks)
    found = []
    for order in itertools.permutations([*there, *back]):
        link_s, device_s, ready_s = 0.0, 0.0, {}
        for item in order:
            if item in there:
                link_s += sent_s
                device_s = max(device_s, link_s) + products_s
                ready_s[item + num_chunks] = device_s
            elif item not in ready_s:
                break
            else:
                link_s = max(link_s, ready_s[item]) + back_s
        else:
            found.append(link_s)
    return min(found)


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
def test_no_order_of_a_link_ends_a_round_earlier(num_chunks):
    for seconds in np.random.default_rng(num_chunks).exponential(size=(40, 3)):
        wanted = shortest_round_s(*seconds, num_chunks)
        assert float(round_s(*seconds, num_chunks)) == pytest.approx(wanted)


def test_chunks_hide_an_exchange_behind_products_until_their_latencies_count(monkeypatch):
    """All but the first chunk's way there and the last one's back, where products take longer."""
    monkeypatch.setattr(expert_exchange, "LOAD_VARIATION", 1e-9)
    experts = ExpertsConfig(count=8, active=2, width=64)
    sizes = {"num_layers": 1, "width": 64, "num_heads": 4, "context_length": 64}
    model = ModelConfig(**sizes, pattern=("expert_block",), experts=experts)
    link = Link(fabric="nvlink", bandwidth_bytes_per_s=1e9, latency_s=1e-6)
    pair = Group(size=2, nodes=1, inside=link, between=None)

    def exchange(chunks, products_s, **hides):
        stage = dataclasses.replace(shape_of(1, expert=2), expert_chunks=chunks)
        return exchange_s(model, stage, pair, (products_s, products_s), **hides)

    def seconds(chunks, products_s):
        return float(exchange(chunks, products_s).forward_s)

    alone_s = seconds(1, 1.0)
    assert seconds(1, 0.0) == alone_s
    start_s = 3 * all_to_all_s(0.0, pair)  # of a chunk's three arrays
    moved_s = alone_s - start_s
    hidden_s = 3 * (moved_s / 4 + start_s)
    assert seconds(4, 1.0) == pytest.approx(
        moved_s / 4 + start_s + (OVERLAP_SLOWDOWN - 1) * hidden_s, rel=0.02
    )
    assert seconds(4, 0.0) == pytest.approx(moved_s + 4 * start_s, rel=0.02)  # nothing to hide in
    products_s = np.array([0.0, 1e-6, 1e-5, 1e-4, 1.0])
    of_chunks = [exchange(chunks, products_s) for chunks in CHUNKS]
    both_s = np.stack([each.forward_s + each.backward_s + 0 * products_s for each in of_chunks])
    best = exchange(None, products_s)
    np.testing.assert_array_equal(best.forward_s + best.backward_s, both_s.min(axis=0))
    np.testing.assert_array_equal(best.chunks, np.take(CHUNKS, both_s.argmin(axis=0)))
    assert set(best.chunks) == {1, 2}
    assert exchange(None, 1.0, hides=False).chunks == 1
    assert seconds(1, 1.0) < float(exchange(2, 1.0, hides=False).forward_s)


def test_an_exchange_between_nodes_shares_their_links():
    """Each of 8 devices on two nodes sends a half of its bytes to the other node."""
    inside = Link(fabric="nvlink", bandwidth_bytes_per_s=200e9, latency_s=0.0)
    between = Link(fabric="infiniband", bandwidth_bytes_per_s=50e9, latency_s=0.0)
    near = Group(size=8, nodes=1, inside=inside, between=None)
    far = Group(size=8, nodes=2, inside=inside, between=between)
    start_s = all_to_all_s(0.0, near), all_to_all_s(0.0, far)
    found = [all_to_all_s(1e9, near) - start_s[0], all_to_all_s(1e9, far) - start_s[1]]
    assert found == pytest.approx([1e9 * 7 / 8 / 200e9, 4 * 1e9 / 2 / 50e9])
    both = all_to_all_s(1e9, Groups.of([None, near, far]))
    np.testing.assert_allclose(both, [0.0, all_to_all_s(1e9, near), all_to_all_s(1e9, far)])


@pytest.mark.parametrize(
    "checkpointing, norms, products, exchanges",
    [
        ("none", "before", 2, 0),  # those before the activation again
        ("dots", "both", 2, 0),
        ("full", "before", 2 - 3, 0),  # the others no more: nothing reads their results
        ("full", "both", 2, 1),
    ],
)
def test_what_devices_that_share_experts_compute_and_send_again(
    monkeypatch, checkpointing, norms, products, exchanges
):
    """In products of one layer's experts with their tokens, and in exchanges of a forward."""
    monkeypatch.setattr(expert_exchange, "LOAD_VARIATION", 1e-9)
    experts = ExpertsConfig(count=4, active=2, width=24)
    sizes = {"num_layers": 1, "width": 32, "num_heads": 4, "context_length": 16, "norms": norms}
    form = {"norm": "rms_norm", "activation": "swiglu", "pattern": ("expert_block",)}
    model = ModelConfig(**sizes, **form, experts=experts)
    link = Link(fabric="nvlink", bandwidth_bytes_per_s=1e9, latency_s=0.0)
    device = DeviceKind(
        name="toy",
        peak_flop_per_s={"float32": 1.0},
        memory_bytes=1e9,
        memory_bandwidth_bytes_per_s=1e30,
        link=link,
    )
    pair = Group(size=2, nodes=1, inside=link, between=None)
    stage = lambda axis: shape_of(1, **{axis: 2}, checkpointing=checkpointing)
    frozen = dataclasses.replace(model, frozen=("*/*_EDF", "*/*_EFD"))
    (alone, shared), (still, still_shared) = (
        [
            stage_times(trains, stage(axis), [device], None, None, **{axis: pair})
            for axis in ("fsdp", "expert")
        ]
        for trains in (model, frozen)
    )
    one_s = 2 * 16 * 2 * (2 * 32 * 24) / 0.5  # of two sequences; a product reaches half the peak
    more = lambda name: getattr(shared, name) - getattr(alone, name)
    assert more("forward_s") == pytest.approx(0.0, abs=1e-6 * one_s)
    assert more("backward_s") == pytest.approx(products * one_s)
    assert more("weight_s") == pytest.approx(-3 * one_s)
    # Frozen experts have no gradients of weights, neither later nor at once.
    assert still.backward_s == pytest.approx(alone.backward_s - 3 * one_s)
    assert still.weight_s == pytest.approx(alone.weight_s - 3 * one_s)
    assert still_shared.backward_s == pytest.approx(shared.backward_s - 3 * one_s)
    assert still_shared.weight_s == pytest.approx(shared.weight_s)
    of_active = 3 * 2 * 32 * 24  # numbers of two experts
    assert train_flop(model, 1) - train_flop(frozen, 1) == 2 * of_active
    once_s, back_s, _ = exchange_s(model, shape_of(1, expert=2), pair)
    assert shared.forward_exchange_s == once_s
    assert shared.backward_exchange_s == pytest.approx(back_s + exchanges * once_s)
