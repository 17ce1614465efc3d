"""Plans of islands: each on its own clusters, for its own part of the batch.

The settings of `parallel` that pin a plan hold for each island. What islands keep for their
meetings is counted when each has its plan, and one that it does not fit is refused.
"""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from holmesjax.config import Config
from holmesjax.costs.stage_shape import LOGIT_BYTES
from holmesjax.errors import PlanError
from holmesjax.layer_specs.model_layers import layers
from holmesjax.plan.codecs import codec_of
from holmesjax.plan.mailbox_cost import mailbox_cost
from holmesjax.plan.meeting_steps import are_equal_after_meetings, fragment_of, steps_of
from holmesjax.plan.outer_rule import (
    kept_by,
    meeting_bytes,
    owners,
    sends_weights,
    trained_sizes,
    way_bytes,
)
from holmesjax.plan.plan import MeetingCost, Plan, StagePlan
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
        own_words = functools.partial(_outer_bytes, config, count, owned, keeps=k == 0)
        stages = tuple(_with_outer(stage, own_words(stage)) for stage in found.stages)
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
    slowest = max(islands, key=lambda plan: plan.step_time_s)
    meeting = (
        _mailbox_meeting(config, islands)
        if config.parallel.is_mailbox
        else meeting_cost(config, topology, names, slowest.step_time_s)
    )
    return replace(
        slowest,
        stages=tuple(stage for island in islands for stage in island.stages),
        global_batch=config.train.global_batch,
        step_time_s=slowest.step_time_s + meeting.exposed_s / meeting.every,
        bound_s=max(island.bound_s for island in islands),
        idle={
            **_left_out(topology, names),
            **{n: d for one in islands for n, d in one.idle.items()},
        },
        idle_because={},
        step_dollars={},
        pipes={},
        queues=(),
        recomputed_layers=(),
        islands=tuple(islands),
        meeting=meeting,
    )


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


def _with_outer(stage: StagePlan, outer_bytes: float) -> StagePlan:
    """The stage with the memory of meetings; each device has a part at most."""
    memory_bytes = {**stage.memory_bytes, "outer": outer_bytes / len(stage.devices)}
    return replace(stage, memory_bytes=memory_bytes)


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


def meeting_cost(
    config: Config, topology: Topology, names: Sequence[Sequence[str]], step_s: float
) -> MeetingCost:
    """The cost of one meeting of each fragment, beside steps that take so long.

    A fragment takes as long as the slowest island's bytes over its slowest link, and its latency
    each way. Half of its delay hides the way to the owners, and half the way back.
    """
    steps, sizes, count = steps_of(config.parallel), trained_sizes(config.model), len(names)
    fragments = fragment_of(layers(config.model), steps.fragments)
    links, outer = _slowest_links(topology, names), config.parallel.outer_rule
    sent, seconds, hidden_s = meeting_bytes(sizes, count, outer), 0.0, 0.0
    if outer.has_pairs:  # at once in both directions
        pairs = zip(sent, links, strict=False)
        seconds = max((n / rate + latency_s for n, (rate, latency_s) in pairs), default=0.0)
    for number in range(0 if outer.has_pairs else steps.fragments):
        met = [name for name in sizes if fragments[_layer(name)] == number]
        ways_s = [
            (there / rate + latency_s, back / rate + latency_s)
            for (there, back), (rate, latency_s) in zip(
                way_bytes(sizes, count, met, codec_of(outer).num_bytes), links, strict=False
            )
        ]
        fragment_s = max((there_s + back_s for there_s, back_s in ways_s), default=0.0)
        there_s = max((there_s for there_s, _ in ways_s), default=0.0)
        back_s = max((back_s for _, back_s in ways_s), default=0.0)
        there = (steps.delay + 1) // 2
        behind_s = min(there_s, there * step_s) + min(back_s, (steps.delay - there) * step_s)
        seconds += fragment_s
        hidden_s += min(behind_s, fragment_s)
    return MeetingCost(
        every=steps.every,
        bytes=tuple(map(float, sent)),
        seconds=seconds,
        hidden_s=hidden_s,
        fragments=steps.fragments,
        delay=steps.delay,
        rule=outer.rule,
        codec=outer.codec,
    )


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


def _slowest_links(topology: Topology, names: Sequence[Sequence[str]]) -> list[tuple[float, float]]:
    """The bytes/s and the latency of each island's slowest links to others; none for one island."""
    first = {c.name: c.nodes[0].name for c in topology.clusters}
    slowest = []
    for island in names if len(names) > 1 else ():
        others = [name for other in names if other != island for name in other]
        links = [topology.boundary_link(first[a], first[b]) for a in island for b in others]
        rate = min(link.bandwidth_bytes_per_s for link in links)
        slowest.append((rate, max(link.latency_s for link in links)))
    return slowest
