"""Rules between the entries of a topology file, beyond the type of each value.

A check reads `schema.Known` entries, so that it can run on a file with other mistakes.
"""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from holmesjax.errors import HolmesError, Mistakes
from holmesjax.files import schema
from holmesjax.files.yaml_files import Document, Keys
from holmesjax.topology import calibration, catalogue
from holmesjax.topology.fabrics import FABRICS, NETWORKS
from holmesjax.topology.file import (
    CapacityEntry,
    ClusterEntry,
    DevicesEntry,
    LinkEntry,
    NicEntry,
    PairEntry,
    TopologyEntry,
    UplinkEntry,
    missing_values,
    nodes_of,
)

MEASURE_AGAIN = "remove the section `measured`, and measure again with `launch probe`"


def clusters_make_sense(document: Document, file: TopologyEntry) -> Iterator[HolmesError]:
    if not file.clusters:
        fix = "describe at least one cluster"
        yield document.mistake(("clusters",), "must not be empty", found="an empty list", fix=fix)
    yield from schema.findings(_cluster_names_differ, document, file)
    yield from schema.findings(_node_names_differ, document, file)
    for i, cluster in enumerate(file.clusters):
        for check in (_kinds_exist, _nodes_have_devices, _fabric_has_nics):
            yield from schema.findings(check, document, ("clusters", i), cluster)


def _cluster_names_differ(document: Document, file: TopologyEntry) -> Iterator[HolmesError]:
    seen: set[str] = set()
    for i, cluster in enumerate(file.clusters):
        if cluster.name in seen:
            keys = ("clusters", i, "name")
            fix = f"call it {cluster.name}_{i}, say"
            yield document.mistake(keys, "is the name of two clusters", found=cluster.name, fix=fix)
        seen.add(cluster.name)


def _node_names_differ(document: Document, file: TopologyEntry) -> Iterator[HolmesError]:
    seen: set[str] = set()
    clusters: set[str] = set()
    for i, cluster in enumerate(file.clusters):
        for j, node in enumerate(nodes_of(cluster)):
            is_counted = isinstance(cluster.nodes, int)
            if is_counted and cluster.name in clusters:
                continue  # two clusters of one name are a mistake by themselves
            if node.name in seen:
                keys = (
                    ("clusters", i, "nodes") if is_counted else ("clusters", i, "nodes", j, "name")
                )
                fix = f"call it {cluster.name}-{j}, say"
                if is_counted:
                    fix = f"rename the cluster {cluster.name}, or the other node"
                yield document.mistake(keys, "is the name of two nodes", found=node.name, fix=fix)
            seen.add(node.name)
        clusters.add(cluster.name)


def _entries(cluster: ClusterEntry, keys: Keys) -> Iterator[tuple[Keys, DevicesEntry | NicEntry]]:
    """Every description of devices or NICs in a cluster, and where it is."""
    owners: list[tuple[Keys, Any]] = [(keys, cluster)]
    if isinstance(cluster.nodes, tuple):
        owners += [((*keys, "nodes", j), node) for j, node in enumerate(cluster.nodes)]
    for place, owner in owners:
        if owner.devices is not None:
            yield (*place, "devices"), owner.devices
        for j, nic in enumerate(owner.nics or ()):
            yield (*place, "nics", j), nic


def _kinds_exist(document: Document, keys: Keys, cluster: ClusterEntry) -> Iterator[HolmesError]:
    for place, entry in _entries(cluster, keys):
        yield from schema.findings(_kind_exists, document, place, entry)


def _kind_exists(document: Document, keys: Keys, known: Any) -> Iterator[HolmesError]:
    is_device = keys[-1] == "devices"
    kinds = catalogue.DEVICES if is_device else catalogue.NICS
    if known.kind not in kinds and (gaps := missing_values(known, is_device)):
        named = schema.near(known.kind, list(kinds))
        fix = f"{named}{'' if named.endswith('?') else '.'} Or add {', '.join(gaps)}"
        problem = "is not in the catalogue"
        yield document.mistake((*keys, "kind"), problem, found=known.kind, fix=fix)


