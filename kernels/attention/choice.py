"""The choice of an implementation of attention: cuDNN, the Pallas kernels, or plain JAX.

cuDNN comes first: the Pallas kernels have not been measured against it.
"""

import functools
import logging
from typing import Literal

import jax
import jax.numpy as jnp

from kernels.attention import pallas

Implementation = Literal["cudnn", "pallas", "reference"]


class UnsupportedError(ValueError):
    """The implementation that was asked for cannot compute these arrays, and why."""


def choose(
    asked: str,
    device: jax.Device,
    q_BLHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    *,
    has_segments: bool,
    is_cut: bool,
    deterministic: bool,
) -> Implementation:
    """Returns the implementation that computes causal attention of these arrays.

    Args:
      asked: an `Implementation`, or "auto": plain JAX on devices that are no NVIDIA GPUs; on others
        the first of cuDNN and Pallas that can compute the arrays, and plain JAX, with a warning,
        where neither can.
      device: one of those that hold the arrays.
      q_BLHK, k_BMGK, v_BMGK: queries, keys and values, or their shapes and dtypes.
      has_segments: whether a query sees the keys of its own document only.
      is_cut: whether several devices share each sequence.
      deterministic: whether gradients must have the same bits each time.

    Raises:
      UnsupportedError: `asked` names an implementation that cannot compute the arrays.
    """
    if asked == "reference" or (asked == "auto" and not is_nvidia(device)):
        return "reference"
    refusals: dict[Implementation, str | None] = {
        "cudnn": _cudnn_refuses(device, q_BLHK, has_segments, is_cut, deterministic),
        "pallas": _pallas_refuses(device, q_BLHK, k_BMGK, v_BMGK, deterministic),
    }
    reasons = []
    for implementation, reason in refusals.items():
        if asked in (implementation, "auto"):
            if reason is None:
                return implementation
            reasons.append(f"{implementation} has no {reason}")
            if asked == implementation:
                raise UnsupportedError(reason)
    _warn_once(f"attention runs as plain JAX: {'; '.join(reasons)}")
    return "reference"


def is_nvidia(device: jax.Device) -> bool:
    return device.platform == "gpu" and "NVIDIA" in device.device_kind


def is_hopper(device: jax.Device) -> bool:
    return is_nvidia(device) and str(getattr(device, "compute_capability", "")) == "9.0"


def _pallas_refuses(
    device: jax.Device,
    q_BLHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    deterministic: bool,
) -> str | None:
    if not is_hopper(device):
        return f"{device.device_kind} devices: supported are NVIDIA Hopper GPUs"
    return pallas.unsupported(q_BLHK, k_BMGK, v_BMGK, deterministic)


def _cudnn_refuses(
    device: jax.Device, q_BLHK: jax.Array, has_segments: bool, is_cut: bool, deterministic: bool
) -> str | None:
    if not is_nvidia(device):
        return f"{device.device_kind} devices: supported are NVIDIA GPUs"
    if q_BLHK.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{q_BLHK.dtype}: supported are bfloat16, float16"
    if q_BLHK.shape[-1] > 128 or q_BLHK.shape[-1] % 8:
        return f"heads {q_BLHK.shape[-1]} wide: supported are multiples of 8 up to 128"
    if is_cut:  # JAX gives no log-sum-exp of it
        return "sequences that several devices share: supported are whole ones"
    if deterministic:
        return "gradients of the same bits each time: kernels.deterministic_attention asks for them"
    if has_segments:
        return "documents: supported is attention to all that came before"
    return _cudnn_is_missing()


@functools.cache
def _cudnn_is_missing() -> str | None:
    """Returns why JAX cannot call cuDNN on this machine; None where it can."""
    x = jax.ShapeDtypeStruct((1, 64, 1, 64), jnp.bfloat16)
    call = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    try:
        jax.eval_shape(call, x, x, x)
    except RuntimeError as error:
        return f"library that JAX finds here: {error}"
    return None


@functools.cache
def _warn_once(line: str) -> None:
    """Once for each line, and not for every layer."""
    logging.getLogger(__name__).warning(line)
