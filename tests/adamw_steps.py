"""The third step of AdamW by each way to compute it, and what is near it."""

import jax
import jax.numpy as jnp
import numpy as np

from kernels import moments
from kernels.adamw import Hyperparameters, Leaf, factors
from tests.arrays import normal, wide

HERE = Hyperparameters(beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1)


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


NEAR = {"float32": (2e-6, 2e-7), "bfloat16": (2.0**-7, 0), "int8": (0, 1)}


def assert_near_steps(got, want):
    """Sums in another order may take a number over the edge where it is rounded the other way."""
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        rtol, atol = NEAR[one.dtype.name]
        np.testing.assert_allclose(wide(one), wide(other), rtol=rtol, atol=atol)
        if one.dtype != jnp.float32:
            assert np.mean(wide(one) != wide(other)) < 0.01


def third_step():
    return factors(jnp.int32(3), 0.7, 0.01, HERE.beta1, HERE.beta2)
