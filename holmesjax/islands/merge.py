"""The merge of a round: the outer rule on the mean of the islands' weights, by tokens. No JAX."""

from collections.abc import Sequence

import numpy as np

from holmesjax.config import OuterConfig
from holmesjax.plan.outer_rule import outer_step, weighted_mean


def merge(
    outer: OuterConfig,
    arrays: Sequence[np.ndarray],
    tokens: Sequence[int],
    weights: np.ndarray,
    momentum: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """The global weights and the momentum after a round; all arrays have one shape, float32.

    Args:
      outer: the rule.
      arrays: the weights of the islands that take part, by their numbers.
      tokens: that each has trained since it was merged before.
      weights, momentum: of the round before.
    """
    return outer_step(outer, [weighted_mean(arrays, tokens)], weights, momentum)
