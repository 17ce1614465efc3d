"""Islands against synchronous training, in miniature: python -m benchmarks.local_updates ROWS

    l1       four islands that meet every 20 steps, and one replica with the same batches; also
             islands that go on with what one replica has trained for half of the steps
    l2       the steps between meetings: 5, 10, 50, 100
    l3       four fragments, 0, 1 or 3 steps late; islands keep none or half of their own weights
    l10      each island has a topic of its own, against l1's, with all topics on each
    overlap  L4: two processes in a lab, a meeting takes as long as the steps between
    peers    tokens/s of ours, torchft's DiLoCo and DDP over links of 1/64 and 1/1000 in a lab

l1 to l10 train a byte-level GPT in this process, at equal tokens; the loss is that of held-out text
after the last step. `overlap` and `peers` need what `launch lab` needs (docs/lab.md). A result that
was stopped goes on with --go-on at the same commit: the text is files of the checkout.
"""

import argparse
import glob
import hashlib
import io
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.provenance import RESULTS, commit, provenance

ROOT = Path(__file__).parent.parent
NUM_ISLANDS, STEPS, EVERY = 4, 400, 20
BEHIND = STEPS // 2  # steps of one replica, before islands go on
BARS = {"l1": 0.015, "l3": 0.01, "l10": 0.02}  # of the loss that a row is compared with
TOPICS = {  # text of this checkout
    "english": "docs/**/*.md",
    "python": "holmesjax/**/*.py",
    "tests": "tests/**/*.py",
    "numbers": "benchmarks/results/*.json",
}
TOPIC_BYTES, FILE_BYTES = 600_000, 15_000  # the most of each, in files of so many
Run = dict[str, Any]
Settings = Mapping[str, Any]


def meets(every: int = EVERY, **more: Any) -> dict[str, Any]:
    settings = {"across": "local_updates", "every": every, **more}
    return {f"parallel.{name}": value for name, value in settings.items()}


ONE_TOPIC_EACH = {f"c{k}": {topic: 1.0} for k, topic in enumerate(TOPICS)}
SYNCHRONOUS = {"parallel.clusters": ["c0"], "parallel.stages": 1}
LATE = f"H 20 behind {BEHIND} steps"
ROWS: dict[str, dict[str, tuple[Settings, int]]] = {  # by name: settings, and seeds
    "l1": {"synchronous": (SYNCHRONOUS, 5), "H 20": (meets(), 5), LATE: (meets(), 5)},
    "l2": {f"H {every}": (meets(every), 3) for every in (5, 10, 50, 100)},
    "l3": {
        f"P 4, tau {delay}, alpha {1 - blend:g}": (
            meets(fragments=4, delay=delay, blend=blend),
            3,
        )
        for delay in (0, 1, 3)
        for blend in (1.0, 0.5)
    },
    "l10": {"topics": ({**meets(), "data.mixture_by_island": ONE_TOPIC_EACH}, 3)},
}


def topology_text() -> str:
    peak = "{float32: 50 GFLOP/s}"
    clusters = "".join(
        f"  - name: c{k}\n    fabric: local\n    nodes: 1\n"
        f"    devices: {{kind: cpu, count: 1, peak_flop_per_s: {peak}}}\n"
        "    nics: [{kind: ethernet_25}]\n"
        for k in range(NUM_ISLANDS)
    )
    links = "".join(
        f"  - {{between: [c{a}, c{b}], fabric: ethernet, bandwidth: 25 Gb/s, latency: 50 us}}\n"
        for a in range(NUM_ISLANDS)
        for b in range(a)
    )
    return f"name: four\nclusters:\n{clusters}links:\n{links}"


def settings_of(folder: Path, name: str, seed: int, more: Settings) -> dict[str, Any]:
    """The settings of a run on top of the quickstart's."""
    return {
        "topology": str(folder / "four.yaml"),
        "run.dir": str(folder / name),
        "run.compilation_cache": str(folder / "programs"),
        "train.steps": STEPS,
        "train.seed": seed,
        "train.global_batch": 4 * NUM_ISLANDS,
        "train.eval_every": STEPS,
        "train.eval_batches": 16,
        "train.log_every_s": 1000.0,
        "model.num_layers": 3,
        "model.width": 64,
        "model.num_heads": 4,
        "model.context_length": 64,
        "optimizer.learning_rate": 2e-3,
        "optimizer.warmup_steps": 20,
        "parallel": None,
        "parallel.microbatches": 1,
        "data.corpus": "mixture",
        "data.mixture": [
            {"name": topic, "corpus": str(folder / topic), "weight": 1.0} for topic in TOPICS
        ],
        "log.report": False,
        "log.tensorboard": False,
        "checkpoint.every": None,
        **more,
    }


def write_texts(folder: Path) -> str:
    """Writes the topology, and the text of each topic; returns the digest of the text."""
    digest = hashlib.sha256()
    (folder / "four.yaml").write_text(topology_text())
    for topic, pattern in TOPICS.items():
        paths = sorted(glob.glob(str(ROOT / pattern), recursive=True))
        paths = [path for path in paths if Path(path).stem != "local_updates"]  # its own result
        text = "\n\n".join(Path(path).read_text(encoding="utf-8") for path in paths)
        (folder / topic).mkdir()
        for i, start in enumerate(range(0, min(len(text), TOPIC_BYTES), FILE_BYTES)):
            part = text[start : min(start + FILE_BYTES, TOPIC_BYTES)]
            (folder / topic / f"{i}.txt").write_text(part, encoding="utf-8")
            digest.update(part.encode())
    return digest.hexdigest()[:12]


