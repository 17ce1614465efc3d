"""When a run writes checkpoints. No JAX."""

import time
from collections.abc import Callable

from holmesjax.config import CheckpointConfig


class SaveSchedule:
    """Whether to save after a step: after so many steps, or so many minutes after the last time.

    The minutes count from the first step that is asked about. `begun` is told of each step after
    which a checkpoint is written, in the thread that asks. `retries` says whether one that failed
    is to be tried again now. A save that is due where `may_begin` says no comes after the first
    step at which it says yes.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        clock: Callable[[], float] = time.monotonic,
        begun: Callable[[int], object] = lambda step: None,
        retries: Callable[[], bool] = lambda: False,
        may_begin: Callable[[int], bool] = lambda step: True,
    ):
        self._begun, self._retries, self._may_begin = begun, retries, may_begin
        self._is_put_off = False
        self._every, self._interval_s = config.every, 60 * config.minutes
        self._clock = clock
        self._last_s: float | None = None

    def __call__(self, step: int) -> bool:
        """To be asked once after each step."""
        is_due = self._is_due(step) or self._retries() or self._is_put_off
        self._is_put_off = is_due and not self._may_begin(step)
        if is_due and not self._is_put_off:
            self._begun(step)
            return True
        return False

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
