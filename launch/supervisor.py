"""Runs the processes of a job from start to end, wherever a launcher starts them.

An attempt starts the processes, lets them find each other, records what they report, and waits for
their end. When one process is lost, the supervisor ends all. One paragraph names the lost process,
and says what the others waited for. The supervisor does not import JAX: it holds no device, and
starts at once.
"""

import contextlib
import functools
import itertools
import os
import queue
import shlex
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from holmesjax.checkpoints import committed, committing, manifest, resume, second_reading
from holmesjax.checkpoints.commit_alarm import CommitAlarm
from holmesjax.checkpoints.committing import Saves
from holmesjax.checkpoints.retention import Retention
from holmesjax.checkpoints.save_schedule import SaveSchedule
from holmesjax.distributed.controller import NOBODY, Controller
from holmesjax.distributed.data_agreement import DataAgreement
from holmesjax.distributed.messages import (
    AllDone,
    Compiled,
    Done,
    Exit,
    Failed,
    Files,
    Go,
    Lost,
    Measurements,
    Output,
    ProcessEvent,
    Refused,
    Saved,
    Stop,
    Unsaved,
    Up,
    Warned,
)
from holmesjax.errors import (
    REQUEUE,
    CrashError,
    DamagedError,
    DataError,
    FatalError,
    HolmesError,
    LostDataError,
    LostLeaseError,
    PeerError,
    SpikeError,
    of_system,
)
from holmesjax.hosts import computing
from holmesjax.job import Job
from holmesjax.liveness import lease
from holmesjax.liveness.lease import Lease
from holmesjax.plan.processes import make_processes
from holmesjax.report.process_step import ProcessStep
from holmesjax.report.recorder import Recorder
from holmesjax.runtime.step_timeout import Progress
from holmesjax.transport import connections
from launch.failure_causes import NEWS_S, events_of, find_cause, is_failure
from launch.failure_messages import NAMES, error_of, list_names, statuses_of
from launch.holdups import hold_up
from launch.launchers.launcher import Launcher, leaving
from launch.loop_watch import LoopWatch
from launch.process_logs import ProcessLogs, is_noise
from launch.restarts import DEFAULT, Restarts
from launch.stop_requests import StopRequests
from launch.workers import pool_of, start_workers

_say = functools.partial(print, flush=True)

KEY = "job.key"
STACKS_S = 3.0  # for the stacks of a job without progress to come
END_S = 30.0  # for processes to leave after the end
LEAST_LEFT_S = 5.0  # that a job has to end in, however late it was asked to
DELAY_S = 0.5  # of the output on the console, so that the last words of a failing job stay in logs


@dataclass
class _Attempt:
    """The state of an attempt since the processes were started."""

    controller: Controller
    recorder: Recorder
    progress: Progress
    logs: ProcessLogs
    agreement: DataAgreement
    saves: Saves
    data: dict[str, str]  # digests, once all agree
    up: set[int] = field(default_factory=set)
    done: dict[int, int] = field(default_factory=dict)  # process -> steps
    exited: dict[int, int] = field(default_factory=dict)  # process -> status
    output: deque[tuple[float, str]] = field(default_factory=deque)  # when it came, and the line


