"""`launch lab`: runs a command in a topology that is rebuilt in small on this machine."""

import argparse
import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from holmesjax import config as configs
from holmesjax.checkpoints import island_states
from holmesjax.config import Config
from holmesjax.errors import ConfigError
from holmesjax.lab import injected_faults, scaled_topology
from holmesjax.lab.injected_faults import Fault
from holmesjax.lab.shell import Commands, tear_down
from holmesjax.topology import loading
from holmesjax.topology.machines import Node, Topology
from holmesjax.units import show
from launch.lab_machine import namespaces
from launch.lab_machine.counters import Counters
from launch.lab_machine.injector import Injector
from launch.launchers.launcher import unwinding

# One core's rate of products, as NumPy's library does them: the best of five.
MEASURE = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
import time, numpy
a = numpy.ones((1024, 1024), "float32")
def once():
    start_s = time.perf_counter()
    a @ a
    return time.perf_counter() - start_s
once()
print(2 * 1024**3 / min(once() for _ in range(5)))
"""


def run(args: argparse.Namespace) -> int:
    if args.topology == "clean":
        return _clean(args)
    if args.command.verb == "plan":  # it starts no processes on nodes
        return importlib.import_module(f"launch.verbs.{args.command.verb}").run(args.command)
    if getattr(args.command, "launcher", None) is not None:
        problem, fix = "the lab starts the processes itself", "leave it out"
        raise ConfigError("--launcher", problem, found=args.command.launcher, fix=fix)
    topology, config = _topology(args), None
    if args.command.verb != "probe":
        config = args.command.job.config
    faults = injected_faults.parse_all(args.fault, topology)
    lab, lines = _make_lab(args, topology, config)
    commands = namespaces.commands_for(lab)
    described = scaled_topology.describe(lab)
    print(f"lab         {commands.switch}: {len(lab.nodes)} nodes", *described, sep="\n")
    print(f"  scale     {lines[0]}", *(f"            {line}" for line in lines[1:]), sep="\n")
    if args.dry_run:
        print(*_dry_run(commands, faults, args.command), sep="\n")
        return 0
    namespaces.refuse_without_means(delays=bool(lab.delays_s))
    sys.stdout.flush()
    return _run_in(commands, args.command, faults)


class _Watch:
    """Tells the injector of each step, and records the counts of the kernel."""

    def __init__(self, counters: Counters, injector: Injector, run_dir: Path):
        self._counters, self._injector, self._run_dir = counters, injector, run_dir

    def step(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        self._injector.step(record["step"])
        return self._counters.step(record)

    def end(self) -> None:
        self._counters.write(self._run_dir, self._injector.done)


def _run_in(commands: Commands, command: argparse.Namespace, faults: list[Fault]) -> int:
    with unwinding(), namespaces.built(commands):
        for line in _round_trips(commands):
            print(line, flush=True)
        if command.verb == "profile":
            return _profile(commands, command)
        launcher = namespaces.LabLauncher(commands)
        # Imported here: `probe` draws, which is slow to import.
        verb = importlib.import_module(f"launch.verbs.{command.verb}")
        with Injector(commands, faults) as injector:
            if command.verb == "probe":
                return int(verb.run(command, launcher, commands.lab.scale))
            if command.verb == "doctor":
                return int(verb.run(command, launcher))
            islands = island_states.clusters_of(command.job.plan)
            watch = _Watch(Counters(commands, islands), injector, command.job.run_dir)
            return int(verb.run(command, launcher, watch))


def _round_trips(commands: Commands) -> Iterator[str]:
    """Measures the round trip between each two clusters; yields a line for each."""
    lab = commands.lab
    for a, b in sorted(lab.links):
        if a < b:
            expected_s = lab.links[a, b].delay_s + lab.links[b, a].delay_s
            found_s = namespaces.round_trip_s(commands, lab.members(a)[0], lab.members(b)[0])
            names = " <-> ".join(lab.topology.clusters[end].name for end in (a, b))
            expected = f"{show(expected_s, 's')} rebuilt, " if expected_s else ""
            yield f"  round trip {names}: {expected}{show(found_s, 's')} measured"


def _profile(commands: Commands, command: argparse.Namespace) -> int:
    """Runs the verb on the node that is named, or on any if all are equal."""
    node = command.job.node_to_measure(command.node)
    env = command.job.process_environment(os.environ)
    return namespaces.run_on(commands, node.name, _profile_words(command, node), env)


def _profile_words(command: argparse.Namespace, node: Node) -> list[str]:
    """Returns the verb with all of its arguments."""
    output = command.output or f"{node.device.name}_lab.yaml"
    overrides = [str(command.target), *command.overrides]
    return ["profile", *overrides, "--output", output, "--node", node.name]


def _clean(args: argparse.Namespace) -> int:
    namespaces.refuse_without_means()
    cleaned = namespaces.clean()
    print(
        *(f"took away holmes-{id}" for id in cleaned) if cleaned else ["nothing is left"], sep="\n"
    )
    return 0


def _topology(args: argparse.Namespace) -> Topology:
    if args.command.verb == "probe":
        return loading.load(args.topology)
    topology: Topology = args.command.job.topology
    return topology


def _make_lab(
    args: argparse.Namespace, topology: Topology, config: Config | None
) -> tuple[scaled_topology.Lab, list[str]]:
    """Makes the lab, and the arithmetic of its scale. A probe has no config of a run."""
    real = configs.load(args.real) if args.real else config
    cores = sorted(os.sched_getaffinity(0))
    if real is None and args.scale is None:
        problem, fix = (
            "is needed, since a probe has no run to compute it from",
            "write --scale 0.01, say, or --real RUN.yaml",
        )
        raise ConfigError("--scale", problem, found="nothing", fix=fix)
    dtype = real.train.compute_dtype if real else "float32"
    shares = scaled_topology.make_shares(topology, dtype, cores, _quota(args.cpu))
    if args.scale is not None or real is None:
        scale, lines = args.scale, [f"{args.scale:g}, as --scale says"]
    else:
        own, there = scaled_topology.workload(config or real), scaled_topology.workload(real)
        scale, lines = scaled_topology.scale(
            topology, shares, _core_flop_per_s(cores[0]), own, there
        )
    return scaled_topology.make_lab(topology, shares, scale), lines


def _quota(text: str | None) -> float | None:
    """Returns the cores of the fastest node."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text)
    if not match or float(match[1]) == 0:
        problem = "must be the share of a core for the fastest node, in percent"
        raise ConfigError("--cpu", problem, found=text, fix="write --cpu 45%, or 150%")
    return float(match[1]) / 100


