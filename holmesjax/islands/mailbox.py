"""The mailbox of islands that wait for nobody: what one process does with it, beside its steps.

A thread calls `turn` again and again: it sends what is to be sent, looks for rounds that are
merged, fetches the newest, and merges a round where that is due and this island's duty. Another one
renews the lease, however long a transfer takes. The thread of the steps asks for `news`, and takes
what has come. No JAX.

A place that cannot be reached, or an object that is damaged, is said, and tried again: steps go on.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from holmesjax.errors import PeerError, of_system
from holmesjax.files.whole_files import TEMPORARY
from holmesjax.islands import mailbox_records as records
from holmesjax.islands.global_weights import BACK_OFF_S, MOST_LOST, Arrays, GlobalWeights
from holmesjax.islands.island_lease import IslandLease
from holmesjax.islands.mailbox_claim import claim_data
from holmesjax.islands.mailbox_places import Counted, other_place
from holmesjax.islands.mailbox_records import ROUNDS, DamagedObjectError, IslandProgress, Merged
from holmesjax.islands.mailbox_seat import ALONE, JobProgress, MailboxSeat, Rules
from holmesjax.islands.merge_duty import KEPT_ROUNDS, MergeDuty
from holmesjax.islands.round_merging import DamagedSentError, ScratchError, weights_of
from holmesjax.islands.sending import Letters, MakeArrays
from holmesjax.islands.sent_parts import SentParts

CLOSE_S = 10.0  # for what is under way, at the end
FOLDER_POLL_S, STORE_POLL_S = 0.1, 1.0  # a look at a store is a request that is paid for


class News(NamedTuple):
    """News of the mailbox, between two steps."""

    arrived: int = -1  # the newest round whose global weights are here
    opened: int = -1  # the newest round that another island has sent to


class Arrived(NamedTuple):
    """A round whose global weights are here."""

    record: Merged
    weights: Arrays


class Mailbox:
    """The work of one process with the mailbox.

    Args:
      place: of the mailbox.
      seat: who this process is.
      rules: by which rounds are merged.
      scratch: a folder of this process alone, whose `*.tmp` are removed.
      say: takes a line about what has happened.
      clock: seconds.
      poll_s: seconds between two looks.
      progress: of the job, which a long transfer is.
    """

    def __init__(
        self,
        place: Counted,
        seat: MailboxSeat,
        rules: Rules,
        scratch: Path,
        say: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
        poll_s: float = FOLDER_POLL_S,
        progress: JobProgress = ALONE,
    ):
        self.place, self._seat, self._rules = place, seat, rules
        self._scratch, self.say, self._clock = scratch, say, clock
        if seat.writes:
            for left in scratch.glob(TEMPORARY):  # by an earlier process that was killed
                left.unlink(missing_ok=True)
        self._poll_s, self._wake = poll_s, threading.Event()
        self.session = seat.session
        self._changed = threading.Condition()
        self._arrived: dict[int, Arrived] = {}
        self._taken = -1  # the newest round that steps have
        self._wanted: int | None = None  # a round that steps wait for
        self._opened = -1
        self._newest: Merged | None = None
        self._damaged: set[str] = set()  # objects that were said to be
        self._num_failed = 0  # turns in a row that ended with an error
        self._open: set[str] = set()  # the islands that have sent something to the open round
        self._progress, self._moved_s = progress, -math.inf  # by time.monotonic
        self._is_waited_for = False
        place.advance = self._moved
        self.lease = IslandLease(place, seat.order, seat.name, seat.session, rules.lease_s, clock)
        self.sent = SentParts(place, seat.order, self.lease, self._say_damaged)
        self.sending = Letters(place, seat, self.lease, scratch)
        self._weights = GlobalWeights(place, seat, rules.outer, scratch, say, clock)
        self._merging = MergeDuty(
            place,
            seat,
            rules,
            scratch,
            lease=self.lease,
            sent=self.sent,
            weights=self._weights,
            say=say,
            say_damaged=self._say_damaged,
            clock=clock,
        )
        self._held_s: float | None = clock()  # when the lease was held; None: it was said
        self._away_s: float | None = None  # since when the place, or the disk here, fails
        self._what_fails = ""
        self._failure: BaseException | None = None
        self._is_closing = threading.Event()
        self._threads: list[threading.Thread] = []

    # ---- for the thread of the steps -----------------------------------------------------------

    def claim_data(self, digests: Mapping[str, str], files: Mapping[str, str]) -> None:
        """Compares the data of a run with those of its other islands, as one process of an island.

        Raises HolmesError for other data, and where the mailbox cannot be reached.
        """
        if self._seat.merges:
            try:
                claim_data(self.place, digests, files)
            except OSError as error:
                raise of_system(error) from None

    def start(self, first: IslandProgress | None, arrays: MakeArrays) -> None:
        """Begins to work in threads.

        Args:
          first: with the weights of round 0, if there is no round; None: there must be one.
          arrays: the weights.
        """
        if self._seat.writes and first is not None:
            self.sending.offer_first(first, arrays)
        works = [self._work, self._hold_lease] if self._seat.merges else [self._work]
        self._threads = [threading.Thread(target=x, name="mailbox", daemon=True) for x in works]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ends the threads; the lease is given back."""
        self._is_closing.set()
        self._wake.set()
        deadline_s = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline_s - time.monotonic()))

    def send(
        self,
        number: int,
        progress: IslandProgress,
        arrays: MakeArrays,
    ) -> None:
        """Sends weights to a round; `arrays` is called in the thread."""
        if self._seat.writes:
            self.sending.add(number, progress, arrays)
            self._wake.set()

    def adopt(self, number: int, progress: IslandProgress) -> None:
        """Takes over what an earlier job of the island has sent, to send it again if it must be.

        Before `start`. Raises OSError.
        """
        if self._seat.writes and (weights := self.own_weights(number, progress.step)) is not None:
            session = self.sent.of_round(number)[self._seat.name][0].session
            self.sending.adopt(number, progress, weights.items, session)

    def news(self) -> News:
        """The news that are known now. Raises what has ended the thread."""
        with self._changed:
            self._raise_failure()
            return News(max(self._arrived, default=self._taken), self._opened)

    def record(self, number: int, limit_s: float) -> Merged:
        """The record of a round that is not taken yet. Raises as `take`."""
        return self._waited(number, limit_s, takes=False).record

    def take(self, number: int, limit_s: float) -> Arrived:
        """The global weights of a round, which are waited for.

        Raises PeerError where they do not come, and what has ended the thread.
        """
        return self._waited(number, limit_s)

    def wait_for_any(self, limit_s: float) -> None:
        """Waits until the global weights of a round are here. Raises as `take`."""
        self._waited(None, limit_s, takes=False)

    @contextlib.contextmanager
    def waited_for(self) -> Iterator[None]:
        """Takes pieces as progress of the job meanwhile, which does nothing else."""
        self._is_waited_for = True
        try:
            yield
        finally:
            self._is_waited_for = False

    def _waited(self, number: int | None, limit_s: float, takes: bool = True) -> Arrived:
        began_s, self._is_waited_for = time.monotonic(), True
        with self._changed:
            self._wanted = number
            while (found := self._found(number)) is None:
                self._raise_failure()
                newest = self._newest_round
                is_gone = number is not None and number <= newest - KEPT_ROUNDS
                if is_gone and number != self.lease.fetches:
                    raise PeerError(
                        f"round {number} of the islands",
                        "is no longer in the mailbox",
                        found=f"round {newest} is its newest, and it keeps {KEPT_ROUNDS}",
                        fix="start again: the island goes on with the newest",
                    )
                last_s = max(began_s, self._moved_s, self._progress.noted_s())
                left_s = last_s + limit_s - time.monotonic()
                if left_s <= 0:
                    raise self._missing(number, limit_s)
                self._changed.wait(left_s)
            self._wanted, self._is_waited_for = None, False
            if takes:
                self._taken = found.record.round
                for old in [known for known in self._arrived if known <= self._taken]:
                    del self._arrived[old]
            return found

    def _found(self, number: int | None) -> Arrived | None:
        return self._arrived.get(max(self._arrived, default=0) if number is None else number)

    def _missing(self, number: int | None, limit_s: float) -> PeerError:
        newest = self._newest_round
        wanted = newest if number is None and newest >= 0 else number or 0
        problem = f"was not merged within {limit_s:.0f} s"
        found = f"{len(self._islands_of(wanted))} of {self._quorum_of(wanted)} islands have sent"
        if newest >= wanted:
            problem = f"has not come within {limit_s:.0f} s"
            found = (
                f"its weights are in the mailbox, and {self._weights.num_lost} fetches have failed"
            )
        if self._away_s is not None:
            found = self._what_fails
        return PeerError(
            f"round {wanted} of the islands",
            problem,
            found=found,
            fix="start again; let the other islands run, or use a smaller parallel.quorum",
        )

    def _quorum_of(self, number: int) -> int:
        return self._rules.quorum if number else 1

    def _moved(self) -> None:
        """A piece has gone or come; what fails again and again behind it is no progress.

        Nor is it progress of steps, which nothing here holds up.
        """
        if max(self._weights.num_lost, self._num_failed) < MOST_LOST:
            self._moved_s = time.monotonic()
            if self._is_waited_for:
                self._progress.advance()

    def overdue(self, number: int) -> str:
        """The event of a round that was not merged in time."""
        sent, quorum = self._islands_of(number), self._rules.quorum
        if self._newest and self._newest.round >= number:
            return f"round {number} is merged, and no weights have come here since"
        if len(sent) < quorum:
            return f"round {number} has no quorum: {', '.join(sent) or 'none'} sent, of {quorum}"
        return f"round {number} is late: {', '.join(sent)} sent, and nobody has merged it"

    def _islands_of(self, number: int) -> list[str]:
        """The islands that are known to have sent something to a round."""
        is_open = number == self._newest_round + 1
        return sorted(self._open) if is_open else []

    @property
    def _newest_round(self) -> int:
        return self._newest.round if self._newest else -1

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # ---- the thread ----------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._is_closing.is_set():
            with self._telling():
                self.turn()
            if self._away_s is None:
                self._wake.wait(self._poll_s)
            else:
                self._is_closing.wait(BACK_OFF_S)
            self._wake.clear()

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Tells the thread of the steps what ends another one, so that it raises it."""
        try:
            yield
        except BaseException as error:
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()
            self._is_closing.set()

    def turn(self) -> None:
        """Does what is to be done now."""
        try:
            unsent: OSError | None = None
            try:
                self.sending.send(self._newest_round)
            except OSError as error:  # what others have sent may come nevertheless
                unsent = error
            rounds = records.in_rounds(self.place.listed(ROUNDS))
            self._look(rounds)
            if self._seat.merges and self._merging.merge_if_due(rounds, self._newest):
                self._look(records.in_rounds(self.place.listed(ROUNDS)))
            if unsent:
                raise unsent
        except DamagedObjectError as error:
            self._say_damaged(str(error))
        except FileNotFoundError:  # somebody has just removed an old round
            pass
        except OSError as error:
            self._num_failed += 1
            if self._away_s is None:
                self._away_s, why = self._clock(), " ".join(str(error).split())
                self._what_fails = "the mailbox cannot be reached"
                if isinstance(error, ScratchError):
                    self._what_fails = "what is to be sent cannot be written here"
                self.say(f"warning: {self._what_fails}, steps go on: {why}")
            return
        self._num_failed = 0
        if self._away_s is not None:
            self.say(f"the mailbox is used again after {self._clock() - self._away_s:.0f} s")
            self._away_s = None

    def _say_damaged(self, text: str) -> None:
        if text not in self._damaged:
            self._damaged.add(text)
            self.say(f"warning: in the mailbox, {text}: it is left out")

    # ---- the thread of the lease ---------------------------------------------------------------

    def _hold_lease(self) -> None:
        self._held_s = self._clock()
        while not self._is_closing.is_set():
            with self._telling():
                self.hold_lease()
            self._is_closing.wait(self.lease.pause_s)
        self.lease.give_back()

    def hold_lease(self) -> None:
        """Renews the lease; says so where that fails for too long. Raises LostLeaseError."""
        merged = self.lease.others_merged
        try:
            self.lease.renew()
        except OSError as error:
            is_long = (
                self._held_s is not None and self._clock() - self._held_s > self._rules.lease_s / 2
            )
            if is_long and self._away_s is None:  # else the other thread has said so
                self._held_s, why = None, " ".join(str(error).split())
                self.say(f"warning: the lease of the island cannot be renewed: {why}")
            return
        self._held_s = self._clock()
        if self.lease.others_merged > merged:
            self._moved()

    # ---- what has come -------------------------------------------------------------------------

    def _look(self, rounds: Mapping[int, Mapping[str, int]]) -> None:
        """Looks which round is the newest, who has sent to the next, and fetches weights."""
        newest = records.newest(rounds)
        if self._newest and newest < (last := self._newest.round):
            missing = last if records.MERGED not in rounds.get(last, ()) else last - 1
            raise other_place(f"round {missing}, which was there")
        if newest >= 0 and (self._newest is None or newest > self._newest.round):
            record = records.read_merged(self.place, newest)
            with self._changed:
                self._newest = record
                self._changed.notify_all()
            self.sent.forget(newest)
        following, open_ones = newest + 1, rounds.get(newest + 1, {})
        self._open = {island for island, _ in records.senders(open_ones)}
        self.sending.send_again(following, open_ones)
        if self._seat.merges:
            self.sent.read(following, open_ones)
        self.sending.decide_on_first(newest)
        with self._changed:
            self._opened = following if self._open - {self._seat.name} else self._opened
            wanted = self._wanted
            in_hand = max(self._arrived, default=self._taken)
        if wanted is not None and wanted > self._taken and wanted <= newest:
            number = wanted
        else:
            number = newest if in_hand <= self._taken and newest > self._taken else -1
        if number >= 0 and number not in self._arrived:
            is_newest = self._newest is not None and number == newest
            wanted_record = self._newest if is_newest else records.read_merged(self.place, number)
            assert wanted_record is not None, "the newest round has a record"
            self._fetch(wanted_record, rounds.get(number, {}))

    def _fetch(self, record: Merged, sizes: Mapping[str, int]) -> None:
        """Reads the global weights of a round that are for this process.

        Raises DamagedObjectError, and OSError.
        """
        if self._weights.pauses(record.round):
            return
        self.lease.fetches = record.round
        try:
            weights = self._weights.read(record, sizes)
            with self._changed:  # before the lease says that it is fetched no more
                self._arrived[record.round] = Arrived(record, weights)
                self._changed.notify_all()
        finally:
            self.lease.fetches = None

    def own_weights(self, number: int, step: int) -> Arrays | None:
        """The weights here that the island has sent to a round after a step; None: they are gone.

        For the thread of the steps, before the other one works. Raises OSError.
        """
        try:
            folder = records.round_folder(number)
            self.sent.read(number, records.in_rounds(self.place.listed(folder)).get(number, {}))
            parts = self.sent.of_round(number).get(self._seat.name, [])
            if not parts or parts[0].progress.step != step:
                return None
            return weights_of(self.place, parts, self._seat.names)
        except DamagedSentError:
            return None
