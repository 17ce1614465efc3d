"""The training loop: from a job to a trained model in its run folder.

    job -> devices -> stages -> compiled programs -> states -> steps -> checkpoints and report

The loop dispatches step n + 1 before it reads the numbers of step n, so the devices never wait for
the host. All state is in `states`; the batch of a step is a function of the step alone, so a run
that resumes goes on exactly as if it had never stopped.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np

from holmesjax import checkpoint, compat, job as jobs, report
from holmesjax.config import Config
from holmesjax.console import Console
from holmesjax.data import corpus
from holmesjax.data.batches import Batches, model_inputs
from holmesjax.errors import CheckpointError
from holmesjax.job import Job
from holmesjax.mesh import build_meshes
from holmesjax.metrics import Metrics, check_installed
from holmesjax.optimizer import learning_rate, make_optimizer
from holmesjax.pipeline import OneStage, Pipeline, make_runner
from holmesjax.stage import Stage, StageState
from holmesjax.timeline import Clock, Interval, Timeline, bubble_share

TIMELINE = "timeline.json"


class Trainer:
    """One run.

    >>> trainer = Trainer("configs/runs/quickstart.yaml", ["train.steps=2"])
    >>> [stage.cluster for stage in trainer.job.plan.stages]
    ['ib', 'roce']
    """

    def __init__(
        self, source: Job | str | Path, overrides: Sequence[str] = (), stream: TextIO | None = None
    ):
        """Checks everything and starts nothing.

        Args:
          source: a job, a run file, or the folder of a run that was started before.
          overrides: settings on top of it, `"train.steps=100"`.
          stream: where progress is printed; standard output if None.
        """
        self.job = source if isinstance(source, Job) else jobs.load(source, overrides)
        self.history: list[dict[str, Any]] = []  # the records of this session's steps
        self.tasks: list[dict[str, Any]] = []  # of the last step, as `timeline.json` has them
        self.finished = False
        self._stream = sys.stdout if stream is None else stream
        self._stopping = False
        check_installed(self.job.config.log)

    @property
    def run_dir(self) -> Path:
        return self.job.run_dir

    def stop(self) -> None:
        """Asks a running `train` to end after its step, with a checkpoint."""
        self._stopping = True

    def train(self) -> list[dict[str, Any]]:
        """Trains to `train.steps`, from the newest checkpoint in the run folder if there is one."""
        config, plan = self.job.config, self.job.plan
        self._print(*self.job.describe())
        start = self._newest_checkpoint()
        done = start.step if start else 0
        if done >= config.train.steps:
            self.finished = True
            self._print(
                f"finished: {done} of {config.train.steps} steps are done",
                f"to train longer: python -m launch train {self.run_dir} train.steps=...",
            )
            return []
        self.job.save()
        compat.use_devices(self.job.topology, rehearse=config.run.rehearse)
        stages = self._make_stages()
        with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
            reading = pool.submit(self._read_batches)
            runner = make_runner(plan, stages)
            states = checkpoint.restore(start, stages) if start else runner.init(config.train.seed)
            session = _Session(
                config=config,
                history=self.history,
                is_stopping=lambda: self._stopping,
                runner=runner,
                stages=stages,
                batches=reading.result(),
                clock=stack.enter_context(Clock(len(stages))),
                writer=stack.enter_context(
                    checkpoint.Writer(
                        self.run_dir,
                        model=config.model,
                        plan_hash=plan.hash(),
                        keep=config.checkpoint.keep,
                        num_parts=len(stages),
                    )
                ),
                metrics=stack.enter_context(Metrics(self.run_dir, config.log, done_steps=done)),
                console=stack.enter_context(
                    Console(every_s=config.train.log_every_s, stream=self._stream)
                ),
            )
            session.console.start(config.train.steps, done)
            done = session.run(states, done)
            self.tasks = [interval._asdict() for interval in session.last_intervals]
            timeline = {"step": done, "tasks": self.tasks}
            (self.run_dir / TIMELINE).write_text(json.dumps(timeline))
        self._close(done)
        return self.history

    def _make_stages(self) -> list[Stage]:
        config, plan = self.job.config, self.job.plan
        return [
            Stage(
                model=config.model,
                plan=plan,
                index=index,
                mesh=mesh,
                optimizer=make_optimizer(config.optimizer, config.train.steps),
                learning_rate=learning_rate(config.optimizer, config.train.steps),
                compute_dtype=config.train.compute_dtype,
                clip_norm=config.optimizer.clip_norm,
                mask_documents=config.data.documents == "mask",
            )
            for index, mesh in enumerate(build_meshes(plan, jax.devices()))
        ]

    def _read_batches(self) -> Batches:
        config = self.job.config
        return Batches(
            corpus=corpus.read(config.data),
            seed=config.train.seed,
            global_batch=config.train.global_batch,
            length=config.model.context_length,
            num_validation=config.train.eval_batches if config.train.eval_every else 0,
        )

    def _newest_checkpoint(self) -> checkpoint.Checkpoint | None:
        """The newest checkpoint that is whole; says so where a newer one is damaged."""
        for found in (all_found := checkpoint.find(self.run_dir)):
            try:
                checkpoint.verify(found)
            except CheckpointError as error:
                if found is all_found[-1]:
                    raise
                self._print(f"warning: {error}", "resuming from the checkpoint before it")
                continue
            checkpoint.check_model(found, self.job.config.model)
            self._print(f"resuming after step {found.step}")
            return found
        return None

    def _close(self, done: int) -> None:
        self.finished = done >= self.job.config.train.steps
        if not self.finished:
            self._print(
                f"stopped after step {done} of {self.job.config.train.steps}; resume with",
                f"  python -m launch train {self.run_dir}",
            )
        if self.history:
            self._print(f"report  {report.write_report(self.run_dir)}")

    def _print(self, *lines: str) -> None:
        print(*lines, sep="\n", file=self._stream, flush=True)


@dataclass(kw_only=True)
class _Session:
    """The steps of one process: what the loop needs, once everything is up."""

    config: Config
    history: list[dict[str, Any]]
    is_stopping: Callable[[], bool]
    runner: Pipeline | OneStage
    stages: list[Stage]
    batches: Batches
    clock: Clock
    writer: checkpoint.Writer
    metrics: Metrics
    console: Console
    last_s: float = 0.0  # when the numbers of the step before were there
    last_intervals: list[Interval] = field(default_factory=list)

    def run(self, states: list[StageState], done: int) -> int:
        """Trains until the last step or until asked to stop; the number of steps done."""
        steps, saved = self.config.train.steps, done
        unread: tuple[int, dict[str, Any], Timeline, dict[str, int]] | None = None
        self.last_s = time.perf_counter()
        while done < steps and not self.is_stopping():
            timeline = self.clock.timeline()
            inputs = model_inputs(self.batches.train(done))
            states, metrics = self.runner.train_step(states, inputs, timeline)
            done += 1
            if unread:
                self._write(self._read(*unread))
            unread = done, metrics, timeline, self.runner.take_link_bytes()
            if self._is_due(done, self.config.train.eval_every):
                record = self._read(*unread)
                self._write({**record, "val_loss": self._evaluate(states)})
                unread, self.last_s = None, time.perf_counter()
            if self._is_due(done, self.config.checkpoint.every):
                self.writer.save(done, self.stages, states)
                saved = done
        if unread:
            self._write(self._read(*unread))
        if saved != done:
            self.writer.save(done, self.stages, states)
        return done

    def _is_due(self, done: int, every: int) -> bool:
        return every > 0 and (done % every == 0 or done == self.config.train.steps)

    def _read(
        self, step: int, metrics: dict[str, Any], timeline: Timeline, link_bytes: dict[str, int]
    ) -> dict[str, Any]:
        """Waits for the numbers of a step; its record."""
        loss = float(np.mean([float(x) for x in jax.tree.leaves(metrics["loss"])]))
        self.last_intervals = timeline.intervals()
        now_s = time.perf_counter()
        step_time_s, self.last_s = now_s - self.last_s, now_s
        num_tokens = self.config.train.global_batch * self.config.model.context_length
        return {
            "step": step,
            "loss": loss,
            "grad_norm": float(metrics["grad_norm"]),
            "learning_rate": float(metrics["learning_rate"]),
            "tokens_per_s": num_tokens / step_time_s,
            "step_time_s": step_time_s,
            "bubble_share": bubble_share(self.last_intervals),
            "skipped": bool(metrics["skipped"]),
            "link_bytes": link_bytes,
        }

    def _write(self, record: dict[str, Any]) -> None:
        self.metrics.write(record)
        self.console.step(record)
        self.history.append(record)

    def _evaluate(self, states: list[StageState]) -> float:
        """Mean loss over the validation batches, nats per token."""
        losses = [
            self.runner.evaluate(states, model_inputs(self.batches.validation(i)))
            for i in range(self.config.train.eval_batches)
        ]
        self.runner.take_link_bytes()  # not a step's traffic
        return float(np.mean([float(x) for batch in losses for x in batch]))
