"""Attention in plain JAX against float64 NumPy: values and all gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from kernels.attention import reference
from kernels.attention.reference import (
    MAX_BLOCKS,
    QUERY_CHUNK,
    SAVED,
    _blocks,
    attention_reference,
)
from kernels.attention.tiles import Rule
from tests.arrays import assert_near, normal, wide
from tests.kernels.attention.oracle import FULL, check, documents, inputs, oracle, run, seen

CASES = {  # L, M, H, G, K, rule, whether there are documents: all pairs of what a rule can say
    "one token": (1, 1, 2, 1, 16, Rule(), False),
    "documents in blocks": (150, 150, 3, 1, 16, Rule(), True),
    "window": (150, 150, 4, 2, 16, Rule(window=37), False),
    "window of one": (40, 40, 1, 1, 16, Rule(window=1), True),
    "soft cap": (40, 40, 1, 1, 256, Rule(soft_cap=0.7, scale=0.5), False),
    "everything": (150, 150, 6, 2, 32, Rule(window=33, soft_cap=2.0, scale=0.3), True),
    "full": (33, 150, 4, 2, 16, FULL, False),
    "full, documents elsewhere": (150, 50, 2, 1, 16, Rule(causal=False, soft_cap=1.0), True),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case):
    L, M, H, G, K, rule, has_documents = CASES[case]
    segments = None
    if has_documents:  # with a rule that is not causal, some documents have no key here
        segments = (documents(L), documents(M) if rule.causal else documents(M, 1) + 2)
    check(attention_reference, inputs(L, M, H, G, K), segments, rule)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes(dtype):
    arrays = inputs(70, 70, 2, 1, 64, dtype=dtype)
    check(attention_reference, arrays, (documents(70),) * 2, Rule(window=50), dtype)


@pytest.fixture
def short_chunks(monkeypatch):
    """Blocks have 8 queries, so that sequences are long."""
    monkeypatch.setattr(reference, "QUERY_CHUNK", 8)
    assert len(_blocks(150)) <= MAX_BLOCKS == len(_blocks(8 * MAX_BLOCKS))


LONG_CASES = {  # in chunks, and with six queries that are none
    "causal": (150, Rule(soft_cap=2.0), True),
    "window": (150, Rule(window=13), False),
    "wide window, documents": (150, Rule(window=40), True),
    "full": (77, FULL, True),
}


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("case", LONG_CASES)
def test_long_sequences_go_in_chunks(case):
    M, rule, has_documents = LONG_CASES[case]
    segments = (documents(150), documents(M)) if has_documents else None
    check(attention_reference, inputs(150, M, 2, 1, 8), segments, rule)


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("rule", [Rule(), Rule(window=20)], ids=str)
def test_memory_is_linear_in_the_sequence(rule, monkeypatch):
    """The temporaries of a forward and a backward, as XLA plans them."""
    monkeypatch.setattr(reference, "MAX_BLOCKS", 2)  # compiles sooner

    def temporary_bytes(length):
        attention = lambda q, k, v: attention_reference(q, k, v, None, rule)[0].sum()
        q, k, v = inputs(length, length, 2, 1, 8)
        compiled = jax.jit(jax.grad(attention, (0, 1, 2))).lower(q, k, v).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes(1024) < 2.1 * temporary_bytes(512)


@pytest.mark.usefixtures("float64")
def test_the_oracle_has_the_gradients_of_its_formula():
    """By `jax.grad` of the formula, in float64."""
    q, k, v = inputs(12, 12, 2, 1, 8)
    segments, rule = (documents(12),) * 2, Rule(window=5, soft_cap=1.5)
    dout, dlog_sum = normal(3, *q.shape), normal(4, 2, 2, 12)

    def plain(q, k, v):
        k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
        score = jnp.einsum("blhk,bmhk->bhlm", q, k) / np.sqrt(q.shape[3])
        score = 1.5 * jnp.tanh(score / 1.5)
        mask = jnp.asarray(seen(12, 12, rule, [np.asarray(x) for x in segments]))[:, None]
        score = jnp.where(mask, score, -jnp.inf)
        out = jnp.einsum("bhlm,bmhk->blhk", jax.nn.softmax(score), v)
        return out, jax.nn.logsumexp(score, axis=-1)

    args = [jnp.asarray(x) for x in wide((q, k, v))]
    out, pullback = jax.vjp(plain, *args)
    want = (*out, *pullback((jnp.asarray(wide(dout)), jnp.asarray(wide(dlog_sum)))))
    got = oracle(q, k, v, dout, dlog_sum, segments, rule)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-13)


def test_large_scores_stay_finite():
    whole = lambda seed: jnp.round(normal(seed, 2, 40, 2, 16, scale=30.0))
    arrays = (whole(0), whole(1), normal(2, 2, 40, 2, 16))  # so that scores are exact in float32
    got, gradients = run(attention_reference, arrays, None, Rule())
    want = oracle(*arrays, *gradients, None, Rule())
    assert_near(got[0], want[0])
    assert_near(got[1], want[1])
    assert np.abs(want[1]).max() > 1000
    assert all(np.isfinite(x).all() for x in got)


def test_twice_in_a_program_under_vmap_and_checkpointing():
    q, k, v = (jnp.stack([x, x[::-1]]) for x in inputs(20, 20, 4, 2, 16))

    def twice(q, k, v):
        out, _ = attention_reference(q, k, v)
        return attention_reference(out, k, v, None, Rule(window=3))[0]

    total = lambda q, k, v: jax.vmap(jax.checkpoint(twice))(q, k, v).sum()
    got = jax.jit(jax.grad(total))(q, k, v)
    for i in range(2):
        args = (q[i], k[i], v[i])
        zeros = np.zeros((2, 4, 20))
        out, *_ = oracle(*args, np.zeros(q[i].shape), zeros, None, Rule())
        dout = np.ones(q[i].shape)
        _, _, dout, _, _ = oracle(out, *args[1:], dout, zeros, None, Rule(window=3))
        assert_near(got[i], oracle(*args, dout, zeros, None, Rule())[2])


def test_a_checkpoint_keeps_what_the_backward_needs(capsys):
    """Besides its arguments only the output and the log-sum-exp: the forward never runs again."""
    attention = lambda q, k, v: attention_reference(q, k, v)[0]
    policy = jax.checkpoint_policies.save_only_these_names(SAVED)
    jax.ad_checkpoint.print_saved_residuals(
        jax.checkpoint(attention, policy=policy), *inputs(20, 20, 4, 2, 16)
    )
    lines = capsys.readouterr().out.splitlines()
    kept = [line.split()[0] for line in lines if "from the argument" not in line]
    floats = [shape for shape in kept if shape.startswith("f")]
    assert len(floats) == 2
    assert "f32[2,20,4,16]" in floats


def test_no_token_sees_the_future_or_another_document():
    """Changing tokens that must not be seen changes nothing, to the bit."""
    length = 50
    attention = jax.jit(attention_reference)
    q, k, v = inputs(length, length, 2, 1, 16, batch=1)

    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.booleans(), min_size=length, max_size=length), st.integers(0, length - 1))
    def unchanged(starts, i):
        segment = np.cumsum(starts)
        hidden = (np.arange(length) > i) | (segment != segment[i])
        noise = jnp.asarray(hidden, jnp.float32)[None, :, None, None] * 7
        segments = (jnp.asarray(segment, jnp.int32)[None],) * 2
        before, _ = attention(q, k, v, segments)
        after, _ = attention(q, k + noise, v - noise, segments)
        np.testing.assert_array_equal(before[0, i], after[0, i])

    unchanged()


@given(st.integers(1, 5000))
def test_blocks_cover_every_query_once(length):
    blocks = _blocks(length)
    assert [start for start, _ in blocks] == [0, *(stop for _, stop in blocks[:-1])]
    assert blocks[-1][1] == length
    assert len(blocks) <= MAX_BLOCKS + 1
    sizes = [stop - start for start, stop in blocks]
    assert all(size % QUERY_CHUNK == 0 for size in sizes[:-1])
    assert 0 < sizes[-1] < QUERY_CHUNK or sizes[-1] % QUERY_CHUNK == 0
