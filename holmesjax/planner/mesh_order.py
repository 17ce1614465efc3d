"""The order of devices in the mesh of a stage: the axis with most bytes gets the fastest links.

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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from holmesjax.costs import collective_times
from holmesjax.costs.collective_times import NCCL, Group, Reached
from holmesjax.topology.fabrics import Fabric
from holmesjax.topology.file import CollectiveKind
from holmesjax.topology.machines import Collective, Link, Node, Pipe, Topology

A = TypeVar("A", bound=str)  # the name of an axis


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshPlacement(Generic[A]):
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


class _Line(NamedTuple):
    """An axis of a mesh on devices that fill equal nodes one after the other.

    Its groups, and so their links, depend on nothing else.
    """

    size: int  # of the axis
    stride: int  # devices from one of a group to the next
    num_devices: int  # of the mesh, or of a part of it that is like every other part
    in_a_node: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Paths:
    """Speeds of the paths between some nodes, and between the devices of each.

    Bytes between nodes cross the network and both devices' own links; the slowest counts.
    """

    topology: Topology
    nodes: tuple[str, ...]
    s_per_byte: np.ndarray  # [N, N], symmetric; on the diagonal between devices of a node
    is_uniform: bool  # all nodes and all paths between them are equal
    # Cluster -> nodes of a group -> what was measured of its collectives: of all links of a node.
    software: Mapping[str, Mapping[int, Mapping[CollectiveKind, Reached]]]
    pipes: tuple[Pipe, ...]  # between clusters of the nodes
    # Of uniform paths: the slowest group of an axis and its seconds per byte, by `_Line`.
    lines: "dict[_Line, tuple[Group, float]]" = field(default_factory=dict)

    @classmethod
    def between(cls, topology: Topology, nodes: Sequence[str]) -> "Paths":
        """Finds the paths between nodes. Equal nodes of a cluster are looked up once."""
        kinds: list[tuple[str, Node]] = []
        kind_N = np.empty(len(nodes), int)
        for i, name in enumerate(nodes):
            kind = topology.cluster_of(name).name, replace(topology.node(name), name="")
            if kind not in kinds:
                kinds.append(kind)
            kind_N[i] = kinds.index(kind)
        cost = lambda a, b: 1.0 / topology.effective_link(a, b).bandwidth_bytes_per_s
        cost_NN = np.zeros((len(nodes), len(nodes)))
        pairs = topology.measured.pairs if topology.measured else {}
        for kinds_of_pair in itertools.product(range(len(kinds)), repeat=2):
            here, there = (np.flatnonzero(kind_N == kind).tolist() for kind in kinds_of_pair)
            names_of_pairs = ((nodes[a], nodes[b]) for a in here for b in there if a != b)
            # Those that were measured say nothing of the others.
            pair = next((pair for pair in names_of_pairs if pair not in pairs), None)
            if pair is not None:
                cost_NN[np.ix_(here, there)] = cost(*pair)
        position = {name: i for i, name in enumerate(nodes)}
        inside = [(a, b) for a, b in pairs if a in position and b in position]
        for a, b in inside:
            cost_NN[position[a], position[b]] = cost(a, b)
        own_N = np.array([cost(name, name) for name in nodes])
        ends_NN = np.maximum(own_N[:, None], own_N[None, :])
        np.fill_diagonal(cost_NN, own_N)
        names = {cluster for cluster, _ in kinds}
        return cls(
            topology=topology,
            nodes=tuple(nodes),
            s_per_byte=np.maximum(ends_NN, np.maximum(cost_NN, cost_NN.T)),
            is_uniform=len(kinds) == 1 and not inside,
            software=_software(topology, names),
            pipes=tuple(pipe for pipe in topology.pipes if any(map(names.issuperset, pipe.ways))),
        )

    def link(self, pair: tuple[int, int]) -> Link:
        a, b = pair
        return self.topology.effective_link(self.nodes[a], self.nodes[b])

    def shared_link(self, pair: tuple[int, int], num_rings: int) -> Link:
        """The share of the path between two nodes that one of `num_rings` simultaneous groups has.

        The groups share the network interfaces of a node, and each has its own devices' links.
        """
        a, b = pair
        own = [self.link((end, end)).bandwidth_bytes_per_s for end in pair]
        between = [self.link(way).bandwidth_bytes_per_s / num_rings for way in (pair, (b, a))]
        return replace(self.link(pair), bandwidth_bytes_per_s=min(*own, *between))

    def part_of_pipes(self, groups: np.ndarray) -> float:
        """Each group's share of the pipe that it has least of, while all of them send at once.

        A ring crosses a pipe as often as its clusters have ways in it that can follow each other:
        each is left once and entered once. Infinite where no group crosses one.

        Args:
          groups: positions of nodes, [groups, devices of each].
        """
        if not self.pipes:
            return math.inf
        homes = np.array([self.topology.cluster_of(name).name for name in self.nodes])[groups]
        has = {c.name: (homes == c.name).any(axis=1) for c in self.topology.clusters}
        least = math.inf
        for pipe in self.pipes:
            is_crossed = {(a, b): has[a] & has[b] for a, b in pipe.ways}  # [groups] each
            sources, targets = (
                np.sum(
                    [
                        np.any([is_crossed[way] for way in pipe.ways if way[end] == name], axis=0)
                        for name in {way[end] for way in pipe.ways}
                    ],
                    axis=0,
                )
                for end in (0, 1)
            )
            if crossing := int(np.minimum(sources, targets).sum()):
                least = min(least, pipe.reached_bytes_per_s / crossing)
        return least

    def shared_software(
        self, pair: tuple[int, int], num_nodes: int, num_rings: int
    ) -> Mapping[CollectiveKind, Reached]:
        """The speeds that one of `num_rings` groups of nodes reaches; NCCL's if not measured.

        Two nodes of a group say in which cluster. If only groups of other sizes were measured, the
        next larger counts, or else the largest.
        """
        here, there = (self.topology.cluster_of(self.nodes[end]).name for end in pair)
        if here != there or here not in self.software:
            return NCCL
        share = lambda own: replace(
            own, bandwidth_bytes_per_s=own.bandwidth_bytes_per_s / num_rings
        )
        by_size = self.software[here]
        size = min((size for size in by_size if size >= num_nodes), default=max(by_size))
        return {kind: share(measured) for kind, measured in by_size[size].items()}


def _software(
    topology: Topology, names: Collection[str]
) -> dict[str, dict[int, Mapping[CollectiveKind, Reached]]]:
    """Measured speeds of collectives in each of some clusters, by the number of nodes."""
    measured: dict[str, dict[int, list[Collective]]] = {}
    for collective in topology.measured.collectives if topology.measured else ():
        if collective.cluster in names:
            of_cluster = measured.setdefault(collective.cluster, {})
            of_cluster.setdefault(collective.num_nodes, []).append(collective)
    found: dict[str, dict[int, Mapping[CollectiveKind, Reached]]] = {}
    for cluster in topology.clusters:
        if by_size := measured.get(cluster.name):
            link = topology.effective_link(*(node.name for node in cluster.nodes[:2]))
            step_s = collective_times.hop_s(link)
            found[cluster.name] = {n: collective_times.reached(by_size[n], step_s) for n in by_size}
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrangement(Generic[A]):
    """The devices of a stage in a mesh with its axes in one order."""

    sizes: dict[A, int]  # in that order
    devices: tuple[int, ...]
    groups: dict[A, Group]
    s_per_byte: dict[A, float]  # of the slowest pair of any group; none for size 1

    def price_s(self, traffic_bytes: Mapping[A, float]) -> float:
        return sum(traffic_bytes[axis] * cost for axis, cost in self.s_per_byte.items())


def arrangements(
    paths: Paths, devices: Mapping[str, Sequence[int]], sizes: Mapping[A, int]
) -> list[Arrangement[A]]:
    """Every order of the axes, the given one first; those of size 1 make no difference.

    Args: as in `place`.
    """
    assert math.prod(sizes.values()) == sum(map(len, devices.values())), (sizes, devices)
    position = {name: i for i, name in enumerate(paths.nodes)}
    nodes = sorted_by_block(paths, [position[name] for name in devices])
    numbers = tuple(number for node in nodes for number in devices[paths.nodes[node]])
    counts = [len(devices[paths.nodes[node]]) for node in nodes]
    fills = all(count == counts[0] for count in counts[:-1]) and counts[-1] <= counts[0]
    seats = None if paths.is_uniform and fills else np.repeat(nodes, counts)
    found: dict[tuple[A, ...], Arrangement[A]] = {}
    for axes in itertools.permutations(sizes):
        long = tuple(axis for axis in axes if sizes[axis] > 1)
        if long in found:
            continue
        in_order = {axis: sizes[axis] for axis in axes}
        if seats is None:
            lines = _lines(paths, in_order, counts[0])
        else:
            lines = {axis: _slowest(paths, _groups(seats, in_order, axis)) for axis in long}
        found[long] = Arrangement(
            sizes=in_order,
            devices=numbers,
            groups={axis: lines[axis][0] for axis in long},
            s_per_byte={axis: lines[axis][1] for axis in sizes if axis in lines},
        )
    return list(found.values())


def _lines(paths: Paths, sizes: Mapping[A, int], in_a_node: int) -> dict[A, tuple[Group, float]]:
    """`_slowest` of each axis longer than 1, on devices that fill equal nodes; worked out once."""
    num_devices = stride = math.prod(sizes.values())
    found = {}
    for axis, size in sizes.items():
        block, stride = stride, stride // size
        if size == 1:
            continue
        # Blocks that fill whole nodes are all alike, and so are those inside a node.
        is_like = block % in_a_node == 0 or in_a_node % block == 0
        line = _Line(size, stride, block if is_like else num_devices, in_a_node)
        if line not in paths.lines:
            seats = np.arange(line.num_devices) // in_a_node
            groups = np.sort(seats.reshape(-1, size, stride).swapaxes(1, 2).reshape(-1, size))
            paths.lines[line] = _slowest(paths, groups)
        found[axis] = paths.lines[line]
    return found


def _slowest(paths: Paths, groups: np.ndarray) -> tuple[Group, float]:
    """The slowest group of an axis, and the seconds per byte of the slowest pair of any group."""
    pairs = _slowest_pairs(paths, groups)
    s_per_byte = max(float(paths.s_per_byte[pair]) for pair in pairs)
    return _group(paths, groups, pairs), s_per_byte


def cheapest(
    arranged: Sequence[Arrangement[A]], traffic_bytes: Mapping[A, float]
) -> MeshPlacement[A]:
    """The first of the arrangements with the least price."""
    best = min(arranged, key=lambda arrangement: arrangement.price_s(traffic_bytes))
    return MeshPlacement(
        sizes=best.sizes,
        devices=best.devices,
        groups=best.groups,
        price_s=best.price_s(traffic_bytes),
    )


def place(
    paths: Paths,
    devices: Mapping[str, Sequence[int]],
    sizes: Mapping[A, int],
    traffic_bytes: Mapping[A, float],
) -> MeshPlacement[A]:
    """The cheapest placement of a stage's devices in its mesh.

    Args:
      paths: of nodes, those of the stage among them.
      devices: node -> the numbers of its devices that the stage uses.
      sizes: axis -> size; their product is the number of devices. The axes come in the order that
        is kept where prices are equal, slowest link first.
      traffic_bytes: axis -> bytes that each device moves along it in a step.
    """
    return cheapest(arrangements(paths, devices, sizes), traffic_bytes)


def sorted_by_block(paths: Paths, nodes: Sequence[int]) -> list[int]:
    """Sorts positions so that nodes within any limit of each other are a run; else as given."""
    nodes = list(nodes)
    if paths.is_uniform:
        return nodes
    between = paths.s_per_byte[np.ix_(nodes, nodes)][~np.eye(len(nodes), dtype=bool)]
    for limit in np.unique(between):  # a stable sort by the coarsest blocks last
        blocks = _blocks(nodes, paths.s_per_byte, limit)
        nodes = [node for block in blocks for node in block]
    return nodes


def _blocks(nodes: Sequence[int], s_per_byte: np.ndarray, limit: float) -> list[list[int]]:
    """Nodes joined by paths within the limit; blocks in the order of their first nodes."""
    blocks: list[list[int]] = []
    for node in nodes:
        near = [block for block in blocks if (s_per_byte[node, block] <= limit).any()]
        if not near:
            blocks.append([node])
            continue
        near[0].extend([*itertools.chain(*near[1:]), node])
        blocks = [block for block in blocks if block not in near[1:]]
    return blocks


def _groups(seats: np.ndarray, sizes: Mapping[A, int], axis: A) -> np.ndarray:
    """The nodes of every group of an axis, [groups, devices of each], each group sorted.

    `seats` are the nodes of the devices, row-major.
    """
    mesh = seats.reshape(tuple(sizes.values()))
    lines = np.moveaxis(mesh, list(sizes).index(axis), -1)
    return np.sort(lines.reshape(-1, sizes[axis]), axis=1)


def _slowest_pairs(paths: Paths, groups: np.ndarray) -> list[tuple[int, int]]:
    """The node (twice) with the slowest devices of a group of an axis, and the two farthest nodes.

    Either is left out where no group has two devices in a node, or devices on two nodes. The last
    of equally slow pairs counts.
    """
    if paths.is_uniform:  # so any pair is as slow as the others
        repeats = (groups[:, 1:] == groups[:, :-1]).any(axis=1)
        crosses = groups[:, 0] != groups[:, -1]
        groups = groups[[np.argmax(repeats), np.argmax(crosses)]]
    else:
        groups = np.unique(groups, axis=0)
    inside = groups[:, 1:][groups[:, 1:] == groups[:, :-1]]
    pairs = {(node, node) for node in inside.tolist()}
    between = set()
    for group in groups[groups[:, 0] != groups[:, -1]]:
        nodes = np.unique(group)
        cost = np.triu(paths.s_per_byte[np.ix_(nodes, nodes)], 1)
        a, b = np.unravel_index(np.argmax(cost), cost.shape)
        between.add((int(nodes[a]), int(nodes[b])))
    key = lambda pair: (paths.s_per_byte[pair], pair)
    return [max(candidates, key=key) for candidates in (pairs, between) if candidates]


def _group(paths: Paths, groups: np.ndarray, pairs: Sequence[tuple[int, int]]) -> Group:
    """The slowest group of an axis: on as many nodes as any, over the slowest of all links."""
    first_of_node = np.ones(groups.shape, bool)
    first_of_node[:, 1:] = groups[:, 1:] != groups[:, :-1]
    leaving = np.bincount(groups[first_of_node & (groups[:, :1] != groups[:, -1:])])
    num_rings = max(1, int(np.max(leaving, initial=0)))  # most groups that leave any one node
    across = next((pair for pair in pairs if pair[0] != pair[1]), None)
    nodes = int(first_of_node.sum(axis=1).max())
    between = paths.shared_link(across, num_rings) if across else None
    if between and (part := paths.part_of_pipes(groups)) < between.bandwidth_bytes_per_s:
        between = replace(between, bandwidth_bytes_per_s=part)
    return Group(
        size=groups.shape[1],
        nodes=nodes,
        inside=next((paths.link((a, b)) for a, b in pairs if a == b), None),
        between=between,
        software=paths.shared_software(across, nodes, num_rings) if across else NCCL,
    )
