"""AdamW against its formulas in float64."""

import jax
import numpy as np
import pytest

from kernels import moments
from kernels.adamw import Leaf, adamw_step
from tests.adamw_steps import HERE, leaf_kept, leaf_of, third_step
from tests.arrays import normal, wide


def widened(leaf):
    return Leaf(leaf.parameter, moments.widen(leaf.mu, "first"), moments.widen(leaf.nu, "second"))


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
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_step_equals_the_formulas(gradient_dtype, decay):
    leaf, gradient = leaf_of(0, 3, 50), normal(9, 3, 50, dtype=gradient_dtype)
    rule = HERE._replace(weight_decay=decay)
    got = jax.jit(adamw_step, static_argnums=3)(leaf, gradient, third_step(), rule)
    want = stepped(leaf, gradient, 3, 0.7, 0.01, rule)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("kept", ["bfloat16", "int8"])
@pytest.mark.parametrize("shape", [(7,), (5, 3, 128), (2, 100)])
def test_moments_in_fewer_bits(kept, shape):
    """The step is that of the formulas; what is kept of it is within a rounding."""
    leaf, gradient = leaf_kept(kept, 0, *shape), normal(9, *shape)
    plain = jax.jit(adamw_step, static_argnums=3)(leaf, gradient, third_step(), HERE)
    parameter, mu, nu = stepped(widened(leaf), gradient, 3, 0.7, 0.01, HERE)
    np.testing.assert_allclose(plain.parameter, parameter, rtol=2e-6, atol=2e-7)
    found = wide(widened(plain))
    # Two codes, of 127 in the root and of 255 in the fourth root, are so far apart at most.
    for x, want, top, gap in (
        (found.mu, mu, np.abs(mu).max(), 2 / 127),
        (found.nu, nu, nu.max(), 4 / 255),
    ):
        near = 2.0**-7 * np.abs(want) + 1e-7 if kept == "bfloat16" else gap * top
        assert np.all(np.abs(x - want) <= near)
    assert np.all(found.nu > 0)
