"""Values and gradients of an array function against a plain formula in float64."""

import jax
import jax.numpy as jnp

from tests.arrays import assert_near, normal

DTYPES = ["float32", "bfloat16"]


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
