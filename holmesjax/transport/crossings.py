"""What crosses from stage to stage: arrays of known shape and layout, again and again.

Plain data, the same in every process of a job, so that both ends of a link can compute who sends
what to whom and compare notes before the first byte.
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
    """One array on its way."""

    crossing: str
    step: int  # counts optimizer steps and validations of this session
    microbatch: int

    def __str__(self) -> str:
        return f"{self.crossing} of microbatch {self.microbatch}"
