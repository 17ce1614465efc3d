"""The place of a mailbox: a folder that all islands see, or an object store. No JAX.

Both write a small object once, if it is not there (`put` without `replaces`): of two writers the
first one wins, and the other is told. All methods raise OSError for what the place says.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from holmesjax.checkpoints.mirror import Mirror
from holmesjax.files import places
from holmesjax.files.whole_files import TEMPORARY, put_in_place, sync, temporary_of, write_whole

BLOCK_BYTES = 16 << 20  # of a file that is copied


class MailboxPlace(Protocol):
    """A place of objects, as a mailbox uses it; names are paths with slashes."""

    def read(self, name: str) -> bytes | None:
        """A small object; None if it is not there."""

    def read_piece(self, name: str, first: int, count: int) -> bytes:
        """Bytes of an object from a place on."""

    def put(self, name: str, content: bytes, *, replaces: bool = True) -> None:
        """Writes a small object. Raises FileExistsError for another one that is not replaced."""

    def put_file(self, path: Path, name: str, advance: Callable[[], object] = ...) -> None:
        """Copies a file there; the object appears when it is whole.

        `advance` is called with each block.
        """

    def listed(self, name: str) -> dict[str, int]:
        """The objects below a name, with their bytes."""

    def remove(self, names: Collection[str]) -> None:
        """Removes objects that are there."""

    def remove_folder(self, name: str, names: Collection[str]) -> None:
        """Removes the objects of a folder, and what a writer that was killed has left there."""


class Folder:
    """A folder that all islands see."""

    def __init__(self, path: Path):
        self._path = path

    def read(self, name: str) -> bytes | None:
        try:
            return (self._path / name).read_bytes()
        except FileNotFoundError:
            return None

    def read_piece(self, name: str, first: int, count: int) -> bytes:
        with (self._path / name).open("rb") as file:
            file.seek(first)
            return file.read(count)

    def put(self, name: str, content: bytes, *, replaces: bool = True) -> None:
        path = self._path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_whole(path, content, replaces=replaces)
        except FileExistsError:
            if self.read(name) != content:  # as an object store, where an answer may be lost
                raise

    def put_file(self, path: Path, name: str, advance: Callable[[], object] = lambda: None) -> None:
        target = self._path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_of(target)
        try:
            with path.open("rb") as source, temporary.open("wb") as copy:
                while content := source.read(BLOCK_BYTES):
                    copy.write(content)
                    advance()
            sync(temporary)
            put_in_place(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
        sync(target.parent)

    def listed(self, name: str) -> dict[str, int]:
        found = {}
        for folder, _, names in os.walk(self._path / name, onerror=_raise_but_absent):
            for path in (Path(folder, file) for file in names):
                with contextlib.suppress(FileNotFoundError):  # somebody has just removed it
                    if not path.match(TEMPORARY):
                        found[path.relative_to(self._path).as_posix()] = path.stat().st_size
        return found

    def remove(self, names: Collection[str]) -> None:
        for name in names:
            (self._path / name).unlink(missing_ok=True)
        for folder in {(self._path / name).parent for name in names}:
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()

    def remove_folder(self, name: str, names: Collection[str]) -> None:
        for left in (self._path / name).glob(TEMPORARY):
            left.unlink(missing_ok=True)
        self.remove(names)


class MailboxStore(Mirror):
    """An object store, which keeps nothing of an object that is not whole."""

    def remove_folder(self, name: str, names: Collection[str]) -> None:
        self.remove(names)


def _raise_but_absent(error: OSError) -> None:
    """Raises what `os.walk` would pass over: a folder that cannot be listed is not an empty one."""
    if not isinstance(error, FileNotFoundError):
        raise error


@dataclass
class Counted:
    """A place whose requests and bytes are counted.

    Args:
      place: which does the work.
      advance: called with each piece of arrays that has gone or come.
    """

    place: MailboxPlace
    requests: int = 0
    sent: int = field(default=0)  # bytes
    received: int = field(default=0)
    pieces: int = 0
    advance: Callable[[], object] = lambda: None

    def _advance(self) -> None:
        self.pieces += 1
        self.advance()

    def read(self, name: str) -> bytes | None:
        self.requests += 1
        content = self.place.read(name)
        self.received += len(content or b"")
        return content

    def read_piece(self, name: str, first: int, count: int) -> bytes:
        self.requests += 1
        content = self.place.read_piece(name, first, count)
        self.received += len(content)
        self._advance()
        return content

    def put(self, name: str, content: bytes, *, replaces: bool = True) -> None:
        self.requests += 1
        self.sent += len(content)
        self.place.put(name, content, replaces=replaces)

    def put_file(self, path: Path, name: str, advance: Callable[[], object] = lambda: None) -> None:
        def advance_both() -> None:
            self._advance()
            advance()

        self.requests += 1
        self.sent += path.stat().st_size
        self.place.put_file(path, name, advance_both)

    def listed(self, name: str) -> dict[str, int]:
        self.requests += 1
        return self.place.listed(name)

    def remove(self, names: Collection[str]) -> None:
        self.requests += 1
        self.place.remove(names)

    def remove_folder(self, name: str, names: Collection[str]) -> None:
        self.requests += 1
        self.place.remove_folder(name, names)


def open_place(where: str) -> MailboxPlace:
    """The place of a mailbox, by the folder or the URL that a run names."""
    url = places.whole_url(where)
    return MailboxStore(url) if url else Folder(Path(where))


def other_place(lacks: str) -> OSError:
    """The error of a place that is not what it was, as a folder whose file system is gone."""
    return OSError(errno.ESTALE, f"it lacks {lacks}")
