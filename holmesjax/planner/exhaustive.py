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
from typing import NamedTuple

import numpy as np

from holmesjax.planner import shortlist
from holmesjax.planner.assignment import Assignment, Segment, StageSlot
from holmesjax.planner.candidates import (
    Around,
    ScheduleKind,
    Work,
    every_depth,
    orders_of,
    schedule_kinds,
)
from holmesjax.planner.layer_ranges import Counts, split_chunks
from holmesjax.planner.offers import Offers
from holmesjax.planner.problem import roles
from holmesjax.planner.stage_layouts import InFlight, Role, StepSettings
from holmesjax.planner.step_time import transfer_times
from holmesjax.planner.trials import Trials
from holmesjax.schedules.pipeline_schedules import TaskOrder

MAX_ASSIGNMENTS = 4096  # simulated at a time
MAX_DEPTHS = 512  # combinations of numbers in flight that are tried
UNEQUAL = 16  # times the effort of a stage of equal layers: those of unequal ones have many costs


# A stage's largest number of layers from a start on.
Holds = Callable[[int], int]


class _Stage(NamedTuple):
    """A stage without its layers, wherever it is in the pipeline."""

    slot: StageSlot
    role: Role
    settings: StepSettings
    kind: ScheduleKind


class _Placed(NamedTuple):
    """A stage at its place in the pipeline."""

    stage: _Stage
    in_flight: InFlight
    works: dict[int | Counts, Work]  # by `_held`
    rooms: dict[int, int]  # by its first layer


