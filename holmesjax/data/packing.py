"""Documents packed into rows of so many tokens: best fit decreasing, in windows of pieces.

A document longer than a row is cut into pieces. All documents are shuffled, whatever the order of
the files. Then every 1,024 pieces are packed by themselves: the longest first, each into the row
with the smallest space that is enough. A piece is a range of tokens, and the target of each is the
token after it. So a document needs one place less than it has tokens, unless a mark of its end
follows.

A table says which piece is in which row, in memory maps beside the tokens: a row is read by its
index, like a window.

Dims: L tokens of a row, R rows, P pieces, D documents.
"""

import bisect
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from holmesjax.data.number_files import NumberFile
from holmesjax.data.permutation import permute, round_keys
from holmesjax.data.sources import Item
from holmesjax.data.token_files import DocumentStarts
from holmesjax.data.whole_digests import FOLDER
from holmesjax.errors import DataError

WINDOW = 1024  # pieces that are packed together
VERSION = 1  # raised when the same documents give other rows
DTYPES = {"first": "<i8", "place": "<i8", "length": "<i4", "targets": "<i4"}


@dataclass(frozen=True, kw_only=True, eq=False)
class DocumentRange:
    """A range of tokens with the documents that they are of."""

    token_T: np.ndarray | NumberFile
    start_D: np.ndarray | DocumentStarts  # places of the tokens that begin a document, in the range
    first: int
    last: int  # one after the range
    # Whether the mark that begins a document is a target of the one before: it has no other end.
    marks_end: bool
    trained_T: np.ndarray | None = None  # tokens that count as targets; None: all
    # Refuses numbers that are no tokens.
    check: Callable[[int, np.ndarray], None] = lambda first, tokens: None

    @property
    def begins_inside(self) -> int:
        """1 if the range begins inside of a document, whose rest counts as one; else 0."""
        starts = len(self.start_D) and self.start_D[0] == self.first
        return int(self.first < self.last and not starts)

    @property
    def num_documents(self) -> int:
        return self.begins_inside + len(self.start_D)

    def spans(self, document_D: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The first token of each, and the number of its tokens that have a target; int64 [D]."""
        place_D = document_D - self.begins_inside
        first_D, last_D = np.full_like(place_D, self.first), np.full_like(place_D, self.last)
        known_D, ends_D = place_D >= 0, place_D + 1 < len(self.start_D)
        first_D[known_D] = self.start_D[place_D[known_D]]
        last_D[ends_D] = self.start_D[place_D[ends_D] + 1]
        return first_D, last_D - first_D - np.where(ends_D & self.marks_end, 0, 1)


class Spans:
    """The documents of a split: where each one lies among the tokens of all its ranges."""

    def __init__(self, ranges: Sequence[DocumentRange]):
        self._ranges = ranges
        self._documents = [
            0,
            *accumulate(document_range.num_documents for document_range in ranges),
        ]
        self._tokens = [
            0,
            *accumulate(document_range.last - document_range.first for document_range in ranges),
        ]

    def __len__(self) -> int:
        return self._documents[-1]

    @property
    def marks_end(self) -> tuple[bool, ...]:
        """`DocumentRange.marks_end` of each range: the tokenizer says it, not the files."""
        return tuple(documents.marks_end for documents in self._ranges)

    def spans(self, document_D: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The place of the first token of each, and the number of its tokens with a target."""
        range_D = np.searchsorted(self._documents, document_D, side="right") - 1
        place_D, count_D = np.empty_like(document_D), np.empty_like(document_D)
        for number in np.unique(range_D).tolist():
            own, here = self._ranges[number], range_D == number
            first, count_D[here] = own.spans(document_D[here] - self._documents[number])
            place_D[here] = first - own.first + self._tokens[number]
        return place_D, count_D

    def read(self, place: int, count: int) -> np.ndarray:
        """Tokens of one document from a place on; int32. Raises DataError for what is no token."""
        own, first = self._at(place)
        tokens = own.token_T[first : first + count]
        own.check(first, tokens)
        return tokens.astype(np.int32)

    def trained(self, place: int, count: int) -> np.ndarray | None:
        """The marks of the tokens of one document that count as targets; None: all count."""
        own, first = self._at(place)
        return None if own.trained_T is None else own.trained_T[first : first + count]

    def _at(self, place: int) -> tuple[DocumentRange, int]:
        number = bisect.bisect_right(self._tokens, place) - 1
        own = self._ranges[number]
        return own, own.first + place - self._tokens[number]


@dataclass(frozen=True, kw_only=True, eq=False)
class PackTable:
    """The pieces of each row."""

    first: np.ndarray  # int64 [R + 1]: the first piece of each row, and the number of pieces
    place: np.ndarray  # int64 [P]: of the first token of a piece
    length: np.ndarray  # int32 [P]
    targets: np.ndarray  # int32 [R]: that count in the loss


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """The rows of a split, as a table says."""

    spans: Spans
    table: PackTable
    row_length: int  # L

    def __len__(self) -> int:
        return len(self.table.targets)

    def __getitem__(self, index: int) -> Item:
        length = self.row_length
        tokens, begins = np.zeros(length + 1, np.int32), np.zeros(length + 1, bool)
        targets = np.full(length, -1, np.int32)
        at = 0
        for piece in range(*self.table.first[index : index + 2].tolist()):
            place, count = int(self.table.place[piece]), int(self.table.length[piece])
            own = self.spans.read(place, count + 1)
            here = slice(at, at + count)
            tokens[here], targets[here], begins[at] = own[:-1], own[1:], True
            if (trained := self.spans.trained(place + 1, count)) is not None:
                targets[here][~trained] = -1
            at += count
        begins[at] = True  # what is left belongs to no document
        return Item(tokens, begins, targets)

    def num_targets(self, index: int) -> int:
        return int(self.table.targets[index])

    @property
    def padding(self) -> float:
        """The share of the places that hold nothing."""
        places = len(self) * self.row_length
        return 1 - int(self.table.length.sum(dtype=np.int64)) / places if places else 0.0


def best_fit_decreasing(length_P: Sequence[int], capacity: int) -> list[list[int]]:
    """The pieces of each row, by their numbers.

    Pieces of one length keep their order, and the first of several rows with one space is taken.

    >>> best_fit_decreasing([3, 6, 4, 5, 2], 10)
    [[1, 2], [3, 0, 4]]
    """
    rows: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # ascending: the space of each row, and its number
    for piece in sorted(range(len(length_P)), key=lambda p: (-length_P[p], p)):
        need = length_P[piece]
        found = bisect.bisect_left(spaces, (need, 0))
        space, row = spaces.pop(found) if found < len(spaces) else (capacity, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(piece)
        if space > need:
            bisect.insort(spaces, (space - need, row))
    return rows


def cut_documents(spans: Spans, length: int) -> Iterator[tuple[int, int]]:
    """The pieces of all documents in the order of packing: place and length of each."""
    keys = round_keys(0)
    for low in range(0, len(spans), WINDOW):
        number_D = np.arange(low, min(low + WINDOW, len(spans)))
        place_D, count_D = spans.spans(permute(number_D, len(spans), keys))
        for place, count in zip(place_D.tolist(), count_D.tolist(), strict=True):
            for cut in range(0, count, length):
                yield place + cut, min(length, count - cut)


def pack(spans: Spans, length: int, folder: Path) -> None:
    """Writes the table of a split into a folder; no more of it is in memory than a window."""
    num_pieces, batch = 0, list[tuple[int, int]]()
    files = {name: (folder / name).open("wb") for name in DTYPES}
    write = lambda name, values: files[name].write(np.asarray(values, DTYPES[name]).tobytes())

    def flush() -> None:
        nonlocal num_pieces
        for row in best_fit_decreasing([count for _, count in batch], length):
            own = [batch[piece] for piece in row]
            write("first", [num_pieces])
            write("place", [place for place, _ in own])
            write("length", [count for _, count in own])
            write("targets", [sum(_num_trained(spans, *piece) for piece in own)])
            num_pieces += len(own)
        batch.clear()

    try:
        for piece in cut_documents(spans, length):
            batch.append(piece)
            if len(batch) == WINDOW:
                flush()
        flush()
        write("first", [num_pieces])
    finally:
        for file in files.values():
            file.close()


def _num_trained(spans: Spans, place: int, count: int) -> int:
    trained = spans.trained(place + 1, count)
    return count if trained is None else int(np.count_nonzero(trained))


def packed(spans: Spans, length: int, digest: str, beside: Path | None) -> PackedRows:
    """The rows of a split, packed now or by an earlier run.

    Args:
      spans: the documents.
      length: of a row.
      digest: of the split.
      beside: the folder that may keep the table; None: it is for this process alone.
    """
    made_of = f"rows {VERSION} {WINDOW} {length} {digest} {spans.marks_end}"
    key = hashlib.sha256(made_of.encode()).hexdigest()
    found = kept_arrays(key, DTYPES, lambda folder: pack(spans, length, folder), beside)
    return PackedRows(spans=spans, table=PackTable(**found), row_length=length)


def kept_arrays(
    key: str, dtypes: Mapping[str, str], make: Callable[[Path], None], beside: Path | None
) -> dict[str, np.ndarray]:
    """Returns arrays as memory maps of files, which an earlier process or this one has made.

    Args:
      key: says what they are made of, whoever makes them.
      dtypes: of each array by name.
      make: writes each into the folder that it is given.
      beside: the folder that may keep them. If it is None, or cannot be written, they are files
        without a name, which end with this process.

    Raises DataError for files that are not whole.
    """
    final = None if beside is None else beside / FOLDER / key[:32]
    if final is None or not final.is_dir():
        final = _keep(final, make)
        if final is None:
            with tempfile.TemporaryDirectory() as folder:
                make(Path(folder))
                return _mapped(Path(folder), dtypes)
    return _mapped(final, dtypes)


def _keep(final: Path | None, make: Callable[[Path], None]) -> Path | None:
    """Makes a folder at once, unless another process was faster; None where none can be kept."""
    if final is None:
        return None
    own = final.with_name(f"{final.name}.{os.getpid()}.tmp")
    try:
        own.mkdir(parents=True, exist_ok=True)
        (own / "probe").touch()
        (own / "probe").unlink()
    except OSError:
        return None  # a place that is only for reading
    try:
        make(own)
        sizes = {path.name: path.stat().st_size for path in own.iterdir()}
        (own / "sizes").write_text("".join(f"{name} {size}\n" for name, size in sizes.items()))
        own.rename(final)
    except OSError as error:
        if not final.is_dir():
            fix = "make room, or remove the folder"
            where, found = str(own), error.strerror
            raise DataError(where, "cannot be written", found=found, fix=fix) from None
    finally:
        shutil.rmtree(own, ignore_errors=True)
    return final


def _mapped(folder: Path, dtypes: Mapping[str, str]) -> dict[str, np.ndarray]:
    sizes = folder / "sizes"
    try:
        lines = sizes.read_text().splitlines() if sizes.exists() else []
        for name, size in (line.rsplit(" ", 1) for line in lines):
            if (found := (folder / name).stat().st_size) != int(size):
                raise ValueError(f"{name} ends at byte {found:,}, not {int(size):,}")
        return {
            name: np.memmap(folder / name, dtype, "r")
            if (folder / name).stat().st_size
            else np.empty(0, dtype)
            for name, dtype in dtypes.items()
        }
    except (OSError, ValueError) as error:
        fix = "remove the folder: it is made again"
        raise DataError(str(folder), "is not whole", found=error, fix=fix) from None
