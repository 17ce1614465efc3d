"""The data is a function of (seed, sequences consumed); each byte comes once an epoch."""

import dataclasses
import gzip
import hashlib
import math
import os
import re
import subprocess

import numpy as np
import pytest
from hypothesis import given, strategies as st

from holmesjax import config as configs, job as jobs, job_files
from holmesjax.config import DataConfig
from holmesjax.data import corpus, document_formats, object_stores, text
from holmesjax.data.batches import Batches, Rows, model_inputs
from holmesjax.data.byte_tokenizer import BEGIN, ByteTokenizer
from holmesjax.data.corpus import Corpus
from holmesjax.data.text import windows_of
from holmesjax.errors import ConfigError, DataError
from holmesjax.planner import planner
from launch.__main__ import _data_reader, main
from launch.arguments import parse
from tests.cases import cases
from tests.jobs import write_run


def make_corpus(num_bytes=10_000, num_validation=4_000):
    random = np.random.default_rng(0)
    train, validation = (
        random.integers(1, 256, size=size, dtype=np.uint8) for size in (num_bytes, num_validation)
    )
    return Corpus(train=train, validation=validation, source="", files={}, digests={})


def make_batches(seed=0, global_batch=4, length=16, **changes):
    sizes = {"num_validation": 3, "seed": seed, "global_batch": global_batch, **changes}
    return Batches(data=text.cut(make_corpus(), length), length=length, **sizes)


def train(batches, first):
    """The tokens of a step, as bytes."""
    return np.uint8(batches.train(first).token_NL)


def validation(batches, index):
    return np.uint8(batches.validation(index).token_NL)


def decode(tokens):
    return ByteTokenizer().decode(np.ravel(tokens).tolist())


@pytest.mark.parametrize("size", [0, 1, 16, 17, 32, 33, 97, 100])
def test_windows_are_slices_of_the_corpus(size):
    tokens = np.arange(size, dtype=np.uint8)
    want = [tokens[i : i + 17] for i in range(0, size - 16, 16)]  # each with its last target
    np.testing.assert_array_equal(windows_of(tokens, 16), np.reshape(want, (-1, 17)))


def test_every_epoch_visits_every_window_once_in_an_order_of_its_own():
    batches = make_batches(global_batch=7)  # does not divide the 624 windows: batches span epochs
    want = sorted(row.tobytes() for row in windows_of(make_corpus().train, 16))
    rows = [row.tobytes() for i in range(0, 2 * len(want) + 7, 7) for row in train(batches, i)]
    first, second = rows[: len(want)], rows[len(want) : 2 * len(want)]
    assert sorted(first) == want == sorted(second)
    assert sum(a == b for a, b in zip(first, second, strict=True)) < 10


def test_an_epoch_of_one_seed_is_no_epoch_of_another():
    batches = [make_batches(seed=seed, num_validation=0, global_batch=600) for seed in (0, 1)]
    assert not np.array_equal(train(batches[0], 624), train(batches[1], 0))


def test_a_batch_is_the_same_whenever_and_wherever_it_is_asked_for():
    forwards = [train(make_batches(), first) for first in range(0, 20, 4)]
    batches = make_batches()
    backwards = [train(batches, first) for first in reversed(range(0, 20, 4))][::-1]
    np.testing.assert_array_equal(forwards, backwards)
    assert not np.array_equal(forwards[0], train(make_batches(seed=1), 0))


def test_another_batch_size_reads_on_where_the_last_one_stopped():
    rows = [train(make_batches(global_batch=b), first) for b, first in [(2, 0), (4, 2), (3, 6)]]
    np.testing.assert_array_equal(np.concatenate(rows), train(make_batches(global_batch=9), 0))


def test_validation_does_not_depend_on_the_seed_and_never_trains():
    one, other = make_batches(seed=1), make_batches(seed=2)
    for i in range(3):
        np.testing.assert_array_equal(validation(one, i), validation(other, i))
    trained = {row.tobytes() for i in range(0, 600, 4) for row in train(one, i)}
    held = {row.tobytes() for i in range(3) for row in validation(one, i)}
    assert len(held) == 12
    assert trained.isdisjoint(held)


@pytest.mark.parametrize(
    "changes, name", [({"length": 3000}, "train"), ({"num_validation": 70}, "validation")]
)
def test_a_corpus_that_is_too_small_is_refused(changes, name):
    with pytest.raises(DataError, match=f"the {name} split is too small"):
        make_batches(**changes)


