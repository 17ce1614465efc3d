"""Files that are whole, whenever the process that writes them is killed."""

import contextlib
import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes, *, replaces: bool = True) -> None:
    """Writes a file, on the disk when this returns. Raises OSError with this path.

    After a crash the path has the whole content, or what it had before.

    Args:
      path: the file.
      content: all of it; text is written in UTF-8.
      replaces: whether a file that is there is replaced; else it stays, and this raises
        FileExistsError.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        if replaces:
            temporary.replace(path)
        else:
            _link(temporary, path)  # a rename would replace what another has just written
    except OSError as error:  # a full disk names no file, and the temporary one is nobody's
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        with contextlib.suppress(OSError):  # the file is written, or its own error says more
            temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _link(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        if not path.samefile(temporary):  # else the answer of a server was lost
            raise
