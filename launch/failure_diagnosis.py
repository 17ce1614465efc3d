"""Diagnoses a job that has failed or stands still: one error, and the node that is to blame."""

from collections.abc import Callable, Container, Sequence

from holmesjax.distributed.controller import NOBODY, Controller
from holmesjax.distributed.messages import Failed, ProcessEvent
from holmesjax.errors import REQUEUE, HolmesError, PeerError
from holmesjax.plan.processes import Process
from launch.failure_causes import NEWS_S, find_cause
from launch.failure_messages import NAMES, error_of, list_names, mistake_in_flags, statuses_of
from launch.holdups import hold_up, missed_by
from launch.loop_watch import LoopWatch
from launch.process_logs import ProcessLogs
from launch.stop_requests import StopRequests


class FailureDiagnosis:
    """Says why a job ends before it is done.

    Args:
      processes: all of the job.
      controller: asks them.
      logs: what they have printed.
      stops: the signals that the supervisor hears.
      loop_watch: of the loop that hears the processes, which may have stood still itself.
      sees_exits: whether the launcher tells of the end of each process.
      silence_s: after which a process is given up.
      advice: how the job is started again, after a comma.
      say: prints a line.
    """

    def __init__(
        self,
        processes: Sequence[Process],
        controller: Controller,
        logs: ProcessLogs,
        *,
        stops: StopRequests,
        loop_watch: LoopWatch,
        sees_exits: bool,
        silence_s: float,
        advice: str,
        say: Callable[[str], object],
    ):
        self._processes, self._controller, self._logs = processes, controller, logs
        self._stops, self._loop_watch, self._sees_exits = stops, loop_watch, sees_exits
        self._silence_s, self._say = silence_s, say
        self._fix = f"resume from the last checkpoint with the same command, {advice}"
        self.is_final = False  # whether each start would meet it again
        self.blamed: str | None = None  # the node of a failure that came before any signal

    def of_failure(
        self,
        first: ProcessEvent,
        done: Container[int],
        note: Callable[[ProcessEvent], object],
    ) -> HolmesError:
        """Returns the cause of a failure, from all reports within a moment of its first sign.

        Args:
          first: the first sign.
          done: processes that have said that they are done.
          note: takes what else is heard meanwhile.
        """
        is_asked, controller = bool(self._stops), self._controller

        def is_hurried() -> bool:
            self._loop_watch.turn()  # to look for the cause may take longer than a turn may
            return self._stops.is_impatient

        cause = find_cause(
            first,
            controller,
            self._processes,
            note,
            sees_exits=self._sees_exits,
            done=done,
            is_hurried=is_hurried,
        )
        if missed := self._missed_by_the_launcher(cause):
            found = statuses_of(self._processes, controller)
            return PeerError("the launcher", missed, found=found, fix=self._fix)
        process = self._processes[cause.process]
        if late := missed_by(cause.record, process, self._processes, controller):
            problem = f"was waited for in vain by {process.name}"
            return self._held_up(late, f"{problem}: {getattr(cause.record, 'problem', '')}")
        self.blamed = None if is_asked else process.node
        found = statuses_of(self._processes, controller, but=process)
        output = self._logs.told(process.number)
        lines = self._logs.last_lines(process.number)
        if lines and not isinstance(cause.record, Failed):
            self._say(f"the last lines of {process.name}:")
            for line in lines:
                self._say(f"  {line}")
            if mistake := mistake_in_flags(process.full_name, lines):
                self.is_final = True
                return mistake
        hangs = self._logs.hangs()
        own = hangs.pop(process.number, "")
        others = [f"{self._processes[number].name} {hang}" for number, hang in hangs.items()]
        return error_of(
            cause.record,
            process.full_name,
            last=" and ".join(filter(None, (controller.status(process.number), own))),
            others="; ".join((found, *others)),
            fix=f"{self._fix}{output}",
            fix_alone=f"correct what it says{output}",
        )

    def of_hang(self, problem: str, question: int) -> HolmesError:
        """Returns the error of a job without progress: who holds it up, and the status of all.

        Args:
          problem: what takes too long.
          question: the number of the one by which all were asked for their stacks.
        """
        late = hold_up(self._processes, self._controller, question)
        stacks = self._logs.told(late[0].number, "the stacks of all processes are in their logs,")
        return self._held_up(late, problem, stacks)

    def _held_up(self, late: Sequence[Process], problem: str, told: str = "") -> HolmesError:
        """Returns the error of a job that some processes hold up, with the status of all."""
        nodes = list(dict.fromkeys(process.node for process in late))
        self.blamed = None if self._stops else ", ".join(nodes[:NAMES])
        return PeerError(
            list_names([process.full_name for process in late]),
            problem,
            found=statuses_of(self._processes, self._controller),
            fix=f"start it again from the last checkpoint with the same command{told}",
        )

    def _missed_by_the_launcher(self, cause: ProcessEvent) -> str:
        """Returns what the launcher itself has missed, in words; "" where a process is the cause.

        Whoever is silent for `silence_s` is given up, and it is the launcher that was.
        """
        status = getattr(cause.record, "exit_status", getattr(cause.record, "status", REQUEUE))
        paused_s = self._loop_watch.pause_s(within_s=self._silence_s + NEWS_S)
        if status == REQUEUE and paused_s > self._silence_s / 2:
            return (
                f"stood still for {paused_s:.0f} s (it was stopped, or its machine slept or was "
                "overloaded), so no process is to blame"
            )
        if cause.process == NOBODY:
            return (
                "has lost its connections to all processes at once: its network was cut, or all "
                "were ended together"
            )
        return ""
