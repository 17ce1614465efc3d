"""The products of a block with its weights, in the dtype of the activations or in fp8."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from holmesjax.layers.fp8 import INPUTS, MAXIMA
from holmesjax.models import ops


class Products:
    """Products in the dtype of the activations. The dims are those of `models.transformer`."""

    def linears(
        self, reads: str, x: jax.Array, weights: Sequence[jax.Array], num_in: int = 1
    ) -> tuple[jax.Array, ...]:
        """x times each weight.

        Args:
          reads: the name of x, one of `layers.fp8.INPUTS`.
          x: [B, L, *I].
          weights: [*I, *F] each.
          num_in: dims of x that are contracted, its last.
        """
        return ops.linears(x, tuple(weights), num_in)

    def feed_forward(
        self,
        activation: str,
        x_BLD: jax.Array,
        w_in: tuple[jax.Array, ...],
        w_out: tuple[jax.Array, ...],
        b_in: tuple[jax.Array, ...] = (),
        added: tuple[jax.Array | None, ...] = (),
        reads: tuple[jax.Array | None, ...] = (),
    ) -> tuple[jax.Array, ...]:
        """activation(x @ w_in + added + b_in) times each weight of `w_out`.

        Args:
          activation: a name of `kernels.linear.ACTIVATIONS`.
          x_BLD: the input.
          w_in: one weight [D, F], or those of (gate, up).
          w_out: weights [F, D].
          b_in: a bias [F] for each weight of `w_in`, or none.
          added: what is added to the product with each weight of `w_in`; None: nothing.
          reads: for each weight of `w_out`, which numbers it reads, booleans; None: all.
        """
        return ops.feed_forward(activation, x_BLD, w_in, w_out, b_in, added, reads)

    def sums(self) -> dict[str, jax.Array]:
        """`Auxiliary.sums` of the products so far."""
        return {}


PLAIN = Products()


class Fp8Products(Products):
    """Products of one layer's forward in fp8.

    Args:
      maxima_ST: the largest magnitudes of the inputs in the last steps, from which their scales
        follow. None: an input has the scale of its own magnitude.
    """

    def __init__(self, maxima_ST: jax.Array | None):
        self._maxima_ST = maxima_ST
        self._maxima: dict[str, jax.Array] = {}

    def linears(
        self, reads: str, x: jax.Array, weights: Sequence[jax.Array], num_in: int = 1
    ) -> tuple[jax.Array, ...]:
        ys, self._maxima[reads] = ops.fp8_linears(x, tuple(weights), self._scale(reads), num_in)
        return ys

    def feed_forward(
        self,
        activation: str,
        x_BLD: jax.Array,
        w_in: tuple[jax.Array, ...],
        w_out: tuple[jax.Array, ...],
        b_in: tuple[jax.Array, ...] = (),
        added: tuple[jax.Array | None, ...] = (),
        reads: tuple[jax.Array | None, ...] = (),
    ) -> tuple[jax.Array, ...]:
        """Args: those of `Products.feed_forward`, with one weight in `w_out`."""
        assert not any(one is not None for one in (*added, *reads)), "fp8 has no adapters"
        inner = self.linears("feed_forward", x_BLD, w_in)
        if b_in:
            inner = tuple(map(ops.add_bias, inner, b_in))
        [w_FD] = w_out
        y_BLD, self._maxima["down"] = ops.fp8_of_activation(
            activation, inner, w_FD, self._scale("down")
        )
        return (y_BLD,)

    def _scale(self, reads: str) -> jax.Array | None:
        if self._maxima_ST is None:
            return None
        return ops.delayed_scale(self._maxima_ST[INPUTS.index(reads)])

    def sums(self) -> dict[str, jax.Array]:
        """The magnitudes of the last steps with this one's, whose maximum over a step is new."""
        if self._maxima_ST is None:
            return {}
        rows = zip(self._maxima_ST, (self._maxima[name] for name in INPUTS), strict=True)
        return {MAXIMA: jnp.stack([ops.later_maxima(*row) for row in rows])}
