"""The search of all plans that a bound does not rule out.

No stage can work less than its layers take. So a bound says of every sequence of stages, and of
every split of the layers over them, how fast a step could be at best; it grows with each stage. If
few assignments could still beat the best plan, all of them are tried, and the best plan is then the
best there is.
"""

import bisect
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from holmesjax.planner import shortlist
from holmesjax.planner.candidates import (
    Around,
    ScheduleKind,
    Work,
    every_depth,
    kinds,
    orders_of,
)
from holmesjax.planner.layer_ranges import Counts, split_chunks
from holmesjax.planner.problem import Assignment, Segment, StageSlot
from holmesjax.planner.shortlist import Offers
from holmesjax.planner.stage_layouts import InFlight, Role, StepSettings
from holmesjax.planner.step_time import roles, transfer_times
from holmesjax.planner.trials import Trials
from holmesjax.schedules.pipeline_schedules import TaskOrder

MAX_ASSIGNMENTS = 4096  # simulated at a time
MAX_DEPTHS = 512  # combinations of numbers in flight that are tried


# Of a stage: layers from a start on that its memory has room for, at most.
Room = Callable[[int], int]


@dataclass(frozen=True, slots=True)
class _Stage:
    """One stage of a sequence of stages, without its layers."""

    room: Room
    works: dict[int | Counts, Work]  # by the layers of each kind
    # By the end of its layers and by the best step so far: the first layer of a stage that holds
    # them in its memory, and is done in time.
    begins: dict[tuple[int, float], int] = field(default_factory=dict)


