"""Fragments meet in turn, and land later: by the rule, from any step on, with few bytes."""

import itertools
import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from holmesjax.checkpoints import island_states
from holmesjax.config import OuterConfig, ParallelConfig
from holmesjax.islands.meeting import IslandMeetings
from holmesjax.islands.streaming import Streaming
from holmesjax.layer_specs.model_layers import layers
from holmesjax.plan.meeting_steps import fragment_of, steps_of
from holmesjax.plan.outer_rule import meeting_bytes
from tests.diloco import diloco
from tests.drawn_islands import CUTS, islands_of, noise, numbers, states_of, with_arrays
from tests.hand_made_plans import make_model

LAST, MIDDLE = 13, 7
NESTEROV = OuterConfig()
# Fragments, steps between their meetings, delay, and the share of the global weights.
STREAMS = [(1, 6, 4, 1.0), (2, 6, 3, 0.25), (3, 6, 0, 0.75)]


def parallel_of(fragments, every, delay, share):
    settings = {"fragments": fragments, "every": every, "delay": delay, "blend": share}
    return ParallelConfig(across="local_updates", **settings)


class Islands:
    """Two unlike islands whose steps add noise, of which each step has its own."""

    def __init__(self, parallel, states=None, done=0, written=None, keeps=0):
        chunks = islands_of(CUTS[:2])
        self.meetings = IslandMeetings(chunks, 2, NESTEROV)
        self.streaming = Streaming(self.meetings, make_model(), parallel, LAST, keeps)
        if states is None:
            drawn = states_of(chunks[0], np.random.default_rng(0))
            weights = numbers(drawn, lambda state: state.params)
            states = {k: states_of(of_k, np.random.default_rng(0)) for k, of_k in chunks.items()}
            put = lambda state: with_arrays(state, lambda name, x: weights[name])
            states = {k: [put(state) for state in of_k] for k, of_k in states.items()}
        self.states = self.streaming.begin(states, done, written)

    def step(self, step):
        moved = {
            k: [
                with_arrays(s, lambda n, x, k=k: np.asarray(x) + noise(step, k, n, x)) for s in of_k
            ]
            for k, of_k in self.states.items()
        }
        self.states = self.streaming.after_step(moved, step)

    def weights(self, island):
        return numbers(self.states[island], lambda state: state.params)

    def outer(self, what):
        own = [numbers(self.states[k], lambda s: getattr(s.outer, what)) for k in (0, 1)]
        return own[0] | own[1]


