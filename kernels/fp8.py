"""Products with weight matrices in 8-bit floating point. Micikevicius et al., arXiv:2209.05433.

Both operands of a product are fp8, in the forward e4m3 and e4m3, in the backward e5m2 for the
gradient of a result and e4m3 for the other operand. A CPU has no such product, and XLA computes it
there from the same numbers in float32.

Hopper's tensor cores add fp8 products up with 14 bits, unless the sums are taken out in between and
added in float32. XLA lets cuBLAS add up fast where the precision of the operands is DEFAULT. So it
is in a forward, and HIGHEST for gradients, whose errors would add up over the steps of a run.

An array x is held as codes and one scale s, x = s * codes, with s a power of two. So neither a
product with s nor one with 1 / s rounds, and x loses the same bits for any s that leaves it between
the least normal number and the largest: 15 powers of two of e4m3, and 31 of e5m2. Numbers above are
held as the largest, since a cast would make NaN or infinity of them.

The dims are those of `kernels.linear`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import Precision, optimization_barrier as materialize

from kernels.linear import activate, flat

FORWARD = jnp.float8_e4m3fn  # activations and weights
GRADIENT = jnp.float8_e5m2
LARGEST = {FORWARD: 448.0, GRADIENT: 57344.0}

Rows = tuple[tuple[int], tuple[int]]  # the contracted dims of both operands
PLAIN: Rows = ((1,), (0,))  # a @ b
RIGHT: Rows = ((1,), (1,))  # a @ b.T
LEFT: Rows = ((0,), (0,))  # a.T @ b


def maximum(x: jax.Array) -> jax.Array:
    """The largest magnitude in an array; float32."""
    return jnp.max(jnp.abs(x)).astype(jnp.float32)


def scale_of(maximum: jax.Array, dtype: Any) -> jax.Array:
    """The least power of two that brings a magnitude into the range of an fp8 type; float32.

    It is 1 for zeros. It is NaN for a magnitude that is not finite, and so are all numbers that are
    then held, so that a step is skipped as it is without fp8.
    """
    mantissa, exponent = jnp.frexp(maximum / LARGEST[dtype])
    least = jnp.clip(exponent - (mantissa == 0.5), -100, 100)  # 1 / s is finite, too
    scale = jnp.ldexp(jnp.ones((), jnp.float32), least)
    return jnp.where(jnp.isfinite(maximum), jnp.where(maximum > 0, scale, 1.0), jnp.nan)


def delayed_scale(maxima_T: jax.Array) -> jax.Array:
    """The scale of activations from their largest magnitudes in the last T steps; float32.

    It is 1 before the first step, whose magnitudes are all zeros.
    """
    return scale_of(jnp.max(maxima_T), FORWARD)


def later_maxima(maxima_T: jax.Array, maximum: jax.Array) -> jax.Array:
    """The magnitudes of the last T steps after one more. One that is not finite counts as zero."""
    newest = jnp.where(jnp.isfinite(maximum), maximum, 0.0)
    return jnp.concatenate([maxima_T[1:], newest[None]])


def quantize(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """The codes of an array."""
    most = LARGEST[dtype]
    return jnp.clip(x.astype(jnp.float32) * (1 / scale), -most, most).astype(dtype)


def _product(
    a: jax.Array,
    b: jax.Array,
    dims: Rows,
    dtype: jnp.dtype,
    *scales: jax.Array,
    precision: Precision = Precision.HIGHEST,
) -> jax.Array:
    """The product of the numbers that two arrays of codes stand for, in `dtype`."""
    found = jax.lax.dot_general(
        a, b, (dims, ((), ())), precision=precision, preferred_element_type=dtype
    )
    return found * functools.reduce(jnp.multiply, scales).astype(dtype)


def _own_scale(x: jax.Array, dtype: Any) -> jax.Array:
    return scale_of(maximum(x), dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def fp8_linears(
    x: jax.Array, weights: tuple[jax.Array, ...], scale: jax.Array | None, num_in: int = 1
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """`kernels.linear.linears` in fp8, and the largest magnitude in x.

    Weights and gradients have the scales of their own largest magnitudes. x, the weights and the
    scales are kept for the backward; codes are made again there.

    Args:
      x: [..., *I].
      weights: [*I, *F] each.
      scale: of x; None: that of its largest magnitude.
      num_in: dims of x that are contracted, its last.
    """
    return _forward(x, weights, scale, num_in)[0]


def _forward(
    x: jax.Array, weights: tuple[jax.Array, ...], scale: jax.Array | None, num_in: int
) -> tuple[tuple, tuple]:
    lead, largest = x.ndim - num_in, maximum(x)
    scale = scale_of(largest, FORWARD) if scale is None else scale
    codes_ND = quantize(flat(x, lead), scale, FORWARD)
    ys, of_weights = [], []
    for w in weights:
        of_weights.append(own := _own_scale(w, FORWARD))
        w_DF = quantize(flat(w, num_in), own, FORWARD)
        fast = Precision.DEFAULT
        y_NF = _product(codes_ND, w_DF, PLAIN, x.dtype, scale, own, precision=fast)
        ys.append(y_NF.reshape(*x.shape[:lead], *w.shape[num_in:]))
    return (tuple(ys), largest), (x, weights, scale, tuple(of_weights))


def _backward(
    num_in: int, saved: tuple, cotangents: tuple[tuple[jax.Array, ...], jax.Array]
) -> tuple[jax.Array, tuple, jax.Array | None]:
    x, weights, scale, of_weights = saved
    lead = x.ndim - num_in
    dys = [flat(dy, lead) for dy in materialize(cotangents[0])]
    scales = [_own_scale(dy, GRADIENT) for dy in dys]
    codes = [quantize(dy, own, GRADIENT) for dy, own in zip(dys, scales, strict=True)]
    rows = list(zip(codes, scales, weights, of_weights, strict=True))
    first, *rest = (
        _product(dy, quantize(flat(w, num_in), own, FORWARD), RIGHT, x.dtype, of_dy, own)
        for dy, of_dy, w, own in rows
    )
    codes_ND = quantize(flat(x, lead), scale, FORWARD)
    dweights = tuple(
        _product(codes_ND, dy, LEFT, w.dtype, scale, of_dy).reshape(w.shape)
        for dy, of_dy, w, _ in rows
    )
    return sum(rest, first).reshape(x.shape), dweights, None


fp8_linears.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fp8_of_activation(
    activation: str, inner: tuple[jax.Array, ...], w_FD: jax.Array, scale: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """activation(inner) @ w in fp8, and the largest magnitude of the activation's result.

    The backward pass keeps `inner` and computes the activation again.

    Args:
      activation: a name of `kernels.linear.ACTIVATIONS`.
      inner: the arguments of the activation, [..., F].
      w_FD: the weight.
      scale: of the activation's result; None: that of its largest magnitude.
    """
    return _of_activation_forward(activation, inner, w_FD, scale)[0]


def _of_activation_forward(
    activation: str, inner: tuple[jax.Array, ...], w_FD: jax.Array, scale: jax.Array | None
) -> tuple[tuple, tuple]:
    inner = materialize(inner)
    hidden = materialize(activate(activation, inner))
    (ys, largest), (_, _, *scales) = _forward(hidden, (w_FD,), scale, 1)
    return (ys[0], largest), (inner, w_FD, *scales)


def _of_activation_backward(
    activation: str, saved: tuple, cotangents: tuple[jax.Array, jax.Array]
) -> tuple[tuple, jax.Array, None]:
    inner, w_FD, *scales = saved
    dy, inner = materialize((cotangents[0], inner))
    hidden, pullback = jax.vjp(functools.partial(activate, activation), inner)
    found = (materialize(hidden), (w_FD,), *scales)
    dhidden, (dw_FD,), _ = _backward(1, found, ((dy,), cotangents[1]))
    [dinner] = materialize(pullback(materialize(dhidden)))
    return dinner, dw_FD, None


fp8_of_activation.defvjp(_of_activation_forward, _of_activation_backward)
