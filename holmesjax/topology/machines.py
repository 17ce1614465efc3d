"""The machines: clusters, their nodes and devices, and the links between them.

    device    an accelerator
    node      a host with its devices and network interfaces (NICs)
    cluster   nodes that reach each other over one fabric
    fabric    one kind of network: `nvlink`, `infiniband`, `roce`, `ethernet`
    link      a one-way path with a bandwidth and a latency
    pipe      a link between two clusters with a capacity, which all nodes that use it share
    topology  all clusters, and the links that join them

This module only describes: `planner` chooses a layout, `mesh` makes a `jax.sharding.Mesh` of it. No
JAX here, so a plan can be made on a laptop. Units are in every name: `latency_s`, `memory_bytes`.
The file that people write is described in `topology.file`.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations, groupby
from pathlib import Path
from typing import Any

from holmesjax import units, yaml_files
from holmesjax.topology import calibration, catalogue, file as topology_file
from holmesjax.topology.calibration import UNKNOWN, Calibration, Product
from holmesjax.topology.fabrics import FABRICS, Fabric


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
    peak_flop_per_s: dict[str, float] = field(hash=False)  # by dtype name, dense
    memory_bytes: float
    memory_bandwidth_bytes_per_s: float
    link: Link  # to the other devices of its node
    calibration: Calibration = UNKNOWN  # what it reaches of the above
    price_dollars_per_h: float | None = None

    def products_s(self, products: Iterable[Product], dtype: str) -> float:
        """Seconds of matrix products, one after the other.

        Products in another dtype reach the same share of its peak: none has been measured. A device
        that has none counts as if it computed in `dtype`: a CPU, or one that no plan uses.
        """
        peaks, speed = self.peak_flop_per_s, self.calibration.products
        peak = lambda own: peaks.get(own.dtype, peaks[dtype])
        # `sum` rounds differently from Python 3.12 on, and a plan is the same in all of them.
        return math.fsum(speed.seconds(own, peak(own)) for own in products)

    def attention_s(self, products: Iterable[Product], dtype: str) -> float:
        """Seconds of attention, of the products of its scores and its weighted values."""
        return self.calibration.attention * self.products_s(products, dtype)

    def memory_s(self, num_bytes: float) -> float:
        """Seconds to move bytes from or to the memory of the device."""
        return num_bytes / (self.memory_bandwidth_bytes_per_s * self.calibration.memory)

    def between_s(self, num_bytes: float) -> float:
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
    # Bytes per second of all nodes of one cluster to those of another, where pairs share the link.
    capacities: dict[tuple[str, str], float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """All machines. Devices are numbered cluster by cluster, node by node."""

    name: str
    clusters: tuple[Cluster, ...]
    links: dict[tuple[str, str], Link]  # between clusters, one entry each way
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

    def effective_link(self, node_a: str, node_b: str) -> Link:
        """The link that messages get: as measured, or a share of the nominal one."""
        link = self.link(node_a, node_b)
        if self.measured and (node_a, node_b) in self.measured.pairs:
            return link
        reached = FABRICS[link.fabric].reached
        return replace(link, bandwidth_bytes_per_s=reached * link.bandwidth_bytes_per_s)

    def boundary_link(self, node_a: str, node_b: str, processes: float = 1.0) -> Link:
        """What boundaries between stages get of the path, which go over TCP on any fabric.

        Args:
          processes: of each node that send or receive at once, in the mean.
        """
        link = self.effective_link(node_a, node_b)
        if self.measured and (node_a, node_b) in self.measured.pairs:
            return link  # measured as boundaries are sent
        ends = (self.cluster_of(node).name for node in (node_a, node_b))
        most = processes * min(map(self.transport_bytes_per_s, ends))
        return replace(link, bandwidth_bytes_per_s=min(link.bandwidth_bytes_per_s, most))

    @property
    def pipes(self) -> list[tuple[str, str]]:
        """The clusters whose link has a capacity, one entry each way."""
        return sorted(p for p in self.links if math.isfinite(self.capacity_bytes_per_s(*p)))

    def capacity_bytes_per_s(self, cluster_a: str, cluster_b: str) -> float:
        """All that nodes of one cluster send to those of another: as measured, or as it should be.

        Infinite where they do not share the link.
        """
        measured = self.measured.capacities if self.measured else {}
        pair = cluster_a, cluster_b
        return measured.get(pair, self.links[pair].capacity_bytes_per_s)

    def effective_capacity(self, cluster_a: str, cluster_b: str) -> float:
        """The bytes per second that messages get of it."""
        capacity = self.capacity_bytes_per_s(cluster_a, cluster_b)
        if self.measured and (cluster_a, cluster_b) in self.measured.capacities:
            return capacity
        return FABRICS[self.links[cluster_a, cluster_b].fabric].reached * capacity

    def transport_bytes_per_s(self, cluster: str) -> float:
        """Bytes per second of boundaries that one process can send or receive on any network."""
        measured = self.measured.transports if self.measured else {}
        return measured.get(cluster, catalogue.TRANSPORT_BYTES_PER_S)

    def nominal_link(self, node_a: str, node_b: str) -> Link:
        """The slowest part of the path from one node to another, which all their devices share.

        Within a node it is the link of one device. Between nodes of a cluster it is all NICs of
        its fabric together; between clusters their link, as far as the NICs of both ends can fill
        it, where the nodes name NICs of its fabric, and as far as it goes.
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
        nics = [[nic for nic in end.nics if nic.fabric == link.fabric] for end in ends]
        rates = [_rate_bytes_per_s(end) for end in nics if end]
        rates += [link.bandwidth_bytes_per_s, link.capacity_bytes_per_s]
        return replace(link, bandwidth_bytes_per_s=min(rates))

    def hash(self) -> str:
        """16 hex digits that change with anything in the topology.

        >>> len(load("configs/topologies/ib_roce.yaml").hash())
        16
        """
        return hashlib.sha256(to_yaml(self).encode()).hexdigest()[:16]


