"""Finds who holds up a job that makes no progress: the one that nothing waits for."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holmesjax.distributed.controller import Controller
from holmesjax.distributed.messages import Failed
from holmesjax.plan.processes import Process

TIMED_OUT = re.compile(r"timed? ?out|DEADLINE_EXCEEDED", re.IGNORECASE)
# In what JAX says of others; a file system's time runs out, too.
OF_OTHERS = re.compile(
    r"Gloo|NCCL|RCCL|collective|coordination|barrier|rendezvous|RuntimeError: DEADLINE_EXCEEDED",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class Standstill:
    """The known facts of a process of a job without progress."""

    has_come: bool = True  # to the controller
    answers: bool = True  # when it is asked for a sign of life
    position: tuple[int, int] = (0, 0)  # its step, and the work in it
    status: str  # what it says that it "was" doing or "waited" for
    waits_in: str = ""  # the function of JAX in which its main thread waits for others


def hold_up(processes: Sequence[Process], controller: Controller, question: int) -> list[Process]:
    """Returns the processes that hold up a job, some time after a question of `Controller.ask`."""
    states = {
        process.number: Standstill(
            has_come=controller.has_come(process.number),
            answers=controller.has_answered(process.number, question),
            position=controller.position(process.number),
            status=controller.status(process.number),
            waits_in=controller.waits_in(process.number),
        )
        for process in processes
    }
    return [processes[number] for number in behind(states)]


def missed_by(
    record: object, reporter: Process, processes: Sequence[Process], controller: Controller
) -> list[Process]:
    """Returns the processes of a stage for which one of it has waited in vain, in a collective.

    Args:
      record: what ended the reporter.
      reporter: the process that may have waited.
      processes: all of the job.
      controller: of the processes.
    """
    if not isinstance(record, Failed) or record.fix is not None or record.is_own:
        return []
    if not (TIMED_OUT.search(record.problem) and OF_OTHERS.search(record.problem)):
        return []
    states = {
        process.number: Standstill(
            position=controller.position(process.number),
            status=controller.status(process.number),
            waits_in=controller.waits_in(process.number),
        )
        for process in processes
        if process.stage == reporter.stage
    }
    late = behind(states)
    return [] if reporter.number in late else [processes[number] for number in late]


def behind(states: Mapping[int, Standstill]) -> list[int]:
    """Returns the processes that the others of a job without progress wait for, by number.

    One that has not come, or does not answer, is waited for. Else a process whose status or stack
    says that it waits itself is not, unless all wait. Of the rest, the ones that have come least
    far hold up the others.

    >>> behind({
    ...     0: Standstill(position=(5, 0), status="was busy in step 5"),
    ...     1: Standstill(position=(5, 0), status="waited for F0 in step 5"),
    ...     2: Standstill(position=(6, 0), status="waited in step 6"),
    ... })
    [0]
    """
    if absent := [number for number, state in states.items() if not state.has_come]:
        return absent
    if dumb := [number for number, state in states.items() if not state.answers]:
        return dumb
    awake = {n: state for n, state in states.items() if not state.status.startswith("waited")}
    busy = {number: state for number, state in awake.items() if not state.waits_in}
    among = busy or awake or states
    least = min(state.position for state in among.values())
    return [number for number, state in among.items() if state.position == least]
