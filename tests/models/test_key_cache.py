"""A cache with rows at unequal positions, against attention over the whole text of each row."""

import functools

import jax
import numpy as np

from holmesjax.layer_specs.kind import Attention
from holmesjax.models import key_cache, ops
from kernels.attention.tiles import Rule
from tests.arrays import assert_near
from tests.causal_attention import causal
from tests.kernels.attention.oracle import inputs


@functools.partial(jax.jit, static_argnums=3)
def attended(cache, arrays, position, rule):
    """The results of new tokens, and the cache with them."""
    q, k, v = arrays
    held, cache = key_cache.extended(cache, k, v, position, rule.window)
    return ops.cached_attention(q, *held, position, rule), cache


def test_rows_of_unequal_lengths_see_what_each_would_see_alone():
    """Several tokens at once and one at a time, with padding behind; a window keeps its own T."""
    num_tokens = [13, 9]
    q, k, v = inputs(13, 13, 4, 2, 8)
    for window, slots in ((None, 16), (4, 4)):
        rule = Rule(window=window)
        attention = Attention(heads=4, key_heads=2, head_width=8, window=window)
        want = causal(q, k, v, rule)
        cache = key_cache.empty(attention, 2, 16)
        assert cache["key_BTGK"].shape == (2, slots, 2, 8)
        done = [0, 0]
        for cuts in ((5, 3), (2, 4), (1, 1), (5, 1)):  # new tokens of each row
            size = 5 if max(cuts) > 1 else 1
            position = np.full((2, size), -1)
            new = [np.full((2, size, *x.shape[2:]), np.nan, np.float32) for x in (q, k, v)]
            for row, count in enumerate(cuts):
                at = slice(done[row], done[row] + count)
                position[row, :count] = np.arange(at.start, at.stop)
                for mine, whole in zip(new, (q, k, v), strict=True):
                    mine[row, :count] = whole[row, at]
            new = [np.nan_to_num(x, nan=7.0) for x in new]
            got, cache = attended(cache, new, position, rule)
            for row, count in enumerate(cuts):
                at = slice(done[row], done[row] + count)
                assert_near(got[row, :count], want[row, at])
                done[row] += count
        assert done == num_tokens
