"""One attempt of a job: one start of all its processes, until they have ended.

An attempt starts the processes, lets them find each other, records what they report, and waits for
their end. When one process is lost, it ends all. One paragraph names the lost process, and says
what the others waited for.
"""

import contextlib
import functools
import queue
import shlex
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from holmesjax.checkpoints import mirror, resume, retention, stores
from holmesjax.checkpoints.retention import Retention
from holmesjax.checkpoints.scrub import Scrub
from holmesjax.distributed.controller import NAME_AT_RELAY, Controller
from holmesjax.distributed.data_agreement import DataAgreement
from holmesjax.distributed.messages import (
    AllDone,
    Compiled,
    Done,
    Exit,
    Files,
    Go,
    Lost,
    Measurements,
    Met,
    Output,
    ProcessEvent,
    Refused,
    Saved,
    Stop,
    Unsaved,
    Up,
    Warned,
)
from holmesjax.distributed.store_hub import StoreHub
from holmesjax.errors import (
    CheckpointError,
    DamagedError,
    DataError,
    HolmesError,
    LostDataError,
    LostLeaseError,
    may_pass,
)
from holmesjax.files import places
from holmesjax.hosts import computing
from holmesjax.islands.agreement import Agreement, Digests
from holmesjax.liveness.lease import Lease
from holmesjax.plan.processes import Process, node_processes
from holmesjax.report.process_step import ProcessStep
from holmesjax.report.recorder import Recorder
from holmesjax.runtime.step_timeout import Progress
from holmesjax.transport import addresses, key_files
from holmesjax.transport.relayed import RelayPlace
from launch.failure_causes import LOOK_S, events_of, is_failure
from launch.failure_diagnosis import FailureDiagnosis
from launch.job_saves import JobSaves
from launch.launchers.launcher import Launcher, leaving
from launch.loop_watch import LoopWatch
from launch.process_logs import ProcessLogs, is_noise
from launch.stop_requests import StopRequests
from launch.workers import start_stores, start_workers

KEY = "job.key"
STORES_S = 60.0  # for processes to come that only have parts of a checkpoint
MEMORY_S = 15.0  # for a partner's memory, which calls beside its process
STACKS_S = 3.0  # for the stacks of a job without progress to come
END_S = 30.0  # for processes to leave after the end
LEAST_LEFT_S = 5.0  # that a job has to end in, however late it was asked to
DELAY_S = 0.5  # of the output on the console, so that the last words of a failing job stay in logs

say = functools.partial(print, flush=True)


