"""Puts the failure of a job into words: the paragraph of its error, and how names are listed."""

import contextlib
import itertools
import re
import signal
from collections.abc import Sequence

from holmesjax.distributed.controller import Controller
from holmesjax.distributed.messages import Exit, Failed, Silent
from holmesjax.errors import (
    REQUEUE,
    CrashError,
    DamagedError,
    FatalError,
    HolmesError,
    PeerError,
    SpikeError,
)
from holmesjax.plan.processes import Process
from holmesjax.transport.records import Record

NAMES = 5  # of processes, in one list
GROUPS = 10  # of processes that say the same
UNKNOWN_FLAGS = re.compile(r"\bUnknown flags? in XLA_FLAGS: (.+)")  # XLA's last words


def list_names(names: Sequence[str]) -> str:
    """Returns a few names, and the number of those that are left out.

    >>> list_names(["a/a-0", "a/a-1"]), list_names([f"a-{i}" for i in range(2048)])
    ('a/a-0, a/a-1', 'a-0, a-1, a-2, a-3, a-4 and 2043 more')
    """
    shown = ", ".join(names[:NAMES])
    return shown if len(names) <= NAMES else f"{shown} and {len(names) - NAMES} more"


def statuses_of(
    processes: Sequence[Process], controller: Controller, but: Process | None = None
) -> str:
    """Returns what processes say that they "was" doing or "waited" for, but for one of them."""
    groups: dict[tuple[int, str], list[str]] = {}
    for process in processes:
        if process is not but:
            said = process.stage, controller.status(process.number)
            groups.setdefault(said, []).append(process.name)
    told = [
        f"{'each of ' if len(names) > 1 else ''}{list_names(names)} (stage {stage}) {status}"
        for (stage, status), names in itertools.islice(groups.items(), GROUPS)
    ]
    left = sum(map(len, list(groups.values())[GROUPS:]))
    if left:
        told.append(f"{left} more processes say something else")
    return "; ".join(told) or "it is the only process"


def mistake_in_flags(process: str, lines: Sequence[str]) -> HolmesError | None:
    """Returns the mistake that has made XLA end a process, by the last lines that it printed."""
    for line in lines:
        if unknown := UNKNOWN_FLAGS.search(line):
            fix = "correct the flag, or leave it out; other versions of JAX may know it"
            problem = "has what XLA of this JAX does not know"
            return HolmesError(f"{process}: XLA_FLAGS", problem, found=unknown[1], fix=fix)
    return None


def error_of(
    record: Record, where: str, *, last: str, others: str, fix: str, fix_alone: str
) -> HolmesError:
    """Returns the error of a job that ends with the failure of a process.

    Args:
      record: the failure.
      where: the process, with its stage.
      last: its last status.
      others: the status of all others.
      fix: what to do where another node or a network may be the cause.
      fix_alone: what to do where the process ended by itself.
    """
    if isinstance(record, Failed):
        return _as_reported(record, where, others, fix)
    if isinstance(record, Silent):
        silent_s = record.silent_s
        problem = f"has been silent for {silent_s:.0f} s: it hangs, or its node or network does"
    elif isinstance(record, Exit):
        problem = _ending(record.status)
        if record.status == HolmesError.exit_status:
            return HolmesError(where, problem, found=others, fix=fix_alone)
    else:
        problem = "has closed its connection without a word: it was killed, or its node was lost"
    return PeerError(where, f"{problem}; it {last}", found=others, fix=fix)


def _ending(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    with contextlib.suppress(ValueError):
        return f"was killed by signal {-status} ({signal.Signals(-status).name})"
    return f"was killed by signal {-status}"


def _as_reported(failed: Failed, process: str, others: str, fix: str) -> HolmesError:
    """Returns the error that a process reported; a lost peer has what the others waited for."""
    status = failed.exit_status
    where = ": ".join(filter(None, (process, failed.where)))
    found = others if failed.found is None else failed.found
    if failed.fix is None:
        exception = failed.problem if failed.is_own else ""
        fix = f"correct the code if it is wrong, else {fix}" if failed.is_own else fix
        return CrashError(where, failed.problem, found=found, fix=fix, exception=exception)
    if failed.spike is not None:
        words = {"found": found, "fix": failed.fix or fix}
        return SpikeError(where, failed.problem, **words, step=failed.spike)
    if status == REQUEUE:
        return PeerError(where, failed.problem, found=f"{found}; {others}", fix=fix)
    kind = (
        DamagedError
        if failed.damaged
        else HolmesError
        if status == HolmesError.exit_status
        else FatalError
    )
    return kind(where, failed.problem, found=found, fix=failed.fix)
