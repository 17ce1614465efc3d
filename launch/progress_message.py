"""Tells on stderr what a command works on, once it takes long."""

import shutil
import sys
import threading
import time
from types import TracebackType

AFTER_S = 3.0
TERMINAL_S = 1.0  # between two looks of one line that changes
LOG_S = 15.0  # between two lines of a log
CLEAR = "\r\x1b[2K"  # the line of a terminal


class ProgressMessage:
    """A message about work in progress; a context manager.

    Calls inside of `with` name what is worked on. Once the work has taken `after_s`, a terminal
    shows the last name and the seconds so far in one line, which goes away at the end. A log has a
    line then, and one every `log_s`.
    """

    def __init__(self, doing: str, after_s: float = AFTER_S, log_s: float = LOG_S):
        self._doing, self._what = doing, ""
        self._after_s, self._log_s = after_s, log_s
        self._is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="progress", daemon=True)

    def __call__(self, what: str) -> None:
        self._what = what

    def _tell(self) -> None:
        begin_s, pause_s = time.monotonic(), self._after_s
        while not self._ended.wait(pause_s):
            if not self._what:
                continue
            line = f"{self._doing}: {self._what} ({time.monotonic() - begin_s:.0f} s)"
            if self._is_terminal:
                columns = shutil.get_terminal_size().columns
                print(CLEAR + line[: columns - 1], end="", file=sys.stderr, flush=True)
                pause_s = TERMINAL_S
            else:
                print(line, file=sys.stderr, flush=True)
                pause_s = self._log_s

    def __enter__(self) -> "ProgressMessage":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        if self._is_terminal:
            print(CLEAR, end="", file=sys.stderr, flush=True)
