"""Topology + config -> plan: which devices hold which layers, and how long a step takes.

`search` finds the layout, and `assembly` makes a plan of it. `refusals` and `memory_refusal` say
why there is no plan. The words of this package:

    pool        devices of one cluster that stages may be cut from: all of them, or those of a kind
    segment     consecutive stages on one pool, with equal meshes
    slot        the place of one stage in a segment
    assignment  the segments in the order of the pipeline, and the layers of each stage
    offer       what a stage of a pool costs with some settings, for each mesh that it may have
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from holmesjax.config import Config
from holmesjax.errors import PlanError
from holmesjax.plan import pins
from holmesjax.plan.device_pool import USABLE_MEMORY
from holmesjax.plan.plan import Plan
from holmesjax.plan.ways import ChosenWay
from holmesjax.planner import across
from holmesjax.planner.assembly import as_plan
from holmesjax.planner.islands import plan_islands
from holmesjax.planner.memory_refusal import (
    fits_after_all,
    least_memory,
    memory_refusal,
    nearest,
    with_remedy,
)
from holmesjax.planner.problem import Problem
from holmesjax.planner.refusals import refuse_impossible, refuse_large_meshes
from holmesjax.planner.search import SearchResult, search
from holmesjax.planner.selection import (
    Saying,
    find_within,
    make_problems,
    silently,
    with_wide_tensor,
)
from holmesjax.planner.stage_costs import StageCosts
from holmesjax.planner.stage_layouts import joined_pool
from holmesjax.planner.step_time import step_seconds
from holmesjax.planner.trials import Candidate
from holmesjax.topology.machines import Topology


def make_plan(
    config: Config,
    topology: Topology,
    say: Saying = silently,
    usable_memory: float = USABLE_MEMORY,
    *,
    remedies: bool = True,
) -> Plan:
    """The fastest plan by prediction.

    Args:
      say: is called with what is being tried, several times.
      usable_memory: the share of each device's memory that a stage may fill (`DevicePool`).
      remedies: whether a refusal looks for the mildest change with which a plan fits.

    Raises:
      PlanError: no plan satisfies the config on these machines; says what to change.
    """
    return make_plans(config, topology, say, usable_memory, remedies=remedies)[0]


def make_plans(
    config: Config,
    topology: Topology,
    say: Saying = silently,
    usable_memory: float = USABLE_MEMORY,
    *,
    compares: bool = False,
    remedies: bool = True,
) -> tuple[Plan, Plan | None]:
    """The plan of `make_plan`, and the best one without the settings that the config pins.

    Args:
      config, topology, say, usable_memory, remedies: those of `make_plan`.
      compares: whether the second is asked for.

    Returns the two plans; the second is None if it is not asked for, if no setting is pinned, or if
    the search without pins finds none.
    """
    if config.parallel.across == "auto":
        return choose(config, topology, say, usable_memory).plan, None
    if config.parallel.has_islands:
        plan_one = functools.partial(make_plan, say=say, usable_memory=usable_memory)
        return plan_islands(config, topology, plan_one, usable_memory), None
    with_pins, without = _find_both(config, topology, say, usable_memory, compares, remedies)
    plan = lambda problem, found: as_plan(problem, found.best[0], found.bound_s, found.best)
    return plan(*with_pins), None if without is None else plan(*without)


def choose(
    config: Config,
    topology: Topology,
    say: Saying = silently,
    usable_memory: float = USABLE_MEMORY,
) -> ChosenWay:
    """The planner's choice where `parallel.across` is auto. Raises PlanError as `make_plan`."""
    make = functools.partial(make_plan, say=say, usable_memory=usable_memory)
    plan_one = functools.partial(make, remedies=False)
    return across.choose(config, topology, plan_one, usable_memory, say, make)


def make_changed_plan(
    config: Config,
    topology: Topology,
    changed: Topology,
    say: Saying = silently,
    usable_memory: float = USABLE_MEMORY,
) -> Plan:
    """The plan on changed machines: no slower there than the plans of the machines as they are.

    Args:
      config: of the run.
      topology: the machines as they are.
      changed: the machines as they would be.
      say: takes lines about the search.
      usable_memory: the share of a device's memory that a plan may fill.

    Raises PlanError as `make_plan`.
    """
    if config.parallel.across != "pipeline":
        return make_plan(config, changed, say, usable_memory)
    now, best = find(config, topology, say, usable_memory)
    then, found = find(config, changed, say, usable_memory)
    again = timed_again(now, best, changed) if config.plan.is_by_time else None
    if again is None or again[1].step_s >= found.best[0].step_s:
        return as_plan(then, found.best[0], found.bound_s, found.best)
    return as_plan(*again, min(found.bound_s, again[1].step_s))


def timed_again(
    problem: Problem, found: SearchResult, changed: Topology
) -> tuple[Problem, Candidate] | None:
    """The fastest of some plans on changed machines that still have their nodes and devices.

    None where they have not, or where no plan fits them.
    """
    kept = {node.name: node.num_devices for node in changed.nodes}
    nodes = (node for pool in problem.pools for node in pool.devices)
    if any(kept.get(name) != problem.topology.node(name).num_devices for name in nodes):
        return None
    again = problem.on(changed)
    timed = []
    for candidate in found.best:
        assignment, settings, order = candidate.assignment, candidate.settings, candidate.order
        [step_s] = step_seconds(again, [assignment], settings, order)
        timed.append(dataclasses.replace(candidate, step_s=float(step_s)))
    best = min(timed, key=lambda candidate: candidate.step_s)
    return (again, best) if math.isfinite(best.step_s) else None


