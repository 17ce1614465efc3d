"""Random arrays, and what near means: for the tests of array functions."""

import jax
import jax.numpy as jnp
import numpy as np

# Sums of a few hundred terms in float32, relative to the largest entry. Inputs rounded to the 8
# bits of bfloat16, or the 11 of float16, give outputs off by two of its roundings.
TOLERANCE = {"float32": 5e-6, "bfloat16": 2.0**-6, "float16": 2.0**-9}


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
