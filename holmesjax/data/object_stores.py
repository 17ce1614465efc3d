"""Paths of files here and in object stores, whose objects are read as files by their ranges.

An object stays the one that was opened: the store is asked for its ETag with each range, and
refuses another. The clients of the stores are the extras `s3` and `gs`.
"""

import contextlib
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from holmesjax import hub_names
from holmesjax.data import optional_packages
from holmesjax.errors import AbsentDataError, DataError, UnreadDataError
from holmesjax.files import regular_files

SCHEMES = ("s3", "gs")
AHEAD_BYTES = 2**22  # of an object that is read from its beginning
BLOCK_BYTES = 2**16  # of an object of which ranges are read
BLOCKS = 1024  # of all objects that are kept
CONNECTIONS = 16  # requests at once
# The errors that the clients raise besides OSError: their own, and those of what they stand on.
ERRORS = (
    ("aiohttp", "ClientError"),
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.parsers", "ResponseParserError"),
    ("urllib3.exceptions", "HTTPError"),
    ("gcsfs.retry", "HttpError"),
    ("gcsfs.retry", "ChecksumError"),
    ("google.auth.exceptions", "GoogleAuthError"),
)


def is_remote(name: str | Path) -> bool:
    """Tells whether a name is one of an object store.

    >>> is_remote("s3://bucket/corpus"), is_remote("corpora/web")
    (True, False)
    """
    return "://" in str(name)


def path_of(name: str | Path) -> Path:
    """The path that a name means. Raises DataError for a store that is not known."""
    if not is_remote(name):
        return Path(name)
    scheme = str(name).partition("://")[0]
    if scheme not in SCHEMES:
        fix = f"use {' or '.join(f'{known}://' for known in SCHEMES)}, or a path"
        fix = hub_names.fix(str(name), fix, folder="corpora")
        raise DataError(str(name), "is in no store that is known", found=scheme, fix=fix)
    client = {"s3": "s3fs", "gs": "gcsfs"}[scheme]
    with optional_packages.package(client, extra=scheme, where=str(name)):
        import upath

        if scheme == "s3":
            import s3fs  # noqa: F401
        else:
            import gcsfs  # noqa: F401
    return cast(Path, upath.UPath(str(name)))  # with the methods of a path that are used here


def absent(name: str, fix: str) -> AbsentDataError:
    """The refusal of a corpus that is not there."""
    fix = hub_names.fix(name, fix, folder="corpora")
    here = "" if is_remote(name) else f"; the current folder is {Path.cwd()}"
    return AbsentDataError("data.corpus", "is not there", found=f"{name}{here}", fix=fix)


def ask(path: Path) -> None:
    """Raises what a store says of a path: `exists` and `is_dir` hide that it refuses."""
    if is_remote(path):
        with contextlib.suppress(FileNotFoundError):
            cast(Any, path).fs.info(cast(Any, path).path)


def open_file(path: Path, cache: str = "readahead") -> BinaryIO:
    """Opens a file to read it; `cache` is one of fsspec's, for an object."""
    if not is_remote(path):
        return regular_files.open_file(path)
    opened = cast(Any, path).open("rb", cache_type=cache, block_size=AHEAD_BYTES)
    return cast(BinaryIO, opened)


class RangeFile:
    """A file whose ranges are read, by any thread.

    A file is read by calls of the operating system, and not in a memory map: one that becomes
    shorter is an error with a name, where a map would end the process.
    """

    def __init__(self, path: Path):
        self.path = path
        self._object: BinaryIO | None = None
        if is_remote(path):
            self._object = open_file(path, cache="none")
            self._lock = threading.Lock()  # it has one place for all threads
            self.size = self._object.seek(0, os.SEEK_END)
        else:
            self._here = regular_files.opener(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._here)
            self.size = os.fstat(self._here).st_size

    def read(self, first: int, count: int) -> bytes:
        """Bytes from a place on. Raises UnreadDataError if they are not there, or no longer."""
        try:
            found = (
                os.pread(self._here, count, first)
                if self._object is None
                else self._blocks(first, count)
            )
        except errors() as error:
            fix = "bring it back as it was, or start again"
            problem = f"can no longer be read, at byte {first:,}"
            raise UnreadDataError(str(self.path), problem, found=said_by(error), fix=fix) from None
        if len(found) < count:
            what = f"{len(found):,} of {count:,} bytes from byte {first:,} on, of {self.size:,}"
            fix = "bring it back as it was, or start again"
            problem = "has become shorter while it was read"
            raise UnreadDataError(str(self.path), problem, found=what, fix=fix)
        return found

    def _blocks(self, first: int, count: int) -> bytes:
        if count > BLOCK_BYTES:
            return self._fetch(first, count)
        numbers = range(first // BLOCK_BYTES, -(-(first + count) // BLOCK_BYTES))
        content = b"".join(_block(self, number) for number in numbers)
        return content[(start := first % BLOCK_BYTES) : start + count]

    def _fetch(self, first: int, count: int) -> bytes:
        assert self._object is not None
        with self._lock:
            self._object.seek(first)
            return self._object.read(count)


@functools.lru_cache(BLOCKS)
def _block(file: RangeFile, number: int) -> bytes:
    return file._fetch(number * BLOCK_BYTES, BLOCK_BYTES)


T = TypeVar("T")
R = TypeVar("R")


def each(function: Callable[[T], R], items: Sequence[T], place: Path) -> list[R]:
    """The results for all items; of objects, several at a time: a request takes long."""
    if not is_remote(place):
        return [function(item) for item in items]
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        return list(pool.map(function, items))


def whole(path: Path) -> str:
    """A path for messages, from the root or with its store."""
    return str(path if is_remote(path) else path.absolute())


def version_of(path: Path) -> str:
    """A text that changes when a file does: its time of change, or an object's ETag."""
    if not is_remote(path):
        return str(path.stat().st_mtime_ns)
    info = cast(Any, path).fs.info(cast(Any, path).path)
    return str(info.get("ETag") or info.get("etag") or info.get("mtime"))


def files_below(path: Path) -> list[Path]:
    """All objects of a folder in a store, sorted."""
    store = cast(Any, path).fs
    return [
        path_of(store.unstrip_protocol(object_path)) for object_path in sorted(store.find(path))
    ]


def errors() -> tuple[type[Exception], ...]:
    """The errors of reading files: the clients of stores have classes of their own."""
    loaded = [(sys.modules.get(module), name) for module, name in ERRORS]
    return (OSError, *(getattr(module, name) for module, name in loaded if hasattr(module, name)))


def said_by(error: Exception) -> str:
    """The words of such an error."""
    words = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(words.split())
