"""Layouts of stages on the devices of a cluster; `stage_costs` has what they cost.

    pool      devices that stages share, in the order in which stages take them
    mesh      the sizes of the axes of a stage: `data`, `fsdp`, `context`, `expert`, `tensor`
    slot      the place of one stage: a mesh, on devices of a pool
    settings  the microbatches and the checkpointing of a step, equal for all stages

All stages of a pool have the same mesh, since they are equal devices. Each has its own layers. A
pool is a cluster, or its nodes with one kind of device if it has several. If a stage has to cross
clusters, the pool is all machines.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from holmesjax.config import Checkpointing, Config, ModelConfig
from holmesjax.costs import work
from holmesjax.costs.collective_times import Group
from holmesjax.layer_specs import distinct_kinds
from holmesjax.layer_specs.kind import PARTS_DIM, TENSOR_DIMS
from holmesjax.plan.plan import Axis
from holmesjax.planner.mesh_order import (
    Paths,
    sorted_by_block,
)
from holmesjax.topology.fabrics import FABRICS
from holmesjax.topology.machines import Cluster, DeviceKind, Node, Topology

# The fewest tokens in a shard of a sequence, if the planner chooses `context`.
MIN_CONTEXT_TOKENS = 4096

# Devices of a pool up to which all sizes of `fsdp` are tried; in larger ones those that stay inside
# nodes, and that over all replicas.
MOST_FREE = 64

Devices = dict[str, tuple[int, ...]]  # node -> numbers of its devices in the topology


class MeshShape(NamedTuple):
    """Sizes of the axes of the mesh of a stage, and what is cut over them."""

    data: int
    fsdp: int
    tensor: int
    context: int = 1
    # Whether `tensor` cuts sequences between products; no bool, as it is a number beside sizes.
    sequence_parallel: int = 0
    expert: int = 1

    @property
    def num_devices(self) -> int:
        return self.batch_shards * self.tensor * self.context

    @property
    def batch_shards(self) -> int:
        """The number of shards into which the sequences of a microbatch are cut."""
        return self.data * self.fsdp * self.expert

    @property
    def sizes(self) -> dict[Axis, int]:
        """Sizes by axis. `fsdp`, `context` and `expert` of size 1 are no axes of the mesh."""
        sizes = {
            Axis.DATA: self.data,
            Axis.FSDP: self.fsdp,
            Axis.CONTEXT: self.context,
            Axis.EXPERT: self.expert,
            Axis.TENSOR: self.tensor,
        }
        always = (Axis.DATA, Axis.TENSOR)
        return {axis: n for axis, n in sizes.items() if axis in always or n > 1}


class StepSettings(NamedTuple):
    """Settings of a step that hold for all stages."""

    microbatches: int
    checkpointing: Checkpointing


class Role(NamedTuple):
    """The ends of the model that a stage holds."""

    is_first: bool = False
    is_last: bool = False


class InFlight(NamedTuple):
    """`tasks.max_in_flight` of a stage: for all its chunks, and for the last one."""

    all: float
    head: float
    chunks: int = 1
    waiting: float = 0  # `tasks.max_waiting` of all its chunks


@dataclass(frozen=True, kw_only=True, eq=False)
class Pool:
    """Devices of one cluster, or of all."""

    cluster: Cluster
    devices: Devices
    paths: Paths
    # Whether `tensor` may have devices of several nodes though the config does not set it.
    has_wide_tensor: bool = False

    @cached_property
    def num_devices(self) -> int:
        return sum(map(len, self.devices.values()))

    @cached_property
    def kinds(self) -> tuple[DeviceKind, ...]:
        """The kinds of device, each once: equal nodes cost the same."""
        return kinds_of(node for node in self.cluster.nodes if node.name in self.devices)

    @cached_property
    def memory_bytes(self) -> float:
        """The memory of the smallest device."""
        return min(kind.memory_bytes for kind in self.kinds)

    @cached_property
    def most_in_a_node(self) -> int:
        return max(map(len, self.devices.values()))

    @property
    def most_tensor(self) -> int:
        """The largest size of `tensor` that is tried if the config sets none."""
        return self.num_devices if self.has_wide_tensor else self.most_in_a_node

    def is_even(self, mesh: MeshShape) -> bool:
        """Whether all stages with a mesh are on equally many devices of equal nodes."""
        size = self.most_in_a_node
        return (
            self.paths.is_uniform
            and all(len(numbers) == size for numbers in self.devices.values())
            and (mesh.num_devices % size == 0 or size % mesh.num_devices == 0)
        )

    def is_like(self, other: "Pool") -> bool:
        """Whether stages on these nodes cost as much as on those of the other pool.

        One may have more nodes: a stage that both have room for has equal ones in both.
        """
        first, *_ = own = [pool.cluster for pool in (self, other)]
        return (
            self.paths.topology.measured is None
            and all(pool.paths.is_uniform for pool in (self, other))
            and all(
                len(numbers) == self.most_in_a_node
                for pool in (self, other)
                for numbers in pool.devices.values()
            )
            and all(cluster.fabric == first.fabric for cluster in own)
            and replace(own[0].nodes[0], name="") == replace(own[1].nodes[0], name="")
        )

    def on(self, topology: Topology) -> "Pool":
        """The same nodes, with all their devices, as other machines have them.

        Raises KeyError where there is no such node any more.
        """
        nodes = tuple(topology.node(node.name) for node in self.cluster.nodes)
        paths, numbers = Paths.between(topology, self.paths.nodes), device_numbers(topology)
        devices = {name: numbers[name] for name in self.devices}
        cluster = replace(self.cluster, nodes=nodes)
        return replace(self, cluster=cluster, devices=devices, paths=paths)

    def slots(self, mesh: MeshShape, num_stages: int) -> list[Devices]:
        """Returns the devices of each stage. If a pool has more, every stage leaves some idle.

        Stages take runs of whole nodes where each can have as many as it needs, else equal runs of
        devices. If a run crosses nodes although each stage has room inside one, they take that.
        """
        names, size = list(self.devices), mesh.num_devices
        assert num_stages * size <= self.num_devices, (mesh, num_stages, self.num_devices)
        each = len(names) // num_stages
        runs = [names[i * each : (i + 1) * each] for i in range(num_stages)]
        if each and all(sum(len(self.devices[n]) for n in run) >= size for run in runs):
            shares = [{name: self.devices[name] for name in run} for run in runs]
        else:
            slots = [(name, number) for name, numbers in self.devices.items() for number in numbers]
            each = len(slots) // num_stages
            shares = [_by_node(slots[i * each : (i + 1) * each]) for i in range(num_stages)]
        chosen = [_choose(share, mesh) for share in shares]
        if all(len(share) == 1 for share in chosen):
            return chosen
        inside = [
            {name: numbers[start : start + size]}
            for name, numbers in self.devices.items()
            for start in range(0, len(numbers) - size + 1, size)
        ]
        return inside[:num_stages] if len(inside) >= num_stages else chosen


def kinds_of(nodes: Iterator[Node]) -> tuple[DeviceKind, ...]:
    found: list[DeviceKind] = []
    for node in nodes:
        if node.device not in found:
            found.append(node.device)
    return tuple(found)


def _by_node(slots: Sequence[tuple[str, int]]) -> Devices:
    numbers: dict[str, list[int]] = {}
    for node, number in slots:
        numbers.setdefault(node, []).append(number)
    return {node: tuple(of_node) for node, of_node in numbers.items()}


def _choose(devices: Devices, mesh: MeshShape) -> Devices:
    """Chooses as many devices as the mesh has.

    If there are more, every node first gives whole replicas, then whole tensor groups, so
    that few of them cross nodes.
    """
    exchanging = mesh.expert * mesh.tensor
    part = mesh.context * exchanging
    groups = mesh.fsdp * part, part, exchanging, mesh.tensor
    sizes = set(map(len, devices.values()))
    if len(sizes) == 1 and all(size < n or size % n == 0 for size in sizes for n in groups):
        return _first_devices(devices, mesh.num_devices)  # none is left over

    @functools.cache
    def left_over(place: int, size: int) -> int:
        """Returns the number of kinds of group, whole in a node, that a device is no part of."""
        return sum(place >= size // group * group for group in groups)

    slots: list[list[tuple[str, int]]] = [[] for _ in range(len(groups) + 1)]
    for node, numbers in devices.items():
        for place, number in enumerate(numbers):
            slots[left_over(place, len(numbers))].append((node, number))
    return _by_node(list(itertools.chain(*slots))[: mesh.num_devices])


def _first_devices(devices: Devices, number: int) -> Devices:
    found: Devices = {}
    for node, numbers in devices.items():
        if number <= 0:
            break
        found[node] = numbers[:number]
        number -= len(numbers)
    return found


def make_pools(topology: Topology, by_kind: bool) -> list[Pool]:
    """The pools of all clusters; `by_kind` makes one for each kind of device of a cluster.

    Nodes that reach each other fast are neighbours, so that one stage gets them.
    """
    pools, numbers = [], device_numbers(topology)
    for cluster in topology.clusters:
        paths = Paths.between(topology, [node.name for node in cluster.nodes])
        order = [cluster.nodes[i] for i in sorted_by_block(paths, range(len(cluster.nodes)))]
        for kind in kinds_of(iter(cluster.nodes)) if by_kind else [None]:
            names = [node.name for node in order if kind in (None, node.device)]
            devices = {name: numbers[name] for name in names}
            pools.append(Pool(cluster=cluster, devices=devices, paths=paths))
    return pools


def joined_pool(topology: Topology) -> Pool:
    """All machines as if they were one cluster: only Ethernet joins all of them."""
    names = [node.name for node in topology.nodes]
    name = joined_name(topology, names)
    return Pool(
        cluster=Cluster(name=name, fabric="ethernet", nodes=topology.nodes),
        devices=device_numbers(topology),
        paths=Paths.between(topology, names),
    )


def clusters_of(topology: Topology, nodes: Sequence[str]) -> list[str]:
    """Names of the clusters in which some nodes are, each once."""
    return list(dict.fromkeys(topology.cluster_of(node).name for node in nodes))


def joined_name(topology: Topology, nodes: Sequence[str]) -> str:
    """The joined names of the clusters of some nodes: "ib", or "ib+roce"."""
    return "+".join(clusters_of(topology, nodes))


def device_numbers(topology: Topology) -> Devices:
    """Numbers of the devices of every node."""
    numbers = itertools.count()
    return {
        node.name: tuple(itertools.islice(numbers, node.num_devices)) for node in topology.nodes
    }


def has_unlike_devices(topology: Topology) -> bool:
    """Whether `by_kind` makes a difference."""
    return any(len(kinds_of(iter(cluster.nodes))) > 1 for cluster in topology.clusters)


# ---- which meshes there are ----------------------------------------------------------------------


def divisors(number: int) -> list[int]:
    """In order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def tensor_sizes(config: Config, most: int) -> list[int]:
    """Possible sizes of `tensor`: it must divide all dims that it cuts, such as heads."""
    if size := config.parallel.tensor:
        return [size]
    return [n for n in divisors(most_parts(config.model, TENSOR_DIMS)) if n <= most]


