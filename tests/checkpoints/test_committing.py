"""When a run saves, and what becomes of each save, whoever tells of it and in which order."""

import itertools
from pathlib import Path

import pytest

from holmesjax.checkpoints import manifest
from holmesjax.checkpoints.commit_alarm import FIELD, CommitAlarm
from holmesjax.checkpoints.committing import Saves
from holmesjax.checkpoints.retention import Retention
from holmesjax.checkpoints.save_schedule import SaveSchedule
from holmesjax.config import CheckpointConfig
from holmesjax.errors import Mistakes, PeerError

ARRAYS = {"x": {"part": "part_0", "dtype": "float32", "shape": [2]}}


def saved_steps(config, *, step_s, num_steps=20):
    due = SaveSchedule(config, clock=lambda: now_s)
    found = []
    for step in range(1, num_steps + 1):
        now_s = 1e6 + step * step_s
        if due(step):
            found.append(step)
    return found


def test_steps_say_when_and_otherwise_the_clock():
    assert saved_steps(CheckpointConfig(every=6), step_s=1e4) == [6, 12, 18]
    assert saved_steps(CheckpointConfig(), step_s=100.0) == [7, 13, 19]  # 600 s after the first
    assert saved_steps(CheckpointConfig(every_minutes=0.5), step_s=10.0) == [4, 7, 10, 13, 16, 19]
    assert saved_steps(CheckpointConfig(every_minutes=1), step_s=90.0) == list(range(2, 21))
    assert saved_steps(CheckpointConfig(), step_s=0.1) == []


def test_steps_and_the_clock_together_are_refused():
    with pytest.raises(Mistakes, match=r"checkpoint.every_minutes.*checkpoint.every = 5"):
        CheckpointConfig(every=5, every_minutes=5.0)


@pytest.mark.parametrize("config", [{"every": 10}, {"every_minutes": 1.0}])
def test_an_alarm_begins_after_three_intervals_repeats_each_minute_and_ends(config):
    """Steps take 6 s, so that ten are an interval either way; a long start is none."""
    now_s, lines, found = 0.0, [], {}
    told = {10: ["a"], 20: [], 30: ["b", "a"]}
    config = CheckpointConfig(**config)
    alarm = CommitAlarm(config, 0, ["a", "b"], lambda: now_s)
    alarm.attach(lambda: told, lines.append)
    now_s = 1e6
    for step in range(1, 61):
        found[step] = alarm.step(step)
        now_s += 6.0
        if step == 55:
            alarm.committed(50)
    first = min(step for step, alarm_fields in found.items() if alarm_fields)
    assert first in (31, 32)  # the time counts from the first step
    assert found[first] == {FIELD: first}
    assert [step for step, alarm_fields in found.items() if alarm_fields] == list(range(first, 56))
    begun, again, third, over = lines
    assert "the last checkpoint: none in this run; outstanding: " in begun
    assert "the save after step 10 waits for b; the save after step 20 waits for a, b" in begun
    assert begun.endswith("the save after step 30 waits for its commit")
    assert (f"step {first} is done" in begun, f"step {first + 10} is done" in again) == (True,) * 2
    assert f"step {first + 20} is done" in third
    assert "after step 50: the alarm is over" in over


class Recording:
    """Saves of two stages, whose folders are there, and what comes of them."""

    def __init__(self, run_dir, **options):
        self.committed, self.lines, self.full = [], [], False
        keeps = Retention(run_dir, CheckpointConfig(), Path.rename, self.lines.append)
        self.saves = Saves(run_dir, 2, self.commit, keeps, self.lines.append, **options)

    def commit(self, step, arrays, files):
        if self.full:
            raise OSError(28, "No space left on device")
        self.committed.append((step, sorted(arrays), sorted(files)))

    def tell(self, step, *words):
        for word in words:
            if word == "fails":
                self.saves.failed(step, "no room")
            else:
                self.saves.saved(step, {word: ARRAYS["x"]}, {f"{word}.bin": "sha"})


def test_a_checkpoint_is_committed_when_all_have_told(tmp_path):
    run = Recording(tmp_path)
    run.tell(1, "a")
    run.tell(2, "a")  # one stage may be a step ahead
    assert run.committed == []
    run.tell(1, "b")
    run.tell(2, "b")
    both = ["a", "b"], ["a.bin", "b.bin"]
    assert run.committed == [(1, *both), (2, *both)]
    run.saves.check(at_end=True)


@pytest.mark.parametrize("words", set(itertools.permutations(["a", "fails"])) | {("fails",) * 2})
def test_one_part_that_fails_is_told_at_once_and_once(tmp_path, words):
    run = Recording(tmp_path)
    folder = manifest.begin(tmp_path, 5)
    for i, word in enumerate(words):
        run.tell(5, word)
        assert len(run.lines) == ("fails" in words[: i + 1])
        assert folder.exists() == (i == 0)  # whoever still writes finds it
    assert "after step 5" in run.lines[0]
    assert "no room" in run.lines[0]
    assert "\n" not in run.lines[0]
    run.saves.check()
    with pytest.raises(PeerError, match="no room"):
        run.saves.check(at_end=True)
    run.tell(6, "a", "b")
    assert [step for step, *_ in run.committed] == [6]
    run.saves.check(at_end=True)
    run.tell(7, "a", "fails")
    run.saves.check()
    run.tell(8, "fails")  # two in a row: whatever the other stage may say
    with pytest.raises(PeerError, match="could not be written"):
        run.saves.check()


