"""NoLoCo's meetings: islands meet in random pairs, by the rule of `plan.gossip`.

One of a pair sends the other its difference by the codec, and its slow weights in float32: what
tells two islands' slow weights apart is small beside them. Islands have weights of their own after
a meeting. The global weights are the mean of their slow weights, which owners take for a validation
and for a checkpoint, and only then.
"""

import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from holmesjax.checkpoints.array_keys import flatten
from holmesjax.config import OuterConfig
from holmesjax.islands.agreement import Digests
from holmesjax.islands.crossings import in_pair, to_owner
from holmesjax.islands.meeting import (
    Arrays,
    IslandMeetings,
    Round,
    States,
    arrays_like,
    copy_program,
    difference_program,
    digests_of,
    own_arrays,
    with_weights,
)
from holmesjax.plan.codecs import codec_of
from holmesjax.plan.gossip import pair_step, pairs
from holmesjax.plan.meeting_steps import MeetingSteps
from holmesjax.plan.outer_rule import mean_of
from holmesjax.runtime.chunk import ChunkState

WHAT = ("delta", "slow")  # crosses in a pair


class PairMeetings(IslandMeetings):
    """The meetings in pairs of the islands of a run."""

    def meet(self, states: States, step: int) -> States:
        """The states of the islands after each has met its partner of this step.

        Args:
          states: of the chunks here of each island.
          step: after which it is.

        Raises PeerError where all islands are here, and one has other arrays than were sent.
        """
        meeting = self._next_round(step, self.names)
        groups = [group for group in pairs(self.count, step) if not states.keys().isdisjoint(group)]
        sent: dict[int, dict[str, Arrays]] = {}
        for group in groups:
            assert len(group) <= 2, f"a call of a meeting has two peers at most, and not {group}"
            for k in (k for k in group if k in states):
                sent[k] = self._sent_in_pair(states[k])
                for partner in (partner for partner in group if partner != k):
                    self._offer_in_pair(meeting, k, partner, sent[k])
        met: dict[int, Sequence[ChunkState]] = dict(states)
        found: dict[int, Digests] = {}
        for group in groups:
            for k in (k for k in group if k in states):
                other = next((other for other in group if other != k), None)
                met[k], found[k] = self._meet_on(meeting, k, other, states[k], sent[k])
        self._tell(step, [found[k] for k in sorted(found)])
        return met

    def _sent_in_pair(self, island: Sequence[ChunkState]) -> dict[str, Arrays]:
        weights = {name: x for state in island for name, x in flatten(state.params).items()}
        slow = own_arrays(island, "start")
        differ = lambda x: difference_program(self._codec, x.sharding)
        delta = {name: differ(x)(slow[name], x) for name, x in weights.items()}
        return dict(zip(WHAT, (delta, slow), strict=True))

    def _offer_in_pair(
        self, meeting: Round, island: int, other: int, sent: dict[str, Arrays]
    ) -> None:
        for name in sent["delta"]:
            for what in WHAT:
                key = meeting.key(in_pair(what, island, other, name))
                self.transport.offer(key, sent[what][name])

    def _meet_on(
        self,
        meeting: Round,
        island: int,
        other: int | None,
        states: Sequence[ChunkState],
        sent: dict[str, Arrays],
    ) -> tuple[list[ChunkState], Digests]:
        """The states of an island after its meeting, and the digests of what crossed."""
        delta, slow, momentum = sent["delta"], sent["slow"], own_arrays(states, "momentum")
        come: dict[str, Arrays] = {what: {} for what in WHAT}
        if other is not None:
            names = [(what, name) for name in delta for what in WHAT]
            keys = [in_pair(what, other, island, name) for what, name in names]
            for (what, name), x in zip(names, self._fetched(meeting, keys), strict=True):
                come[what][name] = x
        new: Arrays = {}
        for name, moved in delta.items():
            deltas = [moved]
            if other is not None:  # in the order of the islands
                deltas.insert(0 if other < island else 1, come["delta"][name])
            step = _pair_program(self.outer, slow[name].sharding)
            of_other = come["slow"].get(name, slow[name])
            new[name], momentum[name] = step(deltas, slow[name], of_other, momentum[name])
        stages = [[*flatten(state.params)] for state in states]
        digests = lambda arrays, a, b: {
            in_pair(what, a, b, name): digest
            for what in WHAT
            for name, digest in digests_of(stages, arrays[what]).items()
        }
        told = Digests({}, {})
        if other is not None:
            told = Digests(digests(come, other, island), digests(sent, island, other))
        return [_begun_anew(state, new, momentum) for state in states], told

    def average(
        self, states: States, step: int, to: Collection[int]
    ) -> tuple[States, dict[int, Arrays], float]:
        """The states whose owners have the mean of all islands' slow weights.

        Args:
          states: of the chunks here of each island.
          step: after which it is.
          to: islands that the mean is sent to.

        Returns the new states, the mean on those islands here, and the mean square over parameters
        of the standard deviation over islands, as far as its parameters are owned here.
        """
        meeting = self._next_round(step, self.names)
        meeting.is_again = True
        slow = {k: own_arrays(island, "start") for k, island in states.items()}
        for k, arrays in slow.items():
            for name, x in arrays.items():
                if self._owners[name] != k:
                    self.transport.offer(meeting.key(to_owner(k, name)), x)
        square_sums, new = [], {}
        for k, island in states.items():
            own = [name for name in slow[k] if self._owners[name] == k]
            others = [n for n in range(self.count) if n != k]
            arriving = self._fetched(meeting, [to_owner(n, name) for name in own for n in others])
            means: Arrays = {}
            for name in own:
                theirs = {n: next(arriving) for n in others}
                all_slow = [slow[k][name] if n == k else theirs[n] for n in range(self.count)]
                means[name], squares = _mean_program(slow[k][name].sharding)(all_slow)
                square_sums.append(squares)
                self._offer(meeting, k, name, means[name], to)
            new[k] = [_with_mean(state, means) for state in island]
        chosen = {k: island for k, island in new.items() if k in to}
        square = math.fsum(map(float, jax.device_get(square_sums))) / self.num_numbers
        return new, self.global_weights(meeting, chosen), square


