"""Choices for some segments: their order and the schedule."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from holmesjax.config import ParallelConfig
from holmesjax.planner.assignment import Assignment, Segment, StageSlot
from holmesjax.planner.layer_ranges import Counts, split_chunks, sum_counts
from holmesjax.planner.problem import Problem, roles
from holmesjax.planner.shortlist import Listed
from holmesjax.planner.stage_layouts import Role, StepSettings
from holmesjax.planner.step_time import chunk_roles, stage_loads, transfer_times
from holmesjax.schedules.pipeline_schedules import (
    SCHEDULES,
    PipelineSchedule,
    TaskOrder,
    allowed,
    leanest,
)

MAX_ORDERS = 720  # of segments that are tried
MAX_TASKS = 2_000_000  # of a step
DEEP = (1.0, 2.0, 0.0)  # in flight for a link, to what is under way on it


def in_order(problem: Problem, listed: Listed) -> list[tuple[Segment, ...]]:
    """Returns orders of the segments, first with the fastest links and the cheapest ends."""
    segments, settings = listed.segments, listed.settings
    num_bytes = problem.boundary_bytes(settings)
    way_s = {
        (a, b): problem.transfer_s(a.slots[-1], b.slots[0], num_bytes)
        for a, b in itertools.permutations(segments, 2)
    }
    one = problem.ranges.counts(0, 1)
    microbatch_s = lambda segment, role: problem.microbatch_s(segment.slots[0], settings, role, one)
    ends_s = {
        segment: [microbatch_s(segment, role) - microbatch_s(segment, Role()) for role in roles(2)]
        for segment in segments
    }

    def cost_s(order: Sequence[Segment]) -> float:
        ways = [way_s[pair] + way_s[pair[::-1]] for pair in itertools.pairwise(order)]
        slowest_s = max((way_s[pair] for pair in itertools.pairwise(order)), default=0.0)
        late_s = max(0.0, slowest_s - listed.estimate_s / settings.microbatches)
        return (
            sum(ways) + ends_s[order[0]][0] + ends_s[order[-1]][1] + settings.microbatches * late_s
        )

    if asked := problem.config.parallel.clusters:
        in_turn = sorted(
            segments, key=lambda segment: asked.index(problem.pools[segment.pool].cluster.name)
        )
        return [tuple(in_turn)] if problem.is_asked_for(in_turn) else []
    if math.factorial(len(segments)) <= MAX_ORDERS:
        return sorted(itertools.permutations(segments), key=cost_s)
    best = tuple(segments)
    while True:  # move one segment at a time to where it is best
        moved = [
            (*rest[:to], best[i], *rest[to:])
            for i in range(len(best))
            for rest in [best[:i] + best[i + 1 :]]
            for to in range(len(best))
        ]
        if cost_s(better := min(moved, key=cost_s)) >= cost_s(best):
            return [best]
        best = better


class Around(NamedTuple):
    """The least seconds of a step before and after the tasks of a stage, for the other stages."""

    before: float = 0.0  # until the first input of the stage arrives
    after: float = 0.0  # from its last input gradient to the end of these stages
    update: float = 0.0  # the slowest update


class Work(NamedTuple):
    """Seconds of a stage under schedules of a kind."""

    microbatch: float  # forward and backward of one microbatch, in one piece
    tasks: float  # of one microbatch: the tasks for which another stage waits
    weight: float  # of one microbatch: the gradients of weights, if they are tasks of their own
    last_weight: float  # the least of these in one chunk
    first_forward: float  # of its first chunk
    first_backward: float
    gather: float  # before the first task of a step
    reduce: float
    update: float


class ScheduleKind(NamedTuple):
    """Schedules in which a stage waits for the ones before it by the same rule."""

    leanest: str  # name of the schedule with the fewest microbatches in flight on every stage
    chunks: int = 1

    @property
    def splits_backward(self) -> bool:
        return SCHEDULES[self.leanest].splits_backward

    @property
    def is_plain(self) -> bool:
        """Whether it is that of 1F1B: a stage has one chunk, and a backward is one task."""
        return self.chunks == 1 and not self.splits_backward

    def suits(self, num_stages: int, microbatches: int) -> bool:
        if 2 * num_stages * microbatches * self.chunks > MAX_TASKS:
            return False
        return SCHEDULES[self.leanest].suits(num_stages, microbatches)

    def leanest_order(self, num_stages: int, microbatches: int) -> TaskOrder:
        return TaskOrder(self.leanest, num_stages, microbatches, self.chunks)

    def work(
        self,
        problem: Problem,
        slot: StageSlot,
        settings: StepSettings,
        role: Role,
        chunks: Sequence[Counts],
    ) -> Work:
        """Seconds of the tasks of one stage under schedules of this kind.

        Args:
          problem: source of the predicted seconds.
          slot: devices of the stage and their mesh.
          settings: microbatches and checkpointing of a step.
          role: whether the stage holds the embedding or the head.
          chunks: Transformer layers of each of its chunks, of each kind.
        """
        is_split, blocks = self.splits_backward, sum_counts(chunks)
        whole = problem.seconds(slot, settings, role, blocks, is_split)
        times = [
            problem.seconds(slot, settings, own_role, chunk, is_split)
            for own_role, chunk in zip(chunk_roles(role, self.chunks), chunks, strict=True)
        ]
        return Work(
            microbatch=problem.microbatch_s(slot, settings, role, blocks),
            tasks=sum(
                seconds_of_chunk.forward + seconds_of_chunk.backward for seconds_of_chunk in times
            ),
            weight=sum(seconds_of_chunk.weight for seconds_of_chunk in times) if is_split else 0.0,
            last_weight=min(seconds_of_chunk.weight for seconds_of_chunk in times)
            if is_split
            else 0.0,
            first_forward=times[0].forward,
            first_backward=times[0].backward,
            gather=whole.gather,
            reduce=whole.reduce,
            update=whole.update,
        )

    def least_work(
        self, problem: Problem, slot: StageSlot, settings: StepSettings, role: Role, layers: int
    ) -> Work:
        """Lower bounds on the seconds of a stage, wherever its chunks lie in the model.

        Args:
          problem: source of the predicted seconds.
          slot: devices of the stage and their mesh.
          settings: microbatches and checkpointing of a step.
          role: whether the stage holds the embedding or the head.
          layers: the number of Transformer layers of the stage, in all its chunks.
        """
        is_split, least = self.splits_backward, []
        sizes = split_chunks(layers, self.chunks)
        for own_role, size in zip(chunk_roles(role, self.chunks), sizes, strict=True):
            found = [
                problem.seconds(slot, settings, own_role, blocks, is_split)[:3]
                for blocks in problem.ranges.of_size(size)
            ]
            least.append(tuple(map(min, zip(*found, strict=True))))
        forwards, backwards, weights = zip(*least, strict=True)
        tasks = sum(map(sum, zip(forwards, backwards, strict=True)))
        return Work(
            microbatch=tasks + is_split * sum(weights),
            tasks=tasks,
            weight=is_split * sum(weights),
            last_weight=is_split * min(weights),
            first_forward=forwards[0],
            first_backward=backwards[0],
            gather=0.0,
            reduce=0.0,
            update=0.0,
        )

    def with_stage(
        self, work: Work, microbatches: int, around: Around, ways_s: Sequence[float]
    ) -> tuple[float, Around]:
        """Returns a lower bound on a step with one more stage, and the `Around` of the next stage.

        The first microbatch comes through the stages before, and the last goes back through them:
        of several chunks through the first one, which a stage begins and ends with. Nobody waits
        for gradients of weights, where these are tasks of their own; one comes last. The link to
        the next stage is a stage of its own.

        Args:
          around: what the stages before it leave.
          ways_s: of a microbatch to the next stage, and of its gradient back.
        """
        there_s, back_s = ways_s
        before_s = max(around.before, work.gather)
        after_s = max(around.after, work.last_weight + work.reduce)
        update_s = max(around.update, work.update)
        tasks_s = microbatches * work.tasks
        stage_s = max(tasks_s + around.after, tasks_s + microbatches * work.weight + work.reduce)
        slow_s, fast_s = max(there_s, back_s), min(there_s, back_s)
        slow_s *= microbatches * self.chunks
        link_s = work.first_forward + slow_s + fast_s + work.first_backward + after_s
        least_s = before_s + max(stage_s, link_s) + update_s
        before_s += work.first_forward + there_s
        after_s += work.first_backward + back_s
        return least_s, Around(before_s, after_s, update_s)


def schedule_kinds(problem: Problem, settings: StepSettings) -> Iterator[ScheduleKind]:
    """Yields the kinds of schedules that the config allows, with the fewest chunks first."""
    parallel = problem.config.parallel
    found = {
        ScheduleKind(leanest(name, of_its_kind=True), chunks)
        for name in allowed(parallel.schedule)
        for chunks in _numbers_of_chunks(parallel, SCHEDULES[name])
    }
    for kind in sorted(found, key=lambda kind: (kind.chunks, kind.splits_backward, kind.leanest)):
        if settings.checkpointing == "none" or not kind.splits_backward:
            yield kind


def _numbers_of_chunks(parallel: ParallelConfig, own: PipelineSchedule) -> tuple[int, ...]:
    """Chunks of a stage under a schedule that the config allows."""
    if parallel.chunks is None:
        return own.chunks
    return (parallel.chunks,) if own.is_chunked == (parallel.chunks > 1) else ()


def orders_of(
    problem: Problem, assignment: Assignment, settings: StepSettings, kind: ScheduleKind
) -> Iterator[TaskOrder]:
    """The possible schedules of a kind; eager 1F1B as the links of the assignment need it."""
    wanted, p, m = problem.config.parallel.schedule, len(assignment.layers), settings.microbatches
    if not kind.suits(p, m) or kind.chunks * p > problem.num_layers:
        return
    for name in allowed(wanted):
        own = SCHEDULES[name]
        if leanest(name, of_its_kind=True) != kind.leanest or not own.suits(p, m):
            continue
        if not own.chooses_in_flight:
            yield TaskOrder(name, p, m, kind.chunks)
            continue
        plain = tuple(min(m, p - stage) for stage in range(p))
        for share in DEEP:
            in_flight = _deep(problem, assignment, settings, share)
            if in_flight != plain or wanted is not None:
                yield TaskOrder(name, p, m, kind.chunks, in_flight)


def _deep(
    problem: Problem, assignment: Assignment, settings: StepSettings, share: float
) -> tuple[int, ...]:
    """In flight on each stage: 1F1B's, and a share of what is under way on the links after it."""
    load_s = max(stage_loads(problem, assignment, settings))
    extra = [
        math.ceil(share * sum(ways) / load_s)
        for ways in transfer_times(problem, assignment, settings, chunks=1)
    ]
    p, m = len(assignment.layers), settings.microbatches
    return tuple(min(m, p - stage + sum(extra[stage:])) for stage in range(p))


