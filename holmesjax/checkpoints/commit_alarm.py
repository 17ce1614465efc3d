"""An alarm for a run whose steps go on while no checkpoint is committed. No JAX.

Each save that fails is told by itself (`committing`). But one of which nothing more is heard, or
that is never begun, would be missed until the run is needed from its last checkpoint.
"""

import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from holmesjax.config import CheckpointConfig

REPEAT_S = 60.0  # between two lines at least
SHOWN = 3  # of the saves that are outstanding, and of the processes that each waits for
FIELD = "steps_without_checkpoint"  # in the record of a step, while the alarm is on


class CommitAlarm:
    """Says that no checkpoint was committed for `checkpoint.alarm_intervals` intervals.

    The intervals are of steps, or of the time in which steps go on.

    Args:
      config: when checkpoints are due.
      done_steps: steps before this session, after which there is a checkpoint.
      tellers: the names of all that tell of a save.
      clock: seconds that only grow.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        done_steps: int,
        tellers: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._config, self._tellers, self._clock = config, tellers, clock
        self._committed, self._committed_s = done_steps, clock()
        self._begins = True  # the time of an interval counts from the first step
        self._is_on, self._said_s = False, 0.0

    def attach(
        self,
        outstanding: Callable[[], Mapping[int, Collection[str]]],
        say: Callable[[str], object],
    ) -> None:
        """Call before the first step.

        Args:
          outstanding: gives the saves that have not ended, and who has told of each (`Saves`).
          say: takes a line when the alarm begins, again while it lasts, and when it ends.
        """
        self._outstanding, self._say = outstanding, say

    def committed(self, step: int) -> None:
        """A checkpoint after a step was committed."""
        self._committed, self._committed_s = step, self._clock()
        if self._is_on:
            self._is_on = False
            self._say(f"a checkpoint is committed again, after step {step}: the alarm is over")

    def step(self, step: int) -> dict[str, Any]:
        """Takes a step that is done; returns additions to its record."""
        now_s, config = self._clock(), self._config
        if self._begins:
            self._begins, self._committed_s = False, now_s
        if config.every is not None:
            num_intervals = (step - self._committed) / config.every
        else:
            num_intervals = (now_s - self._committed_s) / (60 * config.minutes)
        if num_intervals <= config.alarm_intervals:
            return {}
        if not self._is_on or now_s - self._said_s >= REPEAT_S:
            self._is_on, self._said_s = True, now_s
            self._say(self._describe(step, num_intervals))
        return {FIELD: step - self._committed}

    def _describe(self, step: int, num_intervals: float) -> str:
        last = f"after step {self._committed}" if self._committed else "none in this run"
        saves = self._outstanding()
        told = [
            f"the save after step {begun} waits for {self._missing(has_told)}"
            for begun, has_told in itertools.islice(saves.items(), SHOWN)
        ] + [f"{len(saves) - SHOWN} more saves"] * (len(saves) > SHOWN)
        return (
            f"ALARM: no checkpoint was committed for {num_intervals:.1f} intervals, and step "
            f"{step} is done; the last checkpoint: {last}; "
            f"outstanding: {'; '.join(told) or 'no save is under way'}"
        )

    def _missing(self, has_told: Collection[str]) -> str:
        names = [name for name in self._tellers if name not in has_told]
        shown = ", ".join(names[:SHOWN]) or "its commit"
        return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"
