"""Array functions against float64 NumPy: values, and gradients by hand-written formulas.

The gradients of the feed-forward are checked against `jax.grad` of the plain formula in float64,
which itself is checked against NumPy's values. Attention has a folder of its own.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from kernels.cross_entropy import cross_entropy, linear_cross_entropy
from kernels.embedding import embedding
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


# ---- rows of a table -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding(dtype):
    """Half of the tokens are the same one."""
    often = np.random.default_rng(0).random((4, 300)) < 0.5
    row = jnp.asarray(np.where(often, 3, np.random.default_rng(1).integers(0, 7, (4, 300))))
    table, dy = normal(2, 7, 5, dtype=dtype), normal(3, 4, 300, 5, dtype=dtype) + 1
    y, pullback = jax.vjp(lambda table: embedding(table, row), table)
    np.testing.assert_array_equal(y, table[row])
    [got] = jax.jit(pullback)(dy)
    want = np.zeros((7, 5))
    np.add.at(want, row, wide(dy))
    assert got.dtype == table.dtype
    rounding = {"float32": 1e-5, "bfloat16": 2.0**-8}[dtype]  # of the sum: one of bfloat16
    np.testing.assert_allclose(wide(got), want, rtol=rounding)


def test_embedding_on_a_mesh():
    """Tokens and the table are cut: what one row gets comes from all devices."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tensor"))
    on = lambda x, *axes: jax.device_put(x, NamedSharding(mesh, P(*axes)))
    row = np.random.default_rng(0).integers(0, 3, (4, 50))
    dy = normal(1, 4, 50, 8, dtype="bfloat16")
    table = on(jnp.zeros((6, 8), jnp.bfloat16), "tensor", "fsdp")
    gradient = jax.jit(lambda table, row, dy: jax.vjp(lambda t: embedding(t, row), table)[1](dy)[0])
    got = gradient(table, on(row, "fsdp"), on(dy, "fsdp"))
    want = np.zeros((6, 8))
    np.add.at(want, row, wide(dy))
    assert_near(got, want, "bfloat16")


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
    check(lambda x, w: linears(x, (w,), 2)[0], plain_merge, (heads, out))


FLOAT32_WEIGHTS = {
    "linears": (lambda x, w: linears(x, (w,))[0], lambda x, w: x @ w, (8, 24)),
    "narrower": (linear, lambda x, w: x @ w, (8, 5)),
    "transposed": (linear_transposed, lambda x, w: x @ w.T, (24, 8)),
}


@pytest.mark.parametrize("name", FLOAT32_WEIGHTS)
def test_products_of_bfloat16_give_gradients_of_float32_weights_unrounded(name):
    """Values and the other gradient are those of a weight in bfloat16, bit for bit."""
    function, plain, shape = FLOAT32_WEIGHTS[name]
    x, w = normal(0, 2, 50, 8, dtype="bfloat16"), normal(1, *shape, dtype="bfloat16")
    [y, (dx, dw)], [want_y, (want_dx, _)] = (
        run(function, (x, w.astype("float32"))),
        run(function, (x, w)),
    )
    assert (y.dtype, dx.dtype, dw.dtype) == ("bfloat16", "bfloat16", "float32")
    np.testing.assert_array_equal(y, want_y)
    np.testing.assert_array_equal(dx, want_dx)
    dy = normal(99, *y.shape, dtype="bfloat16")  # the cotangent of `run`
    _, pullback = jax.vjp(plain, *wide((x, w)))
    assert_near(dw, pullback(jnp.asarray(wide(dy)))[1])


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


def projected(B, L, D, V, dtype="float32"):
    x, w = normal(0, B, L, D, dtype=dtype), normal(1, D, V, dtype=dtype)
    target = jnp.asarray(np.random.default_rng(0).integers(V, size=(B, L)), jnp.int32)
    return x, w, target


