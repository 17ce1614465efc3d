"""NoLoCo (arXiv 2506.10911): islands meet in random pairs, and no call has more. No JAX.

The functions work for NumPy and for JAX.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

from holmesjax.config import OuterConfig


def pairs(num_islands: int, step: int) -> tuple[tuple[int, ...], ...]:
    """The pairs that meet after a step, the same on all islands; of an odd number one sits out.

    >>> pairs(4, 10), pairs(3, 10)
    (((1, 2), (0, 3)), ((1, 2), (0,)))
    """
    drawn = lambda k: hashlib.sha256(f"{step} {k}".encode()).digest()
    order = sorted(range(num_islands), key=drawn)
    return tuple(tuple(sorted(order[i : i + 2])) for i in range(0, num_islands, 2))


def pair_step(
    outer: OuterConfig, differences: Sequence[Any], slow: Any, of_other: Any, momentum: Any
) -> tuple[Any, Any]:
    """The slow weights and the momentum of an island after a meeting of its pair.

    With the slow weights P, and the difference D = P - weights of each island of a pair, it is
    m = a m - b mean(D) - g/2 (P - P of the other), and P + m (Eq. 2 and 3 of the paper, whose Eq. 1
    prints D with the other sign). Who sits out takes the step by its own difference alone.

    Args:
      outer: the rate b, the momentum a and the pull g.
      differences: of both islands, in their order; of one that sits out, its own.
      slow: the island's slow weights, with which it has begun the steps since the last meeting.
      of_other: those of its partner; those of its own where it has none.
      momentum: of the meeting before; zeros at first.
    """
    total = differences[0]
    for difference in differences[1:]:
        total = total + difference
    mean = total / len(differences)
    after = outer.decay * momentum - outer.rate * mean - 0.5 * outer.pulls * (slow - of_other)
    return slow + after, after
