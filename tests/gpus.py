"""Kernels where there is no GPU, and programs for GPUs that are not there."""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh

# With `pytest --gpu` kernels run on the device, without it as ordinary JAX operations.
INTERPRET = jax.default_backend() == "cpu"


def lowered_for_cuda(function: Callable, *args: Any, **options: Any) -> str:
    """The text of the program, for an NVIDIA GPU. `options` are those of `jax.jit`."""
    with _an_h200(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated")
        traced = jax.jit(function, **options).trace(*args)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def _an_h200() -> contextlib.AbstractContextManager:
    """Newer JAX asks which GPU a Triton kernel is for."""
    try:
        from jax.sharding import AbstractDevice, use_abstract_mesh
    except ImportError:
        return contextlib.nullcontext()
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))