def _rate_bytes_per_s(nics: Sequence[Nic]) -> float:
    return sum(nic.rate_bytes_per_s * nic.count for nic in nics)


def load(path: str | Path, overrides: Sequence[str] = ()) -> Topology:
    """Reads a topology from a YAML file; raises and takes overrides as `topology.file.read`."""
    file = topology_file.read(path, overrides)
    calibrated = cache(lambda name: calibration.read(calibration.find(name, Path(path).parent)))
    links = {(a, b): _link(entry) for entry in file.links for a, b in [entry.between]}
    return Topology(
        name=file.name,
        clusters=tuple(_cluster(entry, calibrated) for entry in file.clusters),
        links={(b, a): link for (a, b), link in links.items()} | links,
        measured=_measured(file.measured) if file.measured else None,
    )


def _measured(entry: topology_file.MeasuredEntry) -> Measured:
    return Measured(
        date=entry.date,
        pairs={(a, b): _link(pair) for pair in entry.pairs for a, b in [pair.between]},
        collectives=tuple(
            Collective(
                cluster=c.cluster,
                num_nodes=c.nodes,
                kind=c.kind,
                size_bytes=c.size,
                bandwidth_bytes_per_s=c.bandwidth,
            )
            for c in entry.collectives
        ),
        transports={transport.cluster: transport.bandwidth for transport in entry.transports},
        capacities={(a, b): pipe.capacity for pipe in entry.capacities for a, b in [pipe.between]},
    )


Calibrated = Callable[[str], calibration.CalibrationFile]  # by the name in the topology file


def _cluster(entry: topology_file.ClusterEntry, calibrated: Calibrated) -> Cluster:
    nodes = []
    for node in topology_file.nodes_of(entry):
        devices = node.devices or entry.devices
        nics = entry.nics if node.nics is None else node.nics
        assert devices is not None, f"{node.name} has no devices"
        nodes.append(
            Node(
                name=node.name,
                device=_device(devices, calibrated),
                num_devices=devices.count,
                nics=tuple(_nic(nic) for nic in nics or ()),
            )
        )
    return Cluster(name=entry.name, fabric=entry.fabric, nodes=tuple(nodes))


def known_device(kind: str) -> DeviceKind:
    """A kind of the catalogue, with the calibration that is shipped for it."""
    named = lambda name: calibration.read(calibration.find(name, calibration.FOLDER))
    return _device(topology_file.DevicesEntry(kind=kind, count=1), named)


def _device(entry: topology_file.DevicesEntry, calibrated: Calibrated) -> DeviceKind:
    entry = topology_file.filled(entry, catalogue.DEVICES)
    peaks = {dtype: getattr(entry.peak_flop_per_s, dtype) for dtype in catalogue.DTYPES}
    assert entry.memory is not None, entry
    assert entry.memory_bandwidth is not None, entry
    assert entry.link is not None, entry
    speed = entry.calibration or UNKNOWN
    return DeviceKind(
        name=entry.kind,
        peak_flop_per_s={dtype: peak for dtype, peak in peaks.items() if peak is not None},
        memory_bytes=entry.memory,
        memory_bandwidth_bytes_per_s=entry.memory_bandwidth,
        link=_link(entry.link),
        calibration=calibrated(speed).calibration if isinstance(speed, str) else speed,
        price_dollars_per_h=entry.price,
    )


