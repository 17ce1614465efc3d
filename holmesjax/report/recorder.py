"""Puts each step together from what its processes measured, and writes it down. No JAX.

With one process its report is the step; with many, the step is complete when all have reported it.
`process_step` lists the entries of a report.
"""

import contextlib
import json
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

from holmesjax.config import Config
from holmesjax.errors import ConfigError, LostLeaseError
from holmesjax.files.whole_files import write_whole
from holmesjax.liveness.helper_process import StoppedError, run_module
from holmesjax.liveness.lease import Lease
from holmesjax.plan import mfu
from holmesjax.report import history, link_losses
from holmesjax.report.console import Console, placement_line
from holmesjax.report.expert_alarm import LOADS, STEPS, ExpertAlarm
from holmesjax.report.goodput import WallTime, goodput, rows
from holmesjax.report.metrics import Metrics, read_last
from holmesjax.report.process_step import ProcessStep, known_of
from holmesjax.runtime.timeline import Interval, busy_shares, from_first_start
from holmesjax.units import duration

TIMELINE = "timeline.json"
NUM_RECENT = 10_000  # steps that the medians of a session are of
SHOWN = 3  # of what took time, on the console
# The page is another process's: it needs Matplotlib, and takes long after many steps.
PAGE = "holmesjax.report.page"
AFTER_REPORT_S = 5.0  # that are left for the rest of the end of a run


