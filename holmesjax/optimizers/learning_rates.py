"""The learning rate of every update, for numbers and for arrays. Does not import JAX."""

from types import ModuleType
from typing import Any

import numpy as np

from holmesjax.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, num_steps: int, update: Any, xp: ModuleType = np) -> Any:
    """Learning rate of update n = 0, 1, ...: a linear warm-up, then the schedule of the config.

    The last update, `num_steps - 1`, and all later ones have `final_fraction` of the peak, except
    for "constant".

    Args:
      update: n, a number or an array.
      xp: whose functions compute it: `numpy`, or `jax.numpy` inside of a program.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    if config.schedule == "constant":
        after = peak
    else:
        length = max(num_steps - 1 - warmup, 1)
        if config.schedule == "wsd":  # warm-up, stable, decay: Hu et al., arXiv:2404.06395
            assert config.decay_steps is not None
            length = config.decay_steps
        start = max(num_steps - 1 - length, warmup)
        fallen = xp.clip((update - start) / length, 0.0, 1.0)
        if config.schedule == "cosine":
            fallen = 0.5 * (1.0 - xp.cos(xp.pi * fallen))
        after = peak * (1.0 - (1.0 - config.final_fraction) * fallen)
    if not warmup:
        return after
    return xp.where(update < warmup, peak * ((update + 1) / warmup), after)
