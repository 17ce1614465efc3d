"""Finds the cause of a failed job among failures that come together, and puts it into words.

A process that loses another one fails too, within the same second.
"""

import contextlib
import queue
import signal
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence

from holmesjax.distributed.controller import Controller
from holmesjax.distributed.messages import AskBeat, Exit, Failed, Lost, ProcessEvent, Silent
from holmesjax.errors import (
    REQUEUE,
    DamagedError,
    FatalError,
    HolmesError,
    PeerError,
    SpikeError,
)
from holmesjax.plan.processes import Process
from holmesjax.transport.records import Record

GRACE_S = 1.0  # after a failure, for others to say what they know of it


def events_of(controller: Controller, for_s: float) -> Iterator[ProcessEvent]:
    """Yields the events of the next seconds."""
    deadline_s = time.monotonic() + for_s
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            yield controller.events.get(timeout=left_s)
        except queue.Empty:
            return


def is_failure(event: ProcessEvent, done: Container[int]) -> bool:
    """Whether an event is the end of the job, where these processes have trained to the end."""
    match event.record:
        case Exit(status=status):
            return status != 0 or event.process not in done
        case Lost():
            return event.process not in done
    return isinstance(event.record, Failed | Silent)


def find_cause(
    first: ProcessEvent, controller: Controller, note: Callable[[ProcessEvent], object]
) -> ProcessEvent:
    """Returns the cause of a failure, from all reports within a moment of its first sign.

    Args:
      first: the first sign.
      controller: of the processes.
      note: takes what else is heard in this moment.
    """
    failures = [first]
    controller.broadcast(AskBeat())
    for event in events_of(controller, GRACE_S):
        if isinstance(event.record, Exit | Failed | Silent | Lost):
            failures.append(event)
        else:
            note(event)
    for number, silent_s in controller.overdue().items():
        failures.append(ProcessEvent(number, Silent(silent_s=silent_s)))
    return cause_of(failures)


def statuses_of(
    processes: Sequence[Process], controller: Controller, but: Process | None = None
) -> str:
    """Returns what each process says that it "was" doing or "waited" for, but for one of them."""
    told = [
        f"{process.name} (stage {process.stage}) {controller.status(process.number)}"
        for process in processes
        if process is not but
    ]
    return "; ".join(told) or "it is the only process"


def hung(processes: Sequence[Process], controller: Controller) -> list[Process]:
    """Returns the processes that the others of a job without progress wait for."""
    positions = {process.number: controller.position(process.number) for process in processes}
    statuses = {process.number: controller.status(process.number) for process in processes}
    return [processes[number] for number in behind(positions, statuses)]


def behind(positions: Mapping[int, tuple[int, int]], statuses: Mapping[int, str]) -> list[int]:
    """Returns the processes that the others of a job without progress wait for, by number.

    The processes that have come least far are candidates. A candidate that waits for others itself
    does not count, unless all candidates wait.

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
    """Returns the failure that caused the others; among equals, the first that was heard of."""
    return min(failures, key=_rank)


def _rank(failure: ProcessEvent) -> int:
    """Returns the rank of a failure: a low rank is never the consequence of a higher one.

    0  a mistake was reported: exit status 1 or 2, with what to do; nobody else can make it. Or a
       spike was, from which the run goes back: whoever has not read it yet loses the others
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
        if record.spike is not None:
            return 0
        if record.exit_status == REQUEUE:
            return 5
        return 4 if record.fix is None else 0
    if isinstance(record, Exit):
        if record.status == HolmesError.exit_status:
            return 1
        return 2 if record.status < 0 and record.status != -signal.SIGABRT else 6
    return {Silent: 3, Lost: 7}[type(record)]


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
        if record.status > 0 and record.status != REQUEUE:
            return _kind(record.status)(where, problem, found=others, fix=fix_alone)
    else:
        problem = "has closed its connection: it ended, or its node did"
    return PeerError(where, f"{problem}; it {last}", found=others, fix=fix)


def _ending(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    with contextlib.suppress(ValueError):
        return f"was killed by signal {-status} ({signal.Signals(-status).name})"
    return f"was killed by signal {-status}"


def _kind(status: int) -> type[HolmesError]:
    """Returns the kind of error for a process that ended with a status other than REQUEUE."""
    return HolmesError if status == HolmesError.exit_status else FatalError


def _as_reported(failed: Failed, process: str, others: str, fix: str) -> HolmesError:
    """Returns the error that a process reported; a lost peer has what the others waited for."""
    status = failed.exit_status
    where = ": ".join(filter(None, (process, failed.where)))
    found = others if failed.found is None else failed.found
    if failed.spike is not None:
        words = {"found": found, "fix": failed.fix or fix}
        return SpikeError(where, failed.problem, **words, step=failed.spike)
    if status == REQUEUE:
        return PeerError(where, failed.problem, found=f"{found}; {others}", fix=fix)
    kind = DamagedError if failed.damaged else _kind(status)
    return kind(where, failed.problem, found=found, fix=fix if failed.fix is None else failed.fix)
