"""Machines as they would be after an upgrade: topologies in which one thing is faster, or more.

Measurements are scaled with the parts on which they were made.
"""

import itertools
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from holmesjax.topology.fabrics import Fabric
from holmesjax.topology.machines import (
    Cluster,
    DeviceKind,
    Link,
    Measured,
    Node,
    Topology,
    Way,
    Ways,
    backwards,
)


def faster_devices(topology: Topology, cluster: str, kind: str, factor: float) -> Topology:
    """All devices of a kind in a cluster: their products and their memory."""

    def faster(device: DeviceKind) -> DeviceKind:
        if device.name != kind:
            return device
        peaks = {dtype: factor * peak for dtype, peak in device.peak_flop_per_s.items()}
        rate = factor * device.memory_bandwidth_bytes_per_s
        return replace(device, peak_flop_per_s=peaks, memory_bandwidth_bytes_per_s=rate)

    return _with_nodes(topology, cluster, lambda node: replace(node, device=faster(node.device)))


def faster_node_links(topology: Topology, cluster: str, factor: float) -> Topology:
    """The links between the devices of every node of a cluster."""

    def faster(node: Node) -> Node:
        link = _faster(node.device.link, factor)
        return replace(node, device=replace(node.device, link=link))

    return _with_nodes(topology, cluster, faster)


def faster_fabric(topology: Topology, cluster: str, factor: float) -> Topology:
    """The network between the nodes of a cluster."""
    [own] = [c for c in topology.clusters if c.name == cluster]
    changed = _with_nics(topology, cluster, own.fabric, factor)
    names = {node.name for node in own.nodes}
    changed = _with_pairs(changed, lambda way: names.issuperset(way), factor)
    return _with_collectives(changed, {cluster}, factor)


def faster_link(topology: Topology, pair: Way, factor: float) -> Topology:
    """Between two clusters, both ways, with the NICs at both ends that fill it; not a capacity."""
    ends = {c.name: c for c in topology.clusters if c.name in pair}
    ways = {pair, pair[::-1]}
    links = {
        way: _faster(link, factor) if way in ways else link for way, link in topology.links.items()
    }
    changed = replace(topology, links=links)
    for name, cluster in ends.items():
        fabric = topology.links[pair].fabric
        if fabric != cluster.fabric:  # else they are its own network too
            changed = _with_nics(changed, name, fabric, factor)
    homes = {node.name: name for name, cluster in ends.items() for node in cluster.nodes}
    is_between = lambda way: {homes.get(way[0]), homes.get(way[1])} == set(pair)
    return _with_pairs(changed, is_between, factor)


def wider_pipe(topology: Topology, ways: Ways, factor: float) -> Topology:
    """The capacity that some ways have or share, in both directions."""
    wider = lambda own: factor if own in (ways, backwards(ways)) else 1.0
    return _with_pipes(topology, wider)


def faster_transport(topology: Topology, factor: float) -> Topology:
    """Processes that send boundaries, where that is not part of what was measured of a pair."""
    names = [cluster.name for cluster in topology.clusters]
    rates = {name: factor * topology.transport_bytes_per_s(name) for name in names}
    measured = topology.measured or Measured(date="", pairs={})
    return replace(topology, measured=replace(measured, transports=rates))


def faster_everything(topology: Topology, factor: float) -> Topology:
    """All devices, networks and links, and what sends boundaries."""
    changed = faster_transport(topology, factor)
    for cluster in topology.clusters:
        for kind in {node.device.name for node in cluster.nodes}:
            changed = faster_devices(changed, cluster.name, kind, factor)
        changed = faster_node_links(changed, cluster.name, factor)
        for fabric in {nic.fabric for node in cluster.nodes for nic in node.nics}:
            changed = _with_nics(changed, cluster.name, fabric, factor)
    links = {way: _faster(link, factor) for way, link in topology.links.items()}
    changed = _with_pairs(replace(changed, links=links), lambda way: True, factor)
    changed = _with_pipes(changed, lambda way: factor)
    return _with_collectives(changed, {c.name for c in topology.clusters}, factor)


def with_more_nodes(topology: Topology, cluster: str, count: int = 1) -> Topology:
    """Adds nodes like the last one of the cluster. Paths to them have no measurements."""
    [own] = [c for c in topology.clusters if c.name == cluster]
    taken = {node.name for node in topology.nodes}
    names = (f"{cluster}-{number}" for number in itertools.count(len(own.nodes)))
    free = itertools.islice((name for name in names if name not in taken), count)
    more = tuple(replace(own.nodes[-1], name=name) for name in free)
    return _with_cluster(topology, replace(own, nodes=own.nodes + more))


