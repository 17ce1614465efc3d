"""Batches of token sequences as a function of (seed, sequences consumed), whatever the plan.

Dims: B sequences of a batch, N of them that are asked for, L tokens of a sequence. Each epoch
visits every item of a source once, in an order of its own.
"""

import hashlib
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from holmesjax.data import text
from holmesjax.data.mixing import ItemTurn, Schedule, WeightsFrom
from holmesjax.data.patience import patiently
from holmesjax.data.permutation import permute, round_keys
from holmesjax.data.sources import (
    HELD_OUT,
    ONE_HELD_OUT,
    TRAIN,
    WHOLE_SET,
    Item,
    Mixed,
    Sequences,
    Splits,
    need,
    too_small,
)
from holmesjax.errors import DataError, UnreadDataError


class Rows(NamedTuple):
    """Sequences of a batch."""

    token_NL: np.ndarray  # int32 [N, L + 1]
    begins_NL: np.ndarray  # bool [N, L + 1]: the tokens that begin a document
    # int32 [N, L], below 0: does not count. None: the tokens after, which all count.
    target_NL: np.ndarray | None
    num_targets: int  # that count in the whole batch


class ArrayRows(NamedTuple):
    """Items of a batch that are arrays by name."""

    arrays: dict[str, np.ndarray]  # [N, ...]
    num_targets: int


