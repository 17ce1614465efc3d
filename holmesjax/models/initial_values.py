"""Random numbers that can be drawn from anywhere in an array. No JAX.

    draw("seed and name", (V, D), ((0, 8), (4, 6)), Normal(std))

A value depends on the name and on its index in the whole array, and on nothing else: whoever draws
a box of an array draws what anybody else does. Values are computed from integers, with one float32
product and one float32 sum. So they are the same bits on every platform and in every version of
NumPy.

A normal value is the sum of two of 65,536 quantiles of the normal distribution, times half the root
of 2: it has 2^32 different values, up to 6.1 standard deviations. A uniform value is one of 2^24.
"""

import functools
import hashlib
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import NormalDist

import numpy as np

from holmesjax.layer_specs.array_boxes import Box, shape_of
from holmesjax.layer_specs.kind import Normal, Uniform

BLOCK = 1 << 16  # values of a thread at a time: they stay in its cache
QUANTILES = 1 << 16

# SplitMix64 (Steele et al., "Fast Splittable Pseudorandom Number Generators", 2014): a counter
# times GAMMA, mixed. A second key between its halves keeps names from sharing one sequence.
GAMMA = np.uint64(0x9E3779B97F4A7C15)
FIRST, SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def draw(name: str, shape: tuple[int, ...], box: Box, initial: Normal | Uniform) -> np.ndarray:
    """Returns the values in a box of the array `name`; float32 with the box's shape.

    Threads share the work, one for each CPU that this process may use.
    """
    starts, length = _runs(shape, box)
    out = np.empty((len(starts), length), np.float32)
    digest = hashlib.sha256(name.encode()).digest()
    keys = np.frombuffer(digest, "<u8", 2)
    of_words = _uniform(initial) if isinstance(initial, Uniform) else _normal(initial)

    def fill(block: tuple[slice, slice]) -> None:
        rows, columns = block
        _fill(out[block], starts[rows] + columns.start, keys, of_words)

    blocks = list(_blocks(*out.shape))
    if len(blocks) == 1:
        fill(blocks[0])
    else:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "draw") as pool:
            list(pool.map(fill, blocks))
    return out.reshape(shape_of(box))


def _runs(shape: tuple[int, ...], box: Box) -> tuple[np.ndarray, int]:
    """The runs of the box's values in the array: the first index of each; their length."""
    length, dims = 1, list(zip(shape, box, strict=True))
    while dims and dims[-1][1] == (0, dims[-1][0]):
        length *= dims.pop()[0]
    starts = np.zeros(1, np.int64)
    for i, (size, (start, stop)) in enumerate(dims):
        is_last = i == len(dims) - 1
        inside = np.arange(start, start + 1 if is_last else stop)
        starts = (starts[:, None] * size + inside).ravel()
    if dims:
        starts, length = starts * length, length * (stop - start)
    return starts, length


def _blocks(num_rows: int, length: int) -> Iterator[tuple[slice, slice]]:
    """Cuts [num_rows, length] into parts of about BLOCK values."""
    rows = max(1, BLOCK // max(length, 1))
    for row in range(0, num_rows, rows):
        for column in range(0, length, BLOCK):
            yield slice(row, row + rows), slice(column, min(column + BLOCK, length))


def _normal(initial: Normal) -> Callable[[np.ndarray], np.ndarray]:
    table = _quantiles() * np.float32(initial.std * math.sqrt(0.5))

    def of_words(words: np.ndarray) -> np.ndarray:
        parts = table.take(words.view(np.uint16), mode="wrap")
        values: np.ndarray = parts[:, ::2] + parts[:, 1::2]
        return values

    return of_words


def _uniform(initial: Uniform) -> Callable[[np.ndarray], np.ndarray]:
    """The middles of 2^24 equal parts: float32 holds each of these numbers between 0 and 1."""
    unit, bound = np.float32(2**-23), np.float32(initial.bound)
    middle = np.float32(2**23 - 0.5)
    return lambda words: ((words.view(np.uint32) >> 8).astype(np.float32) - middle) * unit * bound


def _fill(
    out: np.ndarray,
    starts: np.ndarray,
    keys: np.ndarray,
    of_words: Callable[[np.ndarray], np.ndarray],
) -> None:
    """The values that follow each of `starts`, [rows], in [rows, length]. One word gives two."""
    length = out.shape[1]
    for odd in (0, 1):
        rows = np.flatnonzero(starts % 2 == odd)
        if not rows.size:
            continue
        num_words = (length + odd + 1) // 2
        words = (starts[rows, None] // 2 + np.arange(num_words)).astype(np.uint64)
        _mix(words, keys)
        out[rows] = of_words(words)[:, odd : odd + length]


def _mix(words: np.ndarray, keys: np.ndarray) -> None:
    """Turns numbers of words into the words, in place."""
    shifted = np.empty_like(words)

    def fold(shift: int) -> None:
        np.right_shift(words, np.uint64(shift), out=shifted)
        np.bitwise_xor(words, shifted, out=words)

    words *= GAMMA
    words += keys[0]
    fold(30)
    words *= FIRST
    words ^= keys[1]
    fold(27)
    words *= SECOND
    fold(31)


@functools.cache
def _quantiles() -> np.ndarray:
    """Standard normal quantiles, in the middle of each of QUANTILES equal parts."""
    normal, half = NormalDist(), QUANTILES // 2
    upper = [normal.inv_cdf((half + i + 0.5) / QUANTILES) for i in range(half)]
    return np.array([-x for x in reversed(upper)] + upper, np.float32)
