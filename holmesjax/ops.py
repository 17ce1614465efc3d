"""Array functions that models are made of; the only importer of `kernels`.

Dims: see `models/gpt.py`. Each takes and returns the dtype of its first argument, unless it says
otherwise.
"""

import jax
import jax.numpy as jnp

EPSILON = 1e-6  # of both norms


def lookup(table_VD: jax.Array, token_BL: jax.Array) -> jax.Array:
    """Rows of the table."""
    return table_VD[token_BL]


def rms_norm(x_BLD: jax.Array, scale_D: jax.Array) -> jax.Array:
    x = x_BLD.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPSILON)
    return (x * scale_D[None, None]).astype(x_BLD.dtype)


def layer_norm(x_BLD: jax.Array, scale_D: jax.Array, bias_D: jax.Array) -> jax.Array:
    x = x_BLD.astype(jnp.float32)
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPSILON)
    return (x * scale_D[None, None] + bias_D[None, None]).astype(x_BLD.dtype)


def gelu(x_BLF: jax.Array) -> jax.Array:
    return jax.nn.gelu(x_BLF, approximate=True)


def project_heads(x_BLD: jax.Array, w_DHK: jax.Array) -> jax.Array:
    return jnp.einsum("bld,dhk->blhk", x_BLD, w_DHK)


def merge_heads(x_BLHK: jax.Array, w_HKD: jax.Array) -> jax.Array:
    return jnp.einsum("blhk,hkd->bld", x_BLHK, w_HKD)


def rotate(x_BLHK: jax.Array, position_L: jax.Array, base: float) -> jax.Array:
    """Rotary positions, halves paired as in GPT-NeoX. Su et al., arXiv:2104.09864."""
    half = x_BLHK.shape[-1] // 2
    frequency_K = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_LK = position_L[:, None].astype(jnp.float32) * frequency_K[None]
    cos, sin = jnp.cos(angle_LK)[None, :, None], jnp.sin(angle_LK)[None, :, None]
    low, high = jnp.split(x_BLHK.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return rotated.astype(x_BLHK.dtype)


def attention(
    q_BLHK: jax.Array, k_BLGK: jax.Array, v_BLGK: jax.Array, segment_BL: jax.Array | None
) -> jax.Array:
    """Causal attention; with segments, only inside the same one. H is a multiple of G."""
    mask = None
    if segment_BL is not None:
        mask = segment_BL[:, None, :, None] == segment_BL[:, None, None, :]
    return jax.nn.dot_product_attention(q_BLHK, k_BLGK, v_BLGK, mask=mask, is_causal=True)


def cached_attention(
    q_BLHK: jax.Array, key_BTGK: jax.Array, value_BTGK: jax.Array, position_L: jax.Array
) -> jax.Array:
    """Attention of tokens at `position_L` to all cached tokens up to and including their own."""
    mask = jnp.arange(key_BTGK.shape[1])[None] <= position_L[:, None]
    return jax.nn.dot_product_attention(q_BLHK, key_BTGK, value_BTGK, mask=mask[None, None])


def cross_entropy(logits_BLV: jax.Array, target_BL: jax.Array) -> jax.Array:
    """Mean of -log p(target), in nats per token; a float32 scalar."""
    log_p_BLV = jax.nn.log_softmax(logits_BLV.astype(jnp.float32))
    return -jnp.take_along_axis(log_p_BLV, target_BL[..., None], axis=-1).mean()
