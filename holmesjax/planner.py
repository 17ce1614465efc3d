"""Topology + config -> plan: which devices hold which layers, and how long a step takes.

    candidate   how many stages each cluster holds; the planner tries them all
    site        the devices of one stage, as a mesh

Each candidate gets the layer split whose slowest stage is fastest, compute and network counted; the
candidate with the shortest simulated step wins. Stages follow the order of clusters and nodes in
the topology.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from holmesjax import costs, memory
from holmesjax.config import Config
from holmesjax.errors import PlanError
from holmesjax.mapper import Placement, place
from holmesjax.plan import EMBED, HEAD, Axis, Plan, StagePlan, block_name
from holmesjax.schedule import Task, max_in_flight, schedule, simulate
from holmesjax.stage_times import StageTimes, stage_times
from holmesjax.topology import Cluster, DeviceKind, Link, Topology
from holmesjax.units import show

# Share of a device's memory that a plan may fill; the rest is for temporaries inside a layer,
# collectives' buffers and the runtime.
USABLE_MEMORY = 0.9

CHECKPOINTING: tuple[costs.Checkpointing, ...] = ("none", "dots", "full")  # the last keeps least


def make_plan(config: Config, topology: Topology) -> Plan:
    """The fastest plan by prediction.

    Raises:
      PlanError: no plan satisfies the config on these machines; says what to change.
    """
    plans, errors = [], []
    for counts in _stage_counts(config, topology):
        try:
            plans.append(_plan_candidate(config, topology, counts))
        except PlanError as error:
            errors.append(error)
    if not plans:
        raise errors[0]
    return min(plans, key=lambda plan: plan.step_time_s)


def split_layers(
    num_layers: int, seconds: Sequence[Callable[[int], float]], least: int = 1
) -> tuple[int, ...]:
    """Layers of each stage, at least `least`, so that the slowest stage is as fast as can be.

    `seconds[i](n)` is the time of stage i with n layers, and never falls with n. So giving each
    next layer to the stage that is fastest with it is optimal: whichever stage ends up slowest, any
    other split gives some stage at least as many layers as that one. Of equally fast stages the
    last takes the layer, since it holds the fewest microbatches in flight.

    >>> split_layers(8, [lambda n: n / 3, lambda n: n / 1])
    (6, 2)
    """
    layers = [least] * len(seconds)
    assert num_layers >= sum(layers), f"{num_layers} layers cannot fill {len(seconds)} stages"
    for _ in range(num_layers - sum(layers)):
        stage = min(range(len(seconds)), key=lambda s: (seconds[s](layers[s] + 1), -s))
        layers[stage] += 1
    assert sum(layers) == num_layers, f"{layers} drops layers of {num_layers}"
    return tuple(layers)


def split_chunks(num_layers: int, num_chunks: int) -> tuple[int, ...]:
    """Layers of each chunk of a stage: equal, or one more in the first ones.

    >>> split_chunks(5, 2)
    (3, 2)
    """
    each, rest = divmod(num_layers, num_chunks)
    return tuple(each + (chunk < rest) for chunk in range(num_chunks))


def choose_in_flight(
    num_stages: int, microbatches: int, step_s: Callable[[tuple[int, ...]], float]
) -> tuple[int, ...]:
    """Microbatches in flight on each stage of eager 1F1B, so that transfers overlap with work.

    One more for a link is one more on every stage before it. Starting from 1F1B, each link in turn
    gets more for as long as that makes the step shorter; `step_s` is infinite for what memory does
    not hold. Depths that grow towards the end of the pipeline would deadlock, and are never tried.

    >>> choose_in_flight(2, 8, lambda in_flight: 9 - min(in_flight[0], 5))
    (5, 1)
    """
    extra = [0] * (num_stages - 1)

    def in_flight() -> tuple[int, ...]:
        ahead = [num_stages - stage + sum(extra[stage:]) for stage in range(num_stages)]
        return tuple(min(number, microbatches) for number in ahead)

    best_s = step_s(best := in_flight())
    for link in range(len(extra)):
        extra[link] += 1
        while (shorter_s := step_s(deeper := in_flight())) < best_s:
            best, best_s = deeper, shorter_s
            extra[link] += 1
        extra[link] -= 1
    return best


# ---- candidates: which devices each stage gets ---------------------------------------------------

Devices = dict[str, tuple[int, ...]]  # node -> numbers of its devices in the topology


@dataclass(frozen=True, kw_only=True, slots=True)
class _Site:
    """Where one stage runs."""

    index: int
    num_stages: int
    cluster: str
    kinds: tuple[DeviceKind, ...]  # of the nodes, each once
    nodes: tuple[str, ...]
    placement: Placement[Axis]
    tasks: tuple[Task, ...]  # of a step, in order

    def shape(self, config: Config, num_blocks: int) -> costs.StageShape:
        data = self.placement.sizes[Axis.DATA]
        fsdp, microbatches = config.parallel.fsdp, config.parallel.microbatches
        chunks = split_chunks(num_blocks, config.parallel.chunks)
        return costs.StageShape(
            num_blocks=num_blocks,
            is_first=self.index == 0,
            is_last=self.index == self.num_stages - 1,
            data=data,
            tensor=self.placement.sizes[Axis.TENSOR],
            fsdp=fsdp,
            sequences=config.train.global_batch // (microbatches * data * fsdp),
            chunks=len(chunks),
            in_flight=max_in_flight(self.tasks, [n / num_blocks for n in chunks]),
            head_in_flight=max_in_flight(self.tasks, [0] * (len(chunks) - 1) + [1]),
            dtype=config.train.compute_dtype,
            checkpointing=config.parallel.activation_checkpointing,
        )

    def times(self, config: Config, num_blocks: int) -> StageTimes:
        return self._times(config, self.shape(config, num_blocks))

    def chunk_times(self, config: Config, num_blocks: int) -> list[StageTimes]:
        """Of each chunk by itself."""
        stage, num_chunks = self.shape(config, num_blocks), config.parallel.chunks
        shapes = [
            dataclasses.replace(
                stage,
                num_blocks=n,
                is_first=stage.is_first and chunk == 0,
                is_last=stage.is_last and chunk == num_chunks - 1,
            )
            for chunk, n in enumerate(split_chunks(num_blocks, num_chunks))
        ]
        return [self._times(config, shape) for shape in shapes]

    def _times(self, config: Config, shape: costs.StageShape) -> StageTimes:
        group = self.placement.groups.get
        return stage_times(
            config.model,
            shape,
            self.kinds,
            data=group(Axis.DATA),
            tensor=group(Axis.TENSOR),
            fsdp=group(Axis.FSDP),
        )

    @property
    def usable_bytes(self) -> float:
        return USABLE_MEMORY * min(kind.memory_bytes for kind in self.kinds)


def _stage_counts(config: Config, topology: Topology) -> Iterator[tuple[int, ...]]:
    """Stages of every cluster, in all ways; a cluster with none stays idle."""
    num_clusters = len(topology.clusters)
    num_stages = config.parallel.stages or len(config.parallel.layers or topology.clusters)
    _refuse_number_of_stages(config, topology, num_stages)
    num_used = min(num_stages, num_clusters)
    for used in itertools.combinations(range(num_clusters), num_used):
        for cuts in itertools.combinations(range(1, num_stages), num_used - 1):
            counts = [0] * num_clusters
            for cluster, start, stop in zip(used, (0, *cuts), (*cuts, num_stages), strict=True):
                counts[cluster] = stop - start
            yield tuple(counts)


def _sites(config: Config, topology: Topology, counts: Sequence[int]) -> list[_Site]:
    """The devices and the mesh of every stage."""
    parallel = config.parallel
    numbers = itertools.count()
    chosen: list[tuple[Cluster, Devices]] = []
    for cluster, count in zip(topology.clusters, counts, strict=True):
        devices = {n.name: tuple(itertools.islice(numbers, n.num_devices)) for n in cluster.nodes}
        for share in _equal_shares(cluster, devices, count):
            chosen.append((cluster, _choose(config, cluster, share, len(chosen))))
    group = parallel.fsdp * parallel.tensor
    replicas = [sum(map(len, devices.values())) // group for _, devices in chosen]
    _refuse_uneven_batch(config, replicas)
    tasks = _tasks(config, len(chosen))
    sites = []
    for i, (cluster, devices) in enumerate(chosen):
        sizes = {Axis.DATA: replicas[i], Axis.FSDP: parallel.fsdp, Axis.TENSOR: parallel.tensor}
        if parallel.fsdp == 1:
            del sizes[Axis.FSDP]
        traffic_bytes = _traffic_bytes(config, sizes, len(chosen))
        sites.append(
            _Site(
                index=i,
                num_stages=len(chosen),
                cluster=cluster.name,
                kinds=_kinds(node.device for node in cluster.nodes if node.name in devices),
                nodes=tuple(devices),
                placement=place(topology, devices, sizes, traffic_bytes),
                tasks=tasks[i],
            )
        )
    return sites


def _kinds(devices: Iterable[DeviceKind]) -> tuple[DeviceKind, ...]:
    """Each once: equal nodes cost the same, and a cluster has many."""
    found: list[DeviceKind] = []
    for device in devices:
        if device not in found:
            found.append(device)
    return tuple(found)


def _tasks(
    config: Config, num_stages: int, in_flight: Sequence[int] = ()
) -> tuple[tuple[Task, ...], ...]:
    """The tasks of all stages; eager 1F1B without numbers in flight starts from those of 1F1B."""
    parallel = config.parallel
    if parallel.schedule == "eager_1f1b":
        in_flight = in_flight or range(num_stages, 0, -1)
    return schedule(
        parallel.schedule,
        num_stages,
        parallel.microbatches,
        num_chunks=parallel.chunks,
        in_flight=in_flight,
    )


def _equal_shares(cluster: Cluster, devices: Devices, count: int) -> list[Devices]:
    """A cluster's devices, in order, cut into equal runs for its stages."""
    if count == 0:
        return []
    seats = [(node, number) for node, numbers in devices.items() for number in numbers]
    if len(seats) % count:
        fits = [str(n) for n in range(1, len(seats) + 1) if len(seats) % n == 0]
        raise PlanError(
            "parallel.stages",
            f"the {len(seats)} devices of cluster {cluster.name!r} cannot be shared equally: "
            f"{len(seats)} / {count} stages leaves {len(seats) % count}",
            found=f"{count} stages in cluster {cluster.name!r}",
            fix=f"choose parallel.stages so that it holds {', '.join(fits)} of them",
        )
    size = len(seats) // count
    return [_by_node(seats[i : i + size]) for i in range(0, len(seats), size)]


