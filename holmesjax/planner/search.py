"""The search for the layout with the shortest predicted step.

`shortlist` names parts that may make a good plan. Each is simulated as it would run, in several
orders of its parts, with layers moved between stages, under every schedule. Then parts near the
best ones are tried. A bound says how much faster a missed plan could be, since no stage can work
less than its layers take. If few cases could still be faster, all of them are tried, and the best
plan is then the best there is.
"""

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from holmesjax.planner import shortlist
from holmesjax.planner.candidates import (
    Around,
    ScheduleKind,
    Work,
    every_depth,
    in_order,
    kinds,
    near_depths,
    orders_of,
    split,
    with_moves,
)
from holmesjax.planner.problem import (
    Case,
    Part,
    Problem,
    Seat,
    TaskOrder,
    roles,
    stage_loads,
    step_seconds,
    transfer_times,
)
from holmesjax.planner.shortlist import Listed, Offers
from holmesjax.planner.stage_layouts import Role, StepSettings

NUM_CANDIDATES = 32  # of the list that are tried
NUM_SIMULATED = 8  # of those and their orders
NUM_REFINED = 2  # of those that are tried with every schedule
NUM_ORDERS = 3  # of the parts of a candidate that are tried
MAX_CASES = 4096  # simulated at a time
MAX_MOVED = 12  # stages that give a layer away, and that take one
NUM_MESHES = 8  # of a pool that are tried in place of the best plan's
MOST_ABOVE = 1.2  # the best estimate: settings with larger bounds are not listed
CASES_PER_TASK = 100  # a task of so many cases is simulated while a simulator is made
QUEUED = 10  # tasks that take as long as one whose result may queue at a pipe
SPLIT_PER_TASK = 10  # layers that are shared out while a task is simulated
MAX_SHARED = 1000  # layers that are shared out at all: of more, several at a time
EFFORT = 2e6  # simulated tasks, or about as much work
UNFOUND = 20  # the part of the effort that is left to try all plans, where none was found
MAX_OFFERED = 3 * 80  # settings that are looked at closely
MAX_DEPTHS = 512  # combinations of numbers in flight that are tried


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One way to train, and how long a step takes."""

    case: Case
    settings: StepSettings
    order: TaskOrder
    step_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The result of a search."""

    best: tuple[Candidate, ...]  # of different parts or settings, the fastest first
    bound_s: float  # no plan that the config allows takes less

    @property
    def gap(self) -> float:
        """The most by which a plan could be faster than the best, as a share of the step."""
        return 1.0 - self.bound_s / self.best[0].step_s


class _Over(Exception):
    """The effort that was allowed is spent."""


