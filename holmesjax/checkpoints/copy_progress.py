"""Says how far a copy of a checkpoint's files is. No JAX."""

import time
from collections.abc import Callable

from holmesjax import units

TELL_S = 5.0  # between two lines


class CopyProgress:
    """Lines that say how far a copy is, with the time that it may still take.

    Args:
      what: the copy in words, as in "fetching part_0".
      total: its bytes.
      here: bytes of them that were there already.
      say: takes the lines.
      bytes_per_s: of the link over which it comes; None: not known.
    """

    def __init__(
        self,
        what: str,
        total: int,
        here: int,
        say: Callable[[str], object],
        bytes_per_s: float | None = None,
    ):
        self.done, self._total, self._here = here, total, here
        self._what, self._say = what, say
        self._begin_s = self._told_s = time.monotonic()
        more = f", {units.show(here, 'B')} of them were here already" if here else ""
        if bytes_per_s is not None:
            left_s = (total - here) / bytes_per_s
            more += f", {units.duration(left_s)} at the link's {units.show(bytes_per_s, 'b/s')}"
        say(f"{what}: {units.show(total, 'B')}{more}")

    def add(self, num_bytes: int) -> None:
        """Counts bytes that have come."""
        self.done += num_bytes
        if (now_s := time.monotonic()) - self._told_s < TELL_S:
            return
        self._told_s = now_s
        rate = (self.done - self._here) / (now_s - self._begin_s)
        left = units.duration((self._total - self.done) / rate) if rate else "unknown"
        done, total = units.show(self.done, "B"), units.show(self._total, "B")
        self._say(f"{self._what}: {done} of {total}, {left} left")

    def skip(self, num_bytes: int) -> None:
        """Counts bytes that were here already, and say nothing about the rate."""
        self.done += num_bytes
        self._here += num_bytes

    @property
    def is_too_much(self) -> bool:
        """Whether more has come than there is: something is copied again and again."""
        return self.done > self._total

    def end(self, what: str) -> None:
        """Says in words what was copied, as in "fetched part_0"."""
        copied, took_s = units.show(self.done - self._here, "B"), time.monotonic() - self._begin_s
        self._say(f"{what}: {copied} in {took_s:.1f} s")
