"""The steps after which islands meet, and which fragments of the model. Does not import JAX.

The fragments of a model meet one after the other, each every H steps. A fragment is every P-th
layer, so that each has layers of all depths (Streaming DiLoCo, arXiv 2501.18512).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from holmesjax.config import ParallelConfig


class Flight(NamedTuple):
    """A fragment on its way between islands."""

    fragment: int
    begun: int  # the step after which its weights are sent
    lands: int  # the step after which its global weights replace those of the islands


@dataclass(frozen=True, kw_only=True, slots=True)
class MeetingSteps:
    """The steps after which islands meet.

    Args:
      every: steps from one meeting of a fragment to the next; a multiple of the fragments.
      fragments: of the model.
      delay: steps from the begin of a meeting to its end; as many as between two meetings at most.
      since: the step with which they began to hold; nothing that has begun up to it is theirs.
    """

    every: int
    fragments: int = 1
    delay: int = 0
    since: int = 0

    @property
    def interval(self) -> int:
        """Steps from the meeting of one fragment to that of the next."""
        return self.every // self.fragments

    def begins(self, step: int) -> Flight | None:
        """The flight that begins after a step.

        >>> steps = MeetingSteps(every=4, fragments=2, delay=1)
        >>> [steps.begins(step).fragment for step in (2, 4, 6)], steps.begins(3)
        ([0, 1, 0], None)
        """
        number, rest = divmod(step, self.interval)
        if rest:
            return None
        return Flight((number - 1) % self.fragments, step, step + self.delay)

    def in_flight(self, step: int) -> Flight | None:
        """The flight that has begun before the end of a step, and lands later.

        >>> steps = MeetingSteps(every=4, fragments=2, delay=1)
        >>> steps.in_flight(1), steps.in_flight(2), steps.in_flight(3)
        (None, Flight(fragment=0, begun=2, lands=3), None)
        """
        begun = step - step % self.interval
        flight = self.begins(begun) if begun > self.since else None
        return flight if flight and step < flight.lands else None

    def merges(self, flight: Flight) -> int:
        """The step after which owners sum: each way has half of the delay."""
        return flight.begun + (self.delay + 1) // 2


def steps_of(parallel: ParallelConfig) -> MeetingSteps:
    """The steps after which the islands of a run meet: a late rule has a delay of one round."""
    every = parallel.meets_every
    delay = every if parallel.outer_rule.is_late else parallel.delay or 0
    return MeetingSteps(every=every, fragments=parallel.fragments or 1, delay=delay)


def are_equal_after_meetings(parallel: ParallelConfig) -> bool:
    """Whether all islands have the global weights after each meeting, and so for validations."""
    if parallel.outer_rule.rule != "nesterov":
        return parallel.outer_rule.rule == "co2"
    steps = steps_of(parallel)
    return steps.fragments == 1 and not steps.delay and parallel.global_share == 1.0


def fragment_of(layers: Iterable[str], fragments: int) -> dict[str, int]:
    """The fragment of each layer of a model.

    >>> fragment_of(["embed", "block_000", "block_001", "head"], 2)
    {'embed': 0, 'block_000': 1, 'block_001': 0, 'head': 1}

    Args:
      layers: their names, in the order of the model.
      fragments: of the model.
    """
    return {layer: number % fragments for number, layer in enumerate(layers)}
