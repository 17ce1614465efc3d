"""The meetings of a run in their order: which parameters meet after which step, and land when.

With a delay, steps go on while arrays come in the background. What devices compute for a meeting is
dispatched between two steps, after the same step in all processes of a stage, which would wait for
each other in vain otherwise. `settle` sums earlier than is due, and that changes no number.
"""

from dataclasses import replace

import jax.numpy as jnp

from holmesjax.checkpoints.array_keys import flatten
from holmesjax.config import ModelConfig, ParallelConfig
from holmesjax.islands.meeting import Arrays, IslandMeetings, Round, States, all_landed
from holmesjax.layer_specs.model_layers import layers
from holmesjax.plan.meeting_steps import (
    Flight,
    MeetingSteps,
    are_equal_after_meetings,
    fragment_of,
    steps_of,
)


class Streaming:
    """The meetings of a run.

    Args:
      meetings: of the islands here.
      model: whose parameters meet.
      parallel: the settings of the meetings.
      last: the last step of the run.
      keeps: the island whose process keeps the global weights for validations; None: no island.
    """

    def __init__(
        self,
        meetings: IslandMeetings,
        model: ModelConfig,
        parallel: ParallelConfig,
        last: int,
        keeps: int | None,
    ):
        self.meetings, self._last = meetings, last
        self._steps, self._share = steps_of(parallel), parallel.global_share
        self._layers, self._is_late = list(layers(model)), parallel.outer_rule.is_late
        self._keeps = None if are_equal_after_meetings(parallel) else keeps
        self.square_spread: float | None = None  # of islands whose weights differ after meetings
        self._flying: tuple[Flight, Round] | None = None
        self.global_weights: Arrays = {}  # of the island that keeps them, after what has landed

    def _names(self, flight: Flight, steps: MeetingSteps) -> frozenset[str]:
        fragments = fragment_of(self._layers, steps.fragments)
        has = lambda name: fragments[name.partition(".")[0]] == flight.fragment
        return frozenset(filter(has, self.meetings.names))

    def begin(self, states: States, done: int, written: MeetingSteps | None = None) -> States:
        """The states with which a run begins, or goes on after so many steps.

        Args:
          states: new ones, or those of a checkpoint.
          done: steps before.
          written: the steps after which the same islands met that have written the checkpoint;
            None where others have, or nobody. What was on its way lands at once where it would
            land after other steps than those of this run.
        """
        states = self.meetings.begin(states)
        if self._is_late:  # what lands in the next meeting
            every = self._steps.every
            late = Flight(0, done, done - done % every + every)
            again = self.meetings.send_again(
                states, done, self.meetings.names, range(self.meetings.count)
            )
            self._flying = late, again
        elif written and (flight := written.in_flight(done)):
            names = self._names(flight, written)
            everybody = range(self.meetings.count)
            self._flying = flight, self.meetings.send_again(states, flight.begun, names, everybody)
            if replace(written, since=0) != self._steps:
                states = self._go_on(states, done, lands=True)
        if self._keeps is not None:
            self.global_weights = self._all_global(states, self._keeps, done)
        return states

    def _all_global(self, states: States, island: int, done: int) -> Arrays:
        """The global weights of all parameters, on one island; {} if it is not here."""
        here = {k: of_chunks for k, of_chunks in states.items() if k == island}
        if not done:
            params = [flatten(state.params) for of_chunks in here.values() for state in of_chunks]
            return {name: jnp.copy(x) for arrays in params for name, x in arrays.items()}
        again = self.meetings.send_again(states, done, self.meetings.names, [island])
        return self.meetings.global_weights(again, here).get(island, {})

    def is_due(self, step: int) -> bool:
        """Whether islands do something after a step."""
        if self._steps.begins(step) is not None or step == self._last:
            return True
        if self._flying is None:
            return False
        flight, meeting = self._flying
        merges = not meeting.is_merged and step >= self._steps.merges(flight)
        return merges or step >= flight.lands

    def after_step(self, states: States, step: int) -> States:
        """The states after what islands do together after a step.

        After the last step all parameters meet, and no island keeps a share of its own.
        """
        flight = self._steps.begins(step)
        if self._is_late and (flight is not None or step == self._last):
            return self._turn(states, step)
        states = self._go_on(states, step, lands=step == self._last or flight is not None)
        if step == self._last:
            return self._meet(states, step, self.meetings.names, 1.0)
        if flight is not None:
            names = self._names(flight, self._steps)
            if not self._steps.delay:
                return self._meet(states, step, names, self._share)
            meeting = self.meetings.send(states, step, names, in_background=True)
            self._flying = flight, meeting
        return states

    def _turn(self, states: States, step: int) -> States:
        """The states after a meeting of a late rule: islands send, and what was sent before lands.

        In the last step all lands.
        """
        assert self._flying is not None, "a meeting is always under way"
        is_last, names = step == self._last, self.meetings.names
        meeting = self.meetings.send(states, step, names, in_background=not is_last)
        states = self.settle(states)
        before, self._flying = self._flying[1], None
        states = self._land(before, states, 1.0, meeting)
        if is_last:
            states = self._land(meeting, self.meetings.merge(meeting, states), 1.0)
            return {k: list(map(all_landed, island)) for k, island in states.items()}
        self._flying = Flight(0, step, step + self._steps.every), meeting
        return states

    def settle(self, states: States) -> States:
        """The states with which a checkpoint has all that is on its way: owners have summed."""
        if self._flying is None or self._flying[1].is_merged:
            return states
        return self.meetings.merge(self._flying[1], states)

    def _go_on(self, states: States, step: int, lands: bool) -> States:
        """Merges and lands the flight that has begun before, if due; `lands`: in any case."""
        if self._flying is None:
            return states
        flight, meeting = self._flying
        lands = lands or step >= flight.lands
        if lands or step >= self._steps.merges(flight):
            states = self.settle(states)
        if not lands:
            return states
        self._flying = None
        return self._land(meeting, states, self._share)

    def _meet(self, states: States, step: int, names: frozenset[str], share: float) -> States:
        meeting = self.meetings.send(states, step, names)
        return self._land(meeting, self.meetings.merge(meeting, states), share)

    def _land(
        self, meeting: Round, states: States, share: float, following: Round | None = None
    ) -> States:
        states, landed = self.meetings.land(meeting, states, share, following)
        if self._keeps is not None:
            self.global_weights.update(landed.get(self._keeps, {}))
        return states
