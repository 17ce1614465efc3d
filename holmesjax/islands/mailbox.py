"""The mailbox of islands that wait for nobody: what one process does with it, beside its steps.

A thread calls `turn` again and again: it sends what is to be sent, looks for rounds that are
merged, fetches the newest, and merges a round where that is due and this island's duty. The thread
of the steps asks for `news`, and takes what has come. No JAX.

A place that cannot be reached, or an object that is damaged, is said, and tried again: steps go on.
"""

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from holmesjax.config import OuterConfig
from holmesjax.errors import HolmesError, LostLeaseError, PeerError
from holmesjax.islands import mailbox_records as records
from holmesjax.islands.election import Leases, RoundWatch
from holmesjax.islands.mailbox_places import Counted
from holmesjax.islands.mailbox_records import (
    LEASES,
    MERGED,
    ROUNDS,
    DamagedObjectError,
    IslandProgress,
    Merged,
    Sent,
)
from holmesjax.islands.round_merging import (
    DamagedSentError,
    temporary,
    weights_of,
    write_round,
)

KEPT_ROUNDS = 4  # the newest, so that whoever reads one has the time to
BEATS = 4  # in the time of a lease
CLOSE_S = 10.0  # for what is under way, at the end
FOLDER_POLL_S, STORE_POLL_S = 0.1, 1.0  # a look at a store is a request that is paid for
Arrays = dict[str, np.ndarray]  # by layer and name


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


class News(NamedTuple):
    """News of the mailbox, between two steps."""

    arrived: int = -1  # the newest round whose global weights are here
    opened: int = -1  # the newest round that another island has sent to


class Arrived(NamedTuple):
    """A round whose global weights are here."""

    record: Merged
    weights: Arrays


class _Letter(NamedTuple):
    round: int
    progress: IslandProgress
    arrays: Callable[[], Iterable[tuple[str, np.ndarray]]]


