"""Array functions that models are made of; the only importer of `kernels`.

Dims: see `models/gpt.py`. Each returns the dtype of its first argument, unless it says otherwise.
"""

import jax
import jax.numpy as jnp

from kernels.attention import attention_reference as attention
from kernels.cross_entropy import cross_entropy
from kernels.linear import feed_forward, linear, linear_transposed, linears
from kernels.norm import layer_norm, rms_norm

__all__ = [
    "attention",
    "cached_attention",
    "cross_entropy",
    "feed_forward",
    "layer_norm",
    "linear",
    "linear_transposed",
    "merge_heads",
    "project_heads",
    "rms_norm",
    "rotate",
    "separate",
]


def separate(x: jax.Array) -> jax.Array:
    """x, computed once: XLA does not fuse it, or its gradient, into what reads it."""
    return jax.lax.optimization_barrier(x)


def project_heads(x_BLD: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
    """x [B, L, D] times each weight [D, H, K]; [B, L, H, K] each."""
    return linears(x_BLD, weights)


def merge_heads(x_BLHK: jax.Array, w_HKD: jax.Array) -> jax.Array:
    """Sum over the heads of x times w; [B, L, D]."""
    return linears(x_BLHK, (w_HKD,), 2)[0]


def rotate(x_BLHK: jax.Array, position_L: jax.Array, base: float) -> jax.Array:
    """Rotary positions, halves paired as in GPT-NeoX. Su et al., arXiv:2104.09864."""
    half = x_BLHK.shape[-1] // 2
    frequency_K = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_LK = position_L[:, None].astype(jnp.float32) * frequency_K[None]
    cos, sin = jnp.cos(angle_LK)[None, :, None], jnp.sin(angle_LK)[None, :, None]
    low, high = jnp.split(x_BLHK.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return rotated.astype(x_BLHK.dtype)


def cached_attention(
    q_BLHK: jax.Array, key_BTGK: jax.Array, value_BTGK: jax.Array, position_L: jax.Array
) -> jax.Array:
    """Attention of tokens at `position_L` to all cached tokens up to and including their own."""
    mask = jnp.arange(key_BTGK.shape[1])[None] <= position_L[:, None]
    return jax.nn.dot_product_attention(q_BLHK, key_BTGK, value_BTGK, mask=mask[None, None])
