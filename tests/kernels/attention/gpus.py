"""Kernels where there is no GPU, and programs for GPUs that are not there."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax

# With `pytest --gpu` kernels run on the device, without it as simulated threads.
INTERPRET = jax.default_backend() == "cpu"

H200 = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")
A100 = SimpleNamespace(platform="gpu", device_kind="NVIDIA A100", compute_capability="8.0")


def lowered_for_cuda(function: Callable, *args: Any) -> str:
    """The text of the program, for an NVIDIA GPU."""
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
