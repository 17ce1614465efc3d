"""The kernel of AdamW, and its reference, against the formulas in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import adamw
from kernels.adamw import BLOCK, SMALL, Leaf, Rule, adamw_reference, adamw_triton, factors
from tests.arrays import normal, wide
from tests.gpus import INTERPRET, lowered_for_cuda

HERE = Rule(beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1)


def leaf_of(seed, *shape):
    return Leaf(normal(seed, *shape), normal(seed + 1, *shape), normal(seed + 2, *shape) ** 2)


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
    shapes = jax.eval_shape(lambda: (leaves, [leaf.parameter for leaf in leaves], jnp.zeros(4)))
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
