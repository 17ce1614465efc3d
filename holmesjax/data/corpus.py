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
from typing import NoReturn

import numpy as np

from holmesjax.config import PYTHON_STDLIB, DataConfig
from holmesjax.data import row_documents, stores, text_documents
from holmesjax.data.tokenizer import BEGIN
from holmesjax.errors import DataError

PLACES = 2**64  # of a file, by a hash of its path
SNIFFED = 8192  # bytes of a file that show, as a rule, whether it is text
# Modules that are left out: distributions of a release lack them, or have them elsewhere.
APART = {
    *("distutils", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "tkinter", "turtle"),
    "turtledemo",
}
APART_BELOW = {"macholib", "test", "tests"}
# Endings of files whose documents are not their text.
OTHER = (
    *(text_documents.LINES, *text_documents.COMPRESSED),
    *(row_documents.PARQUET, row_documents.ARROW, *row_documents.ARRAY_RECORD),
)


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


def files(config: DataConfig) -> dict[str, Path]:
    """The corpus's files by their path inside it, sorted. Raises DataError if there are none."""
    found = dict(_paths(config))
    if not found:
        raise _no_file(config)
    return {name: found[name] for name in sorted(found)}


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
        raise _no_file(config)
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
    for name, path in _paths(config):
        _refuse_other(path)
        try:
            if config.pattern is None and config.corpus != PYTHON_STDLIB:
                with stores.open_file(path) as file:
                    if BEGIN in file.read(SNIFFED):
                        continue
            size = path.stat().st_size
        except stores.errors() as error:
            raise _unreadable(path, error) from None
        yield name, 1 + size


def _refuse_other(path: Path) -> None:
    """Raises DataError for a file whose documents are not its text, by its name."""
    if not path.name.endswith(OTHER):
        return
    fix = "turn the corpus into tokens (python -m launch tokenize) and use data.source=tokens"
    if text_documents.is_lines(path):
        fix += "; use data.source=chat if its lines are dialogues"
    fix += "; choose other files by data.pattern; or give it the ending .txt if it is to be read"
    problem, found = "is not read as text", f"a file {path.suffix}"
    raise DataError(str(path), problem, found=found, fix=f"{fix} as it is")


def _paths(config: DataConfig) -> Iterator[tuple[str, Path]]:
    """The corpus's files with their path inside it, in any order."""
    root = _root(config)
    for path in _stdlib(root) if config.corpus == PYTHON_STDLIB else _in_folder(root, config):
        if path.is_file():
            yield path.relative_to(root).as_posix(), path


def _in_folder(root: Path, config: DataConfig) -> Iterator[Path]:
    """The files that the pattern matches; without one, all that are not hidden."""

    def refuse(error: Exception) -> NoReturn:
        fix = "make it readable, or name another folder"
        raise DataError("data.corpus", "cannot be read", found=error, fix=fix) from None

    is_remote = stores.is_remote(config.corpus)
    try:
        stores.ask(root)
        is_folder, is_there = root.is_dir(), root.exists()
    except stores.errors() as error:
        refuse(error)
    if not is_there:
        raise stores.absent(config.corpus, f"name a folder, or {PYTHON_STDLIB!r} for a first try")
    if not is_folder:
        _refuse_other(root)
        fix = f"name the folder that it is in, and data.pattern={root.name}"
        raise DataError("data.corpus", "is no folder", found=f"{config.corpus}, a file", fix=fix)
    if config.pattern is None and is_remote:
        parts = {path: path.relative_to(root).parts for path in stores.files_below(root)}
        yield from (p for p, own in parts.items() if not any(n.startswith(".") for n in own))
        return
    if config.pattern is None:
        for folder, subfolders, names in os.walk(root, onerror=refuse):
            subfolders[:] = [name for name in subfolders if not name.startswith(".")]
            yield from (Path(folder, name) for name in names if not name.startswith("."))
        return
    try:
        yield from root.glob(config.pattern)
    except (ValueError, NotImplementedError) as error:
        fix = "write a pattern inside the folder, such as **/*.txt"
        found = f"{config.pattern}: {error}"
        raise DataError("data.pattern", "is no pattern", found=found, fix=fix) from None
    except stores.errors() as error:
        refuse(error)


def _no_file(config: DataConfig) -> DataError:
    root = _root(config)
    if config.pattern is None:
        found = "no file but hidden and binary ones"
        fix = "name another folder, or use data.source=tokens for files of tokens"
        return DataError("data.corpus", f"{root} holds no text", found=found, fix=fix)
    fix = "change data.pattern or data.corpus"
    problem = f"no file in {root} matches"
    return DataError("data.pattern", problem, found=config.pattern, fix=fix)


def _unreadable(path: Path, error: Exception) -> DataError:
    fix = "make it readable, or leave it out by data.pattern"
    return DataError(str(path), "cannot be read", found=stores.said_by(error), fix=fix)


def _root(config: DataConfig) -> Path:
    if config.corpus == PYTHON_STDLIB:
        return Path(sysconfig.get_path("stdlib"))
    return stores.path_of(config.corpus)


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
    """Reads all files of the corpus; without a pattern, those that hold a zero byte are left out.

    Raises DataError for a file that cannot be read, or is no text and yet matches the pattern.
    """
    parts: dict[str, list[bytes]] = {"train": [], "validation": []}
    lists = {split: hashlib.sha256() for split in parts}
    found: dict[str, str] = {}
    for name, path in files(config).items():
        _refuse_other(path)
        try:
            text = path.read_bytes()
        except stores.errors() as error:
            raise _unreadable(path, error) from None
        if BEGIN in text:
            if config.pattern is None and config.corpus != PYTHON_STDLIB:
                continue
            fix = "leave it out by data.pattern: training reads text"
            raise DataError(str(path), "holds a zero byte", found="a binary file", fix=fix)
        split = split_of(name, config.validation_fraction)
        parts[split] += [bytes([BEGIN]), text]
        found[name] = hashlib.sha256(text).hexdigest()
        lists[split].update(os.fsencode(f"{found[name]}  {name}\n"))
    if not found:
        raise _no_file(config)
    python = f" of Python {platform.python_version()}" if config.corpus == PYTHON_STDLIB else ""
    train, validation = (np.frombuffer(b"".join(texts), np.uint8) for texts in parts.values())
    return Corpus(
        train=train,
        validation=validation,
        source=f"{_root(config).absolute()}{python}",
        files=found,
        digests={split: list_.hexdigest() for split, list_ in lists.items()},
    )
