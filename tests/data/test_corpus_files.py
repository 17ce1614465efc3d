"""A corpus is read by its bytes, and what is not read is counted and named."""

import bz2
import gzip
import io
import json
import lzma
import os
import tarfile
import zipfile

import datasets
import numpy as np
import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet

from holmesjax.config import DataConfig
from holmesjax.data import (
    chat,
    corpus as corpora,
    corpus_files,
    document_formats,
    file_kinds,
    text,
    tokenizer_paths,
    tokens,
)
from holmesjax.data.documents import Wanted
from holmesjax.errors import DataError, HolmesError
from holmesjax.hugging_face import json_file
from launch.__main__ import main
from tests.data.object_store import object_store

ROWS = [{"text": "first → page", "url": "http://a"}, {"text": "second page", "url": "http://b"}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
RAW = LINES.encode()
WORDS = [row["text"] for row in ROWS]
CSV = "url,text\n{}".format("".join(f"{row['url']},{row['text']}\n" for row in ROWS)).encode()
ZSTD = zstandard.ZstdCompressor().compress
SKIPPED = b"\x5e\x2a\x4d\x18\x02\0\0\0ab"  # a frame of zstd without content


def parquet_bytes(**columns):
    out = io.BytesIO()
    parquet.write_table(pa.table(columns or {"text": WORDS}), out)
    return out.getvalue()


def arrow_bytes(new):
    table, out = pa.table({"text": WORDS}), io.BytesIO()
    with new(out, table.schema) as writer:
        writer.write_table(table)
    return out.getvalue()


def tar_bytes(mode):
    out, content = io.BytesIO(), b"hello"
    with tarfile.open(fileobj=out, mode=mode) as archive:
        about = tarfile.TarInfo("in.txt")
        about.size = len(content)
        archive.addfile(about, io.BytesIO(content))
    return out.getvalue()


def zip_bytes():
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("in.txt", "hello")
    return out.getvalue()


# Files whose documents are those of `ROWS`, under names that say little, nothing, or what is wrong.
READ = {
    "part.00000.json.gz": gzip.compress(RAW),  # as C4 and Dolma are named
    "loose.json": RAW,  # as Megatron-LM names them
    "rows.ndjson": RAW,
    "ROWS.JSONL": RAW,
    "rows.txt": RAW,
    "rows": RAW,
    "unpacked_on_the_way.jsonl.gz": RAW,
    "x.jsonl.xz": lzma.compress(RAW),
    "x.jsonl.bz2": bz2.compress(RAW),
    "x.zst": SKIPPED + ZSTD(RAW),
    "padded.gz": gzip.compress(RAW[:9]) + gzip.compress(RAW[9:]) + bytes(512),
    "packed.jsonl": gzip.compress(RAW),
    "twice.json.gz": gzip.compress(gzip.compress(RAW)),
    "of_windows.jsonl": LINES.encode("utf-16"),
    "of_windows_be.json.gz": gzip.compress(b"\xfe\xff" + LINES.encode("utf-16-be")),
    "utf_32.jsonl": LINES.encode("utf-32"),
    "marked.json": b"\xef\xbb\xbf\r\n" + RAW.replace(b"\n", b"\r\n"),
    "array.json": json.dumps(ROWS, indent=2).encode(),
    "over_lines.json": "".join(json.dumps(row, indent=2) + "\n" for row in ROWS).encode(),
    "over_lines": gzip.compress("".join(json.dumps(row, indent=1) for row in ROWS).encode()),
    "a.csv": CSV,
    "of_excel.csv": b"\xef\xbb\xbf" + CSV.replace(b"\n", b"\r\n"),
    "a.TSV.gz": gzip.compress(CSV.replace(b",", b"\t")),
    "A.PARQUET": parquet_bytes(),
    "table": parquet_bytes(),
    "categories.parquet": parquet_bytes(text=pa.array(WORDS).dictionary_encode()),
    "a.feather": arrow_bytes(pa.ipc.new_file),
    "stream.ARROW": arrow_bytes(pa.ipc.new_stream),
}
ARRAY = json.dumps(ROWS)
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
NOT_READ = {
    "a.tar.gz": (tar_bytes("w:gz"), "tar archive in gzip"),
    "a.tar": (tar_bytes("w:"), "tar archive"),
    "a.zip": (zip_bytes(), "zip archive"),
    "a.pdf": (b"%PDF-1.7\nno zero byte", "PDF file"),
    "a.warc.gz": (gzip.compress(b"WARC/1.0\r\nWARC-Type: warcinfo\r\n"), "WARC archive in gzip"),
    "picture.txt": (POINTER, "pointer of Git LFS"),
    "a.lz4": (b"\x04\x22\x4d\x18" + RAW, "lz4 file"),
    "a.txt": (b"a\0b\0\0", "binary file"),
    "texts.json": (b'["one", "two"]', "JSON without an object in a line"),
    "texts.json.gz": (gzip.compress(b'"one"\n"two"\n'), "JSON without an object in a line in gzip"),
    "arrays.json": (f"{ARRAY}\n{ARRAY}\n".encode(), "JSON without an object in a line"),
    "arrays.jsonl": (f"{ARRAY}\n".encode() * 1000, "JSON without an object in a line"),
    "sequence.json-seq": (
        b'\x1e{"text": "a"}\n\x1e{"text": "b"}\n',
        "JSON without an object in a line",
    ),
    "wiki_00": (b'<doc id="1" url="u" title="A">\nA\n</doc>\n', "documents between tags"),
    "trec": (b"<DOC>\n<DOCNO>1</DOCNO>\nA\n</DOC>\n", "documents between tags"),
    "dump.xml.bz2": (
        bz2.compress(b'<mediawiki xmlns="x">\n<page>'),
        "documents between tags in bzip2",
    ),
    "no_mark.txt": ("text of Windows".encode("utf-16-le"), "UTF-16 without a mark"),
    "_SUCCESS": (b"", "empty file"),  # of Spark
    "none.gz": (gzip.compress(b""), "empty file in gzip"),
    "_metadata": (parquet_bytes(), "metadata of parquet files"),  # with the places of other files
    "a.parquet.gz": (gzip.compress(parquet_bytes()), "compressed parquet file in gzip"),
}


def documents(path, **wanted):
    parts = [part for part, _ in document_formats.cut(path, 2**20)]
    return [
        document for part in parts for _, document in document_formats.read(part, Wanted(**wanted))
    ]


@pytest.mark.parametrize("name", READ)
def test_bytes_decide_how_a_file_is_read(tmp_path, name):
    (tmp_path / name).write_bytes(READ[name])
    assert documents(tmp_path / name) == WORDS
    config = DataConfig(corpus=str(tmp_path))
    found = document_formats.corpus_of(config)
    assert ([file.name for file in found.files], found.left_out.words) == ([name], "")
    with pytest.raises(DataError, match=rf"{name}: is not read as text\n"):
        text.read(config, 3)


@pytest.mark.parametrize(
    "name, content",
    [
        ("a.txt", WORDS[0].encode("utf-16")),
        ("a.md", b"\xef\xbb\xbf" + WORDS[0].encode()),
        ("a.txt.bz2", bz2.compress(WORDS[0].encode())),
        ("a", WORDS[0].encode()),
    ],
)
def test_text_of_any_encoding_is_text_without_its_mark(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert documents(tmp_path / name) == WORDS[:1]
    if not name.endswith(".bz2"):  # for which `launch tokenize` is named
        config = DataConfig(corpus=str(tmp_path), validation_fraction=0.0)
        split = text.corpora.read(config)
        assert list(text.corpora.documents(split, split.train)) == WORDS[:1]


@pytest.mark.parametrize(
    "content",
    [
        b'{\n  "a": 1\n} is how a dict of Python looks',
        b"[1, 2]\n",
        b'[{"a": 1}] is how a list of Python looks',
        b"{} is an empty one",
        b"# a heading\n" + RAW,
        f"{ARRAY}\n".encode() + b"and more words\n" * 2**13,
        b"version https://git-lfs.github.com/spec/v1 is the first line of a pointer",
        POINTER + b"is how a pointer looks. " * 50,
        b"WARC/1.0 is the first line of an archive",
    ],
)
def test_text_that_begins_like_another_kind_stays_text(tmp_path, content):
    (tmp_path / "a.txt").write_bytes(content)
    assert file_kinds.kind_of(tmp_path / "a.txt") == file_kinds.FileKind(file_kinds.TEXT)
    assert documents(tmp_path / "a.txt") == [content.decode()]


@pytest.mark.parametrize(
    "content, where",
    [
        (json.dumps(ROWS).encode()[:-4], "a.json: is no JSON"),  # cut off
        (b"[{'text': 'a list of Python'}]", "a.json: is no JSON"),
        (b"\xef\xbb\xbf" + RAW[:20], "a.json, object 1: is no JSON"),
        (b'{\n "text": "a",\n', "a.json, object 1: is no JSON"),
        (b"<!DOCTYPE html>", "a.json, byte 0: is no JSON"),
        (POINTER, "a.json: is a pointer in place of the file\n.*LFS\n.*git lfs pull"),
    ],
)
def test_what_is_no_json_in_a_file_of_json_is_a_mistake(tmp_path, content, where):
    """A whole file of one of these kinds would be read."""
    path = tmp_path / "a.json"
    for packed, name in ((content, path), (gzip.compress(content), tmp_path / "a.json.gz")):
        name.write_bytes(packed)
        with pytest.raises(
            DataError, match=where.replace("a.json", name.name).replace("byte 0", ".*")
        ):
            documents(name)


def test_a_line_longer_than_what_is_looked_at_is_a_line(tmp_path):
    long = {"text": "x" * (2 * file_kinds.HEAD_BYTES)}
    (tmp_path / "a.json").write_text(json.dumps(long) + "\n" + json.dumps(long) + "\n")
    assert documents(tmp_path / "a.json") == [long["text"]] * 2
    (tmp_path / "b.json").write_text(json.dumps(long, indent=1))
    assert documents(tmp_path / "b.json") == [long["text"]]


@pytest.mark.parametrize(
    "content, where",
    [
        ('{\n "text": "a"\n}\n{\n "name": "b"\n}', "object 2: has no text in a field `text`"),
        ('{\n "text": "' + "x" * 70000 + '"\n}\n{', "object 2: is no JSON"),
    ],
)
def test_an_object_over_lines_that_is_no_document_is_named(tmp_path, content, where):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError, match=f"a.json, {where}"):
        documents(tmp_path / "a.json")


def tokenized(*words):
    return main(["tokenize", *map(str, words), "--tokenizer", "bytes", "--workers", "1"])


@pytest.mark.parametrize("name", NOT_READ)
def test_a_named_file_of_which_nothing_is_read_is_refused(tmp_path, name, capsys):
    content, kind = NOT_READ[name]
    (tmp_path / name).write_bytes(content)
    for command in (
        ["tokenize", "--tokenizer", "bytes", "--out", str(tmp_path / "out")],
        ["tokenizer", "--vocab", "300", "--out", str(tmp_path / "bpe.json")],
        ["data"],
    ):
        assert main([command[0], str(tmp_path / name), *command[1:]]) == 2
        assert f"{name}: is of a kind that is not read\n  found: {kind}" in capsys.readouterr().err


def test_what_is_left_out_is_counted_and_named(tmp_path, capsys):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name, (content, _) in NOT_READ.items():
        (corpus / name).write_bytes(content)
    (corpus / ".git").mkdir()
    os.mkfifo(corpus / "pipe")
    assert tokenized(corpus, "--out", tmp_path / "none") == 2  # of nothing that is read
    said = capsys.readouterr().err
    assert "holds no text\n  found: nothing but what is not read: 23 (" in said
    (corpus / "a.jsonl").write_bytes(RAW)
    kinds = [*(kind for _, kind in NOT_READ.values()), "hidden file or folder", "pipe, socket"]
    out = tmp_path / "out"
    assert tokenized(corpus, "--out", out) == 0
    said = capsys.readouterr()
    for words in (said.out, said.err):
        assert "left out: 23 (" in words
        assert all(f"{kind}" in words for kind in kinds)
    assert main(["data", str(corpus), "model.context_length=16"]) == 0
    assert "left out    23 (" in capsys.readouterr().out
    assert main(["tokenizer", str(corpus), "--vocab", "300", "--out", str(out / "b.json")]) == 0
    assert "left out: 23 (" in capsys.readouterr().out
    (out / "more.jsonl").write_bytes(RAW)
    (out / "b.json").rename(out / "other.json")
    (out / "empty.gz").touch()
    found = tokens.read(DataConfig(corpus=str(out), source="tokens", validation_fraction=0.0), 4)
    kinds = "JSON lines: 1, more.jsonl; JSON over several lines: 1, other.json; damaged file: 1, "
    assert found.left_out == f"3 ({kinds}empty.gz)"


def test_a_file_unlike_the_rest_is_named_before_it_trains(tmp_path, capsys):
    rows, texts = tmp_path / "rows", tmp_path / "texts"
    three = [f"{name}.txt" for name in "abc"]
    for folder, names in {rows: ["a.jsonl", "b.jsonl.gz"], texts: three}.items():
        folder.mkdir()
        for name in names:
            content = RAW if folder == rows else b"some text, and more of it"
            (folder / name).write_bytes(gzip.compress(content) if "gz" in name else content)
        for name in ("README.md", "desktop.ini"):
            (folder / name).write_text("about the folder")
    assert tokenized(rows, "--out", tmp_path / "out") == 0
    said = capsys.readouterr()
    assert "2 text" not in said.out
    assert "1 text; most names end in .jsonl; also read: desktop.ini" in said.out
    assert "left out: 1 (about the rows beside it: 1, README.md)" in said.out
    words = "most names end in .txt; also read: desktop.ini, README.md"
    read = corpora.read(DataConfig(corpus=str(texts), validation_fraction=0.0))
    assert read.left_out == f"nothing; {words}"
    assert tokenized(texts, "--out", tmp_path / "out2") == 0
    assert f"files   5 text; {words}" in capsys.readouterr().out


def test_names_that_say_that_a_file_trains_twice_or_is_for_tests_are_said(tmp_path, capsys):
    (rows := tmp_path / "rows").mkdir()
    for name in ("train-0000-of-0002.jsonl", "train-0001-of-0002.jsonl", "test-0000-of-0001.jsonl"):
        (rows / name).write_bytes(RAW)
    (rows / "train-0001-of-0002.jsonl.gz").write_bytes(gzip.compress(RAW))  # gzip --keep
    assert tokenized(rows, "--out", tmp_path / "out") == 0
    said = capsys.readouterr().out
    twins = "train-0001-of-0002.jsonl, train-0001-of-0002.jsonl.gz"
    assert f"of one name, perhaps of one content: {twins}; " in said
    assert "read beside files for training: test-0000-of-0001.jsonl\n" in said
    for name in ("b.jsonl.part", "train-0001-of-0002.jsonl.1"):
        (rows / name).write_bytes(RAW)
    assert tokenized(rows, "--out", tmp_path / "out2") == 0
    said = capsys.readouterr().out
    both = "train-0001-of-0002.jsonl, train-0001-of-0002.jsonl.1, train-0001-of-0002.jsonl.gz"
    assert f"perhaps of one content: {both}; " in said
    assert "half downloads, by their names: b.jsonl.part\n" in said
    (numbers := tmp_path / "numbers").mkdir()
    for name in ("train.npy", "val.npy"):
        np.save(numbers / name, np.arange(99) % 256)
    read = tokens.read(DataConfig(corpus=str(numbers), source="tokens", validation_fraction=0.0), 4)
    assert read.left_out == "nothing; read beside files for training: val.npy"
    (texts := tmp_path / "texts").mkdir()
    for name in ("wiki.train.tokens", "wiki.valid.tokens", "contest.txt"):
        (texts / name).write_text("some text, and more of it")
    said = corpora.read(DataConfig(corpus=str(texts), validation_fraction=0.0)).left_out
    assert said.endswith("; read beside files for training: wiki.valid.tokens")


def test_what_others_leave_beside_rows_is_no_second_copy_of_them(tmp_path, capsys):
    """A task that Spark has not finished, and what `datasets` has kept of a map."""
    (tmp_path / "spark/_temporary/0").mkdir(parents=True)
    for place in ("part-0.json", "_temporary/0/part-0.json"):
        (tmp_path / "spark" / place).write_bytes(RAW)
    (tmp_path / "cache").mkdir()
    for name in ("x-train.arrow", "cache-0123456789abcdef.arrow"):
        (tmp_path / "cache" / name).write_bytes(arrow_bytes(pa.ipc.new_stream))
    (tmp_path / "cache/dataset_info.json").write_text('{"features": {}}')
    for folder, names in {"spark": "_temporary", "cache": "cache-0123456789abcdef.arrow"}.items():
        assert tokenized(tmp_path / folder, "--out", tmp_path / f"{folder}-out") == 0
        said = capsys.readouterr().out
        assert "2 documents" in said
        assert names in said
    (tmp_path / "cache/dataset_info.json").unlink()  # nothing says of what it is made
    assert tokenized(tmp_path / "cache", "--out", tmp_path / "out") == 0
    assert "4 documents" in capsys.readouterr().out


def test_a_folder_of_the_hubs_cache_is_no_corpus_and_its_files_are_named(tmp_path, capsys):
    root = tmp_path / "datasets--me--rows"
    for version, blob in {"b" * 40: "1", "a" * 40: "2"}.items():
        (root / "snapshots" / version).mkdir(parents=True)
        (root / "blobs").mkdir(exist_ok=True)
        (root / "blobs" / blob).write_bytes(RAW)
        (root / "snapshots" / version / "rows.jsonl").symlink_to(f"../../blobs/{blob}")
    (root / "refs").mkdir()
    (root / "refs/main").write_text("b" * 40)
    named = f"{root / 'snapshots' / ('b' * 40)}\n"
    assert tokenized(root, "--out", tmp_path / "out") == 2
    assert f"fix: name one of them: {named}" in capsys.readouterr().err
    for use in (tokenizer_paths.find, lambda path: json_file.read(path / "config.json")):
        with pytest.raises(HolmesError) as error:
            use(root)
        assert f"fix: name the folder that has the files: {named}" in f"{error.value}\n"
    assert tokenized(root / "snapshots" / ("b" * 40), "--out", tmp_path / "out") == 0


def test_empty_lists_of_tokens_are_counted(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(
        '{"text": [5, 6]}\n{"text": []}\n{"text": ""}\n{"text": []}\n'
    )
    for _ in range(2):  # the second finds its shard
        assert tokenized(tmp_path / "a.jsonl", "--out", tmp_path / "out") == 0
        said = capsys.readouterr().out
        assert "2 documents" in said
        assert "left out: 2 documents that are empty lists of tokens" in said


@pytest.mark.parametrize(
    "name, content",
    [
        ("a.jsonl", b""),
        ("a.jsonl", b"\n\n"),
        ("a.txt", b""),
        ("a.json.gz", gzip.compress(b"", mtime=0)),
        ("a.parquet", parquet_bytes(text=pa.array([], pa.string()))),
        ("a.json", b"[]"),
    ],
)
def test_a_corpus_without_a_document_is_refused(tmp_path, name, content, capsys):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / name).write_bytes(content)
    for corpus in (tmp_path / "corpus", tmp_path / "corpus" / name):
        if name == "a.json":
            break
        assert tokenized(corpus, "--out", tmp_path / "out") == 2, corpus
        assert "error: corpus: " in capsys.readouterr().err
        assert main(["tokenizer", str(corpus), "--vocab", "300", "--out", str(tmp_path / "b")]) == 2


def test_a_dataset_without_rows_is_refused(tmp_path, capsys):
    features = datasets.Features({"text": datasets.Value("string")})
    datasets.Dataset.from_dict({"text": []}, features=features).save_to_disk(tmp_path / "hf")
    assert tokenized(tmp_path / "hf", "--out", tmp_path / "out") == 2
    assert "hf is empty\n  found: nothing in its file" in capsys.readouterr().err


@pytest.mark.parametrize("pattern", [None, "**/*.txt"])
def test_links_are_followed_once(tmp_path, pattern):
    corpus, other = tmp_path / "corpus", tmp_path / "other"
    (corpus / "own").mkdir(parents=True)
    (other / "deep").mkdir(parents=True)
    for path in (corpus / "own" / "a.txt", other / "b.txt", other / "deep" / "c.txt"):
        path.write_text(path.name)
    (corpus / "z").symlink_to(other)  # read
    (corpus / "y").symlink_to(corpus / "own")  # read already
    (corpus / "x.txt").symlink_to(corpus / "own" / "a.txt")  # read already
    (corpus / "d.txt").symlink_to(other / "deep" / "c.txt")  # read, and not below z any more
    (corpus / "own" / "round").symlink_to(corpus)
    (corpus / "none.txt").symlink_to(tmp_path / "none")
    (corpus / "self.txt").symlink_to(corpus / "self.txt")
    (other / "up").symlink_to(tmp_path)
    found = document_formats.corpus_of(DataConfig(corpus=str(corpus), pattern=pattern))
    names = [file.name for file in found.files]
    read = sorted(path.read_text() for path in (file.path for file in found.files))
    assert read == ["a.txt", "b.txt", "c.txt"], names
    assert names[:2] == ["d.txt", "own/a.txt"]
    kinds, above = found.left_out.names, ["z/up/corpus", "z/up/other"]
    assert kinds["link in a circle"] == ["own/round"]
    assert sorted(kinds[corpus_files.TWICE]) == ["x.txt", "y", "z/deep/c.txt", *above]
    assert kinds["link to what is not there"] == ["none.txt"]
    assert kinds["link that leads nowhere"] == ["self.txt"]
    config = DataConfig(corpus=str(corpus), pattern="**/*.txt", validation_fraction=0.0)
    assert list(text.read(config, 3).files) == names


def test_dialogues_are_found_as_documents_are(tmp_path):
    line = '{"prompt": "one, ", "answer": "two"}\n'
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(line.encode()))
    (tmp_path / "deep" / "b.NDJSON").write_bytes(line.encode("utf-16"))
    (tmp_path / "c.json").write_text(json.dumps([json.loads(line)] * 3))
    (tmp_path / "README.md").write_text("About them.")
    (tmp_path / "d.tar").write_bytes(NOT_READ["a.tar"][0])
    config = DataConfig(
        corpus=str(tmp_path), source="chat", documents="mask", validation_fraction=0.0
    )
    found = chat.read(config, 16)
    assert list(found.files) == ["a.json.gz", "c.json", "deep/b.NDJSON"]
    assert len(found.train.spans) == 5
    assert found.left_out == "2 (about the rows beside it: 1, README.md; tar archive: 1, d.tar)"