def _nic(entry: topology_file.NicEntry) -> Nic:
    entry = topology_file.filled(entry, catalogue.NICS)
    assert entry.fabric is not None, entry
    assert entry.rate is not None, entry
    assert entry.latency is not None, entry
    return Nic(
        name=entry.kind,
        fabric=entry.fabric,
        rate_bytes_per_s=entry.rate,
        latency_s=entry.latency,
        count=entry.count,
    )


def _link(
    entry: topology_file.LinkEntry | topology_file.DeviceLinkEntry | topology_file.PairEntry,
) -> Link:
    link = Link(
        fabric=entry.fabric,
        bandwidth_bytes_per_s=entry.bandwidth,
        latency_s=entry.latency,
    )
    if not isinstance(entry, topology_file.LinkEntry):
        return link
    capacity = math.inf if entry.capacity is None else entry.capacity
    return replace(link, egress_dollars_per_gb=entry.egress, capacity_bytes_per_s=capacity)


def to_yaml(topology: Topology) -> str:
    """The file of a topology with every number written out; `load` reads it back as equal."""
    order = [cluster.name for cluster in topology.clusters]
    both_ways = [(a, b) for a in order for b in order if (a, b) in topology.links]
    links = [
        {"between": [a, b], **_link_values(topology.links[a, b], "b/s")}
        for a, b in both_ways
        if order.index(a) < order.index(b) or topology.links[a, b] != topology.links.get((b, a))
    ]
    clusters = [_cluster_values(cluster) for cluster in topology.clusters]
    values = {"name": topology.name, "clusters": clusters} | ({"links": links} if links else {})
    text = yaml_files.to_text(values)
    return text + measured_section(topology.measured) if topology.measured else text


def measured_section(measured: Measured) -> str:
    """The section of a topology file with what was measured."""
    pairs = [
        {"between": list(pair), **_link_values(link, "b/s")}
        for pair, link in measured.pairs.items()
    ]
    collectives = [
        {
            "cluster": collective.cluster,
            "nodes": collective.num_nodes,
            "kind": collective.kind,
            "size": units.exact(collective.size_bytes, "B"),
            "bandwidth": units.exact(collective.bandwidth_bytes_per_s, "b/s"),
        }
        for collective in measured.collectives
    ]
    transports = [
        {"cluster": cluster, "bandwidth": units.exact(rate, "b/s")}
        for cluster, rate in measured.transports.items()
    ]
    capacities = [
        {"between": list(pair), "capacity": units.exact(rate, "b/s")}
        for pair, rate in measured.capacities.items()
    ]
    lines = ["measured:", f"  {yaml_files.to_line({'date': measured.date})[1:-1]}"]
    sections: dict[str, list[dict[str, Any]]] = {
        "pairs": pairs,
        "collectives": collectives,
        "transports": transports,
        "capacities": capacities,
    }
    for name, items in sections.items():
        if items:
            lines.append(f"  {name}:")
            lines += [f"    - {yaml_files.to_line(item)}" for item in items]
    return "\n".join(lines) + "\n"


def save(topology: Topology, path: str | Path) -> None:
    """Writes the resolved topology."""
    Path(path).write_text(to_yaml(topology), encoding="utf-8")


def _cluster_values(cluster: Cluster) -> dict[str, Any]:
    """Values of a cluster for its file: equal nodes with plain names become a number."""
    first, *_ = cluster.nodes
    shared = _node_values(first)
    plain = [replace(first, name=f"{cluster.name}-{i}") for i in range(len(cluster.nodes))]
    nodes: int | list[dict[str, Any]] = len(plain)
    if list(cluster.nodes) != plain:
        nodes = [
            {"name": node.name}
            | ({} if replace(node, name=first.name) == first else _node_values(node))
            for node in cluster.nodes
        ]
    return {"name": cluster.name, "fabric": cluster.fabric, "nodes": nodes, **shared}


def _node_values(node: Node) -> dict[str, Any]:
    device = node.device
    peaks = {
        dtype: units.exact(device.peak_flop_per_s[dtype], "FLOP/s")
        for dtype in catalogue.DTYPES
        if dtype in device.peak_flop_per_s
    }
    price = device.price_dollars_per_h
    devices = {
        "kind": device.name,
        "count": node.num_devices,
        "peak_flop_per_s": peaks,
        "memory": units.exact(device.memory_bytes, "B"),
        "memory_bandwidth": units.exact(device.memory_bandwidth_bytes_per_s, "B/s"),
        "link": _link_values(device.link, "B/s"),
        "calibration": calibration.values(device.calibration),
        **({} if price is None else {"price": units.exact(price, "$/h")}),
    }
    return {"devices": devices, "nics": [_nic_values(nic) for nic in node.nics]}