def without_cluster(topology: Topology, cluster: str) -> Topology:
    """Returns the other clusters, and the links between them."""
    clusters = tuple(c for c in topology.clusters if c.name != cluster)
    left = {node.name for c in clusters for node in c.nodes}
    measured = topology.measured
    if measured is not None:
        measured = replace(
            measured,
            pairs={way: link for way, link in measured.pairs.items() if left.issuperset(way)},
            collectives=tuple(c for c in measured.collectives if c.cluster != cluster),
            transports={
                name: transport
                for name, transport in measured.transports.items()
                if name != cluster
            },
            capacities=_capacities_without(measured.capacities, cluster),
        )
    links = {way: link for way, link in topology.links.items() if cluster not in way}
    uplinks = _capacities_without(topology.uplinks, cluster)
    return replace(topology, clusters=clusters, links=links, uplinks=uplinks, measured=measured)


def _capacities_without(capacities: dict[Ways, float], cluster: str) -> dict[Ways, float]:
    """Capacities between the other clusters; the least of those that have the same ways left."""
    left: dict[Ways, float] = {}
    for ways, rate in capacities.items():
        if rest := tuple(way for way in ways if cluster not in way):
            left[rest] = min(rate, left.get(rest, rate))
    return left


def _faster(link: Link, factor: float) -> Link:
    return replace(link, bandwidth_bytes_per_s=factor * link.bandwidth_bytes_per_s)


def _with_cluster(topology: Topology, changed: Cluster) -> Topology:
    clusters = tuple(changed if c.name == changed.name else c for c in topology.clusters)
    return replace(topology, clusters=clusters)


def _with_nodes(topology: Topology, cluster: str, change: Callable[[Node], Node]) -> Topology:
    [own] = [c for c in topology.clusters if c.name == cluster]
    return _with_cluster(topology, replace(own, nodes=tuple(map(change, own.nodes))))


def _with_nics(topology: Topology, cluster: str, fabric: Fabric, factor: float) -> Topology:
    """The NICs of a fabric on every node of a cluster faster."""

    def faster(node: Node) -> Node:
        nics = (
            replace(nic, rate_bytes_per_s=factor * nic.rate_bytes_per_s)
            if nic.fabric == fabric
            else nic
            for nic in node.nics
        )
        return replace(node, nics=tuple(nics))

    return _with_nodes(topology, cluster, faster)


def _with_pairs(topology: Topology, is_one: Callable[[Way], bool], factor: float) -> Topology:
    """Returns the topology with some of the measured ways faster."""
    if topology.measured is None:
        return topology
    pairs = {
        way: _faster(link, factor) if is_one(way) else link
        for way, link in topology.measured.pairs.items()
    }
    return replace(topology, measured=replace(topology.measured, pairs=pairs))


def _with_pipes(topology: Topology, factor_of: Callable[[Ways], float]) -> Topology:
    """All capacities, and those that were measured, times a factor for each."""
    links = {
        way: replace(link, capacity_bytes_per_s=factor_of((way,)) * link.capacity_bytes_per_s)
        for way, link in topology.links.items()
    }
    uplinks = {ways: factor_of(ways) * rate for ways, rate in topology.uplinks.items()}
    if (measured := topology.measured) is not None:
        rates = {ways: factor_of(ways) * rate for ways, rate in measured.capacities.items()}
        measured = replace(measured, capacities=rates)
    return replace(topology, links=links, uplinks=uplinks, measured=measured)


def _with_collectives(topology: Topology, clusters: Collection[str], factor: float) -> Topology:
    """The topology with faster measured collectives in some clusters."""
    if topology.measured is None:
        return topology
    faster = lambda own: replace(own, bandwidth_bytes_per_s=factor * own.bandwidth_bytes_per_s)
    found = tuple(
        faster(collective) if collective.cluster in clusters else collective
        for collective in topology.measured.collectives
    )
    return replace(topology, measured=replace(topology.measured, collectives=found))


def neighbouring_pairs(clusters: Iterable[str]) -> list[Way]:
    """The pairs of clusters that follow each other, each once, whichever comes first.

    >>> neighbouring_pairs(["ib", "ib", "roce", "ib"])
    [('ib', 'roce')]
    """
    pairs: dict[frozenset[str], Way] = {}
    for a, b in itertools.pairwise(clusters):
        if a != b:
            pairs.setdefault(frozenset((a, b)), (a, b))
    return list(pairs.values())
