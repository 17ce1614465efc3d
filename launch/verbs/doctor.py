"""`launch doctor`: checks everything that a start needs, and says what to do."""

import argparse
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import TypeVar

from holmesjax.errors import ConfigError
from holmesjax.files import places
from holmesjax.hosts import doctor, kernel_check
from holmesjax.hosts.agent_messages import (
    Bind,
    CheckKernels,
    Inspect,
    Listening,
    NicPath,
    NoAnswer,
    NodeFacts,
    Open,
    Reach,
)
from holmesjax.hosts.doctor import Finding
from holmesjax.job import Job
from holmesjax.plan import save_costs
from holmesjax.plan.plan import Axis, Plan
from holmesjax.plan.processes import Process, domain_fabric, fabric_between, make_processes
from holmesjax.transport import addresses
from launch import writable_outputs
from launch.launchers import table
from launch.launchers.agents import ANSWER_S, Agents
from launch.launchers.launcher import Launcher, unwinding
from launch.workers import pool_of

S = TypeVar("S")
T = TypeVar("T")
MAX_AT_ONCE = 16  # nodes whose clocks are compared
REACH_S = 10.0  # for one connection: a busy host is slow to answer


def run(args: argparse.Namespace, launcher: Launcher | None = None) -> int:
    """Returns 0 if nothing is in the way of a start, else 1. A given launcher is a lab's."""
    start_s = time.monotonic()
    job: Job = args.job
    kind = table.LAUNCHERS[args.launcher or "local"]
    is_simulated = job.config.run.rehearse or launcher is not None
    has_gpus = not is_simulated and job.topology.device_kinds != {"cpu"}
    launcher = launcher or table.make(kind, job.topology, args)
    writable_outputs.make_folder(job.run_dir, "run.dir")
    with unwinding(), Agents(job.topology, launcher, job.run_dir) as agents:
        found = [_missing(node, why) for node, why in agents.missing.items()]
        if agents.nodes:
            is_rehearsal = is_simulated or kind.is_here
            found += _look(job, agents, is_rehearsal=is_rehearsal, has_gpus=has_gpus)
    if has_gpus:
        found.append(_memory(job, launcher))
    print(f"doctor      {len(job.topology.nodes)} nodes of {job.topology.name}, {job.run_dir}")
    print(*found, sep="\n")
    problems = sum(finding.level == "problem" for finding in found)
    count = f"{problems or 'no'} problem{'s' * (problems != 1)}"
    print(f"{count}; it took {time.monotonic() - start_s:.1f} s")
    return 1 if problems else 0


def _memory(job: Job, launcher: Launcher) -> Finding:
    """Tells whether the plan fits the pool that each process will have of a GPU."""
    processes = make_processes(job.plan, job.topology, job.config.distributed.processes)
    pool = pool_of(job, launcher, processes, os.environ)
    assert pool, "there are GPUs"
    try:
        pool.refuse_too_small(job.plan.stages, job.topology)
    except ConfigError as error:
        text = f"{error.found}: {error.problem}"
        return Finding(what="memory", level="problem", text=text, fix=error.fix)
    text = pool.describe(job.plan.stages, job.topology)
    return Finding(what="memory", level="ok", text=text)


def _missing(node: str, why: str) -> Finding:
    fix = f"see that {node} can be reached, and has this installation and the run folder"
    return Finding(what="start", level="problem", text=f"no process on {node}: {why}", fix=fix)


def _look(job: Job, agents: Agents, *, is_rehearsal: bool, has_gpus: bool) -> Iterator[Finding]:
    with _marker(job.run_dir) as marker:
        answers = _inspect(job.run_dir, marker, agents)
    facts = {node: answer for node, answer in answers.items() if isinstance(answer, NodeFacts)}
    for node, answer in answers.items():
        if isinstance(answer, NoAnswer):
            fix = "install the same on all nodes, from one checkout and constraints.txt"
            yield Finding(what="start", level="problem", text=f"{node} {answer}", fix=fix)
    if not facts:
        return
    run_s = job.config.train.steps * job.plan.step_time_s
    yield from doctor.findings(
        job.topology,
        facts,
        is_rehearsal=is_rehearsal,
        needed_bytes=sum(save_costs.part_bytes(job.config, job.plan))
        * job.config.checkpoint.most_on_disk(run_s),
        streams=job.config.distributed.streams,
        url=job.config.run.dir if places.is_url(job.config.run.dir) else None,
        has_partners=job.config.checkpoint.partner,
    )
    if has_gpus:
        is_cut = any(stage.mesh.get(Axis.CONTEXT, 1) > 1 for stage in job.plan.stages)
        question = CheckKernels(asked=kernel_check.asked_of(job.config, is_cut=is_cut))
        # Another process of a node may have a check of its own first.
        longest_s = 2 * kernel_check.longest_s(question.asked) + ANSWER_S
        yield doctor.kernels(agents.ask_all(dict.fromkeys(facts, question), longest_s))
    yield from _coordinators(job, agents, facts)
    yield from doctor.reachability(_reach(job, agents, facts))


@contextmanager
def _marker(folder: Path) -> Iterator[str]:
    """Makes a file that only this folder has, and gives its name."""
    path = folder / f".doctor-{secrets.token_hex(8)}"
    path.touch()
    try:
        yield path.name
    finally:
        with suppress(OSError):  # what was found says more
            path.unlink()


