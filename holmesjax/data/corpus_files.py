"""The files of a corpus: which there are, what each holds, and what is left out.

Links are followed once: a file or a folder that is reached twice is read under the first name, its
own before that of a link. What is not read is counted by its kind, so that a run can say so.
"""

import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import NamedTuple, NoReturn

from holmesjax.config import PYTHON_STDLIB, DataConfig
from holmesjax.data import file_kinds, object_stores
from holmesjax.data.file_kinds import ABOUT_TABLES, EMPTY, FileKind
from holmesjax.data.whole_digests import FOLDER
from holmesjax.errors import DataError

HIDDEN, TWICE = "hidden file or folder", "another name of what is read"
Identity = tuple[int, int]  # of a file or a folder, whatever its names
NAMED = 3  # names of a kind in a message


class CorpusFile(NamedTuple):
    """A file that is read."""

    name: str  # its path inside the corpus
    path: Path
    kind: FileKind


@dataclass
class LeftOut:
    """The names of a corpus that are not read, by kind."""

    names: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, name: str) -> None:
        self.names.setdefault(kind, []).append(name)

    @property
    def words(self) -> str:
        """The counts in words; empty: nothing is left out.

        >>> LeftOut({"tar archive": ["a.tar", "b.tar"]}).words
        '2 (tar archive: 2, a.tar, b.tar)'
        """
        if not self.names:
            return ""
        kinds = []
        for kind, names in sorted(self.names.items()):
            shown = ", ".join(sorted(names)[:NAMED]) + (", ..." if len(names) > NAMED else "")
            kinds.append(f"{kind}: {len(names):,}, {shown}")
        return f"{sum(map(len, self.names.values())):,} ({'; '.join(kinds)})"


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusFiles:
    """The files of a corpus that are read, sorted by name, and the rest."""

    files: Sequence[CorpusFile]
    left_out: LeftOut

    @property
    def words(self) -> str:
        """The number of files of each kind: "2 JSON lines, 1 text"."""
        kinds = Counter(file.kind.words for file in self.files)
        return ", ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items()))


def named_files(config: DataConfig) -> CorpusFiles:
    """The files of a folder, or the one that is named.

    A file that a pattern or the corpus names is to be read: one of a kind that is not read is
    refused, unless it is an empty one of several. Others of a folder are left out.

    Raises DataError for what cannot be read, for damage at the beginning of a file, and where
    nothing is left to read.
    """
    left_out = LeftOut()
    root = object_stores.path_of(config.corpus)
    if is_file(config, root):
        if not (kind := kind_of(root)).is_read:
            raise not_read(root, kind, is_named=True)
        files = [CorpusFile(root.name, root, kind)]
    else:
        files = sorted(files_in(root, config, left_out))
    if not any(file.path.stat().st_size for file in files):
        for file in files:
            left_out.add(EMPTY, file.name)
        raise nothing(config, root, left_out)
    return CorpusFiles(files=files, left_out=left_out)


def files_in(root: Path, config: DataConfig, left_out: LeftOut) -> Iterator[CorpusFile]:
    """The files of a folder that are read, in any order; the others are counted."""
    paths = list(paths_in(root, config, left_out))
    is_remote = object_stores.is_remote(config.corpus)
    kinds: Iterable[FileKind] = (
        object_stores.each(kind_of, paths, root) if is_remote else map(kind_of, paths)
    )
    for path, kind in zip(paths, kinds, strict=True):
        name = path.relative_to(root).as_posix()
        if kind.is_read:
            yield CorpusFile(name, path, kind)
        elif config.pattern is None or kind.content in (EMPTY, ABOUT_TABLES):
            left_out.add(kind.words, name)
        else:
            raise not_read(path, kind)


def is_file(config: DataConfig, root: Path) -> bool:
    """Tells whether the corpus is one file. Raises DataError if it is not there."""
    try:
        object_stores.ask(root)
        is_there, is_file = root.exists(), root.is_file()
    except object_stores.errors() as error:
        _refuse(error)
    if not is_there:
        fix = f"name a folder, or {PYTHON_STDLIB!r} for a first try"
        raise object_stores.absent(config.corpus, fix)
    return is_file


def kind_of(path: Path) -> FileKind:
    """The kind of a file. Raises DataError for one that cannot be read."""
    try:
        return file_kinds.kind_of(path)
    except object_stores.errors() as error:
        raise unreadable(path, error) from None


def not_read(path: Path, kind: FileKind, *, is_named: bool = False) -> DataError:
    """The refusal of a file of a kind that is not read."""
    fix = "unpack it, or write it as text, JSON lines or parquet"
    fix = "name another file" if kind.content == EMPTY else fix
    fix += "" if is_named else "; or leave it out by data.pattern"
    return DataError(str(path), "is of a kind that is not read", found=kind.words, fix=fix)


def unreadable(path: Path, error: Exception) -> DataError:
    """The refusal of a file that the system does not let read."""
    fix = "make it readable, or leave it out by data.pattern"
    return DataError(str(path), "cannot be read", found=object_stores.said_by(error), fix=fix)