def by_the_rule(parallel, weights):
    """Yields the weights of both islands, and the global ones, after each step, in float64."""
    steps, share = steps_of(parallel), parallel.global_share
    fragment = fragment_of(layers(make_model()), steps.fragments)
    own = [{name: x.astype(np.float64) for name, x in weights.items()} for _ in (0, 1)]
    outer = {name: (x.astype(np.float64), np.zeros(x.shape)) for name, x in weights.items()}
    lands = {}  # step -> fragment

    def land(names, share):
        for name, k in itertools.product(names, (0, 1)):
            own[k][name] = share * outer[name][0] + (1 - share) * own[k][name]

    def send(names):
        for name in names:
            outer[name] = diloco(NESTEROV, [own[0][name], own[1][name]], *outer[name])

    for step in range(1, LAST + 1):
        for k, name in itertools.product((0, 1), weights):
            own[k][name] = own[k][name] + noise(step, k, name, weights[name])
        if step in lands:
            land(lands.pop(step), share)
        if step == LAST:
            land([name for names in lands.values() for name in names], share)
            send(weights)
            land(weights, 1.0)
        elif step % (steps.every // steps.fragments) == 0:
            number = step // (steps.every // steps.fragments) - 1
            names = [n for n in weights if fragment[n.split(".")[0]] == number % steps.fragments]
            send(names)
            lands[step + steps.delay] = names
            if not steps.delay:
                land(lands.pop(step), share)
        yield own, outer


@pytest.mark.parametrize("stream", STREAMS, ids=str)
def test_fragments_meet_by_the_rule_and_from_any_step_on(stream):
    """An owner's weights follow when it has summed. Some steps are checkpoints, before or after."""
    parallel = parallel_of(*stream)
    islands, counted = Islands(parallel), [0, 0]
    rule = by_the_rule(parallel, islands.weights(0))
    for step, (inner, outer) in enumerate(rule, 1):
        islands.step(step)
        for k in (0, 1):
            for name, x in islands.weights(k).items():
                np.testing.assert_allclose(x, inner[k][name], rtol=0, atol=1e-5)
        if step % 5 == 0 or step in (MIDDLE, LAST):
            islands.states = islands.streaming.settle(islands.states)
            for name, x in islands.outer("weights").items():
                np.testing.assert_allclose(x, outer[name][0], rtol=0, atol=1e-5)
        if step == MIDDLE:
            saved = islands.states
            others = share_of_flight(parallel, inner, outer)
        for link, num_bytes in islands.meetings.take_bytes().items():
            counted[int(link.split()[1])] += num_bytes
        if step == 2 * stream[1]:
            validated = dict(islands.streaming.global_weights)
    # Each fragment has met twice, and everything after the last step.
    sizes = {name: x.size for name, x in islands.weights(0).items()}
    assert counted == [3 * sent for sent in meeting_bytes(sizes, 2)]
    again = Islands(parallel, saved, MIDDLE, steps_of(parallel))
    for step in range(MIDDLE + 1, LAST + 1):
        again.step(step)
        if step == 2 * stream[1]:
            assert_equal(again.streaming.global_weights, validated)
    for k in (0, 1):
        assert_equal(again.weights(k), islands.weights(k))
    assert_equal(again.outer("momentum"), islands.outer("momentum"))
    assert_equal(islands.weights(0), islands.weights(1))
    # With other steps nothing is on its way: what was lands at once.
    changed = Islands(parallel_of(1, 12, 0, stream[-1]), saved, MIDDLE, steps_of(parallel))
    assert not changed.streaming.is_due(MIDDLE + 1)
    for k in (0, 1):
        for name, x in changed.weights(k).items():
            np.testing.assert_allclose(x, others[k][name], rtol=0, atol=1e-5)


def share_of_flight(parallel, own, outer):
    """The weights of both islands after what is on its way after step MIDDLE has landed."""
    fragment = fragment_of(layers(make_model()), parallel.fragments)
    flight, share = steps_of(parallel).in_flight(MIDDLE), parallel.global_share
    lands = lambda name: flight is not None and fragment[name.split(".")[0]] == flight.fragment
    mixed = lambda name, x: share * outer[name][0] + (1 - share) * x if lands(name) else x
    return [{name: mixed(name, x) for name, x in weights.items()} for weights in own]


def test_a_checkpoint_tells_what_is_on_its_way():
    """In many sessions, with the same settings or others, which end anywhere or after all steps."""
    rng, checkpoint, before, flying, done = random.Random(0), None, None, None, 0
    counted = Counter()
    for _ in range(400):
        session = before
        if before is None or rng.random() < 0.4:
            stream = rng.choice([(1, 4, 4, 1.0), (1, 6, 4, 1.0), (2, 6, 3, 0.5), (1, 6, 0, 1.0)])
            clusters = rng.choice([(("a",), ("b",)), (("a",),)])
            session = steps_of(parallel_of(*stream)), clusters
        if session != before:  # it lands at once, or other islands go on from global weights
            flying, before = None, session
        steps, clusters = session
        since = island_states.since(checkpoint, clusters, steps, NESTEROV)
        last = done + rng.randrange(1, 12)
        stop = rng.choice([last, rng.randrange(done + 1, last + 1)])
        for step in range(done + 1, stop + 1):
            flying = None if step == last or (flying and step >= flying.lands) else flying
            if step < last and steps.delay:
                flying = steps.begins(step) or flying
        done = stop
        checkpoint = checkpoint_of(done, last, steps, clusters, since)
        assert island_states.meeting_steps(checkpoint, clusters, NESTEROV).in_flight(done) == flying
        counted[flying is not None] += 1
    assert min(counted.values()) > 50


def checkpoint_of(step, last, steps, clusters, since):
    names = {"every": steps.every, "fragments": steps.fragments, "delay": steps.delay}
    parallel = {"islands": clusters, **names, "since": since, "outer": {}}
    settings = {"parallel": parallel, "train": {"steps": last}}
    arrays = {f"island_{k}.params.a": {} for k in range(len(clusters))}
    return SimpleNamespace(step=step, manifest={"arrays": arrays}, settings=settings)


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        np.testing.assert_array_equal(x, theirs[name])


def test_one_fragment_without_a_delay_is_a_meeting_to_the_bit():
    whole, plain = Islands(parallel_of(1, 6, 0, 1.0)), Islands(parallel_of(1, 6, 0, 1.0))
    assert not whole.streaming.global_weights
    for step in range(1, 7):
        whole.step(step)
    states = plain.states
    for step in range(1, 7):
        plain.streaming.after_step = lambda states, step: states
        plain.step(step)
    states = plain.meetings.meet(plain.states, 6)
    for k in (0, 1):
        assert_equal(whole.weights(k), numbers(states[k], lambda state: state.params))