def with_moves(
    assignment: Assignment, least: int, busy: Sequence[int], free: Sequence[int]
) -> list[Assignment]:
    """Assignments with a layer moved from a busy stage to a free one, where it leaves enough."""
    assignments = []
    for source, target in itertools.product(busy, free):
        if source != target and assignment.layers[source] > least:
            layers = list(assignment.layers)
            layers[source] -= 1
            layers[target] += 1
            assignments.append(assignment._replace(layers=tuple(layers)))
    return assignments


def near_depths(order: TaskOrder) -> Iterator[TaskOrder]:
    """One microbatch more or fewer in flight up to any stage, but never fewer than in 1F1B."""
    p, m = order.num_stages, order.microbatches
    for stage, change in itertools.product(range(p - 1), (1, -1)):
        depths = [n + change * (i <= stage) for i, n in enumerate(order.in_flight)]
        depths = [min(max(n, p - i), m) for i, n in enumerate(depths)]
        if depths == sorted(depths, reverse=True):
            yield order._replace(in_flight=tuple(depths))


def every_depth(num_stages: int, microbatches: int) -> Iterator[tuple[int, ...]]:
    """In flight on each stage, all that eager 1F1B may have: never more towards the end.

    The last stage has no use for more than one: nobody waits for its forwards.

    >>> list(every_depth(2, 3))
    [(2, 1), (3, 1)]
    """
    if num_stages == 1:
        yield (1,)
        return
    for rest in every_depth(num_stages - 1, microbatches):
        for depth in range(max(rest[0], min(num_stages, microbatches)), microbatches + 1):
            yield (depth, *rest)
