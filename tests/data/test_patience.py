"""Data that are gone for seconds are waited for by a run that has trained on them."""

import functools
import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from holmesjax import job as jobs
from holmesjax.config import DataConfig
from holmesjax.data import batches as batches_module, patience, sources
from holmesjax.data.batches import Batches
from holmesjax.data.patience import patiently
from holmesjax.errors import REQUEUE, AbsentDataError, DataError, LostDataError
from holmesjax.files import run_folder
from tests.data.written_token_files import DOCUMENTS, write_megatron, write_numpy, write_own
from tests.jobs import write_run

LENGTH = 3


def text(folder):
    folder.mkdir()
    (folder / "a.txt").write_text("some words of a corpus" * 9)
    return DataConfig(corpus=str(folder), validation_fraction=0.0), folder / "a.txt"


def chat(folder):
    folder.mkdir()
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 50}]
    (folder / "a.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 4)
    config = {"source": "chat", "documents": "mask", "validation_fraction": 0.0}
    return DataConfig(corpus=str(folder), **config), folder / "a.jsonl"


def tokens(write):
    def make(folder):
        folder.mkdir()
        file = write(folder / "a.bin", DOCUMENTS)
        return DataConfig(corpus=str(file), source="tokens", validation_fraction=0.0), file

    make.__name__ = write.__name__
    return make


def mixture(folder):
    (one, file), (two, _) = text(folder), text(Path(f"{folder}_2"))
    entries = [{"name": n, "corpus": c.corpus, "weight": 1.0} for n, c in (("a", one), ("b", two))]
    return DataConfig(mixture=entries, validation_fraction=0.0), file


def missing(file):
    file.unlink()


def empty(file):
    file.write_bytes(b"")


def cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2 - 1])


def a_folder(file):
    file.unlink()
    file.mkdir()


KINDS = [text, chat, mixture, *map(tokens, (write_own, write_megatron, write_numpy))]


@pytest.mark.parametrize("damage", [missing, empty, cut, a_folder], ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", KINDS, ids=lambda f: f.__name__)
def test_data_of_each_kind_that_come_back_are_those_they_were(tmp_path, kind, damage):
    config, file = kind(tmp_path / "corpus")
    whole = shutil.copy(file, tmp_path / "whole")
    length = 64 if kind is chat else LENGTH  # of a whole dialogue
    read = lambda: sources.module_of(config).read(config, length)
    before, pauses, said = read().digests, [], []
    damage(file)

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == 3:
            shutil.rmtree(file) if file.is_dir() else file.unlink(missing_ok=True)
            shutil.copy(whole, file)

    try:
        assert read().digests != before  # a text that is cut is a text: `check_data` sees it
        return
    except (DataError, OSError) as error:
        first = type(error)
    with pytest.raises(first):
        patiently(read, has_trained=False, pause=pytest.fail)
    found = patiently(read, has_trained=True, pause=pause, say=said.append)
    assert found.digests == before
    assert (len(pauses), len(said)) == (3, 2)


@pytest.mark.parametrize(
    ("name", "content", "has_trained"),
    [
        ("metrics.jsonl", "", False),  # a first start before its first step
        ("metrics.jsonl", "{}\n", True),
        ("checkpoints/step_00000010/manifest.json", "{}", True),  # of a folder apart
        ("checkpoints/step_00000000/manifest.json", "{}", False),  # of weights that were imported
        ("checkpoints/step_00000010/part_0/d", "", False),
    ],
)
def test_a_run_waits_for_its_data_once_it_has_a_record_or_a_manifest(
    tmp_path, name, content, has_trained
):
    """The folder of a process apart from the launcher's has no records of steps."""
    assert not jobs.has_trained(tmp_path / "absent")
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(content)
    assert jobs.has_trained(tmp_path) == has_trained


def test_the_wait_has_an_end_after_which_another_start_is_asked_for():
    waits: list[float] = []

    def read():
        raise DataError("a.bin", "is short", found="3 bytes", fix="copy it")

    say, clock = lambda _: None, lambda: sum(waits)
    with pytest.raises(LostDataError, match=r"a\.bin: is short\n  found: 3 bytes\n  fix: copy it"):
        patiently(read, has_trained=True, pause=waits.append, clock=clock, say=say)
    assert patience.WAITS_S < clock() < 1.5 * patience.WAITS_S
    assert LostDataError.exit_status == REQUEUE


def test_a_file_that_becomes_short_while_it_is_trained_on_is_read_again(
    tmp_path, capsys, monkeypatch
):
    config, file = tokens(write_own)(tmp_path / "corpus")
    splits = sources.module_of(config).read(config, LENGTH)
    batches = Batches(data=splits, seed=0, global_batch=1, length=LENGTH, num_validation=0)
    before, whole = batches.train(0).token_NL, file.read_bytes()
    file.write_bytes(b"")
    restore = lambda seconds: file.write_bytes(whole)
    monkeypatch.setattr(batches_module, "patiently", functools.partial(patiently, pause=restore))
    np.testing.assert_array_equal(batches.train(0).token_NL, before)
    assert "has become shorter while it was read; it is tried again" in capsys.readouterr().err


def test_only_the_first_start_of_a_run_takes_absent_data_for_a_mistake(tmp_path, monkeypatch):
    monkeypatch.setattr(patience, "WAITS_S", 0.0)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    run_file = write_run(tmp_path, {"a": (1,)})
    load = lambda: jobs.load(run_file, [f"data.corpus={tmp_path / 'none'}"], reads_data="process")
    with pytest.raises(AbsentDataError):
        load()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / run_folder.METRICS).write_text('{"step": 1}\n')
    with pytest.raises(LostDataError):
        load()
