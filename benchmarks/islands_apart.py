"""Islands of unlike speed that wait for nobody: python -m benchmarks.islands_apart

Two islands, each a process, train a small model through a mailbox in a folder. The second takes
three times as long for a step. Both begin at the same moment and stop after `--seconds`. The run is
made with means weighted by tokens, and with plain means, in turn, for each seed.

    loss       validation loss of the global weights after so many seconds, nats per byte
    steps      of each island

Steps sleep up to their time, so that the speeds do not depend on what else this machine does, as
long as it has the time for the steps. The bar: the weighted mean has the lower loss after all
seconds, in the mean over seeds. Writes the result after each pair.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.provenance import RESULTS, provenance

NAME = "islands_apart"
RUN_FILE = "configs/runs/islands.yaml"
STEP_S = {"ib": 0.4, "roce": 1.2}  # of a step of each island
MERGES = ("tokens", "uniform")
SETTINGS = {
    "topology": "configs/topologies/two_cpus.yaml",
    "model.num_layers": 2,
    "model.width": 64,
    "model.num_heads": 2,
    "model.context_length": 64,
    "train.steps": 100_000,
    "train.global_batch": 16,
    "train.eval_every": 10,
    "train.eval_batches": 4,
    "optimizer.schedule": "constant",
    "parallel.every": 6,
    "parallel.meet": "mailbox",
    "parallel.grace_s": 10.0,
    "parallel.stages": 1,
    "parallel.microbatches": 1,
    "checkpoint.every": 100_000,
    "log.report": False,
    "log.tensorboard": False,
}


def measure(seed: int, merge: str, seconds: float) -> dict[str, Any]:
    """A run of both islands: losses of the fast one with their seconds, and the steps of each."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {**SETTINGS, "run.dir": f"{folder}/run", "train.seed": seed}
        processes = {}
        for name, step_s in STEP_S.items():
            own = json.dumps({**settings, "parallel.island": name})
            options = json.dumps({"step_s": step_s, "merge": merge})
            processes[name] = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.island_process", RUN_FILE, own, options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        try:
            for process in processes.values():
                assert _said_by(process) == "ready\n"
            began_s = time.time()
            for process in processes.values():
                assert process.stdin
                process.stdin.write(f"{began_s + seconds}\n")
                process.stdin.flush()
            found = {name: json.loads(_said_by(p)) for name, p in processes.items()}
        finally:
            for process in processes.values():
                process.kill()
                process.wait()
    losses = [(round(at_s - began_s, 1), loss) for at_s, loss in found["ib"]["losses"]]
    return {"losses": losses, "steps": {name: island["steps"] for name, island in found.items()}}


def _said_by(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline()


def loss_at(losses: Sequence[Sequence[float]], seconds: float) -> float:
    """The newest loss before so many seconds."""
    return [loss for at_s, loss in losses if at_s <= seconds][-1]


def main(arguments: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(NAME, description=__doc__, formatter_class=raw)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind (3)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of a run (60)")
    parser.add_argument("--out", metavar="DIR", type=Path, default=RESULTS, help="(results/)")
    args = parser.parse_args(arguments)
    result: dict[str, Any] = {**provenance(NAME), "settings": SETTINGS, "step_s": STEP_S}
    result |= {"seconds": args.seconds, "runs": {merge: [] for merge in MERGES}}
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in range(args.seeds):
        for merge in MERGES:
            run = measure(seed, merge, args.seconds)
            result["runs"][merge].append({"seed": seed, **run})
            print(f"seed {seed}, {merge}: {run['losses'][-1]}, steps {run['steps']}", flush=True)
        write(result, args.out)
    return 0


def write(result: dict[str, Any], out: Path) -> None:
    """Writes the result as JSON and as a table."""
    (out / f"{NAME}.json").write_text(json.dumps(result, indent=1) + "\n")
    whole = result["seconds"]
    times = [whole / 3, 2 * whole / 3, whole + 5]
    lines = [
        f"# {NAME}",
        "",
        f"{result['command']}, commit {result['commit']}, {result['date']}",
        "",
    ]
    lines += ["| mean of weights | " + " | ".join(f"loss, {t:.0f} s" for t in times) + " | steps |"]
    lines += ["| --- " * (len(times) + 2) + "|"]
    for merge, runs in result["runs"].items():
        means = [statistics.fmean(loss_at(run["losses"], t) for run in runs) for t in times]
        steps = "; ".join(", ".join(map(str, run["steps"].values())) for run in runs)
        cells = [f"{mean:.3f}" for mean in means]
        lines.append(f"| by {merge} | {' | '.join(cells)} | {steps} |")
    (out / f"{NAME}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
