"""The meeting of islands: weights go to their owners, who give back the global weights.

Each parameter that trains has an owner among the islands (`plan.outer_rule`). The others give it
their weights, it takes the outer step, and gives all of them the new ones. Its sums are in the
order of the islands, so that they do not depend on who came first. A process has all islands, or
one stage of one. The arrays go through a transport as boundaries do.

A meeting has three parts: islands send (`send`), owners sum and send (`merge`), and islands take
the global weights (`land`). Steps may lie between, while arrays come in the background.

Differences cross in place of weights where a codec rounds. Each island adds what comes back to the
global weights that it knows, as the owner does, so that all have the same bits.
"""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from holmesjax.checkpoints import digests
from holmesjax.checkpoints.array_keys import flatten
from holmesjax.config import OuterConfig
from holmesjax.islands.agreement import Digests, compare
from holmesjax.islands.crossings import again, from_owner, link, to_owner, ways_of
from holmesjax.plan.codecs import Codec, codec_of
from holmesjax.plan.outer_rule import (
    blend,
    kept_by,
    own_step,
    owner_of,
    owner_step,
    sends_weights,
    trained_sizes,
)
from holmesjax.runtime.chunk import Chunk, ChunkState, kept_leaves
from holmesjax.runtime.outer_state import IslandArrays, Outer, Tree
from holmesjax.transport.crossings import Key
from holmesjax.transport.local import LocalTransport, Transport

Arrays = dict[str, jax.Array]  # by layer and name: "block_000.up_DF"
States = Mapping[int, Sequence[ChunkState]]  # of the chunks here of each island
AHEAD = 64  # arrays that are asked for at once, so that a far link is filled


@dataclass(eq=False)
class Round:
    """A meeting of some parameters that is under way."""

    number: int  # counts those of this session, alike on all islands
    step: int  # after which it began
    names: Collection[str]  # of the parameters
    # By island, what it sends of what it owns: nothing of it crosses.
    owned: dict[int, Arrays] = field(default_factory=dict)
    # By island, of eager updates: its own part of the step, and the momentum behind it.
    ahead: dict[int, Arrays] = field(default_factory=dict)
    momentum: dict[int, Arrays] = field(default_factory=dict)
    asked: set[Key] = field(default_factory=set)  # what comes in the background
    is_merged: bool = False
    is_again: bool = False  # owners have summed before

    def key(self, crossing: str) -> Key:
        """The key of an array of this meeting."""
        return Key(crossing, self.number, 0)


