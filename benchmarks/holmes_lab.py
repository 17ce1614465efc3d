"""The Holmes comparison in small, in labs on this machine: python -m benchmarks.holmes_lab

The rows are in `benchmarks.lab_rows`: a homogeneous fast network, homogeneous Ethernet, and a
hybrid one with HolmesJAX's plan, with four worse ones, and with what one would take instead. Each
run is a lab of its own, with new processes; a repeat runs every row at every point once, those of
a system soon after each other.

    tokens/s    of a batch over the mean time of a step, without the first two; the median of the
                repeats. `spread` is their range over it.
    share       of the best homogeneous figure of the same system, the fast network's, in the same
                repeat, since the machine is not as fast in each; the median of the repeats, and
                their range. So is `slower by`, which is of the row that this one is compared with
    compute     CPU seconds of a node's processes in a step over the node's quota; mean of the nodes
    waiting     the rest of the step: for other nodes, the network, and in the schedule's bubble
    others      what else had the machine's cores, as a share of them: above 10% in any run, the
                line is marked as disturbed, and is no result

A run in which others had that much, or whose nodes took 15% more CPU seconds than another of the
same row and point, is made again when all others are done, at most twice; what was dropped stays in
the JSON under `dropped`.

Losses of HolmesJAX's rows must agree within 1e-5 of their value, and so must those of plain JAX.
PyTorch's within 1e-3. Needs what `launch lab` needs (docs/lab.md), and an idle machine for two to
three hours: a result that was stopped goes on with --go-on, and may be made a repeat at a time.
"""

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil

from benchmarks import lab_results
from benchmarks.lab_rows import (
    POINTS,
    ROWS,
    WARM_UP_STEPS,
    Row,
    cells,
    load_topology,
    make_config,
    make_job,
    make_lab,
    network_text,
    settings,
    told_text,
)
from benchmarks.lab_steps import machine_cpu_s
from benchmarks.pipeline_overhead import count
from benchmarks.provenance import RESULTS, provenance, versions
from holmesjax import config as configs
from holmesjax.config import CHECKOUT, Schedule
from holmesjax.errors import ConfigError, HolmesError
from holmesjax.job import Job
from holmesjax.lab.shell import Commands
from holmesjax.process_variables import allocator_for
from holmesjax.report import metrics
from launch.lab_machine import namespaces
from launch.supervisor import Supervisor

Result = dict[str, Any]
RUN_TIMEOUT_S = 900.0
MAX_AGAIN = 2  # times that a run is made again because the machine was disturbed
LAST_LINES = 12  # of a process that failed, for the result
PORT = 29500  # of the rendezvous; every lab has its own network


class Failed(Exception):
    """A run that has no figure, and why."""


# ---- one run -------------------------------------------------------------------------------------


def cpu_seconds(commands: Commands) -> list[float]:
    """CPU seconds of the processes that run on each node now."""
    found = []
    for node in commands.lab.nodes:
        total_s = 0.0
        for pid in Path(commands.cgroup(node), "cgroup.procs").read_text().split():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = psutil.Process(int(pid)).cpu_times()
                total_s += times.user + times.system
        found.append(total_s)
    return found


