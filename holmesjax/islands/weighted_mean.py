"""The merge of a round: the outer rule on the mean of the islands' weights, by tokens. No JAX."""

from collections.abc import Sequence

import numpy as np

from holmesjax.config import OuterConfig
from holmesjax.plan.outer_rule import outer_step


def weighted_mean(arrays: Sequence[np.ndarray], tokens: Sequence[int]) -> np.ndarray:
    """The mean of arrays with a weight for each, float32, summed in their order.

    It is the first one and a share of the differences of the others to it: equal arrays, and one
    alone, are their own mean to the bit.
    """
    total, mean = sum(tokens), arrays[0].astype(np.float32)
    for array, count in zip(arrays[1:], tokens[1:], strict=True):
        mean = mean + np.float32(count / total) * (array - arrays[0])
    return mean


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
