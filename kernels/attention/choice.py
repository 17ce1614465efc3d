"""The choice of an implementation of attention: cuDNN, the kernels of this package, or plain JAX.

`auto` takes what is known to work: cuDNN, which others have run for years and whose backward is the
fastest. Where cuDNN cannot compute the arrays, it takes the Pallas kernels on Hopper GPUs and JAX's
own Triton kernels on others, if a check on this very machine has passed. Else it takes plain JAX.

A run and the planner, which prices what a run will take, ask the same function. Therefore nothing
here needs JAX, and `missing` and `unproven` say what only a run can know.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Implementation = Literal["cudnn", "pallas", "triton", "reference"]
NAMES: dict[Implementation, str] = {
    "cudnn": "cuDNN",
    "pallas": "the Pallas kernels",
    "triton": "JAX's Triton kernels",
    "reference": "plain JAX",
}
HALF_PRECISION = ("bfloat16", "float16")
PALLAS_HEAD_WIDTHS = (64, 128, 256)
DETERMINISTIC_HEAD_WIDTHS = (64, 128)  # wider gradients do not fit into the registers
TRITON_WIDEST = 128  # wider tiles do not fit into the shared memory of all these GPUs
UNCHECKED = "passed check on this machine"  # what checked kernels lack, if nobody has checked


class UnsupportedError(ValueError):
    """The implementation that was asked for cannot compute these arrays, and why."""


class Device(NamedTuple):
    """A device in the words of JAX, where no JAX has seen it."""

    platform: str  # "gpu"
    device_kind: str  # "NVIDIA H200"
    compute_capability: str | None = None  # "9.0"


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """The properties of some attention that decide what can compute it."""

    dtype: str  # of queries, keys and values
    head_width: int
    length: int  # tokens of a sequence
    window: int | None = None  # keys that a query sees; None: all before it
    soft_cap: float | None = None  # of scores
    has_documents: bool = False  # whether a query sees the keys of its own document only
    is_cut: bool = False  # whether several devices share each sequence
    deterministic: bool = False  # whether gradients must have the same bits each time


class AttentionChoice(NamedTuple):
    """An implementation, and why it is this one."""

    implementation: Implementation
    reason: str

    def __str__(self) -> str:
        return f"{NAMES[self.implementation]} ({self.reason})"


def _nothing(_: Implementation) -> None:
    return None


def choose(
    asked: str,
    device: Any,
    needs: Needs,
    *,
    missing: Callable[[Implementation], str | None] = _nothing,
    unproven: str | None = UNCHECKED,
) -> AttentionChoice:
    """Returns the implementation that computes attention.

    Args:
      asked: an `Implementation`, or "auto": plain JAX on devices that are no NVIDIA GPUs; on others
        the first that can compute the arrays of cuDNN, Pallas and Triton, else plain JAX.
      device: one of those that hold the arrays, or a `Device` that says as much.
      needs: what is computed.
      missing: says why an implementation cannot run on this machine; None: it can.
      unproven: what the kernels of this package lack to be taken by "auto"; None: nothing.

    Raises:
      UnsupportedError: `asked` names an implementation that cannot compute the arrays.
    """
    if asked == "reference":
        return AttentionChoice("reference", "kernels.attention asks for it")
    if asked == "auto" and not is_nvidia(device):
        return AttentionChoice(
            "reference", f"on {device.device_kind} devices there is nothing else"
        )
    reasons: list[str] = []
    for implementation, refuses in REFUSALS.items():
        if asked not in ("auto", implementation):
            continue
        reason = refuses(device, needs) or missing(implementation)
        if asked != "auto":
            if implementation == "cudnn" and not reason:
                reason = _cudnn_refuses_alone(needs)
            if reason:
                raise UnsupportedError(reason)
            return AttentionChoice(implementation, "kernels.attention asks for it")
        if reason is None and implementation in CHECKED:
            reason = unproven
        if reason is None:
            return AttentionChoice(
                implementation, "; ".join(reasons) or "the first that can compute it"
            )
        has = "has" if implementation == "cudnn" else "have"
        reasons.append(f"{NAMES[implementation]} {has} no {reason}")
    return AttentionChoice("reference", "; ".join(reasons))


def to_check(device: Any, needs: Needs) -> Implementation | None:
    """The kernels that "auto" takes if a check of them passes; None if no check decides.

    Args: see `choose`.
    """
    chosen = choose("auto", device, needs, unproven=None).implementation
    return chosen if chosen in CHECKED else None


def is_nvidia(device: Any) -> bool:
    return device.platform == "gpu" and "NVIDIA" in device.device_kind


BEFORE_HOPPER = (8, 9)  # a compute capability


def is_hopper(device: Any) -> bool:
    return is_nvidia(device) and capability(device) == (9, 0)


def capability(device: Any) -> tuple[int, ...]:
    """The compute capability: (9, 0) of a Hopper GPU, (0,) where JAX does not say."""
    said = str(getattr(device, "compute_capability", None))  # "gfx942" of an AMD GPU
    return tuple(map(int, said.split("."))) if re.fullmatch(r"\d+(\.\d+)*", said) else (0,)


def _is_too_old(device: Any) -> str | None:
    if not is_nvidia(device):
        return f"{device.device_kind} devices: supported are NVIDIA GPUs"
    if capability(device) < (8, 0):
        return f"{device.device_kind} devices: supported are NVIDIA GPUs from Ampere on"
    return None


def _is_too_precise(dtype: str) -> str | None:
    if dtype not in HALF_PRECISION:
        return f"{dtype}: supported are {', '.join(HALF_PRECISION)}"
    return None


def _cudnn_refuses(device: Any, needs: Needs) -> str | None:
    if reason := _is_too_old(device) or _is_too_precise(needs.dtype):
        return reason
    widest = 256 if capability(device) >= (9, 0) else 128
    if needs.head_width > widest or needs.head_width % 8:
        return f"heads {needs.head_width} wide: supported are multiples of 8 up to {widest}"
    if needs.is_cut:  # JAX gives a log-sum-exp in the dtype of the output only
        return "sequences that several devices share: supported are whole ones"
    if needs.deterministic:
        return "gradients of the same bits each time: kernels.deterministic_attention asks for them"
    if needs.soft_cap is not None:
        return "soft cap of scores"
    if needs.has_documents:  # JAX takes a mask of all pairs, or offsets in a private function
        return "documents: supported is attention to all that came before"
    return None


def _cudnn_refuses_alone(needs: Needs) -> str | None:
    """Returns what JAX's cuDNN alone refuses, and "auto" gets round (`cudnn`)."""
    if needs.length % 2:
        return (
            f"gradients for sequences of an odd length, {needs.length} tokens: an even length has "
            "them, and kernels.attention: auto adds a token that nothing sees"
        )
    return None


