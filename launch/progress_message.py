"""Tells on stderr what a command works on, once it takes long."""

import sys
import threading
from types import TracebackType

AFTER_S = 3.0


class ProgressMessage:
    """A message about work in progress; a context manager.

    Calls inside of `with` name what is worked on. The name is printed once the work has taken
    `after_s`, and each name that follows.
    """

    def __init__(self, doing: str, after_s: float = AFTER_S):
        self._doing, self._what = doing, ""
        self._is_due = False
        self._lock = threading.Lock()
        self._timer = threading.Timer(after_s, self._begin)
        self._timer.daemon = True

    def __call__(self, what: str) -> None:
        with self._lock:
            self._what = what
            if self._is_due:
                self._print()

    def _begin(self) -> None:
        with self._lock:
            self._is_due = True
            if self._what:
                self._print()

    def _print(self) -> None:
        print(f"{self._doing}: {self._what}", file=sys.stderr, flush=True)

    def __enter__(self) -> "ProgressMessage":
        self._timer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        with self._lock:
            self._is_due, self._what = False, ""
