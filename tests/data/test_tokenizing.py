"""Text to files of tokens: the same tokens as text read at once, and nothing lost by a kill."""

import fcntl
import gzip
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from holmesjax.config import DataConfig
from holmesjax.data import text, tokenizing, tokens
from holmesjax.data.documents import FilePart, Wanted
from holmesjax.data.tokenizing import Shard, write_shard
from holmesjax.errors import ConfigError, DataError
from tests.data.trained_tokenizers import TEXTS, write_bpe, write_corpus
from tests.jobs import ROOT


def shard(out, *pieces, tokenizer="bytes"):
    whole = [
        FilePart(str(p), 0, p.stat().st_size) if not isinstance(p, FilePart) else p for p in pieces
    ]
    return Shard(name="s", parts=whole, tokenizer=str(tokenizer), wanted=Wanted(), out=out)


def stream(out, name="s"):
    about = json.loads((out / f"{name}.json").read_text())
    starts = np.fromfile(out / f"{name}.starts", np.int64).tolist()
    return np.fromfile(out / f"{name}.bin", about["dtype"]).tolist(), starts


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_the_windows_are_those_of_the_text_itself(tmp_path, tokenizer):
    corpus, out = write_corpus(tmp_path / "corpus"), tmp_path / "out"
    (corpus / "binary").write_bytes(b"a\0b")  # neither reads it
    out.mkdir()
    if tokenizer == "bpe":
        (tmp_path / "bpe").mkdir()
        write_bpe(corpus, tmp_path / "bpe")
        tokenizer = str(tmp_path / "bpe")
    of_text = DataConfig(corpus=str(corpus), tokenizer=tokenizer, validation_fraction=0.0)
    done = tokenizing.tokenize(of_text, out, workers=1, say=lambda done: None)
    assert (done.shards, done.documents) == (1, len(TEXTS))
    config = DataConfig(
        corpus=str(out), source="tokens", tokenizer=tokenizer, validation_fraction=0.0
    )
    expected, found = text.read(of_text, 7).train, tokens.read(config, 7).train
    assert len(found) == len(expected) > 10
    for i in range(len(found)):
        np.testing.assert_array_equal(found[i].tokens, expected[i].tokens)
        np.testing.assert_array_equal(found[i].begins, expected[i].begins)


