"""Machines as lines for the console."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, groupby

from holmesjax import units
from holmesjax.topology import windows
from holmesjax.topology.machines import Cluster, Link, Measured, Node, Topology, name_of
from holmesjax.units import counted


def describe(topology: Topology) -> list[str]:
    """Lines for the console: what there is, cluster by cluster, and the links between them."""
    num_nodes, num_devices = len(topology.nodes), topology.num_devices
    lines = [f"topology    {topology.name}: {counted(num_nodes, 'node')}, {num_devices} devices"]
    for cluster in topology.clusters:
        groups = [list(g) for _, g in groupby(cluster.nodes, key=lambda n: replace(n, name=""))]
        lines += [_group_line(cluster, nodes) for nodes in groups[:GROUPS_SHOWN]]
        if rest := [node for nodes in groups[GROUPS_SHOWN:] for node in nodes]:
            count = sum(node.num_devices for node in rest)
            lines.append(f"  {cluster.name:<9} {counted(len(rest), 'more node')}, {count} devices")
    for one, other in combinations(topology.clusters, 2):
        a, b = one.name, other.name
        there, back = topology.links[a, b], topology.links[b, a]
        if there == back:
            lines.append(f"  {a} <-> {b}: {_link_text(there)} each way")
        else:
            lines += [f"  {a} -> {b}: {_link_text(there)}", f"  {b} -> {a}: {_link_text(back)}"]
        ends = one.nodes[0].name, other.nodes[0].name
        round_trip_s = topology.round_trip_s(*ends)
        carried = windows.most_bytes_per_s(round_trip_s)
        if topology.measured and ends in topology.measured.pairs:
            continue  # with the windows that the kernels have granted
        if carried < max(there.bandwidth_bytes_per_s, back.bandwidth_bytes_per_s):
            lines.append(
                f"  {a} <-> {b}: a process sends at most {units.show(carried, 'b/s')}, in "
                f"{windows.MAX_FILLING} connections of {units.show(windows.WINDOW_BYTES, 'B')} a "
                f"round trip of {units.show(round_trip_s, 's')}"
            )
    shared = {
        name_of(pipe.ways): f"share {units.show(pipe.capacity_bytes_per_s, 'b/s')}"
        for pipe in topology.pipes
        if pipe.is_uplink
    }
    lines += [f"  {line}" for line in each_way(shared)]
    if topology.measured is not None:
        lines.append(_measured_line(topology, topology.measured))
    return lines


def each_way(texts: Mapping[str, str]) -> list[str]:
    """Lines with the text of each pipe, by its name; both directions at once if they are equal.

    >>> each_way({"a -> b": "50%", "b -> a": "50%", "a -> c+d": "25%", "c+d -> a": "10%"})
    ['a <-> b 50% each way', 'a -> c+d 25%', 'c+d -> a 10%']
    """
    lines = []
    for name, text in texts.items():
        ways = [way.split(" -> ") for way in name.split(" + ")]
        back = " + ".join(f"{b} -> {a}" for a, b in sorted(ways, key=lambda ends: ends[::-1]))
        line = f"{back.replace(' -> ', ' <-> ')} {text} each way"
        if texts.get(back) != text or back == name:
            lines.append(f"{name} {text}")
        elif line not in lines:
            lines.append(f"{name.replace(' -> ', ' <-> ')} {text} each way")
    return lines


def changed_ways(topology: Topology, changed: Topology, *, by_device: bool = False) -> list[str]:
    """Lines about links between clusters that were changed: what boundaries get, and the limit.

    Args:
      topology: the machines as they are.
      changed: the machines as they would be, with the same clusters and links.
      by_device: whether each device has a process, and not each node.
    """
    first = {cluster.name: cluster.nodes[0] for cluster in changed.clusters}
    texts: dict[str, str] = {}
    for (a, b), link in changed.links.items():
        if topology.links.get((a, b)) == link:
            continue
        ends = first[a].name, first[b].name
        processes = min(first[a].num_devices, first[b].num_devices) if by_device else 1
        before, now = (
            machines.boundary_link(*ends, processes).bandwidth_bytes_per_s
            for machines in (topology, changed)
        )
        limits = changed.boundary_limits(*ends, processes)
        was = "as before" if now == before else f"{units.show(before, 'b/s')} before"
        least = sorted(part for part, rate in limits.items() if rate == min(limits.values()))
        texts[f"{a} -> {b}"] = (
            f"limited by {' and '.join(least)} to {units.show(now, 'b/s')} a node ({was})"
        )
    return [f"            {line}" for line in each_way(texts)]


def _measured_line(topology: Topology, measured: Measured) -> str:
    """How much was measured, and which pair fell shortest of what it should be."""
    line = f"  measured  {counted(len(measured.pairs), 'way')} between nodes, {measured.date}"
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
    num_nodes, num_devices = counted(len(nodes), "node"), nodes[0].num_devices
    return (
        f"  {cluster.name:<9} {num_nodes} x {num_devices} {device.name} "
        f"({speed} {dtype}, {units.show(device.memory_bytes, 'B')}), "
        f"{cluster.fabric}: {', '.join(counted_nics) or 'no NICs'}"
    )


def _link_text(link: Link) -> str:
    rate, latency_s = link.bandwidth_bytes_per_s, link.latency_s
    text = f"{link.fabric}, {units.show(latency_s, 's')}, {units.show(rate, 'b/s')}"
    if math.isfinite(capacity := link.capacity_bytes_per_s):
        return f"{text} a node, {units.show(capacity, 'b/s')} all together"
    return text
