"""A second watch: ends a launcher whose supervising loop stands still.

The loop reads and writes files, and a file system that hangs holds it up for ever: it is then deaf
to signals, commits no checkpoint and sees no failure. Nobody else would notice.
"""

import functools
import sys
import threading
import time
from collections.abc import Callable
from typing import Self

from holmesjax import hung_main_thread
from holmesjax.errors import REQUEUE, PeerError

CHECK_S = 0.5


class LoopWatch:
    """Watches that `turn` is called again and again in a `with`.

    Args:
      limit_s: for one turn of the loop.
      setting: what the limit is called.
      release: gives up the lease of the run folder before this process is ended.
      end: ends this process with a status, after some last words.
    """

    def __init__(
        self,
        limit_s: float,
        setting: str,
        release: Callable[[], object],
        end: Callable[..., object] = hung_main_thread.end_process,
    ):
        self._limit_s, self._setting, self._release, self._end = limit_s, setting, release, end
        self._turned_s = time.monotonic()
        self._ended = threading.Event()

    def turn(self) -> None:
        """The loop has come round."""
        self._turned_s = time.monotonic()

    def __enter__(self) -> Self:
        self.turn()
        self._ended.clear()
        threading.Thread(target=self._watch, name="loop watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(min(CHECK_S, self._limit_s / 4)):
            if time.monotonic() - self._turned_s > self._limit_s:
                error = PeerError(
                    "the launcher",
                    f"stands still for {self._limit_s:g} s ({self._setting})",
                    found="see the stacks of its threads above: a file system hangs, say",
                    fix="start it again with the same command: it resumes from the last checkpoint",
                )
                say = functools.partial(print, f"error: {error}", file=sys.stderr)
                self._end(REQUEUE, hung_main_thread.write_stacks, say, self._release)
                return
