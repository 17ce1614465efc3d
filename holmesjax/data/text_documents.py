"""Documents in text, which may be compressed: a file is one, or each line of a file `.jsonl`."""

import contextlib
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from holmesjax.data import extras, stores
from holmesjax.data.documents import Documents, FilePart, Wanted, damaged, decoded
from holmesjax.data.tokenizer import BEGIN
from holmesjax.errors import DataError

LINES = ".jsonl"
GZIP, ZSTD = ".gz", ".zst"
COMPRESSED = {GZIP: "gzip file", ZSTD: "zstd file"}
# The first bytes of files that are something else than plain text.
MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"PAR1": "parquet"}
CHUNK = 2**20  # bytes of a compressed file that are read at once
WINDOW = 2**31  # bytes that a frame of zstd may need in memory, the most there is


def is_lines(path: Path) -> bool:
    """Tells whether each line is a document.

    >>> [is_lines(Path(name)) for name in ("a.jsonl", "a.jsonl.zst", "a.txt.gz")]
    [True, True, False]
    """
    return path.name.removesuffix(GZIP).removesuffix(ZSTD).endswith(LINES)


def cut(path: Path, step: int) -> Iterator[tuple[int, int, int]]:
    """The parts of a file, each with its bytes: ranges of plain lines, or all of it."""
    size = path.stat().st_size
    step = step if path.name.endswith(LINES) else max(size, 1)
    for first in range(0, max(size, 1), step):
        last = min(first + step, size)
        yield first, last, last - first


def read(part: FilePart, wanted: Wanted) -> Documents:
    """The documents of a part. Raises DataError for what is no text."""
    path = stores.path_of(part.path)
    if is_lines(path):
        for where, line in lines(path, part):
            if line.strip():
                yield where, _field(line, where, wanted.column)
        return
    with _opened(path) as file:
        content = file.read()
    if BEGIN not in content:
        yield part.path, decoded(content, part.path)
    elif wanted.is_picked:
        fix = "leave it out by --pattern"
        raise DataError(part.path, "holds a zero byte", found="a binary file", fix=fix)


def lines(path: Path, part: FilePart) -> Iterator[tuple[str, bytes]]:
    """The lines that begin in a range of a file; in a compressed one, all."""
    with _opened(path) as file:
        if path.suffix in COMPRESSED:
            for number, line in enumerate(file, 1):
                yield f"{part.path}, line {number:,}", line
            return
        _refuse_magic(part.path, file.read(4))
        file.seek(max(part.first - 1, 0))
        if part.first:
            file.readline()  # of the part before, unless it ends just there
        while (first := file.tell()) < part.last:
            yield f"{part.path}, byte {first:,}", file.readline()


def _refuse_magic(path: str, head: bytes) -> None:
    for magic, kind in MAGIC.items():
        if head.startswith(magic):
            fix = "give it the ending of what it is: .jsonl.gz, .jsonl.zst, .parquet"
            raise DataError(path, "has no lines of text", found=f"a {kind} file", fix=fix)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """A file, unpacked. Raises DataError where it is cut off or damaged."""
    with stores.open_file(path) as file:
        if path.suffix == GZIP:
            try:
                with gzip.open(file) as unpacked:
                    yield unpacked  # type: ignore[misc]
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise _damaged(path, file, error) from None
        elif path.suffix == ZSTD:
            with extras.package("zstandard", extra="zstd", where=str(path)):
                import zstandard
            try:
                yield io.BufferedReader(_Unpacked(_frames(file)), CHUNK)
            except (EOFError, zstandard.ZstdError) as error:
                raise _damaged(path, file, error) from None
        else:
            yield file


def _damaged(path: Path, file: BinaryIO, error: Exception) -> DataError:
    return damaged(str(path), COMPRESSED[path.suffix], f"{error}, before byte {file.tell():,}")


def _frames(file: BinaryIO) -> Iterator[bytes]:
    """The content of all frames of a zstd file; its own reader takes a cut frame for the end."""
    import zstandard

    data = file.read(CHUNK)
    while data:
        frame = zstandard.ZstdDecompressor(max_window_size=WINDOW).decompressobj()
        while not frame.eof:
            if not data and not (data := file.read(CHUNK)):
                raise EOFError("it ends inside of a frame")
            yield frame.decompress(data)
            data = frame.unused_data
        data = data or file.read(CHUNK)


class _Unpacked(io.RawIOBase):
    """Pieces of bytes, one after another, as a file."""

    def __init__(self, pieces: Iterator[bytes]):
        self._pieces, self._left = pieces, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._left:
            if (piece := next(self._pieces, None)) is None:
                return 0
            self._left = memoryview(piece)
        count = min(len(buffer), len(self._left))
        buffer[:count], self._left = self._left[:count], self._left[count:]
        return count


def from_json(line: bytes, where: str) -> Any:
    """The value of a line of JSON. Raises DataError."""
    try:
        return json.loads(decoded(line, where).removeprefix("\ufeff"))
    except ValueError as error:
        raise DataError(where, "is no JSON", found=error, fix="write an object a line") from None


def _field(line: bytes, where: str, column: str) -> str | np.ndarray:
    found = from_json(line, where)
    own = found.get(column) if isinstance(found, dict) else None
    if isinstance(own, list) and all(type(token) is int for token in own):
        return np.array(own, np.int64)
    if not isinstance(own, str):
        shown = ", ".join(found) if isinstance(found, dict) else type(found).__name__
        fix = f'write lines as {{"{column}": "..."}}, or name another field by --column'
        problem = f"has no text in a field `{column}`"
        raise DataError(where, problem, found=shown or "{}", fix=fix)
    try:
        own.encode()
    except UnicodeEncodeError as error:
        fix = "write whole characters"
        raise DataError(where, "holds half a character", found=error, fix=fix) from None
    return own
