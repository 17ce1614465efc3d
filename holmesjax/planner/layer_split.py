"""The layers of each stage, split by the speed of its devices within their memory."""

import bisect
import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial

from holmesjax.planner.assignment import Assignment, Segment, StageSlot
from holmesjax.planner.layer_ranges import Counts
from holmesjax.planner.problem import PricedStage, Problem
from holmesjax.planner.stage_layouts import InFlight, StepSettings
from holmesjax.schedules.pipeline_schedules import TaskOrder

FEW_LAYERS = 128  # so many are shared out one by one
LIMIT_ERROR = 1e-4  # of the slowest stage, where unequal layers are shared out


def split(
    problem: Problem, segments: Sequence[Segment], settings: StepSettings, order: TaskOrder
) -> Assignment:
    """The layers of each stage so that the slowest is as fast as can be, inside their memory.

    Each stage has as many layers that compute again as the config says, if it does. The assignment
    is one that does not fit if memory is too small.
    """
    assignment = Assignment(tuple(segments), ())
    share_out = _share_equal if problem.ranges.num_kinds == 1 else _share_unequal
    return assignment._replace(layers=share_out(problem, assignment.slots, settings, order))


class _Loads:
    """The loads of the stages of a pipeline, of equal stages worked out once."""

    def __init__(
        self,
        problem: Problem,
        slots: Sequence[StageSlot],
        settings: StepSettings,
        order: TaskOrder,
    ):
        self._problem, self._order = problem, order
        self._stages = problem.stages(slots, settings)
        self._plain = [problem.in_flight(order, i, order.chunks) for i in range(len(slots))]
        self._seconds: dict[tuple[PricedStage, Counts, Counts | None], float] = {}
        self._full: dict[tuple[PricedStage, InFlight, Counts, Counts | None], bool] = {}
        numbers = problem.config.parallel.recomputed_layers
        self._numbers = numbers if numbers and settings.checkpointing != "none" else None
        fewest = [max(order.chunks, number) for number in numbers or ()]
        is_possible = 0 < sum(fewest) <= problem.num_layers
        # Layers that each stage has at least.
        self.fewest = fewest if is_possible else [order.chunks] * order.num_stages

    def again(self, place: int, start: int, stop: int) -> Counts | None:
        """Those layers of a stage that compute again, of each kind, if not all of them do."""
        if self._numbers is None:
            return None
        return self._problem.ranges.counts(start, min(stop, start + self._numbers[place]))

    def of(self, place: int, blocks: Counts, recomputed: Counts | None) -> tuple[bool, float]:
        """Returns whether layers are too much for a stage's memory, and their seconds."""
        return self.is_full(place, blocks, recomputed), self.seconds(place, blocks, recomputed)

    def seconds(self, place: int, blocks: Counts, recomputed: Counts | None) -> float:
        """The seconds of a microbatch, with a share of the tasks that come once in a step."""
        stage = self._stages[place]
        key = stage, blocks, recomputed
        if (seconds := self._seconds.get(key)) is None:
            times = stage.seconds(blocks, is_split=False, recomputed=recomputed)
            once_s = times.once / stage.settings.microbatches
            seconds = self._seconds[key] = times.forward + times.backward + once_s
        return seconds

    def is_full(self, place: int, blocks: Counts, recomputed: Counts | None) -> bool:
        """Whether layers are too much for a stage's memory."""
        stage, in_flight = self._stages[place], self._plain[place]
        if self._order.chunks > 1:
            in_flight = self._problem.in_flight(self._order, place, sum(blocks))
        key = stage, in_flight, blocks, recomputed
        if (full := self._full.get(key)) is None:
            full = self._full[key] = not self._problem.holds(stage, blocks, in_flight, recomputed)
        return full

    def are_above(
        self, limit: tuple[bool, float], place: int, blocks: Counts, recomputed: Counts | None
    ) -> bool:
        """Whether `of` is above a limit; what does not decide that is not worked out."""
        full, most_s = limit
        is_slow = most_s < math.inf and self.seconds(place, blocks, recomputed) > most_s
        if is_slow == full:
            return self.is_full(place, blocks, recomputed)
        return is_slow


