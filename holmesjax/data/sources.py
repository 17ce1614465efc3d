"""The protocol of a data source: items that are read by their index, and how text becomes tokens.

A source has `__len__` and `__getitem__`, as grain's `RandomAccessDataSource` has. The order of an
epoch and the cut into batches are not its own: `batches` has both, as functions of seed and step.

Dims: L tokens of a sequence.
"""

import importlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from holmesjax.config import Config, DataConfig
from holmesjax.data.mixing import Schedule
from holmesjax.data.pieces import Pieces
from holmesjax.data_sources import SOURCES
from holmesjax.errors import DataError


class Item(NamedTuple):
    """A sequence. Its last token is a target alone; a target is the token after."""

    tokens: np.ndarray  # int32 [L + 1]
    begins: np.ndarray  # bool [L + 1]: the tokens that begin a document
    # int32 [L], below 0: does not count in the loss. None: the tokens after, which all count.
    targets: np.ndarray | None = None


Arrays = Mapping[str, np.ndarray]  # an item that is no text: arrays by the names of the model


class Sequences(Protocol):
    """The items of one split, the same in every process of a job."""

    def __len__(self) -> int:
        """The number of items."""

    def __getitem__(self, index: int) -> Item | Arrays:
        """An item; the same each time."""

    def num_targets(self, index: int) -> int:
        """The number of targets of an item that count.

        Every process asks for all items of a batch, and reads few of them.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixed:
    """The sequences of several sources, as a schedule mixes them."""

    parts: Mapping[str, Sequences]  # in the order of the schedule's names
    schedule: Schedule

    def __len__(self) -> int:
        """The sequences of all sources, however often the schedule takes them."""
        return sum(map(len, self.parts.values()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Splits:
    """The data of a run."""

    train: Sequences | Mixed
    validation: Sequences
    place: str  # where it was found, for messages
    # SHA-256 of each split by its name, and of each file by its path, sorted: these say whether all
    # processes of a job have the same data, and which file differs.
    digests: Mapping[str, str]
    files: Mapping[str, str]
    # Validation sets by name, in place of `validation`; empty: there is that one.
    sets: Mapping[str, Sequences] = field(default_factory=dict)

    def validation_sets(self) -> Mapping[str, Sequences]:
        """Returns all sets that a validation reads, by name."""
        return self.sets or {"validation": self.validation}


class Tokenizer(Protocol):
    """Text to tokens and back."""

    @property
    def num_tokens(self) -> int:
        """The number of different tokens; a model may have more ids, which mean nothing."""

    @property
    def ends(self) -> Collection[int]:
        """The tokens before which a text has ended."""

    def encode(self, text: str) -> np.ndarray:
        """The tokens of a document that begins with a text; int32."""

    def pieces(self, after: Sequence[int] = ()) -> Pieces:
        """The text of tokens that follow others, as they come."""


class SourceModule(Protocol):
    """The functions that the module of a source has."""

    def look(self, config: Config) -> None:
        """Looks in a fraction of a second whether there is data enough. Raises DataError."""

    def read(self, config: DataConfig, length: int) -> Splits:
        """The data as sequences of so many tokens. Raises DataError."""

    def tokenizer(self, config: DataConfig) -> Tokenizer:
        """The tokenizer by which the text of this data became tokens."""


def module_of(config: DataConfig) -> SourceModule:
    """The module of the source that a run names, or of several corpora."""
    name = SOURCES[config.source].module
    if config.mixture or config.validation:
        name = "holmesjax.data.named_corpora"
    module: SourceModule = importlib.import_module(name)
    return module


def enough_fraction(needed: int, held_out: int, train: int, batch: int) -> float | None:
    """A validation_fraction that holds out as many sequences as are needed, and a tenth more.

    None if less than a batch is left to train on.

    >>> enough_fraction(needed=8, held_out=2, train=98, batch=4)
    0.09
    """
    total = held_out + train
    fraction = math.ceil(110 * needed / max(total, 1)) / 100
    return fraction if (1 - fraction) * total >= batch else None


def too_small(
    split: str,
    num_batches: int,
    of: str,
    needed: str,
    *,
    found: str,
    fraction: float | None = None,
) -> DataError:
    """Makes the error of a split that has not enough data for all of its batches.

    Args:
      split: "train" or "validation".
      num_batches: the number of batches.
      of: the content of a batch.
      needed: the size of all batches.
      found: the size of the split.
      fraction: a larger `data.validation_fraction` that suffices; None: none is known.
    """
    count, need = (f"{num_batches} batches", "need") if num_batches > 1 else ("a batch", "needs")
    problem = f"the {split} split is too small: {count} of {of} {need} {needed}"
    fix = "use more files, a smaller train.global_batch, or a smaller model.context_length"
    if split == "validation":
        larger = f"data.validation_fraction={fraction:g}, " if fraction else ""
        fix = (
            f"use {larger}more files, fewer train.eval_batches, a smaller train.global_batch, or "
            "train.eval_every=0 for no validation"
        )
    return DataError("data.corpus", problem, found=found, fix=fix)