def _nic_values(nic: Nic) -> dict[str, Any]:
    return {
        "kind": nic.name,
        "count": nic.count,
        "fabric": nic.fabric,
        "rate": units.exact(nic.rate_bytes_per_s, "b/s"),
        "latency": units.exact(nic.latency_s, "s"),
    }


def _link_values(link: Link, unit: units.Unit) -> dict[str, str]:
    egress, capacity = link.egress_dollars_per_gb, link.capacity_bytes_per_s
    return {
        "fabric": link.fabric,
        "bandwidth": units.exact(link.bandwidth_bytes_per_s, unit),
        **({"capacity": units.exact(capacity, unit)} if math.isfinite(capacity) else {}),
        "latency": units.exact(link.latency_s, "s"),
        **({"egress": units.exact(egress, "$/GB")} if egress else {}),
    }


def describe(topology: Topology) -> list[str]:
    """Lines for the console: what there is, cluster by cluster, and the links between them."""
    num_nodes, num_devices = len(topology.nodes), topology.num_devices
    lines = [f"topology    {topology.name}: {_counted(num_nodes, 'node')}, {num_devices} devices"]
    for cluster in topology.clusters:
        groups = [list(g) for _, g in groupby(cluster.nodes, key=lambda n: replace(n, name=""))]
        lines += [_group_line(cluster, nodes) for nodes in groups[:GROUPS_SHOWN]]
        if rest := [node for nodes in groups[GROUPS_SHOWN:] for node in nodes]:
            count = sum(node.num_devices for node in rest)
            lines.append(f"  {cluster.name:<9} {_counted(len(rest), 'more node')}, {count} devices")
    order = [cluster.name for cluster in topology.clusters]
    for a, b in combinations(order, 2):
        there, back = topology.links[a, b], topology.links[b, a]
        if there == back:
            lines.append(f"  {a} <-> {b}: {_link_text(there)} each way")
        else:
            lines += [f"  {a} -> {b}: {_link_text(there)}", f"  {b} -> {a}: {_link_text(back)}"]
    if topology.measured is not None:
        lines.append(_measured_line(topology, topology.measured))
    return lines


def _measured_line(topology: Topology, measured: Measured) -> str:
    """How much was measured, and which pair fell shortest of what it should be."""
    line = f"  measured  {_counted(len(measured.pairs), 'way')} between nodes, {measured.date}"
    if not measured.pairs:
        return line
    nominal = {pair: topology.nominal_link(*pair) for pair in measured.pairs}
    share = lambda pair: (
        measured.pairs[pair].bandwidth_bytes_per_s / nominal[pair].bandwidth_bytes_per_s
    )
    a, b = pair = min(measured.pairs, key=share)
    should = units.show(nominal[pair].bandwidth_bytes_per_s, "b/s")
    return f"{line}; least of nominal: {a} -> {b} {_link_text(measured.pairs[pair])} of {should}"


GROUPS_SHOWN = 2  # of unlike nodes in a cluster


def _group_line(cluster: Cluster, nodes: Sequence[Node]) -> str:
    """One line for equal nodes."""
    device, nics = nodes[0].device, nodes[0].nics
    dtype = max(("float32", "bfloat16"), key=lambda dtype: device.peak_flop_per_s.get(dtype, 0.0))
    speed = units.show(device.peak_flop_per_s[dtype], "FLOP/s")
    counted_nics = [f"{nic.count} x {nic.name}" if nic.count > 1 else nic.name for nic in nics]
    num_nodes, num_devices = _counted(len(nodes), "node"), nodes[0].num_devices
    return (
        f"  {cluster.name:<9} {num_nodes} x {num_devices} {device.name} "
        f"({speed} {dtype}, {units.show(device.memory_bytes, 'B')}), "
        f"{cluster.fabric}: {', '.join(counted_nics) or 'no NICs'}"
    )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + "s" * (count != 1)


def _link_text(link: Link) -> str:
    rate, latency_s = link.bandwidth_bytes_per_s, link.latency_s
    text = f"{link.fabric}, {units.show(latency_s, 's')}, {units.show(rate, 'b/s')}"
    if math.isfinite(capacity := link.capacity_bytes_per_s):
        return f"{text} a node, {units.show(capacity, 'b/s')} all together"
    return text
