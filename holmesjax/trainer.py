"""A run in one process: from a job to a trained model in its run folder.

job -> devices -> stages -> compiled programs -> states -> steps -> checkpoints and report
"""

import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

import jax

from holmesjax import job as jobs
from holmesjax.checkpoints import checkpoint, resume, second_reading, writing
from holmesjax.checkpoints.commit_alarm import CommitAlarm
from holmesjax.checkpoints.retention import Retention
from holmesjax.checkpoints.saves import Due, Saves
from holmesjax.data import cluster_paths
from holmesjax.data.patience import patiently
from holmesjax.errors import ConfigError, DamagedError, SpikeError
from holmesjax.helper_process import StoppedError
from holmesjax.hosts import nics
from holmesjax.job import Job
from holmesjax.layers.model_layers import forget
from holmesjax.lease import Lease
from holmesjax.models.own_model import name_of
from holmesjax.parallel import compat
from holmesjax.parallel.mesh import build_meshes
from holmesjax.report import metrics
from holmesjax.report.recorder import Recorder
from holmesjax.runtime import program_cache
from holmesjax.runtime.device_memory import PeakMemory, devices_of
from holmesjax.runtime.kernel_choice import attention_lines, find_unproven, optimizer_lines
from holmesjax.runtime.one_stage import OneStage
from holmesjax.runtime.pipeline import Pipeline, make_runner
from holmesjax.runtime.stage import Stage
from holmesjax.runtime.step_timeout import Progress
from holmesjax.runtime.timeline import Clock
from holmesjax.session import Session, make_stages, read_batches
from holmesjax.yaml_files import as_overrides


