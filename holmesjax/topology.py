"""What the machines are: clusters, their nodes and devices, and the links between them.

    device    an accelerator
    node      a host with its devices and network interfaces (NICs)
    cluster   nodes that reach each other over one fabric
    fabric    one kind of network: `nvlink`, `infiniband`, `roce`, `ethernet`
    link      a one-way path with a bandwidth and a latency
    topology  all clusters, and the links that join them

This module only describes: `planner` chooses a layout, `mesh` makes a `jax.sharding.Mesh` of it. No
JAX here, so a plan can be made on a laptop. Units are in every name: `latency_s`, `memory_bytes`.
The file that people write is described in `topology_file`.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

Fabric = Literal["local", "nvlink", "infiniband", "roce", "ethernet"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Cost of sending n bytes: `latency_s + n / bandwidth_bytes_per_s` seconds."""

    fabric: Fabric
    bandwidth_bytes_per_s: float
    latency_s: float

    def time_s(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceKind:
    """One model of accelerator."""

    name: str
    peak_flop_per_s: dict[str, float]  # by dtype name, dense
    memory_bytes: float
    memory_bandwidth_bytes_per_s: float
    link: Link  # to the other devices of its node


@dataclass(frozen=True, kw_only=True, slots=True)
class Nic:
    """Equal network interfaces of one node."""

    name: str  # of the catalogue
    fabric: Fabric
    rate_bytes_per_s: float  # of each
    latency_s: float
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One host."""

    name: str  # unique in the topology: "ib-0"
    device: DeviceKind
    num_devices: int
    nics: tuple[Nic, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Nodes joined by one fabric."""

    name: str
    fabric: Fabric
    nodes: tuple[Node, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """All machines. Devices are numbered cluster by cluster, node by node."""

    name: str
    clusters: tuple[Cluster, ...]
    links: dict[tuple[str, str], Link]  # between clusters, one entry each way
