"""Runs the steps of a plan with islands, and their meetings.

Each island has the runner that a run of its plan would have. A process has all islands, and runs
one after the other, or it has a stage of one. What the loop of training gives and takes has those
that are here: the states one island after the other, the batch in parts.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from holmesjax.config import ParallelConfig
from holmesjax.data.batches import Batches
from holmesjax.islands.agreement import Digests
from holmesjax.islands.crossings import first_stages
from holmesjax.islands.gossip import Pairing, PairMeetings
from holmesjax.islands.host_memory import to_devices, to_hosts
from holmesjax.islands.meeting import IslandMeetings, States, with_weights
from holmesjax.islands.streaming import Streaming
from holmesjax.plan.island_shares import EVALUATES, validation_parts
from holmesjax.plan.meeting_steps import MeetingSteps, steps_of
from holmesjax.plan.plan import Plan
from holmesjax.runtime.chunk import Chunk, ChunkState
from holmesjax.runtime.end_of_step import Metrics
from holmesjax.runtime.overlapped_work import BUSY, OverlappedWork
from holmesjax.runtime.pipeline import Pipeline, make_runner
from holmesjax.runtime.prefetch import Inputs, Maker, Step, Validation
from holmesjax.runtime.timeline import Awaitable, Timeline
from holmesjax.runtime.whole_step import WholeStep
from holmesjax.transport.local import Transport

OneIsland = Pipeline | WholeStep


@dataclass(frozen=True, kw_only=True)
class IslandsInputs(Inputs):
    """A batch in parts, one for each island; in a validation all are for the same island."""

    parts: Mapping[int, Inputs]  # by the number of the island whose part of the batch it is


def _joined_inputs(parts: Mapping[int, Inputs]) -> IslandsInputs:
    num_targets = sum(part.num_targets for part in parts.values())
    return IslandsInputs(num_targets=num_targets, microbatches={}, parts=parts)


def step_of_island(
    batches: Batches, first: int, names: Sequence[str], number: int, sizes: Sequence[int]
) -> tuple[Batches, Step]:
    """The batches and the step of an island: its part of the run's batch, or of its own mixture.

    Args:
      first: sequences of the run before the step, of all islands alike.
      names: of all islands.
      number: of the island.
      sizes: sequences of a step of each island.
    """
    size, in_run = sizes[number], first + sum(sizes[:number])
    if batches.is_by_island:
        of_mixture = Step(first * size // sum(sizes), size, first_draw=in_run)
        return batches.of_island(number, names), of_mixture
    return batches, Step(in_run, size)


class IslandsPlacer:
    """Puts the parts of the islands here on their devices.

    Args:
      placers: of each island here, by its number.
      names: of all islands.
      shares: of the batch that each island takes; empty: equal ones.
    """

    def __init__(
        self, placers: Mapping[int, Maker], names: Sequence[str], shares: Sequence[int] = ()
    ):
        self._placers, self._names, self._shares = placers, names, shares or [1] * len(names)

    def make(self, batches: Batches, what: Step | Validation) -> IslandsInputs:
        """Makes a batch of a run; island k has the k-th part of its sequences."""
        sizes = [batches.global_batch * share // sum(self._shares) for share in self._shares]
        if isinstance(what, Step):
            first = what.first_sequence
            of_island = lambda k: step_of_island(batches, first, self._names, k, sizes)
            return _joined_inputs(
                {k: placer.make(*of_island(k)) for k, placer in self._placers.items()}
            )
        if EVALUATES not in self._placers:
            return _joined_inputs({})
        number, index = divmod(what.index, batches.num_validation)
        count = validation_parts(sizes[EVALUATES], batches.global_batch, batches.num_validation)
        most = batches.num_validation * batches.global_batch
        parts = replace(
            batches, global_batch=sizes[EVALUATES], num_validation=count, most_validated=most
        )
        begin, end = (i * count // batches.num_validation for i in (index, index + 1))
        make = self._placers[EVALUATES].make
        first = number * count
        return _joined_inputs({k: make(parts, Validation(first + k)) for k in range(begin, end)})


class Island(NamedTuple):
    """An island that is in this process, or a stage of which is."""

    runner: OneIsland
    num_chunks: int  # here
    first_stage: int  # the number in the run of the island's first stage


class IslandsRunner:
    """The islands of a run that are in this process, as the loop of training knows a runner.

    Args:
      islands: those here, by their numbers.
      names: of all islands of the run.
      streaming: their meetings.
      waits_for: told what the process waits for, and "" when that has come.
      shares: of the batch that each island takes; empty: equal ones.
      on_hosts: whether what islands keep is in memory of hosts between meetings.
    """

    def __init__(
        self,
        islands: Mapping[int, Island],
        names: Sequence[str],
        streaming: Streaming | Pairing,
        waits_for: Callable[[str], None] = lambda text: None,
        shares: Sequence[int] = (),
        on_hosts: bool = False,
    ):
        self._islands, self._waits_for = islands, waits_for
        self._streaming, self._shares = streaming, shares or [1] * len(names)
        self._on_hosts = on_hosts
        self.placer: Maker = IslandsPlacer(
            {k: island.runner.placer for k, island in islands.items()}, names, shares
        )
        self._done = 0  # steps

    def init(self, seed: int, drawn: Callable[[], None] = lambda: None) -> list[ChunkState]:
        """The states of all chunks here; `drawn` is called after each layer."""
        return _joined(island.runner.init(seed, drawn) for island in self._islands.values())

    def begin(
        self, states: Sequence[ChunkState], done: int, written: MeetingSteps | None = None
    ) -> Sequence[ChunkState]:
        """The states with which the run goes on; the arguments are those of `Streaming.begin`.

        A checkpoint of imported weights has nothing of the meetings, which begin here then.
        """
        self._done = done
        with self._waiting():
            begun = _joined(self._streaming.begin(self._split(states), done, written).values())
        return self.parked(begun)

    def settled(self, states: Sequence[ChunkState]) -> Sequence[ChunkState]:
        """The states for a checkpoint, on devices, which has all that is on its way then."""
        with self._waiting():
            here = self._brought_to_devices(self._split(states))
            return _joined(self._streaming.settle(here).values())

    def parked(self, states: Sequence[ChunkState]) -> Sequence[ChunkState]:
        """The states between meetings: what islands keep is where the run has it then."""
        return _joined(to_hosts(self._split(states)).values()) if self._on_hosts else states

    def _brought_to_devices(self, states: States) -> States:
        return to_devices(states) if self._on_hosts else states

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """While this process may wait for other islands, which it says."""
        self._waits_for("the meeting of islands")
        yield
        self._waits_for("")

    def train_step(
        self,
        states: Sequence[ChunkState],
        inputs: Inputs,
        timeline: Timeline,
        meanwhile: OverlappedWork = BUSY,
    ) -> tuple[list[ChunkState], Metrics]:
        """A step of each island on its part of the batch, and a meeting where one is due."""
        assert isinstance(inputs, IslandsInputs), inputs
        new: dict[int, Sequence[ChunkState]] = {}
        found, last = [], max(self._islands)
        for k, of_island in self._split(states).items():
            bare = [replace(state, outer=None) for state in of_island]
            island = self._islands[k]
            shifted: Any = _Shifted(timeline, island.first_stage)
            work = meanwhile if k == last else BUSY
            stepped, metrics = island.runner.train_step(bare, inputs.parts[k], shifted, work)
            pairs = zip(stepped, of_island, strict=True)
            new[k] = [replace(state, outer=before.outer) for state, before in pairs]
            found.append(metrics)
        self._done += 1
        if self._streaming.is_due(self._done):
            with self._waiting():
                new = dict(self._streaming.after_step(self._brought_to_devices(new), self._done))
        means = _mean(found, [self._shares[k] for k in self._islands])
        if self._streaming.square_spread is not None:
            means["square_spread"] = self._streaming.square_spread
        return list(self.parked(_joined(new.values()))), means

    def evaluate(self, states: Sequence[ChunkState], inputs: Inputs) -> float | None:
        """Sum of the losses of a batch's tokens, by the weights of the first island.

        They are the global weights: a validation comes after a meeting of everything, or the first
        island keeps them. None where the last stage of the first island is elsewhere.
        """
        assert isinstance(inputs, IslandsInputs), inputs
        if EVALUATES not in self._islands:
            return None
        weights = self._streaming.global_weights
        own = [
            with_weights(replace(state, outer=None), weights)
            for state in self._split(states)[EVALUATES]
        ]
        runner = self._islands[EVALUATES].runner
        losses = [runner.evaluate(own, part) for part in inputs.parts.values()]
        known = [float(loss) for loss in losses if loss is not None]
        return math.fsum(known) if known else None

    def take_link_bytes(self) -> dict[str, int]:
        """The bytes that crossed each link since the last call, within islands and between."""
        found = self._streaming.meetings.take_bytes()
        for island in self._islands.values():
            for link, count in island.runner.take_link_bytes().items():
                found[link] = found.get(link, 0) + count
        return found

    def close(self) -> None:
        """Ends the transport of the meetings and of what crosses inside of islands."""
        self._streaming.meetings.transport.close()

    def _split(self, states: Sequence[ChunkState]) -> dict[int, Sequence[ChunkState]]:
        parts, start = {}, 0
        for k, island in self._islands.items():
            parts[k] = states[start : start + island.num_chunks]
            start += island.num_chunks
        return parts


class _Shifted:
    """The timeline of a step, for an island that counts its own stages from 0."""

    def __init__(self, timeline: Timeline, first_stage: int):
        self._timeline, self._first = timeline, first_stage

    def begin(self, stage: int, arrived: Awaitable | None = None) -> Any:
        return self._timeline.begin(self._first + stage, arrived)

    def watch(self, stage: int, *args: Any) -> None:
        self._timeline.watch(self._first + stage, *args)


def _joined(states: Iterable[Sequence[ChunkState]]) -> list[ChunkState]:
    return [state for island in states for state in island]


def _mean(found: Sequence[Metrics], shares: Sequence[int]) -> Metrics:
    """Means of the islands' numbers by their shares; a step is skipped where any has skipped it."""
    if len(found) == 1:
        return found[0]

    def here(values: Sequence[jax.Array]) -> list[jax.Array]:
        return [jax.device_put(value, values[0].sharding) for value in values]

    of = lambda name: here([metrics[name] for metrics in found])

    def mean(name: str) -> jax.Array:
        first, *others = (share * x for share, x in zip(shares, of(name), strict=True))
        return sum(others, first) / sum(shares)

    is_flag = lambda name: found[0][name].dtype == bool
    means = {
        name: jnp.any(jnp.stack(of(name))) if is_flag(name) else mean(name)
        for name in found[0]
        if name != "square_norms"
    }
    return {**means, "square_norms": jnp.concatenate(here(list(map(_square_norms, found))))}


