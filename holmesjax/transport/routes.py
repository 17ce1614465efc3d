"""Decides who sends which part of a crossing to whom. No JAX.

    box     a part of an array: start and stop of every dim
    wire    how the target's devices share what they receive: `target_spec`, plus the mesh axes
            whose replicas live in several processes, on the first dims that they divide
    piece   what of a wire box one process sends to one other

Every byte crosses once, replicas included. A process whose devices hold the same box receives it
once and copies it. If several processes hold it, each receives a share, and a collective of the
target stage rebuilds the whole. Scalars, which no axis cuts, and crossings that are `is_whole` go
to every process.
"""

import heapq
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from holmesjax.errors import PlanError
from holmesjax.layer_specs.array_boxes import Box, intersection, num_elements
from holmesjax.plan.plan import Plan, StagePlan
from holmesjax.plan.processes import Process
from holmesjax.transport.crossings import Crossing, Spec


class Piece(NamedTuple):
    """A part of an array that one process sends to another."""

    box: Box  # in the whole array
    source: int  # process number
    target: int
    devices: tuple[int, ...]  # of the target that receive it: numbers in the topology


def boxes(shape: Sequence[int], spec: Spec, stage: StagePlan) -> dict[int, Box]:
    """Returns the box of each device of a stage, by number, as `NamedSharding` cuts."""
    sizes = _sizes(stage)
    held = {}
    places = itertools.product(*map(range, sizes.values()))  # row-major, like the devices
    for device, place in zip(stage.devices, places, strict=True):
        at = dict(zip(sizes, place, strict=True))
        held[device] = tuple(
            _range(size, axes, sizes, at) for size, axes in zip(shape, spec, strict=True)
        )
    return held


def _sizes(stage: StagePlan) -> dict[str, int]:
    return {axis.value: size for axis, size in stage.mesh.items()}


def _range(
    size: int, axes: Sequence[str], sizes: Mapping[str, int], at: Mapping[str, int]
) -> tuple[int, int]:
    """Returns the part of a dim at some mesh coordinates; the first axis is the major one."""
    part, num_parts = 0, 1
    for axis in axes:
        part, num_parts = part * sizes[axis] + at[axis], num_parts * sizes[axis]
    assert size % num_parts == 0, f"{axes} of {dict(sizes)} do not divide a dim of {size}"
    step = size // num_parts
    return part * step, (part + 1) * step


def wire_spec(crossing: Crossing, plan: Plan, processes: Sequence[Process]) -> Spec:
    """Returns how an array is cut when it arrives at its target.

    Raises:
      PlanError: replicas in several processes cannot share it, because no dim divides.
    """
    stage = plan.stages[crossing.target]
    if not crossing.shape or crossing.is_whole:
        return crossing.target_spec
    spec = [list(axes) for axes in crossing.target_spec]
    used = set(itertools.chain(*spec))
    sizes = _sizes(stage)
    for axis, size in sizes.items():
        if axis in used or not _spans_processes(axis, stage, processes):
            continue
        for length, axes in zip(crossing.shape, spec, strict=True):
            if length % (size * math.prod(sizes[name] for name in axes)) == 0:
                axes.append(axis)
                break
        else:
            raise PlanError(
                f"crossing {crossing.name}, {crossing.link}",
                f"the processes along mesh axis {axis} hold the same array and cannot share "
                "its transfer, because no dim can be cut further",
                found=f"shape {crossing.shape}, already cut by {crossing.target_spec}, "
                f"{axis} {size}",
                fix=f"choose sizes so that a dim is a multiple of {size}, or another mesh",
            )
    return tuple(map(tuple, spec))


def _spans_processes(axis: str, stage: StagePlan, processes: Sequence[Process]) -> bool:
    """Whether some neighbours along a mesh axis are in different processes."""
    home = {device: p.number for p in processes for device in p.devices}
    axes, sizes = zip(*_sizes(stage).items(), strict=True)
    stride, size = math.prod(sizes[axes.index(axis) + 1 :]), sizes[axes.index(axis)]
    return any(
        home[device] != home[stage.devices[i + stride]]
        for i, device in enumerate(stage.devices)
        if i // stride % size < size - 1
    )


def pieces(crossing: Crossing, plan: Plan, processes: Sequence[Process]) -> tuple[Piece, ...]:
    """Returns all pieces of a crossing, target by target; the same in every process of the job."""
    home = {device: p.number for p in processes for device in p.devices}
    stages = plan.stages[crossing.source], plan.stages[crossing.target]
    holders: dict[Box, set[int]] = defaultdict(set)  # of each box, the processes that have it
    for device, box in boxes(crossing.shape, crossing.source_spec, stages[0]).items():
        holders[box].add(home[device])
    landing: dict[tuple[int, Box], list[int]] = defaultdict(list)
    wire = wire_spec(crossing, plan, processes)
    for device, box in boxes(crossing.shape, wire, stages[1]).items():
        landing[home[device], box].append(device)
    grid = _grid(crossing.shape, crossing.source_spec, _sizes(stages[0]))
    found = []
    sent: Counter[int] = Counter()  # elements by each source, so that copies take turns
    turns = {box: [(0, number) for number in sorted(held)] for box, held in holders.items()}
    for (target, wanted), devices in sorted(landing.items()):
        for held in _overlapping(wanted, grid):
            common = intersection(wanted, held)
            assert common is not None, f"{wanted} does not reach {held}"
            source = _take_turn(turns[held], sent)
            sent[source] += num_elements(common)
            found.append(Piece(common, source, target, tuple(devices)))
    return tuple(found)


def _grid(shape: Sequence[int], spec: Spec, sizes: Mapping[str, int]) -> list[int]:
    """Returns the length of the parts of each dim."""
    return [
        size // math.prod(sizes[axis] for axis in axes)
        for size, axes in zip(shape, spec, strict=True)
    ]


def _overlapping(box: Box, grid: Sequence[int]) -> Iterator[Box]:
    """Yields the boxes of a grid that overlap a box, in ascending order; it visits no others."""
    ranges = (
        [(at, at + step) for at in range(start // step * step, stop, step)]
        for (start, stop), step in zip(box, grid, strict=True)
    )
    return itertools.product(*ranges)


def _take_turn(turns: list[tuple[int, int]], sent: Mapping[int, int]) -> int:
    """Returns the process that has sent least, from a heap of (elements sent, number).

    Counts of elements sent only grow: one that is out of date is corrected when it comes up.
    """
    while turns[0][0] < (now := sent[turns[0][1]]):
        heapq.heapreplace(turns, (now, turns[0][1]))
    return turns[0][1]
