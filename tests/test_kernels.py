"""Every array function against float64 NumPy: values, and gradients by hand-written formulas.

The gradients of attention and of the feed-forward are checked against `jax.grad` of the plain
formula in float64, which itself is checked against NumPy's values.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from holmesjax import ops
from kernels.attention import MAX_BLOCKS, QUERY_BLOCK, _blocks, attention_reference
from kernels.cross_entropy import cross_entropy
from kernels.linear import feed_forward, linear, linear_transposed, linears
from kernels.norm import EPSILON, layer_norm, rms_norm

COMPILED_ATTENTION = jax.jit(attention_reference)
# Sums of a few hundred terms in float32, relative to the largest entry; inputs rounded to the 8
# bits of bfloat16 give outputs off by two of its roundings.
TOLERANCE = {"float32": 5e-6, "bfloat16": 2.0**-6}


@pytest.fixture(autouse=True)
def _float64():
    """The formulas to compare with run in float64."""
    with jax.enable_x64(True):
        yield


def normal(seed, *shape, dtype="float32", scale=1.0):
    value = np.random.default_rng([seed, *shape]).normal(size=shape) * scale
    return jnp.asarray(value, dtype)


def wide(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def assert_near(got, want, dtype="float32"):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    scale = max(np.abs(want).max(), 1.0)  # inputs are of order one
    np.testing.assert_allclose(got / scale, want / scale, rtol=0, atol=TOLERANCE[dtype])


def run(function, args):
    """Values and gradients for fixed random cotangents, in one compiled program."""
    shapes = jax.eval_shape(function, *args)
    cotangents = jax.tree.map(lambda x: normal(99, *x.shape, dtype=x.dtype), shapes)

    def values_and_gradients(args):
        out, pullback = jax.vjp(function, *args)
        return out, pullback(cotangents)

    return jax.jit(values_and_gradients)(args)


def check(function, plain, args, dtype="float32"):
    """Values and all gradients of `function` equal those of `plain` in float64."""
    got = run(function, args)
    want = run(plain, jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), args))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_near(one, other, dtype)
    for gradient, arg in zip(jax.tree.leaves(got[1]), jax.tree.leaves(args), strict=True):
        assert gradient.dtype == arg.dtype


# ---- attention ---------------------------------------------------------------------------------


def numpy_attention(q_BLHK, k_BMGK, v_BMGK, segment_BL=None):
    """One query at a time, in float64."""
    q, k, v = wide((q_BLHK, k_BMGK, v_BMGK))
    out = np.zeros_like(q)
    shared = q.shape[2] // k.shape[2]
    for b, i, h in np.ndindex(q.shape[:3]):
        seen = np.arange(i + 1)
        if segment_BL is not None:
            seen = seen[np.asarray(segment_BL[b])[: i + 1] == segment_BL[b, i]]
        score = k[b, seen, h // shared] @ q[b, i, h] / np.sqrt(q.shape[3])
        weight = np.exp(score - score.max())
        out[b, i, h] = weight @ v[b, seen, h // shared] / weight.sum()
    return out


def plain_attention(q, k, v, segment_BL=None):
    """The formula with a full square of scores."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    score = jnp.einsum("blhk,bmhk->bhlm", q, k) / np.sqrt(q.shape[3])
    mask = jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool))[None, None]
    if segment_BL is not None:
        mask = mask & (segment_BL[:, None, :, None] == segment_BL[:, None, None, :])
    return jnp.einsum("bhlm,bmhk->blhk", jax.nn.softmax(jnp.where(mask, score, -1e30)), v)


def attention_inputs(length, heads, kv_heads, head_width=8, dtype="float32", scale=1.0, batch=2):
    q = normal(0, batch, length, heads, head_width, dtype=dtype, scale=scale)
    k = normal(1, batch, length, kv_heads, head_width, dtype=dtype, scale=scale)
    return q, k, normal(2, batch, length, kv_heads, head_width, dtype=dtype)