class Watch(Protocol):
    """Watches a job while it trains."""

    def step(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        """Takes the record of a step that is done, and returns additions to it."""

    def end(self) -> None:
        """Called when all processes have ended, before the report is written."""


class Attempt:
    """One start of all processes of a job. `run` starts them, and returns when they have ended.

    Args:
      start: where the job goes on.
      restart: how many attempts there were before.
      launcher: starts the processes.
      processes: all of the plan.
      lease: on the run folder.
      stops: the signals that the supervisor hears.
      unsave: takes back what the start wrote into the run folder, for a job that is refused.
      variables: of the environment of all processes.
      key_file: with the key of the job; None: the attempt has its own, in the run folder.
      watch: looks on.
      unlike: facts in which processes may differ.
      advice: how the job is started again, after a comma.
      has_worked: whether an attempt before it has made steps, and no setting has changed since.
    """

    def __init__(
        self,
        start: resume.Start,
        restart: int,
        launcher: Launcher,
        processes: Sequence[Process],
        *,
        lease: Lease,
        stops: StopRequests,
        unsave: Callable[[], None],
        variables: Mapping[str, str],
        key_file: str | None,
        watch: Watch | None,
        unlike: Sequence[str],
        advice: str,
        has_worked: bool,
    ):
        self.start, self._restart, self._has_worked = start, restart, has_worked
        self._job, self._launcher, self._processes = start.job, launcher, processes
        self._config = self._job.config.distributed
        self._lease, self._stops, self._unsave = lease, stops, unsave
        self._variables, self._given_key_file, self._watch = variables, key_file, watch
        self._unlike = unlike
        self._key_file = Path(key_file or self._job.run_dir / KEY)
        limit_s, setting = self._config.start_timeout_s, "distributed.start_timeout_s"
        self._loop_watch = LoopWatch(limit_s, setting, lease.release)
        self.has_trained = False  # a step
        self.up: set[int] = set()  # processes
        self.committed = start.step  # the newest checkpoint
        self.done: dict[int, int] = {}  # process -> steps
        self.exited: dict[int, int] = {}  # process -> status
        self.output: deque[tuple[float, str]] = deque()  # when it came, and the line
        self._leave_by_s = 0.0  # when the launcher is to be gone, once its loop is over
        self._is_over = False  # whether no step follows, though the run may have more
        self._is_ending = False  # whether a signal comes too late to be told to processes
        self._mirror = mirror.of(self._job.run_dir, say)
        self._retention(say).after_start()
        self._logs = ProcessLogs(self._job.run_dir, processes, lease.move)
        self._progress = self._open_progress()
        self._data: dict[str, str] = {}  # digests, once all agree: before there is any commit
        with ExitStack() as stack:
            self._hub = self._open_hub()
            start_name = stores.start_name(self._hub.id, lease.epoch, restart)
            self._hub.start = start_name
            stack.callback(self._hub.close)
            if self._mirror:
                stack.callback(self._mirror.close)
                self._mirror.begin(start_name, retention.set_aside(self._job.run_dir))
            stack.callback(self._remove_key)
            self._controller = stack.enter_context(self._open_controller())
            self._recorder = stack.enter_context(self._open_recorder())
            print_line, mb_per_s = self._recorder.console.print, self._job.config.checkpoint.scrub
            self._scrub = stack.enter_context(Scrub(self._job.run_dir, mb_per_s, print_line))
            self._hub.on_damage = self._scrub.damaged
            self._saves = stack.enter_context(
                JobSaves(
                    start,
                    start_name,
                    processes,
                    lease=lease,
                    mirror=self._mirror,
                    hub=self._hub,
                    retention=self._retention(print_line),
                    data=self._data,
                    committed=(self._note_commit, self._hub.committed, self._scrub.committed),
                    say=print_line,
                )
            )
            self._opened = stack.pop_all()
        self._agreement = DataAgreement(processes, self._controller.send)
        self._meetings = Agreement(self._job.plan.island_of)
        self.diagnosis = self._diagnosis_with(advice)

    def _diagnosis_with(self, advice: str) -> FailureDiagnosis:
        """Says why the job ends before it is done."""
        return FailureDiagnosis(
            self._processes,
            self._controller,
            self._logs,
            stops=self._stops,
            loop_watch=self._loop_watch,
            sees_exits=self._launcher.sees_exits,
            silence_s=self._config.silence_s,
            advice=advice,
            say=self._recorder.console.print,
        )

    def _open_hub(self) -> StoreHub:
        """Knows the run folders that are not the launcher's."""
        checkpoint = self.start.checkpoint
        written = checkpoint.manifest.get("stores", {}) if checkpoint else {}
        own = [where["node"] for where in written.values() if not places.is_url(where["folder"])]
        nodes = set(own) - {p.node for p in self._processes}
        self._keepers = [p for p in node_processes(self._job.topology) if p.node in nodes]
        wait_s = MEMORY_S if self._job.config.checkpoint.partner else 0.0
        wait_s = STORES_S if self._keepers else wait_s
        if not self._launcher.sees_exits:  # somebody else starts them
            wait_s = self._config.start_timeout_s / 2
        return StoreHub(self._job.run_dir, self._processes, say, wait_s)

    def _open_controller(self) -> Controller:
        """Listens for the processes."""
        read_or_make = key_files.read_key_file if self._given_key_file else key_files.make_key_file
        return Controller(
            self._processes,
            address=self._launcher.address,
            port=self._launcher.port,
            about=self._job.about(self._restart),
            resume=self.start.step,
            key=read_or_make(self._key_file),
            silence_s=self._config.silence_s,
            is_saving=lambda step: self._saves.is_due(step),
            progress=self._progress,
            allow=computing.permitted(self._job.run_dir, self._unlike),
            hub=self._hub,
            checkpoint=self.start.checkpoint,
            skipped=self.start.skipped,
            relay=RelayPlace.of_setting(self._config.relay),
        )

    def _open_progress(self) -> Progress:
        """Notes what the processes do."""
        return Progress(self._config, self._job.config.train, self._job.plan.batch_shares)

    def _open_recorder(self) -> Recorder:
        return Recorder(
            self._job.run_dir,
            self._job.config,
            done_steps=self.start.step,
            num_processes=len(self._processes),
            peak_step_s=self._job.measured_peak_step_s,
            on_step=self._watch_step,
            owner=self._lease,
            shares=self._job.plan.batch_shares,
        )

    def stop(self) -> None:
        """Tells the processes to stop after their step, as long as they run."""
        if not self._is_ending:
            self._controller.stop()

    def run(self) -> int:
        """Starts the processes, and hears them until they have ended; the exit status of the job.

        Raises HolmesError if the attempt fails, and SystemExit if it is asked to leave at once.
        """
        with ExitStack() as watched:  # the loop and what follows it, until the stack is closed
            with self._opened:
                done = self._train(watched)
            return self._finish(done)

    def _train(self, watched: ExitStack) -> int:
        """Starts the processes, and ends them; the number of steps done."""
        try:
            if (relay := RelayPlace.of_setting(self._config.relay)) is not None:
                place = addresses.show(*relay.of(NAME_AT_RELAY))
                print(f"relay       HOLMES_CONTROLLER={place} where nobody can call this machine")
            start_workers(
                self._launcher,
                self._processes,
                self._controller,
                run_dir=self._job.run_dir,
                key_file=self._key_file,
                variables=self._variables,
                restart=self._restart,
                store=self._hub.id,
                look=self._leave_unsaved,
            )
            start_stores(
                self._launcher,
                self._keepers,
                self._controller.address,
                run_dir=self._job.run_dir,
                key_file=self._key_file,
                events=queue.SimpleQueue(),
            )
            watched.enter_context(self._loop_watch)
            done = self._supervise()
            is_whole = self._is_over or done >= self._job.config.train.steps
            self._begin_to_leave(0 if is_whole else self._stops.exit_status)
        except SystemExit as end:  # asked to leave at once
            self._begin_to_leave(int(end.code or 0))
            raise
        except HolmesError as raised:
            error = self._passing(raised)
            self._begin_to_leave(error.exit_status)
            is_final = error.exit_status == HolmesError.exit_status
            if is_final and not isinstance(error, DamagedError):
                self._controller.refuse(error)  # whoever started them, none is to start again
                self._unsave()
            raise error from None
        finally:
            self._end_workers()
        return done

    def _end_workers(self) -> None:
        self._is_ending = True
        self._launcher.end()
        if self._watch:
            self._watch.end()
        self._remove_key()

    def _remove_key(self) -> None:
        if self._given_key_file is None:
            with contextlib.suppress(OSError, LostLeaseError):  # the end says more
                self._lease.guard(self._key_file.unlink)(missing_ok=True)

    def _finish(self, done: int) -> int:
        """Tells what a session has done, which has not failed; returns its exit status."""
        for line in self._recorder.summary():
            say(line)
        self._report()
        if done < self._job.config.train.steps and not self._is_over:
            print(*self._job.unfinished(done), sep="\n", flush=True)
            return self._stops.exit_status
        return 0

    def _begin_to_leave(self, status: int) -> None:
        """Limits what follows on the loop: a job that is to end is gone in time."""
        limit_s = max(min(self._config.stop_timeout_s, self._stops.left_s), LEAST_LEFT_S)
        self._leave_by_s = time.monotonic() + limit_s
        self._loop_watch.leave(limit_s, "distributed.stop_timeout_s", status)

    def _report(self) -> None:
        """Has the report written; a signal that comes meanwhile gives it up."""
        before, limit_s = self._stops.count, self._leave_by_s - time.monotonic()
        if line := self._recorder.write_report(limit_s, lambda: self._stops.count > before):
            say(line)

    def _note_commit(self, step: int) -> None:
        self.committed = step

    def _retention(self, tell: Callable[[str], None]) -> Retention:
        """Removes the checkpoints that need not stay."""
        checkpoint = self._job.config.checkpoint
        lease = self._lease
        return Retention(self._job.run_dir, checkpoint, lease.move, tell, lease.check, self._mirror)

    def _watch_step(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Returns additions to the record of a step that is done."""
        found = dict(self._watch.step(record)) if self._watch else {}
        return found | self._saves.step(record["step"]) | self._scrub.step()

    def _leave_unsaved(self) -> None:
        """Raises SystemExit if a signal came before anything was trained that could be saved."""
        if self._stops and not self.up:
            raise SystemExit(leaving(self._stops.first))

    def _supervise(self) -> int:
        """Takes events until all processes have ended; returns the number of steps done."""
        print_line = self._recorder.console.print
        end_s: float | None = None
        while len(self.exited) < len(self._processes):
            self._loop_watch.turn()
            self._hub.raise_problem()
            self._saves.check()
            self._leave_unsaved()
            if self._stops.is_impatient:
                raise SystemExit(leaving(self._stops.last))
            if end_s is not None and time.monotonic() > end_s:
                break
            is_done = len(self.done) == len(self._processes) and end_s is None
            waits = is_done and self._waits_for_stores()
            if waits:
                self._progress.note()  # nobody trains
            elif not is_done and end_s is None and (problem := self._overdue()):
                question = self._ask_for_stacks()
                if self._overdue():
                    raise self.diagnosis.of_hang(problem, question)
                print_line("warning: a step was late, and is done now")
            self._agreement.check()
            while self.output and time.monotonic() > self.output[0][0] + DELAY_S:
                print_line(self.output.popleft()[1])
            if is_done and not waits:
                self._controller.broadcast(AllDone())
                end_s = time.monotonic() + min(END_S, max(self._stops.left_s, LEAST_LEFT_S))
            with contextlib.suppress(queue.Empty):
                self._hear(self._controller.events.get(timeout=0.2))
        for _, line in self.output:
            print_line(line)
        self._saves.end()
        steps = set(self.done.values())
        assert len(steps) == 1, f"the processes ended after different steps: {self.done}"
        return steps.pop()

    def _waits_for_stores(self) -> bool:
        """Whether the last checkpoint is still committed, or stores are told of it.

        Raises PeerError if its commit takes longer than a job may that is asked to stop.
        """
        if not self._saves.is_busy:
            return not self._stops.is_overdue and self._hub.settles()
        if self._stops.is_overdue:
            raise self._saves.late(self._stop_limit)
        return True

    def _hear(self, event: ProcessEvent) -> None:
        """Takes an event. Raises HolmesError if it is the end of the job."""
        if is_failure(event, self.done):
            raise self.diagnosis.of_failure(event, self.done, self._note)
        if isinstance(event.record, Compiled | Files):
            self._agree(event.process, event.record)
        else:
            self._take(event)

    def _take(self, event: ProcessEvent) -> None:
        number, console = event.process, self._recorder.console
        name = self._processes[number].name
        match event.record:
            case Up():
                self.up.add(number)
            case Measurements(measured=report):
                self._record(report)
            case Met(step=step, weights=weights, owned=owned):
                stage = self._processes[number].stage
                self._meetings.take(step, stage, Digests(weights, owned))
            case Saved() as saved:
                self._saves.saved(number, saved)
            case Unsaved() as unsaved:
                self._saves.unsaved(number, unsaved)
            case Done(step=step, is_over=is_over):
                self.done[number] = step
                self._is_over = is_over
            case Stop(signal=signal_number):
                signalled = signal.Signals(signal_number)
                console.print(f"{name} was sent {signalled.name}")
                self._stops.add(signalled)
            case Exit(status=status):
                self.exited[number] = status
            case Output(line=line):
                self._logs.write(number, line)
                if not is_noise(line):
                    self.output.append((time.monotonic(), f"{name} | {line}"))
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
                    self.exited[number] = 0
            case _:
                raise AssertionError(f"what is {event}?")

    def _note(self, event: ProcessEvent) -> None:
        """Takes what is still told while the cause of a failure is looked for."""
        match event.record:
            case Output(line=line):
                self._logs.write(event.process, line)
            case Measurements(measured=report):
                self._record(report)

    def _record(self, report: ProcessStep) -> None:
        self._recorder.take(report)
        self.has_trained = True

    def _agree(self, number: int, record: Compiled | Files) -> None:
        """Lets all processes go once all have read the same data; says what none of them reads.

        Raises LostDataError for data that are not those of the run so far, DataError at its begin.
        """
        if isinstance(record, Compiled) and record.left_out and number == 0:
            print(f"left out    {record.left_out}", flush=True)
        try:
            data = self._agreement.take(number, record)
            lines = self.start.check_data(data) if data else []
        except CheckpointError:  # the code divides the data otherwise: every start meets it
            self._has_worked = False
            raise
        except DataError as error:
            if not self.start.step:
                raise
            self._unsave()
            raise LostDataError.of(error) from None
        if data:
            print("".join(f"{line}\n" for line in lines), end="", flush=True)
            self._data.update(data)
            self._unsave = lambda: None  # the run goes on with what was saved
            self._controller.broadcast(Go(epoch=self._lease.epoch))

    def _events(self, for_s: float) -> Iterator[ProcessEvent]:
        """Yields the events of the next seconds; output goes to the logs alone."""
        deadline_s = time.monotonic() + for_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            self._loop_watch.turn()
            for event in events_of(self._controller, min(left_s, LOOK_S)):
                if isinstance(event.record, Output):
                    self._logs.write(event.process, event.record.line)
                else:
                    yield event

    def _passing(self, error: HolmesError) -> HolmesError:
        """Returns a mistake at a start as a fault that may pass, if such starts have worked.

        A node may have lost a device since, say, or not have mounted a file system yet, or be
        another one than before.
        """
        is_new = self._has_worked and not self.has_trained and not self.diagnosis.is_final
        return may_pass(error) if is_new else error

    @property
    def _stop_limit(self) -> str:
        asked = signal.Signals(self._stops.first).name
        return f"distributed.stop_timeout_s = {self._config.stop_timeout_s:g} s of {asked}"

    def _overdue(self) -> str | None:
        """Describes what takes too long in a job; None if nothing does."""
        if self._stops.is_overdue:
            return f"has not stopped within {self._stop_limit}; its step is given up"
        if not self._progress.is_late():
            return None
        if self.up == set(range(len(self._processes))):
            return f"no progress for {self._progress.describe_limit()}"
        return (
            f"not ready to train, and no progress within distributed.start_timeout_s = "
            f"{self._config.start_timeout_s:g} s"
        )

    def _ask_for_stacks(self) -> int:
        """Makes all processes write their stacks into their logs, and report their status.

        Returns the number of the question, for `hold_up`.
        """
        question = self._controller.ask(stacks=True)
        for event in self._events(STACKS_S):
            self._hear(event)
        return question
