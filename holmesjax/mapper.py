"""Which device sits where in a stage's mesh: the axis that moves most bytes gets the fastest links.

A group is a line of the mesh along one axis: the devices that take part in one of its collectives.
The price of a placement, in seconds, is the sum over axes of the bytes the axis moves times the
seconds per byte of the slowest path between two devices of any of its groups.

Inside a cluster, two nodes reach each other as fast as the slower of them allows. So the nodes that
reach each other within a limit form blocks, and a slower limit only merges blocks. Take any
placement, and its axes from the one with the fastest groups to the one with the slowest: the first
i of them span boxes of the product of their sizes, and every box lies in one block of the i-th
limit. So every such block holds a multiple of a box, and when the devices are sorted so that each
block of each limit is a run, cutting them row-major puts every box into a block again. The cheapest
order of the axes over that one order of the devices is therefore the cheapest placement of all.

Measured pairs need not be like that. Blocks are then what paths within a limit join, and the result
is a placement whose price is right, but not always the cheapest.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from holmesjax.errors import PlanError
from holmesjax.network import Group
from holmesjax.topology import Fabric, Link, Topology

A = TypeVar("A", bound=str)  # the name of an axis


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement(Generic[A]):
    """The devices of one stage, laid out as a mesh."""

    sizes: dict[A, int]  # axis -> size, in the order of the mesh: slowest link first
    devices: tuple[int, ...]  # numbers of the topology, in row-major order of the mesh
    groups: dict[A, Group]  # axis -> its slowest group; none for size 1
    price_s: float  # sum over axes of bytes times seconds per byte

    @property
    def fabrics(self) -> dict[A, Fabric]:
        """The slowest fabric of each axis; `local` where a group is a single device."""
        return {
            a: self.groups[a].slowest.fabric if a in self.groups else "local" for a in self.sizes
        }


def place(
    topology: Topology,
    devices: Mapping[str, Sequence[int]],
    sizes: Mapping[A, int],
    traffic_bytes: Mapping[A, float],
) -> Placement[A]:
    """The cheapest placement of a stage's devices in its mesh.

    Args:
      topology: what the nodes belong to.
      devices: node -> the numbers of its devices that the stage uses; all in one cluster.
      sizes: axis -> size; their product is the number of devices. The axes come in the order that
        is kept where prices are equal, slowest link first.
      traffic_bytes: axis -> bytes that each device moves along it in a step.

    Raises:
      PlanError: two nodes lie in different clusters, so no fabric joins them.
    """
    assert math.prod(sizes.values()) == sum(map(len, devices.values())), (sizes, devices)
    _refuse_two_clusters(topology, tuple(devices))
    paths = _Paths.between(topology, tuple(devices))
    nodes = _sorted_by_block(paths, {node: len(numbers) for node, numbers in devices.items()})
    seats = tuple(node for node in nodes for _ in devices[node])  # the node of each device
    best: tuple[float, tuple[A, ...]] | None = None
    for axes in itertools.permutations(sizes):  # the given order comes first
        in_order = {axis: sizes[axis] for axis in axes}
        slowest = _slowest_pairs(paths, seats, in_order)
        price_s = sum(
            traffic_bytes[a] * max(paths.s_per_byte[pair] for pair in slowest[a])
            for a in sizes
            if a in slowest
        )
        if best is None or price_s < best[0]:
            best = price_s, axes
    assert best is not None, "no axes"
    price_s, axes = best
    in_order = {axis: sizes[axis] for axis in axes}
    return Placement(
        sizes=in_order,
        devices=tuple(number for node in nodes for number in devices[node]),
        groups={
            axis: _group(paths, seats, in_order, axis, pairs)
            for axis, pairs in _slowest_pairs(paths, seats, in_order).items()
        },
        price_s=price_s,
    )


def _refuse_two_clusters(topology: Topology, nodes: Sequence[str]) -> None:
    first = topology.cluster_of(nodes[0])
    for node in nodes:
        if (other := topology.cluster_of(node)).name != first.name:
            raise PlanError(
                "mesh",
                "the devices of one stage must share a fabric, but two of its nodes lie in the "
                f"clusters {first.name!r} and {other.name!r}",
                found=f"{nodes[0]} on {first.fabric}, {node} on {other.fabric}",
                fix="give each cluster stages of its own: raise parallel.stages, or leave it out",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Paths:
    """How fast nodes reach each other, and their own devices each other.

    Bytes between nodes cross the network and both devices' own links; the slowest counts.
    """

    links: dict[tuple[str, str], Link]
    s_per_byte: dict[tuple[str, str], float]

    @classmethod
    def between(cls, topology: Topology, nodes: Sequence[str]) -> "_Paths":
        pairs = list(itertools.product(nodes, nodes))
        links = {pair: topology.effective_link(*pair) for pair in pairs}
        cost = {pair: 1.0 / links[pair].bandwidth_bytes_per_s for pair in pairs}
        s_per_byte = {(a, b): max(cost[a, a], cost[b, b], cost[a, b], cost[b, a]) for a, b in pairs}
        return cls(links=links, s_per_byte=s_per_byte)

    def shared_link(self, pair: tuple[str, str], num_rings: int) -> Link:
        """What a group has of the path between two nodes when `num_rings` groups use it at once.

        The groups share the network interfaces of a node, and each has its own devices' links.
        """
        a, b = pair
        own = [self.links[node, node].bandwidth_bytes_per_s for node in pair]
        between = [self.links[way].bandwidth_bytes_per_s / num_rings for way in (pair, (b, a))]
        return replace(self.links[pair], bandwidth_bytes_per_s=min(*own, *between))


def _sorted_by_block(paths: _Paths, num_devices: Mapping[str, int]) -> list[str]:
    """The nodes, so that those within any limit of each other are a run; else as they come."""
    nodes = list(num_devices)
    limits = {s for (a, b), s in paths.s_per_byte.items() if a != b}
    for limit in sorted(limits):  # a stable sort by the coarsest blocks last
        blocks = _blocks(nodes, paths.s_per_byte, limit)
        nodes = [node for block in blocks for node in block]
    return nodes


def _blocks(
    nodes: Sequence[str], s_per_byte: Mapping[tuple[str, str], float], limit: float
) -> list[list[str]]:
    """Nodes joined by paths within the limit; blocks in the order of their first nodes."""
    blocks: list[list[str]] = []
    for node in nodes:
        near = [block for block in blocks if any(s_per_byte[node, x] <= limit for x in block)]
        if not near:
            blocks.append([node])
            continue
        near[0].extend([*itertools.chain(*near[1:]), node])
        blocks = [block for block in blocks if block not in near[1:]]
    return blocks


def _groups(seats: Sequence[str], sizes: Mapping[A, int], axis: A) -> Iterator[tuple[str, ...]]:
    """The nodes of every group of an axis; `seats` are the nodes of the devices, row-major."""
    names = list(sizes)
    stride = math.prod(sizes[name] for name in names[names.index(axis) + 1 :])
    span = stride * sizes[axis]
    for start in range(0, len(seats), span):
        for offset in range(start, start + stride):
            yield tuple(seats[offset : start + span : stride])


def _slowest_pairs(
    paths: _Paths, seats: Sequence[str], sizes: Mapping[A, int]
) -> dict[A, list[tuple[str, str]]]:
    """Axis -> the node (twice) with the slowest devices of a group, and the two farthest nodes.

    Either is left out where no group has two devices in a node, or devices on two nodes.
    """
    # Equally slow pairs are told apart by name, so that the result does not depend on hashes.
    key = lambda pair: (paths.s_per_byte[pair], pair)
    slowest: dict[A, list[tuple[str, str]]] = {}
    for axis in sizes:
        if sizes[axis] == 1:
            continue
        counts = [Counter(group) for group in set(_groups(seats, sizes, axis))]
        inside = {(node, node) for count in counts for node, num in count.items() if num > 1}
        between = {pair for count in counts for pair in itertools.combinations(count, 2)}
        slowest[axis] = [max(pairs, key=key) for pairs in (inside, between) if pairs]
    return slowest


def _group(
    paths: _Paths,
    seats: Sequence[str],
    sizes: Mapping[A, int],
    axis: A,
    pairs: Sequence[tuple[str, str]],
) -> Group:
    """The slowest group of an axis: on as many nodes as any, over the slowest of all links."""
    groups = [set(group) for group in _groups(seats, sizes, axis)]
    leaving = Counter(node for nodes in groups if len(nodes) > 1 for node in nodes)
    num_rings = max(leaving.values(), default=1)  # most groups that leave any one node
    return Group(
        size=sizes[axis],
        nodes=max(map(len, groups)),
        inside=next((paths.links[a, b] for a, b in pairs if a == b), None),
        between=next((paths.shared_link((a, b), num_rings) for a, b in pairs if a != b), None),
    )
