"""The devices and layers of each stage, as a search decides them.

segment     consecutive stages of the pipeline that share a pool, and their mesh
slot        the place of one stage in its segment
assignment  segments in the order of the pipeline, with the layers of every stage
"""

import functools
import itertools
from typing import NamedTuple

from holmesjax.planner.stage_layouts import MeshShape


class StageSlot(NamedTuple):
    """The place of one stage: one of the stages of a segment."""

    pool: int
    mesh: MeshShape
    num_stages: int  # of the segment
    number: int  # of them


class Segment(NamedTuple):
    """Consecutive stages on one pool."""

    pool: int
    mesh: MeshShape
    num_stages: int

    @property
    def slots(self) -> tuple[StageSlot, ...]:
        return _slots(self)


@functools.cache  # a search asks over and over
def _slots(segment: Segment) -> tuple[StageSlot, ...]:
    return tuple(StageSlot(*segment, index) for index in range(segment.num_stages))


class Assignment(NamedTuple):
    """The devices and the layers of every stage; with a schedule, one way to train."""

    segments: tuple[Segment, ...]
    layers: tuple[int, ...]  # Transformer layers of each stage
    # The first layers of each stage that the checkpointing is for. Empty: it is for all.
    recomputed: tuple[int, ...] = ()

    @property
    def slots(self) -> tuple[StageSlot, ...]:
        return tuple(itertools.chain(*(segment.slots for segment in self.segments)))
