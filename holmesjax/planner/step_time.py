"""The predicted seconds of a step, for any assignment of layers to stages."""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from holmesjax.costs.parameters import table_parameters
from holmesjax.planner.layer_ranges import add
from holmesjax.planner.problem import Assignment, Problem
from holmesjax.planner.stage_layouts import (
    Role,
    StepSettings,
)
from holmesjax.schedules.pipeline_schedules import TaskOrder
from holmesjax.schedules.simulation import Queue


@functools.cache  # a search asks over and over
def roles(num_stages: int) -> tuple[Role, ...]:
    """The role of each stage."""
    last = num_stages - 1
    return tuple(Role(stage == 0, stage == last) for stage in range(num_stages))


def chunk_roles(role: Role, num_chunks: int) -> list[Role]:
    """The role of each chunk of a stage: the ends of the model are in its first and its last.

    >>> [tuple(role) for role in chunk_roles(Role(is_first=True, is_last=True), 2)]
    [(True, False), (False, True)]
    """
    last = num_chunks - 1
    return [Role(role.is_first and c == 0, role.is_last and c == last) for c in range(num_chunks)]


def stage_loads(problem: Problem, assignment: Assignment, settings: StepSettings) -> list[float]:
    """Seconds that each stage works for a microbatch, with layers in one chunk."""
    ranges = problem.ranges.ranges(assignment.layers)
    stages = zip(assignment.slots, roles(len(ranges)), ranges, strict=True)
    return [problem.microbatch_s(slot, settings, role, blocks) for slot, role, blocks in stages]


def transfer_times(
    problem: Problem, assignment: Assignment, settings: StepSettings, chunks: int
) -> list[tuple[float, float]]:
    """Seconds to the next stage and back, of each stage but the last; of it too with chunks."""
    num_bytes, segments = problem.boundary_bytes(settings), assignment.segments
    both_ways_s = lambda a, b: problem.both_ways_s((a.slots[-1], b.slots[0]), num_bytes)
    ways_s = list(problem.inside_s(segments[0], num_bytes))
    for before, segment in itertools.pairwise(segments):
        ways_s += [both_ways_s(before, segment), *problem.inside_s(segment, num_bytes)]
    if chunks > 1:
        ways_s.append(both_ways_s(segments[-1], segments[0]))
    return ways_s


def table_times(problem: Problem, assignment: Assignment) -> tuple[float, float]:
    """Seconds in which the first and the last stage send the token table of tied embeddings.

    Once a step the last stage sends its gradient of the table; the first, the sum of both back.
    """
    model, slots = problem.config.model, assignment.slots
    if not model.sums_table or len(slots) == 1:
        return 0.0, 0.0
    num_bytes = 4.0 * table_parameters(model)
    return problem.both_ways_s((slots[0], slots[-1]), num_bytes)


def link_bytes(
    problem: Problem, assignment: Assignment, settings: StepSettings, chunks: int
) -> dict[tuple[str, str], float]:
    """Bytes that a step sends from cluster to cluster, by their names: boundaries and tied tables.

    Empty where stages cross clusters, since collectives are not counted.
    """
    if problem.crosses_because:
        return {}
    clusters = [problem.pools[slot.pool].cluster.name for slot in assignment.slots]
    model, num_stages = problem.config.model, len(clusters)
    found = Counter[tuple[str, str]]()

    def add(a: str, b: str, num_bytes: float) -> None:
        if a != b:
            found.update({(a, b): num_bytes, (b, a): num_bytes})

    for at in range(chunks * num_stages - 1):
        num_bytes = settings.microbatches * problem.boundary_bytes(settings)
        add(clusters[at % num_stages], clusters[(at + 1) % num_stages], num_bytes)
    if model.sums_table and num_stages > 1:
        add(clusters[0], clusters[-1], 4.0 * table_parameters(model))
    return dict(found)


def step_seconds(
    problem: Problem,
    assignments: Sequence[Assignment],
    settings: StepSettings,
    order: TaskOrder,
    with_links: bool = True,
) -> np.ndarray:
    """Predicted seconds of a step of each assignment, [assignments].

    An assignment that does not fit in memory takes infinite time. Each stage gathers its parameters
    before its first task and reduces its gradients after its last. All stages wait for the norm of
    the whole gradient; then each updates its parameters.

    Args:
      problem: source of the seconds of stages and links.
      assignments: stages and their layers; all assignments have the same number of stages.
      settings: microbatches and checkpointing of a step.
      order: the schedule, its chunks, and what each stage holds in flight.
      with_links: whether boundaries and tied tables take time to send.
    """
    simulator, _ = problem.simulator(order)
    is_split = order.splits_backward
    p, v, num_assignments = order.num_stages, order.chunks, len(assignments)
    stage_s = np.empty((3, p, num_assignments))  # reduce, gather, update
    task_s = np.empty((3, p * v, num_assignments))  # forward, backward, weight
    transfer_s = np.zeros((p - (v == 1), 2, num_assignments))
    tables_s, holds = np.zeros(num_assignments), np.ones(num_assignments, bool)
    queues: list[list[Queue]] = [[] for _ in assignments]
    for k, assignment in enumerate(assignments):
        chunks = problem.ranges.chunks(assignment.layers, v)
        stages = zip(assignment.slots, chunks, roles(p), strict=True)
        for stage, (slot, own_chunks, role) in enumerate(stages):
            blocks = add(own_chunks)
            whole = problem.seconds(slot, settings, role, blocks, is_split)
            stage_s[:, stage, k] = whole.reduce, whole.gather, whole.update
            in_flight = problem.in_flight(order, stage, assignment.layers[stage])
            if not problem.fits(slot, settings, role, blocks, in_flight):
                holds[k] = False
                break
            if v == 1:
                task_s[:, stage, k] = whole[:3]
                continue
            both = zip(own_chunks, chunk_roles(role, v), strict=True)
            for chunk, (chunk_blocks, chunk_role) in enumerate(both):
                chunk_s = problem.seconds(slot, settings, chunk_role, chunk_blocks, is_split)
                task_s[:, chunk * p + stage, k] = chunk_s[:3]
        if holds[k] and with_links:
            transfer_s[:, :, k] = np.reshape(
                transfer_times(problem, assignment, settings, v), (-1, 2)
            )
            tables_s[k] = sum(table_times(problem, assignment))
            queues[k] = problem.queues(assignment, settings, v)
    found = np.full(num_assignments, math.inf)
    if holds.any():
        forward_s, backward_s, weight_s = task_s[:, :, holds]
        reduce_s, gather_s, update_s = stage_s[:, :, holds]
        ways_s = transfer_s[:, :, holds]
        _, end_s, _ = simulator.run(forward_s, backward_s, ways_s, weight_s, ready_s=gather_s)
        own = [queues[k] for k in np.flatnonzero(holds)]
        if waiting := [k for k, queue in enumerate(own) if queue]:
            _, end_s[:, waiting], _ = simulator.run(
                forward_s[:, waiting],
                backward_s[:, waiting],
                ways_s[:, :, waiting],
                weight_s[:, waiting],
                ready_s=gather_s[:, waiting],
                queues=[own[k] for k in waiting],
            )
        finish_s = simulator.finish_s(end_s)
        found[holds] = (finish_s + reduce_s).max(0) + update_s.max(0) + tables_s[holds]
    return found
