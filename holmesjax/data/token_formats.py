"""The formats of files of tokens: how each is known, opened and checked.

    holmesjax   `token_files` says it
    megatron    NAME.bin and NAME.idx, as Megatron-LM's `indexed_dataset` writes them
    llm.c       a header of 1,024 bytes with a magic number, and tokens as uint16 or uint32
    numpy       NAME.npy, an array of one dim
    plain       NAME.bin or NAME.npy with nothing but numbers, as nanoGPT and OLMo write them

Dims: D documents, S sequences of Megatron, each a part of a document.
"""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from holmesjax.config import DataConfig
from holmesjax.data import file_kinds, object_stores
from holmesjax.data.corpus_files import HIDDEN, LeftOut, doubtful, kind_of, with_remarks
from holmesjax.data.number_files import NumberFile, SortedNumbers
from holmesjax.data.object_stores import RangeFile
from holmesjax.data.token_files import DTYPES, FORMAT, JOB, LOCK, STARTS, TokenFile, wrong
from holmesjax.data.tokenizer_paths import read, read_json
from holmesjax.data.whole_digests import FOLDER
from holmesjax.errors import DataError

ENDINGS = (".bin", ".npy")
BESIDE = (".json", ".idx", ".starts")  # of files of the same name
MAGIC, VERSION = b"MMIDIDX\0\0", 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, code of the dtype, sequences, D + 1
CODES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
NUMPY = b"\x93NUMPY"
LLM_C_BYTES = 1024  # of its header
FEWEST = 16  # numbers of which every second one is 0 by no chance
# Magic number and version, which tell the type of tokens.
LLM_C = {struct.pack("<ii", 20240520, 1): "<u2", struct.pack("<ii", 20240801, 7): "<u4"}


def find(config: DataConfig) -> list[TokenFile]:
    """The files that a run names, by their names. Raises DataError for one that is damaged."""
    path = object_stores.path_of(config.corpus)
    try:
        object_stores.ask(path)
        if path.is_dir():
            _refuse_unfinished(path)
            names = sorted(inner.name for inner in path.iterdir() if not inner.name.startswith("."))
            found = [path / name for name in names if name.endswith(ENDINGS)]
            if not found:
                shown = ", ".join(names[:8]) or "nothing"
                fix = "make them with python -m launch tokenize, or name another folder"
                raise DataError("data.corpus", f"{path} has no .bin", found=shown, fix=fix)
            return object_stores.each(lambda each: _open(each, config.dtype), found, path)
        if not path.exists():
            fix = "name a folder with files of tokens, or one file .bin or .npy"
            raise object_stores.absent(config.corpus, fix)
        named = path if path.suffix == ".npy" else path.with_suffix(".bin")
        if not named.exists():
            fix = "turn it into tokens (python -m launch tokenize), or name files .bin or .npy"
            found_here = f"{path}, and no {named.name} beside it"
            raise DataError("data.corpus", "is no file of tokens", found=found_here, fix=fix)
        return [_open(named, config.dtype)]
    except object_stores.errors() as error:
        name = getattr(error, "filename", None) or path
        fix, found_here = "make it readable", f"{name}: {object_stores.said_by(error)}"
        raise DataError("data.corpus", "cannot be read", found=found_here, fix=fix) from None


def left_out(config: DataConfig, files: Sequence[TokenFile]) -> str:
    """The rest of a folder, besides files of tokens and what belongs to them, in words.

    And files of tokens that are read, and by their names perhaps should not be.
    """
    found, root = LeftOut(), object_stores.path_of(config.corpus)
    if not root.is_dir():
        return ""
    own = {file.path.with_suffix(end).name for file in files for end in BESIDE}
    own |= {file.path.name for file in files} | {JOB, LOCK}
    for path in sorted(root.iterdir(), key=lambda path: path.name):
        if path.name in own or path.name == FOLDER or path.suffix == ".tmp":
            continue
        if path.name.startswith("."):
            found.add(HIDDEN, path.name)
        elif path.is_dir():
            found.add("folder in a folder of tokens", path.name)
        else:
            try:
                kind = kind_of(path).words
            except DataError:  # nothing of it is wanted
                kind = "damaged file"
            found.add(kind, path.name)
    return with_remarks(found.words, doubtful([file.path.name for file in files]))


