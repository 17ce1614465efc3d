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


def refuse_corpus(out: Path, corpus: str, pattern: str | None) -> None:
    """Raises ConfigError if the output would join the files of the corpus.

    Args:
      out: the file or folder of the output.
      corpus: a folder or a file.
      pattern: of the files of the folder; None: all of them.
    """
    own, folder = out.resolve(), Path(corpus).resolve()
    if own == folder:
        raise ConfigError("--out", "is the corpus", found=out, fix="name another folder")
    if pattern is None and folder in own.parents:
        fix = "name a folder beside the corpus, or its files by --pattern"
        raise ConfigError("--out", "is inside of the corpus", found=out, fix=fix)


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
