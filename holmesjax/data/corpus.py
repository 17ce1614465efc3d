"""Corpora: the files of a run, split for validation by file, as one array of bytes each.

Every process of a job reads its own copy. Digests say whether the copies agree: of each file, made
while it is read, and of each split.
"""

import hashlib
import os
import platform
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from holmesjax.config import DataConfig
from holmesjax.data.tokenizer import BEGIN
from holmesjax.errors import DataError

PYTHON_STDLIB = "python-stdlib"
# Left out, since not every distribution of a release has them, or has them in the same place.
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


def files(config: DataConfig) -> dict[str, Path]:
    """The corpus's files by their path inside it, sorted."""
    root, pattern = _root(config), config.pattern
    if config.corpus == PYTHON_STDLIB:
        paths, pattern = _stdlib(root), "*.py"
    else:
        if not root.is_dir():
            fix = f"name a folder, or {PYTHON_STDLIB!r}"
            raise DataError("data.corpus", "is no folder", found=config.corpus, fix=fix)
        paths = root.glob(pattern)
    found = {path.relative_to(root).as_posix(): path for path in paths}
    found = {name: found[name] for name in sorted(found) if found[name].is_file()}
    if not found:
        fix = "change data.pattern or data.corpus"
        raise DataError("data.pattern", f"no file in {root} matches", found=pattern, fix=fix)
    return found


def _root(config: DataConfig) -> Path:
    if config.corpus == PYTHON_STDLIB:
        return Path(sysconfig.get_path("stdlib"))
    return Path(config.corpus)


def _stdlib(root: Path) -> Iterator[Path]:
    """The places where the source of the standard library's modules may be.

    Only modules that Python itself names: what is generated when it is built, what a distribution
    adds and what is installed later is none of them.
    """
    for name in sys.stdlib_module_names - APART:
        yield root / f"{name}.py"
        for folder, subfolders, names in os.walk(root / name):
            subfolders[:] = [name for name in subfolders if name not in APART_BELOW]
            yield from (Path(folder, name) for name in names if name.endswith(".py"))


def is_validation(name: str, fraction: float) -> bool:
    """Whether a file is held out: a function of its path alone, so the split never moves."""
    digest = hashlib.sha256(os.fsencode(name)).digest()
    return int.from_bytes(digest[:8]) < fraction * 2**64


def read(config: DataConfig) -> Corpus:
    """Reads all files of the corpus.

    Raises DataError for a file that cannot be read or is no text.
    """
    parts: dict[str, list[bytes]] = {"train": [], "validation": []}
    lists = {split: hashlib.sha256() for split in parts}
    found: dict[str, str] = {}
    for name, path in files(config).items():
        try:
            text = path.read_bytes()
        except OSError as error:
            fix = "make it readable, or leave it out by data.pattern"
            raise DataError(str(path), "cannot be read", found=error.strerror, fix=fix) from None
        if BEGIN in text:
            fix = "leave it out by data.pattern: training reads text"
            raise DataError(str(path), "holds a zero byte", found="a binary file", fix=fix)
        split = "validation" if is_validation(name, config.validation_fraction) else "train"
        parts[split] += [bytes([BEGIN]), text]
        found[name] = hashlib.sha256(text).hexdigest()
        lists[split].update(os.fsencode(f"{found[name]}  {name}\n"))
    python = f" of Python {platform.python_version()}" if config.corpus == PYTHON_STDLIB else ""
    train, validation = (np.frombuffer(b"".join(texts), np.uint8) for texts in parts.values())
    return Corpus(
        train=train,
        validation=validation,
        source=f"{_root(config).absolute()}{python}",
        files=found,
        digests={split: list_.hexdigest() for split, list_ in lists.items()},
    )
