"""Opens files only where they are files. Does not import JAX.

A pipe, a socket or a device that stands where a file belongs would hold up whoever opens it, or
give bytes without an end.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, cast

WORDS = "it is a pipe, a socket or a device, and no file"


def opener(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    """The descriptor of a regular file or a folder: for `open`, and in place of `os.open`.

    It returns at once. Raises OSError as `os.open` does, and with ESPIPE for anything else.
    """
    try:
        # Without a second end, a pipe is opened at once to read, and refuses at once to be written.
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, mode)
    except OSError as error:
        if error.errno == errno.ENXIO:  # of such a pipe, and of a socket
            raise OSError(errno.ESPIPE, WORDS, str(path)) from None
        raise
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind) or stat.S_ISDIR(kind):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.ESPIPE, WORDS, str(path))


def open_file(path: str | Path, mode: str = "rb", *, buffering: int = -1) -> BinaryIO:
    """Opens a regular file of bytes, as `open` does."""
    return cast(BinaryIO, open(path, mode, buffering, opener=opener))


def read_bytes(path: str | Path) -> bytes:
    """The bytes of a regular file. Raises OSError with this path."""
    try:
        with open_file(path) as file:
            return file.read()
    except OSError as error:  # of a file that is open, it names none
        raise OSError(error.errno, error.strerror, str(path)) from None


def read_text(path: str | Path) -> str:
    """The text of a regular file in UTF-8. Raises OSError, and ValueError for other bytes."""
    return read_bytes(path).decode()
