"""Runs the steps of an island that is a job of its own, and lands what a mailbox brings.

The island goes on while its weights are on the way. What it has changed since it sent them stays:
its new weights are the global ones of the round and the change since. With G the global weights,
S what it has sent and W what it has now, they are W + (G - S). Where the round was merged without
it, S is the global weights of the round before: all that it has trained since is still its own, and
counts in a later round. So each step counts once, and no island waits.

The processes of an island land the same round before the same step: `agree` tells them which.
"""

import functools
import math
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from holmesjax.checkpoints import skipped_data
from holmesjax.checkpoints.array_keys import flatten
from holmesjax.checkpoints.skipped_data import Skipped
from holmesjax.config import Config, PlaceConfig
from holmesjax.data.batches import Batches
from holmesjax.errors import of_system
from holmesjax.islands import rejoining
from holmesjax.islands.landing import (
    NOWHERE,
    RoundStanding,
    copies,
    global_weights_of,
    landed,
    like,
    on_host,
    params_of,
    put,
    standing_in,
    whole,
    with_standing,
    with_updates,
)
from holmesjax.islands.mailbox import Arrived, Mailbox, News
from holmesjax.islands.mailbox_records import IslandProgress, Merged
from holmesjax.islands.mailbox_seat import JobProgress, MailboxSeat
from holmesjax.islands.meeting import Arrays, with_weights
from holmesjax.islands.rejoining import open_mailbox
from holmesjax.islands.runner import Island, IslandsInputs, IslandsRunner, step_of_island
from holmesjax.plan.meeting_steps import MeetingSteps
from holmesjax.plan.plan import Plan
from holmesjax.runtime.chunk import Chunk, ChunkState
from holmesjax.runtime.end_of_step import Metrics
from holmesjax.runtime.outer_state import Outer
from holmesjax.runtime.overlapped_work import BUSY, OverlappedWork
from holmesjax.runtime.pipeline import make_runner
from holmesjax.runtime.prefetch import Inputs, Maker, Step, Validation
from holmesjax.runtime.timeline import Timeline
from holmesjax.transport.local import Transport

SENT, RECEIVED = "island -> mailbox", "mailbox -> island"


@dataclass(frozen=True)
class ApartPlacer:
    """Puts the island's own part of the order of the data on its devices.

    Step n of island k of K, with b sequences, has those from (n K + k) b on of the run's order. So
    it does not depend on who else is there, and no two islands have a sequence in common. With a
    mixture of its own, it has the next b sequences of that (`Mixed.of_island`).
    """

    placer: Maker
    number: int  # of the island
    names: tuple[str, ...]  # of all islands

    def make(self, batches: Batches, what: Step | Validation) -> IslandsInputs:
        """Makes a batch; one of a validation is that of the run without islands, in parts."""
        count = len(self.names)
        if isinstance(what, Step):
            first, sizes = count * what.first_sequence, [what.global_batch] * count
            own = step_of_island(batches, first, self.names, self.number, sizes)
            parts = {0: self.placer.make(*own)}
        else:
            number, index = divmod(what.index, batches.num_validation)
            all_parts = replace(batches, num_validation=count * batches.num_validation)
            first = number * all_parts.num_validation + index * count
            parts = {k: self.placer.make(all_parts, Validation(first + k)) for k in range(count)}
        num_targets = sum(part.num_targets for part in parts.values())
        return IslandsInputs(num_targets=num_targets, microbatches={}, parts=parts)


@dataclass(eq=False)
class _Sent:
    """Weights that the island has sent, and that no round has answered yet."""

    round: int
    step: int  # its own, after which it was sent
    counted: int  # its steps that are merged with it, as this job counts them
    weights: Arrays  # then; of an earlier job those with which this one has begun
    at_s: float = field(default_factory=time.monotonic)


