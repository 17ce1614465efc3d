"""Islands meet by the rule of DiLoCo, with the same bits on all of them, and few bytes."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from holmesjax.config import OuterConfig
from holmesjax.errors import PeerError
from holmesjax.islands.agreement import Agreement, Digests, compare
from holmesjax.islands.meeting import IslandMeetings
from holmesjax.plan.outer_rule import meeting_bytes, outer_step
from tests.diloco import diloco
from tests.drawn_islands import CUTS, islands_of, numbers, states_of

NESTEROV, HEAVY_BALL = OuterConfig(), OuterConfig(rate=0.5, momentum=0.6, nesterov=False)


@pytest.mark.parametrize("outer", [NESTEROV, HEAVY_BALL])
@pytest.mark.parametrize("count, shares", [(1, ()), (2, ()), (3, ()), (3, (5, 2, 1))])
def test_the_rule_is_that_of_papers(outer, count, shares):
    random = np.random.default_rng(count)
    wide = weights = random.normal(size=50).astype(np.float32)
    wide_momentum = momentum = np.zeros_like(weights)
    for _ in range(4):
        moved = [0.1 * random.normal(size=50).astype(np.float32) for _ in range(count)]
        of_islands = [weights + move for move in moved]
        wide = weights.astype(np.float64)
        wide, wide_momentum = diloco(outer, of_islands, wide, wide_momentum, shares)
        weights, momentum = outer_step(outer, of_islands, weights, momentum, shares)
        assert weights.dtype == momentum.dtype == np.float32
        np.testing.assert_allclose(weights, wide, rtol=0, atol=1e-6)
        np.testing.assert_allclose(momentum, wide_momentum, rtol=0, atol=1e-6)


def test_rate_1_without_momentum_gives_the_mean_to_the_bit():
    """Also where a weight has passed zero, which a difference would round."""
    one, before = np.float32([1e-9, -0.3, 0.7]), np.float32([0.5, 0.1, -0.7])
    plain = OuterConfig(rate=1.0, momentum=0.0)
    assert before[0] - (before[0] - one[0]) != one[0]
    np.testing.assert_array_equal(outer_step(plain, [one], before, 0 * before)[0], one)


@pytest.mark.parametrize("count, shares", [(2, (5, 3)), (3, ())])
def test_unlike_islands_meet_by_the_rule(count, shares):
    islands, random = islands_of(CUTS[:count]), np.random.default_rng(count)
    drawn = {k: states_of(chunks, random) for k, chunks in islands.items()}
    meeting = IslandMeetings(islands, count, NESTEROV, shares=shares)
    states = meeting.begin(drawn)
    owned = [
        numbers(chunk_states, lambda state: state.outer.weights) for chunk_states in states.values()
    ]
    names = [name for its_weights in owned for name in its_weights]
    weights = {name: x for its_weights in owned for name, x in its_weights.items()}
    assert sorted(names) == sorted(numbers(states[0], lambda state: state.params))  # each once
    momentum = dict.fromkeys(weights, 0.0)
    sizes = {name: x.size for name, x in weights.items()}
    for step in (1, 2):
        of_islands = [
            numbers(chunk_states, lambda state: state.params) for chunk_states in states.values()
        ]
        for name in weights:
            own = [arrays[name] for arrays in of_islands]
            before = weights[name], momentum[name]
            weights[name], momentum[name] = diloco(NESTEROV, own, *before, shares)
        states = meeting.meet(states, step)
        of_islands = [
            numbers(chunk_states, lambda state: state.params) for chunk_states in states.values()
        ]
        for name, of_island in itertools.product(weights, of_islands):
            np.testing.assert_allclose(of_island[name], weights[name], rtol=0, atol=2e-6)
            np.testing.assert_array_equal(of_island[name], of_islands[0][name])
        for k, chunk_states in states.items():
            where = lambda tree: [x.sharding for x in jax.tree.leaves(tree)]
            for chunk, state in zip(islands[k], chunk_states, strict=True):
                assert where(state.params) == where(chunk.state_shapes.params)
        sent = [0] * count
        for link, num_bytes in meeting.take_bytes().items():
            sent[int(link.split()[1])] += num_bytes
        assert sent == meeting_bytes(sizes, count)
        move = lambda x: x + 0.01 * random.normal(size=x.shape).astype(np.float32)
        states = {
            k: [dataclasses.replace(s, params=jax.tree.map(move, s.params)) for s in chunk_states]
            for k, chunk_states in states.items()
        }


@pytest.mark.parametrize("odd", [0, 1])
def test_an_island_with_other_bits_is_named(monkeypatch, odd):
    """Whichever it is."""
    islands = islands_of(CUTS[:2])
    meeting = IslandMeetings(islands, 2, NESTEROV)
    random = np.random.default_rng(0)
    states = meeting.begin({k: states_of(chunks, random) for k, chunks in islands.items()})
    states = meeting.meet(states, 1)
    new = IslandMeetings._new_weights

    def flipped(self, meeting, island, owned):
        arrays = new(self, meeting, island, owned)
        name = next(iter(arrays))
        return {**arrays, name: arrays[name].at[0].add(1e-6)} if island == odd else arrays

    monkeypatch.setattr(IslandMeetings, "_new_weights", flipped)
    with pytest.raises(PeerError, match=f"island {odd}: has other weights than the owners after"):
        meeting.meet(states, 2)


def test_stages_agree_once_all_have_told():
    """The first two of three stages are an island; a parameter of the last has flipped."""
    agreement = Agreement((0, 0, 1))
    stages = [Digests({"a": "1"}, {}), Digests({"b": "2"}, {"b": "2"})]
    for step, digest in ((2, "1"), (4, "7")):
        agreement.take(step, 1, stages[1])
        agreement.take(step, 2, Digests({"a": digest, "b": "2"}, {"a": "1"}))
        if step == 2:
            agreement.take(step, 0, stages[0])
    with pytest.raises(
        PeerError, match="of a is 7 in island 1, and 1 in what island 1 owns"
    ) as error:
        agreement.take(4, 0, stages[0])
    assert error.value.where == "island 1"
    others = [Digests({"a": "1"}, {})] * 2
    with pytest.raises(PeerError, match="other weights than the others") as error:
        compare(6, [*others, Digests({"a": "7"}, {"a": "7"})])
    assert error.value.where == "island 2"
