"""The kinds of files, by their first bytes. Every source and every verb asks here.

The bytes decide. The ending of a name is a hint, which counts where bytes could be anything: a file
`.parquet` that is not one is a damaged parquet file, what is no JSON in a file `.jsonl` or `.json`
is a mistake, and text in a file `.csv` or `.tsv` is a table.
"""

import codecs
import contextlib
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from holmesjax.data import compressed_files, object_stores
from holmesjax.data.compressed_files import Packing
from holmesjax.data.documents import damaged
from holmesjax.errors import DataError
from holmesjax.files import json_text

HEAD_BYTES = 2**16
# What is read. A name in any other words is a kind that is not read.
TEXT, LINES, ARRAY = "text", "JSON lines", "JSON array"
OVER_LINES = "JSON over several lines"  # one object or more, each over several lines
JSON = (LINES, ARRAY, OVER_LINES)
CSV, TSV = "CSV table", "TSV table"  # whose first row has the names of columns
PARQUET, ARROW, ARRAY_RECORD = "parquet file", "Arrow file", "array_record file"
READ = (TEXT, *JSON, CSV, TSV, PARQUET, ARROW, ARRAY_RECORD)
BINARY, UTF_16 = "binary file", "UTF-16 without a mark"
EMPTY = "empty file"  # without an ending, such as the `_SUCCESS` of Spark: no document
TABLES_ABOUT = ("_metadata", "_common_metadata")  # parquet files about the others of a folder
ABOUT_TABLES = "metadata of parquet files"
OTHER_JSON = "JSON without an object in a line"  # arrays of texts, rows in arrays, texts
POINTER = "pointer of Git LFS"  # in place of a large file
TAGGED = "documents between tags"  # of WikiExtractor, TREC and MediaWiki; as text all would be one

