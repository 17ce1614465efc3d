"""Who a process is to a mailbox and in its job, and the rules by which its islands merge."""

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from holmesjax.config import OuterConfig


@dataclass(frozen=True, kw_only=True)
class MailboxSeat:
    """A process that uses a mailbox.

    Args:
      order: the names of all islands, by their numbers.
      number: of the island.
      part, parts: the stage whose weights this process has, and how many there are.
      names: the parameters here that train, in the order of the model.
      writes: whether this process sends the weights of its stage.
      session: of the job, the same in all of its processes and in no other job.
    """

    order: tuple[str, ...]
    number: int
    part: int
    parts: int
    names: tuple[str, ...]
    writes: bool
    session: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def name(self) -> str:
        """The name of the island."""
        return self.order[self.number]

    @property
    def merges(self) -> bool:
        """Whether this process speaks for its island: it renews the lease, and merges."""
        return self.writes and self.part == 0


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules by which islands merge.

    Args:
      outer: the rule of the step.
      quorum: islands that a round needs.
      grace_s: seconds for the others, once a quorum has sent.
      lease_s: seconds of silence after which an island counts as gone.
    """

    outer: OuterConfig
    quorum: int
    grace_s: float
    lease_s: float


@dataclass(frozen=True)
class JobProgress:
    """The signs of progress of the job, whose processes wait for each other.

    Args:
      advance: called with each piece that goes or comes while a round is waited for.
      noted_s: when a process has made progress, by `time.monotonic`.
    """

    advance: Callable[[], object] = lambda: None
    noted_s: Callable[[], float] = lambda: -math.inf


ALONE = JobProgress()  # of a job of one process
