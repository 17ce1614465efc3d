"""The search for the layout with the shortest predicted step, in two halves.

`heuristic` finds good plans soon. `exhaustive` then tries everything that could still be faster. If
that takes more effort than is allowed, a bound says how much faster a missed plan could be. In all
of these plans every layer has the same activation checkpointing. `recomputation` then lets fewer
layers of the best of them compute again.
"""

import math
from dataclasses import dataclass, replace

from holmesjax.planner.exhaustive import ExhaustiveSearch
from holmesjax.planner.heuristic import HeuristicSearch
from holmesjax.planner.problem import Problem
from holmesjax.planner.recomputation import refined
from holmesjax.planner.trials import Candidate, EffortSpent, Trials

EFFORT = 2e6  # simulated tasks, or about as much work


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """The result of a search."""

    best: tuple[Candidate, ...]  # of different segments or settings, the fastest first
    # No plan that the config allows takes less, of those in which all layers of a stage compute
    # again, or none.
    bound_s: float

    @property
    def gap(self) -> float:
        """The most by which a plan could be faster than the best, as a share of the step."""
        return 1.0 - self.bound_s / self.best[0].step_s


def search(problem: Problem, effort: float = EFFORT) -> SearchResult | None:
    """The fastest plans; None where memory holds none, or where no mesh is possible.

    Plans that cut no sequences between products are searched by themselves, too, where the run
    leaves that open: no plan is then slower than one of them.
    """
    found = _search(problem, effort)
    if problem.config.kernels.sequence_parallel != "auto":
        return found
    kernels = replace(problem.config.kernels, sequence_parallel="off")
    whole = _search(replace(problem, config=replace(problem.config, kernels=kernels)), effort)
    if found is None or whole is None:
        return found or whole
    best = sorted([*whole.best, *found.best], key=lambda candidate: candidate.step_s)
    return SearchResult(best=tuple(best), bound_s=min(found.bound_s, best[0].step_s))


def _search(problem: Problem, effort: float) -> SearchResult | None:
    trials = Trials(problem, effort)
    bound_s = _try_all(trials)
    if not trials.found:
        return None
    if not (best := refined(problem, trials.found.values())):
        return None
    return SearchResult(best=tuple(best), bound_s=min(bound_s, best[0].step_s))


def _try_all(trials: Trials) -> float:
    """Seconds that no plan can take less than, once the effort is spent or nothing is left."""
    try:
        HeuristicSearch(trials).run()
        trials.give_up_soon()
        if ExhaustiveSearch(trials).run():
            return trials.best_s
    except EffortSpent:
        pass
    return min(trials.bounds.values(), default=math.inf)