@pytest.mark.parametrize(
    "name, content, where",
    [
        ("a.parquet", parquet_bytes(ids=[[1, 2], [3, None]]), r"a.parquet, row 1"),
        ("a.jsonl", b'{"ids": [1, 2]}\n{"ids": [3, null]}\n', r"a.jsonl, byte 16"),
        ("a.json", b'[{"ids": [1, 2]}, {"ids": [3, null]}]', r"a.json, item 1"),
    ],
)
def test_a_null_among_tokens_is_named_with_file_and_row(tmp_path, name, content, where):
    (tmp_path / name).write_bytes(content)
    message = rf"{where}: has a null among the tokens of `ids`\n  found: null at place 1"
    with pytest.raises(DataError, match=message):
        documents(tmp_path / name, column="ids")


def masked(**beside):
    rows = {"ids": [[1, 2], [3, 4]], **{name: [[1, 1], values] for name, values in beside.items()}}
    lines = [{name: column[row] for name, column in rows.items()} for row in range(2)]
    return rows, "".join(json.dumps(line) + "\n" for line in lines).encode()


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "arrow", "fixed.arrow", "hf"])
def test_tokens_that_a_field_beside_them_leaves_out_are_refused(tmp_path, ending):
    """Padding and prompts of a data set that another trainer has made would train."""
    masks = {"attention_mask": [1, 0], "labels": [3, -100], "loss_mask": [1, 0], "other": [1, 0]}
    for name, values in masks.items():
        rows, lines = masked(**{name: values})
        path = tmp_path / name / f"a.{ending}"
        path.parent.mkdir()
        if ending == "hf":
            datasets.Dataset.from_dict(rows).save_to_disk(path)
        elif "arrow" in ending:
            kind = pa.list_(pa.int64(), 2 if "fixed" in ending else -1)
            table = pa.table({key: pa.array(value, kind) for key, value in rows.items()})
            with pa.ipc.new_file(path, table.schema) as file:
                file.write(table)
        else:
            path.write_bytes(parquet_bytes(**rows) if ending == "parquet" else lines)
        if name == "other":
            assert [list(tokens) for tokens in documents(path, column="ids")] == rows["ids"]
            continue
        message = rf"has tokens that its `{name}` leaves out.*\n  found: {values[1]} at place 1"
        with pytest.raises(DataError, match=message):
            documents(path, column="ids")


