"""A file that grows by whole records, and loses none while its disk is full."""

import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from holmesjax.files import regular_files
from holmesjax.files.whole_files import put_in_place, temporary_of

MOST_WAITING = 10_000  # records, for a disk that has room or for whoever writes them
MOST_BYTES = 16 << 20  # of a record


def end_of_lines(file: BinaryIO) -> int:
    """The end of the last whole line of a file."""
    start = file.seek(max(file.seek(0, os.SEEK_END) - MOST_BYTES, 0))
    return start + file.read().rfind(b"\n") + 1


class RecordFile:
    """A file that grows by the record of a step, or not at all.

    A record that finds no room is kept, and written with the next one. A file that somebody removes
    comes back with all its records; of another one in its place it is said that it lacks them.
    A file that others have cut, or written behind its end, ends with a whole record again, and
    that is said.

    Args:
      path: of the file, which may be there.
      say: takes messages.
      end_of_records: where the last whole record of a file ends that others have cut.
    """

    def __init__(
        self,
        path: Path,
        say: Callable[[str], object],
        end_of_records: Callable[[BinaryIO], int] = end_of_lines,
    ):
        self._path, self._say, self._end_of_records = path, say, end_of_records
        self._file = regular_files.open_file(path, "a+b", buffering=0)
        self._size = self._file.seek(0, os.SEEK_END)  # of whole records
        self._records: list[bytes] = []  # that are not in the file yet
        self._is_failing = False
        self._is_replaced = False

    def append(self, record: bytes) -> None:
        self._records.append(record)
        self._write()

    def _write(self) -> None:
        """Writes all records that are left. One of which only a part fits is cut off again."""
        content = b"".join(self._records)
        try:
            self._come_back()
            self._cut_to_records()
            if (count := self._file.write(content)) != len(content):
                raise OSError(errno.ENOSPC, f"{count} of {len(content)} bytes were written")
        except OSError as error:
            with contextlib.suppress(OSError):  # others may have cut it: it must not grow by zeros
                self._file.truncate(min(self._size, self._file.seek(0, os.SEEK_END)))
            if not self._is_failing:
                self._say(
                    f"{self._path} cannot be written ({error.strerror}): "
                    "the records of steps are kept, and written when it can be"
                )
            self._is_failing = True
            if len(self._records) > MOST_WAITING:
                del self._records[0]
            return
        if self._is_failing:
            self._say(f"{self._path} is written again")
        self._size += len(content)
        self._records.clear()
        self._is_failing = False

    def _come_back(self) -> None:
        """Puts a file that was removed back in its place. Raises OSError."""
        try:
            is_there = os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            copy = temporary_of(self._path)
            try:
                self._file.seek(0)
                with regular_files.open_file(copy, "wb") as file:
                    shutil.copyfileobj(self._file, file)
                there = regular_files.open_file(copy, "a+b", buffering=0)
                put_in_place(copy, self._path)
            finally:
                copy.unlink(missing_ok=True)
            self._file.close()
            self._file = there
            self._say(f"{self._path} was removed, and is there again with all records of steps")
            return
        if not is_there and not self._is_replaced:
            self._say(f"{self._path} is another file now: the records of steps do not go there")
        self._is_replaced = not is_there

    def _cut_to_records(self) -> None:
        """Makes the file end with a record where others have changed its length. Raises OSError."""
        size = self._file.seek(0, os.SEEK_END)
        if size == self._size:
            return
        if size > self._size:
            said = f"had {size - self._size:,} bytes behind its last record, which are cut off"
        else:
            said = f"was cut from {self._size:,} to {size:,} bytes: it lacks records of steps"
            self._size = self._end_of_records(self._file)
        self._file.truncate(self._size)
        self._say(f"{self._path} {said}")

    def close(self) -> None:
        if self._records:
            self._write()
        if self._records:
            self._say(f"{self._path} lacks the records of {len(self._records)} steps")
            self._records.clear()
        with contextlib.suppress(OSError):
            self._file.close()
