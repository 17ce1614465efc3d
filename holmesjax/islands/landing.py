"""The arrays of an island that is a job of its own, as they land and as a checkpoint has them."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from holmesjax.checkpoints.array_keys import flatten
from holmesjax.islands.meeting import Arrays
from holmesjax.parallel import sharding
from holmesjax.runtime.chunk import ChunkState, Tree


class RoundStanding(NamedTuple):
    """How far an island is with the rounds, as its checkpoint has it."""

    round: int  # the newest that has landed
    counted: int  # its own steps that are in the global weights of that round
    sent_round: int  # to which it has sent, without an answer; -1: none
    sent_step: int  # its own, after which it has sent; -1


NOWHERE = RoundStanding(-1, 0, -1, -1)


def standing_in(states: Sequence[ChunkState]) -> RoundStanding:
    """The standing in the states of a checkpoint."""
    by_layer = [state.outer.rounds for state in states if state.outer and state.outer.rounds]
    found = [x for rounds in by_layer for x in rounds.values()]
    return RoundStanding(*map(int, on_host(found[0]))) if found else NOWHERE


def with_standing(state: ChunkState, standing: RoundStanding) -> ChunkState:
    """The state of a checkpoint with the standing of the island, by layer."""
    assert state.outer is not None, "an island has it"
    numbers, arrays = np.array(standing, np.int32), jax.tree.leaves(state.params)
    where = everywhere(arrays[0] if arrays else state.opt_state.updates)
    rounds = {layer: put(numbers, where) for layer in state.params}
    return replace(state, outer=replace(state.outer, rounds=rounds))


def params_of(states: Sequence[ChunkState]) -> Arrays:
    """The weights of an island, by layer and name."""
    return {name: x for state in states for name, x in flatten(state.params).items()}


def global_weights_of(states: Sequence[ChunkState]) -> Arrays:
    """The global weights of the newest round that an island has, by layer and name."""
    outer = [state.outer.weights for state in states if state.outer]
    return {name: x for tree in outer for name, x in flatten(tree).items()}


def like(tree: Tree, arrays: Mapping[str, jax.Array]) -> Tree:
    """Arrays by layer and name in the form of a tree."""
    return jax.tree.unflatten(jax.tree.structure(tree), [arrays[name] for name in flatten(tree)])


def copies(arrays: Mapping[str, jax.Array]) -> Arrays:
    """Copies, since a step takes the memory of its weights."""
    return {name: _copy_program(x.sharding)(x) for name, x in arrays.items()}


def on_host(array: jax.Array) -> np.ndarray:
    """An array that is whole on a device of this process."""
    is_here = array.is_fully_addressable
    return np.asarray(array if is_here else array.addressable_data(0))


def put(array: np.ndarray, where: Any) -> jax.Array:
    """An array of the host on devices; each process puts its part."""
    return jax.make_array_from_callback(array.shape, where, lambda index: array[index])


def landed(own: jax.Array, new: jax.Array, before: jax.Array | None) -> jax.Array:
    """The weights that an island goes on with; it keeps no change where `before` is None."""
    if before is None:
        return _copy_program(new.sharding)(new)
    return _land_program(own.sharding)(own, new, before)


def with_updates(state: ChunkState, change: int) -> ChunkState:
    """A state whose schedule is so many updates further, which its moments have not seen."""
    counts = {"updates": state.opt_state.updates}
    if (missed := getattr(state.opt_state, "missed", None)) is not None:
        counts["missed"] = missed
    added = {name: _add_program(x.sharding)(x, change) for name, x in counts.items()}
    return replace(state, opt_state=state.opt_state._replace(**added))


def whole(x: jax.Array) -> jax.Array:
    """An array that `on_host` takes; all processes that share it come here."""
    return x if x.is_fully_addressable else _whole_program(everywhere(x))(x)


def everywhere(x: jax.Array) -> NamedSharding:
    """The sharding of a copy on each device of an array."""
    assert isinstance(x.sharding, NamedSharding), x.sharding
    assert isinstance(x.sharding.mesh, Mesh), x.sharding
    return sharding.replicated(x.sharding.mesh)


def _with_change(own: jax.Array, new: jax.Array, before: jax.Array) -> jax.Array:
    """W + (G - S), and W to the bit where G is S."""
    return jnp.where(new == before, own, own + (new - before))


@functools.cache
def _land_program(where: NamedSharding) -> Callable[..., jax.Array]:
    return jax.jit(_with_change, out_shardings=where)


@functools.cache
def _copy_program(where: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(jnp.copy, out_shardings=where)


@functools.cache
def _add_program(where: Any) -> Callable[..., jax.Array]:
    return jax.jit(lambda x, change: x + change, out_shardings=where)


@functools.cache
def _whole_program(where: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: x, out_shardings=where)
