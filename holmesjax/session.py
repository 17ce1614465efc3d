"""The steps of one process: the loop of training, whichever stages live here.

The loop dispatches step n + 1 before it reads the numbers of step n, and takes its batch from a
thread that has put it on the devices, so these never wait for the host. All state is in `states`; a
step's batch is a function of the sequences consumed before it, so a run that resumes goes on
exactly as if it had never stopped.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.sharding import Mesh

from holmesjax.checkpoints import checkpoint
from holmesjax.config import Config
from holmesjax.data import corpus
from holmesjax.data.batches import Batches
from holmesjax.errors import FatalError
from holmesjax.job import Job
from holmesjax.optimizers.adamw import make_optimizer
from holmesjax.report.recorder import Part
from holmesjax.runtime.pipeline import Meanwhile, OneStage, Pipeline
from holmesjax.runtime.prefetch import Feed, Step, Validation
from holmesjax.runtime.progress import Work
from holmesjax.runtime.stage import Stage, StageState
from holmesjax.runtime.timeline import Clock, Timeline


def make_stages(job: Job, meshes: Mapping[int, Mesh]) -> list[Stage]:
    """The chunks of the stages that have a mesh here, in the order of the model."""
    config = job.config
    return [
        Stage(
            model=config.model,
            plan=job.plan,
            index=index,
            mesh=meshes[stage],
            optimizer=make_optimizer(config.optimizer, config.train.steps),
            compute_dtype=config.train.compute_dtype,
            clip_norm=config.optimizer.clip_norm,
            mask_documents=config.data.documents == "mask",
            kernels=config.kernels,
        )
        for index, (stage, _) in enumerate(job.plan.chunks)
        if stage in meshes
    ]


def read_batches(config: Config) -> Batches:
    return Batches(
        corpus=corpus.read(config.data),
        seed=config.train.seed,
        global_batch=config.train.global_batch,
        length=config.model.context_length,
        num_validation=config.train.eval_batches if config.train.eval_every else 0,
    )


@dataclass
class _Unread:
    """A step whose numbers are still being computed."""

    step: int
    metrics: dict[str, Any]
    timeline: Timeline
    link_bytes: dict[str, int]


@dataclass(kw_only=True)
class Session:
    """The loop of steps, once everything is up.

    Args:
      tell: takes each step's part, in order (`recorder`).
      vote: called in each step when most of it is dispatched: the answer is what `is_stopping` and
        `is_saving` say after it.
      is_stopping: asked before every step; with the same answer in all processes of a job.
      is_saving: asked after every step, with its number, whether to write a checkpoint; with the
        same answer in all processes of a job.
      begins: told of each step, each batch of validation and each checkpoint before it begins.
    """

    config: Config
    runner: Pipeline | OneStage
    batches: Batches
    clock: Clock
    writer: checkpoint.Writer
    tell: Callable[[Part], None]
    is_stopping: Callable[[], bool]
    is_saving: Callable[[int], bool]
    begins: Callable[[Work, int], None]
    vote: Callable[[], None] = lambda: None
    _last_s: float = field(default=0.0, init=False)  # when the step before ended
    _num_skipped: int = field(default=0, init=False)  # in a row

    def run(self, states: Sequence[StageState], done: int, sequences: int) -> int:
        """Trains until the last step or until asked to stop; the number of steps done.

        Args:
          states: of the stages that are here.
          done: steps before this session.
          sequences: consumed in them.

        Raises FatalError after too many steps in a row whose gradient is not finite.
        """
        order = self._order(done, sequences)
        # It waits as long as the first step, which waits for what is as slow.
        timeout_s = self.config.distributed.start_timeout_s
        with Feed(self.batches, self.runner.placer, order, timeout_s) as feed:
            return self._run(feed, states, done)

    def _order(self, done: int, sequences: int) -> Iterator[Step | Validation]:
        """All batches from here to the last step."""
        train = self.config.train
        for step in range(done + 1, train.steps + 1):
            yield Step(sequences)
            sequences += train.global_batch
            if self._is_evaluating(step):
                yield from map(Validation, range(train.eval_batches))

    def _run(self, feed: Feed, states: Sequence[StageState], done: int) -> int:
        steps, saved = self.config.train.steps, done
        unread: _Unread | None = None
        self._last_s = time.perf_counter()

        def tell() -> None:
            """While there is nothing to dispatch: of the step before."""
            if unread:
                self.tell(self._read(unread))

        meanwhile = Meanwhile(nearly=self.vote, idle=tell)
        while done < steps and not self.is_stopping():
            self.begins("step", done + 1)
            timeline = self.clock.timeline()
            states, metrics = self.runner.train_step(states, feed.take(), timeline, meanwhile)
            done += 1
            unread = _Unread(done, metrics, timeline, self.runner.take_link_bytes())
            if self._is_evaluating(done):
                part = self._read(unread)
                losses = self._evaluate(feed, states, done)
                part["validation_bytes"] = self.runner.take_link_bytes()
                self.tell({**part, "val_loss": losses} if losses is not None else part)
                unread, self._last_s = None, time.perf_counter()
            if self.is_saving(done):
                self._save(done, states)
                saved = done
        tell()
        if saved != done:
            self._save(done, states)
        return done

    def _save(self, done: int, states: Sequence[StageState]) -> None:
        self.begins("checkpoint", done)
        self.writer.save(done, states)

    def _is_evaluating(self, done: int) -> bool:
        every, steps = self.config.train.eval_every, self.config.train.steps
        return every > 0 and (done % every == 0 or done == steps)

    def _read(self, unread: _Unread) -> Part:
        """Waits for the numbers of a step; what this process tells of it."""
        metrics = unread.metrics
        part: Part = {
            "step": unread.step,
            "grad_norm": float(metrics["grad_norm"]),
            "learning_rate": float(metrics["learning_rate"]),
            "skipped": bool(metrics["skipped"]),
        }
        if "loss" in metrics:
            part["loss"] = float(metrics["loss"])
        intervals = part["intervals"] = unread.timeline.intervals()
        part["link_bytes"] = unread.link_bytes
        end_s = max(interval.end_s for interval in intervals)
        part["step_time_s"], self._last_s = end_s - self._last_s, end_s
        self._refuse_divergence(part, metrics)
        return part

    def _refuse_divergence(self, part: Part, metrics: dict[str, Any]) -> None:
        self._num_skipped = self._num_skipped + 1 if part["skipped"] else 0
        if self._num_skipped < self.config.train.max_skipped:
            return
        norms = np.atleast_1d(np.asarray(metrics.get("square_norms", part["grad_norm"])))
        where = ", ".join(f"stage {s}" for s, norm in enumerate(norms) if not math.isfinite(norm))
        raise FatalError(
            f"step {part['step']}, {where}",
            f"the gradient is not finite, for {self._num_skipped} steps in a row",
            found=f"|g| = {part['grad_norm']}",
            fix="lower optimizer.learning_rate, or look at the data of these steps; "
            "train.max_skipped sets how many steps are skipped",
        )

    def _evaluate(self, feed: Feed, states: Sequence[StageState], done: int) -> float | None:
        """Mean loss over the validation batches, nats per token, where the last stage is here."""
        losses, count = [], 0
        for _ in range(self.config.train.eval_batches):
            self.begins("validation", done)
            inputs = feed.take()
            count += inputs.num_targets
            if (loss := self.runner.evaluate(states, inputs)) is not None:
                losses.append(float(loss))
        return sum(losses) / max(count, 1) if losses else None
