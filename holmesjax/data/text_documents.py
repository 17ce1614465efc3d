"""Documents in text, which may be packed: a file, each object of JSON, or each row of a table."""

import codecs
import csv
import io
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from holmesjax.data import compressed_files, object_stores
from holmesjax.data.byte_tokenizer import BEGIN
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
from holmesjax.data.file_kinds import ARRAY, CSV, JSON, LINES, OVER_LINES, TSV, FileKind
from holmesjax.errors import DataError
from holmesjax.files import json_text

MAX_CELL = 2**31 - 1  # characters
SHOWN = 80  # characters of a value in a message


class _Tabs(csv.excel_tab):
    """TSV: no quotes, a tab ends a cell, and a line a row."""

    quoting = csv.QUOTE_NONE


DIALECTS = {CSV: csv.excel, TSV: _Tabs}


def cut(path: Path, kind: FileKind, step: int) -> Iterator[tuple[int, int, int]]:
    """The parts of a file, each with its bytes: ranges of plain lines, or all of it."""
    size = path.stat().st_size
    step = step if kind == FileKind(LINES) else max(size, 1)
    for first in range(0, max(size, 1), step):
        last = min(first + step, size)
        yield first, last, last - first


def read(part: FilePart, kind: FileKind, wanted: Wanted) -> Documents:
    """The documents of a part. Raises DataError for what is no text."""
    path = object_stores.path_of(part.path)
    if kind.content in JSON:
        for where, item in objects(path, kind, part):
            yield where, _field(item, where, wanted.column)
        return
    if kind.content in DIALECTS:
        yield from _rows(path, kind, wanted.column)
        return
    yield part.path, decoded(whole(path, kind, "--pattern"), part.path)


def whole(path: Path, kind: FileKind, option: str) -> bytes:
    """A file of text as UTF-8, without a mark of its encoding. Raises DataError for a binary one.

    `option` is the one by which a user can leave it out.
    """
    with compressed_files.opened(path, kind.packing) as file:
        content = file.read().removeprefix(codecs.BOM_UTF8)
    if (place := content.find(BEGIN)) >= 0:
        found, fix = f"at byte {place:,}", f"leave it out by {option}: it is a binary file"
        raise DataError(str(path), "holds a zero byte", found=found, fix=fix)
    return content


def objects(path: Path, kind: FileKind, part: FilePart | None = None) -> Iterator[tuple[str, Any]]:
    """The values of JSON in a file, each with its place for messages. Raises DataError.

    A part has the plain lines that begin in it. Other JSON is read as a whole.
    """
    if kind.content == ARRAY:
        with compressed_files.opened(path, kind.packing) as file:
            found = from_json(file.read(), str(path))
        yield from ((f"{path}, item {number:,}", document) for number, document in enumerate(found))
        return
    if kind.content == OVER_LINES:
        with compressed_files.opened(path, kind.packing) as file:
            yield from _over_lines(file.read(), str(path))
        return
    for where, line in _lines(path, kind, part):
        if (own := line.removeprefix(codecs.BOM_UTF8)).strip():
            yield where, from_json(own, where)


def _over_lines(content: bytes, path: str) -> Iterator[tuple[str, Any]]:
    found = json_text.values_of(decoded(content.removeprefix(codecs.BOM_UTF8), path))
    for number in itertools.count(1):
        where = f"{path}, object {number:,}"
        try:
            value = next(found, found)
        except ValueError as error:
            fix = "write an object a line"
            raise DataError(where, "is no JSON", found=error, fix=fix) from None
        if value is found:
            return
        yield where, value


def _lines(path: Path, kind: FileKind, part: FilePart | None) -> Iterator[tuple[str, bytes]]:
    with compressed_files.opened(path, kind.packing) as file:
        if kind.packing:
            for number, line in enumerate(file, 1):
                yield f"{path}, line {number:,}", line
            return
        first = part.first if part else 0
        file.seek(max(first - 1, 0))
        if first:
            file.readline()  # of the part before, unless it ends just there
        while part is None or file.tell() < part.last:
            place = file.tell()
            if not (line := file.readline()):
                return
            yield f"{path}, byte {place:,}", line


