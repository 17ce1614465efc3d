"""The first layers of each stage that compute again, where a plan need not compute all again.

A search looks at plans in which all layers have the same activation checkpointing. Of the best of
them this module makes plans that compute fewer layers again: in each stage the fewest with which
memory holds it. Memory falls with the number of such layers, and the seconds of the stage rise, so
no other number would be better for the same layout. (A later kind of layer may need more room for
what it computes again; then the number may not be the smallest, but the stage fits.) The layers of
stages then move, since a stage with more memory may now be the faster one.
"""

import bisect
import dataclasses
import math
import operator
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from holmesjax.planner import shortlist
from holmesjax.planner.assignment import Assignment, Segment
from holmesjax.planner.candidates import near_depths, orders_of, schedule_kinds, with_moves
from holmesjax.planner.layer_ranges import Span, sum_counts
from holmesjax.planner.layer_split import split
from holmesjax.planner.problem import PricedStage, Problem
from holmesjax.planner.stage_layouts import InFlight, StepSettings
from holmesjax.planner.step_time import stage_loads, step_seconds
from holmesjax.planner.trials import ASSIGNMENTS_PER_TASK, Candidate
from holmesjax.schedules.pipeline_schedules import TaskOrder

NUM_REFINED = 32  # of the best plans that compute layers again
NUM_CHANGED = 4  # of those that are changed in other things too
MAX_MOVED = 4  # stages that give a layer away, and that take one
EFFORT = 1e5  # simulated tasks for the changes of one plan


def refined(problem: Problem, found: Iterable[Candidate]) -> list[Candidate]:
    """Plans with only as many layers that compute again as memory asks for; the fastest first.

    One is kept of the same segments and settings, as found or as made of it. Where the config says
    how many layers of each stage compute again, they are those, and plans that do not fit in memory
    then are left out.
    """
    by_time = lambda candidate: candidate.step_s
    in_order, parallel = sorted(found, key=by_time), problem.config.parallel
    if parallel.recomputed_layers is None and parallel.activation_checkpointing is not None:
        return in_order
    if parallel.recomputed_layers is not None:
        again, as_found = in_order, []
    else:
        again = [candidate for candidate in in_order if candidate.settings.checkpointing != "none"][
            :NUM_REFINED
        ]
        as_found = in_order  # so that no plan gets slower
    fewer = sorted(
        (
            with_fewest(problem, candidate, _splits(problem, candidate, candidate.order))
            for candidate in again
        ),
        key=by_time,
    )
    is_any = any(math.isfinite(candidate.step_s) for candidate in fewer)
    most = NUM_CHANGED if is_any else min(len(fewer), NUM_REFINED)
    fewer[:most] = [_changed(problem, candidate) for candidate in fewer[:most]]
    fits = [
        _in_plain_words(problem, candidate)
        for candidate in fewer
        if math.isfinite(candidate.step_s)
    ]
    best: dict[tuple[frozenset[Segment], StepSettings], Candidate] = {}
    for candidate in sorted([*fits, *as_found], key=by_time):
        best.setdefault((frozenset(candidate.assignment.segments), candidate.settings), candidate)
    return list(best.values())


def with_fewest(
    problem: Problem, candidate: Candidate, assignments: Sequence[Assignment]
) -> Candidate:
    """The fastest of some assignments, with the layers that compute again as `refined` has them.

    Args:
      problem: source of the seconds and bytes.
      candidate: the settings and the schedule of all.
      assignments: the devices and the layers of the stages, at least one.

    It takes infinite time where none fits.
    """
    settings, order = candidate.settings, candidate.order
    numbers = problem.config.parallel.recomputed_layers
    if settings.checkpointing == "none":
        tried = list(assignments)
    elif numbers is None:
        tried = [_with_fewest(problem, each, settings, order) for each in assignments]
    else:
        tried = [each._replace(recomputed=numbers) for each in assignments]
    seconds = step_seconds(problem, tried, settings, order)
    exceed = [any(map(operator.gt, each.recomputed, each.layers)) for each in tried]
    seconds[exceed] = math.inf
    k = int(np.argmin(seconds))
    return dataclasses.replace(candidate, assignment=tried[k], step_s=float(seconds[k]))


def _splits(problem: Problem, candidate: Candidate, order: TaskOrder) -> list[Assignment]:
    """The layers as a candidate has them; and as they are split for numbers that the config sets.

    A search splits them as if all of them computed again.
    """
    assignment, parallel = candidate.assignment._replace(recomputed=()), problem.config.parallel
    if parallel.recomputed_layers is None or parallel.layers is not None:
        return [assignment]
    return [assignment, split(problem, assignment.segments, candidate.settings, order)]


