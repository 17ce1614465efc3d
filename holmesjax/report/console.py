"""Prints the progress of a run: one line every few seconds.

    step 20/400  loss 3.412  12.4k tok/s  |g| 1.23  lr 3.0e-04  0.33 s/step  bubble 21%  links 3 MiB

Link traffic is bytes per step, over all links; `launch top` shows each of them. On a terminal a
progress bar with the time left stays below the lines and goes when the run ends; piped into a file
there are the lines and no control characters.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

import rich.console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from holmesjax.units import duration, show

MAX_COLUMNS = 120


class Console:
    """Prints the first step, the last, and between them one step every `every_s` seconds."""

    def __init__(
        self,
        *,
        every_s: float,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._every_s = every_s
        self._stream = sys.stdout if stream is None else stream
        self._clock = clock
        self._progress: Progress | None = None
        self._bar = TaskID(0)
        self._total_steps = 0
        self._due_s = -float("inf")
        self._waiting: str | None = None  # a line that was seen, not printed

    def __enter__(self) -> "Console":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, total_steps: int, done_steps: int = 0) -> None:
        """Shows the bar, if this is a terminal; the next step is the first."""
        self._total_steps = total_steps
        if self._stream.isatty():
            self._progress = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("time left"),
                TimeRemainingColumn(),
                console=rich.console.Console(file=self._stream),
                get_time=self._clock,
                refresh_per_second=4,
                transient=True,
            )
            self._bar = self._progress.add_task("", total=total_steps, completed=done_steps)
            self._progress.start()

    def step(self, record: Mapping[str, Any], own: Sequence[str] = ()) -> None:
        """Takes the record of one step, as `metrics` writes it; `own` names the user's numbers."""
        now_s = self._clock()
        self._waiting = step_line(record, self._total_steps, own)
        if now_s >= self._due_s or record["step"] >= self._total_steps:
            self._print_step()
            # The next multiple of the interval: the time of a step does not shift the rhythm.
            late = now_s - self._due_s
            on_time = 0 <= late < self._every_s
            self._due_s = (self._due_s if on_time else now_s) + self._every_s
        if "val_loss" in record:
            self.print(validation_line(record, self._total_steps))
        if self._progress:
            self._progress.update(self._bar, completed=record["step"])

    def close(self) -> None:
        """Prints the last step of a run that stopped early, and takes the bar away."""
        self._print_step()
        if self._progress:
            self._progress.stop()
            self._progress = None

    def _print_step(self) -> None:
        if self._waiting:
            self.print(self._waiting)
            self._waiting = None

    def print(self, line: str) -> None:
        """Prints a line above the progress bar."""
        if self._progress:
            self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            self._stream.write(line + "\n")
            self._stream.flush()


def step_line(record: Mapping[str, Any], total_steps: int, own: Sequence[str] = ()) -> str:
    """One step in less than 120 columns; numbers of the user's own come before links and time.

    >>> step_line({"step": 20, "loss": 3.41, "tokens_per_s": 12_400.0, "grad_norm": 1.234,
    ...     "learning_rate": 3e-4, "step_time_s": 0.333, "bubble_share": 0.21, "skipped": False,
    ...     "time_left_s": 126.5, "link_bytes": {"stage 0 -> stage 1": 3 * 2**20}},
    ...     400).split("  ")[-4:]
    ['0.333 s/step', 'bubble 21%', 'links 3 MiB', 'left 2 min 6 s']
    >>> step_line({"step": 1, "loss": 3.41, "tokens_per_s": 12_400.0, "grad_norm": 1.234,
    ...     "learning_rate": 3e-4, "step_time_s": 0.333, "skipped": False, "time_left_s": 126.5,
    ...     "link_bytes": {}, "head_norm": 2.5, "own/with_a_long_name": 1 / 3},
    ...     400, ["head_norm", "own/with_a_long_name"]).split("  ")[-3:]
    ['0.333 s/step', 'head_norm 2.5', 'own/with_a_long_name 0.3333']
    """
    parts = [
        _place(record, total_steps),
        f"loss {record['loss']:.3f}",
        f"{_short(record['tokens_per_s'])} tok/s",
        *([f"MFU {record['mfu']:.0%}"] if "mfu" in record else []),
        f"|g| {record['grad_norm']:.3g}",
        f"lr {record['learning_rate']:.1e}",
        f"{record['step_time_s']:.3g} s/step",
    ]
    links = record["link_bytes"]
    if links:  # a run of one stage has neither bubbles nor links
        parts.append(f"bubble {record['bubble_share']:.0%}")
    if record["skipped"]:
        parts.append("SKIPPED")
    if record.get("spike"):
        parts.append("SPIKE")
    left = [f"left {duration(s)}"] if (s := record.get("time_left_s")) else []
    whole = [f"links {show(sum(links.values()), 'B')}"] if links else []
    ends = [[*whole, *left], whole, left, []]
    numbers = [f"{name} {record[name]:.4g}" for name in own]
    ends = [[*numbers[:count], *end] for count in range(len(own), -1, -1) for end in ends]
    lines = ["  ".join([*parts, *end]) for end in ends]
    return next((line for line in lines if len(line) < MAX_COLUMNS), lines[-1])


def validation_line(record: Mapping[str, Any], total_steps: int) -> str:
    """The loss on the documents that are not trained on.

    >>> validation_line({"step": 20, "val_loss": 3.5}, 400)
    'step  20/400  val loss 3.500'
    """
    return f"{_place(record, total_steps)}  {validation_losses(record)}"


def validation_losses(record: Mapping[str, Any]) -> str:
    """The loss of a validation, and of each of its sets that has a name.

    >>> validation_losses({"val_loss": 3.5, "val_losses": {"web": 3.25, "code": 3.75}})
    'val loss 3.500 (web 3.250, code 3.750)'
    """
    named = [f"{name} {loss:.3f}" for name, loss in record.get("val_losses", {}).items()]
    return f"val loss {record['val_loss']:.3f}" + (f" ({', '.join(named)})" if named else "")


def placement_line(peaks: Mapping[str, Sequence[float]]) -> str:
    """The means over layers of the load of the fullest device, as experts were placed.

    >>> placement_line({"block_001": [1.5, 1.0], "block_003": [1.3, 1.1]})
    'experts placed by load: the fullest device has 1.05 times the mean, 1.40 by number (2 layers)'
    """
    by_number, placed = (sum(pair) / len(peaks) for pair in zip(*peaks.values(), strict=True))
    return (
        f"experts placed by load: the fullest device has {placed:.2f} times the mean, "
        f"{by_number:.2f} by number ({len(peaks)} layer{'s' if len(peaks) != 1 else ''})"
    )


def _place(record: Mapping[str, Any], total_steps: int) -> str:
    width = len(str(total_steps))
    return f"step {record['step']:>{width}}/{total_steps}"


def _short(number: float) -> str:
    """
    >>> _short(940.2), _short(12_432), _short(999_960), _short(3_141_592)
    ('940', '12.4k', '1M', '3.14M')
    """
    for suffix in ("", "k", "M"):
        if abs(number) < 999.5:
            return f"{number:.3g}{suffix}"
        number /= 1000
    return f"{number:.3g}G"
