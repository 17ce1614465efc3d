"""Plans of islands: each on its own clusters, for its own part of the batch.

The settings of `parallel` that pin a plan hold for each island. What islands keep for their
meetings is counted when each has its plan, and one that it does not fit is refused.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from holmesjax.config import Config
from holmesjax.costs.stage_shape import LOGIT_BYTES
from holmesjax.errors import PlanError
from holmesjax.layer_specs.model_layers import layers
from holmesjax.plan.outer_rule import meeting_bytes, owners, trained_sizes
from holmesjax.plan.plan import MeetingCost, Plan, StagePlan
from holmesjax.topology import upgrades
from holmesjax.topology.machines import Topology
from holmesjax.units import show

WORDS_BYTES = 8  # of a number that an island owns: its global weight and its momentum, in float32


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
    every, count = config.parallel.meets_every, len(names)
    own = island_config(config, count)
    sizes = trained_sizes(config.model)
    owner = owners(sizes, count)

    def make(settings: Config, k: int) -> Plan:
        found = _on(topology, plan_one(settings, part_of(topology, names[k])), names[k])
        _refuse_shared_table(config, found, k)
        owned = {name for name, island in owner.items() if island == k}
        stages = tuple(_with_outer(stage, owned, sizes) for stage in found.stages)
        return replace(found, stages=stages)

    parallel, islands = own.parallel, []
    # A search lets as few layers compute again as memory holds, without what meetings need of it.
    full = replace(own, parallel=replace(parallel, activation_checkpointing="full"))
    is_set = parallel.activation_checkpointing or parallel.recomputed_layers
    for k in range(count):
        island = make(own, k)
        if not is_set and _excess(island, topology, usable_memory):
            island = make(full, k)
        if error := _excess(island, topology, usable_memory):
            raise error
        islands.append(island)
    sent = meeting_bytes(sizes, count)
    seconds = _seconds(topology, names, sent)
    slowest = max(islands, key=lambda plan: plan.step_time_s)
    return replace(
        slowest,
        stages=tuple(stage for island in islands for stage in island.stages),
        global_batch=config.train.global_batch,
        step_time_s=slowest.step_time_s + seconds / every,
        bound_s=max(island.bound_s for island in islands),
        idle={node: n for island in islands for node, n in island.idle.items()},
        idle_because={},
        step_dollars={},
        pipes={},
        queues=(),
        recomputed_layers=(),
        islands=tuple(islands),
        meeting=MeetingCost(every=every, bytes=tuple(map(float, sent)), seconds=seconds),
    )


def clusters_of(config: Config, topology: Topology) -> tuple[tuple[str, ...], ...]:
    """The clusters of each island. Raises PlanError where they cannot be islands of this run."""
    known = [cluster.name for cluster in topology.clusters]
    names = config.parallel.islands or tuple((name,) for name in known)
    for name in (name for island in names for name in island):
        if name not in known:
            fix = f"use {', '.join(known)}"
            raise PlanError("parallel.islands", "names no cluster", found=name, fix=fix)
    parts = len(names) * (config.parallel.microbatches or 1)
    if config.train.global_batch % parts:
        problem = f"must be a multiple of {parts}, the microbatches of all islands, which are equal"
        found, fix = config.train.global_batch, "use another batch, or other islands"
        raise PlanError("train.global_batch", problem, found=found, fix=fix)
    return names


def _refuse_untrained_changes(config: Config) -> None:
    """Raises PlanError for parameters that steps change without a gradient: nothing merges them."""
    for layer, kind in layers(config.model).items():
        for parameter in kind.parameters:
            if parameter.changes and not parameter.trains:
                raise PlanError(
                    "parallel.across",
                    "local_updates cannot have parameters that change without a gradient so far",
                    found=f"{layer}.{parameter.name}",
                    fix="use a model without them, or set parallel.across to pipeline",
                )


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
    """The config of one island: a part of the batch, on one pipeline."""
    part = replace(config.train, global_batch=config.train.global_batch // count)
    # Steps and tokens count for all islands together: no island has a schedule of its own.
    optimizer = replace(
        config.optimizer,
        schedule="constant",
        schedule_by="steps",
        warmup_steps=0,
        warmup_tokens=None,
        decay_steps=None,
        decay_tokens=None,
    )
    # What islands keep for their meetings needs the room that a larger chunk would take.
    mib = config.kernels.loss_chunk_mib or LOGIT_BYTES // 2**20
    kernels = replace(config.kernels, loss_chunk_mib=mib)
    island = without_islands(config)
    return replace(island, train=part, optimizer=optimizer, kernels=kernels)


def without_islands(config: Config) -> Config:
    """The same run as one pipeline."""
    parallel = replace(config.parallel, across="pipeline", islands=None, every=None, outer=None)
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


def _with_outer(stage: StagePlan, owned: set[str], sizes: dict[str, int]) -> StagePlan:
    """The stage with the memory of what its island owns; each device has a part at most."""
    held = sum(n for name, n in sizes.items() if name in owned and _layer(name) in stage.layers)
    cuts = len(stage.devices)
    return replace(stage, memory_bytes={**stage.memory_bytes, "outer": WORDS_BYTES * held / cuts})


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


def _seconds(topology: Topology, names: Sequence[Sequence[str]], sent: Sequence[int]) -> float:
    """Seconds of a meeting: the slowest island's bytes over its slowest link, twice its latency."""
    if len(names) == 1:
        return 0.0
    first = {c.name: c.nodes[0].name for c in topology.clusters}
    found = 0.0
    for k, island in enumerate(names):
        others = [name for other in names if other != island for name in other]
        links = [topology.boundary_link(first[a], first[b]) for a in island for b in others]
        slowest = min(link.bandwidth_bytes_per_s for link in links)
        latency_s = max(link.latency_s for link in links)
        found = max(found, sent[k] / slowest + 2 * latency_s)
    return found