def _pallas_refuses(device: Any, needs: Needs) -> str | None:
    if not is_hopper(device):
        return f"{device.device_kind} devices: supported are NVIDIA Hopper GPUs"
    return pallas_lacks({needs.dtype}, needs.head_width, needs.deterministic)


def pallas_lacks(dtypes: set[str], head_width: int, deterministic: bool) -> str | None:
    """Returns what of some arrays the Pallas kernels cannot compute, and which they can."""
    if len(dtypes) > 1 or not dtypes <= set(HALF_PRECISION):
        supported = ", ".join(HALF_PRECISION)
        return f"dtypes {', '.join(sorted(dtypes))}: supported is one of {supported}"
    widths = DETERMINISTIC_HEAD_WIDTHS if deterministic else PALLAS_HEAD_WIDTHS
    if head_width not in widths:
        supported = ", ".join(map(str, widths))
        condition = " with the same bits each time" if deterministic else ""
        return f"heads {head_width} wide{condition}: supported are {supported}"
    return None


def _triton_refuses(device: Any, needs: Needs) -> str | None:
    if reason := _is_too_old(device) or _is_too_precise(needs.dtype):
        return reason
    if needs.head_width > TRITON_WIDEST:
        return f"heads {needs.head_width} wide: supported are those up to {TRITON_WIDEST}"
    if needs.is_cut:  # their queries and keys have the same documents
        return "sequences that several devices share: supported are whole ones"
    if needs.window is not None:
        return "windows"
    if needs.soft_cap is not None:
        return "soft cap of scores"
    return None


# In the order in which "auto" takes them.
REFUSALS: dict[Implementation, Callable[[Any, Needs], str | None]] = {
    "cudnn": _cudnn_refuses,
    "pallas": _pallas_refuses,
    "triton": _triton_refuses,
}
CHECKED = ("pallas", "triton")  # those that "auto" takes after a check
