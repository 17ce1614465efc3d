"""Numbers in files are those of arrays in memory, and sorted ones have the same ranks."""

import numpy as np
import pytest

from holmesjax.data import number_files
from holmesjax.data.number_files import NumberFile, SortedNumbers
from holmesjax.data.object_stores import RangeFile


@pytest.mark.parametrize("count", [0, 1, 511, 512, 513, 5000])
def test_ranks_are_those_of_the_array_on_every_page(tmp_path, monkeypatch, count):
    monkeypatch.setattr(number_files, "CHUNK", 4 * number_files.PAGE)
    random = np.random.default_rng(count)
    values = np.sort(random.integers(0, 2000, count))  # most of 5,000 are there more than once
    path = tmp_path / "numbers"
    path.write_bytes(b"header" + values.astype("<i8").tobytes())
    numbers = NumberFile(RangeFile(path), np.dtype("<i8"), count, at=6)
    for low, high in [(0, count), (count // 3, count // 2), (5, 2), (count, count + 9)]:
        np.testing.assert_array_equal(numbers[low:high], values[low:high])
    np.testing.assert_array_equal(
        np.concatenate([values[:0], *(chunk for _, chunk in numbers.chunks())]), values
    )
    found = SortedNumbers(numbers)
    wanted = range(-1, 2002)
    assert [found.rank(value) for value in wanted] == np.searchsorted(values, wanted).tolist()
