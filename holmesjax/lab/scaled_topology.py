"""A topology rebuilt in small on one Linux machine: how fast, where, and under which addresses.

    lab     network namespaces, one for each node and one for the bridges between them
    fast    the interface to a bridge of the cluster's own: it stands for the cluster's fabric
    slow    the interface to a bridge of all nodes: it stands for Ethernet
    scale   the rate of a link in the lab, over that of the link it stands for
    share   the part of this machine's cores that a node may use

This module only decides. `shell` writes its decisions as shell lines, `launch` runs them.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from holmesjax.config import Config
from holmesjax.costs import work
from holmesjax.costs.parameters import num_parameters
from holmesjax.costs.products import backward_flop, blocks_forward_flop, head_forward_flop
from holmesjax.errors import ConfigError, TopologyError
from holmesjax.topology.machines import Node, Topology, name_of
from holmesjax.units import show

FILE = "lab.json"  # in the run folder: the lab, and what its kernel counted

# 198.18.0.0/15 is set aside for tests of networks (RFC 2544): no host has such an address. Slow
# addresses are 198.18.<cluster>.<node>, fast ones 198.19.<cluster>.<node>.
SLOW, FAST = "198.18", "198.19"
SUPERVISOR = f"{SLOW}.255.1"
MAX_CLUSTERS, MAX_NODES = 255, 254

FULL = 0.9  # of a core: the rest is for the supervisor and the kernel
MIN_RATE_BYTES_PER_S = 1e3  # below, a frame takes ten seconds
MAX_ROUND_TRIP_S = 2.0  # calls of processes and of TCP end after a few seconds
MIN_DELAY_S = 500e-6  # of a way: what is shorter, the process that delays would itself take
HOST_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """The share of this machine that a node may use."""

    quota: float  # cores
    cores: tuple[int, ...]  # to which its processes are held; enough for the quota


@dataclass(frozen=True, kw_only=True, slots=True)
class LabNode:
    """One namespace. A rate is None where the topology has no such network: nothing is shaped."""

    name: str
    number: int  # in the topology
    cluster: int  # number of its cluster
    share: Share
    slow_address: str
    slow_rate_bytes_per_s: float | None
    fast_address: str | None  # None where the cluster's fabric is Ethernet, or a single node's
    fast_rate_bytes_per_s: float | None
    addresses: dict[str, list[str]]  # by fabric, as HOLMES_ADDRESSES has them

    @property
    def interfaces(self) -> list[tuple[str, str, float | None]]:
        """Name, address and rate of each."""
        slow = ("eth0", self.slow_address, self.slow_rate_bytes_per_s)
        if self.fast_address is None:
            return [slow]
        return [("fast0", self.fast_address, self.fast_rate_bytes_per_s), slow]


@dataclass(frozen=True, kw_only=True, slots=True)
class LabLink:
    """The link from the nodes of one cluster to those of another."""

    rate_bytes_per_s: float  # of each node
    latency_s: float  # in the lab's time

    @property
    def delay_s(self) -> float:
        """How long the lab holds each packet; 0: the latency is too short to be rebuilt."""
        return self.latency_s if self.latency_s >= MIN_DELAY_S else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LabPipe:
    """A capacity that one way between clusters has, or that several share."""

    ways: tuple[tuple[int, int], ...]  # by the numbers of clusters
    rate_bytes_per_s: float  # of all nodes and ways together


@dataclass(frozen=True, kw_only=True, slots=True)
class Lab:
    """Nodes, links and rates of a lab, for `shell`."""

    topology: Topology
    scale: float
    nodes: tuple[LabNode, ...]
    links: dict[tuple[int, int], LabLink]  # by the numbers of clusters, one entry each way
    pipes: tuple[LabPipe, ...]

    def cluster_number(self, name: str) -> int:
        return [cluster.name for cluster in self.topology.clusters].index(name)

    @property
    def delays_s(self) -> list[float]:
        """The delays of all ways: those of each have a number, which is the place here."""
        return sorted({link.delay_s for link in self.links.values() if link.delay_s})

    def pipes_of(self, way: tuple[int, int]) -> list[int]:
        """The numbers of the pipes that lie on a way, in the order in which packets pass them."""
        return [number for number, pipe in enumerate(self.pipes) if way in pipe.ways]

    def members(self, cluster: int) -> list[LabNode]:
        return [node for node in self.nodes if node.cluster == cluster]


# ---- scale -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The numbers of a run that decide the ratio of sending to computing."""

    dtype: str  # that matrix products are computed in
    flop_per_token: float  # forward and backward, of all layers
    boundary_bytes_per_token: float  # handed from stage to stage, one way
    gradient_bytes_per_token: float  # of all parameters, once a step

    @property
    def boundary_intensity(self) -> float:
        """Bytes between stages for every FLOP."""
        return self.boundary_bytes_per_token / self.flop_per_token

    @property
    def gradient_intensity(self) -> float:
        """Bytes between replicas for every FLOP: the larger the batch, the fewer."""
        return self.gradient_bytes_per_token / self.flop_per_token


