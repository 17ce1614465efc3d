"""The searches of a run: on all its machines, or on the machines that are worth their price."""

import dataclasses
from collections.abc import Callable, Sequence

from holmesjax.config import Config
from holmesjax.errors import PlanError
from holmesjax.plan.device_pool import USABLE_MEMORY
from holmesjax.planner import prices
from holmesjax.planner.problem import Problem
from holmesjax.planner.search import EFFORT, SearchResult, search
from holmesjax.planner.stage_costs import StageCosts
from holmesjax.planner.stage_layouts import has_unlike_devices, make_pools, tensor_sizes
from holmesjax.planner.trials import Candidate
from holmesjax.topology.machines import Topology

Saying = Callable[[str], None]  # what is worked on now


def silently(what: str) -> None:
    """Reports no progress."""


def make_problem(
    config: Config,
    topology: Topology,
    by_kind: bool = False,
    usable_memory: float = USABLE_MEMORY,
) -> Problem:
    """The problem of a config on a topology, with the pools of `make_pools`."""
    return Problem(
        config=config,
        topology=topology,
        pools=make_pools(topology, by_kind),
        stage_costs=StageCosts(config),
        usable_memory=usable_memory,
    )


def make_problems(
    config: Config, topology: Topology, usable_memory: float = USABLE_MEMORY
) -> list[Problem]:
    """Makes a problem with a pool for each cluster; for unlike devices also one by their kind."""
    kinds = (False, True) if has_unlike_devices(topology) else (False,)
    return [make_problem(config, topology, by_kind, usable_memory) for by_kind in kinds]


def with_wide_tensor(problems: Sequence[Problem]) -> list[Problem]:
    """The same problems, with stages whose `tensor` may leave nodes; none if that adds no mesh."""
    if problems[0].config.parallel.tensor is not None:
        return []
    wide = [
        problem.on(
            problem.topology,
            [dataclasses.replace(pool, has_wide_tensor=True) for pool in problem.pools],
        )
        for problem in problems
    ]
    adds = any(
        tensor_sizes(problem.config, pool.most_tensor)
        != tensor_sizes(problem.config, pool.most_in_a_node)
        for problem in wide
        for pool in problem.pools
    )
    return wide if adds else []


def find_within(
    problems: Sequence[Problem], effort: float = EFFORT, say: Saying = silently
) -> tuple[Problem, SearchResult] | None:
    """The best plans of some problems; None where no plan was found that fits the memory.

    Raises PlanError where none is within the budget.
    """
    config = problems[0].config
    is_priced = not config.plan.is_by_time
    results = []
    for whole, by_kind in zip(problems, (False, True), strict=False):
        for pools in prices.selections(whole.pools) if is_priced else [whole.pools]:
            problem = whole.on(whole.topology, pools) if is_priced else whole
            used = ", ".join(dict.fromkeys(pool.cluster.name for pool in pools))
            say(f"plans on {used}" + " with stages of one kind of device" * by_kind)
            if (found := search(problem, effort)) is not None:
                results.append((problem, found))
    if not results:
        return None
    bound_s = min(searched.bound_s for _, searched in results)
    if is_priced:
        problem, best = _best_for_its_price(config, results)
        return problem, SearchResult(best=best, bound_s=bound_s)
    problem, found = min(results, key=lambda result: result[1].best[0].step_s)
    return problem, dataclasses.replace(found, bound_s=bound_s)


def _best_for_its_price(
    config: Config, results: Sequence[tuple[Problem, SearchResult]]
) -> tuple[Problem, tuple[Candidate, ...]]:
    """The best candidate within the budget, then the others on the same machines."""
    priced = [
        (problem, candidate, sum(prices.step_dollars(problem, candidate).values()))
        for problem, result in results
        for candidate in result.best
    ]
    steps, budget = config.train.steps, config.plan.budget_dollars
    within = [item for item in priced if budget is None or item[2] * steps <= budget]
    if not within:
        least = min(dollars for _, _, dollars in priced) * steps
        raise PlanError(
            "plan.budget_dollars",
            f"the cheapest plan that was found takes {least:.2f} dollars for {steps} steps",
            found=f"{budget:g}",
            fix="raise the budget, train for fewer steps, or give cheaper machines",
        )
    is_cheapest = config.plan.objective == "tokens_per_dollar"
    rank = lambda item: (item[2], item[1].step_s) if is_cheapest else (item[1].step_s, item[2])
    in_order = sorted(within, key=rank)
    problem = in_order[0][0]
    return problem, tuple(
        candidate for problem_of_plan, candidate, _ in in_order if problem_of_plan is problem
    )
