"""The files of a corpus: which there are, what each holds, and what is left out.

Links are followed once: a file or a folder that is reached twice is read under the first name, its
own before that of a link. What is not read is counted by its kind, so that a run can say so.
"""

import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import NamedTuple, NoReturn

from holmesjax import hub_names
from holmesjax.config import PYTHON_STDLIB, DataConfig
from holmesjax.data import compressed_files, file_kinds, object_stores
from holmesjax.data.file_kinds import ABOUT_TABLES, EMPTY, TEXT, FileKind
from holmesjax.data.whole_digests import FOLDER
from holmesjax.errors import DataError

HIDDEN, TWICE = "hidden file or folder", "another name of what is read"
Identity = tuple[int, int]  # of a file or a folder, whatever its names
ABOUT_ROWS = "about the rows beside it"
NAMES_ABOUT = ("readme", "license", "licence", "notice")  # of such texts, whatever their ending
# JSON about rows, of `datasets`, and what its `map` and `filter` have kept of the rows beside it.
DATASET_INFO = "dataset_info.json"
DATASET_ABOUT = (DATASET_INFO, "dataset_infos.json", "dataset_dict.json")
CACHE = re.compile(r"cache-[0-9a-f]{16}(_\d+_of_\d+)?\.arrow")
CACHED = "rows that datasets has made of those beside it"
UNFINISHED, OF_HADOOP = "unfinished output of Hadoop", "_temporary"  # of it or Spark
COPIED = re.compile(r" \(\d+\)|\.(\d+|bak|old|orig)$|~$")  # of browsers, wget and editors
HALF = (".part", ".partial", ".filepart", ".crdownload", ".download", ".incomplete")
DIGITS = re.compile(r"\d+")
TRAINING = re.compile(r"(?<![a-z])train(?![a-z])")
OTHER_SPLIT = re.compile(r"(?<![a-z])(test(ing)?|val(id(ation)?)?|dev|eval(uation)?)(?![a-z])")
NAMED = 3  # names of a kind in a message
UNLIKE = 6  # names of files that are unlike most


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
        """The number of files of each kind: "2 JSON lines, 1 text", and which are unlike most."""
        kinds = Counter(file.kind.words for file in self.files)
        counts = ", ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items()))
        return "; ".join(filter(None, [counts, remarks([file.name for file in self.files])]))


def remarks(names: Sequence[str]) -> str:
    """The names of files that are read, and perhaps should not be, in words; empty: none."""
    return "; ".join(filter(None, [unlike_most(names), doubtful(names)]))


def doubtful(names: Sequence[str]) -> str:
    """The same of files that all have documents."""
    found = (of_one_name(names), of_other_splits(names), half_downloads(names))
    return "; ".join(filter(None, found))


def with_remarks(left_out: str, found: str) -> str:
    """Words on what is left out, with remarks on what is read; empty: there are neither."""
    return "; ".join(filter(None, [left_out or (found and "nothing"), found]))


def of_one_name(names: Sequence[str]) -> str:
    """The files that differ in their endings or the mark of a copy alone, in words.

    >>> of_one_name(["a.jsonl", "a.jsonl.zst", "b.jsonl", "b (1).jsonl", "part.1", "part.2"])
    'of one name, perhaps of one content: a.jsonl, a.jsonl.zst, b (1).jsonl, b.jsonl'
    """
    by_stem: dict[str, list[str]] = {}
    there = {*names}
    for name in names:
        copied = COPIED.sub("", name)
        stem = PurePosixPath(compressed_files.without_endings(copied if copied in there else name))
        is_row = stem.suffix in file_kinds.PROMISES
        by_stem.setdefault(str(stem.with_suffix("") if is_row else stem), []).append(name)
    shown = _shown([name for alike in by_stem.values() if len(alike) > 1 for name in sorted(alike)])
    return f"of one name, perhaps of one content: {shown}" if shown else ""


def half_downloads(names: Iterable[str]) -> str:
    """The files that by their names are not whole yet, in words."""
    shown = _shown([name for name in names if name.lower().endswith(HALF)])
    return f"half downloads, by their names: {shown}" if shown else ""