def test_documents_are_numbered_from_their_marks():
    rows = np.array([[5, 6, BEGIN, 7, BEGIN, 8]])
    inputs = model_inputs(Rows(rows, rows == BEGIN, None, 5))
    assert inputs["token_BL"].tolist() == [[5, 6, 0, 7, 0]]
    assert inputs["target_BL"].tolist() == [[6, 0, 7, 0, 8]]
    assert inputs["segment_BL"].tolist() == [[0, 0, 1, 1, 2]]
    assert {x.dtype for x in inputs.values()} == {np.dtype("int32")}


@given(st.text().filter(lambda text: "\0" not in text))
def test_text_survives_the_tokenizer(words):
    assert decode(ByteTokenizer().encode(words)) == words


def test_targets_that_do_not_count_are_below_zero_and_counted_over_the_whole_batch():
    class Marked(text.Windows):
        """Every third target of a window counts, from the third on."""

        def __getitem__(self, index):
            counts = np.arange(1, 17) % 3 == 0
            item = super().__getitem__(index)
            return item._replace(targets=np.where(counts, item.tokens[1:], -1))

        def num_targets(self, index):
            return 5

    windows = Marked(windows_of(make_corpus().train, 16), np.arange(0))
    data = dataclasses.replace(text.cut(make_corpus(), 16), train=windows)
    batches = dataclasses.replace(make_batches(), data=data)
    rows = batches.train(8, np.array([1, 3]))
    assert rows.num_targets == 4 * 5
    got = model_inputs(rows)["target_BL"]
    want = train(make_batches(), 8)[[1, 3], 1:]
    np.testing.assert_array_equal(got[:, 2::3], want[:, 2::3])
    assert np.count_nonzero(got >= 0) == 2 * 5


# ---- files --------------------------------------------------------------------------------------


def files(config):
    return {file.name: file.path for file in document_formats.corpus_of(config).files}


def test_the_standard_library_is_there_and_split_by_file():
    config = DataConfig(corpus="python-stdlib")
    found = files(config)
    assert {"argparse.py", "json/decoder.py"} <= found.keys()
    assert list(found) == sorted(found)
    read = corpus.read(config)
    held = [name for name in found if corpus.is_validation(name, 0.05)]
    text = b"".join(bytes([BEGIN]) + found[name].read_bytes() for name in held)
    assert read.validation.tobytes() == text
    assert len(read.train) > 5_000_000
    assert np.count_nonzero(read.train == BEGIN) == len(found) - len(held)


def test_the_standard_library_leaves_out_what_builds_of_one_release_differ_in(
    tmp_path, monkeypatch
):
    for name in (
        *("abc.py", "ctypes/util.py", "json/__init__.py"),
        *("sitecustomize.py", "_sysconfigdata__linux.py", "config-3.11/python-config.py"),
        *("site-packages/a.py", "test/test_a.py", "unittest/test/a.py", "idlelib/a.py"),
        *("ctypes/macholib/dyld.py", "ensurepip/__init__.py", "_distutils_system_mod.py"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda _: str(tmp_path))
    found = files(DataConfig(corpus="python-stdlib"))
    assert list(found) == ["abc.py", "ctypes/util.py", "json/__init__.py"]


def test_digests_are_those_of_sha256sum(tmp_path):
    for i in range(20):
        (tmp_path / f"{i:02}.py").write_text(f"x = {i}\n")
    config = DataConfig(corpus=str(tmp_path), validation_fraction=0.3)
    read = corpus.read(config)
    for split, held in (("train", False), ("validation", True)):
        names = [name for name in read.files if corpus.is_validation(name, 0.3) == held]
        listing = subprocess.check_output(["sha256sum", *names], cwd=tmp_path)
        assert read.digests[split] == hashlib.sha256(listing).hexdigest()
        assert [f"{read.files[name]}  {name}" for name in names] == listing.decode().splitlines()


def test_a_digest_knows_names_and_contents_and_not_where_the_corpus_is(tmp_path):
    def digests(folder, **files):
        for name, words in {"a": "x = 1\n", **files}.items():
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / f"{name}.py").write_text(words)
        config = DataConfig(corpus=str(tmp_path / folder), validation_fraction=0.0)
        return corpus.read(config).digests["train"]

    assert digests("one") == digests("two")
    all_digests = [digests("one"), digests("b", b=""), digests("c", c=""), digests("d", a="x = 2")]
    assert len(set(all_digests)) == 4


