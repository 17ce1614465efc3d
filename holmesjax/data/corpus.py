"""Corpora: the files of a run, split for validation by file, as one array of bytes each.

Every process of a job reads its own copy. Digests say whether the copies agree: of each file, made
while it is read, and of each split.
"""

import hashlib
import math
import os
import platform
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from holmesjax.config import PYTHON_STDLIB, DataConfig
from holmesjax.data import compressed_files, corpus_files, file_kinds, object_stores, text_documents
from holmesjax.data.byte_tokenizer import BEGIN
from holmesjax.data.corpus_files import CorpusFile, LeftOut
from holmesjax.data.file_kinds import FileKind
from holmesjax.errors import DataError

PLACES = 2**64  # of a file, by a hash of its path
# Modules that are left out: distributions of a release lack them, or have them elsewhere.
APART = {
    *("distutils", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "tkinter", "turtle"),
    "turtledemo",
}
APART_BELOW = {"macholib", "test", "tests"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Documents in order of their path, each behind the mark that begins one; uint8."""

    train: np.ndarray
    validation: np.ndarray
    source: str  # where it was found, for messages
    files: dict[str, str]  # path inside the corpus -> SHA-256, sorted by path
    digests: dict[
        str, str
    ]  # "train", "validation" -> SHA-256 of what `sha256sum` says of its files
    left_out: str = ""  # what is not read, or read and unlike the rest, in words; empty: nothing


def standard_library() -> list[CorpusFile]:
    """The files of `python-stdlib`."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in _stdlib(root) if path.is_file()]
    kind = FileKind(file_kinds.TEXT)
    return sorted(CorpusFile(path.relative_to(root).as_posix(), path, kind) for path in paths)


def sizes(config: DataConfig, enough: Mapping[str, int]) -> dict[str, int]:
    """Bytes of each split, counted until each has enough; no file is read, some are begun.

    Raises DataError for a corpus that is missing or has no file, or a file that cannot be read.
    """
    found = dict.fromkeys(enough, 0)
    is_empty = True
    for name, size in _sizes(config):
        is_empty = False
        found[split_of(name, config.validation_fraction)] += size
        if all(found[split] >= enough[split] for split in enough):
            return found
    if is_empty:
        corpus_files.named_files(config)  # says what there is
        raise corpus_files.nothing(config, _root(config), LeftOut())
    return found


def enough_fraction(config: DataConfig, enough: Mapping[str, int]) -> float | None:
    """A validation_fraction with which each split has enough bytes; None if there is none."""
    files = sorted((_place(name), size) for name, size in _sizes(config))
    held_out = accumulate(size for _, size in files)
    last = next((i for i, size in enumerate(held_out) if size >= enough["validation"]), None)
    if last is None:
        return None
    for digits in range(2, 17):  # the shortest number is found first
        fraction = (math.floor(files[last][0] / PLACES * 10**digits) + 1) / 10**digits
        train = sum(size for place, size in files if place >= fraction * PLACES)
        if fraction < 1 and train >= enough["train"]:
            return fraction
    return None


def _sizes(config: DataConfig) -> Iterator[tuple[str, int]]:
    """The files of text by their path, each with its bytes and the mark before them."""
    for name, path, kind in _files(config, LeftOut()):
        try:
            size = path.stat().st_size
        except object_stores.errors() as error:
            raise corpus_files.unreadable(path, error) from None
        yield name, 1 + (size * 3 // 2 if kind.packing else size)  # UTF-16 is longer in UTF-8


def _files(config: DataConfig, left_out: LeftOut) -> Iterator[CorpusFile]:
    """The corpus's files of text, in any order. Raises DataError for a file of another kind."""
    if config.corpus == PYTHON_STDLIB:
        yield from standard_library()
        return
    root = _root(config)
    if corpus_files.is_file(config, root):
        _refuse_other(root, corpus_files.kind_of(root))
        fix = f"name the folder that it is in, and data.pattern={root.name}"
        raise DataError("data.corpus", "is no folder", found=f"{config.corpus}, a file", fix=fix)
    for file in corpus_files.files_in(root, config, left_out):
        _refuse_other(file.path, file.kind)
        yield file


def _refuse_other(path: Path, kind: FileKind) -> None:
    """Raises DataError for a file whose documents are not its text."""
    if kind.content == file_kinds.TEXT and set(kind.packing) <= compressed_files.ENCODINGS:
        return
    fix = "turn the corpus into tokens (python -m launch tokenize) and use data.source=tokens"
    if kind.content in file_kinds.JSON:
        fix += "; use data.source=chat if it has dialogues"
    fix += "; or choose other files by data.pattern"
    raise DataError(str(path), "is not read as text", found=kind.words, fix=fix)


def _root(config: DataConfig) -> Path:
    if config.corpus == PYTHON_STDLIB:
        return Path(sysconfig.get_path("stdlib"))
    return object_stores.path_of(config.corpus)


def _stdlib(root: Path) -> Iterator[Path]:
    """The places where the source of the standard library's modules may be.

    Only modules that Python itself names count. Modules that a build generates, a distribution adds
    or a user installs do not.
    """
    for name in sys.stdlib_module_names - APART:
        yield root / f"{name}.py"
        for folder, subfolders, names in os.walk(root / name):
            subfolders[:] = [name for name in subfolders if name not in APART_BELOW]
            yield from (Path(folder, name) for name in names if name.endswith(".py"))


def documents(corpus: Corpus, split: np.ndarray) -> Iterator[str]:
    """The files of a split as text, in their order. Raises DataError for one that is no UTF-8."""
    for text in split.tobytes().split(bytes([BEGIN]))[1:]:
        try:
            yield text.decode()
        except UnicodeDecodeError as error:
            digest = hashlib.sha256(text).hexdigest()
            name = next(name for name, known in corpus.files.items() if known == digest)
            fix = "save it as UTF-8, leave it out by data.pattern, or use data.tokenizer=bytes"
            raise DataError(name, "is no UTF-8", found=error, fix=fix) from None


def is_validation(name: str, fraction: float) -> bool:
    """Tells whether a file is held out: a function of its path alone, so the split never moves."""
    return _place(name) < fraction * PLACES


def _place(name: str) -> int:
    """The place of a file among `PLACES`, the first of which are held out."""
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8])


