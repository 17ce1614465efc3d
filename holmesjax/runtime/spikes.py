"""Spikes of the loss or of the gradient's norm, and whether their steps are left out.

A step is a spike if its loss, or its norm, is more than some standard deviations above the mean of
the steps before it (the rule of OLMo 2's SkipStepOptimizer, arXiv:2501.00656). The last stage
remembers these steps. It gives all stages the limits with the loss, so that all compare the same
numbers and decide alike, whatever their devices.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

TOTALS = ("loss", "loss_limit", "square_norm_limit")  # what stages share, in this order


class SpikeRule(NamedTuple):
    """The steps that are spikes, and what becomes of them."""

    window: int  # steps that are remembered; half of them must be there before any is a spike
    sigmas: float  # standard deviations above the mean
    skips: bool  # whether a spike changes no parameter


class Recent(NamedTuple):
    """The last steps whose numbers were finite; the oldest is replaced first."""

    steps: jax.Array  # all of them so far, int32
    losses: jax.Array  # float32 [window]
    norms: jax.Array


def none_yet(window: int) -> Recent:
    zeros = jnp.zeros((window,), jnp.float32)
    return Recent(jnp.zeros((), jnp.int32), zeros, zeros)


def limits(recent: Recent, rule: SpikeRule) -> tuple[jax.Array, jax.Array]:
    """The largest loss, and the largest square of a norm, that are no spikes."""
    count = jnp.minimum(recent.steps, rule.window)
    is_there = jnp.arange(rule.window) < count

    def limit(values: jax.Array) -> jax.Array:
        mean = jnp.sum(values, where=is_there) / count
        squares = jnp.sum(jnp.square(values - mean), where=is_there) / (count - 1)
        largest = mean + rule.sigmas * jnp.sqrt(squares)
        return jnp.where(count >= max(2, rule.window // 2), largest, jnp.inf)

    return limit(recent.losses), jnp.square(limit(recent.norms))


def remembering(recent: Recent, loss: jax.Array, norm: jax.Array, is_finite: jax.Array) -> Recent:
    """The last steps with one more, a spike too: so a level that has risen is soon no spike."""
    at = recent.steps % recent.losses.shape[0]
    found = Recent(recent.steps + 1, recent.losses.at[at].set(loss), recent.norms.at[at].set(norm))
    return jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), found, recent)