def test_a_save_that_fails_is_tried_again_after_pauses_until_the_limit(tmp_path):
    now_s, lines, failing = [0.0], [], True
    keeps = Retention(tmp_path, CheckpointConfig(), Path.rename, lines.append)
    saves = Saves(
        tmp_path,
        1,
        lambda *_: None,
        keeps,
        lines.append,
        limit_s=240.0,
        clock=lambda: now_s[0],
    )
    due = SaveSchedule(CheckpointConfig(every=100), begun=saves.begun, retries=saves.is_retry_due)
    tried = []
    for step in range(100, 199):  # ten seconds each
        now_s[0] = 10.0 * step
        if due(step):
            tried.append(step)
            saves.failed(step, "no room") if failing else saves.saved(step, {}, {})
            failing = step < 121
            saves.check()
    assert tried == [100, 103, 109, 121, 145]  # 30, 60, 120 and 240 s later; then it is well
    assert "is tried in 2 min 0 s at the latest, and the run ends if saves fail for" in lines[2]
    for seconds in (2000.0, 2239.0, 2240.0):
        saves.check()
        now_s[0] = seconds
        saves.failed(int(seconds), "no room")
    with pytest.raises(PeerError, match="no room"):
        saves.check()


def test_a_save_is_under_way_until_its_commit_has_ended(tmp_path):
    """Until then nothing is tried again, and no more than two wait for their commits."""
    ends, now_s = [], [0.0]
    run = Recording(tmp_path, in_turn=ends.append, limit_s=1e9, clock=lambda: now_s[0])
    saves = run.saves
    due = SaveSchedule(
        CheckpointConfig(every=100),
        begun=saves.begun,
        retries=saves.is_retry_due,
        may_begin=saves.may_begin,
    )
    run.tell(90, "fails", "a")
    ends.pop()()
    now_s[0] = 1e3
    assert due(95)  # again, since one has failed
    run.tell(95, "a", "b")
    assert [step for step in range(96, 150) if due(step)] == [100]  # and not that of 95
    assert saves.outstanding() == {95: ["", ""], 100: []}
    run.tell(100, "a", "b")
    assert not any(due(step) for step in range(200, 310))
    assert "no checkpoint after step 200: the commits of those after steps 95, 100" in run.lines[1]
    assert len(run.lines) == 2  # said once
    saves.failed(250, "no room")  # by one that saves at its end
    ends.pop(0)()
    assert [step for step in range(310, 315) if due(step)] == [310]  # late, and not left out
    ends.pop(0)()
    assert [step for step, *_ in run.committed] == [95, 100]
    with pytest.raises(PeerError, match="no room"):  # earlier commits do not mend it
        saves.check(at_end=True)


def test_one_of_several_processes_of_a_stage_says_so_before_its_leader_does(tmp_path):
    run = Recording(tmp_path)
    run.saves.failed(5, "no room", counts=False)
    assert len(run.lines) == 1
    run.tell(5, "a", "b")
    run.saves.failed(5, "no room", counts=False)  # nor does another one that is late count again
    assert len(run.lines) == 1
    assert run.committed == []
    run.saves.check()


@pytest.mark.parametrize("reasons", [["", "no room"], ["no room", ""], ["", "no room", "late"]])
def test_who_failed_because_another_did_gives_no_reason_whoever_speaks_first(tmp_path, reasons):
    run = Recording(tmp_path)
    for i, reason in enumerate(reasons):
        run.saves.failed(5, reason, counts=i == 0)
        assert [line.count("no room") for line in run.lines] == [1] * (
            "no room" in reasons[: i + 1]
        )
    run.tell(5, "a")
    assert run.committed == []
    with pytest.raises(PeerError, match="no room"):
        run.saves.check(at_end=True)


def test_stores_are_told_of_a_checkpoint_when_what_it_supersedes_is_gone(tmp_path):
    """They keep the checkpoints that they find here."""
    seen = []
    keeps = Retention(
        tmp_path, CheckpointConfig(keep=1, keep_every_hours=None), Path.rename, pytest.fail
    )
    committed = lambda step: seen.append([step for step, _ in manifest.finished(tmp_path)])

    def commit(step, arrays, files):
        (manifest.folder_of(tmp_path, step) / manifest.MANIFEST).write_text("{}")

    saves = Saves(tmp_path, 1, commit, keeps, pytest.fail, committed)
    for step in (2, 4):
        manifest.begin(tmp_path, step)
        saves.saved(step, {}, {})
    assert seen == [[2], [4]]


def test_a_manifest_that_cannot_be_written_is_a_save_that_failed(tmp_path):
    run = Recording(tmp_path)
    run.full = True
    run.tell(5, "a", "b")
    assert "No space left on device" in run.lines[0]
    run.full = False
    run.tell(6, "a", "b")
    run.saves.check(at_end=True)
