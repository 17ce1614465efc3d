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

Cache = dict[str, jax.Array]  # key_BTGK, value_BTGK


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
    shape = num_rows, size, attention.key_heads, attention.head_width
    return {name: jnp.zeros(shape, device=where) for name in ("key_BTGK", "value_BTGK")}


def extended(
    cache: Cache, k_BLGK: jax.Array, v_BLGK: jax.Array, position_BL: jax.Array, window: int | None
) -> tuple[Held, Cache]:
    """The keys that new tokens may see, and the cache with them.

    Args:
      cache: of the tokens before.
      k_BLGK: keys of the new tokens.
      v_BLGK: their values.
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
    after = {name: write(cache[name], new) for name, new in news.items()}
    if window is None or k_BLGK.shape[1] == 1:
        return Held(**after, position_BT=_positions(last_B1, T)), after
    # The first of several tokens see keys that the last of them push out.
    both = {name: jnp.concatenate([cache[name], new], axis=1) for name, new in news.items()}
    before_BT = _positions(position_BL[:, :1] - 1, T)
    return Held(**both, position_BT=jnp.concatenate([before_BT, position_BL], axis=1)), after


def _positions(last_B1: jax.Array, T: int) -> jax.Array:
    """The positions in the slots of a cache whose last token is at a position; [B, T]."""
    return last_B1 - (last_B1 - jnp.arange(T)[None]) % T
