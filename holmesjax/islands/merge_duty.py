"""The duty to merge a round: when an island has it, and what it does with damaged parts. No JAX.

`election` says whose duty it is, `round_merging` makes the sums.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from holmesjax.islands import mailbox_records as records
from holmesjax.islands.election import RoundWatch
from holmesjax.islands.global_weights import BACK_OFF_S, GlobalWeights
from holmesjax.islands.island_lease import IslandLease
from holmesjax.islands.mailbox_places import Counted
from holmesjax.islands.mailbox_records import DamagedObjectError, Merged
from holmesjax.islands.mailbox_seat import MailboxSeat, Rules
from holmesjax.islands.round_merging import DamagedSentError, write_round
from holmesjax.islands.sent_parts import SentParts

KEPT_ROUNDS = 4  # the newest, so that whoever reads one has the time to


class MergeDuty:
    """Merges rounds where that is due and this island's duty, and removes old ones.

    Args:
      place: of the mailbox.
      seat: who this process is.
      rules: by which rounds are merged.
      scratch: a folder of this process alone.
      lease: of the island, which tells others what it does.
      sent: what islands have sent.
      weights: of merged rounds, which may have to be written again.
      say: takes a line about what has happened.
      say_damaged: takes what is wrong with an object.
      clock: seconds.
    """

    def __init__(
        self,
        place: Counted,
        seat: MailboxSeat,
        rules: Rules,
        scratch: Path,
        *,
        lease: IslandLease,
        sent: SentParts,
        weights: GlobalWeights,
        say: Callable[[str], object],
        say_damaged: Callable[[str], object],
        clock: Callable[[], float],
    ):
        self._place, self._seat, self._rules, self._scratch = place, seat, rules, scratch
        self._lease, self._sent, self._weights = lease, sent, weights
        self._say, self._say_damaged, self._clock = say, say_damaged, clock
        self._watch: RoundWatch | None = None
        self._tried = -1  # the round that this process has begun to merge
        self._merge_after_s = -1e9  # behind a failure

    def merge_if_due(self, rounds: Mapping[int, Mapping[str, int]], before: Merged | None) -> bool:
        """Merges the round behind the newest if that is due; whether it is merged.

        Args:
          rounds: what is there: number -> names and sizes.
          before: the newest round.

        Raises OSError.
        """
        if not self._lease.leases.are_known or self._clock() < self._merge_after_s:
            return False
        number = before.round + 1 if before else 0
        sent = self._sent.of_round(number)
        if self._watch is None or self._watch.number != number:
            is_first = number == 0
            self._watch = RoundWatch(
                number=number,
                name=self._seat.name,
                order=self._seat.order,
                quorum=1 if is_first else self._rules.quorum,
                grace_s=0.0 if is_first else self._rules.grace_s,
                lease_s=self._rules.lease_s,
                clock=self._clock,
            )
        live = self._lease.leases.live() | {self._seat.name}
        if self._lease.is_merging(number):
            self._watch.postpone()
        if not self._watch.is_mine(sent, live):
            return False
        order = [name for name in self._seat.order if name in sent]
        if not number:  # all islands begin with the same weights: one is enough
            order = order[:1]
        if self._tried != number:  # others wait for one try, and not for one that fails again
            self._tried = self._lease.merges = number
        try:
            if before:
                sizes = rounds.get(before.round, {})
                records.refuse_outside(before.weights, before.file, sizes)
                records.refuse_outside(before.momentum, before.momentum_file, sizes)
            is_own = write_round(
                self._place,
                self._scratch,
                self._rules.outer,
                number=number,
                by=self._seat.name,
                session=self._seat.session,
                before=before,
                sent={name: sent[name] for name in order},
            )
        except DamagedSentError as error:
            self._say_damaged(str(error))
            self._sent.remove_damaged(sent[error.island], str(error))
            return False
        except (DamagedObjectError, FileNotFoundError) as error:  # of the round before
            self._merge_after_s = self._clock() + BACK_OFF_S
            self._say_damaged(str(error))
            assert before, "what is sent is a DamagedSentError"
            self._weights.write_again(before)
            return False
        finally:
            self._lease.merges = None
        if not is_own:  # another was faster, and says what there is to say
            return True
        left_out = sorted(live - set(order))
        if number and left_out:
            self._say(f"round {number} is merged without {', '.join(left_out)}")
        self._remove_old(number, rounds)
        return True

    def _remove_old(self, number: int, rounds: Mapping[int, Mapping[str, int]]) -> None:
        fetched = self._lease.fetched()  # by somebody whose link is slow
        old_ones = [known for known in rounds if known <= number - KEPT_ROUNDS]
        for old in [known for known in old_ones if known not in fetched]:
            folder = records.round_folder(old)
            self._place.remove_folder(folder, [f"{folder}/{name}" for name in rounds[old]])