def test_lines_are_the_same_however_a_file_is_cut(tmp_path):
    lines = [json.dumps({"text": words}) for words in (*TEXTS, "", "é")]
    path = tmp_path / "a.jsonl"
    path.write_text("\ufeff" + lines[0] + "\r\n\n" + "\n".join(lines[1:]))  # no last newline
    write_shard(shard(tmp_path, path))
    whole, starts = stream(tmp_path)
    documents = [[0, *words.encode()] for words in (*TEXTS, "", "é")]
    assert whole == [token for document in documents for token in document]
    assert starts == np.cumsum([0, *map(len, documents)])[:-1].tolist()
    size = path.stat().st_size
    for cut in range(1, size):
        pieces = FilePart(str(path), 0, cut), FilePart(str(path), cut, size)
        write_shard(shard(tmp_path, *pieces))
        assert stream(tmp_path) == (whole, starts)
        if cut > 80:
            break
    zipped = tmp_path / "a.jsonl.gz"
    content = path.read_bytes()
    zipped.write_bytes(gzip.compress(content[:50]) + gzip.compress(content[50:]))  # two members
    write_shard(shard(tmp_path, zipped))
    assert stream(tmp_path) == (whole, starts)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.txt", b"\xff", r"a.txt: is no UTF-8"),
        ("a.txt", b"a\0", r"a.txt: holds a zero byte\n  found: at byte 1"),
        ("a.jsonl", b'{"text": "a"}\n{"text', r"a.jsonl, byte 14: is no JSON"),
        ("a.jsonl", b'{"text": ' + b"[" * 100_000, r"a.jsonl, .* is no JSON\n.*nested too deep"),
        ("a.jsonl", b'{"words": "a"}', r"a.jsonl, byte 0: has no text in .*\n  found: words"),
        ("a.jsonl", b"[1]", r"a.jsonl, byte 0: has no text in .*\n  found: list"),
        ("a.jsonl", b'{"text": 3}', r"a.jsonl, byte 0: has no text in .*\n  found: text"),
        ("a.jsonl", b'{"text": "\xff"}', r"a.jsonl, byte 0: is no UTF-8"),
        ("a.jsonl", b'{"text": "\\ud800"}', r"a.jsonl, byte 0: holds half a character"),
        ("a.jsonl", b'{"text": [99999999999999999999]}', r"a.jsonl, byte 0: .* that is no token"),
        ("a.jsonl", b'{"text": "\\u0000"}', r"a.jsonl, byte 0: holds a zero byte"),
        ("a.jsonl.gz", b"text", r"a.jsonl.gz: is no whole gzip file"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "a"}', mtime=0)[:-3],
            r"a.jsonl.gz: is no whole gzip",
        ),
        ("a.jsonl.gz", gzip.compress(b"\n\n3", mtime=0), r"a.jsonl.gz, line 3: has no text"),
    ],
)
def test_what_is_no_text_is_named_with_its_place(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        write_shard(shard(tmp_path, tmp_path / name))
    assert not (tmp_path / "s.json").exists()


def test_a_damaged_shard_is_written_again_and_another_corpus_is_refused(tmp_path):
    corpus, out = write_corpus(tmp_path / "corpus"), tmp_path / "out"
    out.mkdir()
    config = DataConfig(corpus=str(corpus))
    again = lambda config: tokenizing.tokenize(config, out, workers=1, say=lambda done: None)
    again(config)
    files = ("shard-00000.bin", "shard-00000.starts", "shard-00000.json")
    before = {name: (out / name).read_bytes() for name in files}
    (out / files[0]).write_bytes(before[files[0]][:-2] + b"x\0")
    again(config)
    assert {name: (out / name).read_bytes() for name in files} == before
    (corpus / "0.txt").write_text("other")
    with pytest.raises(DataError, match=r"--out: .* of another corpus or tokenizer\n.*other files"):
        again(config)
    (out / "tokenize.json").unlink()
    with pytest.raises(DataError, match=r"--out: .* not of this command\n  found: shard-00000.bin"):
        again(config)
    with pytest.raises(ConfigError, match=r"--workers: must be 1 or more\n  found: 0"):
        tokenizing.tokenize(config, out, workers=0, say=lambda done: None)


def test_a_killed_command_loses_no_finished_shard(tmp_path):
    corpus, out = tmp_path / "a.jsonl", tmp_path / "out"
    random = np.random.default_rng(0)
    words = lambda: " ".join(map(str, random.integers(0, 999, 5000)))
    corpus.write_text("\n".join(json.dumps({"text": words()}) for _ in range(400)))
    command = [sys.executable, "-m", "launch", "tokenize", str(corpus), "--out"]
    options = ["--tokenizer", "bytes", "--workers", "1", "--shard-bytes", "40000"]
    first = subprocess.Popen(
        [*command, str(out), *options], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    fcntl.fcntl(first.stderr, fcntl.F_SETPIPE_SZ, 4096)  # it waits once that is full
    assert re.match(r"tokenize: 1 of \d+ shards, ", first.stderr.readline())
    first.kill()
    first.wait(240)
    first.stderr.close()
    kept = {path.name: path.stat().st_mtime_ns for path in out.glob("shard-*.json")}
    shards = json.loads((out / "tokenize.json").read_text())["shards"]
    assert 0 < len(kept) < len(shards)
    with pytest.raises(DataError, match=r"is not whole: shard-\d+ is missing"):
        tokens.read(DataConfig(corpus=str(out), source="tokens"), 8)
    subprocess.run([*command, str(out), *options], cwd=ROOT, check=True, timeout=240)
    assert {name: (out / name).stat().st_mtime_ns for name in kept} == kept
    whole = tmp_path / "whole"
    whole.mkdir()
    size = int(options[-1])
    tokenizing.tokenize(
        DataConfig(corpus=str(corpus)), whole, shard_bytes=size, say=lambda done: None
    )
    assert sorted(os.listdir(out)) == sorted(os.listdir(whole))
    for path in whole.glob("shard-*"):
        assert (out / path.name).read_bytes() == path.read_bytes()
