"""Text as a data source: the files of a corpus, as bytes or by a tokenizer, cut into windows.

Dims: L tokens of a sequence, W windows, D documents. A split is cut into windows of L + 1 tokens,
the last of which is the first of the next window: the target of the last token.
"""

from dataclasses import dataclass

import numpy as np

from holmesjax.config import BYTES, Config, DataConfig
from holmesjax.data import corpus as corpora, packing, tokenizer_files
from holmesjax.data.byte_tokenizer import BEGIN, ByteTokenizer
from holmesjax.data.corpus import Corpus
from holmesjax.data.corpus_progress import LongWork
from holmesjax.data.packing import DocumentRange, Spans
from holmesjax.data.sources import (
    HELD_OUT,
    TRAIN,
    Item,
    Sequences,
    Splits,
    Tokenizer,
    need,
    too_small,
)
from holmesjax.data.tokenizer_files import FileTokenizer

BATCH_BYTES = 2**20  # of the texts that a library tokenizes at once: it keeps much for each token


@dataclass(frozen=True, eq=False)
class Windows:
    """The windows of an array of tokens."""

    token_WL: np.ndarray  # [W, L + 1]
    first_D: np.ndarray  # the place of the first token of each document in the split

    def __len__(self) -> int:
        return len(self.token_WL)

    def __getitem__(self, index: int) -> Item:
        tokens = self.token_WL[index].astype(np.int32)
        start = index * (len(tokens) - 1)
        low, high = np.searchsorted(self.first_D, (start, start + len(tokens)))
        begins = np.zeros(len(tokens), bool)
        begins[self.first_D[low:high] - start] = True
        return Item(tokens, begins)

    def num_targets(self, index: int) -> int:
        """All targets count."""
        return self.token_WL.shape[1] - 1


def windows_of(tokens: np.ndarray, length: int) -> np.ndarray:
    """All windows of an array of tokens, a view; [W, L + 1].

    >>> windows_of(np.arange(8), 3).tolist()
    [[0, 1, 2, 3], [3, 4, 5, 6]]
    """
    if len(tokens) <= length:
        return np.empty((0, length + 1), tokens.dtype)
    return np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length]


def cut(
    corpus: Corpus, length: int, by: FileTokenizer | None = None, *, packs: bool = False
) -> Splits:
    """The windows of a corpus, or its documents packed into rows.

    Args:
      corpus: whose documents become tokens.
      length: of a sequence.
      by: the tokenizer; None: a token for each byte.
      packs: whether documents are packed.
    """

    def sequences(split: np.ndarray) -> Sequences:
        tokens, first_D = split, np.flatnonzero(split == BEGIN)
        if by is not None:
            tokens, first_D = _tokens_of(corpus, split, by)
        if not packs:
            return Windows(windows_of(tokens, length), first_D)
        own = DocumentRange(
            token_T=tokens, start_D=first_D, first=0, last=len(tokens), marks_end=by is None
        )
        return packing.packed(Spans([own]), length, digest="", beside=None)

    return Splits(
        train=sequences(corpus.train),
        validation=sequences(corpus.validation),
        place=corpus.source,
        digests=corpus.digests,
        files=corpus.files,
        left_out=corpus.left_out,
    )


def _tokens_of(
    corpus: Corpus, split: np.ndarray, by: FileTokenizer
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a split, and the place of the first token of each document."""
    dtype = np.uint16 if by.num_tokens <= 2**16 else np.int32
    found = [np.empty(0, dtype)]
    batch: list[str] = []
    num_bytes, work = 0, LongWork("making tokens of documents")
    for text in corpora.documents(corpus, split):
        batch.append(text)
        num_bytes += len(text)
        if num_bytes >= BATCH_BYTES:
            found += (tokens.astype(dtype) for tokens in by.documents(batch))
            work.add(len(batch))
            batch, num_bytes = [], 0
    found += (tokens.astype(dtype) for tokens in by.documents(batch))
    return np.concatenate(found), np.cumsum([len(tokens) for tokens in found])[:-1]


def read(config: DataConfig, length: int) -> Splits:
    """Reads all files of the corpus."""
    by = None if config.tokenizer == BYTES else tokenizer_files.of_run(config)
    return cut(corpora.read(config), length, by, packs=config.packing is not None)


def tokenizer(config: DataConfig) -> Tokenizer:
    if config.tokenizer == BYTES:
        return ByteTokenizer()
    return tokenizer_files.of_run(config)


def look(config: Config) -> None:
    """Looks whether there are files enough for a run, without reading them; in a fraction of 1 s.

    Raises DataError for a corpus that is missing, empty or too small, and ConfigError for a
    model without an id for each token. A token has a byte at least, so a split with too few bytes
    has too few tokens; `batches` finds the other ones.
    """
    if config.data.tokenizer != BYTES:
        tokenizer = tokenizer_files.of_run(config.data)
        tokenizer_files.check_vocabulary(config.model, tokenizer.num_used)
    train, length = config.train, config.model.context_length
    num_batches = {"train": 1, "validation": train.eval_batches if train.eval_every else 0}
    size = train.global_batch * length
    enough = {name: count * size + 1 if count else 0 for name, count in num_batches.items()}
    sizes = corpora.sizes(config.data, enough)
    for name, count in num_batches.items():
        if sizes[name] < enough[name]:
            needs = need(count, train.global_batch, length, f"{enough[name]:,} bytes")
            is_held_out = name == "validation"
            fraction = corpora.enough_fraction(config.data, enough) if is_held_out else None
            of, found = HELD_OUT if is_held_out else TRAIN, f"{sizes[name]:,} bytes"
            raise too_small(of, needs, found=found, fraction=fraction)
