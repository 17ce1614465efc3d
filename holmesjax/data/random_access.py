"""Random-access sources of other libraries, such as grain's, as the sequences of a split.

Dims: L tokens of a sequence.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from holmesjax.data.sources import Item

MOST_DIGESTED = 64  # items that a digest reads


class RandomAccess(Protocol):
    """Items that are read by their index, as from grain's `RandomAccessDataSource`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


@dataclass(frozen=True, eq=False)
class RandomAccessItems:
    """The items of a random-access source, as `data.sources.Sequences`.

    Args:
      source: gives the same in every process of a job.
      to_item: makes an `Item` with L + 1 tokens of what the source gives.
    """

    source: RandomAccess
    to_item: Callable[[Any], Item]

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Item:
        return self.to_item(self.source[index])

    def num_targets(self, index: int) -> int:
        """The number of targets of an item that count. Reads the item."""
        tokens, _, targets = self[index]
        return len(tokens) - 1 if targets is None else int(np.count_nonzero(targets >= 0))

    def digest(self) -> str:
        """SHA-256 of the number of items, and of up to 64 of them, evenly spread."""
        digest = hashlib.sha256(str(len(self)).encode())
        for index in np.unique(np.linspace(0, len(self) - 1, MOST_DIGESTED).astype(int)).tolist():
            for array in self[index]:
                digest.update(b"none" if array is None else np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()
