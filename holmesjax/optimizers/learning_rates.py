"""The learning rate of every update, for numbers and for arrays. Does not import JAX.

A schedule by tokens is a schedule by steps of the whole batch: an update whose batch has half of
its tokens takes half a step. So both are the same, to the bit, where no batch is smaller.
"""

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from holmesjax.config import OptimizerConfig, TrainConfig
from holmesjax.config.update_rules import RATE_SCHEDULES


class StepTokens(NamedTuple):
    """The tokens of each step."""

    whole: int  # of a step of the whole batch
    rampup: tuple[tuple[int, float], ...] = ()  # of the first steps: how many, and what part of it

    def whole_steps(self, num_steps: Any, xp: ModuleType = np) -> Any:
        """Returns the tokens of the first steps, over the tokens of a step of the whole batch."""
        found, left = 0, num_steps
        for steps, part in self.rampup:
            here = xp.minimum(left, steps)
            found, left = found + here * part, left - here
        return found + left


def step_tokens(train: TrainConfig, context_length: int) -> StepTokens:
    """The tokens of each step of a run."""
    parts = ((part.steps, part.global_batch / train.global_batch) for part in train.rampup)
    return StepTokens(train.global_batch * context_length, tuple(parts))


def learning_rate(
    config: OptimizerConfig,
    num_steps: int,
    update: Any,
    xp: ModuleType = np,
    tokens: StepTokens | None = None,
) -> Any:
    """Learning rate of update n = 0, 1, ...: a linear warm-up, then the schedule of the config.

    The last update, `num_steps - 1`, and all later ones have `final_fraction` of the peak, except
    for "constant". A run that is shorter than its warm-up only rises.

    Args:
      config: of the schedule.
      num_steps: of the whole run.
      update: n, a number or an array.
      xp: whose functions compute it: `numpy`, or `jax.numpy` inside of a program.
      tokens: of each step, which a schedule by tokens needs.
    """
    peak: float = config.learning_rate
    warmup: float | None = config.warmup_steps
    decay: float | None = config.decay_steps
    last, whole = num_steps - 1, num_steps  # in steps of the whole batch, as the next two are
    before, after = update, update + 1
    if config.schedule_by == "tokens":
        assert tokens is not None, "a schedule by tokens needs the tokens of each step"
        warmup, decay = (
            x and x / tokens.whole for x in (config.warmup_tokens, config.decay_tokens)
        )
        last, whole = (tokens.whole_steps(n) for n in (num_steps - 1, num_steps))
        before, after = (tokens.whole_steps(n, xp) for n in (update, update + 1))
    warmup = warmup or 0
    is_rising, schedule = after <= warmup, RATE_SCHEDULES[config.schedule]
    if schedule.fallen is None:
        rate = peak
    else:
        start = warmup
        if schedule.has_decay:
            assert decay is not None
            start = max(last - decay, warmup)
        fallen = xp.clip((before - start) / (last - start if last > start else 1), 0.0, 1.0)
        if warmup <= whole:  # the last update, even where nothing is between it and the warm-up
            is_last = update >= num_steps - 1
            fallen, is_rising = xp.where(is_last, 1.0, fallen), is_rising & (update < num_steps - 1)
        fallen = schedule.fallen(fallen, xp)
        rate = peak * (1.0 - (1.0 - config.final_fraction) * fallen)
    if not warmup:
        return rate
    return xp.where(is_rising, peak * (after / warmup), rate)
