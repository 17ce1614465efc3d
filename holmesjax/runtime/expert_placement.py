"""Moves the experts of layers between the devices that share them, by their loads.

A layer with placed experts has a table, the slot of each expert, among the parameters that do not
train. Weights of experts, and all that an optimizer keeps of them, lie by slot; everything else of
the layer is by number. Checkpoints have experts by number, and no table.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from holmesjax.config.update_rules import factored_dims
from holmesjax.costs import expert_placement
from holmesjax.errors import ConfigError
from holmesjax.layer_specs.experts import COUNT, PLACE
from holmesjax.layer_specs.kind import Parameter
from holmesjax.parallel import sharding
from holmesjax.plan.plan import Axis
from holmesjax.runtime.chunk import Chunk, ChunkState

ROUTER, NAME = PLACE.split("/")
PIECES = 8  # of an array, which move one after the other

Orders = Mapping[str, Sequence[int]]  # of the experts of each layer: a number for each slot


class Peaks(NamedTuple):
    """The load of the fullest device over the mean one, by the loads of one step."""

    by_number: float  # if experts lay in the order of their numbers
    placed: float


@dataclass(frozen=True)
class ExpertPlacement:
    """Places the experts of the chunks of a process; nothing changes in chunks that place none.

    Arrays move one after the other, in their place and in `PIECES` pieces, of which some travel. So
    a move needs less than the gradients of a step, which are not there then.

    Raises:
      ConfigError: the optimizer keeps an array of experts that has no row for each of them.
    """

    chunks: Sequence[Chunk] = ()

    def __post_init__(self) -> None:
        for chunk in self.chunks:
            for path, x in jax.tree_util.tree_leaves_with_path(chunk.state_shapes):
                _, parameter = _of_experts(chunk, path)
                if parameter is not None and not _has_a_row_for_each(parameter, x.shape):
                    raise ConfigError(
                        "parallel.expert_placement",
                        "must be number, if the optimizer keeps no row for each expert",
                        found=f"load, and an array {list(x.shape)} for {parameter.name}",
                        fix="use number, or optimizer.name=adamw",
                    )

    def by_load(self, states: Sequence[ChunkState]) -> tuple[list[ChunkState], dict[str, Peaks]]:
        """Places the experts of states that have them by number, by the loads of the last step.

        Returns:
          The states, and the peaks of each layer whose experts are placed.
        """
        peaks: dict[str, Peaks] = {}

        def order(chunk: Chunk, router: Mapping[str, jax.Array], layer: str) -> Sequence[int]:
            loads = np.asarray(router[COUNT.split("/")[1]], np.float64).tolist()
            num_devices = chunk.mesh.shape[Axis.EXPERT]
            order = expert_placement.placed(loads, num_devices)
            of = lambda order: expert_placement.peak(loads, order, num_devices)
            if any(loads):
                peaks[layer] = Peaks(of(range(len(loads))), of(order))
            return order

        return self._moved(states, order, lambda order: np.argsort(order)), peaks

    def by_number(self, states: Sequence[ChunkState]) -> list[ChunkState]:
        """The states as checkpoints have them."""
        read = lambda chunk, router, layer: np.asarray(router[NAME]).astype(int).tolist()
        return self._moved(states, read, lambda order: np.arange(len(order)))

    def _moved(
        self,
        states: Sequence[ChunkState],
        order_of: Callable[[Chunk, Mapping[str, jax.Array], str], Sequence[int]],
        place_of: Callable[[Sequence[int]], np.ndarray],
    ) -> list[ChunkState]:
        moved = []
        for chunk, state in zip(self.chunks, states, strict=True):
            fixed = state.fixed
            orders = {
                layer: order_of(chunk, fixed[layer][ROUTER], layer) for layer in chunk.placed_layers
            }
            state = jax.tree_util.tree_map_with_path(
                functools.partial(_in_order, chunk, orders), state
            )
            places = {layer: place_of(order) for layer, order in orders.items()}
            moved.append(with_places(chunk, state, places))
        return moved


def with_places(
    chunk: Chunk, state: ChunkState, places: Mapping[str, np.ndarray] | None = None
) -> ChunkState:
    """The state with the tables of the layers whose experts are placed; by number without them."""
    fixed = dict(state.fixed)
    for layer in chunk.placed_layers:
        like = chunk.state_shapes.fixed[layer][ROUTER][NAME]
        place_E = np.arange(like.shape[0]) if places is None else places[layer]
        array = sharding.put(np.asarray(place_E, like.dtype), like.sharding)
        fixed[layer] = {**fixed[layer], ROUTER: {**fixed[layer][ROUTER], NAME: array}}
    return replace(state, fixed=fixed)


def without_places(chunk: Chunk, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of a state, by their names in a checkpoint, which has no tables."""
    tables = {f"fixed.{layer}.{ROUTER}.{NAME}" for layer in chunk.placed_layers}
    return {key: x for key, x in arrays.items() if key not in tables}


