"""Schedules the measurements of `launch probe`, and turns their times into rates. No JAX.

    way      from one node to another, over one fabric
    step     ways that are measured at the same time
    round    a step in which no node is on two ways

Inside a cluster a round pairs all nodes, so that no NIC is in two measurements. Pairs between
clusters share one link: they are measured one by one, and then together.
"""

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from holmesjax.costs import collective_times
from holmesjax.hosts.doctor import Finding
from holmesjax.topology.fabrics import FABRICS
from holmesjax.topology.file import CollectiveKind
from holmesjax.topology.machines import Topology, Ways
from holmesjax.topology.probe_speed import ProbeSpeed, Seconds
from holmesjax.units import show

KIB, MIB = 2**10, 2**20
# Size 0 stands for a message there and back.
SIZES_BYTES = (0, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
COLLECTIVE_BYTES = (64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
LIMIT_S = 0.25  # sizes after one that took longer are left out: the next takes four times as long
ROUND_TRIPS = 20  # at least, that the limit has: a window doubles once in each
STREAMS = 4  # at least, for the fastest way to send: the default of a run
ROUNDS = 3  # of each size; the median counts
MAX_ROUNDS = 15  # of a cluster: all pairs of 16 nodes
MAX_PAIRS = 8  # of two clusters
FAR_BELOW = 0.5  # of nominal
SHARED = 0.9  # of the sum of rates alone: pairs that reach less together share a link

Way = tuple[str, str]
Step = tuple[Way, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """The steps inside a cluster, or between two."""

    title: str  # "inside ib", "ib <-> roce"
    fabric: str
    steps: tuple[Step, ...]
    together: tuple[Step, ...]  # for the bandwidth of the link that all pairs share
    left_out: str  # what of it is not measured, if anything


def schedule(topology: Topology, nodes: Sequence[str]) -> list[Phase]:
    """Returns all phases, for the nodes that answer."""
    present = {
        cluster.name: [node.name for node in cluster.nodes if node.name in nodes]
        for cluster in topology.clusters
    }
    phases = []
    for cluster in topology.clusters:
        if len(present[cluster.name]) > 1:
            phases.append(_inside(cluster.name, cluster.fabric, present[cluster.name]))
    names = [name for name in present if present[name]]
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            phases.append(_between((a, b), topology.links[a, b].fabric, present[a], present[b]))
    for name in names:
        phases += _uplinks(topology, name, present)
    return phases


def tournament(nodes: Sequence[str]) -> Iterator[Step]:
    """Yields rounds of pairs: every two nodes meet once, and a round has each node once at most.

    >>> list(tournament("abc"))
    [(('b', 'c'),), (('a', 'c'),), (('a', 'b'),)]
    """
    position = {node: i for i, node in enumerate(nodes)}
    ring: list[str | None] = [*nodes] if len(nodes) % 2 == 0 else [*nodes, None]
    for _ in range(len(ring) - 1):
        halves = zip(ring[: len(ring) // 2], reversed(ring[len(ring) // 2 :]), strict=True)
        met = [(a, b) for a, b in halves if a is not None and b is not None]
        yield tuple((a, b) if position[a] < position[b] else (b, a) for a, b in met)
        ring = [ring[0], ring[-1], *ring[1:-1]]


def _inside(name: str, fabric: str, nodes: Sequence[str]) -> Phase:
    num_rounds = len(nodes) - 1 + len(nodes) % 2
    left_out = ""
    if num_rounds > MAX_ROUNDS:
        left_out = f"{num_rounds - MAX_ROUNDS} of {num_rounds} rounds of pairs"
    rounds = itertools.islice(tournament(nodes), MAX_ROUNDS)
    steps = [step for met in rounds for step in (met, _back(met))]
    return Phase(
        title=f"inside {name}", fabric=fabric, steps=tuple(steps), together=(), left_out=left_out
    )


def _between(names: Way, fabric: str, a: Sequence[str], b: Sequence[str]) -> Phase:
    """Pairs node i of one cluster with node i of the other; the smaller cluster's nodes repeat."""
    count = min(max(len(a), len(b)), MAX_PAIRS)
    pairs = [(a[i % len(a)], b[i % len(b)]) for i in range(count)]
    rest = len(a) * len(b) - count
    disjoint = tuple(pairs[: min(len(a), len(b))])
    return Phase(
        title=f"{names[0]} <-> {names[1]}",
        fabric=fabric,
        steps=tuple((way,) for pair in pairs for way in (pair, pair[::-1])),
        together=(disjoint, _back(disjoint)) if len(disjoint) > 1 else (),
        left_out=f"{rest} of {rest + count} pairs" if rest else "",
    )


def _uplinks(topology: Topology, name: str, present: Mapping[str, Sequence[str]]) -> list[Phase]:
    """Phases in which a cluster sends to several others at once, and they to it.

    No node sends twice. So a cluster sends to as many others as it has nodes.
    """
    by_fabric: dict[str, list[str]] = {}
    for other in present:
        if other != name and present[other]:
            by_fabric.setdefault(topology.links[name, other].fabric, []).append(other)
    phases = []
    for fabric, others in by_fabric.items():
        own = present[name]
        out = tuple((a, present[other][0]) for a, other in zip(own, others, strict=False))
        back = tuple((present[other][0], own[i % len(own)]) for i, other in enumerate(others))
        together = tuple(step for step in (out, back) if len(step) > 1)
        if together:
            phases.append(
                Phase(
                    title=f"{name} <-> {', '.join(others)} at once",
                    fabric=fabric,
                    steps=(),
                    together=together,
                    left_out="",
                )
            )
    return phases


def _back(step: Step) -> Step:
    return tuple((b, a) for a, b in step)


def group_sizes(num_nodes: int) -> list[int]:
    """Returns the sizes of the groups of nodes in which collectives are measured.

    >>> group_sizes(8), group_sizes(6), group_sizes(3)
    ([2, 4, 8], [2, 6], [3])
    """
    powers = (2**i for i in range(1, num_nodes.bit_length()))
    return [*(n for n in powers if n < num_nodes and num_nodes % n == 0), num_nodes]


# ---- what the times say --------------------------------------------------------------------------


def speed(fabric: str, seconds: Seconds) -> ProbeSpeed:
    """Computes latency and bandwidth from the medians of a way.

    The latency is half a round trip. The bandwidth is that of the largest size, by the best number
    of streams.

    >>> speed("roce", {1: {0: [2e-4], 1000: [1.2e-3]}, 4: {0: [2e-4], 1000: [7e-4]}})
    ... # doctest: +ELLIPSIS
    ProbeSpeed(fabric='roce', latency_s=0.0001, bandwidth_bytes_per_s=2000000.0, seconds=...)
    """
    rates = []
    for of_sizes in seconds.values():
        largest = max(of_sizes)
        whole_s, empty_s = (statistics.median(of_sizes[size]) for size in (largest, 0))
        # A round trip that is as long as the sending says little: half of it is kept at least.
        rates.append(largest / max(whole_s - empty_s, whole_s / 2))
    return ProbeSpeed(
        fabric=fabric,
        latency_s=statistics.median(seconds[1][0]) / 2,
        bandwidth_bytes_per_s=max(rates),
        seconds=seconds,
    )


def bus_bandwidth(
    kind: CollectiveKind, num_nodes: int, num_bytes: float, seconds: Sequence[Sequence[float]]
) -> float:
    """Returns the bytes per second that each node sends in a ring, as NCCL's tests count them.

    Args:
      num_bytes: that each node holds, of what is gathered afterwards.
      seconds: of each round, node by node; the slowest node counts.

    >>> bus_bandwidth("all_reduce", 4, 1000.0, [[0.2, 0.1, 0.1], [0.15, 0.15, 0.15]])
    10000.0
    """
    slowest_s = max(statistics.median(of_node) for of_node in seconds)
    return collective_times.sent_bytes(kind, num_nodes, num_bytes) / slowest_s


def goes_over_tcp(topology: Topology, way: Way) -> bool:
    """Whether all traffic of a run goes over TCP: between clusters, on Ethernet, and from CPUs.

    Inside an InfiniBand or RoCE cluster of GPUs only boundaries do: NCCL runs the collectives.
    """
    homes = [topology.cluster_of(node) for node in way]
    kinds = {topology.node(node).device.name for node in way}
    return homes[0] != homes[1] or not FABRICS[homes[0].fabric].is_rdma or kinds == {"cpu"}


def transports(topology: Topology, speeds: Mapping[Way, ProbeSpeed]) -> dict[str, float]:
    """Returns the median rate of boundaries in each cluster where NCCL runs the collectives."""
    found: dict[str, list[float]] = {}
    for way, speed in speeds.items():
        if not goes_over_tcp(topology, way):
            rates = found.setdefault(topology.cluster_of(way[0]).name, [])
            rates.append(speed.bandwidth_bytes_per_s)
    return {cluster: statistics.median(rates) for cluster, rates in found.items()}


def capacities(
    topology: Topology,
    speeds: Mapping[Way, ProbeSpeed],
    together: Mapping[Step, float],
    scale: float = 1.0,
) -> dict[Ways, float]:
    """Returns the rates that pairs of nodes share, by the ways between their clusters.

    Pairs share a link, or an uplink if they are of several pairs of clusters, if they are slower
    together than the sum of their rates alone. What a node, or a link, cannot carry alone does not
    count.

    Args:
      speeds: of each way alone.
      together: bytes per second of all ways of a step, measured at once.
      scale: of the rates of NICs, in a lab.
    """
    home = lambda way: (topology.cluster_of(way[0]).name, topology.cluster_of(way[1]).name)
    alone: dict[Way, list[float]] = {}
    for way, speed in speeds.items():
        alone.setdefault(home(way), []).append(speed.bandwidth_bytes_per_s)
    found: dict[Ways, float] = {}
    steps = {step: tuple(sorted({home(way) for way in step})) for step in together}
    for step, ways in sorted(steps.items(), key=lambda item: len(item[1])):  # links come first
        if not all(way in speeds if len(ways) == 1 else home(way) in alone for way in step):
            continue
        rates = {
            way: speeds[way].bandwidth_bytes_per_s
            if way in speeds
            else statistics.median(alone[home(way)])
            for way in step
        }
        of_links = [
            min(
                math.fsum(r for w, r in rates.items() if home(w) == link),
                found.get((link,), math.inf),
            )
            for link in ways
        ]
        of_nodes = [
            min(math.fsum(mine), max(scale * _nic_rate(topology, node, step), *mine))
            for node in {way[1] for way in step}
            if (mine := [r for w, r in rates.items() if w[1] == node])
        ]
        if together[step] < SHARED * min(math.fsum(of_links), math.fsum(of_nodes)):
            found[ways] = together[step]
    return found


def _nic_rate(topology: Topology, node: str, step: Step) -> float:
    """Bytes per second of the NICs of a node over which it receives a step."""
    fabrics = {topology.nominal_link(*way).fabric for way in step}
    nics = [nic for nic in topology.node(node).nics if nic.fabric in fabrics]
    return math.fsum(nic.rate_bytes_per_s * nic.count for nic in nics)


def slow_ways(
    topology: Topology, speeds: Mapping[Way, ProbeSpeed], scale: float = 1.0
) -> list[Finding]:
    """Returns a warning for each way far below nominal, with the likely reason.

    Args:
      scale: of all rates, in a lab.
    """
    should = {way: scale * topology.nominal_link(*way).bandwidth_bytes_per_s for way in speeds}
    judged = [way for way in speeds if goes_over_tcp(topology, way)]
    slow = [w for w in judged if speeds[w].bandwidth_bytes_per_s < FAR_BELOW * should[w]]
    return [
        Finding(
            what=f"{a} -> {b}",
            level="warning",
            text=f"{show(speeds[a, b].bandwidth_bytes_per_s, 'b/s')} over {speeds[a, b].fabric}, "
            f"nominal {show(should[a, b], 'b/s')}",
            fix=_reason((a, b), judged, slow),
        )
        for a, b in slow
    ]


def _reason(way: Way, judged: Sequence[Way], slow: Sequence[Way]) -> str:
    if set(slow) == set(judged) and len(judged) > 2:
        return "all ways are slow: look at the rates in the topology file, and at the CPUs' load"
    for node in way:
        own = [other for other in judged if node in other]
        if len(own) > 2 and set(own) <= set(slow):
            return (
                f"all ways of {node} are slow: look at its NIC's speed and at its cable (ethtool)"
            )
    if way[::-1] not in slow:
        return "the way back is not slow: look for dropped frames (ethtool -S) and at its route"
    return "both ways are slow: look at what the network between them has to carry, and its MTU"
