"""The seconds of a run since it was first started, by what they were spent on. No JAX.

    start        processes start, read data and restore a checkpoint
    compile      programs are compiled, or taken from the folder of programs
    step         steps that count
    input        steps wait for their batches
    validation   validations
    checkpoint   steps wait for a checkpoint to be taken
    lost         steps after the checkpoint from which a run goes on: they are done again
    stopped      nobody trains: between sessions, and while a failure is found out

They add up to the time from the first start of the run to its last record. The record of each step
has the sums so far, `wall_s`, so they outlive every crash, and its time, `time_s`. A session that
ends before its first step leaves no record, and counts as stopped.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from holmesjax.report.process_step import ProcessStep

BUCKETS = ("step", "input", "validation", "checkpoint", "start", "compile", "lost", "stopped")
MEASURED = {
    "input": "input_wait_s",
    "validation": "validation_s",
    "checkpoint": "checkpoint_s",
}  # what processes tell of a step
Record = Mapping[str, Any]


class WallTime:
    """The clock of one session of a run.

    Args:
      last: the last record of earlier sessions; None: there is none.
      kept: the last of a step that the session need not do again; None: there is none.
      began_s: when it began, by `time.monotonic`.
    """

    def __init__(self, last: Record | None, kept: Record | None, began_s: float):
        self._sums = dict.fromkeys(BUCKETS, 0.0)
        self._told_s = began_s
        self._is_starting = True
        # Only the time between sessions is taken from the host's clock.
        self._epoch_s = time.time() - time.monotonic()
        if kept:
            self._sums |= kept.get("wall_s", {})
        if last and "wall_s" in last:
            all_s = sum(last["wall_s"].values())
            self._sums["lost"] += max(all_s - sum(self._sums.values()), 0.0)
            self._sums["stopped"] += max(self._epoch_s + began_s - last["time_s"], 0.0)

    def step(self, reports: Sequence[ProcessStep]) -> dict[str, Any]:
        """The entries of a step's record for its time, from the reports of its processes."""
        now_s = time.monotonic()
        left_s, self._told_s = now_s - self._told_s, now_s
        if self._is_starting:
            in_step_s = max(report["step_time_s"] for report in reports)
            start_s = max(left_s - in_step_s, 0.0)
            compile_s = min(max(report.get("compile_s", 0.0) for report in reports), start_s)
            self._sums["compile"] += compile_s
            self._sums["start"] += start_s - compile_s
            left_s, self._is_starting = min(left_s, in_step_s), False
        for bucket, name in MEASURED.items():
            # Processes overlap, and each is told of its longest: they cannot be more than all.
            measured_s = min(max(report.get(name, 0.0) for report in reports), left_s)
            self._sums[bucket] += measured_s
            left_s -= measured_s
        self._sums["step"] += left_s
        return {"time_s": self._epoch_s + now_s, "wall_s": dict(self._sums)}


def goodput(record: Record) -> float:
    """The share of a run's time that went into steps that count.

    >>> goodput({"wall_s": {"step": 6.0, "start": 1.0, "lost": 1.0}})
    0.75
    """
    spent = record["wall_s"]
    return float(spent["step"] / max(sum(spent.values()), 1e-9))


def rows(record: Record) -> list[tuple[str, float]]:
    """The activities that took time, the longest first."""
    found = [(name, seconds) for name, seconds in record["wall_s"].items() if seconds]
    return sorted(found, key=lambda row: -row[1])
