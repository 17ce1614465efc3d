"""Checkpoints that are read again while a run goes on."""

import shutil
import time

import pytest

from holmesjax.checkpoints import manifest, scrub as scrubbing, second_reading
from holmesjax.checkpoints.scrub import FIELD, Scrub
from holmesjax.liveness.helper_process import Ended
from tests.written_checkpoints import flip_a_byte, write


@pytest.fixture
def checkpoint(tmp_path):
    write(tmp_path)
    [found] = manifest.find(tmp_path)
    return found


def test_a_byte_that_the_disk_has_lost_is_told_and_recorded_once(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(scrubbing, "AGAIN_S", 0.0)
    sizes = {name: x["bytes"] for name, x in checkpoint.manifest["files"].items()}
    flip_a_byte(checkpoint.path / max(sizes, key=sizes.__getitem__))
    said = []
    with Scrub(tmp_path, 1e4, said.append) as scrub:
        assert scrub.step() == {}
        scrub.committed(10)
        deadline_s = time.monotonic() + 240  # a hang guard: the reader has a low priority
        while not (found := scrub.step()):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        assert found == {FIELD: 10}
        assert scrub.step() == {}
    [line] = said
    assert line.startswith("ALARM: the checkpoint after step 10 is damaged")
    assert "is damaged: " in line
    assert manifest.find(tmp_path)  # a start decides, and reads it twice


def test_a_read_error_that_passes_is_no_alarm(checkpoint, tmp_path, monkeypatch):
    answers = [second_reading.DAMAGED, 0, second_reading.DAMAGED, second_reading.DAMAGED]
    ended = lambda *_, **__: Ended(answers.pop(0), "x")
    monkeypatch.setattr(second_reading, "read_again", ended)
    said, waited_s = [], []
    scrub = Scrub(tmp_path, 1.0, said.append)
    monkeypatch.setattr(scrub, "_wait", waited_s.append)
    scrub._read(checkpoint.step)
    assert waited_s == [60.0]  # a server that is away for seconds is back
    assert (said, scrub.all_damaged()) == ([], [])
    scrub._read(checkpoint.step)
    assert scrub.all_damaged() == [checkpoint.step]


def test_a_whole_checkpoint_is_read_as_fast_as_it_may_be_and_not_faster(checkpoint, monkeypatch):
    """The oracle is the size of the arrays in memory: the brake waits for it at the rate."""
    slept_s, begin_s = [], time.monotonic()
    monkeypatch.setattr(second_reading.time, "sleep", slept_s.append)
    monkeypatch.setattr(second_reading.time, "monotonic", lambda: begin_s)
    assert second_reading._look(checkpoint.path, ["part_0"], 0.5) == 0
    sizes = {"float32": 4, "int32": 4, "bool": 1}
    total = 0
    for array in checkpoint.manifest["arrays"].values():
        num = sizes[array["dtype"]]
        for length in array["shape"]:
            num *= length
        total += num
    waits = [wait for wait in slept_s if wait > 0]
    assert waits[-1] == pytest.approx(total / 0.5e6)
    assert waits == sorted(waits)


def test_a_checkpoint_that_is_taken_away_meanwhile_is_not_damaged(checkpoint, tmp_path):
    shutil.rmtree(checkpoint.path / "part_0")
    assert second_reading._look(checkpoint.path, [], 1.0) == second_reading.DAMAGED
    checkpoint.path.rename(tmp_path / "checkpoints/step_00000010.removed")
    assert second_reading._look(checkpoint.path, [], 1.0) == 0
