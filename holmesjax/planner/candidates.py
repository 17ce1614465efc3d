"""Choices for some parts: their order, the layers of each stage, and the schedule."""

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from holmesjax.config import Schedule
from holmesjax.planner.problem import (
    CHUNKS,
    Case,
    Part,
    Problem,
    Seat,
    TaskOrder,
    chunk_roles,
    roles,
    split_chunks,
    stage_loads,
    transfer_times,
)
from holmesjax.planner.shortlist import Listed
from holmesjax.planner.stage_layouts import Role, StepSettings

MAX_ORDERS = 720  # of parts that are tried
MAX_TASKS = 2_000_000  # of a step
FEW_LAYERS = 128  # so many are shared out one by one
DEEP = (1.0, 2.0, 0.0)  # in flight for a link, to what is under way on it


def split(
    problem: Problem, parts: Sequence[Part], settings: StepSettings, order: TaskOrder
) -> Case:
    """The layers of each stage so that the slowest is as fast as can be, inside their memory.

    A stage's seconds never fall with its layers, so giving each next layer to the stage that is
    fastest with it is optimal: whichever stage ends up slowest, any other split gives some stage
    at least as many layers as that one. Of equally fast stages the last takes the layer, since it
    holds the fewest microbatches in flight. Where memory is too small, the last case it does not
    hold is given.
    """
    case = Case(tuple(parts), ())
    seats, own_roles = case.seats, roles(order.num_stages)
    layers = [order.chunks] * order.num_stages

    def load(stage: int, more: int) -> tuple[bool, float, int]:
        seat, role, n = seats[stage], own_roles[stage], layers[stage] + more
        times = problem.seconds(seat, settings, role, n, is_split=False)
        once_s = times.once / settings.microbatches
        in_flight = problem.in_flight(order, stage, n)
        full = not problem.fits(seat, settings, role, n, in_flight)
        return full, times.forward + times.backward + once_s, -stage

    left = problem.num_layers - sum(layers)
    while left > 0:
        # Very many are shared out several at a time, the last ones one by one.
        more = max(1, left // FEW_LAYERS)
        waiting = [(*load(stage, more), stage) for stage in range(order.num_stages)]
        heapq.heapify(waiting)
        for _ in range(left // more if more == 1 else left // more // 2):
            *_, stage = heapq.heappop(waiting)
            layers[stage] += more
            left -= more
            heapq.heappush(waiting, (*load(stage, more), stage))
    return case._replace(layers=tuple(layers))


def in_order(problem: Problem, listed: Listed) -> list[tuple[Part, ...]]:
    """Orders of the parts, those first whose links are fastest and whose ends cost least."""
    parts, settings = listed.parts, listed.settings
    num_bytes = problem.boundary_bytes(settings)
    way_s = {
        (a, b): problem.transfer_s(a.seats[-1], b.seats[0], num_bytes)
        for a, b in itertools.permutations(parts, 2)
    }
    microbatch_s = lambda part, role: problem.microbatch_s(part.seats[0], settings, role, 1)
    ends_s = {
        part: [microbatch_s(part, role) - microbatch_s(part, Role()) for role in roles(2)]
        for part in parts
    }

    def cost_s(order: Sequence[Part]) -> float:
        ways = [way_s[pair] + way_s[pair[::-1]] for pair in itertools.pairwise(order)]
        slowest_s = max((way_s[pair] for pair in itertools.pairwise(order)), default=0.0)
        late_s = max(0.0, slowest_s - listed.estimate_s / settings.microbatches)
        return (
            sum(ways) + ends_s[order[0]][0] + ends_s[order[-1]][1] + settings.microbatches * late_s
        )

    if asked := problem.config.parallel.clusters:
        in_turn = sorted(parts, key=lambda part: asked.index(problem.pools[part.pool].cluster.name))
        return [tuple(in_turn)] if problem.is_asked_for(in_turn) else []
    if math.factorial(len(parts)) <= MAX_ORDERS:
        return sorted(itertools.permutations(parts), key=cost_s)
    best = tuple(parts)
    while True:  # move one part at a time to where it is best
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
    """The least seconds of a step that the stages before one need besides its own."""

    before: float = 0.0  # it begins
    after: float = 0.0  # the last gradient of its input, to the end of theirs
    update: float = 0.0  # behind all that


class Work(NamedTuple):
    """Seconds of a stage under schedules of a kind."""

    microbatch: float  # forward and backward of one, in one piece
    tasks: float  # of one: all that has another stage waiting
    weight: float  # of one: the gradients of weights, where they are tasks of their own
    first_forward: float  # of its first chunk
    first_backward: float
    gather: float  # in front of a step, and behind it
    reduce: float
    update: float


class ScheduleKind(NamedTuple):
    """Schedules in which a stage waits for the ones before it by the same rule."""

    name: Literal["whole", "split", "interleaved"]  # backwards, or stages in chunks
    chunks: int = 1

    def suits(self, num_stages: int, microbatches: int) -> bool:
        if 2 * num_stages * microbatches * self.chunks > MAX_TASKS:
            return False
        if self.name == "whole":
            return True
        return num_stages > 1 and (self.name == "split" or microbatches % num_stages == 0)

    def leanest(self, num_stages: int, microbatches: int) -> TaskOrder:
        """The schedule that keeps the fewest microbatches in flight on every stage."""
        names: dict[str, Schedule] = {
            "whole": "1f1b",
            "split": "zero_bubble",
            "interleaved": "interleaved_1f1b",
        }
        return TaskOrder(names[self.name], num_stages, microbatches, self.chunks)

    def work(
        self, problem: Problem, seat: Seat, settings: StepSettings, role: Role, layers: int
    ) -> Work:
        """Seconds of the tasks of one stage under schedules of this kind.

        Args:
          problem: source of the predicted seconds.
          seat: devices of the stage and their mesh.
          settings: microbatches and checkpointing of a step.
          role: whether the stage holds the embedding or the head.
          layers: Transformer layers of the stage, in all its chunks.
        """
        is_split = self.name == "split"
        whole = problem.seconds(seat, settings, role, layers, is_split)
        chunks = [
            problem.seconds(seat, settings, part, own, is_split)
            for part, own in zip(
                chunk_roles(role, self.chunks), split_chunks(layers, self.chunks), strict=True
            )
        ]
        return Work(
            microbatch=problem.microbatch_s(seat, settings, role, layers),
            tasks=sum(own.forward + own.backward for own in chunks),
            weight=whole.weight if is_split else 0.0,
            first_forward=chunks[0].forward,
            first_backward=chunks[0].backward,
            gather=whole.gather,
            reduce=whole.reduce,
            update=whole.update,
        )

    def with_stage(
        self, work: Work, microbatches: int, around: Around, ways_s: Sequence[float]
    ) -> tuple[float, Around]:
        """Seconds that no step with one more stage takes less than, and what the next is left.

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
        after_s = max(around.after, work.weight + work.reduce)
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


def kinds(problem: Problem, settings: StepSettings) -> Iterator[ScheduleKind]:
    """Kinds of schedules that the config allows."""
    parallel = problem.config.parallel
    if parallel.schedule not in ("zero_bubble", "interleaved_1f1b"):
        yield ScheduleKind("whole")
    if parallel.schedule in (None, "zero_bubble") and settings.checkpointing == "none":
        yield ScheduleKind("split")
    if parallel.schedule in (None, "interleaved_1f1b"):
        for chunks in [parallel.chunks] if parallel.chunks else CHUNKS:
            yield ScheduleKind("interleaved", chunks)


def orders_of(
    problem: Problem, case: Case, settings: StepSettings, kind: ScheduleKind
) -> Iterator[TaskOrder]:
    """The schedules of a kind that are possible; eager 1F1B as the links of the case need it."""
    wanted, p, m = problem.config.parallel.schedule, len(case.layers), settings.microbatches
    if not kind.suits(p, m):
        return
    if kind.name == "split":
        yield TaskOrder("zero_bubble", p, m)
        return
    if kind.name == "interleaved":
        if kind.chunks * p <= problem.num_layers:
            yield TaskOrder("interleaved_1f1b", p, m, kind.chunks)
        return
    if wanted in (None, "1f1b"):
        yield TaskOrder("1f1b", p, m)
    if wanted == "gpipe":  # else it is an eager 1F1B
        yield TaskOrder("gpipe", p, m)
    if wanted in (None, "eager_1f1b"):
        plain = tuple(min(m, p - stage) for stage in range(p))
        for share in DEEP:
            in_flight = _deep(problem, case, settings, share)
            if in_flight != plain or wanted is not None:
                yield TaskOrder("eager_1f1b", p, m, in_flight=in_flight)


def _deep(problem: Problem, case: Case, settings: StepSettings, share: float) -> tuple[int, ...]:
    """In flight on each stage: 1F1B's, and a share of what is under way on the links after it."""
    load_s = max(stage_loads(problem, case, settings))
    extra = [
        math.ceil(share * sum(ways) / load_s)
        for ways in transfer_times(problem, case, settings, chunks=1)
    ]
    p, m = len(case.layers), settings.microbatches
    return tuple(min(m, p - stage + sum(extra[stage:])) for stage in range(p))


def with_moves(case: Case, least: int, busy: Sequence[int], free: Sequence[int]) -> list[Case]:
    """The case with a layer moved from any busy stage to any free one, where it leaves enough."""
    cases = []
    for source, target in itertools.product(busy, free):
        if source != target and case.layers[source] > least:
            layers = list(case.layers)
            layers[source] -= 1
            layers[target] += 1
            cases.append(case._replace(layers=tuple(layers)))
    return cases


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