class Mailbox:
    """The work of one process with the mailbox.

    Args:
      place: of the mailbox.
      seat: who this process is.
      rules: by which rounds are merged.
      scratch: a folder of this process.
      say: takes a line about what has happened.
      clock: seconds.
      poll_s: seconds between two looks.
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
    ):
        self.place, self._seat, self._rules = place, seat, rules
        self._scratch, self.say, self._clock = scratch, say, clock
        self._poll_s, self._wake = poll_s, threading.Event()
        self.session = seat.session
        self._changed = threading.Condition()
        self._letters: list[_Letter] = []
        self._first: _Letter | None = None  # to round 0, until it is known whether there is a round
        self._arrived: dict[int, Arrived] = {}
        self._taken = -1  # the newest round that steps have
        self._wanted: int | None = None  # a round that steps wait for
        self._opened = -1
        self._newest: Merged | None = None
        self._sent: dict[str, Sent] = {}  # by the name of the object
        self._damaged: set[str] = set()  # objects that were said to be
        self._suspect = -1  # a round whose record, or weights, looked damaged once
        self._leases = Leases(rules.lease_s, clock)
        self._watch: RoundWatch | None = None
        self._beat, self._beat_s = 0, -1e9
        self._away_s: float | None = None  # since when the place cannot be reached
        self._failure: BaseException | None = None
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None

    # ---- for the thread of the steps -----------------------------------------------------------

    def start(
        self, first: IslandProgress, arrays: Callable[[], Iterable[tuple[str, np.ndarray]]]
    ) -> None:
        """Begins to work in a thread; the weights are those of round 0, if there is no round."""
        if self._seat.writes:
            self._first = _Letter(0, first, arrays)
        self._thread = threading.Thread(target=self._work, name="mailbox", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, and gives the lease back."""
        self._is_closing.set()
        self._wake.set()
        if self._thread:
            self._thread.join(timeout=CLOSE_S)
        if self._seat.merges:
            with contextlib.suppress(OSError):
                self.place.remove([self._lease_name()])

    def send(
        self,
        number: int,
        progress: IslandProgress,
        arrays: Callable[[], Iterable[tuple[str, np.ndarray]]],
    ) -> None:
        """Sends weights to a round; `arrays` is called in the thread."""
        if self._seat.writes:
            with self._changed:
                self._letters.append(_Letter(number, progress, arrays))
            self._wake.set()

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

    def _waited(self, number: int | None, limit_s: float, takes: bool = True) -> Arrived:
        deadline_s = time.monotonic() + limit_s
        with self._changed:
            self._wanted = number
            while (found := self._found(number)) is None:
                self._raise_failure()
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise self._missing(number or 0, limit_s)
                self._changed.wait(left_s)
            self._wanted = None
            if takes:
                self._taken = found.record.round
                for old in [known for known in self._arrived if known <= self._taken]:
                    del self._arrived[old]
            return found

    def _found(self, number: int | None) -> Arrived | None:
        return self._arrived.get(max(self._arrived, default=0) if number is None else number)

    def _missing(self, number: int, limit_s: float) -> PeerError:
        sent = self._islands_of(number)
        found = f"{len(sent)} of {self._rules.quorum} islands have sent to it"
        if self._away_s is not None:
            found = "the mailbox cannot be reached"
        return PeerError(
            f"round {number} of the islands",
            f"was not merged within {limit_s:.0f} s",
            found=found,
            fix="start again; let the other islands run, or use a smaller parallel.quorum",
        )

    def overdue(self, number: int) -> str:
        """The event of a round that was not merged in time."""
        sent, quorum = self._islands_of(number), self._rules.quorum
        if len(sent) < quorum:
            return f"round {number} has no quorum: {', '.join(sent) or 'none'} sent, of {quorum}"
        return f"round {number} is late: {', '.join(sent)} sent, and nobody has merged it"

    def _islands_of(self, number: int) -> list[str]:
        """The islands that are known to have sent something to a round."""
        return sorted({x.island for x in list(self._sent.values()) if x.round == number})

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # ---- the thread ----------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._is_closing.is_set():
            try:
                self.turn()
            except BaseException as error:  # told to the thread of the steps, which raises it
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                return
            self._wake.wait(self._poll_s)
            self._wake.clear()

    def turn(self) -> None:
        """Does what is to be done now."""
        try:
            if self._seat.merges:
                self._renew()
            self._send_letters()
            rounds = records.in_rounds(self.place.listed(ROUNDS))
            self._look(rounds)
            if self._seat.merges and self._merge_if_due(rounds):
                self._look(records.in_rounds(self.place.listed(ROUNDS)))
        except DamagedObjectError as error:
            self._say_damaged(str(error))
        except FileNotFoundError:  # somebody has just removed an old round
            pass
        except OSError as error:
            if self._away_s is None:
                self._away_s = self._clock()
                why = " ".join(str(error).split())
                self.say(f"warning: the mailbox cannot be reached, steps go on: {why}")
            return
        if self._away_s is not None:
            self.say(f"the mailbox is there again after {self._clock() - self._away_s:.0f} s")
            self._away_s = None

    def _say_damaged(self, text: str) -> None:
        if text not in self._damaged:
            self._damaged.add(text)
            self.say(f"warning: in the mailbox, {text}: it is left out")

    def _lease_name(self) -> str:
        return f"{LEASES}/{self._seat.name}.json"

    def _renew(self) -> None:
        """Counts the lease up, in time, and reads the others'."""
        if self._clock() - self._beat_s < self._rules.lease_s / BEATS:
            return
        name = self._lease_name()
        if self._beat and (content := self.place.read(name)):
            with contextlib.suppress(DamagedObjectError):
                if records.opened(content, name).get("session") != self.session:
                    raise LostLeaseError(
                        f"island {self._seat.name}",
                        "is trained by another job by now",
                        found=f"the lease of another session in {name}",
                        fix="let the other job go on",
                    )
        self._beat, self._beat_s = self._beat + 1, self._clock()
        self.place.put(name, records.sealed({"session": self.session, "beat": self._beat}))
        self._read_leases()

    def _read_leases(self) -> None:
        beats = {}
        for name in self.place.listed(LEASES):
            island = name.removeprefix(f"{LEASES}/").removesuffix(".json")
            if island in self._seat.order and (content := self.place.read(name)):
                beats[island] = content
        self._leases.take(beats)

    def _send_letters(self) -> None:
        while self._letters:
            letter, seat = self._letters[0], self._seat
            if self._newest and letter.round <= self._newest.round:  # it was merged without these
                with self._changed:
                    del self._letters[0]
                continue
            stem = f"{records.round_folder(letter.round)}/{seat.name}.{self.session}.{seat.part}"
            with temporary(self._scratch) as path:
                index = records.write_arrays(path, letter.arrays())
                self.place.put_file(path, f"{stem}.bin")
            sent = Sent(
                round=letter.round,
                island=seat.name,
                session=self.session,
                part=seat.part,
                parts=seat.parts,
                progress=letter.progress,
                file=f"{stem}.bin",
                index=index,
            )
            self.place.put(f"{stem}.json", sent.to_bytes())
            with self._changed:
                del self._letters[0]

    # ---- what has come -------------------------------------------------------------------------

    def _look(self, rounds: Mapping[int, Sequence[str]]) -> None:
        """Looks which round is the newest, who has sent to the next, and fetches weights."""
        merged = [number for number, names in rounds.items() if MERGED in names]
        newest = max(merged, default=-1)
        if newest >= 0 and (self._newest is None or newest > self._newest.round):
            with self._refusing(newest):
                self._newest = self._read_merged(newest)
            self._sent = {name: x for name, x in self._sent.items() if x.round > self._newest.round}
        following = newest + 1
        others = {island for island, _ in records.senders(rounds.get(following, ()))}
        if self._seat.merges:
            self._read_sent(following, rounds.get(following, ()))
        if self._first:
            if newest < 0 and not self._letters:
                self._letters.append(self._first)
            self._first = None
        with self._changed:
            self._opened = following if others - {self._seat.name} else self._opened
            wanted = self._wanted
            in_hand = max(self._arrived, default=self._taken)
        if wanted is not None and wanted > self._taken and wanted <= newest:
            number = wanted
        else:
            number = newest if in_hand <= self._taken and newest > self._taken else -1
        if number >= 0 and number not in self._arrived:
            with self._refusing(number):
                record = self._newest if number == newest else self._read_merged(number)
                assert record is not None, "the newest round has a record"
                weights = records.read_arrays(
                    self.place, record.file, record.weights, self._seat.names
                )
            with self._changed:
                self._arrived[number] = Arrived(record, weights)
                self._changed.notify_all()

    @contextlib.contextmanager
    def _refusing(self, number: int) -> Iterator[None]:
        """Takes the record of a round back that is damaged, or whose weights are."""
        try:
            yield
        except DamagedObjectError:
            self._newest = None
            is_sure, self._suspect = self._suspect == number, number
            if self._seat.merges and is_sure:  # it is merged again, of what islands have sent
                self.place.remove([f"{records.round_folder(number)}/{MERGED}"])
            raise

    def _read_merged(self, number: int) -> Merged:
        name = f"{records.round_folder(number)}/{MERGED}"
        content = self.place.read(name)
        if content is None:
            raise FileNotFoundError(name)
        return Merged.from_bytes(content, name)

    def _read_sent(self, number: int, names: Iterable[str]) -> None:
        """Reads the records of what was sent to a round, each once."""
        for own in sorted(names):
            name = f"{records.round_folder(number)}/{own}"
            if not own.endswith(".json") or own == MERGED or name in self._sent:
                continue
            if content := self.place.read(name):
                try:
                    self._sent[name] = Sent.from_bytes(content, name)
                except DamagedObjectError as error:
                    self._say_damaged(str(error))

    def sent_to(self, number: int) -> dict[str, list[Sent]]:
        """The parts that islands have sent to a round, by name: those of the last session."""
        sessions: dict[tuple[str, str], list[Sent]] = {}
        for sent in self._sent.values():
            if sent.round == number and sent.island in self._seat.order:
                sessions.setdefault((sent.island, sent.session), []).append(sent)
        found: dict[str, list[Sent]] = {}
        for (island, _), parts in sessions.items():
            is_whole = len({sent.part for sent in parts}) == parts[0].parts
            before = found[island][0].progress.step if island in found else -1
            if is_whole and parts[0].progress.step > before:
                found[island] = parts
        return found

    def own_weights(self, number: int, step: int) -> Arrays | None:
        """The weights here that the island has sent to a round after a step; None: they are gone.

        For the thread of the steps, before the other one works.
        """
        try:
            folder = records.round_folder(number)
            names = [x.removeprefix(f"{folder}/") for x in self.place.listed(folder)]
            self._read_sent(number, [x for x in names if x.startswith(f"{self._seat.name}.")])
            parts = self.sent_to(number).get(self._seat.name, [])
            if not parts or parts[0].progress.step != step:
                return None
            return weights_of(self.place, parts, self._seat.names)
        except (OSError, DamagedSentError):
            return None

    # ---- merging -------------------------------------------------------------------------------

    def _merge_if_due(self, rounds: Mapping[int, Sequence[str]]) -> bool:
        number = self._newest.round + 1 if self._newest else 0
        sent = self.sent_to(number)
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
        live = self._leases.live() | {self._seat.name}
        if not self._watch.is_mine(sent, live):
            return False
        order = [name for name in self._seat.order if name in sent]
        if not number:  # all islands begin with the same weights: one is enough
            order = order[:1]
        try:
            write_round(
                self.place,
                self._scratch,
                self._rules.outer,
                number=number,
                by=self._seat.name,
                session=self.session,
                before=self._newest,
                sent={name: sent[name] for name in order},
            )
        except DamagedSentError as error:
            self._say_damaged(str(error))
            for part in sent[error.island]:
                name = f"{part.file.removesuffix('.bin')}.json"
                self.place.remove([name])
                self._sent.pop(name, None)
            return False
        left_out = sorted(live - set(order))
        if number and left_out:
            self.say(f"round {number} is merged without {', '.join(left_out)}")
        self._remove_old(number, rounds)
        return True

    def _remove_old(self, number: int, rounds: Mapping[int, Sequence[str]]) -> None:
        for old in [known for known in rounds if known <= number - KEPT_ROUNDS]:
            self.place.remove([f"{records.round_folder(old)}/{name}" for name in rounds[old]])


def claim(place: Counted, run: Mapping[str, object], where: str) -> None:
    """Makes a mailbox that of a run, or finds that it is.

    Raises HolmesError for the mailbox of another run, and OSError.
    """
    content = records.sealed(run)
    try:
        place.put(records.RUN, content, replaces=False)
    except FileExistsError:
        try:
            found = records.opened(place.read(records.RUN) or b"", records.RUN)
        except DamagedObjectError as error:
            fix = "name another parallel.mailbox, or empty this one before all islands start"
            raise HolmesError(where, "is no mailbox", found=error, fix=fix) from None
        differ = [name for name in run if found.get(name) != run[name]]
        raise HolmesError(
            where,
            "is the mailbox of another run",
            found=", ".join(f"{name}: {found.get(name)}, not {run[name]}" for name in differ)
            or "other settings",
            fix="name another parallel.mailbox; a run of other settings has one of its own",
        ) from None
