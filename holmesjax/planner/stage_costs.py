"""The costs of a stage on its layouts: its shape, its seconds and its bytes."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from holmesjax.config import Config, update_rules
from holmesjax.costs import collective_times, memory, work
from holmesjax.costs.attention import asked_of
from holmesjax.costs.collective_times import Group, Groups
from holmesjax.costs.expert_exchange import choices, expert_numbers
from holmesjax.costs.layer_times import layers_s
from holmesjax.costs.stage_shape import DTYPE_BYTES, LOGIT_BYTES, StageShape
from holmesjax.costs.stage_times import StageTimes, stage_times
from holmesjax.layer_specs import distinct_kinds
from holmesjax.layer_specs.experts import sent_width
from holmesjax.plan.plan import Axis
from holmesjax.planner.layer_ranges import Counts, LayerRanges
from holmesjax.planner.mesh_order import (
    Arrangement,
    MeshPlacement,
    arrangements,
    cheapest,
)
from holmesjax.planner.stage_layouts import (
    Devices,
    InFlight,
    MeshShape,
    Pool,
    Role,
    StepSettings,
    exchanges_slowly,
)
from holmesjax.topology.machines import Numbers

ALONE = InFlight(all=1, head=1)  # one microbatch
DEPTHS = 32  # numbers of microbatches in flight whose memory is worked out together
MIDDLE = Role()  # holds neither end of the model
AXES = tuple(Axis)  # in the order of `MeshShape.sizes`


class _Placements:
    """Every order of the axes of some meshes on a pool, as arrays: many are placed at once."""

    def __init__(self) -> None:
        self._numbers: dict[MeshShape, int] = {}
        self._num_nodes: list[int] = []
        self._costs: list[np.ndarray] = []  # seconds per byte, [orders, axes]
        self._groups: list[np.ndarray] = []  # places in the rows, [orders, axes]
        self._rows = [collective_times.ALONE]  # of the groups, as `Group.row`
        self._row_of: dict[int, int] = {}  # by the id of a group, which an arrangement keeps
        self._stacked: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def __contains__(self, mesh: MeshShape) -> bool:
        return mesh in self._numbers

    def add(self, mesh: MeshShape, arranged: Sequence[Arrangement[Axis]], num_nodes: int) -> None:
        """Adds a mesh with the orders of its axes, the first of which is kept among equals."""
        sizes = len(arranged), len(AXES)
        costs, groups = np.zeros(sizes), np.zeros(sizes, int)
        for order, arrangement in enumerate(arranged):
            for place, axis in enumerate(AXES):
                if (group := arrangement.groups.get(axis)) is not None:
                    costs[order, place] = arrangement.s_per_byte[axis]
                    groups[order, place] = self._row(group)
        self._numbers[mesh] = len(self._costs)
        self._num_nodes.append(num_nodes)
        self._costs.append(costs)
        self._groups.append(groups)
        self._stacked = None

    def _row(self, group: Group) -> int:
        if id(group) not in self._row_of:
            self._row_of[id(group)] = len(self._rows)
            self._rows.append(group.row)
        return self._row_of[id(group)]

    def num_nodes(self, found: Sequence[MeshShape]) -> np.ndarray:
        """The nodes of a stage with each of some meshes, [meshes]."""
        return np.array(self._num_nodes)[[self._numbers[mesh] for mesh in found]]

    def cheapest(
        self, found: Sequence[MeshShape], traffic_bytes: Mapping[Axis, Numbers]
    ) -> dict[Axis, Groups]:
        """The groups of each axis of some meshes, each in the order that `cheapest` chooses."""
        if self._stacked is None:
            most = max(map(len, self._costs))
            padded = (_padded(self._costs, most), _padded(self._groups, most))
            self._stacked = *padded, np.array(self._rows)
        costs, groups, rows = self._stacked
        numbers = [self._numbers[mesh] for mesh in found]
        traffic = np.stack(np.broadcast_arrays(*(traffic_bytes[axis] for axis in AXES)))
        price_s: Any = 0.0
        for place, sent_bytes in enumerate(traffic):
            price_s = price_s + sent_bytes[:, None] * costs[numbers, :, place]
        best = groups[numbers, np.argmin(price_s, axis=1)]
        return {axis: Groups.of_rows(rows[best[:, place]]) for place, axis in enumerate(AXES)}


class StageCosts:
    """Seconds and bytes of stages, each computed once.

    One search asks for the same stages over and over.
    """

    def __init__(self, config: Config):
        self._config = config
        self._attention = asked_of(config)
        mib = config.kernels.loss_chunk_mib
        self._logit_bytes = LOGIT_BYTES if mib is None else mib * 2**20
        self.ranges = LayerRanges(config.model)
        self._slots: dict[tuple[int, MeshShape, int], list[Devices]] = {}
        self._arranged: dict[tuple[int, MeshShape, int, int], list[Arrangement[Axis]]] = {}
        self._placements: dict[tuple[object, ...], MeshPlacement[Axis]] = {}
        self._placed: dict[int, _Placements] = {}  # by pool; pools that are alike share one
        self._times: dict[tuple[object, ...], StageTimes] = {}
        self._many_times: dict[tuple[object, ...], StageTimes] = {}
        # For so many microbatches in flight, and for one more each.
        self._bytes: dict[tuple[object, ...], list[float]] = {}
        self._many_bytes: dict[tuple[object, ...], np.ndarray] = {}
        # Pools are named by their ids, and so must not go away.
        self._pools: list[Pool] = []  # with `_placed`
        self._kept: list[Pool] = []

    def devices(self, pool: Pool, mesh: MeshShape, num_stages: int, index: int) -> Devices:
        """Devices of stage `index` of the `num_stages` in a pool."""
        key = id(pool), mesh, num_stages
        if key not in self._slots:
            self._kept.append(pool)
            self._slots[key] = pool.slots(mesh, num_stages)
        return self._slots[key][index]

    def placement(
        self, pool: Pool, mesh: MeshShape, num_stages: int, index: int, settings: StepSettings
    ) -> MeshPlacement[Axis]:
        """The cheapest order of the axes of one stage over its devices.

        Args:
          pool: devices that its stages share equally.
          mesh: sizes of the axes of the stage.
          num_stages: stages in the pool.
          index: index of the stage among them, from 0.
          settings: microbatches and checkpointing, which decide the bytes that each axis sends.
        """
        key = id(pool), mesh, num_stages, index, settings
        if key not in self._placements:
            arranged = self._arrangements(pool, mesh, num_stages, index)
            self._placements[key] = cheapest(arranged, self._traffic_bytes(mesh, settings))
        return self._placements[key]

    def _arrangements(
        self, pool: Pool, mesh: MeshShape, num_stages: int, index: int
    ) -> list[Arrangement[Axis]]:
        where = id(pool), mesh, num_stages, index
        if where not in self._arranged:
            devices = self.devices(pool, mesh, num_stages, index)
            found = arrangements(pool.paths, devices, mesh.sizes)
            fast = [placement for placement in found if not exchanges_slowly(placement.groups)]
            # Where all are slow, no plan has the stage (`Problem.holds`).
            self._arranged[where] = fast or found
        return self._arranged[where]

    def _traffic_bytes(self, mesh: MeshShape, settings: StepSettings) -> dict[Axis, Any]:
        """Bytes that a device sends along each axis in a step, to weigh the axes.

        Arrays, if the sizes of the mesh are arrays.
        They are counted for a few layers, with each kind in the model's proportion.
        """
        model, train = self._config.model, self._config.train
        width = DTYPE_BYTES[train.compute_dtype]
        sent = lambda size: (size - 1) / size  # of a ring reduce-scatter
        own = list(zip(self.ranges.proportions, distinct_kinds.kinds(model).blocks, strict=True))
        num_parameters = sum(n * kind.size(mesh.tensor) for n, kind in own)
        num_tokens = train.global_batch / mesh.batch_shards * model.context_length
        summed = sum(
            n * num_tokens * numbers * width * (2 * (forward + backward) + again)
            for n, kind in own
            for numbers, forward, backward in work.all_reduces(kind, settings.checkpointing)
            for again in [work.gathered_again(kind, numbers, model.width, mesh.sequence_parallel)]
        )
        num_gathers = 3 * settings.microbatches  # parameters in both passes, gradients in one
        gathered = width * num_parameters * num_gathers
        # Keys and values in both passes, and their gradients.
        key_values = sum(n * work.key_value_numbers(kind, mesh.tensor) for n, kind in own)
        passed = (2 * width + 4) * num_tokens * key_values
        parts = mesh.fsdp * mesh.context * mesh.expert
        num_experts = sum(n * expert_numbers(kind, mesh.tensor) for n, kind in own)
        dense = width * (num_parameters - num_experts) * num_gathers
        exchanged = 5 * width * num_tokens * sum(n * choices(model, kind) for n, kind in own)
        if model.experts is not None:
            exchanged = exchanged * sent_width(model) / mesh.context
        return {
            Axis.DATA: sent(mesh.data) * (4 + width) * num_parameters / parts,
            Axis.FSDP: sent(mesh.fsdp) * gathered / (mesh.context * mesh.expert),
            Axis.CONTEXT: sent(mesh.context) * (gathered / mesh.expert + passed),
            Axis.EXPERT: sent(mesh.expert) * (dense + exchanged),
            Axis.TENSOR: sent(mesh.tensor) * summed / mesh.context,
        }

    def shape(
        self,
        mesh: MeshShape,
        settings: StepSettings,
        role: Role,
        blocks: Counts,
        in_flight: InFlight = ALONE,
        recomputed: Counts | None = None,
        logit_bytes: int | None = None,
    ) -> StageShape:
        """The shape of one stage, from which its times and its memory follow.

        Args:
          mesh: sizes of the axes of the stage.
          settings: microbatches and checkpointing of a step.
          role: whether the stage holds the embedding or the head.
          blocks: Transformer layers of the stage, of each kind.
          in_flight: the most microbatches whose activations it holds; only memory depends on it.
          recomputed: the layers that the checkpointing is for, of each kind; None: all.
          logit_bytes: of a chunk of the loss; None: what the config says, or else the least.
        """
        train, optimizer = self._config.train, self._config.optimizer
        return StageShape(
            blocks=blocks,
            is_first=role.is_first,
            is_last=role.is_last,
            data=mesh.data,
            tensor=mesh.tensor,
            fsdp=mesh.fsdp,
            context=mesh.context,
            expert=mesh.expert,
            places_experts=self._config.parallel.expert_placement == "load",
            expert_chunks=self._config.parallel.expert_chunks,
            experts_by_kernel=self._config.kernels.experts == "pallas",
            sequences=train.global_batch // (settings.microbatches * mesh.batch_shards),
            chunks=in_flight.chunks,
            in_flight=in_flight.all,
            head_in_flight=in_flight.head,
            waiting=in_flight.waiting,
            dtype=train.compute_dtype,
            param_dtype=train.param_dtype,
            reduction_dtype=train.reduction_dtype,
            checkpointing=settings.checkpointing,
            recomputed=recomputed,
            logit_bytes=logit_bytes or self._logit_bytes,
            cross_entropy=self._config.kernels.cross_entropy,
            kept=update_rules.kept(optimizer),
            is_whole_step=role.is_first and role.is_last and settings.microbatches == 1,
            attention=self._attention,
            sequence_parallel=mesh.sequence_parallel,
        )

    def times(
        self,
        pool: Pool,
        placement: MeshPlacement[Axis],
        mesh: MeshShape,
        settings: StepSettings,
        role: Role,
        blocks: Counts,
        recomputed: Counts | None = None,
    ) -> StageTimes:
        """Predicted seconds of one stage. Each is worked out once.

        Args:
          pool: source of the kinds of device.
          placement: groups of devices of each axis.
          mesh: sizes of the axes of the stage.
          settings: microbatches and checkpointing of a step.
          role: whether the stage holds the embedding or the head.
          blocks: Transformer layers of the stage, of each kind.
          recomputed: that of `shape`.
        """
        groups = tuple(placement.groups.get(axis) for axis in AXES)
        key = pool.kinds, groups, mesh, settings, role, blocks, recomputed
        if key not in self._times:
            shape = self.shape(mesh, settings, role, blocks, recomputed=recomputed)
            self._times[key] = stage_times(
                self._config.model, shape, pool.kinds, **_by_name(placement.groups)
            )
        return self._times[key]

    def many_times(
        self, pool: Pool, found: Sequence[MeshShape], settings: StepSettings, blocks: Counts
    ) -> StageTimes:
        """Times of a stage in the middle of the pipeline with each of some meshes: [meshes]."""
        placed = self._placements_of(pool, found)
        key = id(placed), tuple(found), settings, blocks
        if key not in self._many_times:
            self._many_times[key] = self._work_out_times(pool, placed, found, settings, blocks)
        return self._many_times[key]

    def num_nodes(self, pool: Pool, found: Sequence[MeshShape]) -> np.ndarray:
        """The nodes of a stage with each of some meshes, [meshes]."""
        return self._placements_of(pool, found).num_nodes(found)

    def _placements_of(self, pool: Pool, found: Sequence[MeshShape]) -> _Placements:
        """The placements of stages that have a pool, or one like it, for themselves."""
        if id(pool) not in self._placed:
            like = (self._placed[id(known)] for known in self._pools if known.is_like(pool))
            self._placed[id(pool)] = next(like, None) or _Placements()
            self._pools.append(pool)
        placed = self._placed[id(pool)]
        for mesh in found:
            if mesh not in placed:
                num_nodes = len(self.devices(pool, mesh, 1, 0))
                placed.add(mesh, self._arrangements(pool, mesh, 1, 0), num_nodes)
        return placed

    def _work_out_times(
        self,
        pool: Pool,
        placed: _Placements,
        found: Sequence[MeshShape],
        settings: StepSettings,
        blocks: Counts,
    ) -> StageTimes:
        groups = placed.cheapest(found, self._traffic_bytes(_as_arrays(found), settings))
        shape = self._many_shapes(found, settings, blocks, InFlight(all=1, head=1))
        return stage_times(self._config.model, shape, pool.kinds, **_by_name(groups))

    def many_bytes(
        self,
        found: Sequence[MeshShape],
        settings: StepSettings,
        blocks: Counts,
        in_flight: int,
        role: Role = MIDDLE,
    ) -> np.ndarray:
        """The bytes on each device of such stages, [meshes]. Pools with the same meshes share them.

        Args:
          found: the meshes.
          settings: microbatches and checkpointing of a step.
          blocks: Transformer layers of each stage, of each kind.
          in_flight: microbatches that are held.
          role: whether the stages hold the embedding or the head.
        """
        key = tuple(found), settings, blocks, in_flight, role
        if key not in self._many_bytes:
            held = InFlight(all=in_flight, head=in_flight)
            shape = self._many_shapes(found, settings, blocks, held, role)
            items = memory.stage_memory_bytes(self._config.model, shape)
            self._many_bytes[key] = np.sum(np.broadcast_arrays(*items.values()), axis=0)
        return self._many_bytes[key]

    def bytes_at_places(
        self,
        found: Sequence[MeshShape],
        settings: StepSettings,
        blocks: Counts,
        in_flight: InFlight,
        role: Role,
    ) -> np.ndarray:
        """Bytes on each device of stages of a role, [meshes, places].

        Args:
          found: the meshes.
          settings: microbatches and checkpointing of a step.
          blocks: Transformer layers of each stage, of each kind.
          in_flight: what is held; `all` is an array, [places], by the place in the pipeline.
          role: whether the stages hold the embedding or the head.
        """
        sizes: Any = MeshShape(*np.array(found).T[:, :, None])
        shape = self.shape(sizes, settings, role, blocks, in_flight)
        items = memory.stage_memory_bytes(self._config.model, shape)
        return np.sum(np.broadcast_arrays(*items.values()), axis=0)

    def _many_shapes(
        self,
        found: Sequence[MeshShape],
        settings: StepSettings,
        blocks: Counts,
        in_flight: InFlight,
        role: Role = MIDDLE,
    ) -> StageShape:
        shape = self.shape(_as_arrays(found), settings, role, blocks, in_flight)
        # It may become the only stage.
        return dataclasses.replace(shape, is_whole_step=settings.microbatches == 1)

    def layers_s(
        self, pool: Pool, found: Sequence[MeshShape], settings: StepSettings
    ) -> list[Numbers]:
        """Seconds of a microbatch in a layer of each kind, [meshes] each, without what is sent."""
        shape = self.shape(_as_arrays(found), settings, Role(), self.ranges.proportions)
        return layers_s(self._config.model, shape, pool.kinds)

    def memory_bytes(
        self,
        mesh: MeshShape,
        settings: StepSettings,
        role: Role,
        blocks: Counts,
        in_flight: InFlight,
        recomputed: Counts | None = None,
    ) -> float:
        """Predicted bytes on each device of a stage. Each is worked out once.

        Args:
          mesh: sizes of the axes of the stage.
          settings: microbatches and checkpointing of a step.
          role: whether the stage holds the embedding or the head.
          blocks: Transformer layers of the stage, of each kind.
          in_flight: the most microbatches whose activations the stage holds at a time.
          recomputed: that of `shape`.
        """
        first, at, most = in_flight, 0, in_flight.all
        is_plain = isinstance(most, int) and in_flight == InFlight(all=most, head=most)
        if is_plain:
            at = int(most - 1) % DEPTHS
            first = InFlight(all=most - at, head=most - at)
        key = mesh, settings, role, blocks, first, recomputed
        if key not in self._bytes:
            # The next stages hold fewer: arrays take about as long as numbers.
            numbers: Any = first.all + np.arange(DEPTHS)
            held = InFlight(all=numbers, head=numbers) if is_plain else in_flight
            shape = self.shape(mesh, settings, role, blocks, held, recomputed)
            items = memory.stage_memory_bytes(self._config.model, shape)
            num_bytes = sum(items.values())
            self._bytes[key] = np.broadcast_to(num_bytes, DEPTHS if is_plain else 1).tolist()
        return self._bytes[key][at]


def _by_name(groups: Mapping[Axis, Any]) -> dict[str, Any]:
    """The group of each axis, as `stage_times` takes them; None for an axis of size 1."""
    return {axis.value: groups.get(axis) for axis in AXES}


def _padded(arrays: Sequence[np.ndarray], most: int) -> np.ndarray:
    """Arrays with so many rows each, stacked; the first row stands in the place of others."""
    return np.stack([np.concatenate([a, np.repeat(a[:1], most - len(a), 0)]) for a in arrays])


def _as_arrays(found: Sequence[MeshShape]) -> MeshShape:
    """Some meshes as one, whose sizes are arrays, [meshes]."""
    sizes: Any = MeshShape(*np.array(found).T)
    return sizes