def of_other_splits(names: Iterable[str]) -> str:
    """The files that beside others for training are for tests, by their names, in words.

    >>> of_other_splits(["train-0000.jsonl", "train-0001.jsonl", "test-0000.jsonl", "b.jsonl"])
    'read beside files for training: test-0000.jsonl'
    """
    by_form = {name: DIGITS.sub("0", name.lower()).replace("training", "train") for name in names}
    forms = {form for form in by_form.values() if TRAINING.search(form)}
    in_training = {name: OTHER_SPLIT.sub("train", form) for name, form in by_form.items()}
    shown = _shown([n for n, form in in_training.items() if form in forms and form != by_form[n]])
    return f"read beside files for training: {shown}" if shown else ""


def _shown(names: Sequence[str]) -> str:
    more = f", and {len(names) - UNLIKE:,} more" if len(names) > UNLIKE else ""
    return ", ".join(names[:UNLIKE]) + more


def unlike_most(names: Iterable[str]) -> str:
    """The files that have another ending than most, in words; empty: none is that of most.

    Such a file is often no document, as one that a program left, and nothing but its name says so.

    >>> unlike_most(["a.txt", "b.txt", "README.md"])
    'most names end in .txt; also read: README.md'
    >>> unlike_most(["part.0001", "part.0002"])
    ''
    """
    by_ending: dict[str, list[str]] = {}
    for name in names:
        ending = PurePosixPath(compressed_files.without_endings(name)).suffix
        by_ending.setdefault(ending, []).append(name)
    if len(by_ending) < 2:
        return ""
    *rare, most = sorted(by_ending.items(), key=lambda row: (len(row[1]), row[0]))
    others = [name for _, alike in rare for name in sorted(alike)]
    if len(others) >= len(most[1]):
        return ""
    ending = f"end in {most[0]}" if most[0] else "have no ending"
    return f"most names {ending}; also read: {_shown(others)}"


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
        if any(file.kind.content != TEXT for file in files):
            files = _documents(files, left_out, is_picked=config.pattern is not None)
    if not any(file.path.stat().st_size for file in files):
        for file in files:
            left_out.add(EMPTY, file.name)
        raise nothing(config, root, left_out)
    return CorpusFiles(files=files, left_out=left_out)


def _documents(
    files: Iterable[CorpusFile], left_out: LeftOut, *, is_picked: bool
) -> list[CorpusFile]:
    """The files with documents; those whose names say that they are about them are counted."""
    found = []
    for file in files:
        name, is_text = file.path.name, file.kind.content == TEXT
        stem = name.lower().partition(".")[0]
        is_about = stem in NAMES_ABOUT if is_text else name in DATASET_ABOUT
        if is_about and not is_picked:
            left_out.add(ABOUT_ROWS, file.name)
        elif CACHE.fullmatch(name) and file.path.with_name(DATASET_INFO).is_file():
            left_out.add(CACHED, file.name)
        else:
            found.append(file)
    return found


def files_in(root: Path, config: DataConfig, left_out: LeftOut) -> Iterator[CorpusFile]:
    """The files of a folder that are read, in any order; the others are counted."""
    _refuse_cache_of_hub(root, config)
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


def _refuse_cache_of_hub(root: Path, config: DataConfig) -> None:
    """Raises DataError for a folder that has every version of its files, and some twice."""
    if config.pattern is not None or object_stores.is_remote(config.corpus):
        return
    if (snapshot := hub_names.snapshot_of(root)) is not None:
        problem = f"{root} is a folder of the Hub's cache, with versions of the same files"
        fix, found = f"name one of them: {snapshot}", "blobs, refs, snapshots"
        raise DataError("data.corpus", problem, found=found, fix=fix)


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
        elif hides and OF_HADOOP in name.parts:
            left_out.add(UNFINISHED, name.as_posix())
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
                elif hides and entry.name == OF_HADOOP:
                    left_out.add(UNFINISHED, name)
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
