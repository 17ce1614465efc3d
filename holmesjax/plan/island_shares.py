"""The sequences of a step that each island takes: equal shares of a batch, or unlike ones.

Validations are made by one island, whose programs take as many sequences at once as its steps do.
Rows without targets fill the last part.
"""

import math
from collections.abc import Sequence

from holmesjax.config import Config

EVALUATES = 0  # the island that makes the validations


def allotted(speeds: Sequence[float], units: int) -> tuple[int, ...]:
    """Whole units, one at least for each, so that the last one ends as soon as it can.

    >>> allotted([3.0, 1.0], 8), allotted([100.0, 1.0, 1.0], 4)
    ((6, 2), (2, 1, 1))

    Args:
      speeds: of each, above 0.
      units: to give; at least one for each.
    """
    found = [1] * len(speeds)
    for _ in range(units - len(speeds)):  # the next one to whoever is done first with it
        next_s = [(count + 1) / speed for count, speed in zip(found, speeds, strict=True)]
        found[next_s.index(min(next_s))] += 1
    return tuple(found)


def validation_parts(size: int, global_batch: int, num_validation: int) -> int:
    """The parts in which an island with so many sequences of a step makes a validation.

    >>> validation_parts(12, 16, 3), validation_parts(12, 16, 1)
    (4, 2)
    """
    return -(-num_validation * global_batch // size)


def can_validate(size: int, config: Config) -> bool:
    """Whether an island with so many sequences of a step can make the validations of a run.

    Layers of the user's count what they like in a loss, so nothing fills their last part.
    """
    train = config.train
    is_whole = train.eval_batches * train.global_batch % size == 0
    return is_whole or not train.eval_every or config.model.module is None


def batches_to_validate(size: int, global_batch: int) -> int:
    """The number of which `train.eval_batches` must be a multiple where nothing is filled."""
    return size // math.gcd(size, global_batch)
