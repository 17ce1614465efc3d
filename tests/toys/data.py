"""A data source without files: digits to be copied, and only the copies count in the loss.

A document is a mark, three digits, a sign, and the digits again: `B 1 2 3 = 1 2 3`.
"""

import dataclasses
import hashlib

import numpy as np

from holmesjax.config.data_sources import SOURCES, DataSource
from holmesjax.data.decode_stream import DecodeStream
from holmesjax.data.sources import Item, Splits

NAME = "toy_copies"
BEGIN, SIGN, FIRST_DIGIT, NUM_TOKENS, DOCUMENT = 0, 1, 2, 12, 8


@dataclasses.dataclass(frozen=True)
class Copies:
    """Items that are drawn from their index."""

    seed: int
    length: int

    def __len__(self):
        return 40

    def __getitem__(self, index):
        random = np.random.default_rng([self.seed, index])
        digits = random.integers(FIRST_DIGIT, NUM_TOKENS, (self.length // DOCUMENT + 1, 3))
        ends = np.full((len(digits), 1), BEGIN), np.full((len(digits), 1), SIGN)
        documents = np.concatenate([ends[0], digits, ends[1], digits], axis=1, dtype=np.int32)
        tokens = documents.reshape(-1)[: self.length + 1]
        targets = np.where(self.counts(index), tokens[1:], -1)
        return Item(tokens, tokens == BEGIN, targets)

    def counts(self, index):
        """The copies of some documents: more of them in items with a larger index."""
        place = np.arange(1, self.length + 1)
        return (place % DOCUMENT > 4) & (place // DOCUMENT <= index % 4)

    def num_targets(self, index):
        return int(np.count_nonzero(self.counts(index)))


class Digits:
    """The tokenizer: a token for each digit."""

    num_tokens, ends, marks = NUM_TOKENS, (BEGIN,), {}

    def encode(self, text):
        return np.array([BEGIN, *(FIRST_DIGIT + int(digit) for digit in text)], np.int32)

    def decode_stream(self, after=()):
        text = lambda token: "B="[token] if token < FIRST_DIGIT else str(token - FIRST_DIGIT)
        return DecodeStream(lambda tokens: "".join(map(text, tokens)), after)


def look(config):
    """There is always enough."""


def read(config, length):
    train, validation = Copies(1, length), Copies(2, length)
    tokens = lambda own: np.stack([own[i].tokens for i in range(len(own))])
    digest = lambda own: hashlib.sha256(tokens(own)).hexdigest()
    digests = {"train": digest(train), "validation": digest(validation)}
    return Splits(train=train, validation=validation, place=NAME, digests=digests, files={})


def tokenizer(config):
    return Digits()


SOURCE = DataSource(module=__name__, num_tokens=lambda config: NUM_TOKENS, tokens_are="digits")


def add():
    SOURCES[NAME] = SOURCE
