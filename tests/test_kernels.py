"""Array functions against float64 NumPy: values, and gradients by hand-written formulas.

The gradients of the feed-forward are checked against `jax.grad` of the plain formula in float64,
which itself is checked against NumPy's values. `test_attention` has attention's.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holmesjax import ops
from kernels.cross_entropy import cross_entropy
from kernels.linear import feed_forward, linear, linear_transposed, linears
from kernels.norm import EPSILON, layer_norm, rms_norm
from tests.arrays import assert_near, normal, wide

DTYPES = ["float32", "bfloat16"]

pytestmark = pytest.mark.usefixtures("float64")


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


# ---- products ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
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


@pytest.mark.parametrize("dtype", DTYPES)
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


@pytest.mark.parametrize("dtype", DTYPES)
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


@pytest.mark.parametrize("dtype", DTYPES)
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
