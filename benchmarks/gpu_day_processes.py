"""Runs the parts of `gpu_day`, each in its own process with its own limit, and writes the results.

A process that fails, or that hangs until its limit, gives a row as well.
"""

import argparse
import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.provenance import provenance
from holmesjax import xla_flags
from holmesjax.config import CHECKOUT
from holmesjax.hosts import hardware

NAME = "gpu_day"
MODULE = "benchmarks.gpu_day_processes"
LOG_BYTES = 20_000  # of the end of each part's output
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


def run_part(part: DayPart, limit_s: float, rehearse: bool) -> Outcome:
    """Runs a part in a process of its own, which is ended at the limit with all that it started."""
    command = [sys.executable, "-m", MODULE, json.dumps(part)]
    environment = os.environ | {"JAX_TRACEBACK_FILTERING": "off"}  # an error's last line is it
    if rehearse:
        own = os.environ.get("XLA_FLAGS", "")
        flags = xla_flags.joined(xla_flags.for_tiny_programs(), own)
        environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    else:
        environment.setdefault("JAX_PLATFORMS", "cuda,cpu")  # by itself JAX would go on without GPU
    start_s = time.monotonic()
    with (
        tempfile.TemporaryFile("w+", errors="replace") as out,
        tempfile.TemporaryFile("w+", errors="replace") as said,
    ):
        process = subprocess.Popen(
            command + ["--rehearse"] * rehearse,
            cwd=CHECKOUT,
            env=environment,
            stdout=out,
            stderr=said,
            start_new_session=True,  # so that what it starts ends with it
        )
        status = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(limit_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILLED_S)
        out.seek(0)
        whole = (line for line in out if line.startswith('{"row"') and line[-1] == "\n")
        rows = [json.loads(line)["row"] for line in whole]
        said.seek(0)
        words = said.read()
    took_s = time.monotonic() - start_s
    if status is None:
        rows.append({"what": part.name, "problem": f"no end within {limit_s:.0f} s"})
    elif status:
        last = words.strip().splitlines()[-1:]
        problem = f"exit status {status}: {' '.join(last)}"
        rows.append({"what": part.name, "problem": problem})
    how = "ended at its limit" if status is None else f"exit status {status}"
    text = f"---- {part.name}: {took_s:.1f} s, {how}\n{words[-LOG_BYTES:]}\n"
    return Outcome(rows, text, status is None)


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
    for part in parts:
        asked = part.name.startswith(tuple(again))
        if has_ended(result["parts"].get(part.name)) and not asked:
            continue
        left_s = end_s - time.monotonic()
        if left_s < 1:
            print(f"{part.name}: no time left", flush=True)
            continue
        rows, text, is_late = run_part(part, min(part.limit_s, left_s), rehearse)
        is_cut_short = is_late and left_s < part.limit_s
        all_failed = rows and all(row.get("problem") for row in rows)
        is_hopeless = part == parts[0] and all_failed and not is_cut_short
        if is_hopeless or is_cut_short:
            rows[-1]["cut_short"] = True
        for found in (row["calibration"] for row in rows if "calibration" in row):
            _write(path.with_suffix(".yaml"), found)
        result["parts"][part.name], result["commits"][part.name] = rows, result["commit"]
        with open(path.with_suffix(".log"), "a", encoding="utf-8") as log:
            log.write(text)
        _write(path, json.dumps(result, indent=1) + "\n")
        _write(path.with_suffix(".md"), report(result))
        print(*table({part.name: rows})[2:], sep="\n", flush=True)
        if is_hopeless:
            break
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
            found = [str(row[key]) for key in ("is", "rate", "errors") if row.get(key)]
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
