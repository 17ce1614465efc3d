"""Digests of whole files, each read once: what was read is kept beside the file.

A digest counts as long as the file has the size, the times and the inode that it had. Processes
that share a folder share the work: whoever locks a file first reads it, and the others go on with
the next one.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from holmesjax.data.corpus_progress import LongWork
from holmesjax.files import json_text, regular_files
from holmesjax.files.whole_files import write_whole

FOLDER = ".holmesjax"  # beside the files
THREADS = 4
CHUNK_BYTES = 2**22
LOCKED_S = 0.2  # between two looks at a file that another process reads


def whole_digests(paths: Sequence[Path]) -> list[str]:
    """Returns the SHA-256 of each file. Raises OSError for one that cannot be read."""
    known: dict[Path, str] = {}
    left = list(dict.fromkeys(paths))
    with ThreadPoolExecutor(THREADS) as pool:
        while left:
            found = dict(zip(left, pool.map(_try, left), strict=True))
            known |= {path: digest for path, digest in found.items() if digest is not None}
            left = [path for path in left if path not in known]
            if left:  # others read them
                time.sleep(LOCKED_S)
    return [known[path] for path in paths]


def _try(path: Path) -> str | None:
    """Returns the digest of a file; None: another process is reading it."""
    if (digest := _kept(path)) is not None:
        return digest
    with _locked(path) as is_mine:
        if not is_mine:
            return None
        if (digest := _kept(path)) is None:
            before = _state(path)
            digest = _read(path)
            if _state(path) == before:  # else the next process reads it again
                with contextlib.suppress(OSError):  # the folder is only for reading
                    write_whole(_place(path), json.dumps({**before, "sha256": digest}) + "\n")
        return digest


def _read(path: Path) -> str:
    digest = hashlib.sha256()
    with regular_files.open_file(path, buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        work = LongWork(f"reading {path.name} once for its digest", size)
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            work.add(len(chunk))
    return digest.hexdigest()


def _kept(path: Path) -> str | None:
    """Returns the digest that an earlier process has kept, if the file is still the same."""
    try:
        kept = json_text.read(_place(path))
        digest = kept.pop("sha256")
    except (
        OSError,
        ValueError,
        AttributeError,
        KeyError,
        TypeError,
    ):  # none, or not as it was written
        return None
    return digest if kept == _state(path) and isinstance(digest, str) else None


def _state(path: Path) -> dict[str, int]:
    found = path.stat()
    return {
        "bytes": found.st_size,
        "modified_ns": found.st_mtime_ns,
        "changed_ns": found.st_ctime_ns,
        "inode": found.st_ino,
    }


def _place(path: Path) -> Path:
    return path.parent / FOLDER / f"{path.name}.sha256"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Whether this process alone may read a file; where no lock can be kept, it may."""
    try:
        _place(path).parent.mkdir(exist_ok=True)
        handle = os.open(_place(path).with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        yield True
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:  # a file system without locks
            pass
        yield True
    finally:
        os.close(handle)
