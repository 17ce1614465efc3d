"""The steps of one process: the loop of training, whichever stages live here.

The loop dispatches step n + 1 before it reads the numbers of step n, and takes its batch from a
thread that has put it on the devices, so these never wait for the host. All state is in `states`; a
step's batch is a function of the sequences consumed before it, so a run that resumes goes on
exactly as if it had never stopped.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from holmesjax.callbacks import Callbacks
from holmesjax.checkpoints import skipped_data, writing
from holmesjax.checkpoints.skipped_data import Skipped
from holmesjax.config import Config
from holmesjax.data.batches import Batches
from holmesjax.errors import FatalError, SpikeError
from holmesjax.islands.apart import IslandApart
from holmesjax.islands.runner import IslandsRunner
from holmesjax.layer_specs.model_layers import auxiliary_names
from holmesjax.report.process_step import ProcessStep
from holmesjax.runtime import layer_statistics
from holmesjax.runtime.chunk import ChunkState
from holmesjax.runtime.device_memory import PeakMemory
from holmesjax.runtime.expert_loads import ExpertLoads
from holmesjax.runtime.expert_placement import ExpertPlacement
from holmesjax.runtime.overlapped_work import OverlappedWork
from holmesjax.runtime.pipeline import Pipeline
from holmesjax.runtime.prefetch import Feed, Step, Validation
from holmesjax.runtime.step_timeout import Activity
from holmesjax.runtime.timeline import Clock, Timeline
from holmesjax.runtime.whole_step import WholeStep

Runner = Pipeline | WholeStep | IslandsRunner
MAX_HELD = 8  # steps that are told together, if a busy machine sees their ends at once


def _spike(report: ProcessStep) -> SpikeError:
    loss = [f"loss {report['loss']:.4g}"] if "loss" in report else []
    return SpikeError(
        f"step {report['step']}",
        "its loss, or the norm of its gradient, stands out (train.spike_sigmas)",
        found=", ".join([*loss, f"|g| {report['grad_norm']:.4g}"]),
        fix="start it again: it goes back to its last checkpoint, and leaves out the data since",
        step=report["step"],
    )


def _floats(numbers: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in numbers.items()}


def _scalars(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a step that callbacks are told: no arrays of experts or stages."""
    return {name: value for name, value in metrics.items() if not np.shape(value)}


@dataclass
class _Unread:
    """A step whose numbers are still being computed."""

    step: int
    metrics: dict[str, Any]
    timeline: Timeline
    link_bytes: dict[str, int]
    input_wait_s: float
    own: dict[str, Any]  # numbers of callbacks
    round: int | None = None  # the newest that has landed on an island that is a job of its own


