"""Norms against NumPy and `jax.grad` of plain formulas, in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from kernels.norm import layer_norm, rms_norm
from tests.arrays import assert_near, normal, wide
from tests.kernels.gradients import DTYPES, check

pytestmark = pytest.mark.usefixtures("float64")

EPSILON = 1e-5


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


def test_norms_of_heads_with_another_epsilon_and_scales_around_zero():
    """The norm is of each head, [K], or of all heads, [H, K]; so large an epsilon shows."""
    x = normal(0, 2, 5, 4, 8)
    for shape in ((8,), (4, 8)):
        scale, dims = normal(1, *shape), tuple(range(-len(shape), 0))

        def plain(x, scale, dims=dims):
            root = jnp.sqrt((x**2).mean(dims, keepdims=True) + 0.5)
            return x / root * (1 + jnp.expand_dims(scale, range(x.ndim - scale.ndim)))

        check(lambda x, scale: rms_norm(x, scale, 0.5, 1.0), plain, (x, scale), "float32")
    scale, bias = normal(1, 8), normal(2, 8)

    def plain_layer(x, scale, bias):
        centred = x - x.mean(-1, keepdims=True)
        root = jnp.sqrt((centred**2).mean(-1, keepdims=True) + 0.5)
        return centred / root * (1 + scale[None, None, None]) + bias[None, None, None]

    run = lambda x, scale, bias: layer_norm(x, scale, bias, 0.5, 1.0)
    check(run, plain_layer, (x, scale, bias), "float32")
