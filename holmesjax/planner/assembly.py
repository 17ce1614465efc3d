"""A plan assembled from what a search has found: its devices, and what each stage costs."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from holmesjax.costs import memory, work
from holmesjax.costs.stage_shape import LOGIT_BYTES, StageShape, stage_tokens
from holmesjax.costs.stage_times import StageTimes
from holmesjax.layer_specs.distinct_kinds import kinds
from holmesjax.layer_specs.model_layers import EMBED, HEAD, block_name
from holmesjax.plan.plan import Plan, StagePlan, TaskSeconds
from holmesjax.planner import prices
from holmesjax.planner.layer_ranges import Counts, split_chunks, sum_counts
from holmesjax.planner.problem import Problem, StageSeconds
from holmesjax.planner.stage_layouts import clusters_of, joined_name
from holmesjax.planner.step_time import (
    chunk_roles,
    link_bytes,
    roles,
    step_seconds,
    table_times,
    transfer_times,
)
from holmesjax.planner.trials import Candidate
from holmesjax.topology import saving
from holmesjax.topology.machines import Cluster, Topology
from holmesjax.units import show

LARGER_CHUNKS = (2 * LOGIT_BYTES, 4 * LOGIT_BYTES)  # of the loss, where there is room


def as_plan(
    problem: Problem, candidate: Candidate, bound_s: float, others: Sequence[Candidate] = ()
) -> Plan:
    """The plan of a candidate, with what each of its stages costs.

    Args:
      problem: source of the seconds.
      candidate: what the plan is of.
      bound_s: that no plan takes less than.
      others: what else was found, by which the plan says why a cluster is idle.
    """
    config, assignment, settings = problem.config, candidate.assignment, candidate.settings
    order, num_stages = candidate.order, len(assignment.layers)
    sends_s = _send_times(problem, candidate)
    tables_s = [0.0] * num_stages
    tables_s[0], tables_s[-1] = table_times(problem, assignment)
    chunks = _chunks(assignment.layers, order.chunks)
    parts = [_part_seconds(problem, candidate, stage) for stage in range(num_stages)]
    ways_s: list[Sequence[float]] = [
        *transfer_times(problem, assignment, settings, order.chunks),
        (),
    ]
    stages = []
    for i, (slot, role) in enumerate(zip(assignment.slots, roles(num_stages), strict=True)):
        nodes, placement = problem.nodes(slot), problem.placement(slot, settings)
        in_flight = problem.in_flight(order, i, assignment.layers[i])
        blocks, again = stage_layers(problem, candidate, i)
        shape = problem.stage_costs.shape(slot.mesh, settings, role, blocks, in_flight, again)
        logit_bytes = _logit_bytes(problem, shape, problem.usable_bytes(slot.pool))
        times = stage_seconds(problem, candidate, i)
        shape = dataclasses.replace(shape, logit_bytes=logit_bytes or shape.logit_bytes)
        items = memory.stage_memory_bytes(config.model, shape)
        sent_s = settings.microbatches * sends_s[i] + tables_s[i]
        stages.append(
            StagePlan(
                cluster=joined_name(problem.topology, nodes),
                nodes=tuple(nodes),
                chunks=chunks[i],
                devices=placement.devices,
                mesh=placement.sizes,
                fabrics=dict(placement.fabrics),
                memory_bytes={name: float(size) for name, size in items.items()},
                seconds=parts[i] | {"boundary": sent_s},
                task_seconds=_task_seconds(problem, candidate, i, ways_s[i]),
                sequence_parallel=bool(slot.mesh.sequence_parallel),
                expert_chunks=int(times.exchange_chunks),
                logit_bytes=logit_bytes,
            )
        )
    assert sum(assignment.layers) == config.model.num_layers, f"{assignment.layers} drops layers"
    return Plan(
        topology=problem.topology.name,
        topology_hash=saving.hash_of(problem.topology),
        stages=tuple(stages),
        idle=_idle(problem.topology, stages),
        idle_because=_idle_because(problem, candidate, stages, others),
        global_batch=config.train.global_batch,
        microbatches=settings.microbatches,
        schedule=order.schedule,
        in_flight=order.in_flight,
        activation_checkpointing=settings.checkpointing,
        boundary_bytes=problem.boundary_bytes(settings) if num_stages > 1 else 0.0,
        step_time_s=candidate.step_s,
        bound_s=bound_s,
        step_dollars=prices.step_dollars(problem, candidate),
        shares=_shares(problem, candidate, parts),
        pipes=_pipe_shares(problem, candidate),
        queues=tuple(problem.queues(assignment, settings, order.chunks)),
        recomputed_layers=assignment.recomputed,
        exception=_exception(problem, stages),
    )


def _logit_bytes(problem: Problem, stage: StageShape, usable_bytes: float) -> int | None:
    """Bytes of a chunk of the loss: as many as there is room for; None: the least, or no chunks.

    A product of more tokens reads and adds to its weight less often.
    """
    model, kernels = problem.config.model, problem.config.kernels
    if kernels.loss_chunk_mib is not None:
        return stage.logit_bytes if stage.is_last else None
    logits = kinds(model).head.logits if stage.is_last else 0
    if not logits or kernels.cross_entropy == "reference":
        return None
    numbers = stage_tokens(model, stage), logits / stage.tensor, model.width
    fewest = work.logit_chunks(*numbers)
    found = None
    for most_bytes in LARGER_CHUNKS:
        larger = dataclasses.replace(stage, logit_bytes=most_bytes)
        held_bytes = sum(memory.stage_memory_bytes(model, larger).values())
        number = work.logit_chunks(*numbers, most_bytes)
        if 1 < number < fewest and held_bytes <= usable_bytes:
            found, fewest = most_bytes, number
    return found


def _exception(problem: Problem, stages: Sequence[StagePlan]) -> str:
    """The stages whose collectives leave one fabric, and the reason."""
    crossing = [
        f"stage {i} crosses clusters {' and '.join(names)}"
        for i, stage in enumerate(stages)
        if len(names := clusters_of(problem.topology, stage.nodes)) > 1
    ]
    if not crossing:
        return ""
    return (
        f"{', '.join(crossing)}, against the rule that collectives stay within one fabric: no "
        f"other plan is possible ({problem.crosses_because})"
    )


def _pipe_shares(problem: Problem, candidate: Candidate) -> dict[str, float]:
    """The share of each pipe's capacity that a step uses."""
    sent = link_bytes(problem, candidate.assignment, candidate.settings, candidate.order.chunks)
    used = {pipe: math.fsum(sent.get(way, 0.0) for way in pipe.ways) for pipe in problem.pipes}
    return {
        str(pipe): num_bytes / (pipe.capacity_bytes_per_s * candidate.step_s)
        for pipe, num_bytes in used.items()
        if num_bytes
    }


