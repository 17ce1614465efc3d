"""`launch doctor`: looks at everything that a start needs, and says what to do."""

import argparse
import secrets
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise, product
from pathlib import Path
from typing import TypeVar

from holmesjax.config import Config
from holmesjax.costs import work
from holmesjax.hosts import doctor
from holmesjax.hosts.doctor import Facts, Finding
from holmesjax.job import Job
from holmesjax.plan.processes import Process, domain_fabric, fabric_between, make_processes
from launch import outputs
from launch.launchers import table
from launch.launchers.agents import Agents
from launch.launchers.launcher import Launcher

T = TypeVar("T")
MAX_AT_ONCE = 16  # nodes whose clocks are compared
REACH_S = 3.0  # for one connection
STATE_BYTES = 12  # of a parameter in a checkpoint: a float32 master and two moments


def run(args: argparse.Namespace, launcher: Launcher | None = None) -> int:
    """0 if nothing is in the way of a start, or else 1. With a launcher that is given: a lab."""
    start_s = time.monotonic()
    job: Job = args.job
    name = args.launcher or "local"
    is_rehearsal = job.config.run.rehearse or launcher is not None or name == "local"
    if launcher is None:
        table.refuse_useless({"--hosts": args.hosts, "--listen": args.listen}, name)
        launcher = table.make(name, job.topology, hosts=args.hosts, listen=args.listen)
    outputs.make_folder(job.run_dir, "run.dir")
    with Agents(job.topology, launcher, job.run_dir) as agents:
        found = [_missing(node, why) for node, why in agents.missing.items()]
        if agents.nodes:
            found += _look(job, agents, is_rehearsal=is_rehearsal)
    print(f"doctor      {len(job.topology.nodes)} nodes of {job.topology.name}, {job.run_dir}")
    print(*found, sep="\n")
    problems = sum(finding.level == "problem" for finding in found)
    count = f"{problems or 'no'} problem{'s' * (problems != 1)}"
    print(f"{count}; it took {time.monotonic() - start_s:.1f} s")
    return 1 if problems else 0


def _missing(node: str, why: str) -> Finding:
    fix = f"see that {node} can be reached, and has this installation and the run folder"
    return Finding(what="start", level="problem", text=f"no process on {node}: {why}", fix=fix)


def _look(job: Job, agents: Agents, *, is_rehearsal: bool) -> list[Finding]:
    with _marker(job.run_dir) as marker:
        facts = _inspect(job.run_dir, marker, agents)
    return [
        *doctor.findings(
            job.topology,
            facts,
            is_rehearsal=is_rehearsal,
            needed_bytes=checkpoint_bytes(job.config) * (job.config.checkpoint.keep + 1),
        ),
        *_coordinators(job, agents, facts),
        *doctor.reachability(_reach(job, agents, facts)),
    ]


def checkpoint_bytes(config: Config) -> float:
    """Of one checkpoint of the whole model."""
    model = config.model
    num_parameters = (
        model.num_layers * work.block_parameters(model)
        + work.embed_parameters(model)
        + work.head_parameters(model)
    )
    return STATE_BYTES * num_parameters


@contextmanager
def _marker(folder: Path) -> Iterator[str]:
    """A file that only this folder has."""
    path = folder / f".doctor-{secrets.token_hex(8)}"
    path.touch()
    try:
        yield path.name
    finally:
        path.unlink()


def _inspect(folder: Path, marker: str, agents: Agents) -> dict[str, Facts]:
    """The facts of every node, its clock compared with this one's."""

    def ask(node: str) -> Facts:
        start_s = time.time()
        fact = agents.ask(node, "inspect", folder=str(folder.absolute()), marker=marker)
        end_s = time.time()
        return {**fact, "now_s": fact["now_s"] - (start_s + end_s) / 2}

    with ThreadPoolExecutor(MAX_AT_ONCE) as pool:
        return dict(zip(agents.nodes, pool.map(ask, agents.nodes), strict=True))


