"""Runs the parts of `gpu_day`, each in its own process with its own limit, and writes the results.

A process that fails, or that hangs until its limit, gives a row as well.
"""

import argparse
import contextlib
import importlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from benchmarks.provenance import provenance
from holmesjax import xla_flags
from holmesjax.config import CHECKOUT
from holmesjax.hosts import hardware

NAME = "gpu_day"
MODULE = "benchmarks.gpu_day_processes"
LOG_BYTES = 20_000  # of the end of each part's output
LOOK_S = 0.05  # between two looks at what runs
CHECKS_AT_A_TIME = 5  # no more than there are cores; of 15 at a time most reached their limits
NO_TUNING = "--xla_gpu_autotune_level=0"
KILLED_S = 10.0  # for a part that was killed to be gone; what hangs in a driver is left to it

Row = dict[str, Any]

ANCHORS = """
| published, TFLOP/s, causal, 128 wide | forward at 4k / 8k / 16k | backward |
| --- | ---: | ---: |
| cuDNN 9.19 on an H200, 64 query and 8 key heads | 591 / 644 / 673 | 474 / 541 / 579 |
| tokamax 0.0.17 on an H100 | 567 / 620 / 637 | 408 / 438 / 452 |

| published | MFU |
| --- | ---: |
| MaxText, Llama 3.1 70B on H200 | 51.4% |
| GPT-3 175B on 128 H100 | 54% |
"""


class DayPart(NamedTuple):
    """Some rows, by one process."""

    name: str
    limit_s: float
    function: str  # module:function, which takes `argument` and whether this is a rehearsal
    argument: Any = None
    needs_s: float = 1.0  # it is not begun with less time than that left
    is_check: bool = False  # of values: several run at a time, and XLA tunes nothing


def serve(part: DayPart, rehearse: bool) -> int:
    """Runs a part in this process: a line of JSON for each row."""
    module, _, function = part.function.partition(":")
    for row in getattr(importlib.import_module(module), function)(part.argument, rehearse):
        print(json.dumps({"row": row}), flush=True)
    return 0


class Outcome(NamedTuple):
    """The rows of a part, and how it ended."""

    rows: list[Row]  # with one of its failure
    text: str  # the end of what it printed
    is_late: bool  # whether it was ended at its limit


