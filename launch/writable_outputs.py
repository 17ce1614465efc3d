"""Checks the files and folders that a command writes at its end, before it begins."""

import os
from pathlib import Path

from holmesjax.errors import ConfigError


def make_folder(folder: Path, where: str) -> None:
    """Makes a folder unless it is there. Raises ConfigError if it cannot be written.

    Args:
      where: the setting or option that names it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        problem = "" if os.access(folder, os.W_OK | os.X_OK) else "no permission to write"
    except OSError as error:
        problem = str(error.strerror)
    if problem:
        fix = "name a folder that can be written"
        raise ConfigError(where, "cannot be written", found=f"{folder}: {problem}", fix=fix)


def refuse_corpus(out: Path, corpus: str) -> None:
    """Raises ConfigError if `--out` is the corpus itself, whose files the output would join."""
    if out.resolve() == Path(corpus).resolve():
        raise ConfigError("--out", "is the corpus", found=out, fix="name another folder")


def check_file(path: Path, where: str) -> None:
    """Raises ConfigError if a file cannot be written, or its folder is missing.

    Args:
      where: the option that names it.
    """
    folder = path.absolute().parent
    if path.is_dir():
        problem = "a folder"
    elif not folder.is_dir():
        problem = f"no folder {folder}"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        problem = "no permission to write"
    else:
        return
    fix = "name a file in a folder that can be written"
    raise ConfigError(where, "cannot be written", found=f"{path}: {problem}", fix=fix)
