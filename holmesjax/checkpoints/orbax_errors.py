"""Errors of Orbax: why a checkpoint cannot be read or written, told once."""

import functools
import logging
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp


def unread(error: Exception) -> str | None:
    """The reason why arrays cannot be read, or None for another error.

    Orbax tells what TensorStore could not read as the cause of a bare `Exception`.
    """
    cause = error.__cause__ if type(error) is Exception else error
    return reason(cause) if isinstance(cause, OSError | ValueError) else None


def number_of(error: BaseException | None) -> int | None:
    """The number of the system's error behind one of Orbax's, if it tells one."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        if (number := _told_number(error)) is not None:
            return number
        error = error.__cause__
    return None


def _told_number(error: BaseException) -> int | None:
    """The number of the system's error that a text of TensorStore tells."""
    told = re.search(r"os_error_code='(\d+)'", str(error))
    return int(told[1]) if told else None


def reason(error: Exception) -> str:
    """In one line, without the chain of calls that TensorStore tells."""
    if (number := _told_number(error)) is not None:
        return os.strerror(number)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    return str(error).splitlines()[0]


@functools.cache
def silence_orbax() -> None:
    """Keeps errors that are told in one line from also being printed in hundreds of lines.

    Orbax logs each error that it also raises. It abandons all other reads or writes with the first
    that fails: asyncio logs theirs, those that come back later find their loop closed or raise
    when they are collected, and some never began. It also warns of each save without OCDBT.
    """
    orbax, hook = str(Path(ocp.__file__).parent), sys.unraisablehook
    is_orbaxs = lambda r: r.levelno >= logging.ERROR and r.pathname.startswith(orbax)
    is_of_no_use = lambda r: "Skipping merge of OCDBT checkpoints" in r.getMessage()
    is_abandoned = lambda r: "exception was never retrieved" in r.getMessage()
    logging.getLogger("absl").addFilter(lambda r: not (is_orbaxs(r) or is_of_no_use(r)))
    logging.getLogger("asyncio").addFilter(lambda record: not is_abandoned(record))

    def tell(unraisable: Any) -> None:
        code = getattr(unraisable.object, "cr_code", None)  # of a coroutine
        is_ours = code is None or not code.co_filename.startswith(orbax)
        if is_ours and str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    sys.unraisablehook = tell
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
