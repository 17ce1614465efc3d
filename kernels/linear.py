"""Products with weight matrices, whose gradients XLA:CPU computes at the speed of the forward.

Dims: ... any, N all of them merged, D width of the input, F width of the output.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import optimization_barrier as materialize

from kernels.sequence_cut import SequenceCut, gathered, scattered


class Cuts(NamedTuple):
    """The ends of a product where several devices share the tokens of each sequence."""

    input: SequenceCut | None = None
    output: SequenceCut | None = None


UNCUT = Cuts()


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def linears(
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    num_in: int = 1,
    dtype: str | None = None,
    cuts: Cuts = UNCUT,
) -> tuple[jax.Array, ...]:
    """x times each weight, contracting the last dims of x: projections of one input.

    All products are of arrays in the dtype of x. The gradient of a weight is in the dtype of the
    weight: of weights in float32 it is not rounded. The weights are kept for the backward pass as
    they are, not as copies of another shape. An x whose sequences are cut is kept so, and gathered
    again.

    Args:
      x: [..., *I].
      weights: [*I, *F] each; the result of each is [..., *F].
      num_in: dims of x that are contracted, its last.
      dtype: of the results, by default that of x.
      cuts: how the sequences of x and of the results are cut, if they are.
    """
    return _forward(x, weights, num_in, dtype, cuts)[0]


def linear(x: jax.Array, w_DF: jax.Array, dtype: str | None = None) -> jax.Array:
    """`x @ w`; x is [..., D], the result in `dtype`, by default that of x."""
    return linears(x, (w_DF,), 1, dtype)[0]


def flat(array: jax.Array, split: int) -> jax.Array:
    """The array as a matrix: the dims before `split` merged, and those after."""
    return array.reshape(math.prod(array.shape[:split]), -1)


def _forward(
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    num_in: int,
    dtype: str | None,
    cuts: Cuts = UNCUT,
) -> tuple[tuple, tuple]:
    lead = x.ndim - num_in
    if cuts != UNCUT:
        x = scattered(x, cuts.input)  # so it is kept
        whole = gathered(x, cuts.input)
        multiply = functools.partial(_contracted, num_in=num_in, dtype=dtype)
        return tuple(scattered(multiply(whole, w), cuts.output) for w in weights), (x, weights)
    x_ND = flat(x, lead)
    multiply = functools.partial(jnp.matmul, preferred_element_type=dtype)
    products = [multiply(x_ND, flat(w, num_in).astype(x.dtype)) for w in weights]
    ys = [
        y.reshape(*x.shape[:lead], *w.shape[num_in:])
        for y, w in zip(products, weights, strict=True)
    ]
    return tuple(ys), (x, weights)


def _contracted(
    x: jax.Array, w: jax.Array, num_in: int, dtype: str | None = None, *, is_turned: bool = False
) -> jax.Array:
    """x [..., *I] times w [*I, *F], or if it `is_turned` [*F, *I]; no dims are merged.

    The result can so be cut along any of them, where XLA would have to have a merged dim whole.
    """
    mine = tuple(range(x.ndim - num_in, x.ndim))
    start = w.ndim - num_in if is_turned else 0
    dims = (mine, tuple(range(start, start + num_in))), ((), ())
    return jax.lax.dot_general(x, w.astype(x.dtype), dims, preferred_element_type=dtype)


def _backward(
    num_in: int,
    dtype: str | None,
    cuts: Cuts,
    saved: tuple,
    dys: tuple[jax.Array, ...],
) -> tuple[jax.Array, tuple]:
    x, weights = saved
    lead = x.ndim - num_in
    dys = materialize(tuple(dy.astype(x.dtype) for dy in dys))
    if cuts != UNCUT:
        return _cut_backward(num_in, cuts, x, weights, dys)
    x_ND, dys = flat(x, lead), tuple(flat(dy, lead) for dy in dys)
    pairs = list(zip(dys, weights, strict=True))
    first, *rest = (dy @ flat(w, num_in).astype(x.dtype).T for dy, w in pairs)
    dweights = tuple(weight_gradient(x_ND, dy, w.dtype).reshape(w.shape) for dy, w in pairs)
    return sum(rest, first).reshape(x.shape), dweights


def _cut_backward(
    num_in: int,
    cuts: Cuts,
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    dys: tuple[jax.Array, ...],
) -> tuple[jax.Array, tuple]:
    """`_backward` where the sequences of x or of the results are cut."""
    lead = x.ndim - num_in
    pairs = [(gathered(dy, cuts.output), w) for dy, w in zip(dys, weights, strict=True)]
    first, *rest = (_contracted(dy, w, w.ndim - num_in, is_turned=True) for dy, w in pairs)
    dx = scattered(sum(rest, first), cuts.input)
    # Behind a barrier, or XLA would keep what the forward has gathered.
    x_ND = flat(gathered(materialize(x), cuts.input), lead)
    dweights = tuple(
        weight_gradient(x_ND, flat(dy, lead), w.dtype).reshape(w.shape) for dy, w in pairs
    )
    # Or XLA puts products for weights off, and all that they read stays gathered.
    return materialize((dx, dweights))


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
    dw_FD = weight_gradient(flat(dy, dy.ndim - 1), flat(x, x.ndim - 1), w_FD.dtype)
    return dy @ w_FD.astype(x.dtype), dw_FD


linear_transposed.defvjp(_transposed_forward, _transposed_backward)


def weight_gradient(x_ND: jax.Array, dy_NF: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Gradient of the weight in `y = x @ w`; [D, F], in `dtype`.

    A CPU takes a wide matrix transposed on the left at 68 GFLOP/s, on the right at 103 (one core,
    f32). Other platforms multiply as it is: the gradient then lies as its weight, and is added in
    place to the sum over microbatches.
    """
    multiply = functools.partial(jnp.matmul, preferred_element_type=dtype)
    plain = lambda x_ND, dy_NF: multiply(x_ND.T, dy_NF)
    if x_ND.shape[1] < dy_NF.shape[1]:
        return plain(x_ND, dy_NF)
    if x_ND.shape[1] > dy_NF.shape[1]:
        on_cpu = lambda x_ND, dy_NF: materialize(multiply(dy_NF.T, x_ND)).T
    else:
        on_cpu = lambda x_ND, dy_NF: multiply(materialize(x_ND.T), dy_NF)
    gradient: jax.Array = jax.lax.platform_dependent(x_ND, dy_NF, cpu=on_cpu, default=plain)
    return gradient


