"""How long large jobs take to come together: python -m benchmarks.control_plane

    admitted   from the first call to the last member that is let in, all calling at once
    started    from there until all have read "go": ready, start, addresses of neighbours, compiled
    verdict    from the last vote of a step until the last member has read the verdict, without
               the way there and back; the median of the steps, over 16 stages
    clock      how far the clocks of members are off, the worst of them, as a share of the round
               trip: after the last step, and at "go", here about a second after the first call
    memory     of the controller's process, a member; what the kernel holds for sockets is not in it
    routed     all pieces of a crossing between two stages of so many devices each, the slowest of
               several layouts

All this while as many members as the job has wait for a save to begin; `control_plane_growth` says
what that costs, and what a run of a million steps costs its recorder.

The controller is the real one, in a process of its own. Members are simulated, as
`simulated_members` says.

Bars: 2,048 members at 200 ms admitted in 10 s and started in 5 more, a verdict in 0.1 s, clocks
within a tenth of the round trip, a waiting save half a core and released in 1 s; 4,096 devices a
stage routed in 1 s; a run of a million steps resumed in 1 s, without growth by steps. A line
through the sizes says what 16,384 members would take.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.control_plane_growth import STEPS, record_long_run, wait_at_gate
from benchmarks.pipeline_overhead import count
from benchmarks.provenance import RESULTS, cpu_model, provenance
from benchmarks.resident import resident_bytes
from benchmarks.simulated_members import (
    ABOUT,
    KEY,
    LIMIT_S,
    SILENCE_S,
    attend,
    last_of_each_step,
    make_processes,
)
from holmesjax.config import DistributedConfig
from holmesjax.distributed.controller import Controller
from holmesjax.distributed.data_agreement import DataAgreement
from holmesjax.distributed.messages import (
    Compiled,
    Done,
    Go,
    Up,
)
from holmesjax.plan.plan import Axis, StagePlan
from holmesjax.plan.processes import Process
from holmesjax.runtime.step_timeout import Progress
from holmesjax.transport import connections
from holmesjax.transport.crossings import Crossing, Spec
from holmesjax.transport.routes import pieces

NAME = "control_plane"
SIZES = (128, 512, 1024, 2048)
DEVICES = (512, 1024, 2048, 4096)
FITTED = 16_384
BARS = {  # of 2,048 members
    "admitted_s": 10.0,
    "started_s": 5.0,
    "verdict_s": 0.1,
    "clock": 0.1,
    "gate_cores": 0.5,
    "gate_released_s": 1.0,
}
LONG_RUN_BARS = {"resumed_s": 1.0, "resident_bytes": 50e6, "bytes_a_step": 50.0}
ROUTED_S = 1.0  # of 4,096 devices a stage


# ---- the controller ------------------------------------------------------------------------------


def serve(num_members: int, pipe: Pipe) -> None:
    """A controller, and what a supervisor does with it until all members are done."""
    connections.raise_open_files(num_members)
    processes = make_processes(num_members)
    before = resident_bytes()
    with Controller(
        processes,
        address="127.0.0.1",
        port=0,
        about=ABOUT,
        resume=0,
        key=KEY,
        silence_s=SILENCE_S,
        is_saving=lambda step: False,
        progress=Progress(DistributedConfig()),
    ) as controller:
        pipe.send(controller.address)
        agreement = DataAgreement(processes, controller.send)
        num_done, wrong = 0, []
        most = before
        while num_done < num_members:
            event = controller.events.get(timeout=LIMIT_S)
            if isinstance(event.record, Compiled):
                if agreement.take(event.process, event.record):
                    most = max(most, resident_bytes())
                    controller.broadcast(Go(epoch=1))
            elif isinstance(event.record, Done):
                num_done += 1
            elif not isinstance(event.record, Up):
                wrong.append(f"{event.record.kind} {event.process}")
        pipe.send({"bytes_each": (most - before) / num_members, "wrong": wrong})
        pipe.recv()


# ---- runs ----------------------------------------------------------------------------------------


def measure(num_members: int, round_trip_s: float, num_crowds: int) -> dict[str, float]:
    """One job from its first call to its last step."""
    context = multiprocessing.get_context("spawn")
    pipes, started = [], []

    def start(target: Callable[..., None], *args: Any) -> Pipe:
        here, there = context.Pipe()
        process = context.Process(target=target, args=(*args, there), daemon=True)
        process.start()
        pipes.append(here)
        started.append(process)
        return here

    def hear(pipe: Pipe, limit_s: float) -> Any:
        assert pipe.poll(limit_s), f"a process of {num_members} members says nothing"
        return pipe.recv()

    try:
        save = start(wait_at_gate, num_members)
        hear(save, LIMIT_S)
        controller = start(serve, num_members)
        address = hear(controller, 60.0)
        crowds = [
            start(
                attend,
                range(c, num_members, num_crowds),
                num_members,
                address,
                round_trip_s,
            )
            for c in range(num_crowds)
        ]
        for crowd in crowds:
            hear(crowd, 60.0)
        start_s = time.perf_counter() + 0.5
        for crowd in crowds:
            crowd.send(start_s)
        seen = [hear(crowd, LIMIT_S) for crowd in crowds]
        told = hear(controller, LIMIT_S)
        save.send("come")
        gate = hear(save, LIMIT_S)
        for pipe in pipes:
            pipe.send("end")
        for process in started:
            process.join(10.0)
    finally:
        for process in started:
            process.kill()
    assert not told["wrong"], f"members were lost: {told['wrong'][:5]}"
    entered_s = max(crowd["entered_s"] for crowd in seen)
    votes_s, verdicts_s = (
        last_of_each_step([crowd[kind] for crowd in seen]) for kind in ("votes_s", "verdicts_s")
    )
    first, last = (max(crowd["error_s"][i] for crowd in seen) for i in (0, 1))
    return {
        "admitted_s": entered_s - start_s,
        "started_s": max(crowd["went_s"] for crowd in seen) - entered_s,
        "verdict_s": statistics.median(verdicts_s[step] - votes_s[step] for step in votes_s),
        "slowest_verdict_s": max(verdicts_s[step] - votes_s[step] for step in votes_s),
        "clock": last / round_trip_s,
        "first_clock": first / round_trip_s,
        "bytes_each": told["bytes_each"],
        "repeated_calls": sum(crowd["repeats"] for crowd in seen),
        **gate,
    }


def measure_long_run() -> dict[str, float]:
    """A recorder of a run of a million steps, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=record_long_run, args=(folder, there), daemon=True)
        process.start()
        assert here.poll(LIMIT_S), "the recorder of a long run says nothing"
        found: dict[str, float] = here.recv()
        process.join()
    return found