@cases("fraction", [0.0, 0.05, 0.3, 1.0])
def test_the_share_of_the_files_held_out_is_the_fraction(fraction):
    """Within five standard errors of as many independent draws."""
    names = [f"folder/{i}.txt" for i in range(10_000)]
    held = sum(corpus.is_validation(name, fraction) for name in names)
    error = math.sqrt(len(names) * fraction * (1 - fraction))
    assert abs(held - fraction * len(names)) <= 5 * error


def test_the_split_of_a_file_does_not_move_with_others(tmp_path):
    for i in range(40):
        (tmp_path / f"{i}.py").write_text(f"x = {i}\n")
    config = DataConfig(corpus=str(tmp_path), validation_fraction=0.3)
    before = corpus.read(config).validation.tobytes()
    assert len(before) > 0
    (tmp_path / "another.py").write_text("y = 1\n")
    after = corpus.read(config).validation.tobytes()
    assert after.replace(b"\0y = 1\n", b"") == before


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"corpus": "/nowhere"}, "is not there"),
        ({"pattern": "*.nothing"}, "no file in"),
        ({"pattern": "/*.txt"}, "is no pattern"),
        ({"corpus": "x" * 5000}, "cannot be read"),
        ({}, "holds no text"),
        ({"pattern": "*.bin"}, "is of a kind that is not read"),
    ],
)
def test_a_corpus_that_is_none_is_refused(tmp_path, changes, words):
    (tmp_path / "a.bin").write_bytes(b"\0\1")
    with pytest.raises(DataError, match=words):
        corpus.read(DataConfig(**{"corpus": str(tmp_path), **changes}))