def workload(config: Config) -> Workload:
    """The workload of a run, from its model, batch, dtype and checkpointing."""
    model, train = config.model, config.train
    forward_flop = blocks_forward_flop(model, 1)
    head_flop = head_forward_flop(model, 1)
    policy = config.parallel.activation_checkpointing or "none"
    parameters = num_parameters(model)
    return Workload(
        dtype=train.compute_dtype,
        flop_per_token=forward_flop + backward_flop(forward_flop, policy) + 3 * head_flop,
        boundary_bytes_per_token=float(work.boundary_bytes(model, 1, train.compute_dtype)),
        gradient_bytes_per_token=4 * parameters / (train.global_batch * model.context_length),
    )


def node_speed(node: Node, dtype: str) -> float:
    """FLOP/s of all devices of a node, at their peak. Raises TopologyError without a peak."""
    if dtype not in node.device.peak_flop_per_s:
        known = ", ".join(node.device.peak_flop_per_s)
        where, problem = node.device.name, f"has no peak_flop_per_s for {dtype}"
        raise TopologyError(where, problem, found=known, fix=f"add peak_flop_per_s.{dtype}")
    return node.device.peak_flop_per_s[dtype] * node.num_devices


def scale(
    topology: Topology,
    shares: Sequence[Share],
    core_flop_per_s: float,
    lab: Workload,
    real: Workload,
) -> tuple[float, list[str]]:
    """Computes the scale of rates that keeps the ratio of sending between stages to computing.

    A node computes for F / S seconds and sends for B / R: the ratio stays with
    R' / R = (S' / S) (B' / F') / (B / F), where ' is the lab. Shares are in proportion to speeds,
    so the first node stands for all.

    Args:
      topology: the machines that the lab stands for.
      shares: the share of this machine's cores for each node.
      core_flop_per_s: measured speed of one core here.
      lab: bytes per FLOP of the run in the lab.
      real: bytes per FLOP of the run whose ratio is kept.

    Returns:
      The factor, and the lines of its arithmetic.
    """
    node, share = topology.nodes[0], shares[0]
    here, there = share.quota * core_flop_per_s, node_speed(node, real.dtype)
    factor = here / there * lab.boundary_intensity / real.boundary_intensity
    kind, count = node.device.name, node.num_devices
    lines = [
        f"{factor:.3g} = {show(here, 'FLOP/s')} a node here / {show(there, 'FLOP/s')} there"
        + ("" if lab == real else " x bytes per FLOP here / there"),
        f"here: {share.quota:.3g} cores x {show(core_flop_per_s, 'FLOP/s')} "
        f"(float32 product, measured); there: {count} x {kind}, {real.dtype} peak",
    ]
    if lab != real:
        gradients = factor * lab.gradient_intensity / lab.boundary_intensity
        gradients *= real.boundary_intensity / real.gradient_intensity
        lines += [
            f"between stages, bytes per FLOP: {lab.boundary_intensity:.3g} here, "
            f"{real.boundary_intensity:.3g} there",
            f"gradients alone would ask for {gradients:.3g}: {lab.gradient_intensity:.3g} here, "
            f"{real.gradient_intensity:.3g} there",
        ]
    return factor, lines


# ---- shares of the cores -----------------------------------------------------------------------


