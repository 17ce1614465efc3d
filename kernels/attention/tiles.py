"""The keys that a query sees, and the tiles of scores that a fused attention has to compute.

    rule    which keys a query may see by its position, and what becomes of a score
    tile    `block_q` queries by `block_k` keys: what a kernel computes at a time
    run     the tiles that one row of tiles has to visit, and those that need no mask

A kernel reads the run of its row from a table and asks no more questions: causality, windows,
documents and ragged ends are all in it. Tiles that no query sees are never visited.

    B  sequences       L  queries        M  keys
    I  rows of tiles   J  columns of tiles
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LOG2_E = math.log2(math.e)
Array = jax.Array | np.ndarray
Segments = tuple[jax.Array, jax.Array]  # ids of the queries [B, L] and of the keys [B, M]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The keys that a query sees, and the changes of its scores before the softmax."""

    causal: bool = True  # query i sees keys 0 to i; then there are as many of each
    window: int | None = None  # with `causal`: the last so many of them, its own included
    soft_cap: float | None = None  # c: a score s becomes c tanh(s / c). arXiv:2408.00118
    scale: float | None = None  # of the products of queries and keys; None: 1 / sqrt(K)

    def __post_init__(self) -> None:
        if self.window is not None and not self.causal:
            raise ValueError("a window counts back from the query: it needs causal=True")
        for name in ("window", "soft_cap", "scale"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be more than 0, not {value}")

    def factor(self, head_width: int) -> float:
        """By which products of queries and keys are multiplied to be scores."""
        return head_width**-0.5 if self.scale is None else self.scale

    def unit(self, head_width: int) -> float:
        """By which `raw` scores are multiplied to be exponents of two."""
        scale = self.factor(head_width) if self.soft_cap is None else self.soft_cap
        return scale * LOG2_E

    def raw(self, products: jax.Array, head_width: int) -> jax.Array:
        """Products of queries and keys, as far as they must be changed before the maximum."""
        if self.soft_cap is None:
            return products
        return jnp.tanh(products * (self.factor(head_width) / self.soft_cap))

    def slope(self, raw: jax.Array, ds: jax.Array) -> jax.Array:
        """The gradient of a product, before its factor, from that of its score."""
        return ds if self.soft_cap is None else ds * (1 - raw * raw)

    def keys(self, start: int, stop: int, num_keys: int) -> tuple[int, int]:
        """The first and the end of the keys that some query from start to stop sees.

        >>> Rule(window=4).keys(6, 8, 100)
        (3, 8)
        """
        if not self.causal:
            return 0, num_keys
        return 0 if self.window is None else max(0, start + 1 - self.window), stop

    def sees(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """Whether the query at one position sees the key at another, which is broadcast to it."""
        seen = key <= query if self.causal else (key >= 0) & (query >= 0)
        return seen if self.window is None else seen & (key > query - self.window)


def runs(
    rule: Rule, num_queries: int, num_keys: int, segments: Segments | None, block: tuple[int, int]
) -> tuple[Array, Array]:
    """The tables of runs, by rows and by columns: int32, [B, I, 4] and [B, J, 4].

    A run is (first, first_whole, end_whole, end): visit the tiles from `first` up to `end`. The
    tiles from `first_whole` up to `end_whole` need no mask. B is 1 without segments.

    Args:
      rule: which keys a query sees.
      num_queries: L.
      num_keys: M.
      segments: the document of each query [B, L] and of each key [B, M].
      block: queries and keys in a tile.

    >>> rows, columns = runs(Rule(window=4), 8, 8, None, (2, 2))
    >>> rows[0].tolist()
    [[0, 1, 1, 1], [0, 0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 4]]
    >>> columns[0].tolist()
    [[0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 4], [3, 4, 4, 4]]
    """
    seen, whole = _tiles(rule, num_queries, num_keys, block)
    if segments is not None:
        query_low, query_high = _extremes(segments[0], block[0])
        key_low, key_high = _extremes(segments[1], block[1])
        low, high = query_low[:, :, None], query_high[:, :, None]
        seen = seen & (low <= key_high[:, None]) & (key_low[:, None] <= high)
        is_one = (low == high) & (key_low == key_high)[:, None]
        whole = whole & is_one & (low == key_low[:, None])
    return _runs(seen, whole), _runs(seen.swapaxes(1, 2), whole.swapaxes(1, 2))


def _tiles(
    rule: Rule, num_queries: int, num_keys: int, block: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Whether some query of a tile sees some key, and whether all see all; [1, I, J] each."""
    first_query = np.arange(0, num_queries, block[0])[:, None]
    first_key = np.arange(0, num_keys, block[1])[None]
    last_query = np.minimum(first_query + block[0], num_queries) - 1
    last_key = np.minimum(first_key + block[1], num_keys) - 1
    seen = np.ones((first_query.size, first_key.size), bool)
    whole = (first_query + block[0] <= num_queries) & (first_key + block[1] <= num_keys)
    if rule.causal:
        seen &= first_key <= last_query
        whole &= last_key <= first_query
    if rule.window is not None:
        seen &= last_key > first_query - rule.window
        whole &= first_key > last_query - rule.window
    return seen[None], whole[None]


def _extremes(ids: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """The smallest and the largest id of each block."""
    padded = jnp.pad(ids, [(0, 0), (0, -ids.shape[1] % block)], mode="edge")
    blocks = padded.reshape(ids.shape[0], -1, block)
    return blocks.min(-1), blocks.max(-1)


def _runs(seen: Array, whole: Array) -> Array:
    """The last run of whole tiles in each row is taken; a rule never makes more than one."""
    numpy: Any = np if isinstance(seen, np.ndarray) else jnp  # a rule alone is a constant
    tile = np.arange(seen.shape[2], dtype=np.int32)[None, None]
    end = numpy.where(seen, tile + 1, 0).max(2)
    first = numpy.minimum(numpy.where(seen, tile, seen.shape[2]).min(2), end)
    end_whole = numpy.where(whole, tile + 1, 0).max(2)
    is_gap = ~whole & (tile < end_whole[..., None])
    first_whole = numpy.where(is_gap, tile + 1, 0).max(2)
    none = end_whole == 0
    first_whole, end_whole = (numpy.where(none, end, x) for x in (first_whole, end_whole))
    return numpy.stack([first, first_whole, end_whole, end], axis=2).astype(np.int32)