def _square_norms(metrics: Metrics) -> jax.Array:
    """The squared norms of an island's stages; a step that is one program tells the norm alone."""
    alone = lambda: jnp.square(metrics["grad_norm"])[None]
    return metrics["square_norms"] if "square_norms" in metrics else alone()


def make_islands(
    plan: Plan,
    chunks: Sequence[Chunk],
    *,
    names: Sequence[str],
    parallel: ParallelConfig,
    steps: int,
    eval_every: int = 0,
    evaluates: bool = True,
    ramps: bool = False,
    connect: Callable[[], Transport] | None = None,
    compiled: Callable[[], None] = lambda: None,
    waits_for: Callable[[str], None] = lambda text: None,
    told: Callable[[int, Digests], None] | None = None,
) -> IslandsRunner:
    """Compiles the chunks of the islands here; the arguments are those of `make_runner`, and these.

    Args:
      plan: of the run.
      chunks: of all islands, or those of one that are in this process.
      names: of all islands.
      parallel: the settings of the meetings.
      steps: of the run.
      eval_every: steps from one validation to the next; 0: there is none.
      evaluates, ramps, compiled, waits_for: as `make_runner` takes them.
      connect: makes the transport to other processes, for meetings and inside of an island.
      told: as `IslandMeetings` takes it.
    """
    assert not ramps, "a check of the settings sees to it"
    here: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        assert chunk.island is not None, "each chunk is of an island"
        here.setdefault(chunk.island, []).append(chunk)
    transport = connect() if connect else None  # first, while all are as far
    inside = (lambda: transport) if transport else None
    firsts = first_stages(plan)
    islands = {}
    for k, of_island in here.items():
        runner = make_runner(
            plan.islands[k],
            of_island,
            evaluates=evaluates,
            connect=inside,
            compiled=compiled,
            waits_for=waits_for,
        )
        islands[k] = Island(runner, len(of_island), firsts[k])
    count, shares, on_hosts = len(plan.islands), plan.batch_shares, parallel.outer_memory == "host"
    keeps, outer = EVALUATES if evaluates else None, parallel.outer_rule
    if outer.has_pairs:
        meetings = PairMeetings(here, count, outer, transport, told)
        pairing = Pairing(meetings, steps_of(parallel), steps, keeps, eval_every)
        return IslandsRunner(islands, names, pairing, waits_for, on_hosts=on_hosts)
    of_all = IslandMeetings(here, count, outer, transport, told, shares)
    streaming = Streaming(of_all, chunks[0].model, parallel, steps, keeps)
    return IslandsRunner(islands, names, streaming, waits_for, shares, on_hosts)