def numpy_linear_cross_entropy(x, w, target, z_loss=0.0):
    """The sum over the tokens that count, and its gradients."""
    x, w, target = wide(x), wide(w), np.asarray(target)
    mask, logits = target >= 0, x @ w
    top = logits.max(-1, keepdims=True)
    log_sum = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
    onehot = np.eye(w.shape[1])[target]
    loss = log_sum - (logits * onehot).sum(-1) + z_loss * log_sum**2
    softmax = np.exp(logits - log_sum[..., None])
    slope = (softmax * (1 + 2 * z_loss * log_sum)[..., None] - onehot) * mask[..., None]
    return (loss * mask).sum(), slope @ w.T, np.einsum("bld,blv->dv", x, slope)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_chunks", [1, 3, 7])
@pytest.mark.parametrize("z_loss, masked", [(0.0, False), (1e-2, True)])
def test_linear_cross_entropy(dtype, num_chunks, z_loss, masked):
    x, w, target = projected(2, 7, 16, 11, dtype)
    if masked:
        target = target.at[0, 2:5].set(-1).at[1].set(-1)
    want = numpy_linear_cross_entropy(x, w, target, z_loss)

    def total(x, w):
        return linear_cross_entropy(x, w, target, z_loss=z_loss, num_chunks=num_chunks)

    value, gradients = jax.jit(jax.value_and_grad(total, (0, 1)))(x, w)
    for got, wanted in zip((value, *gradients), want, strict=True):
        assert_near(got, wanted, dtype)
    assert_near(jax.jit(total)(x, w), want[0], dtype)  # without gradients it is another program


def at_once(x, w, target):
    return cross_entropy(linear(x, w, "float32"), target).sum()


def at_once_tied(x, w, target):
    return cross_entropy(linear_transposed(x, w.T, "float32"), target).sum()


def in_chunks(x, w, target):
    return linear_cross_entropy(x, w, target, num_chunks=4)


@pytest.mark.parametrize("loss", [at_once, at_once_tied, in_chunks])
def test_logits_are_not_rounded(loss):
    """Of bfloat16 inputs the loss is as exact as of float32; their gradients are rounded last.

    With rounded logits, here of some tens, the loss is off by 1e-4 and gradients by 0.65%.
    """
    x, w, target = projected(2, 32, 64, 256, "bfloat16")
    target = target.at[0, :5].set(-1)
    value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, w, target)
    want, *wanted = numpy_linear_cross_entropy(x, w, target)
    assert abs(float(value) - want) < 1e-6 * want
    for got, wide_gradient in zip(gradients, wanted, strict=True):
        error = np.linalg.norm(wide(got) - wide_gradient) / np.linalg.norm(wide_gradient)
        assert error < 2.5e-3  # two roundings to 8 bits, each by at most 0.2%


@pytest.mark.parametrize("loss", [at_once, at_once_tied, in_chunks])
def test_the_loss_of_nothing_is_zero(loss):
    x, w, target = projected(1, 4, 8, 11)
    value, gradients = jax.value_and_grad(loss, (0, 1))(x, w, jnp.full_like(target, -1))
    assert value == 0
    assert not any(np.any(gradient) for gradient in gradients)


def test_linear_cross_entropy_sums_the_weight_gradient_in_float32():
    """One rounding to bfloat16 at the end; a sum of 256 chunks in bfloat16 is off by far more."""
    x, w, target = projected(1, 256, 8, 11, "bfloat16")
    total = lambda w: linear_cross_entropy(x, w, target, num_chunks=256)
    _, _, want = numpy_linear_cross_entropy(x, w, target)
    got = wide(jax.jit(jax.grad(total))(w))
    assert np.abs(got - want).max() < 2.0**-8 * np.abs(want).max()


def test_linear_cross_entropy_never_has_all_logits():
    x, w, target = projected(1, 256, 16, 8192)
    all_logits = 256 * 8192 * 4

    def temporary_bytes(num_chunks):
        total = lambda x, w: linear_cross_entropy(x, w, target, num_chunks=num_chunks)
        compiled = jax.jit(jax.value_and_grad(total, (0, 1))).lower(x, w).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes(1) > all_logits
    assert temporary_bytes(16) < all_logits / 4


@pytest.mark.parametrize("num_chunks", [0, 5])
def test_chunks_without_tokens_are_refused(num_chunks):
    x, w, target = projected(1, 4, 8, 11)
    with pytest.raises(
        ValueError, match=f"num_chunks must be 1 to 4, the length, not {num_chunks}"
    ):
        linear_cross_entropy(x, w, target, num_chunks=num_chunks)
