"""The global weights of rounds, as one process reads them and mends damaged ones. No JAX.

Weights that look damaged twice are written again, of exactly what was merged, and read again after
a pause that grows. A round is never merged to another result: islands have gone on from it.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from holmesjax.config import OuterConfig
from holmesjax.islands import mailbox_records as records
from holmesjax.islands.mailbox_places import Counted
from holmesjax.islands.mailbox_records import DamagedObjectError, Merged
from holmesjax.islands.mailbox_seat import MailboxSeat
from holmesjax.islands.round_merging import write_again
from holmesjax.islands.sent_parts import read_part

BACK_OFF_S = 5.0  # until what has failed is tried again
MOST_BACK_OFF_S = 60.0  # for weights that look damaged, which are as many bytes as a round has
MOST_LOST = 3  # fetches, or turns, in a row that fail, until that is no progress
Arrays = dict[str, np.ndarray]  # by layer and name


class GlobalWeights:
    """The global weights that a process reads.

    Args:
      place: of the mailbox.
      seat: who the process is.
      outer: the rule of a merge.
      scratch: a folder of this process.
      say: takes a line about what has happened.
      clock: seconds.
    """

    def __init__(
        self,
        place: Counted,
        seat: MailboxSeat,
        outer: OuterConfig,
        scratch: Path,
        say: Callable[[str], object],
        clock: Callable[[], float],
    ):
        self._place, self._seat, self._outer = place, seat, outer
        self._scratch, self._say, self._clock = scratch, say, clock
        self._suspect = -1  # a round whose weights looked damaged once
        self._read_after_s = -1e9  # the weights of that round
        self._again_after_s = -1e9  # a round is written again
        self.num_lost = 0  # readings in a row that ended without weights

    def pauses(self, number: int) -> bool:
        """Whether a round that looks damaged is not read yet."""
        return self._suspect == number and self._clock() < self._read_after_s

    def read(self, record: Merged, sizes: Mapping[str, int]) -> Arrays:
        """Reads what is for this process, which is suspect afterwards where it looks damaged.

        Args:
          record: of the round.
          sizes: of the round's objects, as listed.

        Raises DamagedObjectError, and OSError.
        """
        try:
            records.refuse_outside(record.weights, record.file, sizes)
            names = self._seat.names
            weights = records.read_arrays(self._place, record.file, record.weights, names)
        except (DamagedObjectError, FileNotFoundError):
            is_sure, self._suspect = self._suspect == record.round, record.round
            self.num_lost += 1
            if self.num_lost == MOST_LOST:
                self._say(f"{MOST_LOST} fetches of rounds in a row were given up")
            pause_s = BACK_OFF_S * 2.0 ** min(self.num_lost - 2, 9) if is_sure else 0.0
            self._read_after_s = self._clock() + min(pause_s, MOST_BACK_OFF_S)
            if self._seat.merges and is_sure and self.write_again(record):
                self._read_after_s = -1e9
            raise
        self.num_lost, self._suspect = 0, -1
        return weights

    def write_again(self, record: Merged) -> bool:
        """Writes what is damaged of a round again, of exactly what was merged; whether it has.

        It is no other round then: islands have gone on from it. Raises DamagedObjectError where
        that is gone or damaged itself, and OSError.
        """
        number, folder = record.round, records.round_folder(record.round)
        if self._clock() < self._again_after_s:
            return False
        self._again_after_s = self._clock() + BACK_OFF_S
        try:
            sizes = records.in_rounds(self._place.listed(folder)).get(number, {})
            sent = {}
            for island in [name for name in self._seat.order if name in record.sessions]:
                names = records.sent_by(island, sizes)
                of_session = [x for x in names if f".{record.sessions[island]}." in x]
                parts = [read_part(self._place, f"{folder}/{x}", sizes) for x in of_session]
                sent[island] = parts
                if not records.are_whole(sent[island]):
                    raise DamagedObjectError(f"what {island} has sent is gone")
            write_again(
                self._place,
                self._scratch,
                self._outer,
                record=record,
                before=records.read_merged(self._place, number - 1) if number else None,
                sent=sent,
            )
        except (DamagedObjectError, FileNotFoundError) as error:
            text = f"round {number} is damaged and cannot be written again: {error}"
            raise DamagedObjectError(text) from None
        self._say(f"round {number} was damaged in the mailbox, and is written again")
        return True
