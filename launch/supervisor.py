"""Runs a job from start to end: attempt after attempt, with the lease on its run folder.

The supervisor does not import JAX: it holds no device, and starts at once.
"""

import dataclasses
import itertools
import os
import time
from collections.abc import Sequence
from types import MappingProxyType

from holmesjax import job_description, job_files
from holmesjax.checkpoints import committed, manifest, mirror, newest_whole, resume, second_reading
from holmesjax.errors import (
    ConfigError,
    CrashError,
    DamagedError,
    FatalError,
    GoneError,
    HolmesError,
    PeerError,
    SpikeError,
    may_pass,
    of_system,
)
from holmesjax.hosts import computing
from holmesjax.islands import rejoining
from holmesjax.job import Job
from holmesjax.liveness import lease
from holmesjax.liveness.lease import Lease
from holmesjax.plan.processes import make_processes
from holmesjax.planner import island_alone
from holmesjax.transport import connections
from launch.attempt import Attempt, Watch, say
from launch.launchers.launcher import Launcher, leaving
from launch.restarts import DEFAULT, Restarts
from launch.stop_requests import StopRequests
from launch.workers import pool_of


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
        if job.config.distributed.relay is not None and key_file is None:
            problem = "needs a key of the job that stays the same, from which the relay's was made"
            fix = "use --launcher external, with HOLMES_KEY_FILE set (docs/several_sites.md)"
            raise ConfigError("distributed.relay", problem, found="a new key each time", fix=fix)
        self._given_key_file, self._watch = key_file, watch
        names = resume.names_of(allow)
        self._allow = [name for name in names if not computing.is_fact(name)]
        self._unlike = [name for name in names if computing.is_fact(name)]
        self._config = job.config.distributed
        self._processes = make_processes(job.plan, job.topology, self._config.processes)
        self._pool = pool_of(job, launcher, self._processes, os.environ)
        self._stops = StopRequests(self._config.stop_timeout_s, self._stop)
        self._attempt: Attempt | None = None  # the last one, if it has begun to run
        self._has_worked = False  # whether an attempt of this launcher has made steps

    def run(self) -> int:
        """Trains to the end, or until it is asked to stop.

        Returns 0, or REQUEUE if something other than Ctrl-C asked it to stop.

        Raises LeaseError where another process owns the run folder; PeerError, or what a process
        raised, if the last attempt failed; FatalError if no restart is left.
        """
        connections.raise_open_files(len(self._processes) * (1 + self._launcher.files_each))
        with Lease(self._job.run_dir, on_loss=lease.end_process) as owner:
            return self._run_owned(owner)

    def _run_owned(self, owner: Lease) -> int:
        job = self._job
        island_alone.refuse_no_island(job.config, job.topology)
        mirror.open_run(job.config.run.dir, owner, say)
        print(*job_description.describe(job, self._pool), *self._describe(), sep="\n", flush=True)
        if self._pool:
            self._pool.refuse_too_small(job.plan.stages, job.topology)
        with self._stops:
            return self._run(owner)

    def _run(self, owner: Lease) -> int:
        job = self._job
        copy = mirror.of(job.run_dir, say)
        restarts = Restarts(job.run_dir, self._max_restarts, say, copy)
        owner.guard(committed.adopt)(job.run_dir, restarts.last_step)
        for restart in itertools.count():
            step = self._done()
            if restarts.is_spent(step):
                raise owner.guard(restarts.give_up)(step)
            if restarts.failed(step):
                self._pause(restarts, step)
            elif restart:
                print(f"starting again; {_newest(step)}", flush=True)
            if self._stops:
                print(*job.unfinished(step), sep="\n", flush=True)
                return self._stops.exit_status
            try:
                return self._recorded_attempt(owner, restart, restarts, step)
            except DamagedError as error:
                self._set_aside(owner, error)
            except SpikeError as error:
                self._roll_back(owner, error)
            except PeerError as error:
                if self._stops or not (self._starts_again or restarts.is_spent(self._done())):
                    raise
                print(f"error: {error}", flush=True)
        raise AssertionError("the last attempt returns or raises")

    def _set_aside(self, owner: Lease, error: DamagedError) -> None:
        """Sets a damaged checkpoint aside, so that the next start reads an older one.

        Raises DamagedError if none is left, and PeerError where somebody else starts the processes.
        """
        self._repair(owner)
        steps = error.steps if isinstance(error, GoneError) else [self._read_checkpoint().step]
        folders = [manifest.folder_of(self._job.run_dir, step) for step in steps]
        self._find(owner, dict.fromkeys(folders, error))
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

    def _roll_back(self, owner: Lease, error: SpikeError) -> None:
        """Lets the next start go back to the newest checkpoint, and leave out the data since.

        Raises FatalError if it did so too often, and PeerError where somebody else starts the
        processes.
        """
        self._repair(owner)
        with self._stops.at_once(finishes=True):  # or the next start meets the same data again
            resume.roll_back(self._job, error, say, owner, self._wait_to_see)
        if not self._can_start:
            fix = "start it again with the same command: it goes back to its last checkpoint"
            raise PeerError(error.where, error.problem, found=error.found, fix=fix)

    def _pause(self, restarts: Restarts, step: int) -> None:
        """Waits before a restart that follows one without a new step; a signal ends it at once."""
        pause_s = restarts.pause_s(step)
        count = f"restart {len(restarts.failed(step))} of {restarts.limit} without a new step"
        print(f"starting again in {pause_s:g} s, {count}; {_newest(step)}", flush=True)
        deadline_s = time.monotonic() + pause_s
        while time.monotonic() < deadline_s and not self._stops:
            time.sleep(min(0.1, pause_s))

    def _done(self) -> int:
        """Returns the step of the newest checkpoint."""
        return manifest.newest_step(self._job.run_dir)

    def _recorded_attempt(self, owner: Lease, restart: int, restarts: Restarts, step: int) -> int:
        owner.guard(restarts.begin)(step)
        if self._attempt:
            self._has_worked |= self._attempt.has_trained
        self._repair(owner)
        self._attempt = None
        status, cause, exception, is_meant = FatalError.exit_status, "", "", False
        try:
            try:
                status = self._confirmed_attempt(owner, restart)
            except OSError as error:  # of a disk or a file server, which may be back for the next
                raise of_system(error) from None
        except SystemExit as end:  # asked to leave at once
            status, is_meant = int(end.code or 0), True
            raise
        except HolmesError as error:
            status, cause, attempt = error.exit_status, str(error), self._attempt
            is_meant = isinstance(error, SpikeError)
            if isinstance(error, CrashError) and not (attempt and attempt.has_trained):
                exception = error.exception
            raise
        finally:
            owner.check(at_once=True)  # a process of the job may have seen a loss first
            blamed = self._attempt.diagnosis.blamed if self._attempt else None
            stopped = is_meant or (bool(self._stops) and blamed is None)
            restarts.end(
                status,
                stopped=stopped,
                node=blamed or "",
                cause=cause,
                exception=exception,
            )
        return status

    def _repair(self, owner: Lease) -> None:
        """Writes the record of commits anew where somebody has cut it since the last attempt."""
        if self._attempt:
            owner.guard(committed.repair)(self._job.run_dir, self._attempt.committed)

    def _confirmed_attempt(self, owner: Lease, restart: int) -> int:
        """Lets another process read what one has found damaged; PeerError if that can read it."""
        try:
            return self._start_and_run(owner, restart)
        except GoneError:
            raise
        except DamagedError as error:
            found = self._read_checkpoint()
            say("another process reads the checkpoint once more")
            with self._stops.at_once():
                second_reading.confirm(found, error, pause=self._wait_to_see, say=say)
            raise

    def _read_checkpoint(self) -> manifest.Checkpoint:
        """The checkpoint that the processes have read."""
        found = self._attempt.start.checkpoint if self._attempt else None
        assert found, "arrays are read of a checkpoint"
        return found

    def _start_and_run(self, owner: Lease, restart: int) -> int:
        """Runs an attempt from the newest checkpoint on, unless all steps are done."""
        job = self._job
        start = self._find(owner)
        if (going := rejoining.go_on(start, say)) is None:
            return 0
        start = going
        for line in start.describe():
            say(line)
        owner.check()
        unsave = owner.guard(job_files.save(job, start.step))  # the processes read it
        variables = job.process_environment(os.environ, self._pool)
        job_files.save_environment(job, variables)
        # Whoever starts the launcher again, as a scheduler does, has changed no setting.
        has_worked = self._has_worked or bool(start.step and not start.changes)
        try:
            with self._stops.at_once():  # a store that has a copy may be away
                self._attempt = Attempt(
                    start,
                    restart,
                    self._launcher,
                    self._processes,
                    lease=owner,
                    stops=self._stops,
                    unsave=unsave,
                    variables=variables,
                    key_file=self._given_key_file,
                    watch=self._watch,
                    unlike=self._unlike,
                    advice=self._advice,
                    has_worked=has_worked,
                )
        except HolmesError as error:  # a port that is taken, or a key that is not mounted yet
            raise may_pass(error) if has_worked else error from None
        return self._attempt.run()

    def _find(
        self, owner: Lease, known: newest_whole.Damaged = MappingProxyType({})
    ) -> resume.Start:
        """Finds where the job goes on (`resume.find`), and may fetch what another store has."""
        with self._stops.at_once():
            return resume.find(
                dataclasses.replace(self._job),  # its `own_sources` are those of this start
                self._allow,
                say,
                known,
                owner=owner,
                pause=self._wait_to_see,
                fetches=True,
            )

    def _describe(self) -> list[str]:
        names = ", ".join(process.name for process in self._processes)
        return [f"processes   {len(self._processes)}: {names}"]

    def _stop(self) -> None:
        if self._attempt is not None:
            self._attempt.stop()


def _newest(step: int) -> str:
    """Returns what is known before a start looks whether the newest checkpoint is whole."""
    return f"the newest checkpoint is after step {step}" if step else "no step is saved yet"