def _inspect(folder: Path, marker: str, agents: Agents) -> dict[str, NodeFacts | NoAnswer]:
    """Asks for the facts of every node, and compares its clock with this machine's."""
    question = Inspect(folder=str(folder.absolute()), marker=marker)

    def ask(node: str) -> NodeFacts | NoAnswer:
        start_s = time.time()
        answer = agents.ask(node, question)
        end_s = time.time()
        if isinstance(answer, NoAnswer):
            return answer
        return replace(answer, now_s=answer.now_s - (start_s + end_s) / 2)

    with ThreadPoolExecutor(MAX_AT_ONCE) as pool:
        return dict(zip(agents.nodes, pool.map(ask, agents.nodes), strict=True))


def _coordinators(job: Job, agents: Agents, facts: Mapping[str, NodeFacts]) -> Iterator[Finding]:
    """Yields a finding for each port of the config that is taken."""
    config = job.config.distributed
    if not config.port:
        return
    processes = make_processes(job.plan, job.topology, config.processes)
    for process in processes:
        if not process.leads or process.node not in facts:
            continue
        domain = [other for other in processes if other.stage == process.stage]
        fabric = domain_fabric(job.topology, domain)
        for address in facts[process.node].addresses.get(fabric, [])[:1]:
            port = config.port + process.stage
            answer = agents.ask(process.node, Bind(address=address, port=port))
            if isinstance(answer, NoAnswer):
                yield Finding(
                    what="distributed.port",
                    level="problem",
                    text=f"{addresses.show(address, port)} on {process.node}: {answer.found}",
                    fix="choose another distributed.port, or 0 for any that is free",
                )


def _reach(
    job: Job, agents: Agents, facts: Mapping[str, NodeFacts]
) -> dict[tuple[str, str, str], float | str]:
    """Tries every way of the job: (from, to, fabric) -> seconds, or the reason of a failure."""
    listening = agents.ask_all(dict.fromkeys(facts, Open()))
    books = {
        node: answer.book if isinstance(answer, Listening) else {}
        for node, answer in listening.items()
    }
    found: dict[tuple[str, str, str], float | str] = {}
    plans: dict[str, list[tuple[tuple[str, str, str], NicPath]]] = {}
    for source, target, fabric in sorted(ways(job)):
        if source not in books or target not in books:
            continue  # told of already
        key = source, target, fabric
        own = facts[source].addresses.get(fabric, [])
        theirs = books[target].get(fabric, [])
        if not own or not theirs:
            found[key] = f"{target if own else source} has no address on {fabric}"
            continue
        for here, (there, port) in paired(own, theirs):
            nics = f"{fabric}, {here} to {there}" if len(own) + len(theirs) > 2 else fabric
            path = NicPath(source=here, address=there, port=port)
            plans.setdefault(source, []).append(((source, target, nics), path))
    questions = {
        source: Reach(paths=[path for _, path in planned], timeout_s=REACH_S)
        for source, planned in plans.items()
    }
    for source, answer in agents.ask_all(questions).items():
        for i, (key, _) in enumerate(plans[source]):
            found[key] = str(answer) if isinstance(answer, NoAnswer) else answer.seconds[i]
    return found


def ways(job: Job) -> set[tuple[str, str, str]]:
    """Returns the ways to try: (from, to, fabric) of nodes, in both directions.

    The nodes of a stage stand in a ring. The nodes of two stages that hand something to each other
    are paired, cluster by cluster. So every node sends and receives over every fabric that it uses,
    and the number of ways grows with the nodes, not with their pairs.
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
    for source, target in _joined(job.plan, job.config.model.tied_embeddings):
        clusters = [_by_cluster(stages[end]) for end in (source, target)]
        for ends in product(*clusters):
            for a, b in paired(*ends):
                found.add((a.node, b.node, fabric_between(job.topology, a, b)))
    return {way for a, b, fabric in found if a != b for way in ((a, b, fabric), (b, a, fabric))}


def _joined(plan: Plan, is_tied: bool) -> set[tuple[int, int]]:
    """The stages that hand something to each other, in steps and in meetings of islands."""
    first, joined = 0, set[tuple[int, int]]()
    holders: dict[str, list[int]] = defaultdict(list)  # of each layer, one stage in each island
    for pipeline in plan.pipelines:
        homes = [first + home for home, _ in pipeline.chunks]
        joined |= set(pairwise(homes)) | ({(homes[0], homes[-1])} if is_tied else set())
        for s, stage in enumerate(pipeline.stages, start=first):
            for layer in stage.layers:
                holders[layer].append(s)
        first += len(pipeline.stages)
    return joined.union(*(combinations(stages, 2) for stages in holders.values()))


def _by_cluster(stage: Mapping[str, Process]) -> list[list[Process]]:
    found: dict[str, list[Process]] = defaultdict(list)
    for process in stage.values():
        found[process.cluster].append(process)
    return list(found.values())


def paired(a: Sequence[S], b: Sequence[T]) -> list[tuple[S, T]]:
    """Pairs two sequences; the shorter one repeats.

    >>> paired([1, 2, 3], [4, 5])
    [(1, 4), (2, 5), (3, 4)]
    """
    return [(a[i % len(a)], b[i % len(b)]) for i in range(max(len(a), len(b)))]
