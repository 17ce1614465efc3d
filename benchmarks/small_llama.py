"""A small Llama over two clusters and on one device: python -m benchmarks.small_llama --out DIR

Trains configs/runs/small_llama.yaml twice, about an hour each on two cores, on the text of
`benchmarks.technical_text`:

    two clusters   a process for each cluster, which exchange boundaries over sockets
    one device     the same model, data and optimizer in one stage, in one process

Both runs read the same sequences in the same order. Their losses differ by rounding, which the
training amplifies. Prints the numbers, draws the losses into one picture, and draws samples from
the run over two clusters. The result is written after each run. A run that was stopped goes on when
the command is given again; with `--run NAME`, the result keeps the numbers of the other run.
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
from holmesjax.report import metrics
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
    parser.add_argument("--run", choices=RUNS, help="train this one alone (both)")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="for both runs")
    args = parser.parse_args(arguments)
    text, out = Path(args.text), RESULTS / args.result
    result: dict[str, Any] = {"runs": {}}
    if args.run and out.with_suffix(".json").exists():
        result = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    made = provenance("small_llama")  # now: the result of the first run changes the checkout
    try:
        if not (text / "tokens").is_dir():
            problem, fix = "has no files of tokens", "run python -m benchmarks.technical_text"
            raise DataError(str(text), problem, found="no folder tokens", fix=fix)
        corpus = [f"data.corpus={text / 'tokens'}", f"data.tokenizer={text / 'tokenizer'}"]
        for name in [args.run] if args.run else RUNS:
            folder = Path(args.out) / f"small_llama_{name.replace(' ', '_')}"
            own = [*corpus, *RUNS[name], *args.settings, f"run.dir={folder}"]
            _launch(["train", RUN_FILE, *own, "--launcher", "local"])
            numbers = _numbers(metrics.read(str(folder)))
            result["runs"][name] = {**made, **numbers}
            if name == "two clusters":
                result["documents"] = _documents(text / "manifest")
                result["samples"] = _samples(folder)
            _write(out, result)
    except HolmesError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    print(page(result))
    return 0 if (_difference(result) or 0) <= MAX_DIFFERENCE else 1


def _write(out: Path, result: dict[str, Any]) -> None:
    """Writes the result beside its picture and its page."""
    curves = {name: _losses(run) for name, run in result["runs"].items()}
    loss_curves(curves).savefig(out.with_suffix(".png"), dpi=150, facecolor="white")
    out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    out.with_suffix(".md").write_text(page(result), encoding="utf-8")


def _losses(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The losses of a run as records of its steps."""
    records = [{"step": step, "loss": loss} for step, loss in enumerate(run["losses"], 1)]
    for step, loss in run["validation"].items():
        records[int(step) - 1]["val_loss"] = loss
    return records


def _difference(result: Mapping[str, Any]) -> float | None:
    """The largest difference between validation losses of both runs; None with one run."""
    if len(result["runs"]) < len(RUNS):
        return None
    first, second = (run["validation"] for run in result["runs"].values())
    return max(abs(first[step] - second[step]) for step in first)


def page(result: dict[str, Any]) -> str:
    """The result as Markdown: a table of the runs, and the samples."""
    runs = result["runs"]
    lines = []
    for name, run in runs.items():
        made = f"`{run['command']}` at commit {run['commit']}, {run['date']}"
        on = f"{run['device']['cores']} cores of {run['device']['cpu']}"
        lines.append(f"- {name}: {made}, {on}.")
    lines += ["", "| | " + " | ".join(runs) + " |", "| --- |" + " --- |" * len(runs)]
    rows = {
        "steps": lambda run: f"{run['steps']:,}",
        "tokens": lambda run: f"{run['tokens']:,}",
        "hours": lambda run: f"{run['hours']:.2f}",
        "tokens/s": lambda run: f"{run['tokens_per_s']:,.0f}",
        "last validation loss": lambda run: f"{list(run['validation'].values())[-1]:.4f}",
    }
    for name, cell in rows.items():
        lines.append(f"| {name} | " + " | ".join(cell(run) for run in runs.values()) + " |")
    lines += ["", *(f"Not measured: {name}." for name in RUNS if name not in runs)]
    if (difference := _difference(result)) is not None:
        verdict = "met" if difference <= MAX_DIFFERENCE else "missed"
        lines.append(
            f"Largest difference of validation losses: {difference:.2g}. The bar of "
            f"{MAX_DIFFERENCE} is {verdict}; the header of `{RUN_FILE}` says how the runs differ."
        )
    for prompt, text in result.get("samples", {}).items():
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
