"""Runs the steps of a plan with islands, all in this process: one after the other, and meetings.

Each island has the runner that a run of its plan would have. What the loop of training gives and
takes has all of them: the states one island after the other, the batch in parts.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from holmesjax.config import ParallelConfig
from holmesjax.data.batches import Batches
from holmesjax.islands.meeting import IslandMeetings
from holmesjax.plan.outer_rule import meets
from holmesjax.plan.plan import Plan
from holmesjax.runtime.chunk import Chunk, ChunkState
from holmesjax.runtime.end_of_step import Metrics
from holmesjax.runtime.overlapped_work import BUSY, OverlappedWork
from holmesjax.runtime.pipeline import Pipeline, make_runner
from holmesjax.runtime.prefetch import Inputs, Placer, Step, Validation
from holmesjax.runtime.timeline import Awaitable, Timeline
from holmesjax.runtime.whole_step import WholeStep
from holmesjax.transport.local import Transport

OneIsland = Pipeline | WholeStep


@dataclass(frozen=True, kw_only=True)
class IslandsInputs(Inputs):
    """A batch in parts: one for each island, or, in a validation, all for the first island."""

    parts: Sequence[Inputs]


def _joined_inputs(parts: Sequence[Inputs]) -> IslandsInputs:
    num_targets = sum(part.num_targets for part in parts)
    return IslandsInputs(num_targets=num_targets, microbatches={}, parts=parts)


class IslandsPlacer:
    """Puts the part of each island on its devices."""

    def __init__(self, placers: Sequence[Placer]):
        self._placers = placers

    def make(self, batches: Batches, what: Step | Validation) -> IslandsInputs:
        """Makes a batch of a run; island k has the k-th part of its sequences."""
        count = len(self._placers)
        size = batches.global_batch // count
        if isinstance(what, Step):
            whats = [Step(what.first_sequence + k * size, size) for k in range(count)]
            pairs = zip(self._placers, whats, strict=True)
            return _joined_inputs([placer.make(batches, step) for placer, step in pairs])
        number, index = divmod(what.index, batches.num_validation)
        parts = replace(batches, global_batch=size, num_validation=count * batches.num_validation)
        first = number * parts.num_validation + index * count
        placer = self._placers[0]
        return _joined_inputs([placer.make(parts, Validation(first + k)) for k in range(count)])


class IslandsRunner:
    """The islands of a run, as the loop of training knows a runner.

    Args:
      runners: of each island.
      counts: chunks of each island.
      first_stages: the number in the run of each island's first stage.
      meeting: what islands do when they meet.
      meets_after: whether they meet after a step.
    """

    def __init__(
        self,
        runners: Sequence[OneIsland],
        counts: Sequence[int],
        first_stages: Sequence[int],
        meeting: IslandMeetings,
        meets_after: Callable[[int], bool],
    ):
        self._runners, self._counts, self._first_stages = runners, counts, first_stages
        self._meeting, self._meets_after = meeting, meets_after
        self.placer = IslandsPlacer([runner.placer for runner in runners])
        self._done = 0  # steps

    def init(self, seed: int, drawn: Callable[[], None] = lambda: None) -> list[ChunkState]:
        """The states of all chunks; `drawn` is called after each layer."""
        return _joined([runner.init(seed, drawn) for runner in self._runners])

    def begin(self, states: Sequence[ChunkState], done: int) -> Sequence[ChunkState]:
        """The states with which the run goes on after so many steps.

        A checkpoint of imported weights has nothing of the meetings, which begin here then.
        """
        self._done = done
        if all(state.outer for state in states):
            return states
        return _joined(self._meeting.begin(self._split(states)))

    def train_step(
        self,
        states: Sequence[ChunkState],
        inputs: Inputs,
        timeline: Timeline,
        meanwhile: OverlappedWork = BUSY,
    ) -> tuple[list[ChunkState], Metrics]:
        """A step of each island on its part of the batch, and a meeting where one is due."""
        assert isinstance(inputs, IslandsInputs), inputs
        new: list[list[ChunkState]] = []
        found = []
        last = len(self._runners) - 1
        for k, (runner, own) in enumerate(zip(self._runners, self._split(states), strict=True)):
            bare = [replace(state, outer=None) for state in own]
            shifted: Any = _Shifted(timeline, self._first_stages[k])
            work = meanwhile if k == last else BUSY
            stepped, metrics = runner.train_step(bare, inputs.parts[k], shifted, work)
            pairs = zip(stepped, own, strict=True)
            new.append([replace(state, outer=before.outer) for state, before in pairs])
            found.append(metrics)
        self._done += 1
        if self._meets_after(self._done):
            new = self._meeting.meet(new, self._done)
        return _joined(new), _mean(found)

    def evaluate(self, states: Sequence[ChunkState], inputs: Inputs) -> Any:
        """Sum of the losses of a batch's tokens, by the weights of the first island.

        They are the global weights: a validation comes after a meeting.
        """
        assert isinstance(inputs, IslandsInputs), inputs
        own = [replace(state, outer=None) for state in self._split(states)[0]]
        runner = self._runners[0]
        losses = [runner.evaluate(own, part) for part in inputs.parts]
        return math.fsum(float(loss) for loss in losses if loss is not None)

    def take_link_bytes(self) -> dict[str, int]:
        """The bytes that crossed each link since the last call, within islands and between."""
        found = self._meeting.take_bytes()
        for runner in self._runners:
            for link, count in runner.take_link_bytes().items():
                found[link] = found.get(link, 0) + count
        return found

    def _split(self, states: Sequence[ChunkState]) -> list[Sequence[ChunkState]]:
        parts, start = [], 0
        for count in self._counts:
            parts.append(states[start : start + count])
            start += count
        return parts


class _Shifted:
    """The timeline of a step, for an island that counts its own stages from 0."""

    def __init__(self, timeline: Timeline, first_stage: int):
        self._timeline, self._first = timeline, first_stage

    def begin(self, stage: int, arrived: Awaitable | None = None) -> Any:
        return self._timeline.begin(self._first + stage, arrived)

    def watch(self, stage: int, *args: Any) -> None:
        self._timeline.watch(self._first + stage, *args)


def _joined(states: Sequence[Sequence[ChunkState]]) -> list[ChunkState]:
    return [state for island in states for state in island]


def _mean(found: Sequence[Metrics]) -> Metrics:
    """Means of the islands' numbers; a step is skipped where any island has skipped it."""
    if len(found) == 1:
        return found[0]

    def here(name: str) -> list[jax.Array]:
        first = found[0][name]
        return [jax.device_put(own[name], first.sharding) for own in found]

    mean = lambda name: sum(here(name)[1:], here(name)[0]) / len(found)
    is_flag = lambda name: found[0][name].dtype == bool
    return {
        name: _any(here(name)) if is_flag(name) else mean(name)
        for name in found[0]
        if name != "square_norms"
    }


