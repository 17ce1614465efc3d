"""Plans that a search has tried, the best of them, and the effort that it may still take."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from holmesjax.planner import shortlist
from holmesjax.planner.assignment import Assignment, Segment
from holmesjax.planner.offers import Offers, make_offers
from holmesjax.planner.problem import Problem
from holmesjax.planner.stage_layouts import StepSettings
from holmesjax.planner.step_time import step_seconds
from holmesjax.schedules.pipeline_schedules import TaskOrder

ASSIGNMENTS_PER_TASK = 100  # a task of so many assignments is simulated while a simulator is made
QUEUED = 10  # tasks that take as long as one whose result may queue at a pipe
UNFOUND = 20  # the part of the effort that is left to try all plans, where none was found
MAX_OFFERED = 3 * 80  # settings that are looked at closely


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One way to train, and how long a step takes."""

    assignment: Assignment
    settings: StepSettings
    order: TaskOrder
    step_s: float


class EffortSpent(Exception):
    """The effort that was allowed is spent."""


class Trials:
    """The best plans so far. Both halves of a search add to them.

    Effort is counted, not timed: the same input gives the same plan on every machine.
    """

    def __init__(self, problem: Problem, effort: float):
        self.problem = problem
        self.found: dict[tuple[frozenset[Segment], StepSettings], Candidate] = {}  # each one's best
        self.best_s = math.inf
        self.bounds = {  # no step takes fewer seconds
            settings: shortlist.rough_bound_s(problem, settings)
            for settings in shortlist.step_settings(problem.config)
        }
        self._left = self._more = effort
        self._offers: dict[StepSettings, dict[int, Offers]] = {}

    def spend(self, effort: float) -> None:
        """Raises EffortSpent where it was too much; more is allowed until anything is found."""
        self._left -= effort
        if self._left < (0 if self.found else -self._more):
            raise EffortSpent

    def give_up_soon(self) -> None:
        """Leaves little effort if nothing was found: that nothing fits is seldom proven."""
        if not self.found:
            self._left = min(self._left, self._more / UNFOUND)
            self._more = 0.0

    def in_turn(self) -> list[StepSettings]:
        """Returns the settings of a step, the most promising first."""
        return sorted(self.bounds, key=lambda settings: self.bounds[settings])

    def offers_of(self, settings: StepSettings) -> dict[int, Offers]:
        """Offers of the pools for some settings; they also give a better bound on a step."""
        if settings not in self._offers:
            if len(self._offers) == MAX_OFFERED:
                raise EffortSpent
            self._offers[settings] = offers = make_offers(self.problem, settings)
            self.bounds[settings] = shortlist.bound_s(self.problem, settings, offers)
        return self._offers[settings]

    def try_assignments(
        self, assignments: Sequence[Assignment], settings: StepSettings, order: TaskOrder
    ) -> Candidate | None:
        """Keeps the best of some assignments with the same schedule; None if memory holds none."""
        if not assignments:
            return None
        num_tasks = order.num_tasks
        if any(
            self.problem.queues(assignment, settings, order.chunks) for assignment in assignments
        ):
            num_tasks *= QUEUED
        self.spend(
            num_tasks * (1 + len(assignments) / ASSIGNMENTS_PER_TASK)
            + len(assignments) * order.num_stages
        )
        seconds = step_seconds(self.problem, assignments, settings, order)
        k = int(np.argmin(seconds))
        if math.isinf(seconds[k]):
            return None
        candidate = Candidate(
            assignment=assignments[k], settings=settings, order=order, step_s=float(seconds[k])
        )
        key = frozenset(assignments[k].segments), settings
        if key not in self.found or candidate.step_s < self.found[key].step_s:
            self.found[key] = candidate
            self.best_s = min(self.best_s, candidate.step_s)
        return candidate