def calibrations_fit(document: Document, file: TopologyEntry) -> Iterator[HolmesError]:
    for i, cluster in enumerate(file.clusters):
        for keys, entry in _entries(cluster, ("clusters", i)):
            if keys[-1] == "devices":
                yield from schema.findings(_calibration_fits, document, keys, entry)


def _calibration_fits(document: Document, keys: Keys, known: Any) -> Iterator[HolmesError]:
    """A calibration that is named is there, has no mistake, and is of this kind of device."""
    if not isinstance(name := known.calibration, str):
        return
    try:
        devices = calibration.read(calibration.find(name, Path(document.file).parent)).devices
    except Mistakes as error:
        yield from error.mistakes
        return
    if known.kind not in devices:
        fix = f"measure {known.kind} with `python -m launch profile`, or leave the key out"
        problem = f"is a calibration of {', '.join(devices)}"
        place = (*keys, "calibration")
        yield document.mistake(place, problem, found=f"{name}, for {known.kind}", fix=fix)


def _nodes_have_devices(
    document: Document, keys: Keys, cluster: ClusterEntry
) -> Iterator[HolmesError]:
    fix = "add devices: {kind: h100, count: 8}, say"
    if cluster.nodes == ():
        fix = "give a number, or a list of nodes"
        yield document.mistake((*keys, "nodes"), "must not be empty", found="[]", fix=fix)
    elif isinstance(cluster.nodes, int) and cluster.devices is None:
        yield document.mistake((*keys, "devices"), "is missing", found="nothing", fix=fix)
    elif not isinstance(cluster.nodes, int) and cluster.devices is None:
        for j, node in enumerate(cluster.nodes):
            if node.devices is None:
                place = (*keys, "nodes", j, "devices")
                yield document.mistake(place, "is missing", found="nothing", fix=fix)


def _fabric_has_nics(
    document: Document, keys: Keys, cluster: ClusterEntry
) -> Iterator[HolmesError]:
    if cluster.fabric == "local":
        num_nodes = len(nodes_of(cluster))
        if num_nodes > 1:
            *names, last = NETWORKS
            problem = f"must be {', '.join(names)} or {last}: local is the inside of one node"
            fix = "name the network between the nodes, or set nodes to 1"
            found = f"local, with {num_nodes} nodes"
            yield document.mistake((*keys, "fabric"), problem, found=found, fix=fix)
        return
    owners: list[tuple[Keys, Any]] = [(keys, cluster)]
    if not isinstance(cluster.nodes, int):
        owners = [((*keys, "nodes", j), node) for j, node in enumerate(cluster.nodes)]
    for place, owner in owners:
        nics = cluster.nics if owner.nics is None else owner.nics
        fabrics = {_nic_fabric(nic) for nic in nics or ()}
        if not fabrics & {cluster.fabric, None}:
            problem = f"none is on the fabric {cluster.fabric} of the cluster"
            found = ", ".join(nic.kind for nic in nics or ()) or "no NICs"
            offers = catalogue.NICS.items()
            kinds = ", ".join(kind for kind, nic in offers if nic["fabric"] == cluster.fabric)
            fix = f"add one of {kinds}, or correct the fabric"
            yield document.mistake((*place, "nics"), problem, found=found, fix=fix)


def _nic_fabric(nic: NicEntry) -> str | None:
    """None if it is not known, because the kind is a mistake."""
    return nic.fabric or catalogue.NICS.get(nic.kind, {}).get("fabric")


