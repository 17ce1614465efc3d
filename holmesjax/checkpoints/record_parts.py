"""The records of steps in an object store, in parts: a commit sends what is new. No JAX.

    metrics.json                             the parts, in their order
    metrics/00000000-9f86d081884c7d65.jsonl  the first MiB of metrics.jsonl, with its SHA-256
            00000001-60303ae22b998861.jsonl  the next one

A store cannot append to an object, and the file of a run of weeks has a GB: as one object it would
be sent again with each checkpoint, which would wait for it. Parts that are full stay as they are.
Only the last one is sent anew, under another name, and the list says which count.
"""

import contextlib
import hashlib
import io
import json
import os
import re
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import IO, Protocol

from holmesjax.files import regular_files, run_folder
from holmesjax.files.whole_files import put_in_place, temporary_of

LIST = "metrics.json"
FOLDER = "metrics"
PART_BYTES = 1 << 20
NAME = re.compile(rf"{FOLDER}/\d{{8}}-[0-9a-f]{{16}}\.jsonl")
TRIES = 3  # to read parts whose writer replaces the last one meanwhile


class Objects(Protocol):
    """The part of `Mirror` that is used here."""

    def read(self, name: str) -> bytes | None: ...

    def put(self, name: str, content: bytes) -> None: ...

    def listed(self, name: str) -> Mapping[str, int]: ...

    def remove(self, names: Collection[str]) -> None: ...


class RecordParts:
    """The parts of one file, for one start of a run. Its methods raise OSError as `Objects` do."""

    def __init__(self, objects: Objects):
        self._objects = objects
        self._names: list[str] = []  # of the parts that count
        self._there: set[str] | None = None  # all objects; None before it was looked
        self._size = 0  # bytes that they have
        self._lock = threading.Lock()  # commits and removals are of different threads

    def publish(self, path: Path) -> None:
        """Brings there what a file has now and the store has not; the run may write on meanwhile.

        Raises FileNotFoundError without the file.
        """
        with self._lock, regular_files.open_file(path) as file:
            self._publish(file)

    def _publish(self, file: IO[bytes]) -> None:
        end = file.seek(0, os.SEEK_END)
        if end < self._size:  # the run went back, or others have cut it
            self._names, self._size = [], 0
        if self._there is None:
            whole = self._objects.listed(run_folder.METRICS)  # of an earlier version
            self._there = {*self._objects.listed(FOLDER), *whole}
        names = self._names[: self._size // PART_BYTES]
        size = file.seek(len(names) * PART_BYTES)
        while content := file.read(min(PART_BYTES, end - size)):
            name = _name(len(names), content)
            if name not in self._there:
                self._objects.put(name, content)
                self._there.add(name)
            names.append(name)
            size += len(content)
        if names != self._names:
            self._objects.put(LIST, json.dumps({"parts": names}).encode())
        self._names, self._size = names, size

    def tidy(self, check: Callable[[], object]) -> None:
        """Removes the parts that do not count any more; `check` is called before."""
        with self._lock:
            if superfluous := (self._there or set()) - set(self._names):
                check()
                self._objects.remove(superfluous)
                self._there = set(self._names)

    def bring(self, path: Path, say: Callable[[str], object]) -> bool:
        """Makes a file of the parts; False if there are none. Parts that it has are not read.

        `say` is told where a part is gone: then there is no file.
        """
        temporary = temporary_of(path)
        try:
            for _ in range(TRIES):
                if (names := self._listed()) is None:
                    return False
                if self._join(names, path, temporary):
                    put_in_place(temporary, path)
                    return True
        finally:
            temporary.unlink(missing_ok=True)
        say(f"warning: parts of {run_folder.METRICS} are gone from the store, and are not read")
        return True

    def _listed(self) -> list[str] | None:
        try:
            names = json.loads(self._objects.read(LIST) or b"{}")["parts"]
            return names if all(map(NAME.fullmatch, names)) else None
        except (ValueError, KeyError, TypeError):  # there is none, or somebody else's
            return None

    def _join(self, names: list[str], path: Path, temporary: Path) -> bool:
        """Whether all parts were there; the file is on the disk then."""
        with contextlib.ExitStack() as stack:
            known: IO[bytes] = io.BytesIO()
            with contextlib.suppress(FileNotFoundError):
                known = stack.enter_context(regular_files.open_file(path))
            file = stack.enter_context(temporary.open("wb"))
            for number, name in enumerate(names):
                content: bytes | None = known.read(PART_BYTES)
                if _name(number, content or b"") != name:
                    content = self._objects.read(name)
                if content is None:
                    return False
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        return True


def _name(number: int, content: bytes) -> str:
    return f"{FOLDER}/{number:08d}-{hashlib.sha256(content).hexdigest()[:16]}.jsonl"
