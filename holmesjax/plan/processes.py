"""The processes that run a plan: each stage is a domain of one process per node, or one per device.

A domain is one `jax.distributed` job. Its processes are ranked in the order of their devices in the
topology, and every device of the stage belongs to exactly one of them.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from holmesjax.plan.plan import Plan
from holmesjax.topology.machines import Topology

PER = Literal["node", "device"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """One process of a job."""

    number: int  # in the job, in the order of stages
    name: str  # "ib/ib-0": cluster and node; unique in the job
    cluster: str
    node: str
    stage: int
    rank: int  # in the domain of its stage
    devices: tuple[int, ...]  # numbers in the topology, ascending
    local_devices: tuple[int, ...]  # the same, counted from the first device of the node

    @property
    def leads(self) -> bool:
        """Whether it speaks for its stage, and coordinates its domain."""
        return self.rank == 0

    @property
    def full_name(self) -> str:
        """Its name with its place in the job: "ib/ib-0 (stage 0, process 0)"."""
        return f"{self.name} (stage {self.stage}, process {self.number})"

    @property
    def file_name(self) -> str:
        """Its name, for files of its own in the run folder: "ib_ib-0"."""
        return self.name.replace("/", "_").replace(":", "_")


def make_processes(plan: Plan, topology: Topology, per: PER) -> tuple[Process, ...]:
    """The processes of all stages, stage by stage.

    Where two stages share a node, or a node has a process for each device, the name says which:
    "ib/ib-0.s1", "ib/ib-0:3".
    """
    homes = Counter(name for stage in plan.stages for name in set(stage.nodes))
    firsts = _first_devices(topology)
    numbers = itertools.count()
    processes = []
    for s, stage in enumerate(plan.stages):
        groups: list[tuple[str, tuple[int, ...]]] = []
        for node, on_node in itertools.groupby(
            sorted(stage.devices), lambda device: topology.node_of(device).name
        ):
            devices = tuple(on_node)
            groups += [(node, (d,)) for d in devices] if per == "device" else [(node, devices)]
        for rank, (node, devices) in enumerate(groups):
            local = tuple(device - firsts[node] for device in devices)
            cluster = topology.cluster_of(node).name
            name = f"{cluster}/{node}"
            name += f":{local[0]}" if per == "device" else f".s{s}" if homes[node] > 1 else ""
            processes.append(
                Process(
                    number=next(numbers),
                    name=name,
                    cluster=cluster,
                    node=node,
                    stage=s,
                    rank=rank,
                    devices=devices,
                    local_devices=local,
                )
            )
    return tuple(processes)


def _first_devices(topology: Topology) -> dict[str, int]:
    """The number of the first device of each node, by its name."""
    sizes = [node.num_devices for node in topology.nodes]
    starts = itertools.accumulate(sizes, initial=0)
    return {node.name: start for node, start in zip(topology.nodes, starts, strict=False)}


def node_processes(topology: Topology) -> tuple[Process, ...]:
    """One process for every node, with all its devices; a cluster counts as a stage."""
    processes: list[Process] = []
    firsts = _first_devices(topology)
    for c, cluster in enumerate(topology.clusters):
        for rank, node in enumerate(cluster.nodes):
            processes.append(
                Process(
                    number=len(processes),
                    name=f"{cluster.name}/{node.name}",
                    cluster=cluster.name,
                    node=node.name,
                    stage=c,
                    rank=rank,
                    devices=tuple(range(firsts[node.name], firsts[node.name] + node.num_devices)),
                    local_devices=tuple(range(node.num_devices)),
                )
            )
    return tuple(processes)


def fabric_between(topology: Topology, a: Process, b: Process) -> str:
    """The network that carries boundaries from one process to another.

    Inside a cluster it is the cluster's own; between clusters, that of their link.
    """
    if a.cluster != b.cluster:
        return topology.links[a.cluster, b.cluster].fabric
    return topology.cluster_of(a.node).fabric


def domain_fabric(topology: Topology, domain: Sequence[Process]) -> str:
    """The network of a stage's collectives: of its cluster, or the slowest that joins several."""
    clusters = sorted({process.cluster for process in domain})
    if len(clusters) == 1:
        return topology.cluster_of(domain[0].node).fabric
    ways = [topology.links[pair] for pair in itertools.combinations(clusters, 2)]
    return min(ways, key=lambda link: link.bandwidth_bytes_per_s).fabric