def _by_node(seats: Sequence[tuple[str, int]]) -> Devices:
    nodes = dict.fromkeys(node for node, _ in seats)
    return {node: tuple(number for other, number in seats if other == node) for node in nodes}


def _choose(config: Config, cluster: Cluster, devices: Devices, stage: int) -> Devices:
    """The devices that a stage uses: all of them, or those of `parallel.data` replicas.

    Of more than are needed, every node first gives whole replicas, then whole tensor groups, so
    that few of them cross nodes.
    """
    tensor, fsdp, data = config.parallel.tensor, config.parallel.fsdp, config.parallel.data
    num_devices, replica = sum(map(len, devices.values())), fsdp * tensor
    holds = f"stage {stage} has {num_devices} devices of cluster {cluster.name!r}"
    names, sizes = "parallel.tensor", f"{tensor}"
    if fsdp > 1:
        names, sizes = f"parallel.fsdp * {names}", f"{fsdp} * {sizes}"
    if num_devices % replica and data is None:
        fits = [str(n) for n in range(1, num_devices + 1) if num_devices % (n * fsdp) == 0]
        equals = f"{sizes} = {replica}" if fsdp > 1 else sizes
        use = f"use parallel.tensor={' or '.join(fits)}" if fits else "change parallel.fsdp"
        raise PlanError(
            "parallel.tensor",
            f"{holds}, which are no multiple of {names} = {equals}",
            found=f"{num_devices} / {replica} leaves {num_devices % replica}",
            fix=f"{use}, or set parallel.data to leave some idle",
        )
    if data is None or data * replica == num_devices:
        return devices
    if data * replica > num_devices:
        most = num_devices // replica
        smaller = (
            "use a smaller parallel.fsdp" if fsdp > 1 else f"use parallel.tensor={num_devices}"
        )
        raise PlanError(
            "parallel.data",
            f"{holds}, and parallel.data * {names} needs {data * replica}",
            found=f"{data} * {sizes} = {data * replica}",
            fix=f"use parallel.data={most} or less" if most else smaller,
        )
    seats = [(node, number) for node, numbers in devices.items() for number in numbers]

    def left_over(seat: tuple[str, int]) -> int:
        """How many kinds of whole group the device is no part of."""
        numbers = devices[seat[0]]
        place = numbers.index(seat[1])
        return sum(place >= len(numbers) // size * size for size in (replica, tensor))

    return _by_node(sorted(seats, key=left_over)[: data * replica])


def _traffic_bytes(config: Config, sizes: Mapping[Axis, int], num_stages: int) -> dict[Axis, float]:
    """Bytes that a device sends along each axis in a step, for a stage of average length."""
    model, parallel, dtype = config.model, config.parallel, config.train.compute_dtype
    num_blocks, width = model.num_layers / num_stages, costs.DTYPE_BYTES[dtype]
    sent = {axis: (size - 1) / size for axis, size in sizes.items()}  # of a ring reduce-scatter
    num_parameters = num_blocks * costs.block_parameters(model, parallel.tensor)
    parts = sizes[Axis.DATA] * parallel.fsdp
    num_tokens = config.train.global_batch // parts * model.context_length
    summed = costs.boundary_bytes(model, num_tokens, dtype)
    num_sums = num_blocks * costs.block_all_reduces(parallel.activation_checkpointing)
    return {
        Axis.DATA: sent[Axis.DATA] * (4 + width) * num_parameters / parallel.fsdp,
        # Of each microbatch: parameters gathered in both passes, gradients scattered in one.
        Axis.FSDP: sent.get(Axis.FSDP, 0.0) * 3 * width * num_parameters * parallel.microbatches,
        Axis.TENSOR: sent[Axis.TENSOR] * 2 * summed * num_sums,
    }


# ---- one candidate: its split and its times ------------------------------------------------------


def _plan_candidate(config: Config, topology: Topology, counts: Sequence[int]) -> Plan:
    model, parallel = config.model, config.parallel
    sites = _sites(config, topology, counts)
    num_tokens = config.train.global_batch // parallel.microbatches * model.context_length
    boundary = costs.boundary_bytes(model, num_tokens, config.train.compute_dtype)
    transfer_s = _transfer_times(config, topology, sites, boundary)
    sends_s = _send_times(config, transfer_s, len(sites))
    num_blocks = parallel.layers or _split(config, sites, sends_s)
    for site, n in zip(sites, num_blocks, strict=True):
        _refuse_full_memory(config, site, n)
    in_flight = _in_flight(config, sites, num_blocks, transfer_s)
    sites = _with_in_flight(config, sites, in_flight)
    times = [site.times(config, n) for site, n in zip(sites, num_blocks, strict=True)]
    table_s = _table_times(config, topology, sites)
    step_time_s, shares = _step_time(config, sites, num_blocks, transfer_s, sum(table_s))
    chunks = _chunks(num_blocks, parallel.chunks)
    seconds = [
        _part_seconds(config, t) | {"boundary": parallel.microbatches * sent_s + tied_s}
        for t, sent_s, tied_s in zip(times, sends_s, table_s, strict=True)
    ]
    stages = tuple(
        StagePlan(
            cluster=site.cluster,
            nodes=site.nodes,
            chunks=chunks[i],
            devices=site.placement.devices,
            mesh=site.placement.sizes,
            fabrics=dict(site.placement.fabrics),
            memory_bytes=_memory_bytes(config, site, num_blocks[i]),
            seconds=seconds[i],
        )
        for i, site in enumerate(sites)
    )
    assert sum(stage.num_blocks for stage in stages) == model.num_layers, "layers were dropped"
    return Plan(
        topology=topology.name,
        topology_hash=topology.hash(),
        stages=stages,
        idle=_idle(topology, sites),
        global_batch=config.train.global_batch,
        microbatches=parallel.microbatches,
        schedule=parallel.schedule,
        in_flight=in_flight,
        activation_checkpointing=parallel.activation_checkpointing,
        boundary_bytes=boundary if len(sites) > 1 else 0.0,
        step_time_s=step_time_s,
        shares=shares,
    )


def _link(topology: Topology, source: _Site, target: _Site) -> Link:
    """The slowest link from a node of one stage to a node of the other."""
    links = (topology.effective_link(a, b) for a in source.nodes for b in target.nodes)
    return min(links, key=lambda link: link.bandwidth_bytes_per_s)


def _transfer_s(topology: Topology, source: _Site, target: _Site, num_bytes: float) -> float:
    """Seconds in which an array goes from one stage to another.

    Each node of the smaller stage sends, or receives, an equal part of it at once (`routes`).
    """
    num_pairs = min(len(source.nodes), len(target.nodes))
    return _link(topology, source, target).time_s(num_bytes / num_pairs)


def _transfer_times(
    config: Config, topology: Topology, sites: Sequence[_Site], boundary: float
) -> list[tuple[float, float]]:
    """Seconds to the next stage and back, of each stage but the last; of it too with chunks."""
    time_s = lambda a, b: _transfer_s(topology, a, b, boundary)
    pairs = list(itertools.pairwise(sites))
    if config.parallel.chunks > 1:
        pairs.append((sites[-1], sites[0]))
    return [(time_s(a, b), time_s(b, a)) for a, b in pairs]


def _send_times(
    config: Config, transfer_s: Sequence[tuple[float, float]], num_stages: int
) -> list[float]:
    """Seconds in which each stage sends boundaries, both ways, per microbatch."""
    sends_s = [0.0] * num_stages
    for virtual in range(config.parallel.chunks * num_stages - 1):
        stage, after = virtual % num_stages, (virtual + 1) % num_stages
        there_s, back_s = transfer_s[stage]
        sends_s[stage] += there_s
        sends_s[after] += back_s
    return sends_s


def _chunks(num_blocks: Sequence[int], num_chunks: int) -> list[tuple[tuple[str, ...], ...]]:
    """The layers of each stage, by chunk; model order goes through all stages chunk by chunk.

    >>> _chunks([2, 2], 2)
    [(('embed', 'block_000'), ('block_002',)), (('block_001',), ('block_003', 'head'))]
    """
    shares = [split_chunks(n, num_chunks) for n in num_blocks]
    names = iter(map(block_name, range(sum(num_blocks))))
    take = lambda n: tuple(itertools.islice(names, n))
    in_order = [[take(share[chunk]) for share in shares] for chunk in range(num_chunks)]
    in_order[0][0] = (EMBED, *in_order[0][0])
    in_order[-1][-1] = (*in_order[-1][-1], HEAD)
    return list(zip(*in_order, strict=True))


def _table_times(config: Config, topology: Topology, sites: Sequence[_Site]) -> list[float]:
    """Seconds each stage sends the token table of tied embeddings in a step.

    The last stage sends its gradient of the table to the first; the first, the sum of both back.
    """
    table_s = [0.0] * len(sites)
    if config.model.tied_embeddings and len(sites) > 1:
        table_bytes = 4 * costs.table_parameters(config.model)
        table_s[0] = _transfer_s(topology, sites[0], sites[-1], table_bytes)
        table_s[-1] = _transfer_s(topology, sites[-1], sites[0], table_bytes)
    return table_s


def _split(config: Config, sites: Sequence[_Site], sends_s: Sequence[float]) -> tuple[int, ...]:
    """The layers of each stage by speed, inside its memory where that is possible at all."""

    def seconds(site: _Site, num_blocks: int) -> float:
        times = site.times(config, num_blocks)
        once_s = times.once_s / config.parallel.microbatches
        return times.microbatch_s + once_s + sends_s[site.index]

    def seconds_in_memory(site: _Site, num_blocks: int) -> float:
        return seconds(site, num_blocks) if _fits(config, site, num_blocks) else math.inf

    num_layers = config.model.num_layers
    chunks = config.parallel.chunks
    layers = split_layers(num_layers, [partial(seconds_in_memory, site) for site in sites], chunks)
    if math.inf in map(seconds_in_memory, sites, layers):
        return split_layers(num_layers, [partial(seconds, site) for site in sites], chunks)
    return layers


def _memory_bytes(config: Config, site: _Site, num_blocks: int) -> dict[str, float]:
    return memory.stage_memory_bytes(config.model, site.shape(config, num_blocks))


def _part_seconds(config: Config, times: StageTimes) -> dict[str, float]:
    """Seconds of a stage in a step, by what they go into; `fsdp` where it is used."""
    microbatches = config.parallel.microbatches
    fsdp_s = microbatches * (times.forward_fsdp_s + times.backward_fsdp_s)
    return {
        "compute": microbatches * (times.forward_s + times.backward_s) + times.update_s,
        "tensor": microbatches * (times.forward_tensor_s + times.backward_tensor_s),
        **({"fsdp": fsdp_s} if config.parallel.fsdp > 1 else {}),
        "data": times.reduce_s + times.gather_s,
    }


def _fits(config: Config, site: _Site, num_blocks: int) -> bool:
    return sum(_memory_bytes(config, site, num_blocks).values()) <= site.usable_bytes


def _in_flight(
    config: Config,
    sites: Sequence[_Site],
    num_blocks: Sequence[int],
    transfer_s: Sequence[tuple[float, float]],
) -> tuple[int, ...]:
    """What eager 1F1B keeps in flight on each stage, inside its memory; nothing for the others."""

    def step_s(in_flight: tuple[int, ...]) -> float:
        deeper = _with_in_flight(config, sites, in_flight)
        fits = all(_fits(config, site, n) for site, n in zip(deeper, num_blocks, strict=True))
        return _step_s(config, deeper, num_blocks, transfer_s) if fits else math.inf

    if config.parallel.schedule != "eager_1f1b":
        return ()
    return choose_in_flight(len(sites), config.parallel.microbatches, step_s)


def _with_in_flight(
    config: Config, sites: Sequence[_Site], in_flight: Sequence[int]
) -> list[_Site]:
    tasks = _tasks(config, len(sites), in_flight)
    return [dataclasses.replace(site, tasks=t) for site, t in zip(sites, tasks, strict=True)]


def _step_s(
    config: Config,
    sites: Sequence[_Site],
    num_blocks: Sequence[int],
    transfer_s: Sequence[tuple[float, float]],
) -> float:
    """Predicted seconds of a step, less the exchange of a tied token table.

    Every stage reduces its gradients after its last task. All wait for the norm of the whole
    gradient; then each updates and gathers its parameters.
    """
    times = [site.times(config, n) for site, n in zip(sites, num_blocks, strict=True)]
    chunks = [site.chunk_times(config, n) for site, n in zip(sites, num_blocks, strict=True)]
    virtual = list(itertools.chain(*zip(*chunks, strict=True)))  # in model order
    is_split = config.parallel.schedule == "zero_bubble"
    simulation = simulate(
        [site.tasks for site in sites],
        [t.whole_forward_s for t in virtual],
        [t.whole_backward_s - is_split * t.weight_s for t in virtual],
        transfer_s,
        weight_s=[t.weight_s for t in virtual],
    )
    reduced_s = max(simulation.finish_s(i) + t.reduce_s for i, t in enumerate(times))
    return reduced_s + max(t.update_s + t.gather_s for t in times)


def _step_time(
    config: Config,
    sites: Sequence[_Site],
    num_blocks: Sequence[int],
    transfer_s: Sequence[tuple[float, float]],
    table_s: float,
) -> tuple[float, dict[str, float]]:
    """Predicted seconds of a step, and the shares of its parts, averaged over stages.

    `boundary` is what a step would be shorter if transfers took no time; `bubble` is the rest of
    the time without work.
    """
    times = [site.times(config, n) for site, n in zip(sites, num_blocks, strict=True)]
    num_stages = len(sites)
    step_time_s = _step_s(config, sites, num_blocks, transfer_s) + table_s
    no_time = [(0.0, 0.0)] * len(transfer_s)
    parts = [_part_seconds(config, t) for t in times]
    shares = {
        name: sum(part[name] for part in parts) / num_stages / step_time_s for name in parts[0]
    }
    shares["boundary"] = 1.0 - _step_s(config, sites, num_blocks, no_time) / step_time_s
    shares["bubble"] = max(0.0, 1.0 - sum(shares.values()))
    return step_time_s, shares


def _idle(topology: Topology, sites: Sequence[_Site]) -> dict[str, int]:
    """Devices of each node that no stage uses; nodes without any are left out."""
    used = {device for site in sites for device in site.placement.devices}
    numbers = itertools.count()
    idle = {
        node.name: sum(next(numbers) not in used for _ in range(node.num_devices))
        for node in topology.nodes
    }
    return {node: num_devices for node, num_devices in idle.items() if num_devices}


# ---- refusals ------------------------------------------------------------------------------------


def _refuse_number_of_stages(config: Config, topology: Topology, num_stages: int) -> None:
    num_clusters, num_layers = len(topology.clusters), config.model.num_layers
    limits = (num_layers, "layers of the model"), (topology.num_devices, "devices of the topology")
    most, of = min(limits)
    if num_stages > most:
        why = "" if config.parallel.stages else f", one for each of {num_clusters} clusters"
        raise PlanError(
            "parallel.stages",
            f"must be at most {most}, the number of {of}",
            found=f"{num_stages} stages{why}",
            fix=f"set parallel.stages to {most} or less; clusters without a stage stay idle",
        )
    if config.parallel.chunks > 1:
        _refuse_interleaving(config, num_stages)


def _refuse_interleaving(config: Config, num_stages: int) -> None:
    parallel, num_layers = config.parallel, config.model.num_layers
    if num_stages * parallel.chunks > num_layers:
        most = num_layers // num_stages
        raise PlanError(
            "parallel.chunks",
            f"chunks * stages must be at most the number of layers, {num_layers}",
            found=f"{parallel.chunks} * {num_stages} = {parallel.chunks * num_stages}",
            fix=f"set parallel.chunks to {most} or less" if most > 1 else "use fewer stages",
        )
    if num_stages == 1:
        raise PlanError(
            "parallel.schedule",
            "interleaved_1f1b needs two stages or more",
            found="1 stage",
            fix="set parallel.stages to 2 or more, or parallel.schedule to 1f1b",
        )
    if parallel.microbatches % num_stages:
        below = parallel.microbatches // num_stages * num_stages
        values = f"{below} or {below + num_stages}" if below else f"{num_stages}"
        raise PlanError(
            "parallel.microbatches",
            f"must be a multiple of the number of stages, {num_stages}, for interleaved_1f1b",
            found=f"{parallel.microbatches} / {num_stages} leaves "
            f"{parallel.microbatches % num_stages}",
            fix=f"use parallel.microbatches={values}, or set parallel.schedule to 1f1b",
        )


def _refuse_uneven_batch(config: Config, replicas: Sequence[int]) -> None:
    """Every part of every stage must get the same number of sequences in every microbatch."""
    global_batch, microbatches = config.train.global_batch, config.parallel.microbatches
    fsdp = config.parallel.fsdp
    parts = microbatches * fsdp * math.lcm(*replicas)
    if global_batch % parts:
        stage, data = next(
            (i, d) for i, d in enumerate(replicas) if global_batch % (microbatches * fsdp * d)
        )
        here = data * fsdp * microbatches
        names, sizes = (
            ("data * parallel.fsdp", f"{data} * {fsdp}") if fsdp > 1 else ("data", f"{data}")
        )
        below = global_batch // parts * parts
        values = f"{below} or {below + parts}" if below else f"{parts}"
        raise PlanError(
            "train.global_batch",
            f"must be a multiple of {names} * parallel.microbatches, on stage {stage} "
            f"{sizes} * {microbatches} = {here}",
            found=f"{global_batch} / {here} leaves {global_batch % here} sequences; "
            f"data is {_listed(replicas)} on the stages",
            fix=f"use train.global_batch={values}, or change parallel.microbatches",
        )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _refuse_full_memory(config: Config, site: _Site, num_blocks: int) -> None:
    items = _memory_bytes(config, site, num_blocks)
    excess = sum(items.values()) - site.usable_bytes
    if excess <= 0:
        return
    kind = min(site.kinds, key=lambda kind: kind.memory_bytes)
    largest = sorted(items, key=lambda name: -items[name])[:3]
    raise PlanError(
        f"stage {site.index}",
        f"does not fit {kind.name} in cluster {site.cluster!r}: {show(excess, 'B')} more than "
        f"{USABLE_MEMORY:.0%} of its {show(kind.memory_bytes, 'B')}",
        found=f"{show(sum(items.values()), 'B')} per device for {num_blocks} Transformer layers: "
        + ", ".join(f"{name} {show(items[name], 'B')}" for name in largest),
        fix=_memory_remedy(config, site, num_blocks),
    )


def _memory_remedy(config: Config, site: _Site, num_blocks: int) -> str:
    """The mildest change that makes the stage fit, or at least the one that helps most."""
    shape = site.shape(config, num_blocks)
    stronger = CHECKPOINTING[CHECKPOINTING.index(shape.checkpointing) + 1 :]
    for policy in stronger if config.parallel.schedule != "zero_bubble" else ():
        changed = dataclasses.replace(shape, checkpointing=policy)
        if sum(memory.stage_memory_bytes(config.model, changed).values()) <= site.usable_bytes:
            return f"set parallel.activation_checkpointing={policy}"
    items = _memory_bytes(config, site, num_blocks)
    if sum(items.get(name, 0.0) for name in memory.PER_PARAMETER) <= site.usable_bytes:
        return "raise parallel.microbatches or lower train.global_batch: fewer sequences at a time"
    return "raise parallel.fsdp, parallel.tensor or parallel.stages: fewer parameters on a device"
