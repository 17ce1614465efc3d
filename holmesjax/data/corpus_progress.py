"""How far this process has come with its corpus before it trains. No JAX.

Digests, tokens and rows of a large corpus take long. Each of these works counts what is done, which
tells the watch of a start that it goes on, and says now and then how far it is.
"""

import time

SAY_S = 10.0  # between two lines about one work


class WorkDone:
    """Counts what is done, in any units: a sign that a long start goes on."""

    def __init__(self) -> None:
        self.count = 0


done = WorkDone()  # bytes, documents and dialogues, of all works of this process


class LongWork:
    """A work that may take long.

    Args:
      what: in words, for the lines.
      total: how much there is to do; None: nobody knows.
    """

    def __init__(self, what: str, total: int | None = None):
        self._what, self._total = what, total
        self._done, self._said_s = 0, time.monotonic()

    def add(self, number: int) -> None:
        """So much more is done."""
        self._done += number
        done.count += number
        if time.monotonic() - self._said_s > SAY_S:
            self._said_s = time.monotonic()
            share = f"{self._done / self._total:.0%}" if self._total else f"{self._done:,}"
            print(f"{self._what}: {share}", flush=True)
