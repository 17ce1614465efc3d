"""Exchanges of tokens: their rounds against routers drawn at random, and their seconds."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from holmesjax.config import ExpertsConfig, ModelConfig
from holmesjax.costs import expert_exchange
from holmesjax.costs.collective_times import OVERLAP_SLOWDOWN, Group, Groups, all_to_all_s
from holmesjax.costs.expert_exchange import (
    CHUNKS,
    LOAD_VARIATION,
    exchange_s,
    multiplied_rows,
    peak_load,
    round_s,
    rounds,
)
from holmesjax.costs.expert_placement import greedy
from holmesjax.costs.products import train_flop
from holmesjax.costs.stage_times import stage_times
from holmesjax.layer_specs.model_layers import forget
from holmesjax.topology.machines import DeviceKind, Link
from kernels.attention.shards import Shards
from kernels.expert_exchange import experts_feed_forward
from kernels.expert_slots import (
    capacity_rows,
    choices_of_each,
    share_of_tokens,
    slots_of_each,
)
from tests.shapes import shape_of
from tests.traced_flop import dot_flop


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
        found.append(np.ceil(sent.max() / choices_of_each(num_tokens, count, active, n)))
    experts = ExpertsConfig(count=count, active=active)
    peak = peak_load(experts, n, is_placed=is_placed)
    assert float(peak) == pytest.approx(np.mean(peaks), rel=0.02)
    expected = rounds(experts, num_tokens, n, is_placed=is_placed)
    assert float(expected) == pytest.approx(np.mean(found), abs=0.12)


@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (2, 1)])
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_tokens_go_to_a_device_as_often_as_in_all_choices_there_are(n, groups):
    """8 experts, 3 of a token, in so many of their groups."""
    number, active = groups
    all_of = lambda group: range(group * 8 // number, (group + 1) * 8 // number)
    ways = [
        set(choice)
        for some in itertools.combinations(range(number), active)
        for choice in itertools.combinations([e for g in some for e in all_of(g)], 3)
    ]
    first = set(range(8 // n))
    wanted = np.mean([bool(first & choice) for choice in ways])
    assert share_of_tokens(8, 3, n, *groups) == pytest.approx(wanted)


def test_rows_of_an_exchange_have_room_where_choices_have():
    """1,024 tokens of each of 16 devices: choices need a round more where rows do."""
    rng, n, count, k, num_tokens = np.random.default_rng(0), 16, 64, 6, 1024
    sizes = num_tokens, count, k, n
    room = slots_of_each(*sizes), choices_of_each(*sizes)
    for _ in range(10):
        load = np.log(np.maximum(rng.normal(1, LOAD_VARIATION, count), 0.01))
        score = load + rng.gumbel(size=(n, num_tokens, count)).astype(np.float32)
        chosen = np.argpartition(score, -k)[..., -k:] // (count // n)
        of_device = np.sum(chosen[..., None] == np.arange(n), 2)  # [from, token, to]
        rows, choices = np.sum(of_device > 0, 1) / room[0], of_device.sum(1) / room[1]
        assert rows.max() < choices.max()


@pytest.mark.parametrize(
    "length, factor, n, chunks",
    [(4096, None, 1, 1), (96, None, 1, 1), (64, 1.3, 1, 1), (256, None, 4, 1), (96, None, 2, 3)],
)
def test_rows_are_those_that_a_program_multiplies(length, factor, n, chunks):
    """In a round, where devices share experts; [rows, 8] [8, 16] and back."""
    settings, sequences = ExpertsConfig(count=8, active=2, capacity_factor=factor), 3
    mesh = Mesh(np.array(jax.devices("cpu")[:n]), ["expert"])
    shards = Shards(mesh, (("B", ("expert",)), ("E", ("expert",)), ("N", ()), ("F", ())))
    capacity = factor and capacity_rows(length, 2, 8, factor)
    options = {"capacity": capacity, "num_chunks": chunks, "shards": shards if n > 1 else None}
    run = lambda *arrays: experts_feed_forward("gelu", *arrays, **options)
    x_BLD = jnp.zeros((n * sequences, length, 8))
    choice = jnp.zeros((*x_BLD.shape[:2], 2), jnp.int32)
    weights = (jnp.zeros((8, 8, 16)),), jnp.zeros((8, 16, 8))
    program = jax.make_jaxpr(run)(x_BLD, choice, choice.astype("float32"), *weights)
    num_tokens = sequences * length
    rows = multiplied_rows(settings, length, num_tokens, n, num_chunks=chunks)
    rows_of_round = rows / float(rounds(settings, num_tokens, n))
    assert dot_flop(program.jaxpr) == pytest.approx(rows_of_round * 2 * num_tokens * 4 * 8 * 16)


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


@pytest.fixture
def equal_loads(monkeypatch):
    """Devices have equal loads, and no seconds are known that are those of others."""
    forget()
    monkeypatch.setattr(expert_exchange, "LOAD_VARIATION", 1e-9)
    yield
    forget()


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
def test_no_order_of_a_link_ends_a_round_earlier(num_chunks):
    for seconds in np.random.default_rng(num_chunks).exponential(size=(40, 3)):
        wanted = shortest_round_s(*seconds, num_chunks)
        assert float(round_s(*seconds, num_chunks)) == pytest.approx(wanted)


def test_chunks_hide_an_exchange_behind_products_until_their_latencies_count(equal_loads):
    """All but the first chunk's way there and the last one's back, where products take longer."""
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
    equal_loads, checkpointing, norms, products, exchanges
):
    """In products of one layer's experts with their tokens, and in exchanges of a forward."""
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
    options = {"checkpointing": checkpointing, "experts_by_kernel": True}
    stage = lambda axis: shape_of(1, **{axis: 2}, **options)
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
