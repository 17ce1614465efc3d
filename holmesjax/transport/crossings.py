"""The arrays that cross from stage to stage in every step, with their shapes and layouts.

They are plain data, and the same in every process of a job. So both ends of a link compute who
sends what to whom, and compare the result before the first byte.
"""

from dataclasses import dataclass
from typing import NamedTuple

# For each dim of an array, the mesh axes that cut it: `PartitionSpec` without JAX.
Spec = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Crossing:
    """An array handed from one stage to another in every step."""

    name: str  # unique in the plan: "F0" is what chunk 0 gives forward
    source: int  # stage
    target: int
    link: str  # "ib -> roce", as metrics name it
    shape: tuple[int, ...]
    dtype: str
    source_spec: Spec
    target_spec: Spec
    is_whole: bool = False  # goes to every process whole: too small to be shared, or counted


class Key(NamedTuple):
    """The key of one array: its crossing, step and microbatch."""

    crossing: str
    step: int  # counts optimizer steps and validations of this session
    microbatch: int

    def __str__(self) -> str:
        return f"{self.crossing} of microbatch {self.microbatch}"