def links_join_clusters(document: Document, file: TopologyEntry) -> Iterator[HolmesError]:
    names = [cluster.name for cluster in file.clusters]
    wrong = [
        mistake
        for i, link in enumerate(file.links)
        for mistake in schema.findings(_ends_exist, document, ("links", i), link, names)
    ]
    yield from wrong
    if not wrong:
        for i, link in enumerate(file.links):
            yield from schema.findings(_ends_have_nics, document, ("links", i), link, file)
    pairs = [tuple(link.between) for link in file.links]
    for i, pair in enumerate(pairs):
        if pair in pairs[:i]:
            fix = f"remove one, or write [{', '.join(reversed(pair))}] for the other way"
            found = f"[{', '.join(pair)}] again"
            yield document.mistake(("links", i, "between"), "is given twice", found=found, fix=fix)
    for a, b in itertools.combinations(dict.fromkeys(names), 2):
        if not wrong and not {(a, b), (b, a)} & set(pairs):
            fix = (
                f"add {{between: [{a}, {b}], fabric: ethernet, bandwidth: 25 Gb/s, latency: 50 us}}"
            )
            problem = f"no link joins the clusters {a!r} and {b!r}"
            yield document.mistake(("links",), problem, found="no link", fix=fix)


def _ends_exist(
    document: Document, keys: Keys, link: LinkEntry | CapacityEntry, names: list[str]
) -> Iterator[HolmesError]:
    yield from _are_two_clusters(document, (*keys, "between"), link.between, names)


def _are_two_clusters(
    document: Document, place: Keys, ends: Sequence[str], names: list[str]
) -> Iterator[HolmesError]:
    if len(ends) != 2 or ends[0] == ends[1]:
        found = f"[{', '.join(ends)}]"
        fix = f"write two of {', '.join(names)}, the first one as the sender"
        yield document.mistake(place, "must be two clusters", found=found, fix=fix)
    for i, name in enumerate(ends):
        if name not in names:
            fix = schema.near(name, names)
            yield document.mistake((*place, i), "no such cluster", found=name, fix=fix)


def _ends_have_nics(
    document: Document, keys: Keys, link: LinkEntry, file: TopologyEntry
) -> Iterator[HolmesError]:
    """RDMA needs a NIC of its fabric at both ends; every machine has some Ethernet."""
    if not FABRICS[link.fabric].is_rdma:
        return
    for cluster in file.clusters:
        if cluster.name not in link.between:
            continue
        owners: Sequence[Any] = [cluster] if isinstance(cluster.nodes, int) else cluster.nodes
        for owner in owners:
            nics = (cluster.nics if owner.nics is None else owner.nics) or ()
            if not {_nic_fabric(nic) for nic in nics} & {link.fabric, None}:
                problem = f"{owner.name} has no NIC on it"
                found = ", ".join(nic.kind for nic in nics) or "no NICs"
                fix = f"correct the fabric of the link, or add a NIC of {link.fabric} there"
                yield document.mistake((*keys, "fabric"), problem, found=found, fix=fix)
                break


def uplinks_are_shared(document: Document, file: TopologyEntry) -> Iterator[HolmesError]:
    names = [cluster.name for cluster in file.clusters]
    yield from _uplinks_differ(document, ("uplinks",), file.uplinks, names)


def _uplinks_differ(
    document: Document, keys: Keys, uplinks: Sequence[UplinkEntry], names: list[str]
) -> Iterator[HolmesError]:
    """The pairs of an uplink are of clusters, each once; no two uplinks have the same pairs."""
    for i, uplink in enumerate(uplinks):
        yield from schema.findings(_pairs_differ, document, (*keys, i, "pairs"), uplink, names)
    seen: list[set[tuple[str, ...]]] = []
    for i, uplink in enumerate(uplinks):
        if (pairs := set(uplink.pairs)) in seen:
            fix = "remove one, or write every pair in the other order for the other direction"
            found = "the same pairs again"
            yield document.mistake((*keys, i, "pairs"), "are given twice", found=found, fix=fix)
        seen.append(pairs)


def _pairs_differ(
    document: Document, place: Keys, uplink: UplinkEntry, names: list[str]
) -> Iterator[HolmesError]:
    if not uplink.pairs:
        fix = "write the pairs of clusters that share the capacity, such as [[a, b], [a, c]]"
        yield document.mistake(place, "must not be empty", found="[]", fix=fix)
    for j, pair in enumerate(uplink.pairs):
        yield from _are_two_clusters(document, (*place, j), pair, names)
        if pair in uplink.pairs[:j]:
            found, fix = f"[{', '.join(pair)}] again", "remove one of them"
            yield document.mistake((*place, j), "is given twice", found=found, fix=fix)


