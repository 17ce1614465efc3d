"""Offers: what a pool can do with some settings, for each mesh that its stages may have.

Seconds and bytes are of a stage by its load: the number of layers, each counted as often as its
work asks (`LayerRanges.loads`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from holmesjax.planner.problem import Problem, roles
from holmesjax.planner.stage_layouts import MeshShape, Pool, StepSettings

MAX_STAGES = 512  # of a pipeline


class Room(NamedTuple):
    """Memory of the stages of one pool with some settings; arrays are [meshes]."""

    usable_bytes: float
    fixed_bytes: np.ndarray  # of a stage, however many layers it has
    layer_bytes: np.ndarray  # of a unit of load
    kept_bytes: np.ndarray  # by a unit of load of each microbatch in flight
    alone_bytes: np.ndarray  # of the only stage of a plan
    alone_load: int = 0  # of that stage, if the room is that of a stage anywhere

    def load(self, depth: int, times: float = 1.0) -> np.ndarray:
        """The load of a stage, [meshes], with so many in flight and so many times the memory."""
        left_bytes = times * self.usable_bytes - self.fixed_bytes
        load = left_bytes / (self.layer_bytes + depth * self.kept_bytes)
        is_alone = self.alone_bytes <= times * self.usable_bytes
        return np.where(is_alone, np.maximum(load, self.alone_load), load)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Offers:
    """Costs of a stage on one pool with some settings; arrays are [meshes].

    A stage of n units of load costs `fixed` + n `layer`. The numbers are those of a stage in the
    middle of the pipeline; stages at its ends cost more.
    """

    pool: int
    meshes: tuple[MeshShape, ...]
    most_stages: np.ndarray
    fixed_s: np.ndarray  # of a microbatch: to the next stage of the pool, and back
    layer_s: np.ndarray  # all tasks
    fixed_load_s: np.ndarray  # of tasks, with a share of what comes once in a step
    layer_load_s: np.ndarray
    least_layer_s: np.ndarray  # in the kind of layer that is fastest
    room: Room  # for layers of all kinds
    most_room: Room  # for layers of the kind that takes least, at the best place
    way_s: np.ndarray  # a microbatch to the pool that is reached fastest
    least: int  # load of a layer
    count: int | None = None  # of stages; None: as many as are best

    def most(self, limit_s: float, depth: int, crosses: bool) -> np.ndarray:
        """The load that a stage can hold, [meshes], with so many microbatches in flight."""
        bounds = self.fixed_load_s, self.layer_load_s, self.room.load(depth), self.least
        return most_load(limit_s, *bounds, self.way_s * crosses)

    def counted(self, count: int) -> "Offers":
        """Returns these offers with exactly `count` stages."""
        most_stages = np.where(self.most_stages >= count, count, 0)
        return replace(self, most_stages=most_stages, count=count)

    @property
    def alone(self) -> "Offers":
        """Returns these offers with the least that any stage takes, for bounds.

        That is without the load that comes once in a step.
        """
        return replace(
            self,
            fixed_load_s=0.0 * self.fixed_s,
            layer_load_s=self.least_layer_s,
            room=self.most_room,
        )


def most_load(
    limit_s: float,
    fixed_s: np.ndarray,
    layer_s: np.ndarray,
    room: np.ndarray,
    least: int | np.ndarray,
    way_s: np.ndarray,
) -> np.ndarray:
    """The load that stages can hold in their time and their memory, arrays of one shape.

    It is none where it would be less than a layer, or where a microbatch does not come in time.

    Args:
      limit_s: seconds of a microbatch.
      fixed_s, layer_s: seconds of a stage without layers, and of a unit of load.
      room: the load that its memory holds.
      least: the smallest load of a layer.
      way_s: seconds of a boundary.
    """
    most = np.floor(np.minimum((limit_s - fixed_s) / layer_s * (1 + 1e-9), room))
    return np.where((most >= least) & (way_s <= limit_s), most, 0)


def make_offers(problem: Problem, settings: StepSettings) -> dict[int, Offers]:
    """Offers of each pool that has a possible mesh, by its index."""
    offers = (_offers(problem, index, settings) for index in range(len(problem.pools)))
    return {offer.pool: offer for offer in offers if offer is not None}


def _offers(problem: Problem, pool_index: int, settings: StepSettings) -> Offers | None:
    pool, stage_costs = problem.pools[pool_index], problem.stage_costs
    num_bytes = problem.boundary_bytes(settings)
    own_link, *links = problem.links_of(pool_index)
    found = problem.meshes(pool_index, settings)
    if not found:
        return None
    ranges, task_s, fixed_load_s, layer_load_s = problem.ranges, [], [], []
    mean = lambda rows: np.average(np.array(rows), axis=0, weights=ranges.load_shares)
    for kind, load in enumerate(ranges.loads):
        times = [
            stage_costs.many_times(pool, found, settings, ranges.unit(kind, n)) for n in (1, 2)
        ]
        first_s, second_s = (t.microbatch_s + t.once_s / settings.microbatches for t in times)
        task_s.append(times[0].microbatch_s / load)
        fixed_load_s.append(2 * first_s - second_s)
        layer_load_s.append((second_s - first_s) / load)
    num_nodes = stage_costs.num_nodes(pool, found)
    room, most_room = rooms(problem, pool_index, found, settings)
    time_s = lambda link: (
        link.latency_s
        + np.maximum(
            num_bytes / num_nodes / link.bandwidth_bytes_per_s,
            num_bytes / link.capacity_bytes_per_s,
        )
    )
    ways_s = [time_s(link) for link in links]
    return Offers(
        pool=pool_index,
        meshes=tuple(found),
        most_stages=most_stages(pool, found),
        fixed_s=2 * time_s(own_link),
        layer_s=mean(task_s),
        fixed_load_s=mean(fixed_load_s),
        layer_load_s=mean(layer_load_s),
        least_layer_s=np.array(task_s).min(axis=0),
        room=room,
        most_room=most_room,
        way_s=np.min(ways_s, axis=0) if ways_s else np.zeros(len(found)),
        least=min(ranges.loads),
    )


def most_stages(pool: Pool, found: Sequence[MeshShape]) -> np.ndarray:
    """Stages that a pool has devices for, [meshes]."""
    return np.array([min(MAX_STAGES, pool.num_devices // mesh.num_devices) for mesh in found])


def rooms(
    problem: Problem, pool_index: int, found: Sequence[MeshShape], settings: StepSettings
) -> tuple[Room, Room]:
    """The room of stages in the middle for layers of all kinds; and the most that a stage has.

    That is for layers of the kind that takes least, wherever the stage stands.
    """
    fixed, layer, kept = [], [], []
    for kind, load in enumerate(problem.ranges.loads):
        one, more, deep = (
            problem.stage_costs.many_bytes(found, settings, problem.ranges.unit(kind, n), depth)
            for n, depth in ((1, 1), (2, 1), (1, 2))
        )
        fixed.append(2 * one - more)
        layer.append((more - deep) / load)
        kept.append((deep - one) / load)
    ranges, many_bytes = problem.ranges, problem.stage_costs.many_bytes
    # The only stage reduces its gradients where its replicas were, too.
    [only], blocks = roles(1), ranges.counts(0, problem.num_layers)
    alone_bytes = many_bytes(found, settings, blocks, 1, only)
    usable_bytes, rows = problem.usable_bytes(pool_index), (fixed, layer, kept)
    mean_fixed, mean_layer, mean_kept = (
        np.average(row, axis=0, weights=ranges.load_shares) for row in rows
    )
    fixed_bytes, layer_bytes, kept_bytes = (np.min(row, axis=0) for row in rows)
    spare_bytes = np.zeros(len(found))
    for role in roles(2):  # each has one neighbour, and so fewer buffers
        for kind, load in enumerate(ranges.loads):
            plain = fixed_bytes + load * (layer_bytes + kept_bytes)
            own = many_bytes(found, settings, ranges.unit(kind), 1, role)
            spare_bytes = np.maximum(spare_bytes, plain - own)
    least = fixed_bytes - spare_bytes, layer_bytes, kept_bytes
    return (
        Room(usable_bytes, mean_fixed, mean_layer, mean_kept, alone_bytes),
        Room(usable_bytes, *least, alone_bytes, alone_load=ranges.load),
    )
