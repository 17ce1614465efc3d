"""Documents in each format: the same ones from all, however cut, and damage by its place."""

import gzip
import shutil

import datasets
import numpy as np
import pyarrow as pa
import pytest
import zstandard
from array_record.python.array_record_module import ArrayRecordWriter
from pyarrow import parquet

from holmesjax.data import document_formats
from holmesjax.data.documents import FilePart, Wanted
from holmesjax.errors import DataError
from tests.data.written_documents import (
    TEXTS,
    TOKENS,
    frames,
    write_csv,
    write_jsonl,
    write_jsonl_gz,
    write_jsonl_zst,
    write_parquet,
)


def write_hugging_face(folder):
    own = datasets.Dataset.from_dict({"text": TEXTS, "input_ids": TOKENS})
    both = datasets.DatasetDict({"train": own, "test": own.select([5, 3])})
    both.save_to_disk(folder / "hf", num_shards={"train": 3, "test": 1})
    return folder / "hf" / "train"


def write_array_record(folder, records=None):
    records = [document.encode() for document in TEXTS] if records is None else records
    writer = ArrayRecordWriter(str(folder / "a.array_record"), "group_size:7")
    for record in records:
        writer.write(record)
    writer.close()
    return folder / "a.array_record"


def write_array_record_of_tokens(folder):
    return write_array_record(folder, [np.array(tokens, "<u2").tobytes() for tokens in TOKENS])


def read(path, step=2**28, **wanted):
    parts = [part for part, _ in document_formats.cut(path, step)]
    found = [
        document for part in parts for _, document in document_formats.read(part, Wanted(**wanted))
    ]
    return found, len(parts)


@pytest.mark.parametrize(
    "write, can_be_cut",
    [
        (write_jsonl, True),
        (write_jsonl_gz, False),
        (write_jsonl_zst, False),
        (write_csv, False),
        (write_parquet, True),
        (write_hugging_face, True),
        (write_array_record, True),
    ],
)
def test_every_format_has_the_same_documents_however_it_is_cut(tmp_path, write, can_be_cut):
    path = write(tmp_path)
    assert read(path)[0] == TEXTS
    found, num_parts = read(path, step=10_000)
    assert found == TEXTS
    assert (num_parts > 3) == can_be_cut


def test_a_compressed_text_is_one_document(tmp_path):
    text = "".join(TEXTS)
    (tmp_path / "a.txt.zst").write_bytes(frames(text.encode()))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(text.encode()))
    assert read(tmp_path / "a.txt.zst")[0] == read(tmp_path / "b.txt.gz")[0] == [text]


@pytest.mark.parametrize(
    "write, wanted",
    [
        (write_parquet, {"column": "input_ids"}),
        (write_hugging_face, {"column": "input_ids"}),
        (write_array_record_of_tokens, {"dtype": "uint16"}),
    ],
)
def test_every_format_of_rows_has_the_same_tokens(tmp_path, write, wanted):
    found, _ = read(write(tmp_path), step=1000, **wanted)
    assert [tokens.tolist() for tokens in found] == TOKENS


def cut_off(by, name=""):
    def change(path):
        file = path / name if name else path
        file.write_bytes(file.read_bytes()[:-by])

    return change


def flip(at, name=""):
    def change(path):
        file = path / name if name else path
        content = bytearray(file.read_bytes())
        content[int(len(content) * at)] ^= 8
        file.write_bytes(content)

    return change


def say(content, name=""):
    return lambda path: (path / name if name else path).write_bytes(content)


def remove(name):
    return lambda path: (path / name).unlink()


