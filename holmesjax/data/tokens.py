"""Files of tokens as a data source: windows are read as they come, so a corpus may be of any size.

A window has L + 1 tokens, the last of which is the first of the next window, and no window goes
from one file into the next. The last documents of each file are held out for validation.

Dims: L tokens of a sequence.
"""

import bisect
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from holmesjax.config import BYTES, Config, DataConfig
from holmesjax.data import object_stores, packing, text, token_formats, tokenizer_files
from holmesjax.data.packing import DocumentRange, Spans
from holmesjax.data.sources import (
    HELD_OUT,
    TRAIN,
    Item,
    Sequences,
    Splits,
    enough_fraction,
    need,
    too_small,
)
from holmesjax.data.token_files import TOKENIZER_PATH, DocumentStarts, TokenFile
from holmesjax.data.tokenizer_paths import read_json
from holmesjax.errors import ConfigError, DataError

tokenizer = text.tokenizer


@dataclass(frozen=True, slots=True)
class FileRange:
    """A range of the tokens of a file."""

    file: TokenFile
    first: int
    last: int  # one after the range

    @property
    def num_tokens(self) -> int:
        return self.last - self.first

    @property
    def num_documents(self) -> int:
        """The documents that begin in it."""
        return self.file.num_documents(self.first, self.last)