@dataclass(kw_only=True)
class TrainingLoop:
    """The loop of steps, once everything is up.

    Args:
      tell: takes this process's report of each step, in order (`process_step`).
      vote: called in each step when most of it is dispatched: the answer is what `is_stopping` and
        `is_saving` say after it.
      is_stopping: asked before every step; with the same answer in all processes of a job.
      is_saving: asked after every step, with its number, whether to write a checkpoint; with the
        same answer in all processes of a job.
      begins: told of each step, each batch of validation and each checkpoint before it begins.
      profiles: the folder of this process for what JAX's profiler writes.
      memory: of the devices of this process.
      skipped: data that the run leaves out.
      compile_s: for which this process compiled its programs, before the first step.
      callbacks: the user's.
      tells_at_once: asked after each step whether to wait for its numbers and tell of it then.
      stage_names: of the stages whose squared norms the runner gives, in their order.
      placement: of the experts here, before the first step and the one after each checkpoint.
    """

    config: Config
    runner: Runner
    batches: Batches
    clock: Clock
    writer: writing.Writer
    tell: Callable[[ProcessStep], None]
    is_stopping: Callable[[], bool]
    is_saving: Callable[[int], bool]
    begins: Callable[[Activity, int], None]
    profiles: Path
    memory: PeakMemory = field(default_factory=lambda: PeakMemory({}))
    skipped: Sequence[Skipped] = ()
    compile_s: float = 0.0
    vote: Callable[[], None] = lambda: None
    callbacks: Callbacks = field(default_factory=Callbacks)
    tells_at_once: Callable[[], bool] = lambda: False
    stage_names: Sequence[str] = ("stage 0",)
    placement: ExpertPlacement | None = None
    # Of the stages that are here, after the last step that was dispatched. Nothing else refers to
    # them: a step takes their memory.
    states: Sequence[ChunkState] = field(default=(), init=False)
    _is_save_asked: bool = field(default=False, init=False)
    _last_s: float = field(default=0.0, init=False)  # when the step before ended
    # Reports of steps whose ends were seen at once.
    _held: list[ProcessStep] = field(default_factory=list, init=False)
    _num_skipped: int = field(default=0, init=False)  # in a row
    _checkpoint_s: float = field(default=0.0, init=False)  # that no report has yet
    _expert_loads: ExpertLoads = field(init=False)
    _is_by_number: bool = field(default=True, init=False)  # whether experts wait to be placed
    # The peaks of loads by layer, as experts were placed last, until the report of a step after
    # `_placed_after` has them.
    _peaks: Mapping[str, Sequence[float]] = field(default_factory=dict, init=False)
    _placed_after: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        every = self.config.log.expert_loads_every
        self._expert_loads = ExpertLoads(every, self.config.train.steps)

    def run(self, done: int, sequences: int) -> int:
        """Trains `states` until the last step or until asked to stop; the number of steps done.

        Args:
          done: steps before this session.
          sequences: consumed in them.

        Raises:
          FatalError: the gradient of too many steps in a row is not finite.
          SpikeError: a step is a spike, in a run that goes back then.
        """
        for number in self.steps(done, sequences):
            done = number
        return done

    def steps(self, done: int, sequences: int) -> Iterator[int]:
        """Does what `run` does, and yields the number of steps done after each step."""
        order = self._order(done, sequences)
        # It waits as long as the first step, which waits for what is as slow.
        timeout_s = self.config.distributed.start_timeout_s
        with Feed(self.batches, self.runner.placer, order, timeout_s) as feed:
            try:
                yield from self._run(feed, done)
            finally:
                self._tell_held()

    def save(self) -> None:
        """Asks for a checkpoint of the arrays that are there; in `before_step`, after the step."""
        self._is_save_asked = True

    def _order(self, done: int, sequences: int) -> Iterator[Step | Validation]:
        """All batches from here to the last step."""
        train = self.config.train
        for step in range(done + 1, train.steps + 1):
            sequences += skipped_data.sequences(self.skipped, step - 1, step)
            yield Step(sequences, train.batch_of(step))
            sequences += train.batch_of(step)
            if self._is_evaluating(step):
                num_sets = len(self.batches.data.validation_sets())
                yield from map(Validation, range(num_sets * train.eval_batches))

    def _run(self, feed: Feed, done: int) -> Iterator[int]:
        steps, saved = self.config.train.steps, done
        unread: _Unread | None = None
        timeline: Timeline | None = None  # of the step that is dispatched
        if done < steps:
            self._place_experts(done)
            self._checkpoint_s = 0.0  # there was none
        self._last_s = time.perf_counter()

        def tell(following: Timeline | None = None) -> None:
            """While there is nothing to dispatch: of the step before."""
            if unread:
                self._tell(self._read(unread), following)

        meanwhile = OverlappedWork(nearly=self.vote, idle=lambda: tell(timeline))
        while done < steps and not self.is_stopping() and not self.is_over:
            self._place_experts(done)
            self.begins("step", done + 1)
            self.callbacks.before_step(done + 1)
            timeline = self.clock.timeline()
            began_s = time.perf_counter()
            inputs = feed.take()
            waited_s = time.perf_counter() - began_s
            self.states, metrics = self._step(done + 1, self.states, inputs, timeline, meanwhile)
            done += 1
            own = self.callbacks.after_step(done, _scalars(metrics))
            link_bytes = self.runner.take_link_bytes()
            landed = self.runner.round if isinstance(self.runner, IslandApart) else None
            unread = _Unread(done, metrics, timeline, link_bytes, waited_s, own, landed)
            if self._is_evaluating(done):
                report = self._read(unread)
                began_s = time.perf_counter()
                losses = self._evaluate(feed, self.states, done)
                report["validation_s"] = time.perf_counter() - began_s
                report["validation_bytes"] = self.runner.take_link_bytes()
                own = _floats(self.callbacks.on_validation(done, losses))
                report["own"] = {**report.get("own", {}), **own}
                self._tell({**report, **losses}, None)
                unread, self._last_s = None, time.perf_counter()
            if self.tells_at_once():
                tell()
                unread = None
            if self.is_saving(done) or self._is_save_asked:
                if self.config.train.spike_policy == "roll_back":
                    tell()  # no checkpoint is made behind a spike
                    unread = None
                self._save(done)
                saved = done
            paused_s = time.perf_counter()
            yield done
            self._last_s += time.perf_counter() - paused_s
            if self._is_save_asked:
                self._save(done)
                saved = done
        tell()
        if saved != done:
            self._save(done)

    @property
    def is_over(self) -> bool:
        """Whether the run has ended before its last step: islands of their own have all tokens."""
        return isinstance(self.runner, IslandApart) and self.runner.is_over

    def _tell(self, report: ProcessStep, following: Timeline | None) -> None:
        """Tells of a step, unless the step that follows has ended, too.

        Then a busy machine has woken this process late: it sees both ends at once, and knows only
        how long both steps took. Each of them is told with the mean.
        """
        self._held.append(report)
        late = following is not None and following.has_ended(self._last_s)
        if not late or len(self._held) == MAX_HELD:
            self._tell_held()

    def _tell_held(self) -> None:
        held, self._held = self._held, []
        for report in held:
            mean_s = math.fsum(held_report["step_time_s"] for held_report in held) / len(held)
            self.tell({**report, "step_time_s": mean_s})

    def _step(self, step: int, states: Sequence[ChunkState], *args: Any) -> tuple[Any, Any]:
        """Runs a step; with JAX's profiler, where the run asks for it."""
        if step not in self.config.train.profile_steps:
            return self.runner.train_step(states, *args)
        jax.block_until_ready(states)
        folder = self.profiles / f"step_{step:06d}"
        jax.profiler.start_trace(folder, create_perfetto_trace=True)
        try:
            return jax.block_until_ready(self.runner.train_step(states, *args))
        finally:
            jax.profiler.stop_trace()

    def _save(self, done: int) -> None:
        self._is_save_asked = False
        began_s = time.perf_counter()
        if isinstance(self.runner, IslandApart):  # its last round may take as long as a checkpoint
            self.begins("checkpoint", done)
        if isinstance(self.runner, IslandsRunner):
            self.states = self.runner.settled(self.states)
        self.begins("checkpoint", done)
        if self.placement:
            self.states = self.placement.by_number(self.states)
            self._is_by_number = True
        self.writer.save(done, self.states)
        if isinstance(self.runner, IslandsRunner):
            self.states = self.runner.parked(self.states)
        self._checkpoint_s += time.perf_counter() - began_s

    def _place_experts(self, done: int) -> None:
        """By the loads of the last step, where experts lie as checkpoints have them."""
        if self.placement and self._is_by_number:
            began_s = time.perf_counter()
            self.states, self._peaks = self.placement.by_load(self.states)
            self._is_by_number, self._placed_after = False, done
            self._checkpoint_s += time.perf_counter() - began_s

    def _is_evaluating(self, done: int) -> bool:
        every, steps = self.config.train.eval_every, self.config.train.steps
        return every > 0 and (done % every == 0 or done == steps)

    def _read(self, unread: _Unread) -> ProcessStep:
        """Waits for the numbers of a step; what this process tells of it."""
        metrics = unread.metrics
        report: ProcessStep = {
            "step": unread.step,
            "grad_norm": float(metrics["grad_norm"]),
            "learning_rate": float(metrics["learning_rate"]),
            "skipped": bool(metrics["skipped"]),
        }
        if unread.round is not None:
            report["round"] = unread.round
        if unread.own:
            report["own"] = _floats(unread.own)
        if "spike" in metrics:
            report["spike"] = bool(metrics["spike"])
        if "square_spread" in metrics:
            report["square_spread"] = float(metrics["square_spread"])
        if "loss" in metrics:
            report["loss"] = float(metrics["loss"])
        names = auxiliary_names(self.config.model)
        if self.config.log.statistics:
            names += layer_statistics.names(self.config.model)
        if names:
            found = {name: float(metrics[name]) for name in names}
            train = self.config.train
            of_whole = train.batch_of(unread.step) / train.global_batch
            report["auxiliary"] = layer_statistics.of_small_batch(found, of_whole)
        report |= self._expert_loads.after_step(unread.step, metrics, skipped=report["skipped"])
        intervals = report["intervals"] = unread.timeline.intervals()
        report["link_bytes"] = unread.link_bytes
        report["input_wait_s"] = unread.input_wait_s
        if risen := self.memory.risen():
            report["memory_bytes"] = risen
        if self._peaks and unread.step > self._placed_after:
            report["expert_peaks"], self._peaks = dict(self._peaks), {}
        if self._checkpoint_s:
            report["checkpoint_s"], self._checkpoint_s = self._checkpoint_s, 0.0
        if self.compile_s:
            report["compile_s"], self.compile_s = self.compile_s, 0.0
        end_s = max(interval.end_s for interval in intervals)
        report["step_time_s"], self._last_s = end_s - self._last_s, end_s
        self._refuse_divergence(report, metrics)
        if report.get("spike", False) and self.config.train.spike_policy == "roll_back":
            raise _spike(report)
        return report

    def _refuse_divergence(self, report: ProcessStep, metrics: dict[str, Any]) -> None:
        is_infinite = report["skipped"] and not report.get("spike", False)
        self._num_skipped = self._num_skipped + 1 if is_infinite else 0
        if self._num_skipped < self.config.train.max_skipped:
            return
        norms = np.atleast_1d(np.asarray(metrics.get("square_norms", report["grad_norm"])))
        named = zip(self.stage_names, norms, strict=True)
        where = ", ".join(name for name, norm in named if not math.isfinite(norm))
        raise FatalError(
            f"step {report['step']}, {where}",
            f"the gradient is not finite, for {self._num_skipped} steps in a row",
            found=f"|g| = {report['grad_norm']}",
            fix="lower optimizer.learning_rate, or look at the data of these steps; "
            "train.max_skipped sets how many steps are skipped",
        )

    def _evaluate(self, feed: Feed, states: Sequence[ChunkState], done: int) -> ProcessStep:
        """Mean losses of the validation sets, nats per token; empty if the last stage is elsewhere.

        `val_loss` is the mean over the tokens of all sets; `val_losses` has one of each, if a run
        names its sets.
        """
        if self.config.train.eval_ema:
            assert all(state.average for state in states), "a check of the settings sees to it"
            states = [replace(s, params=s.average.weights) for s in states if s.average]
        sets = self.batches.data.validation_sets()
        sums, counts = dict.fromkeys(sets, 0.0), dict.fromkeys(sets, 0)
        knows = False
        for name in sets:
            for _ in range(self.config.train.eval_batches):
                self.begins("validation", done)
                inputs = feed.take()
                counts[name] += inputs.num_targets
                if (loss := self.runner.evaluate(states, inputs)) is not None:
                    sums[name] += float(loss)
                    knows = True
        if not knows:
            return {}
        losses = {name: sums[name] / max(counts[name], 1) for name in sets}
        whole = sum(sums.values()) / max(sum(counts.values()), 1)
        named = {"val_losses": losses} if self.batches.data.sets else {}
        return {"val_loss": whole, **named}
