"""Files of tokens: golden bytes, windows, what is damaged, and how little of them is in memory."""

import gzip
import hashlib
import io
import json
import pickle
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

from holmesjax.config import DataConfig
from holmesjax.data import token_files, token_formats, tokens
from holmesjax.data.batches import Batches
from holmesjax.errors import DataError
from tests.data.written_token_files import (
    DOCUMENTS,
    STREAM,
    overwrite,
    write_megatron,
    write_numpy,
    write_own,
)


def write_llm_c(path, documents=(), *, magic=20240520, version=1, dtype="<u2"):
    head = np.zeros(256, "<i4")
    head[:3] = magic, version, len(STREAM)
    path.write_bytes(head.tobytes() + np.array(STREAM, dtype).tobytes())
    return path


def write_llama_3(path):
    return write_llm_c(path, magic=20240801, version=7, dtype="<u4")


def write_plain(path, documents=()):
    path.write_bytes(np.array(STREAM, "<u2").tobytes())
    return path


def write_olmo(path):
    path.with_suffix(".npy").write_bytes(np.array(STREAM, "<u4").tobytes())
    return path.with_suffix(".npy")


def read(place, length=3, fraction=0.0, dtype=None):
    config = DataConfig(
        corpus=str(place), source="tokens", validation_fraction=fraction, dtype=dtype
    )
    return tokens.read(config, length)


@pytest.mark.parametrize(
    "write, dtype",
    [
        (write_llm_c, None),
        (write_llama_3, None),
        (write_numpy, None),
        (write_plain, "uint16"),
        (write_olmo, "uint32"),
    ],
)
def test_a_file_that_says_nothing_of_documents_has_the_tokens_of_the_others(tmp_path, write, dtype):
    path = write(tmp_path / "a.bin")
    if write is write_llm_c:
        assert path.read_bytes()[:16].hex() == "88d83401010000000900000000000000"
    for place in (path, tmp_path):
        train = read(place, dtype=dtype).train
        assert [train[i].tokens.tolist() for i in range(len(train))] == [[1, 2, 3, 4], [4, 5, 6, 7]]
        assert not train[0].begins.any()
    before = read(path, dtype=dtype).digests
    overwrite(path.suffix, path.stat().st_size - 2, b"\1")(path)
    assert read(path, dtype=dtype).digests != before


def test_a_file_of_megatron_has_the_golden_bytes_and_its_documents(tmp_path):
    path = write_megatron(tmp_path / "a.bin", DOCUMENTS)
    index = path.with_suffix(".idx").read_bytes()
    head = "4d4d4944494458000001000000000000000803000000000000000400000000000000"
    assert (len(index), index[:34].hex()) == (102, head)
    assert hashlib.sha256(index).hexdigest().startswith("a029b2e87ccf2a80")
    assert token_files.hash_of(path).startswith("00d2e6ff506fb601")
    train = read(path).train
    assert len(train) == 2
    assert [train[i].tokens.tolist() for i in range(2)] == [[1, 2, 3, 4], [4, 5, 6, 7]]
    assert [np.flatnonzero(train[i].begins).tolist() for i in range(2)] == [[0, 3], [0, 2]]
    write_megatron(path, DOCUMENTS, "<i8", 5, cut=[0])  # the first two are one document
    train = read(path).train
    assert [train[i].tokens.tolist() for i in range(2)] == [[1, 2, 3, 4], [4, 5, 6, 7]]
    assert [np.flatnonzero(train[i].begins).tolist() for i in range(2)] == [[0], [2]]
    index = path.with_suffix(".idx")
    index.write_bytes(index.read_bytes() + bytes(len(DOCUMENTS)))
    assert len(read(path).train) == 2
    index.write_bytes(index.read_bytes()[:-1] + b"\1")  # the mode of pictures
    with pytest.raises(DataError, match=r"a.idx: must have text alone\n  found: .* of mode 1"):
        read(path)