def _core_flop_per_s(core: int) -> float:
    """Measures how fast one core multiplies float32 matrices."""
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", MEASURE, str(core)]
    return float(subprocess.run(words, env=env, capture_output=True, check=True).stdout)


def _dry_run(commands: Commands, faults: list[Fault], command: argparse.Namespace) -> list[str]:
    """Returns every line that would be run, with comments between them."""
    lines = ["# build the lab", *commands.build()]
    if commands.lab.delays_s:
        line = shlex.join(namespaces.delaying_words(commands))
        lines += ["# start the process that delays, which ends with its standard input", line]
    words = ["worker", str(command.job.run_dir)] if command.verb == "train" else ["agent"]
    nodes = commands.lab.nodes
    if command.verb == "profile":
        measured = command.job.node_to_measure(command.node)
        words = _profile_words(command, measured)
        nodes = tuple(node for node in nodes if node.name == measured.name)
    worker = [sys.executable, "-m", "launch", *words]
    lines.append(f"# start a process on {'each node' if len(nodes) > 1 else nodes[0].name}")
    lines += [shlex.join(commands.enter(node, worker)) for node in nodes]
    for fault in faults:
        doing, undoing = commands.fault(fault)
        lines += [f"# fault: {fault.text}", *doing]
        if fault.duration_s is not None:
            lines += [f"# {fault.duration_s:g} s later", *undoing]
    return [*lines, "# take it away", *tear_down(commands.id, commands.cgroup_version)]
