"""A small Llama over two clusters and on one device: python -m benchmarks.small_llama --out DIR

Trains configs/runs/small_llama.yaml twice, about an hour each on two idle cores, on the text of
`benchmarks.technical_text`:

    two clusters   a process for each cluster, which exchange boundaries over sockets
    one device     the same model, data and optimizer in one stage, in one process

Both runs read the same sequences in the same order, so their losses differ only by rounding. Prints
the numbers, draws both losses into one picture, and draws samples from the run over two clusters.
A run that was stopped goes on when the command is given again.
"""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.provenance import RESULTS, provenance
from holmesjax.errors import DataError, HolmesError
from holmesjax.report import comparison
from holmesjax.report.figures import loss_curves

RUN_FILE = "configs/runs/small_llama.yaml"
RUNS = {
    "two clusters": (),
    "one device": ("topology=configs/topologies/one_cpu.yaml", "parallel.microbatches=null"),
}
PROMPTS = (
    "The kernel",
    "def simplify(",
    "Regular expressions",
    "This function returns",
)
MAX_DIFFERENCE = 0.01  # nats a token, between validation losses of the two runs


def main(arguments: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("small_llama", description=__doc__, formatter_class=raw)
    parser.add_argument("--text", metavar="DIR", default="corpora/technical", help="(%(default)s)")
    parser.add_argument("--out", metavar="DIR", default="runs", help="of the runs (%(default)s)")
    parser.add_argument("--result", metavar="NAME", default="small_llama", help="(%(default)s)")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="for both runs")
    args = parser.parse_args(arguments)
    text = Path(args.text)
    try:
        if not (text / "tokens").is_dir():
            problem, fix = "has no files of tokens", "run python -m benchmarks.technical_text"
            raise DataError(str(text), problem, found="no folder tokens", fix=fix)
        corpus = [f"data.corpus={text / 'tokens'}", f"data.tokenizer={text / 'tokenizer'}"]
        folders = []
        for name, settings in RUNS.items():
            folders.append(Path(args.out) / f"small_llama_{name.replace(' ', '_')}")
            own = [*corpus, *settings, *args.settings, f"run.dir={folders[-1]}"]
            _launch(["train", RUN_FILE, *own, "--launcher", "local"])
        runs = comparison.load([str(folder) for folder in folders])
    except HolmesError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    result: dict[str, Any] = {
        **provenance("small_llama"),
        "documents": _documents(text / "manifest"),
        "runs": {name: _numbers(run.records) for name, run in zip(RUNS, runs, strict=True)},
    }
    first, second = (numbers["validation"] for numbers in result["runs"].values())
    result["largest_difference"] = max(abs(first[step] - second[step]) for step in first)
    result["samples"] = _samples(folders[0])
    curves = {name: run.records for name, run in zip(RUNS, runs, strict=True)}
    out = RESULTS / args.result
    loss_curves(curves).savefig(out.with_suffix(".png"), dpi=150, facecolor="white")
    out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    out.with_suffix(".md").write_text(page(result), encoding="utf-8")
    print(page(result))
    return 0 if result["largest_difference"] <= MAX_DIFFERENCE else 1


def page(result: dict[str, Any]) -> str:
    """The result as Markdown: a table of both runs, and the samples."""
    lines = [
        f"`{result['command']}` at commit {result['commit']}, {result['date']}, "
        f"{result['device']['cores']} cores of {result['device']['cpu']}.",
        "",
        "| | " + " | ".join(result["runs"]) + " |",
        "| --- |" + " --- |" * len(result["runs"]),
    ]
    rows = {
        "steps": lambda run: f"{run['steps']:,}",
        "tokens": lambda run: f"{run['tokens']:,}",
        "hours": lambda run: f"{run['hours']:.2f}",
        "tokens/s": lambda run: f"{run['tokens_per_s']:,.0f}",
        "last validation loss": lambda run: f"{list(run['validation'].values())[-1]:.4f}",
    }
    for name, cell in rows.items():
        cells = [cell(run) for run in result["runs"].values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", f"Largest difference of validation losses: {result['largest_difference']:.2g}."]
    for prompt, text in result["samples"].items():
        lines += ["", f"After `{prompt}`:", "", "```text", prompt + text, "```"]
    return "\n".join(lines) + "\n"


def _numbers(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    seconds = [record["step_time_s"] for record in records]
    tokens = [s * record["tokens_per_s"] for s, record in zip(seconds, records, strict=True)]
    return {
        "steps": records[-1]["step"],
        "tokens": round(math.fsum(tokens)),
        "hours": math.fsum(seconds) / 3600,
        "tokens_per_s": math.fsum(tokens) / math.fsum(seconds),
        "validation": {str(r["step"]): r["val_loss"] for r in records if "val_loss" in r},
        "losses": [round(record["loss"], 5) for record in records],
    }


def _documents(manifest: Path) -> dict[str, int]:
    """The number of documents by package with its version."""
    packages = [line.split("\t")[2] for line in manifest.read_text().splitlines()]
    return {package: packages.count(package) for package in sorted(set(packages))}


def _samples(run_dir: Path) -> dict[str, str]:
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    drawn = ["--max-tokens", "80", "--temperature", "0.7", "--seed", "0", "--json"]
    lines = _launch(["generate", str(run_dir), *prompts, *drawn], capture=True).splitlines()
    return {row["prompt"]: row["text"] for row in map(json.loads, lines)}


def _launch(arguments: Sequence[str], *, capture: bool = False) -> str:
    command = [sys.executable, "-m", "launch", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE if capture else None, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout or ""


if __name__ == "__main__":
    sys.exit(main())