def make_shares(
    topology: Topology, dtype: str, cores: Sequence[int], quota: float | None
) -> list[Share]:
    """Quotas in proportion to the nodes' speeds, so that no core is asked for more than it has.

    Args:
      dtype: whose peaks are compared.
      cores: of this machine.
      quota: cores for the fastest node; None takes as much as all nodes can have.

    Raises ConfigError if the quota asks for more than a core has.
    """
    speeds = [node_speed(node, dtype) for node in topology.nodes]
    parts = [speed / max(speeds) for speed in speeds]
    if quota is not None:
        quotas = [quota * part for part in parts]
        if _load(held := _hold(quotas, cores), quotas) > 1:
            most = make_shares(topology, dtype, cores, None)
            raise ConfigError(
                "--cpu",
                f"{len(parts)} nodes would take time from each other on {len(cores)} cores",
                found=f"{quota:.0%} of a core for the fastest node",
                fix=f"use --cpu {math.floor(100 * max(s.quota for s in most))}%, or fewer nodes",
            )
        return _shares(quotas, held)
    quotas = [FULL * len(cores) * part / sum(parts) for part in parts]
    while (load := _load(held := _hold(quotas, cores), quotas)) > FULL + 1e-9:
        quotas = [each * FULL / load for each in quotas]
    return _shares(quotas, held)


def _hold(quotas: Sequence[float], cores: Sequence[int]) -> list[list[int]]:
    """Cores of each node: the least loaded ones, chosen for the largest node first."""
    load = dict.fromkeys(cores, 0.0)
    held: dict[int, list[int]] = {}
    for i in sorted(range(len(quotas)), key=lambda i: -quotas[i]):
        count = min(math.ceil(quotas[i]), len(cores))
        held[i] = sorted(sorted(cores, key=lambda core: load[core])[:count])
        for core in held[i]:
            load[core] += quotas[i] / count
    return [held[i] for i in range(len(quotas))]


def _load(held: Sequence[Sequence[int]], quotas: Sequence[float]) -> float:
    """The load of the fullest core."""
    pairs = list(zip(held, quotas, strict=True))
    return max(
        sum(quota / len(held_cores) for held_cores, quota in pairs if core in held_cores)
        for held_cores, _ in pairs
        for core in held_cores
    )


def _shares(quotas: Sequence[float], held: Sequence[Sequence[int]]) -> list[Share]:
    return [
        Share(quota=q, cores=tuple(held_cores)) for q, held_cores in zip(quotas, held, strict=True)
    ]


# ---- the lab ---------------------------------------------------------------------------------


def make_lab(topology: Topology, shares: Sequence[Share], scale: float) -> Lab:
    """Addresses and rates. Raises TopologyError for what cannot be built on one machine."""
    _check(topology, scale)
    places = [
        (c, i, node)
        for c, cluster in enumerate(topology.clusters)
        for i, node in enumerate(cluster.nodes)
    ]
    nodes = [
        _node(topology, c, i, node, share, number, scale)
        for number, ((c, i, node), share) in enumerate(zip(places, shares, strict=True))
    ]
    numbers = {cluster.name: c for c, cluster in enumerate(topology.clusters)}
    links = {
        (numbers[a], numbers[b]): LabLink(
            rate_bytes_per_s=scale * _link_rate(topology, a, b),
            latency_s=link.latency_s / scale,
        )
        for (a, b), link in topology.links.items()
    }
    pipes = tuple(
        LabPipe(
            ways=tuple((numbers[a], numbers[b]) for a, b in pipe.ways),
            rate_bytes_per_s=scale * pipe.capacity_bytes_per_s,
        )
        for pipe in topology.pipes
    )
    return Lab(topology=topology, scale=scale, nodes=tuple(nodes), links=links, pipes=pipes)


