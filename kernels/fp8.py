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

Hopper multiplies fp8 only where both operands have the contracted dim last, and XLA transposes
those that have not, each in a kernel of its own. So an array that is contracted over its first dim
is held transposed, and one that two products read is held in both layouts.

The dims are those of `kernels.linear`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.lax import Precision, optimization_barrier as materialize

from kernels.linear import activate, flat

FORWARD = jnp.float8_e4m3fn  # activations and weights
GRADIENT = jnp.float8_e5m2
LARGEST = {FORWARD: 448.0, GRADIENT: 57344.0}


class Coded(NamedTuple):
    """A weight as codes, x = scale * codes."""

    codes: jax.Array  # [*I, *F], which a backward reads
    transposed: jax.Array  # [*F, *I], which a forward reads
    scale: jax.Array  # [], float32


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
    return _in_range(x, scale, dtype).astype(dtype)


def _in_range(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    most = LARGEST[dtype]
    return jnp.clip(x.astype(jnp.float32) * (1 / scale), -most, most)


def transposed(x: jax.Array, split: int, scale: jax.Array, dtype: Any) -> jax.Array:
    """The codes of an array [*A, *B] as [*B, *A]; `split` is the number of dims A."""
    order = (*range(split, x.ndim), *range(split))
    # Without the barrier XLA takes the transposition to the product, and makes a kernel of it.
    return materialize(_in_range(x, scale, dtype).transpose(order).astype(dtype))


def both_layouts(x: jax.Array, split: int, scale: jax.Array, dtype: Any) -> tuple[Any, Any]:
    """The codes of an array [*A, *B], and those that `transposed` makes.

    XLA does not know that both scales are the same. So it cannot make one array of the other, which
    would be written and read for it, but reads x for both. It can join kernels that read one array.
    """
    one, other = materialize((scale, scale))
    return quantize(x, one, dtype), transposed(x, split, other, dtype)


def coded(w: jax.Array, num_in: int) -> Coded:
    """A weight [*I, *F] as codes, with the scale of its largest magnitude; I are `num_in` dims.

    One kernel reads the weight and writes both layouts. Left to itself, XLA makes a transposition a
    mere change of layout, has the codes in that of the other product, and transposes them in a
    kernel of its own, since they are the fewest bytes.
    """
    scale = _own_scale(w, FORWARD)
    order = (*range(num_in, w.ndim), *range(num_in))
    turned = _in_rows(w.transpose(order))
    one, other = materialize((scale, scale))  # as in `both_layouts`
    codes = quantize(_in_rows(w), one, FORWARD)
    return Coded(codes, materialize(quantize(turned, other, FORWARD)), scale)


def _in_rows(x: jax.Array) -> jax.Array:
    """The array, which lies in memory in the order of its dims."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _own_scale(x: jax.Array, dtype: Any) -> jax.Array:
    return scale_of(maximum(x), dtype)


def _product(
    a: jax.Array, b: jax.Array, dtype: jnp.dtype, precision: Precision, *scales: jax.Array
) -> jax.Array:
    """a @ b.T of the numbers that two arrays of codes stand for, in `dtype`."""
    last = ((1,), (1,)), ((), ())
    found = jax.lax.dot_general(a, b, last, precision=precision, preferred_element_type=dtype)
    return found * functools.reduce(jnp.multiply, scales).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def fp8_linears(
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    of_weights: tuple[Coded, ...],
    scale: jax.Array | None,
    num_in: int = 1,
    keeps_codes: bool = False,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """`kernels.linear.linears` in fp8, and the largest magnitude in x.

    Gradients have the scales of their own largest magnitudes.

    Args:
      x: [..., *I].
      weights: [*I, *F] each. They get the gradients; their numbers are not read.
      of_weights: the same as `coded` gives them.
      scale: of x; None: that of its largest magnitude.
      num_in: dims of x that are contracted, its last.
      keeps_codes: whether the codes of x are kept for the backward, a byte for each number. Else x
        is, and its codes are made again: better where x is kept by others anyway.
    """
    return _forward(x, weights, of_weights, scale, num_in, keeps_codes)[0]


def _forward(
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    of_weights: tuple[Coded, ...],
    scale: jax.Array | None,
    num_in: int,
    keeps_codes: bool,
) -> tuple[tuple, tuple]:
    lead, largest = x.ndim - num_in, maximum(x)
    scale = scale_of(largest, FORWARD) if scale is None else scale
    x_ND = flat(x, lead)
    if keeps_codes:
        codes_ND, kept = both_layouts(x_ND, 1, scale, FORWARD)
    else:
        codes_ND, kept = quantize(x_ND, scale, FORWARD), x
    ys = []
    for w in of_weights:
        num_out = w.codes.ndim - num_in
        w_FD = flat(w.transposed, num_out)
        y_NF = _product(codes_ND, w_FD, x.dtype, Precision.DEFAULT, scale, w.scale)
        ys.append(y_NF.reshape(*x.shape[:lead], *w.transposed.shape[:num_out]))
    for_backward = tuple((w.codes, w.scale) for w in of_weights)
    return (tuple(ys), largest), (kept, weights, for_backward, scale)


def _backward(
    num_in: int,
    keeps_codes: bool,
    saved: tuple,
    cotangents: tuple[tuple[jax.Array, ...], jax.Array],
) -> tuple[jax.Array, tuple, None, None]:
    kept, weights, of_weights, scale = saved
    dys = materialize(cotangents[0])
    lead = dys[0].ndim - (weights[0].ndim - num_in)
    # Or XLA could keep the codes of the forward, where both are in one program.
    codes_DN = kept
    if not keeps_codes:
        codes_DN = transposed(flat(materialize(kept), lead), 1, scale, FORWARD)
    dx_parts, dweights = [], []
    for dy, w, (codes, of_w) in zip(dys, weights, of_weights, strict=True):
        dy_NF, of_dy = flat(dy, lead), _own_scale(dy, GRADIENT)
        dy_NF, dy_FN = both_layouts(dy_NF, 1, of_dy, GRADIENT)
        precise = Precision.HIGHEST
        dx_parts.append(_product(dy_NF, flat(codes, num_in), dy.dtype, precise, of_dy, of_w))
        dw_DF = _product(codes_DN, dy_FN, w.dtype, precise, scale, of_dy)
        dweights.append(dw_DF.reshape(w.shape))
    first, *rest = dx_parts
    shape = *dys[0].shape[:lead], *weights[0].shape[:num_in]
    return sum(rest, first).reshape(shape), tuple(dweights), None, None


fp8_linears.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fp8_of_activation(
    activation: str,
    inner: tuple[jax.Array, ...],
    w_FD: jax.Array,
    of_w: Coded,
    scale: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """activation(inner) @ w in fp8, and the largest magnitude of the activation's result.

    The backward pass keeps `inner` and computes the activation again.

    Args:
      activation: a name of `kernels.linear.ACTIVATIONS`.
      inner: the arguments of the activation, [..., F].
      w_FD: the weight, which gets the gradient; its numbers are not read.
      of_w: the same as `coded` gives it.
      scale: of the activation's result; None: that of its largest magnitude.
    """
    return _of_activation_forward(activation, inner, w_FD, of_w, scale)[0]


def _of_activation_forward(
    activation: str,
    inner: tuple[jax.Array, ...],
    w_FD: jax.Array,
    of_w: Coded,
    scale: jax.Array | None,
) -> tuple[tuple, tuple]:
    inner = materialize(inner)
    hidden = materialize(activate(activation, inner))
    (ys, largest), (_, *saved) = _forward(hidden, (w_FD,), (of_w,), scale, 1, False)
    return (ys[0], largest), (inner, *saved)


def _of_activation_backward(
    activation: str, saved: tuple, cotangents: tuple[jax.Array, jax.Array]
) -> tuple[tuple, jax.Array, None, None]:
    inner, *saved_others = saved
    dy, inner = materialize((cotangents[0], inner))
    hidden, pullback = jax.vjp(functools.partial(activate, activation), inner)
    found = (hidden, *saved_others)
    dhidden, (dw_FD,), *_ = _backward(1, False, found, ((dy,), cotangents[1]))
    [dinner] = materialize(pullback(materialize(dhidden)))
    return dinner, dw_FD, None, None


fp8_of_activation.defvjp(_of_activation_forward, _of_activation_backward)