class IslandMeetings:
    """The meetings of the islands of a run.

    Args:
      islands: the chunks here of each island, by its number: all of all, or some of one.
      count: islands of the run.
      outer: the rule of the outer step.
      transport: moves weights; None: all islands are here.
      told: takes the step and the digests of a stage after each meeting; None: they are compared.
      shares: of the batch that each island takes; empty: equal ones.
    """

    def __init__(
        self,
        islands: Mapping[int, Sequence[Chunk]],
        count: int,
        outer: OuterConfig,
        transport: Transport | None = None,
        told: Callable[[int, Digests], None] | None = None,
        shares: tuple[int, ...] = (),
    ):
        self.outer, self.count, self._told, self._num_rounds = outer, count, told, 0
        self._shares = shares or (1,) * count
        self._codec, self._kept = codec_of(outer), kept_by(outer)
        self._homes = {k: _homes(chunks) for k, chunks in islands.items()}
        model = next(iter(islands.values()))[0].model
        self._owners = owner_of(model, count)
        self.num_numbers = sum(trained_sizes(model).values())
        self.transport = transport or LocalTransport(dict(self._targets()))

    def _targets(self) -> Iterator[tuple[str, tuple[NamedSharding, str]]]:
        """Yields the sharding at its target of each array that crosses, and its link."""
        for name, way in ways_of(self.outer, self._owners, self.count):
            where = self._homes[way.target][name].sharding
            yield way.crossing, (where, link(way.source, way.target))

    def begin(self, states: States) -> States:
        """The states of islands with what they keep between meetings, where they lack it.

        Islands have equal weights before their first step, and where others than before go on.
        """
        return {
            k: [replace(state, outer=self._begun(k, state)) for state in island]
            for k, island in states.items()
        }

    def _begun(self, island: int, state: ChunkState) -> Outer:
        zeros = functools.partial(jax.tree.map, lambda x: jnp.zeros_like(x, device=x.sharding))
        copies = functools.partial(jax.tree.map, jnp.copy)
        kept, outer = self._kept, state.outer
        if outer is None:
            weights = copies(self._owned(island, state.params))
            outer = Outer(weights, zeros(weights) if "momentum" in kept.owned else None)
        if "before" in kept.owned and outer.before is None:
            outer = replace(outer, before=copies(outer.weights))
        if kept.own and outer.own is None:
            first = lambda name: (zeros if name == "momentum" else copies)(state.params)
            outer = replace(outer, own=IslandArrays(**{name: first(name) for name in kept.own}))
        return outer

    def _owned(self, island: int, tree: Tree) -> Tree:
        return kept_leaves(tree, lambda name: self._owners[name] == island)

    @property
    def names(self) -> frozenset[str]:
        """All parameters that train, by layer and name."""
        return frozenset(self._owners)

    def meet(self, states: States, step: int) -> States:
        """The states of the islands after a meeting: all have the same weights.

        Args:
          states: of the chunks here of each island.
          step: after which it is.

        Raises PeerError where all islands are here, and one has other weights than the owners.
        """
        meeting = self.send(states, step, self.names)
        return self.land(meeting, self.merge(meeting, states))[0]

    def send(
        self, states: States, step: int, names: Collection[str], in_background: bool = False
    ) -> Round:
        """Begins a meeting: gives weights to their owners.

        Args:
          states: of the chunks here of each island.
          step: after which it is.
          names: of the parameters that meet.
          in_background: whether steps go on meanwhile. They take the memory of the weights, so
            copies are sent then.
        """
        meeting = self._next_round(step, names)
        for k, island in states.items():
            sent = self._sent(island, names, in_background)
            if self.outer.rule == "eager":
                self._take_own_step(meeting, k, island, sent)
            meeting.owned[k] = {name: x for name, x in sent.items() if self._owners[name] == k}
            for name, x in sent.items():
                if name not in meeting.owned[k]:
                    self.transport.offer(meeting.key(to_owner(k, name)), x)
        if in_background:
            self._ask(meeting, self._to_owners(meeting))
            self._ask(meeting, self._from_owners(meeting))
        return meeting

    def _sent(
        self, island: Sequence[ChunkState], names: Collection[str], in_background: bool
    ) -> Arrays:
        """The arrays that an island sends of these parameters: weights, or encoded differences."""
        weights = _arrays([state.params for state in island])
        weights = {name: x for name, x in weights.items() if name in names}
        if not sends_weights(self.outer):
            base = own_arrays(island, "start" if self.outer.rule == "eager" else "known")
            encoded = lambda name, x: difference_program(self._codec, x.sharding)(base[name], x)
            return {name: encoded(name, x) for name, x in weights.items()}
        if in_background:
            return {name: copy_program(x.sharding)(x) for name, x in weights.items()}
        return weights

    def _take_own_step(
        self, meeting: Round, k: int, island: Sequence[ChunkState], sent: Arrays
    ) -> None:
        momentum = own_arrays(island, "momentum")
        meeting.ahead[k], meeting.momentum[k] = {}, {}
        for name, x in sent.items():
            parts = sum(self._shares) / self._shares[k]
            step = _own_program(self.outer, parts, x.sharding)
            meeting.ahead[k][name], meeting.momentum[k][name] = step(x, momentum[name])

    def send_again(
        self, states: States, step: int, names: Collection[str], to: Collection[int]
    ) -> Round:
        """A meeting whose owners have summed before: they send the global weights to islands."""
        meeting = self._next_round(step, names)
        meeting.is_merged = meeting.is_again = True
        for k, island in states.items():
            weights = _arrays([state.outer.weights for state in island if state.outer])
            for name, x in weights.items():
                if name in names:
                    self._offer(meeting, k, name, x, to)
        keys = {k: keys for k, keys in self._from_owners(meeting).items() if k in to}
        self._ask(meeting, keys)
        return meeting

    def _next_round(self, step: int, names: Collection[str]) -> Round:
        self._num_rounds += 1
        return Round(self._num_rounds, step, names)

    def merge(self, meeting: Round, states: States) -> States:
        """Owners sum what has come, take the outer step, and send the global weights to all."""
        assert not meeting.is_merged, "owners sum once"
        meeting.is_merged = True
        merged = {k: self._merge_on(meeting, k, island) for k, island in states.items()}
        meeting.owned.clear()
        return merged

    def _merge_on(
        self, meeting: Round, island: int, states: Sequence[ChunkState]
    ) -> list[ChunkState]:
        kept = [state.outer for state in states if state.outer]
        weights = _arrays([outer.weights for outer in kept])
        momentum = _arrays([outer.momentum for outer in kept])
        before = _arrays([outer.before for outer in kept])
        own, others = meeting.owned[island], [k for k in range(self.count) if k != island]
        arriving = self._fetched(meeting, [to_owner(k, name) for name in own for k in others])
        for name in own:
            theirs = {k: next(arriving) for k in others}
            sent = [own[name] if k == island else theirs[k] for k in range(self.count)]
            was, where = weights[name], weights[name].sharding
            step = _owner_program(self.outer, self._shares, where)
            weights[name], momentum[name] = step(sent, was, momentum[name], before.get(name))
            back = weights[name]
            if not self._codec.is_exact:
                back = difference_program(self._codec, where)(back, was)
                weights[name] = _sum_program(self._codec, where)(was, back)
            before |= {name: was} if name in before else {}
            self._offer(meeting, island, name, back, range(self.count))
        merged = []
        for state in states:
            owned = self._owned(island, state.params)
            late = arrays_like(owned, before) if "before" in self._kept.owned else None
            outer = Outer(arrays_like(owned, weights), arrays_like(owned, momentum), late)
            outer = replace(outer, own=state.outer.own if state.outer else None)
            merged.append(replace(state, outer=outer))
        return merged

    def _offer(
        self, meeting: Round, owner: int, name: str, array: jax.Array, to: Collection[int]
    ) -> None:
        """Sends global weights to others than their owner."""
        for k in to:
            if k != owner:
                self.transport.offer(self._back(meeting, k, name), array)

    def _back(self, meeting: Round, island: int, name: str) -> Key:
        """The key of what an owner sends to an island."""
        is_whole = meeting.is_again and not (self._codec.is_exact or self.outer.has_pairs)
        return meeting.key((again if is_whole else from_owner)(island, name))

    def land(
        self, meeting: Round, states: States, share: float = 1.0, following: Round | None = None
    ) -> tuple[States, dict[int, Arrays]]:
        """Ends a meeting: islands go on with the global weights, which are told or compared.

        Args:
          meeting: that owners have merged.
          states: of the chunks here of each island.
          share: of the global weights in the new ones; the rest is that of the island's own.
          following: the meeting that has begun just now, whose own steps islands take at once.

        Returns the new states, and the global weights of each island here. Raises as `meet`.
        """
        landed, met, found = self.global_weights(meeting, states), {}, []
        for k, island in states.items():
            weights = landed[k]
            if following and following.ahead:
                ahead = following.ahead[k]
                weights = {n: _less_program(x.sharding)(x, ahead[n]) for n, x in weights.items()}
            elif share == 1.0:  # a step takes the memory of its parameters
                weights = {name: copy_program(x.sharding)(x) for name, x in weights.items()}
            momentum = following.momentum.get(k) if following else None
            met[k] = [
                _with_own(with_weights(state, weights, share), landed[k], momentum)
                for state in island
            ]
            stages = [[*flatten(state.params)] for state in island]
            owned = self._owned_of(meeting, island)
            found.append(Digests(digests_of(stages, landed[k]), digests_of(stages, owned)))
        if following:  # islands have taken these
            following.ahead.clear()
            following.momentum.clear()
        self._tell(meeting.step, found)
        return met, landed

    def _tell(self, step: int, found: Sequence[Digests]) -> None:
        if self._told is None:
            compare(step, found)
        else:
            self._told(step, *found)

    def global_weights(self, meeting: Round, states: States) -> dict[int, Arrays]:
        """The global weights of a meeting on each island here that they are sent to."""
        found = {}
        for k, island in states.items():
            owned = self._owned_of(meeting, island)
            found[k] = self._new_weights(meeting, k, owned)
            if self._codec.is_exact or self.outer.has_pairs or meeting.is_again:
                continue
            known = own_arrays(island, "known")
            for name in [name for name in found[k] if name not in owned]:
                add = _sum_program(self._codec, known[name].sharding)
                found[k][name] = add(known[name], found[k][name])
        return found

    def _owned_of(self, meeting: Round, island: Sequence[ChunkState]) -> Arrays:
        outer = _arrays([state.outer.weights for state in island if state.outer])
        return {name: x for name, x in outer.items() if name in meeting.names}

    def take_bytes(self) -> dict[str, int]:
        """Returns the bytes that crossed between islands since the last call, by link."""
        return self.transport.take_bytes()

    def _to_owners(self, meeting: Round) -> dict[int, list[Key]]:
        """The arrays that come to each island here for its own parameters, by their keys."""
        others = lambda k: (other for other in range(self.count) if other != k)
        return {
            k: [
                meeting.key(to_owner(other, name))
                for name in homes
                if name in meeting.names and self._owners[name] == k
                for other in others(k)
            ]
            for k, homes in self._homes.items()
        }

    def _from_owners(self, meeting: Round) -> dict[int, list[Key]]:
        """The global weights that come to each island here."""
        return {
            k: [
                self._back(meeting, k, name)
                for name in homes
                if name in meeting.names and self._owners[name] != k
            ]
            for k, homes in self._homes.items()
        }

    def _ask(self, meeting: Round, keys: Mapping[int, Sequence[Key]]) -> None:
        for of_island in keys.values():
            meeting.asked.update(of_island)
            self.transport.ask(of_island)

    def _fetched(self, meeting: Round, crossings: Sequence[str]) -> Iterator[jax.Array]:
        """Yields arrays in this order, in which all processes of a stage fetch them."""
        yield from self._taken(meeting, [meeting.key(crossing) for crossing in crossings])

    def _taken(self, meeting: Round, keys: Sequence[Key]) -> Iterator[jax.Array]:
        self.transport.expect([key for key in keys if key not in meeting.asked])
        for i, key in enumerate(keys):
            ahead = [key for key in keys[i : i + AHEAD] if not self.transport.arrived(key)]
            while key in ahead:
                self.transport.wait(ahead)
                ahead = [key for key in ahead if not self.transport.arrived(key)]
            yield self.transport.fetch(key)

    def _new_weights(self, meeting: Round, island: int, owned: Arrays) -> Arrays:
        """The arrays of a meeting that have come to an island, and the global weights it owns."""
        homes = [name for name in self._homes[island] if name in meeting.names]
        theirs = [name for name in homes if name not in owned]
        arriving = self._taken(meeting, [self._back(meeting, island, name) for name in theirs])
        return {**owned, **dict(zip(theirs, arriving, strict=True))}


