"""Products with weight matrices, whose gradients XLA:CPU computes at the speed of the forward.

Dims: ... any, N all of them merged, D width of the input, F width of the output.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.lax import optimization_barrier as materialize


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def linears(
    x: jax.Array, weights: tuple[jax.Array, ...], num_in: int = 1, dtype: str | None = None
) -> tuple[jax.Array, ...]:
    """x times each weight, contracting the last `num_in` dims of x: projections of one input.

    x is [..., *I], a weight [*I, *F], its result [..., *F] in `dtype`, by default that of x. All
    products are of arrays in the dtype of x. The gradient of a weight is in the dtype of the
    weight: of weights in float32 it is not rounded. The weights are kept for the backward pass as
    they are, not as copies of another shape.
    """
    return _forward(x, weights, num_in, dtype)[0]


def linear(x: jax.Array, w_DF: jax.Array, dtype: str | None = None) -> jax.Array:
    """`x @ w`; x is [..., D], the result in `dtype`, by default that of x."""
    return linears(x, (w_DF,), 1, dtype)[0]


def _flat(array: jax.Array, split: int) -> jax.Array:
    """The array as a matrix: the dims before `split` merged, and those after."""
    return array.reshape(math.prod(array.shape[:split]), -1)


def _forward(
    x: jax.Array, weights: tuple[jax.Array, ...], num_in: int, dtype: str | None
) -> tuple[tuple, tuple]:
    lead = x.ndim - num_in
    x_ND = _flat(x, lead)
    multiply = functools.partial(jnp.matmul, preferred_element_type=dtype)
    products = [multiply(x_ND, _flat(w, num_in).astype(x.dtype)) for w in weights]
    ys = [
        y.reshape(*x.shape[:lead], *w.shape[num_in:])
        for y, w in zip(products, weights, strict=True)
    ]
    return tuple(ys), (x, weights)


def _backward(
    num_in: int, dtype: str | None, saved: tuple, dys: tuple[jax.Array, ...]
) -> tuple[jax.Array, tuple]:
    x, weights = saved
    lead = x.ndim - num_in
    dys = materialize(tuple(dy.astype(x.dtype) for dy in dys))
    x_ND, dys = _flat(x, lead), tuple(_flat(dy, lead) for dy in dys)
    pairs = list(zip(dys, weights, strict=True))
    first, *rest = (dy @ _flat(w, num_in).astype(x.dtype).T for dy, w in pairs)
    dweights = tuple(weight_gradient(x_ND, dy, w.dtype).reshape(w.shape) for dy, w in pairs)
    return sum(rest, first).reshape(x.shape), dweights


linears.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def linear_transposed(x: jax.Array, w_FD: jax.Array, dtype: str | None = None) -> jax.Array:
    """`x @ w.T`; x is [..., D]: a tied output projection, whose weight is the token table.

    The result is in `dtype`, by default that of x; gradients are as of `linears`.
    """
    return _transposed_forward(x, w_FD, dtype)[0]


def _transposed_forward(
    x: jax.Array, w_FD: jax.Array, dtype: str | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return jnp.matmul(x, w_FD.astype(x.dtype).T, preferred_element_type=dtype), (x, w_FD)


def _transposed_backward(
    dtype: str | None, saved: tuple, dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w_FD = saved
    dy = materialize(dy.astype(x.dtype))
    dw_FD = weight_gradient(_flat(dy, dy.ndim - 1), _flat(x, x.ndim - 1), w_FD.dtype)
    return dy @ w_FD.astype(x.dtype), dw_FD


linear_transposed.defvjp(_transposed_forward, _transposed_backward)


def weight_gradient(x_ND: jax.Array, dy_NF: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Gradient of the weight in `y = x @ w`; [D, F], in `dtype`.

    A wide matrix transposed on the left runs at 68 GFLOP/s, on the right at 103 (one core, f32).
    """
    multiply = functools.partial(jnp.matmul, preferred_element_type=dtype)
    if x_ND.shape[1] > dy_NF.shape[1]:
        return materialize(multiply(dy_NF.T, x_ND)).T
    if x_ND.shape[1] < dy_NF.shape[1]:
        return multiply(x_ND.T, dy_NF)
    return multiply(materialize(x_ND.T), dy_NF)


def gelu(u: jax.Array) -> jax.Array:
    """GELU by its tanh approximation. Hendrycks and Gimpel, arXiv:1606.08415."""
    return jax.nn.gelu(u, approximate=True)


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up. Shazeer, arXiv:2002.05202."""
    return jax.nn.silu(gate) * up


def _activate(inner: tuple[jax.Array, ...]) -> jax.Array:
    """Computes in float32; one inner array is GELU, two are SwiGLU."""
    wide = [u.astype(jnp.float32) for u in inner]
    return (gelu(*wide) if len(inner) == 1 else swiglu(*wide)).astype(inner[0].dtype)


@jax.custom_vjp
def feed_forward(x: jax.Array, w_in: tuple[jax.Array, ...], w_out: jax.Array) -> jax.Array:
    """activation(x @ w_in) @ w_out: GELU with one weight [D, F] in `w_in`, SwiGLU with (gate, up).

    The backward pass keeps the activation's inputs and computes its output again. Products and
    gradients are in the dtypes that they have in `linears`.
    """
    return _feed_forward_forward(x, w_in, w_out)[0]


def _feed_forward_forward(
    x: jax.Array, w_in: tuple[jax.Array, ...], w_out: jax.Array
) -> tuple[jax.Array, tuple]:
    inner = materialize(tuple(x @ w.astype(x.dtype) for w in w_in))
    return materialize(_activate(inner)) @ w_out.astype(x.dtype), (x, w_in, inner, w_out)


def _feed_forward_backward(
    saved: tuple, dy: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...], jax.Array]:
    x, w_in, inner, w_out = saved
    dy, inner = materialize((dy, inner))
    dh = materialize(dy @ w_out.astype(x.dtype).T)
    hidden, pullback = jax.vjp(_activate, inner)
    [dinner] = materialize(pullback(dh))
    dx, dw_in = _backward(1, None, (x, w_in), dinner)
    lead = x.ndim - 1
    dw_out = weight_gradient(_flat(materialize(hidden), lead), _flat(dy, lead), w_out.dtype)
    return dx, dw_in, dw_out


feed_forward.defvjp(_feed_forward_forward, _feed_forward_backward)
