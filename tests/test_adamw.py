"""The kernel of AdamW, and its reference, against the formulas in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import adamw, moments
from kernels.adamw import BLOCK, SMALL, Leaf, Part, Rule, adamw_reference, adamw_triton, factors
from tests.arrays import normal, wide
from tests.gpus import INTERPRET, lowered_for_cuda

HERE = Rule(beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1)


def leaf_of(seed, *shape):
    return Leaf(normal(seed, *shape), normal(seed + 1, *shape), normal(seed + 2, *shape) ** 2)


def leaf_kept(kept, seed, *shape):
    """After some steps, with moments in fewer bits."""
    wide_leaf = leaf_of(seed, *shape)
    both = []
    for which, x in (("first", wide_leaf.mu), ("second", wide_leaf.nu)):
        bits = moments.noise(moments.positions(shape), jnp.uint32(seed))[which == "second"]
        both.append(moments.narrow(x, moments.zero_moment(shape, kept, which), bits, which))
    return Leaf(wide_leaf.parameter, *both)


def widened(leaf):
    return Leaf(leaf.parameter, moments.widen(leaf.mu, "first"), moments.widen(leaf.nu, "second"))


NEAR = {"float32": (2e-6, 2e-7), "bfloat16": (2.0**-7, 0), "int8": (0, 1)}


def assert_alike(got, want):
    """Sums in another order may take a number over the edge where it is rounded the other way."""
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        rtol, atol = NEAR[one.dtype.name]
        np.testing.assert_allclose(wide(one), wide(other), rtol=rtol, atol=atol)
        if one.dtype != jnp.float32:
            assert np.mean(wide(one) != wide(other)) < 0.01


def stepped(leaf, gradient, count, scale, rate, rule):
    """In float64."""
    p, mu, nu = wide(leaf)
    g = wide(gradient) * scale
    mu = rule.beta1 * mu + (1 - rule.beta1) * g
    nu = rule.beta2 * nu + (1 - rule.beta2) * g**2
    unbiased = mu / (1 - rule.beta1**count), nu / (1 - rule.beta2**count)
    change = unbiased[0] / (np.sqrt(unbiased[1]) + rule.epsilon) + rule.weight_decay * p
    return p - rate * change, mu, nu


@pytest.mark.parametrize("gradient_dtype", ["float32", "bfloat16"])
def test_the_kernel_equals_the_formulas(gradient_dtype, monkeypatch):
    """Arrays of all sizes; small ones share a launch, with and without weight decay."""
    monkeypatch.setattr(adamw, "SMALL", 2 * BLOCK)
    shapes = [(1,), (), (3, 5), (BLOCK,), (BLOCK + 1,), (3, BLOCK), (0, 4), *[(7,)] * 12]
    leaves = [leaf_of(i, *shape) for i, shape in enumerate(shapes)]
    gradients = [normal(100 + i, *s, dtype=gradient_dtype) for i, s in enumerate(shapes)]
    rules = [HERE._replace(weight_decay=0.1 * (i % 2)) for i in range(len(shapes))]
    step = factors(jnp.int32(3), 0.7, 0.01, HERE.beta1, HERE.beta2)
    got = jax.jit(lambda *args: adamw_triton(*args, rules, interpret=INTERPRET))(
        leaves, gradients, step
    )
    for leaf, gradient, rule, new in zip(leaves, gradients, rules, got, strict=True):
        want = stepped(leaf, gradient, 3, 0.7, 0.01, rule)
        for plain in (new, adamw_reference(leaf, gradient, step, rule)):
            for one, other in zip(plain, want, strict=True):
                assert one.shape == other.shape
                np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-7)


def test_small_arrays_share_launches():
    leaves = [leaf_of(0, n) for n in (8, SMALL, 3, SMALL + 5)]
    shapes = jax.eval_shape(lambda: (leaves, [leaf.parameter for leaf in leaves], jnp.zeros(6)))
    update = lambda *args: adamw_triton(*args, [HERE] * 4)
    text = lowered_for_cuda(update, *shapes)
    assert text.count("__gpu$xla.gpu.triton") == 3


def test_donated_state_is_updated_in_place():
    leaf, gradient = leaf_of(0, 64, 64), normal(5, 64, 64)
    step = factors(jnp.int32(1), 1.0, 0.01, HERE.beta1, HERE.beta2)
    update = lambda leaf, gradient: adamw_triton([leaf], [gradient], step, [HERE])
    text = lowered_for_cuda(update, leaf, gradient, donate_argnums=0)
    [call] = [line for line in text.splitlines() if "__gpu$xla.gpu.triton" in line]
    for i in range(3):
        assert f"output_tuple_indices = [{i}], operand_index = {i + 1}" in call
    assert text.count("tf.aliasing_output") == 3


SHAPES = [(7,), (BLOCK + 1,), (3, 64), (5, 3, 128), (70, 64), (64, 64), (2, 100)]


@pytest.mark.parametrize("kept", ["bfloat16", "int8"])
def test_moments_in_fewer_bits(kept, monkeypatch):
    """The step is that of the formulas; what is kept of it is within a rounding."""
    monkeypatch.setattr(adamw, "SMALL", 64 * 64)
    leaves = [leaf_kept(kept, i, *shape) for i, shape in enumerate(SHAPES)]
    gradients = [normal(100 + i, *shape) for i, shape in enumerate(SHAPES)]
    rules = [HERE._replace(seed=i) for i in range(len(SHAPES))]
    step = factors(jnp.int32(3), 0.7, 0.01, HERE.beta1, HERE.beta2)
    run = lambda *args: adamw_triton(*args, rules, interpret=INTERPRET)
    for leaf, gradient, rule, got in zip(
        leaves, gradients, rules, jax.jit(run)(leaves, gradients, step), strict=True
    ):
        plain = adamw_reference(leaf, gradient, step, rule)
        assert_alike(got, plain)
        parameter, mu, nu = stepped(widened(leaf), gradient, 3, 0.7, 0.01, rule)
        np.testing.assert_allclose(plain.parameter, parameter, rtol=2e-6, atol=2e-7)
        found = wide(widened(plain))
        most = np.abs(mu).max(), nu.max()
        # Two codes, of 127 in the root and of 255 in the fourth root, are so far apart at most.
        for x, want, top, gap in (
            (found.mu, mu, most[0], 2 / 127),
            (found.nu, nu, most[1], 4 / 255),
        ):
            near = 2.0**-7 * np.abs(want) + 1e-7 if kept == "bfloat16" else gap * top
            assert np.all(np.abs(x - want) <= near)
        assert np.all(found.nu > 0)


@pytest.mark.parametrize("kept", ["bfloat16", "int8"])
def test_parts_are_rounded_as_the_whole_is(kept):
    leaf, gradient = leaf_kept(kept, 0, 8, 4, 128), normal(9, 8, 4, 128)
    step = factors(jnp.int32(3), 0.7, 0.01, HERE.beta1, HERE.beta2)
    whole = adamw_reference(leaf, gradient, step, HERE)
    for row, column, last in ((0, 0, 0), (4, 2, 64)):
        here = lambda x, last=last, row=row, column=column: x[
            row : row + 4,
            column : column + 2,
            last * x.shape[2] // 128 : (last + 64) * x.shape[2] // 128,
        ]
        part = Part((8, 4, 128), jnp.asarray([row, column, last], jnp.int32))
        own = jax.tree.map(here, leaf)
        [got] = adamw_triton([own], [here(gradient)], step, [HERE], [part], interpret=INTERPRET)
        assert_alike(got, jax.tree.map(here, whole))


@pytest.mark.parametrize("kept", ["bfloat16", "int8"])
def test_kernels_for_fewer_bits_lower_in_place(kept):
    leaf, gradient = leaf_kept(kept, 0, 64, 128), normal(5, 64, 128)
    part = Part((128, 128), jnp.zeros(2, jnp.int32))
    step = factors(jnp.int32(1), 1.0, 0.01, HERE.beta1, HERE.beta2)
    update = lambda leaf, gradient: adamw_triton([leaf], [gradient], step, [HERE], [part])
    text = lowered_for_cuda(update, leaf, gradient, donate_argnums=0)
    [call] = [line for line in text.splitlines() if "__gpu$xla.gpu.triton" in line]
    count = len(jax.tree.leaves(leaf))
    assert count == (5 if kept == "int8" else 3)
    for i in range(count):
        assert f"output_tuple_indices = [{i}], operand_index = {i + 1}" in call
    assert text.count("tf.aliasing_output") == count
