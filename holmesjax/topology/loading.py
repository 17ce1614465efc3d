"""Topology files and kinds of the catalogue as machines."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from holmesjax.errors import Mistakes, TopologyError
from holmesjax.files import schema, yaml_files
from holmesjax.topology import calibration, catalogue, file as topology_file, file_checks
from holmesjax.topology.calibration import UNKNOWN
from holmesjax.topology.machines import (
    Cluster,
    Collective,
    DeviceKind,
    Link,
    Measured,
    Nic,
    Node,
    Topology,
    Ways,
    backwards,
)


def load(path: str | Path, overrides: Sequence[str] = ()) -> Topology:
    """Reads a topology from a YAML file; `"clusters.ib.nodes=4"` overrides on top.

    Raises `Mistakes` with all that is wrong with it.
    """
    file = _read(path, overrides)
    calibrated = cache(lambda name: calibration.read(calibration.find(name, Path(path).parent)))
    links = {(a, b): _link(entry) for entry in file.links for a, b in [entry.between]}
    uplinks = {_ways(entry): entry.capacity for entry in file.uplinks}
    return Topology(
        name=file.name,
        clusters=tuple(_cluster(entry, calibrated) for entry in file.clusters),
        links={(b, a): link for (a, b), link in links.items()} | links,
        uplinks={backwards(ways): rate for ways, rate in uplinks.items()} | uplinks,
        measured=_measured(file.measured) if file.measured else None,
    )


def _read(path: str | Path, overrides: Sequence[str] = ()) -> topology_file.TopologyEntry:
    """The entries of a topology file, which hold together. Raises `Mistakes`."""
    document = yaml_files.read(path, TopologyError, overrides)
    if "model" in document.values and "clusters" not in document.values:
        problem, fix = "is a run, not a topology", "name a file of configs/topologies/"
        raise TopologyError(str(path), problem, found="the key `model`", fix=fix)
    file, mistakes = schema.read(topology_file.TopologyEntry, document)
    mistakes += schema.findings(file_checks.clusters_make_sense, document, file)
    mistakes += schema.findings(file_checks.calibrations_fit, document, file)
    mistakes += schema.findings(file_checks.links_join_clusters, document, file)
    mistakes += schema.findings(file_checks.uplinks_are_shared, document, file)
    mistakes += schema.findings(file_checks.measured_is_of_these, document, file)
    if mistakes:
        raise Mistakes(mistakes)
    entry: topology_file.TopologyEntry = schema.build(file)
    return entry


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
        capacities={
            ((a, b),): capacity.capacity
            for capacity in entry.capacities
            for a, b in [capacity.between]
        }
        | {_ways(uplink): uplink.capacity for uplink in entry.uplinks},
    )


def _ways(entry: topology_file.UplinkEntry) -> Ways:
    return tuple(sorted((a, b) for a, b in entry.pairs))


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