def stage_layers(
    problem: Problem, candidate: Candidate, stage: int
) -> tuple[Counts, Counts | None]:
    """The Transformer layers of one stage, of each kind; and those that compute again.

    None: the checkpointing is for all.
    """
    own, again = problem.layer_counts(candidate.assignment, candidate.order.chunks)[stage]
    return sum_counts(own), None if again is None else sum_counts(again)


def stage_seconds(problem: Problem, candidate: Candidate, stage: int) -> StageTimes:
    assignment, settings = candidate.assignment, candidate.settings
    slot, role = assignment.slots[stage], roles(len(assignment.layers))[stage]
    pool, placement = problem.pools[slot.pool], problem.placement(slot, settings)
    layers = stage_layers(problem, candidate, stage)
    return problem.stage_costs.times(pool, placement, slot.mesh, settings, role, *layers)


def _task_seconds(
    problem: Problem, candidate: Candidate, stage: int, ways_s: Sequence[float]
) -> TaskSeconds:
    """Seconds of the tasks of a stage, as `step_seconds` counts them."""
    assignment, settings, order = candidate.assignment, candidate.settings, candidate.order
    slot, is_split = assignment.slots[stage], order.splits_backward
    own_roles = chunk_roles(roles(len(assignment.layers))[stage], order.chunks)
    blocks, again = problem.layer_counts(assignment, order.chunks)[stage]
    own = zip(own_roles, blocks, again or [None] * order.chunks, strict=True)
    chunks = [
        problem.seconds(slot, settings, role, layers, is_split, first)
        for role, layers, first in own
    ]
    whole = _whole(problem, candidate, stage)
    return TaskSeconds(
        forward_s=tuple(chunk.forward for chunk in chunks),
        backward_s=tuple(chunk.backward for chunk in chunks),
        weight_s=tuple(is_split * chunk.weight for chunk in chunks),
        transfer_s=tuple(ways_s),
        gather_s=whole.gather,
        reduce_s=whole.reduce,
        update_s=whole.update,
    )


