"""Who makes a job fail. Of several failures one is the cause: what is reported, seen and missed.

Failures come together: a process that loses another one fails too, within the same second.
"""

import signal
from collections.abc import Mapping, Sequence

from holmesjax.distributed.messages import Exit, Failed, Lost, ProcessEvent, Silent
from holmesjax.errors import REQUEUE, HolmesError


def behind(positions: Mapping[int, tuple[int, int]], statuses: Mapping[int, str]) -> list[int]:
    """The processes that the others of a job without progress wait for, by number.

    Of those that have come least far they are the ones that do not wait for others themselves; all
    of these where each says that it waits.

    Args:
      positions: how far each process has come.
      statuses: what each says that it "was" doing or "waited" for.

    >>> statuses = {0: "was busy in step 5", 1: "waited for F0 in step 5", 2: "waited in step 6"}
    >>> behind({0: (5, 0), 1: (5, 0), 2: (6, 0)}, statuses)
    [0]
    """
    least = min(positions.values())
    last = [number for number in positions if positions[number] == least]
    return [n for n in last if not statuses[n].startswith("waited")] or last


def cause_of(failures: Sequence[ProcessEvent]) -> ProcessEvent:
    """The failure that made the others; of several of one rank, the first that was heard of."""
    return min(failures, key=_rank)


def _rank(failure: ProcessEvent) -> int:
    """The place of a failure in this order; a lower one is never the consequence of a higher one.

    0  a mistake was reported: exit status 1 or 2, with what to do; nobody else can make it
    1  ended with status 2: a mistake again, found before the controller was reached
    2  killed by a signal: such a process says nothing, and all others say what they miss
    3  silent for several heartbeats: it hangs, or its node or network does
    4  an exception was reported: a bug, or a collective that has lost another process
    5  the loss of another process or of a link was reported: exit status 75
    6  ended in any other way; JAX aborts a process that has lost another one of its domain
    7  its connection closed
    """
    record = failure.record
    if isinstance(record, Failed):
        if record.exit_status == REQUEUE:
            return 5
        return 4 if record.fix is None else 0
    if isinstance(record, Exit):
        if record.status == HolmesError.exit_status:
            return 1
        return 2 if record.status < 0 and record.status != -signal.SIGABRT else 6
    return {Silent: 3, Lost: 7}[type(record)]
