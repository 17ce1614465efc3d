"""The meeting of islands: weights go to their owners, who give back the global weights.

Each parameter that trains has an owner among the islands (`plan.outer_rule`). The others give it
their weights, it takes the outer step, and gives all of them the new ones. Its sums are in the
order of the islands, so that they do not depend on who came first. A process has all islands, or
one stage of one. The arrays go through a transport as boundaries do.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from holmesjax.checkpoints import digests
from holmesjax.checkpoints.restoring import flatten
from holmesjax.config import OuterConfig
from holmesjax.islands.agreement import Digests, compare
from holmesjax.islands.crossings import from_owner, link, to_owner
from holmesjax.plan.outer_rule import outer_step, owner_of
from holmesjax.runtime.chunk import Chunk, ChunkState, Outer, Tree, kept_leaves
from holmesjax.transport.crossings import Key
from holmesjax.transport.local import LocalTransport, Transport

Arrays = dict[str, jax.Array]  # by layer and name: "block_000.up_DF"
AHEAD = 64  # arrays that are asked for at once, so that a far link is filled


class IslandMeetings:
    """The meetings of the islands of a run.

    Args:
      islands: the chunks here of each island, by its number: all of all, or some of one.
      count: islands of the run.
      outer: the rule of the outer step.
      transport: moves weights; None: all islands are here.
      told: takes the step and the digests of a stage after each meeting; None: they are compared.
    """

    def __init__(
        self,
        islands: Mapping[int, Sequence[Chunk]],
        count: int,
        outer: OuterConfig,
        transport: Transport | None = None,
        told: Callable[[int, Digests], None] | None = None,
    ):
        self._outer, self._count, self._told, self._round = outer, count, told, 0
        self._homes = {k: _homes(chunks) for k, chunks in islands.items()}
        model = next(iter(islands.values()))[0].model
        self._owners = owner_of(model, count)
        self.transport = transport or LocalTransport(dict(self._targets()))

    def _targets(self) -> Iterator[tuple[str, tuple[NamedSharding, str]]]:
        """Yields the sharding at its target of each array that crosses, and its link."""
        for k, homes in self._homes.items():
            for name, owner in self._owners.items():
                if owner != k:
                    yield to_owner(k, name), (self._homes[owner][name].sharding, link(k, owner))
                    yield from_owner(k, name), (homes[name].sharding, link(owner, k))

    def begin(self, states: Mapping[int, Sequence[ChunkState]]) -> dict[int, list[ChunkState]]:
        """The states of islands before their first step, which have equal weights then."""
        return {
            k: [replace(state, outer=self._begun(k, state.params)) for state in island]
            for k, island in states.items()
        }

    def _begun(self, island: int, params: Tree) -> Outer:
        weights = self._owned(island, params)
        zeros = lambda x: jnp.zeros_like(x, device=x.sharding)
        return Outer(jax.tree.map(jnp.copy, weights), jax.tree.map(zeros, weights))

    def _owned(self, island: int, tree: Tree) -> Tree:
        return kept_leaves(tree, lambda name: self._owners[name] == island)

    def meet(
        self, states: Mapping[int, Sequence[ChunkState]], step: int
    ) -> dict[int, list[ChunkState]]:
        """The states of the islands after a meeting: all have the same weights.

        Args:
          states: of the chunks here of each island.
          step: after which it is.

        Raises PeerError where all islands are here, and one has other weights than the owners.
        """
        self._round += 1
        of_islands = {
            k: _arrays([state.params for state in island]) for k, island in states.items()
        }
        for k, arrays in of_islands.items():
            for name, array in arrays.items():
                if self._owners[name] != k:
                    self.transport.offer(self._key(to_owner(k, name)), array)
        outer = {k: self._step(k, of_islands[k], island) for k, island in states.items()}
        met = {k: self._after(k, island, outer[k]) for k, island in states.items()}
        found = [Digests(*self._digests(island)) for island in met.values()]
        if self._told is None:
            compare(step, found)
        else:
            self._told(step, *found)
        return met

    def _after(
        self, island: int, states: Sequence[ChunkState], outer: tuple[Arrays, Arrays]
    ) -> list[ChunkState]:
        """An island's states with the global weights, and what it keeps for the next meeting."""
        weights, new = self._new_weights(island, outer[0]), []
        for state in states:
            owned = self._owned(island, state.params)
            kept = Outer(*(_like(owned, arrays) for arrays in outer))
            new.append(replace(state, params=_like(state.params, weights), outer=kept))
        return new

    def take_bytes(self) -> dict[str, int]:
        """Returns the bytes that crossed between islands since the last call, by link."""
        return self.transport.take_bytes()

    def _key(self, crossing: str) -> Key:
        return Key(crossing, self._round, 0)

    def _fetched(self, crossings: Sequence[str]) -> Iterator[jax.Array]:
        """Yields arrays in this order, in which all processes of a stage fetch them."""
        keys = [self._key(crossing) for crossing in crossings]
        self.transport.expect(keys)
        for i, key in enumerate(keys):
            ahead = [key for key in keys[i : i + AHEAD] if not self.transport.arrived(key)]
            while key in ahead:
                self.transport.wait(ahead)
                ahead = [key for key in ahead if not self.transport.arrived(key)]
            yield self.transport.fetch(key)

    def _step(
        self, island: int, own: Arrays, states: Sequence[ChunkState]
    ) -> tuple[Arrays, Arrays]:
        """The global weights and the momentum of what an island owns; it offers the weights."""
        kept = [state.outer for state in states if state.outer]
        weights = _arrays([outer.weights for outer in kept])
        momentum = _arrays([outer.momentum for outer in kept])
        others = [k for k in range(self._count) if k != island]
        arriving = self._fetched([to_owner(k, name) for name in weights for k in others])
        for name in weights:
            theirs = {k: next(arriving) for k in others}
            all_weights = [own[name] if k == island else theirs[k] for k in range(self._count)]
            step = _outer_program(self._outer, weights[name].sharding)
            weights[name], momentum[name] = step(all_weights, weights[name], momentum[name])
            for k in others:
                self.transport.offer(self._key(from_owner(k, name)), weights[name])
        return weights, momentum

    def _new_weights(self, island: int, owned: Arrays) -> Arrays:
        """The global weights on an island: copies, since a step takes their memory."""
        homes = self._homes[island]
        theirs = [name for name in homes if name not in owned]
        arriving = self._fetched([from_owner(island, name) for name in theirs])
        found = {**owned, **dict(zip(theirs, arriving, strict=True))}
        return {name: _copy_program(homes[name].sharding)(found[name]) for name in homes}

    def _digests(self, states: Sequence[ChunkState]) -> tuple[dict[str, str], dict[str, str]]:
        """The digests of an island's weights here, and of the global weights that it owns.

        All processes of a stage come here with the same arrays.
        """
        weights = [digests.of(flatten(state.params)) for state in states]
        owned = [flatten(state.outer.weights) for state in states if state.outer]
        of_owned = [digests.of(arrays) for arrays in owned if arrays]
        joined = lambda trees: {name: x for tree in trees for name, x in tree.items()}
        return joined(weights), joined(of_owned)


def _homes(chunks: Sequence[Chunk]) -> dict[str, jax.ShapeDtypeStruct]:
    return _arrays([chunk.state_shapes.params for chunk in chunks])


def _arrays(trees: Sequence[Tree]) -> dict:
    return {name: x for tree in trees for name, x in flatten(tree).items()}


def _like(tree: Tree, arrays: Arrays) -> Tree:
    """The arrays by their names in the form of a tree."""
    return jax.tree.unflatten(jax.tree.structure(tree), [arrays[name] for name in flatten(tree)])


@functools.cache
def _outer_program(
    outer: OuterConfig, where: NamedSharding
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    return jax.jit(functools.partial(outer_step, outer), out_shardings=(where, where))


@functools.cache
def _copy_program(where: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(jnp.copy, out_shardings=where)
