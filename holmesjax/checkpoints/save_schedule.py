"""When a run writes checkpoints. No JAX."""

import time
from collections.abc import Callable

from holmesjax.config import CheckpointConfig


class SaveSchedule:
    """Whether to save after a step: after so many steps, or so many minutes after the last time.

    The minutes count from the first step that is asked about. `begun` is told of each step after
    which a checkpoint is written, in the thread that asks. `retries` says whether one that failed
    is to be tried again now.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        clock: Callable[[], float] = time.monotonic,
        begun: Callable[[int], object] = lambda step: None,
        retries: Callable[[], bool] = lambda: False,
    ):
        self._begun, self._retries = begun, retries
        self._every, self._interval_s = config.every, 60 * config.minutes
        self._clock = clock
        self._last_s: float | None = None

    def __call__(self, step: int) -> bool:
        """To be asked once after each step."""
        is_due = self._is_due(step) or self._retries()
        if is_due:
            self._begun(step)
        return is_due

    def _is_due(self, step: int) -> bool:
        if self._every is not None:
            return step % self._every == 0
        now_s = self._clock()
        if self._last_s is None:
            self._last_s = now_s
        if now_s - self._last_s < self._interval_s:
            return False
        self._last_s = now_s
        return True
