"""The fabrics of a topology, with what is known of each: add a fabric to the table here."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from holmesjax.files.schema import OneOf

Joined = Literal["nothing", "devices", "nodes"]

# The time in which NCCL's kernels synchronise with a neighbour over RDMA; the source is at
# `collective_times.START_S`.
RDMA_STEP_S = 30e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class FabricFacts:
    """The facts that the planner and the reports know of a fabric."""

    title: str  # as people write it
    joins: Joined  # the devices of a host, or nodes
    reached: float  # share of a nominal bandwidth that long messages reach
    step_s: float = 0.0  # of each step of a collective, beyond the latency of the link
    is_rdma: bool = False  # NICs move bytes without the CPU


FABRICS: dict[str, FabricFacts] = {
    # The inside of a host without any other fabric.
    "local": FabricFacts(title="local", joins="nothing", reached=1.0),
    # 231 GB/s of 300, which 280 NCCL all-reduces approach; the source is at
    # `collective_times.START_S`.
    "nvlink": FabricFacts(title="NVLink", joins="devices", reached=0.77),
    # The share that all-reduces of 16 GiB reach on 16 to 512 GPUs (aliyun/SimAI@cef83f9,
    # nic_ratio.csv).
    "infiniband": FabricFacts(
        title="InfiniBand", joins="nodes", reached=0.96, step_s=RDMA_STEP_S, is_rdma=True
    ),
    "roce": FabricFacts(
        title="RoCE", joins="nodes", reached=0.96, step_s=RDMA_STEP_S, is_rdma=True
    ),
    # TCP carries 1,448 bytes in a frame of 1,500, which takes 1,538 on the wire.
    "ethernet": FabricFacts(title="Ethernet", joins="nodes", reached=0.94),
}


class Joining(Mapping[str, FabricFacts]):
    """The fabrics that join some of these: a view of the table, which grows with it."""

    def __init__(self, *joined: Joined):
        self._joined = joined

    def __getitem__(self, name: str) -> FabricFacts:
        facts = FABRICS[name]
        if facts.joins not in self._joined:
            raise KeyError(name)
        return facts

    def __iter__(self) -> Iterator[str]:
        return (name for name, facts in FABRICS.items() if facts.joins in self._joined)

    def __len__(self) -> int:
        return sum(1 for _ in self)


NETWORKS = Joining("nodes")
OF_CLUSTERS = Joining("nothing", "nodes")  # `local`: of a cluster of one node

Fabric = Annotated[str, OneOf(FABRICS)]
Network = Annotated[str, OneOf(NETWORKS)]
DeviceFabric = Annotated[str, OneOf(Joining("nothing", "devices"))]
ClusterFabric = Annotated[str, OneOf(OF_CLUSTERS)]


def rdma_networks() -> list[str]:
    """Returns the networks whose NICs move bytes without the CPU."""
    return [name for name, facts in NETWORKS.items() if facts.is_rdma]