def _homes(chunks: Sequence[Chunk]) -> dict[str, jax.ShapeDtypeStruct]:
    return _arrays([chunk.state_shapes.params for chunk in chunks])


def _arrays(trees: Sequence[Tree]) -> dict:
    return {name: x for tree in trees for name, x in flatten(tree).items()}


def arrays_like(tree: Tree, arrays: Arrays) -> Tree:
    """The arrays by their names in the form of a tree."""
    return jax.tree.unflatten(jax.tree.structure(tree), [arrays[name] for name in flatten(tree)])


def with_weights(state: ChunkState, weights: Arrays, share: float = 1.0) -> ChunkState:
    """A state in which global weights have a share in the weights that they are of."""
    arrays = flatten(state.params)
    for name, array in arrays.items():
        if name in weights:
            blend = _blend_program(share, array.sharding)
            arrays[name] = weights[name] if share == 1.0 else blend(array, weights[name])
    return replace(state, params=arrays_like(state.params, arrays))


def own_arrays(island: Sequence[ChunkState], what: str) -> Arrays:
    """Arrays that an island keeps of all its parameters: "start", "momentum" or "known"."""
    own = [state.outer.own for state in island if state.outer and state.outer.own]
    return _arrays([getattr(kept, what) for kept in own])


def all_landed(state: ChunkState) -> ChunkState:
    """A state of an island that begins with the global weights: nothing is on its way any more."""
    if state.outer is None or state.outer.before is None:
        return state
    return replace(state, outer=replace(state.outer, before=state.outer.weights))


