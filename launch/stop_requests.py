"""The signals that ask a job to stop."""

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Self

from holmesjax.errors import REQUEUE
from holmesjax.liveness import hung_main_thread
from launch.launchers.launcher import leaving


class StopRequests:
    """The signals that came to the supervisor, which it hears in a `with`, or to a process.

    Args:
      timeout_s: for the step and the checkpoint of a job that is asked to stop.
      heard: called after each signal to the supervisor.
    """

    def __init__(self, timeout_s: float, heard: Callable[[], object]):
        self._timeout_s, self._heard = timeout_s, heard
        self._numbers: list[int] = []
        self._num_here = 0  # of these, to the supervisor
        self._deadline_s = math.inf
        self._is_at_once = False
        self._give_back: Callable[[], None] = lambda: None

    def __enter__(self) -> Self:
        numbers = hung_main_thread.stop_signals()
        self._give_back = hung_main_thread.hear_signals(numbers, self._limit)
        for number in numbers:
            signal.signal(number, self._hear)
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self._give_back()

    @contextlib.contextmanager
    def at_once(self, *, finishes: bool = False) -> Iterator[None]:
        """While nothing runs that could be saved, a signal raises SystemExit where it is heard.

        One that came before does so at once, unless what is begun here `finishes` what has
        happened. The process ends within `timeout_s` even if a file system or a store holds it.
        """
        self._is_at_once = True
        try:
            if self:
                self._limit(self.first)
                if not finishes:
                    raise SystemExit(leaving(self.first))
            yield
        finally:
            self._is_at_once = False

    def __bool__(self) -> bool:
        return bool(self._numbers)

    def _hear(self, number: int, _: FrameType | None) -> None:
        self._num_here += 1
        self.add(number)
        if self._is_at_once:
            raise SystemExit(leaving(number))
        self._heard()

    def _limit(self, number: int) -> None:
        """Hears a signal that the main thread may not come to hear."""
        if self._is_at_once:
            hung_main_thread.end_within(self._timeout_s, leaving(number))

    def add(self, number: int) -> None:
        """Notes a signal, of whichever process."""
        if not self._numbers:
            self._deadline_s = time.monotonic() + self._timeout_s
        self._numbers.append(number)

    @property
    def first(self) -> int:
        return self._numbers[0]

    @property
    def last(self) -> int:
        return self._numbers[-1]

    @property
    def is_impatient(self) -> bool:
        """Whether the supervisor was asked twice, and so is not to wait for the step."""
        return self._num_here > 1

    @property
    def count(self) -> int:
        """How many there were."""
        return len(self._numbers)

    @property
    def left_s(self) -> float:
        """Seconds until the job should have stopped; infinite before it is asked to."""
        return max(self._deadline_s - time.monotonic(), 0.0)

    @property
    def is_overdue(self) -> bool:
        """Whether the job should have stopped by now."""
        return time.monotonic() > self._deadline_s

    @property
    def exit_status(self) -> int:
        """The exit status of a job that was asked to stop before its last step."""
        return 0 if signal.SIGINT in self._numbers else REQUEUE