def find(
    config: Config,
    topology: Topology,
    say: Saying = silently,
    usable_memory: float = USABLE_MEMORY,
) -> tuple[Problem, SearchResult]:
    """The best plans there are, with what they were found in. Raises PlanError as `make_plan`."""
    return _find_both(config, topology, say, usable_memory, compares=False)[0]


def _find_both(
    config: Config,
    topology: Topology,
    say: Saying,
    usable_memory: float,
    compares: bool,
    remedies: bool = True,
) -> tuple[tuple[Problem, SearchResult], tuple[Problem, SearchResult] | None]:
    """The best plans with what the config pins, and those without; None: not asked for, or none.

    A search is no proof, unless its effort was enough. What the search without pins finds may have
    them all, and be faster than what the search with the pins found. Then that is taken, so that a
    plan that is pinned to what it is costs the same.
    """
    pinned, by_time = pins.pins(config.parallel), config.plan.is_by_time

    @functools.cache
    def free() -> tuple[Problem, SearchResult] | None:
        if not pinned:
            return None
        without = lambda what: say(f"{what}, without the settings of parallel")
        try:
            unset = dataclasses.replace(config, parallel=pins.without_pins(config.parallel))
            return _find(unset, topology, without, usable_memory)
        except PlanError:
            return None

    def kept(most_s: float = math.inf) -> tuple[Problem, SearchResult] | None:
        """Those of the plans without pins that have them all, and take less time."""
        if not by_time or (result := free()) is None:
            return None
        problem, found = result
        best = tuple(
            candidate
            for candidate in found.best
            if candidate.step_s < most_s
            and pins.keeps(as_plan(problem, candidate, found.bound_s), pinned)
        )
        return (problem.set_to(config.parallel), replace(found, best=best)) if best else None

    own = _find(config, topology, say, usable_memory, otherwise=kept, remedies=remedies)
    best_s = own[1].best[0].step_s
    # A search is no proof of plans in which some layers of a stage compute again, either.
    is_proof = own[1].gap <= 0 and not any(
        candidate.assignment.recomputed for candidate in own[1].best
    )
    if pinned and not is_proof and (better := kept(best_s)) is not None:
        problem, found = better
        bound_s = min(own[1].bound_s, found.best[0].step_s)
        own = problem, replace(found, bound_s=bound_s)
    return own, free() if compares else None


def _find(
    config: Config,
    topology: Topology,
    say: Saying,
    usable_memory: float,
    otherwise: Callable[[], tuple[Problem, SearchResult] | None] = lambda: None,
    remedies: bool = True,
) -> tuple[Problem, SearchResult]:
    """The result of one search: `find`, as the config is.

    Args:
      config, topology, say, usable_memory, remedies: those of `make_plan`.
      otherwise: gives plans that are looked at last, before a refusal for want of memory.
    """
    refuse_impossible(config, topology)
    problems = make_problems(config, topology, usable_memory)
    try:
        refuse_large_meshes(config, topology)
        result, close = _find_fitting(problems, say, otherwise)
        if result is None and (wide := with_wide_tensor(problems)):
            say("stages in which tensor leaves nodes")
            problems = wide
            result, close = _find_fitting(problems, say)
        if result is None:
            raise memory_refusal(problems, close or nearest(problems))
    except PlanError as refusal:
        say("stages that lie in several clusters")
        result = _find_across(config, topology, refusal, usable_memory)
        if result is None and not remedies:
            raise
        if result is None:
            say("the mildest change with which a plan fits")
            raise with_remedy(refusal, problems) from None
    return result


def _find_fitting(
    problems: Sequence[Problem],
    say: Saying,
    otherwise: Callable[[], tuple[Problem, SearchResult] | None] = lambda: None,
) -> tuple[tuple[Problem, SearchResult] | None, tuple[Problem, SearchResult] | None]:
    """The best plans that memory holds; and the `nearest`, if they were looked for."""
    may_fit = least_memory(problems) <= 1.0
    if may_fit and (result := find_within(problems, say=say)) is not None:
        return result, None
    say("the plan that comes nearest, as none fits the memory")
    close = nearest(problems)  # the bound is one of costs: a refusal is looked at once more
    result = fits_after_all(problems, close)
    return result or (otherwise() if may_fit else None), close


def _find_across(
    config: Config, topology: Topology, refusal: PlanError, usable_memory: float
) -> tuple[Problem, SearchResult] | None:
    """Plans whose stages may lie in several clusters, for what is refused without them.

    None where there is no such plan either, or where the config says which clusters stages are in
    or what a plan may cost: what collectives send between clusters has no price here.
    """
    is_open = config.parallel.clusters is None and config.plan.is_by_time
    if len(topology.clusters) == 1 or not is_open:
        return None
    problem = Problem(
        config=config,
        topology=topology,
        pools=[joined_pool(topology)],
        stage_costs=StageCosts(config),
        crosses_because=f"{refusal.where}: {refusal.problem}",
        usable_memory=usable_memory,
    )
    found = search(problem)
    return (problem, found) if found is not None else None
