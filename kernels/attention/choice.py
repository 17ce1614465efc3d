"""The choice of an implementation of attention: cuDNN, the Pallas kernels, or plain JAX.

`auto` takes what is known to work: cuDNN, which others have run for years, else plain JAX. The
Pallas kernels were right on an H200, and slower than cuDNN in the backward. So `auto` takes them
only where cuDNN cannot compute the arrays and a check on this very machine has passed.

The kernels are imported where a Hopper GPU may run them: JAX takes a third of a second to import
what they are written with.
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from kernels.attention.tiles import Rule

Implementation = Literal["cudnn", "pallas", "reference"]
NAMES = {"cudnn": "cuDNN", "pallas": "the Pallas kernels", "reference": "plain JAX"}
UNCHECKED = "passed check on this machine"  # what the Pallas kernels lack, if nobody has checked


class UnsupportedError(ValueError):
    """The implementation that was asked for cannot compute these arrays, and why."""


class AttentionChoice(NamedTuple):
    """An implementation, and why it is this one."""

    implementation: Implementation
    reason: str

    def __str__(self) -> str:
        return f"{NAMES[self.implementation]} ({self.reason})"


def choose(
    asked: str,
    device: Any,
    q_BLHK: Any,
    k_BMGK: Any,
    v_BMGK: Any,
    *,
    rule: Rule,
    has_segments: bool,
    is_cut: bool,
    deterministic: bool,
    unproven: str | None = UNCHECKED,
) -> AttentionChoice:
    """Returns the implementation that computes attention of these arrays.

    Args:
      asked: an `Implementation`, or "auto": plain JAX on devices that are no NVIDIA GPUs; on others
        the first of cuDNN and Pallas that can compute the arrays, and plain JAX where neither can.
      device: one of those that hold the arrays, or its platform, kind and compute capability.
      q_BLHK, k_BMGK, v_BMGK: queries, keys and values, or their shapes and dtypes.
      rule: which keys a query sees, and what is done to scores.
      has_segments: whether a query sees the keys of its own document only.
      is_cut: whether several devices share each sequence.
      deterministic: whether gradients must have the same bits each time.
      unproven: what the Pallas kernels lack to be taken by "auto"; None: nothing.

    Raises:
      UnsupportedError: `asked` names an implementation that cannot compute the arrays.
    """
    if asked == "reference":
        return AttentionChoice("reference", "kernels.attention asks for it")
    if asked == "auto" and not is_nvidia(device):
        return AttentionChoice(
            "reference", f"on {device.device_kind} devices there is nothing else"
        )
    refusals: dict[Implementation, str | None] = {
        "cudnn": _cudnn_refuses(device, q_BLHK, rule, has_segments, is_cut, deterministic)
        or _cudnn_is_missing(),
        "pallas": _pallas_refuses(device, q_BLHK, k_BMGK, v_BMGK, deterministic),
    }
    if asked != "auto":
        [chosen] = (implementation for implementation in refusals if implementation == asked)
        if reason := refusals[chosen]:
            raise UnsupportedError(reason)
        return AttentionChoice(chosen, "kernels.attention asks for it")
    refusals["pallas"] = refusals["pallas"] or unproven
    reasons: list[str] = []
    for implementation, reason in refusals.items():
        if reason is None:
            return AttentionChoice(
                implementation, "; ".join(reasons) or "the first that can compute it"
            )
        start = "cuDNN has" if implementation == "cudnn" else "the Pallas kernels have"
        reasons.append(f"{start} no {reason}")
    return AttentionChoice("reference", "; ".join(reasons))


def depends_on_check(
    device: Any,
    q_BLHK: Any,
    k_BMGK: Any,
    v_BMGK: Any,
    *,
    rule: Rule,
    has_segments: bool,
    is_cut: bool,
    deterministic: bool,
) -> bool:
    """Whether "auto" takes the Pallas kernels if a check of them passes. Starts no device.

    Args: see `choose`.
    """
    return (
        is_nvidia(device)
        and _cudnn_refuses(device, q_BLHK, rule, has_segments, is_cut, deterministic) is not None
        and _pallas_refuses(device, q_BLHK, k_BMGK, v_BMGK, deterministic) is None
    )


def is_nvidia(device: Any) -> bool:
    return device.platform == "gpu" and "NVIDIA" in device.device_kind


def is_hopper(device: Any) -> bool:
    return is_nvidia(device) and _capability(device) == (9, 0)


def _capability(device: Any) -> tuple[int, ...]:
    """The compute capability: (9, 0) of a Hopper GPU, (0,) where JAX does not say."""
    return tuple(map(int, str(getattr(device, "compute_capability", None) or 0).split(".")))


def _pallas_refuses(
    device: Any, q_BLHK: Any, k_BMGK: Any, v_BMGK: Any, deterministic: bool
) -> str | None:
    if not is_hopper(device):
        return f"{device.device_kind} devices: supported are NVIDIA Hopper GPUs"
    from kernels.attention.pallas import unsupported

    return unsupported(q_BLHK, k_BMGK, v_BMGK, deterministic)


def _cudnn_refuses(
    device: Any, q_BLHK: Any, rule: Rule, has_segments: bool, is_cut: bool, deterministic: bool
) -> str | None:
    if not is_nvidia(device):
        return f"{device.device_kind} devices: supported are NVIDIA GPUs"
    if (capability := _capability(device)) < (8, 0):
        return f"{device.device_kind} devices: supported are NVIDIA GPUs from Ampere on"
    if q_BLHK.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{q_BLHK.dtype}: supported are bfloat16, float16"
    widest = 256 if capability >= (9, 0) else 128
    if q_BLHK.shape[-1] > widest or q_BLHK.shape[-1] % 8:
        return f"heads {q_BLHK.shape[-1]} wide: supported are multiples of 8 up to {widest}"
    if is_cut:  # JAX gives a log-sum-exp in the dtype of the output only
        return "sequences that several devices share: supported are whole ones"
    if deterministic:
        return "gradients of the same bits each time: kernels.deterministic_attention asks for them"
    if rule.soft_cap is not None:
        return "soft cap of scores"
    if has_segments:  # JAX takes a mask of all pairs, or offsets in a function that is not public
        return "documents: supported is attention to all that came before"
    return None


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
