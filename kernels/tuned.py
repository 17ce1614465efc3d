"""Tiles that were the fastest on a kind of device, by the sizes they were measured with.

`benchmarks.kernels_tune` measures them and writes `tuned.json`. Nothing is measured while a model
trains: other tiles would be another order of sums.
"""

import dataclasses
import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

PATH = Path(__file__).with_name("tuned.json")


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The tiles of attention's kernels, of a class of their backend."""

    forward: Any
    dq: Any
    dkv: Any
    joint: Any = None  # of a backend that has one kernel for all gradients


class Case(NamedTuple):
    """What tiles are for."""

    device_kind: str  # as JAX calls it: "NVIDIA H200"
    backend: str
    dtype: str
    head_width: int
    length: int  # keys


@functools.cache
def entries() -> list[dict[str, Any]]:
    """The fields of a case, the name of a kernel, its tiles, and how they were measured."""
    found: list[dict[str, Any]] = json.loads(PATH.read_text())
    return found


def tuned(defaults: Kernels, case: Case) -> Kernels:
    """The tiles measured for a case, at the nearest length; the defaults where there are none."""
    same = [
        entry
        for entry in entries()
        if all(entry[name] == getattr(case, name) for name in Case._fields if name != "length")
    ]
    found = {}
    for field in dataclasses.fields(Kernels):
        apart = {
            abs(math.log(entry["length"] / case.length)): entry["tiles"]
            for entry in same
            if entry["kernel"] == field.name
        }
        if apart:
            found[field.name] = type(getattr(defaults, field.name))(**apart[min(apart)])
    return dataclasses.replace(defaults, **found)
