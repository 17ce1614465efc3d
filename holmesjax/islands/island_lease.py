"""The lease of an island in a mailbox: which job speaks for the island, and which islands live.

A lease is an object with the session of a job and a number that it counts up. Of two jobs the
later one holds it, which has read the lease of the other. It also says which round its island
merges, which one it fetches, and how many pieces have gone and come. No JAX.
"""

import contextlib
from collections.abc import Callable
from typing import Any

from holmesjax.errors import LostLeaseError
from holmesjax.islands import mailbox_records as records
from holmesjax.islands.election import Leases
from holmesjax.islands.mailbox_places import Counted
from holmesjax.islands.mailbox_records import LEASES, DamagedObjectError

BEATS = 4  # in the time of a lease


class IslandLease:
    """The lease that a job holds for its island, and what it knows of the others'.

    Args:
      place: of the mailbox.
      order: the names of all islands.
      name: of the island.
      session: of the job.
      lasts_s: seconds of silence after which an island counts as gone.
      clock: seconds.
    """

    def __init__(
        self,
        place: Counted,
        order: tuple[str, ...],
        name: str,
        session: str,
        lasts_s: float,
        clock: Callable[[], float],
    ):
        self._place, self._order, self._island, self._session = place, order, name, session
        self._object = f"{LEASES}/{name}.json"
        self.pause_s = lasts_s / BEATS  # from one renewal to the next
        self.leases = Leases(lasts_s, clock)
        self.beat = 0  # how often it was renewed, or tried to be
        self._has_held = False  # whether the lease was this job's
        self._job = 1  # counts the jobs that have held it: the later one counts
        self.sessions: dict[str, str] = {}  # of the jobs that hold leases, by island
        self.merges: int | None = None  # the round that this island merges now
        self.fetches: int | None = None  # and the one whose global weights it reads
        self.others_merged = 0  # how often others that merge were seen to have moved pieces
        self._said: dict[str, dict[str, Any]] = {}  # by the leases, by island
        self._pieces = Leases(lasts_s, clock)  # that the leases count

    def renew(self) -> None:
        """Counts the lease up, and reads the others'. Raises LostLeaseError, and OSError.

        It is counted up even where the others' cannot be read: they read this one.
        """
        self.refuse_lost()
        self.beat += 1
        lease = {
            "session": self._session,
            "job": self._job,
            "beat": self.beat,
            "merges": self.merges,
            "fetches": self.fetches,
            "pieces": self._place.pieces,
        }
        self._place.put(self._object, records.sealed(lease))
        self._has_held = True
        self._read_all()

    def is_merging(self, number: int) -> bool:
        """Whether another island that lives merges a round, and pieces of it go or come."""
        moving, said = self.leases.live() & self._pieces.live() - {self._island}, self._said
        return any(said.get(name, {}).get("merges") == number for name in moving)

    def fetched(self) -> set[int]:
        """The rounds whose global weights islands that live read."""
        living, said = self.leases.live(), self._said
        of_living = (lease.get("fetches") for name, lease in said.items() if name in living)
        return {number for number in of_living if number is not None}

    def give_back(self) -> None:
        """Removes the lease, unless it is another job's."""
        with contextlib.suppress(OSError):
            lease = _lease_in(self._place.read(self._object), self._object)
            if lease.get("session") == self._session:
                self._place.remove([self._object])

    def refuse_lost(self) -> None:
        """Raises LostLeaseError where the lease was this job's, and is another one's."""
        lease = _lease_in(self._place.read(self._object), self._object)
        session, job = lease.get("session", self._session), lease.get("job", 0)
        self._has_held |= bool(lease) and session == self._session
        if session == self._session:  # another process of the job may be the one that renews it
            self._job = max(self._job, job)
        elif not self._has_held:
            self._job = max(self._job, job + 1)
        elif (job, session) > (self._job, self._session):  # else it was on its way for long
            raise LostLeaseError(
                f"island {self._island}",
                "is trained by another job by now",
                found=f"the lease of another session in {self._object}",
                fix="let the other job go on",
            )

    def _read_all(self) -> None:
        beats, said = {}, {}
        for name in self._place.listed(LEASES):
            island = name.removeprefix(f"{LEASES}/").removesuffix(".json")
            if island in self._order and (content := self._place.read(name)):
                beats[island], said[island] = content, _lease_in(content, name)
        before, self._said = self._said, said
        self.leases.take(beats)
        self._pieces.take({island: lease.get("pieces") for island, lease in said.items()})
        self.sessions = {island: lease["session"] for island, lease in said.items() if lease}
        self.others_merged += sum(
            lease.get("pieces") != before[island].get("pieces")
            for island, lease in said.items()
            if island in before and island != self._island and lease.get("merges") is not None
        )


def _lease_in(content: bytes | None, name: str) -> dict[str, Any]:
    """The content of a lease; nothing where it is gone or damaged."""
    with contextlib.suppress(DamagedObjectError):
        found = records.opened(content or b"", name)
        if isinstance(found.get("session"), str) and isinstance(found.get("job", 0), int):
            return found
    return {}
