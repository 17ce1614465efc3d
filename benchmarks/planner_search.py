"""How long the planner takes, by the number of devices: python -m benchmarks.planner_search

    devices    in clusters of three fabrics and four speeds, eight to a node
    tokens     of a sequence
    seconds    of `planner.find`, the median of the repeats; each in a process of its own
    CPU s      of them, on a CPU: the search is one thread
    gap        how much faster a plan could be at most, by the planner's own bound
    gain       what ten times the effort finds, as a share of the step

Bars: 1,024 devices, 96 layers, 6 clusters in 2 s on 2 cores; 16,384 devices in 12 clusters in 5 s
and 2 GiB; both with sequences of 2,048 tokens.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from benchmarks.pipeline_overhead import count
from benchmarks.provenance import RESULTS, cpu_model, provenance
from holmesjax.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
)
from holmesjax.planner import planner
from holmesjax.planner.search import EFFORT, search
from holmesjax.planner.selection import make_problem
from holmesjax.report.figures import BLUE, GRID, INK, MUTED
from holmesjax.topology.fabrics import Fabric
from holmesjax.topology.loading import known_device
from holmesjax.topology.machines import Cluster, Link, Nic, Node, Topology

NAME = "planner_search"
PER_NODE = 8
CONTEXT_LENGTHS = (2048, 32_768)  # tokens of a sequence: of the longer, `context` is tried, too
# fabric, its NIC, and the kind of device, of each cluster in turn
KINDS: tuple[tuple[Fabric, float, str], ...] = (
    ("infiniband", 50e9, "h100"),
    ("roce", 25e9, "a100_80gb"),
    ("ethernet", 12.5e9, "a100_40gb"),
    ("infiniband", 25e9, "a100_80gb"),
)
ETHERNET_BYTES_PER_S = 12.5e9  # of a node, between clusters


class Size(NamedTuple):
    """A problem."""

    devices: int
    clusters: int
    layers: int
    width: int
    batch: int


SIZES = (
    Size(16, 2, 12, 1024, 64),
    Size(64, 2, 32, 4096, 256),
    Size(256, 4, 48, 8192, 512),
    Size(1024, 6, 96, 12288, 1536),
    Size(4096, 8, 96, 12288, 3072),
    Size(16384, 12, 96, 12288, 6144),
)
BARS_S = {(1024, 2048): 2.0, (16384, 2048): 5.0}  # by devices and tokens of a sequence
MOST_GIB = 2.0


def make_topology(size: Size) -> Topology:
    """Clusters as equal as their nodes can be shared out."""
    num_nodes = size.devices // PER_NODE
    clusters = []
    for i in range(size.clusters):
        fabric, rate, kind = KINDS[i % len(KINDS)]
        nics = [Nic(name="ethernet", fabric="ethernet", rate_bytes_per_s=ETHERNET_BYTES_PER_S,
                    latency_s=30e-6, count=1)]  # fmt: skip
        if fabric != "ethernet":
            nics.append(Nic(name=fabric, fabric=fabric, rate_bytes_per_s=rate, latency_s=2e-6,
                            count=PER_NODE))  # fmt: skip
        count = num_nodes // size.clusters + (i < num_nodes % size.clusters)
        nodes = [
            Node(name=f"c{i}-{n}", device=known_device(kind), num_devices=PER_NODE,
                 nics=tuple(nics))
            for n in range(count)
        ]  # fmt: skip
        clusters.append(Cluster(name=f"c{i}", fabric=fabric, nodes=tuple(nodes)))
    link = Link(fabric="ethernet", bandwidth_bytes_per_s=ETHERNET_BYTES_PER_S, latency_s=100e-6)
    names = [cluster.name for cluster in clusters]
    links = {(a, b): link for a in names for b in names if a != b}
    return Topology(name=f"{size.devices}", clusters=tuple(clusters), links=links)


def make_config(size: Size, context_length: int) -> Config:
    """A GPT, with everything left to the planner."""
    return Config(
        topology="made",
        run=RunConfig(dir="unused"),
        train=TrainConfig(steps=1, global_batch=size.batch, compute_dtype="bfloat16"),
        model=ModelConfig(
            num_layers=size.layers,
            width=size.width,
            num_heads=size.width // 128,
            context_length=context_length,
            vocab_size=51200,
        ),
        data=DataConfig(corpus="python-stdlib"),
        optimizer=OptimizerConfig(learning_rate=1e-4),
    )


def measure(size: Size, context_length: int) -> dict[str, float]:
    """One search, timed."""
    config, topology = make_config(size, context_length), make_topology(size)
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    _, found = planner.find(config, topology)
    return {
        "seconds": time.perf_counter() - start_s,
        "cpu_s": time.process_time() - start_cpu_s,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "step_s": found.best[0].step_s,
        "gap": found.gap,
    }


def try_harder(size: Size, context_length: int) -> float:
    """Seconds of the step that ten times the effort finds."""
    config, topology = make_config(size, context_length), make_topology(size)
    problem = make_problem(config, topology)
    found = search(problem, 10 * EFFORT)
    assert found is not None, "there is a plan"
    return found.best[0].step_s


def summarise(
    size: Size, context_length: int, runs: list[dict[str, float]], harder_s: float | None
) -> dict[str, Any]:
    seconds = [run["seconds"] for run in runs]
    line: dict[str, Any] = {
        **size._asdict(),
        "context_length": context_length,
        "seconds": statistics.median(seconds),
        "cpu_s": statistics.median(run["cpu_s"] for run in runs),
        "low": min(seconds),
        "high": max(seconds),
        "peak_gib": max(run["peak_gib"] for run in runs),
        "step_s": runs[0]["step_s"],
        "gap": runs[0]["gap"],
    }
    return line if harder_s is None else line | {"gain": 1 - harder_s / runs[0]["step_s"]}


def bar_of(line: dict[str, Any]) -> float | None:
    """Seconds that a search should take at most; None where there is no bar."""
    return BARS_S.get((line["devices"], line["context_length"]))


def is_met(line: dict[str, Any]) -> bool:
    """Whether a size keeps its bar; those without one do."""
    bar_s = bar_of(line)
    return bar_s is None or (line["seconds"] <= bar_s and line["peak_gib"] <= MOST_GIB)


def table(lines: list[dict[str, Any]]) -> str:
    """In Markdown."""
    rows = [
        "| devices | clusters | layers | tokens | seconds | range | CPU s | bar | peak GiB | gap "
        "| gain |",
        "| ---: " * 11 + "|",
    ]
    for line in lines:
        bar = bar_of(line)
        met = f"{bar:.0f} s {'met' if is_met(line) else 'MISSED'}" if bar is not None else ""
        gain = f"{line['gain']:.1%}" if "gain" in line else "not tried"
        cells = [
            f"{line['devices']:,}", line["clusters"], line["layers"], f"{line['context_length']:,}",
            f"{line['seconds']:.1f}", f"{line['low']:.1f} to {line['high']:.1f}",
            f"{line['cpu_s']:.1f}", met, f"{line['peak_gib']:.2f}", f"{line['gap']:.0%}", gain,
        ]  # fmt: skip
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(rows)


def chart(lines: list[dict[str, Any]], about: str) -> Figure:
    """Seconds by devices, both logarithmic, with the bars."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    ax = figure.subplots()
    for context_length, color in zip(CONTEXT_LENGTHS, (BLUE, MUTED), strict=True):
        own = [line for line in lines if line["context_length"] == context_length]
        devices = [line["devices"] for line in own]
        seconds = [line["seconds"] for line in own]
        label = f"sequences of {context_length:,} tokens"
        ax.loglog(devices, seconds, color=color, marker="o", label=label)
        low, high = ([line[end] for line in own] for end in ("low", "high"))
        ax.vlines(devices, low, high, color=INK)
        for line in own:
            at = line["devices"], line["seconds"]
            text = f"{line['seconds']:.1f} s"
            ax.annotate(text, at, (6, -12), textcoords="offset points", color=INK)
    for (number, _), bar_s in BARS_S.items():
        ax.plot([number / 1.5, number * 1.5], [bar_s] * 2, color=INK, linestyle="--")
    ax.legend(frameon=False)
    ax.set_xticks(devices, [f"{n:,}" for n in devices])
    ax.set_xticks([], minor=True)
    ax.set_xlabel("devices")
    ax.set_ylabel("seconds to plan; bars dashed")
    ax.grid(color=GRID)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_title(about, fontsize=7, color=MUTED, loc="right")
    return figure


