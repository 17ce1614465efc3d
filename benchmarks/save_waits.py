"""How long steps wait for a save: python -m benchmarks.save_waits

Trains the Llama of `configs/runs/small_llama.yaml`, of 10 million parameters, over two clusters of
a process each. Every process has a run folder of its own, so each stage writes its part to a store
of its own, and the launcher commits. A checkpoint is made after each `--every` steps.

    step     median seconds of the steps that follow no save
    wait     seconds for which training stood still until the arrays were on the host, for each save
    ratio    wait / step

The bar: the median of the ratios is at most 0.05. The first save also compiles the sums of arrays
and makes Orbax's threads, so it stands beside the others and does not count. All of it is of one
run, so work beside it slows both down.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.provenance import RESULTS, provenance
from holmesjax.report import metrics

NAME = "save_waits"
RUN_FILE = "configs/runs/small_llama.yaml"
NODES = ("ib-0", "roce-0")
BAR = 0.05
FEWEST_SAVES = 3  # the first of them does not count
SETTINGS = {  # a text that every Python has
    "data.source": "text",
    "data.corpus": "python-stdlib",
    "data.tokenizer": "bytes",
    "model.vocab_size": "256",
    "train.eval_every": "0",
    "log.report": "false",
    "log.tensorboard": "false",
}


def measure(steps: int, every: int) -> list[dict[str, Any]]:
    """The records of a run whose nodes have a folder each."""
    with tempfile.TemporaryDirectory() as folder:
        homes = [{"node": node, "run_dir": f"{folder}/{node}"} for node in NODES]
        hosts = Path(folder, "hosts.yaml")
        hosts.write_text(json.dumps({"hosts": homes}))
        settings = {**SETTINGS, "train.steps": steps, "checkpoint.every": every}
        settings |= {"run.dir": f"{folder}/{NODES[0]}"}
        words = ["train", RUN_FILE, "--launcher", "local", "--hosts", str(hosts)]
        words += [f"{name}={value}" for name, value in settings.items()]
        subprocess.run([sys.executable, "-m", "launch", *words], check=True)
        return [*metrics.read(Path(folder, NODES[0]))]


def waits(records: Sequence[dict[str, Any]], every: int) -> dict[str, Any]:
    """The seconds of steps and of waits, and their ratios.

    A wait is told with the step before it or after it, whichever is read next.

    >>> wall = [0, 0, 0.5, 0.5, 0.5, 0.6, 0.6]
    >>> steps = [{"step": i + 1, "step_time_s": 2.0, "wall_s": {"checkpoint": w}}
    ...          for i, w in enumerate(wall)]
    >>> waits(steps, 3)
    {'step_s': 2.0, 'first_wait_s': 0.5, 'wait_s': [0.1], 'ratios': [0.05]}
    """
    told = [record["wall_s"]["checkpoint"] for record in records]
    saved = [
        round(told[i + 1] - told[i - 1], 6)
        for i, record in enumerate(records[:-1])
        if record["step"] % every == 0
    ]
    # The first steps compile, or find programs; those after a save share the machine with it.
    free = [r["step_time_s"] for r in records[2:] if (r["step"] - 1) % every]
    step_s = statistics.median(free)
    first, *later = saved
    ratios = [round(wait / step_s, 4) for wait in later]
    return {"step_s": step_s, "first_wait_s": first, "wait_s": later, "ratios": ratios}


def main(arguments: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(NAME, description=__doc__, formatter_class=raw)
    parser.add_argument("--steps", type=int, default=25, help="of the run (25)")
    parser.add_argument("--every", type=int, default=3, help="steps from save to save (3)")
    parser.add_argument("--out", metavar="DIR", type=Path, default=RESULTS, help="(results/)")
    args = parser.parse_args(arguments)
    if args.every < 2:
        parser.error("--every must be 2 at least: some steps must follow no save")
    if args.steps < FEWEST_SAVES * args.every + 1:
        parser.error(f"--steps must be {FEWEST_SAVES} times --every at least, and one more")
    load = os.getloadavg()[0]
    origin = provenance(NAME)  # before the run, whose result is a change
    found = waits(measure(args.steps, args.every), args.every)
    ratio = statistics.median(found["ratios"])
    result = {**origin, "load": load, "settings": SETTINGS, **found, "ratio": ratio, "bar": BAR}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{NAME}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"a step takes {found['step_s']:.3f} s, and waits for a save {ratio:.1%} of that")
    return int(ratio > BAR)


if __name__ == "__main__":
    sys.exit(main())
