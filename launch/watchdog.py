"""Ends a run in one process that makes no progress, or does not stop when it is asked to.

There is nobody else to do it: the main thread may wait in a collective of its own devices for ever,
where Python hears no signal.
"""

import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Protocol

from holmesjax import lifeline
from holmesjax.errors import REQUEUE, PeerError
from holmesjax.runtime.progress import Progress
from launch.launchers.launcher import leaving

CHECK_S = 0.2
LEAVE_S = 2.0  # for the main thread to end by itself when it is asked twice
NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Run(Protocol):
    """What is watched."""

    @property
    def progress(self) -> Progress | None:
        """Of its steps; None before the first and after the last."""

    def stop(self) -> None:
        """Asks it to end after its step."""


class Watchdog:
    """Hears the signals of this process from now on, for a run; made on the main thread.

    `release` gives up what others wait for, before this process is ended.
    """

    def __init__(self, run: Run, stop_timeout_s: float, release: Callable[[], object]):
        self.signals: list[int] = []  # that have come
        self._run, self._stop_timeout_s, self._release = run, stop_timeout_s, release
        self._num_handled = 0
        self._stop_by_s: float | None = None
        self._ended = threading.Event()
        lifeline.hear_signals(NUMBERS, self._hear)
        for number in NUMBERS:
            signal.signal(number, self._handle)
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def end(self) -> None:
        """The run is over."""
        self._ended.set()

    def _handle(self, number: int, _: FrameType | None) -> None:
        """On the main thread, if that is within reach."""
        self._num_handled += 1
        if self._num_handled > 1:  # asked twice: do not wait for the step
            raise SystemExit(leaving(number))

    def _hear(self, number: int) -> None:
        self.signals.append(number)
        self._run.stop()
        if len(self.signals) == 1:
            self._stop_by_s = time.monotonic() + self._stop_timeout_s
        elif not self._ended.wait(LEAVE_S):
            lifeline.end_process(leaving(number), self._release)

    def _watch(self) -> None:
        while not self._ended.wait(CHECK_S):
            progress = self._run.progress
            if self._stop_by_s is not None and time.monotonic() > self._stop_by_s:
                name = signal.Signals(self.signals[0]).name
                limit = f"distributed.stop_timeout_s = {self._stop_timeout_s:g} s"
                self._give_up(f"has not stopped within {limit} of {name}; its step is given up")
            elif progress is not None and progress.is_late():
                self._give_up(f"no progress for {progress.describe_limit()}")

    def _give_up(self, problem: str) -> None:
        error = PeerError(
            "this process",
            problem,
            found="see the stacks of its threads above",
            fix="start it again with the same command: it resumes from the last checkpoint",
        )
        say = lambda: print(f"error: {error}", file=sys.stderr)
        lifeline.end_process(REQUEUE, lifeline.write_stacks, say, self._release)
