"""Reads data again that a run has trained on, where they are not as they were.

A file server that restarts, or a file that is being copied again, is back after seconds. Whether
this is so, or a user has named what is not there, the error does not say. So a run that has made no
step takes the error as a mistake, and any other one waits for its data, and then asks for another
start.
"""

import sys
import time
from collections.abc import Callable
from typing import TypeVar

from holmesjax.data import object_stores
from holmesjax.errors import DataError, LostDataError

WAITS_S = 30.0  # for data to be as they were; a start or a step may take longer
PAUSE_S, LONGEST_PAUSE_S = 0.5, 5.0

T = TypeVar("T")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def patiently(
    read: Callable[[], T],
    *,
    has_trained: bool,
    transient: type[DataError] = DataError,
    say: Callable[[str], object] = _say,
    pause: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """Returns what `read` returns, which is called again where it fails.

    Args:
      has_trained: whether the run has made a step with these data. If not, an error is raised at
        once and as it is.
      transient: the mistakes that may go away; errors of the system and of stores may, too.
      say: takes a line when the wait begins, and when it ends.
      pause, clock: wait for seconds, and tell them.

    Raises:
      LostDataError: the data are not as they were after `WAITS_S`.
    """
    if not has_trained:
        return read()
    deadline_s, pause_s, has_failed = clock() + WAITS_S, PAUSE_S, False
    while True:
        try:
            found = read()
        except (transient, *object_stores.errors()) as error:
            if clock() > deadline_s:
                raise _lost(error) from None
            if not has_failed:
                first = str(error).partition("\n")[0]
                say(f"warning: {first}; it is tried again for {WAITS_S:g} s")
            has_failed = True
        else:
            if has_failed:
                say("the data can be read again")
            return found
        pause(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _lost(error: Exception) -> LostDataError:
    if isinstance(error, DataError):
        fix = f"{error.fix}; then start it again with the same command"
        return LostDataError(error.where, error.problem, found=error.found, fix=fix)
    path = str(getattr(error, "filename", None) or "data.corpus")
    fix = "see that its file system is there, and start it again with the same command"
    return LostDataError(path, "cannot be read", found=object_stores.said_by(error), fix=fix)
