"""Corpora in an object store: what is there as it is read here, and what is not by its name."""

import logging

import numpy as np
import pytest

from holmesjax.config import DataConfig
from holmesjax.data import chat, document_formats, object_stores, text, tokens
from holmesjax.data.documents import Wanted
from holmesjax.errors import DataError
from tests.data import written_documents as formats, written_token_files as files
from tests.data.object_store import object_store


@pytest.fixture(scope="module")
def store():
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with object_store() as store:
        yield store


def put(store, folder, name):
    store.put(str(folder), f"corpora/{name}", recursive=True)
    return f"s3://corpora/{name}"


@pytest.mark.parametrize(
    "write",
    [formats.write_jsonl, formats.write_jsonl_gz, formats.write_jsonl_zst, formats.write_parquet],
)
def test_a_format_is_read_in_a_store_as_it_is_here(store, tmp_path, write):
    path = object_stores.path_of(put(store, write(tmp_path), write(tmp_path).name))
    parts = [part for part, _ in document_formats.cut(path, 10_000)]
    found = [document for part in parts for _, document in document_formats.read(part, Wanted())]
    assert found == formats.TEXTS


def test_a_folder_in_a_store_is_the_corpus_that_it_is_here(store, tmp_path):
    (tmp_path / "corpus" / "b").mkdir(parents=True)
    (tmp_path / "corpus" / ".hidden").mkdir()
    names = {"a.txt": b"first", "b/c.txt": b"second", "b/d.bin": b"\0", ".hidden/e.txt": b"no"}
    for name, content in names.items():
        (tmp_path / "corpus" / name).write_bytes(content)
    there = put(store, tmp_path / "corpus", "corpus")
    for pattern in (None, "**/*.txt"):
        expected, found = (
            text.read(DataConfig(corpus=str(corpus), pattern=pattern, validation_fraction=0.0), 3)
            for corpus in (tmp_path / "corpus", there)
        )
        assert (found.files, found.digests) == (expected.files, expected.digests)


def test_dialogues_in_a_store_are_the_rows_that_they_are_here(store, tmp_path):
    path = tmp_path / "dialogues.jsonl"
    path.write_text('{"prompt": "one, ", "answer": "two"}\n' * 20)
    there = put(store, path, "dialogues.jsonl")
    expected, found = (
        chat.read(DataConfig(corpus=str(corpus), source="chat", documents="mask"), 16)
        for corpus in (path, there)
    )
    assert (found.files, found.digests) == (expected.files, expected.digests)
    assert found.place == there
    assert len(found.train) == len(expected.train) > 0


def read(place, fraction=0.3):
    config = DataConfig(corpus=str(place), source="tokens", validation_fraction=fraction)
    return tokens.read(config, 5)


def test_files_of_tokens_in_a_store_have_the_windows_and_digests_that_they_have_here(
    store, tmp_path
):
    random = np.random.default_rng(0)
    documents = [random.integers(1, 200, n) for n in random.integers(1, 900, 300)]
    files.write_own(tmp_path / "a.bin", documents)
    files.write_megatron(tmp_path / "b.bin", documents, "<i4", 4)
    there = put(store, tmp_path, "tokens")
    expected, found = read(tmp_path), read(there)
    assert (found.digests, found.files) == (expected.digests, expected.files)
    assert found.place == "s3://corpora/tokens"
    for split in ("train", "validation"):
        ours, theirs = getattr(expected, split), getattr(found, split)
        assert len(ours) == len(theirs) > 1000
        for i in random.integers(0, len(ours), 200).tolist():
            np.testing.assert_array_equal(ours[i].tokens, theirs[i].tokens)
            np.testing.assert_array_equal(ours[i].begins, theirs[i].begins)
    config = DataConfig(corpus=there, source="tokens", validation_fraction=0.0)
    assert tokens.verify(config) == 2


def test_an_object_that_changes_or_vanishes_while_it_is_read_is_named(store, tmp_path):
    path = files.write_own(tmp_path / "a.bin", [np.arange(10**6) % 200])
    there = put(store, tmp_path, "changing")
    train = read(there, 0.0).train
    store.put(str(path), "corpora/changing/a.bin")  # the same content is the same object
    object_stores._block.cache_clear()
    train[0]
    files.overwrite(".bin", 200_000, b"\7")(path)
    store.put(str(path), "corpora/changing/a.bin")
    with pytest.raises(DataError, match=r"s3://.*a.bin: can no longer be read.*\n.*Etag"):
        train[len(train) // 2]
    assert train[0].tokens.tolist() == [0, 1, 2, 3, 4, 5]  # which is kept
    store.rm("corpora/changing/a.bin")
    with pytest.raises(DataError, match=r"s3://.*a.bin: can no longer be read.*\n.*not exist"):
        train[len(train) // 3]


@pytest.mark.parametrize(
    "place, message",
    [
        ("s3://nobucket/tokens", r"data.corpus: is not there\n  found: s3://nobucket/tokens"),
        ("s3://corpora/nothing", r"data.corpus: is not there\n  found: s3://corpora/nothing"),
        ("s4://corpora/nothing", r"s4://corpora/nothing: is in no store that is known\n.*s4"),
        ("gs://corpora/nothing", r"gs://corpora/nothing: needs the package gcsfs"),
    ],
)
def test_what_is_not_in_a_store_is_named(store, place, message):
    with pytest.raises(DataError, match=message):
        read(place)


def test_a_store_that_refuses_or_does_not_answer_is_named(store, monkeypatch):
    def refuse(path):
        raise PermissionError("Access Denied")

    monkeypatch.setattr(store, "info", refuse)
    with pytest.raises(DataError, match=r"data.corpus: cannot be read\n.*Access Denied"):
        read("s3://corpora/tokens")