MAGIC = {
    b"PAR1": PARQUET,
    b"ARROW1\0\0": ARROW,
    b"\x83\xaf\x70\xd1\x0d\x88\x4a\x3f": ARRAY_RECORD,
    **dict.fromkeys((b"PK\x03\x04", b"PK\x05\x06"), "zip archive"),
    b"7z\xbc\xaf\x27\x1c": "7z archive",
    b"Rar!\x1a\x07": "rar archive",
    b"\x04\x22\x4d\x18": "lz4 file",
    b"\xff\x06\0\0sNaPpY": "snappy file",
    b"\x1f\x9d\x90": "compress file",  # with codes of 16 bits, as `compress` writes them
    b"%PDF-": "PDF file",
    b"\x89HDF\r\n": "HDF5 file",
    b"SQLite format 3\0": "SQLite file",
    b"\x93NUMPY": "NumPy file",
    b"Obj\x01": "Avro file",
    b"GGUF": "GGUF file",
    b"LITPKDS": "packed file of LitGPT",
    b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.": "PyTorch file",  # of old; a new one is a zip
    **dict.fromkeys((b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a"), "picture"),
}
SHORT = tuple(mark for mark in MAGIC if len(mark) < 4)
WARC = re.compile(rb"WARC/\d\.\d\r?\n")
SAFETENSORS = re.compile(rb".{4}\0{4}\{\s*\"", re.DOTALL)  # the length of a header in JSON, and it
# Lists and arrays, by the protocols of Python 3 and the older ones.
PICKLE = re.compile(rb"\x80(?:[\4\5]\x95.{4}\0{4}|[\2\3](?:[\]}]q\0|cnumpy))", re.DOTALL)
TAGS = re.compile(rb"\s*<(?:(?:doc|DOC) id=\"|DOC>\s*<DOC(?:NO|ID)>|mediawiki\s)")
SEQUENCE = b"\x1e{"  # RFC 7464
POINTED = re.compile(rb"version https://git-lfs\.github\.com/spec/.*\noid sha256:", re.DOTALL)
POINTER_BYTES = 1024  # at most, by the specification of Git LFS
CONTROL = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")  # in no text
STREAM = re.compile(rb"\xff{4}.{3}\0.\0\0\0", re.DOTALL)  # of Arrow: a mark and two lengths
TAR_AT, TAR = 257, b"ustar"
PROMISES = {
    **dict.fromkeys((".jsonl", ".ndjson", ".jsonlines", ".json"), LINES),
    ".csv": CSV,
    ".tsv": TSV,
    ".parquet": PARQUET,
    ".arrow": ARROW,
    **dict.fromkeys((".array_record", ".arrayrecord"), ARRAY_RECORD),
}
DECODER = json.JSONDecoder()
KEY = rb'\{[ \t\r]*"(?:[^"\\]|\\.)*"[ \t\r]*:'  # the first of an object, in its line
OBJECT = re.compile(rb"\s*" + KEY)
OBJECT_OVER_LINES = re.compile(rb"\s*" + KEY.replace(rb"[ \t\r]", rb"\s"))
# What a file `.json` begins with, if it is JSON and whole.
BEGINNINGS = {
    re.compile(rb"\s*\[\s*\{"): ARRAY,
    re.compile(rb"\s*[\[\"\x1e]"): OTHER_JSON,
    re.compile(rb"\s*\{"): OVER_LINES,
}
OBJECTS = re.compile(rb"\s*\[" + OBJECT_OVER_LINES.pattern)


class FileKind(NamedTuple):
    """The content of a file."""

    content: str  # a name of `READ`, or another one for what is not read
    packing: Packing = ()

    @property
    def is_read(self) -> bool:
        return self.content in READ

    @property
    def words(self) -> str:
        """The kind in words for messages.

        >>> FileKind(LINES, ("gzip",)).words
        'JSON lines in gzip'
        """
        return " in ".join((self.content, *reversed(self.packing)))


def kind_of(path: Path) -> FileKind:
    """The kind of a file; reads its beginning.

    Raises DataError for a file whose beginning is damaged, or that is not what its name promises.
    """
    packing: Packing = ()
    while True:
        with compressed_files.opened(path, packing, cache="none") as file:
            head = _head(file)
        inner = compressed_files.packing_of(head)
        if inner is None or len(packing) == compressed_files.DEEPEST:
            break
        packing += (inner,)
    content = _content(head, is_whole=len(head) < HEAD_BYTES)
    ending = Path(compressed_files.without_endings(path.name)).suffix
    if content == EMPTY and ending:
        content = TEXT  # such as `__init__.py`: a document without a word
    promise = PROMISES.get(ending)
    wanted = compressed_files.promised(path.name)
    if content == POINTER and (promise or wanted):
        problem, fix = "is a pointer in place of the file", "bring the file: git lfs pull"
        raise DataError(str(path), problem, found=content, fix=fix)
    if content == TEXT and ending == ".json":
        start = head.removeprefix(codecs.BOM_UTF8)
        content = next((kind for line, kind in BEGINNINGS.items() if line.match(start)), content)
    if content not in (TEXT, BINARY, EMPTY):
        promise = None
    if wanted and not packing and content in (TEXT, BINARY, EMPTY):
        found = f"it begins with {head[:8]!r}" if head else "it is empty"
        raise damaged(str(path), f"{wanted} file", found)
    if promise and (content == TEXT or promise not in (LINES, CSV, TSV)):
        content = promise
    if content == PARQUET and path.name in TABLES_ABOUT:
        content = ABOUT_TABLES
    if packing and content in (PARQUET, ARROW, ARRAY_RECORD):
        content = f"compressed {content}"
    return FileKind(content, packing)


def other_than_numbers(path: Path) -> str | None:
    """The kind of a file that is no array of numbers, whatever its name says; None: it may be one.

    Numbers may begin with any bytes, so marks of two or three are not enough: gzip must unpack, and
    text must be text to the end of what is read.
    """
    with object_stores.open_file(path) as file:
        head = _head(file)
    packing = compressed_files.packing_of(head)
    if packing == "gzip" and compressed_files.is_surely_gzip(head):
        return "gzip file"
    if packing in compressed_files.ENCODINGS and is_surely_text(head, packing):
        return f"text in {packing}"
    if packing not in (None, "gzip", *compressed_files.ENCODINGS):
        return f"{packing} file"
    if head.startswith(SHORT):
        return None
    content = _content(head, is_whole=len(head) < HEAD_BYTES)
    is_other = is_surely_text(head) if content == TEXT else content not in (BINARY, EMPTY, UTF_16)
    return content if is_other else None


def is_surely_text(content: bytes, encoding: str = "utf-8") -> bool:
    """Tells whether bytes are text without control characters; the last character may be cut.

    Tokens of a type of two bytes or more are that by chance in none of the files of some hundred.
    """
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(content)
    except UnicodeError:
        return False
    return bool(text) and not CONTROL.search(text)


def _head(file: Any) -> bytes:
    """The first bytes; a file may give fewer at a time."""
    head = b""
    while len(head) < HEAD_BYTES and (more := file.read(HEAD_BYTES - len(head))):
        head += more
    return head


def _content(head: bytes, *, is_whole: bool) -> str:
    """The content that the first bytes show, or all bytes of a short file."""
    if not head:
        return EMPTY
    for mark, name in MAGIC.items():
        if head.startswith(mark):
            return name
    if WARC.match(head):
        return "WARC archive"
    if SAFETENSORS.match(head):
        return "safetensors file"
    if PICKLE.match(head):
        return "pickle of Python"
    if is_whole and len(head) <= POINTER_BYTES and POINTED.match(head):
        return POINTER
    if STREAM.match(head):
        return ARROW
    if head[TAR_AT:].startswith(TAR):
        return "tar archive"
    if b"\0" in head:
        # Text of UTF-16 has a zero byte in every second place, as far as it is English.
        is_of_both = head[::2].count(0) and head[1::2].count(0)
        is_rare = 4 * head.count(0) < len(head) or len(head) < 4
        return BINARY if is_of_both or is_rare else UTF_16
    if _is_lines(head, is_whole=is_whole):
        return LINES
    if TAGS.match(head):
        return TAGGED
    if head.startswith(SEQUENCE) or _is_arrays(head):
        return OTHER_JSON
    if _is_array(head, is_whole=is_whole):
        return ARRAY
    return OVER_LINES if _is_over_lines(head, is_whole=is_whole) else TEXT


def _is_lines(head: bytes, *, is_whole: bool) -> bool:
    """Tells whether the first line begins with an object of JSON, or with one longer than the head.

    More behind the object is a mistake in lines, to be named when they are read.
    """
    head = head.removeprefix(codecs.BOM_UTF8).lstrip()
    line, newline, _ = head.partition(b"\n")
    if not newline and not is_whole:
        return OBJECT.match(line) is not None
    with contextlib.suppress(ValueError, RecursionError):
        found, _ = DECODER.raw_decode(line.decode())
        return isinstance(found, dict) and (bool(found) or line.strip() == b"{}")
    return False


def _is_arrays(head: bytes) -> bool:
    """Tells whether it is lines, each an array of objects."""
    return OBJECTS.match(_behind_array(head)) is not None


def _behind_array(head: bytes) -> bytes:
    """The bytes behind a first line that is a whole array of objects; none behind another one."""
    line, _, rest = head.removeprefix(codecs.BOM_UTF8).lstrip().partition(b"\n")
    if OBJECTS.match(line):
        with contextlib.suppress(ValueError, RecursionError):
            json.loads(line)
            return rest
    return b""


def _is_array(head: bytes, *, is_whole: bool) -> bool:
    """Tells whether it is an array of objects."""
    head = head.removeprefix(codecs.BOM_UTF8)
    if not OBJECTS.match(head):
        return False
    if not is_whole:
        return not _behind_array(head).strip()  # a text follows
    with contextlib.suppress(ValueError, RecursionError):
        return isinstance(json.loads(head), list)
    return False


def _is_over_lines(head: bytes, *, is_whole: bool) -> bool:
    """Tells whether it is objects, each over several lines, and nothing else."""
    head = head.removeprefix(codecs.BOM_UTF8)
    if not OBJECT_OVER_LINES.match(head):
        return False
    if not is_whole:
        return True
    with contextlib.suppress(ValueError):
        return all(isinstance(value, dict) for value in json_text.values_of(head.decode()))
    return False