def gelu(u: jax.Array) -> jax.Array:
    """GELU by its tanh approximation. Hendrycks and Gimpel, arXiv:1606.08415."""
    return jax.nn.gelu(u, approximate=True)


def gelu_erf(u: jax.Array) -> jax.Array:
    """GELU itself."""
    return jax.nn.gelu(u, approximate=False)


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up. Shazeer, arXiv:2002.05202."""
    return jax.nn.silu(gate) * up


def geglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """gelu(gate) * up. Shazeer, arXiv:2002.05202."""
    return gelu(gate) * up


ACTIVATIONS: dict[str, Callable[..., jax.Array]] = {
    "gelu": gelu,
    "gelu_erf": gelu_erf,
    "swiglu": swiglu,
    "geglu": geglu,
}


def activate(activation: str, inner: tuple[jax.Array, ...]) -> jax.Array:
    """Computes in float32."""
    wide = [u.astype(jnp.float32) for u in inner]
    return ACTIVATIONS[activation](*wide).astype(inner[0].dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def linear_of_activation(
    activation: str, inner: tuple[jax.Array, ...], w_FD: jax.Array
) -> jax.Array:
    """activation(inner) @ w, whose backward computes the activation again.

    Args:
      activation: a name of `ACTIVATIONS`.
      inner: its arguments, [..., F].
      w_FD: the weight.
    """
    return _of_activation_forward(activation, inner, w_FD)[0]


def _of_activation_forward(
    activation: str, inner: tuple[jax.Array, ...], w_FD: jax.Array
) -> tuple[jax.Array, tuple]:
    inner = materialize(inner)
    [y], _ = _forward(materialize(activate(activation, inner)), (w_FD,), 1, None)
    return y, (inner, w_FD)


def _of_activation_backward(activation: str, saved: tuple, dy: jax.Array) -> tuple:
    inner, w_FD = saved
    dy, inner = materialize((dy, inner))
    hidden, pullback = jax.vjp(functools.partial(activate, activation), inner)
    dhidden, (dw_FD,) = _backward(1, None, UNCUT, (materialize(hidden), (w_FD,)), (dy,))
    [dinner] = materialize(pullback(materialize(dhidden)))
    return dinner, dw_FD


linear_of_activation.defvjp(_of_activation_forward, _of_activation_backward)


def add_bias(y: jax.Array, bias: jax.Array) -> jax.Array:
    """y [B, L, ...] and a bias of its last dims, whose gradient is summed in float32."""
    row = jnp.expand_dims(bias.astype(jnp.float32), range(y.ndim - bias.ndim))
    return (y.astype(jnp.float32) + row).astype(y.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 7))
def feed_forward(
    activation: str,
    x: jax.Array,
    w_in: tuple[jax.Array, ...],
    w_out: tuple[jax.Array, ...],
    b_in: tuple[jax.Array, ...] = (),
    added: tuple[jax.Array | None, ...] = (),
    reads: tuple[jax.Array | None, ...] = (),
    cut: SequenceCut | None = None,
) -> tuple[jax.Array, ...]:
    """activation(x @ w_in + added + b_in) times each weight of `w_out`.

    The backward pass keeps the activation's inputs and computes its output again. Products and
    gradients are in the dtypes that they have in `linears`.

    Args:
      activation: a name of `ACTIVATIONS`.
      x: [..., D].
      w_in: one weight [D, F], or those of (gate, up).
      w_out: weights [F, D].
      b_in: a bias [F] for each weight of `w_in`, in its dtype, or none.
      added: what is added to the product with each weight of `w_in`, [..., F]; None: nothing.
      reads: for each weight of `w_out`, which numbers it reads, booleans [..., F]; the others count
        as zeros. None: all.
      cut: how the sequences of x and of the results are cut, if they are.
    """
    return _feed_forward_forward(activation, x, w_in, w_out, b_in, added, reads, cut)[0]


def _read(hidden: jax.Array, mask: jax.Array | None) -> jax.Array:
    return hidden if mask is None else jnp.where(mask, hidden, jnp.zeros((), hidden.dtype))


def _feed_forward_forward(
    activation: str,
    x: jax.Array,
    w_in: tuple[jax.Array, ...],
    w_out: tuple[jax.Array, ...],
    b_in: tuple[jax.Array, ...],
    added: tuple[jax.Array | None, ...],
    reads: tuple[jax.Array | None, ...],
    cut: SequenceCut | None,
) -> tuple[tuple[jax.Array, ...], tuple]:
    x = scattered(x, cut)  # so it is kept
    whole = gathered(x, cut)
    inner = tuple(whole @ w.astype(x.dtype) for w in w_in)
    if added:
        both = zip(inner, added, strict=True)
        inner = tuple(u if extra is None else u + extra for u, extra in both)
    if b_in:
        inner = tuple(map(add_bias, inner, b_in))
    inner = materialize(inner)
    hidden = materialize(activate(activation, inner))
    masks = reads or (None,) * len(w_out)
    ys = tuple(
        scattered(_read(hidden, mask) @ w.astype(x.dtype), cut)
        for w, mask in zip(w_out, masks, strict=True)
    )
    is_added = tuple(None if extra is None else () for extra in added)  # structure alone
    return ys, (x, w_in, inner, w_out, (None,) * len(b_in), is_added, reads)


def _feed_forward_backward(
    activation: str, cut: SequenceCut | None, saved: tuple, dys: tuple[jax.Array, ...]
) -> tuple[jax.Array, tuple, tuple, tuple, tuple, tuple]:
    x, w_in, inner, w_out, b_in, is_added, reads = saved
    masks = reads or (None,) * len(w_out)
    dys, inner = materialize((dys, inner))
    dys = tuple(gathered(dy, cut) for dy in dys)
    first, *rest = (
        _read(dy @ w.astype(x.dtype).T, mask) for dy, w, mask in zip(dys, w_out, masks, strict=True)
    )
    dh = materialize(sum(rest, first))
    hidden, pullback = jax.vjp(functools.partial(activate, activation), inner)
    [dinner] = materialize(pullback(dh))
    dx, dw_in = _backward(1, None, Cuts(input=cut), (x, w_in), dinner)
    lead = x.ndim - 1
    hidden = materialize(hidden)
    dw_out = tuple(
        weight_gradient(flat(_read(hidden, mask), lead), flat(dy, lead), w.dtype)
        for dy, w, mask in zip(dys, w_out, masks, strict=True)
    )
    if cut is not None:  # as in `_cut_backward`
        dx, dw_out = materialize((dx, dw_out))
    rows = tuple(range(lead))
    pairs = zip(dinner, w_in, strict=True) if b_in else ()
    db_in = tuple(du.sum(rows, dtype=jnp.float32).astype(w.dtype) for du, w in pairs)
    dadded = tuple(
        None if is_given is None else du for is_given, du in zip(is_added, dinner, strict=False)
    )
    return dx, dw_in, dw_out, db_in, dadded, (None,) * len(reads)


feed_forward.defvjp(_feed_forward_forward, _feed_forward_backward)
