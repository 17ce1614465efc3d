"""A second watch: ends a launcher whose supervising loop stands still, and knows that it stood.

A launcher that was stopped (SIGSTOP, a machine that slept) goes on after a while. Its processes may
have given it up then, for which none of them is to blame.

The loop reads and writes files, and a file system that hangs holds it up for ever: it is then deaf
to signals, and sees no failure. Nobody else would notice. Commits, which have a thread of their
own, are watched by the loop (`job_saves`).
"""

import functools
import math
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Self

from holmesjax.errors import REQUEUE, PeerError
from holmesjax.liveness import hung_main_thread

CHECK_S = 0.5
NOTICED_S = 2.0  # between two turns


def _now_s() -> float:
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class LoopWatch:
    """Watches that `turn` is called again and again in a `with`, and that the `with` then ends.

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
        self._turn_limit = _Limit(limit_s, f"{limit_s:g} s ({setting})", REQUEUE)
        self._limit, self._release, self._end = self._turn_limit, release, end
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

    def leave(self, limit_s: float, setting: str, status: int) -> None:
        """The loop is over: what follows is limited, and ends with this status."""
        self._limit = _Limit(limit_s, f"{limit_s:.0f} s of its end ({setting})", status)
        self.turn()

    def __enter__(self) -> Self:
        self._limit = self._turn_limit
        self._slept_s, self._pause_ended_s = _now_s(), -math.inf
        self.turn()
        self._ended = threading.Event()
        threading.Thread(
            target=self._watch, args=(self._ended,), name="loop watch", daemon=True
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _watch(self, ended: threading.Event) -> None:
        looked_s = time.monotonic()
        while not ended.wait(wait_s := min(CHECK_S, self._limit.seconds / 4)):
            now_s, limit = time.monotonic(), self._limit
            if now_s - looked_s > wait_s + NOTICED_S:  # this thread, too, stood still
                self._turned_s = now_s
            looked_s = now_s
            if now_s - self._turned_s > limit.seconds:
                does = "stands still for" if limit is self._turn_limit else "is still there after"
                error = PeerError(
                    "the launcher",
                    f"{does} {limit.text}",
                    found="see the stacks of its threads above: a file system hangs, say",
                    fix="start it again with the same command: it resumes from the last checkpoint",
                )
                say = functools.partial(print, f"error: {error}", file=sys.stderr)
                self._end(limit.status, hung_main_thread.write_stacks, say, self._release)
                return


class _Limit(NamedTuple):
    """A limit that the watch enforces."""

    seconds: float
    text: str
    status: int  # of a process that is ended by it