def _coordinators(job: Job, agents: Agents, facts: Mapping[str, Facts]) -> Iterator[Finding]:
    """Whether the ports that the config names are free."""
    config = job.config.distributed
    if not config.port:
        return
    processes = make_processes(job.plan, job.topology, config.processes)
    for process in processes:
        if not process.leads or process.node not in facts:
            continue
        domain = [other for other in processes if other.stage == process.stage]
        fabric = domain_fabric(job.topology, domain)
        for address in facts[process.node]["addresses"].get(fabric, [])[:1]:
            port = config.port + process.stage
            answer = agents.ask(process.node, "bind", address=address, port=port)
            if "problem" in answer:
                yield Finding(
                    what="distributed.port",
                    level="problem",
                    text=f"{address}:{port} on {process.node}: {answer['found']}",
                    fix="choose another distributed.port, or 0 for any that is free",
                )


def _reach(
    job: Job, agents: Agents, facts: Mapping[str, Facts]
) -> dict[tuple[str, str, str], float | str]:
    """Every way that the job will use: (from, to, fabric) -> seconds, or why it is shut."""
    books = {
        node: answer.get("book", {})
        for node, answer in agents.ask_all(dict.fromkeys(agents.nodes, ("open", {}))).items()
    }
    found: dict[tuple[str, str, str], float | str] = {}
    plans: dict[str, list[tuple[tuple[str, str, str], tuple[str, str, int]]]] = {}
    for source, target, fabric in sorted(ways(job)):
        if source not in books or target not in books:
            continue  # told of already
        key = source, target, fabric
        own = facts[source]["addresses"].get(fabric, [])
        theirs = books[target].get(fabric, [])
        if not own or not theirs:
            found[key] = f"{target if own else source} has no address on {fabric}"
            continue
        for here, (there, port) in paired(own, theirs):
            nics = f"{fabric}, {here} to {there}" if len(own) + len(theirs) > 2 else fabric
            plans.setdefault(source, []).append(((source, target, nics), (here, there, port)))
    questions = {
        source: ("reach", {"paths": [path for _, path in planned], "timeout_s": REACH_S})
        for source, planned in plans.items()
    }
    for source, answer in agents.ask_all(questions).items():
        keys = [key for key, _ in plans[source]]
        found |= dict(zip(keys, answer["seconds"], strict=True))
    return found


def ways(job: Job) -> set[tuple[str, str, str]]:
    """(from, to, fabric) of nodes that the plan lets talk: enough for each of them, both ways.

    The nodes of a stage stand in a ring; those of two stages that hand something to each other are
    paired, cluster by cluster. So every node sends and receives over every fabric that it uses, in
    a number of ways that grows with the nodes and not with their pairs.
    """
    processes = make_processes(job.plan, job.topology, job.config.distributed.processes)
    stages: dict[int, dict[str, Process]] = defaultdict(dict)  # of each, one process a node
    for process in processes:
        stages[process.stage].setdefault(process.node, process)
    found = set()
    for stage in stages.values():
        nodes = list(stage)
        fabric = domain_fabric(job.topology, list(stage.values()))
        found |= {(a, b, fabric) for a, b in zip(nodes, [*nodes[1:], nodes[0]], strict=True)}
    homes = [home for home, _ in job.plan.chunks]
    joined = set(pairwise(homes))
    if job.config.model.tied_embeddings:
        joined.add((homes[0], homes[-1]))
    for source, target in joined:
        clusters = [_by_cluster(stages[end]) for end in (source, target)]
        for ends in product(*clusters):
            for a, b in paired(*ends):
                found.add((a.node, b.node, fabric_between(job.topology, a, b)))
    return {way for a, b, fabric in found if a != b for way in ((a, b, fabric), (b, a, fabric))}


def _by_cluster(stage: Mapping[str, Process]) -> list[list[Process]]:
    found: dict[str, list[Process]] = defaultdict(list)
    for process in stage.values():
        found[process.cluster].append(process)
    return list(found.values())


def paired(a: Sequence[T], b: Sequence[T]) -> list[tuple[T, T]]:
    """Pairs, as many as the longer one has; those of the shorter one are there several times.

    >>> paired([1, 2, 3], [4, 5])
    [(1, 4), (2, 5), (3, 4)]
    """
    return [(a[i % len(a)], b[i % len(b)]) for i in range(max(len(a), len(b)))]
