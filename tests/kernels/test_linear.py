"""Products and the feed-forward against NumPy and `jax.grad` of plain formulas, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.linear import (
    feed_forward,
    linear,
    linear_transposed,
    linears,
    weight_gradient,
)
from tests.arrays import assert_near, normal, wide
from tests.kernels.gradients import DTYPES, check, run

pytestmark = pytest.mark.usefixtures("float64")


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


@pytest.mark.parametrize("out", [24, 8, 5])
def test_only_a_cpu_multiplies_weight_gradients_in_a_layout_of_its_own(out):
    """Elsewhere a product is added to the sum of microbatches where it is: nothing is between."""
    add = lambda total, x, dy: total + weight_gradient(x, dy, total.dtype)
    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, out), (50, 8), (50, out))]
    lowered = lambda platform: jax.jit(add).trace(*shapes).lower(lowering_platforms=(platform,))
    text = {platform: lowered(platform).as_text() for platform in ("cpu", "cuda")}
    assert ("optimization_barrier" in text["cpu"]) == (out <= 8)
    assert text["cuda"].count("stablehlo.transpose") == 1  # of x
    assert "optimization_barrier" not in text["cuda"]


def numpy_gelu(x):
    return 0.5 * x * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


PLAIN_ACTIVATIONS = {
    "gelu": numpy_gelu,
    "gelu_erf": lambda u: u * (1 + jax.scipy.special.erf(u / np.sqrt(2))) / 2,
    "swiglu": lambda gate, up: gate / (1 + jnp.exp(-gate)) * up,
    "geglu": lambda gate, up: numpy_gelu(gate) * up,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation, num_in", [("gelu", 1), ("swiglu", 2)])
def test_feed_forward(activation, num_in, dtype):
    x, w_out = normal(0, 2, 5, 8, dtype=dtype), normal(1, 20, 8, dtype=dtype)
    w_in = tuple(normal(2 + i, 8, 20, dtype=dtype) for i in range(num_in))

    def plain(x, w_in, w_out):
        return PLAIN_ACTIVATIONS[activation](*(x @ w for w in w_in)) @ w_out

    run = lambda x, w_in, w_out: feed_forward(activation, x, w_in, (w_out,))[0]
    if num_in == 1:
        by_hand = wide(plain(wide(x), wide(w_in), wide(w_out)))
        assert_near(run(x, w_in, w_out), by_hand, dtype)
    check(run, plain, (x, w_in, w_out), dtype)


@pytest.mark.parametrize("activation, num_in", [("gelu_erf", 1), ("geglu", 2)])
def test_feed_forward_with_biases(activation, num_in):
    x, w_out = normal(0, 2, 5, 8), normal(1, 20, 8)
    w_in = tuple(normal(2 + i, 8, 20) for i in range(num_in))
    b_in = tuple(normal(4 + i, 20) for i in range(num_in))

    def plain(x, w_in, w_out, b_in):
        inner = (x @ w + b[None, None] for w, b in zip(w_in, b_in, strict=True))
        return PLAIN_ACTIVATIONS[activation](*inner) @ w_out

    run = lambda x, w_in, w_out, b_in: feed_forward(activation, x, w_in, (w_out,), b_in)[0]
    check(run, plain, (x, w_in, w_out, b_in), "float32")


def test_feed_forward_with_something_added_and_two_results():
    x, added = normal(0, 2, 5, 8), normal(1, 2, 5, 20)
    w_in, w_out = (normal(2, 8, 20), normal(3, 8, 20)), (normal(4, 20, 8), normal(5, 20, 3))

    def plain(x, w_in, w_out, added):
        gate, up = (x @ w for w in w_in)
        hidden = PLAIN_ACTIVATIONS["swiglu"](gate, up + added)
        return jnp.concatenate([hidden @ w for w in w_out], -1)

    def run(x, w_in, w_out, added):
        ys = feed_forward("swiglu", x, w_in, w_out, (), (None, added))
        return jnp.concatenate(ys, -1)

    check(run, plain, (x, w_in, w_out, added), "float32")
