"""Array functions that models are made of. No other module imports `kernels`.

`Kernels` says which implementation of a function is asked for. `kernels.attention.choice` chooses
between cuDNN, the Pallas kernels and plain JAX.

Dims: see `models/gpt.py`. Each returns the dtype of its first argument, unless it says otherwise.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from holmesjax.config import KernelsConfig
from holmesjax.costs import work
from holmesjax.errors import ConfigError
from holmesjax.plan.plan import Axis
from kernels.adamw import Hyperparameters, Leaf, adamw_step, factors
from kernels.attention import choice
from kernels.attention.pallas import attention_pallas
from kernels.attention.reference import CAUSAL, SAVED, attention_reference
from kernels.attention.ring import REFERENCE, Placement, attention_on, from_runs, to_runs
from kernels.attention.shards import Shards
from kernels.cross_entropy import cross_entropy, linear_cross_entropy
from kernels.embedding import embedding
from kernels.linear import feed_forward, linear, linear_transposed, linears
from kernels.moments import (
    Moment,
    Quantized,
    Which,
    narrow,
    noise,
    positions,
    step_seed,
    widen,
    zero_moment,
)
from kernels.norm import layer_norm, rms_norm

__all__ = [
    "DEFAULT",
    "SAVED",
    "Hyperparameters",
    "Kernels",
    "Leaf",
    "Quantized",
    "adamw",
    "attention",
    "cached_attention",
    "cross_entropy",
    "embedding",
    "factors",
    "feed_forward",
    "from_parts",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "linear_transposed",
    "merge_heads",
    "moment_spec",
    "project_heads",
    "rms_norm",
    "rotate",
    "round_moment",
    "separate",
    "to_parts",
    "token_positions",
    "widen",
    "zero_moment",
]


@dataclass(frozen=True)
class Kernels:
    """The implementations that the layers of a stage ask for, and the devices of the stage."""

    config: KernelsConfig = field(default_factory=KernelsConfig)
    mesh: Mesh | None = None  # None: JAX's default device
    dtype: str | None = None  # of matrix products; None: the dtype of the parameters

    @property
    def device(self) -> jax.Device:
        return jax.devices()[0] if self.mesh is None else self.mesh.devices.flat[0]

    @property
    def shards(self) -> Shards | None:
        """How `sharding` cuts the dims of attention: sequences, or their parts, and heads."""
        if self.mesh is None or self.mesh.size == 1:
            return None
        has = lambda *axes: tuple(axis.value for axis in axes if axis in self.mesh.shape)
        heads = has(Axis.TENSOR)
        axes_of = (("B", has(Axis.CONTEXT, Axis.FSDP)), ("H", heads), ("G", heads))
        return Shards(self.mesh, axes_of, Axis.CONTEXT.value if self.context > 1 else None)

    @property
    def context(self) -> int:
        """Devices that share each sequence."""
        return self._size(Axis.CONTEXT)

    def logit_chunks(self, x_BLD: jax.Array, vocab_size: int) -> int:
        """Chunks in which the logits of a replica's sequences are computed; 1: all at once."""
        if self.config.cross_entropy == "reference":
            return 1
        B, L, D = x_BLD.shape
        num_tokens = B * L // (self._size(Axis.FSDP) * self.context)
        cut = vocab_size // self._size(Axis.TENSOR)
        num_chunks = work.logit_chunks(num_tokens, cut, D)
        least = 2 if self.config.cross_entropy == "chunked" else 1
        return min(max(least, int(num_chunks)), L)

    def _size(self, axis: Axis) -> int:
        return 1 if self.mesh is None else self.mesh.shape.get(axis, 1)


DEFAULT = Kernels()


def separate(x: jax.Array) -> jax.Array:
    """x, computed once: XLA does not fuse it, or its gradient, into what reads it."""
    return jax.lax.optimization_barrier(x)