class ExhaustiveSearch:
    """The half of a search that proves that no plan is faster, if its effort suffices."""

    def __init__(self, trials: Trials):
        self._trials = trials
        self._problem = trials.problem
        self._is_equal = trials.problem.ranges.num_kinds == 1  # whether all layers are alike
        self._works: dict[_Stage, dict[int | Counts, Work]] = {}
        self._rooms: dict[tuple[StageSlot, StepSettings, Role, InFlight, int], int] = {}
        self._placed: dict[tuple[Segment, TaskOrder, StepSettings, int], list[_Placed]] = {}
        # Results that depend on the best step so far have its seconds in the key.
        self._in_time: dict[tuple[object, ...], int] = {}
        self._first_in_time: dict[tuple[object, ...], int] = {}
        self._begins: dict[tuple[object, ...], list[int]] = {}

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
        for kind in schedule_kinds(self._problem, settings):
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
        ways = {
            offer.pool: [
                (offer.meshes[j], int(most[offer.pool][j]), int(offer.most_stages[j]))
                for j in np.flatnonzero(most[offer.pool] >= 1)
            ]
            for offer in offers
        }
        best_of = {
            pool: max((each * count for _, each, count in ways_of_pool), default=0)
            for pool, ways_of_pool in ways.items()
        }

        def longer(
            segments: tuple[Segment, ...], unused: Sequence[Offers], holds: int, num_stages: int
        ) -> Iterator[tuple[Segment, ...]]:
            if (
                len(segments) > crosses
                and holds >= load
                and (numbers is None or num_stages in numbers)
                and self._problem.is_asked_for(segments)
            ):
                yield segments
            for i, offer in enumerate(unused):
                rest = [*unused[:i], *unused[i + 1 :]]
                needed = load - holds - sum(best_of[other.pool] for other in rest)
                for mesh, each, most_count in ways[offer.pool]:
                    room = min(most_count, most_stages - num_stages)
                    # So few stages cannot hold enough, whatever the other pools do.
                    too_few = min(max(0, -(-needed // each) - 1), room)
                    self._trials.spend(too_few)
                    for count in range(too_few + 1, room + 1):
                        self._trials.spend(1)
                        segment, more = Segment(offer.pool, mesh, count), holds + count * each
                        yield from longer((*segments, segment), rest, more, num_stages + count)

        self._trials.spend(1)
        if sum(best_of.values()) < load:
            return
        for segments in longer((), offers, 0, 0):
            yield from self._splits(segments, settings, kind)

    def _splits(
        self, segments: tuple[Segment, ...], settings: StepSettings, kind: ScheduleKind
    ) -> Iterator[Assignment]:
        """All ways to share out the layers, where no stage works longer than the best step."""
        problem, m, least = self._problem, settings.microbatches, kind.chunks
        num_layers, fixed = problem.num_layers, problem.config.parallel.layers
        num_stages = sum(segment.num_stages for segment in segments)
        if not kind.suits(num_stages, m):
            return
        if fixed:
            yield Assignment(segments, fixed)
            return
        # A stage costs as much as two splits.
        self._trials.spend(2 * num_stages * (1 if self._is_equal else UNEQUAL))
        if not self._are_in_time(segments, settings, kind, num_stages):
            return
        order, last = kind.leanest_order(num_stages, m), num_stages - 1
        placed: list[_Placed] = []
        begins = [num_layers]
        for segment in reversed(segments):
            first = num_stages - len(placed) - segment.num_stages
            placed = [*self._placed_of(segment, settings, kind, order, first), *placed]
            begins = [*self._begins_of(segment, settings, kind, order, first, begins[0]), *begins]
        if begins[0] > 0:
            return
        assignment = Assignment(segments, ())
        ways_s = [*transfer_times(problem, assignment, settings, chunks=1), (0.0, 0.0)]
        trials, works = self._trials, [place.works for place in placed]

        def shares(stage: int, start: int, around: Around) -> Iterator[tuple[int, ...]]:
            if stage > last:
                yield ()
                return
            most = start + self._room(placed[stage], start)
            most = min(num_layers - least * (last - stage), most)
            for stop in range(max(begins[stage + 1], start + least), most + 1):
                trials.spend(1)
                held = self._held(kind, start, stop)
                own = works[stage].get(held) or self._work(placed[stage].stage, held)
                if around.before + m * own.microbatch >= trials.best_s:
                    return
                least_s, left_to_next = kind.with_stage(own, m, around, ways_s[stage])
                if least_s < trials.best_s:
                    for rest in shares(stage + 1, stop, left_to_next):
                        yield (stop - start, *rest)

        for layers in shares(0, 0, Around()):
            yield Assignment(segments, layers)

    def _are_in_time(
        self,
        segments: tuple[Segment, ...],
        settings: StepSettings,
        kind: ScheduleKind,
        num_stages: int,
    ) -> bool:
        """Whether stages could do all layers before the best step so far is over.

        Their memory is left out: it depends on the place of a stage, and is seldom what counts.
        """
        behind, stop = self._problem.num_layers, num_stages
        for segment in reversed(segments):
            first = stop - segment.num_stages
            ends = Role(first == 0, stop == num_stages)
            key = segment, settings, kind, ends, behind, self._trials.best_s
            if key not in self._first_in_time:
                stages = self._stages_of(segment, settings, kind, first, num_stages)
                holds = [functools.partial(self._most_in_time, stage) for stage in stages]
                self._first_in_time[key] = self._earliest(holds, behind)[0]
            behind, stop = self._first_in_time[key], first
        return behind <= 0

    def _begins_of(
        self,
        segment: Segment,
        settings: StepSettings,
        kind: ScheduleKind,
        order: TaskOrder,
        first: int,
        behind: int,
    ) -> list[int]:
        """The first layer of each stage at the earliest, if `behind` begins the next.

        The stages hold their layers in their memory, and are done in time. The other arguments are
        those of `_placed_of`.
        """
        key = segment, settings, order, first, behind, self._trials.best_s
        if key not in self._begins:
            placed = self._placed_of(segment, settings, kind, order, first)
            holds = [functools.partial(self._most, place) for place in placed]
            self._begins[key] = self._earliest(holds, behind)
        return self._begins[key]

    def _earliest(self, holds: Sequence[Holds], behind: int) -> list[int]:
        """The first layer of each of some stages at the earliest, if `behind` begins the next."""
        begins = []
        for hold in reversed(holds):
            if self._is_equal:
                behind -= hold(0)
            else:
                reaches = lambda start, hold=hold, stop=behind: start + hold(start) >= stop
                behind = bisect.bisect_left(range(behind), True, key=reaches)
            begins.append(behind)
        return begins[::-1]

    def _most(self, placed: _Placed, start: int) -> int:
        """Layers from `start` on that a stage holds in its memory and does in time, at most."""
        least, most = placed.stage.kind.chunks, self._most_in_time(placed.stage, start)
        if most < least or self._lie_anywhere(placed.stage.kind):
            return most
        # Mostly there is room for all of them, or for the layers that all chunks have.
        if self._fits(placed, start, most // least * least):
            return most
        return max(least - 1, min(most, self._room(placed, start)))

    def _most_in_time(self, stage: _Stage, start: int) -> int:
        """Layers from `start` on that a stage does before the best step so far is over, at most."""
        slot, role, settings, kind = stage
        own_kind = kind if self._lie_anywhere(kind) else None  # a stage works as long with others
        key = slot, role, settings, own_kind, start, self._trials.best_s
        if key not in self._in_time:

            def is_late(number: int) -> bool:
                if own_kind:
                    held = self._held(own_kind, start, start + number)
                    own_s = self._work(stage, held).microbatch
                else:
                    blocks = self._problem.ranges.counts(start, start + number)
                    own_s = self._problem.microbatch_s(slot, settings, role, blocks)
                return settings.microbatches * own_s >= self._trials.best_s

            least = own_kind.chunks if own_kind else 1
            numbers = range(least, self._problem.num_layers - start + 1)
            self._in_time[key] = least - 1 + bisect.bisect_left(numbers, True, key=is_late)
        return max(kind.chunks - 1, self._in_time[key])

    def _lie_anywhere(self, kind: ScheduleKind) -> bool:
        """Whether chunks are of unequal layers: of a stage's, a bound knows only the number."""
        return kind.chunks > 1 and not self._is_equal

    def _stages_of(
        self,
        segment: Segment,
        settings: StepSettings,
        kind: ScheduleKind,
        first: int,
        num_stages: int,
    ) -> list[_Stage]:
        """The stages of a segment; `first` is the index of its first one in the pipeline."""
        slots = map(self._problem.like, segment.slots)
        own_roles = roles(num_stages)[first : first + segment.num_stages]
        return [_Stage(*both, settings, kind) for both in zip(slots, own_roles, strict=True)]

    def _placed_of(
        self,
        segment: Segment,
        settings: StepSettings,
        kind: ScheduleKind,
        order: TaskOrder,
        first: int,
    ) -> list[_Placed]:
        """The stages of a segment at their places.

        Args:
          segment: consecutive stages.
          settings: microbatches and checkpointing of a step.
          kind: the kind of schedule.
          order: the leanest schedule of the kind.
          first: index of the first stage of the segment in the pipeline.
        """
        key = segment, order, settings, first
        if key not in self._placed:
            stages = self._stages_of(segment, settings, kind, first, order.num_stages)
            # Uneven chunks have no less in flight than the layers that all of them have.
            in_flight = [
                self._problem.in_flight(order, place, kind.chunks)
                for place in range(first, first + len(stages))
            ]
            self._placed[key] = [
                _Placed(stage, held, self._works.setdefault(stage, {}), {})
                for stage, held in zip(stages, in_flight, strict=True)
            ]
        return self._placed[key]

    def _held(self, kind: ScheduleKind, start: int, stop: int) -> int | Counts:
        """The layers of a stage, as far as its seconds depend on them: by kind, or their number."""
        by_number = self._is_equal or kind.chunks > 1
        return stop - start if by_number else self._problem.ranges.counts(start, stop)

    def _work(self, stage: _Stage, held: int | Counts) -> Work:
        """Seconds of a stage with the layers of `_held`."""
        slot, role, settings, kind = stage
        known = self._works.setdefault(stage, {})
        if held not in known:
            if not isinstance(held, int):
                known[held] = kind.work(self._problem, slot, settings, role, [held])
            elif self._is_equal:
                chunks = [(size,) for size in split_chunks(held, kind.chunks)]
                known[held] = kind.work(self._problem, slot, settings, role, chunks)
            else:
                known[held] = kind.least_work(self._problem, slot, settings, role, held)
        return known[held]

    def _room(self, placed: _Placed, start: int) -> int:
        """Layers from `start` on that the memory of a stage has room for, at most."""
        own_start = 0 if self._is_equal else start
        if own_start not in placed.rooms:
            placed.rooms[own_start] = self._room_from(placed, own_start)
        return placed.rooms[own_start]

    def _room_from(self, placed: _Placed, start: int) -> int:
        """Unequal layers of chunks may lie anywhere, and no number of them is too many."""
        (slot, role, settings, kind), in_flight, *_ = placed
        if self._lie_anywhere(kind):
            return self._problem.num_layers
        key = slot, settings, role, in_flight, start
        if key not in self._rooms:
            full = lambda n: not self._fits(placed, start, kind.chunks * n)
            numbers = range(1, (self._problem.num_layers - start) // kind.chunks + 1)
            most = bisect.bisect_left(numbers, True, key=full)
            self._rooms[key] = kind.chunks * most + kind.chunks - 1
        return self._rooms[key]

    def _fits(self, placed: _Placed, start: int, number: int) -> bool:
        (slot, role, settings, _), in_flight, *_ = placed
        blocks = self._problem.ranges.counts(start, start + number)
        stage = self._problem.stage(slot, settings, role)
        return self._problem.holds(stage, blocks, in_flight)