SECOND = "data-00001-of-00003.arrow"
SAMPLES = [document.encode() for document in TEXTS] * 9
DICTIONARY = zstandard.train_dictionary(2048, SAMPLES, dict_id=7)
WITH_DICTIONARY = zstandard.ZstdCompressor(dict_data=DICTIONARY).compress(SAMPLES[0])
RAW_DICTIONARY = zstandard.ZstdCompressionDict(
    b"".join(SAMPLES[:9]), zstandard.DICT_TYPE_RAWCONTENT
)
WITH_RAW_DICTIONARY = zstandard.ZstdCompressor(dict_data=RAW_DICTIONARY).compress(SAMPLES[0])
DAMAGES = {
    "gz cut off": (write_jsonl_gz, cut_off(9), r"a.jsonl.gz: is no whole gzip file\n.*byte \d"),
    "gz header": (write_jsonl_gz, say(b"{]"), r"a.jsonl.gz: is no whole gzip file\n.*begins with"),
    "gz empty": (write_jsonl_gz, say(b""), r"a.jsonl.gz: is no whole gzip file\n.*it is empty"),
    "gz flip": (write_jsonl_gz, flip(0.5), r"a.jsonl.gz"),
    "gz junk": (write_jsonl_gz, say(gzip.compress(b"") + b"x"), r"no whole gzip file"),
    "zst cut off": (write_jsonl_zst, cut_off(9), r"a.jsonl.zst: is no whole zstd.*\n.*inside of a"),
    "zst header": (write_jsonl_zst, say(b"{]"), r"a.jsonl.zst: is no whole zstd file\n.*begins"),
    "zst flip": (write_jsonl_zst, flip(0.5), r"a.jsonl.zst: is no whole zstd file"),
    "zst dictionary": (
        write_jsonl_zst,
        say(WITH_DICTIONARY),
        r"a dictionary, which.*\n.*number 7\n",
    ),
    "zst dictionary without a number": (
        write_jsonl_zst,
        say(WITH_RAW_DICTIONARY),
        r"a.jsonl.zst: is no whole zstd file\n(.*\n)+.*copy it again; if zstd -D packed it, unpack",
    ),
    "zst junk": (write_jsonl_zst, say(frames(b"{}") + b"x"), r"no whole zstd file"),
    "lines are gzip": (write_jsonl, say(gzip.compress(b"a")), r"a.jsonl, line 1: is no JSON"),
    "lines are zstd": (write_jsonl, say(frames(b"a")), r"a.jsonl, line 1: is no JSON"),
    "lines cut off": (write_jsonl, cut_off(9), r"a.jsonl, byte [\d,]+: is no JSON"),
    "parquet cut off": (write_parquet, cut_off(1), r"a.parquet: is no whole parquet file"),
    "parquet half": (write_parquet, cut_off(3000), r"a.parquet: is no whole parquet file"),
    "parquet empty": (write_parquet, say(b""), r"a.parquet: is no whole parquet file\n.*0 bytes"),
    "parquet flip": (
        lambda folder: write_parquet(folder, write_page_checksum=True, compression=None),
        flip(0.3),
        r"a.parquet, row group \d: is no whole row group\n.*CRC",
    ),
    "hf missing": (write_hugging_face, remove(SECOND), rf"{SECOND}: is missing\n.*state.json"),
    "hf cut at a batch": (
        write_hugging_face,
        cut_off(8, SECOND),
        rf"{SECOND}: is no whole Arrow stream\n.*cut off at byte",
    ),
    "hf cut off": (write_hugging_face, cut_off(99, SECOND), rf"{SECOND}: is no whole Arrow"),
    "hf empty": (write_hugging_face, say(b"", SECOND), rf"{SECOND}: is no whole Arrow"),
    "hf state": (write_hugging_face, say(b"{", "state.json"), r"state.json: is no whole list"),
    "hf state names": (write_hugging_face, say(b"{}", "state.json"), r"state.json: is no whole"),
    "hf about": (write_hugging_face, say(b"{", "dataset_info.json"), r"train: is no whole dataset"),
    "hf schema": (write_hugging_face, flip(0.001, SECOND), r"train: is no whole dataset"),
    "record cut off": (write_array_record, cut_off(1), r"a.array_record: is no whole array_record"),
    "record half": (write_array_record, cut_off(70_000), r"a.array_record: is no whole array_rec"),
    "record empty": (write_array_record, say(b""), r"a.array_record: is no whole .*\n.*0 bytes"),
    "record is text": (write_array_record, say(b"text" * 99), r"a.array_record: is no whole"),
    "record flip": (
        write_array_record,
        flip(0.01),
        r"a.array_record, records \d+ to \d+: is no whole part.*\n.*hash mismatch",
    ),
}


