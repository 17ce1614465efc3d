"""Text from the processes of a run's plan, which share the model.

A process runs the layers of its stage. This one starts them, sends all of them the texts, and hears
what comes of these. It needs no JAX, and writes nothing but the key of the processes.
"""

import contextlib
import os
import queue
import secrets
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from pathlib import Path

from holmesjax.checkpoints import newest_whole
from holmesjax.checkpoints.manifest import Checkpoint
from holmesjax.distributed.controller import Controller
from holmesjax.distributed.messages import (
    AllDone,
    Continued,
    Done,
    Exit,
    Lost,
    Output,
    ProcessEvent,
    Stop,
    TextPiece,
    Texts,
    Up,
)
from holmesjax.errors import CheckpointError, DamagedError, HolmesError, PeerError
from holmesjax.job import Job
from holmesjax.plan.processes import make_processes
from holmesjax.runtime.step_timeout import Progress
from holmesjax.transport import connections, key_files
from launch.device_hangs import DeviceHang
from launch.failure_causes import find_cause, is_failure
from launch.failure_messages import error_of, statuses_of
from launch.launchers.launcher import Launcher
from launch.workers import pool_of, start_workers

END_S = 30.0  # for processes to leave after the end
LAST_LINES = 8  # of a process that failed

Show = Callable[[int, str], None]  # the number of a text, and more of it


class GenerationJob:
    """The processes of a run's plan while they generate text.

    Args:
      job: the run.
      launcher: starts its processes.
      warn: takes what is wrong with newer checkpoints, and what a failing process printed.
    """

    def __init__(self, job: Job, launcher: Launcher, warn: Callable[[str], None]):
        self._job = job = job.generating
        self._launcher, self._warn = launcher, warn
        self._config = job.config.distributed
        self._processes = make_processes(job.plan, job.topology, self._config.processes)

    def checkpoint(self, known: Mapping[Path, DamagedError]) -> Checkpoint:
        """The newest whole checkpoint, but for those that are known to be damaged."""
        run_dir = self._job.run_dir
        if found := newest_whole.find(run_dir, self._warn, known=known):
            return found
        fix = f"train it first: python -m launch train {run_dir}"
        raise CheckpointError(str(run_dir), "has no checkpoint", found="none", fix=fix)

    def run(self, found: Checkpoint, texts: Texts, show: Show) -> Continued:
        """Continues the texts with the weights of a checkpoint.

        Raises PeerError if a process is lost, or what a process raised.
        """
        job = self._job
        self._last: dict[int, deque[str]] = {}  # process -> its last lines
        self._hangs: defaultdict[int, DeviceHang] = defaultdict(DeviceHang)
        self._done: set[int] = set()
        self._gone: set[int] = set()
        connections.raise_open_files(len(self._processes) * (1 + self._launcher.files_each))
        pool = pool_of(job, self._launcher, self._processes, os.environ)
        key_file = job.run_dir / f"generate_{secrets.token_hex(4)}.key"
        progress = Progress(self._config)
        try:
            with Controller(
                self._processes,
                address=self._launcher.address,
                port=self._launcher.port,
                about=job.about(0),
                resume=found.step,
                key=key_files.make_key_file(key_file),
                silence_s=self._config.silence_s,
                is_saving=lambda step: False,
                progress=progress,
            ) as controller:
                try:
                    start_workers(
                        self._launcher,
                        self._processes,
                        controller,
                        run_dir=job.run_dir,
                        key_file=key_file,
                        variables=job.process_environment(os.environ, pool),
                        options=["--generates"],
                    )
                    return self._hear_all(controller, progress, texts, show)
                finally:
                    self._launcher.end()
        finally:
            with contextlib.suppress(OSError):  # what the processes said is worth more
                key_file.unlink(missing_ok=True)

    def _hear_all(
        self, controller: Controller, progress: Progress, texts: Texts, show: Show
    ) -> Continued:
        """Takes events until all processes have ended."""
        continued: Continued | None = None
        end_s: float | None = None
        while len(self._gone) < len(self._processes):
            if end_s is None and progress.is_late():
                raise self._late(controller, progress)
            if end_s is not None and time.monotonic() > end_s:
                break
            try:
                event = controller.events.get(timeout=0.2)
            except queue.Empty:
                continue
            if is_failure(event, self._done) or isinstance(event.record, Stop):
                raise self._diagnose(event, controller)
            match event.record:
                case Up():
                    controller.send(event.process, texts)
                case TextPiece(row=row, text=text):
                    show(row, text)
                case Continued():
                    continued = event.record
                case _:
                    self._note(event)
            if len(self._done) == len(self._processes) and end_s is None:
                controller.broadcast(AllDone())
                end_s = time.monotonic() + END_S
        assert continued is not None, "the process that leads the last stage has told it"
        return continued

    def _note(self, event: ProcessEvent) -> None:
        match event.record:
            case Done():
                self._done.add(event.process)
            case Output(line=line) if line.strip():
                self._hangs[event.process].read(line)
                self._last.setdefault(event.process, deque(maxlen=LAST_LINES)).append(line)
            case Exit():
                self._gone.add(event.process)
            case Lost() if not self._launcher.sees_exits:
                self._gone.add(event.process)

    def _diagnose(self, first: ProcessEvent, controller: Controller) -> HolmesError:
        """Returns the cause of a failure, from all reports within a moment of its first sign."""
        if isinstance(first.record, Stop):
            name, fix = self._processes[first.process].name, "run it again"
            problem, found = "was asked to stop", f"signal {first.record.signal}"
            return PeerError(name, problem, found=found, fix=fix)
        cause = find_cause(
            first,
            controller,
            self._processes,
            self._note,
            sees_exits=self._launcher.sees_exits,
            done=self._done,
        )
        process = self._processes[cause.process]
        for line in self._last.get(cause.process, ()):
            self._warn(f"{process.name} | {line}")
        return error_of(
            cause.record,
            process.full_name,
            last=" and ".join(
                filter(None, (controller.status(cause.process), str(self._hangs[cause.process])))
            ),
            others=statuses_of(self._processes, controller, but=process),
            fix="run it again; the last lines of the process are above",
            fix_alone="see its last lines above",
        )

    def _late(self, controller: Controller, progress: Progress) -> HolmesError:
        return PeerError(
            "the processes",
            f"no progress for {progress.describe_limit()}",
            found=statuses_of(self._processes, controller),
            fix="run it again, or raise distributed.start_timeout_s",
        )
