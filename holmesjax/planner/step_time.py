"""The predicted seconds of a step, for any assignment of layers to stages."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from holmesjax.costs.parameters import table_parameters
from holmesjax.planner.assignment import Assignment, Segment
from holmesjax.planner.layer_ranges import Counts, sum_counts
from holmesjax.planner.problem import PricedStage, Problem, roles
from holmesjax.planner.stage_layouts import (
    Role,
    StepSettings,
)
from holmesjax.schedules.pipeline_schedules import TaskOrder
from holmesjax.schedules.simulation import Queue


def chunk_roles(role: Role, num_chunks: int) -> list[Role]:
    """The role of each chunk of a stage: the ends of the model are in its first and its last.

    >>> [tuple(role) for role in chunk_roles(Role(is_first=True, is_last=True), 2)]
    [(True, False), (False, True)]
    """
    last = num_chunks - 1
    return [Role(role.is_first and c == 0, role.is_last and c == last) for c in range(num_chunks)]


def stage_loads(problem: Problem, assignment: Assignment, settings: StepSettings) -> list[float]:
    """Seconds that each stage works for a microbatch, with layers in one chunk."""
    layers = problem.layer_counts(assignment, 1)
    found = []
    for slot, role, (counts, again) in zip(
        assignment.slots, roles(len(layers)), layers, strict=True
    ):
        first = None if again is None else sum_counts(again)
        found.append(problem.microbatch_s(slot, settings, role, sum_counts(counts), first))
    return found


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

    def send(a: str, b: str, num_bytes: float) -> None:
        if a != b:
            found.update({(a, b): num_bytes, (b, a): num_bytes})

    for at in range(chunks * num_stages - 1):
        num_bytes = settings.microbatches * problem.boundary_bytes(settings)
        send(clusters[at % num_stages], clusters[(at + 1) % num_stages], num_bytes)
    if model.sums_table and num_stages > 1:
        send(clusters[0], clusters[-1], 4.0 * table_parameters(model))
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
    p, v, num_assignments = order.num_stages, order.chunks, len(assignments)
    stage_s = np.empty((3, p, num_assignments))  # reduce, gather, update
    task_s = np.empty((3, p * v, num_assignments))  # forward, backward, weight
    transfer_s = np.zeros((p - (v == 1), 2, num_assignments))
    tables_s, holds = np.zeros(num_assignments), np.ones(num_assignments, bool)
    queues: list[list[Queue]] = [[] for _ in assignments]
    costs = _AssignmentCosts(problem, settings, order)
    for k, assignment in enumerate(assignments):
        if (stages := costs.of(assignment)) is None:
            holds[k] = False
            continue
        stage_s[:, :, k], task_s[:, :, k] = stages
        if with_links:
            transfer_s[:, :, k], tables_s[k] = costs.sending(assignment)
            queues[k] = problem.queues(assignment, settings, v)
    found = np.full(num_assignments, math.inf)
    if holds.any():
        forward_s, backward_s, weight_s = task_s[:, :, holds]
        reduce_s, gather_s, update_s = stage_s[:, :, holds]
        ways_s = transfer_s[:, :, holds]
        finish_s = simulator.finish_s(forward_s, backward_s, ways_s, weight_s, gather_s)
        own = [queues[k] for k in np.flatnonzero(holds)]
        if waiting := [k for k, queue in enumerate(own) if queue]:
            finish_s[:, waiting] = simulator.finish_s(
                forward_s[:, waiting],
                backward_s[:, waiting],
                ways_s[:, :, waiting],
                weight_s[:, waiting],
                ready_s=gather_s[:, waiting],
                queues=[own[k] for k in waiting],
            )
        found[holds] = (finish_s + reduce_s).max(0) + update_s.max(0) + tables_s[holds]
    return found


class _AssignmentCosts:
    """The seconds of assignments with one schedule. Most share segments, and the layers of stages.

    Each is worked out once for all of them.
    """

    def __init__(self, problem: Problem, settings: StepSettings, order: TaskOrder):
        self._problem, self._settings, self._order = problem, settings, order
        self._stages: dict[tuple[Segment, ...], list[PricedStage]] = {}
        self._held: dict[
            tuple[PricedStage, int, tuple[Counts, ...], tuple[Counts, ...] | None],
            _StageRow | None,
        ] = {}
        self._sending: dict[tuple[Segment, ...], tuple[np.ndarray, float]] = {}

    def of(self, assignment: Assignment) -> tuple[np.ndarray, np.ndarray] | None:
        """Seconds to reduce, gather and update, [3, stages], and of tasks, [3, virtual stages].

        None where memory is too small.
        """
        problem, segments = self._problem, assignment.segments
        if segments not in self._stages:
            self._stages[segments] = problem.stages(assignment.slots, self._settings)
        layers = problem.layer_counts(assignment, self._order.chunks)
        once, tasks = [], []
        for place, (stage, of_stage) in enumerate(zip(self._stages[segments], layers, strict=True)):
            key = stage, place, *of_stage
            if key not in self._held:
                self._held[key] = self._row(*key)
            if (row := self._held[key]) is None:
                return None
            once.append(row.once_s)
            tasks.append(row.task_s)
        # [stages, chunks, 3] to virtual stages in the order of the model.
        task_s = np.transpose(tasks, (2, 1, 0)).reshape(3, -1)
        return np.transpose(once), task_s

    def _row(
        self,
        stage: PricedStage,
        place: int,
        chunks: tuple[Counts, ...],
        again: tuple[Counts, ...] | None,
    ) -> "_StageRow | None":
        problem, order, settings = self._problem, self._order, self._settings
        blocks, is_split = sum_counts(chunks), order.splits_backward
        recomputed = None if again is None else sum_counts(again)
        in_flight = problem.in_flight(order, place, sum(blocks))
        if not problem.holds(stage, blocks, in_flight, recomputed):
            return None
        whole = stage.seconds(blocks, is_split, recomputed)
        once_s = whole.reduce, whole.gather, whole.update
        if len(chunks) == 1:
            return _StageRow(once_s, [whole[:3]])
        own_roles = chunk_roles(stage.role, len(chunks))
        each = [problem.stage(stage.slot, settings, role) for role in own_roles]
        own = zip(each, chunks, again or [None] * len(chunks), strict=True)
        task_s: list[tuple[float, ...]] = [
            chunk.seconds(layers, is_split, first)[:3] for chunk, layers, first in own
        ]
        return _StageRow(once_s, task_s)

    def sending(self, assignment: Assignment) -> tuple[np.ndarray, float]:
        """Seconds to the next stage and back, [links, 2], and of tied tables."""
        if assignment.segments not in self._sending:
            problem, chunks = self._problem, self._order.chunks
            ways_s = transfer_times(problem, assignment, self._settings, chunks)
            tables_s = sum(table_times(problem, assignment))
            self._sending[assignment.segments] = np.reshape(ways_s, (-1, 2)), tables_s
        return self._sending[assignment.segments]


class _StageRow(NamedTuple):
    """Seconds of one stage under a schedule."""

    once_s: tuple[float, float, float]  # reduce, gather, update
    task_s: list[tuple[float, ...]]  # of each chunk: forward, backward, weight