def _refuse_unfinished(folder: Path) -> None:
    """Raises DataError for a folder that `tokenize` has not finished, or that lost a shard."""
    if not (folder / JOB).exists():
        return
    names = read_json(folder / JOB).get("shards")
    names = names if isinstance(names, list) else wrong(folder / JOB, "names no shards", names)
    for name in names:
        if not (folder / f"{name}.json").exists():
            there = sum((folder / f"{each}.json").exists() for each in names)
            fix = "run the same python -m launch tokenize again: it goes on where it stopped"
            problem = f"{folder} is not whole: {name} is missing"
            raise DataError(
                "data.corpus", problem, found=f"{there} of {len(names)} shards", fix=fix
            )


def _open(path: Path, dtype: str | None) -> TokenFile:
    """A file, in the format of which it or the file beside it is."""
    if (beside := path.with_suffix(".json")).is_file():
        return _open_own(path, beside)
    if (beside := path.with_suffix(".idx")).is_file():
        return _open_megatron(path, beside)
    with object_stores.open_file(path) as file:
        head = file.read(LLM_C_BYTES)
        if head.startswith(NUMPY):
            file.seek(0)
            return _open_numpy(path, file)
    if (kind := LLM_C.get(head[:8])) is not None:
        return _open_llm_c(path, head, np.dtype(kind))
    if head[:4] in {known[:4] for known in LLM_C}:  # its header would be tokens
        version = int.from_bytes(head[4:8], "little")
        wrong(path, "must have a version of llm.c that is known", version)
    if (kind := file_kinds.other_than_numbers(path)) is not None:
        fix = "name files of tokens (of a packed one, unpack it); numpy.save marks numbers as such"
        raise DataError(str(path), "is no file of tokens", found=kind, fix=fix)
    if dtype is not None:
        _refuse_parts(path)
        _refuse_narrow(path, head, dtype)
        return _open_plain(path, np.dtype(dtype).newbyteorder("<"))
    found = f"neither {path.stem}.json nor {path.stem}.idx"
    fix = (
        "bring the file that was written with it; make others by launch tokenize; say "
        "data.dtype=uint16 if it has nothing but numbers"
    )
    raise DataError(
        str(path), "has no file beside it that says what its tokens are", found=found, fix=fix
    )


def _refuse_parts(path: Path) -> None:
    """Raises DataError for a chunk of LitData, whose tokens are behind offsets without a mark."""
    index = path.with_name("index.json")
    if not index.is_file():
        return
    content = read(index)
    if b'"chunks"' in content and f'"{path.name}"'.encode() in content:
        fix = "write its tokens with numpy.save, or its text as JSON lines for launch tokenize"
        raise DataError(str(path), "is no file of tokens", found="a chunk of LitData", fix=fix)


WIDER = ("uint32", "int64")


