"""Products in fp8 against NumPy: numbers from a table of all codes, products in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.fp8 import (
    FORWARD,
    GRADIENT,
    LARGEST,
    coded,
    delayed_scale,
    fp8_linears,
    fp8_of_activation,
    later_maxima,
    quantize,
    scale_of,
)
from kernels.linear import activate
from tests.arrays import normal, wide

# Bits of exponent and mantissa, and the code of the largest number.
FORMS = {FORWARD: (4, 3, 0x7E), GRADIENT: (5, 2, 0x7B)}


def table(dtype):
    """The numbers of the codes from 0 to that of the largest number."""
    exponents, mantissas, last = FORMS[dtype]
    code = np.arange(last + 1)
    exponent, mantissa = code >> mantissas, code % 2**mantissas / 2.0**mantissas
    bias = 2 ** (exponents - 1) - 1
    low = mantissa * 2.0 ** (1 - bias)
    return np.where(exponent == 0, low, (1 + mantissa) * 2.0 ** (exponent - bias))


def rounded(x, dtype):
    """The numbers of the nearest codes, even ones where two are as near; the largest beyond it."""
    numbers = table(dtype)
    above = np.clip(np.searchsorted(numbers, np.abs(x)), 1, len(numbers) - 1)
    low, high = np.abs(x) - numbers[above - 1], numbers[above] - np.abs(x)
    up = (high < low) | ((high == low) & (above % 2 == 0))
    return np.sign(x) * numbers[np.where(up, above, above - 1)]


def held(x, dtype, scale=None):
    """The numbers that are held for x, with the least power of two that is no less than needed."""
    if scale is None:
        scale = 2.0 ** np.ceil(np.log2(np.abs(x).max() / numbers_end(dtype)))
    return scale * rounded(x / scale, dtype)


def numbers_end(dtype):
    return table(dtype)[-1]


def stored(x, scale, dtype):
    return np.asarray(quantize(jnp.asarray(x), jnp.float32(scale), dtype))


@pytest.mark.parametrize("dtype", [FORWARD, GRADIENT])
def test_every_bfloat16_number_is_held_as_the_nearest(dtype):
    assert numbers_end(dtype) == LARGEST[dtype]
    x = np.arange(2**16, dtype=np.uint16).view(jnp.bfloat16)
    x = x[np.isfinite(x.astype(np.float32))].astype(np.float64)
    np.testing.assert_array_equal(stored(x, 1.0, dtype).astype(np.float64), rounded(x, dtype))


X = (0.1, -0.3, 1, 2.5, -7.7, 100, 0.001, -0.02)


def test_published_codes():
    """Computed with ml_dtypes, and with scales that are no powers of two."""
    scale = np.float32(100 / 448)
    assert stored(X, scale, FORWARD).view(np.uint8).tolist() == [46, 187, 73, 83, 225, 126, 2, 155]
    gradient = [0.09765625, -0.27901787, 0.89285713, 2.6785715, -7.1428571, 100, 0.00108991]
    scale = np.float32(100 / 57344)
    found = stored(X, scale, GRADIENT).astype(np.float32) * scale
    np.testing.assert_allclose(found, [*gradient, -0.02092634], rtol=5e-6)
    found = stored(X, scale_of(jnp.float32(100), FORWARD), FORWARD).astype(np.float32) * 0.25
    assert found.tolist() == [0.1015625, -0.3125, 1, 2.5, -7.5, 96, 0.0009765625, -0.01953125]


def test_scales():
    """The least powers of two; 1 for zeros, and NaN for what is not finite."""
    maxima = [448.0, 448.1, 224.0, 1e-3, 3e38, 1e-45, 0.0]
    found = [float(scale_of(jnp.float32(x), FORWARD)) for x in maxima]
    assert found[:3] + found[-1:] == [1.0, 2.0, 0.5, 1.0]
    assert found[3] / 2 < 1e-3 / 448 <= found[3]
    assert all(np.isfinite(found))
    assert all(np.isnan(scale_of(jnp.float32(x), FORWARD)) for x in (np.inf, np.nan))


def test_delayed_scales_follow_the_largest_magnitude_of_some_steps():
    maxima, used = jnp.zeros(4), []
    for x in (2, 8, 0, 1, 1, 1, 1, np.inf, np.nan, 3):
        used.append(float(delayed_scale(maxima)))
        maxima = later_maxima(maxima, jnp.float32(x))
    plain = [1, 0.004464286, *[0.01785714] * 4, *[0.002232143] * 4]
    assert used == [2 ** np.ceil(np.log2(scale)) for scale in plain]


def nothing(x):
    return jnp.full_like(x, jnp.nan)


def product(a, b):
    return np.einsum("nd,df->nf", a, b)


@pytest.mark.parametrize(
    "depth, scale, dtype, keeps_codes",  # all pairs
    [
        (128, None, "float32", True),
        (128, 2.0**-8, "bfloat16", False),
        (1000, None, "bfloat16", False),
        (1000, 2.0**-8, "float32", True),
    ],
)
def test_linears(depth, scale, dtype, keeps_codes):
    """A delayed scale holds the largest numbers as 448 times itself. Weights are read as codes."""
    x = 2 * normal(0, 3, 7, depth // 4, 4, dtype=dtype)
    weights = normal(1, depth // 4, 4, 24), 0.02 * normal(2, depth // 4, 4, 2, 5)
    dys = normal(3, 3, 7, 24, dtype=dtype), 1e-6 * normal(4, 3, 7, 2, 5, dtype=dtype)
    own = None if scale is None else jnp.float32(scale)

    @jax.jit
    def both(x, weights, dys):
        codes, unread = tuple(coded(w, 2) for w in weights), jax.tree.map(nothing, weights)
        run = lambda x, w: fp8_linears(x, w, codes, own, 2, keeps_codes)
        (ys, largest), pullback = jax.vjp(run, x, unread)
        kept = {(x.shape, x.dtype.name) for x in jax.tree.leaves(pullback)}
        assert (((4 * (depth // 4), 21), "float8_e4m3fn") in kept) == keeps_codes
        assert (x.shape in {shape for shape, _ in kept}) != keeps_codes
        return ys, largest, *pullback((dys, jnp.zeros(())))

    ys, largest, dx, dweights = wide(both(x, weights, dys))
    x, weights, dys = wide((x, weights, dys))
    assert largest == np.abs(x).max()
    assert scale is None or largest > 448 * scale
    flat = lambda x, count: x.reshape(np.prod(x.shape[:count], dtype=int), -1)
    x = held(flat(x, 2), FORWARD, scale)
    want_dx = 0.0
    end = 1e-6 if dtype == "float32" else 2**-8
    near = lambda found, want, end: np.testing.assert_allclose(
        found, want, rtol=end, atol=end * np.abs(want).max()
    )
    for y, w, dy, dw in zip(ys, weights, dys, dweights, strict=True):
        w, dy = held(flat(w, 2), FORWARD), held(flat(dy, 2), GRADIENT)
        near(flat(y, 2), product(x, w), end)
        near(flat(dw, 2), product(x.T, dy), 1e-6)
        want_dx = want_dx + product(dy, w.T)
    near(flat(dx, 2), want_dx, end)


@pytest.mark.parametrize("num_in", [1, 2])
def test_both_layouts_of_a_weight_are_the_numbers_that_are_held(num_in):
    w = 0.02 * normal(0, 8, 4, 6)
    found = coded(w, num_in)
    turned = np.moveaxis(wide(w), range(num_in), range(-num_in, 0))
    for codes, x in ((found.codes, wide(w)), (found.transposed, turned)):
        np.testing.assert_array_equal(wide(found.scale) * wide(codes), held(x, FORWARD))


def test_kept_codes_change_no_bit():
    """Codes of the forward, and those that a backward makes again."""
    x, w, dy = (
        normal(i, *shape, dtype="bfloat16") for i, shape in enumerate([(3, 8), (8, 6), (3, 6)])
    )
    codes = (coded(w, 1),)

    def run(keeps_codes):
        linears = lambda x, w: fp8_linears(x, (w,), codes, jnp.float32(2.0**-7), 1, keeps_codes)
        (ys, _), pullback = jax.vjp(linears, x, w)
        return ys, pullback(((dy,), jnp.zeros(())))

    jax.tree.map(np.testing.assert_array_equal, run(True), run(False))


@pytest.mark.parametrize("activation, count", [("gelu", 1), ("swiglu", 2)])
def test_a_product_of_an_activation_computes_it_again(activation, count):
    inner = tuple(normal(i, 2, 5, 16) for i in range(count))
    w, dy = normal(7, 16, 8), normal(8, 2, 5, 8)
    codes = coded(w, 1)
    run = jax.vjp(
        lambda *args: fp8_of_activation(activation, *args, codes, None), inner, nothing(w)
    )
    (y, largest), pullback = run
    dinner, dw = pullback((dy, jnp.zeros(())))
    hidden, through = jax.vjp(lambda inner: activate(activation, inner), inner)
    (want_y,), want_largest = fp8_linears(hidden, (w,), (codes,), None)
    _, plain = jax.vjp(lambda x, w: fp8_linears(x, w, (codes,), None), hidden, (w,))
    dhidden, (want_dw,) = plain(((dy,), jnp.zeros(())))
    np.testing.assert_array_equal(y, want_y)
    assert largest == want_largest
    np.testing.assert_array_equal(dw, want_dw)
    for got, want in zip(dinner, *through(dhidden), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)
    kept = jax.tree.leaves(pullback)
    assert not [x for x in kept if x.shape == hidden.shape and np.array_equal(x, hidden)]


def test_what_is_not_finite_stays_so():
    """In the forward where the scale is that of x, and in both gradients."""
    w = normal(1, 8, 3)
    codes = (coded(w, 1),)

    @jax.jit
    def run(x, dy):
        (ys, _), pullback = jax.vjp(lambda x, w: fp8_linears(x, (w,), codes, None), x, w)
        return ys[0], pullback(((dy,), jnp.zeros(())))

    for bad in (np.inf, np.nan):
        x, dy = np.asarray(normal(0, 4, 8)).copy(), np.zeros((4, 3), np.float32)
        dy[0, 0] = bad
        y, gradients = run(x, dy)
        assert np.isfinite(y).all()
        assert all(np.isnan(gradient).all() for gradient in gradients)
        x[0, 0] = bad
        assert np.isnan(run(x, dy)[0]).all()
