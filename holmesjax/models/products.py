"""The products of a block with its weights, in the dtype of the activations or in fp8."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from holmesjax.layer_specs.fp8 import MAXIMA, weights_by_input
from holmesjax.layer_specs.kind import Kind
from holmesjax.models import ops


class Products:
    """Products in the dtype of the activations. The dims are those of `models.transformer`.

    Args:
      cut: how the sequences of the residual stream are cut, if they are: of what the products into
        attention and the feed-forward read, and of what those out of them give.
    """

    def __init__(self, cut: ops.SequenceCut | None = None):
        self._cut = cut

    def linears(
        self, reads: str, x: jax.Array, weights: Sequence[jax.Array], num_in: int = 1
    ) -> tuple[jax.Array, ...]:
        """x times each weight.

        Args:
          reads: the name of x, one of those in `layers.fp8.INPUTS`.
          x: [B, L, *I].
          weights: [*I, *F] each.
          num_in: dims of x that are contracted, its last.
        """
        return ops.linears(x, tuple(weights), num_in, None, self.cuts(reads))

    def cuts(self, reads: str) -> ops.Cuts:
        """The ends at which sequences are cut, of products of the input of this name."""
        into = reads in ("attention", "feed_forward")
        return ops.Cuts(input=self._cut) if into else ops.Cuts(output=self._cut)

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
        return ops.feed_forward(activation, x_BLD, w_in, w_out, b_in, added, reads, self._cut)

    def sums(self) -> dict[str, jax.Array]:
        """`Auxiliary.sums` of the products so far."""
        return {}


PLAIN = Products()


class Fp8Products(Products):
    """Products of one layer's forward in fp8, but for those that stay in the compute dtype.

    Args:
      kind: of the layer.
      params: of the layer. `fp8/codes` has its weights as codes, by name, where they are there;
        else they are made here. With `fp8/maxima_ST`, the largest magnitudes of the inputs in the
        last steps, scales follow from these; without, an input has the scale of its own magnitude.
      cut: that of `Products`. Its arrays are gathered before they become codes.
    """

    def __init__(self, kind: Kind, params: Mapping[str, Any], cut: ops.SequenceCut | None = None):
        super().__init__(cut)
        own = params.get("fp8", {})
        self._maxima_ST: jax.Array | None = own.get("maxima_ST")
        num_in = {parameter.name: parameter.matrix for parameter in kind.parameters}
        held = own.get("codes", {})
        codes = lambda name: held[name] if held else ops.coded(params[name], num_in[name])
        by_input = weights_by_input(kind)
        self._codes = {reads: tuple(map(codes, names)) for reads, names in by_input.items()}
        self._rows = list(by_input)
        self._maxima: dict[str, jax.Array] = {}

    def linears(
        self, reads: str, x: jax.Array, weights: Sequence[jax.Array], num_in: int = 1
    ) -> tuple[jax.Array, ...]:
        # The input of `out` is kept anyway: attention's backward reads it.
        how, cuts = (num_in, reads != "out"), self.cuts(reads)
        x = ops.gathered(x, cuts.input)
        args = x, tuple(weights), self._codes[reads], self._scale(reads)
        ys, self._maxima[reads] = ops.fp8_linears(*args, *how)
        return tuple(ops.scattered(y, cuts.output) for y in ys)

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
        if "down" not in self._codes:
            y_BLD = ops.linear_of_activation(activation, inner, w_FD)
            return (ops.scattered(y_BLD, self._cut),)
        [of_w] = self._codes["down"]
        y_BLD, self._maxima["down"] = ops.fp8_of_activation(
            activation, inner, w_FD, of_w, self._scale("down")
        )
        return (ops.scattered(y_BLD, self._cut),)

    def _scale(self, reads: str) -> jax.Array | None:
        if self._maxima_ST is None:
            return None
        return ops.delayed_scale(self._maxima_ST[self._rows.index(reads)])

    def sums(self) -> dict[str, jax.Array]:
        """The magnitudes of the last steps with this one's, whose maximum over a step is new."""
        if self._maxima_ST is None:
            return {}
        rows = zip(self._maxima_ST, (self._maxima[name] for name in self._rows), strict=True)
        return {MAXIMA: jnp.stack([ops.later_maxima(*row) for row in rows])}
