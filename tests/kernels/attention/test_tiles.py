"""The tables of tiles against every pair of query and key."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from kernels.attention.tiles import Rule, runs
from tests.kernels.attention.oracle import seen


def check_runs(L, M, rule, segments, block):
    """Against all pairs of queries and keys; whole tiles have none that is masked."""
    rows, columns = (np.asarray(x)[0] for x in runs(rule, L, M, segments, block))
    all_of_it = seen(L, M, rule, segments and [np.asarray(x) for x in segments])[0]
    tables = ((rows, *block, all_of_it), (columns, *block[::-1], all_of_it.T))
    for table, size, other, mask in tables:
        assert len(table) == -(-len(mask) // size)
        for i, (first, first_whole, end_whole, end) in enumerate(table):
            here = mask[i * size : (i + 1) * size]
            assert 0 <= first <= first_whole <= end_whole <= end <= -(-mask.shape[1] // other)
            assert not here[:, : first * other].any()
            assert not here[:, end * other :].any()
            whole = here[:, first_whole * other : end_whole * other]
            assert whole.all()
            assert whole.size == (end_whole - first_whole) * size * other  # none is ragged
            if segments is None and end > first:  # and no more than it must
                assert here[:, first * other : (first + 1) * other].any()
                assert here[:, (end - 1) * other :].any()


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_runs_visit_every_tile_that_counts(data):
    causal = data.draw(st.booleans())
    lengths = st.sampled_from([1, 40])  # each is a shape for which JAX compiles operations
    L = data.draw(lengths)
    M = L if causal else data.draw(lengths)
    window = data.draw(st.none() | st.integers(1, 40)) if causal else None
    rule = Rule(causal=causal, window=window)
    block = data.draw(st.sampled_from([(4, 16), (64, 8)]))
    ids = lambda n: jnp.asarray(data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)))[
        None
    ]
    segments = None
    if data.draw(st.booleans()):
        query_BL = ids(L)
        segments = (query_BL, query_BL if causal else ids(M))
    check_runs(L, M, rule, segments, block)


@pytest.mark.parametrize("block", [(4, 4), (4, 8), (8, 4)])
def test_runs_of_every_window(block):
    for window in range(1, 26):
        check_runs(24, 24, Rule(window=window), None, block)


@pytest.mark.parametrize(
    "wrong, problem",
    [
        ({"window": 0}, "window must be more than 0, not 0"),
        ({"soft_cap": -1.0}, "soft_cap must be more than 0, not -1.0"),
        ({"scale": 0.0}, "scale must be more than 0, not 0.0"),
        ({"causal": False, "window": 4}, "it needs causal=True"),
    ],
)
def test_rules_that_cannot_be(wrong, problem):
    with pytest.raises(ValueError, match=problem):
        Rule(**wrong)
