"""Batches of token sequences as a function of (seed, step), whatever the plan.

Dims: B sequences of a batch, L tokens of a sequence. The corpus is cut into windows of L + 1 bytes,
the last of which is the first of the next window: the target of the last token. Each epoch visits
every window once, in an order of its own.
"""

from dataclasses import dataclass, field
from typing import SupportsIndex

import grain
import numpy as np

from holmesjax.data.corpus import Corpus
from holmesjax.data.tokenizer import BEGIN
from holmesjax.errors import DataError


@dataclass(frozen=True)
class Windows:
    """Random access to the windows of a token array."""

    tokens: np.ndarray
    length: int  # L

    def __len__(self) -> int:
        return max(len(self.tokens) - 1, 0) // self.length

    def __getitem__(self, index: SupportsIndex) -> np.ndarray:
        start = index.__index__() * self.length
        return self.tokens[start : start + self.length + 1]


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The batches of a run; `train(step)` and `validation(i)` give rows of L + 1 tokens, uint8."""

    corpus: Corpus
    seed: int
    global_batch: int  # B
    length: int  # L
    num_validation: int  # batches
    _train: grain.MapDataset = field(init=False)
    _validation: grain.MapDataset = field(init=False)

    def __post_init__(self) -> None:
        train = self._dataset(self.corpus.train, "training", 1).seed(self.seed).shuffle().repeat()
        object.__setattr__(self, "_train", train.batch(self.global_batch))
        if self.num_validation:
            held = self._dataset(self.corpus.validation, "validation", self.num_validation)
            held = held.seed(0).shuffle()  # the same sequences for every run
            object.__setattr__(self, "_validation", held.batch(self.global_batch))

    def train(self, step: int) -> np.ndarray:
        """Rows of step 0, 1, ...; [B, L + 1]."""
        return self._train[step]

    def validation(self, index: int) -> np.ndarray:
        """Rows of validation batch 0, ..., num_validation - 1; [B, L + 1]."""
        assert index < self.num_validation
        return self._validation[index]

    def _dataset(self, tokens: np.ndarray, name: str, num_batches: int) -> grain.MapDataset:
        windows = Windows(tokens, self.length)
        needed = num_batches * self.global_batch
        if len(windows) < needed:
            raise DataError(
                "data.corpus",
                f"the {name} split is too small: {num_batches} batches of {self.global_batch} "
                f"sequences of {self.length} tokens need {needed * self.length} bytes",
                found=f"{len(tokens)} bytes",
                fix="use more files, a smaller train.global_batch, or fewer train.eval_batches",
            )
        return grain.MapDataset.source(windows)


def model_inputs(rows: np.ndarray) -> dict[str, np.ndarray]:
    """What the stages read of the rows: tokens, targets, and the document of each token; int32.

    >>> {name: x.tolist() for name, x in model_inputs(np.array([[7, 0, 8, 9]])).items()}
    {'token_BL': [[7, 0, 8]], 'target_BL': [[0, 8, 9]], 'segment_BL': [[0, 1, 1]]}
    """
    token_BL, target_BL = rows[:, :-1].astype(np.int32), rows[:, 1:].astype(np.int32)
    segment_BL = np.cumsum(token_BL == BEGIN, axis=1, dtype=np.int32)
    return {"token_BL": token_BL, "target_BL": target_BL, "segment_BL": segment_BL}