@pytest.mark.parametrize(
    "content, words",
    [
        ("id,words\n1,a\n", "a.csv: has no column `text`\n  found: id, words"),
        ("text,text\n1,a\n", "a.csv: has several columns `text`"),
        ("id,text\n1,a\n2,b,c\n", "line 3: has another number of cells than the 2 names"),
        ('id,text\n1,"a\n', "a.csv, line 2: is no whole CSV table"),
        ("id,text\n1,\u00e9\n".encode("latin-1"), "a.csv, .* is no UTF-8"),
    ],
)
def test_a_table_that_is_none_is_refused_with_its_line(tmp_path, content, words):
    own = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "a.csv").write_bytes(own)
    with pytest.raises(DataError, match=words):
        documents(tmp_path / "a.csv")


def test_quotes_are_of_csv_alone(tmp_path):
    (tmp_path / "a.csv").write_text('text\n"one ""two"",\nthree"\n')
    (tmp_path / "a.tsv").write_text('id\ttext\n1\t"one\n2\ttwo" he said\n')
    assert documents(tmp_path / "a.csv") == ['one "two",\nthree']
    assert documents(tmp_path / "a.tsv") == ['"one', 'two" he said']
    (tmp_path / "a.tsv").write_text('text\n"I went out, and then\n"I came."\nhe said\n')
    assert documents(tmp_path / "a.tsv") == ['"I went out, and then', '"I came."', "he said"]
    for content in ('id\ttext\n1\t"he said ""hi"""\n', 'text\n"one\ntwo"\n'):  # as pandas writes
        (tmp_path / "a.tsv").write_text(content)
        with pytest.raises(DataError, match=r"line 2: has a cell in quotes, which TSV does not"):
            documents(tmp_path / "a.tsv")


