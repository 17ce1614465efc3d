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
from holmesjax.config.data_sources import SOURCES
from holmesjax.data.decode_stream import DecodeStream
from holmesjax.data.mixing import ItemTurn, Schedule
from holmesjax.errors import DataError


class Item(NamedTuple):
    """A sequence. Its last token is a target alone; a target is the token after."""

    tokens: np.ndarray  # int32 [L + 1]
    begins: np.ndarray  # bool [L + 1]: the tokens that begin a document
    # int32 [L], below 0: does not count in the loss. None: the tokens after, which all count.
    targets: np.ndarray | None = None


ONLY = "corpus"  # the name of `data.corpus` beside named validation sets
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
    by_island: Mapping[str, Schedule] = field(default_factory=dict)  # of islands that differ
    turns: Mapping[str, ItemTurn] = field(default_factory=dict)  # by source; without: all its items

    def __len__(self) -> int:
        """The sequences of all sources, however often the schedule takes them."""
        return sum(map(len, self.parts.values()))

    def of_island(self, number: int, names: Sequence[str]) -> "Mixed":
        """An island reads by its own schedule, and of each source the items whose turn is its.

        Islands take turns that read the source, so no item of an epoch is in two of them, however
        far each is.

        Args:
          number: of the island.
          names: of all islands.
        """
        schedules = [self.by_island.get(name, self.schedule) for name in names]
        turns = {}
        for source in self.parts:
            readers = [k for k, schedule in enumerate(schedules) if schedule.reads(source)]
            if number in readers:
                turns[source] = ItemTurn(readers.index(number), len(readers))
        return Mixed(parts=self.parts, schedule=schedules[number], turns=turns)


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
    left_out: str = ""  # what is there and is not read, in words; empty: nothing
    # Validation sets by name, in place of `validation`; empty: there is that one.
    sets: Mapping[str, Sequences] = field(default_factory=dict)

    def held_out(self) -> Collection[str]:
        """Returns the names of the validation sets of which the rest trains."""
        if isinstance(self.train, Mixed):
            return list(self.train.parts)
        return [ONLY if self.sets else "validation"]

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

    @property
    def marks(self) -> Mapping[str, int]:
        """The tokens that are marks and no text, by how they are written."""

    def encode(self, text: str) -> np.ndarray:
        """The tokens of a document that begins with a text; int32."""

    def decode_stream(self, after: Sequence[int] = ()) -> DecodeStream:
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


def enough_fraction(needed: int, total: int, batch: int) -> float | None:
    """A validation_fraction that holds out as many sequences as are needed, and a tenth more.

    None if less than a batch is left to train on.

    >>> enough_fraction(needed=8, total=100, batch=4)
    0.09
    """
    fraction = math.ceil(110 * needed / max(total, 1)) / 100
    return fraction if (1 - fraction) * total >= batch else None


# What may be too small: of the only corpus, or of one in a mixture, or of a set of its own.
TRAIN, HELD_OUT = "train split", "validation split"
ONE_TRAIN, ONE_HELD_OUT = "train split of one corpus", "validation split of one corpus"
WHOLE_SET = "validation set"
FEWER = "more files, fewer train.eval_batches, a smaller train.global_batch, or"
REMEDIES = {
    TRAIN: "more files, a smaller train.global_batch, or a smaller model.context_length",
    HELD_OUT: f"{FEWER} train.eval_every=0 for no validation",
    ONE_TRAIN: "more files, a smaller data.validation_fraction, or a smaller model.context_length",
    ONE_HELD_OUT: f"{FEWER} data.validation_fraction=0 and the sets of data.validation",
    WHOLE_SET: f"{FEWER} train.eval_every=0 for no validation",
}


class TooSmallError(DataError):
    """Data that are not enough, with what `too_small` was told of them."""

    of = needs = ""
    fraction: float | None = None


def too_small(
    of: str,
    needs: str,
    *,
    found: object,
    where: str = "data.corpus",
    fraction: float | None = None,
    hint: str = "",
) -> TooSmallError:
    """Makes the error of data that are not enough for all batches.

    Args:
      of: a key of `REMEDIES`.
      needs: the batches and their size, as `need` says it.
      found: the size of what is there.
      where: the setting that names the corpus.
      fraction: a larger `data.validation_fraction` that suffices; None: none is known.
      hint: what else would do, to be said first.
    """
    larger = f"data.validation_fraction={fraction:g}, " if fraction else hint
    if fraction and of == ONE_HELD_OUT:
        larger += "which every corpus then holds out, "
    fix = f"use {larger}{REMEDIES[of]}"
    error = TooSmallError(where, f"the {of} is too small: {needs}", found=found, fix=fix)
    error.of, error.needs, error.fraction = of, needs, fraction
    return error


def need(num_batches: int, global_batch: int, length: int, size: str) -> str:
    """Says how much so many batches need.

    >>> need(4, 16, 256, "64 sequences")
    '4 batches of 16 sequences of 256 tokens need 64 sequences'
    >>> need(1, 1, 256, "257 bytes")
    'a sequence of 256 tokens needs 257 bytes'
    """
    if num_batches * global_batch == 1:
        return f"a sequence of {length:,} tokens needs {size}"
    count = f"{num_batches * global_batch:,}"
    if num_batches > 1 and global_batch > 1:
        count = f"{num_batches:,} batches of {global_batch:,}"
    return f"{count} sequences of {length:,} tokens need {size}"
