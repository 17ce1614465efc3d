"""A second watch: ends a launcher whose supervising loop stands still, and knows that it stood.

A launcher that was stopped (SIGSTOP, a machine that slept) goes on after a while. Its processes may
have given it up then, for which none of them is to blame.

The loop reads and writes files, and a file system that hangs holds it up for ever: it is then deaf
to signals, commits no checkpoint and sees no failure. Nobody else would notice.
"""

import functools
import math
import sys
import threading
import time
from collections.abc import Callable
from typing import Self

from holmesjax import hung_main_thread
from holmesjax.errors import REQUEUE, PeerError

CHECK_S = 0.5
NOTICED_S = 2.0  # between two turns


def _now_s() -> float:
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


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
        self._turned_s, self._slept_s = time.monotonic(), _now_s()
        self._pause_s, self._pause_ended_s = 0.0, -math.inf
        self._ended = threading.Event()

    def turn(self) -> None:
        """The loop has come round."""
        now_s = _now_s()
        if (pause_s := now_s - self._slept_s) > NOTICED_S:
            self._pause_s, self._pause_ended_s = pause_s, now_s
        self._turned_s, self._slept_s = time.monotonic(), now_s

    def pause_s(self, within_s: float) -> float:
        """The seconds of the last pause between two turns, if it ended within so many; else 0."""
        return self._pause_s if _now_s() - self._pause_ended_s < within_s else 0.0

    def __enter__(self) -> Self:
        self._slept_s, self._pause_ended_s = _now_s(), -math.inf
        self.turn()
        self._ended.clear()
        threading.Thread(target=self._watch, name="loop watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _watch(self) -> None:
        looked_s, wait_s = time.monotonic(), min(CHECK_S, self._limit_s / 4)
        while not self._ended.wait(wait_s):
            now_s = time.monotonic()
            if now_s - looked_s > wait_s + NOTICED_S:  # this thread, too, stood still
                self._turned_s = now_s
            looked_s = now_s
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
