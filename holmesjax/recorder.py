"""Puts each step together from what its processes measured, and writes it down. No JAX.

A part is what one process tells of one step: a dict with

    step           optimizer steps done
    intervals      its tasks, as `timeline.Interval`
    link_bytes     what it received, by link
    step_time_s    since the step before
    loss, grad_norm, learning_rate, skipped, val_loss     where it knows them

With one process the part is the step; with many, the step is complete when all have told of it.
"""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

from holmesjax import report
from holmesjax.config import Config
from holmesjax.console import Console
from holmesjax.errors import LostLeaseError
from holmesjax.metrics import Metrics
from holmesjax.timeline import Interval, bubble_share, from_first_start

TIMELINE = "timeline.json"
Part = dict[str, Any]


class Recorder:
    """Writes the records of a session of a run; a context manager.

    Args:
      run_dir: the run folder.
      config: of the run.
      done_steps: steps before this session.
      num_parts: processes that tell of every step.
      stream: where progress is printed; standard output if None.
      on_step: takes the record of each step; what it returns is added.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        *,
        done_steps: int,
        num_parts: int = 1,
        stream: TextIO | None = None,
        on_step: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
    ):
        self.history: list[dict[str, Any]] = []
        self.tasks: list[dict[str, Any]] = []  # of the last step, as `timeline.json` has them
        self._run_dir, self._config, self._num_parts = run_dir, config, num_parts
        self._on_step = on_step
        self._parts: dict[int, list[Part]] = {}
        with ExitStack() as stack:
            self._metrics = stack.enter_context(Metrics(run_dir, config.log, done_steps=done_steps))
            self.console = stack.enter_context(
                Console(every_s=config.train.log_every_s, stream=stream)
            )
            self._stack = stack.pop_all()
        self.console.start(config.train.steps, done_steps)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._stack.close()
        if self.history and not isinstance(error, LostLeaseError):
            timeline = {"step": self.history[-1]["step"], "tasks": self.tasks}
            with contextlib.suppress(OSError):  # of a full disk: what ended the run says more
                (self._run_dir / TIMELINE).write_text(json.dumps(timeline))

    def take(self, part: Part) -> None:
        """Takes what one process tells of one step."""
        parts = self._parts.setdefault(part["step"], [])
        parts.append(part)
        if len(parts) == self._num_parts:
            self._write(self._parts.pop(part["step"]))

    def write_report(self) -> Path | None:
        """The report of all steps so far; None if this session has none."""
        return report.write_report(self._run_dir) if self.history else None

    def _write(self, parts: Sequence[Part]) -> None:
        train = self._config.train
        known: Part = {}
        for part in parts:
            known |= part
        intervals = from_first_start([Interval(*i) for part in parts for i in part["intervals"]])
        link_bytes: dict[str, int] = {}
        for part in parts:
            for link, num_bytes in part["link_bytes"].items():
                link_bytes[link] = link_bytes.get(link, 0) + num_bytes
        step_time_s = max(part["step_time_s"] for part in parts)
        record = {
            "step": known["step"],
            "loss": known["loss"],
            "grad_norm": known["grad_norm"],
            "learning_rate": known["learning_rate"],
            "tokens_per_s": train.global_batch * self._config.model.context_length / step_time_s,
            "step_time_s": step_time_s,
            "bubble_share": bubble_share(intervals),
            "skipped": known["skipped"],
            "link_bytes": link_bytes,
        }
        if "val_loss" in known:
            record["val_loss"] = known["val_loss"]
        if self._on_step:
            record |= self._on_step(record)
        self.tasks = [interval._asdict() for interval in intervals]
        self._metrics.write(record)
        self.console.step(record)
        self.history.append(record)
