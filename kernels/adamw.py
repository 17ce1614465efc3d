"""AdamW (Loshchilov and Hutter, arXiv:1711.05101) of one parameter with its moments.

XLA makes one pass of the formula: a parameter, its gradient and its two moments are read once, and
all but the gradient written once, in place. Such a pass moves 28 bytes for each float32 parameter,
and 20 with moments in bfloat16. With moments in int8 (`moments`) XLA reads the new moments again
for their scales. `adamw_pallas` has a kernel that does not.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels import moments
from kernels.moments import PLAIN, Moment, Operations, Quantized


class Hyperparameters(NamedTuple):
    """The settings of a parameter, the same in every step."""

    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    seed: int = 0  # of the noise that rounds the moments; another for each parameter
    rate: float = 1.0  # by which the learning rate of a step is multiplied
    rounding: int = 0  # the seed of the noise that rounds a parameter in bfloat16


class Leaf(NamedTuple):
    """A parameter, float32 or bfloat16, with its moments, all of one shape."""

    parameter: jax.Array
    mu: Moment
    nu: Moment


class Turn(NamedTuple):
    """How a gradient lies: [*stack, *columns, *rows], for a parameter [*stack, *rows, *columns]."""

    rows: int  # the number of dims that have changed places with all those behind them
    stack: int = 0  # the number of dims before them

    def sizes(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """The number of matrices, and the rows and columns of each, in a parameter of a shape.

        >>> Turn(1).sizes((128, 4, 64)), Turn(rows=1, stack=1).sizes((3, 32, 64))
        ((1, 128, 256), (3, 32, 64))
        """
        end = self.stack + self.rows
        return (
            math.prod(shape[: self.stack]),
            math.prod(shape[self.stack : end]),
            math.prod(shape[end:]),
        )

    def of(self, gradient: jax.Array) -> jax.Array:
        """The gradient in the order in which it lies, from one of the parameter's shape."""
        stack, end = range(self.stack), self.stack + self.rows
        return gradient.transpose(*stack, *range(end, gradient.ndim), *range(self.stack, end))

    def undo(self, gradient: jax.Array) -> jax.Array:
        """The opposite of `of`."""
        return Turn(gradient.ndim - self.stack - self.rows, self.stack).of(gradient)


def factors(
    count: jax.Array,
    scale: jax.Array | float,
    learning_rate: jax.Array | float,
    beta1: float,
    beta2: float,
    applies: jax.Array | bool = True,
) -> jax.Array:
    """The numbers that all parameters of a step have in common, as float32[6].

    Args:
      count: the number of this update; 1 is the first.
      scale: by which gradients are multiplied, to clip their norm.
      learning_rate: of this step.
      beta1: the decay of the first moment.
      beta2: the decay of the second moment.
      applies: whether the step changes anything.
    """
    t = count.astype(jnp.float32)
    corrections = [1.0 / (1.0 - jnp.power(beta, t)) for beta in (beta1, beta2)]
    return jnp.stack([jnp.float32(x) for x in (scale, learning_rate, *corrections, t, applies)])


def adamw_step(
    leaf: Leaf, gradient: jax.Array, factors: jax.Array, hyperparameters: Hyperparameters
) -> Leaf:
    """Returns the leaf after a step, even if the step does not apply.

    Args:
      leaf: the parameter and its moments.
      gradient: of the parameter's shape, before `scale`.
      factors: those of the step (`factors`).
      hyperparameters: of this parameter.
    """
    seeds = np.asarray([hyperparameters.seed, hyperparameters.rounding], np.uint32)
    return _step(leaf, gradient, factors, seeds, hyperparameters._replace(seed=0, rounding=0))


def formula(
    parameter: jax.Array,
    mu: jax.Array,
    nu: jax.Array,
    gradient: jax.Array,
    numbers: tuple[jax.Array, ...],
    h: Hyperparameters,
    by: Operations = PLAIN,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Parameters and moments after a step, all in float32 and elementwise.

    The kernel computes the same, operation by operation, in this order.

    Args:
      parameter: before the step.
      mu: its first moment.
      nu: its second moment.
      gradient: before the scale.
      numbers: the scale of gradients, the learning rate of these parameters, and the corrections
        of both moments.
      h: the settings, of which a weight decay may be traced; `rate` and `seed` are not read.
      by: the operations.
    """
    scale, learning_rate, correction1, correction2 = numbers
    times = by.times
    g = times(gradient.astype(jnp.float32), scale)
    mu = times(mu, h.beta1) + times(g, 1.0 - h.beta1)
    nu = times(nu, h.beta2) + times(times(g, g), 1.0 - h.beta2)
    root = by.sqrt(times(nu, correction2))
    change = by.over(times(mu, correction1), root + h.epsilon)
    change = change + times(parameter, h.weight_decay)
    return parameter - times(change, learning_rate), mu, nu


# Parameters of one shape, whose seeds are not static, share one trace.
@functools.partial(jax.jit, static_argnames="h")
def _step(
    leaf: Leaf, gradient: jax.Array, factors: jax.Array, seeds: jax.Array, h: Hyperparameters
) -> Leaf:
    scale, learning_rate, correction1, correction2, update, _ = factors
    if h.rate != 1.0:
        learning_rate = h.rate * learning_rate
    numbers = scale, learning_rate, correction1, correction2
    wide = moments.widen(leaf.mu, "first"), moments.widen(leaf.nu, "second")
    parameter, mu, nu = formula(leaf.parameter.astype(jnp.float32), *wide, gradient, numbers, h)
    noise = lambda seed: moments.noise(
        moments.positions(parameter.shape), moments.step_seed(update, seed)
    )
    if leaf.parameter.dtype == jnp.bfloat16:
        parameter = moments.round_to_bfloat16(parameter, noise(seeds[1])[0])
    if not isinstance(leaf.mu, Quantized) and leaf.mu.dtype == jnp.float32:
        return Leaf(parameter, mu, nu)
    first, second = noise(seeds[0])
    return Leaf(
        parameter,
        moments.narrow(mu, leaf.mu, first, "first"),
        moments.narrow(nu, leaf.nu, second, "second"),
    )
