"""Weights that a process sends to rounds of a mailbox, and again where they are damaged there.

The thread of the steps adds them; the one of the mailbox sends them. No JAX.
"""

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from holmesjax.islands import mailbox_records as records
from holmesjax.islands.island_lease import IslandLease
from holmesjax.islands.mailbox_places import Counted, other_place
from holmesjax.islands.mailbox_records import IslandProgress, Sent
from holmesjax.islands.mailbox_seat import MailboxSeat
from holmesjax.islands.round_merging import temporary, writing_here

MakeArrays = Callable[[], Iterable[tuple[str, np.ndarray]]]


class _Letter(NamedTuple):
    round: int
    progress: IslandProgress
    arrays: MakeArrays
    session: str


class Letters:
    """The letters of a process: its weights for rounds. Each is sent once, unless it is damaged.

    Args:
      place: of the mailbox.
      seat: who this process is.
      lease: of its island; whoever has lost it sends nothing.
      scratch: a folder of this process alone.
    """

    def __init__(self, place: Counted, seat: MailboxSeat, lease: IslandLease, scratch: Path):
        self._place, self._seat, self._lease, self._scratch = place, seat, lease, scratch
        self._changed = threading.Lock()
        self._letters: deque[_Letter] = deque()
        self._posted: _Letter | None = None  # the newest that was sent
        self._first: _Letter | None = None  # to round 0, until it is known whether there is a round

    def offer_first(self, progress: IslandProgress, arrays: MakeArrays) -> None:
        """Takes the weights of round 0, which are sent if there is no round."""
        self._first = _Letter(0, progress, arrays, self._seat.session)

    def add(self, number: int, progress: IslandProgress, arrays: MakeArrays) -> None:
        """Takes weights for a round; `arrays` is called when they are sent."""
        with self._changed:
            self._letters.append(_Letter(number, progress, arrays, self._seat.session))

    def adopt(
        self, number: int, progress: IslandProgress, arrays: MakeArrays, session: str
    ) -> None:
        """Takes over what an earlier job of the island has sent."""
        self._posted = _Letter(number, progress, arrays, session)

    def send(self, newest: int) -> None:
        """Sends what is to be sent to rounds behind the newest. Raises OSError."""
        while self._letters:
            letter, seat = self._letters[0], self._seat
            if letter.round <= newest:  # it was merged without these
                with self._changed:
                    self._letters.popleft()
                continue
            stem = self._stem(letter)
            with temporary(self._scratch) as path:
                with writing_here(self._scratch):
                    index = records.write_arrays(path, letter.arrays())
                self._place.put_file(path, f"{stem}.bin")
            sent = Sent(
                round=letter.round,
                island=seat.name,
                session=letter.session,
                part=seat.part,
                parts=seat.parts,
                progress=letter.progress,
                file=f"{stem}.bin",
                index=index,
            )
            self._lease.refuse_lost()  # a long transfer is behind
            self._place.put(f"{stem}.json", sent.to_bytes())
            with self._changed:
                self._posted = self._letters.popleft()

    def send_again(self, following: int, names: Collection[str]) -> None:
        """Sends a letter to the open round again that somebody has removed, since it is damaged."""
        posted = self._posted
        if posted is None or posted.round > following:
            return
        record = f"{self._stem(posted)}.json".removeprefix(f"{records.round_folder(posted.round)}/")
        if posted.round == following and record in names:
            return
        self._posted = None
        if posted.round == following:
            with self._changed:
                self._letters.append(posted)

    def decide_on_first(self, newest: int) -> None:
        """Sends the weights of round 0 or drops them, now that it is known which rounds are there.

        Raises OSError where the place is not the one that this job has read.
        """
        if self._first and newest < 0 and not self._letters:
            if self._place.read(records.RUN) is None:
                raise other_place(f"{records.RUN}, which this job has read")
            with self._changed:
                self._letters.append(self._first)
        self._first = None

    def _stem(self, letter: _Letter) -> str:
        """The name of what is sent, without its end."""
        seat = self._seat
        return f"{records.round_folder(letter.round)}/{seat.name}.{letter.session}.{seat.part}"