class ExhaustiveSearch:
    """The half of a search that proves that no plan is faster, if its effort suffices."""

    def __init__(self, trials: Trials):
        self._trials = trials
        self._problem = trials.problem
        self._is_equal = trials.problem.ranges.num_kinds == 1  # whether all layers are alike
        self._works: dict[
            tuple[StageSlot, StepSettings, Role, ScheduleKind], dict[int | Counts, Work]
        ] = {}
        self._rooms: dict[tuple[StageSlot, StepSettings, Role, InFlight, int], int] = {}
        self._stages: dict[tuple[Segment, StepSettings, TaskOrder, int], list[_Stage]] = {}

    def run(self) -> bool:
        """Tries all plans that could be faster than the best; whether no other is left.

        Plans with 1F1B are tried first, and make the limits of all others tighter.
        """
        trials = self._trials
        return all(
            trials.bounds[settings] >= trials.best_s or self._exhaust(settings, is_first)
            for is_first in (True, False)
            for settings in trials.in_turn()
        )

    def _exhaust(self, settings: StepSettings, is_first: bool) -> bool:
        """Tries all assignments of some settings that could be faster than the best, in two turns.

        First those with 1F1B and its like, then those with the other schedules. Returns whether
        that was all that had to be tried.
        """
        is_all = True
        for kind in kinds(self._problem, settings):
            if kind.is_plain != is_first:
                continue
            waiting: dict[int, list[Assignment]] = {}
            for assignment in self._possible(settings, kind):
                group = waiting.setdefault(len(assignment.layers), [])
                group.append(assignment)
                if len(group) == MAX_ASSIGNMENTS:
                    is_all &= self._try_all(group, settings, kind)
                    group.clear()
            for group in waiting.values():
                if group:
                    is_all &= self._try_all(group, settings, kind)
        return is_all

    def _try_all(
        self, assignments: Sequence[Assignment], settings: StepSettings, kind: ScheduleKind
    ) -> bool:
        """Every schedule of a kind; whether also every number in flight."""
        p, m = len(assignments[0].layers), settings.microbatches
        orders = {
            order
            for assignment in assignments
            for order in orders_of(self._problem, assignment, settings, kind)
        }
        is_all = True
        if deep := {order._replace(in_flight=()) for order in orders if order.chooses_in_flight}:
            depths = list(itertools.islice(every_depth(p, m), MAX_DEPTHS + 1))
            is_all = len(depths) <= MAX_DEPTHS
            if is_all:
                orders.update(o._replace(in_flight=depth) for o in deep for depth in depths)
        for order in sorted(orders):
            self._trials.try_assignments(
                [c for c in assignments if min(c.layers) >= order.chunks], settings, order
            )
        return is_all

    def _possible(self, settings: StepSettings, kind: ScheduleKind) -> Iterator[Assignment]:
        """Cases whose stages could all be done before the best step so far is over."""
        offers = [offer.alone for offer in self._trials.offers_of(settings).values()]
        for offer in offers:
            yield from self._sequences([offer], settings, kind, crosses=False)
        yield from self._sequences(offers, settings, kind, crosses=True)

    def _sequences(
        self, offers: Sequence[Offers], settings: StepSettings, kind: ScheduleKind, crosses: bool
    ) -> Iterator[Assignment]:
        """Cases of a kind of schedule, on one pool or on several."""
        numbers = shortlist.numbers_of_stages(self._problem.config, settings)
        load = self._problem.ranges.load
        most_stages = self._problem.num_layers if numbers is None else max(numbers, default=0)
        limit_s = self._trials.best_s / settings.microbatches
        most = {offer.pool: offer.most(limit_s, 1, crosses) for offer in offers}
        best_of = {o.pool: float((o.most_stages * most[o.pool]).max()) for o in offers}

        def longer(
            segments: tuple[Segment, ...], unused: Sequence[Offers], holds: float, num_stages: int
        ) -> Iterator[tuple[Segment, ...]]:
            self._trials.spend(1)
            if (
                len(segments) > crosses
                and holds >= load
                and (numbers is None or num_stages in numbers)
                and self._problem.is_asked_for(segments)
            ):
                yield segments
            if holds + sum(best_of[offer.pool] for offer in unused) < load:
                return
            for offer in unused:
                rest = [other for other in unused if other is not offer]
                for j in np.flatnonzero(most[offer.pool] >= 1):
                    room = min(int(offer.most_stages[j]), most_stages - num_stages)
                    for count in range(1, room + 1):
                        segment = Segment(offer.pool, offer.meshes[j], count)
                        more = holds + count * float(most[offer.pool][j])
                        yield from longer((*segments, segment), rest, more, num_stages + count)

        for segments in longer((), offers, 0.0, 0):
            yield from self._splits(segments, settings, kind)

    def _splits(
        self, segments: tuple[Segment, ...], settings: StepSettings, kind: ScheduleKind
    ) -> Iterator[Assignment]:
        """All ways to share out the layers, where no stage works longer than the best step."""
        problem, m, least = self._problem, settings.microbatches, kind.chunks
        assignment, fixed = Assignment(segments, ()), problem.config.parallel.layers
        slots, num_layers = assignment.slots, problem.num_layers
        if not kind.suits(len(slots), m):
            return
        if fixed:
            yield Assignment(segments, fixed)
            return
        own_roles, last = roles(len(slots)), len(slots) - 1
        order = kind.leanest_order(len(slots), m)
        stages: list[_Stage] = []
        for segment in segments:
            stages += self._stages_of(segment, settings, kind, order, first=len(stages))
        # With chunks, a bound on a stage's work knows only the number of its layers.
        by_number, counts = self._is_equal or kind.chunks > 1, problem.ranges.counts

        def work(stage: int, start: int, stop: int) -> Work:
            known = stages[stage].works
            key = stop - start if by_number else counts(start, stop)
            if key not in known:
                blocks = counts(start, stop)
                known[key] = self._work(kind, slots[stage], settings, own_roles[stage], blocks)
            return known[key]

        def stop(stage: int, start: int) -> int:
            """The end of the most layers that a stage holds in its memory and does in time."""
            stops = range(start + least, min(start + stages[stage].room(start), num_layers) + 1)
            late = lambda stop: m * work(stage, start, stop).microbatch >= self._trials.best_s
            return start + least - 1 + bisect.bisect_left(stops, True, key=late)

        def begin(stage: int, behind: int) -> int:
            """The first layer of a stage, at the earliest, where `behind` begins the next."""
            known, key = stages[stage].begins, (behind, self._trials.best_s)
            if key not in known:
                if self._is_equal:
                    known[key] = behind - stop(stage, 0)
                else:
                    reaches = lambda start: stop(stage, start) >= behind
                    known[key] = bisect.bisect_left(range(behind), True, key=reaches)
            return known[key]

        self._trials.spend(2 * len(slots))  # a stage costs as much as two splits
        begins = [num_layers]
        for stage in reversed(range(len(slots))):
            begins.append(begin(stage, begins[-1]))
        begins.reverse()
        if begins[0] > 0:
            return
        ways_s = [*transfer_times(problem, assignment, settings, chunks=1), (0.0, 0.0)]

        def shares(stage: int, start: int, around: Around) -> Iterator[tuple[int, ...]]:
            if stage > last:
                yield ()
                return
            most = min(num_layers - least * (last - stage), start + stages[stage].room(start))
            for stop in range(max(begins[stage + 1], start + least), most + 1):
                self._trials.spend(1)
                own = work(stage, start, stop)
                if around.before + m * own.microbatch >= self._trials.best_s:
                    return
                least_s, left_to_next = kind.with_stage(own, m, around, ways_s[stage])
                if least_s < self._trials.best_s:
                    for rest in shares(stage + 1, stop, left_to_next):
                        yield (stop - start, *rest)

        for layers in shares(0, 0, Around()):
            yield Assignment(segments, layers)

    def _stages_of(
        self,
        segment: Segment,
        settings: StepSettings,
        kind: ScheduleKind,
        order: TaskOrder,
        first: int,
    ) -> list[_Stage]:
        """The room of each stage of a segment, and its work by the layers of each kind.

        Args:
          segment: consecutive stages.
          settings: microbatches and checkpointing of a step.
          kind: the kind of schedule.
          order: the leanest schedule of the kind.
          first: index of the first stage of the segment in the pipeline.
        """
        key = segment, settings, order, first
        if key not in self._stages:
            self._stages[key] = found = []
            for stage, slot in enumerate(map(self._problem.like, segment.slots), start=first):
                role = roles(order.num_stages)[stage]
                works = self._works.setdefault((slot, settings, role, kind), {})
                found.append(_Stage(self._room(order, settings, role, stage, slot), works))
        return self._stages[key]

    def _work(
        self,
        kind: ScheduleKind,
        slot: StageSlot,
        settings: StepSettings,
        role: Role,
        blocks: Counts,
    ) -> Work:
        problem, layers = self._problem, sum(blocks)
        if kind.chunks == 1:
            return kind.work(problem, slot, settings, role, [blocks])
        if not self._is_equal:
            return kind.least_work(problem, slot, settings, role, layers)
        chunks = [(n,) for n in split_chunks(layers, kind.chunks)]
        return kind.work(problem, slot, settings, role, chunks)

    def _room(
        self, order: TaskOrder, settings: StepSettings, role: Role, stage: int, slot: StageSlot
    ) -> Room:
        """The room of one stage.

        With chunks, unequal layers of a stage may lie anywhere, and no number of them is too many.
        """
        if self._is_equal:
            most = self._room_from(order, settings, role, stage, slot, start=0)
            return lambda start: most
        if order.chunks > 1:
            return lambda start: self._problem.num_layers
        return functools.partial(self._room_from, order, settings, role, stage, slot)

    def _room_from(
        self,
        order: TaskOrder,
        settings: StepSettings,
        role: Role,
        stage: int,
        slot: StageSlot,
        start: int,
    ) -> int:
        """Layers from `start` on that the memory of a stage has room for, at most."""
        # Uneven chunks have no less in flight than the layers that all of them have.
        problem, v = self._problem, order.chunks
        in_flight = problem.in_flight(order, stage, v)
        key = slot, settings, role, in_flight, start
        if key not in self._rooms:
            blocks = lambda n: problem.ranges.counts(start, start + v * n)
            full = lambda n: not problem.fits(slot, settings, role, blocks(n), in_flight)
            numbers = range(1, (problem.num_layers - start) // v + 1)
            most = bisect.bisect_left(numbers, True, key=full)
            self._rooms[key] = v * most + v - 1
        return self._rooms[key]
