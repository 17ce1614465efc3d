"""The formats in which a corpus may have its documents: how each is cut and read."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from holmesjax.config import PYTHON_STDLIB, DataConfig
from holmesjax.data import (
    corpus as corpora,
    corpus_files,
    file_kinds,
    object_stores,
    row_documents as rows,
    text_documents as texts,
)
from holmesjax.data.corpus_files import CorpusFile, CorpusFiles, LeftOut
from holmesjax.data.documents import Documents, FilePart, Wanted
from holmesjax.data.file_kinds import FileKind

DATASET = FileKind("dataset of Hugging Face")  # a folder that counts as a file


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """A format of files of rows, or of folders that count as one."""

    # The ranges of the parts that hold about so many bytes, if they can, each with its bytes.
    cut: Callable[[Path, int], Iterator[tuple[int, int, int]]]
    read: Callable[[FilePart, Wanted], Documents]


ROWS = {
    file_kinds.PARQUET: Format(cut=rows.cut_parquet, read=rows.read_parquet),
    file_kinds.ARRAY_RECORD: Format(cut=rows.cut_array_record, read=rows.read_array_record),
    file_kinds.ARROW: Format(cut=rows.cut_arrow, read=rows.read_arrow),
    DATASET.content: Format(cut=rows.cut_hugging_face, read=rows.read_hugging_face),
}


def corpus_of(config: DataConfig) -> CorpusFiles:
    """The files of a corpus, sorted by name, or its folder, where that is a dataset."""
    if config.corpus == PYTHON_STDLIB:
        return CorpusFiles(files=corpora.standard_library(), left_out=LeftOut())
    path = object_stores.path_of(config.corpus)
    if not corpus_files.is_file(config, path) and rows.is_hugging_face(path):
        return CorpusFiles(files=[CorpusFile(path.name, path, DATASET)], left_out=LeftOut())
    return corpus_files.named_files(config)


def cut(path: Path, step: int) -> Iterator[tuple[FilePart, int]]:
    """The parts of a file, each with its bytes; about so many, where the format allows it."""
    kind = _kind_of(path)
    own = ROWS.get(kind.content)
    ranges = own.cut(path, step) if own else texts.cut(path, kind, step)
    for first, last, num_bytes in ranges:
        yield FilePart(str(path), first, last), num_bytes


def read(part: FilePart, wanted: Wanted) -> Documents:
    """The documents of a part. Raises DataError for what is damaged, with its place."""
    kind = _kind_of(object_stores.path_of(part.path))
    own = ROWS.get(kind.content)
    return own.read(part, wanted) if own else texts.read(part, kind, wanted)


def _kind_of(path: Path) -> FileKind:
    return DATASET if path.is_dir() else corpus_files.kind_of(path)
