"""Ends a run in one process that makes no progress, or does not stop when it is asked to.

No other process would end it. The main thread may wait for ever in a collective of its own devices,
where Python hears no signal.
"""

import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Protocol, Self

from holmesjax.errors import REQUEUE, PeerError
from holmesjax.liveness import hung_main_thread
from holmesjax.runtime.step_timeout import Progress
from launch.launchers.launcher import leaving

CHECK_S = 0.2
LEAVE_S = 2.0  # for the main thread to end by itself when it is asked twice


class Run(Protocol):
    """A run that is watched."""

    @property
    def progress(self) -> Progress | None:
        """The progress of its steps; None before the first and after the last."""

    def stop(self) -> None:
        """Asks the run to end after its step."""


class Watchdog:
    """Hears the signals of this process for a run; a context manager of the main thread.

    `release` gives up the lease of the run folder before this process is ended.
    """

    def __init__(self, run: Run, stop_timeout_s: float, release: Callable[[], object]):
        self.signals: list[int] = []  # that have come
        self._run, self._stop_timeout_s, self._release = run, stop_timeout_s, release
        self._num_handled = 0
        self._stop_by_s: float | None = None
        self._ended = threading.Event()
        numbers = hung_main_thread.stop_signals()
        self._give_back = hung_main_thread.hear_signals(numbers, self._hear)
        for number in numbers:
            signal.signal(number, self._handle)
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Stops watching: the run is over, or has failed."""
        if kind is not SystemExit:  # asked twice: this process still has to end in time
            self._ended.set()
            self._give_back()

    def _handle(self, number: int, _: FrameType | None) -> None:
        """Handles a signal on the main thread, if Python reaches it."""
        self._num_handled += 1
        if self._num_handled > 1:  # asked twice: do not wait for the step
            raise SystemExit(leaving(number))

    def _hear(self, number: int) -> None:
        self.signals.append(number)
        self._run.stop()
        if len(self.signals) == 1:
            self._stop_by_s = time.monotonic() + self._stop_timeout_s
        elif not self._ended.wait(LEAVE_S):
            hung_main_thread.end_process(leaving(number), self._release)

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
        hung_main_thread.end_process(REQUEUE, hung_main_thread.write_stacks, say, self._release)
