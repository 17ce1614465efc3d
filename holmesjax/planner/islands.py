"""Plans of islands: each on its own clusters, for its own part of the batch.

The settings of `parallel` that pin a plan hold for each island. What islands keep for their
meetings is counted when each has its plan, and one that it does not fit is refused.
"""

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from holmesjax.config import Config
from holmesjax.config.training_sections import FINAL_FRACTION
from holmesjax.costs.stage_shape import LOGIT_BYTES
from holmesjax.errors import PlanError
from holmesjax.layer_specs.model_layers import layers
from holmesjax.plan.codecs import codec_of
from holmesjax.plan.mailbox_cost import mailbox_cost
from holmesjax.plan.meeting_steps import are_equal_after_meetings, fragment_of, steps_of
from holmesjax.plan.outer_rule import kept_by, owners, sends_weights, trained_sizes
from holmesjax.plan.plan import MeetingCost, Plan, StagePlan
from holmesjax.planner.meeting_times import MeetingPaths, meeting_cost
from holmesjax.schedules.pipeline_schedules import SCHEDULES
from holmesjax.topology import upgrades
from holmesjax.topology.machines import Topology
from holmesjax.units import show

WORD_BYTES = 4  # of a number that islands keep, in float32


def plan_islands(
    config: Config,
    topology: Topology,
    plan_one: Callable[[Config, Topology], Plan],
    usable_memory: float,
) -> Plan:
    """The plan of a run with islands.

    Args:
      config: of the run.
      topology: all machines.
      plan_one: makes the plan of one island, as `make_plan`.
      usable_memory: the share of each device's memory that a stage may fill.

    Raises PlanError where clusters cannot be these islands, or where an island has no plan.
    """
    names = clusters_of(config, topology)
    _refuse_untrained_changes(config)
    _refuse_empty_fragments(config)
    count = len(names)
    own = island_config(config, count)
    sizes = trained_sizes(config.model)
    owner = owners(sizes, count)

    def make(settings: Config, k: int) -> Plan:
        found = _on(topology, plan_one(settings, part_of(topology, names[k])), names[k])
        _refuse_shared_table(config, found, k)
        # Through a mailbox each island has all global weights, and a copy of what it has sent.
        is_own = lambda island: island == k or config.parallel.is_mailbox
        owned = {name for name, island in owner.items() if is_own(island)}
        own_bytes = functools.partial(_outer_bytes, config, count, owned, keeps=k == 0)
        stages = tuple(_with_outer(stage, own_bytes(stage), sizes) for stage in found.stages)
        return replace(found, stages=stages)

    parallel, islands = own.parallel, []
    may_compute_again = not (
        parallel.activation_checkpointing
        or parallel.recomputed_layers
        or (parallel.schedule and SCHEDULES[parallel.schedule].splits_backward)
    )
    for k in range(count):
        island = make(own, k)
        # A search lets as few layers compute again as memory holds, without what meetings need.
        if may_compute_again and _excess(island, topology, usable_memory):
            full = replace(own, parallel=replace(parallel, activation_checkpointing="full"))
            island = make(full, k)
        if error := _excess(island, topology, usable_memory):
            raise error
        islands.append(island)
    paths = MeetingPaths(config, topology, islands)
    slowest = max(islands, key=lambda plan: plan.step_time_s)
    meeting = (
        _mailbox_meeting(config, islands)
        if config.parallel.is_mailbox
        else meeting_cost(config, paths, slowest.step_time_s)
    )
    step_s = slowest.step_time_s + meeting.exposed_s / meeting.every
    return replace(
        slowest,
        stages=tuple(stage for island in islands for stage in island.stages),
        global_batch=config.train.global_batch,
        step_time_s=step_s,
        bound_s=max(island.bound_s for island in islands),
        idle={
            **_left_out(topology, names),
            **{n: d for one in islands for n, d in one.idle.items()},
        },
        idle_because={},
        step_dollars=_step_dollars(config, islands, paths, step_s),
        pipes={},
        queues=(),
        recomputed_layers=(),
        islands=tuple(islands),
        meeting=meeting,
    )


def _step_dollars(
    config: Config, islands: Sequence[Plan], paths: MeetingPaths, step_s: float
) -> dict[str, float]:
    """Dollars of a step of all islands, as `prices.step_dollars`: nodes are there for all of it.

    Empty if those of an island are not known, or what a mailbox takes.
    """
    if config.parallel.is_mailbox or not all(island.step_dollars for island in islands):
        return {}
    of_meeting = paths.egress_dollars(config.parallel.outer_rule)
    of_islands = sum(island.step_dollars["egress"] for island in islands)
    return {
        "nodes": sum(one.step_dollars["nodes"] * step_s / one.step_time_s for one in islands),
        "egress": of_islands + of_meeting / config.parallel.meets_every,
    }