def _of_experts(chunk: Chunk, path: tuple) -> tuple[str, Parameter | None]:
    """The layer of an array of a state, and the weight of placed experts that it belongs to."""
    names = [str(getattr(key, "key", "")) for key in path]
    for layer in set(names) & set(chunk.placed_layers):
        own = tuple(names[names.index(layer) + 1 :])
        for parameter in chunk.kinds[layer].parameters:
            if parameter.is_of_experts and own[: len(parameter.path)] == parameter.path:
                return layer, parameter
    return "", None


def _has_a_row_for_each(parameter: Parameter, shape: tuple[int, ...]) -> bool:
    """Whether an array that belongs to a weight of experts has a row for each of them."""
    whole = parameter.shape
    means = [whole[:dim] + whole[dim + 1 :] for dim in factored_dims(whole) or ()]
    if shape in means:  # of Adafactor, and one over experts has no rows of theirs
        return whole[1:] not in means and shape[0] == whole[0]
    return shape[:2] == whole[:2]


def _in_order(chunk: Chunk, orders: Orders, path: tuple, x: jax.Array) -> jax.Array:
    """An array of a state, with a row for each expert in its layer's order."""
    layer, parameter = _of_experts(chunk, path)
    if parameter is None or np.array_equal(orders[layer], np.arange(len(orders[layer]))):
        return x
    taken: jax.Array = _take(x.sharding)(x, np.asarray(orders[layer], np.int32))
    jax.block_until_ready(taken)
    return taken


@functools.cache
def _take(where: NamedSharding) -> Callable[[jax.Array, np.ndarray], jax.Array]:
    """A program that takes rows, which devices pass on to each other in a ring, and its array.

    `jnp.take` along a dim that is cut would gather the whole array on every device.
    """
    sizes, cuts = where.mesh.shape, sharding.spec_axes(where.spec, 1)[0]
    axes = tuple(axis for axis in sizes if axis in cuts)  # in whose order collectives count devices
    num_parts = math.prod(sizes[axis] for axis in axes)
    # The number of the part that each device of the ring has.
    part_n = np.arange(num_parts, dtype=np.int32).reshape([sizes[axis] for axis in cuts])
    part_n = part_n.transpose([cuts.index(axis) for axis in axes]).ravel()
    ring = [(i, (i - 1) % num_parts) for i in range(num_parts)]

    def on_shards(own: jax.Array, order_E: jax.Array) -> jax.Array:
        each, width = own.shape[:2]
        place = jax.lax.axis_index(axes) if axes else 0
        part = lambda turn: jnp.asarray(part_n)[(place + turn) % num_parts]
        wanted = jax.lax.dynamic_slice_in_dim(order_E, part(0) * each, each)

        def take(turn: jax.Array | int, rows: jax.Array, taken: jax.Array) -> jax.Array:
            row = wanted - part(turn) * each
            is_here = ((row >= 0) & (row < each)).reshape(-1, *[1] * (own.ndim - 1))
            return jnp.where(is_here, jnp.take(rows, row, axis=0, mode="clip"), taken)

        def pass_on(turn: jax.Array, held: tuple[jax.Array, jax.Array]) -> Any:
            rows, taken = held
            rows = jax.lax.ppermute(rows, axes, ring)
            return rows, take(turn, rows, taken)

        def move(own: jax.Array, start: jax.Array | int, size: int) -> jax.Array:
            piece = jax.lax.dynamic_slice_in_dim(own, start, size, axis=1)
            held = piece, take(0, piece, piece)
            taken = jax.lax.fori_loop(1, num_parts, pass_on, held)[1]
            return jax.lax.dynamic_update_slice_in_dim(own, taken, start, axis=1)

        size = -(-width // PIECES)
        whole = width // size
        own = jax.lax.fori_loop(0, whole, lambda i, own: move(own, i * size, size), own)
        rest = width - whole * size
        return move(own, whole * size, rest) if rest else own

    specs: dict[str, Any] = {"in_specs": (where.spec, P()), "out_specs": where.spec}
    run = jax.shard_map(on_shards, mesh=where.mesh, check_vma=False, **specs)
    return jax.jit(run, donate_argnums=0)