def from_json(line: bytes, where: str) -> Any:
    """The value of a line of JSON. Raises DataError."""
    try:
        return json_text.value_of(decoded(line.removeprefix(codecs.BOM_UTF8), where))
    except ValueError as error:
        raise DataError(where, "is no JSON", found=error, fix="write an object a line") from None


def _field(found: Any, where: str, column: str) -> str | np.ndarray:
    own = found.get(column) if isinstance(found, dict) else None
    if isinstance(own, list) and all(type(token) is int for token in own):
        for name, value in MASKS.items():
            beside = found.get(name)
            if own and isinstance(beside, list) and value in beside:
                raise masked_beside(where, name, beside.index(value))
        try:
            return np.array(own, np.int64)
        except OverflowError as error:
            fix = "write the numbers of tokens"
            raise DataError(
                where, "holds a number that is no token", found=error, fix=fix
            ) from None
    if isinstance(own, list) and None in own:
        raise null_among(where, column, own.index(None))
    if not isinstance(own, str):
        shown = ", ".join(found) if isinstance(found, dict) else type(found).__name__
        if isinstance(found, dict) and column in found:
            shown = f"{column}: {json.dumps(own)[:SHOWN]}"
        fix = f'write lines as {{"{column}": "..."}}, or name another field by --column'
        problem = f"has no text in a field `{column}`"
        raise DataError(where, problem, found=shown or "{}", fix=fix)
    refuse_half_characters(own, where)
    return own


def _rows(path: Path, kind: FileKind, column: str) -> Iterator[tuple[str, str]]:
    """A column of a table whose first row has the names of columns; CSV is that of RFC 4180."""
    csv.field_size_limit(MAX_CELL)  # a document is a cell
    with compressed_files.opened(path, kind.packing) as file:
        lines = io.TextIOWrapper(file, "utf-8-sig", newline="")
        rows = csv.reader(lines, DIALECTS[kind.content], strict=True)
        names: list[str] | None = None
        opened: tuple[str, str] | None = None  # a row that may be the first line of a cell
        while True:
            try:
                row = next(rows, None)
            except UnicodeError as error:
                raise no_text(f"{path}, behind line {rows.line_num:,}", error) from None
            except csv.Error as error:
                raise damaged(f"{path}, line {rows.line_num:,}", kind.content, error) from None
            if row is None:
                return
            where = f"{path}, row that ends at line {rows.line_num:,}"
            if not row:  # an empty line
                continue
            if names is None:
                names = row
                if names.count(column) != 1:
                    many = "has several columns" if column in names else "has no column"
                    fix = "name another column by --column, or leave the file out by --pattern"
                    found = ", ".join(names)
                    raise DataError(str(path), f"{many} `{column}`", found=found, fix=fix)
                continue
            if len(row) != len(names):
                problem = f"has another number of cells than the {len(names)} names of columns"
                fix = "put cells with commas and quotes into quotes, and double those inside"
                raise DataError(where, problem, found=len(row), fix=fix)
            cell = row[names.index(column)]
            if kind.content == TSV and (begun := opened if _closes(cell) else None):
                where, cell = begun
            if kind.content == TSV and (begun or _is_quoted(cell)):
                problem = "has a cell in quotes, which TSV does not have"
                fix = "name the file .csv and write commas, or write JSON lines"
                raise DataError(where, problem, found=cell[:SHOWN], fix=fix)
            if len(names) == 1 and cell.startswith('"') and cell.count('"') % 2:
                opened = where, cell
            yield where, cell


def _is_quoted(cell: str) -> bool:
    """Tells whether a writer of CSV has put a cell into quotes: it has doubled those inside."""
    inside = cell[1:-1]
    is_doubled = '""' in inside and '"' not in inside.replace('""', "")
    return len(cell) > 1 and cell[0] == cell[-1] == '"' and is_doubled


def _closes(cell: str) -> bool:
    """Tells whether a line may be the last one of a cell in quotes that an earlier one has opened.

    Speech that goes on in the next line opens with quotes there, too.
    """
    return cell.endswith('"') and cell[0] != '"' and cell.count('"') % 2 == 1


def refuse_half_characters(text: str, where: str) -> None:
    """Raises DataError for a text with halves of pairs of UTF-16, which JSON may spell."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        fix = "write whole characters"
        raise DataError(where, "holds half a character", found=error, fix=fix) from None
