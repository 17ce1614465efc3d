"""A run in one process: from a job to a trained model in its run folder.

job -> devices -> stages -> compiled programs -> states -> steps -> checkpoints and report
"""

import functools
import inspect
import os
import socket
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

import jax
from jax.sharding import Mesh

from holmesjax import job as jobs, job_description, job_files, xla_flags
from holmesjax.callbacks import Callback, Callbacks
from holmesjax.checkpoints import (
    committing,
    fetching,
    manifest,
    mirror,
    resume,
    retention,
    second_reading,
    stores,
    writing,
)
from holmesjax.checkpoints.commit_alarm import CommitAlarm
from holmesjax.checkpoints.committing import Saves
from holmesjax.checkpoints.manifest import Checkpoint
from holmesjax.checkpoints.mirror import Mirror
from holmesjax.checkpoints.retention import Retention
from holmesjax.checkpoints.save_schedule import SaveSchedule
from holmesjax.checkpoints.scrub import Scrub
from holmesjax.errors import ConfigError, DamagedError, HolmesError, SpikeError, of_system
from holmesjax.files import places
from holmesjax.files.yaml_files import as_overrides
from holmesjax.hosts import nics
from holmesjax.islands import rejoining
from holmesjax.islands.apart import IslandApart
from holmesjax.job import Job
from holmesjax.liveness.helper_process import StoppedError
from holmesjax.liveness.lease import Lease
from holmesjax.models.own_model import name_of
from holmesjax.optimizers.optimizer import State
from holmesjax.parallel import platforms
from holmesjax.parallel.mesh import build_meshes
from holmesjax.planner import island_alone
from holmesjax.report import metric_sinks, metrics
from holmesjax.report.recorder import Recorder
from holmesjax.report.shown_plan import ShownPlan
from holmesjax.runtime import program_cache, stage_arrays
from holmesjax.runtime.chunk import Chunk, Tree
from holmesjax.runtime.kernel_choice import attention_lines, find_unproven, optimizer_lines
from holmesjax.runtime.stage_arrays import StageArrays
from holmesjax.runtime.step_timeout import Progress
from holmesjax.training_loop import Runner, TrainingLoop
from holmesjax.training_setup import TrainingSetup, make_chunks

Record = dict[str, Any]  # of a step, as `metrics.jsonl` has it


