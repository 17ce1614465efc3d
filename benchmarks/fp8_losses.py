"""Losses of fp8 beside those of bfloat16: python -m benchmarks.fp8_losses

Trains a small Llama on the source of Python's standard library, 300 steps in each mode of
`model.fp8`, on one CPU, which computes with the numbers of fp8. All modes begin with the same
parameters and read the same sequences, so their losses differ by the formats alone. The last row
shows what chance does: it has bfloat16 and another seed, so other parameters and another order.

    training      mean loss of the last 50 steps, nats per byte
    validation    loss after the last step
    difference    of each from bfloat16's
    apart         the largest difference of one step's loss from bfloat16's

A small model shows that nothing is broken. It cannot show how a large one trains for weeks. There
is no bar. Writes the result after each mode.
"""

import argparse
import io
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.provenance import RESULTS, provenance
from holmesjax import Trainer
from holmesjax.errors import HolmesError

NAME = "fp8_losses"
RUN_FILE = "configs/runs/small_llama.yaml"
LAST = 50  # steps, of which the mean is shown
SETTINGS = (
    "topology=configs/topologies/one_cpu.yaml",
    "parallel.microbatches=2",
    "model.num_layers=5",
    "model.width=96",
    "model.num_heads=3",
    "model.num_kv_heads=3",
    "model.mlp_width=256",
    "model.context_length=128",
    "model.vocab_size=256",
    "data.source=text",
    "data.corpus=python-stdlib",
    "data.tokenizer=bytes",
    "train.compute_dtype=bfloat16",
    "train.steps=300",
    "train.global_batch=8",
    "train.eval_every=300",
    "train.eval_batches=16",
    "optimizer.learning_rate=2e-3",
    "optimizer.warmup_steps=30",
    "log.report=false",
)
MODES = {
    "bfloat16": (),
    "fp8, delayed scales": ("model.fp8.scaling=delayed",),
    "fp8, current scales": ("model.fp8.scaling=current",),
    "fp8, first and last block in bfloat16": (
        "model.fp8.exclude_first=1",
        "model.fp8.exclude_last=1",
    ),
    "fp8, `down` in bfloat16": ("model.fp8.exclude_down=true",),
    "bfloat16, another seed": ("train.seed=1",),
}


def main(arguments: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(NAME, description=__doc__, formatter_class=raw)
    parser.add_argument("--out", metavar="DIR", type=Path, default=RESULTS, help="(results/)")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="for all modes")
    args = parser.parse_args(arguments)
    result: dict[str, Any] = {**provenance(NAME), "settings": [*SETTINGS, *args.settings]}
    result["modes"] = {}
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        for mode, settings in MODES.items():
            result["modes"][mode] = measure([*SETTINGS, *args.settings, *settings])
            path = args.out / f"{NAME}.json"
            path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            path.with_suffix(".md").write_text(page(result), encoding="utf-8")
            print(page(result), flush=True)
    except HolmesError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    return 0


def measure(settings: Sequence[str]) -> dict[str, Any]:
    """Trains in one mode, and returns its losses."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(RUN_FILE, [*settings, f"run.dir={folder}/run"], stream=io.StringIO())
        records = trainer.train()
    return {
        "losses": [round(record["loss"], 5) for record in records],
        "skipped": sum(bool(record["skipped"]) for record in records),
        "validation": round(records[-1]["val_loss"], 5),
    }


def page(result: dict[str, Any]) -> str:
    """The result as Markdown.

    >>> modes = {"bfloat16": {"losses": [3.0, 1.0], "validation": 2.0, "skipped": 0},
    ...          "fp8": {"losses": [3.25, 1.25], "validation": 1.5, "skipped": 0}}
    >>> made = {"commit": "c", "date": "d", "command": "x"}
    >>> print(page({"modes": modes, **made}).splitlines()[3])
    | fp8 | 2.2500 | +0.2500 | 1.5000 | -0.5000 | 0.2500 |
    """
    rows = [
        "| mode | training | difference | validation | difference | apart |",
        "| --- |" + " ---: |" * 5,
    ]
    plain = result["modes"]["bfloat16"]
    mean = lambda run: float(np.mean(run["losses"][-LAST:]))
    for mode, run in result["modes"].items():
        training, validation = mean(run), run["validation"]
        apart = np.max(np.abs(np.subtract(run["losses"], plain["losses"])))
        rows.append(
            f"| {mode} | {training:.4f} | {training - mean(plain):+.4f} | {validation:.4f} "
            f"| {validation - plain['validation']:+.4f} | {apart:.4f} |"
        )
    skipped = sum(run["skipped"] for run in result["modes"].values())
    made = f"commit {result['commit']}, {result['date']}, on a CPU: `{result['command']}`"
    return "\n".join([*rows, "", f"Steps that were skipped: {skipped}.", "", made]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