def test_damage_behind_the_beginning_of_a_file_is_refused(tmp_path):
    noise = np.random.default_rng(0).bytes(2**20).hex().encode()
    for name, pack in {"a.xz": lzma.compress, "a.bz2": bz2.compress, "a.gz": gzip.compress}.items():
        whole = pack(noise)
        path = tmp_path / name
        broken = bytearray(whole)
        broken[len(whole) // 2] ^= 8
        for content in (whole[:-20], bytes(broken), whole + b"junk"):
            path.write_bytes(content)
            with pytest.raises(DataError, match=rf"{name}: is no whole \w+ file"):
                documents(path)
    late = tmp_path / "late.txt"
    late.write_bytes(b"x" * 2**17 + b"\0")
    with pytest.raises(DataError, match=r"late.txt: holds a zero byte\n  found: at byte 131,072"):
        documents(late)


def test_a_store_has_the_kinds_that_a_folder_has(tmp_path):
    for name, content in READ.items():
        (tmp_path / name).write_bytes(content)
    for name, (content, _) in NOT_READ.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / ".hidden").write_text("no")
    with object_store("kinds") as store:
        store.put(f"{tmp_path}/", "kinds/all/", recursive=True)
        here, there = (
            document_formats.corpus_of(DataConfig(corpus=place))
            for place in (str(tmp_path), "s3://kinds/all")
        )
        assert [(f.name, f.kind) for f in there.files] == [(f.name, f.kind) for f in here.files]
        assert there.left_out.words == here.left_out.words
        assert [documents(file.path) for file in there.files] == [WORDS] * len(READ)
        with pytest.raises(DataError, match=r"a.tar: is of a kind that is not read"):
            document_formats.corpus_of(DataConfig(corpus="s3://kinds/all/a.tar"))