def main() -> int:
    parser = argparse.ArgumentParser(
        NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=count, default=3, help="of every size (3)")
    parser.add_argument("--most", type=int, default=SIZES[-1].devices, help="devices (16384)")
    parser.add_argument("--harder", type=int, default=1024, help="gains up to so many (1024)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder (results/)")
    args = parser.parse_args()
    lines: list[dict[str, Any]] = []
    context = multiprocessing.get_context("spawn")
    sizes = [size for size in SIZES if size.devices <= args.most]
    for context_length, size in itertools.product(CONTEXT_LENGTHS, sizes):
        runs = []
        for _ in range(args.repeats):
            with context.Pool(1) as pool:
                runs.append(pool.apply(measure, (size, context_length)))
            print(f"{size.devices} devices: {runs[-1]['seconds']:.1f} s", flush=True)
        harder_s = try_harder(size, context_length) if size.devices <= args.harder else None
        lines.append(summarise(size, context_length, runs, harder_s))
    result = {
        **provenance(NAME),
        "lines": lines,
    }
    about = f"commit {result['commit']}, {result['date']}, {os.cpu_count()} cores of {cpu_model()}"
    args.out.mkdir(parents=True, exist_ok=True)
    text = f"{table(lines)}\n\n{about}: `{result['command']}`\n"
    (args.out / f"{NAME}.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / f"{NAME}.md").write_text(text)
    chart(lines, about).savefig(args.out / f"{NAME}.png", dpi=120)
    print("", text, sep="\n")
    return 0 if all(map(is_met, lines)) else 1


if __name__ == "__main__":
    sys.exit(main())
