"""A data source of arrays, for models of your own: `data.corpus` names a function that gives them.

The function takes nothing and gives, for "train" and "validation", arrays by name. The first dim of
each counts the items of the split, and the layers of a model name the arrays that they read. An
array `num_targets` may say how many targets of each item count in the loss; without it an item has
one.
"""

import hashlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from holmesjax.config import Config, DataConfig
from holmesjax.data.sources import Splits, Tokenizer
from holmesjax.errors import DataError

WHERE = "data.corpus"
NUM_TARGETS = "num_targets"
SPLITS = ("train", "validation")


@dataclass(frozen=True)
class ArrayItems:
    """One split: arrays of which each has an entry for every item."""

    arrays: Mapping[str, np.ndarray]
    counts: np.ndarray  # of targets, by item

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {name: array[index] for name, array in self.arrays.items()}

    def num_targets(self, index: int) -> int:
        return int(self.counts[index])


def look(config: Config) -> None:
    """Looks whether there is such a function; only `read` calls it."""
    _named(config.data.corpus)


def read(config: DataConfig, length: int) -> Splits:
    """The arrays that the function gives."""
    name = config.corpus
    found = _named(name)()
    if not isinstance(found, Mapping) or "train" not in found or set(found) - set(SPLITS):
        shown = sorted(found) if isinstance(found, Mapping) else type(found).__name__
        fix = 'give {"train": {"image": array}, "validation": {"image": array}}'
        raise _wrong("must give the splits train and validation", f"{name}: {shown}", fix)
    splits = {split: _items(split, found.get(split, {})) for split in SPLITS}
    digests = {split: _digest(items) for split, items in splits.items()}
    train, validation = splits.values()
    return Splits(train=train, validation=validation, place=name, digests=digests, files={})


def tokenizer(config: DataConfig) -> Tokenizer:
    raise _wrong(
        "is of arrays, which no tokenizer made", config.corpus, "use a run whose data are text"
    )


def _named(name: str) -> Any:
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        fix = "write module:function, of a module that each process of the run can import"
        if name.startswith("__main__:"):
            fix += ", and not of a notebook or a script"
        problem = "names no function, which data.source = arrays needs"
        raise _wrong(problem, f"{name}: {error}", fix) from None


def _items(split: str, arrays: Any) -> ArrayItems:
    if not isinstance(arrays, Mapping):
        found = f"{type(arrays).__name__} for {split}"
        raise _wrong("must give arrays by name", found, 'give {"image": array, "label": array}')
    own = {str(name): np.asarray(array) for name, array in arrays.items()}
    lengths = {name: len(array) if array.ndim else 0 for name, array in own.items()}
    if len(set(lengths.values())) > 1 or not all(lengths.values()):
        found = f"{split}: " + ", ".join(f"{name} of {n}" for name, n in lengths.items())
        fix = "give each array an entry for every item"
        raise _wrong("must give arrays with one first dim for the items", found, fix)
    count = next(iter(lengths.values()), 0)
    return ArrayItems(own, own.pop(NUM_TARGETS, np.ones(count, np.int64)))


def _digest(items: ArrayItems) -> str:
    """SHA-256 of names, shapes and numbers."""
    digest = hashlib.sha256()
    for name, array in sorted({**items.arrays, NUM_TARGETS: items.counts}.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _wrong(problem: str, found: object, fix: str) -> DataError:
    return DataError(WHERE, problem, found=found, fix=fix)
