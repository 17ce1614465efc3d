"""Documents in rows: columns of parquet files and of Hugging Face datasets, and array_record.

Each is read by the library that owns it, some rows at a time.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from holmesjax.data import file_kinds, object_stores, optional_packages
from holmesjax.data.documents import (
    MASKS,
    Documents,
    FilePart,
    Wanted,
    damaged,
    decoded,
    masked_beside,
    no_text,
    null_among,
)
from holmesjax.errors import DataError
from holmesjax.files import json_text, regular_files

ROWS = 256  # read at once
STATE, SPLITS = "state.json", "dataset_dict.json"  # of folders that `datasets` wrote
ARROW_FILE = b"ARROW1"  # what a file of batches begins with, and a stream does not
END = b"\xff\xff\xff\xff\0\0\0\0"  # of an Arrow stream

Parts = Iterator[tuple[int, int, int]]  # the ranges of a file's parts, each with its bytes


# ---- parquet -----------------------------------------------------------------------------------


def cut_parquet(path: Path, step: int) -> Parts:
    """Yields each row group, the smallest part that can be read by itself."""
    del step
    with object_stores.open_file(path) as file:
        about = _parquet(path, file).metadata
        for group in range(about.num_row_groups):
            yield group, group + 1, about.row_group(group).total_byte_size


def read_parquet(part: FilePart, wanted: Wanted) -> Documents:
    """The documents of row groups."""
    path = object_stores.path_of(part.path)
    with object_stores.open_file(path) as file:
        parquet = _parquet(path, file)
        _refuse_no_column(part.path, wanted.column, parquet.schema_arrow)
        first = sum(parquet.metadata.row_group(group).num_rows for group in range(part.first))
        for group in range(part.first, part.last):
            names = [wanted.column, *_masks(wanted.column, parquet.schema_arrow)]
            batches = parquet.iter_batches(ROWS, row_groups=[group], columns=names)
            while True:
                try:
                    batch = next(batches, None)
                except Exception as error:  # of any class, by what is damaged
                    where = f"{part.path}, row group {group}"
                    raise damaged(where, "row group", error) from None
                if batch is None:
                    break
                # By their names: `a.b` may be a field of `a`.
                yield from _column(batch, part.path, first, wanted.column)
                first += batch.num_rows


def _parquet(path: Path, file: Any) -> Any:
    with optional_packages.package("pyarrow", extra="hf", where=str(path)):
        import pyarrow
        from pyarrow import parquet
    try:
        return parquet.ParquetFile(file, page_checksum_verification=True)
    except (pyarrow.ArrowException, OSError) as error:
        raise damaged(str(path), "parquet file", error) from None


# ---- datasets of Hugging Face ------------------------------------------------------------------


def is_hugging_face(path: Path) -> bool:
    """Tells whether a folder is a dataset, or has one for each split, as `datasets` writes it."""
    return (path / STATE).is_file() or _is_split(path)


def _is_split(path: Path) -> bool:
    """Tells whether a folder has a dataset for each split."""
    return (path / SPLITS).is_file()


def cut_hugging_face(path: Path, step: int) -> Parts:
    """Ranges of rows of about so many bytes."""
    if not _is_split(path) and not _arrows(path):
        return  # `datasets` writes no file for no rows, and does not open that again
    num_rows, size = len(_dataset(path)), sum(file.stat().st_size for file in _arrows(path))
    rows = max(1, num_rows * step // max(size, 1))
    for first in range(0, num_rows, rows):
        last = min(first + rows, num_rows)
        yield first, last, (last - first) * size // num_rows


def read_hugging_face(part: FilePart, wanted: Wanted) -> Documents:
    """The documents of rows."""
    dataset = _dataset(Path(part.path)).with_format("arrow")
    _refuse_no_column(part.path, wanted.column, dataset.features.arrow_schema)
    masks = _masks(wanted.column, dataset.features.arrow_schema)
    dataset = dataset.select_columns([wanted.column, *masks])
    for first in range(part.first, part.last, ROWS):
        table = dataset[first : min(first + ROWS, part.last)]
        yield from _column(table, part.path, first, wanted.column)


def _dataset(path: Path) -> Any:
    """Opens a dataset, of which it reads no rows."""
    if object_stores.is_remote(path):
        fix = "copy the folder here, or write parquet files"
        raise DataError(str(path), "cannot be read in a store", found="a dataset", fix=fix)
    if _is_split(path):
        try:
            names = list(map(str, json_text.read(path / SPLITS)["splits"]))
        except (ValueError, KeyError, TypeError) as error:
            raise damaged(str(path / SPLITS), "list of splits", error) from None
        fix = f"name one of them: {path / names[0]}" if names else "copy it again"
        raise DataError(str(path), "has several splits", found=", ".join(names), fix=fix)
    for file in _arrows(path):
        with regular_files.open_file(file) as content:
            _refuse_cut_off(content, str(file))
    with optional_packages.package("datasets", extra="hf", where=str(path)):
        import datasets
        import pyarrow
    try:
        return datasets.load_from_disk(str(path))
    except (pyarrow.ArrowException, OSError, ValueError, KeyError) as error:
        raise damaged(str(path), "dataset of Hugging Face", error) from None


def _arrows(path: Path) -> list[Path]:
    """The files of rows. Raises DataError if one is missing."""
    try:
        said = json_text.read(path / STATE)
        files = [path / entry["filename"] for entry in said["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(str(path / STATE), "list of files", error) from None
    for file in files:
        if not file.is_file():
            problem, fix = "is missing", "copy the whole folder again"
            raise DataError(str(file), problem, found=f"named by {STATE}", fix=fix)
    return files


# ---- Arrow -------------------------------------------------------------------------------------


def cut_arrow(path: Path, step: int) -> Parts:
    """All of a file. Raises DataError for one of a dataset, whose folder says which rows it has."""
    del step
    if is_hugging_face(path.parent):
        fix = "name the folder of the dataset, or leave it out by --pattern"
        raise DataError(str(path), "is a part of a dataset", found="an Arrow file", fix=fix)
    yield 0, 1, path.stat().st_size


def read_arrow(part: FilePart, wanted: Wanted) -> Documents:
    """The documents of a file of batches, or of a stream of them in a file."""
    path = object_stores.path_of(part.path)
    with optional_packages.package("pyarrow", extra="hf", where=str(path)):
        import pyarrow
    with object_stores.open_file(path) as file:
        is_file = file.read(len(ARROW_FILE)) == ARROW_FILE
        if not is_file:
            _refuse_cut_off(file, part.path)
        file.seek(0)
        first = 0
        try:
            reader = pyarrow.ipc.open_file(file) if is_file else pyarrow.ipc.open_stream(file)
            _refuse_no_column(part.path, wanted.column, reader.schema)
            batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
            for batch in batches:
                yield from _column(batch, part.path, first, wanted.column)
                first += batch.num_rows
        except (pyarrow.ArrowException, OSError) as error:
            raise damaged(part.path, "Arrow file", error) from None


def _refuse_cut_off(file: IO[bytes], where: str) -> None:
    """Raises DataError for a stream of Arrow without its end, of which its reader says nothing."""
    size = file.seek(0, 2)
    file.seek(max(size - len(END), 0))
    if file.read() != END:
        raise damaged(where, "Arrow stream", f"it is cut off at byte {size:,}")


# ---- array_record ------------------------------------------------------------------------------


def cut_array_record(path: Path, step: int) -> Parts:
    """Ranges of records of about so many bytes."""
    num_records, size = _reader(path).num_records(), path.stat().st_size
    records = max(1, num_records * step // size)
    for first in range(0, num_records, records):
        last = min(first + records, num_records)
        yield first, last, (last - first) * size // num_records


def read_array_record(part: FilePart, wanted: Wanted) -> Documents:
    """The documents of records, which are text or numbers."""
    reader = _reader(Path(part.path))
    for first in range(part.first, part.last, ROWS):
        last = min(first + ROWS, part.last)
        try:
            records = reader.read(first, last)
        except RuntimeError as error:
            where = f"{part.path}, records {first:,} to {last - 1:,}"
            raise damaged(where, "part of an array_record file", error) from None
        if wanted.dtype and file_kinds.is_surely_text(b"".join(records)):
            where = f"{part.path}, records {first:,} to {last - 1:,}"
            fix = "leave --dtype out"
            raise DataError(where, "are text", found=f"--dtype {wanted.dtype}", fix=fix)
        for number, record in enumerate(records, first):
            where = f"{part.path}, record {number:,}"
            yield where, _record(record, where, wanted.dtype)


def _record(record: bytes, where: str, dtype: str | None) -> str | np.ndarray:
    if dtype is None:
        return decoded(record, where)
    kind = np.dtype(dtype).newbyteorder("<")
    if len(record) % kind.itemsize:
        problem, fix = f"holds no numbers of {dtype}", "name another --dtype"
        raise DataError(where, problem, found=f"{len(record):,} bytes", fix=fix)
    return np.frombuffer(record, kind)


def _reader(path: Path) -> Any:
    if object_stores.is_remote(path):
        fix = "copy the file here"
        raise DataError(str(path), "cannot be read in a store", found="array_record", fix=fix)
    with optional_packages.package("array_record", extra="array_record", where=str(path)):
        from array_record.python import array_record_module
    # Without reading ahead, which makes reading by ranges slow.
    reader = array_record_module.ArrayRecordReader(str(path), options="readahead_buffer_size:0")
    if not reader.ok():  # the only sign: the number of records of a file that was cut off is 0
        size = f"{path.stat().st_size:,} bytes, and no index of records at their end"
        raise damaged(str(path), "array_record file", size)
    return reader


# ---- columns -----------------------------------------------------------------------------------


def _refuse_no_column(where: str, column: str, schema: Any) -> None:
    import pyarrow

    types = pyarrow.types
    texts = (types.is_string, types.is_large_string, types.is_string_view)
    lists = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    if schema.names.count(column) == 1:
        kind = schema.field(column).type
        is_list = any(is_one(kind) for is_one in lists)
        text = kind.value_type if types.is_dictionary(kind) else kind
        if any(is_one(text) for is_one in texts):
            return
        if is_list and types.is_integer(kind.value_type):
            return
    found = ", ".join(f"{field.name}: {field.type}" for field in schema)
    many = "has several columns" if schema.names.count(column) > 1 else "has no column"
    problem = f"{many} `{column}` of text, or of lists of integers"
    raise DataError(where, problem, found=found, fix="name another by --column")


def _masks(column: str, schema: Any) -> list[str]:
    """The columns beside one of tokens that say which of them count."""
    import pyarrow

    types = pyarrow.types
    kind = lambda name: schema.field(name).type
    lists = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    is_list = lambda name: any(is_kind(kind(name)) for is_kind in lists)
    is_one = lambda name: schema.names.count(name) == 1 and is_list(name) and name != column
    return list(filter(is_one, MASKS)) if is_list(column) else []


def _column(table: Any, path: str, first: int, name: str) -> Documents:
    """The documents of some rows. Raises DataError for tokens that another column leaves out."""
    masks = {mask: table.column(mask) for mask in _masks(name, table.schema)}
    for row, value in enumerate(table.column(name), first):
        where = f"{path}, row {row:,}"
        for mask, values in masks.items():
            if (own := values[row - first]).is_valid and len(own):
                is_out = own.values.to_numpy(zero_copy_only=False) == MASKS[mask]
                if is_out.any():
                    raise masked_beside(where, mask, int(np.argmax(is_out)))
        if value.is_valid and hasattr(value, "values"):
            if value.values.null_count:
                place = int(np.argmax(value.values.is_null().to_numpy(zero_copy_only=False)))
                raise null_among(where, name, place)
            yield where, value.values.to_numpy(zero_copy_only=False)
            continue
        try:
            document = value.as_py()
        except UnicodeDecodeError as error:
            raise no_text(where, error) from None
        if document is None:  # also a null that a dictionary holds
            fix = "leave such rows out"
            raise DataError(where, f"has nothing in `{name}`", found="null", fix=fix)
        yield where, document