def project_heads(x_BLD: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
    """x [B, L, D] times each weight [D, H, K]; [B, L, H, K] each."""
    return linears(x_BLD, weights)


def merge_heads(x_BLHK: jax.Array, w_HKD: jax.Array) -> jax.Array:
    """Sum over the heads of x times w; [B, L, D]."""
    return linears(x_BLHK, (w_HKD,), 2)[0]


def to_parts(x_BL: jax.Array, kernels: Kernels) -> jax.Array:
    """[B, L, ...] to [context * B, L / context, ...], as devices that share sequences have them.

    The parts of the first device come first. Each part has two runs of tokens
    (`kernels.attention.ring`). XLA could not merge B with an L that is cut, so a part is a sequence
    of its own.
    """
    if kernels.context == 1:
        return x_BL
    count, (B, L, *rest) = kernels.context, x_BL.shape
    x_CBl = x_BL.reshape(B, count, L // count, *rest).swapaxes(0, 1)
    return to_runs(kernels.shards, x_CBl.reshape(count * B, -1, *rest))


def from_parts(x_Bl: jax.Array, kernels: Kernels) -> jax.Array:
    """The opposite of `to_parts`."""
    if kernels.context == 1:
        return x_Bl
    x_Bl = from_runs(kernels.shards, x_Bl)
    count, (B, L, *rest) = kernels.context, x_Bl.shape
    x_CBl = x_Bl.reshape(count, B // count, L, *rest)
    return x_CBl.swapaxes(0, 1).reshape(B // count, -1, *rest)


def token_positions(num_sequences: int, length: int, kernels: Kernels) -> jax.Array:
    """The positions of tokens: [L]; where devices share sequences, [B, L] of their parts."""
    if kernels.context == 1:
        return jnp.arange(length)
    count = kernels.context
    size = length // (2 * count)
    device_Cl, token_Cl = jnp.indices((count, 2 * size))
    run_Cl = jnp.where(token_Cl < size, device_Cl, 2 * count - 1 - device_Cl)
    position_Cl = run_Cl * size + token_Cl % size
    return jnp.repeat(position_Cl, num_sequences, axis=0)


def rotate(x_BLHK: jax.Array, position_L: jax.Array, base: float) -> jax.Array:
    """Rotary positions, halves paired as in GPT-NeoX. Su et al., arXiv:2104.09864."""
    half = x_BLHK.shape[-1] // 2
    frequency_K = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    position_BL = position_L.reshape(-1, x_BLHK.shape[1]).astype(jnp.float32)
    angle_BLK = position_BL[..., None] * frequency_K[None, None]
    cos, sin = jnp.cos(angle_BLK)[:, :, None], jnp.sin(angle_BLK)[:, :, None]
    low, high = jnp.split(x_BLHK.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return rotated.astype(x_BLHK.dtype)


def attention(
    q_BLHK: jax.Array,
    k_BLGK: jax.Array,
    v_BLGK: jax.Array,
    segment_BL: jax.Array | None = None,
    kernels: Kernels = DEFAULT,
) -> jax.Array:
    """Causal attention, inside each document where segments tell them apart; [B, L, H, K].

    B counts the parts of sequences, as `to_parts` gives them, if devices share sequences.

    Args:
      q_BLHK: queries. H is a multiple of G.
      k_BLGK: keys.
      v_BLGK: values.
      segment_BL: the number of each token's document; None: a sequence is one document.
      kernels: the implementation that is asked for, and the mesh.

    Raises:
      ConfigError: the implementation that is asked for cannot compute these arrays.
    """
    config, arrays = kernels.config, (q_BLHK, k_BLGK, v_BLGK)
    try:
        implementation = choice.choose(
            config.attention,
            kernels.device,
            *arrays,
            has_segments=segment_BL is not None,
            is_cut=kernels.context > 1,
            deterministic=config.deterministic_attention,
        )
    except choice.UnsupportedError as reason:
        problem = f"{config.attention} cannot do it"
        fix = "use auto, which takes the best that can, or reference"
        raise ConfigError("kernels.attention", problem, found=str(reason), fix=fix) from None
    if implementation == "cudnn":
        return jax.nn.dot_product_attention(*arrays, is_causal=True, implementation="cudnn")
    segments = None if segment_BL is None else (segment_BL, segment_BL)
    if implementation == "pallas":
        deterministic = config.deterministic_attention
        run = functools.partial(attention_pallas, deterministic=deterministic)
        return run(*arrays, segments, shards=kernels.shards)[0]
    if kernels.context > 1:
        return attention_on(Placement(CAUSAL, REFERENCE, kernels.shards), *arrays, segments)[0]
    return attention_reference(*arrays, segments)[0]


def adamw(
    leaves: Sequence[Leaf],
    gradients: Sequence[jax.Array],
    factors: jax.Array,
    hyperparameters: Sequence[Hyperparameters],
    kernels: Kernels,
) -> list[Leaf]:
    """Parameters and moments after a step, if it applies; in place where they are donated.

    A conditional is in place on a CPU, and a choice between new and old on a GPU. On a GPU a
    conditional keeps a copy of all that it may change; on a CPU a choice keeps one.

    Args:
      leaves: parameters and their moments.
      gradients: of the shapes of the parameters.
      factors: those of the step (`factors`).
      hyperparameters: of each leaf.
      kernels: tells the platform.
    """
    applies = factors[5] > 0

    def update(leaves: list[Leaf]) -> list[Leaf]:
        rows = zip(leaves, gradients, hyperparameters, strict=True)
        return [adamw_step(leaf, gradient, factors, h) for leaf, gradient, h in rows]

    if kernels.device.platform == "cpu":
        return jax.lax.cond(applies, update, lambda leaves: leaves, list(leaves))
    choose = lambda new, old: jnp.where(applies, new, old)
    return jax.tree.map(choose, update(list(leaves)), list(leaves))


def moment_spec(moment: Moment, spec: PartitionSpec, sizes: Mapping[str, int]) -> Any:
    """The partition spec of a moment: that of its parameter.

    Scales that the devices of the last dim share lie on all of them.
    """
    if not isinstance(moment, Quantized):
        return spec
    scales = spec if _has_whole_blocks(moment, spec, sizes) else PartitionSpec(*spec[:-1])
    return Quantized._make([spec, scales])


def _has_whole_blocks(moment: Moment, spec: PartitionSpec, sizes: Mapping[str, int]) -> bool:
    """Whether each device has the scales of its own numbers, and of no others."""
    if not isinstance(moment, Quantized):
        return True
    last = len(moment.codes.shape) - 1
    entry = spec[last] if last < len(spec) else None
    axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
    return moment.scales.shape[-1] % math.prod(sizes[axis] for axis in axes) == 0


def round_moment(x: jax.Array, like: Moment, update: jax.Array, seed: int, which: Which) -> Moment:
    """float32 numbers in the format of a moment, rounded by the noise of an update.

    Args:
      x: the numbers.
      like: a moment of the same shape.
      update: the number of the update, int32.
      seed: of the parameter.
      which: the first moment or the second.
    """
    bits = noise(positions(x.shape), step_seed(update, seed))
    return narrow(x, like, bits[0 if which == "first" else 1], which)


def cached_attention(
    q_BLHK: jax.Array, key_BTGK: jax.Array, value_BTGK: jax.Array, position_L: jax.Array
) -> jax.Array:
    """Attention of tokens at `position_L` to all cached tokens up to and including their own."""
    mask = jnp.arange(key_BTGK.shape[1])[None] <= position_L[:, None]
    return jax.nn.dot_product_attention(q_BLHK, key_BTGK, value_BTGK, mask=mask[None, None])
