"""Batches of token sequences as a function of (seed, sequences consumed), whatever the plan.

Dims: B sequences of a batch, L tokens of a sequence, W windows. The corpus is cut into windows of
L + 1 bytes, the last of which is the first of the next window: the target of the last token. Each
epoch visits every window once, in an order of its own.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

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
        self._check_size(self.corpus.train, "training", 1)
        self._check_size(self.corpus.validation, "validation", self.num_validation)

    def train(self, first_sequence: int) -> np.ndarray:
        """Rows of the step before which that many sequences were consumed; [B, L + 1]."""
        windows = windows_of(self.corpus.train, self.length)
        sequence = first_sequence + np.arange(self.global_batch)
        epoch, index = np.divmod(sequence, len(windows))
        order = [
            permute(index[epoch == e], len(windows), round_keys(self.seed, stream=int(e)))
            for e in np.unique(epoch)
        ]
        return windows[np.concatenate(order)]

    def validation(self, index: int) -> np.ndarray:
        """Rows of validation batch 0, ..., num_validation - 1, for all seeds alike; [B, L + 1]."""
        assert index < self.num_validation
        windows = windows_of(self.corpus.validation, self.length)
        sequence = index * self.global_batch + np.arange(self.global_batch)
        return windows[permute(sequence, len(windows), round_keys(0))]

    def digests(self) -> dict[str, str]:
        """SHA-256 of each split and of the order in which windows are read."""
        return {**self.corpus.digests, "order": order_digest()}

    def _check_size(self, tokens: np.ndarray, name: str, num_batches: int) -> None:
        needed = num_batches * self.global_batch
        if len(windows_of(tokens, self.length)) < needed:
            raise DataError(
                "data.corpus",
                f"the {name} split is too small: {num_batches} batches of {self.global_batch} "
                f"sequences of {self.length} tokens need {needed * self.length + 1} bytes",
                found=f"{len(tokens)} bytes",
                fix="use more files, a smaller train.global_batch, or fewer train.eval_batches",
            )


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


def model_inputs(rows: np.ndarray) -> dict[str, np.ndarray]:
    """What the stages read of the rows: tokens, targets, and the document of each token; int32.

    A token whose target is below 0 would not count in the loss; rows of a corpus have none.

    >>> {name: x.tolist() for name, x in model_inputs(np.array([[7, 0, 8, 9]])).items()}
    {'token_BL': [[7, 0, 8]], 'target_BL': [[0, 8, 9]], 'segment_BL': [[0, 1, 1]]}
    """
    token_BL, target_BL = rows[:, :-1].astype(np.int32), rows[:, 1:].astype(np.int32)
    segment_BL = np.cumsum(token_BL == BEGIN, axis=1, dtype=np.int32)
    return {"token_BL": token_BL, "target_BL": target_BL, "segment_BL": segment_BL}
