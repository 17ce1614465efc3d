"""The formats in which a corpus may have its documents: how each is known, cut and read."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from holmesjax.config import PYTHON_STDLIB, DataConfig
from holmesjax.data import corpus as corpora, row_documents as rows, stores, text_documents as texts
from holmesjax.data.documents import Documents, FilePart, Wanted


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """A format of files, or of folders that count as one."""

    is_of: Callable[[Path], bool]
    # The ranges of the parts that hold about so many bytes, if they can, each with its bytes.
    cut: Callable[[Path, int], Iterator[tuple[int, int, int]]]
    read: Callable[[FilePart, Wanted], Documents]


FORMATS = (  # the first that fits
    Format(
        is_of=lambda path: path.suffix == rows.PARQUET,
        cut=rows.cut_parquet,
        read=rows.read_parquet,
    ),
    Format(
        is_of=lambda path: path.suffix in rows.ARRAY_RECORD,
        cut=rows.cut_array_record,
        read=rows.read_array_record,
    ),
    Format(
        is_of=lambda path: path.is_dir(), cut=rows.cut_hugging_face, read=rows.read_hugging_face
    ),
    Format(
        is_of=lambda path: path.suffix == rows.ARROW,
        cut=rows.refuse_arrow,
        read=rows.read_hugging_face,
    ),
    Format(is_of=lambda path: True, cut=texts.cut, read=texts.read),
)


def files(config: DataConfig) -> list[Path]:
    """The files of a corpus in the order of their names, or its folder, where that is a dataset."""
    if config.corpus == PYTHON_STDLIB:
        return list(corpora.files(config).values())
    path = stores.path_of(config.corpus)
    stores.ask(path)
    if path.is_file() or rows.is_hugging_face(path):
        return [path]
    return list(corpora.files(config).values())


def cut(path: Path, step: int) -> Iterator[tuple[FilePart, int]]:
    """The parts of a file, each with its bytes; about so many, where the format allows it."""
    for first, last, num_bytes in _format_of(path).cut(path, step):
        yield FilePart(str(path), first, last), num_bytes


def read(part: FilePart, wanted: Wanted) -> Documents:
    """The documents of a part. Raises DataError for what is damaged, with its place."""
    return _format_of(stores.path_of(part.path)).read(part, wanted)


def _format_of(path: Path) -> Format:
    return next(own for own in FORMATS if own.is_of(path))
