"""Plans that do not fit: what the nearest one lacks, and the mildest change that helps."""

import bisect
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from holmesjax.errors import PlanError
from holmesjax.plan import device_pool, pins
from holmesjax.planner import shortlist
from holmesjax.planner.assembly import as_plan
from holmesjax.planner.problem import Problem
from holmesjax.planner.search import EFFORT, SearchResult
from holmesjax.planner.selection import find_within, make_problems
from holmesjax.planner.step_time import step_seconds
from holmesjax.planner.trials import Trials
from holmesjax.schedules.pipeline_schedules import SCHEDULES
from holmesjax.topology import upgrades
from holmesjax.units import show

MEMORY_STEPS = (1.0, 1.05, 1.2, 1.5, 2.0, 4.0, 10.0, 100.0)  # to the least that was worked out
MOST_MEMORY = 1e9  # times what there is, in which all fits that fits at all
LITTLE = EFFORT / 20  # for a plan that need not be the best
NODES_STEPS = (1.0, 1.3, 1.7, 2.5)  # times the nodes that should do, each with one more
MOST_DEVICES = 512  # for which it is tried how many nodes would do
# Settings that may be left to the planner, the mildest change first.
FREED = (
    "recomputed_layers",
    "activation_checkpointing",
    "microbatches",
    "fsdp",
    "data",
    "tensor",
    "context",
    "expert",
    "layers",
    "stages",
    "clusters",
)


def nearest(problems: Sequence[Problem]) -> tuple[Problem, SearchResult] | None:
    """Plans with the checkpointing that keeps least, on devices with as little more memory as it
    takes to find any."""
    usable_memory = problems[0].usable_memory
    lean, least = [_leanest(problem) for problem in problems], least_memory(problems)

    @functools.cache
    def within(factor: float) -> tuple[Problem, SearchResult] | None:
        share = least * factor * usable_memory
        return find_within(
            [lean_problem.set_to(lean_problem.config.parallel, share) for lean_problem in lean],
            LITTLE,
        )

    step = bisect.bisect_left(MEMORY_STEPS, True, key=lambda factor: within(factor) is not None)
    return within(MEMORY_STEPS[step]) if step < len(MEMORY_STEPS) else None


def fits_after_all(
    problems: Sequence[Problem], close: tuple[Problem, SearchResult] | None
) -> tuple[Problem, SearchResult] | None:
    """The nearest plans that fit the memory that there is; None if none does."""
    if close is None:
        return None
    problem = close[0].set_to(problems[0].config.parallel, problems[0].usable_memory)
    best = [
        candidate
        for candidate in close[1].best
        if math.isfinite(
            step_seconds(problem, [candidate.assignment], candidate.settings, candidate.order)[0]
        )
    ]
    if not best:
        return None
    bound_s = min(
        bound
        for each_problem in problems
        for bound in Trials(each_problem, effort=0).bounds.values()
    )
    return problem, SearchResult(best=tuple(best), bound_s=min(bound_s, best[0].step_s))


def memory_refusal(
    problems: Sequence[Problem], close: tuple[Problem, SearchResult] | None
) -> PlanError:
    """The refusal says what the nearest plan lacks; the fix is left to `with_remedy`.

    Args:
      problems: for which no plan was found.
      close: what `nearest` found for them.
    """
    config, topology = problems[0].config, problems[0].topology
    usable_memory, least = problems[0].usable_memory, least_memory(problems)
    if 1.0 < least < MOST_MEMORY and close is None:
        return PlanError(
            "memory",
            f"no plan was found that fits: each needs at least {least:.3g} times what there is",
            found=f"{topology.num_devices} devices, {config.model.num_layers:,} layers, "
            f"train.global_batch {config.train.global_batch:,}",
            fix="",
        )
    if close is None:
        return PlanError(
            "parallel",
            "no mesh, number of microbatches and schedule agree with all settings of parallel",
            found=f"train.global_batch {config.train.global_batch}, {topology.num_devices} devices",
            fix="leave more of parallel: to the planner",
        )
    problem, found = close
    plan = as_plan(problem, found.best[0], found.bound_s)
    kinds = [problem.pools[slot.pool].kinds for slot in found.best[0].assignment.slots]
    usable = [
        usable_memory * min(kind.memory_bytes for kind in devices_kinds) for devices_kinds in kinds
    ]
    excess = [
        sum(stage.memory_bytes.values()) - room
        for stage, room in zip(plan.stages, usable, strict=True)
    ]
    i = max(range(len(excess)), key=excess.__getitem__)
    stage, kind = plan.stages[i], min(kinds[i], key=lambda kind: kind.memory_bytes)
    items = stage.memory_bytes
    largest = sorted(items, key=lambda name: -items[name])[:3]
    return PlanError(
        f"stage {i}",
        f"does not fit {kind.name} in cluster {stage.cluster!r}: {show(excess[i], 'B')} more than "
        f"{usable_memory:.0%} of its {show(kind.memory_bytes, 'B')}, in the plan that comes "
        "nearest",
        found=f"{show(sum(items.values()), 'B')} per device for {stage.num_blocks} Transformer "
        "layers: " + ", ".join(f"{name} {show(items[name], 'B')}" for name in largest),
        fix="",
    )


