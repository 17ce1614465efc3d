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
import contextlib
import hashlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from holmesjax.data.corpus_progress import LongWork
from holmesjax.data.number_files import NumberFile
from holmesjax.data.permutation import permute, round_keys
from holmesjax.data.sources import Item
from holmesjax.data.token_files import DocumentStarts
from holmesjax.data.whole_digests import FOLDER
from holmesjax.errors import DataError, UnreadDataError
from holmesjax.files.whole_files import TEMPORARY, sync_below, temporary_of

WINDOW = 1024  # pieces that are packed together
VERSION = 1  # raised when the same documents give other rows
SIZES = "sizes"  # a file with the bytes of each other one
LEFT_S = 86_400.0  # that a folder is not written to, after which nobody makes it any more
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
        _refuse_cut(own.token_T, own.trained_T)
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
        _refuse_cut(self.table.first, self.table.place, self.table.length)
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
        _refuse_cut(self.table.targets)
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
    keys, work = round_keys(0), LongWork(f"packing {len(spans):,} documents into rows", len(spans))
    for low in range(0, len(spans), WINDOW):
        number_D = np.arange(low, min(low + WINDOW, len(spans)))
        place_D, count_D = spans.spans(permute(number_D, len(spans), keys))
        for place, count in zip(place_D.tolist(), count_D.tolist(), strict=True):
            for cut in range(0, count, length):
                yield place + cut, min(length, count - cut)
        work.add(len(number_D))


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

    Files that are not whole are made again. Raises DataError for files that cannot be read.
    """
    final = None if beside is None else beside / FOLDER / key[:32]
    if final is not None:
        if final.is_dir():
            try:
                return _mapped(final, dtypes)
            except _NotWholeError as error:
                what = f"{final} is not whole: {error.found}"
                print(f"warning: {what}; it is made again", file=sys.stderr, flush=True)
                _remove(final)
        if _keep(final, make):
            return _mapped(final, dtypes)
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder))
        _write_sizes(Path(folder))
        return _mapped(Path(folder), dtypes)


def _refuse_cut(*arrays: Any) -> None:
    """Raises UnreadDataError for a memory map whose file is shorter than it was.

    The system ends a process with SIGBUS that reads there, without a word.
    """
    for array in arrays:
        mapped = getattr(array, "_mmap", None)  # None: it is in memory
        if mapped is None or mapped.size() >= len(mapped):
            continue
        found = f"{mapped.size():,} bytes, not {len(mapped):,}"
        fix = "start again with the same command: what was packed is made again"
        raise UnreadDataError(str(array.filename), "was cut", found=found, fix=fix)


class _NotWholeError(DataError):
    """Files that their writer has not finished, or that somebody has changed since."""


def _keep(final: Path, make: Callable[[Path], None]) -> bool:
    """Makes a folder at once, unless another process was faster; False where none can be kept."""
    own = temporary_of(final)  # processes in containers of two hosts may have one number
    try:
        own.mkdir(parents=True)
        _remove_left(final.parent)
        (own / "probe").touch()
        (own / "probe").unlink()
    except OSError:
        return False  # a place that is only for reading
    try:
        make(own)
        _write_sizes(own)
        sync_below(own)  # a crash of the machine leaves no folder with empty files
        own.rename(final)
    except OSError as error:
        if not final.is_dir():
            fix = "make room, or remove the folder"
            where, found = str(own), error.strerror
            raise DataError(where, "cannot be written", found=found, fix=fix) from None
    finally:
        shutil.rmtree(own, ignore_errors=True)
    return True


def _remove(folder: Path) -> None:
    """Removes a folder at once, where that is allowed: nobody finds a part of it."""
    old = temporary_of(folder)
    with contextlib.suppress(OSError):
        folder.rename(old)
    shutil.rmtree(old, ignore_errors=True)


def _write_sizes(folder: Path) -> None:
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    (folder / SIZES).write_text("".join(f"{name} {size}\n" for name, size in sizes.items()))


def _remove_left(folder: Path) -> None:
    """Removes what processes that were killed have left half made, by its age."""
    for left in folder.glob(TEMPORARY):
        with contextlib.suppress(OSError):
            newest_s = max(path.stat().st_mtime for path in (left, *left.iterdir()))
            if newest_s < time.time() - LEFT_S:
                shutil.rmtree(left)


def _mapped(folder: Path, dtypes: Mapping[str, str]) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    try:
        lines = [line.rpartition(" ") for line in (folder / SIZES).read_text().splitlines()]
        sizes = {name: size for name, _, size in lines}
        for name, dtype in dtypes.items():
            found = (folder / name).stat().st_size
            if str(found) != sizes.get(name):
                raise ValueError(f"{name} has {found:,} bytes, {SIZES} says {sizes.get(name)}")
            empty = np.empty(0, dtype)
            arrays[name] = np.memmap(folder / name, dtype, "r") if found else empty
    except (FileNotFoundError, ValueError) as error:
        fix = "remove the folder: it is made again"
        raise _NotWholeError(str(folder), "is not whole", found=error, fix=fix) from None
    except OSError as error:
        fix = "see that its file system is there, or remove the folder: it is made again"
        raise DataError(str(folder), "cannot be read", found=error.strerror, fix=fix) from None
    return arrays
