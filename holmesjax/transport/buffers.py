"""Host memory that sockets fill and JAX takes over, and the memory of parts of arrays. No JAX."""

import itertools
import math
import weakref
from collections import defaultdict, deque
from collections.abc import Collection, Mapping

import numpy as np

ALIGNMENT = 64  # bytes; JAX takes over host memory without a copy only so


# glibc's allocator with one heap that is never given back. XLA:CPU asks for its temporaries anew on
# each call of a program; by default their pages go back to the kernel, and each is a fault when it
# is touched again (docs/measurements.md).
ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1"}


def allocator_for(kinds: Collection[str], own: Mapping[str, str]) -> dict[str, str]:
    """Returns the allocator's variables for these kinds of devices; none if the user has set some.

    >>> allocator_for({"h100"}, {})
    {}
    >>> allocator_for({"cpu"}, {"MALLOC_ARENA_MAX": "4"})
    {}
    """
    chosen = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in own)
    return {} if chosen or set(kinds) != {"cpu"} else dict(ALLOCATOR)


class BufferPool:
    """Memory that is used again when JAX has dropped the array that lay in it.

    Receiving into pages that the process has not touched yet takes several times as long.
    """

    def __init__(self) -> None:
        self._free: dict[int, deque[np.ndarray]] = defaultdict(deque)

    def take(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        num_bytes = math.prod(shape) * dtype.itemsize
        free = self._free[num_bytes]
        try:
            block = free.pop()
        except IndexError:
            memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
            start = -memory.ctypes.data % ALIGNMENT
            block = memory[start : start + num_bytes]
        # A view of an array would keep the memory alive, but not this very object; a view of a
        # buffer does. Appending to a deque takes no lock, so that it is safe wherever it is called.
        lent = np.frombuffer(block.data, np.uint8)
        weakref.finalize(lent, free.append, block).atexit = False
        return lent.view(dtype).reshape(shape)


def runs_of(view: np.ndarray, offset: int, length: int) -> list[memoryview]:
    """Returns the memory of a range of an array's bytes, as contiguous runs."""
    run, num_outer = view.itemsize, view.ndim
    while num_outer and (view.shape[num_outer - 1] == 1 or view.strides[num_outer - 1] == run):
        num_outer -= 1
        run *= view.shape[num_outer]
    first, stop = offset // run, -(-(offset + length) // run)
    outer = itertools.islice(np.ndindex(view.shape[:num_outer]), first, stop)
    runs = [view[(*index, ...)].reshape(-1).view(np.uint8).data for index in outer]
    runs[-1] = runs[-1][: offset + length - (stop - 1) * run]
    runs[0] = runs[0][offset - first * run :]
    return runs
