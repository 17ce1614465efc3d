"""The problem of a search: a config and machines, and the seconds of any stages and links.

order       which schedule the pipeline runs, and with how many microbatches
flow        what one stage sends to another, one array after the other
pipe        a capacity of one way between clusters, or of several: flows that want more queue
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from holmesjax.config import Config, ParallelConfig
from holmesjax.costs import work
from holmesjax.plan.device_pool import USABLE_MEMORY
from holmesjax.plan.plan import Axis
from holmesjax.planner.assignment import Assignment, Segment, StageSlot
from holmesjax.planner.layer_ranges import Counts, LayerRanges, split_chunks
from holmesjax.planner.mesh_order import MeshPlacement
from holmesjax.planner.node_paths import FlowPath, NodePaths
from holmesjax.planner.stage_costs import StageCosts
from holmesjax.planner.stage_layouts import (
    Devices,
    InFlight,
    MeshShape,
    Pool,
    Role,
    StepSettings,
    exchanges_slowly,
    meshes,
)
from holmesjax.schedules.pipeline_schedules import TaskOrder
from holmesjax.schedules.simulation import Queue, Simulator
from holmesjax.schedules.tasks import Task, max_in_flight, max_waiting
from holmesjax.topology.machines import Link, Pipe, Topology

Flow = tuple[StageSlot, StageSlot]  # from one stage to another


class StageSeconds(NamedTuple):
    """Predicted seconds of one stage."""

    forward: float
    backward: float  # without the weights' gradients, where these are a task of their own
    weight: float
    reduce: float  # what comes behind the last task
    gather: float  # what comes before the first task
    update: float
    once: float  # about what all that adds to a step


@functools.cache  # a search asks over and over
def roles(num_stages: int) -> tuple[Role, ...]:
    """The role of each stage."""
    last = num_stages - 1
    return tuple(Role(stage == 0, stage == last) for stage in range(num_stages))


class PricedStage:
    """One stage without its layers; its seconds and its bytes are worked out once for any.

    They do not depend on how much memory there is, nor on what the config asks for.
    """

    def __init__(self, problem: "Problem", slot: StageSlot, settings: StepSettings, role: Role):
        self.slot, self.settings, self.role = slot, settings, role
        self._problem = problem
        self._seconds: dict[tuple[Counts, bool, Counts | None], StageSeconds] = {}
        self._bytes: dict[tuple[Counts, InFlight, Counts | None], float] = {}

    def seconds(
        self, blocks: Counts, is_split: bool, recomputed: Counts | None = None
    ) -> StageSeconds:
        """Predicted seconds of the stage, or of one of its chunks.

        Args:
          blocks: Transformer layers of the stage, of each kind.
          is_split: whether gradients of weights are tasks of their own.
          recomputed: the layers that the checkpointing is for, of each kind; None: all.
        """
        key = blocks, is_split, recomputed
        if key not in self._seconds:
            slot, settings, role = self.slot, self.settings, self.role
            costs, pool = self._problem.stage_costs, self._problem.pools[slot.pool]
            placement = self._problem.placement(slot, settings)
            times = costs.times(pool, placement, slot.mesh, settings, role, blocks, recomputed)
            # The same rule as `compilation.sends_within`. A whole step in one program loops over
            # microbatches and sends before and after the loop. W, too, reduces while it computes.
            sends_within = role.is_first and not (role.is_last and settings.microbatches > 1)
            self._seconds[key] = StageSeconds(
                float(times.whole_forward_s),
                float(times.whole_backward_s - is_split * times.weight_s),
                float(times.weight_s),
                float(times.exposed_reduce_s if sends_within or is_split else times.reduce_s),
                float(times.exposed_gather_s if sends_within else times.gather_s),
                float(times.update_s),
                float(times.once_s),
            )
        return self._seconds[key]

    @cached_property
    def exchanges_slowly(self) -> bool:
        """Whether devices of the stage would exchange tokens over a slow link between nodes."""
        if self.slot.mesh.expert == 1:
            return False
        return exchanges_slowly(self._problem.placement(self.slot, self.settings).groups)

    def memory_bytes(
        self, blocks: Counts, in_flight: InFlight, recomputed: Counts | None = None
    ) -> float:
        """Predicted bytes on each device, with the most microbatches that it holds at a time."""
        key = blocks, in_flight, recomputed
        if key not in self._bytes:
            mesh, settings, role = self.slot.mesh, self.settings, self.role
            costs = self._problem.stage_costs
            self._bytes[key] = costs.memory_bytes(mesh, settings, role, *key)
        return self._bytes[key]


@dataclass(kw_only=True, eq=False)
class Problem:
    """Everything that is given, and what has been worked out so far."""

    config: Config
    topology: Topology
    pools: Sequence[Pool]
    stage_costs: StageCosts
    crosses_because: str = ""  # why stages may lie in several clusters, if they may
    usable_memory: float = USABLE_MEMORY  # share of each device's memory
    _stages: dict[tuple[StageSlot, StepSettings, Role], PricedStage] = field(default_factory=dict)
    _meshes: dict[tuple[object, ...], list[MeshShape]] = field(default_factory=dict)
    _simulators: dict[TaskOrder, tuple[Simulator, tuple[tuple[Task, ...], ...]]] = field(
        default_factory=dict
    )
    _links_of: dict[int, list[Link]] = field(default_factory=dict)
    _like: dict[StageSlot, StageSlot] = field(default_factory=dict)
    _in_flight: dict[tuple[object, ...], InFlight] = field(default_factory=dict)
    _paths: dict[Flow, FlowPath] = field(default_factory=dict)
    _node_paths: dict[tuple[tuple[str, ...], tuple[str, ...], int], FlowPath] = field(
        default_factory=dict
    )
    _both_ways_s: dict[tuple[Flow, float], tuple[float, float]] = field(default_factory=dict)
    _inside_s: dict[tuple[Segment, float], list[tuple[float, float]]] = field(default_factory=dict)
    _queues: dict[tuple[object, ...], list[tuple[int, int, Pipe]]] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        return self.config.model.num_layers

    @property
    def ranges(self) -> LayerRanges:
        return self.stage_costs.ranges

    def on(self, topology: Topology, pools: Sequence[Pool] | None = None) -> "Problem":
        """The same problem on other machines; with the same pools, unless others are given."""
        return Problem(
            config=self.config,
            topology=topology,
            pools=[pool.on(topology) for pool in self.pools] if pools is None else pools,
            stage_costs=StageCosts(self.config),
            crosses_because=self.crosses_because,
            usable_memory=self.usable_memory,
            _simulators=self._simulators,
        )

    def set_to(self, parallel: ParallelConfig, usable_memory: float | None = None) -> "Problem":
        """The same machines with other settings or more memory. Cached results stay valid."""
        config = replace(self.config, parallel=parallel)
        share = self.usable_memory if usable_memory is None else usable_memory
        return replace(self, config=config, usable_memory=share)

    @cached_property
    def node_paths(self) -> NodePaths:
        return NodePaths(self.topology)

    @property
    def pipes(self) -> list[Pipe]:
        return self.node_paths.pipes

    def meshes(self, pool_index: int, settings: StepSettings) -> list[MeshShape]:
        """The meshes that a stage may have on a pool."""
        own = self.config.parallel, self.config.kernels.sequence_parallel
        key = pool_index, settings.microbatches, own
        if key not in self._meshes:
            found = meshes(self.config, self.pools[pool_index], settings)
            self._meshes[key] = list(found)
        return self._meshes[key]

    def boundary_bytes(self, settings: StepSettings) -> float:
        sequences = self.config.train.global_batch // settings.microbatches
        num_tokens = sequences * self.config.model.context_length
        dtype = self.config.train.compute_dtype
        return float(work.boundary_bytes(self.config.model, num_tokens, dtype))

    def is_asked_for(self, segments: Sequence[Segment]) -> bool:
        """Whether the stages are on the clusters that the config names, if it does."""
        asked = self.config.parallel.clusters
        if asked is None:
            return True
        found = [
            self.pools[segment.pool].cluster.name
            for segment in segments
            for _ in range(segment.num_stages)
        ]
        return tuple(found) == asked

    def stage(self, slot: StageSlot, settings: StepSettings, role: Role) -> "PricedStage":
        """A stage whose seconds and bytes are asked for, for one number of layers after another.

        Args:
          slot: devices of the stage and their mesh.
          settings: microbatches and checkpointing of a step.
          role: whether the stage holds the embedding or the head.
        """
        key = self.like(slot), settings, role
        if key not in self._stages:
            self._stages[key] = PricedStage(self, *key)
        return self._stages[key]

    def stages(self, slots: Sequence[StageSlot], settings: StepSettings) -> list["PricedStage"]:
        """All stages of a pipeline in order."""
        return [
            self.stage(slot, settings, role)
            for slot, role in zip(slots, roles(len(slots)), strict=True)
        ]

    def seconds(
        self,
        slot: StageSlot,
        settings: StepSettings,
        role: Role,
        blocks: Counts,
        is_split: bool,
        recomputed: Counts | None = None,
    ) -> StageSeconds:
        """Predicted seconds of a stage, or of one of its chunks, as `PricedStage.seconds`.

        Args:
          slot, settings, role: those of `stage`.
          blocks, is_split, recomputed: those of `PricedStage.seconds`.
        """
        return self.stage(slot, settings, role).seconds(blocks, is_split, recomputed)

    def holds(
        self,
        stage: PricedStage,
        blocks: Counts,
        in_flight: InFlight,
        recomputed: Counts | None = None,
    ) -> bool:
        """Whether the memory of each device holds its share of a stage.

        None holds a stage whose devices would exchange tokens over a slow link, however it is laid.

        Args:
          stage: without its layers.
          blocks: Transformer layers of the stage, of each kind.
          in_flight: the most microbatches whose activations the stage holds at a time.
          recomputed: the layers that the checkpointing is for, of each kind; None: all.
        """
        if stage.exchanges_slowly:
            return False
        num_bytes = stage.memory_bytes(blocks, in_flight, recomputed)
        return num_bytes <= self.usable_bytes(stage.slot.pool)

    def usable_bytes(self, pool_index: int) -> float:
        """Bytes that a stage may fill on each device of a pool."""
        return self.usable_memory * self.pools[pool_index].memory_bytes

    def layer_counts(
        self, assignment: Assignment, chunks: int
    ) -> list[tuple[tuple[Counts, ...], tuple[Counts, ...] | None]]:
        """The layers of each chunk of every stage, of each kind; and those that compute again.

        None: the checkpointing is for all.
        """
        every = self.ranges.chunks(assignment.layers, chunks)
        if not assignment.recomputed:
            return [(counts, None) for counts in every]
        spans = self.ranges.spans(assignment.layers, chunks)
        numbers = zip(spans, assignment.recomputed, strict=True)
        again = [self.ranges.first(span, number) for span, number in numbers]
        return list(zip(every, again, strict=True))

    def microbatch_s(
        self,
        slot: StageSlot,
        settings: StepSettings,
        role: Role,
        blocks: Counts,
        recomputed: Counts | None = None,
    ) -> float:
        """Seconds that a stage works for a microbatch, forward and backward.

        Args:
          slot, settings, role: those of `stage`.
          blocks, recomputed: those of `PricedStage.seconds`.
        """
        times = self.seconds(slot, settings, role, blocks, False, recomputed)
        return times.forward + times.backward

    def simulator(self, order: TaskOrder) -> tuple[Simulator, tuple[tuple[Task, ...], ...]]:
        """The simulator of a schedule, and its tasks."""
        if order not in self._simulators:
            tasks = order.tasks()
            self._simulators[order] = Simulator(tasks, order.chunks), tasks
        return self._simulators[order]

    def in_flight(self, order: TaskOrder, stage: int, layers: int) -> InFlight:
        """The most microbatches in flight that a stage with `layers` layers holds."""
        v = order.chunks
        if v == 1:
            most = order.bound(stage)
            return InFlight(all=most, head=most, waiting=order.waiting_bound(stage))
        key = order, stage, layers
        if key not in self._in_flight:
            tasks = self.simulator(order)[1][stage]
            shares = [n / layers for n in split_chunks(layers, v)]
            self._in_flight[key] = InFlight(
                all=max_in_flight(tasks, shares),
                head=max_in_flight(tasks, [0] * (v - 1) + [1]),
                chunks=v,
                waiting=max_waiting(tasks, shares),
            )
        return self._in_flight[key]

    def transfer_s(self, source: StageSlot, target: StageSlot, num_bytes: float) -> float:
        """Seconds in which an array goes from one stage to another, if no other flow is on its way.

        Each node of the smaller stage sends, or receives, an equal part of it at once (`routes`).
        """
        path = self._path((source, target))
        return path.link.time_s(num_bytes / path.num_pairs)

    def both_ways_s(self, flow: Flow, num_bytes: float) -> tuple[float, float]:
        """Seconds in which an array goes from one stage to another, and an equal one back."""
        key = flow, num_bytes
        if key not in self._both_ways_s:
            there_s, back_s = (self.transfer_s(*ends, num_bytes) for ends in (flow, flow[::-1]))
            self._both_ways_s[key] = there_s, back_s
        return self._both_ways_s[key]

    def inside_s(self, segment: Segment, num_bytes: float) -> Sequence[tuple[float, float]]:
        """`both_ways_s` from each stage of a segment to the next."""
        key = segment, num_bytes
        if key not in self._inside_s:
            flows = itertools.pairwise(segment.slots)
            self._inside_s[key] = [self.both_ways_s(flow, num_bytes) for flow in flows]
        return self._inside_s[key]

    def _path(self, flow: Flow) -> FlowPath:
        if flow not in self._paths:
            source, target = (tuple(self.nodes(slot)) for slot in flow)
            processes = min(map(self._num_processes, flow))
            key = source, target, processes  # meshes of many sizes have the same nodes
            if key not in self._node_paths:
                self._node_paths[key] = self.node_paths.path(*key)
            self._paths[flow] = self._node_paths[key]
        return self._paths[flow]

    def queues(self, assignment: Assignment, settings: StepSettings, chunks: int) -> list[Queue]:
        """The flows over pipes whose capacity is less than these flows would send together."""
        if not self.pipes:
            return []
        key = assignment.segments, chunks > 1
        if key not in self._queues:
            self._queues[key] = self._shared(assignment.slots, chunks > 1)
        num_bytes = self.boundary_bytes(settings)
        return [
            Queue(
                source,
                target,
                str(pipe),
                hold_s=num_bytes / pipe.reached_bytes_per_s,
                latency_s=self._path(
                    (assignment.slots[source], assignment.slots[target])
                ).link.latency_s,
            )
            for source, target, pipe in self._queues[key]
        ]

    def _shared(self, slots: Sequence[StageSlot], goes_round: bool) -> list[tuple[int, int, Pipe]]:
        """Sources and targets of the flows that queue, each with its pipe."""
        pairs = list(itertools.pairwise(range(len(slots))))
        if goes_round:
            pairs.append((len(slots) - 1, 0))
        flows = sorted({*pairs, *((b, a) for a, b in pairs)})
        names = [self.pools[slot.pool].cluster.name for slot in slots]
        found = []
        for pipe in self.pipes:
            users = [(a, b) for a, b in flows if (names[a], names[b]) in pipe.ways]
            paths = [self._path((slots[a], slots[b])) for a, b in users]
            wanted = math.fsum(path.num_pairs * path.link.bandwidth_bytes_per_s for path in paths)
            if wanted > pipe.reached_bytes_per_s * (1 + 1e-9):
                found += [(a, b, pipe) for a, b in users]
        return found

    def links_of(self, pool_index: int) -> list[Link]:
        """The fastest for boundaries inside a pool, and from it to each other pool."""
        if pool_index not in self._links_of:
            pools = [self.pools[pool_index]]
            pools += [pool for pool in self.pools if pool is not pools[0]]
            names = [list(pool.devices) for pool in pools]
            most = pools[0].most_in_a_node if self._is_per_device else 1
            self._links_of[pool_index] = [
                replace(
                    max(
                        self.node_paths.links(names[0], names[i], most),
                        key=lambda link: link.bandwidth_bytes_per_s,
                    ),
                    capacity_bytes_per_s=self._capacity(pools[0], pool),
                )
                for i, pool in enumerate(pools)
            ]
        return self._links_of[pool_index]

    def _capacity(self, source: Pool, target: Pool) -> float:
        """The least of the pipes from one pool to another."""
        way = source.cluster.name, target.cluster.name
        rates = (pipe.reached_bytes_per_s for pipe in self.pipes if way in pipe.ways)
        return min(rates, default=math.inf)

    def like(self, slot: StageSlot) -> StageSlot:
        """A slot that costs as much: the same one for all stages of equal whole nodes."""
        if slot not in self._like:
            pool = self.pools[slot.pool]
            own = slot._replace(num_stages=1, number=0)
            self._like[slot] = own if pool.is_even(slot.mesh) else slot
        return self._like[slot]

    def nodes(self, slot: StageSlot) -> list[str]:
        return list(self._devices(slot))

    def _devices(self, slot: StageSlot) -> Devices:
        pool = self.pools[slot.pool]
        return self.stage_costs.devices(pool, slot.mesh, slot.num_stages, slot.number)

    @property
    def _is_per_device(self) -> bool:
        return self.config.distributed.processes == "device"

    def _num_processes(self, slot: StageSlot) -> int:
        devices = self._devices(slot)
        return sum(map(len, devices.values())) if self._is_per_device else len(devices)

    def placement(self, slot: StageSlot, settings: StepSettings) -> MeshPlacement[Axis]:
        pool = self.pools[slot.pool]
        return self.stage_costs.placement(pool, slot.mesh, slot.num_stages, slot.number, settings)