def _whole(problem: Problem, candidate: Candidate, stage: int) -> StageSeconds:
    """Seconds of one stage with all its chunks."""
    assignment, is_split = candidate.assignment, candidate.order.splits_backward
    role = roles(len(assignment.layers))[stage]
    blocks, again = stage_layers(problem, candidate, stage)
    slot = assignment.slots[stage]
    return problem.seconds(slot, candidate.settings, role, blocks, is_split, again)


def _part_seconds(problem: Problem, candidate: Candidate, stage: int) -> dict[str, float]:
    """Seconds of a stage in a step, by what they go into; other axes where used."""
    times, whole = stage_seconds(problem, candidate, stage), _whole(problem, candidate, stage)
    microbatches = candidate.settings.microbatches
    fsdp_s = microbatches * (times.forward_fsdp_s + times.backward_fsdp_s)
    context_s = microbatches * (times.forward_context_s + times.backward_context_s)
    exchange_s = microbatches * (times.forward_exchange_s + times.backward_exchange_s)
    meshes = [segment.mesh for segment in candidate.assignment.segments]
    uses_context = any(mesh.context > 1 for mesh in meshes)
    uses_expert = any(mesh.expert > 1 for mesh in meshes)
    uses_fsdp = uses_context or uses_expert or any(mesh.fsdp > 1 for mesh in meshes)
    return {
        "compute": float(microbatches * (times.forward_s + times.backward_s) + times.update_s),
        "tensor": float(microbatches * (times.forward_tensor_s + times.backward_tensor_s)),
        **({"fsdp": float(fsdp_s)} if uses_fsdp else {}),
        **({"context": float(context_s)} if uses_context else {}),
        **({"expert": float(exchange_s)} if uses_expert else {}),
        "data": whole.gather + whole.reduce,
    }


def _shares(
    problem: Problem, candidate: Candidate, parts: Sequence[dict[str, float]]
) -> dict[str, float]:
    """The shares of a step's parts, averaged over stages.

    `boundary` is what a step would be shorter if transfers took no time; `bubble` is the rest of
    the time without work.
    """
    step_s = candidate.step_s
    mean_s = {name: math.fsum(part[name] for part in parts) / len(parts) for name in parts[0]}
    shares = {name: part_s / step_s for name, part_s in mean_s.items()}
    [alone_s] = step_seconds(
        problem, [candidate.assignment], candidate.settings, candidate.order, with_links=False
    )
    shares["boundary"] = 1.0 - float(alone_s) / step_s
    shares["bubble"] = max(0.0, 1.0 - math.fsum(shares.values()))
    return shares


def _send_times(problem: Problem, candidate: Candidate) -> list[float]:
    """Seconds in which each stage sends boundaries, both ways, per microbatch."""
    num_stages, chunks = len(candidate.assignment.layers), candidate.order.chunks
    transfer_s = transfer_times(problem, candidate.assignment, candidate.settings, chunks)
    sends_s = [0.0] * num_stages
    for virtual in range(chunks * num_stages - 1):
        stage, after = virtual % num_stages, (virtual + 1) % num_stages
        there_s, back_s = transfer_s[stage]
        sends_s[stage] += there_s
        sends_s[after] += back_s
    return sends_s


