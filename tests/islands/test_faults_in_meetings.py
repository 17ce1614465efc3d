"""Links and processes that fail inside a meeting: islands agree, or one is named."""

import random
import threading
from dataclasses import replace

import jax
import numpy as np
import pytest

from holmesjax.checkpoints.array_keys import flatten
from holmesjax.config import OuterConfig, ParallelConfig
from holmesjax.errors import PeerError
from holmesjax.islands.crossings import crossings_of
from holmesjax.islands.meeting import IslandMeetings
from holmesjax.islands.streaming import Streaming
from holmesjax.plan.plan import MeetingCost
from holmesjax.plan.processes import Process
from holmesjax.runtime.chunk import ChunkState
from tests.hand_made_plans import hand_made_plan, make_chunks, make_model
from tests.relays import Breaker, Proxy
from tests.two_stages import CLUSTERS, start_pair, together

STEP = 2  # after which the islands meet
FEW = [pytest.param(seed, marks=[pytest.mark.exhaustive] * (seed > 0)) for seed in range(20)]


@pytest.fixture(scope="module")
def pair():
    """Two islands, the second cut in two, with unlike weights; what they are after a meeting."""
    model, chunks = make_model(), []
    plans = [hand_made_plan((4,), 1, 1), hand_made_plan((4,), 2, 1)]
    for k, plan in enumerate(plans):
        nodes = (f"{CLUSTERS[k]}-0",)
        devices = tuple(4 * k + n for n in plan.stages[0].devices)
        stage = replace(plan.stages[0], cluster=CLUSTERS[k], nodes=nodes, devices=devices)
        plans[k] = replace(plan, stages=(stage,))
        chunks.append(replace(make_chunks(model, plans[k])[0], island=k))
    stages = tuple(plan.stages[0] for plan in plans)
    cost = MeetingCost(every=STEP, bytes=(0.0, 0.0), seconds=0.0)
    plan = replace(plans[0], stages=stages, islands=tuple(plans), meeting=cost)
    return Pair(plan, chunks)


class Pair:
    """Two islands of a process each, in this process, and their states before a meeting."""

    def __init__(self, plan, chunks):
        self.plan, self.chunks = plan, chunks
        draw = np.random.default_rng(0).normal
        put = lambda x: jax.device_put(draw(size=x.shape).astype(np.float32), x.sharding)
        drawn = [ChunkState(jax.tree.map(put, c.state_shapes.params), {}, {}) for c in chunks]
        here = dict(enumerate([chunk] for chunk in chunks))
        alone = IslandMeetings(here, 2, OuterConfig())
        begun = alone.begin({k: [state] for k, state in enumerate(drawn)})
        self.states = [begun[k][0] for k in (0, 1)]
        self.met = numbers(alone.meet(begun, STEP))
        self.num_bytes = sum(alone.take_bytes().values())

    def transports(self, **changes):
        stages = self.plan.stages
        processes = tuple(
            Process(
                number=k,
                name=f"{stage.cluster}/{stage.nodes[0]}",
                cluster=stage.cluster,
                node=stage.nodes[0],
                stage=k,
                rank=0,
                devices=stage.devices,
                local_devices=stage.devices,
            )
            for k, stage in enumerate(stages)
        )
        crossings = crossings_of(self.plan, self.chunks[0], processes)
        each = [{"mesh": chunk.mesh, "processes": processes} for chunk in self.chunks]
        found = start_pair(self.plan, crossings, each=each, **changes)
        for transport in found:
            if isinstance(transport, Exception):
                raise transport
        return found

    def meet(self, transports):
        """The weights of each island after a meeting, or what it raises."""

        def island(k):
            here = {k: [self.chunks[k]]}
            told = lambda step, digests: None
            meeting = IslandMeetings(here, 2, OuterConfig(), transports[k], told)
            return numbers(meeting.meet({k: [self.states[k]]}, STEP))[0]

        return together(lambda: island(0), lambda: island(1))

    def assert_met(self, outcomes):
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
            for name, x in self.met[0].items():
                np.testing.assert_array_equal(outcome[name], x)

    def assert_meets_again(self):
        """From the same states, as a job does that starts again from its checkpoint."""
        transports = self.transports()
        try:
            self.assert_met(self.meet(transports))
        finally:
            together(*(transport.close for transport in transports))