class IslandApart(IslandsRunner):
    """An island that is a job of its own, as the loop of training knows a runner.

    Args:
      island: its runner.
      place: of the island in the run.
      every: steps from one round to the next.
      grace_s: seconds after which a round that is not merged is said to be late.
      step_tokens: of one of its steps.
      last: the most steps that it takes.
      mailbox: of the run.
      own_sent: the progress with which an earlier job of the island has sent to a round that is not
        merged, with the round; None: nothing.
      consumed: the sequences that the island has consumed after a step.
      limit_s: seconds for what is waited for, at the start and at the end.
      waits_for: told what the process waits for, and "" when that has come.
      note: takes what is written down of a round, or an event.
    """

    def __init__(
        self,
        island: Island,
        place: PlaceConfig,
        *,
        every: int,
        grace_s: float,
        step_tokens: int,
        last: int,
        mailbox: Mailbox,
        own_sent: tuple[int, IslandProgress] | None,
        consumed: Callable[[int], int],
        limit_s: float,
        waits_for: Callable[[str], None] = lambda text: None,
        note: Callable[[Mapping[str, Any]], object] = lambda entry: None,
    ):
        self._islands, self._waits_for, self._on_hosts = {0: island}, waits_for, False
        self.placer: Maker = ApartPlacer(island.runner.placer, place.number, place.names)
        self._place, self._every, self._last = place, every, last
        self._tokens, self._limit_s = step_tokens, limit_s
        self._all_tokens = place.steps * step_tokens * len(place.names)
        self._mailbox, self._own_sent, self._consumed = mailbox, own_sent, consumed
        self._agreed = News()
        self._round = -1  # the newest that has landed
        self._merged_tokens = 0  # of all islands, in that round
        self._counted = 0  # its own steps that are in the global weights
        self._begun = 0  # the step with which the session began
        self._position = 0  # the step of the schedule
        self._sent: _Sent | None = None
        self._rejoins = True  # until a round has landed
        self._standing = NOWHERE  # of the checkpoint
        self._sent_before: Arrays | None = None  # its weights that were on their way then
        self._grace_s, self._overdue = grace_s, 0  # the newest round that was said to be late
        self._bytes = (0, 0)
        self._note = note

    def compare_data(self, batches: Batches, own_sets: Collection[str]) -> None:
        """Compares the data with those of other islands, before it begins.

        Args:
          batches: that this process has read; all processes of the island have the same.
          own_sets: the names of `data.validation`.

        Raises as `Mailbox.claim_data`.
        """
        self._mailbox.claim_data(*rejoining.shared_data(batches, own_sets))

    # ---- what the processes of the island do alike ---------------------------------------------

    def news(self) -> News:
        """The news of this process. Raises as `Mailbox.news`."""
        return self._mailbox.news()

    def agree(self, news: News) -> None:
        """Takes what all processes of the island know, between two steps."""
        self._agreed = news

    @property
    def is_over(self) -> bool:
        """Whether all tokens of the run are merged, in the round that lands next or has landed."""
        if self._done == self._begun:  # a checkpoint of the end comes behind a step
            return False
        if self._agreed.arrived > self._round:
            record = self._mailbox.record(self._agreed.arrived, self._limit_s)
            return record.tokens >= self._all_tokens
        return self._round >= 0 and self._merged_tokens >= self._all_tokens

    def begin(
        self, states: Sequence[ChunkState], done: int, written: MeetingSteps | None = None
    ) -> Sequence[ChunkState]:
        """The states with which the island begins, or goes on after so many steps.

        Waits until the mailbox has a round. Raises PeerError where none comes, and HolmesError for
        a mailbox that lacks a round which has landed here.
        """
        self._done = self._begun = self._counted = done
        states = [replace(state, outer=_begun(state)) for state in states]
        self._where = {name: x.sharding for name, x in params_of(states).items()}
        self._position = int(on_host(states[0].opt_state.updates))
        standing = self._standing = standing_in(states)
        with self._mailbox.waited_for():
            rejoining.refuse_older(self._mailbox.place, standing.round)
            self._sent_before = self._fetched(standing.sent_round, standing.sent_step)
        if self._own_sent:
            number, progress = self._own_sent
            is_same = (standing.sent_round, standing.sent_step) == (number, progress.step)
            is_known = self._sent_before is not None and is_same
            counted = progress.step if is_known else done
            weights = self._sent_before if is_known else copies(params_of(states))
            assert weights is not None, "it was fetched"
            self._sent = _Sent(number, progress.step, counted, weights)
            try:
                with self._mailbox.waited_for():
                    self._mailbox.adopt(number, progress)
            except OSError as error:
                raise of_system(error) from None
        first = None if standing.round >= 0 else IslandProgress(0, done, self._consumed(done), 0)
        self._mailbox.start(first, self._on_host(copies(params_of(states))))
        self._waits_for("the mailbox of the islands")
        self._mailbox.wait_for_any(self._limit_s)
        self._waits_for("")
        return states

    def settled(self, states: Sequence[ChunkState]) -> Sequence[ChunkState]:
        """The states for a checkpoint: what has come has landed, and after the last step all."""
        states = self._land_agreed(states)
        if self._done == self._last and not self._has_all:
            states = self._finish(states)
        if self._has_all:  # what was trained since is no part of the run
            weights = global_weights_of(states)
            states = [with_weights(state, copies(weights)) for state in states]
        sent = self._sent
        standing = RoundStanding(
            self._round, self._counted, sent.round if sent else -1, sent.step if sent else -1
        )
        return [with_standing(state, standing) for state in states]

    @property
    def _has_all(self) -> bool:
        return self._round >= 0 and self._merged_tokens >= self._all_tokens

    def _finish(self, states: Sequence[ChunkState]) -> Sequence[ChunkState]:
        """Waits for the rounds that merge the last steps of an island that may take no more."""
        self._waits_for("the last round of the islands")
        while not self._has_all and (self._sent or self._counted < self._done):
            if self._sent is None:
                self._send(states)
            states = self._land(states, self._mailbox.take(self._round + 1, self._limit_s))
        self._waits_for("")
        return states

    def train_step(
        self,
        states: Sequence[ChunkState],
        inputs: Inputs,
        timeline: Timeline,
        meanwhile: OverlappedWork = BUSY,
    ) -> tuple[list[ChunkState], Metrics]:
        """A step, before which lands what has come, and goes off what is due."""
        assert isinstance(inputs, IslandsInputs), inputs
        states = self._land_agreed(states)
        if self._is_due():
            self._send(states)
        bare = [replace(state, outer=None) for state in states]
        runner = self._islands[0].runner
        stepped, metrics = runner.train_step(bare, inputs.parts[0], timeline, meanwhile)
        self._done += 1
        self._position += 1
        pairs = zip(stepped, states, strict=True)
        return [replace(state, outer=before.outer) for state, before in pairs], metrics

    def evaluate(self, states: Sequence[ChunkState], inputs: Inputs) -> float | None:
        """Sum of the losses of a batch's tokens, by the global weights of the newest round here."""
        assert isinstance(inputs, IslandsInputs), inputs
        weights, runner = global_weights_of(states), self._islands[0].runner
        own = [with_weights(replace(state, outer=None), weights) for state in states]
        losses = [runner.evaluate(own, part) for part in inputs.parts.values()]
        known = [float(loss) for loss in losses if loss is not None]
        return sum(known) if known else None

    def take_link_bytes(self) -> dict[str, int]:
        """The bytes that crossed each link since the last call, and to and from the mailbox."""
        found = dict(self._islands[0].runner.take_link_bytes())
        place, before = self._mailbox.place, self._bytes
        self._bytes = place.sent, place.received
        return found | {SENT: self._bytes[0] - before[0], RECEIVED: self._bytes[1] - before[1]}

    @property
    def round(self) -> int:
        """The newest round that has landed; -1 before the first."""
        return self._round

    def close(self) -> None:
        """Ends the work with the mailbox, and the transport inside of the island."""
        self.close_mailbox()
        close = getattr(self._islands[0].runner, "close", None)
        if close:
            close()

    def close_mailbox(self) -> None:
        """Ends the work with the mailbox, and gives the lease back; once is enough."""
        self._mailbox.close()

    # ---- sending -------------------------------------------------------------------------------

    def _is_due(self) -> bool:
        """Whether the island sends its weights now."""
        if self._round < 0 or self._done == self._counted or self._has_all:
            return False
        if self._sent:
            self._look_at_the_time(self._sent)
            return False
        since = self._done - self._counted
        has_others = self._agreed.opened > self._round
        return has_others or since >= self._every or self._position >= self._place.steps

    def _look_at_the_time(self, sent: _Sent) -> None:
        """Says once of each round that it is not merged in time."""
        is_late = (
            time.monotonic() - sent.at_s > self._grace_s and self._done - sent.step >= self._every
        )
        if is_late and sent.round > self._overdue:
            self._overdue = sent.round
            self._mailbox.say(self._mailbox.overdue(sent.round))

    def _send(self, states: Sequence[ChunkState]) -> None:
        weights = copies(params_of(states))
        self._sent = _Sent(self._round + 1, self._done, self._done, weights)
        tokens = (self._done - self._counted) * self._tokens
        progress = IslandProgress(self._round + 1, self._done, self._consumed(self._done), tokens)
        letter = self._on_host(weights)
        self._mailbox.send(self._round + 1, progress, letter)

    def _on_host(self, weights: Arrays) -> Callable[[], Iterable[tuple[str, np.ndarray]]]:
        """A function that copies weights to the host; all processes of a stage come here."""
        arrays = {name: whole(x) for name, x in weights.items()}
        return lambda: ((name, on_host(x)) for name, x in arrays.items())

    # ---- landing -------------------------------------------------------------------------------

    def _land_agreed(self, states: Sequence[ChunkState]) -> Sequence[ChunkState]:
        if self._agreed.arrived <= self._round:
            return states
        self._waits_for(f"round {self._agreed.arrived} of the islands")
        arrived = self._mailbox.take(self._agreed.arrived, self._limit_s)
        self._waits_for("")
        return self._land(states, arrived)

    def _land(self, states: Sequence[ChunkState], arrived: Arrived) -> Sequence[ChunkState]:
        """The states after the global weights of a round have come."""
        record, name = arrived.record, self._place.name
        known = record.known.get(name)
        own, old = params_of(states), global_weights_of(states)
        new = {key: put(arrived.weights[key], x.sharding) for key, x in own.items()}
        sent = self._sent
        is_merged = bool(sent and known and (known.round, known.step) == (sent.round, sent.step))
        before: Arrays | None = old
        self._round, self._merged_tokens = record.round, record.tokens
        if self._has_all:
            before, self._counted = None, self._done
        elif self._rejoins:
            before, self._counted = self._rejoined(record, old)
            if sent and before is None:
                self._sent = replace(sent, weights=copies(new), counted=self._done)
            elif sent and before:  # it lies on this round by now, as its weights do
                on_new = {key: landed(x, new[key], before[key]) for key, x in sent.weights.items()}
                self._sent = replace(sent, weights=on_new)
        elif sent and is_merged:
            before, self._counted = sent.weights, sent.counted
        if sent and (is_merged or record.round >= sent.round):
            self._sent = None
        self._rejoins, self._sent_before = False, None
        weights = {
            key: landed(x, new[key], before[key] if before else None) for key, x in own.items()
        }
        states = self._moved([with_weights(state, weights) for state in states])
        self._note(
            {
                "step": self._done,
                "round": record.round,
                "tokens": record.tokens,
                "islands": dict(record.islands),
                "by": record.by,
                "is_merged": name in record.islands,
            }
        )
        return [replace(state, outer=Outer(like(state.params, new), None)) for state in states]

    def _rejoined(self, record: Merged, old: Arrays) -> tuple[Arrays | None, int]:
        """The weights that a job's first round is compared with, and the own steps that are merged.

        The island keeps what it has changed since its checkpoint was merged, as far as it is known
        that it was not merged since. Else it begins with the global weights: None.
        """
        known, standing = record.known.get(self._place.name), self._standing
        if standing.round < 0:
            is_new = record.round == 0 and not self._begun  # and all begin with the same weights
            return (old, 0) if is_new else (None, self._done)
        if not known or known.round <= standing.round:  # nothing of it was merged since
            return old, standing.counted
        is_sent = (known.round, known.step) == (standing.sent_round, standing.sent_step)
        is_sent = is_sent and known.step <= self._begun
        if is_sent and self._sent_before is not None:
            return self._sent_before, known.step
        return None, self._done

    def _fetched(self, number: int, step: int) -> Arrays | None:
        """The weights that the island had sent before its checkpoint; None: they are gone."""
        try:
            found = self._mailbox.own_weights(number, step) if number >= 0 else None
        except OSError as error:
            raise of_system(error) from None
        if found is None:
            return None
        return {name: put(x, self._where[name]) for name, x in found.items()}

    def _moved(self, states: Sequence[ChunkState]) -> list[ChunkState]:
        """The states with the schedule at the tokens of all islands."""
        of_all = self._merged_tokens // (self._tokens * len(self._place.names))
        position = of_all + self._done - self._counted
        change, self._position = position - self._position, position
        return [with_updates(state, change) if change else state for state in states]