@pytest.mark.parametrize("write", [write_own, write_megatron])
def test_the_documents_of_a_range_are_read_by_their_numbers(tmp_path, write):
    config = DataConfig(corpus=str(write(tmp_path / "a.bin", DOCUMENTS)), source="tokens")
    [file] = token_formats.find(config)
    found = token_files.DocumentStarts(file.documents, 2, 9)
    assert (len(found), int(found[0]), found[np.array([1, 0])].tolist()) == (2, 3, [5, 3])
    assert found[np.empty(0, int)].tolist() == []
    assert file.starts(0, 4).tolist() == [0, 3]
    assert [file.next_start(place) for place in (0, 1, 5, 6)] == [0, 3, 5, None]
    assert [file.num_documents(1, last) for last in (1, 3, 4, 6)] == [0, 0, 1, 2]


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.9])
def test_the_windows_of_several_files_are_those_of_each_one_cut_at_a_document(tmp_path, fraction):
    random = np.random.default_rng(0)
    length, parts = 5, {"train": [], "validation": []}
    for name, dtype in {"a": "uint16", "b": "uint32", "c": "uint16"}.items():
        documents = [random.integers(1, 200, n) for n in random.integers(1, 20, 30)]
        write_own(tmp_path / f"{name}.bin", documents, dtype)
        stream, begins = np.concatenate(documents), [1] * 0
        for document in documents:
            begins += [True] + [False] * (len(document) - 1)
        cut = len(stream) - int(len(stream) * fraction)
        while cut < len(stream) and not begins[cut]:
            cut += 1
        for split, bounds in {"train": slice(0, cut), "validation": slice(cut, None)}.items():
            for first in range(0, len(stream[bounds]) - length, length):
                window = slice(first, first + length + 1)
                parts[split].append((stream[bounds][window], np.array(begins)[bounds][window]))
    splits = read(tmp_path, length, fraction)
    for split, expected in parts.items():
        found = getattr(splits, split)
        assert len(found) == len(expected)
        for i, (expected_L, begins_L) in enumerate(expected):
            np.testing.assert_array_equal(found[i].tokens, expected_L)
            np.testing.assert_array_equal(found[i].begins, begins_L)
            assert found[i].tokens.dtype == np.int32


def resize(suffix, by):
    def change(path):
        with path.with_suffix(suffix).open("r+b") as file:
            file.truncate(file.seek(0, 2) + by)

    return change


def say(**changes):
    def change(path):
        about = path.with_suffix(".json")
        about.write_text(json.dumps(json.loads(about.read_text()) | changes))

    return change


def remove(suffix):
    return lambda path: path.with_suffix(suffix).unlink()


I8 = struct.Struct("<q").pack
OWN = {
    "truncated": (resize(".bin", -1), r"a.bin: must have 18 bytes.*\n  found: ends at byte 17"),
    "too long": (resize(".bin", 2), r"a.bin: must have 18 bytes.*\n  found: 20 bytes"),
    "empty": (resize(".bin", -18), r"a.bin: must have 18 bytes.*\n  found: ends at byte 0"),
    "no tokens": (say(tokens=0), r"a.starts: must have places from 0 that increase below 0"),
    "no .bin": (remove(".bin"), r"data.corpus: .*has no .bin\n  found: a.json, a.starts"),
    "no .json": (remove(".json"), r"a.bin: has no file beside it.*\n  found: neither a.json"),
    "no .starts": (remove(".starts"), r"data.corpus: cannot be read\n  found: .*a.starts: No such"),
    "short .starts": (resize(".starts", -8), r"a.starts: must have 24 bytes.*\n.*ends at byte 16"),
    "first start": (overwrite(".starts", 0, I8(1)), r"places from 0.*\n  found: 1 at byte 0"),
    "order": (overwrite(".starts", 16, I8(3)), r"a.starts: .*increase.*\n  found: 3 at byte 16"),
    "beyond": (overwrite(".starts", 16, I8(9)), r"a.starts: .*below 9\n  found: 9 at byte 16"),
    "no JSON": (overwrite(".json", 0, b"x"), r"a.json: is no JSON"),
    "format": (say(format="x"), r"a.json: must have the format 'holmesjax tokens 1'"),
    "dtype": (say(dtype="int8"), r"a.json: must have a dtype of uint16, uint32\n  found: int8"),
    "tokens": (say(tokens=-1), r"a.json: must have 'tokens': a number, 0 or more\n  found: -1"),
    "largest": (
        say(largest=None),
        r"a.json: must have 'largest': a number, 0 or more\n  found: None",
    ),
    "documents": (say(documents=1.5), r"a.json: must have 'documents': a number"),
    "sha256": (say(sha256=3), r"a.json: must have 'sha256': 64 digits\n  found: 3"),
}
MEGATRON = {
    "truncated": (resize(".bin", -1), r"a.bin: must have 18 bytes: a.idx says 9 tokens"),
    "short index": (resize(".idx", -1), r"a.idx: must have 102 bytes for 3 sequences"),
    "no header": (resize(".idx", -80), r"a.idx: must have 34 bytes before its lists\n.*22 bytes"),
    "magic": (overwrite(".idx", 0, b"X"), r"a.idx: must begin with b'MMIDIDX"),
    "version": (overwrite(".idx", 9, b"\2"), r"a.idx: must begin with .* and version 1\n.*, 2"),
    "floats": (overwrite(".idx", 17, b"\7"), r"a.idx: must have integers.*\n  found: dtype 7"),
    "length": (overwrite(".idx", 38, b"\1"), r"a.idx: must have sequence 2 from byte 8\n.*byte 62"),
    "negative": (overwrite(".idx", 41, b"\xff"), r"a.idx: must have sequence 1 from byte 6"),
    "odd offset": (
        overwrite(".idx", 54, b"\7"),
        r"sequence 1 from byte 6\n.*from byte 7, as .* 54",
    ),
    "documents": (overwrite(".idx", 94, I8(4)), r"a.idx: must have documents.*\n.*4 at byte 94"),
    "order": (overwrite(".idx", 78, I8(3)), r"a.idx: must have documents.*\n.*2 at byte 86"),
}


