"""The order of the data: a permutation at every length, without a trace of the file's order."""

import numpy as np
import pytest

from holmesjax.data.permutation import GAMMA, mix64, permute, round_keys


def plain(i, n, keys):
    """The definition, for one index, in Python's integers."""

    def mix(x):
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    half = (max(2, (n - 1).bit_length()) + 1) // 2
    mask = 2**half - 1
    while True:
        left, right = i >> half, i & mask
        for key in keys:
            left, right = right, left ^ (mix((right + key) % 2**64) & mask)
        i = left << half | right
        if i < n:
            return i


def test_the_generator_is_splitmix64():
    numbers = np.array([1, GAMMA], np.uint64)  # the second is SplitMix64's first of seed 0
    assert [hex(x) for x in mix64(numbers)] == ["0x5692161d100b05e5", "0xe220a8397b1dcdaf"]
    assert [hex(k) for k in round_keys(0)[:2]] == ["0xa706dd2f4d197e6f", "0xb382a305f4414f5e"]


@pytest.mark.parametrize(
    "n, seed, stream, first, last",
    [
        (10, 0, 0, [8, 6, 5, 1, 7, 4, 3, 0, 2], 9),
        (10, 0, 1, [9, 0, 4, 2, 3, 5, 7, 8, 6], 1),
        (10, 0, 2, [9, 5, 6, 4, 8, 7, 0, 1, 2], 3),
        (10, 1, 0, [2, 7, 4, 3, 0, 9, 1, 8, 5], 6),
        (65537, 42, 0, [20343, 43929, 35155], 57503),
        (10**6, 42, 0, [597031, 472485, 63010], 201925),
        (10**12, 42, 0, [302854179269, 89570420719, 66489891770], 782290202093),
    ],
)
def test_the_order_is_the_published_one(n, seed, stream, first, last):
    keys = round_keys(seed, stream)
    index = np.array([*range(len(first)), n - 1])
    assert permute(index, n, keys).tolist() == [*first, last]
    assert [plain(i, n, keys.tolist()) for i in index.tolist()] == [*first, last]


def test_every_index_comes_once_at_any_length():
    sizes = [*range(1, 300), *(2**k + d for k in (9, 12, 16, 18) for d in (-1, 0, 1))]
    for n in sizes:
        got = permute(np.arange(n), n, round_keys(seed=3, stream=n))
        np.testing.assert_array_equal(np.sort(got), np.arange(n), err_msg=f"n = {n}")


@pytest.mark.parametrize("n", [2**20, 2**20 - 3, 2**28 - 3, 10**12])
def test_neighbours_in_the_order_are_no_neighbours_in_the_file(n):
    order = permute(np.arange(2**16), n, round_keys(0)).astype(float)
    correlation = np.corrcoef(order[:-1], order[1:])[0, 1]
    assert abs(correlation) < 0.02  # 5 standard deviations of independent draws
    counts = np.bincount((order * 256 / n).astype(int), minlength=256)
    assert np.sum((counts - 256) ** 2 / 256) < 255 + 5 * np.sqrt(2 * 255)  # chi-squared


def test_streams_and_seeds_are_orders_of_their_own():
    index = np.arange(1000)
    orders = {(s, e): permute(index, 1000, round_keys(s, e)) for s in range(5) for e in range(5)}
    by_chance = [np.sum(orders[a] == orders[b]) for a in orders for b in orders if a < b]
    assert max(by_chance) < 10  # the same place in both: 1 expected