def measured_is_of_these(document: Document, file: TopologyEntry) -> Iterator[HolmesError]:
    """Pairs, collectives and transports are of nodes and clusters of the file."""
    if file.measured is None:
        return
    sizes = {cluster.name: len(nodes_of(cluster)) for cluster in file.clusters}
    homes = {node.name: cluster for cluster in file.clusters for node in nodes_of(cluster)}
    fabrics = {tuple(sorted(link.between)): link.fabric for link in file.links}
    seen: set[tuple[str, ...]] = set()
    for i, pair in enumerate(file.measured.pairs):
        keys: Keys = ("measured", "pairs", i)
        wrong = schema.findings(_pair_exists, document, keys, pair, homes, seen)
        yield from wrong
        if not wrong:
            yield from schema.findings(_fabric_is_theirs, document, keys, pair, homes, fabrics)
    for i, collective in enumerate(file.measured.collectives):
        keys, found = ("measured", "collectives", i), collective.cluster
        if found not in sizes:
            fix = schema.near(found, list(sizes))
            yield document.mistake((*keys, "cluster"), "no such cluster", found=found, fix=fix)
        elif not 2 <= collective.nodes <= sizes[found]:
            problem = f"must be 2 to {sizes[found]}, the nodes of {found}"
            place = (*keys, "nodes")
            yield document.mistake(place, problem, found=collective.nodes, fix=MEASURE_AGAIN)
    seen_pipes: list[tuple[str, ...]] = []
    for i, pipe in enumerate(file.measured.capacities):
        keys = ("measured", "capacities", i)
        yield from schema.findings(_ends_exist, document, keys, pipe, list(sizes))
        if pipe.between in seen_pipes:
            found, fix = f"[{', '.join(pipe.between)}] again", "remove one of them"
            yield document.mistake((*keys, "between"), "is given twice", found=found, fix=fix)
        seen_pipes.append(pipe.between)
    own = ("measured", "uplinks")
    yield from schema.findings(_uplinks_differ, document, own, file.measured.uplinks, list(sizes))
    named = [transport.cluster for transport in file.measured.transports]
    for i, name in enumerate(named):
        keys = ("measured", "transports", i, "cluster")
        if name not in sizes:
            fix = schema.near(name, list(sizes))
            yield document.mistake(keys, "no such cluster", found=name, fix=fix)
        elif name in named[:i]:
            fix = "remove one of them"
            yield document.mistake(keys, "is given twice", found=f"{name} again", fix=fix)


def _pair_exists(
    document: Document,
    keys: Keys,
    pair: PairEntry,
    homes: dict[str, ClusterEntry],
    seen: set[tuple[str, ...]],
) -> Iterator[HolmesError]:
    place, ends = (*keys, "between"), pair.between
    found = f"[{', '.join(ends)}]"
    for j, node in enumerate(ends):
        if node not in homes:
            fix = schema.near(node, list(homes))
            yield document.mistake((*place, j), "no such node", found=node, fix=fix)
    if len(ends) != 2 or ends[0] == ends[1]:
        yield document.mistake(place, "must be two nodes", found=found, fix=MEASURE_AGAIN)
    elif ends in seen:
        fix = "remove one of them"
        yield document.mistake(place, "is given twice", found=f"{found} again", fix=fix)
    seen.add(ends)


def _fabric_is_theirs(
    document: Document,
    keys: Keys,
    pair: PairEntry,
    homes: dict[str, ClusterEntry],
    fabrics: dict[tuple[str, ...], str],
) -> Iterator[HolmesError]:
    """A pair of a cluster is on its fabric; of two clusters, on that of their link."""
    a, b = (homes[node] for node in pair.between)
    expected = a.fabric if a.name == b.name else fabrics.get(tuple(sorted((a.name, b.name))))
    if expected is not None and pair.fabric != expected:
        problem = f"the nodes reach each other over {expected}"
        yield document.mistake((*keys, "fabric"), problem, found=pair.fabric, fix=MEASURE_AGAIN)
