"""The lease of an island in a mailbox: which job speaks for the island, and which islands live.

A lease is an object with the session of a job and a number that it counts up. No JAX.
"""

import contextlib
from collections.abc import Callable

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
        self.beat = 0  # how often it was renewed
        self._has_held = False  # whether the lease was this job's
        self.sessions: dict[str, str] = {}  # of the jobs that hold leases, by island

    def renew(self) -> None:
        """Counts the lease up, and reads the others'. Raises LostLeaseError, and OSError."""
        self.refuse_lost()
        beat = {"session": self._session, "beat": self.beat + 1}
        self._place.put(self._object, records.sealed(beat))
        self._has_held = True
        self._read_all()
        self.beat += 1

    def give_back(self) -> None:
        """Removes the lease, unless it is another job's."""
        with contextlib.suppress(OSError):
            if _session_in(self._place.read(self._object), self._object) == self._session:
                self._place.remove([self._object])

    def refuse_lost(self) -> None:
        """Raises LostLeaseError where the lease was this job's, and is another one's."""
        session = _session_in(self._place.read(self._object), self._object)
        self._has_held |= session == self._session
        if self._has_held and session not in (None, self._session):
            raise LostLeaseError(
                f"island {self._island}",
                "is trained by another job by now",
                found=f"the lease of another session in {self._object}",
                fix="let the other job go on",
            )

    def _read_all(self) -> None:
        beats, sessions = {}, {}
        for name in self._place.listed(LEASES):
            island = name.removeprefix(f"{LEASES}/").removesuffix(".json")
            if island in self._order and (content := self._place.read(name)):
                beats[island] = content
                if session := _session_in(content, name):
                    sessions[island] = session
        self.leases.take(beats)
        self.sessions = sessions


def _session_in(content: bytes | None, name: str) -> str | None:
    """The session that a lease names; None where it is gone or damaged."""
    with contextlib.suppress(DamagedObjectError):
        return str(records.opened(content or b"", name).get("session"))
    return None
