"""Who merges a round, and when: leases that end, a quorum and a window of grace. No JAX, no wait.

A lease is a number that its island counts up. It ends for a reader who has not seen it change for
some seconds of his own clock, so clocks of machines need not agree. The island with the lowest
number among those that live merges. The next one does after as long as a lease lasts, if nobody
merges then: so a merger whose leases come and who does not merge holds nobody up. Two may merge at
once; the record of a round is written once, so the first one counts.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field


@dataclass
class Leases:
    """The leases of islands, as a reader sees them.

    Args:
      lasts_s: seconds without a change after which a lease ends.
      clock: seconds of the reader.
    """

    lasts_s: float
    clock: Callable[[], float]
    _seen: dict[str, tuple[object, float]] = field(default_factory=dict)
    _taken_s: float = -math.inf

    def take(self, beats: Mapping[str, object]) -> None:
        """Takes what the leases say now, by island; one that is not there has ended."""
        now_s, before = self.clock(), self._seen
        self._taken_s = now_s
        is_same = lambda name: name in before and before[name][0] == beats[name]
        # A new one at once, since another thread may read it.
        self._seen = {
            name: before[name] if is_same(name) else (beat, now_s) for name, beat in beats.items()
        }

    @property
    def are_known(self) -> bool:
        """Whether they were read lately: who has slept for long does not know who lives."""
        return self.clock() - self._taken_s < self.lasts_s / 2

    def live(self) -> set[str]:
        """The islands whose lease has not ended."""
        now_s = self.clock()
        return {name for name, (_, at_s) in self._seen.items() if now_s - at_s < self.lasts_s}


@dataclass
class RoundWatch:
    """A round that is open, as one island knows it.

    Args:
      number: of the round.
      name: of the island.
      order: all islands, by their numbers.
      quorum: islands that a round needs.
      grace_s: seconds for the others once a quorum has sent.
      lease_s: seconds of a lease.
      clock: seconds of the island.
    """

    number: int
    name: str
    order: tuple[str, ...]
    quorum: int
    grace_s: float
    lease_s: float
    clock: Callable[[], float]
    _quorum_s: float | None = None  # since when there is one
    _due_s: float | None = None  # since when it is due

    def postpone(self) -> None:
        """Another island merges it: whether this one does is asked anew when that stands still."""
        self._due_s = None

    def is_mine(self, sent: Collection[str], live: Collection[str]) -> bool:
        """Whether this island merges the round now.

        Args:
          sent: the islands that have sent all their weights.
          live: the islands whose lease has not ended.
        """
        now_s = self.clock()
        if len(sent) < self.quorum:
            self._quorum_s = self._due_s = None
            return False
        if self._quorum_s is None:
            self._quorum_s = now_s
        is_due = set(live) <= set(sent) or now_s - self._quorum_s >= self.grace_s
        if not is_due:
            return False
        if self._due_s is None:
            self._due_s = now_s
        before = [name for name in self.order[: self.order.index(self.name)] if name in live]
        return now_s - self._due_s >= len(before) * self.lease_s