def random_segments(length, batch=2):
    starts = np.random.default_rng(length).random((batch, length)) < 0.1
    return jnp.asarray(np.cumsum(starts, axis=1), jnp.int32)


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (4, 2), (4, 1), (3, 3)])
@pytest.mark.parametrize("length", [1, 13, QUERY_BLOCK, QUERY_BLOCK + 1])
def test_attention_equals_numpy(length, heads, kv_heads, segments):
    inputs = attention_inputs(length, heads, kv_heads)
    segment_BL = random_segments(length) if segments else None
    want = numpy_attention(*inputs, segment_BL)
    assert_near(jax.jit(attention_reference)(*inputs, segment_BL), want)
    assert_near(jax.jit(plain_attention)(*wide(inputs), segment_BL), want)


@pytest.mark.parametrize(
    "length, heads, kv_heads, dtype",
    [
        (1, 2, 1, "float32"),
        (37, 4, 2, "float32"),
        (37, 4, 2, "bfloat16"),
        (200, 2, 2, "float32"),
        (1050, 1, 1, "float32"),  # more than MAX_BLOCKS blocks of the usual size
    ],
)
def test_attention_gradients(length, heads, kv_heads, dtype):
    inputs = attention_inputs(length, heads, kv_heads, dtype=dtype, batch=1)
    segment_BL = random_segments(length, batch=1)
    for segments in (None, segment_BL):
        mine = lambda q, k, v, s=segments: attention_reference(q, k, v, s)
        plain = lambda q, k, v, s=segments: plain_attention(q, k, v, s)
        check(mine, plain, inputs, dtype)


def test_attention_with_large_scores_stays_finite():
    inputs = attention_inputs(40, 2, 2, scale=100.0)
    out, gradients = run(attention_reference, inputs)
    assert_near(out, numpy_attention(*inputs))
    assert all(np.isfinite(x).all() for x in gradients)


def test_attention_under_vmap_and_remat():
    q, k, v = (jnp.stack([x, x[::-1]]) for x in attention_inputs(20, 4, 2))
    got = jax.vmap(jax.checkpoint(attention_reference))(q, k, v)
    for i in range(2):
        assert_near(got[i], numpy_attention(q[i], k[i], v[i]))


@given(st.integers(1, 5000))
def test_blocks_cover_every_query_once(length):
    blocks = _blocks(length)
    assert [start for start, _ in blocks] == [0, *(stop for _, stop in blocks[:-1])]
    assert blocks[-1][1] == length
    assert len(blocks) <= MAX_BLOCKS
    assert all(start < stop for start, stop in blocks)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.booleans(), min_size=24, max_size=24))
def test_no_token_sees_the_future_or_another_document(starts):
    """Changing tokens that must not be seen changes nothing, to the bit."""
    length = len(starts)
    segment_BL = jnp.asarray(np.cumsum(starts), jnp.int32)[None]
    q, k, v = attention_inputs(length, 2, 1, batch=1)
    before = COMPILED_ATTENTION(q, k, v, segment_BL)
    i = length // 2  # the query that is looked at
    hidden = np.arange(length) > i
    hidden |= np.asarray(segment_BL[0]) != np.asarray(segment_BL[0])[i]
    noise = jnp.asarray(hidden, jnp.float32)[None, :, None, None] * 7
    after = COMPILED_ATTENTION(q, k + noise, v - noise, segment_BL)
    np.testing.assert_array_equal(before[0, i], after[0, i])


def test_cached_attention_is_the_last_rows_of_attention():
    q, k, v = attention_inputs(12, 4, 2)
    want = numpy_attention(q, k, v)[:, 9:]
    padded = [jnp.pad(x, [(0, 0), (0, 5), (0, 0), (0, 0)], constant_values=3.0) for x in (k, v)]
    got = ops.cached_attention(q[:, 9:], *padded, jnp.arange(9, 12))
    assert_near(got, want)


# ---- products ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width, out", [(8, 8), (8, 24), (24, 8)])
def test_linear(width, out, dtype):
    x, w = normal(0, 2, 5, width, dtype=dtype), normal(1, width, out, dtype=dtype)
    assert_near(linear(x, w), wide(x) @ wide(w), dtype)
    check(linear, lambda x, w: x @ w, (x, w), dtype)
    check(linear_transposed, lambda x, w: x @ w.T, (x, w.T), dtype)