def _any(flags: Sequence[jax.Array]) -> jax.Array:
    return jnp.any(jnp.stack(flags))


def make_islands(
    plan: Plan,
    chunks: Sequence[Chunk],
    *,
    parallel: ParallelConfig,
    steps: int,
    evaluates: bool = True,
    ramps: bool = False,
    connect: Callable[[], Transport] | None = None,
    compiled: Callable[[], None] = lambda: None,
    waits_for: Callable[[str], None] = lambda text: None,
) -> IslandsRunner:
    """Compiles the chunks of all islands; the arguments are those of `make_runner`, and these.

    Args:
      plan: of the run.
      chunks: of all islands.
      parallel: the settings of the meetings.
      steps: of the run.
      evaluates, ramps, connect, compiled, waits_for: as `make_runner` takes them.
    """
    assert plan.meeting is not None, "islands meet"
    assert connect is None, "a plan with islands has no processes"
    assert not ramps, "a check of the settings sees to it"
    every = plan.meeting.every
    islands = [[chunk for chunk in chunks if chunk.island == k] for k in range(len(plan.islands))]
    runners = [
        make_runner(own, mine, evaluates=evaluates, compiled=compiled, waits_for=waits_for)
        for own, mine in zip(plan.islands, islands, strict=True)
    ]
    sizes = [len(own.stages) for own in plan.islands]
    return IslandsRunner(
        runners,
        [len(mine) for mine in islands],
        [sum(sizes[:k]) for k in range(len(sizes))],
        IslandMeetings(islands, parallel.outer_rule),
        lambda step: meets(step, every, steps),
    )