def split_of(name: str, fraction: float) -> str:
    """The split of a file: "train" or "validation"."""
    return "validation" if is_validation(name, fraction) else "train"


def read(config: DataConfig) -> Corpus:
    """Reads all files of the corpus.

    Raises DataError for a file that cannot be read, or is of another kind than text. Without a
    pattern, files of a kind that no source reads are left out.
    """
    parts: dict[str, list[bytes]] = {"train": [], "validation": []}
    lists = {split: hashlib.sha256() for split in parts}
    found: dict[str, str] = {}
    left_out = LeftOut()
    for name, path, kind in sorted(_files(config, left_out)):
        try:
            text = text_documents.whole(path, kind, "data.pattern")
        except object_stores.errors() as error:
            raise corpus_files.unreadable(path, error) from None
        split = split_of(name, config.validation_fraction)
        parts[split] += [bytes([BEGIN]), text]
        found[name] = hashlib.sha256(text).hexdigest()
        lists[split].update(os.fsencode(f"{found[name]}  {name}\n"))
    if not found:
        raise corpus_files.nothing(config, _root(config), left_out)
    is_own = config.corpus != PYTHON_STDLIB
    found_names = corpus_files.remarks([*found]) if is_own else ""
    python = f" of Python {platform.python_version()}" if config.corpus == PYTHON_STDLIB else ""
    train, validation = (np.frombuffer(b"".join(texts), np.uint8) for texts in parts.values())
    return Corpus(
        train=train,
        validation=validation,
        source=f"{_root(config).absolute()}{python}",
        files=found,
        digests={split: list_.hexdigest() for split, list_ in lists.items()},
        left_out=corpus_files.with_remarks(left_out.words, found_names),
    )
