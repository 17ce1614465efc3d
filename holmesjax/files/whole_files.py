"""Files that are whole, whenever the process that writes them is killed.

A file of a folder that has owners, one after the other, is replaced by its owner alone (`lease`).
Content is first on the disk under a temporary name, then the owner looks whether the folder is
still its own, then it renames. Who takes the folder over deletes all temporary names. So a process
that stood still somewhere on this way, and wakes up behind its successor, renames nothing.
"""

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

TEMPORARY = "*.tmp"
_looks: dict[Path, Callable[[], object]] = {}  # of folders that this process owns


def owned(folder: Path, look: Callable[[], object]) -> Callable[[], None]:
    """Lets `look` be called before a file below a folder is replaced; it raises if it may not be.

    Returns the end of that.
    """
    _looks[folder] = look
    return lambda: _looks.pop(folder, None) and None


def temporary_of(path: Path) -> Path:
    """A name beside a file that no other process has, on any host."""
    return path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")


def put_in_place(temporary: Path, path: Path) -> None:
    """Renames a file that is on the disk. Raises OSError, and what the owner's look raises."""
    _look(path)
    temporary.replace(path)


def _look(path: Path) -> None:
    for folder in path.absolute().parents:
        if look := _looks.get(folder):
            look()


def write_whole(path: Path, content: str | bytes, *, replaces: bool = True) -> None:
    """Writes a file, on the disk when this returns. Raises OSError with this path.

    Also raises LostLeaseError where the file is in a folder that this process owned.

    After a crash the path has the whole content, or what it had before.

    Args:
      path: the file.
      content: all of it; text is written in UTF-8.
      replaces: whether a file that is there is replaced; else it stays, and this raises
        FileExistsError.
    """
    temporary = temporary_of(path)
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        if replaces:
            put_in_place(temporary, path)
        else:
            _look(path)
            _link(temporary, path)  # a rename would replace what another has just written
    except OSError as error:  # a full disk names no file, and the temporary one is nobody's
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        with contextlib.suppress(OSError):  # the file is written, or its own error says more
            temporary.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Puts the content of a file, or the names in a folder, on the disk.

    Raises OSError with this path.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # which names no file
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(descriptor)


def sync_below(folder: Path) -> None:
    """Puts all files below a folder, and their names, on the disk. Raises OSError."""
    for here, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(here, name))
        sync(Path(here))


def _link(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        if not path.samefile(temporary):  # else the answer of a server was lost
            raise
