"""Files that are whole, whenever the process that writes them is killed."""

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file, on the disk when this returns. Raises OSError.

    After a crash the path has the whole content, or what it had before.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
