"""Files of tokens, of which only the range that is being read is in memory.

    holmesjax   NAME.bin, tokens as uint16 or uint32; NAME.json, which says what they are; and
                NAME.starts, the place of the first token of each document, as int64

Other formats are in `token_formats`. All numbers are little-endian. A file is checked when it is
opened, but for its tokens: of these some blocks are read. `verify` reads all.

Dims: T tokens of a file.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np

from holmesjax.data import object_stores
from holmesjax.data.number_files import NumberFile
from holmesjax.data.whole_digests import whole_digests
from holmesjax.errors import DataError

FORMAT = "holmesjax tokens 1"
DTYPES: dict[str, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
STARTS = np.dtype("<i8")
TOKENIZER_PATH = "tokenizer_path"  # key of where the tokenizer of `tokenize` was, for messages
LOCK = "tokenize.lock"  # file that the `tokenize` of a folder locks while it writes
JOB = "tokenize.json"  # file of a folder that `tokenize` writes: the shards that it will have
BLOCKS, BLOCK_BYTES = 64, 4096  # blocks that are checked when a file is opened, and their bytes


class Places(Protocol):
    """The places of the first tokens of documents, in their order."""

    def rank(self, place: int) -> int:
        """Returns the number of documents that begin before a place."""

    def __getitem__(self, index: slice) -> np.ndarray:
        """Returns the places of some documents."""


class DocumentStarts:
    """The places of the documents that begin in a range of tokens, each read when it is asked."""

    def __init__(self, documents: Places, first: int, last: int):
        self._documents = documents
        self._first, self._last = documents.rank(first), documents.rank(last)

    def __len__(self) -> int:
        return self._last - self._first

    def __getitem__(self, number: int | np.ndarray) -> np.ndarray:
        """Returns the places of documents by their numbers in the range; int64."""
        found = [self._documents[n : n + 1] for n in np.ravel(self._first + number).tolist()]
        return np.concatenate([np.empty(0, np.int64), *found]).reshape(np.shape(number))


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenFile:
    """Tokens with the documents that they are of."""

    path: Path  # of the tokens
    about: Path | None  # the file beside it that says what they are; None: it says it itself
    token_T: NumberFile
    documents: Places | None  # None: not known
    tokenizer: str | None  # its identity; None: not known
    limit: int | None  # more than any token; None: not known
    hashes: dict[Path, str] = field(default_factory=dict)  # SHA-256, as `about` says

    def starts(self, first: int, last: int) -> np.ndarray:
        """The places of the first tokens of the documents that begin in a range of tokens."""
        assert self.documents is not None, f"the documents of {self.path} are not known"
        return self.documents[self.documents.rank(first) : self.documents.rank(last)]

    def num_documents(self, first: int, last: int) -> int:
        """The documents that begin in a range of tokens; 0 if they are not known."""
        if self.documents is None:
            return 0
        return self.documents.rank(last) - self.documents.rank(first)

    def next_start(self, place: int) -> int | None:
        """The place of the first document that begins there or later; None: there is none."""
        if self.documents is None:
            return None
        number = self.documents.rank(place)
        found = self.documents[number : number + 1]
        return int(found[0]) if len(found) else None

    def check(self, first: int, tokens: np.ndarray, limit: int | None) -> None:
        """Raises DataError for a token that cannot be.

        Args:
          first: place of the first of these tokens.
          limit: more than any token may be; None: not known.
        """
        wrong = tokens < 0
        if limit is not None:
            wrong |= tokens >= limit
        if wrong.any():
            place = int(np.argmax(wrong))
            found = f"{int(tokens[place])} at byte {self.token_T.byte_of(first + place):,}"
            problem = "holds a token " + ("below 0" if limit is None else f"not below {limit}")
            fix = "copy it again, or name the data.tokenizer that it was made with"
            raise DataError(str(self.path), problem, found=found, fix=fix)

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Some blocks of tokens with the place of their first, the same ones each time."""
        size = BLOCK_BYTES // self.token_T.dtype.itemsize
        last = max(len(self.token_T) - size, 0)
        for first in sorted({last * i // (BLOCKS - 1) for i in range(BLOCKS)}):
            yield first, self.token_T[first : first + size]

    def check_blocks(self, limit: int | None) -> None:
        """Checks the tokens of some blocks."""
        for first, tokens in self.blocks():
            self.check(first, tokens, limit)

    def digest(self) -> str:
        """Returns the SHA-256 of the type of the tokens and of all bytes of the files.

        It is the same for a file here and in a store. Of an object in a store the hash that
        `about` says is taken as it is; without one, all of the object is read.

        Raises DataError for a file that is not as it was written.
        """
        digest = hashlib.sha256()
        if self.about is None:
            digest.update(f"{self.token_T.dtype.str}\n".encode())
        else:
            update(digest, self.about)
        for path in (self.path, *self.hashes):
            digest.update(f"{path.stat().st_size}\n".encode())
        paths = [self.path, *(path for path in self.hashes if path != self.path)]
        if object_stores.is_remote(self.path):
            found = [self.hashes.get(path) or hash_of(path) for path in paths]
        else:
            found = whole_digests(paths)
        for path, table in zip(paths, found, strict=True):
            self._compare(path, table)
            digest.update(f"{table}\n".encode())
        return digest.hexdigest()

    def verify(self, limit: int | None) -> None:
        """Reads all tokens, and compares the hashes that are known. Raises DataError."""
        for first, tokens in self.token_T.chunks():
            self.check(first, tokens, limit)
        for path in self.hashes:
            self._compare(path, hash_of(path))

    def _compare(self, path: Path, found: str) -> None:
        """Raises DataError where a file has another hash than `about` says."""
        said = self.hashes.get(path, found)
        if said != found:
            assert self.about is not None
            problem = f"is not as it was written: {self.about.name} says SHA-256 {said[:12]}"
            raise DataError(str(path), problem, found=found[:12], fix="copy or make it again")


def hash_of(path: Path) -> str:
    """SHA-256 of a file."""
    update(digest := hashlib.sha256(), path)
    return digest.hexdigest()


def update(digest: Any, path: Path) -> None:
    """Adds the content of a file to a digest."""
    with object_stores.open_file(path) as file:
        while content := file.read(object_stores.AHEAD_BYTES):
            digest.update(content)


def wrong(path: Path, problem: str, found: Any) -> NoReturn:
    """Raises DataError for a file that is not as it should be."""
    fix = "copy it again, or make it again"
    raise DataError(str(path), problem, found=found, fix=fix)


def as_json(said: dict[str, Any]) -> str:
    """The text of a file that says what tokens are."""
    return json.dumps({"format": FORMAT, **said}, indent=2) + "\n"
