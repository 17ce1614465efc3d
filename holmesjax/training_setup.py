"""Makes what a process needs before its first step: chunks, data, programs and states."""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from holmesjax.checkpoints import island_states, restoring, writing
from holmesjax.checkpoints.manifest import Checkpoint
from holmesjax.checkpoints.skipped_data import Skipped
from holmesjax.config import Config, TrainConfig
from holmesjax.config.data_checks import packs
from holmesjax.data import cluster_paths, sources
from holmesjax.data.batches import INPUTS, Batches
from holmesjax.data.patience import patiently
from holmesjax.errors import DataError
from holmesjax.islands.agreement import Digests
from holmesjax.islands.apart import IslandApart, make_apart
from holmesjax.islands.runner import IslandsRunner, make_islands
from holmesjax.job import Job
from holmesjax.layer_specs.kind import BatchArray
from holmesjax.layer_specs.model_layers import layers
from holmesjax.models import ops
from holmesjax.models.layer import statements
from holmesjax.optimizers.learning_rates import step_tokens
from holmesjax.optimizers.optimizer import make_optimizer
from holmesjax.plan.plan import Plan
from holmesjax.planner.islands import names_of
from holmesjax.runtime.chunk import Chunk, ChunkState
from holmesjax.runtime.device_memory import PeakMemory, devices_of
from holmesjax.runtime.expert_placement import ExpertPlacement
from holmesjax.runtime.pipeline import make_runner
from holmesjax.runtime.spikes import SpikeRule
from holmesjax.runtime.timeline import Clock
from holmesjax.training_loop import Runner, TrainingLoop
from holmesjax.transport.local import Transport


class TrainingSetup:
    """Prepares the loop of a process, and closes what the loop has used; a context manager.

    The data are read from the start on, in a thread, while programs are compiled: `reading`.

    Args:
      job: the run.
      chunks: those of this process.
      cluster: whose paths of the data are those of this process.
      has_trained: whether the run had its data before, so that they are waited for.
      skipped: data that the run leaves out, as whoever owns its folder has read it.
      session, noted_s: of the job, where it has several processes (`islands.apart.make_apart`).
    """

    def __init__(
        self,
        job: Job,
        chunks: Sequence[Chunk],
        cluster: str,
        *,
        has_trained: bool,
        skipped: Sequence[Skipped],
        session: str | None = None,
        noted_s: Callable[[], float] = lambda: -math.inf,
    ):
        self._job, self._chunks, self._session, self._noted_s = job, chunks, session, noted_s
        self._placement = _placement(chunks)  # which refuses optimizers, before data are read
        self._skipped, self._compile_s = skipped, 0.0
        self._states: Sequence[ChunkState] = ()  # until the loop has them
        data = cluster_paths.here(job.config.data, cluster)
        read = functools.partial(read_batches, dataclasses.replace(job.config, data=data))
        self._stack = ExitStack()
        pool = self._stack.enter_context(ThreadPoolExecutor(1))
        self.reading: Future[Batches] = pool.submit(patiently, read, has_trained=has_trained)

    def __enter__(self) -> "TrainingSetup":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def compile(
        self,
        connect: Callable[[], Transport] | None = None,
        compiled: Callable[[], None] = lambda: None,
        waits_for: Callable[[str], None] = lambda text: None,
        told: Callable[[int, Digests], None] | None = None,
    ) -> Runner:
        """Compiles the chunks; the arguments are those of `make_runner` and of `make_islands`."""
        train, began_s = self._job.config.train, time.perf_counter()
        parallel = self._job.config.parallel
        make: Callable[..., Runner] = make_runner
        if parallel.place:
            make = functools.partial(
                make_apart,
                config=self._job.config,
                run_dir=self._job.run_dir,
                skipped=self._skipped,
                session=self._session,
                noted_s=self._noted_s,
            )
        elif self._job.plan.islands:
            make = functools.partial(
                make_islands,
                names=names_of(self._job.config, self._job.topology),
                parallel=parallel,
                steps=train.steps,
                eval_every=train.eval_every,
                told=told,
            )
        runner = make(
            self._job.plan,
            self._chunks,
            evaluates=train.eval_every > 0,
            ramps=bool(train.rampup),
            connect=connect,
            compiled=compiled,
            waits_for=waits_for,
        )
        if isinstance(runner, IslandApart):
            self._stack.callback(runner.close_mailbox)
        self._compile_s = time.perf_counter() - began_s
        return runner

    def restore(
        self,
        runner: Runner,
        checkpoint: Checkpoint | None,
        drawn: Callable[[], None] = lambda: None,
    ) -> None:
        """Reads the states from a checkpoint, or draws them; `drawn` is called after each layer."""
        self._states = (
            restoring.restore(checkpoint, self._chunks)
            if checkpoint
            else runner.init(self._job.config.train.seed, drawn)
        )
        if isinstance(runner, IslandApart):
            own_sets = [each.name for each in self._job.config.data.validation or ()]
            runner.compare_data(self.reading.result(), own_sets)
        if isinstance(runner, IslandsRunner):
            clusters = island_states.clusters_of(self._job.plan)
            outer, written = self._job.config.parallel.outer_rule, None
            if checkpoint:
                shares = self._job.plan.batch_shares
                written = island_states.meeting_steps(checkpoint, clusters, outer, shares)
            done = checkpoint.step if checkpoint else 0
            self._states = runner.begin(self._states, done, written)

    def loop(
        self,
        make: Callable[..., TrainingLoop],
        runner: Runner,
        writer: writing.Writer,
    ) -> TrainingLoop:
        """Makes the loop, which alone has the states from now on.

        Args:
          make: `TrainingLoop` with what this process tells and asks.
          runner: of `compile`.
          writer: of checkpoints.
        """
        loop = make(
            config=self._job.config,
            runner=runner,
            batches=self.reading.result(),
            skipped=self._skipped,
            clock=self._stack.enter_context(Clock(len(self._job.plan.stages))),
            writer=self._stack.enter_context(writer),
            memory=PeakMemory(devices_of(self._chunks)),
            compile_s=self._compile_s,
            stage_names=_stage_names(self._job.plan, self._chunks),
            placement=self._placement,
        )
        loop.states, self._states = self._states, ()  # a step takes their memory
        return loop