class Pairing:
    """The meetings in pairs of a run, in their order, as `Streaming` has those of all islands.

    Args:
      meetings: of the islands here.
      steps: after which they meet.
      last: the last step of the run.
      keeps: the island whose process keeps the global weights for validations; None: no island.
      eval_every: steps from one validation to the next; 0: there is none.
    """

    def __init__(
        self,
        meetings: PairMeetings,
        steps: MeetingSteps,
        last: int,
        keeps: int | None,
        eval_every: int,
    ):
        self.meetings, self._steps, self._last = meetings, steps, last
        self._keeps, self._eval_every = keeps, eval_every
        self._unaveraged: int | None = None  # the step of the last meeting, if its mean lacks
        self.square_spread: float | None = None  # of the last step, where its mean was taken
        self.global_weights: Arrays = {}  # of the island that keeps them, when last taken

    def begin(self, states: States, done: int, written: MeetingSteps | None = None) -> States:
        """The states with which a run begins, or goes on; the arguments are `Streaming`'s."""
        return self.meetings.begin(states)

    def is_due(self, step: int) -> bool:
        """Whether islands do something after a step."""
        self.square_spread = None
        return self._steps.begins(step) is not None or step == self._last

    def after_step(self, states: States, step: int) -> States:
        """The states after a meeting, and after the mean where a validation follows."""
        states, self._unaveraged = self.meetings.meet(states, step), step
        if self._eval_every and (step % self._eval_every == 0 or step == self._last):
            return self._average(states, () if self._keeps is None else (self._keeps,))
        return states

    def settle(self, states: States) -> States:
        """The states with which a checkpoint has the global weights of the last meeting."""
        return states if self._unaveraged is None else self._average(states, ())

    def _average(self, states: States, to: Collection[int]) -> States:
        assert self._unaveraged is not None, "there is a mean to take"
        states, weights, square = self.meetings.average(states, self._unaveraged, to)
        self._unaveraged, self.square_spread = None, square
        self.global_weights = weights.get(self._keeps, {}) if self._keeps is not None else {}
        return states


def _begun_anew(state: ChunkState, slow: Arrays, momentum: Arrays) -> ChunkState:
    """A state that goes on with new slow weights."""
    assert state.outer, "pairs keep slow weights"
    assert state.outer.own, "pairs keep slow weights"
    weights = {name: copy_program(x.sharding)(x) for name, x in slow.items()}  # a step takes them
    like = functools.partial(arrays_like, state.params)
    own = replace(state.outer.own, start=like(slow), momentum=like(momentum))
    return replace(with_weights(state, weights), outer=replace(state.outer, own=own))


def _with_mean(state: ChunkState, means: Arrays) -> ChunkState:
    assert state.outer is not None, "pairs keep them"
    weights = arrays_like(state.outer.weights, means)
    return replace(state, outer=replace(state.outer, weights=weights))


@functools.cache
def _pair_program(
    outer: OuterConfig, where: NamedSharding
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    decode = codec_of(outer).decode

    def step(deltas: list, slow: jax.Array, of_other: jax.Array, momentum: jax.Array) -> tuple:
        return pair_step(outer, list(map(decode, deltas)), slow, of_other, momentum)

    return jax.jit(step, out_shardings=(where, where))


@functools.cache
def _mean_program(where: NamedSharding) -> Callable[..., tuple[jax.Array, jax.Array]]:
    def mean(arrays: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        mean = mean_of(arrays)
        squares = jnp.stack([jnp.sum(jnp.square(x - mean)) for x in arrays])
        return mean, jnp.sum(squares) / len(arrays)

    return jax.jit(mean, out_shardings=(where, None))
