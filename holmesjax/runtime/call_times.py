"""Seconds of calls on a device: `launch profile` and the benchmarks of kernels measure with it."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Call = Callable[[], Any]  # starts the work; what it returns can be waited for
MOST_CALLS = 10_000  # in a round
DRAWN = 2**20  # numbers


def rounds_s(
    calls: Mapping[str, Call],
    *,
    rounds: int,
    round_s: float,
    wait: Callable[[Any], Any] = jax.block_until_ready,
) -> dict[str, list[float]]:
    """Seconds of one call, in each round. In a round, calls follow each other without a wait.

    Args:
      calls: by name. They take turns, so a device that becomes slower is slower for all of them.
      rounds: how many times each has its turn.
      round_s: a round has as many calls as take so long.
      wait: waits until the result of a call is there.
    """
    counts: dict[str, int] = {}
    for name, call in calls.items():
        wait(call())  # compiles
        start_s = time.perf_counter()
        wait(call())
        took_s = max(time.perf_counter() - start_s, 1e-9)
        counts[name] = min(max(1, math.ceil(round_s / took_s)), MOST_CALLS)
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start_s = time.perf_counter()
            for _ in range(counts[name]):
                result = call()
            wait(result)
            found[name].append((time.perf_counter() - start_s) / counts[name])
    return found


def normal(seed: int, *shape: float, dtype: str) -> jax.Array:
    """Random numbers, which repeat in large arrays: drawing them all would take seconds.

    Products of zeros take less power, and so less time.
    """
    dims = [round(n) for n in shape]
    drawn = np.random.default_rng(seed).standard_normal(min(math.prod(dims), DRAWN), np.float32)
    return jnp.asarray(np.resize(drawn.astype(jnp.dtype(dtype)), dims))


def product(rows: float, columns: float, depth: float, dtype: str) -> Call:
    """A matrix product of random numbers."""
    a = normal(0, rows, depth, dtype=dtype)
    b = normal(1, depth, columns, dtype=dtype)
    multiply = jax.jit(jnp.matmul)
    return lambda: multiply(a, b)