# Streams of a seed. A run of one source uses stream 0 in its first epoch, and the next one in each
# further epoch. A source of a mixture begins at a number that its name gives.
OF_NAME, MOST_EPOCHS = 2**20, 2**20
OF_ROWS = 2**60  # the rows of a batch of a mixture


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The batches of a run."""

    data: Splits
    seed: int
    global_batch: int  # B
    length: int  # L
    num_validation: int  # batches of each validation set
    most_validated: int | None = None  # sequences of each set; None: all of these batches

    def __post_init__(self) -> None:
        data, num_validation = self.data, self.num_validation
        is_mixed = isinstance(data.train, Mixed)
        if not isinstance(data.train, Mixed):  # which may be read as often as it takes
            self._need(1, data.train, TRAIN)
        # No setting splits arrays, which have no files.
        hint = "a larger data.validation_fraction, " if data.files else ""
        for name, sequences in data.validation_sets().items():
            if name not in data.held_out():
                where = f"data.validation, {name}: corpus"
                self._need(num_validation, sequences, WHOLE_SET, where)
            elif is_mixed:
                where = f"data.mixture, {name}: corpus"
                self._need(num_validation, sequences, ONE_HELD_OUT, where, hint)
            else:
                self._need(num_validation, sequences, HELD_OUT, hint=hint)

    def _need(
        self,
        num_batches: int,
        sequences: Sequences,
        of: str,
        where: str = "data.corpus",
        hint: str = "",
    ) -> None:
        """Raises DataError if there are not enough sequences for so many batches."""
        needed = num_batches * self.global_batch
        if self.most_validated is not None:
            needed = min(needed, self.most_validated)
        if len(sequences) < needed:
            needs = need(num_batches, self.global_batch, self.length, f"{needed:,} sequences")
            found = f"{len(sequences):,} sequences"
            raise too_small(of, needs, found=found, where=where, hint=hint)

    def of_size(self, global_batch: int) -> "Batches":
        """Returns the same data in batches of another size."""
        return (
            self if global_batch == self.global_batch else replace(self, global_batch=global_batch)
        )

    @property
    def is_by_island(self) -> bool:
        """Whether islands mix their sources by weights of their own."""
        return isinstance(self.data.train, Mixed) and bool(self.data.train.by_island)

    def of_island(self, number: int, names: Sequence[str]) -> "Batches":
        """Returns the batches of an island with a mixture of its own; `Mixed.of_island`."""
        assert isinstance(self.data.train, Mixed), "a check of the settings sees to it"
        own = self.data.train.of_island(number, names)
        return replace(self, data=replace(self.data, train=own))

    def train(self, first_sequence: int, row_N: np.ndarray | None = None) -> Rows | ArrayRows:
        """Returns the rows of the step that begins after `first_sequence` sequences.

        Args:
          row_N: which of the B rows; None: all.

        Raises DataError where no target of the whole batch counts.
        """
        picked = self._picked(first_sequence)
        rows = self._rows(picked, row_N)
        if not rows.num_targets:
            problem = "has no target that counts in the loss of a step"
            last = f"{first_sequence + self.global_batch:,}"
            found = f"none in sequences {first_sequence + 1:,} to {last} of the run"
            fix = "leave documents without targets out, or use a larger train.global_batch"
            raise DataError("data.corpus", problem, found=found, fix=fix)
        return rows

    def _picked(self, first_sequence: int) -> list[tuple[Sequences, int]]:
        """The source and the item of each row of a batch."""
        source = self.data.train
        row_B = np.arange(self.global_batch)
        if not isinstance(source, Mixed):
            order_B = self._in_epochs(first_sequence + row_B, len(source), stream=0)
            return [(source, index) for index in order_B.tolist()]
        # A schedule is periodic: in its order, the rows of a device would be of the same sources.
        row_B = permute(row_B, len(row_B), round_keys(self.seed, stream=OF_ROWS + first_sequence))
        part_B, order_B = source.schedule.picks(first_sequence + row_B)
        for number, (name, part) in enumerate(source.parts.items()):
            stream = OF_NAME * (1 + zlib.crc32(name.encode()))
            is_own_B, turn = part_B == number, source.turns.get(name, ItemTurn())
            place_I = order_B[is_own_B] * turn.readers + turn.number
            order_B[is_own_B] = self._in_epochs(place_I, len(part), stream)
        parts = list(source.parts.values())
        pairs = zip(part_B.tolist(), order_B.tolist(), strict=True)
        return [(parts[part], index) for part, index in pairs]

    def _in_epochs(self, index_I: np.ndarray, size: int, stream: int) -> np.ndarray:
        """Returns the items at some places of an endless series of epochs of `size` items."""
        epoch_I, place_I = np.divmod(index_I, size)
        order_I = np.empty_like(place_I)
        for epoch in np.unique(epoch_I).tolist():
            here = epoch_I == epoch
            order_I[here] = permute(place_I[here], size, round_keys(self.seed, stream + epoch))
        return order_I

    def validation(self, index: int, row_N: np.ndarray | None = None) -> Rows | ArrayRows:
        """Rows of a validation batch; equal for all seeds.

        Args:
          index: number of the batch: first come the batches of the first set, then those of the
          next.
          row_N: which of the B rows; None: all.
        """
        number, index = divmod(index, self.num_validation)
        source = list(self.data.validation_sets().values())[number]
        first = index * self.global_batch
        sequence_B = first + np.arange(self.global_batch)
        most = self.most_validated or first + self.global_batch
        is_real_B = sequence_B < most
        order_B = permute(np.minimum(sequence_B, most - 1), len(source), round_keys(0))
        rows = self._rows([(source, item) for item in order_B.tolist()], row_N)
        if is_real_B.all():
            return rows
        is_real_N = is_real_B if row_N is None else is_real_B[row_N]
        num_targets = sum(source.num_targets(item) for item in order_B[is_real_B].tolist())
        return _filled(rows, is_real_N, num_targets)

    def _rows(
        self, picked: Sequence[tuple[Sequences, int]], row_N: np.ndarray | None
    ) -> Rows | ArrayRows:
        """Some rows of the batch of these items.

        Raises LostDataError where a file is no longer as it was when it was opened.
        """
        wanted = picked if row_N is None else [picked[row] for row in row_N.tolist()]
        found, num_targets = patiently(
            lambda: (
                [source[i] for source, i in wanted],
                sum(source.num_targets(i) for source, i in picked),
            ),
            has_trained=True,  # or is about to
            transient=UnreadDataError,
        )
        items = [item for item in found if isinstance(item, Item)]
        if arrays := [item for item in found if not isinstance(item, Item)]:
            stacked = {name: np.stack([array[name] for array in arrays]) for name in arrays[0]}
            return ArrayRows(stacked, num_targets)
        return Rows(
            self._stack([item.tokens for item in items], np.int32),
            self._stack([item.begins for item in items], np.bool_),
            self._targets(items),
            num_targets,
        )

    def _stack(self, arrays: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
        return np.stack(arrays) if arrays else np.empty((0, self.length + 1), dtype)

    def _targets(self, items: Sequence[Item]) -> np.ndarray | None:
        if all(item.targets is None for item in items):
            return None
        return np.stack(
            [item.tokens[1:] if item.targets is None else item.targets for item in items]
        )

    def digests(self) -> dict[str, str]:
        """SHA-256 of each split and of the order in which windows are read."""
        is_mixed = isinstance(self.data.train, Mixed)
        mixed = {"order of a mixture": mixture_digest()} if is_mixed else {}
        if self.is_by_island:
            mixed["order of islands"] = islands_digest()
        return {**self.data.digests, "order": order_digest(), **mixed}


def _filled(rows: Rows | ArrayRows, is_real_N: np.ndarray, num_targets: int) -> Rows | ArrayRows:
    """Rows of which some only fill a batch: no target of theirs counts."""
    name = "target_BL"
    if isinstance(rows, ArrayRows):
        target_NL = np.where(is_real_N[:, None], rows.arrays[name], -1)
        return ArrayRows({**rows.arrays, name: target_NL}, num_targets)
    target_NL = model_inputs(rows, (name,))[name]
    return rows._replace(
        target_NL=np.where(is_real_N[:, None], target_NL, -1), num_targets=num_targets
    )


def order_digest() -> str:
    """Returns the SHA-256 of batches of a small corpus; it changes if the order does."""
    windows = text.Windows(text.windows_of(np.arange(1000), 3), np.arange(0))
    return _order_digest(windows, windows)


def mixture_digest() -> str:
    """Returns the SHA-256 of batches of a small mixture; it changes if the order does."""
    return _order_digest(_small_mixture(), _small_mixture().parts["a"])


def islands_digest() -> str:
    """Returns the SHA-256 of batches of an island; it changes if what an island takes does."""
    mixed = _small_mixture().of_island(1, ("one", "other", "third"))
    return _order_digest(mixed, mixed.parts["a"])


def _small_mixture() -> Mixed:
    parts: dict[str, Sequences] = {
        name: text.Windows(text.windows_of(token_T, 3), np.arange(0))
        for name, token_T in (("a", np.arange(1000)), ("b", np.arange(1000, 1100)))
    }
    phases = [WeightsFrom(0, {"a": 0.75, "b": 0.25}), WeightsFrom(400, {"a": 0.5, "b": 0.5})]
    of_other = Schedule(list(parts), [WeightsFrom(0, {"a": 0.25, "b": 0.75})])
    schedule = Schedule(list(parts), phases)
    return Mixed(parts=parts, schedule=schedule, by_island={"other": of_other})


def _order_digest(train: Sequences | Mixed, validation: Sequences) -> str:
    data = Splits(train=train, validation=validation, place="", digests={}, files={})
    batches = Batches(data=data, seed=1, global_batch=300, length=3, num_validation=1)
    rows = [batches.train(0), batches.train(300), batches.validation(0)]
    tokens = np.concatenate([row.token_NL for row in rows if isinstance(row, Rows)])
    return hashlib.sha256(tokens.astype("<i8").tobytes()).hexdigest()


INPUTS = ("token_BL", "target_BL", "segment_BL")


def model_inputs(rows: Rows | ArrayRows, names: Collection[str] = INPUTS) -> dict[str, np.ndarray]:
    """Returns the inputs of the stages: tokens, targets, and the document of each token; int32.

    A target that does not count is below 0. Items that are arrays by name are returned as they are.

    Args:
      names: the inputs that are needed.

    >>> rows = Rows(np.array([[7, 0, 8, 9]]), np.array([[False, True, False, False]]), None, 3)
    >>> {name: x.tolist() for name, x in model_inputs(rows).items()}
    {'token_BL': [[7, 0, 8]], 'target_BL': [[0, 8, 9]], 'segment_BL': [[0, 1, 1]]}
    """

    if isinstance(rows, ArrayRows):
        return {name: rows.arrays[name] for name in names}

    make = {
        "token_BL": lambda: rows.token_NL[:, :-1],
        "target_BL": lambda: rows.token_NL[:, 1:] if rows.target_NL is None else rows.target_NL,
        "segment_BL": lambda: np.cumsum(rows.begins_NL[:, :-1], axis=1),
    }
    return {name: make[name]().astype(np.int32) for name in names}
