"""The parts that islands have sent to the rounds of a mailbox.

Each record is read once, and damaged ones go.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence

from holmesjax.islands import mailbox_records as records
from holmesjax.islands.island_lease import IslandLease
from holmesjax.islands.mailbox_places import Counted
from holmesjax.islands.mailbox_records import MERGED, DamagedObjectError, Sent


class SentParts:
    """The parts that are known, by the names of their objects.

    Args:
      place: of the mailbox.
      order: the names of all islands, by their numbers.
      lease: says which job of an island counts.
      say_damaged: takes a line about an object that is damaged.
    """

    def __init__(
        self,
        place: Counted,
        order: Sequence[str],
        lease: IslandLease,
        say_damaged: Callable[[str], object],
    ):
        self._place, self._order, self._lease = place, order, lease
        self._say_damaged = say_damaged
        self._parts: dict[str, Sent] = {}
        self._suspects: dict[str, str] = {}  # how it looked damaged once, by the name of an object

    def read(self, number: int, sizes: Mapping[str, int]) -> None:
        """Reads the records of what was sent to a round. Raises OSError.

        Args:
          number: of the round.
          sizes: of the round's objects, as listed.
        """
        folder = records.round_folder(number)
        self._parts = {
            name: part
            for name, part in self._parts.items()
            if part.round != number or name.removeprefix(f"{folder}/") in sizes
        }
        for file in sorted(sizes):
            name = f"{folder}/{file}"
            if not file.endswith(".json") or file == MERGED or name in self._parts:
                continue
            with contextlib.suppress(FileNotFoundError):
                try:
                    self._parts[name] = read_part(self._place, name, sizes)
                except DamagedObjectError as error:
                    self._say_damaged(str(error))
                    if self._is_damaged(name, f"{sizes[file]} bytes"):
                        self._place.remove([name])  # its island sends it again

    def _is_damaged(self, name: str, text: str) -> bool:
        """Whether an object looks damaged for the second time, in the same way."""
        is_sure = self._suspects.get(name) == text
        self._suspects = {} if is_sure else {**self._suspects, name: text}
        return is_sure

    def of_round(self, number: int) -> dict[str, list[Sent]]:
        """The parts that islands have sent to a round, by name.

        An island may have several jobs: the one with its lease counts, then the one that is ahead.
        """
        sessions: dict[tuple[str, str], list[Sent]] = {}
        for part in self._parts.values():
            if part.round == number and part.island in self._order:
                sessions.setdefault((part.island, part.session), []).append(part)
        found: dict[str, list[Sent]] = {}
        rank = lambda part: (
            part.session == self._lease.sessions.get(part.island),
            part.progress.step,
        )
        for (island, _), parts in sessions.items():
            is_first = island not in found or rank(parts[0]) > rank(found[island][0])
            if is_first and records.are_whole(parts):
                found[island] = parts
        return found

    def forget(self, number: int) -> None:
        """Forgets what was sent to a round and to those before."""
        self._parts = {name: part for name, part in self._parts.items() if part.round > number}

    def remove_damaged(self, parts: Sequence[Sent], text: str) -> None:
        """Removes what looks damaged for the second time; its island sends it again.

        Raises OSError.
        """
        for part in parts if self._is_damaged(parts[0].file, text) else ():
            name = f"{part.file.removesuffix('.bin')}.json"
            self._place.remove([name])
            self._parts.pop(name, None)


def read_part(place: Counted, name: str, sizes: Mapping[str, int]) -> Sent:
    """The record of what was sent. Raises DamagedObjectError, and OSError."""
    content = place.read(name)
    if content is None:
        raise FileNotFoundError(name)
    part = Sent.from_bytes(content, name)
    records.refuse_outside(part.index, part.file, sizes)
    return part
