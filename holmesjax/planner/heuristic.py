"""The search near what looks good: a shortlist, simulated, and then changed one step at a time.

`shortlist` names segments that may make a good plan. Where memory holds none of them, `fitting`
names those that take least memory. Each is simulated as it would run, in several orders of its
segments, with layers moved between stages, under every schedule. Then segments and settings near
the best ones are tried.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from holmesjax.config import ParallelConfig
from holmesjax.planner import shortlist
from holmesjax.planner.assignment import Assignment, Segment
from holmesjax.planner.candidates import (
    in_order,
    near_depths,
    orders_of,
    schedule_kinds,
    with_moves,
)
from holmesjax.planner.fitting import fitting
from holmesjax.planner.layer_split import split
from holmesjax.planner.offers import Offers
from holmesjax.planner.problem import Problem
from holmesjax.planner.shortlist import CHECKPOINTING, Listed
from holmesjax.planner.stage_layouts import StepSettings
from holmesjax.planner.step_time import stage_loads, transfer_times
from holmesjax.planner.trials import Candidate, Trials
from holmesjax.schedules.pipeline_schedules import PLAIN, TaskOrder, leanest

NUM_CANDIDATES = 32  # of the list that are tried
NUM_SIMULATED = 8  # of those and their orders
NUM_REFINED = 2  # of those that are tried with every schedule
NUM_ORDERS = 3  # of the segments of a candidate that are tried
MAX_MOVED = 12  # stages that give a layer away, and that take one
NUM_MESHES = 8  # of a pool that are tried in place of the best plan's
MOST_ABOVE = 1.2  # the best estimate: settings with larger bounds are not listed
SPLIT_PER_TASK = 10  # layers that are shared out while a task is simulated
MAX_SHARED = 1000  # layers that are shared out at all: of more, several at a time

Way = tuple[tuple[Segment, ...], StepSettings]  # to train, but for the layers and the schedule


class HeuristicSearch:
    """The half of a search that finds good plans soon."""

    def __init__(self, trials: Trials, pinned: Problem | None = None):
        """The search of `trials`, or of those of its plans that have more settings pinned."""
        self._trials = trials
        self._problem = pinned or trials.problem
        allowed = set(shortlist.step_settings(self._problem.config))
        self._settings = [settings for settings in trials.bounds if settings in allowed]
        self._splits: dict[tuple[tuple[Segment, ...], StepSettings, TaskOrder], Assignment] = {}

    def run(self) -> None:
        """Tries the shortlist, then what is near the best of it, then both with pins."""
        self._try_candidates(self._candidates(self._in_turn()))
        if not self._trials.found:  # estimates of what does not fit kept these out of the list
            policies = {settings.checkpointing for settings in self._settings}
            leanest = max(policies, key=CHECKPOINTING.index)
            lean = [settings for settings in self._in_turn() if settings.checkpointing == leanest]
            self._try_candidates(self._candidates(lean))
            self._try_fitting()
        self._improve()
        self._look_again()

    def _look_again(self) -> None:
        """Searches with settings of the best plan pinned, until none of these finds a better one.

        A list with pins has more plans of each kind, and they are compared under the schedule that
        is pinned, not under the first. A run that pins what was chosen would find more otherwise.
        """
        looked: set[ParallelConfig] = set()
        parallel, best_s = self._problem.config.parallel, math.inf
        while self._trials.best_s < best_s:
            best, best_s = self._best(), self._trials.best_s
            stages, microbatches = len(best.assignment.layers), best.settings.microbatches
            for pinned in (
                replace(parallel, stages=stages, microbatches=microbatches),
                replace(parallel, microbatches=microbatches, schedule=best.order.schedule),
                replace(parallel, stages=stages, schedule=best.order.schedule),
            ):
                if pinned in looked or pinned == parallel:
                    continue
                looked.add(pinned)
                again = HeuristicSearch(self._trials, self._problem.set_to(pinned))
                again._try_candidates(again._candidates(again._in_turn()))
                again._improve()
                if self._trials.best_s < best_s:
                    break  # the others have settings that the best plan may have no more

    def _in_turn(self) -> list[StepSettings]:
        """The settings that are allowed here and may be faster than the best plan."""
        found = set(self._settings)
        return [
            settings
            for settings in self._trials.in_turn()
            if settings in found and self._trials.bounds[settings] < self._trials.best_s
        ]

    def _best(self) -> Candidate:
        return min(self._trials.found.values(), key=lambda candidate: candidate.step_s)

    def _candidates(self, in_turn: Sequence[StepSettings]) -> list[Listed]:
        """Lists of segments for the settings that may be good, the best estimates first."""
        found: dict[tuple[frozenset[Segment], StepSettings], Listed] = {}
        least_s = math.inf
        for settings in shortlist.thinned(in_turn):
            if self._trials.bounds[settings] > MOST_ABOVE * least_s:
                break
            offers = self._trials.offers_of(settings)
            most_s = min(MOST_ABOVE * least_s, self._trials.best_s)
            for item in shortlist.listed(self._problem, settings, offers, most_s):
                key = frozenset(item.segments), settings
                if key not in found or item.estimate_s < found[key].estimate_s:
                    found[key] = item
                    least_s = min(least_s, item.estimate_s)
        return sorted(found.values(), key=lambda item: item.estimate_s)

    def _try_candidates(self, items: Sequence[Listed]) -> None:
        """Tries the best by estimate in a few orders, then the best of these by simulation, and so
        on.

        The next are tried if none of the first fits memory.
        """
        for start in range(0, len(items), NUM_CANDIDATES):
            self._try_best(
                (segments, item.settings)
                for item in items[start : start + NUM_CANDIDATES]
                for segments in in_order(self._problem, item)[:NUM_ORDERS]
            )
            if self._trials.found:
                return

    def _try_fitting(self) -> None:
        """Tries what memory holds, whatever its seconds: all settings and numbers of stages."""
        ways = [
            (segments, settings)
            for settings in self._trials.bounds
            for segments in fitting(self._problem, settings)
        ]
        self._try_best(ways)
        if not self._trials.found:  # other schedules may hold less than the first
            for way in ways:
                self._try_segments(*way)

    def _try_best(self, ways: Iterable[Way]) -> None:
        """Tries segments with good estimates under one schedule, then the best under all."""
        estimates = sorted((self._estimate_s(*way), way) for way in ways)
        possible = [
            way for estimate_s, way in estimates if estimate_s < MOST_ABOVE * self._trials.best_s
        ]
        tried = sorted(
            (self._try_segments(*way, is_first=True), way) for way in possible[:NUM_SIMULATED]
        )
        for _, way in tried[:NUM_REFINED]:
            self._try_segments(*way)

    def _improve(self) -> None:
        """Changes the best plan in one thing at a time for as long as that helps."""
        tried: set[tuple[tuple[Segment, ...], StepSettings]] = set()
        while self._trials.found:
            best = self._best()
            near = [
                way
                for way in dict.fromkeys((*self._near(best), *self._with_near_settings(best)))
                if way not in tried and self._is_allowed(*way)
            ]
            tried.update(near)
            self._try_best(near)
            if best.order.chooses_in_flight:
                for order in near_depths(best.order):
                    self._trials.try_assignments([best.assignment], best.settings, order)
            if self._trials.best_s >= best.step_s:
                return

    def _is_allowed(self, segments: Sequence[Segment], settings: StepSettings) -> bool:
        num_stages = sum(segment.num_stages for segment in segments)
        numbers = shortlist.numbers_of_stages(self._problem.config, settings)
        return (
            1 <= num_stages <= self._problem.num_layers
            and (numbers is None or num_stages in numbers)
            and self._problem.is_asked_for(segments)
        )

    def _with_near_settings(self, candidate: Candidate) -> Iterator[Way]:
        """The same segments with other checkpointing, or with the next numbers of microbatches."""
        count, policy = candidate.settings
        counts = sorted({settings.microbatches for settings in self._settings})
        at = counts.index(count)
        for settings in self._settings:
            if settings.microbatches in counts[max(0, at - 1) : at + 2] and (
                (settings.microbatches == count) != (settings.checkpointing == policy)
            ):
                offers = self._trials.offers_of(settings)
                for fills in (False, True):
                    segments = [
                        own
                        for segment in candidate.assignment.segments
                        if (own := _as_offered(segment, offers.get(segment.pool), fills))
                    ]
                    if len(segments) == len(candidate.assignment.segments):
                        yield tuple(segments), settings

    def _near(self, candidate: Candidate) -> Iterator[Way]:
        """Segments with one changed: mesh, stages, pool or place; or left out; or a stage moved.

        A stage that moves to another segment keeps the number of stages, which may be set.
        """
        segments, settings = candidate.assignment.segments, candidate.settings
        used = {segment.pool for segment in segments}
        with_other = lambda i, other: (*segments[:i], other, *segments[i + 1 :])
        for i, segment in enumerate(segments):
            rest = (*segments[:i], *segments[i + 1 :])
            for other in self._near_segments(settings, segment):
                changed = with_other(i, other)
                yield changed, settings
                for j, giver in enumerate(segments):
                    if (
                        j != i
                        and other.num_stages
                        == segment.num_stages + 1
                        < giver.num_stages + segment.num_stages
                    ):
                        fewer = giver._replace(num_stages=giver.num_stages - 1)
                        yield (*changed[:j], fewer, *changed[j + 1 :]), settings
            for pool, offers in self._trials.offers_of(settings).items():
                if pool not in used and segment.mesh in offers.meshes:
                    most = int(offers.most_stages[offers.meshes.index(segment.mesh)])
                    moved = Segment(pool, segment.mesh, min(segment.num_stages, most))
                    yield with_other(i, moved), settings
            yield rest, settings
            for to in range(len(segments)):
                yield (*rest[:to], segment, *rest[to:]), settings

    def _near_segments(self, settings: StepSettings, segment: Segment) -> Iterator[Segment]:
        """A segment with other meshes, or a stage more or less."""
        offers = self._trials.offers_of(settings)[segment.pool]
        effort = offers.layer_load_s * [mesh.num_devices for mesh in offers.meshes]
        for j in np.argsort(effort, kind="stable")[:NUM_MESHES]:
            one, most = segment.num_stages, int(offers.most_stages[j])
            on_as_many = one * segment.mesh.num_devices // offers.meshes[j].num_devices
            for count in dict.fromkeys((one - 1, one, one + 1, on_as_many, most)):
                if 1 <= count <= most:
                    yield Segment(segment.pool, offers.meshes[j], count)

    def _try_segments(
        self, segments: Sequence[Segment], settings: StepSettings, is_first: bool = False
    ) -> float:
        """The least seconds of a step of these segments in this order, with layers moved.

        With every schedule, or with the first.
        """
        layers = self._problem.config.parallel.layers
        least_s = math.inf
        plain = self._plain_assignment(segments, settings)
        for order in self._orders(plain, settings)[: 1 if is_first else None]:
            assignment = self._assignment(segments, settings, order)
            if min(assignment.layers) < order.chunks:
                continue
            best = self._trials.try_assignments([assignment], settings, order)
            while best is not None and not layers:
                busy, free = self._ends(best)
                moves = with_moves(best.assignment, order.chunks, busy, free)
                better = self._trials.try_assignments(moves, settings, order)
                if better is None or better.step_s >= best.step_s:
                    break
                best = better
            if best is not None:
                least_s = min(least_s, best.step_s)
        return least_s

    def _assignment(
        self, segments: Sequence[Segment], settings: StepSettings, order: TaskOrder
    ) -> Assignment:
        """An assignment with the layers of the config, or else with layers split by speed."""
        layers = self._problem.config.parallel.layers
        if layers:
            return Assignment(tuple(segments), layers)
        key = tuple(segments), settings, order
        if key not in self._splits:
            self._splits[key] = split(self._problem, segments, settings, order)
        return self._splits[key]

    def _plain_assignment(self, segments: Sequence[Segment], settings: StepSettings) -> Assignment:
        """An assignment split for the schedule with the fewest microbatches in flight."""
        num_stages = sum(segment.num_stages for segment in segments)
        return self._assignment(segments, settings, self._leanest(num_stages, settings))

    def _leanest(self, num_stages: int, settings: StepSettings) -> TaskOrder:
        """1F1B, or a schedule that the config asks for and that may hold less."""
        name = leanest(self._problem.config.parallel.schedule or PLAIN)
        return TaskOrder(name, num_stages, settings.microbatches)

    def _fits(self, assignment: Assignment, settings: StepSettings) -> bool:
        """Whether memory holds an assignment with the schedule that holds least."""
        order = self._leanest(len(assignment.layers), settings)
        ranges = self._problem.ranges.ranges(assignment.layers)
        stages = self._problem.stages(assignment.slots, settings)
        return all(
            self._problem.holds(stage, blocks, self._problem.in_flight(order, place, sum(blocks)))
            for place, (stage, blocks) in enumerate(zip(stages, ranges, strict=True))
        )

    def _orders(self, assignment: Assignment, settings: StepSettings) -> list[TaskOrder]:
        """The schedules for an assignment; first eager 1F1B if allowed, which is seldom slow."""
        orders = dict.fromkeys(
            order
            for kind in schedule_kinds(self._problem, settings)
            for order in orders_of(self._problem, assignment, settings, kind)
        )
        return sorted(orders, key=lambda order: not order.chooses_in_flight)

    def _estimate_s(self, segments: Sequence[Segment], settings: StepSettings) -> float:
        """About the seconds of a step of these segments in this order, without a simulation.

        The slowest stage or link is busy all the time, but for the first microbatch, which goes
        down and back up. Infinite where memory is too small.
        """
        problem, plain = self._problem, self._plain_assignment(segments, settings)
        effort = len(plain.layers) * min(problem.num_layers, MAX_SHARED) / SPLIT_PER_TASK
        if not self._fits(plain, settings):
            self._trials.spend(effort)
            return math.inf
        for order in self._orders(plain, settings)[:2]:
            self._trials.spend(effort)
            assignment = self._assignment(segments, settings, order)
            task_s, once_s = [], []
            ranges = problem.ranges.ranges(assignment.layers)
            stages = problem.stages(assignment.slots, settings)
            for place, (stage, blocks) in enumerate(zip(stages, ranges, strict=True)):
                in_flight = problem.in_flight(order, place, sum(blocks))
                if not problem.holds(stage, blocks, in_flight):
                    break
                times = stage.seconds(blocks, is_split=False)
                task_s.append(times.forward + times.backward)
                once_s.append(times.once)
            else:
                ways_s = transfer_times(problem, assignment, settings, chunks=1)
                slowest_s = max(*task_s, *itertools.chain(*ways_s), 0.0)
                first_s = sum(task_s) + sum(map(sum, ways_s))
                return first_s + (settings.microbatches - 1) * slowest_s + max(once_s)
        return math.inf

    def _ends(self, candidate: Candidate) -> tuple[list[int], list[int]]:
        """Returns the stages that work longest, and the stages that work shortest."""
        load_s = stage_loads(self._problem, candidate.assignment, candidate.settings)
        by_load = sorted(range(len(load_s)), key=load_s.__getitem__)
        return by_load[::-1][:MAX_MOVED], by_load[:MAX_MOVED]


def _as_offered(segment: Segment, offers: Offers | None, fills: bool) -> Segment | None:
    """A segment with as many replicas as other settings allow; None if none is like it.

    Args:
      segment: as it is.
      offers: of its pool with the other settings.
      fills: whether its number of stages grows as its meshes get smaller.
    """
    sizes = segment.mesh._replace(data=1)
    like = [
        j
        for j, mesh in enumerate(offers.meshes if offers else ())
        if mesh._replace(data=1) == sizes and mesh.data <= segment.mesh.data
    ]
    if offers is None or not like:
        return None
    j = max(like, key=lambda j: offers.meshes[j].data)
    mesh, count = offers.meshes[j], segment.num_stages
    if fills:
        count = min(
            count * segment.mesh.num_devices // mesh.num_devices, int(offers.most_stages[j])
        )
    return Segment(segment.pool, mesh, count)