def refuse_others(result: Run, commit: str, text: str) -> None:
    """Ends the program where a result is of another commit, or of other text."""
    now = {"commit": commit.removesuffix(" dirty"), "text": text}
    before = {"commit": result["commit"].removesuffix(" dirty"), "text": result.get("text", text)}
    if now != before:
        sys.exit(f"--go-on: the result is of {before}, and this checkout has {now}: begin anew")


def train(folder: Path, name: str, seed: int, more: Settings, behind: int = 0) -> Run:
    """Trains a run in this process, of which one replica trains the first steps `behind`."""
    from holmesjax import Trainer

    make = lambda own: Trainer(
        "configs/runs/quickstart.yaml", settings_of(folder, name, seed, own), io.StringIO()
    )
    began_s = time.monotonic()
    if behind:
        with make(SYNCHRONOUS) as first:
            for _ in range(behind):
                first.step()
    trainer = make(more)
    trainer.run()
    meeting = trainer.job.plan.meeting
    return {
        "loss": trainer.history[-1]["val_loss"],
        "s": time.monotonic() - began_s,
        "meeting_bytes": max(meeting.bytes) if meeting else 0.0,
    }


def measure(groups: list[str], result: Run, path: Path, seeds: int) -> None:
    """Adds the runs of in-process rows to a result, which is written after each."""
    done = {(run["group"], run["row"], run["seed"]) for run in result["runs"]}
    with tempfile.TemporaryDirectory(prefix="local_updates_") as folder:
        text = write_texts(Path(folder))
        refuse_others(result, commit(), text)
        result["text"] = text
        for seed in range(seeds):
            for group in groups:
                for name, (more, most) in ROWS[group].items():
                    if seed >= most or (group, name, seed) in done:
                        continue
                    where = f"{group}-{name}-{seed}".replace(" ", "_").replace(",", "")
                    run = train(Path(folder), where, seed, more, BEHIND if name == LATE else 0)
                    result["runs"].append({"group": group, "row": name, "seed": seed, **run})
                    print(f"{group} {name} seed {seed}: {run['loss']:.4f}, {run['s']:.0f} s")
                    sys.stdout.flush()
                    path.write_text(json.dumps(result, indent=1) + "\n")


def table(result: Run) -> list[str]:
    """The rows of in-process runs as Markdown: means over seeds, beside what they are held to."""
    by_row: dict[tuple[str, str], dict[int, float]] = {}
    for run in result["runs"]:
        by_row.setdefault((run["group"], run["row"]), {})[run["seed"]] = run["loss"]
    references = {"l1": ("l1", "synchronous"), "l2": ("l1", "synchronous"), "l3": ("l1", "H 20")}
    references["l10"] = references["l3"]
    lines = ["| | row | seeds | loss | spread | above its reference | bar |", "| --- " * 7 + "|"]
    for (group, name), losses in by_row.items():
        reference = by_row.get(references[group], {})
        common = [seed for seed in losses if seed in reference]
        above = [losses[seed] / reference[seed] - 1.0 for seed in common]
        is_reference = references[group] == (group, name)
        bar = "" if is_reference or group not in BARS else f"{BARS[group]:.1%}"
        more = "" if is_reference or not above else f"{statistics.fmean(above):+.2%}"
        spread = max(losses.values()) - min(losses.values())
        mean = statistics.fmean(losses.values())
        cells = (group.upper(), name, str(len(losses)), f"{mean:.4f}", f"{spread:.4f}", more, bar)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def parse() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("local_updates", description=__doc__, formatter_class=raw)
    groups = [*ROWS, "overlap", "peers"]
    parser.add_argument("groups", nargs="+", choices=groups, metavar="ROWS")
    parser.add_argument("--seeds", type=int, default=5, help="the most, of a row (5)")
    parser.add_argument("--repeats", type=int, default=3, help="of overlap and peers (3)")
    parser.add_argument("--torch", help="a Python with torch and torchft, for peers")
    parser.add_argument("--go-on", action="store_true", help="with the result in --out")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder (results/)")
    return parser.parse_args()


def main() -> int:
    args = parse()
    os.chdir(ROOT)
    count = f"--xla_force_host_platform_device_count={NUM_ISLANDS}"
    count += " --xla_cpu_multi_thread_eigen=false"  # a core is enough for islands that take turns
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {count}".strip()
    path = args.out / "local_updates.json"
    result: Run = {**provenance("local_updates"), "runs": [], "lab": []}
    if args.go_on:
        result = json.loads(path.read_text())
        refuse_others(result, commit(), result.get("text", ""))
        result["command"] += f"; {provenance('local_updates')['command']}"
    result["load"] = [*result.get("load", []), os.getloadavg()[2]]  # of 15 minutes
    if own := [group for group in args.groups if group in ROWS]:
        measure(own, result, path, args.seeds)
    if lab := [group for group in args.groups if group not in ROWS]:
        from benchmarks import local_updates_lab

        for group in lab:
            result["lab"] += local_updates_lab.measure(group, args.repeats, args.torch)
            path.write_text(json.dumps(result, indent=1) + "\n")
    facts = ", ".join(f"{name} {result[name]}" for name in ("commit", "date", "load"))
    text = [f"Made by `{result['command']}`: {facts}.", "", *table(result)]
    path.with_suffix(".md").write_text("\n".join(text) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
