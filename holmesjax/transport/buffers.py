"""Host memory that sockets fill and JAX takes over, and the memory of parts of arrays. No JAX."""

import itertools
import math
import weakref
from collections import defaultdict, deque

import numpy as np

ALIGNMENT = 64  # bytes; JAX takes over host memory without a copy only so


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
