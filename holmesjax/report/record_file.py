"""A file that grows by whole records, and loses none while its disk is full."""

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

from holmesjax.files import regular_files

MOST_WAITING = 10_000  # records, for a disk that has room or for whoever writes them


class RecordFile:
    """A file that grows by the record of a step, or not at all.

    A record that finds no room is kept, and written with the next one.

    Args:
      path: of the file, which may be there.
      say: takes messages.
    """

    def __init__(self, path: Path, say: Callable[[str], object]):
        self._file, self._say = regular_files.open_file(path, "ab", buffering=0), say
        self._size = self._file.seek(0, os.SEEK_END)  # of whole records
        self._records: list[bytes] = []  # that are not in the file yet
        self._is_failing = False

    def append(self, record: bytes) -> None:
        self._records.append(record)
        self._write()

    def _write(self) -> None:
        """Writes all records that are left. One of which only a part fits is cut off again."""
        content = b"".join(self._records)
        try:
            if (count := self._file.write(content)) != len(content):
                raise OSError(errno.ENOSPC, f"{count} of {len(content)} bytes were written")
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)
            if not self._is_failing:
                self._say(
                    f"{self._file.name} cannot be written ({error.strerror}): "
                    "the records of steps are kept, and written when it can be"
                )
            self._is_failing = True
            if len(self._records) > MOST_WAITING:
                del self._records[0]
            return
        if self._is_failing:
            self._say(f"{self._file.name} is written again")
        self._size += len(content)
        self._records.clear()
        self._is_failing = False

    def close(self) -> None:
        if self._records:
            self._write()
        if self._records:
            self._say(f"{self._file.name} lacks the records of {len(self._records)} steps")
            self._records.clear()
        with contextlib.suppress(OSError):
            self._file.close()
