"""The exponential moving average of the weights, which a run with `optimizer.ema_decay` keeps."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from holmesjax.models import ops
from holmesjax.optimizers import update_ops

Tree = Any  # a nested dict of arrays, keyed by layer and parameter name


class Average(NamedTuple):
    """An exponential moving average of the parameters that train: float32, in the master layout."""

    updates: Any  # since it began: an int32 array
    weights: Tree


def begin(params: Tree) -> Average:
    """An average that begins with these float32 parameters."""
    # Copies: the average and the parameters are donated side by side.
    return Average(jnp.zeros((), jnp.int32), jax.tree.map(jnp.copy, params))


def after(
    old: Average, decay: float, params: Tree, applies: jax.Array, kernels: ops.Kernels
) -> Average:
    """The average after update n = 0, 1, ... since it began, if the update applies.

    It keeps min(decay, (1 + n) / (10 + n)) of itself, so that the weights with which it began do
    not weigh long in a short run.

    Args:
      old: the average before.
      decay: `optimizer.ema_decay`.
      params: after the update.
      applies: whether the update changes anything.
      kernels: tells the mesh.
    """
    n = old.updates.astype(jnp.float32)
    keep = jnp.minimum(decay, (1.0 + n) / (10.0 + n))

    def averaged(weights: Tree) -> Tree:
        return jax.tree.map(lambda mean, x: keep * mean + (1.0 - keep) * x, weights, params)

    weights = update_ops.changed_if(applies, averaged, old.weights, kernels)
    return Average(old.updates + applies.astype(jnp.int32), weights)