@pytest.mark.parametrize(
    "name, content",
    [
        ("a.jsonl", b'{"text": "a"}\n' * 9),
        ("a.txt.gz", gzip.compress(b"a", mtime=0)),
        ("a.parquet", b"PAR1"),
        ("a.arrow", b"ARROW1\0\0"),
        ("a.array_record", b"is no such file"),
    ],
)
def test_a_file_whose_documents_are_not_its_text_is_refused(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    (tmp_path / "b.txt").write_text("x" * 9)
    whole = DataConfig(corpus=str(tmp_path), validation_fraction=0.0)
    for config in (
        whole,
        dataclasses.replace(whole, pattern="*"),
        dataclasses.replace(whole, corpus=str(tmp_path / name)),
    ):
        for read in (corpus.read, lambda own: corpus.sizes(own, {"train": 99, "validation": 0})):
            with pytest.raises(DataError, match=f"{name}: is not read as text") as error:
                read(config)
            assert "data.source=tokens" in error.value.fix
            assert ("data.source=chat" in error.value.fix) == (name == "a.jsonl")
    assert corpus.read(dataclasses.replace(whole, pattern="*.txt")).files.keys() == {"b.txt"}
    assert files(whole).keys() == {name, "b.txt"}  # which `tokenize` reads


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("x = 1\n")

    def fail(path, cache=""):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(object_stores, "open_file", fail)
    with pytest.raises(DataError, match=r"a\.py: cannot be read"):
        corpus.read(DataConfig(corpus=str(tmp_path)))


def test_a_name_that_is_no_utf8_is_read(tmp_path):
    (tmp_path / os.fsdecode(b"caf\xe9.py")).write_text("x = 1\n")
    read = corpus.read(DataConfig(corpus=str(tmp_path), validation_fraction=0.0))
    assert decode(read.train) == "x = 1\n"


def test_the_corpus_of_a_folder_is_every_text_file_that_is_not_hidden(tmp_path):
    texts = {"a.txt": "a", "deep/b.md": "b", "no_suffix": "c", "UPPER.TXT": "d"}
    others = {".hidden": "h", ".git/config": "g", "deep/.cache/x.txt": "x", "image.png": "\x89\0"}
    for name, words in (texts | others).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(words.encode("latin-1"))
    config = DataConfig(corpus=str(tmp_path), validation_fraction=0.0)
    assert corpus.read(config).files.keys() == texts.keys()
    assert decode(corpus.read(config).train) == "dabc"  # in order of their names
    assert corpus.sizes(config, {"train": 100, "validation": 0})["train"] == 8


@pytest.mark.parametrize("num_batches", [1, 9, 30])
def test_a_fraction_that_would_do_is_named(tmp_path, num_batches):
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text("x" * (1 + 97 * i))
    own = [f"data.corpus={tmp_path}", "model.context_length=32", "train.eval_every=1"]
    own += [f"train.eval_batches={num_batches}", "train.global_batch=4"]
    path = write_run(tmp_path, {"a": (1,), "b": (1,)})
    look = lambda fraction: text.look(
        configs.load(path, [*own, "data.pattern=*.txt", f"data.validation_fraction={fraction}"])
    )
    with pytest.raises(DataError, match="the validation split") as error:
        look(0.001)
    [named] = re.findall(r"validation_fraction=([\d.]+)", error.value.fix)
    look(named)


# Faults of the data, by a change of the run and what is said; the folder has 2,000 bytes.
TOO_LITTLE = [
    (["data.corpus=text/a.txt"], "is no folder", "a file", "data.pattern=a.txt"),
    (["data.corpus=empty"], "holds no text", "binary file: 1, data.bin", "another folder"),
    (["data.pattern=*.py"], "no file in", "*.py", "change data.pattern"),
    (["train.global_batch=64"], "the train split is too small", "2,001 bytes", "global_batch"),
    (["model.context_length=2048"], "the train split", "2,001 bytes", "context_length"),
    (["train.eval_every=5"], "the validation split", "0 bytes", "train.eval_every=0"),
    (["data.corpus=python-stdlib", "data.pattern=*"], "is only for a folder", "*", "remove it"),
]


@pytest.mark.parametrize("target", ["file", "folder"])
@pytest.mark.parametrize(("settings", "problem", "found", "fix"), TOO_LITTLE)
def test_data_are_looked_at_before_anything_is_planned(
    tmp_path, monkeypatch, capsys, target, settings, problem, found, fix
):
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("x" * 2000)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/data.bin").write_bytes(b"\0")
    monkeypatch.chdir(tmp_path)
    path, own = write_run(tmp_path, {"a": (1,), "b": (1,)}), ["data.corpus=text"]
    if target == "folder":
        job_files.save(jobs.load(path, own, reads_data="node"))
        path, own = tmp_path / "run", []
    planned = []
    monkeypatch.setattr(planner, "make_plan", lambda *_: planned.append(1))
    assert main(["plan", str(path), *own, *settings]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3
    for line, words in zip(said, (problem, found, fix), strict=True):
        assert words in line
    assert not planned


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["data.source=tokens"],
        ["data.source=chat", "data.documents=mask"],
        ["data.tokenizer=absent"],
    ],
)
def test_a_plan_does_not_need_the_data_and_a_run_does(tmp_path, monkeypatch, capsys, settings):
    monkeypatch.chdir(tmp_path)
    path, where = write_run(tmp_path, {"a": (1,), "b": (1,)}), "data.corpus"
    own = ["data.corpus=absent", *settings]
    if "data.tokenizer=absent" in settings:
        (tmp_path / "absent.txt").write_text("x" * 2000)
        own, where = [f"data.corpus={tmp_path}", *settings], "data.tokenizer"
    assert main(["plan", str(path), *own]) == 0
    said = capsys.readouterr()
    assert "stage 1" in said.out
    assert said.err.startswith(f"note: {where} ")
    assert main(["train", str(path), *own]) == 2
    assert capsys.readouterr().err.startswith(f"error: {where}: ")


@pytest.mark.parametrize("name", ["text/a.txt", "text/a.txt/run"])
def test_a_file_in_place_of_the_run_folder_is_told_before_anything_is_planned(
    tmp_path, monkeypatch, name
):
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("x")
    monkeypatch.setattr(planner, "make_plan", None)
    path = write_run(tmp_path, {"a": (1,), "b": (1,)})
    with pytest.raises(ConfigError, match=r"run.dir: is no folder") as error:
        jobs.load(path, [f"run.dir={tmp_path / name}"])
    assert error.value.found == f"{tmp_path / 'text/a.txt'}, a file"


def test_a_launcher_that_reads_the_data_elsewhere_does_not_look_for_them(tmp_path, capsys):
    path = write_run(tmp_path, {"a": (1,), "b": (1,)})
    arguments = ["train", str(path), "data.corpus=/only/there", "--launcher"]
    assert main([*arguments, "kubernetes"]) == 2
    assert "--options" in capsys.readouterr().err  # and not the data
    assert _data_reader(parse([*arguments, "ssh"]), in_lab=False) is None
    assert _data_reader(parse([*arguments, "local"]), in_lab=False) == "node"
    alone = parse(arguments[:-1])
    assert [_data_reader(alone, in_lab=in_lab) for in_lab in (False, True)] == ["process", "node"]
