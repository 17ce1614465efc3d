"""Outer rules and codecs: by papers, with the bytes of the formula, and pairs of two."""

import itertools
from collections import Counter

import numpy as np
import pytest

from holmesjax.config import OuterConfig, ParallelConfig
from holmesjax.errors import PeerError
from holmesjax.islands import gossip
from holmesjax.islands.gossip import Pairing, PairMeetings
from holmesjax.islands.meeting import IslandMeetings
from holmesjax.islands.streaming import Streaming
from holmesjax.plan.gossip import pair_step, pairs
from holmesjax.plan.meeting_steps import steps_of
from holmesjax.plan.outer_rule import (
    late_step,
    mean_of,
    meeting_bytes,
    own_step,
    owner_step,
    owners,
    pair_bytes,
)
from tests import outer_rules
from tests.drawn_islands import islands_of, noise, numbers, states_of, with_arrays
from tests.hand_made_plans import make_model

ROUNDS, EVERY = 4, 2
MODEL = make_model(num_layers=1)
CUTS = [((1,), 2, 1), ((1,), 1, 1), ((1,), 1, 1)]  # of each island
LAST = ROUNDS * EVERY
SHARES = {3: (1, 4, 2)}  # of the batch, of so many islands; of others equal ones
ORACLES = {"eager": outer_rules.eager, "co2": outer_rules.co2}
CO2 = OuterConfig(rule="co2", clip=0.15, penalty=0.5)  # which some of these numbers reach
EAGER, NOLOCO = OuterConfig(rule="eager"), OuterConfig(rule="noloco", pull=0.8)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("outer", [CO2, EAGER, NOLOCO], ids=lambda outer: outer.rule)
def test_the_rules_are_those_of_papers(outer, count):
    """In float64, but for what a codec gives back: each is another form of the same numbers."""
    shares = () if outer.has_pairs else SHARES.get(count, ())
    random = np.random.default_rng(count)
    first = random.normal(size=50)
    moves = 0.1 * random.normal(size=(ROUNDS, count, 50))
    steps = range(1, ROUNDS + 1)
    more = (steps,) if outer.rule == "noloco" else (shares,)
    oracle = ORACLES.get(outer.rule, outer_rules.noloco)(outer, first, moves, *more)
    ours = {"co2": rounds_of_co2, "eager": rounds_of_eager}.get(outer.rule, rounds_of_noloco)
    for weights, papers in itertools.zip_longest(ours(outer, first, moves, shares), oracle):
        atol = 1e-6 if outer.rule == "eager" else 1e-12
        np.testing.assert_allclose(weights, papers[0], rtol=0, atol=atol)


def rounds_of_eager(outer, first, moves, shares):
    """The form that crosses: the global weights one round late, less an island's own step."""
    count, momentum = len(moves[0]), 0.0
    start, own, whole, late = [first] * count, [0.0] * count, first, first
    for of_islands in moves:
        sent = [-move for move in of_islands]
        parts = [sum(shares) / share for share in shares] or [count] * count
        steps = [own_step(outer, sent[k], parts[k], own[k]) for k in range(count)]
        own, start = [after for _, after in steps], [late - step for step, _ in steps]
        whole, momentum = owner_step(outer, sent, whole, momentum, None, shares)
        late = whole
        yield start


def rounds_of_co2(outer, first, moves, shares):
    whole, before, momentum, now, late = first, first, 0.0, first, first
    for of_islands in moves:
        difference = before - mean_of([now + move for move in of_islands], shares)
        after, momentum = late_step(outer, difference, whole, before, momentum)
        before, whole, now, late = whole, after, late, after
        yield [now] * len(of_islands)


def rounds_of_noloco(outer, first, moves, _):
    slow, momenta = [first] * len(moves[0]), [0.0] * len(moves[0])
    for step, of_islands in enumerate(moves, 1):
        new = {}
        for group in pairs(len(slow), step):
            for k in group:
                other = next((n for n in group if n != k), k)
                differences = [-of_islands[n] for n in group]
                new[k] = pair_step(outer, differences, slow[k], slow[other], momenta[k])
        slow, momenta = [new[k][0] for k in sorted(new)], [new[k][1] for k in sorted(new)]
        yield slow