class Recorder:
    """Writes the records of a session of a run; a context manager.

    Args:
      run_dir: the run folder.
      config: of the run.
      done_steps: steps before this session.
      num_processes: processes that report every step.
      peak_step_s: `Job.measured_peak_step_s`, for the MFU.
      stream: where progress is printed; standard output if None.
      on_step: takes the record of each step; what it returns is added.
      owner: the lease of the run folder, which is looked at before each write.
      shares: of the batch that each island takes; empty: equal ones.
      began_s: when the session began, by `time.monotonic`; None: now.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        *,
        done_steps: int,
        num_processes: int = 1,
        peak_step_s: float | None = None,
        stream: TextIO | None = None,
        on_step: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
        began_s: float | None = None,
        owner: Lease | None = None,
        shares: Sequence[int] = (),
    ):
        self._owner, self._shares = owner, shares
        self.last: dict[str, Any] = {}  # the record of this session's last step
        self._num_steps = 0  # of this session
        self._step_times_s: deque[float] = deque(maxlen=NUM_RECENT)
        self._tokens: deque[int] = deque(maxlen=NUM_RECENT)  # of the same steps
        self.tasks: list[dict[str, Any]] = []  # of the last step, as `timeline.json` has them
        self._run_dir, self._config, self._num_processes = run_dir, config, num_processes
        self._on_step, self._peak_step_s = on_step, peak_step_s
        self._began_s = time.monotonic()
        self._first_s = self._began_s  # when the first step of the session ended
        self._reports: dict[int, list[ProcessStep]] = {}
        self._expert_alarm = ExpertAlarm(config.model.experts, config.log.expert_load_alarm)
        start_s = self._began_s if began_s is None else began_s
        last, kept = read_last(run_dir, done_steps)  # before the file is cut
        self._wall_time = WallTime(last, kept, start_s)
        with ExitStack() as stack:
            self._metrics = stack.enter_context(
                Metrics(run_dir, config.log, done_steps=done_steps, owner=owner)
            )
            self.console = stack.enter_context(
                Console(every_s=config.train.log_every_s, stream=stream)
            )
            self._stack = stack.pop_all()
        self.console.start(config.train.steps, done_steps)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._stack.close()
        if self._num_steps and not isinstance(error, LostLeaseError):
            timeline = {"step": self.last["step"], "tasks": self.tasks}
            # Of a full disk, or of another owner: what ended the run says more.
            with contextlib.suppress(OSError, LostLeaseError):
                if self._owner:
                    self._owner.check()
                write_whole(self._run_dir / TIMELINE, json.dumps(timeline))

    def take(self, report: ProcessStep) -> None:
        """Takes the report of one process about one step."""
        reports = self._reports.setdefault(report["step"], [])
        reports.append(report)
        if len(reports) == self._num_processes:
            self._write(self._reports.pop(report["step"]))

    def summary(self) -> list[str]:
        """The session's result, and where the time of the whole run went; empty without a step."""
        if not self._num_steps:
            return []
        count, last, whole_s = self._num_steps, self.last, time.monotonic() - self._began_s
        step_s = statistics.median(self._step_times_s)
        utilisation = mfu.shown(self._peak_step_s, step_s)
        tokens = statistics.median(self._tokens)
        spent = ", ".join(f"{name} {duration(seconds)}" for name, seconds in rows(last)[:SHOWN])
        of_last = f" of the last {NUM_RECENT:,}" if count > NUM_RECENT else ""
        return [
            f"trained     {count} step{'s' if count != 1 else ''} in {duration(whole_s)}: "
            f"{tokens / step_s:,.0f} tokens/s{utilisation}, {step_s:.3g} s/step (median{of_last})",
            f"goodput     {goodput(last):.1%} of the run's time to its last step: {spent}",
        ]

    def _tokens_of(self, step: int) -> int:
        return self._config.train.batch_of(step) * self._config.model.context_length

    def write_report(
        self, limit_s: float, is_given_up: Callable[[], bool] = lambda: False
    ) -> str | None:
        """Has another process write the report of all steps so far.

        Args:
          limit_s: until this process is to be gone.
          is_given_up: asked again and again whether somebody wants to go without the report.

        Returns:
          A line that says where it is, or why it is not there; None if no report is wanted.
        """
        if not self._num_steps or not self._config.log.report:
            return None
        limit_s -= AFTER_REPORT_S
        lines: list[str] = []

        def pause(seconds: float) -> None:
            if is_given_up():
                raise StoppedError
            time.sleep(seconds)

        try:
            if limit_s <= 0.0:
                raise StoppedError
            run_dir = [str(self._run_dir)]
            ended = run_module(PAGE, run_dir, limit_s=limit_s, pause=pause, say=lines.append)
        except StoppedError:
            why = "the job is to end now"
        except OSError as error:
            why = str(error)
        else:
            if ended.status == 0:
                return f"report  {lines[-1]}"
            status = f"it ended with status {ended.status}"
            is_late = ended.status is None
            why = f"it took more than {limit_s:.0f} s" if is_late else ended.last_line or status
        return f"no report: {why}; to write it: python -m launch report {self._run_dir}"

    def _time_left(self, step: int) -> dict[str, float]:
        """Seconds to the last step, with what comes between steps; from the second step on."""
        now_s, count = time.monotonic(), self._num_steps
        if not count:
            self._first_s = now_s
            return {}
        left = self._config.train.steps - step
        return {"time_left_s": left * (now_s - self._first_s) / count}

    def _write(self, reports: Sequence[ProcessStep]) -> None:
        known = known_of(reports, self._shares)
        intervals = from_first_start(
            [Interval(*i) for report in reports for i in report["intervals"]]
        )
        busy = busy_shares(intervals)
        step_time_s = max(report["step_time_s"] for report in reports)
        share = self._config.train.batch_of(known["step"]) / self._config.train.global_batch
        peak_s = self._peak_step_s
        record = {
            "step": known["step"],
            "loss": known["loss"],
            "grad_norm": known["grad_norm"],
            "learning_rate": known["learning_rate"],
            "tokens_per_s": self._tokens_of(known["step"]) / step_time_s,
            **({"mfu": share * mfu.of_step(peak_s, step_time_s)} if peak_s else {}),
            "step_time_s": step_time_s,
            "input_wait_s": max(report["input_wait_s"] for report in reports),
            **self._time_left(known["step"]),
            **self._wall_time.step(reports),
            "bubble_share": 1.0 - statistics.fmean(busy),
            **({"busy_share": {f"stage {i}": x for i, x in enumerate(busy)}} if busy[1:] else {}),
            "skipped": known["skipped"],
            **({"spike": known["spike"]} if "spike" in known else {}),
            **known.get("auxiliary", {}),
            "link_bytes": _sum_by_link(report["link_bytes"] for report in reports),
        }
        names = ("val_loss", "val_losses", "island_spread", "round", STEPS, LOADS, "expert_peaks")
        for name in names:
            if name in known:
                record[name] = known[name]
        if memory := {
            n: b for report in reports for n, b in report.get("memory_bytes", {}).items()
        }:
            record["memory_bytes"] = memory
        if "validation_bytes" in known:
            record["validation_bytes"] = _sum_by_link(
                report["validation_bytes"] for report in reports
            )
        record |= link_losses.of_step(reports)
        of_experts, alarm = self._expert_alarm.step(record)
        record |= of_experts
        if self._on_step:
            record |= self._on_step(record)
        own = known.get("own", {})
        _refuse_taken(own.keys() & (record.keys() | history.TAKEN))
        record |= own
        self.tasks = [interval._asdict() for interval in intervals]
        self._metrics.write(record)
        self.console.step(record, tuple(own))
        if alarm:
            self.console.print(alarm)
        if "expert_peaks" in record:
            self.console.print(placement_line(record["expert_peaks"]))
        self.last = record
        self._num_steps += 1
        self._step_times_s.append(step_time_s)
        self._tokens.append(self._tokens_of(record["step"]))


def _refuse_taken(names: Collection[str]) -> None:
    """Raises ConfigError if there are names of one's own that a record has for other numbers."""
    for name in sorted(names):
        raise ConfigError(
            f"a callback's number {name!r}",
            "has the name of a number that is in the records of steps",
            found=name,
            fix=f"give it another name, such as own/{name}",
        )


def _sum_by_link(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for bytes_of in counts:
        for link, num_bytes in bytes_of.items():
            found[link] = found.get(link, 0) + num_bytes
    return found
