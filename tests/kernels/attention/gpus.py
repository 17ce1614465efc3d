"""Kernels where there is no GPU, and programs for GPUs that are not there."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

# With `pytest --gpu` kernels run on the device, without it as simulated threads.
INTERPRET = jax.default_backend() == "cpu"

H200 = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")
B200 = SimpleNamespace(platform="gpu", device_kind="NVIDIA B200", compute_capability="10.0")
V100 = SimpleNamespace(platform="gpu", device_kind="NVIDIA V100", compute_capability="7.0")
A100 = SimpleNamespace(platform="gpu", device_kind="NVIDIA A100", compute_capability="8.0")


def first_devices(count: int) -> np.ndarray:
    """So many of JAX's devices. A test is skipped on real GPUs that are fewer."""
    if len(jax.devices()) < count:
        pytest.skip(f"needs {count} devices")
    return np.array(jax.devices()[:count])


def lowered_for_cuda(function: Callable, *args: Any) -> str:
    """The text of the program, for an NVIDIA GPU."""
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def on_described_gpu(kind: str) -> AbstractContextManager:
    """A context in which Triton kernels lower without a GPU. JAX 0.10 needs none."""
    if jax.__version_info__ < (0, 11):
        return nullcontext()
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=108, platform="gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)
