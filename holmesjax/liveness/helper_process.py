"""A module of this program as a process of its own, waited for in short turns. No JAX.

Whoever waits stays awake: between two turns it hears signals, and whatever it then raises ends the
process. A file system that hangs holds up the process, and not the one that waits.
"""

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, NamedTuple

FIRST_TURN_S, LONGEST_TURN_S = 0.01, 0.2
KILLED_S = 2.0  # for a process that is killed to be gone; what hangs in the kernel is left to it
KEPT_BYTES = 4096  # of what it writes to standard error


class StoppedError(Exception):
    """A `pause` raises it where the process is not waited for any more."""


class Ended(NamedTuple):
    """The end of such a process."""

    status: int | None  # None: it took longer than its limit
    last_line: str  # of its standard error; "" if there is none


def run_module(
    module: str,
    arguments: Sequence[str],
    *,
    limit_s: float = math.inf,
    silence_s: float = math.inf,
    pause: Callable[[float], object] = time.sleep,
    say: Callable[[str], object] = lambda line: None,
) -> Ended:
    """Runs `python -m module` to its end, or to its limit.

    The module should call `process_environment.die_with`, so that it ends with this process.

    Args:
      module: of this program; its standard input is empty.
      arguments: on its command line.
      limit_s: how long it may take; then it is killed.
      silence_s: how long it may print nothing; then it is killed.
      pause: waits for some seconds; what it raises kills the process, and passes through.
      say: takes each line of its standard output.

    Raises OSError where it cannot be started.
    """
    path = os.pathsep.join(filter(None, (_root(), os.environ.get("PYTHONPATH"))))
    own = {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "HOLMES_PARENT": str(os.getpid())}
    with subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, **own},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for whoever waits
    ) as process:
        try:
            return _wait(process, limit_s, silence_s, pause, say)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILLED_S)
            if process.returncode is None:
                process.returncode = -signal.SIGKILL  # the end of the `with` would wait for it


def _root() -> str:
    return str(Path(__file__).parents[1])


def _wait(
    process: subprocess.Popen[bytes],
    limit_s: float,
    silence_s: float,
    pause: Callable[[float], object],
    say: Callable[[str], object],
) -> Ended:
    assert process.stdout, "it has a pipe"
    assert process.stderr, "it has a pipe"
    for pipe in (process.stdout, process.stderr):
        os.set_blocking(pipe.fileno(), False)
    deadline_s, turn_s = time.monotonic() + limit_s, FIRST_TURN_S
    heard_s = time.monotonic()
    line, errors = b"", b""
    while True:
        status = process.poll()  # before the pipes are read: they then have its last words
        *lines, line = (line + _read(process.stdout)).split(b"\n")
        for whole_line in lines:
            say(whole_line.decode(errors="replace"))
            heard_s = time.monotonic()
        errors = (errors + _read(process.stderr))[-KEPT_BYTES:]
        is_late = time.monotonic() > min(deadline_s, heard_s + silence_s)
        if status is not None or is_late:
            told = errors.decode(errors="replace").strip().splitlines()
            return Ended(status, told[-1].strip() if told else "")
        pause(turn_s)
        turn_s = min(2 * turn_s, LONGEST_TURN_S)


def _read(pipe: IO[bytes]) -> bytes:
    """All that is in a pipe now."""
    found = b""
    with contextlib.suppress(BlockingIOError):
        while part := os.read(pipe.fileno(), 1 << 16):
            found += part
    return found