def most_parts(model: ModelConfig, dims: str) -> int:
    """The most parts into which all dims of these letters can be cut; 1 if no parameter has one."""
    sizes = {
        size
        for kind in distinct_kinds.kinds(model).in_order
        for parameter in kind.parameters
        for dim, size in zip(parameter.dims, parameter.shape, strict=True)
        if dim in dims
    }
    return math.gcd(*sizes) or 1


def context_sizes(config: Config, most: int) -> list[int]:
    """Possible sizes of `context`, which cuts sequences and parameters.

    If the planner chooses, no shard of a sequence is shorter than `MIN_CONTEXT_TOKENS`.
    """
    model, size = config.model, config.parallel.context
    if size:
        return [size] if size <= most else []
    has_capacity = model.experts is not None and model.experts.capacity_factor is not None
    if model.module is not None or has_capacity:  # layers read whole sequences
        return [1]
    longest = model.context_length // MIN_CONTEXT_TOKENS
    found = divisors(math.gcd(model.context_length // 2, model.width))
    return [n for n in found if n == 1 or n <= min(most, longest)]


def sequence_parallel_choices(config: Config, tensor: int, context: int) -> list[int]:
    """Whether sequences may be cut between products: 0, 1 or both, the plain choice first."""
    asked, model = config.kernels.sequence_parallel, config.model
    can = any(kind.cuts_sequences for kind in distinct_kinds.kinds(model).in_order)
    if not can or asked == "off" or work.sequence_cuts(model.context_length, tensor, context) == 1:
        return [0]
    return [1] if asked == "on" else [0, 1]


def meshes(config: Config, pool: Pool, settings: StepSettings) -> Iterator[MeshShape]:
    """Meshes that the pool has devices for and that give every shard whole sequences."""
    sequences, rest = divmod(config.train.global_batch, settings.microbatches)
    if rest:
        return
    cuts = [
        (tensor, context, is_cut)
        for tensor in tensor_sizes(config, pool.most_tensor)
        for context in context_sizes(config, pool.num_devices // tensor)
        for is_cut in sequence_parallel_choices(config, tensor, context)
    ]
    width = most_parts(config.model, PARTS_DIM)
    for tensor, context, is_cut in cuts:
        most = pool.num_devices // (tensor * context)
        for parts in divisors(sequences):
            if parts > most:
                break
            for expert in expert_sizes(config, pool, parts, tensor):
                others = tensor * context * expert
                for data, fsdp in _replicas(config, pool, parts // expert, others):
                    if width % (fsdp * context * expert) == 0:
                        yield MeshShape(data, fsdp, tensor, context, is_cut, expert)


def _replicas(
    config: Config, pool: Pool, parts: int, num_devices: int
) -> Iterator[tuple[int, int]]:
    """Sizes of `data` and `fsdp` where other axes have so many devices.

    `parts` are those of the sequences, over `data` and `fsdp`.
    """
    parallel = config.parallel
    for fsdp in divisors(parts):
        inside = fsdp * num_devices <= pool.most_in_a_node or fsdp == parts
        if pool.num_devices > MOST_FREE and not inside and fsdp != parallel.fsdp:
            continue
        data = parts // fsdp
        if parallel.fsdp in (None, fsdp) and parallel.data in (None, data):
            yield data, fsdp


def expert_sizes(config: Config, pool: Pool, parts: int, tensor: int) -> list[int]:
    """Possible sizes of `expert`, which cuts experts and sequences, and exchanges tokens fast."""
    experts, size = config.model.experts, config.parallel.expert
    if experts is None:
        return [1]
    wanted = [size] if size else divisors(math.gcd(experts.count, parts))
    return [n for n in wanted if parts % n == 0 and exchange_is_fast(pool, n, tensor)]


def exchange_is_fast(pool: Pool, expert: int, tensor: int) -> bool:
    """Whether so many devices can exchange tokens without a link between nodes that is slow.

    Links with RDMA are fast. Where nodes have others, each must hold whole groups.
    """
    if expert == 1 or FABRICS[pool.cluster.fabric].is_rdma:
        return True
    return all(len(numbers) % (expert * tensor) == 0 for numbers in pool.devices.values())


def exchanges_slowly(groups: Mapping[Axis, Group]) -> bool:
    """Whether devices that share experts would exchange tokens over a slow link between nodes."""
    between = groups[Axis.EXPERT].between if Axis.EXPERT in groups else None
    return between is not None and not FABRICS[between.fabric].is_rdma