LLM_C = {
    "truncated": (resize(".bin", -1), r"a.bin: must have 1,042 bytes: its header says 9 tokens of"),
    "too long": (resize(".bin", 2), r"a.bin: must have 1,042 bytes.*\n  found: 1,044 bytes"),
    "no header": (resize(".bin", -99), r"a.bin: must have 1,024 bytes before its tokens\n.*943"),
    "negative": (overwrite(".bin", 11, b"\xff"), r"a.bin: must have a number.* at byte 8\n.*-"),
    "magic": (overwrite(".bin", 0, b"\0"), r"a.bin: has no file beside it.*\n.*\n.*data.dtype"),
    "version": (overwrite(".bin", 4, b"\2"), r"a.bin: must have a version of llm.c.*\n.*: 2"),
}
NUMPY_FILE = {
    "truncated": (resize(".npy", -1), r"a.npy: must have 164 bytes.*\n  found: ends at byte 163"),
    "too long": (resize(".npy", 4), r"a.npy: must have 164 bytes.*\n  found: 168 bytes"),
    "header": (overwrite(".npy", 12, b"?"), r"a.npy: must have a header of NumPy\n"),
    "short header": (resize(".npy", -80), r"a.npy: must have a header of NumPy\n  found: EOF"),
    "floats": (
        lambda path: np.save(path, np.ones(3)),
        r"a.npy: must have one dim of integers\n.*float64 \[3\]",
    ),
    "rows": (
        lambda path: np.save(path, np.ones((3, 2), int)),
        r"a.npy: must have one dim of integers\n.*int64 \[3, 2\]",
    ),
    "no magic": (overwrite(".npy", 0, b"X"), r"a.npy: has no file beside it.*\n.*\n.*data.dtype"),
}


@pytest.mark.parametrize(
    "write, damage, message",
    [
        *(pytest.param(write_llm_c, *case, id=f"llm.c: {name}") for name, case in LLM_C.items()),
        *(pytest.param(write_numpy, *case, id=f"npy: {name}") for name, case in NUMPY_FILE.items()),
        *(pytest.param(write_own, *case, id=f"own: {name}") for name, case in OWN.items()),
        *(
            pytest.param(write_megatron, *case, id=f"idx: {name}")
            for name, case in MEGATRON.items()
        ),
    ],
)
def test_a_damaged_file_is_named_before_a_run_begins(tmp_path, write, damage, message):
    path = write(tmp_path / "a.bin", DOCUMENTS)
    read(tmp_path)
    damage(path)
    with pytest.raises(DataError, match=message):
        read(tmp_path)


