"""Corpora: the files of a run, split for validation by file, as one array of bytes each."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from holmesjax.config import DataConfig
from holmesjax.data.tokenizer import BEGIN
from holmesjax.errors import DataError

PYTHON_STDLIB = "python-stdlib"
# Installed packages are no part of it, and Debian ships its tests apart.
NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Documents in order of their path, each behind the mark that begins one; uint8."""

    train: np.ndarray
    validation: np.ndarray
    num_files: int


def files(config: DataConfig) -> dict[str, Path]:
    """The corpus's files by their path inside it, sorted."""
    if config.corpus == PYTHON_STDLIB:
        root, pattern = Path(sysconfig.get_path("stdlib")), "*.py"
        paths = _walk(root)
    else:
        root, pattern = Path(config.corpus), config.pattern
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


def _walk(root: Path) -> Iterator[Path]:
    """Python files below the root; unlike a glob it never enters the folders to leave out."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in NOT_STDLIB]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def is_validation(name: str, fraction: float) -> bool:
    """Whether a file is held out: a function of its path alone, so the split never moves."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8]) < fraction * 2**64


def read(config: DataConfig) -> Corpus:
    """Reads all files of the corpus."""
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    found = files(config)
    for name, path in found.items():
        text = path.read_bytes()
        if BEGIN in text:
            fix = "leave it out by data.pattern: training reads text"
            raise DataError(str(path), "holds a zero byte", found="a binary file", fix=fix)
        parts[is_validation(name, config.validation_fraction)] += [bytes([BEGIN]), text]
    train, validation = (np.frombuffer(b"".join(parts[held]), np.uint8) for held in (False, True))
    return Corpus(train=train, validation=validation, num_files=len(found))