class _Search:
    """One search, until it is done or has taken as much effort as it may.

    Effort is counted, not timed: the same input gives the same plan on every machine.
    """

    def __init__(self, problem: Problem, effort: float):
        self._problem = problem
        self._left = self._more = effort
        self._bounds: dict[StepSettings, float] = {}  # no step takes fewer seconds
        self._offers: dict[StepSettings, dict[int, Offers]] = {}
        self._works: dict[
            tuple[Seat, StepSettings, Role, ScheduleKind], dict[int, Work]
        ] = {}  # by layers
        self._rooms: dict[tuple[Seat, StepSettings, TaskOrder, int], int] = {}
        self.found: dict[tuple[frozenset[Part], StepSettings], Candidate] = {}  # the best of each
        self.best_s = math.inf

    def _spend(self, effort: float) -> None:
        """Raises _Over where that was too much; more is allowed until anything is found."""
        self._left -= effort
        if self._left < (0 if self.found else -self._more):
            raise _Over

    def try_cases(
        self, cases: Sequence[Case], settings: StepSettings, order: TaskOrder
    ) -> Candidate | None:
        """Keeps the best of some cases with the same schedule; None if memory holds none."""
        if not cases:
            return None
        num_tasks = 2 * order.num_stages * order.microbatches * order.chunks
        if any(self._problem.queues(case, settings, order.chunks) for case in cases):
            num_tasks *= QUEUED
        self._spend(num_tasks * (1 + len(cases) / CASES_PER_TASK) + len(cases) * order.num_stages)
        seconds = step_seconds(self._problem, cases, settings, order)
        k = int(np.argmin(seconds))
        if math.isinf(seconds[k]):
            return None
        candidate = Candidate(
            case=cases[k], settings=settings, order=order, step_s=float(seconds[k])
        )
        key = frozenset(cases[k].parts), settings
        if key not in self.found or candidate.step_s < self.found[key].step_s:
            self.found[key] = candidate
            self.best_s = min(self.best_s, candidate.step_s)
        return candidate

    def try_parts(
        self, parts: Sequence[Part], settings: StepSettings, is_first: bool = False
    ) -> float:
        """The least seconds of a step of these parts in this order, with layers moved.

        With every schedule, or with the first.
        """
        layers = self._problem.config.parallel.layers
        least_s = math.inf
        plain = self._plain_case(parts, settings)
        for order in self._orders(plain, settings)[: 1 if is_first else None]:
            case = self._case(parts, settings, order)
            if min(case.layers) < order.chunks:
                continue
            best = self.try_cases([case], settings, order)
            while best is not None and not layers:
                busy, free = self._ends(best)
                moves = with_moves(best.case, order.chunks, busy, free)
                better = self.try_cases(moves, settings, order)
                if better is None or better.step_s >= best.step_s:
                    break
                best = better
            if best is not None:
                least_s = min(least_s, best.step_s)
        return least_s

    def _case(self, parts: Sequence[Part], settings: StepSettings, order: TaskOrder) -> Case:
        """A case with the layers of the config, or else with layers split by speed."""
        layers = self._problem.config.parallel.layers
        if layers:
            return Case(tuple(parts), layers)
        return split(self._problem, parts, settings, order)

    def _plain_case(self, parts: Sequence[Part], settings: StepSettings) -> Case:
        """A case split for 1F1B, the schedule with the fewest microbatches in flight."""
        num_stages = sum(part.num_stages for part in parts)
        return self._case(parts, settings, TaskOrder("1f1b", num_stages, settings.microbatches))

    def _fits(self, case: Case, settings: StepSettings) -> bool:
        """Whether memory holds a case with 1F1B, and so with any schedule."""
        order = TaskOrder("1f1b", len(case.layers), settings.microbatches)
        stages = zip(case.seats, roles(order.num_stages), case.layers, strict=True)
        return all(
            self._problem.fits(seat, settings, role, n, self._problem.in_flight(order, stage, n))
            for stage, (seat, role, n) in enumerate(stages)
        )

    def _orders(self, case: Case, settings: StepSettings) -> list[TaskOrder]:
        """The schedules for a case; first eager 1F1B where it may be, which is seldom slow."""
        orders = dict.fromkeys(
            order
            for kind in kinds(self._problem, settings)
            for order in orders_of(self._problem, case, settings, kind)
        )
        return sorted(orders, key=lambda order: order.schedule != "eager_1f1b")

    def estimate_s(self, parts: Sequence[Part], settings: StepSettings) -> float:
        """About the seconds of a step of these parts in this order, without a simulation.

        The slowest stage or link is busy all the time, but for the first microbatch, which goes
        down and back up. Infinite where memory is too small.
        """
        problem, plain = self._problem, self._plain_case(parts, settings)
        effort = len(plain.layers) * min(problem.num_layers, MAX_SHARED) / SPLIT_PER_TASK
        if not self._fits(plain, settings):
            self._spend(effort)
            return math.inf
        for order in self._orders(plain, settings)[:2]:
            self._spend(effort)
            case = self._case(parts, settings, order)
            task_s, once_s = [], []
            for stage, (seat, n, role) in enumerate(
                zip(case.seats, case.layers, roles(order.num_stages), strict=True)
            ):
                in_flight = problem.in_flight(order, stage, n)
                if not problem.fits(seat, settings, role, n, in_flight):
                    break
                times = problem.seconds(seat, settings, role, n, is_split=False)
                task_s.append(times.forward + times.backward)
                once_s.append(times.once)
            else:
                ways_s = transfer_times(problem, case, settings, chunks=1)
                slowest_s = max(*task_s, *itertools.chain(*ways_s), 0.0)
                first_s = sum(task_s) + sum(map(sum, ways_s))
                return first_s + (settings.microbatches - 1) * slowest_s + max(once_s)
        return math.inf

    def _ends(self, candidate: Candidate) -> tuple[list[int], list[int]]:
        """The stages that work longest, and those that work shortest."""
        load_s = stage_loads(self._problem, candidate.case, candidate.settings)
        by_load = sorted(range(len(load_s)), key=load_s.__getitem__)
        return by_load[::-1][:MAX_MOVED], by_load[:MAX_MOVED]

    def run(self) -> float:
        """Seconds that no plan can take less than."""
        problem = self._problem
        self._bounds = {
            settings: shortlist.rough_bound_s(problem, settings)
            for settings in shortlist.step_settings(problem.config)
        }
        try:
            self._try_candidates(self._candidates())
            self._improve()
            if not self.found:  # that nothing fits is seldom proven, and then soon
                self._left = min(self._left, self._more / UNFOUND)
                self._more = 0.0
            # Plans with 1F1B are tried soon, and make the limits of all others tighter.
            if all(
                self._bounds[settings] >= self.best_s or self._exhaust(settings, is_first)
                for is_first in (True, False)
                for settings in self._in_turn()
            ):
                return self.best_s
        except _Over:
            pass
        return min(self._bounds.values(), default=math.inf)

    def _in_turn(self) -> list[StepSettings]:
        """The settings of a step, those first that may be fastest."""
        return sorted(self._bounds, key=lambda settings: self._bounds[settings])

    def _offers_of(self, settings: StepSettings) -> dict[int, Offers]:
        """Offers of the pools for some settings; they also give a better bound on a step."""
        if settings not in self._offers:
            if len(self._offers) == MAX_OFFERED:
                raise _Over
            self._offers[settings] = offers = shortlist.make_offers(self._problem, settings)
            self._bounds[settings] = shortlist.bound_s(self._problem, settings, offers)
        return self._offers[settings]

    def _candidates(self) -> list[Listed]:
        """Lists of parts for all settings that may be good, the best estimates first."""
        found: dict[tuple[frozenset[Part], StepSettings], Listed] = {}
        least_s = math.inf
        for settings in shortlist.thinned(self._in_turn()):
            if self._bounds[settings] > MOST_ABOVE * least_s:
                break
            offers = self._offers_of(settings)
            for item in shortlist.listed(self._problem, settings, offers, MOST_ABOVE * least_s):
                key = frozenset(item.parts), settings
                if key not in found or item.estimate_s < found[key].estimate_s:
                    found[key] = item
                    least_s = min(least_s, item.estimate_s)
        return sorted(found.values(), key=lambda item: item.estimate_s)

    def _try_candidates(self, items: Sequence[Listed]) -> None:
        """The best by estimate in a few orders; of those the best by simulation, and so on.

        Where none of the first fits memory, the next are tried.
        """
        for start in range(0, len(items), NUM_CANDIDATES):
            self._try_best(
                (parts, item.settings)
                for item in items[start : start + NUM_CANDIDATES]
                for parts in in_order(self._problem, item)[:NUM_ORDERS]
            )
            if self.found:
                return

    def _try_best(self, ways: Iterable[tuple[tuple[Part, ...], StepSettings]]) -> None:
        """Tries the parts with the best estimates under one schedule, then the best under all."""
        estimates = sorted((self.estimate_s(*way), way) for way in ways)
        possible = [way for estimate_s, way in estimates if estimate_s < MOST_ABOVE * self.best_s]
        tried = sorted(
            (self.try_parts(*way, is_first=True), way) for way in possible[:NUM_SIMULATED]
        )
        for _, way in tried[:NUM_REFINED]:
            self.try_parts(*way)

    def _improve(self) -> None:
        """Changes one part of the best plan at a time for as long as that helps."""
        tried: set[tuple[Part, ...]] = set()
        while self.found:
            best = min(self.found.values(), key=lambda candidate: candidate.step_s)
            allowed = shortlist.numbers_of_stages(self._problem.config, best.settings)
            near = []
            for parts in dict.fromkeys(self._near(best)):
                num_stages = sum(part.num_stages for part in parts)
                if allowed is not None and num_stages not in allowed:
                    continue
                if not self._problem.is_asked_for(parts):
                    continue
                if 1 <= num_stages <= self._problem.num_layers and parts not in tried:
                    tried.add(parts)
                    near.append((parts, best.settings))
            self._try_best(near)
            if best.order.schedule == "eager_1f1b":
                for order in near_depths(best.order):
                    self.try_cases([best.case], best.settings, order)
            if self.best_s >= best.step_s:
                return

    def _near(self, candidate: Candidate) -> Iterator[tuple[Part, ...]]:
        """Parts with one of them changed: its mesh or stages, its place, or left out."""
        parts = candidate.case.parts
        for i, part in enumerate(parts):
            offers = self._offers_of(candidate.settings)[part.pool]
            effort = offers.layer_load_s * [mesh.num_devices for mesh in offers.meshes]
            for j in np.argsort(effort, kind="stable")[:NUM_MESHES]:
                for count in (part.num_stages - 1, part.num_stages, part.num_stages + 1):
                    if 1 <= count <= offers.most_stages[j]:
                        other = Part(part.pool, offers.meshes[j], count)
                        yield (*parts[:i], other, *parts[i + 1 :])
            rest = (*parts[:i], *parts[i + 1 :])
            yield rest
            yield from ((*rest[:to], part, *rest[to:]) for to in range(len(parts)))

    def _exhaust(self, settings: StepSettings, is_first: bool) -> bool:
        """Tries all cases of some settings that could be faster than the best, in two turns.

        First those with 1F1B and its like, then those with the other schedules. Returns whether
        that was all that had to be tried.
        """
        is_all = True
        for kind in kinds(self._problem, settings):
            if (kind.name == "whole") != is_first:
                continue
            waiting: dict[int, list[Case]] = {}
            for case in self._possible(settings, kind):
                group = waiting.setdefault(len(case.layers), [])
                group.append(case)
                if len(group) == MAX_CASES:
                    is_all &= self._try_all(group, settings, kind)
                    group.clear()
            for group in waiting.values():
                if group:
                    is_all &= self._try_all(group, settings, kind)
        return is_all

    def _try_all(self, cases: Sequence[Case], settings: StepSettings, kind: ScheduleKind) -> bool:
        """Every schedule of a kind; whether also every number in flight."""
        p, m = len(cases[0].layers), settings.microbatches
        orders = {
            order for case in cases for order in orders_of(self._problem, case, settings, kind)
        }
        is_all = True
        if any(order.schedule == "eager_1f1b" for order in orders):
            depths = list(itertools.islice(every_depth(p, m), MAX_DEPTHS + 1))
            is_all = len(depths) <= MAX_DEPTHS
            if is_all:
                orders.update(TaskOrder("eager_1f1b", p, m, in_flight=depth) for depth in depths)
        for order in sorted(orders):
            self.try_cases([c for c in cases if min(c.layers) >= order.chunks], settings, order)
        return is_all

    def _possible(self, settings: StepSettings, kind: ScheduleKind) -> Iterator[Case]:
        """Cases whose stages could all be done before the best step so far is over."""
        offers = [offer.alone for offer in self._offers_of(settings).values()]
        for offer in offers:
            yield from self._sequences([offer], settings, kind, crosses=False)
        yield from self._sequences(offers, settings, kind, crosses=True)

    def _sequences(
        self, offers: Sequence[Offers], settings: StepSettings, kind: ScheduleKind, crosses: bool
    ) -> Iterator[Case]:
        """Cases of a kind of schedule, on one pool or on several."""
        numbers = shortlist.numbers_of_stages(self._problem.config, settings)
        num_layers = self._problem.num_layers
        most_stages = num_layers if numbers is None else max(numbers, default=0)
        limit_s = self.best_s / settings.microbatches
        most = {offer.pool: offer.most(limit_s, 1, crosses) for offer in offers}
        best_of = {o.pool: float((o.most_stages * most[o.pool]).max()) for o in offers}

        def longer(
            parts: tuple[Part, ...], unused: Sequence[Offers], holds: float, num_stages: int
        ) -> Iterator[tuple[Part, ...]]:
            self._spend(1)
            if (
                len(parts) > crosses
                and holds >= num_layers
                and (numbers is None or num_stages in numbers)
                and self._problem.is_asked_for(parts)
            ):
                yield parts
            if holds + sum(best_of[offer.pool] for offer in unused) < num_layers:
                return
            for offer in unused:
                rest = [other for other in unused if other is not offer]
                for j in np.flatnonzero(most[offer.pool] >= 1):
                    room = min(int(offer.most_stages[j]), most_stages - num_stages)
                    for count in range(1, room + 1):
                        part = Part(offer.pool, offer.meshes[j], count)
                        more = holds + count * float(most[offer.pool][j])
                        yield from longer((*parts, part), rest, more, num_stages + count)

        for parts in longer((), offers, 0.0, 0):
            yield from self._splits(parts, settings, kind)

    def _splits(
        self, parts: tuple[Part, ...], settings: StepSettings, kind: ScheduleKind
    ) -> Iterator[Case]:
        """All ways to share out the layers, where no stage works longer than the best step."""
        problem, m, least = self._problem, settings.microbatches, kind.chunks
        seats, fixed = Case(parts, ()).seats, problem.config.parallel.layers
        if not kind.suits(len(seats), m):
            return
        if fixed:
            yield Case(parts, fixed)
            return
        own_roles, last = roles(len(seats)), len(seats) - 1
        order = kind.leanest(len(seats), m)
        room = [
            self._room(order, settings, role, stage, problem.like(seat))
            for stage, (seat, role) in enumerate(zip(seats, own_roles, strict=True))
        ]
        if sum(room) < problem.num_layers:
            return
        behind = [sum(room[stage + 1 :]) for stage in range(len(seats))]
        works = [
            self._works.setdefault((problem.like(seat), settings, role, kind), {})
            for seat, role in zip(seats, own_roles, strict=True)
        ]
        ways_s = [*transfer_times(problem, Case(parts, ()), settings, chunks=1), [0.0, 0.0]]

        def shares(stage: int, left: int, around: Around) -> Iterator[tuple[int, ...]]:
            if stage > last:
                yield ()
                return
            most, known = min(left - least * (last - stage), room[stage]), works[stage]
            for n in range(max(left - behind[stage], least), most + 1):
                self._spend(1)
                if n not in known:
                    known[n] = kind.work(problem, seats[stage], settings, own_roles[stage], n)
                work = known[n]
                if around.before + m * work.microbatch >= self.best_s:
                    return
                least_s, left_to_next = kind.with_stage(work, m, around, ways_s[stage])
                if least_s < self.best_s:
                    for rest in shares(stage + 1, left - n, left_to_next):
                        yield (n, *rest)

        for layers in shares(0, problem.num_layers, Around()):
            yield Case(parts, layers)

    def _room(
        self, order: TaskOrder, settings: StepSettings, role: Role, stage: int, seat: Seat
    ) -> int:
        """Layers that the memory of a stage has room for, at most."""
        problem, key = self._problem, (seat, settings, order, stage)
        if key not in self._rooms:
            # Uneven chunks have no less in flight than the layers that all of them have.
            v = order.chunks
            in_flight = problem.in_flight(order, stage, v)
            full = lambda n: not problem.fits(seat, settings, role, v * n, in_flight)
            most = bisect.bisect_left(range(1, problem.num_layers // v + 1), True, key=full)
            self._rooms[key] = v * most + v - 1
        return self._rooms[key]


def search(problem: Problem, effort: float = EFFORT) -> Found | None:
    """The fastest plans; None where memory holds none, or where no mesh is possible."""
    run = _Search(problem, effort)
    bound_s = run.run()
    if not run.found:
        return None
    best = sorted(run.found.values(), key=lambda candidate: candidate.step_s)
    return Found(best=tuple(best), bound_s=min(bound_s, best[0].step_s))