class Watch(Protocol):
    """Watches a job while it trains."""

    def step(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        """Takes the record of a step that is done, and returns additions to it."""

    def end(self) -> None:
        """Called when all processes have ended, before the report is written."""


class Supervisor:
    """One job: as many attempts as it may have.

    Args:
      max_restarts: how often it may start again without a new step (`restarts`). None: this
        supervisor does not start it again; `restarts.DEFAULT` is for whoever does.
      starts_again: whether the launcher can start the processes again. If not, the limit is for
        whoever does.
      key_file: with the key of the job; without one each attempt has its own, in the run folder.
      watch: looks on.
      allow: settings that may differ from the checkpoint's (`resume.find`), and facts in which
        processes may differ (`computing`).
    """

    def __init__(
        self,
        job: Job,
        launcher: Launcher,
        *,
        max_restarts: int | None = None,
        starts_again: bool = True,
        key_file: str | None = None,
        watch: Watch | None = None,
        allow: Sequence[str] = (),
    ):
        self._job, self._launcher = job, launcher
        self._can_start, self._starts_again = starts_again, starts_again and bool(max_restarts)
        self._advice = "as --max-restarts does" if max_restarts else "or add --max-restarts"
        self._max_restarts = DEFAULT if max_restarts is None else max_restarts
        self._given_key_file, self._watch = key_file, watch
        names = resume.names_of(allow)
        self._allow = [name for name in names if not computing.is_fact(name)]
        self._unlike = [name for name in names if computing.is_fact(name)]
        self._config = job.config.distributed
        self._processes = make_processes(job.plan, job.topology, self._config.processes)
        self._pool = pool_of(job, launcher, self._processes, os.environ)
        self._stops = StopRequests(self._config.stop_timeout_s, self._stop)
        limit_s, setting = self._config.start_timeout_s, "distributed.start_timeout_s"
        self._loop_watch = LoopWatch(limit_s, setting, lambda: self._lease.release())
        self._controller: Controller | None = None
        self._unsave: Callable[[], None] = lambda: None
        self._blamed: str | None = None  # the node of a failure that came before any signal
        self._has_trained = False  # a step, in this attempt
        self._leave_by_s = 0.0  # when the launcher is to be gone, once its loop is over

    def run(self) -> int:
        """Trains to the end, or until it is asked to stop.

        Returns 0, or REQUEUE if something other than Ctrl-C asked it to stop.

        Raises LeaseError where another process owns the run folder; PeerError, or what a process
        raised, if the last attempt failed; FatalError if no restart is left.
        """
        connections.raise_open_files(len(self._processes) * (1 + self._launcher.files_each))
        with Lease(self._job.run_dir, on_loss=lease.end_process) as self._lease:
            return self._run_owned()

    def _run_owned(self) -> int:
        job = self._job
        print(*job.describe(self._pool), *self._describe(), sep="\n", flush=True)
        if self._pool:
            self._pool.refuse_too_small(job.plan.stages, job.topology)
        with self._stops:
            return self._run()

    def _run(self) -> int:
        job = self._job
        restarts = Restarts(job.run_dir, self._max_restarts, _say)
        self._lease.guard(committed.adopt)(job.run_dir, restarts.last_step)
        for restart in itertools.count():
            step = self._done()
            if restarts.is_spent(step):
                raise self._lease.guard(restarts.give_up)(step)
            if restarts.failed(step):
                self._pause(restarts, step)
            elif restart:
                print(f"starting again, after step {step}", flush=True)
            if self._stops:
                print(*job.unfinished(step), sep="\n", flush=True)
                return self._stops.exit_status
            try:
                return self._recorded_attempt(restart, restarts, step)
            except DamagedError as error:
                self._set_aside(error)
            except SpikeError as error:
                self._roll_back(error)
            except PeerError as error:
                if self._stops or not (self._starts_again or restarts.is_spent(self._done())):
                    raise
                print(f"error: {error}", flush=True)
        raise AssertionError("the last attempt returns or raises")

    def _set_aside(self, error: DamagedError) -> None:
        """Sets a damaged checkpoint aside, so that the next start reads an older one.

        Raises DamagedError if none is left, and PeerError where somebody else starts the processes.
        """
        found = self._resumed.checkpoint
        assert found, "arrays are read of a checkpoint"
        resume.find(
            self._job,
            self._allow,
            _say,
            {found.path: error},
            owner=self._lease,
            pause=self._wait_to_see,
        )
        if not self._can_start:
            fix = "start it again with the same command: it goes on from the older checkpoint"
            raise PeerError(error.where, error.problem, found=error.found, fix=fix)

    def _wait_to_see(self, seconds: float) -> None:
        """Waits while nothing runs that could be saved; a signal ends the launcher."""
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            if self._stops:
                raise SystemExit(leaving(self._stops.first))
            time.sleep(min(left_s, 0.1))

    def _roll_back(self, error: SpikeError) -> None:
        """Lets the next start go back to the newest checkpoint, and leave out the data since.

        Raises FatalError if it did so too often, and PeerError where somebody else starts the
        processes.
        """
        resume.roll_back(self._job, error, _say, self._lease, self._wait_to_see)
        if not self._can_start:
            fix = "start it again with the same command: it goes back to its last checkpoint"
            raise PeerError(error.where, error.problem, found=error.found, fix=fix)

    def _pause(self, restarts: Restarts, step: int) -> None:
        """Waits before a restart that follows one without a new step; a signal ends it at once."""
        pause_s = restarts.pause_s(step)
        count = f"restart {len(restarts.failed(step))} of {restarts.limit} without a new step"
        print(f"starting again in {pause_s:g} s, after step {step}: {count}", flush=True)
        deadline_s = time.monotonic() + pause_s
        while time.monotonic() < deadline_s and not self._stops:
            time.sleep(min(0.1, pause_s))

    def _done(self) -> int:
        """Returns the step of the newest checkpoint."""
        return max((found.step for found in manifest.find(self._job.run_dir)), default=0)

    def _recorded_attempt(self, restart: int, restarts: Restarts, step: int) -> int:
        self._lease.guard(restarts.begin)(step)
        self._blamed, self._has_trained = None, False
        status, cause, exception, is_meant = FatalError.exit_status, "", "", False
        try:
            try:
                status = self._confirmed_attempt(restart)
            except OSError as error:  # of a disk or a file server, which may be back for the next
                raise of_system(error) from None
        except SystemExit as end:  # asked to leave at once
            status, is_meant = int(end.code or 0), True
            raise
        except HolmesError as error:
            status, cause = error.exit_status, str(error)
            is_meant = isinstance(error, SpikeError)
            if isinstance(error, CrashError) and not self._has_trained:
                exception = error.exception
            raise
        finally:
            self._lease.check(at_once=True)  # a process of the job may have seen a loss first
            stopped = is_meant or (bool(self._stops) and self._blamed is None)
            restarts.end(
                status,
                stopped=stopped,
                node=self._blamed or "",
                cause=cause,
                exception=exception,
            )
        return status

    def _confirmed_attempt(self, restart: int) -> int:
        """Lets another process read what one has found damaged; PeerError if that can read it."""
        try:
            return self._attempt(restart)
        except DamagedError as error:
            found = self._resumed.checkpoint
            assert found, "arrays are read of a checkpoint"
            _say("another process reads the checkpoint once more")
            second_reading.confirm(found, error, pause=self._wait_to_see, say=_say)
            raise

    def _describe(self) -> list[str]:
        names = ", ".join(process.name for process in self._processes)
        return [f"processes   {len(self._processes)}: {names}"]

    def _stop(self) -> None:
        if self._controller is not None:
            self._controller.stop()

    # ---- one attempt ---------------------------------------------------------------------------

    def _attempt(self, restart: int) -> int:
        job, config = self._job, self._job.config
        start = self._resumed = resume.find(
            job, self._allow, _say, owner=self._lease, pause=self._wait_to_see
        )
        if start.step >= config.train.steps:
            print(*start.finished(), sep="\n", flush=True)
            return 0
        for line in start.describe():
            _say(line)
        self._lease.check()
        self._unsave = self._lease.guard(job.save(start.step))  # the processes read it
        variables = job.process_environment(os.environ, self._pool)
        job.save_environment(variables)
        self._keeps(_say).after_start()
        logs = ProcessLogs(job.run_dir, self._processes, self._lease.move)
        with contextlib.ExitStack() as watched:
            return self._watched_attempt(start, restart, variables, logs, watched)

    def _watched_attempt(
        self,
        start: resume.Start,
        restart: int,
        variables: Mapping[str, str],
        logs: ProcessLogs,
        watched: contextlib.ExitStack,
    ) -> int:
        """One attempt, whose loop and whose end are watched until the stack is closed."""
        job, config = self._job, self._job.config
        key_file = Path(self._given_key_file or job.run_dir / KEY)
        make_or_read = (
            connections.read_key_file if self._given_key_file else connections.make_key_file
        )
        progress = Progress(self._config)
        leaders = [process.name for process in self._processes if process.leads]
        alarm = CommitAlarm(config.checkpoint, start.step, leaders)
        with (
            Controller(
                self._processes,
                address=self._launcher.address,
                port=self._launcher.port,
                about=job.about(restart),
                resume=start.step,
                key=make_or_read(key_file),
                heartbeat_timeout_s=self._config.silence_s,
                is_saving=SaveSchedule(
                    config.checkpoint, begun=lambda step: self._saves.begun(step)
                ),
                progress=progress,
                allow=computing.permitted(job.run_dir, self._unlike),
            ) as controller,
            Recorder(
                job.run_dir,
                config,
                done_steps=start.step,
                num_processes=len(self._processes),
                peak_step_s=job.measured_peak_step_s,
                on_step=lambda record: self._watch_step(record, alarm),
                owner=self._lease,
            ) as recorder,
        ):
            self._controller = controller
            try:
                start_workers(
                    self._launcher,
                    self._processes,
                    controller,
                    run_dir=job.run_dir,
                    key_file=key_file,
                    variables={**variables, "HOLMES_EPOCH": str(self._lease.epoch)},
                    restart=restart,
                )
                watched.enter_context(self._loop_watch)
                done = self._supervise(controller, recorder, progress, logs, alarm)
                self._begin_to_leave(0 if done >= config.train.steps else self._stops.exit_status)
            except SystemExit as end:  # asked to leave at once
                self._begin_to_leave(int(end.code or 0))
                raise
            except HolmesError as error:
                self._begin_to_leave(error.exit_status)
                is_final = error.exit_status == HolmesError.exit_status
                if is_final and not isinstance(error, DamagedError):
                    controller.refuse(error)  # whoever started them, none is to start again
                    self._unsave()
                raise
            finally:
                self._end_workers(key_file)
        return self._finish(recorder, done)

    def _end_workers(self, key_file: Path) -> None:
        self._controller = None
        self._launcher.end()
        if self._watch:
            self._watch.end()
        if self._given_key_file is None:
            with contextlib.suppress(OSError, LostLeaseError):  # the end says more
                self._lease.guard(key_file.unlink)(missing_ok=True)

    def _finish(self, recorder: Recorder, done: int) -> int:
        """Tells what a session has done, which has not failed; returns its exit status."""
        for line in recorder.summary():
            _say(line)
        self._report(recorder)
        if done < self._job.config.train.steps:
            print(*self._job.unfinished(done), sep="\n", flush=True)
            return self._stops.exit_status
        return 0

    def _begin_to_leave(self, status: int) -> None:
        """Limits what follows on the loop: a job that is to end is gone in time."""
        limit_s = max(min(self._config.stop_timeout_s, self._stops.left_s), LEAST_LEFT_S)
        self._leave_by_s = time.monotonic() + limit_s
        self._loop_watch.leave(limit_s, "distributed.stop_timeout_s", status)

    def _report(self, recorder: Recorder) -> None:
        """Has the report written; a signal that comes meanwhile gives it up."""
        before, limit_s = self._stops.count, self._leave_by_s - time.monotonic()
        if line := recorder.write_report(limit_s, lambda: self._stops.count > before):
            _say(line)

    def _keeps(self, say: Callable[[str], None]) -> Retention:
        """Removes the checkpoints that need not stay."""
        checkpoint = self._job.config.checkpoint
        return Retention(self._job.run_dir, checkpoint, self._lease.move, say, self._lease.check)

    def _watch_step(self, record: Mapping[str, Any], alarm: CommitAlarm) -> dict[str, Any]:
        """Returns additions to the record of a step that is done."""
        found = dict(self._watch.step(record)) if self._watch else {}
        return found | alarm.step(record["step"])

    def _supervise(
        self,
        controller: Controller,
        recorder: Recorder,
        progress: Progress,
        logs: ProcessLogs,
        alarm: CommitAlarm,
    ) -> int:
        """Takes events until all processes have ended; returns the number of steps done."""
        job, say = self._job, recorder.console.print
        data: dict[str, str] = {}  # filled before there is anything to commit
        commit = functools.partial(committing.commit, self._resumed, data=data, owner=self._lease)
        retention, count = self._keeps(say), len(job.plan.stages)
        self._saves = Saves(job.run_dir, count, commit, retention, say, alarm.committed)
        alarm.attach(self._saves.outstanding, say)
        attempt = _Attempt(
            controller,
            recorder,
            progress,
            logs,
            DataAgreement(self._processes, controller.send),
            self._saves,
            data,
        )
        end_s: float | None = None
        while len(attempt.exited) < len(self._processes):
            self._loop_watch.turn()
            if self._stops and not attempt.up:  # nothing has been trained that could be saved
                raise SystemExit(leaving(self._stops.first))
            if self._stops.is_impatient:
                raise SystemExit(leaving(self._stops.last))
            if end_s is not None and time.monotonic() > end_s:
                break
            if end_s is None and (problem := self._overdue(attempt)):
                question = self._ask_for_stacks(attempt)
                if self._overdue(attempt):
                    raise self._hang(problem, attempt, question)
                recorder.console.print("warning: a step was late, and is done now")
            attempt.agreement.check()
            while attempt.output and time.monotonic() > attempt.output[0][0] + DELAY_S:
                recorder.console.print(attempt.output.popleft()[1])
            try:
                event = controller.events.get(timeout=0.2)
            except queue.Empty:
                continue
            self._hear(event, attempt)
            attempt.saves.check()
            if len(attempt.done) == len(self._processes) and end_s is None:
                controller.broadcast(AllDone())
                end_s = time.monotonic() + min(END_S, max(self._stops.left_s, LEAST_LEFT_S))
        for _, line in attempt.output:
            recorder.console.print(line)
        attempt.saves.check(at_end=True)
        steps = set(attempt.done.values())
        assert len(steps) == 1, f"the processes ended after different steps: {attempt.done}"
        return steps.pop()

    def _hear(self, event: ProcessEvent, attempt: _Attempt) -> None:
        """Takes an event. Raises HolmesError if it is the end of the job."""
        if is_failure(event, attempt.done):
            raise self._diagnose(event, attempt)
        if isinstance(event.record, Compiled | Files):
            self._agree(event.process, event.record, attempt)
        else:
            self._take(event, attempt)

    def _take(self, event: ProcessEvent, attempt: _Attempt) -> None:
        number, console = event.process, attempt.recorder.console
        name = self._processes[number].name
        match event.record:
            case Up():
                attempt.up.add(number)
            case Measurements(measured=report):
                self._record(report, attempt)
            case Saved(step=step, arrays=arrays, files=files):
                attempt.saves.saved(step, arrays, files, name)
            case Unsaved(step=step, reason=reason):
                leads = self._processes[number].leads
                attempt.saves.failed(step, f"{name} says {reason}", name, counts=leads)
            case Done(step=step):
                attempt.done[number] = step
            case Stop(signal=signal_number):
                signalled = signal.Signals(signal_number)
                console.print(f"{name} was sent {signalled.name}")
                self._stops.add(signalled)
            case Exit(status=status):
                attempt.exited[number] = status
            case Output(line=line):
                attempt.logs.write(number, line)
                if not is_noise(line):
                    attempt.output.append((time.monotonic(), f"{name} | {line}"))
            case Refused(reason=reason, unlike=names) if names:
                allow = shlex.quote(",".join([*self._unlike, *names]))
                command = f"python -m launch train {self._job.run_dir} --allow={allow}"
                fix = f"make the processes alike, or permit it: {command} and your other options"
                raise HolmesError(name, "cannot be a process of this job", found=reason, fix=fix)
            case Refused(reason=reason):
                console.print(f"refused a process that says it is {name}: {reason}")
            case Warned(text=text):
                console.print(f"warning: {text}")
            case Lost():
                if not self._launcher.sees_exits:
                    attempt.exited[number] = 0
            case _:
                raise AssertionError(f"what is {event}?")

    def _record(self, report: ProcessStep, attempt: _Attempt) -> None:
        attempt.recorder.take(report)
        self._has_trained = True

    def _agree(self, number: int, record: Compiled | Files, attempt: _Attempt) -> None:
        """Lets all processes go once all have read the same data; says what none of them reads.

        Raises LostDataError for data that are not those of the run so far, DataError at its begin.
        """
        if isinstance(record, Compiled) and record.left_out and number == 0:
            print(f"left out    {record.left_out}", flush=True)
        try:
            data = attempt.agreement.take(number, record)
            lines = self._resumed.check_data(data) if data else []
        except DataError as error:
            if not self._resumed.step:
                raise
            self._unsave()
            raise LostDataError.of(error) from None
        if data:
            print("".join(f"{line}\n" for line in lines), end="", flush=True)
            attempt.data.update(data)
            self._unsave = lambda: None  # the run goes on with what was saved
            attempt.controller.broadcast(Go())

    def _events(self, attempt: _Attempt, for_s: float) -> Iterator[ProcessEvent]:
        """Yields the events of the next seconds; output goes to the logs alone."""
        for event in events_of(attempt.controller, for_s):
            if isinstance(event.record, Output):
                attempt.logs.write(event.process, event.record.line)
            else:
                yield event

    # ---- failures ------------------------------------------------------------------------------

    def _diagnose(self, first: ProcessEvent, attempt: _Attempt) -> HolmesError:
        """Returns the cause of a failure, from all reports within a moment of its first sign."""
        is_asked, controller = bool(self._stops), attempt.controller
        self._loop_watch.turn()

        def note(event: ProcessEvent) -> None:
            match event.record:
                case Output(line=line):
                    attempt.logs.write(event.process, line)
                case Measurements(measured=report):
                    self._record(report, attempt)

        cause = find_cause(
            first,
            controller,
            self._processes,
            note,
            sees_exits=self._launcher.sees_exits,
            done=attempt.done,
            is_hurried=lambda: self._stops.is_impatient,
        )
        if paused := self._launchers_fault(cause):
            return PeerError(
                "the launcher",
                paused,
                found=statuses_of(self._processes, controller),
                fix=f"resume from the last checkpoint with the same command, {self._advice}",
            )
        process = self._processes[cause.process]
        self._blamed = None if is_asked else process.node
        found = statuses_of(self._processes, controller, but=process)
        output = attempt.logs.told(process.number)
        fix = f"resume from the last checkpoint with the same command, {self._advice}{output}"
        if not isinstance(cause.record, Failed) and (
            lines := attempt.logs.last_lines(process.number)
        ):
            attempt.recorder.console.print(f"the last lines of {process.name}:")
            for line in lines:
                attempt.recorder.console.print(f"  {line}")
        hangs = attempt.logs.hangs()
        own = hangs.pop(process.number, "")
        others = [f"{self._processes[number].name} {hang}" for number, hang in hangs.items()]
        return error_of(
            cause.record,
            process.full_name,
            last=" and ".join(filter(None, (controller.status(process.number), own))),
            others="; ".join((found, *others)),
            fix=fix,
            fix_alone=f"correct what it says{output}",
        )

    def _launchers_fault(self, cause: ProcessEvent) -> str:
        """Returns what the launcher itself has missed, in words; "" where a process is the cause.

        Whoever is silent for `silence_s` is given up, and it is the launcher that was.
        """
        status = getattr(cause.record, "exit_status", getattr(cause.record, "status", REQUEUE))
        paused_s = self._loop_watch.pause_s(within_s=self._config.silence_s + NEWS_S)
        if status == REQUEUE and paused_s > self._config.silence_s / 2:
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

    def _overdue(self, attempt: _Attempt) -> str | None:
        """Describes what takes too long in a job; None if nothing does."""
        if self._stops.is_overdue:
            asked = signal.Signals(self._stops.first).name
            return (
                f"has not stopped within distributed.stop_timeout_s = "
                f"{self._config.stop_timeout_s:g} s of {asked}; its step is given up"
            )
        if not attempt.progress.is_late():
            return None
        if attempt.up == set(range(len(self._processes))):
            return f"no progress for {attempt.progress.describe_limit()}"
        return (
            f"not ready to train, and no progress within distributed.start_timeout_s = "
            f"{self._config.start_timeout_s:g} s"
        )

    def _ask_for_stacks(self, attempt: _Attempt) -> int:
        """Makes all processes write their stacks into their logs, and report their status.

        Returns the number of the question, for `hold_up`.
        """
        question = attempt.controller.ask(stacks=True)
        for event in self._events(attempt, STACKS_S):
            self._hear(event, attempt)
        return question

    def _hang(self, problem: str, attempt: _Attempt, question: int) -> HolmesError:
        """Returns the error of a job without progress: who holds it up, and the status of all."""
        blamed = hold_up(self._processes, attempt.controller, question)
        nodes = list(dict.fromkeys(process.node for process in blamed))
        self._blamed = None if self._stops else ", ".join(nodes[:NAMES])
        return PeerError(
            list_names([process.full_name for process in blamed]),
            problem,
            found=statuses_of(self._processes, attempt.controller),
            fix="start it again from the last checkpoint with the same command"
            + attempt.logs.told(blamed[0].number, "the stacks of all processes are in their logs,"),
        )