class Trainer:
    """One run.

    >>> trainer = Trainer("configs/runs/quickstart.yaml", ["train.steps=2"])
    >>> [stage.cluster for stage in trainer.job.plan.stages]
    ['ib', 'roce']
    """

    def __init__(
        self,
        source: Job | str | Path,
        overrides: Sequence[str] | Mapping[str, Any] = (),
        stream: TextIO | None = None,
        *,
        model: Callable[..., Any] | None = None,
        allow: str | Sequence[str] = (),
        lease: Lease | None = None,
    ):
        """Checks everything and starts nothing.

        Args:
          source: a job, a run file, or the folder of a run that was started before.
          overrides: settings on top of it, `["train.steps=100"]` or `{"train.steps": 100}`.
          stream: where progress is printed; standard output if None.
          model: a model of your own, `model.module` of the run: a function of the section `model`
            that gives layers (`models.own_model`).
          allow: settings that may differ from the checkpoint's, though the run then goes on
            otherwise than if it had never stopped: `"data.corpus"`.
          lease: on the run folder; if None, `train` takes it for as long as it runs.
        """
        if model is not None and isinstance(source, Job):
            problem, fix = "must be left out beside a job", "make the job with model.module"
            raise ConfigError("model", problem, found=name_of(model), fix=fix)
        if model is not None:
            forget()  # another function may have had its name
            overrides = [*as_overrides(overrides), *as_overrides({"model.module": name_of(model)})]
        self.job = (
            source
            if isinstance(source, Job)
            else jobs.load(source, overrides, reads_data="process", env=os.environ)
        )
        self.tasks: list[dict[str, Any]] = []  # of the last step, as `timeline.json` has them
        self.finished = False
        self.progress: Progress | None = None  # while there are steps
        self._stream = sys.stdout if stream is None else stream
        self._stopping, self._allow, self._lease = False, allow, lease
        self._asked_s: float | None = None  # when it was asked to stop
        metrics.check_installed(self.job.config.log)

    @property
    def run_dir(self) -> Path:
        return self.job.run_dir

    def stop(self) -> None:
        """Asks a running `train` to end after its step, with a checkpoint."""
        self._asked_s = self._asked_s or time.monotonic()
        self._stopping = True

    @property
    def history(self) -> list[dict[str, Any]]:
        """The records of all steps of the run, read from its folder."""
        return metrics.read(self.run_dir)

    def train(self) -> list[dict[str, Any]]:
        """Trains as `run` does. Returns the records of all steps of the run."""
        self.run()
        return self.history

    def run(self) -> None:
        """Trains to `train.steps`, from the newest checkpoint in the run folder if there is one.

        Raises HolmesError, such as LeaseError where another process owns the run folder, or
        CheckpointError for a checkpoint of other settings.
        """
        with ExitStack() as stack:
            own = lambda: stack.enter_context(Lease(self.run_dir, say=self._print))
            self._train(self._lease or own())

    def _train(self, lease: Lease) -> None:
        numbers = range(len(self.job.plan.stages))
        self._print(*self.job.describe(self.job.check_pool(os.environ, numbers)))
        find = functools.partial(
            resume.find,
            self.job,
            self._allow,
            self._print,
            owner=lease,
            pause=self._wait_to_train,
        )
        try:
            start = find()
            while True:
                try:
                    self._train_from(start, lease)
                    return
                except DamagedError as error:
                    assert start.checkpoint, "arrays are read of a checkpoint"
                    self._print("another process reads the checkpoint once more")
                    second_reading.confirm(
                        start.checkpoint, error, pause=self._wait_to_train, say=self._print
                    )
                    start = find(known={start.checkpoint.path: error})
                except SpikeError as error:
                    resume.roll_back(self.job, error, self._print, lease, self._wait_to_train)
                    start = find()
        except StoppedError:
            self._print("stopped before a step")

    def _wait_to_train(self, seconds: float) -> None:
        """Waits while nothing is trained; raises StoppedError if a stop is asked for."""
        if self._stopping:
            raise StoppedError
        time.sleep(seconds)

    def _report(self, recorder: Recorder) -> None:
        """Has the report written; a stop that is asked for meanwhile ends that."""
        stop_timeout_s, was_asked_s = self.job.config.distributed.stop_timeout_s, self._asked_s
        ends_s = (was_asked_s or time.monotonic()) + stop_timeout_s

        def pause(seconds: float) -> None:
            if self._asked_s != was_asked_s:
                raise StoppedError
            time.sleep(seconds)

        if line := recorder.write_report(ends_s - time.monotonic(), pause):
            self._print(line)

    def _train_from(self, start: resume.Start, lease: Lease) -> None:
        began_s, config, plan = time.monotonic(), self.job.config, self.job.plan
        done = start.step
        if done >= config.train.steps:
            self.finished = True
            self._print(*start.finished())
            return
        for line in start.describe():
            self._print(line)
        stages = self._make_stages()
        progress = Progress(config.distributed)
        with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
            stack.callback(setattr, self, "progress", None)
            # The paths of the first cluster: all stages are in this process.
            data_here = cluster_paths.here(config.data, self.job.topology.clusters[0].name)
            read = functools.partial(read_batches, dataclasses.replace(config, data=data_here))
            has_trained = jobs.has_trained(self.run_dir)
            reading = pool.submit(patiently, read, has_trained=has_trained)
            compiles_s = time.perf_counter()
            runner = self._make_runner(stages)
            compile_s = time.perf_counter() - compiles_s
            states = (
                checkpoint.restore(start.checkpoint, stages)
                if start.checkpoint
                else runner.init(config.train.seed)
            )
            batches = reading.result()
            data = batches.digests()
            if left_out := batches.data.left_out:
                self._print(f"left out    {left_out}")
            for line in start.check_data(data):
                self._print(line)
            lease.guard(self.job.save)(done)  # nothing is refused any more
            alarm = CommitAlarm(config.checkpoint, done, ["this process"])
            recorder = stack.enter_context(
                Recorder(
                    self.run_dir,
                    config,
                    done_steps=done,
                    peak_step_s=self.job.measured_peak_step_s,
                    stream=self._stream,
                    on_step=lambda record: alarm.step(record["step"]),
                    began_s=began_s,
                    owner=lease,
                )
            )
            saves = self._saves(start, lease, data, recorder.console.print, alarm)

            def is_stopping() -> bool:
                lease.check()
                saves.check()
                return self._stopping

            session = Session(
                config=config,
                runner=runner,
                batches=batches,
                clock=stack.enter_context(Clock(len(plan.stages))),
                writer=stack.enter_context(
                    writing.Writer(self.run_dir, stages, saves.saved, saves.failed, lease.check)
                ),
                tell=recorder.take,
                is_stopping=is_stopping,
                is_saving=Due(config.checkpoint, begun=saves.begun),
                begins=progress.begin,
                profiles=self.run_dir / jobs.PROFILES,
                memory=PeakMemory(devices_of(stages)),
                skipped=start.skipped,
                compile_s=compile_s,
            )
            self.progress = progress
            done = session.run(states, done, start.sequences)
        saves.check(at_end=True)
        self.tasks = recorder.tasks
        self.finished = done >= config.train.steps
        if not self.finished:
            self._print(*self.job.unfinished(done))
        lease.check()
        self._print(*recorder.summary())
        self._report(recorder)

    def _saves(
        self,
        start: resume.Start,
        lease: Lease,
        data: Mapping[str, str],
        say: Callable[[str], None],
        alarm: CommitAlarm,
    ) -> Saves:
        """The checkpoints of the session; what a crash has left behind is removed."""
        config = self.job.config.checkpoint
        retention = Retention(self.run_dir, config, lease.move, say, lease.check)
        retention.after_start()
        commit = functools.partial(start.commit, data=data, owner=lease)
        saves = Saves(self.run_dir, 1, commit, retention, say, alarm.committed)
        alarm.attach(saves.outstanding, say)
        return saves

    def _make_runner(self, stages: Sequence[Stage]) -> Pipeline | OneStage:
        train = self.job.config.train
        sorts = {"evaluates": train.eval_every > 0, "ramps": bool(train.rampup)}
        return make_runner(self.job.plan, stages, **sorts)

    def _make_stages(self) -> list[Stage]:
        """The stages on the devices, and what computes attention there."""
        topology, plan, config = self.job.topology, self.job.plan, self.job.config.run
        kinds, count = topology.device_kinds, topology.num_devices
        compat.use_devices(kinds, count, rehearse=config.rehearse)
        # Before this process uses a device, whose memory a check needs.
        numbers = range(len(plan.stages))
        unproven = find_unproven(self.job, numbers, nics.discover, os.environ, self._print)
        meshes = build_meshes(plan, jax.devices())
        program_cache.use(config.compilation_cache, os.environ, self._print)
        stages = make_stages(self.job, dict(enumerate(meshes)), unproven)
        self._print(*attention_lines(stages), *optimizer_lines(stages))
        return stages

    def _print(self, *lines: str) -> None:
        for line in lines:
            print(line, file=self._stream, flush=True)
