"""Finds the cause of a failed job among failures that come together.

A process that loses another one fails too, and may be heard first: the end of a process is news of
its launcher, which CUDA, srun or a long line hold up. So the supervisor asks all processes for a
sign of life, and waits until each has given one or its end is known.
"""

import queue
import signal
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

from holmesjax.distributed.controller import NOBODY, Controller
from holmesjax.distributed.messages import Exit, Failed, Lost, ProcessEvent, Silent
from holmesjax.errors import REQUEUE, HolmesError
from holmesjax.plan.processes import Process

GRACE_S = 1.0  # after a failure, for others to say what they know of it
NEWS_S = 30.0  # for the end of a process that gives no sign of life to be told
LOOK_S = 0.1


def events_of(controller: Controller, for_s: float) -> Iterator[ProcessEvent]:
    """Yields the events of the next seconds."""
    deadline_s = time.monotonic() + for_s
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            yield controller.events.get(timeout=left_s)
        except queue.Empty:
            return


def is_failure(event: ProcessEvent, done: Container[int]) -> bool:
    """Whether an event is the end of the job, where these processes have said that they are done.

    One that was asked to stop before the last step ends with REQUEUE, for whoever starts it again.
    """
    match event.record:
        case Exit(status=status):
            return status not in (0, REQUEUE) or event.process not in done
        case Lost():
            return event.process not in done
    return isinstance(event.record, Failed | Silent)


def find_cause(
    first: ProcessEvent,
    controller: Controller,
    processes: Sequence[Process],
    note: Callable[[ProcessEvent], object],
    *,
    sees_exits: bool,
    done: Container[int],
    is_hurried: Callable[[], bool] = lambda: False,
) -> ProcessEvent:
    """Returns the cause of a failure, from all that is heard until every process is known of.

    Its process is NOBODY where all have lost the launcher at once.

    Args:
      first: the first sign.
      controller: of the processes.
      processes: all of them.
      note: takes what else is heard meanwhile.
      sees_exits: whether the launcher tells of the end of each process.
      done: processes that have said that they are done.
      is_hurried: asked again and again whether to decide at once.
    """
    failures = [first]
    question, asked_s = controller.ask(), time.monotonic()
    while not is_hurried():
        waited_s = time.monotonic() - asked_s
        unknown = _unknown(controller.unanswered(question), failures, sees_exits)
        if waited_s > (NEWS_S if unknown else GRACE_S):
            break
        for event in events_of(controller, LOOK_S):
            if is_failure(event, done):
                failures.append(event)
            elif not isinstance(event.record, Exit | Lost):
                note(event)
    for number, silent_s in controller.overdue().items():
        failures.append(ProcessEvent(number, Silent(silent_s=silent_s)))
    return cause_of(failures, processes)


def _unknown(
    unanswered: Iterable[int], failures: Sequence[ProcessEvent], sees_exits: bool
) -> set[int]:
    """Returns the processes of which neither a sign of life nor the end is known.

    One that has closed its connection without a word ends: its launcher may tell how.
    """
    last = Failed | Exit if sees_exits else Failed | Exit | Lost
    known = {failure.process for failure in failures if isinstance(failure.record, last)}
    lost = [failure.process for failure in failures if isinstance(failure.record, Lost)]
    return {number for number in (*unanswered, *lost) if number not in known}


# ---- the decision --------------------------------------------------------------------------------


def cause_of(failures: Sequence[ProcessEvent], processes: Sequence[Process]) -> ProcessEvent:
    """Returns the failure that caused the others; among equals, the first that was heard of.

    Its process is NOBODY where all processes, and they are several, have lost the launcher alone.

    Args:
      failures: in the order in which they were heard, at least one.
      processes: all processes of the job.
    """
    told = _own_failures(failures)
    if len(told) == len(processes) > 1 and all(map(_lacks_launcher, told.values())):
        return ProcessEvent(NOBODY, Lost())
    least = min(map(_rank, told.values()))
    first, *others = (failure for failure in told.values() if _rank(failure) == least)
    if least == _ECHO:
        return _first_loss(told, processes)
    if isinstance(first.record, Lost) or _ending_signal(first.record) == signal.SIGABRT:
        # JAX aborts the processes of a stage when the one that coordinates them is gone.
        stage = processes[first.process].stage
        leaders = [
            other
            for other in others
            if processes[other.process].leads and processes[other.process].stage == stage
        ]
        return leaders[0] if leaders else first
    return first