@dataclass
class _Running:
    """A part in a process of its own."""

    part: DayPart
    limit_s: float
    process: subprocess.Popen
    out: IO[str]
    said: IO[str]
    start_s: float
    took_s: float | None = None  # None: it has not ended
    is_late: bool = False

    def look(self) -> None:
        """Notes whether it has ended by itself, and ends it at its limit."""
        took_s = time.monotonic() - self.start_s
        if self.process.poll() is not None:
            self.took_s = took_s
        elif took_s >= self.limit_s:
            self.took_s, self.is_late = took_s, True
            self.end()

    def end(self) -> None:
        """Ends it with all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(KILLED_S)

    def outcome(self) -> Outcome:
        status = self.process.poll()
        self.out.seek(0)
        whole = (line for line in self.out if line.startswith('{"row"') and line[-1] == "\n")
        rows = [json.loads(line)["row"] for line in whole]
        self.said.seek(0)
        words = self.said.read()
        if self.is_late:
            problem = f"no end within {self.limit_s:.0f} s"
            rows.append({"what": self.part.name, "problem": problem})
        elif status:
            last = words.strip().splitlines()[-1:]
            problem = f"exit status {status}: {' '.join(last)}"
            rows.append({"what": self.part.name, "problem": problem})
        how = "ended at its limit" if self.is_late else f"exit status {status}"
        text = f"---- {self.part.name}: {self.took_s:.1f} s, {how}\n{words[-LOG_BYTES:]}\n"
        return Outcome(rows, text, self.is_late)


@contextlib.contextmanager
def _running(part: DayPart, limit_s: float, rehearse: bool) -> Iterator[_Running]:
    """The process of a part, which is gone in the end with all that it started."""
    command = [sys.executable, "-m", MODULE, json.dumps(part)]
    with (
        tempfile.TemporaryFile("w+", errors="replace") as out,
        tempfile.TemporaryFile("w+", errors="replace") as said,
    ):
        process = subprocess.Popen(
            command + ["--rehearse"] * rehearse,
            cwd=CHECKOUT,
            env=_environment(part, rehearse),
            stdout=out,
            stderr=said,
            start_new_session=True,  # so that what it starts ends with it
        )
        running = _Running(part, limit_s, process, out, said, time.monotonic())
        try:
            yield running
        finally:
            running.end()


def _environment(part: DayPart, rehearse: bool) -> dict[str, str]:
    environment = os.environ | {"JAX_TRACEBACK_FILTERING": "off"}  # an error's last line is it
    own = environment.get("XLA_FLAGS", "")
    if rehearse:
        flags = xla_flags.joined(xla_flags.for_tiny_programs(), own)
        return environment | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    environment.setdefault("JAX_PLATFORMS", "cuda,cpu")  # by itself JAX would go on without GPU
    if part.is_check:
        environment["XLA_FLAGS"] = xla_flags.joined(NO_TUNING, own)
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # they share the device's memory
    return environment


def run_together(parts: Sequence[DayPart], limit_s: float, rehearse: bool) -> list[Outcome]:
    """Runs parts at the same time, each in a process of its own.

    Args:
      parts: what is run.
      limit_s: for each, unless its own limit is less.
      rehearse: whether nothing counts.
    """
    with contextlib.ExitStack() as stack:
        running = [
            stack.enter_context(_running(part, min(part.limit_s, limit_s), rehearse))
            for part in parts
        ]
        while any(one.took_s is None for one in running):
            time.sleep(LOOK_S)
            for one in running:
                if one.took_s is None:
                    one.look()
        return [one.outcome() for one in running]


def _batches(parts: Sequence[DayPart]) -> Iterator[Sequence[DayPart]]:
    """Every part by itself, but checks that follow each other several at a time."""
    for is_check, alike in itertools.groupby(parts, key=lambda part: part.is_check):
        group, size = list(alike), min(CHECKS_AT_A_TIME, os.cpu_count() or 1) if is_check else 1
        yield from (group[start : start + size] for start in range(0, len(group), size))


def run_parts(
    parts: Sequence[DayPart], out: Path, minutes: float, rehearse: bool, again: Collection[str] = ()
) -> dict[str, Any]:
    """Returns the result, which is written after each part, and goes on from one that is there.

    Args:
      parts: what is to do, in this order. Where the first has nothing but failures, the rest waits.
      out: folder of the results, which has files of its own for each kind of device.
      minutes: for all parts.
      rehearse: whether nothing counts.
      again: how names of parts begin that are run again although they have ended.
    """
    gpus = () if rehearse else hardware.gpus(Path("/"))
    device = gpus[0].name if gpus else "CPU" if rehearse else "not known"
    name = "rehearsal" if rehearse else device
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{NAME}_{re.sub(r'[^a-z0-9]+', '_', name.lower())}.json"
    result: dict[str, Any] = {"parts": {}, "commits": {}}
    with contextlib.suppress(OSError, ValueError):
        result = json.loads(path.read_text())
    driver = gpus[0].driver if gpus else "not known"
    result |= {**provenance(NAME, device), "driver": driver, "rehearsal": rehearse}
    end_s = time.monotonic() + 60 * minutes
    asked = tuple(again)
    due = [
        part
        for part in parts
        if part.name.startswith(asked) or not has_ended(result["parts"].get(part.name))
    ]
    for batch in _batches(due):
        left_s = end_s - time.monotonic()
        ready = [part for part in batch if part.needs_s <= left_s]
        for part in batch:
            if part not in ready:
                print(f"{part.name}: no time left, it needs {part.needs_s:.0f} s", flush=True)
        found = zip(ready, run_together(ready, left_s, rehearse), strict=True)
        for part, (rows, text, is_late) in found:
            is_cut_short = is_late and left_s < part.limit_s
            all_failed = rows and all(row.get("problem") for row in rows)
            is_hopeless = part == parts[0] and all_failed and not is_cut_short
            if is_hopeless or is_cut_short:
                rows[-1]["cut_short"] = True
            for calibration in (row["calibration"] for row in rows if "calibration" in row):
                _write(path.with_suffix(".yaml"), calibration)
            result["parts"][part.name], result["commits"][part.name] = rows, result["commit"]
            with open(path.with_suffix(".log"), "a", encoding="utf-8") as log:
                log.write(text)
            _write(path, json.dumps(result, indent=1) + "\n")
            _write(path.with_suffix(".md"), report(result))
            print(*table({part.name: rows})[2:], sep="\n", flush=True)
            if is_hopeless:
                return result
    return result


def has_ended(rows: list[Row] | None) -> bool:
    """Whether a part with these rows has had its time, well used or not."""
    return bool(rows and "cut_short" not in rows[-1])


def _write(path: Path, text: str) -> None:
    """Whole or not at all: the machine may go away at any moment."""
    temporary = path.with_suffix(path.suffix + ".new")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def table(parts: dict[str, list[Row]]) -> list[str]:
    lines = ["| part | what | by | result |", "| --- | --- | --- | --- |"]
    for name, rows in parts.items():
        for row in rows:
            found = [str(row[key]) for key in ("is", "rate", "errors", "note") if row.get(key)]
            found += [f"{row['ms']:.3f} ms"] if "ms" in row else []
            found += [f"{row['s']:.1f} s"] if "s" in row else []
            if "mfu" in row:
                predicted = row.get("predicted_mfu")
                beside = "" if predicted is None else f", predicted {predicted:.1%}"
                found.append(f"MFU {row['mfu']:.1%}{beside}")
            found += [f"{row['limit']:.0%} of what the device reaches"] if "limit" in row else []
            found += [f"spread {row['spread']:.1%}"] if "spread" in row else []
            if "measured_gib" in row:
                predicted = row.get("predicted_gib")
                beside = "" if predicted is None else f", predicted {predicted:.1f}"
                found.append(f"{row['measured_gib']:.1f} GiB{beside}")
            if row.get("problem"):
                found.append(f"FAILED: {row['problem']}")
            cells = [name, row["what"], row.get("by", ""), "; ".join(found)]
            lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return lines


def report(result: dict[str, Any]) -> str:
    commits = " and ".join(dict.fromkeys(result["commits"].values()))
    about = f"commit {commits}, {result['date']}, {result['device']}, driver {result['driver']}"
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    kind = "A rehearsal on a CPU: no number here means anything.\n\n" * result["rehearsal"]
    text = "\n".join(table(result["parts"]))
    return f"{kind}{text}\n{ANCHORS}\n{about}: `{result['command']}`; {versions}\n"


def main() -> int:
    """Serves one part, for `run_part`."""
    parser = argparse.ArgumentParser(MODULE, description=__doc__)
    parser.add_argument("part", type=json.loads)
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    return serve(DayPart(*args.part), args.rehearse)


if __name__ == "__main__":
    sys.exit(main())