class Islands:
    """Unlike islands that begin with equal weights, and whose steps add noise of their own."""

    def __init__(self, outer, count, last=LAST, states=None, done=0, shares=()):
        parallel = ParallelConfig(across="local_updates", every=EVERY, outer=outer)
        chunks = islands_of(CUTS[:count], MODEL)
        if outer.has_pairs:
            self.meetings = PairMeetings(chunks, count, outer)
            self.steps = Pairing(self.meetings, steps_of(parallel), last, 0, EVERY)
        else:
            self.meetings = IslandMeetings(chunks, count, outer, shares=shares)
            self.steps = Streaming(self.meetings, MODEL, parallel, last, 0)
        if states is not None:
            self.states = self.steps.begin(states, done)
            return
        drawn = states_of(chunks[0], np.random.default_rng(0))
        self.first = numbers(drawn, lambda state: state.params)
        put = lambda state: with_arrays(state, lambda name, x: self.first[name])
        states = {k: states_of(of_k, np.random.default_rng(0)) for k, of_k in chunks.items()}
        equal = {k: [put(state) for state in of_k] for k, of_k in states.items()}
        self.states = self.steps.begin(equal, 0)

    def step(self, step):
        moved = {
            k: [
                with_arrays(s, lambda n, x, k=k: np.asarray(x) + noise(step, k, n, x)) for s in of_k
            ]
            for k, of_k in self.states.items()
        }
        is_due = self.steps.is_due(step)
        self.states = self.steps.after_step(moved, step) if is_due else moved

    def weights(self, island):
        return numbers(self.states[island], lambda state: state.params)

    def sent(self):
        """The bytes that each island has sent since the last call."""
        found = Counter()
        for link, num_bytes in self.meetings.take_bytes().items():
            found[int(link.split()[1])] += num_bytes
        return found


# By how much float32, or bfloat16, may differ from the rule.
NEAR = {"float32": 3e-6, "bfloat16": 8e-3}


@pytest.mark.parametrize(
    "outer, count, shares",
    [
        (CO2, 2, ()),
        (CO2, 3, (1, 4, 2)),
        (EAGER, 2, (3, 1)),
        (OuterConfig(rule="noloco", codec="bfloat16"), 3, ()),
        (OuterConfig(rule="eager", codec="bfloat16"), 2, ()),
        (OuterConfig(codec="bfloat16"), 2, (1, 3)),
    ],
    ids=lambda value: getattr(value, "rule", value),
)
def test_unlike_islands_meet_by_each_rule(outer, count, shares):
    """With the bytes of the formula. What all have together has the same bits on all of them."""
    islands, near = Islands(outer, count, shares=shares), NEAR[outer.codec]
    sizes = {name: x.size for name, x in islands.first.items()}
    names, turns = list(sizes), [range(n - 1, n + 1) for n in range(EVERY, LAST + 1, EVERY)]
    move = lambda name, k, turn: sum(noise(n, k, name, islands.first[name]) for n in turn)
    expected = {}
    for name in names:
        moves = [[move(name, k, turn) for k in range(count)] for turn in turns]
        more = ([turn[-1] for turn in turns],) if outer.rule == "noloco" else (shares,)
        oracle = ORACLES.get(outer.rule, outer_rules.noloco) if outer.rule != "nesterov" else diloco
        first = islands.first[name].astype(np.float64)
        expected[name] = list(oracle(outer, first, np.float64(moves), *more))
    for number, turn in enumerate(turns):
        for step in turn:
            islands.step(step)
        is_last = turn[-1] == LAST
        for k, name in itertools.product(range(count), names):
            of_islands, whole = expected[name][number]
            own = whole if is_last and outer.rule != "noloco" else of_islands[k]
            np.testing.assert_allclose(islands.weights(k)[name], own, rtol=0, atol=near)
        if outer.rule in ("co2", "nesterov") or (is_last and not outer.has_pairs):
            for name in names:
                np.testing.assert_array_equal(islands.weights(0)[name], islands.weights(1)[name])
        if outer.has_pairs:
            assert_mean_and_bytes(islands, [expected[name][number] for name in names], turn[-1])
    if outer.is_late:  # each sum arrives once, and the first weights once
        again = 4 * (count - 1) * sum(sizes.values())
        every_meeting = sum(meeting_bytes(sizes, count, outer))
        assert islands.sent().total() == ROUNDS * every_meeting + again
    elif not outer.has_pairs:
        sent = islands.sent()
        every_meeting = meeting_bytes(sizes, count, outer)
        assert [sent[k] for k in range(count)] == [ROUNDS * n for n in every_meeting]