@pytest.mark.parametrize(
    "write, damage, message", [pytest.param(*case, id=name) for name, case in DAMAGES.items()]
)
def test_a_damaged_file_is_refused_with_its_place(tmp_path, write, damage, message):
    path = write(tmp_path)
    damage(path)
    with pytest.raises(DataError, match=message):
        read(path)


@pytest.mark.parametrize(
    "table, message",
    [
        ({"words": ["a"]}, r"no column `text` of text.*\n  found: words: string\n.*--column"),
        ({"text": [1.5]}, r"no column `text` of text.*\n  found: text: double"),
        ({"text": [[1.5]]}, r"no column `text` of text.*\n  found: text: list"),
        ({"text": ["a", None]}, r"a.parquet, row 1: has nothing in `text`\n  found: null"),
        (
            {"text": pa.DictionaryArray.from_arrays([0, 1], ["a", None])},
            r"a.arrow, row 1: has nothing in `text`\n  found: null",
        ),
        (
            pa.table([pa.array(["a"])] * 2, ["text"] * 2),
            r"has several columns `text` of text.*\n  found: text: string, text: string",
        ),
    ],
)
def test_a_column_without_documents_is_refused_with_its_row(tmp_path, table, message):
    table = pa.table(table) if isinstance(table, dict) else table
    path = tmp_path / ("a.arrow" if "a.arrow" in message else "a.parquet")
    if path.suffix == ".arrow":  # keeps dictionaries as they are
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    else:
        parquet.write_table(table, path)
    with pytest.raises(DataError, match=message):
        read(path)


def test_a_column_is_taken_by_its_whole_name(tmp_path):
    """The library that reads parquet files takes `a.b` as the field `b` of `a`, too."""
    table = {"a": [{"b": "field"}], "a.b": ["column"]}
    parquet.write_table(pa.table(table), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", column="a.b")[0] == ["column"]


def test_what_is_no_text_in_rows_is_refused_with_its_row(tmp_path):
    wrong = pa.array([b"a", b"\xff"]).view(pa.string())
    parquet.write_table(pa.table({"text": wrong}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet, row 1: is no UTF-8"):
        read(tmp_path / "a.parquet")
    path = write_array_record(tmp_path, [b"a", b"b\xff"])
    with pytest.raises(DataError, match=r"a.array_record, record 1: is no UTF-8"):
        read(path)
    with pytest.raises(DataError, match=r"record 0: holds no numbers of uint16\n  found: 1 bytes"):
        read(path, dtype="uint16")


def test_a_dataset_of_several_splits_names_them(tmp_path):
    write_hugging_face(tmp_path)
    with pytest.raises(DataError, match=r"hf: has several splits\n.*train, test\n.*hf/train"):
        read(tmp_path / "hf")
    for wrong in ("", "[]", '{"splits": 3}'):
        (tmp_path / "hf" / "dataset_dict.json").write_text(wrong)
        with pytest.raises(DataError, match=r"dataset_dict.json: is no whole list of splits"):
            read(tmp_path / "hf")
    with pytest.raises(DataError, match=r"arrow: is a part of a dataset\n.*\n.*name the folder"):
        read(tmp_path / "hf" / "train" / SECOND)
    shutil.rmtree(tmp_path / "hf" / "test")
    part = FilePart(str(tmp_path / "hf" / "train"), 3, 5)
    assert [document for _, document in document_formats.read(part, Wanted())] == TEXTS[3:5]