def _changed(problem: Problem, candidate: Candidate) -> Candidate:
    """A candidate with other schedules, checkpointing and layers of stages, while these help.

    A pipeline that suits stages whose layers all compute again may be too deep, or too uneven, for
    stages in which fewer do.
    """
    best, left = candidate, EFFORT
    while True:
        start_s = best.step_s
        for near in (_with_other_settings, _with_other_depths, _with_moves):
            for changed, assignments in near(problem, best):
                left -= changed.order.num_tasks * (1 + len(assignments) / ASSIGNMENTS_PER_TASK)
                if left < 0:
                    return best
                other = with_fewest(problem, changed, assignments)
                best = other if other.step_s < best.step_s else best
        if best.step_s >= start_s:
            return best


Way = tuple[Candidate, list[Assignment]]  # settings and a schedule, and what to try with them


def _with_other_settings(problem: Problem, candidate: Candidate) -> Iterator[Way]:
    """The other ways to compute again, and schedules."""
    for settings in shortlist.step_settings(problem.config):
        if settings.microbatches != candidate.settings.microbatches:
            continue
        if settings.checkpointing == "none" != candidate.settings.checkpointing:
            continue
        for kind in schedule_kinds(problem, settings):
            for order in orders_of(problem, candidate.assignment, settings, kind):
                changed = dataclasses.replace(candidate, settings=settings, order=order)
                splits = _splits(problem, changed, order)
                if tried := [each for each in splits if min(each.layers) >= order.chunks]:
                    yield changed, tried


def _with_other_depths(_: Problem, candidate: Candidate) -> Iterator[Way]:
    """One microbatch more or fewer in flight, where the schedule chooses."""
    if candidate.order.chooses_in_flight:
        for order in near_depths(candidate.order):
            yield dataclasses.replace(candidate, order=order), [candidate.assignment]


def _with_moves(problem: Problem, candidate: Candidate) -> Iterator[Way]:
    """A layer moved from a stage that works long to one that works shorter."""
    if problem.config.parallel.layers is not None:
        return
    load_s = stage_loads(problem, candidate.assignment, candidate.settings)
    by_load = sorted(range(len(load_s)), key=load_s.__getitem__)
    busy, free = by_load[::-1][:MAX_MOVED], by_load[:MAX_MOVED]
    if moves := with_moves(candidate.assignment, candidate.order.chunks, busy, free):
        yield candidate, moves


def _in_plain_words(problem: Problem, candidate: Candidate) -> Candidate:
    """The same plan, where all layers compute again, or none, as a search finds such plans."""
    assignment, settings = candidate.assignment, candidate.settings
    plain = assignment._replace(recomputed=())
    if assignment.recomputed == assignment.layers:
        return dataclasses.replace(candidate, assignment=plain)
    if any(assignment.recomputed) or problem.config.parallel.recomputed_layers is not None:
        return candidate
    none = dataclasses.replace(candidate, settings=settings._replace(checkpointing="none"))
    return with_fewest(problem, none, [plain])


def _with_fewest(
    problem: Problem, assignment: Assignment, settings: StepSettings, order: TaskOrder
) -> Assignment:
    """An assignment in which as few of the first layers of each stage compute again as can be.

    A stage that does not fit even so computes all of its layers again.
    """
    stages = problem.stages(assignment.slots, settings)
    spans = problem.ranges.spans(assignment.layers, order.chunks)
    numbers = [
        _fewest(problem, stage, span, problem.in_flight(order, place, sum(n for _, n in span)))
        for place, (stage, span) in enumerate(zip(stages, spans, strict=True))
    ]
    return assignment._replace(recomputed=tuple(numbers))


def _fewest(
    problem: Problem, stage: PricedStage, spans: Sequence[Span], in_flight: InFlight
) -> int:
    most = sum(number for _, number in spans)
    blocks = sum_counts(problem.ranges.first(spans, most))
    again = lambda number: sum_counts(problem.ranges.first(spans, number))
    holds = lambda number: problem.holds(stage, blocks, in_flight, again(number))
    # A layer that computes again needs room for what it computes: the first may take more than it
    # spares.
    return 0 if holds(0) else bisect.bisect_left(range(most), True, lo=1, key=holds)