def test_a_token_that_cannot_be_is_named_with_its_file_and_place(tmp_path):
    wrong = [*STREAM[:5], 65535, *STREAM[6:]]
    path = write_own(tmp_path / "a.bin", [wrong], largest=max(STREAM))
    with pytest.raises(DataError, match=r"a.bin: .* not below 10\n  found: 65535 at byte 10"):
        read(path).train[1]
    path = write_megatron(tmp_path / "b.bin", [[1, 300, 2], [-1, 3]], "<i4", 4)
    with pytest.raises(DataError, match=r"b.bin: .* not below 256\n  found: 300 at byte 4"):
        read(path, 2).train[0]
    with pytest.raises(DataError, match=r"b.bin: .*\n  found: -1 at byte 12"):
        read(path, 2).train[1]


def test_a_header_of_llm_c_is_no_tokens_whatever_its_version(tmp_path):
    write_llm_c(tmp_path / "a.bin", [[1, 2]], version=2)
    config = DataConfig(source="tokens", corpus=str(tmp_path), dtype="uint16")
    with pytest.raises(DataError, match=r"a version of llm\.c"):
        token_formats.find(config)


TEXT = "Once upon a time, in Bärenthal, there was a model.\n" * 40
HEADER = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()


def zip_bytes():
    with zipfile.ZipFile(file := io.BytesIO(), "w") as archive:
        archive.writestr("archive/data.pkl", TEXT)
    return file.getvalue()


