"""Finds residuals that are copies of weights.

A residual is kept for each microbatch in flight. A layer that casts or reshapes a weight before a
product keeps what it made, so a stage would hold the weight many times. `microbatch.Residuals`
leaves out weights as they are; those that a layer has made of weights alone are found here.
"""

import math
from collections.abc import Sequence
from typing import cast

import jax
from jax.extend.core import ClosedJaxpr

from holmesjax.errors import ConfigError
from holmesjax.layer_specs.kind import Parameter
from holmesjax.models.jaxprs import roots


def refuse_weight_copies(
    closed: ClosedJaxpr, weights: Sequence[Parameter], num_residuals: int
) -> None:
    """Raises ConfigError if a residual depends on weights alone and is as large as one.

    Vectors do not count: norms and biases are small.

    Args:
      closed: a forward, whose last outputs are the residuals.
      weights: its first inputs.
      num_residuals: how many outputs are residuals.
    """
    jaxpr = closed.jaxpr
    found = roots(jaxpr, [frozenset([i]) for i in range(len(jaxpr.invars))])
    first = len(found) - num_residuals
    for residual, of in zip(jaxpr.outvars[first:], found[first:], strict=True):
        if not of or max(of) >= len(weights):
            continue
        shape = cast(jax.core.ShapedArray, residual.aval).shape
        for weight in (weights[i] for i in sorted(of)):
            if len(weight.shape) > 1 and math.prod(shape) >= weight.size():
                raise ConfigError(
                    "model.pattern",
                    f"a layer keeps a copy of its parameter {weight.name} for each microbatch",
                    found=f"an array [{', '.join(map(str, shape))}] made of it alone",
                    fix="cast or reshape it inside of a jax.custom_vjp that keeps the parameter as "
                    "it is, as the products of holmesjax.models.ops do",
                )
