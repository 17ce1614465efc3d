"""The records of a mailbox, and the arrays in its objects. No JAX.

    run.json                               the run whose mailbox it is, made once
    data.json                              the digests of its data, made once
    data_files.DIGEST.json                 the digest of each file of them
    leases/ib.json                         written again and again by an island that lives
    rounds/00000007/ib.SESSION.0.bin       the weights of an island's stage 0: float32 numbers
                    ib.SESSION.0.json      what is in it; written behind it
                    global.ib.SESSION.bin  the global weights, by whoever merged the round
                    momentum.ib.SESSION.bin
                    merged.json            the record of the round: written once, the first one wins

A record is JSON in a seal, its SHA-256. Each array has one, too, so that a stage reads its own.
"""

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

import numpy as np

from holmesjax.files import json_text
from holmesjax.islands.mailbox_places import MailboxPlace
from holmesjax.plan.mailbox_cost import PIECE_BYTES

RUN, LEASES, ROUNDS, MERGED = "run.json", "leases", "rounds", "merged.json"
DATA, FILES = "data.json", "data_files"
_OF_ROUND = re.compile(rf"{ROUNDS}/(\d{{8}})/(.+)")
_SENT = re.compile(r"(?P<island>.+)\.(?P<session>[0-9a-f]{16})\.(?P<part>\d+)\.json")


class DamagedObjectError(ValueError):
    """An object of a mailbox is not what its record says."""


def sealed(content: Mapping[str, Any]) -> bytes:
    """A record with its seal."""
    text = json.dumps(content, sort_keys=True)
    return json.dumps({"sha256": _sha256(text.encode()), "record": content}).encode()


def opened(content: bytes, name: str) -> dict[str, Any]:
    """The content of a sealed record. Raises DamagedObjectError."""
    try:
        found = json_text.value_of(content)
        record, seal = found["record"], found["sha256"]
        if seal == _sha256(json.dumps(record, sort_keys=True).encode()):
            return dict(record)
    except (ValueError, TypeError, KeyError):
        pass
    raise DamagedObjectError(f"{name} is not what was written")