def make_apart(
    plan: Plan,
    chunks: Sequence[Chunk],
    *,
    config: Config,
    run_dir: Path,
    skipped: Sequence[Skipped],
    evaluates: bool = True,
    ramps: bool = False,
    connect: Callable[[], Transport] | None = None,
    compiled: Callable[[], None] = lambda: None,
    waits_for: Callable[[str], None] = lambda text: None,
    session: str | None = None,
    noted_s: Callable[[], float] = lambda: -math.inf,
) -> IslandApart:
    """Compiles the chunks here of an island that is a job of its own.

    The arguments are those of `make_runner`, and these.

    Args:
      config: of the island's job.
      run_dir: its run folder.
      skipped: data that it leaves out.
      session: of the job, where it has several processes.
      noted_s: as in `JobProgress`, where it has several processes.

    Raises as `open_mailbox`.
    """
    assert not ramps, "a check of the settings sees to it"
    [own], place = plan.islands, config.parallel.place
    assert place is not None, "the job is of an island"
    runner = make_runner(
        own, chunks, evaluates=evaluates, connect=connect, compiled=compiled, waits_for=waits_for
    )
    stages = {own.chunks[chunk.index][0] for chunk in chunks}
    has_all = len(stages) == len(own.stages)
    trained_here = [name for chunk in chunks for name in flatten(chunk.state_shapes.params)]
    leads = all(_leads(chunk.mesh) for chunk in chunks)
    seat = MailboxSeat(
        order=place.names,
        number=place.number,
        part=0 if has_all else min(stages),
        parts=1 if has_all else len(own.stages),
        names=tuple(trained_here),
        writes=leads,
        session=session or secrets.token_hex(8),
    )
    note = functools.partial(rejoining.note, run_dir) if seat.merges else lambda entry: None

    def say(text: str) -> None:
        note({"event": text})
        if seat.merges:
            print(text, flush=True)

    mailbox = open_mailbox(config, run_dir, seat, say, JobProgress(compiled, noted_s))
    after = config.train.sequences_after
    return IslandApart(
        Island(runner, len(chunks), 0),
        place,
        every=config.parallel.meets_every,
        grace_s=config.parallel.grace,
        step_tokens=config.train.global_batch * config.model.context_length,
        last=config.train.steps,
        mailbox=mailbox,
        own_sent=rejoining.own_sent(mailbox.place, place),
        consumed=lambda step: after(step) + skipped_data.sequences(skipped, 0, step),
        limit_s=config.distributed.start_timeout_s,
        waits_for=waits_for,
        note=note,
    )


def _leads(mesh: Mesh) -> bool:
    """Whether this process is the first of those that share a mesh."""
    return bool(mesh.devices.flat[0].process_index == jax.process_index())


def _begun(state: ChunkState) -> Outer:
    """The global weights with which the island begins; the momentum is in the mailbox."""
    if state.outer:
        return replace(state.outer, momentum=None)
    return Outer(jax.tree.map(jnp.copy, state.params), None)
