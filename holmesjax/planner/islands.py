"""Plans of islands: each on its own clusters, for its own part of the batch.

The settings of `parallel` that pin a plan hold for each island. What islands keep for their
meetings is counted when each has its plan, and one that it does not fit is refused.
"""

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from holmesjax.config import Config
from holmesjax.config.island_checks import OF_ISLANDS, OF_LOCAL_UPDATES, unknown_islands
from holmesjax.config.sections import SPEED
from holmesjax.config.training_sections import FINAL_FRACTION
from holmesjax.costs.stage_shape import LOGIT_BYTES
from holmesjax.errors import PlanError
from holmesjax.layer_specs.model_layers import layers
from holmesjax.plan.codecs import codec_of
from holmesjax.plan.mailbox_cost import mailbox_cost
from holmesjax.plan.meeting_steps import are_equal_after_meetings, fragment_of, steps_of
from holmesjax.plan.outer_rule import WORD_BYTES, kept_by, owners, sends_weights, trained_sizes
from holmesjax.plan.plan import MeetingCost, Plan, StagePlan
from holmesjax.planner.island_batches import by_speed, sizes_of
from holmesjax.planner.meeting_times import MeetingPaths, meeting_cost
from holmesjax.schedules.pipeline_schedules import SCHEDULES
from holmesjax.topology import upgrades
from holmesjax.topology.machines import Topology
from holmesjax.units import show

# Of the memory of a stage, what is there while no step computes; the rest may be there, too.
BETWEEN_STEPS = ("parameters", "optimizer", "replicas", "average")


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
    _refuse_few_sequences(config, len(names))
    islands = _island_plans(config, topology, names, plan_one, usable_memory)
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


def _island_plans(
    config: Config,
    topology: Topology,
    names: Sequence[Sequence[str]],
    plan_one: Callable[[Config, Topology], Plan],
    usable_memory: float,
) -> Sequence[Plan]:
    """The plan of each island, with the memory of its meetings. Raises as `plan_islands`.

    `names` are the clusters of each island.
    """
    count = len(names)
    sizes = trained_sizes(config.model)
    owner = owners(sizes, count)

    def make(settings: Config, k: int) -> Plan:
        found = _on(topology, plan_one(settings, part_of(topology, names[k])), names[k])
        _refuse_shared_table(config, found, k)
        # Through a mailbox each island has all global weights, and a copy of what it has sent.
        is_own = lambda island: island == k or config.parallel.is_mailbox
        owned = {name for name, island in owner.items() if is_own(island)}
        stages = tuple(
            _with_outer(
                stage,
                _kept_bytes(config, owned, stage),
                _passing_bytes(config, count, stage, keeps=k == 0),
                sizes,
                on_host=config.parallel.outer_memory == "host",
            )
            for stage in found.stages
        )
        return replace(found, stages=stages)

    parallel = without_islands(config).parallel
    may_compute_again = not (
        parallel.activation_checkpointing
        or parallel.recomputed_layers
        or (parallel.schedule and SCHEDULES[parallel.schedule].splits_backward)
    )

    @functools.cache
    def planned(k: int, sequences: int) -> Plan:
        own = island_config(config, sequences)
        island = make(own, k)
        # A search lets as few layers compute again as memory holds, without what meetings need.
        if may_compute_again and _excess(island, topology, usable_memory):
            full = replace(own, parallel=replace(parallel, activation_checkpointing="full"))
            island = make(full, k)
        if error := _excess(island, topology, usable_memory):
            raise error
        return island

    def plan_all(batches: Sequence[int]) -> list[Plan]:
        return [planned(k, sequences) for k, sequences in enumerate(batches)]

    if config.parallel.shares == SPEED:
        parts = [part_of(topology, clusters) for clusters in names]
        return by_speed(config, parts, plan_all)
    return plan_all(sizes_of(config, count))


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
    if not config.parallel.place:
        for mistake in unknown_islands(config.data, list(map(name_of, names))):
            raise mistake
    parts = len(names) * (config.parallel.microbatches or 1)
    if config.parallel.shares is None and config.train.global_batch % parts:
        problem = f"must be a multiple of {parts}, the microbatches of all islands, which are equal"
        found, fix = config.train.global_batch, "use another batch, or other islands"
        raise PlanError("train.global_batch", problem, found=found, fix=fix)
    return names


