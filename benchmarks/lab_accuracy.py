"""How far off predicted steps of the Holmes comparison are: python -m benchmarks.lab_accuracy

Builds the labs of `benchmarks.holmes_lab` again, and measures them as one measures real machines:
links and collectives with `launch probe`, nodes with `launch profile`, all at once as they train.
With what they find it plans each row of HolmesJAX, and compares the predicted step with what the
comparison has measured on the same machine.

    measured    seconds of a step, the median of the repeats; its spread is their range over it
    compute     seconds that a node computes in a step, mean of the nodes: predicted; and measured,
                which is CPU seconds over the node's quota
    error       of the predicted step, as a share of the measured one; bar: 10%

Needs what `launch lab` needs (docs/lab.md), an idle machine for half an hour, and the JSON file of
the comparison.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.lab_rows import (
    GLOBAL_BATCH,
    ROWS,
    Row,
    in_turn,
    load_topology,
    make_config,
    make_job,
    make_lab,
    network_text,
    told_text,
)
from benchmarks.loops import LARGE
from benchmarks.pipeline_overhead import RESULTS, commit, cpu_model, versions
from holmesjax import calibration, config as configs, topology as topologies
from holmesjax.config import CHECKOUT, Schedule
from holmesjax.errors import ConfigError, HolmesError
from holmesjax.host_memory import allocator_for
from holmesjax.plan import Plan
from holmesjax.topology import Topology
from launch import namespaces, probe

BAR = 0.10
TOKENS = GLOBAL_BATCH * LARGE.context_length
HEADER = (
    "network",
    "row",
    "measured s",
    "spread",
    "predicted s",
    "error",
    "compute s",
    "predicted compute s",
)

Run = Mapping[str, Any]  # of the comparison
Cell = tuple[str, int | None]  # row and point


# ---- what is measured ----------------------------------------------------------------------------


def network_of(row: Row, point: int | None) -> str:
    """Rows with the same name have the same lab, and take the same nodes for clusters."""
    pairs = f"clusters of {row.label.split()[0]}, " if row.pairs else ""
    unequal = "unequal nodes, " * row.unequal
    return f"{row.network}, {pairs}{unequal}{f'1/{point}' if point else 'fast'}"


def measure(row: Row, point: int | None, folder: Path) -> Topology:
    """What a row is told, with what a probe and profiles say of its lab. Raises HolmesError.

    All nodes are profiled at once, each for itself: they share cores that are not equally fast.
    """
    network = load_topology(network_text(row, point), folder / "network.yaml")
    load_topology(told_text(row, point), folder / "told.yaml")  # for those that read it there
    run_file = folder / "run.yaml"
    configs.save(make_config(row, folder, 1, "1f1b"), run_file)
    with (folder / "log").open("w") as log, contextlib.redirect_stdout(log):
        commands = namespaces.commands_for(make_lab(row, network, sorted(os.sched_getaffinity(0))))
        with namespaces.built(commands):
            probed = _probe(folder, namespaces.LabLauncher(commands))
            log.flush()

            def profile(node: str) -> int:
                words = ["profile", str(run_file), "--node", node]
                words += ["--output", str(folder / f"{node}.yaml")]
                return namespaces.run_on(
                    commands, node, words, allocator_for({"cpu"}, os.environ), log
                )

            names = [node.name for node in network.nodes]
            with ThreadPoolExecutor(len(names)) as pool:
                statuses = list(pool.map(profile, names))
            if any(statuses):
                failed = [name for name, status in zip(names, statuses, strict=True) if status]
                fix = "see what it says above"
                raise HolmesError("launch profile", "failed", found=failed, fix=fix)
    found = {name: calibration.read(folder / f"{name}.yaml").calibration for name in names}
    devices = {
        node.name: dataclasses.replace(node.device, calibration=found[node.name])
        for node in network.nodes
    }
    return with_devices(probed, devices)


def _probe(folder: Path, launcher: namespaces.LabLauncher) -> Topology:
    output = folder / "probed.yaml"
    args = argparse.Namespace(
        topology=str(folder / "told.yaml"), output=str(output), no_collectives=False, launcher=None
    )
    probe.run(args, launcher, 1.0)
    return topologies.load(output)


def with_devices(topology: Topology, devices: Mapping[str, topologies.DeviceKind]) -> Topology:
    """With other devices in its nodes."""
    clusters = tuple(
        dataclasses.replace(
            cluster,
            nodes=tuple(dataclasses.replace(n, device=devices[n.name]) for n in cluster.nodes),
        )
        for cluster in topology.clusters
    )
    return dataclasses.replace(topology, clusters=clusters)


# ---- what is predicted ---------------------------------------------------------------------------


def plan_of(
    row: Row, point: int | None, layers: Sequence[int], schedule: Schedule, network: Topology
) -> Plan:
    """Of a row, with the layers that its runs had, on its network as it was measured."""
    row = dataclasses.replace(row, layers=tuple(layers))
    with tempfile.TemporaryDirectory() as folder:
        told = load_topology(told_text(row, point), Path(folder) / "told.yaml")
        config = make_config(row, Path(folder), 1, schedule)
    told = with_devices(told, {node.name: node.device for node in network.nodes})
    return make_job(config, dataclasses.replace(told, measured=network.measured)).plan


def line_of(cell: Cell, runs: Sequence[Run], plan: Plan) -> dict[str, Any]:
    steps_s = [TOKENS / run["tokens_per_s"] for run in runs]
    step_s = statistics.median(steps_s)
    nodes = [stage.seconds["compute"] for stage in plan.stages for _ in stage.nodes]
    return {
        "row": cell[0],
        "point": cell[1],
        "step_s": step_s,
        "spread": (max(steps_s) - min(steps_s)) / step_s,
        "predicted_s": plan.step_time_s,
        "error": plan.step_time_s / step_s - 1,
        "compute_s": statistics.median(run["compute_s"] for run in runs),
        "predicted_compute_s": statistics.mean(nodes),
        "seconds": [stage.seconds for stage in plan.stages],
        "shares": plan.shares,
    }


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """In Markdown, with the mean and the worst error behind it."""
    out = ["| " + " | ".join(HEADER) + " |", "| --- | --- " + "| ---: " * 6 + "|"]
    for line in lines:
        row = ROWS[line["row"]]
        missed = " MISSED" * (abs(line["error"]) > BAR)
        cells = [
            network_of(row, line["point"]),
            row.label,
            f"{line['step_s']:.2f}",
            f"{line['spread']:.1%}",
            f"{line['predicted_s']:.2f}",
            f"{line['error']:+.1%}{missed}",
            f"{line['compute_s']:.2f}",
            f"{line['predicted_compute_s']:.2f}",
        ]
        out.append("| " + " | ".join(cells) + " |")
    errors = [abs(line["error"]) for line in lines]
    met = sum(error <= BAR for error in errors)
    out.append(
        f"\n{met} of {len(errors)} within {BAR:.0%}; mean error {statistics.mean(errors):.1%}, "
        f"worst {max(errors):.1%}"
    )
    return "\n".join(out)


# ---- the command ---------------------------------------------------------------------------------


def read_runs(path: Path) -> tuple[dict[str, Any], dict[Cell, list[Run]]]:
    """A result of the comparison, and its runs of HolmesJAX that have a figure."""
    try:
        result = json.loads(path.read_text())
        runs = [run for run in result["runs"] if "tokens_per_s" in run]
    except (OSError, ValueError, KeyError) as error:
        fix = "name the JSON file that benchmarks.holmes_lab has written"
        raise ConfigError(str(path), "is no result", found=error, fix=fix) from None
    found: dict[Cell, list[Run]] = {}
    for run in runs:
        if ROWS[run["row"]].system == "HolmesJAX":
            found.setdefault((run["row"], run["point"]), []).append(run)
    return result, found


def parse() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("lab_accuracy", description=__doc__, formatter_class=raw)
    add = parser.add_argument
    default = RESULTS / f"holmes_lab_{versions()['jax']}.json"
    add("result", nargs="?", type=Path, default=default, help="of the comparison (results/)")
    add("--measured", type=Path, metavar="JSON", help="take this result's probes and profiles")
    add("--out", type=Path, default=RESULTS, help="folder of table and JSON (results/)")
    return parser.parse_args()


def main() -> int:
    args = parse()
    args.out = args.out.absolute()
    try:
        compared, runs = read_runs(args.result)
        networks = _networks(args, list(runs))
    except HolmesError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    schedule = compared["settings"]["schedule"]
    lines = []
    for name, point in in_turn(runs):
        row, own = ROWS[name], runs[name, point]
        topology = networks[network_of(row, point)]
        plan = plan_of(row, point, own[0]["layers"], schedule, topology)
        lines.append(line_of((name, point), own, plan))
    result = {
        "command": " ".join(["python -m benchmarks.lab_accuracy", *sys.argv[1:]]),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "device": {"cpu": cpu_model(), "cores": os.cpu_count()},
        "versions": versions(),
        "compared_with": {key: compared[key] for key in ("commit", "date", "device")},
        "lines": lines,
        "networks": {name: topologies.to_yaml(found) for name, found in networks.items()},
    }
    path = args.out / f"lab_accuracy_{versions()['jax']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    text = table(lines) + f"\n\ncommit {result['commit']}, {result['date']}, "
    text += f"{os.cpu_count()} cores of {cpu_model()}: `{result['command']}`; measured steps: "
    text += f"commit {compared['commit']}, {compared['date']}\n"
    path.with_suffix(".md").write_text(text)
    print("", text, path, sep="\n")
    return 0


def _networks(args: argparse.Namespace, cells: Sequence[Cell]) -> dict[str, Topology]:
    """Every network that is needed, measured now or before."""
    wanted = {network_of(ROWS[name], point): (ROWS[name], point) for name, point in cells}
    found: dict[str, Topology] = {}
    with tempfile.TemporaryDirectory(prefix="holmes_lab_") as folder:
        if args.measured:
            try:
                networks = json.loads(args.measured.read_text())["networks"]
                texts = {name: networks[name] for name in wanted}
            except (OSError, ValueError, KeyError) as error:
                fix = "name the JSON file that this benchmark has written for the same rows"
                where, problem = f"--measured {args.measured}", "is no such result"
                raise ConfigError(where, problem, found=error, fix=fix) from None
            path = Path(folder) / "network.yaml"
            return {name: load_topology(text, path) for name, text in texts.items()}
        namespaces.refuse_without_means()
        args.out.mkdir(parents=True, exist_ok=True)
        os.chdir(CHECKOUT)  # where the nodes' processes find these modules
        for i, (name, (row, point)) in enumerate(wanted.items()):
            own = Path(folder) / str(i)
            own.mkdir()
            print(f"{i + 1}/{len(wanted)}  {name}", flush=True)
            found[name] = measure(row, point, own)
    return found


if __name__ == "__main__":
    sys.exit(main())
