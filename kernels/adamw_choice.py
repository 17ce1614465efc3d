"""The choice of an implementation of AdamW's step: the Pallas kernel, or XLA's pass.

`auto` is XLA until `benchmarks.gpu_day` has shown on a kind of device that the kernel is faster
there: a row of `MEASURED` says so, and this machine has to pass a check of the kernel besides.

    add a row     run `python -m benchmarks.gpu_day --out DIR` on a GPU, and copy the rates of the
                  rows "adamw: ..., one array" of a format: by the kernel, and by XLA. They are of
                  parameters in float32; none speaks for those in bfloat16
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from kernels.attention.choice import UNCHECKED, UnsupportedError, is_hopper, is_nvidia

OptimizerImplementation = Literal["pallas", "xla"]
PARAMETERS = "float32"  # of the rows
NAMES = {"pallas": "the Pallas kernel", "xla": "XLA"}


class MeasuredStep(NamedTuple):
    """The bytes/s of a step of one large array, of both implementations on a kind of device."""

    device_kind: str  # as JAX names it
    moments: str  # how they are kept
    kernel_gb_per_s: float
    xla_gb_per_s: float
    source: str  # the date and the commit of the run


MEASURED = (MeasuredStep("NVIDIA H200", "float32", 4064, 4158, "2026-11-27, commit 5f7ba2d"),)


class OptimizerChoice(NamedTuple):
    """An implementation, and why it is this one."""

    implementation: OptimizerImplementation
    reason: str

    def __str__(self) -> str:
        return f"{NAMES[self.implementation]} ({self.reason})"


def choose_optimizer(
    asked: str,
    device: Any,
    moments: str,
    *,
    parameters: str = PARAMETERS,
    unproven: str | None = UNCHECKED,
    measured: Sequence[MeasuredStep] | None = None,
) -> OptimizerChoice:
    """Returns the implementation of AdamW's step.

    Args:
      asked: an `OptimizerImplementation`, or "auto".
      device: one of the stage's, or its platform, kind and compute capability.
      moments: how they are kept: float32, bfloat16 or int8.
      parameters: how they are kept: float32 or bfloat16.
      unproven: what the kernel lacks to be taken by "auto"; None: nothing.
      measured: what "auto" goes by; None: `MEASURED`.

    Raises:
      UnsupportedError: the kernel is asked for, and it is not for the device.
    """
    if asked == "xla":
        return OptimizerChoice("xla", "kernels.optimizer asks for it")
    if asked == "pallas":
        if not is_hopper(device):
            problem = f"{device.device_kind} devices: supported are NVIDIA Hopper GPUs"
            raise UnsupportedError(problem)
        return OptimizerChoice("pallas", "kernels.optimizer asks for it")
    if not is_nvidia(device):
        return OptimizerChoice("xla", f"on {device.device_kind} devices there is nothing else")
    if parameters != PARAMETERS:
        what = f"the kernel with parameters in {parameters} has not been measured"
        return OptimizerChoice("xla", what)
    rows = MEASURED if measured is None else measured
    key = device.device_kind, moments
    of_device = [row for row in rows if (row.device_kind, row.moments) == key]
    if not is_hopper(device) or not of_device:
        what = f"the kernel with moments in {moments} has not been measured on {device.device_kind}"
        return OptimizerChoice("xla", what)
    row = of_device[-1]
    beside = f"{row.kernel_gb_per_s:g} beside {row.xla_gb_per_s:g} GB/s, {row.source}"
    if row.kernel_gb_per_s <= row.xla_gb_per_s:
        return OptimizerChoice("xla", f"the kernel is not faster: {beside}")
    if unproven is not None:
        return OptimizerChoice("xla", f"the Pallas kernel has no {unproven}")
    return OptimizerChoice("pallas", f"it is faster: {beside}")


def depends_on_check(device: Any, moments: str) -> bool:
    """Whether "auto" takes the kernel if a check of it passes. Starts no device.

    Args: see `choose_optimizer`.
    """
    proven = choose_optimizer("auto", device, moments, unproven=None)
    return proven.implementation == "pallas"
