"""Losses of islands by each outer rule, and how far pairs drift: python -m benchmarks.island_rules

Trains a small model on eight islands in one process, 400 steps with a meeting every 10 and a
learning rate that falls to a tenth, by each rule of `parallel.outer.rule`. All begin with the same
parameters and read the same sequences. Bars, of a miniature of NoLoCo's claims:

    loss      of pairs within 2 % of that of the rule nesterov, by validation after the last step
    spread    of weights over islands: bounded, and falling with the learning rate: at the end at
              most half of the most, and with half of the rate below that of the whole rate

A small model shows that nothing is broken. It cannot show how a large one trains for weeks. Writes
the result after each run.
"""

import argparse
import io
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.provenance import RESULTS, provenance
from holmesjax import Trainer
from holmesjax.errors import HolmesError

NAME = "island_rules"
RUN_FILE = "configs/runs/quickstart.yaml"
ISLANDS = 8
RATE = 3e-3
CLUSTER = """
  - name: c{number}
    fabric: infiniband
    nodes: [{{name: n{number}, devices: {{kind: cpu, count: 1}}}}]
    nics: [{{kind: infiniband_200}}, {{kind: ethernet_25}}]
"""
LINK = "  - {{between: [c{a}, c{b}], fabric: ethernet, bandwidth: 1 Gb/s, latency: 50 ms}}\n"
SETTINGS = (
    "parallel=null",
    "parallel.microbatches=1",
    "model.num_layers=2",
    "model.width=64",
    "model.num_heads=2",
    "model.context_length=64",
    "train.steps=400",
    "train.global_batch=32",
    "train.eval_every=40",
    "train.eval_batches=4",
    "checkpoint.every=400",
    f"optimizer.learning_rate={RATE}",
    "optimizer.warmup_steps=40",
    "optimizer.schedule=cosine",
    "optimizer.final_fraction=0.1",
    "log.report=false",
    "log.tensorboard=false",
)
HALF = f"optimizer.learning_rate={RATE / 2}"
RULES = {
    "nesterov": "{rule: nesterov}",
    "noloco": "{rule: noloco}",
    "noloco, half the learning rate": "{rule: noloco}",
    "noloco, bfloat16": "{rule: noloco, codec: bfloat16}",
    "eager": "{rule: eager}",
    "co2": "{rule: co2}",
    "nesterov, bfloat16": "{rule: nesterov, codec: bfloat16}",
}


def main(arguments: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(NAME, description=__doc__, formatter_class=raw)
    parser.add_argument("--out", metavar="DIR", type=Path, default=RESULTS, help="(results/)")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="for all runs")
    args = parser.parse_args(arguments)
    result: dict[str, Any] = {**provenance(NAME), "settings": [*SETTINGS, *args.settings]}
    result["rules"] = {}
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        for name, rule in RULES.items():
            settings = [*SETTINGS, *args.settings, *([HALF] if "half" in name else [])]
            result["rules"][name] = measure(rule, settings)
            path = args.out / f"{NAME}.json"
            path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            path.with_suffix(".md").write_text(page(result), encoding="utf-8")
            print(page(result), flush=True)
    except HolmesError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    return 0


def measure(rule: str, settings: Sequence[str]) -> dict[str, Any]:
    """Trains by one rule, and returns its losses, its spreads and its bytes."""
    with tempfile.TemporaryDirectory() as folder:
        topology = Path(folder) / "islands.yaml"
        topology.write_text(topology_text(ISLANDS), encoding="utf-8")
        islands = (
            f"topology={topology}",
            "parallel.across=local_updates",
            "parallel.every=10",
            f"parallel.outer={rule}",
            f"run.dir={folder}/run",
        )
        trainer = Trainer(RUN_FILE, [*settings, *islands], stream=io.StringIO())
        records = trainer.train()
    evaluated = [record for record in records if "val_loss" in record]
    sent = sum(sum(record["link_bytes"].values()) for record in records)
    return {
        "validation": [round(record["val_loss"], 5) for record in evaluated],
        "learning_rate": [record["learning_rate"] for record in evaluated],
        "spread": [record["island_spread"] for record in evaluated if "island_spread" in record],
        "sent_bytes": sent / ISLANDS,
    }


def topology_text(count: int) -> str:
    """A topology of so many clusters, each of one device, with a slow link between any two."""
    clusters = "".join(CLUSTER.format(number=number) for number in range(count))
    links = [LINK.format(a=a, b=b) for b in range(count) for a in range(b)]
    return f"name: islands\nclusters:\n{clusters}links:\n{''.join(links)}"


def page(result: dict[str, Any]) -> str:
    """The result as Markdown.

    >>> rules = {"nesterov": {"validation": [3.0, 2.0], "spread": [], "sent_bytes": 2e6},
    ...          "noloco": {"validation": [3.0, 2.02], "spread": [0.002, 1e-3], "sent_bytes": 1e6}}
    >>> made = {"commit": "c", "date": "d", "command": "x"}
    >>> print(page({"rules": rules, **made}).splitlines()[3])
    | noloco | 2.0200 | +1.00 % | 0.00200 | 0.00100 | 1.0 MB |
    """
    rows = [
        "| rule | validation | difference | most spread | spread at the end | sent by an island |",
        "| --- |" + " ---: |" * 5,
    ]
    plain = result["rules"]["nesterov"]["validation"][-1]
    for name, run in result["rules"].items():
        loss, spread = run["validation"][-1], run["spread"]
        spreads = f"{max(spread):.5f} | {spread[-1]:.5f}" if spread else "0 | 0"
        share, sent = 100 * (loss / plain - 1), f"{run['sent_bytes'] / 1e6:.1f} MB"
        rows.append(f"| {name} | {loss:.4f} | {share:+.2f} % | {spreads} | {sent} |")
    made = f"commit {result['commit']}, {result['date']}, on a CPU: `{result['command']}`"
    return "\n".join([*rows, "", made]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