def clusters_of(config: Config, topology: Topology) -> tuple[tuple[str, ...], ...]:
    """The clusters of each island. Raises PlanError where they cannot be islands of this run."""
    known = [cluster.name for cluster in topology.clusters]
    names = config.parallel.islands or tuple((name,) for name in known)
    refuse_unknown_clusters(names, topology)
    parts = len(names) * (config.parallel.microbatches or 1)
    if config.train.global_batch % parts:
        problem = f"must be a multiple of {parts}, the microbatches of all islands, which are equal"
        found, fix = config.train.global_batch, "use another batch, or other islands"
        raise PlanError("train.global_batch", problem, found=found, fix=fix)
    return names


def refuse_unknown_clusters(names: Sequence[Sequence[str]], topology: Topology) -> None:
    """Raises PlanError where islands have a cluster that is not there."""
    known = [cluster.name for cluster in topology.clusters]
    for name in (name for island in names for name in island):
        if name not in known:
            fix = f"use {', '.join(known)}"
            raise PlanError("parallel.islands", "names no cluster", found=name, fix=fix)


def _left_out(topology: Topology, names: Sequence[Sequence[str]]) -> dict[str, int]:
    """The devices of each node whose cluster is in no island."""
    inside = {name for island in names for name in island}
    others = (cluster for cluster in topology.clusters if cluster.name not in inside)
    return {node.name: node.num_devices for cluster in others for node in cluster.nodes}


def _refuse_untrained_changes(config: Config) -> None:
    """Raises PlanError for parameters that steps change without a gradient: nothing merges them.

    So no island has experts; whoever allows them also has to merge their loads in
    `report.process_step.known_of`.
    """
    for layer, kind in layers(config.model).items():
        for parameter in kind.parameters:
            if parameter.changes and not parameter.trains:
                raise PlanError(
                    "parallel.across",
                    "local_updates cannot have parameters that change without a gradient so far",
                    found=f"{layer}.{parameter.name}",
                    fix="use a model without them, or set parallel.across to pipeline",
                )


def _refuse_empty_fragments(config: Config) -> None:
    """Raises PlanError where there are more fragments than layers."""
    fragments, count = config.parallel.fragments or 1, len(layers(config.model))
    if fragments > count:
        problem = f"must be at most {count}, the layers of the model"
        raise PlanError("parallel.fragments", problem, found=fragments, fix="use fewer")


def _refuse_shared_table(config: Config, plan: Plan, island: int) -> None:
    """Raises PlanError where two stages of an island have the token table."""
    if config.model.tied_embeddings and len(plan.stages) > 1:
        raise PlanError(
            f"island {island}",
            "cannot share the token table between its stages so far",
            found=f"model.tied_embeddings, and {len(plan.stages)} stages",
            fix="set parallel.stages to 1, or model.tied_embeddings to false",
        )


