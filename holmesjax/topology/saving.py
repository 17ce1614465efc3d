"""Machines as a topology file with every number written out."""

import hashlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from holmesjax import units
from holmesjax.files import yaml_files
from holmesjax.topology import calibration, catalogue
from holmesjax.topology.machines import (
    Cluster,
    Link,
    Measured,
    Nic,
    Node,
    Topology,
    Ways,
    backwards,
)


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
    if topology.uplinks:
        values["uplinks"] = [
            _uplink_values(ways, rate)
            for ways, rate in sorted(topology.uplinks.items())
            if (back := backwards(ways)) >= ways or topology.uplinks.get(back) != rate
        ]
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
        {"between": list(ways[0]), "capacity": units.exact(rate, "b/s")}
        for ways, rate in measured.capacities.items()
        if len(ways) == 1
    ]
    uplinks = [
        _uplink_values(ways, rate) for ways, rate in measured.capacities.items() if len(ways) > 1
    ]
    lines = ["measured:", f"  {yaml_files.to_line({'date': measured.date})[1:-1]}"]
    sections: dict[str, list[dict[str, Any]]] = {
        "pairs": pairs,
        "collectives": collectives,
        "transports": transports,
        "capacities": capacities,
        "uplinks": uplinks,
    }
    for name, items in sections.items():
        if items:
            lines.append(f"  {name}:")
            lines += [f"    - {yaml_files.to_line(item)}" for item in items]
    return "\n".join(lines) + "\n"


def save(topology: Topology, path: str | Path) -> None:
    """Writes the resolved topology."""
    Path(path).write_text(to_yaml(topology), encoding="utf-8")


def hash_of(topology: Topology) -> str:
    """16 hex digits that change with anything in the topology.

    >>> from holmesjax.topology import loading
    >>> len(hash_of(loading.load("configs/topologies/ib_roce.yaml")))
    16
    """
    return hashlib.sha256(to_yaml(topology).encode()).hexdigest()[:16]


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


def _uplink_values(ways: Ways, rate_bytes_per_s: float) -> dict[str, Any]:
    return {"pairs": list(map(list, ways)), "capacity": units.exact(rate_bytes_per_s, "b/s")}


def _link_values(link: Link, unit: units.Unit) -> dict[str, str]:
    egress, capacity = link.egress_dollars_per_gb, link.capacity_bytes_per_s
    return {
        "fabric": link.fabric,
        "bandwidth": units.exact(link.bandwidth_bytes_per_s, unit),
        **({"capacity": units.exact(capacity, unit)} if math.isfinite(capacity) else {}),
        "latency": units.exact(link.latency_s, "s"),
        **({"egress": units.exact(egress, "$/GB")} if egress else {}),
    }