def name_of(clusters: tuple[str, ...]) -> str:
    """The name of an island, which settings have and, where it is a job, its run folder.

    >>> name_of(("a", "b"))
    'a+b'
    """
    return "+".join(clusters)


def names_of(config: Config, topology: Topology) -> tuple[str, ...]:
    """The names of all islands of a run, by their numbers. Raises as `clusters_of`."""
    place = config.parallel.place
    return place.names if place else tuple(map(name_of, clusters_of(config, topology)))


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


def _refuse_few_sequences(config: Config, count: int) -> None:
    """Raises PlanError if the batch has no sequence for each island."""
    if config.train.global_batch < count:
        problem, fix = f"must be at least {count}, a sequence for each island", "use fewer islands"
        raise PlanError("train.global_batch", problem, found=config.train.global_batch, fix=fix)


def island_config(config: Config, sequences: int) -> Config:
    """The config of one island, which takes so many sequences of a step, on one pipeline."""
    part = replace(config.train, global_batch=sequences)
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
    none: dict[str, Any] = dict.fromkeys((*OF_ISLANDS, *OF_LOCAL_UPDATES))
    parallel = replace(config.parallel, across="pipeline", meet="direct", **none)
    data = replace(config.data, mixture_by_island=None)
    return replace(config, parallel=parallel, data=data)


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


def _kept_bytes(config: Config, owned: set[str], stage: StagePlan) -> float:
    """The bytes that a stage keeps between meetings, of what its island owns and of its own."""
    here, kept = _sizes_of(config, stage), kept_by(config.parallel.outer_rule)
    owned_here = sum(n for name, n in here.items() if name in owned)
    return float(kept.num_bytes(owned_here, sum(here.values())))


def _sizes_of(config: Config, stage: StagePlan) -> dict[str, int]:
    sizes = trained_sizes(config.model)
    return {name: n for name, n in sizes.items() if _layer(name) in stage.layers}


def _passing_bytes(config: Config, count: int, stage: StagePlan, keeps: bool) -> float:
    """The bytes that a stage has besides for meetings: what is on its way, above all.

    A fragment on its way is there once for the owners, and what comes is beside it. The first
    island keeps all global weights where it validates while islands have none in common.
    """
    here, outer = _sizes_of(config, stage), config.parallel.outer_rule
    steps, num_bytes = steps_of(config.parallel), codec_of(outer).num_bytes
    all_here, found = sum(here.values()), 0.0
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
        most = max(loads.values(), default=0)
        found += num_bytes * most * (1 + 2 * (count - 1) / count)
        if config.parallel.outer_memory == "host":  # what goes back is no part of what it keeps
            found += num_bytes * most / count
    if keeps and config.train.eval_every and not are_equal_after_meetings(config.parallel):
        found += WORD_BYTES * all_here
    return found


def _with_outer(
    stage: StagePlan,
    kept_bytes: float,
    passing_bytes: float,
    sizes: Mapping[str, int],
    on_host: bool,
) -> StagePlan:
    """The stage with the memory of meetings, which lies over its devices as its parameters do.

    Args:
      stage: of the island.
      kept_bytes: between meetings, on all devices together, each number once.
      passing_bytes: besides.
      sizes: numbers of each parameter that trains, by its name.
      on_host: whether what is kept is on devices while islands meet alone. Nothing that only steps
        have is there then: what is kept needs more room only where it is more than that.
    """
    numbers = sum(n for name, n in sizes.items() if _layer(name) in stage.layers)
    own_bytes = stage.memory_bytes["parameters"]  # in float32: islands have no other weights
    share = own_bytes / (WORD_BYTES * numbers) if numbers else 0.0
    kept_bytes, passing_bytes = share * kept_bytes, share * passing_bytes
    if on_host:
        of_steps = sum(n for what, n in stage.memory_bytes.items() if what not in BETWEEN_STEPS)
        kept_bytes = max(0.0, kept_bytes - of_steps)
    outer_bytes = kept_bytes + passing_bytes
    return replace(stage, memory_bytes={**stage.memory_bytes, "outer": outer_bytes})


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
