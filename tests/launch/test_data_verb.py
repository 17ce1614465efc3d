"""`launch data` shows what a run would read."""

import re

import pytest

from launch.__main__ import main
from tests.jobs import ROOT

RUN = str(ROOT / "configs/runs/quickstart.yaml")


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(8):
        (folder / f"{i}.txt").write_text(f"text {i} " * 200)
    out = tmp_path / "tokens"
    words = ["--tokenizer", "bytes", "--out", str(out), "--workers", "1"]
    assert main(["tokenize", str(folder), *words]) == 0
    return out


def shown(capsys, *words):
    assert main(["data", RUN, "model.context_length=32", *words]) == 0
    return capsys.readouterr().out


def test_documents_tokens_and_windows_are_those_of_the_files(corpus, capsys):
    settings = ["data.source=tokens", "train.eval_every=0", "data.validation_fraction=0.2"]
    out = shown(capsys, f"data.corpus={corpus}", *settings, "--verify", "--windows", "3")
    assert "every token was read; 2 files have their SHA-256" in out
    length = 1 + len("text 0 ") * 200
    for name, count in {"train": 7, "validation": 1}.items():
        windows = (count * length - 1) // 32
        size = f"{count * length:,} tokens, documents: {count}, {windows} windows of 32 tokens"
        assert re.search(rf"^{name} +{size}, digest \w+$", out, re.MULTILINE)
    assert len(re.findall(r"^  '.*text \d .*'$", out, re.MULTILINE)) == 3
    with (corpus / "shard-00000.bin").open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"x")
    assert main(["data", RUN, f"data.corpus={corpus}", *settings, "--verify"]) == 2
    assert "shard-00000.bin: is not as it was written" in capsys.readouterr().err


def test_text_is_shown_and_has_nothing_to_verify(corpus, capsys):
    place = f"data.corpus={corpus.parent / 'corpus'}"
    out = shown(capsys, place, "train.eval_every=0", "data.validation_fraction=0.0")
    assert re.search(r"^train +documents: 8, 350 windows of 32 tokens", out, re.MULTILINE)
    assert main(["data", RUN, place, "train.eval_every=0", "--verify"]) == 2
    assert "--verify: is for files of tokens" in capsys.readouterr().err
    both = [f"{{name: {name}, corpus: {corpus.parent / 'corpus'}}}" for name in ("one", "other")]
    change = "data.mixture_changes=[{steps: 50, weights: {one: 1}}]"
    mixed = f"data.mixture=[{', '.join(both)}]", "train.eval_every=0", "data.corpus=mixture"
    out = shown(capsys, *mixed, "data.validation_fraction=0.0", change, "train.steps=100")
    assert "1,200 of 1,600 sequences are of one" in out  # 50 steps of 8 of 16, and 50 of all


def test_a_corpus_by_itself_is_shown_as_its_files_of_tokens_are(corpus, capsys):
    def as_read(path, *words):
        assert main(["data", str(path), "model.context_length=1024", *words]) == 0
        place, *lines = capsys.readouterr().out.splitlines()
        assert place == f"corpus      {path}: {8 * 1401:,} tokens, 8 documents"
        return lines

    # Rests of 377 bytes, two to a row; the last byte of all has no mark behind it.
    padding = 1 - (8 * 1401 - 1) / (12 * 1024)
    packed = f"documents: 8 in 16 pieces, 12 rows of 1,024 tokens, {padding:.2%} of them padding"
    lines = as_read(corpus)
    assert lines[0] == f"as read     {packed}"
    assert re.search(r"^  '.*text \d .*' \.\.\.$", lines[2])
    assert as_read(corpus.parent / "corpus") == ["files       8 text", *lines]
    path = corpus.parent / "dialogues.jsonl"
    path.write_text('{"prompt": "one, ", "answer": "two"}\n')
    assert main(["data", str(path)]) == 2
    assert "has no text in a field `text`" in capsys.readouterr().err
    assert main(["data", str(path), "data.source=chat", "model.context_length=16"]) == 0
    out = capsys.readouterr().out
    assert "1 documents begin, 3 of 16 targets count, 16 characters\n  '<|begin|>one, tw'\n" in out
    assert "\n  of it count 'two'\n" in out


def test_a_folder_of_run_folders_is_no_corpus(tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("model: {}\n")
        (tmp_path / name / "topology.yaml").write_text("clusters: []\n")
    assert main(["data", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path}: holds run folders, and is no corpus\n  found: a, b" in said
    assert f"python -m launch data {tmp_path}/a; launch top" in said
