"""Keys and values of the tokens before, where text is generated: those that a layer still sees.

Dims: see `models/transformer.py`. A cache has T slots for each row of a batch: one for each token
of the longest text, or for each key of a window. The token at position p is in slot p mod T, so the
positions of all slots follow from the last one. Rows are independent: each is at a position of its
own, and tokens at position -1 are padding, which no token sees and no slot holds.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from holmesjax.layer_specs.kind import Attention

Cache = dict[str, jax.Array]  # key_BTGK, and value_BTGK unless both are latents


class Held(NamedTuple):
    """The keys and values that new tokens may see."""

    key_BTGK: jax.Array
    value_BTGK: jax.Array
    position_BT: jax.Array  # below 0: nothing


def empty(
    attention: Attention, num_rows: int, length: int, where: jax.sharding.Sharding | None = None
) -> Cache:
    """A cache for texts of a length; float32."""
    size = min(length, attention.window or length)
    if attention.latents is not None:
        return {"key_BTGK": jnp.zeros((num_rows, size, 1, attention.latents), device=where)}
    shape = num_rows, size, attention.key_heads, attention.head_width
    return {name: jnp.zeros(shape, device=where) for name in ("key_BTGK", "value_BTGK")}


def extended(
    cache: Cache, k_BLGK: jax.Array, v_BLGK: jax.Array, position_BL: jax.Array, window: int | None
) -> tuple[Held, Cache]:
    """The keys that new tokens may see, and the cache with them.

    Args:
      cache: of the tokens before.
      k_BLGK: keys of the new tokens.
      v_BLGK: their values; the keys, where the cache holds latents.
      position_BL: their positions, ascending by 1, with padding behind them.
      window: of the layer; None: all keys.
    """
    T = cache["key_BTGK"].shape[1]
    last_B1 = jnp.max(position_BL, axis=1, keepdims=True)
    is_kept_BL = (position_BL >= 0) & (position_BL > last_B1 - T)
    slot_BL = jnp.where(is_kept_BL, position_BL % T, T)  # slot T does not exist: dropped
    row_B1 = jnp.arange(len(position_BL))[:, None]
    write = lambda x_BTGK, new_BLGK: x_BTGK.at[row_B1, slot_BL].set(
        new_BLGK.astype(x_BTGK.dtype), mode="drop"
    )
    news = {"key_BTGK": k_BLGK, "value_BTGK": v_BLGK}
    after = {name: write(old, news[name]) for name, old in cache.items()}
    if window is None or k_BLGK.shape[1] == 1:
        return _held(after, _positions(last_B1, T)), after
    # The first of several tokens see keys that the last of them push out.
    both = {name: jnp.concatenate([old, news[name]], axis=1) for name, old in cache.items()}
    before_BT = _positions(position_BL[:, :1] - 1, T)
    return _held(both, jnp.concatenate([before_BT, position_BL], axis=1)), after


def _held(arrays: Cache, position_BT: jax.Array) -> Held:
    key_BTGK = arrays["key_BTGK"]
    return Held(key_BTGK, arrays.get("value_BTGK", key_BTGK), position_BT)


def _positions(last_B1: jax.Array, T: int) -> jax.Array:
    """The positions in the slots of a cache whose last token is at a position; [B, T]."""
    return last_B1 - (last_B1 - jnp.arange(T)[None]) % T
