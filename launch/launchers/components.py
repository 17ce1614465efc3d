"""Groups equal processes of one cluster: a component of the job, which a scheduler gives as one.

A cluster of equal nodes is one component. A scheduler numbers the processes of each from 0;
HOLMES_PROCESSES lists their numbers in the job, in that order.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from holmesjax.errors import ConfigError, HolmesError, Mistakes
from holmesjax.files import places, schema, yaml_files
from holmesjax.files.yaml_files import Document
from holmesjax.job import Job
from holmesjax.plan.processes import Process, make_processes
from holmesjax.topology.machines import Topology

Options = TypeVar("Options")


@dataclass(frozen=True, kw_only=True)
class Component:
    """Equal processes on nodes of one cluster."""

    name: str  # of the cluster; with a number where it has several
    cluster: str
    processes: tuple[Process, ...]  # node by node
    num_nodes: int
    num_gpus: int  # of each process; 0: it computes on CPUs

    @property
    def per_node(self) -> int:
        """Processes on each node."""
        return len(self.processes) // self.num_nodes

    @cached_property
    def process_numbers(self) -> frozenset[int]:
        return frozenset(process.number for process in self.processes)

    @property
    def numbers(self) -> str:
        """The value of HOLMES_PROCESSES."""
        return ",".join(str(process.number) for process in self.processes)


def make_components(job: Job) -> tuple[Component, ...]:
    """Returns the components of a job, in the order of the topology."""
    topology = job.topology
    processes = make_processes(job.plan, topology, job.config.distributed.processes)
    on_node = Counter((process.node, len(process.devices)) for process in processes)
    groups: dict[tuple[str, str, int, int], list[Process]] = {}
    for process in sorted(processes, key=lambda p: p.devices):
        kind = "cpu" if job.config.run.rehearse else topology.node(process.node).device.name
        size = len(process.devices)
        key = process.cluster, kind, size, on_node[process.node, size]
        groups.setdefault(key, []).append(process)
    components: list[Component] = []
    clusters = {cluster.name for cluster in topology.clusters}
    for (cluster, kind, size, _), members in groups.items():
        numbered = (f"{cluster}-{i}" for i in itertools.count(1))
        taken = clusters | {component.name for component in components}
        is_first = all(component.cluster != cluster for component in components)
        components.append(
            Component(
                name=cluster if is_first else next(n for n in numbered if n not in taken),
                cluster=cluster,
                processes=tuple(members),
                num_nodes=len({process.node for process in members}),
                num_gpus=0 if kind == "cpu" else size,
            )
        )
    return tuple(components)


def read_options(
    cls: type[Options],
    path: str | Path,
    topology: Topology,
    check: Callable[[Document, Any], Iterator[HolmesError]],
) -> Options:
    """Reads the options file of a scheduler. Raises Mistakes with all that is wrong in it.

    Args:
      cls: has its keys; `clusters` has options of each cluster, by name.
      path: the file.
      topology: has the clusters.
      check: finds other mistakes in it.
    """
    document = yaml_files.read(path, ConfigError)
    file, mistakes = schema.read(cls, document)
    mistakes += schema.findings(_wrong_clusters, document, file, topology)
    mistakes += schema.findings(check, document, file)
    if mistakes:
        raise Mistakes(mistakes)
    options: Options = schema.build(file)
    return options


def _wrong_clusters(document: Document, file: Any, topology: Topology) -> Iterator[HolmesError]:
    names = [cluster.name for cluster in topology.clusters]
    seen: set[str] = set()
    for i, cluster in enumerate(file.clusters):
        keys = ("clusters", i, "name")
        if cluster.name not in names:
            problem = f"no such cluster in the topology {topology.name}"
            fix = schema.near(cluster.name, names)
            yield document.mistake(keys, problem, found=cluster.name, fix=fix)
        elif cluster.name in seen:
            fix = "write its options in one entry"
            yield document.mistake(keys, "is described twice", found=cluster.name, fix=fix)
        seen.add(cluster.name)
        place = cluster.run_dir
        if place and (problem := places.mistake_in_run_dir(place)):
            fix = "write /scratch/llama, or s3://BUCKET/NAME, say"
            yield document.mistake(("clusters", i, "run_dir"), problem, found=place, fix=fix)