def _lacks_launcher(failure: ProcessEvent) -> bool:
    """Whether a process has lost its connection to the launcher, as far as is known of it."""
    record = failure.record
    return isinstance(record, Lost) or (isinstance(record, Exit) and record.status == REQUEUE)


def _own_failures(failures: Sequence[ProcessEvent]) -> dict[int, ProcessEvent]:
    """Returns the most telling failure of each process, in the order in which they failed.

    A report says more than an exit status, which says more than a silence or a closed connection.
    """
    kinds = [Failed, Exit, Silent, Lost]
    found: dict[int, ProcessEvent] = {}
    for failure in failures:
        known = found.get(failure.process, failure)
        found[failure.process] = min(known, failure, key=lambda own: kinds.index(type(own.record)))
    return found


_ECHO = 7


def _rank(failure: ProcessEvent) -> int:
    """Returns the rank of a process's failure: a low rank is never the consequence of a higher one.

    0  a mistake was reported: exit status 1 or 2, with what to do; nobody else can make it. Or a
       spike was, from which the run goes back: whoever has not read it yet loses the others
    1  ended with status 2: a mistake again, found before the controller was reached
    2  killed by a signal: such a process says nothing, and all others say what they miss
    3  an exception was reported that nothing outside of the process can have caused
    4  silent for several heartbeats: it hangs, or its node or network does
    5  ended without a word, which is all that is known of it; or nobody was named as lost
    6  aborted: by itself, or by JAX, which has lost another process of its stage
    7  the loss of another process or of a link was reported, or an exception that this may cause
    8  ended with status 75 without a word: it has lost the launcher
    """
    record = failure.record
    if isinstance(record, Failed):
        if record.fix is None:
            return 3 if record.is_own else _ECHO
        if record.spike is None and record.exit_status == REQUEUE:
            return 5 if record.peer is None else _ECHO
        return 0
    if isinstance(record, Exit):
        if record.status in (HolmesError.exit_status, REQUEUE):
            return 1 if record.status != REQUEUE else 8
        number = _ending_signal(record)
        return 5 if number is None else 6 if number == signal.SIGABRT else 2
    return {Silent: 4, Lost: 5}[type(record)]


def _ending_signal(record: object) -> int | None:
    """Returns the signal that ended a process; a shell around it tells it as 128 and more."""
    if not isinstance(record, Exit):
        return None
    number = -record.status if record.status < 0 else record.status - 128
    return number if number > 0 else None


def _first_loss(told: Mapping[int, ProcessEvent], processes: Sequence[Process]) -> ProcessEvent:
    """Returns where the losses began that processes report, all of which may follow from another.

    1. A link: two processes have lost each other, or one has lost another that reports nothing.
    2. An exception in a stage of which no process has lost one of another stage.
    3. Any exception: whoever leaves with one is missed by others.
    4. The first that was told.
    """
    peers: dict[int, int] = {}
    exceptions = []
    for number, failure in told.items():
        if isinstance(record := failure.record, Failed) and _rank(failure) == _ECHO:
            if record.peer is None:
                exceptions.append(failure)
            else:
                peers[number] = record.peer
    links = [
        told[number]
        for number, peer in peers.items()
        if peers.get(peer) == number or peer not in told
    ]
    cut = {processes[number].stage for number in peers}
    apart = [failure for failure in exceptions if processes[failure.process].stage not in cut]
    losses = [told[number] for number in peers]
    return [*links, *apart, *exceptions, *losses][0]