def _placement(chunks: Sequence[Chunk]) -> ExpertPlacement | None:
    """The placement of the experts of chunks; None where they lie by number."""
    return ExpertPlacement(chunks) if any(chunk.placed_layers for chunk in chunks) else None


def make_chunks(
    job: Job, meshes: Mapping[int, Mesh], unproven: str | None = ops.UNCHECKED
) -> list[Chunk]:
    """The chunks of the stages that have a mesh here, in the order of the model.

    `unproven` says what the Pallas kernels lack to be taken, if anything.
    """
    config = job.config
    stated = statements(config.model)
    train = _of_schedule(config)
    tokens = step_tokens(train, config.model.context_length)
    optimizer = make_optimizer(config.optimizer, train.steps, stated, tokens)
    if config.parallel.place is not None:  # other islands move its schedule
        optimizer = optimizer.with_jumps()
    islands = island_states.clusters_of(job.plan)
    return [
        Chunk(
            model=config.model,
            plan=place.plan,
            index=place.chunk,
            mesh=meshes[place.stage],
            optimizer=optimizer,
            compute_dtype=config.train.compute_dtype,
            param_dtype=config.train.param_dtype,
            reduction_dtype=config.train.reduction_dtype,
            clip_norm=config.optimizer.clip_norm,
            ema_decay=config.optimizer.ema_decay,
            spike_rule=_spike_rule(config.train),
            has_statistics=config.log.statistics,
            places_experts=config.parallel.expert_placement == "load",
            expert_chunks=job.plan.stages[place.stage].expert_chunks,
            mask_documents=config.data.documents == "mask",
            restarts_positions=packs(config.data) and config.model.positions == "learned",
            kernels=config.kernels,
            seed=config.train.seed,
            unproven=unproven,
            island=place.island,
            before=place.before,
            islands=islands,
            island_shares=job.plan.batch_shares,
            outer=config.parallel.outer_rule,
        )
        for place in _places(job.plan)
        if place.stage in meshes
    ]