# ---- routes --------------------------------------------------------------------------------------

BATCH: Spec = (("data",), (), ())
WHOLE: Spec = ((), (), ())
PER_NODE = 8


def layouts(devices: int) -> list[tuple[tuple[int, int], Spec, tuple[int, int], Spec]]:
    """Meshes and cuts at both ends: (data, tensor)."""
    wide, even = (devices // PER_NODE, PER_NODE), (devices // 4, 4)
    return [
        (wide, BATCH, wide, BATCH),
        (wide, BATCH, even, BATCH),
        ((devices, 1), BATCH, (1, devices), WHOLE),
        ((1, devices), WHOLE, (devices, 1), BATCH),
    ]


def route(devices: int) -> float:
    """Seconds of the slowest layout."""
    numbers = [range(devices), range(devices, 2 * devices)]
    processes = [
        Process(
            number=first // PER_NODE,
            name=f"c/n{first // PER_NODE}",
            cluster="c",
            node=f"n{first // PER_NODE}",
            stage=stage,
            rank=rank,
            devices=tuple(range(first, first + PER_NODE)),
            local_devices=tuple(range(PER_NODE)),
        )
        for stage in (0, 1)
        for rank, first in enumerate(numbers[stage][::PER_NODE])
    ]
    times_s = []
    for source, source_spec, target, target_spec in layouts(devices):
        stages = [
            StagePlan(
                cluster="c",
                nodes=("n",),
                chunks=((),),
                devices=tuple(stage_devices),
                mesh={Axis.DATA: mesh[0], Axis.TENSOR: mesh[1]},
                fabrics={},
                memory_bytes={},
                seconds={},
            )
            for stage_devices, mesh in zip(numbers, (source, target), strict=True)
        ]
        crossing = Crossing(
            name="F0",
            source=0,
            target=1,
            link="c -> c",
            shape=(devices, 2048, 8192),
            dtype="bfloat16",
            source_spec=source_spec,
            target_spec=target_spec,
        )
        start_s = time.perf_counter()
        pieces(crossing, SimpleNamespace(stages=stages), processes)  # type: ignore[arg-type]
        times_s.append(time.perf_counter() - start_s)
    return max(times_s)


# ---- results -------------------------------------------------------------------------------------


def summarise(runs: Sequence[dict[str, float]]) -> dict[str, Any]:
    """The median, the least and the most of each number."""
    return {
        name: {
            "median": statistics.median(run[name] for run in runs),
            "low": min(run[name] for run in runs),
            "high": max(run[name] for run in runs),
        }
        for name in runs[0]
    }


def fit(lines: Sequence[dict[str, Any]], name: str) -> float:
    """Seconds that `FITTED` members would take, by a straight line through the medians."""
    sizes = [line["members"] for line in lines]
    slope, start = np.polyfit(sizes, [line[name]["median"] for line in lines], 1)
    return float(slope * FITTED + start)


def verdicts(
    lines: Sequence[dict[str, Any]], routed: dict[int, float], long_run: dict[str, float]
) -> dict[str, bool]:
    """The bars, each met or not; those of sizes that were not run are left out."""
    found: dict[str, bool] = {}
    for line in lines:
        if line["members"] == SIZES[-1]:
            found |= {name: line[name]["median"] <= bar for name, bar in BARS.items()}
    if DEVICES[-1] in routed:
        found["routed_s"] = routed[DEVICES[-1]] <= ROUTED_S
    return found | {name: long_run[name] <= bar for name, bar in LONG_RUN_BARS.items()}


def table(
    lines: Sequence[dict[str, Any]],
    routed: dict[int, float],
    fitted: dict[str, float],
    long_run: dict[str, float],
) -> str:
    """In Markdown."""
    rows = [
        "| members | admitted s | started s | verdict ms | slowest verdict ms "
        "| clock | clock at go | KiB each | gate cores | gate released ms |",
        "| ---: " * 10 + "|",
    ]

    def cell(line: dict[str, Any], name: str, scale: float, digits: int) -> str:
        middle, low, high = (scale * line[name][of] for of in ("median", "low", "high"))
        return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"

    for line in lines:
        cells = [
            f"{line['members']:,}", cell(line, "admitted_s", 1, 1), cell(line, "started_s", 1, 1),
            cell(line, "verdict_s", 1e3, 0), cell(line, "slowest_verdict_s", 1e3, 0),
            cell(line, "clock", 1e2, 1) + "%",
            cell(line, "first_clock", 1e2, 0) + "%", cell(line, "bytes_each", 2**-10, 1),
            cell(line, "gate_cores", 1, 2), cell(line, "gate_released_s", 1e3, 0),
        ]  # fmt: skip
        rows.append("| " + " | ".join(cells) + " |")
    met = verdicts(lines, routed, long_run)
    bars = {**BARS, "routed_s": ROUTED_S, **LONG_RUN_BARS}
    told = [
        f"{name} <= {bars[name]:g} {'met' if is_met else 'MISSED'}" for name, is_met in met.items()
    ]
    rows += ["", f"Bars of {SIZES[-1]:,} members and {DEVICES[-1]:,} devices: {', '.join(told)}."]
    if fitted:
        words = [f"{name} {value:.2f}" for name, value in fitted.items()]
        rows += ["", f"A line through the medians, at {FITTED:,} members: {', '.join(words)}."]
    rows += ["", "| devices a stage | routed s |", "| ---: | ---: |"]
    rows += [f"| {devices:,} | {seconds:.3f} |" for devices, seconds in routed.items()]
    rows += [
        "",
        f"A run of {STEPS:,} steps: resumed in {long_run['resumed_s']:.2f} s; its recorder then "
        f"holds {long_run['resident_bytes'] / 1e6:.1f} MB, and "
        f"{long_run['bytes_a_step']:.0f} bytes more for each step that follows.",
    ]
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=count, default=3, help="of every size (3)")
    parser.add_argument("--most", type=count, default=SIZES[-1], help="members (2048)")
    parser.add_argument("--round-trip", type=float, default=0.2, help="seconds (0.2)")
    parser.add_argument("--crowds", type=count, default=2, help="processes of members (2)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder (results/)")
    args = parser.parse_args()
    routed = {
        devices: statistics.median(route(devices) for _ in range(args.repeats))
        for devices in DEVICES
    }
    lines: list[dict[str, Any]] = []
    for size in (size for size in SIZES if size <= args.most):
        runs = []
        for _ in range(args.repeats):
            runs.append(measure(size, args.round_trip, args.crowds))
            words = ", ".join(f"{name} {value:.3g}" for name, value in runs[-1].items())
            print(f"{size} members: {words}", flush=True)
        lines.append({"members": size, **summarise(runs)})
    long_run = measure_long_run()
    names = ("admitted_s", "started_s", "verdict_s")
    fitted = {name: fit(lines, name) for name in names} if len(lines) > 1 else {}
    result = {
        **provenance(NAME),
        "round_trip_s": args.round_trip,
        "lines": lines,
        "fitted": {"members": FITTED, **fitted},
        "routed_s": routed,
        "long_run": {"steps": STEPS, **long_run},
        "bars": {name: bool(met) for name, met in verdicts(lines, routed, long_run).items()},
    }
    about = f"commit {result['commit']}, {result['date']}, {os.cpu_count()} cores of {cpu_model()}"
    trip = f"round trip {1e3 * args.round_trip:g} ms, medians (least to most) of {args.repeats}"
    text = f"{table(lines, routed, fitted, long_run)}\n\n{about}, {trip}: `{result['command']}`\n"
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{NAME}.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / f"{NAME}.md").write_text(text)
    print("", text, sep="\n")
    return 0 if all(verdicts(lines, routed, long_run).values()) else 1


if __name__ == "__main__":
    sys.exit(main())
