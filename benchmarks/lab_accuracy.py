"""How far off predicted steps of the Holmes comparison are: python -m benchmarks.lab_accuracy

Builds the labs of `benchmarks.holmes_lab`, and measures them as one measures real machines: links
and collectives with `launch probe`, nodes with `launch profile`, all at once as they train. Then
each of HolmesJAX's rows trains there, and its plan, made of what was found, says how long a step
should have taken. All of a network comes soon after each other, since from one hour to the next
this machine is not as fast.

    measured    seconds of a step, without the first two, the median; its spread is their range over
                it
    compute     seconds that a node computes in a step, mean of the nodes: predicted; and measured,
                which is CPU seconds over the node's quota
    others      what else had the machine's cores, as a share of them
    error       of the predicted step, as a share of the measured one; bar: 10%

Needs what `launch lab` needs (docs/lab.md), and an idle machine for an hour. With
--measured nothing is run: what an earlier result has measured is predicted again.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.holmes_lab import Failed, compile_cache, run_row
from benchmarks.lab_rows import (
    NEAR_MS,
    POINTS,
    ROWS,
    WARM_UP_STEPS,
    Row,
    cells,
    in_turn,
    load_topology,
    make_config,
    make_job,
    make_lab,
    network_text,
    told_text,
)
from benchmarks.pipeline_overhead import count
from benchmarks.provenance import RESULTS, provenance, versions
from holmesjax import config as configs
from holmesjax.config import CHECKOUT, Schedule
from holmesjax.errors import ConfigError, HolmesError
from holmesjax.plan.plan import Plan
from holmesjax.process_variables import allocator_for
from holmesjax.topology import calibration, loading, machines, saving
from holmesjax.topology.machines import Topology
from launch.lab_machine import namespaces
from launch.verbs import probe

BAR = 0.10
HEADER = (
    "network",
    "row",
    "measured s",
    "spread",
    "predicted s",
    "error",
    "compute s",
    "predicted compute s",
    "others",
)
SCHEDULE: Schedule = "eager_1f1b"  # of the comparison

Cell = tuple[str, int | None]  # row and point
Found = dict[str, Any]  # of a network: its topology as it was measured, and the runs of its rows


# ---- what is measured ----------------------------------------------------------------------------


def network_of(row: Row, point: int | None) -> str:
    """Rows with the same name have the same lab, and take the same nodes for clusters."""
    pairs = f"clusters of {row.label.split()[0]}, " if row.pairs else ""
    unequal = "unequal nodes, " * row.unequal
    far = f"{row.round_trip_ms:g} ms there and back, " * (row.round_trip_ms != NEAR_MS)
    return f"{row.network}, {pairs}{unequal}{far}{f'1/{point}' if point else 'fast'}"


def measure(row: Row, point: int | None, folder: Path) -> Topology:
    """The topology that a row is told, with a probe and profiles of its lab. Raises HolmesError.

    All nodes are profiled at once, each for itself: they share cores that are not equally fast.
    """
    network = load_topology(network_text(row, point), folder / "network.yaml")
    load_topology(told_text(row, point), folder / "told.yaml")  # for those that read it there
    run_file = folder / "run.yaml"
    configs.save(make_config(row, folder, 1, SCHEDULE), run_file)
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
    return loading.load(output)


def with_devices(topology: Topology, devices: Mapping[str, machines.DeviceKind]) -> Topology:
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


def plan_of(row: Row, point: int | None, layers: Sequence[int], network: Topology) -> Plan:
    """The plan of a row, with the layers of its runs, on its network as it was measured."""
    row = dataclasses.replace(row, layers=tuple(layers))
    with tempfile.TemporaryDirectory() as folder:
        told = load_topology(told_text(row, point), Path(folder) / "told.yaml")
        config = make_config(row, Path(folder), 1, SCHEDULE)
    told = with_devices(told, {node.name: node.device for node in network.nodes})
    return make_job(config, dataclasses.replace(told, measured=network.measured)).plan


def line_of(run: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    step_s = statistics.median(run["step_s"])
    nodes = [stage.seconds["compute"] for stage in plan.stages for _ in stage.nodes]
    return {
        "row": run["row"],
        "point": run["point"],
        "step_s": step_s,
        "spread": (max(run["step_s"]) - min(run["step_s"])) / step_s,
        "predicted_s": plan.step_time_s,
        "error": plan.step_time_s / step_s - 1,
        "compute_s": run["compute_s"],
        "predicted_compute_s": statistics.mean(nodes),
        "disturbed_share": run["disturbed_share"],
        "seconds": [stage.seconds for stage in plan.stages],
        "shares": plan.shares,
    }


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """In Markdown, with the mean and the worst error behind it."""
    out = ["| " + " | ".join(HEADER) + " |", "| --- | --- " + "| ---: " * 7 + "|"]
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
            f"{line['disturbed_share']:.0%}",
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


def networks_of(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """The networks that cells need, and the cells of each."""
    found: dict[str, list[Cell]] = {}
    for name, point in cells:
        found.setdefault(network_of(ROWS[name], point), []).append((name, point))
    return found


def measure_all(cells: Sequence[Cell], steps: int) -> Iterator[tuple[str, Found]]:
    """Network by network. Raises HolmesError, or Failed where a run has no figure."""
    namespaces.refuse_without_means(delays=True)
    os.chdir(CHECKOUT)  # where the nodes' processes find these modules
    networks = networks_of(cells)
    with tempfile.TemporaryDirectory(prefix="holmes_lab_") as text, compile_cache():
        folder = Path(text)
        for i, (name, its_cells) in enumerate(networks.items()):
            print(f"{i + 1}/{len(networks)}  {name}: probe and profiles", flush=True)
            first, point = its_cells[0]
            topology = measure(ROWS[first], point, new_folder(folder))
            runs = []
            for row, point in its_cells:
                print(f"      {row}: ", end="", flush=True)
                run = run_row(ROWS[row], point, steps, SCHEDULE, new_folder(folder))
                runs.append({"row": row, "point": point, **run})
                seconds = statistics.median(run["step_s"])
                print(f"{seconds:.2f} s, others {run['disturbed_share']:.0%}", flush=True)
            yield name, {"topology": saving.to_yaml(topology), "runs": runs}


def new_folder(parent: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=parent))


def read_measured(path: Path) -> tuple[dict[str, Found], dict[str, Any]]:
    """Reads an earlier result: its measurements and settings. Raises ConfigError."""
    try:
        result = json.loads(path.read_text())
        found: dict[str, Found] = result["networks"]
        assert all({"topology", "runs"} <= network.keys() for network in found.values())
        return found, result["measured"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        fix = "name a JSON file that this benchmark has written"
        where, problem = f"--measured {path}", "is no such result"
        raise ConfigError(where, problem, found=repr(error), fix=fix) from None


def predict(found: Mapping[str, Found]) -> list[dict[str, Any]]:
    """A line for each run, in the order of the table."""
    lines: dict[Cell, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for network in found.values():
            topology = load_topology(network["topology"], Path(folder) / "network.yaml")
            for run in network["runs"]:
                plan = plan_of(ROWS[run["row"]], run["point"], run["layers"], topology)
                lines[run["row"], run["point"]] = line_of(run, plan)
    return [lines[cell] for cell in in_turn(lines)]


def parse() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("lab_accuracy", description=__doc__, formatter_class=raw)
    add = parser.add_argument
    names = [name for name, row in ROWS.items() if row.system == "HolmesJAX"]
    add("--rows", nargs="+", choices=names, default=names, metavar="ROW", help="(all)")
    add("--points", nargs="+", type=int, choices=POINTS, default=list(POINTS), help="(all)")
    add("--steps", type=count, default=6, help=f"timed in each run, after {WARM_UP_STEPS} (6)")
    add("--measured", type=Path, metavar="JSON", help="take what this result has measured")
    add("--out", type=Path, default=RESULTS, help="folder of table and JSON (results/)")
    return parser.parse_args()


def main() -> int:
    args = parse()
    args.out = args.out.absolute()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"lab_accuracy_{versions()['jax']}.json"
    now = how()
    found: dict[str, Found] = {}
    measured = now
    try:
        if args.measured:
            found, measured = read_measured(args.measured)
        else:
            for name, network in measure_all(cells(args.rows, args.points), args.steps):
                found[name] = network
                write(found, now, measured, path)  # what there is stays, whatever comes
    except (HolmesError, Failed) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status if isinstance(error, HolmesError) else 1
    print("", write(found, now, measured, path), path, sep="\n")
    return 0


def how() -> dict[str, Any]:
    return {
        **provenance("lab_accuracy"),
    }


def source(how: Mapping[str, Any]) -> str:
    device = how["device"]
    cores = f"{device['cores']} cores of {device['cpu']}"
    return f"commit {how['commit']}, {how['date']}, {cores}: `{how['command']}`"


def write(
    found: Mapping[str, Found], now: Mapping[str, Any], measured: Mapping[str, Any], path: Path
) -> str:
    """JSON and table; gives the table."""
    lines = predict(found)
    result = {**now, "measured": measured, "lines": lines, "networks": found}
    path.write_text(json.dumps(result, indent=1) + "\n")
    text = f"{table(lines)}\n\n{source(now)}"
    text += f"; measured: {source(measured)}\n" if measured != now else "\n"
    path.with_suffix(".md").write_text(text)
    return text


if __name__ == "__main__":
    sys.exit(main())