def least_memory(problems: Sequence[Problem]) -> float:
    """A factor of the present memory below which no plan fits."""
    most = MOST_MEMORY
    for problem in problems:
        # A whole step in one program can need more with all layers computed again.
        for as_allowed in (_leanest(problem), problem):
            most = shortlist.least_memory(as_allowed, 1.0, most)
    return most


def _leanest(problem: Problem) -> Problem:
    """The problem with the checkpointing that keeps least, unless the config sets one."""
    parallel = problem.config.parallel
    splits = parallel.schedule is not None and SCHEDULES[parallel.schedule].splits_backward
    if splits or parallel.activation_checkpointing is not None:
        return problem
    return problem.set_to(dataclasses.replace(parallel, activation_checkpointing="full"))


def with_remedy(refusal: PlanError, problems: Sequence[Problem]) -> PlanError:
    """A refusal that says what helps: the mildest change of the settings, or more machines."""
    if refusal.fix:
        return refusal
    fix = _milder_settings(problems) or _more_machines(problems)
    if problems[0].usable_memory < device_pool.USABLE_MEMORY:
        fix = f"raise {device_pool.NAME}, by which JAX's pool is smaller than it could be, or {fix}"
    return PlanError(refusal.where, refusal.problem, found=refusal.found, fix=fix)


def _milder_settings(problems: Sequence[Problem]) -> str | None:
    """The mildest change of one setting that makes a plan fit, with the value that is best."""
    parallel = problems[0].config.parallel
    set_here = [name for name in FREED if getattr(parallel, name) is not None]

    def without(names: Sequence[str]) -> list[Problem]:
        free: dict[str, Any] = dict.fromkeys(names)
        return [problem.set_to(dataclasses.replace(parallel, **free)) for problem in problems]

    free = without(set_here)
    if not set_here or least_memory(free) > 1.0:
        return None
    for name in set_here:
        if (result := find_within(without([name]), LITTLE)) is not None:
            plan = as_plan(result[0], result[1].best[0], result[1].bound_s)
            value = pins.chosen(plan, name)
            if name == "activation_checkpointing":
                value = plan.activation_checkpointing  # for all layers it takes no more memory
            if value is None:
                return f"leave parallel.{name} to the planner"
            return f"set {pins.setting(name, value)}, or leave it to the planner"
    if find_within(free, LITTLE) is not None:
        return f"leave to the planner: {', '.join(f'parallel.{name}' for name in set_here)}"
    return None


def _more_machines(problems: Sequence[Problem]) -> str:
    """More nodes of the cluster whose nodes have most memory, if so many were found to do.

    The word "about" marks a number that holds the layers and with which no plan was tried.
    """
    config, topology = problems[0].config, problems[0].topology
    node_bytes = lambda node: node.num_devices * node.device.memory_bytes
    cluster = max(topology.clusters, key=lambda own: node_bytes(own.nodes[-1]))
    lacks = (least_memory(problems) - 1.0) * sum(map(node_bytes, topology.nodes))
    found = ""
    can_grow = cluster.fabric != "local"
    for extra, step in enumerate(NODES_STEPS if can_grow else ()):
        more = extra + math.ceil(max(1.0, step * lacks / node_bytes(cluster.nodes[-1])))
        is_tried = topology.num_devices + more * cluster.nodes[-1].num_devices <= MOST_DEVICES
        if not is_tried and not lacks:
            break
        changed = make_problems(
            config,
            upgrades.with_more_nodes(topology, cluster.name, more),
            problems[0].usable_memory,
        )
        if least_memory(changed) <= 1.0 and (not is_tried or find_within(changed, LITTLE)):
            found = f", {'such as' if is_tried else 'about'} {more:,} more in {cluster.name!r}"
            break
    return (
        f"use more nodes{found}, or devices with more memory, or a smaller model, "
        "train.global_batch or model.context_length"
    )
