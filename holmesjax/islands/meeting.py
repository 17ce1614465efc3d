"""The meeting of islands: weights go to their owners, who give back the global weights.

Each parameter that trains has an owner among the islands (`plan.outer_rule`). The others give it
their weights, it takes the outer step, and gives all of them the new ones. Its sums are in the
order of the islands, so that they do not depend on who came first. Here all islands are in one
process; the arrays go through a transport as boundaries do.
"""

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from holmesjax.checkpoints import digests
from holmesjax.checkpoints.restoring import flatten
from holmesjax.config import OuterConfig
from holmesjax.errors import FatalError
from holmesjax.plan.outer_rule import outer_step, owners
from holmesjax.runtime.chunk import Chunk, ChunkState, Outer, Tree, kept_leaves
from holmesjax.transport.crossings import Key
from holmesjax.transport.local import LocalTransport

Arrays = dict[str, jax.Array]  # by layer and name: "block_000.up_DF"


class IslandMeetings:
    """The meetings of the islands of a run.

    Args:
      islands: the chunks of each island, all of them here.
      outer: the rule of the outer step.
    """

    def __init__(self, islands: Sequence[Sequence[Chunk]], outer: OuterConfig):
        self._outer, self._chunks, self._round = outer, islands, 0
        self._homes = [_homes(chunks) for chunks in islands]
        shapes = {name: where.shape for name, where in self._homes[0].items()}
        self._owners = owners({n: math.prod(shape) for n, shape in shapes.items()}, len(islands))
        self._transport = LocalTransport(dict(self._targets()))

    def _targets(self) -> Iterator[tuple[str, tuple[NamedSharding, str]]]:
        """Yields the sharding at its target of each array that crosses, and its link."""
        for k, homes in enumerate(self._homes):
            for name, owner in self._owners.items():
                if owner != k:
                    link = f"island {k} -> island {owner}", f"island {owner} -> island {k}"
                    yield f"weights {k} {name}", (self._homes[owner][name].sharding, link[0])
                    yield f"global {k} {name}", (homes[name].sharding, link[1])

    def begin(self, states: Sequence[Sequence[ChunkState]]) -> list[list[ChunkState]]:
        """The states of islands before their first step, which have equal weights then."""
        return [
            [replace(state, outer=self._begun(k, state.params)) for state in island]
            for k, island in enumerate(states)
        ]

    def _begun(self, island: int, params: Tree) -> Outer:
        weights = self._owned(island, params)
        zeros = lambda x: jnp.zeros_like(x, device=x.sharding)
        return Outer(jax.tree.map(jnp.copy, weights), jax.tree.map(zeros, weights))

    def _owned(self, island: int, tree: Tree) -> Tree:
        return kept_leaves(tree, lambda name: self._owners[name] == island)

    def meet(self, states: Sequence[Sequence[ChunkState]], step: int) -> list[list[ChunkState]]:
        """The states of all islands after a meeting: all have the same weights.

        Args:
          states: of the chunks of each island.
          step: after which it is.

        Raises FatalError where an island's weights differ from those of the first.
        """
        self._round += 1
        of_islands = [self._arrays([state.params for state in island]) for island in states]
        for k, arrays in enumerate(of_islands):
            for name, owner in self._owners.items():
                if owner != k:
                    self._transport.offer(self._key("weights", k, name), arrays[name])
        outer = [self._step(k, of_islands[k], island) for k, island in enumerate(states)]
        met = [self._after(k, island, outer) for k, island in enumerate(states)]
        self._compare(met, step)
        return met

    def _after(
        self, island: int, states: Sequence[ChunkState], outer: Sequence[tuple[Arrays, Arrays]]
    ) -> list[ChunkState]:
        """An island's states with the global weights, and what it keeps for the next meeting."""
        weights, new = self._new_weights(island, outer), []
        for state in states:
            owned = self._owned(island, state.params)
            kept = Outer(*(_like(owned, arrays) for arrays in outer[island]))
            new.append(replace(state, params=_like(state.params, weights), outer=kept))
        return new

    def take_bytes(self) -> dict[str, int]:
        """Returns the bytes that crossed between islands since the last call, by link."""
        return self._transport.take_bytes()

    def _key(self, what: str, island: int, name: str) -> Key:
        return Key(f"{what} {island} {name}", self._round, 0)

    @staticmethod
    def _arrays(trees: Sequence[Tree]) -> Arrays:
        return {name: x for tree in trees for name, x in flatten(tree).items()}

    def _step(
        self, island: int, own: Arrays, states: Sequence[ChunkState]
    ) -> tuple[Arrays, Arrays]:
        """The global weights and the momentum of what an island owns; it offers the weights."""
        kept = [state.outer for state in states if state.outer]
        weights = self._arrays([outer.weights for outer in kept])
        momentum = self._arrays([outer.momentum for outer in kept])
        for name in weights:
            others = range(len(self._homes))
            all_weights = [
                own[name] if k == island else self._transport.fetch(self._key("weights", k, name))
                for k in others
            ]
            step = _outer_program(self._outer)
            weights[name], momentum[name] = step(all_weights, weights[name], momentum[name])
            for k in others:
                if k != island:
                    self._transport.offer(self._key("global", k, name), weights[name])
        return weights, momentum

    def _new_weights(self, island: int, outer: Sequence[tuple[Arrays, Arrays]]) -> Arrays:
        """The global weights on an island: copies, since a step takes their memory."""
        return {
            name: jnp.copy(outer[owner][0][name])
            if owner == island
            else jnp.copy(self._transport.fetch(self._key("global", island, name)))
            for name, owner in self._owners.items()
        }

    def _compare(self, states: Sequence[Sequence[ChunkState]], step: int) -> None:
        island_digests = [digest(island) for island in states]
        for k, island_digest in enumerate(island_digests):
            if island_digest != island_digests[0]:
                raise FatalError(
                    f"island {k}",
                    f"has other weights than island 0 after the meeting of step {step}",
                    found=f"digest {island_digest}, not {island_digests[0]}",
                    fix="start again from the last checkpoint; look at the memory of its devices",
                )


def _homes(chunks: Sequence[Chunk]) -> dict[str, jax.ShapeDtypeStruct]:
    shapes = [flatten(chunk.state_shapes.params) for chunk in chunks]
    return {name: x for chunk in shapes for name, x in chunk.items()}


def _like(tree: Tree, arrays: Arrays) -> Tree:
    """The arrays by their names in the form of a tree."""
    return jax.tree.unflatten(jax.tree.structure(tree), [arrays[name] for name in flatten(tree)])


@functools.cache
def _outer_program(outer: OuterConfig) -> Callable[..., tuple[jax.Array, jax.Array]]:
    return jax.jit(functools.partial(outer_step, outer))


def digest(states: Sequence[ChunkState]) -> str:
    """12 hexadecimal digits of all weights of an island, however they are cut."""
    found = {k: x for state in states for k, x in digests.of(flatten(state.params)).items()}
    text = ",".join(f"{name} {found[name]}" for name in sorted(found))
    return hashlib.sha256(text.encode()).hexdigest()[:12]