class Trainer:
    """One run. `train` trains to the end; `step` makes one step, for a loop of one's own.

    From the start of the run until it is closed, `stages` has the arrays of each stage, and
    `params`, `opt_state` and `shardings` those of all stages. They are the arrays that are trained,
    and no copies: they are there to be read between steps, and a later step takes their memory.
    After the last step the final arrays stay until `close`.

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
        callbacks: Sequence[Callback] = (),
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
          callbacks: called between steps, in this order.
          lease: on the run folder; if None, `train` takes it for as long as it runs.
        """
        self._callbacks = Callbacks(self, callbacks)
        self._stream = sys.stdout if stream is None else stream
        if not hasattr(self._stream, "write"):
            problem, fix = "must be an open file", "write stream=open(path, 'w'), or leave it out"
            raise ConfigError("stream", problem, found=repr(stream), fix=fix)
        if model is not None and isinstance(source, Job):
            problem, fix = "must be left out beside a job", "make the job with model.module"
            raise ConfigError("model", problem, found=name_of(model), fix=fix)
        if model is not None:
            overrides = [*as_overrides(overrides), *as_overrides({"model.module": name_of(model)})]
        self.job = (
            source
            if isinstance(source, Job)
            else jobs.load(source, overrides, reads_data="process", env=os.environ)
        )
        self.tasks: list[dict[str, Any]] = []  # of the last step, as `timeline.json` has them
        self.finished = False
        self.progress: Progress | None = None  # while there are steps
        self._stopping, self._allow, self._lease = False, allow, lease
        self._asked_s: float | None = None  # when it was asked to stop
        self._going: Generator[Record | None] | None = None  # the run, while it goes on
        self._is_stepwise = False  # whether somebody asks for each step
        self._loop: TrainingLoop | None = None  # while there are arrays
        self._chunks: Sequence[Chunk] = ()  # of the loop
        metric_sinks.check_installed(self.job.config.log)

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

    @functools.cached_property
    def plan(self) -> ShownPlan:
        """The plan to be printed, as `launch plan` prints it; `job.plan` has its numbers.

        If the run sets a part of the plan, the best plan without that is looked for, once.
        """
        return ShownPlan(self.job.compared(os.environ))

    @property
    def stages(self) -> tuple[StageArrays, ...]:
        """The cluster, layers, mesh and arrays of each stage.

        Raises HolmesError where there are none: before the start, or after `close`.
        """
        return stage_arrays.of(self._chunks, self._loop_now().states)

    def _loop_now(self) -> TrainingLoop:
        if self._loop is None:
            raise HolmesError(
                "Trainer",
                "has no arrays now",
                found="a run whose steps were done before" if self.finished else "no start",
                fix="call start() before, or use it in a with statement; a run whose steps are all "
                "done starts again with more train.steps",
            )
        return self._loop

    @property
    def params(self) -> Tree:
        """The parameters of all stages, by layer and name: `params["head"]`.

        Those of each layer lie on the mesh of its stage. Those that do not train are here, too.
        """
        return stage_arrays.union([stage.params for stage in self.stages])

    @property
    def opt_state(self) -> State:
        """The state of the optimizer for all stages: the trees in it are by layer and name."""
        return stage_arrays.union([stage.opt_state for stage in self.stages])

    @property
    def shardings(self) -> Tree:
        """The `NamedSharding` of each parameter of all stages, by layer and name."""
        return stage_arrays.union([stage.shardings for stage in self.stages])

    @property
    def mesh(self) -> tuple[Mesh, ...]:
        """The mesh of each stage."""
        return tuple(stage.mesh for stage in self.stages)

    def __enter__(self) -> "Trainer":
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._abandon()

    def start(self) -> None:
        """Takes the devices, compiles, and restores the newest checkpoint; raises as `run` does.

        It does nothing where the run goes on already.
        """
        if self._going is None:
            self._go_on()

    def step(self) -> Record | None:
        """Trains one step, and returns its record; None where all steps are done.

        Validations and checkpoints come after the steps after which the run has them. In `run` the
        next step is dispatched before the numbers of this one are read. Here they are waited for,
        so the devices are idle between two calls. Raises as `run` does.
        """
        self._is_stepwise = True
        self.start()
        while self._going:
            if (record := self._go_on()) is not None:
                return record
        return None

    def save(self) -> None:
        """Asks for a checkpoint of the arrays that are there now.

        From a loop of one's own it is of the last step, and taken as the next one begins. Before
        the first step, and from `before_step` of a callback, it is of the step that comes.
        """
        self._loop_now().save()

    def close(self) -> None:
        """Ends a run that goes on as `stop` does, with a checkpoint, and gives its arrays up."""
        if self._going:
            self.stop()
            self.run()
        self._loop, self._chunks = None, ()

    def train(self) -> list[dict[str, Any]]:
        """Trains as `run` does. Returns the records of all steps of the run."""
        self.run()
        return self.history

    def run(self) -> None:
        """Trains to `train.steps`, from the newest checkpoint in the run folder if there is one.

        Raises HolmesError, such as LeaseError where another process owns the run folder, or
        CheckpointError for a checkpoint of other settings.
        """
        self._is_stepwise = False
        self.start()
        while self._going:
            self._go_on()

    def _go_on(self) -> Record | None:
        """Goes on to the next step, or to the start; the record of the step if there is one."""
        if self._going and inspect.getgeneratorstate(self._going) == inspect.GEN_RUNNING:
            problem, fix = "cannot be asked for steps or its end by a callback", "call stop or save"
            raise HolmesError("Trainer", problem, found="a step that is being made", fix=fix)
        if self._going is None:
            self._going = self._records()
        try:
            return next(self._going)
        except StopIteration:
            self._going = None
        except BaseException:
            self._abandon()
            raise
        return None

    def _abandon(self) -> None:
        """Ends a run that has failed, or whose loop has: without a checkpoint."""
        going, self._going, self._loop, self._chunks = self._going, None, None, ()
        if going:
            going.close()

    def _records(self) -> Generator[Record | None]:
        """The run: yields None at each start, and the record of each step that is waited for."""
        with ExitStack() as stack:
            own = lambda: stack.enter_context(Lease(self.run_dir, say=self._print))
            yield from self._train(self._lease or own())

    def _train(self, lease: Lease) -> Generator[Record | None]:
        island_alone.refuse_no_island(self.job.config, self.job.topology)
        self.job.refuse_other_nodes()
        numbers = range(len(self.job.plan.stages))
        mirror.open_run(self.job.config.run.dir, lease, self._print)
        self._print(*job_description.describe(self.job, self.job.check_pool(os.environ, numbers)))
        find = functools.partial(
            resume.find,
            self.job,
            self._allow,
            self._print,
            owner=lease,
            pause=self._wait_to_train,
            fetches=places.is_url(self.job.config.run.dir),
        )
        try:
            start = find()
            while True:
                try:
                    yield from self._train_from(start, lease)
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
        limit_s = (was_asked_s or time.monotonic()) + stop_timeout_s - time.monotonic()
        if line := recorder.write_report(limit_s, lambda: self._asked_s != was_asked_s):
            self._print(line)

    def _train_from(self, start: resume.Start, lease: Lease) -> Generator[Record | None]:
        began_s, config = time.monotonic(), self.job.config
        done = start.step
        if (going := rejoining.go_on(start, self._print)) is None:
            self.finished = True
            return
        start = going
        for line in start.describe():
            self._print(line)
        self._loop = None  # the arrays of an attempt before this
        chunks = self._make_chunks()
        progress = Progress(config.distributed, config.train, self.job.plan.batch_shares)
        cluster = self.job.topology.clusters[0].name  # of all stages: they are in this process
        has_trained = jobs.has_trained(self.run_dir)
        setup = TrainingSetup(
            self.job, chunks, cluster, has_trained=has_trained, skipped=start.skipped
        )
        with ExitStack() as stack, setup:
            stack.callback(setattr, self, "progress", None)
            runner = setup.compile()
            self._fetch(start.checkpoint)
            batches = setup.reading.result()
            data = batches.digests()
            if left_out := batches.data.left_out:
                self._print(f"left out    {left_out}")
            for line in start.check_data(data):
                self._print(line)
            setup.restore(runner, start.checkpoint)
            lease.guard(job_files.save)(self.job, done)  # nothing is refused any more
            alarm = CommitAlarm(config.checkpoint, done, ["this process"])
            recorder = stack.enter_context(
                Recorder(
                    self.run_dir,
                    config,
                    done_steps=done,
                    peak_step_s=self.job.measured_peak_step_s,
                    stream=self._stream,
                    on_step=lambda record: alarm.step(record["step"]) | scrub.step(),
                    began_s=began_s,
                    owner=lease,
                )
            )
            say = recorder.console.print
            scrub = stack.enter_context(Scrub(self.run_dir, config.checkpoint.scrub, say))
            copy = self._begin_copy(stack, lease, say)
            saves = self._saves(start, lease, data, say, (alarm.committed, scrub.committed), copy)
            alarm.attach(saves.outstanding, say)

            def is_stopping() -> bool:
                lease.check()
                saves.check()
                self._callbacks.on_saves()
                return self._stopping

            loop = setup.loop(
                functools.partial(
                    TrainingLoop,
                    tell=recorder.take,
                    is_stopping=is_stopping,
                    is_saving=SaveSchedule(
                        config.checkpoint, begun=saves.begun, retries=saves.is_retry_due
                    ),
                    begins=progress.begin,
                    profiles=self.run_dir / jobs.PROFILES,
                    vote=_vote_of(runner, stack),
                    callbacks=self._callbacks,
                    tells_at_once=lambda: self._is_stepwise,
                ),
                runner,
                writing.Writer(self.run_dir, chunks, saves.saved, saves.failed, lease.check, copy),
            )
            self._loop, self._chunks = loop, chunks
            self.progress = progress
            yield None
            for number in loop.steps(done, start.sequences):
                done = number
                yield dict(recorder.last)
        saves.check(at_end=True)
        self._callbacks.on_saves()
        self._end(done, recorder, lease, is_over=loop.is_over)

    def _end(self, done: int, recorder: Recorder, lease: Lease, *, is_over: bool) -> None:
        self.tasks = recorder.tasks
        self.finished = is_over or done >= self.job.config.train.steps
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
        told: Sequence[Callable[[int], object]],
        copy: Mirror | None,
    ) -> Saves:
        """The checkpoints of the session; what a crash has left behind is removed."""
        config = self.job.config.checkpoint
        keeps = Retention(self.run_dir, config, lease.move, say, lease.check, copy)
        keeps.after_start()
        commit = functools.partial(
            committing.commit,
            start,
            data=data,
            owner=lease,
            mirror=copy,
            stores=lambda: self._stores_of_parts(copy),
        )

        def committed(step: int) -> None:
            for tell in told:
                tell(step)
            self._callbacks.saved(step, manifest.folder_of(self.run_dir, step))

        return Saves(
            self.run_dir,
            1,
            commit,
            keeps,
            say,
            committed,
            limit_s=60 * config.failing_minutes,
        )

    def _stores_of_parts(self, copy: Mirror | None) -> dict[str, dict[str, str]]:
        """The entry of a manifest for parts that an object store has; empty: it has none."""
        if copy is None:
            return {}
        where = {"id": stores.identifier(self.run_dir), "node": socket.gethostname()}
        where |= {"folder": copy.url, "start": copy.start}
        return {manifest.part_name(chunk.number): where for chunk in self._chunks}

    def _begin_copy(
        self, stack: ExitStack, lease: Lease, say: Callable[[str], None]
    ) -> Mirror | None:
        """The run folder's copy in an object store, which is this start's from now on."""
        copy = mirror.of(self.run_dir, say)
        if copy:
            stack.callback(copy.close)
            try:
                start = stores.start_name(stores.identifier(self.run_dir), lease.epoch)
                copy.begin(start, retention.set_aside(self.run_dir))
            except OSError as error:
                raise of_system(error) from None
        return copy

    def _fetch(self, checkpoint: Checkpoint | None) -> None:
        """Brings parts here that only an object store has."""
        if checkpoint is not None:
            fetching.bring_uploads(checkpoint, self._print)

    def _make_chunks(self) -> list[Chunk]:
        """The stages on the devices, and what computes attention there."""
        topology, plan, config = self.job.topology, self.job.plan, self.job.config.run
        kinds, count = topology.device_kinds, topology.num_devices
        self._set_flags()
        platforms.use_devices(kinds, count, rehearse=config.rehearse)
        # Before this process uses a device, whose memory a check needs.
        numbers = range(len(plan.stages))
        unproven = find_unproven(self.job, numbers, nics.discover, os.environ, self._print)
        meshes = build_meshes(plan, jax.devices())
        program_cache.use(config.compilation_cache, os.environ, self._print)
        chunks = make_chunks(self.job, dict(enumerate(meshes)), unproven)
        self._print(*attention_lines(chunks), *optimizer_lines(chunks))
        return chunks

    def _set_flags(self) -> None:
        """Sets the flags of XLA that the run needs, which XLA reads when its devices start.

        Raises ConfigError where they have started without the one that equal bits need.
        """
        of_user = os.environ.get("XLA_FLAGS", "")
        variables = self.job.environment(os.environ)
        flags = variables.get("XLA_FLAGS", "")
        is_needed = self.job.config.train.deterministic and xla_flags.DETERMINISTIC in flags
        if not platforms.has_devices():
            read = ("XLA_FLAGS", xla_flags.HOST_MEMORY)
            os.environ.update({name: variables[name] for name in read if name in variables})
        elif is_needed and xla_flags.DETERMINISTIC not in of_user:
            raise ConfigError(
                "XLA_FLAGS",
                "lacks the flag that train.deterministic needs, and JAX has its devices",
                found=of_user or "nothing",
                fix=f"start Python with XLA_FLAGS=--{xla_flags.DETERMINISTIC}=true, or train "
                "before JAX makes its first array",
            )

    def _print(self, *lines: str) -> None:
        for line in lines:
            print(line, file=self._stream, flush=True)


def _vote_of(runner: Runner, stack: ExitStack) -> Callable[[], None]:
    """The function that is called near the end of a step: an island apart looks into its mailbox.

    The mailbox is closed with the stack.
    """
    if not isinstance(runner, IslandApart):
        return lambda: None
    stack.callback(runner.close)
    look = lambda: runner.agree(runner.news())
    look()  # before the first step, too
    return look
