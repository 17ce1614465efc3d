"""Sequences that devices share between products whose weights they share.

Sequence parallelism (Korthikanti et al., arXiv:2205.05198): where an axis of the mesh cuts weights,
it cuts the tokens of whatever lies between the products. An array comes together before a product
with columns of weights on each device, by an all-gather. The partial sums of a product with rows of
weights are added up by a reduce-scatter, which leaves each device its own tokens.
"""

import functools
from dataclasses import dataclass

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P


@dataclass(frozen=True)
class SequenceCut:
    """How [B, L, ...] lies on a mesh: B is always cut over `sequences`, L over `axis` or not."""

    mesh: Mesh
    sequences: tuple[str, ...]
    axis: str

    def whole(self, x_BLD: jax.Array) -> jax.Array:
        """x with all tokens of a sequence on each device of the axis."""
        return self._lie(x_BLD, P(self.sequences or None))

    def parts(self, x_BLD: jax.Array) -> jax.Array:
        """x with some tokens of each sequence on each device of the axis."""
        return self._lie(x_BLD, P(self.sequences or None, self.axis))

    def _lie(self, x_BLD: jax.Array, spec: P) -> jax.Array:
        return jax.lax.with_sharding_constraint(x_BLD, NamedSharding(self.mesh, spec))


def gathered(x_BLD: jax.Array, cut: SequenceCut | None) -> jax.Array:
    """x with all tokens on each device; its gradient is summed up into parts."""
    return x_BLD if cut is None else _gathered(x_BLD, cut)


def scattered(x_BLD: jax.Array, cut: SequenceCut | None) -> jax.Array:
    """x with some tokens on each device, summed up into them; its gradient is gathered."""
    return x_BLD if cut is None else _scattered(x_BLD, cut)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gathered(x_BLD: jax.Array, cut: SequenceCut) -> jax.Array:
    return cut.whole(x_BLD)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _scattered(x_BLD: jax.Array, cut: SequenceCut) -> jax.Array:
    return cut.parts(x_BLD)


# The gradient of each lies as what the other gives.
_gathered.defvjp(lambda x, cut: (cut.whole(x), None), lambda cut, _, dy: (cut.parts(dy),))
_scattered.defvjp(lambda x, cut: (cut.parts(x), None), lambda cut, _, dy: (cut.whole(dy),))