def _sha256(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()


class Entry(NamedTuple):
    """An array in an object."""

    first: int  # byte
    shape: tuple[int, ...]
    sha256: str


Index = dict[str, Entry]  # by layer and name of the parameter


class IslandProgress(NamedTuple):
    """How far an island was when it sent what was merged."""

    round: int
    step: int  # its own
    sequences: int  # that it had consumed
    tokens: int  # that it had trained since it was merged before


@dataclass(frozen=True, kw_only=True)
class SealedRecord:
    """A record with a seal."""

    def to_bytes(self) -> bytes:
        """The content of its object."""
        return sealed(asdict(self))

    @classmethod
    def from_bytes(cls, content: bytes, name: str) -> Self:
        """The record in an object with a name. Raises DamagedObjectError."""
        found = opened(content, name)
        try:
            if found.keys() != {field.name for field in fields(cls)}:
                raise ValueError("other fields")
            record = cls(**cls._read(found))
            if not record.is_named(name):
                raise ValueError("the record of another object")
            return record
        except (ValueError, TypeError, KeyError, AttributeError, IndexError):
            raise DamagedObjectError(f"{name} has other fields than such a record") from None

    @classmethod
    def _read(cls, found: dict[str, Any]) -> dict[str, Any]:
        return found

    def is_named(self, name: str) -> bool:
        """Whether an object with this name has such a record, and it names its own objects."""
        return True


def _index(found: Mapping[str, Any]) -> Index:
    index = {name: Entry(int(x[0]), tuple(map(int, x[1])), str(x[2])) for name, x in found.items()}
    if any(min(entry.first, *entry.shape, 0) < 0 for entry in index.values()):
        raise ValueError("below 0")
    return index


@dataclass(frozen=True, kw_only=True)
class Sent(SealedRecord):
    """The record of weights that a stage of an island has sent to a round.

    Args:
      round: of the meetings.
      island: its name.
      session: of its job.
      part, parts: the stage, and how many there are.
      progress: of the island.
      file: the object of the weights.
      index: of the weights.
    """

    round: int
    island: str
    session: str
    part: int
    parts: int
    progress: IslandProgress
    file: str
    index: Index

    @classmethod
    def _read(cls, found: dict[str, Any]) -> dict[str, Any]:
        progress = IslandProgress(*map(int, found["progress"]))
        return {**found, "progress": progress, "index": _index(found["index"])}

    def is_named(self, name: str) -> bool:
        """Whether it is the record of this name, and of the weights beside it."""
        stem = f"{round_folder(self.round)}/{self.island}.{self.session}.{self.part}"
        return (name, self.file) == (f"{stem}.json", f"{stem}.bin")


@dataclass(frozen=True, kw_only=True)
class Merged(SealedRecord):
    """The record of a round that is merged.

    Args:
      round: of the meetings; 0 has the first weights.
      tokens: of all islands that have been merged so far.
      islands: by name, the tokens that each has in this round.
      known: by name, the progress of each island when it was merged last.
      sessions: by name, the job whose weights of the island are in it.
      by: the island that has merged it.
      file, momentum_file: the objects of the weights and of the momentum.
      weights, momentum: their indexes; a momentum that is not there is zero.
    """

    round: int
    tokens: int
    islands: dict[str, int]
    known: dict[str, IslandProgress]
    sessions: dict[str, str]
    by: str
    file: str
    momentum_file: str
    weights: Index
    momentum: Index

    @classmethod
    def _read(cls, found: dict[str, Any]) -> dict[str, Any]:
        known = {name: IslandProgress(*map(int, x)) for name, x in found["known"].items()}
        indexes = {name: _index(found[name]) for name in ("weights", "momentum")}
        return {**found, "known": known, **indexes}

    def is_named(self, name: str) -> bool:
        """Whether it is the record of this round, whose objects lie beside it."""
        folder = round_folder(self.round)
        is_beside = lambda file, kind: bool(re.fullmatch(rf"{folder}/{kind}\.[^/]+", file))
        has_momentum = not self.momentum_file or is_beside(self.momentum_file, "momentum")
        return name == f"{folder}/{MERGED}" and is_beside(self.file, "global") and has_momentum


def round_folder(number: int) -> str:
    """The folder of a round."""
    return f"{ROUNDS}/{number:08d}"


def in_rounds(listed: Mapping[str, int]) -> dict[int, dict[str, int]]:
    """The objects of each round with their bytes, by their names below it."""
    found: dict[int, dict[str, int]] = {}
    for name, size in listed.items():
        if match := _OF_ROUND.fullmatch(name):
            found.setdefault(int(match[1]), {})[match[2]] = size
    return found


def newest(rounds: Mapping[int, Collection[str]]) -> int:
    """The newest round that is merged, of those that `in_rounds` gives; -1: none is.

    The round before it is there, too. Else it was merged into another folder, as one that lies
    below a file system that has gone.

    >>> newest({3: [MERGED], 4: [MERGED], 5: []}), newest({7: [MERGED]})
    (4, -1)
    """
    merged = {number for number, names in rounds.items() if MERGED in names}
    return max((number for number in merged if not number or number - 1 in merged), default=-1)


def read_merged(place: MailboxPlace, number: int) -> "Merged":
    """The record of a round. Raises DamagedObjectError, and OSError where it is not there."""
    name = f"{round_folder(number)}/{MERGED}"
    content = place.read(name)
    if content is None:
        raise FileNotFoundError(name)
    return Merged.from_bytes(content, name)


def refuse_outside(index: Index, file: str, sizes: Mapping[str, int]) -> None:
    """Raises DamagedObjectError where an array lies outside of its object of a round, as listed.

    An object that was not listed is not there yet or any more: whoever reads it sees.
    """
    size = sizes.get(file.rpartition("/")[2])
    for name, entry in index.items():
        if size is not None and entry.first + _bytes(entry) > size:
            raise DamagedObjectError(f"{file} has no {name}: it is too short")


def sent_by(island: str, names: Iterable[str]) -> list[str]:
    """The records among the objects of a round that are of an island."""
    matches = filter(None, map(_SENT.fullmatch, names))
    return sorted(match[0] for match in matches if match["island"] == island)


def are_whole(parts: Collection[Sent]) -> bool:
    """Whether these are all parts that one job of an island has sent after one of its steps."""
    numbers = {sent.part for sent in parts}
    of_all = {(sent.parts, sent.progress) for sent in parts}
    return len(of_all) == 1 and len(numbers) == next(iter(of_all))[0]


def senders(names: Iterable[str]) -> set[tuple[str, str]]:
    """The islands that have sent something to a round, with their sessions."""
    matches = filter(None, map(_SENT.fullmatch, names))
    return {(match["island"], match["session"]) for match in matches}


def write_arrays(path: Path, arrays: Iterable[tuple[str, np.ndarray]]) -> Index:
    """Writes float32 arrays into a file one behind the other; their index."""
    index: Index = {}
    with path.open("wb") as file:
        for name, array in arrays:
            append_array(file, index, name, array)
    return index


def append_array(file: IO[bytes], index: Index, name: str, array: np.ndarray) -> None:
    """Writes an array behind those of a file and an index."""
    content = np.ascontiguousarray(array, "<f4")
    data = content.reshape(-1).view(np.uint8).data
    index[name] = Entry(file.tell(), array.shape, _sha256(data))
    file.write(data)


def read_arrays(
    place: MailboxPlace, file: str, index: Index, names: Collection[str]
) -> dict[str, np.ndarray]:
    """Some arrays of an object, float32; neighbours are read in one request.

    Raises OSError, and DamagedObjectError for an array that is not there as it was written.
    """
    found = {}
    for run in _neighbours({name: index[name] for name in names if name in index}):
        first, last = run[0][1].first, run[-1][1].first + _bytes(run[-1][1])
        content = place.read_piece(file, first, last - first) if last > first else b""
        for name, entry in run:
            start = entry.first - first
            data = content[start : start + _bytes(entry)]
            if _sha256(data) != entry.sha256:
                raise DamagedObjectError(f"{file}: {name} has not the SHA-256 of its record")
            found[name] = np.frombuffer(data, "<f4").reshape(entry.shape)
    if missing := set(names) - found.keys():
        raise DamagedObjectError(f"{file} has no {min(missing)}")
    return found


def _bytes(entry: Entry) -> int:
    return 4 * math.prod(entry.shape)


def _neighbours(index: Index) -> Iterator[list[tuple[str, Entry]]]:
    """Yields arrays that lie one behind the other, in pieces."""
    run: list[tuple[str, Entry]] = []
    for name, entry in sorted(index.items(), key=lambda item: item[1].first):
        if run:
            end = run[-1][1].first + _bytes(run[-1][1])
            if entry.first != end or end + _bytes(entry) - run[0][1].first > PIECE_BYTES:
                yield run
                run = []
        run.append((name, entry))
    if run:
        yield run