def _check(topology: Topology, scale: float) -> None:
    if not 0 < scale < math.inf:
        fix = "use a number above 0: 1 takes the rates as they are"
        raise ConfigError("--scale", "must be above 0", found=scale, fix=fix)
    largest = max(len(cluster.nodes) for cluster in topology.clusters)
    if len(topology.clusters) > MAX_CLUSTERS or largest > MAX_NODES:
        raise TopologyError(
            topology.name,
            f"a lab holds {MAX_CLUSTERS} clusters of {MAX_NODES} nodes",
            found=f"{len(topology.clusters)} clusters, {largest} nodes in the largest",
            fix="describe fewer: a machine has only so many cores",
        )
    for node in topology.nodes:
        if not HOST_NAME.fullmatch(node.name):
            problem = "is the name of a node, and cannot be that of a host"
            fix = "use letters, digits, '-', '_' and '.', up to 63 of them"
            raise TopologyError(node.name, problem, found=node.name, fix=fix)
    rates = [_link_rate(topology, a, b) for a, b in topology.links]
    rates += [pipe.capacity_bytes_per_s for pipe in topology.pipes]
    rates += [rate for node in topology.nodes for rate in _fabric_rates(node).values()]
    trips_s = {
        (a, b): link.latency_s + topology.links[b, a].latency_s
        for (a, b), link in topology.links.items()
    }
    least = max(trips_s.values(), default=0.0) / MAX_ROUND_TRIP_S
    least = max(least, MIN_RATE_BYTES_PER_S / min(rates)) if rates else least
    fix = f"use --scale {least:.2g} or more"
    if rates and scale * min(rates) < MIN_RATE_BYTES_PER_S:
        problem = "its slowest link is too slow to be shaped"
        shown = f"{show(min(rates), 'b/s')} x {scale:.3g}"
        raise TopologyError(topology.name, problem, found=shown, fix=fix)
    for (a, b), trip_s in trips_s.items():
        if trip_s > scale * MAX_ROUND_TRIP_S:
            problem = f"a lab has round trips of {MAX_ROUND_TRIP_S:g} s at most"
            shown = f"{show(trip_s, 's')} / {scale:.3g}"
            raise TopologyError(f"{a} <-> {b}", problem, found=shown, fix=fix)


def _node(
    topology: Topology, c: int, i: int, node: Node, share: Share, number: int, scale: float
) -> LabNode:
    cluster = topology.clusters[c]
    rates = _fabric_rates(node)
    links = [pair for pair in topology.links if pair[0] == cluster.name]
    slow_rates = [_link_rate(topology, *pair) for pair in links]
    if "ethernet" in rates:
        slow_rates.append(rates["ethernet"])
    has_fast = cluster.fabric not in ("local", "ethernet")
    slow, fast = f"{SLOW}.{c}.{i + 1}", f"{FAST}.{c}.{i + 1}"
    fabrics = {"ethernet", *(topology.links[pair].fabric for pair in links)}
    addresses = {"local": ["127.0.0.1"]} | {fabric: [slow] for fabric in sorted(fabrics)}
    if has_fast:
        addresses[cluster.fabric] = [fast]
    return LabNode(
        name=node.name,
        number=number,
        cluster=c,
        share=share,
        slow_address=slow,
        slow_rate_bytes_per_s=scale * max(slow_rates) if slow_rates else None,
        fast_address=fast if has_fast else None,
        fast_rate_bytes_per_s=scale * rates[cluster.fabric] if has_fast else None,
        addresses=addresses,
    )


def _fabric_rates(node: Node) -> dict[str, float]:
    """Bytes per second of all NICs of each fabric together."""
    rates: dict[str, float] = {}
    for nic in node.nics:
        rates[nic.fabric] = rates.get(nic.fabric, 0.0) + nic.rate_bytes_per_s * nic.count
    return rates


def _link_rate(topology: Topology, a: str, b: str) -> float:
    """Between the slowest nodes of two clusters."""
    by_name = {cluster.name: cluster for cluster in topology.clusters}
    return min(
        topology.link(source.name, target.name).bandwidth_bytes_per_s
        for source in by_name[a].nodes
        for target in by_name[b].nodes
    )


def describe(lab: Lab) -> list[str]:
    """Lines for the console: shares, rates, latencies and addresses of all nodes and links."""
    lines = []
    for node in lab.nodes:
        cores = ",".join(map(str, node.share.cores))
        networks = [
            f"{device} {_rate_text(rate)} {address}" for device, address, rate in node.interfaces
        ]
        cpu = f"{100 * node.share.quota:.3g}% of core {cores}"
        lines.append(f"  {node.name:<9} {cpu}, {', '.join(networks)}")
    names = [cluster.name for cluster in lab.topology.clusters]
    for (a, b), link in sorted(lab.links.items()):
        rate, latency = show(link.rate_bytes_per_s, "b/s"), show(link.latency_s, "s")
        short = "" if link.delay_s else ", too short to be rebuilt"
        lines.append(f"  {names[a]} -> {names[b]}: {rate} from each node, latency {latency}{short}")
    for pipe in lab.pipes:
        name = name_of(tuple((names[a], names[b]) for a, b in pipe.ways))
        lines.append(f"  {name}: {show(pipe.rate_bytes_per_s, 'b/s')} from all together")
    return lines


def _rate_text(rate_bytes_per_s: float | None) -> str:
    return "unshaped" if rate_bytes_per_s is None else show(rate_bytes_per_s, "b/s")
