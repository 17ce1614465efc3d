"""Topology + config -> plan: which devices hold which layers, and how long a step takes.

`search` finds the layout, and `assembly` makes a plan of it. `refusals` and `remedies` say why
there is no plan.
"""

import dataclasses
import math

from holmesjax.config import Config, PlanConfig
from holmesjax.errors import PlanError
from holmesjax.plan.device_pool import USABLE_MEMORY
from holmesjax.plan.plan import Plan
from holmesjax.planner.assembly import as_plan
from holmesjax.planner.problem import Problem
from holmesjax.planner.refusals import refuse_impossible, refuse_large_meshes
from holmesjax.planner.remedies import least_memory, memory_refusal, with_remedy
from holmesjax.planner.search import Found, search
from holmesjax.planner.selection import Saying, find_within, make_problems, silently
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
) -> Plan:
    """The fastest plan by prediction.

    Args:
      say: is called with what is being tried, several times.
      usable_memory: the share of each device's memory that a stage may fill (`DevicePool`).

    Raises:
      PlanError: no plan satisfies the config on these machines; says what to change.
    """
    problem, found = find(config, topology, say, usable_memory)
    return as_plan(problem, found.best[0], found.bound_s)


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
    now, best = find(config, topology, say, usable_memory)
    then, found = find(config, changed, say, usable_memory)
    again = timed_again(now, best, changed) if config.plan == PlanConfig() else None
    if again is None or again[1].step_s >= found.best[0].step_s:
        return as_plan(then, found.best[0], found.bound_s)
    return as_plan(*again, min(found.bound_s, again[1].step_s))


def timed_again(
    problem: Problem, found: Found, changed: Topology
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
) -> tuple[Problem, Found]:
    """The best plans there are, with what they were found in. Raises PlanError as `make_plan`."""
    refuse_impossible(config, topology)
    problems = make_problems(config, topology, usable_memory)
    try:
        refuse_large_meshes(config, topology)
        is_possible = least_memory(problems) <= 1.0
        result = find_within(problems, say=say) if is_possible else None
        if result is None:
            say("the plan that comes nearest, as none fits the memory")
            raise memory_refusal(problems)
    except PlanError as refusal:
        say("stages that lie in several clusters")
        result = _find_across(config, topology, refusal, usable_memory)
        if result is None:
            say("the mildest change with which a plan fits")
            raise with_remedy(refusal, problems) from None
    return result


def _find_across(
    config: Config, topology: Topology, refusal: PlanError, usable_memory: float
) -> tuple[Problem, Found] | None:
    """Plans whose stages may lie in several clusters, for what is refused without them.

    None where there is no such plan either, or where the config says which clusters stages are in
    or what a plan may cost: what collectives send between clusters has no price here.
    """
    is_open = config.parallel.clusters is None and config.plan == PlanConfig()
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