def test_projections_to_and_from_heads():
    x, w = normal(0, 2, 5, 12), (normal(1, 12, 4, 3), normal(2, 12, 2, 3))
    plain = lambda x, w: tuple(jnp.einsum("bld,dhk->blhk", x, one) for one in w)
    check(lambda x, w: linears(x, w), plain, (x, w))
    heads, out = normal(3, 2, 5, 4, 3), normal(4, 4, 3, 12)
    plain_merge = lambda x, w: jnp.einsum("blhk,hkd->bld", x, w)
    check(ops.merge_heads, plain_merge, (heads, out))


def numpy_gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_in", [1, 2])
def test_feed_forward(num_in, dtype):
    x, w_out = normal(0, 2, 5, 8, dtype=dtype), normal(1, 20, 8, dtype=dtype)
    w_in = tuple(normal(2 + i, 8, 20, dtype=dtype) for i in range(num_in))

    def plain(x, w_in, w_out):
        inner = [x @ w for w in w_in]
        if num_in == 1:
            cube = jnp.sqrt(2 / jnp.pi) * (inner[0] + 0.044715 * inner[0] ** 3)
            return 0.5 * inner[0] * (1 + jnp.tanh(cube)) @ w_out
        return inner[0] / (1 + jnp.exp(-inner[0])) * inner[1] @ w_out

    if num_in == 1:
        by_hand = numpy_gelu(wide(x) @ wide(w_in[0])) @ wide(w_out)
        assert_near(feed_forward(x, w_in, w_out), by_hand, dtype)
    check(feed_forward, plain, (x, w_in, w_out), dtype)


# ---- norms, positions, loss --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_norms(dtype, offset):
    x = normal(0, 2, 5, 16, dtype=dtype) + jnp.asarray(offset, dtype)
    scale, bias = normal(1, 16), normal(2, 16)

    def plain_layer(x, scale, bias):
        centred = x - x.mean(-1, keepdims=True)
        root = jnp.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON)
        return centred / root * scale[None, None] + bias[None, None]

    def plain_rms(x, scale):
        root = jnp.sqrt((x**2).mean(-1, keepdims=True) + EPSILON)
        return x / root * scale[None, None]

    x64 = wide(x)
    by_hand = (x64 - x64.mean(-1, keepdims=True)) / np.sqrt(x64.var(-1, keepdims=True) + EPSILON)
    by_hand = by_hand * wide(scale) + wide(bias)
    # Around 100 a float32 of x carries 100 / 2^24 of error, before any norm: 16 times as much room.
    if offset == 0.0:
        assert_near(layer_norm(x, scale, bias), by_hand, dtype)
        check(layer_norm, plain_layer, (x, scale, bias), dtype)
    check(rms_norm, plain_rms, (x, scale), dtype)


def test_rotary_turns_pairs_and_keeps_distances():
    x = normal(0, 1, 6, 2, 8)
    got = np.asarray(ops.rotate(x, jnp.arange(6), 100.0), np.float64)
    frequency = 100.0 ** (-np.arange(4) / 4)
    for i in range(6):
        turn = np.exp(1j * i * frequency)
        pairs = (wide(x)[0, i, :, :4] + 1j * wide(x)[0, i, :, 4:]) * turn
        assert_near(got[0, i], np.concatenate([pairs.real, pairs.imag], axis=-1))
    shifted = ops.rotate(x, 50 + jnp.arange(6), 100.0)
    products = lambda y: np.einsum("blhk,bmhk->hlm", y, y)
    assert_near(products(shifted), products(got))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_cross_entropy(dtype, scale):
    logits = normal(0, 3, 4, 11, dtype=dtype, scale=scale)
    target = jnp.asarray(np.random.default_rng(0).integers(11, size=(3, 4)), jnp.int32)
    logits64 = wide(logits)
    top = logits64.max(-1, keepdims=True)
    log_sum = np.log(np.exp(logits64 - top).sum(-1)) + top[..., 0]
    picked = np.take_along_axis(logits64, np.asarray(target)[..., None], axis=-1)[..., 0]
    assert_near(cross_entropy(logits, target), log_sum - picked)
    softmax = np.exp(logits64 - log_sum[..., None])
    want = softmax - np.eye(11)[np.asarray(target)]
    got = jax.grad(lambda x: cross_entropy(x, target).sum())(logits)
    assert_near(got, want, dtype)
