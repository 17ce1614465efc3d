"""Clips gradients by their global norm: that over the parameters of all stages."""

import jax
import jax.numpy as jnp


def scale(norm: jax.Array, clip_norm: float | None) -> jax.Array:
    """Returns the number by which all gradients are multiplied; a float32 scalar.

    Their norm is then at most `clip_norm`. If `clip_norm` is None, the number is 1.

    >>> [float(scale(jnp.float32(norm), 1.0)) for norm in (0.0, 0.5, 4.0)]
    [1.0, 1.0, 0.25]
    """
    if clip_norm is None:
        return jnp.ones(())
    return jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-12))
