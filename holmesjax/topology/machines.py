"""The machines: clusters, their nodes and devices, and the links between them.

    device    an accelerator
    node      a host with its devices and network interfaces (NICs)
    cluster   nodes that reach each other over one fabric
    fabric    one kind of network: `nvlink`, `infiniband`, `roce`, `ethernet`
    link      a one-way path with a bandwidth and a latency
    way       from one cluster to another
    pipe      a capacity that all nodes share, of one way between clusters, or of several: an uplink
    topology  all clusters, and the links that join them

This module only describes: `planner` chooses a layout, `mesh` makes a `jax.sharding.Mesh` of it. No
JAX here, so a plan can be made on a laptop. Units are in every name: `latency_s`, `memory_bytes`.
The file that people write is described in `file`; `loading` reads it, and `saving` writes it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from holmesjax.topology import catalogue, file as topology_file, windows
from holmesjax.topology.calibration import UNKNOWN, Calibration, Product
from holmesjax.topology.fabrics import FABRICS, Fabric

Way = tuple[str, str]  # from one cluster to another
Ways = tuple[Way, ...]  # sorted, so equal ways are equal keys
Numbers = float | np.ndarray  # one, or an array with one for each of several stages
Sizes = int | np.ndarray  # whole ones


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Cost of sending n bytes: `latency_s + n / bandwidth_bytes_per_s` seconds."""

    fabric: Fabric
    bandwidth_bytes_per_s: float
    latency_s: float  # one way
    egress_dollars_per_gb: float = 0.0  # of 10^9 bytes
    capacity_bytes_per_s: float = math.inf  # of all nodes together; infinite: they share nothing

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
    calibration: Calibration = UNKNOWN  # what it reaches of the above
    price_dollars_per_h: float | None = None

    def __hash__(self) -> int:
        """The hash of what most kinds differ in: a search looks kinds up very often."""
        return hash((self.name, self.memory_bytes))

    def products_s(self, products: Iterable[Product], dtype: str) -> float:
        """Seconds of matrix products, one after the other.

        Products in another dtype reach the same share of its peak: none has been measured. A device
        that has none counts as if it computed in `dtype`: a CPU, or one that no plan uses.
        """
        peaks, speed = self.peak_flop_per_s, self.calibration.products
        peak = lambda own: peaks.get(own.dtype, peaks[dtype])
        # `sum` rounds differently from Python 3.12 on, and a plan is the same in all of them.
        return math.fsum(speed.seconds(product, peak(product)) for product in products)

    def attention_s(self, products: Iterable[Product], dtype: str) -> float:
        """Seconds of attention, of the products of its scores and its weighted values."""
        return self.calibration.attention * self.products_s(products, dtype)

    def memory_s(self, num_bytes: Numbers) -> Numbers:
        """Seconds to move bytes from or to the memory of the device."""
        return num_bytes / (self.memory_bandwidth_bytes_per_s * self.calibration.memory)

    def between_s(self, num_bytes: Numbers) -> Numbers:
        """Seconds of what lies between the products of a layer, which moves so many bytes."""
        return self.calibration.between * self.memory_s(num_bytes)


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
class Collective:
    """A collective that was measured over nodes of a cluster."""

    cluster: str
    num_nodes: int  # of a group; as many groups as the cluster has ran at once
    kind: topology_file.CollectiveKind
    size_bytes: float  # of the array that each node holds, before or after
    bandwidth_bytes_per_s: float  # that each node sends at, in a ring


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Measurements of `launch probe`."""

    date: str
    pairs: dict[tuple[str, str], Link]  # from one node to another
    collectives: tuple[Collective, ...] = ()
    # Bytes per second of boundaries that one process of a cluster sends to another one, by cluster.
    transports: dict[str, float] = field(default_factory=dict)
    # Bytes per second of all nodes that send some ways, where these nodes share them.
    capacities: dict[Ways, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipe:
    """A capacity that whatever goes some ways between clusters shares."""

    ways: Ways  # several: an uplink
    capacity_bytes_per_s: float  # as measured or nominal
    reached_bytes_per_s: float  # that messages get of it

    def __str__(self) -> str:
        return name_of(self.ways)

    @property
    def is_uplink(self) -> bool:
        return len(self.ways) > 1


def backwards(ways: Ways) -> Ways:
    """The same ways in the other direction."""
    return tuple(sorted((b, a) for a, b in ways))


def name_of(ways: Ways) -> str:
    """Names ways, by one arrow if all of the senders send to all of the receivers.

    >>> name_of((("a", "b"), ("a", "c"))), name_of((("a", "b"), ("c", "d")))
    ('a -> b+c', 'a -> b + c -> d')
    """
    senders, receivers = (dict.fromkeys(ends) for ends in zip(*ways, strict=True))
    if len(ways) == len(senders) * len(receivers):
        return f"{'+'.join(senders)} -> {'+'.join(receivers)}"
    return " + ".join(f"{a} -> {b}" for a, b in ways)


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """All machines. Devices are numbered cluster by cluster, node by node."""

    name: str
    clusters: tuple[Cluster, ...]
    links: dict[Way, Link]  # between clusters, one entry each way
    # Capacities that links share with each other: bytes per second, one entry each way.
    uplinks: dict[Ways, float] = field(default_factory=dict)
    measured: Measured | None = None
    _homes: dict[str, tuple[Cluster, Node]] = field(init=False, repr=False, compare=False)
    _nodes: tuple[Node, ...] = field(init=False, repr=False, compare=False)  # of each device

    def __post_init__(self) -> None:
        homes = {node.name: (cluster, node) for cluster in self.clusters for node in cluster.nodes}
        object.__setattr__(self, "_homes", homes)
        nodes = tuple(node for node in self.nodes for _ in range(node.num_devices))
        object.__setattr__(self, "_nodes", nodes)

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(node for cluster in self.clusters for node in cluster.nodes)

    @property
    def num_devices(self) -> int:
        return sum(node.num_devices for node in self.nodes)

    @property
    def device_kinds(self) -> set[str]:
        return {node.device.name for node in self.nodes}

    def node(self, name: str) -> Node:
        return self._homes[name][1]

    def cluster_of(self, node: str) -> Cluster:
        return self._homes[node][0]

    def devices(self, nodes: Sequence[str] | None = None) -> tuple[int, ...]:
        """Numbers of the devices of some nodes, in the order of the topology; by default of all."""
        chosen = self._homes.keys() if nodes is None else set(nodes)
        assert chosen <= self._homes.keys(), f"no nodes {chosen - self._homes.keys()}"
        return tuple(number for number, node in enumerate(self._nodes) if node.name in chosen)

    def node_of(self, device: int) -> Node:
        """The node that holds a device, by its number."""
        assert 0 <= device < len(self._nodes), f"no device {device} of {self.num_devices}"
        return self._nodes[device]

    def link(self, node_a: str, node_b: str) -> Link:
        """The path from one node to another: as it was measured, or else as it should be."""
        measured = self.measured.pairs if self.measured else {}
        return measured.get((node_a, node_b)) or self.nominal_link(node_a, node_b)

    def round_trip_s(self, node_a: str, node_b: str) -> float:
        """Seconds until the answer to a short message from one node to another is back."""
        return self.link(node_a, node_b).latency_s + self.link(node_b, node_a).latency_s

    def effective_link(self, node_a: str, node_b: str) -> Link:
        """The link that messages get: as measured, or a share of the nominal one."""
        link = self.link(node_a, node_b)
        if self.measured and (node_a, node_b) in self.measured.pairs:
            return link
        reached = FABRICS[link.fabric].reached
        return replace(link, bandwidth_bytes_per_s=reached * link.bandwidth_bytes_per_s)

    def boundary_link(self, node_a: str, node_b: str, processes: float = 1.0) -> Link:
        """The share of the path that boundaries between stages get: they go over TCP on any fabric.

        Args:
          processes: of each node that send or receive at once, in the mean.
        """
        link = self.effective_link(node_a, node_b)
        if self.measured and (node_a, node_b) in self.measured.pairs:
            return link  # measured as boundaries are sent
        most = self._tcp_limits(node_a, node_b, processes)
        return replace(link, bandwidth_bytes_per_s=min(link.bandwidth_bytes_per_s, *most.values()))

    def boundary_limits(self, node_a: str, node_b: str, processes: float = 1.0) -> dict[str, float]:
        """Bytes per second of each part of the path between two clusters, by its name.

        The least of them is the bandwidth of `boundary_link`.
        """
        if self.measured and (way := (node_a, node_b)) in self.measured.pairs:
            return {"what was measured": self.measured.pairs[way].bandwidth_bytes_per_s}
        reached = FABRICS[self.nominal_link(node_a, node_b).fabric].reached
        parts = self._parts(node_a, node_b).items()
        tcp = self._tcp_limits(node_a, node_b, processes)
        return {name: reached * rate for name, rate in parts} | tcp

    def _tcp_limits(self, node_a: str, node_b: str, processes: float) -> dict[str, float]:
        """Bytes per second that processes of a node can send to another over any network."""
        ends = (self.cluster_of(node).name for node in (node_a, node_b))
        window = windows.most_bytes_per_s(self.round_trip_s(node_a, node_b))
        return {
            "what a process can send": processes * min(map(self.transport_bytes_per_s, ends)),
            "the windows of TCP": processes * window,
        }

    @property
    def pipes(self) -> list[Pipe]:
        """All capacities, one entry each way: of links, and those that several links share."""
        measured = self.measured.capacities if self.measured else {}
        found, nominal = [], self._nominal_capacities()
        for ways in sorted({*nominal, *measured}):
            rate = nominal.get(ways, math.inf)
            reached = rate * min(FABRICS[self.links[way].fabric].reached for way in ways)
            if ways in measured:
                rate = reached = measured[ways]
            found.append(Pipe(ways=ways, capacity_bytes_per_s=rate, reached_bytes_per_s=reached))
        return found

    def _nominal_capacities(self) -> dict[Ways, float]:
        own: dict[Ways, float] = {
            (way,): link.capacity_bytes_per_s for way, link in self.links.items()
        }
        finite = {ways: rate for ways, rate in own.items() if math.isfinite(rate)}
        shared = {w: min(rate, finite.get(w, math.inf)) for w, rate in self.uplinks.items()}
        return finite | shared

    def transport_bytes_per_s(self, cluster: str) -> float:
        """Bytes per second of boundaries that one process can send or receive on any network."""
        measured = self.measured.transports if self.measured else {}
        return measured.get(cluster, catalogue.TRANSPORT_BYTES_PER_S)

    def nominal_link(self, node_a: str, node_b: str) -> Link:
        """The slowest part of the path from one node to another, which all their devices share.

        Within a node it is the link of one device. Between nodes of a cluster it is all NICs of
        its fabric together; between clusters their link, as far as the NICs of both ends can fill
        it, where the nodes name NICs of its fabric, and as far as its capacities go.
        """
        if node_a == node_b:
            return self.node(node_a).device.link
        ends = self.node(node_a), self.node(node_b)
        cluster_a, cluster_b = self.cluster_of(node_a), self.cluster_of(node_b)
        if cluster_a.name == cluster_b.name:
            nics = [[nic for nic in end.nics if nic.fabric == cluster_a.fabric] for end in ends]
            assert all(nics), f"{node_a} and {node_b} have no common {cluster_a.fabric}"
            return Link(
                fabric=cluster_a.fabric,
                bandwidth_bytes_per_s=min(map(_rate_bytes_per_s, nics)),
                latency_s=max(nic.latency_s for end in nics for nic in end),
            )
        link = self.links[cluster_a.name, cluster_b.name]
        rates = self._parts(node_a, node_b).values()
        return replace(link, bandwidth_bytes_per_s=min(rates))

    def _parts(self, node_a: str, node_b: str) -> dict[str, float]:
        """Bytes per second of each part of the path between nodes of two clusters, by its name."""
        clusters = [self.cluster_of(node).name for node in (node_a, node_b)]
        link = self.links[way := (clusters[0], clusters[1])]
        rates = {
            "the link": link.bandwidth_bytes_per_s,
            "the capacity": link.capacity_bytes_per_s,
        }
        for node, cluster in zip((node_a, node_b), clusters, strict=True):
            if nics := [nic for nic in self.node(node).nics if nic.fabric == link.fabric]:
                rates[f"the NICs of {cluster}"] = _rate_bytes_per_s(nics)
        shared = [rate for ways, rate in self.uplinks.items() if way in ways]
        return rates | ({"a shared capacity": min(shared)} if shared else {})


def _rate_bytes_per_s(nics: Sequence[Nic]) -> float:
    return sum(nic.rate_bytes_per_s * nic.count for nic in nics)