def _share_equal(
    problem: Problem, slots: Sequence[StageSlot], settings: StepSettings, order: TaskOrder
) -> tuple[int, ...]:
    """Numbers of equal layers.

    A stage's seconds never fall with its layers, so giving each next layer to the stage that is
    fastest with it is optimal: whichever stage ends up slowest, any other split gives some stage
    at least as many layers as that one. The last of equally fast stages takes the layer, since it
    holds the fewest microbatches in flight.
    """
    loads = _Loads(problem, slots, settings, order)
    layers = list(loads.fewest)

    def load(stage: int, more: int) -> tuple[bool, float, int]:
        number = layers[stage] + more
        again = loads.again(stage, 0, min(number, problem.num_layers))
        return *loads.of(stage, (number,), again), -stage

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
    return tuple(layers)


def _share_unequal(
    problem: Problem, slots: Sequence[StageSlot], settings: StepSettings, order: TaskOrder
) -> tuple[int, ...]:
    """Sizes of ranges of unequal layers, by the least limit within which the stages hold them.

    A range takes no less time, and no less memory, than any range inside it. So if each stage in
    turn takes as many layers as it can within a limit, the stages hold the model if any can. It
    takes about as many as the stage before it.
    """
    num_layers, last = problem.num_layers, order.num_stages - 1
    loads = _Loads(problem, slots, settings, order)

    def load(stage: int, start: int, stop: int) -> tuple[bool, float]:
        blocks = problem.ranges.counts(start, stop)
        return loads.of(stage, blocks, loads.again(stage, start, stop))

    def is_above(limit: tuple[bool, float], stage: int, start: int, stop: int) -> bool:
        blocks = problem.ranges.counts(start, stop)
        return loads.are_above(limit, stage, blocks, loads.again(stage, start, stop))

    behind = itertools.accumulate(reversed(loads.fewest[1:]), initial=0)
    most_stops = [num_layers - number for number in behind][::-1]

    def within(limit: tuple[bool, float]) -> tuple[int, ...] | None:
        sizes, start, near = list[int](), 0, num_layers // order.num_stages
        for stage, most in enumerate(most_stops):
            stops = range(most if stage == last else start + loads.fewest[stage], most + 1)
            found = _first(stops, start + near + 1, partial(is_above, limit, stage, start))
            if found == 0:
                return None
            near = stops[found - 1] - start
            sizes.append(near)
            start += near
        return tuple(sizes)

    def slowest(sizes: Sequence[int]) -> tuple[bool, float]:
        edges = [0, *itertools.accumulate(sizes)]
        return max(load(stage, *edges[stage : stage + 2]) for stage in range(len(sizes)))

    best = within((False, math.inf)) or within((True, math.inf))
    assert best is not None, "there are at least as many layers as chunks of all stages"
    full, high_s = slowest(best)
    low_s = 0.0
    while high_s - low_s > LIMIT_ERROR * high_s:
        middle_s = (low_s + high_s) / 2
        if (found := within((full, middle_s))) is None:
            low_s = middle_s
        else:
            best = found
            _, high_s = slowest(found)
    return best


def _first(stops: range, near: int, is_above: Callable[[int], bool]) -> int:
    """The number of stops before the first that is above a limit, as those after it are.

    Those about `near` are asked first.
    """
    low, high = 0, len(stops)
    at, step = min(max(0, near - stops.start), high - 1), 1
    while low < high:
        if is_above(stops[at]):
            high = at
            if low:
                break
            at -= step
        else:
            low = at + 1
            if high < len(stops):
                break
            at += step
        at, step = min(max(at, low), high - 1), 2 * step
    return bisect.bisect_left(stops, True, low, high, key=is_above)