@pytest.mark.parametrize("name", ["a.bin", "a.npy"])
@pytest.mark.parametrize(
    "content, kind",
    [
        (gzip.compress(np.array(STREAM * 99, "<u2").tobytes()), "gzip file"),
        (zip_bytes(), "zip archive"),
        (struct.pack("<Q", len(HEADER)) + HEADER + b"\0\0\0\0", "safetensors file"),
        (TEXT.encode()[:-1], "text"),
        (b'{"text": "a"}\n' * 9, "JSON lines"),
        (b"<html>\n<body>404: Not Found</body>\n</html>", "text"),
        (TEXT.encode("utf-16"), "text in UTF-16"),
        (b"LITPKDS" + struct.pack("<QBQ", 1, 8, 9) + bytes(64), "packed file of LitGPT"),
        *((pickle.dumps(STREAM * 99, n), "pickle of Python") for n in (2, 3, 4, 5)),
        (pickle.dumps(np.array(STREAM), 2), "pickle of Python"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_surely_of_another_kind_is_no_numbers(tmp_path, name, content, kind):
    (tmp_path / name).write_bytes(content + b" " * (len(content) % 2))
    for dtype in (None, "uint16"):
        with pytest.raises(DataError, match=rf"{name}: is no file of tokens\n  found: .*{kind}"):
            read(tmp_path, dtype=dtype)


@pytest.mark.parametrize("dtype, width", [("uint16", 4), ("uint16", 8), ("uint32", 8)])
def test_numbers_wider_than_is_said_are_refused(tmp_path, dtype, width):
    """They are below the vocabulary, each with a 0 behind it."""
    tokens = np.arange(40) % 9
    (tmp_path / "a.bin").write_bytes(tokens.astype(f"<u{width}").tobytes())
    with pytest.raises(
        DataError, match=rf"a.bin: has numbers of more bytes than {dtype}.*\n.*0, 0"
    ):
        read(tmp_path, dtype=dtype)
    np.repeat(tokens, 2).astype("<u2").tofile(tmp_path / "a.bin")
    assert len(read(tmp_path, dtype="uint16").train)


def test_a_chunk_of_another_format_is_no_numbers(tmp_path):
    """LitData puts offsets before the tokens, and says what a chunk is in another file."""
    chunk = np.array([3, 16, 36, 56, 76], "<u4").tobytes() + np.arange(30, dtype="<u2").tobytes()
    (tmp_path / "chunk-0-0.bin").write_bytes(chunk)
    (tmp_path / "index.json").write_text('{"chunks": [{"filename": "chunk-0-0.bin"}]}')
    with pytest.raises(
        DataError, match=r"chunk-0-0.bin: is no file.*\n  found: a chunk of LitData"
    ):
        read(tmp_path, dtype="uint16")
    (tmp_path / "index.json").write_text('["chunk-0-0.bin"]')
    read(tmp_path, dtype="uint16")


@pytest.mark.parametrize(
    "begin",
    [
        b"\x1f\x8b\x08\0",
        b"\xff\xfe",
        b"\x1f\x9d",
        b"\xff\xd8",
        b"\x1f\x9d\x90\0",
        b"\xff\xd8\xff\0",
        b"BZ",
        b"<html>\n ",
        b"\xfe\xff",
    ],
)
def test_numbers_may_begin_as_files_of_other_kinds_do(tmp_path, begin):
    numbers = np.arange(50_000, dtype="<u2")
    (tmp_path / "a.bin").write_bytes(begin + numbers.tobytes())
    [file] = token_formats.find(DataConfig(source="tokens", corpus=str(tmp_path), dtype="uint16"))
    assert len(file.token_T) == len(numbers) + len(begin) // 2


def test_a_file_of_numbers_alone_must_have_whole_ones_that_are_tokens(tmp_path):
    path = write_plain(tmp_path / "a.bin")
    resize(".bin", -1)(path)
    with pytest.raises(DataError, match=r"a.bin: must have whole numbers of 2.*\n.*at byte 17"):
        read(path, dtype="uint16")
    path = write_llm_c(path)
    overwrite(".bin", 1028, b"\xff\xff")(path)
    with pytest.raises(DataError, match=r"a.bin: .* not below 256\n  found: 65535 at byte 1,028"):
        read(path).train[0]


def test_a_file_that_becomes_shorter_while_it_is_read_is_named(tmp_path):
    path = write_own(tmp_path / "a.bin", [np.arange(10**6) % 200])
    train = read(path, 99).train
    before = train[len(train) - 1]
    assert len(before.tokens) == 100
    resize(".bin", -(10**6))(path)
    with pytest.raises(DataError, match=r"a.bin: has become shorter.*\n.*0 of 200 bytes from"):
        train[len(train) - 1]


def test_a_token_that_changed_is_seen_wherever_it_is(tmp_path):
    config = DataConfig(corpus=str(tmp_path), source="tokens")
    texts = [np.arange(10**6) % 200]
    path = write_own(tmp_path / "a.bin", texts)
    before = read(tmp_path).digests
    assert tokens.verify(config) == 2
    read_places = {first for first, _ in read(path).train.parts[0].file.blocks()}
    assert (0 in read_places, len(read_places)) == (True, token_files.BLOCKS)
    overwrite(".bin", 2 * 4000, b"\7")(path)  # in none of the blocks that are looked at
    for look in (read, lambda _: tokens.verify(config)):
        with pytest.raises(
            DataError, match=r"a.bin: is not as it was written: a.json says SHA-256"
        ):
            look(tmp_path)
    said = {"sha256": token_files.hash_of(path)}
    write_own(path, texts, **said)
    overwrite(".bin", 2 * 4000, b"\7")(path)  # by someone who has changed the hash, too
    assert read(tmp_path).digests != before
    write_own(path, texts, largest=198)
    with pytest.raises(DataError, match=r"a.bin: .* not below 199\n  found: 199 at byte 398"):
        tokens.verify(config)


def test_memory_does_not_grow_with_a_corpus_of_a_billion_tokens(tmp_path):
    path = tmp_path / "a.bin"
    with path.open("wb") as file:
        file.truncate(2 * 10**9)  # sparse
    tracemalloc.start()
    splits = read(path, 4096, 0.05, "uint16")
    batches = Batches(data=splits, seed=0, global_batch=64, length=4096, num_validation=1)
    rows = batches.train(10**9)
    batches.validation(0)
    assert rows.token_NL.shape == (64, 4097)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 16 * 2**20
    assert (len(splits.train), len(splits.validation)) == (231933, 12207)


@pytest.mark.parametrize(
    "content, message",
    [
        ({}, r"data.corpus: .*has no .bin\n  found: nothing"),
        ({"tokenize.json": '{"shards": ["a", "b"]}'}, r"not whole: a is missing\n.*0 of 2 shards"),
        ({"tokenize.json": "{}"}, r"tokenize.json: names no shards"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(tmp_path: Path, content, message):
    for name, words in content.items():
        (tmp_path / name).write_text(words)
    with pytest.raises(DataError, match=message):
        read(tmp_path)
    with pytest.raises(DataError, match=r"data.corpus: is not there\n  found: .*nothing.bin"):
        read(tmp_path / "nothing.bin")
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match=r"no file of tokens\n  found: .*a.txt, and no a.bin"):
        read(tmp_path / "a.txt")
