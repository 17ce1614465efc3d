"""Batches of token sequences as a function of (seed, sequences consumed), whatever the plan.

Dims: B sequences of a batch, L tokens of a sequence, W windows. The corpus is cut into windows of
L + 1 bytes, the last of which is the first of the next window: the target of the last token. Each
epoch visits every window once, in an order of its own.
"""

import hashlib
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from holmesjax.config import Config
from holmesjax.data import corpus as corpora
from holmesjax.data.corpus import Corpus
from holmesjax.data.permutation import permute, round_keys
from holmesjax.data.tokenizer import BEGIN
from holmesjax.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The batches of a run; `train` and `validation` give rows of L + 1 tokens, uint8."""

    corpus: Corpus
    seed: int
    global_batch: int  # B
    length: int  # L
    num_validation: int  # batches

    def __post_init__(self) -> None:
        for split, count in {"train": 1, "validation": self.num_validation}.items():
            size = len(getattr(self.corpus, split))
            _refuse_too_small(split, size, count, self.global_batch, self.length)

    def train(self, first_sequence: int, row_N: np.ndarray | None = None) -> np.ndarray:
        """Rows of the step before which that many sequences were consumed; [N, L + 1].

        Args:
          row_N: which of the B rows; None: all.
        """
        windows = windows_of(self.corpus.train, self.length)
        sequence = first_sequence + self._rows(row_N)
        epoch, index = np.divmod(sequence, len(windows))
        order = np.empty_like(index)
        for e in np.unique(epoch):
            here = epoch == e
            order[here] = permute(index[here], len(windows), round_keys(self.seed, stream=int(e)))
        return windows[order]

    def validation(self, index: int, row_N: np.ndarray | None = None) -> np.ndarray:
        """Rows of validation batch 0, ..., num_validation - 1, [N, L + 1]; equal for all seeds."""
        assert index < self.num_validation
        windows = windows_of(self.corpus.validation, self.length)
        sequence = index * self.global_batch + self._rows(row_N)
        return windows[permute(sequence, len(windows), round_keys(0))]

    def _rows(self, row_N: np.ndarray | None) -> np.ndarray:
        return np.arange(self.global_batch) if row_N is None else row_N

    def digests(self) -> dict[str, str]:
        """SHA-256 of each split and of the order in which windows are read."""
        return {**self.corpus.digests, "order": order_digest()}


def look_for_data(config: Config) -> None:
    """Looks whether there are files enough for a run, without reading them; in a fraction of 1 s.

    Raises DataError for a corpus that is missing, empty or too small.
    """
    train, length = config.train, config.model.context_length
    num_batches = {"train": 1, "validation": train.eval_batches if train.eval_every else 0}
    sizes = corpora.sizes(
        config.data,
        {name: _bytes_of(count, train.global_batch, length) for name, count in num_batches.items()},
    )
    for name, count in num_batches.items():
        _refuse_too_small(name, sizes[name], count, train.global_batch, length)


def _bytes_of(num_batches: int, global_batch: int, length: int) -> int:
    """The least that a split needs."""
    return num_batches * global_batch * length + 1 if num_batches else 0


def _refuse_too_small(
    split: str, num_bytes: int, num_batches: int, global_batch: int, length: int
) -> None:
    needed = _bytes_of(num_batches, global_batch, length)
    if num_bytes >= needed:
        return
    count, need = (f"{num_batches} batches", "need") if num_batches > 1 else ("a batch", "needs")
    problem = (
        f"the {split} split is too small: {count} of {global_batch:,} sequences of {length:,} "
        f"tokens {need} {needed:,} bytes"
    )
    fix = "use more files, a smaller train.global_batch, or a smaller model.context_length"
    if split == "validation":
        fix = (
            "use more files, a larger data.validation_fraction, fewer train.eval_batches, "
            "or train.eval_every=0 for no validation"
        )
    raise DataError("data.corpus", problem, found=f"{num_bytes:,} bytes", fix=fix)


def windows_of(tokens: np.ndarray, length: int) -> np.ndarray:
    """All windows of an array of tokens, a view; [W, L + 1].

    >>> windows_of(np.arange(8), 3).tolist()
    [[0, 1, 2, 3], [3, 4, 5, 6]]
    """
    if len(tokens) <= length:
        return np.empty((0, length + 1), tokens.dtype)
    return np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length]


def order_digest() -> str:
    """SHA-256 of what two epochs of a small corpus are, and its validation batch."""
    tokens = np.arange(1000, dtype="<i8")
    corpus = Corpus(train=tokens, validation=tokens, source="", files={}, digests={})
    batches = Batches(corpus=corpus, seed=1, global_batch=300, length=3, num_validation=1)
    rows = [batches.train(first) for first in (0, 300)]
    return hashlib.sha256(np.concatenate([*rows, batches.validation(0)]).tobytes()).hexdigest()


INPUTS = ("token_BL", "target_BL", "segment_BL")


def model_inputs(rows: np.ndarray, names: Collection[str] = INPUTS) -> dict[str, np.ndarray]:
    """Returns the inputs of the stages: tokens, targets, and the document of each token; int32.

    A token whose target is below 0 would not count in the loss; rows of a corpus have none.

    Args:
      names: the inputs that are needed.

    >>> {name: x.tolist() for name, x in model_inputs(np.array([[7, 0, 8, 9]])).items()}
    {'token_BL': [[7, 0, 8]], 'target_BL': [[0, 8, 9]], 'segment_BL': [[0, 1, 1]]}
    """
    make = {
        "token_BL": lambda: rows[:, :-1].astype(np.int32),
        "target_BL": lambda: rows[:, 1:].astype(np.int32),
        "segment_BL": lambda: np.cumsum(rows[:, :-1] == BEGIN, axis=1, dtype=np.int32),
    }
    return {name: make[name]() for name in names}