def _chunks(num_blocks: Sequence[int], num_chunks: int) -> list[tuple[tuple[str, ...], ...]]:
    """The layers of each stage, by chunk; model order goes through all stages chunk by chunk.

    >>> _chunks([2, 2], 2)
    [(('embed', 'block_000'), ('block_002',)), (('block_001',), ('block_003', 'head'))]
    """
    shares = [split_chunks(n, num_chunks) for n in num_blocks]
    names = iter(map(block_name, range(sum(num_blocks))))
    take = lambda n: tuple(itertools.islice(names, n))
    in_order = [[take(share[chunk]) for share in shares] for chunk in range(num_chunks)]
    in_order[0][0] = (EMBED, *in_order[0][0])
    in_order[-1][-1] = (*in_order[-1][-1], HEAD)
    return list(zip(*in_order, strict=True))


def _idle(topology: Topology, stages: Sequence[StagePlan]) -> dict[str, int]:
    """Devices of each node that no stage uses; nodes without any are left out."""
    used = {device for stage in stages for device in stage.devices}
    numbers = itertools.count()
    idle = {
        node.name: sum(next(numbers) not in used for _ in range(node.num_devices))
        for node in topology.nodes
    }
    return {node: num_devices for node, num_devices in idle.items() if num_devices}


def _idle_because(
    problem: Problem,
    chosen: Candidate,
    stages: Sequence[StagePlan],
    others: Sequence[Candidate],
) -> dict[str, str]:
    """Why each cluster has devices that no stage uses, where more than the plan was found."""
    idle = {problem.topology.cluster_of(node).name for node in _idle(problem.topology, stages)}
    asked = problem.config.parallel.clusters
    return {
        cluster.name: "parallel.clusters leaves it out"
        if asked is not None and cluster.name not in asked
        else _worth_of(problem, cluster, chosen, others)
        for cluster in problem.topology.clusters
        if others and cluster.name in idle
    }


def _devices_in(problem: Problem, candidate: Candidate, cluster: Cluster) -> int:
    """The devices of a cluster that a plan uses; a pool may be of several clusters."""
    own = set(problem.topology.devices([node.name for node in cluster.nodes]))
    count = 0
    for slot in candidate.assignment.slots:
        nodes = problem.pools[slot.pool].cluster.nodes
        if cluster.nodes[0] not in nodes:
            continue
        if len(nodes) == len(cluster.nodes):
            count += slot.mesh.num_devices
        else:
            count += len(own.intersection(problem.placement(slot, candidate.settings).devices))
    return count


def _worth_of(
    problem: Problem, cluster: Cluster, chosen: Candidate, others: Sequence[Candidate]
) -> str:
    """Compares a plan with the best one that was found with a cluster, or with more of it."""
    devices_of = lambda candidate: _devices_in(problem, candidate, cluster)
    num_used = devices_of(chosen)
    it = "more of it" if num_used else "it"
    with_it = [other for other in others if devices_of(other) > num_used]
    if not with_it:
        return f"no plan with {it} was found near the best, or with room"
    best = min(with_it, key=lambda other: other.step_s)
    [free_s] = step_seconds(problem, [best.assignment], best.settings, best.order, with_links=False)
    longer = best.step_s / chosen.step_s - 1.0
    told = f"the best plan found with {it} takes {show(best.step_s, 's')}, {longer:.1%} longer"
    if longer <= 0.0:
        return f"{told.partition(',')[0]}, with more devices or at a higher price"
    if free_s < chosen.step_s:
        return f"{told}: its links are too slow; if they took no time, {show(float(free_s), 's')}"
    return f"{told}, and {show(float(free_s), 's')} if its links took no time"
