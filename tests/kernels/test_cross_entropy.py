"""The loss and its gradients against formulas written by hand in float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from kernels.attention.shards import Shards
from kernels.cross_entropy import cross_entropy, linear_cross_entropy
from kernels.linear import linear, linear_transposed
from tests.arrays import assert_near, normal, wide
from tests.collectives import collectives, entry
from tests.kernels.gradients import DTYPES

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_cross_entropy(dtype, scale):
    logits = normal(0, 3, 4, 11, dtype=dtype, scale=scale)
    target = jnp.asarray(np.random.default_rng(0).integers(11, size=(3, 4)), jnp.int32)
    logits64 = wide(logits)
    top = logits64.max(-1, keepdims=True)
    log_sum = np.log(np.exp(logits64 - top).sum(-1)) + top[..., 0]
    picked = np.take_along_axis(logits64, np.asarray(target)[..., None], axis=-1)[..., 0]
    total = lambda x: (cross_entropy(x, target).sum(), cross_entropy(x, target))
    (_, losses), got = jax.jit(jax.value_and_grad(total, has_aux=True))(logits)
    assert_near(losses, log_sum - picked)
    softmax = np.exp(logits64 - log_sum[..., None])
    want = softmax - np.eye(11)[np.asarray(target)]
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


@pytest.mark.parametrize(
    "num_chunks, dtype, z_loss, masked",  # all pairs
    [
        (1, "float32", 1e-2, True),
        (1, "bfloat16", 0.0, False),
        (3, "float32", 0.0, False),
        (3, "bfloat16", 1e-2, True),
        (7, "float32", 1e-2, True),
        (7, "bfloat16", 0.0, False),
    ],
)
def test_linear_cross_entropy(dtype, num_chunks, z_loss, masked):
    x, w, target = projected(2, 7, 16, 11, dtype)
    if masked:
        target = target.at[0, 2:5].set(-1).at[1].set(-1)
    want = numpy_linear_cross_entropy(x, w, target, z_loss)

    def total(x, w):
        return linear_cross_entropy(x, w, target, z_loss=z_loss, num_chunks=num_chunks)

    (value, squares), gradients = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(x, w)
    for got, wanted in zip((value + z_loss * squares, *gradients), want, strict=True):
        assert_near(got, wanted, dtype)
    assert_near(value, numpy_linear_cross_entropy(x, w, target)[0], dtype)
    # Without gradients it is another program.
    np.testing.assert_allclose(jax.jit(total)(x, w), (value, squares), rtol=1e-6)
    at_once = lambda x, w: cross_entropy(linear(x, w, "float32"), target, None, z_loss).sum()
    for got, wanted in zip(jax.jit(jax.grad(at_once, (0, 1)))(x, w), want[1:], strict=True):
        assert_near(got, wanted, dtype)


def at_once(x, w, target):
    return cross_entropy(linear(x, w, "float32"), target).sum()


def at_once_tied(x, w, target):
    return cross_entropy(linear_transposed(x, w.T, "float32"), target).sum()


def in_chunks(x, w, target):
    return linear_cross_entropy(x, w, target, num_chunks=4)[0]


@pytest.mark.parametrize("num_chunks", [0, 3])
def test_logits_are_capped_before_the_loss(num_chunks):
    """All at once (0), and in chunks. The products are up to several times the cap."""
    x, w, target = projected(2, 7, 16, 11)
    target = target.at[0, 2:5].set(-1)

    def loss(x, w):
        if num_chunks:
            return linear_cross_entropy(x, w, target, num_chunks=num_chunks, soft_cap=2.0)[0]
        return cross_entropy(linear(x, w, "float32"), target, 2.0).sum()

    def plain(x, w):
        log_p = jax.nn.log_softmax(2.0 * jnp.tanh((x @ w) / 2.0))
        picked = jnp.take_along_axis(log_p, target[..., None], axis=-1)[..., 0]
        return -jnp.sum(jnp.where(target < 0, 0.0, picked))

    got, want = (jax.jit(jax.value_and_grad(f, (0, 1))) for f in (loss, plain))
    wanted = want(*(jnp.asarray(wide(array)) for array in (x, w)))
    jax.tree.map(assert_near, got(x, w), jax.tree.map(np.asarray, wanted))


@pytest.mark.parametrize("loss", [at_once, at_once_tied, in_chunks])
def test_logits_are_not_rounded(loss):
    """With bfloat16 inputs the loss is as exact as with float32; their gradients are rounded last.

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
    nothing = jnp.full_like(target, -1)
    value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, w, nothing)
    assert value == 0
    assert not any(np.any(gradient) for gradient in gradients)


def test_linear_cross_entropy_sums_the_weight_gradient_in_float32():
    """One rounding to bfloat16 at the end; a sum of 256 chunks in bfloat16 is off by far more."""
    x, w, target = projected(1, 256, 8, 11, "bfloat16")
    total = lambda w: linear_cross_entropy(x, w, target, num_chunks=256)[0]
    _, _, want = numpy_linear_cross_entropy(x, w, target)
    got = wide(jax.jit(jax.grad(total))(w))
    assert np.abs(got - want).max() < 2.0**-8 * np.abs(want).max()


def test_the_gradient_of_the_weight_crosses_devices_once_after_the_last_chunk():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tensor"))
    shards = Shards(mesh, (("B", ("fsdp",)), ("D", ("fsdp",)), ("V", ("tensor",))))
    x, w, target = arrays = projected(4, 8, 16, 32)
    put = lambda array, dims: jax.device_put(array, NamedSharding(mesh, shards.spec(dims)))
    total = lambda x, w, target: linear_cross_entropy(x, w, target, num_chunks=4, shards=shards)[0]
    placed = list(map(put, arrays, ("BLx", "xV", "BL")))
    program = jax.jit(jax.grad(total, (0, 1))).lower(*placed).compile()
    _, *want = numpy_linear_cross_entropy(x, w, target)
    for got, wanted in zip(program(*placed), want, strict=True):
        assert_near(got, wanted)
    start = "\n".join(instruction.line for instruction in entry(program.as_text()).values())
    for text in start, program.as_text():
        sizes = [size for _, axes, size in collectives(text, mesh) if axes == ("fsdp",)]
        assert [size for size in sizes if size > 4] == [w.nbytes // 2]


def test_linear_cross_entropy_never_has_all_logits():
    x, w, target = projected(1, 256, 16, 8192)
    all_logits = 256 * 8192 * 4

    def temporary_bytes(num_chunks):
        total = lambda x, w: linear_cross_entropy(x, w, target, num_chunks=num_chunks)[0]
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
