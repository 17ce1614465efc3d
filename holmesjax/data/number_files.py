"""Arrays of numbers in files; only the ranges that are asked for are read."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from holmesjax.data.object_stores import RangeFile

CHUNK = 2**20  # numbers that are read at once, of all
PAGE = 512  # numbers of a sorted array, of which the first is kept


class NumberFile:
    """Numbers of one type in a file, from a byte on."""

    def __init__(self, file: RangeFile, dtype: np.dtype, count: int, at: int = 0):
        """Reads nothing yet.

        Args:
          file: has them all.
          dtype: with its order of bytes.
          count: how many there are.
          at: the byte of the first one.
        """
        self.dtype, self._file, self._count, self._at = dtype, file, count, at

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: slice) -> np.ndarray:
        first, last, step = index.indices(self._count)
        assert step == 1
        count = max(last - first, 0)
        size = self.dtype.itemsize
        content = self._file.read(self._at + first * size, count * size) if count else b""
        return np.frombuffer(content, self.dtype)

    def chunks(self) -> Iterator[tuple[int, np.ndarray]]:
        """All numbers, some at a time, with the place of their first."""
        for first in range(0, self._count, CHUNK):
            yield first, self[first : first + CHUNK]

    def byte_of(self, place: int) -> int:
        """The byte in the file of a number."""
        return self._at + place * self.dtype.itemsize


class SortedNumbers:
    """Numbers that do not decrease, with the first of each page in memory."""

    def __init__(self, numbers: NumberFile):
        """Reads all of them once."""
        self.numbers = numbers
        firsts = [chunk[::PAGE] for _, chunk in numbers.chunks()]
        self._first_P = np.concatenate(firsts) if firsts else np.empty(0, numbers.dtype)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: slice) -> np.ndarray:
        return self.numbers[index]

    def rank(self, value: int) -> int:
        """How many are below a value."""
        page = int(np.searchsorted(self._first_P, value)) - 1
        if page < 0:
            return 0
        return page * PAGE + int(
            np.searchsorted(self.numbers[page * PAGE : (page + 1) * PAGE], value)
        )


def open_numbers(path: Path, dtype: np.dtype, at: int = 0) -> NumberFile:
    """All numbers of a file from a byte on; its size must be right."""
    file = RangeFile(path)
    return NumberFile(file, dtype, (file.size - at) // dtype.itemsize, at)