def _of_schedule(config: Config) -> TrainConfig:
    """The steps and the batches that the learning rate follows: those of all islands."""
    place, train = config.parallel.place, config.train
    if place is None:
        return train
    whole = train.global_batch * len(place.names)
    return dataclasses.replace(train, steps=place.steps, global_batch=whole, profile_steps=())


class _Place(NamedTuple):
    """The place of a chunk in its pipeline, and of that in the plan of the run."""

    plan: Plan  # of its pipeline
    chunk: int  # of its pipeline
    stage: int  # of the run
    island: int | None
    before: int


def _places(plan: Plan) -> Iterator[_Place]:
    """Yields the place of each chunk; with islands, one island after the other."""
    first_stage = before = 0
    for number, pipeline in enumerate(plan.pipelines):
        island = number if plan.islands else None
        for index, (stage, _) in enumerate(pipeline.chunks):
            yield _Place(pipeline, index, first_stage + stage, island, before)
        first_stage += len(pipeline.stages)
        before += len(pipeline.chunks)


def _stage_names(plan: Plan, chunks: Sequence[Chunk]) -> tuple[str, ...]:
    """The names of the stages whose norms a process knows: of its pipeline, or of its islands."""
    islands = {chunk.island for chunk in chunks}
    names, stages = [], itertools.count()
    for number, pipeline in enumerate(plan.pipelines):
        of_island = f" (island {number})" if plan.islands else ""
        own = [f"stage {next(stages)}{of_island}" for _ in pipeline.stages]
        names += own if not plan.islands or number in islands else []
    return tuple(names)


def _spike_rule(train: TrainConfig) -> SpikeRule | None:
    if train.spike_policy == "none":
        return None
    skips = train.spike_policy in ("skip", "roll_back")
    return SpikeRule(train.spike_window, train.spike_sigmas, skips)


def read_batches(config: Config) -> Batches:
    """The data of a run, which has what the layers of its model read."""
    data = sources.module_of(config.data).read(config.data_by_tokens(), config.model.context_length)
    _refuse_missing(config, data)
    return Batches(
        data=data,
        seed=config.train.seed,
        global_batch=config.train.global_batch,
        length=config.model.context_length,
        num_validation=config.train.eval_batches if config.train.eval_every else 0,
    )


def _refuse_missing(config: Config, data: sources.Splits) -> None:
    """Raises DataError where a layer reads an array that the data does not have as it reads it."""
    train = data.train
    if isinstance(train, sources.Mixed):
        train = next(iter(train.parts.values()))
    if not len(train):
        return  # which is refused in its own words
    item, length = train[0], (config.model.context_length,)
    has: dict[str, Any] = {name: (length, "integer") for name in INPUTS}
    if not isinstance(item, sources.Item):
        has = {name: (array.shape, _sort_of(array.dtype)) for name, array in item.items()}
    wanted = {
        array.name: array for kind in layers(config.model).values() for array in kind.reads or ()
    }
    if config.model.module is None:
        names = INPUTS if config.data.documents == "mask" else INPUTS[:2]
        wanted = {name: BatchArray(name, length, "int32") for name in names}
    for name, array in wanted.items():
        if has.get(name) == (array.shape, _sort_of(np.dtype(array.dtype))):
            continue
        shape = ", ".join(map(str, array.shape))
        raise DataError(
            "data.corpus",
            f"has no {name} [{shape}] of {array.dtype}, which a layer of the model reads",
            found=", ".join(f"{key} {list(dims)} {sort}" for key, (dims, sort) in has.items()),
            fix="give this array for each item, or change what the layer reads",
        )


def _sort_of(dtype: np.dtype) -> str:
    return "integer" if np.issubdtype(dtype, np.integer) else "floating"