def _with_own(state: ChunkState, landed: Arrays, momentum: Arrays | None) -> ChunkState:
    """A state whose island knows the global weights, and has begun with its own ones."""
    if state.outer is None or state.outer.own is None:
        return state
    own, weights = state.outer.own, flatten(state.params)
    if own.known is not None:
        own = replace(own, known=arrays_like(own.known, flatten(own.known) | landed))
    if own.start is not None:
        copies = {name: copy_program(x.sharding)(x) for name, x in weights.items()}
        own = replace(own, start=arrays_like(own.start, copies))
    if own.momentum is not None and momentum is not None:
        own = replace(own, momentum=arrays_like(own.momentum, momentum))
    return replace(state, outer=replace(state.outer, own=own))


def digests_of(trees: Sequence[Sequence[str]], arrays: Arrays) -> dict[str, str]:
    """The digests of those of some arrays that are here, by the names of each stage.

    All processes of a stage come here with the same arrays.
    """
    of_stages = [{name: arrays[name] for name in names if name in arrays} for names in trees]
    return {name: x for tree in of_stages if tree for name, x in digests.of(tree).items()}


@functools.cache
def _owner_program(
    outer: OuterConfig, shares: tuple[int, ...], where: NamedSharding
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    step = functools.partial(owner_step, outer, shares=shares)
    return jax.jit(step, out_shardings=(where, where))


@functools.cache
def _own_program(
    outer: OuterConfig, parts: float, where: NamedSharding
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    step = lambda sent, momentum: own_step(outer, sent, parts, momentum)
    return jax.jit(step, out_shardings=(where, where))


@functools.cache
def difference_program(codec: Codec, where: NamedSharding) -> Callable[..., jax.Array]:
    return jax.jit(lambda x, y: codec.encode(x - y), out_shardings=where)


@functools.cache
def _sum_program(codec: Codec, where: NamedSharding) -> Callable[..., jax.Array]:
    return jax.jit(lambda x, sent: x + codec.decode(sent), out_shardings=where)


@functools.cache
def _less_program(where: NamedSharding) -> Callable[..., jax.Array]:
    return jax.jit(lambda x, y: x - y, out_shardings=where)


@functools.cache
def copy_program(where: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(jnp.copy, out_shardings=where)


@functools.cache
def _blend_program(share: float, where: NamedSharding) -> Callable[..., jax.Array]:
    return jax.jit(functools.partial(blend, share), out_shardings=where)