def _refuse_narrow(path: Path, head: bytes, dtype: str) -> None:
    """Raises DataError where numbers are wider than data.dtype says."""
    kind = np.dtype(dtype).newbyteorder("<")
    numbers = np.frombuffer(head[: len(head) // kind.itemsize * kind.itemsize], kind)
    if len(numbers) >= FEWEST and numbers[::2].any() and not numbers[1::2].any():
        problem = f"has numbers of more bytes than {dtype}: every second one would be 0"
        wider = " or ".join(name for name in WIDER if np.dtype(name).itemsize > kind.itemsize)
        fix = f"say data.dtype={wider}"
        shown = ", ".join(map(str, numbers[:6]))
        raise DataError(str(path), problem, found=f"{shown}, ...", fix=fix)


def _open_plain(path: Path, dtype: np.dtype, at: int = 0, count: int | None = None) -> TokenFile:
    """A file of numbers alone, behind a header."""
    file = RangeFile(path)
    if count is None:
        count, odd = divmod(file.size - at, dtype.itemsize)
        if odd:
            problem = f"must have whole numbers of {dtype.itemsize} bytes, as data.dtype says"
            wrong(path, problem, f"ends at byte {file.size:,}")
    if file.size != (needed := at + count * dtype.itemsize):
        what = f"ends at byte {file.size:,}" if file.size < needed else f"{file.size:,} bytes"
        problem = f"must have {needed:,} bytes: its header says {count:,} tokens of {dtype.name}"
        wrong(path, problem, what)
    return TokenFile(
        path=path,
        about=None,
        token_T=NumberFile(file, dtype, count, at),
        documents=None,
        tokenizer=None,
        limit=None,
    )


def _open_llm_c(path: Path, head: bytes, dtype: np.dtype) -> TokenFile:
    if len(head) < LLM_C_BYTES:
        wrong(path, f"must have {LLM_C_BYTES:,} bytes before its tokens", f"{len(head):,} bytes")
    count = int(np.frombuffer(head, "<i4", 1, 8)[0])
    if count < 0:
        wrong(path, "must have a number of tokens at byte 8", count)
    return _open_plain(path, dtype, LLM_C_BYTES, count)


def _open_numpy(path: Path, file: BinaryIO) -> TokenFile:
    try:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0}
        shape, _, dtype = read.get(version, np.lib.format.read_array_header_2_0)(file)
    except (ValueError, EOFError) as error:
        wrong(path, "must have a header of NumPy", " ".join(str(error).split()))
    if len(shape) != 1 or dtype.kind not in "iu":
        wrong(path, "must have one dim of integers", f"{dtype.name} {list(shape)}")
    return _open_plain(path, dtype, file.tell(), shape[0])


def _open_own(path: Path, about: Path) -> TokenFile:
    said = read_json(about)
    if said.get("format") != FORMAT:
        wrong(about, f"must have the format {FORMAT!r}", said.get("format"))
    if (name := said.get("dtype")) not in DTYPES:
        wrong(about, f"must have a dtype of {', '.join(DTYPES)}", name)
    num_tokens, largest = (_number(about, said, key) for key in ("tokens", "largest"))
    hashes = {path: _sha256(about, said, "sha256")}
    documents = None
    if said.get("documents") is not None:
        num_documents = _number(about, said, "documents")
        file = path.with_suffix(".starts")
        documents = SortedNumbers(_map(file, STARTS, num_documents, of="documents", about=about))
        _check_starts(file, documents.numbers, num_tokens)
        hashes[file] = _sha256(about, said, "starts_sha256")
    return TokenFile(
        path=path,
        about=about,
        token_T=_map(path, DTYPES[name], num_tokens, of="tokens", about=about),
        documents=documents,
        tokenizer=said.get("tokenizer"),
        limit=largest + 1,
        hashes=hashes,
    )


def _number(about: Path, said: dict[str, Any], key: str) -> int:
    value = said.get(key)
    if type(value) is not int or value < 0:
        wrong(about, f"must have {key!r}: a number, 0 or more", value)
    return value


def _sha256(about: Path, said: dict[str, Any], key: str) -> str:
    value = said.get(key)
    if not isinstance(value, str) or len(value) != 64:
        wrong(about, f"must have {key!r}: 64 digits", value)
    return value


def _open_megatron(path: Path, about: Path) -> TokenFile:
    file = RangeFile(about)
    size = file.size
    head = file.read(0, min(HEADER.size, size))
    if len(head) < HEADER.size:
        wrong(about, f"must have {HEADER.size} bytes before its lists", f"{size} bytes")
    magic, version, code, num_sequences, num_entries = HEADER.unpack(head)
    if (magic, version) != (MAGIC, VERSION):
        wrong(about, f"must begin with {MAGIC!r} and version {VERSION}", f"{magic!r}, {version}")
    if code not in CODES:
        wrong(about, "must have integers for tokens: at byte 17", f"dtype {code}")
    least = HEADER.size + 12 * num_sequences + 8 * num_entries
    if size not in (least, least + num_sequences):  # modes of sequences may follow
        sizes = f"{num_sequences:,} sequences and {num_entries:,} entries of documents"
        wrong(about, f"must have {least:,} bytes for {sizes}", f"{size:,} bytes")
    if not num_sequences or num_entries < 2:
        wrong(about, "must have a sequence and a document", f"{num_sequences}, {num_entries - 1}")
    at = HEADER.size
    length_S = NumberFile(file, np.dtype("<i4"), num_sequences, at)
    offset_S = NumberFile(file, np.dtype("<i8"), num_sequences, at := at + 4 * num_sequences)
    first_D = NumberFile(file, np.dtype("<i8"), num_entries, at + 8 * num_sequences)
    dtype = np.dtype(CODES[code])
    num_tokens = _check_sequences(about, length_S, offset_S, dtype.itemsize)
    _check_entries(about, first_D, num_sequences)
    if size > least:
        _check_modes(about, NumberFile(file, np.dtype("<i1"), num_sequences, least))
    documents = MegatronDocuments(SortedNumbers(offset_S), SortedNumbers(first_D), dtype.itemsize)
    return TokenFile(
        path=path,
        about=about,
        token_T=_map(path, dtype, num_tokens, of="tokens", about=about),
        documents=documents,
        tokenizer=None,
        limit=None,
    )


class MegatronDocuments:
    """Documents as ranges of sequences, whose offsets say where they begin."""

    def __init__(self, offset_S: SortedNumbers, first_D: SortedNumbers, itemsize: int):
        """The lists of an index.

        Args:
          offset_S: the byte of the first token of each sequence.
          first_D: the first sequence of each document.
          itemsize: bytes of a token.
        """
        self._offset_S, self._first_D, self._itemsize = offset_S, first_D, itemsize

    def rank(self, place: int) -> int:
        return self._first_D.rank(self._offset_S.rank(place * self._itemsize))

    def __getitem__(self, index: slice) -> np.ndarray:
        sequence_D = self._first_D[index]
        sequence_D = sequence_D[sequence_D < len(self._offset_S)]  # the last entry is their end
        if not len(sequence_D):
            return np.empty(0, np.int64)
        offset = self._offset_S[int(sequence_D[0]) : int(sequence_D[-1]) + 1]
        return offset[sequence_D - sequence_D[0]] // self._itemsize


def _check_starts(path: Path, start_D: NumberFile, num_tokens: int) -> None:
    """Raises DataError unless they begin at 0 and increase to the last token at most."""
    before = -1
    for first, chunk_D in start_D.chunks():
        wrong_D = np.diff(chunk_D, prepend=before) <= 0
        wrong_D |= chunk_D >= num_tokens
        if not first:
            wrong_D[0] |= chunk_D[0] != 0
        if wrong_D.any():
            place = int(np.argmax(wrong_D))
            found = f"{chunk_D[place]} at byte {start_D.byte_of(first + place):,}"
            wrong(path, f"must have places from 0 that increase below {num_tokens:,}", found)
        before = int(chunk_D[-1])


def _check_sequences(path: Path, length_S: NumberFile, offset_S: NumberFile, itemsize: int) -> int:
    """The number of tokens. Raises DataError unless each sequence begins where one ended."""
    end = 0
    for (first, chunk_S), (_, found_S) in zip(length_S.chunks(), offset_S.chunks(), strict=True):
        chunk_S = chunk_S.astype(np.int64)
        end_S = end + np.cumsum(chunk_S)
        expected_S = (end_S - chunk_S) * itemsize
        wrong_S = (chunk_S < 0) | (found_S != expected_S)
        if wrong_S.any():
            place = int(np.argmax(wrong_S))
            at = offset_S.byte_of(first + place)
            found = f"{chunk_S[place]} tokens from byte {found_S[place]}, as byte {at:,} says"
            problem = f"must have sequence {first + place:,} from byte {expected_S[place]}"
            wrong(path, problem, found)
        end = int(end_S[-1])
    return end


def _check_entries(path: Path, first_D: NumberFile, num_sequences: int) -> None:
    """Raises DataError unless documents begin at 0 and end at the last sequence."""
    before = 0
    for first, chunk_D in first_D.chunks():
        wrong_D = np.diff(chunk_D, prepend=before) < 0
        wrong_D[0] |= first == 0 and chunk_D[0] != 0
        is_last = first + len(chunk_D) == len(first_D)
        wrong_D[-1] |= is_last and chunk_D[-1] != num_sequences
        if wrong_D.any():
            place = int(np.argmax(wrong_D))
            problem = f"must have documents from sequence 0 to {num_sequences:,}"
            wrong(path, problem, f"{chunk_D[place]} at byte {first_D.byte_of(first + place):,}")
        before = int(chunk_D[-1])


def _check_modes(path: Path, mode_S: NumberFile) -> None:
    """Raises DataError for sequences that are no text, such as those of pictures."""
    for first, chunk_S in mode_S.chunks():
        if chunk_S.any():
            place = int(np.argmax(chunk_S != 0))
            found = f"sequence {first + place:,} of mode {chunk_S[place]}"
            wrong(path, "must have text alone", found)


def _map(path: Path, dtype: np.dtype, count: int, *, of: str, about: Path) -> NumberFile:
    """Numbers of a file. Raises DataError unless it has so many."""
    file = RangeFile(path)
    if file.size != (needed := count * dtype.itemsize):
        problem = f"must have {needed:,} bytes: {about.name} says {count:,} {of} of {dtype.name}"
        what = f"ends at byte {file.size:,}" if file.size < needed else f"{file.size:,} bytes"
        wrong(path, problem, what)
    return NumberFile(file, dtype, count)