def numbers(states):
    """The weights of islands, by layer and name."""
    params = lambda state: {name: np.asarray(x) for name, x in flatten(state.params).items()}
    return [params(state) for [state] in states.values()]


@pytest.fixture
def relays():
    opened = []
    yield opened
    for relay in opened:
        relay.close()


def through(opened, relay):
    """Puts a relay before the island that is called."""

    def change(book):
        opened.append(relay(book[1]["ethernet"][0]))
        return [book[0], {**book[1], "ethernet": [opened[0].address]}]

    return change


@pytest.mark.parametrize("seed", FEW)
def test_islands_agree_over_links_that_are_cut_inside_a_meeting(pair, relays, seed):
    """Connections last for random bytes, several for each meeting, and are made anew."""
    rng = random.Random(seed)
    lasts = lambda: 3_000 + rng.randrange(pair.num_bytes // 3)
    transports = pair.transports(book_of=through(relays, lambda where: Breaker(where, lasts)))
    try:
        pair.assert_met(pair.meet(transports))
        assert relays[0].num_lost >= 2
    finally:
        relays[0]._lasts = lambda: None
        together(*(transport.close for transport in transports))


@pytest.mark.parametrize("seed", FEW)
@pytest.mark.parametrize("fault", ["is killed", "is silent"])
def test_an_island_that_fails_inside_a_meeting_is_named(pair, relays, fault, seed):
    """After a random part of the bytes that it receives; then both meet again to the same bits."""
    part = (seed + random.Random(seed).random()) / len(FEW)
    left, transports, failing = [0.9 * part * pair.num_bytes / 2], [], []

    def passed(num_bytes):
        left[0] -= num_bytes
        if left[0] < 0 and transports and not failing:
            if fault == "is silent":
                relays[0].silent.set()
            end = lambda: transports[1]._fail(RuntimeError("killed"))
            failing.append(threading.Thread(target=end if fault == "is killed" else lambda: None))
            failing[0].start()

    change = through(relays, lambda where: Proxy(where, passed))
    opened = pair.transports(book_of=change, silence_s=5.0)
    transports += opened
    outcomes = pair.meet(opened)
    failing[0].join()
    together(*(transport._end for transport in opened))
    for outcome, error in zip(outcomes, (PeerError, (PeerError, RuntimeError)), strict=True):
        if isinstance(outcome, dict):  # it had all, and the votes of the step do not come
            assert part > 0.25, outcomes
            pair.assert_met([outcome])
        else:
            assert isinstance(outcome, error)
    if isinstance(outcomes[0], PeerError):
        assert "roce/roce-0" in outcomes[0].where
    pair.assert_meets_again()


def test_steps_go_on_while_nothing_crosses(pair, relays):
    """A meeting begins over a link that passes nothing on, and the steps that hide it return."""
    parallel = ParallelConfig(across="local_updates", every=8, delay=4)
    change = through(relays, Proxy)
    transports = pair.transports(book_of=change, silence_s=60.0)
    steps_of = {}
    for k in (0, 1):
        told = lambda step, digests: None
        meetings = IslandMeetings({k: [pair.chunks[k]]}, 2, OuterConfig(), transports[k], told)
        steps_of[k] = Streaming(meetings, make_model(), parallel, last=100, keeps=None)
    states = {k: {k: [pair.states[k]]} for k in (0, 1)}

    def run(k, steps):
        for step in steps:
            states[k] = steps_of[k].after_step(states[k], step)
        return numbers(states[k])[0]

    try:
        relays[0].silent.set()
        for outcome in together(lambda: run(0, (8, 9)), lambda: run(1, (8, 9))):
            assert isinstance(outcome, dict), outcome
        assert not sum(sum(transport.take_bytes().values()) for transport in transports)
        relays[0].silent.clear()
        pair.assert_met(together(lambda: run(0, range(10, 13)), lambda: run(1, range(10, 13))))
        received = sum(sum(transport.take_bytes().values()) for transport in transports)
        assert received == pair.num_bytes
    finally:
        together(*(transport.close for transport in transports))