class FileWindows:
    """The windows of parts of files."""

    def __init__(self, parts: Sequence[FileRange], length: int, limit: int | None):
        self.parts = parts
        self._length = length  # L
        self._limit = limit  # more than any token, where a file does not say so
        counts = [max(part.num_tokens - 1, 0) // length for part in parts]
        self._ends = list(accumulate(counts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Item:
        place = bisect.bisect_right(self._ends, index)
        own = self.parts[place]
        before = self._ends[place - 1] if place else 0
        first = own.first + (index - before) * self._length
        last = first + self._length + 1
        found = own.file.token_T[first:last]
        own.file.check(first, found, _limit(own.file, self._limit))
        begins = np.zeros(len(found), bool)
        if own.file.documents is not None:
            begins[own.file.starts(first, last) - first] = True
        return Item(found.astype(np.int32), begins)

    def num_targets(self, index: int) -> int:
        """All targets count."""
        return self._length


def _limit(file: TokenFile, other: int | None) -> int | None:
    return other if file.limit is None else file.limit


def _cut(files: Sequence[TokenFile], fraction: float) -> tuple[list[FileRange], list[FileRange]]:
    """The parts for training and for validation: the last documents of each file are held out.

    A file without documents, or whose last one is longer than what should be held out, is cut
    inside of one.
    """
    train, validation = [], []
    for file in files:
        count = len(file.token_T)
        cut = count - int(count * fraction)
        if cut < count:
            cut = file.next_start(cut) or cut
        train.append(FileRange(file, 0, cut))
        validation.append(FileRange(file, cut, count))
    return train, validation


def read(config: DataConfig, length: int) -> Splits:
    """Opens the files, and reads some blocks of each."""
    files = token_formats.find(config)
    limit = _limit_of(config, files)
    root = files[0].path
    found = object_stores.each(TokenFile.digest, files, root)
    digests = {file.path.name: digest for file, digest in zip(files, found, strict=True)}
    train, validation = _cut(files, config.validation_fraction)

    def digest(parts: Sequence[FileRange]) -> str:
        lines = [f"{digests[p.file.path.name]} {p.first} {p.last}\n" for p in parts]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def sequences(parts: Sequence[FileRange]) -> Sequences:
        if config.packing is None:
            return FileWindows(parts, length, limit)
        return packing.packed(
            Spans([_documents_of(part, config, limit) for part in parts]),
            length,
            digest(parts),
            beside=None if object_stores.is_remote(root) else root.parent,
        )

    return Splits(
        train=sequences(train),
        validation=sequences(validation),
        place=object_stores.whole(object_stores.path_of(config.corpus)),
        digests={"train": digest(train), "validation": digest(validation)},
        files=digests,
        left_out=token_formats.left_out(config, files),
    )


def _documents_of(part: FileRange, config: DataConfig, limit: int | None) -> DocumentRange:
    file = part.file
    assert file.documents is not None, "`look` refuses documents that are not known"
    return DocumentRange(
        token_T=file.token_T,
        start_D=DocumentStarts(file.documents, part.first, part.last),
        first=part.first,
        last=part.last,
        marks_end=config.tokenizer == BYTES,
        check=lambda first, tokens: file.check(first, tokens, _limit(file, limit)),
    )


def _limit_of(config: DataConfig, files: Sequence[TokenFile]) -> int | None:
    """A number above all tokens of files that name none: the tokenizer gives it."""
    return None if all(file.limit for file in files) else tokenizer(config).num_tokens


def look(config: Config) -> None:
    """Opens all files, and looks at some blocks of each; no more is read.

    Raises DataError for files that are missing, damaged, too small, or of another tokenizer, and
    ConfigError for a model without an id for each token.
    """
    data, train = config.data, config.train
    if data.pattern is not None:
        fix = "leave it out, and name the folder or the file"
        raise DataError("data.pattern", "is for text", found=data.pattern, fix=fix)
    files = token_formats.find(data)
    identity = tokenizer_files.identity(data.tokenizer)
    limit = _limit_of(data, files)
    for file in files:
        _refuse_other(file, data, identity)
        own = _limit(file, limit)
        if own is not None and own > config.model.vocab_size:
            problem = f"must be at least {own}: {file.path} may have tokens up to {own - 1}"
            fix = f"use {tokenizer_files.padded(own)}, the next multiple of {tokenizer_files.UNIT}"
            raise ConfigError("model.vocab_size", problem, found=config.model.vocab_size, fix=fix)
    object_stores.each(lambda file: file.check_blocks(_limit(file, limit)), files, files[0].path)
    num_batches = {TRAIN: 1, HELD_OUT: train.eval_batches if train.eval_every else 0}
    length, batch = config.model.context_length, train.global_batch
    sizes = [
        len(FileWindows(part, length, limit)) for part in _cut(files, data.validation_fraction)
    ]
    for size, (split, count) in zip(sizes, num_batches.items(), strict=True):
        if size < (needed := count * batch):
            needs = need(count, batch, length, f"{needed:,} sequences")
            fraction = enough_fraction(needed, sum(sizes), batch) if split == HELD_OUT else None
            raise too_small(split, needs, found=f"{size:,} sequences", fraction=fraction)


def _refuse_other(file: TokenFile, data: DataConfig, identity: str) -> None:
    if file.tokenizer is not None and file.tokenizer != identity:
        made_with = BYTES if file.tokenizer == BYTES else None
        if file.about is not None:
            made_with = read_json(file.about).get(TOKENIZER_PATH, made_with)
        problem = f"is not the tokenizer of {file.path.name}"
        found = (
            data.tokenizer
            if BYTES in (data.tokenizer, made_with)
            else f"{data.tokenizer}, whose files differ"
        )
        fix = "name the one that it was made with"
        fix += f": data.tokenizer={made_with}" if made_with else ", which its .json does not name"
        raise DataError("data.tokenizer", problem, found=found, fix=fix)
    if file.documents is None and data.documents == "mask":
        said = f"documents: null in {file.about}" if file.about else f"no marks in {file.path}"
        found, fix = said, "use data.documents=concatenate"
        raise DataError(
            "data.documents", "needs files that say where documents begin", found=found, fix=fix
        )


def verify(config: DataConfig) -> int:
    """Reads all tokens of all files, and compares their hashes; the number of hashes.

    Raises DataError for the first file that differs, or that holds what is no token.
    """
    files = token_formats.find(config)
    limit = _limit_of(config, files)
    for file in files:
        file.verify(_limit(file, limit))
    return sum(len(file.hashes) for file in files)