@pytest.mark.parametrize("new", [pa.ipc.new_stream, pa.ipc.new_file])
def test_a_damaged_file_of_arrow_is_refused(tmp_path, new):
    for cut in (1, 8, 200):
        (tmp_path / "a.arrow").write_bytes(arrow_bytes(new)[:-cut])
        with pytest.raises(DataError, match=r"a.arrow: is no whole Arrow"):
            documents(tmp_path / "a.arrow")


@pytest.mark.parametrize(
    "content", [RAW.replace(b"\n", b"\r"), RAW.replace(b"\n", b""), RAW[:-1] + b"}"]
)
def test_objects_that_are_no_lines_are_refused(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(DataError, match=r"a.json, byte \d+: is no JSON\n.*Extra data"):
        documents(tmp_path / "a.json")


def test_a_pattern_that_names_what_is_not_read_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(RAW)
    (tmp_path / "b.bin").write_bytes(b"\0")
    with pytest.raises(DataError, match=r"b.bin: is of a kind that is not read\n.*binary file"):
        document_formats.corpus_of(DataConfig(corpus=str(tmp_path), pattern="*"))
    for pattern in ("/a", "../*", "a**/b"):
        with pytest.raises(DataError, match=r"data.pattern: is no pattern"):
            document_formats.corpus_of(DataConfig(corpus=str(tmp_path), pattern=pattern))
