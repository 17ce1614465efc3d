"""Permutations of 0, ..., n - 1 that need no memory: the order in which an epoch reads its windows.

A balanced Feistel network permutes the numbers of an even number of bits, at most four times as
many as n; an image beyond n goes through it again until it falls below (cycle walking: Black and
Rogaway, "Ciphers with arbitrary finite domains", 2002). The round function is the finalizer of
SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014). Integers
modulo 2**64 only: the order is the same on every machine and with every version of NumPy.
"""

import numpy as np

NUM_ROUNDS = 6  # with four, neighbours in the order were often neighbours in the file
GAMMA, STREAM_GAMMA = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95


def mix64(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer, a permutation of uint64 in which every bit moves others."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


def round_keys(seed: int, stream: int = 0) -> np.ndarray:
    """Keys of an order; each stream of a seed has an order of its own; uint64 [NUM_ROUNDS]."""
    key = mix64(_uint64([seed + GAMMA]))
    if stream:
        key = mix64(key + _uint64([stream * STREAM_GAMMA]))
    return mix64(key + _uint64([(r + 1) * GAMMA for r in range(NUM_ROUNDS)]))


def permute(index: np.ndarray, n: int, keys: np.ndarray) -> np.ndarray:
    """The images of some indices in the permutation of 0, ..., n - 1 with these keys; int64 [I]."""
    assert n <= 2**62, f"the network has no room for {n}"
    half = (max(2, (n - 1).bit_length()) + 1) // 2
    mask = 2**half - 1
    result = index.astype(np.uint64)
    assert (result < n).all(), f"not all below {n}: {index}"
    beyond = np.arange(len(result))  # those that have yet to walk
    while len(beyond):
        left, right = result[beyond] >> half, result[beyond] & mask
        for key in keys:
            left, right = right, left ^ (mix64(right + key) & mask)
        result[beyond] = left << half | right
        beyond = beyond[result[beyond] >= n]
    return result.astype(np.int64)


def _uint64(numbers: list[int]) -> np.ndarray:
    return np.array([number % 2**64 for number in numbers], np.uint64)
