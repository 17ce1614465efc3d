"""Files as they were before they were compressed or written in another encoding.

A packing is known by the first bytes of a file, and may be inside of another one. The content of
UTF-16 and UTF-32 comes as UTF-8.
"""

import bz2
import codecs
import contextlib
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from holmesjax.data import object_stores, optional_packages
from holmesjax.data.documents import damaged, no_text
from holmesjax.errors import DataError

CHUNK = 2**20  # bytes of a packed file that are read at once
WINDOW = 2**31  # bytes that a frame of zstd may need in memory, the most there is
DEEPEST = 3  # packings inside of each other
# The endings of names, and the packing that they promise.
ENDINGS = {
    **{".gz": "gzip", ".gzip": "gzip", ".zst": "zstd", ".zstd": "zstd"},
    **{".xz": "xz", ".bz2": "bzip2"},
}
MARKS = {  # the longer one first: that of UTF-16 begins one of UTF-32
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
ENCODINGS = set(MARKS.values())
PADDED = ("gzip", "xz")  # zero bytes may follow a stream
Packing = tuple[str, ...]  # from the outermost to the innermost


def packing_of(head: bytes) -> str | None:
    """The packing that a file has by its first 10 bytes or more; None: it is not packed.

    >>> packing_of(b"BZh91AY&SY"), packing_of(b"BZh is no bzip2")
    ('bzip2', None)
    """
    if head.startswith(b"\x1f\x8b"):
        return "gzip"
    is_skipped = head[1:4] == b"\x2a\x4d\x18" and 0x50 <= head[0] <= 0x5F  # a frame without content
    if head.startswith(b"\x28\xb5\x2f\xfd") or is_skipped:
        return "zstd"
    if head.startswith(b"\xfd7zXZ\0"):
        return "xz"
    if head.startswith(b"BZh") and head[4:10] in (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90"):
        return "bzip2"
    return next((name for mark, name in MARKS.items() if head.startswith(mark)), None)


def is_surely_gzip(head: bytes) -> bool:
    """Tells whether bytes with the mark of gzip, which are two, unpack as far as 1,024 go.

    >>> import gzip
    >>> is_surely_gzip(gzip.compress(b"text")), is_surely_gzip(bytes.fromhex("1f8b08000102"))
    (True, False)
    """
    try:
        return bool(zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(head[:1024]))
    except zlib.error:
        return False


def promised(name: str) -> str | None:
    """The packing that the ending of a name promises.

    >>> promised("part.JSON.GZ"), promised("a.txt")
    ('gzip', None)
    """
    return ENDINGS.get(Path(name).suffix.lower())


def without_endings(name: str) -> str:
    """A name in small letters without the endings of packings.

    >>> without_endings("Part.JSONL.gz")
    'part.jsonl'
    """
    while promised(name):
        name = name[: name.rindex(".")]
    return name.lower()


@contextlib.contextmanager
def opened(path: Path, packing: Packing, cache: str = "readahead") -> Iterator[BinaryIO]:
    """A file without its packings. Reading raises DataError where it is cut off or damaged."""
    with object_stores.open_file(path, cache) as file:
        own: BinaryIO = file
        for name in packing:
            own = io.BufferedReader(_Pieces(_unpacked(own, name, str(path))), CHUNK)
        yield own


def _unpacked(file: BinaryIO, packing: str, where: str) -> Iterator[bytes]:
    if packing in ENCODINGS:
        return _decoded(file, packing, where)
    return _decompressed(file, packing, where)


def _decompressor(packing: str, where: str) -> tuple[Callable[[], Any], tuple[Any, ...]]:
    """The maker of the decompressor of a stream, and the errors that it raises."""
    if packing == "gzip":
        return lambda: zlib.decompressobj(zlib.MAX_WBITS | 16), (zlib.error,)
    if packing == "xz":
        return lzma.LZMADecompressor, (lzma.LZMAError,)
    if packing == "bzip2":
        return bz2.BZ2Decompressor, (OSError, ValueError)
    with optional_packages.package("zstandard", extra="zstd", where=where):
        import zstandard
    make = lambda: zstandard.ZstdDecompressor(max_window_size=WINDOW).decompressobj()
    return make, (zstandard.ZstdError,)


def _decompressed(file: BinaryIO, packing: str, where: str) -> Iterator[bytes]:
    """The content of all streams of a file; the libraries' own readers take a cut one for whole."""
    make, errors = _decompressor(packing, where)
    num_bytes = 0

    def read() -> bytes:
        nonlocal num_bytes
        data = file.read(CHUNK)
        num_bytes += len(data)
        return data

    def wrong(what: object) -> DataError:
        return damaged(where, f"{packing} file", f"{what}, before byte {num_bytes:,}")

    data = read()
    if not data:
        raise wrong("it is empty")
    while data:
        begin = data
        stream = make()
        while not stream.eof:
            if not data and not (data := read()):
                raise wrong("it ends inside of a frame")
            try:
                yield stream.decompress(data)
            except errors as error:
                if packing == "zstd":
                    raise _no_zstd(wrong(error), _dictionary(begin)) from None
                raise wrong(error) from None
            data = stream.unused_data
        data = data or read()
        while packing in PADDED and data and not data.strip(b"\0"):
            data = read()


def _no_zstd(error: DataError, number: int) -> DataError:
    """The refusal of a frame that may need a dictionary, of which it need not have the number."""
    fix = "unpack it with its dictionary, or pack it without one (zstd without -D)"
    if not number:
        return DataError(**{**error.parts(), "fix": f"copy it again; if zstd -D packed it, {fix}"})
    problem = "is packed with a dictionary, which is another file"
    return DataError(error.where, problem, found=f"the dictionary of number {number}", fix=fix)


def _dictionary(frame: bytes) -> int:
    """The number of the dictionary that a frame of zstd names; 0: it names none."""
    import zstandard

    try:
        return int(zstandard.get_frame_parameters(frame).dict_id)
    except zstandard.ZstdError:
        return 0


def _decoded(file: BinaryIO, encoding: str, where: str) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder(encoding)()
    try:
        while data := file.read(CHUNK):
            yield decoder.decode(data).encode()
        yield decoder.decode(b"", final=True).encode()
    except UnicodeError as error:
        raise no_text(where, error, encoding) from None


class _Pieces(io.RawIOBase):
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
