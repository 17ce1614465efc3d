"""The implementation of attention that a stage will run, and the seconds that it takes.

A calibration has the speed of one implementation: of cuDNN on NVIDIA GPUs, of plain JAX elsewhere.
The others' known speeds stand here, beside it. What a run will take is decided by the function
that the run asks itself, `kernels.attention.choice`. A plan counts on checks that pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from holmesjax.config import Config
from holmesjax.costs.implementation import Implementation
from holmesjax.layer_specs.kind import Attention
from holmesjax.topology import catalogue
from holmesjax.topology.calibration import UNKNOWN, Product
from holmesjax.topology.machines import DeviceKind
from kernels.attention.choice import AttentionChoice, Device, Needs, UnsupportedError, choose


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedAttention:
    """The part of a run file that decides what computes attention."""

    implementation: str  # the setting `kernels.attention`
    has_documents: bool
    deterministic: bool


class PassTimes(NamedTuple):
    """Seconds of a forward and a backward, or their shares of another's."""

    forward: float
    backward: float


# Times of kernels, to those of cuDNN. Pallas: on an H200, 64 query and 8 key-value heads 128 wide,
# 4,096 to 16,384 tokens. Triton: not measured by us; those of tokamax on an H100 with 8,192 tokens,
# 366 and 332 TFLOP/s to 629 and 541 of cuDNN (tokamax@783ea95, cudnn-frontend@3929da2).
TO_CUDNN = {"pallas": PassTimes(0.98, 1.18), "triton": PassTimes(1.72, 1.63)}
# Plain JAX has the scores in memory: how many float32 numbers are read or written for each score
# that is computed. Fitted to an H200's times of the same shapes, which they predict within a tenth.
PLAIN_PASSES = PassTimes(7.5, 10.5)


def asked_of(config: Config) -> AskedAttention:
    return AskedAttention(
        implementation=config.kernels.attention,
        has_documents=config.data.documents == "mask",
        deterministic=config.kernels.deterministic_attention,
    )


def choice_of(
    attention: Attention,
    asked: AskedAttention,
    kind: DeviceKind,
    *,
    dtype: str,
    length: int,
    context: int,
) -> AttentionChoice | None:
    """Returns the choice of a run for a layer on a kind of device.

    None for kinds that the catalogue does not have, and where the run itself will refuse.

    Args:
      attention: of the layer.
      asked: what the run asks for.
      kind: the kind of device.
      dtype: of matrix products.
      length: tokens of a sequence.
      context: devices that share each sequence.
    """
    if (seen := catalogue.AS_JAX_SEES_THEM.get(kind.name)) is None:
        return None
    needs = Needs(
        dtype=dtype,
        head_width=attention.head_width,
        length=length,
        window=attention.window,
        soft_cap=attention.soft_cap,
        has_documents=asked.has_documents,
        is_cut=context > 1,
        deterministic=asked.deterministic,
    )
    try:
        return choose(asked.implementation, Device(*seen), needs, unproven=None)
    except UnsupportedError:
        return None


def attention_s(
    products: Sequence[Product],
    choice: AttentionChoice | None,
    kind: DeviceKind,
    dtype: str,
    context: int,
    implementation: Implementation,
) -> PassTimes:
    """Seconds of a layer's attention, forward and backward.

    Args:
      products: of all pairs of tokens (`costs.products.attention_products`).
      choice: what computes it; None: what the kind was calibrated with.
      kind: the kind of device.
      dtype: of matrix products.
      context: devices that share each sequence.
      implementation: which pairs are computed, and the products of a backward.
    """
    pairs = implementation.pairs(context)
    to_forward = implementation.attention_backward
    if choice is not None and choice.implementation == "reference" and not _is_of_plain(kind):
        products_s = pairs * kind.products_s(products, dtype)
        scores = sum(product.rows * product.columns * product.times for product in products[:1])
        pass_s = float(kind.memory_s(4.0 * pairs * scores))
        return PassTimes(
            products_s + PLAIN_PASSES.forward * pass_s,
            to_forward * products_s + PLAIN_PASSES.backward * pass_s,
        )
    times = TO_CUDNN.get(choice.implementation if choice else "", PassTimes(1, 1))
    usual_s = pairs * kind.attention_s(products, dtype)
    return PassTimes(times.forward * usual_s, times.backward * to_forward * usual_s)


def _is_of_plain(kind: DeviceKind) -> bool:
    """Whether the calibration of a kind is that of plain JAX.

    It is on a CPU, which is described as a whole, and on GPUs that have been measured and have
    nothing else.
    """
    platform, name, _ = catalogue.AS_JAX_SEES_THEM[kind.name]
    return platform == "cpu" or ("NVIDIA" not in name and kind.calibration != UNKNOWN)