def island_config(config: Config, count: int) -> Config:
    """The config of one island: a part of the batch, on one pipeline.

    Raises PlanError where the batch has no sequence for each island.
    """
    if config.train.global_batch < count:
        problem, fix = f"must be at least {count}, a sequence for each island", "use fewer islands"
        raise PlanError("train.global_batch", problem, found=config.train.global_batch, fix=fix)
    part = replace(config.train, global_batch=config.train.global_batch // count)
    # Steps and tokens count for all islands together: no island has a schedule of its own.
    optimizer = replace(
        config.optimizer,
        schedule="constant",
        final_fraction=FINAL_FRACTION,
        schedule_by="steps",
        warmup_steps=0,
        warmup_tokens=None,
        decay_steps=None,
        decay_tokens=None,
    )
    # What islands keep for their meetings needs the room that a larger chunk would take.
    kernels = config.kernels
    if kernels.loss_chunk_mib is None and kernels.cross_entropy != "reference":
        kernels = replace(kernels, loss_chunk_mib=LOGIT_BYTES // 2**20)
    island = without_islands(config)
    return replace(island, train=part, optimizer=optimizer, kernels=kernels)


def without_islands(config: Config) -> Config:
    """The same run as one pipeline."""
    parallel = replace(
        config.parallel,
        across="pipeline",
        islands=None,
        every=None,
        outer=None,
        fragments=None,
        delay=None,
        blend=None,
        meet="direct",
        mailbox=None,
        quorum=None,
        grace_s=None,
        island=None,
        place=None,
    )
    return replace(config, parallel=parallel)


def part_of(topology: Topology, clusters: Sequence[str]) -> Topology:
    """The topology with these clusters alone."""
    for cluster in topology.clusters:
        if cluster.name not in clusters:
            topology = upgrades.without_cluster(topology, cluster.name)
    return topology


def _on(topology: Topology, plan: Plan, clusters: Sequence[str]) -> Plan:
    """A plan of some clusters, with the numbers that their devices have in the whole topology."""
    nodes = [node.name for c in topology.clusters if c.name in clusters for node in c.nodes]
    numbers = topology.devices(nodes)
    stages = tuple(
        replace(stage, devices=tuple(numbers[device] for device in stage.devices))
        for stage in plan.stages
    )
    return replace(plan, stages=stages)


def _outer_bytes(
    config: Config, count: int, owned: set[str], stage: StagePlan, keeps: bool
) -> float:
    """The bytes that a stage has for meetings: what its island owns, and what is on its way.

    A fragment on its way is there once for the owners, and what comes is beside it. The first
    island keeps all global weights where it validates while islands have none in common.
    """
    sizes = trained_sizes(config.model)
    here = {name: n for name, n in sizes.items() if _layer(name) in stage.layers}
    outer, steps = config.parallel.outer_rule, steps_of(config.parallel)
    kept, num_bytes = kept_by(outer), codec_of(outer).num_bytes
    all_here, owned_here = sum(here.values()), sum(n for name, n in here.items() if name in owned)
    found = float(WORD_BYTES * (len(kept.owned) * owned_here + len(kept.own) * all_here))
    if outer.has_pairs:
        # Its difference, and what comes of the other. The new slow weights, the momentum and the
        # weights are there beside the old ones.
        found += all_here * (2 * num_bytes + WORD_BYTES + 3 * WORD_BYTES)
    elif not (steps.delay or sends_weights(outer)):  # its difference
        found += all_here * num_bytes
    if steps.delay:
        fragments = fragment_of(layers(config.model), steps.fragments)
        loads = Counter[int]()
        for name, n in here.items():
            loads[fragments[_layer(name)]] += n
        found += num_bytes * max(loads.values(), default=0) * (1 + 2 * (count - 1) / count)
    if keeps and config.train.eval_every and not are_equal_after_meetings(config.parallel):
        found += WORD_BYTES * all_here
    return found


def _with_outer(stage: StagePlan, outer_bytes: float, sizes: Mapping[str, int]) -> StagePlan:
    """The stage with the memory of meetings, which lies over its devices as its parameters do.

    Args:
      stage: of the island.
      outer_bytes: on all devices together, each number once.
      sizes: numbers of each parameter that trains, by its name.
    """
    numbers = sum(n for name, n in sizes.items() if _layer(name) in stage.layers)
    own_bytes = stage.memory_bytes["parameters"]  # in float32: islands have no other weights
    share = own_bytes / (WORD_BYTES * numbers) if numbers else 0.0
    return replace(stage, memory_bytes={**stage.memory_bytes, "outer": share * outer_bytes})


def _layer(name: str) -> str:
    return name.partition(".")[0]


def _excess(island: Plan, topology: Topology, usable_memory: float) -> PlanError | None:
    """The error of the first stage that has no room for what its island owns; None if all have."""
    for stage in island.stages:
        room = usable_memory * min(topology.node(n).device.memory_bytes for n in stage.nodes)
        needed = sum(stage.memory_bytes.values())
        if needed > room:
            return PlanError(
                f"cluster {stage.cluster}",
                "has no room for what islands keep between meetings",
                found=f"{show(needed, 'B')} of {show(room, 'B')} a device",
                fix="use more microbatches, or islands of more devices",
            )
    return None


def _mailbox_meeting(config: Config, islands: Sequence[Plan]) -> MeetingCost:
    """A round through a mailbox, for which nobody waits; the plan is of all islands, or of one."""
    sizes, place = trained_sizes(config.model), config.parallel.place
    count = len(place.names) if place else len(islands)
    stages = max((island.stages for island in islands), key=len)
    return MeetingCost(
        every=config.parallel.meets_every,
        bytes=(4.0 * sum(sizes.values()),) * len(islands),
        seconds=0.0,
        mailbox=mailbox_cost(sizes, count, [stage.layers for stage in stages]),
    )
