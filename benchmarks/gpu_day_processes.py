"""Runs the parts of `gpu_day`, each in its own process with its own limit, and writes the results.

A process that fails, or that hangs until its limit, gives a row as well.
"""

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.provenance import commit, provenance
from holmesjax import xla_flags
from holmesjax.config import CHECKOUT

NAME = "gpu_day"
MODULE = "benchmarks.gpu_day_processes"
LOG_BYTES = 20_000  # of the end of each part's output

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


def run_part(part: DayPart, limit_s: float, rehearse: bool) -> tuple[list[Row], str]:
    """Returns the rows of a process, with one of its failure, and the end of what it printed."""
    command = [sys.executable, "-m", MODULE, json.dumps(part)]
    environment = os.environ | {"JAX_TRACEBACK_FILTERING": "off"}  # an error's last line is it
    if rehearse:
        own = os.environ.get("XLA_FLAGS", "")
        flags = xla_flags.joined(xla_flags.for_tiny_programs(), own)
        environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    start_s = time.monotonic()
    with (
        tempfile.TemporaryFile("w+", errors="replace") as said,
        subprocess.Popen(
            command + ["--rehearse"] * rehearse,
            cwd=CHECKOUT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            start_new_session=True,  # so that what it starts ends with it
        ) as process,
    ):
        assert process.stdout
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            _kill(process)

        timer = threading.Timer(limit_s, end)
        timer.start()
        whole = (line for line in process.stdout if line.startswith('{"row"') and line[-1] == "\n")
        rows = [json.loads(line)["row"] for line in whole]
        status = process.wait()
        timer.cancel()
        _kill(process)
        said.seek(0)
        words = said.read()
    took_s = time.monotonic() - start_s
    if is_late.is_set():
        rows.append({"what": part.name, "problem": f"no end within {limit_s:.0f} s"})
    elif status:
        last = words.strip().splitlines()[-1:]
        problem = f"exit status {status}: {' '.join(last)}"
        rows.append({"what": part.name, "problem": problem})
    text = f"---- {part.name}: {took_s:.1f} s, exit status {status}\n{words[-LOG_BYTES:]}\n"
    return rows, text


def _kill(process: subprocess.Popen) -> None:
    """Ends a process and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def run_parts(
    parts: Iterable[DayPart], out: Path, minutes: float, rehearse: bool
) -> dict[str, Any]:
    """Returns the result, which is written after each part, and goes on from one that is there."""
    end_s = time.monotonic() + 60 * minutes
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{NAME}.json"
    result = {**provenance(NAME, "not known"), "rehearsal": rehearse, "parts": {}}
    with contextlib.suppress(OSError, ValueError):
        before = json.loads(path.read_text())
        if (before["commit"], before["rehearsal"]) == (commit(), rehearse):
            result = before
    for part in parts:
        if part.name in result["parts"]:
            continue
        limit_s = min(part.limit_s, end_s - time.monotonic())
        if limit_s < 1:
            print(f"{part.name}: no time left", flush=True)
            continue
        rows, words = run_part(part, limit_s, rehearse)
        if part.name == "machine" and rows:
            result["device"] = rows[0].get("is", "not known")
        for text in (row["calibration"] for row in rows if "calibration" in row):
            _write(out / "profile.yaml", text)
        result["parts"][part.name] = rows
        with open(out / f"{NAME}.log", "a", encoding="utf-8") as log:
            log.write(words)
        _write(path, json.dumps(result, indent=1) + "\n")
        _write(path.with_suffix(".md"), report(result))
        print(*table({part.name: rows})[2:], sep="\n", flush=True)
    return result


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
            found += [f"MFU {row['mfu']:.1%}"] if "mfu" in row else []
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
    about = f"commit {result['commit']}, {result['date']}, {result['device']}"
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
