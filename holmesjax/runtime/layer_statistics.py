"""Norms by kind of layer, where a run asks for them: of gradients, of parameters, of activations.

All of them are sums of squares that chunks add to, so any plan gives the same numbers.
"""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from holmesjax.config import ModelConfig
from holmesjax.layer_specs.kind import Kind
from holmesjax.layer_specs.model_layers import layers

Tree = Any  # a nested dict of arrays, keyed by layer and parameter name
GRADIENTS, PARAMETERS, ACTIVATIONS = "grad_norm/", "param_norm/", "activation_rms/"


def names(model: ModelConfig) -> tuple[str, ...]:
    """The names of all statistics: those of activations for layers that hand some on."""
    found: dict[str, None] = {}
    for kind in layers(model).values():
        prefixes = (GRADIENTS, PARAMETERS, ACTIVATIONS)[: 3 - (kind.place == "last")]
        found |= dict.fromkeys(prefix + kind.name for prefix in prefixes)
    return tuple(found)


def squares(kinds: Mapping[str, Kind], gradients: Tree, params: Tree) -> dict[str, jax.Array]:
    """The sums of squares of the layers of a chunk, by name.

    Args:
      kinds: of the layers, by name.
      gradients: of the layers, reduced.
      params: of the layers.
    """
    found: dict[str, jax.Array] = {}
    for layer, kind in kinds.items():
        for prefix, tree in ((GRADIENTS, gradients), (PARAMETERS, params)):
            for x in jax.tree.leaves(tree[layer]):
                name, own = prefix + kind.name, jnp.sum(jnp.square(x.astype(jnp.float32)))
                found[name] = found[name] + own if name in found else own
    return found


def activation_square(x: jax.Array) -> jax.Array:
    """The mean square of what a layer hands on; it has no gradient."""
    return jnp.mean(jnp.square(jax.lax.stop_gradient(x).astype(jnp.float32)))


def finished(model: ModelConfig, sums: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The statistics of a step, from the sums of all chunks: roots, and means over layers."""
    counts = Counter(ACTIVATIONS + kind.name for kind in layers(model).values())
    return {name: jnp.sqrt(x / counts.get(name, 1)) for name, x in sums.items()}


def of_small_batch(found: Mapping[str, float], part: float) -> dict[str, float]:
    """The statistics of a step whose batch is a part of the whole one.

    A program takes the mean over the microbatches of the whole batch, of which the others are 0.

    Args:
      found: the numbers of the step, by name; those of activations change.
      part: the share of the whole batch that the step has.
    """
    return {
        name: value / math.sqrt(part) if name.startswith(ACTIVATIONS) else value
        for name, value in found.items()
    }