def nothing(config: DataConfig, root: Path, left_out: LeftOut) -> DataError:
    """The refusal of a corpus of which nothing is left to read."""
    if config.pattern is not None:
        fix = "change data.pattern or data.corpus"
        problem = f"no file in {root} matches"
        return DataError("data.pattern", problem, found=config.pattern, fix=fix)
    fix = "name another folder, or use data.source=tokens for files of tokens"
    what = left_out.words
    words = f"nothing but what is not read: {what}" if what else "no file"
    return DataError("data.corpus", f"{root} holds no text", found=words, fix=fix)


def _refuse(error: Exception) -> NoReturn:
    fix, words = "make it readable, or name another folder", error
    raise DataError("data.corpus", "cannot be read", found=words, fix=fix) from None


# ---- folders -----------------------------------------------------------------------------------


def paths_in(root: Path, config: DataConfig, left_out: LeftOut) -> Iterator[Path]:
    """The files of a folder that the pattern matches; without one, all that are not hidden."""
    pattern = () if config.pattern is None else _parts(config.pattern)
    # Nothing but the folder that a pattern begins with is looked through.
    fixed = next((i for i, part in enumerate(pattern[:-1]) if set(part) & set("*?[")), None)
    base = root.joinpath(*pattern[: len(pattern[:-1]) if fixed is None else fixed])
    walk = _objects if object_stores.is_remote(config.corpus) else _walk
    try:
        for path in walk(base, root, config.pattern is None, left_out):
            if not pattern or _matches(path.relative_to(root).parts, pattern):
                yield path
    except object_stores.errors() as error:
        _refuse(error)


def _parts(pattern: str) -> tuple[str, ...]:
    """The parts of a pattern. Raises DataError if it is none."""
    parts = PurePosixPath(pattern).parts
    wrong = next((part for part in parts if part in ("/", "..") or "**" in part != "**"), None)
    if parts and wrong is None:
        return parts
    fix = "write a pattern inside the folder, such as **/*.txt"
    raise DataError("data.pattern", "is no pattern", found=repr(pattern), fix=fix)


def _matches(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Tells whether names of folders and a file match the parts of a pattern.

    >>> _matches(("a", "b", "c.txt"), ("**", "*.txt")), _matches(("a", "c.txt"), ("*.txt",))
    (True, False)
    """
    if not pattern:
        return not names
    if pattern[0] == "**":
        return any(_matches(names[i:], pattern[1:]) for i in range(len(names) + 1))
    is_first = bool(names) and fnmatchcase(names[0], pattern[0])
    return is_first and _matches(names[1:], pattern[1:])


def _objects(base: Path, root: Path, hides: bool, left_out: LeftOut) -> Iterator[Path]:
    """All objects below a place in a store."""
    for path in object_stores.files_below(base):
        name = path.relative_to(root)
        if hides and any(part.startswith(".") for part in name.parts):
            left_out.add(HIDDEN, name.as_posix())
        else:
            yield path


def _walk(base: Path, root: Path, hides: bool, left_out: LeftOut) -> Iterator[Path]:
    """All files below a folder, first those that no link leads to."""
    if not base.is_dir():
        return
    seen: set[Identity] = set()  # folders, and files that a link leads to
    own: set[Identity] = set()  # other files, of which one may have several names
    links: list[Path] = []
    below = lambda folder: _below(folder, root, hides, left_out, seen, own, links)
    yield from below(base)
    for link in links:  # which grows
        name = link.relative_to(root).as_posix()
        try:
            about = link.stat()
        except FileNotFoundError:
            left_out.add("link to what is not there", name)
            continue
        except OSError:  # too many links, or no permission
            left_out.add("link that leads nowhere", name)
            continue
        if _identity(about) in seen | own:
            is_circle = link.parent.resolve().is_relative_to(link.resolve())
            kind = "link in a circle" if is_circle else TWICE
            left_out.add(kind, name)
        elif stat.S_ISDIR(about.st_mode):
            yield from below(link)
        elif stat.S_ISREG(about.st_mode):
            seen.add(_identity(about))
            yield link
        else:
            left_out.add("pipe, socket or device", name)


def _below(
    folder: Path,
    root: Path,
    hides: bool,
    left_out: LeftOut,
    seen: set[Identity],
    files: set[Identity],
    links: list[Path],
) -> Iterator[Path]:
    """The files below a folder, without those behind links, which are added to a list."""
    waiting = [folder]
    while waiting:
        own = waiting.pop()
        identity = _identity(own.stat())
        if identity in seen:  # by a link to what is above it
            left_out.add(TWICE, own.relative_to(root).as_posix())
            continue
        seen.add(identity)
        with os.scandir(own) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                path = own / entry.name
                name = path.relative_to(root).as_posix()
                if entry.name == FOLDER:
                    continue
                if hides and entry.name.startswith("."):
                    left_out.add(HIDDEN, name)
                elif entry.is_symlink():
                    links.append(path)
                elif entry.is_dir():
                    waiting.append(path)
                elif entry.is_file() and _identity(entry.stat()) in seen:
                    left_out.add(TWICE, name)
                elif entry.is_file():
                    files.add(_identity(entry.stat()))
                    yield path
                else:
                    left_out.add("pipe, socket or device", name)


def _identity(about: os.stat_result) -> Identity:
    return about.st_dev, about.st_ino
