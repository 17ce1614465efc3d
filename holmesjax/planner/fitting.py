"""Segments whose memory holds the whole model, looked for by memory alone.

The shortlist takes stages for equal: none is at an end of the model, and all have as many
microbatches in flight. Where memory is scarce, its plans may all be too large though others fit.
Here each stage has the room of its place: the ends hold the embedding and the head, and a stage
further from the end of the pipeline holds more in flight. For every number of stages, the segments
that hold most layers are found by dynamic programming over sets of pools, from the last stage to
the first. The room is an upper bound with layers of several kinds, or with several chunks.

    place    stages behind a stage in the pipeline: 0 is the last one
    capacity the load that a stage, or a run of them, has room for (`LayerRanges.loads`)
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from holmesjax.planner import shortlist
from holmesjax.planner.assignment import Segment
from holmesjax.planner.candidates import ScheduleKind, schedule_kinds
from holmesjax.planner.offers import MAX_STAGES
from holmesjax.planner.problem import Problem
from holmesjax.planner.stage_layouts import MeshShape, Role, StepSettings, meshes

MOST_POOLS = 6  # of which all sets are tried in every order; of more, two orders of all
NONE = -1e9  # the capacity of what is not possible; sums of it stay below zero


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Runs:
    """The largest capacities of runs of stages on one pool, [stages - 1, place of the last]."""

    pool: int
    meshes: Sequence[MeshShape]
    middle: np.ndarray  # none of the stages is the first of the pipeline
    middle_mesh: np.ndarray  # index of the mesh
    first: np.ndarray  # one is
    first_mesh: np.ndarray


def fitting(problem: Problem, settings: StepSettings) -> Iterator[tuple[Segment, ...]]:
    """The segments that hold most layers, of every number of stages for which any hold all.

    They are for the kind of schedule that holds least of those that the config allows.
    """
    kind = next(schedule_kinds(problem, settings), None)
    if kind is None:
        return
    numbers = shortlist.numbers_of_stages(problem.config, settings)
    found = {
        index: own
        for index, pool in enumerate(problem.pools)
        if (own := list(meshes(problem.config, pool, settings)))
    }
    most = sum(
        max(pool.num_devices // mesh.num_devices for mesh in found[index])
        for index, pool in enumerate(problem.pools)
        if index in found
    )
    most = min(most, problem.num_layers // kind.chunks, MAX_STAGES)
    possible = [
        n
        for n in (range(1, most + 1) if numbers is None else numbers)
        if n <= most and kind.suits(n, settings.microbatches)
    ]
    parallel = problem.config.parallel
    depends = parallel.layers or parallel.clusters or kind.chunks > 1 or kind.splits_backward
    groups = [[n] for n in possible] if depends else [possible] if possible else []
    for group in groups:
        yield from _of_numbers(problem, settings, kind, found, group)


def _of_numbers(
    problem: Problem,
    settings: StepSettings,
    kind: ScheduleKind,
    found: dict[int, list[MeshShape]],
    numbers: Sequence[int],
) -> Iterator[tuple[Segment, ...]]:
    """`fitting` for some numbers of stages; a place has the same room with each of them."""
    runs = [
        _PoolOfStages(
            problem=problem,
            settings=settings,
            kind=kind,
            pool=pool,
            meshes=meshes_of_pool,
            most=max(numbers),
        ).runs()
        for pool, meshes_of_pool in found.items()
    ]
    best = {0: np.full(max(numbers) + 1, NONE)}  # by set of runs, [stages]: the last ones
    best[0][0] = 0.0
    steps: dict[tuple[int, int], tuple[int, int]] = {}  # the run that was added, and its stages
    totals = np.full(max(numbers) + 1, NONE)
    ends: dict[int, tuple[int, int, int]] = {}  # by number of stages: the first run, before it
    for used, i in _ways(problem, runs):
        before, own = best[used], runs[i]
        after = best.setdefault(used | 1 << i, np.full(len(before), NONE))
        for count in range(1, min(len(own.middle), len(before) - 1) + 1):
            places = len(before) - count
            together = before[:places] + own.middle[count - 1, :places]
            for n in np.flatnonzero(together > after[count:]).tolist():
                after[n + count] = together[n]
                steps[used | 1 << i, n + count] = i, count
            whole = before[:places] + own.first[count - 1, :places]
            for n in np.flatnonzero(whole > totals[count:]).tolist():
                totals[n + count] = whole[n]
                ends[n + count] = used, i, count
    for number in numbers:
        if totals[number] < problem.ranges.load:
            continue
        used, i, count = ends[number]
        left, run = number - count, runs[i]
        segments = [Segment(run.pool, run.meshes[run.first_mesh[count - 1, left]], count)]
        while left:
            i, count = steps[used, left]
            used, left, run = used & ~(1 << i), left - count, runs[i]
            segments.append(Segment(run.pool, run.meshes[run.middle_mesh[count - 1, left]], count))
        yield tuple(segments)


def _ways(problem: Problem, runs: Sequence[_Runs]) -> Iterator[tuple[int, int]]:
    """The sets of runs, each before all that contain it, with a run to add to each."""
    if len(runs) <= MOST_POOLS:
        for used in range(1 << len(runs)):
            yield from ((used, i) for i in range(len(runs)) if not used >> i & 1)
        return
    by_memory = sorted(range(len(runs)), key=lambda i: problem.usable_bytes(runs[i].pool))
    for order in (by_memory, by_memory[::-1]):
        used = 0
        for i in order:
            yield used, i
            used |= 1 << i


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _PoolOfStages:
    """A pool whose devices are to hold some of the stages of a pipeline."""

    problem: Problem
    settings: StepSettings
    kind: ScheduleKind
    pool: int
    meshes: Sequence[MeshShape]
    most: int  # stages on it; also those of the pipeline, where a place depends on their number

    def runs(self) -> _Runs:
        """The capacities of all runs of stages."""
        middle, first = self.capacities(Role()), self.capacities(Role(is_first=True))
        middle[:, 0] = self.capacities(Role(is_last=True))[:, 0]
        first[:, 0] = self.capacities(Role(is_first=True, is_last=True))[:, 0]
        devices = self.problem.pools[self.pool].num_devices
        most_stages = np.array([devices // mesh.num_devices for mesh in self.meshes])
        shape = min(self.most, int(most_stages.max())), self.most
        runs = _Runs(
            pool=self.pool,
            meshes=self.meshes,
            middle=np.full(shape, NONE),
            middle_mesh=np.zeros(shape, int),
            first=np.full(shape, NONE),
            first_mesh=np.zeros(shape, int),
        )
        # By stages without the first of them, [meshes, place of the last].
        held = np.zeros_like(middle)
        for count in range(1, shape[0] + 1):
            places = self.most - count + 1
            too_many = np.where(most_stages >= count, 0.0, NONE)[:, None]
            ahead = slice(count - 1, self.most)
            for role, values, at in (
                (middle, runs.middle, runs.middle_mesh),
                (first, runs.first, runs.first_mesh),
            ):
                together = held[:, :places] + role[:, ahead] + too_many
                at[count - 1, :places] = together.argmax(0)
                values[count - 1, :places] = together.max(0)
            held[:, :places] += middle[:, ahead]
        return runs

    def capacities(self, role: Role) -> np.ndarray:
        """The load that one stage of a role has room for, [meshes, place]."""
        problem, kind = self.problem, self.kind
        order = kind.leanest_order(self.most, self.settings.microbatches)
        in_flight = [
            problem.in_flight(order, self.most - 1 - place, kind.chunks)
            for place in range(self.most)
        ]
        depths: Any = np.array([at_place.all for at_place in in_flight])
        waiting: Any = np.array([at_place.waiting for at_place in in_flight])
        held = in_flight[0]._replace(all=depths, waiting=waiting)
        usable_bytes = problem.usable_bytes(self.pool)
        capacities = np.full((len(self.meshes), self.most), NONE)
        for layer_kind, load in enumerate(problem.ranges.loads):
            numbers = _numbers(problem.num_layers)
            num_bytes = np.stack(
                [
                    problem.stage_costs.bytes_at_places(
                        self.meshes,
                        self.settings,
                        problem.ranges.unit(layer_kind, number),
                        held,
                        role,
                    )
                    for number in numbers
                ]
            )
            capacities = np.maximum(capacities, load * _most(numbers, num_bytes, usable_bytes))
        least = kind.chunks * min(problem.ranges.loads)
        capacities = np.where(capacities >= least, capacities, NONE)
        layers, clusters = problem.config.parallel.layers, problem.config.parallel.clusters
        if layers:
            needed = np.array(layers[::-1]) * min(problem.ranges.loads)
            capacities = np.where(capacities >= needed, needed, NONE)
        if clusters:
            is_here = np.array(clusters[::-1]) == problem.pools[self.pool].cluster.name
            capacities = np.where(is_here, capacities, NONE)
        return capacities


def _numbers(num_layers: int) -> list[int]:
    """Numbers of layers whose bytes are worked out; those between lie on straight lines, nearly.

    >>> _numbers(5)
    [1, 2, 4, 5]
    """
    return sorted({*(1 << i for i in range(num_layers.bit_length())), num_layers})


def _most(numbers: Sequence[int], num_bytes: np.ndarray, usable_bytes: float) -> np.ndarray:
    """The most layers that memory holds, [...], of bytes for some numbers of them, [numbers, ...].

    >>> _most([1, 2, 4], np.array([[1.0, 9.0], [2.0, 9.5], [4.0, 12.0]]), 3.5)
    array([3., 0.])
    """
    most = np.where(num_bytes[0] <= usable_bytes, float(numbers[0]), 0.0)
    for (n, more), low, high in zip(
        itertools.pairwise(numbers), num_bytes[:-1], num_bytes[1:], strict=True
    ):
        share = np.clip((usable_bytes - low) / np.maximum(high - low, 1.0), 0.0, 1.0)
        most = np.where(low <= usable_bytes, n + np.floor((more - n) * share + 1e-9), most)
    return most