def diloco(outer, first, moves, shares):
    """Yields as the rules of `outer_rules`: all islands have the global weights."""
    weights, velocity = first, 0.0
    for of_islands in moves:
        gradient = -np.average(of_islands, axis=0, weights=shares or None)
        step, velocity = outer_rules.nesterov(outer.rate, outer.decay, gradient, velocity)
        weights = weights - step
        yield [weights] * len(of_islands), weights


def assert_mean_and_bytes(islands, expected, step):
    """The mean and the spread are those of all islands; of an odd number one has sent nothing."""
    names, near = list(islands.first), NEAR["bfloat16"]
    numbers_of_all = sum(x.size for x in islands.first.values())
    squares = 0.0
    for name, (of_islands, mean) in zip(names, expected, strict=True):
        np.testing.assert_allclose(islands.steps.global_weights[name], mean, rtol=0, atol=near)
        squares += np.sum(np.var(of_islands, axis=0))
    spread = np.sqrt(islands.steps.square_spread)
    assert spread == pytest.approx(np.sqrt(squares / numbers_of_all), abs=near)
    assert spread > 0.01 or step == EVERY  # slow weights are equal at first
    owner = owners({name: x.size for name, x in islands.first.items()}, 3)
    owned = Counter()
    for name, k in owner.items():
        owned[k] += islands.first[name].size
    of_pair = pair_bytes(numbers_of_all, islands.meetings.outer)
    meets = Counter(k for group in pairs(3, step) if len(group) == 2 for k in group)
    to_owners = {k: 4 * (numbers_of_all - owned[k]) for k in range(3)}
    of_means = {k: 4 * owned[k] if k else 0 for k in range(3)}  # the first island validates
    sent = islands.sent()
    assert [sent[k] for k in range(3)] == [
        of_pair * meets[k] + to_owners[k] + of_means[k] for k in range(3)
    ]


@pytest.mark.parametrize("rule", ["co2", "eager"])
def test_a_run_that_trains_longer_repeats_no_step(rule):
    """All has landed after the last step: islands that do not move stay, without momentum."""
    outer = OuterConfig(rule=rule, momentum=0.0)
    islands = Islands(outer, 2)
    for step in range(1, LAST + 1):
        islands.step(step)
    longer = Islands(outer, 2, 2 * LAST, islands.states, LAST)
    for step in range(LAST + 1, LAST + 2 * EVERY + 1):
        if longer.steps.is_due(step):
            longer.states = longer.steps.after_step(longer.states, step)
            flight = longer.steps._flying[1]
            assert not flight.ahead  # no array of it beside those that the plan counts
    longer.states = longer.steps.settle(longer.states)
    whole = lambda own, k: numbers(own.states[k], lambda state: state.outer.weights)
    for k in range(2):
        for name, x in whole(islands, k).items():
            np.testing.assert_array_equal(whole(longer, k)[name], x)
        for name, x in islands.weights(k).items():
            np.testing.assert_array_equal(longer.weights(k)[name], x)


def test_pairs_cover_everyone_at_random():
    for count in (2, 3, 8):
        met = Counter()
        for step in range(300):
            groups = pairs(count, step)
            assert sorted(k for group in groups for k in group) == list(range(count))
            assert sorted(map(len, groups)) == [1] * (count % 2) + [2] * (count // 2)
            met.update(groups)
        each = 300 * (count // 2) / (count * (count - 1) / 2)
        of_two = [n for group, n in met.items() if len(group) == 2]
        assert len(of_two) == count * (count - 1) / 2
        assert each / 2 < min(of_two) <= max(of_two) <= max(2 * each, 300 * (count == 2))


def test_no_call_of_a_meeting_has_three_peers(monkeypatch):
    islands = Islands(NOLOCO, 3)
    monkeypatch.setattr(gossip, "pairs", lambda count, step: (tuple(range(count)),))
    with pytest.raises(AssertionError, match="two peers at most"):
        islands.step(2)


def test_an_island_of_a_pair_that_has_other_arrays_is_named(monkeypatch):
    """Digests are of what came to it, and of what its partner has sent."""
    islands = Islands(NOLOCO, 2)
    fetched = PairMeetings._fetched

    def flipped(self, meeting, crossings):
        for number, x in enumerate(fetched(self, meeting, crossings)):
            yield x.at[0].add(1e-6) if "delta 0 1" in crossings[0] and number == 1 else x

    monkeypatch.setattr(PairMeetings, "_fetched", flipped)
    with pytest.raises(
        PeerError, match="island 1: has received other arrays than its partner sent"
    ):
        islands.step(2)