class _CpuWatch:
    """Reads the nodes' CPU seconds whenever a step of a job is done."""

    def __init__(self, commands: Commands):
        self._commands = commands
        self.seconds: list[list[float]] = []  # by step, then node; last, the whole machine

    def step(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        self.seconds.append([*cpu_seconds(self._commands), machine_cpu_s()])
        return {}

    def end(self) -> None:
        pass


def run_holmesjax(row: Row, job: Job, commands: Commands, log: Path) -> Result:
    """Trains under a supervisor. Raises HolmesError as that does."""
    launcher = namespaces.LabLauncher(commands)
    launcher.module = row.module
    watch = _CpuWatch(commands)
    with log.open("w") as file, contextlib.redirect_stdout(file):
        Supervisor(job, launcher, watch=watch).run()
    records = metrics.read(job.run_dir)
    if len(records) < job.config.train.steps:  # it was asked to stop
        raise KeyboardInterrupt
    timed = records[WARM_UP_STEPS:]
    return {
        "losses": [record["loss"] for record in records],
        "step_s": [record["step_time_s"] for record in timed],
        # A step is told when the next has been dispatched, which in a pipeline is near its end. The
        # last step has no next, so its own record comes too early.
        **_per_step(watch.seconds[WARM_UP_STEPS - 2 : -1]),
        "bubble_share": sum(record["bubble_share"] for record in timed) / len(timed),
        "link_bytes": records[-1]["link_bytes"],
        "layers": [stage.num_blocks for stage in job.plan.stages],
        "nodes": [list(stage.nodes) for stage in job.plan.stages],
    }


def _per_step(seconds: list[list[float]]) -> Result:
    """CPU seconds in a step, from what had been used after each: of each node, and of the rest.

    The rest is whatever else the machine does: the supervisor, the kernel, and who disturbs.
    """
    pairs = zip(seconds[0], seconds[-1], strict=True)
    *nodes, machine = [(end - start) / (len(seconds) - 1) for start, end in pairs]
    return {"cpu_s": nodes, "other_cpu_s": machine - sum(nodes)}


def run_other(row: Row, run_file: Path, commands: Commands, folder: Path) -> Result:
    """A process on each node, which prints its steps. Raises Failed with the last lines of one."""
    nodes = commands.lab.nodes
    first = nodes[0].fast_address or nodes[0].slow_address
    # PyTorch is no faster with it.
    allocator = allocator_for({"cpu"}, os.environ) if row.system == "JAX" else {}
    children: list[subprocess.Popen[bytes]] = []
    outs = [folder / f"rank{rank}.jsonl" for rank in range(len(nodes))]
    errors = [folder / f"rank{rank}.log" for rank in range(len(nodes))]
    try:
        for rank, node in enumerate(nodes):
            words = [sys.executable, "-m", row.module, row.mode, str(run_file), str(rank)]
            argv = commands.enter(node, [*words, f"{first}:{PORT}"])
            nic = "fast0" if node.fast_address else "eth0"
            with outs[rank].open("wb") as out, errors[rank].open("wb") as error:
                child = subprocess.Popen(
                    argv,
                    env={**os.environ, **allocator, "GLOO_SOCKET_IFNAME": nic},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=error,
                    start_new_session=True,  # Ctrl-C is for this process, which takes the lab away
                )
            children.append(child)
        _wait(children, errors)
    finally:
        for child in children:
            child.kill()
            child.wait()
    return _read_steps(outs)


def _wait(children: list[subprocess.Popen[bytes]], errors: list[Path]) -> None:
    deadline_s = time.monotonic() + RUN_TIMEOUT_S
    while None in (states := [child.poll() for child in children]) or any(states):
        late = time.monotonic() > deadline_s
        for rank, state in enumerate(states):
            if state or (late and state is None):
                lines = errors[rank].read_text(errors="replace").splitlines()[-LAST_LINES:]
                problem = f"ended with {state}" if state else f"not done after {RUN_TIMEOUT_S:g} s"
                raise Failed("\n".join([f"rank {rank} {problem}", *lines]))
        time.sleep(0.2)


def _read_steps(outs: list[Path]) -> Result:
    ranks = [
        [json.loads(line) for line in out.read_text().splitlines() if line.startswith("{")]
        for out in outs
    ]
    ends_s = [record["end_s"] for record in ranks[0]][WARM_UP_STEPS - 1 :]
    losses = []
    for records in zip(*ranks, strict=True):
        known = [record["loss"] for record in records if record["loss"] is not None]
        losses.append(sum(known) / len(known))
    by_step = [
        [*(record["cpu_s"] for record in records), records[0]["machine_cpu_s"]]
        for records in zip(*ranks, strict=True)
    ]
    return {
        "losses": losses,
        "step_s": [end - start for start, end in itertools.pairwise(ends_s)],
        **_per_step(by_step[WARM_UP_STEPS - 1 :]),
    }


def run_row(row: Row, point: int | None, steps: int, schedule: Schedule, folder: Path) -> Result:
    """Runs a row in a lab of its own. Raises Failed or HolmesError.

    Args:
      row: the system, and how it trains.
      point: the number by which the rate of Ethernet is divided; None for the fast network.
      steps: steps that are measured, after the warm-up.
      schedule: the pipeline schedule.
      folder: takes the files of the run.
    """
    if row.system == "PyTorch" and importlib.util.find_spec("torch") is None:
        raise Failed("PyTorch is not installed: pip install -c constraints.txt -e '.[bench]'")
    network = load_topology(network_text(row, point), folder / "network.yaml")
    told = load_topology(told_text(row, point), folder / "told.yaml")
    config = make_config(row, folder, WARM_UP_STEPS + steps, schedule)
    commands = namespaces.commands_for(make_lab(row, network, sorted(os.sched_getaffinity(0))))
    with namespaces.built(commands):
        if row.system == "HolmesJAX":
            found = run_holmesjax(row, make_job(config, told), commands, folder / "job.log")
        else:
            configs.save(config, folder / "run.yaml")
            found = run_other(row, folder / "run.yaml", commands, folder)
    tokens = config.train.global_batch * config.model.context_length
    step_s = sum(found["step_s"]) / len(found["step_s"])
    quotas = [node.share.quota for node in commands.lab.nodes]
    compute_s = [cpu_s / quota for cpu_s, quota in zip(found["cpu_s"], quotas, strict=True)]
    found["tokens_per_s"] = tokens / step_s
    found["compute_s"] = sum(compute_s) / len(compute_s)
    found["waiting_s"] = step_s - found["compute_s"]
    found["disturbed_share"] = found["other_cpu_s"] / (step_s * (os.cpu_count() or 1))
    return found


@contextlib.contextmanager
def compile_cache() -> Iterator[None]:
    """For all processes that are started meanwhile."""
    with tempfile.TemporaryDirectory(prefix="holmes_lab_compiled_") as compiled:
        os.environ.update(
            JAX_COMPILATION_CACHE_DIR=compiled,
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
            JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
        )
        yield


# ---- all runs ------------------------------------------------------------------------------------


def measure(args: argparse.Namespace, result: Result, path: Path) -> None:
    """Adds every run to the result, which is written after each; then those again that tell of the
    machine instead."""
    _measure_missing(args, result, path)
    for _ in range(MAX_AGAIN):
        again = lab_results.disturbed(result["runs"])
        result["dropped"] += again
        result["runs"] = [run for run in result["runs"] if run not in again]
        _measure_missing(args, result, path)


def _measure_missing(args: argparse.Namespace, result: Result, path: Path) -> None:
    done = {(run["row"], run["point"], run["repeat"]) for run in result["runs"]}
    plan = [
        (name, point, repeat)
        for repeat in range(args.repeats)
        for name, point in cells(args.rows, args.points)
        if (name, point, repeat) not in done
    ]
    for i, (name, point, repeat) in enumerate(plan):
        row, at = ROWS[name], f"1/{point}" if point else "fast"
        print(f"{i + 1}/{len(plan)}  repeat {repeat + 1}, {at}, {name}: ", end="", flush=True)
        run: Result = {"row": name, "point": point, "repeat": repeat}
        with tempfile.TemporaryDirectory(prefix="holmes_lab_") as folder:
            try:
                run |= run_row(row, point, args.steps, args.schedule, Path(folder))
                print(
                    f"{run['tokens_per_s']:.0f} tokens/s, compute {run['compute_s']:.2f} s, "
                    f"others {run['disturbed_share']:.0%}",
                    flush=True,
                )
            except (Failed, HolmesError, subprocess.SubprocessError, OSError) as error:
                run["failed"] = str(error)
                print(f"FAILED: {error}", flush=True)
        result["runs"].append(run)
        path.write_text(json.dumps(result, indent=1) + "\n")


def go_on(result: Result, path: Path) -> Result:
    """An earlier result of the same code on the same machine, under the name of both commands.

    Raises ConfigError where there is none.
    """
    if not path.is_file():
        raise ConfigError(
            "--go-on", "there is no result to go on with", found=path, fix="leave it out"
        )
    earlier: Result = json.loads(path.read_text())
    for key in ("commit", "device", "versions", "settings"):
        if earlier.get(key) != result[key]:
            raise ConfigError(
                f"--go-on, {path}",
                f"the earlier result is of other {key}",
                found=_difference(earlier.get(key), result[key]),
                fix="measure both with the same, or choose another --out",
            )
    for key in ("command", "date"):
        if result[key] not in earlier[key].split("; "):
            earlier[key] += f"; {result[key]}"
    earlier.pop("stopped", None)
    return earlier


def _difference(earlier: Any, now: Any) -> str:
    if not isinstance(earlier, dict):
        return f"{earlier}; now {now}"
    keys = [key for key in {**earlier, **now} if earlier.get(key) != now.get(key)]
    return ", ".join(f"{key} {earlier.get(key)}; now {now.get(key)}" for key in keys)


def _leave(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def parse() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("holmes_lab", description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help="(all)")
    add("--points", nargs="+", type=int, choices=POINTS, default=list(POINTS), help="(all)")
    add("--repeats", type=count, default=3, help="of every row at every point (3)")
    add("--steps", type=count, default=6, help=f"timed in each run, after {WARM_UP_STEPS} (6)")
    schedules = ("1f1b", "eager_1f1b")
    add("--schedule", choices=schedules, default="eager_1f1b", help="of HolmesJAX (eager_1f1b)")
    add("--go-on", action="store_true", help="with the result in --out: run what it lacks")
    add("--out", type=Path, default=RESULTS, help="folder of table, chart and JSON (results/)")
    return parser.parse_args()


def main() -> int:
    args = parse()
    signal.signal(signal.SIGTERM, _leave)
    found_versions = versions()
    result: Result = {
        **provenance("holmes_lab", host=socket.gethostname()),
        "versions": found_versions,
        "settings": {**settings(args.schedule), "steps": args.steps},
        "runs": [],
        "dropped": [],
    }
    path = args.out / f"holmes_lab_{found_versions['jax']}.json"
    try:
        namespaces.refuse_without_means(delays=True)
        if args.go_on:
            result = go_on(result, path)
    except HolmesError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    args.out.mkdir(parents=True, exist_ok=True)
    os.chdir(CHECKOUT)  # where the nodes' processes find these modules
    try:
        with compile_cache():
            measure(args, result, path.absolute())
    except (KeyboardInterrupt, SystemExit):  # a supervisor makes the second of Ctrl-C
        print("\nstopped; what has been measured:", file=sys.stderr)
        result["stopped"] = True
    status = lab_results.write(result, path.absolute())
    return 130 if "stopped" in result else status


if __name__ == "__main__":
    sys.exit(main())
