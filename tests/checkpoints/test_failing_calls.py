"""No single failing call of the file system costs a checkpoint, or fails a save that is done."""

import errno
import io
import json
import os
import random
import shutil
import threading
from pathlib import Path

import pytest

from holmesjax.checkpoints import committed, manifest, newest_whole, scrub, second_reading
from holmesjax.checkpoints.committing import Saves
from holmesjax.checkpoints.retention import Retention
from holmesjax.config import CheckpointConfig
from holmesjax.errors import CheckpointError, HolmesError, PeerError

ERRORS = (errno.EBUSY, errno.EIO, errno.ENOSPC, errno.ESTALE)
CALLS = (
    *("open", "close", "fsync", "rename", "replace", "unlink", "rmdir", "mkdir", "link"),
    *("listdir", "scandir", "stat", "lstat"),
)
ARRAYS = {"x": {"part": "part_0", "dtype": "float32", "shape": [2], "digest": "0"}}


class Run:
    """A run whose parts are written by hand."""

    def __init__(self, folder, *, keep=1, hours=None, move=Path.rename):
        self.folder, self.lines, self.committed = folder, [], []
        config = CheckpointConfig(keep=keep, keep_every_hours=hours)
        self.keeps = Retention(folder, config, move, self.lines.append)
        self.saves = Saves(folder, 1, self.commit, self.keeps, self.lines.append)

    def commit(self, step, arrays, files):
        same = {"sequences": step, "settings": {}, "data": {}, "plan_hash": "x"}
        text = manifest.describe(step, arrays=arrays, files=files, **same)
        manifest.commit(self.folder, step, text)
        self.committed.append(step)

    def save(self, *steps):
        for step in steps:
            try:
                path = manifest.begin(self.folder, step)
            except OSError as error:
                self.saves.failed(step, str(error))
                continue
            part = path / "part_0" / "d"
            part.mkdir(parents=True, exist_ok=True)
            (part / "a").write_text(f"arrays of {step}")
            self.saves.saved(step, ARRAYS, manifest.files_of(path, 0))

    def resume(self):
        """The step from which the run goes on."""
        try:
            found = newest_whole.find(
                self.folder, self.lines.append, move=Path.rename, confirm=confirms
            )
        finally:
            self.keeps.after_start()
        return found and found.step


def confirms(found, error):
    """Returns if it is damaged, as another process would."""
    try:
        manifest.verify(manifest.at(found.path))
    except CheckpointError:
        return
    raise PeerError(error.where, "another process has read it", found=error.found, fix="again")


class Failing:
    """Fails one call of the file system; counts them, but for those of threads of other tests."""

    def __init__(self, monkeypatch, at=None, number=errno.EIO):
        self.count, self.failed, self._at, self._number = 0, "", at, number
        self._others = set(threading.enumerate()) - {threading.current_thread()}
        for name in CALLS:
            monkeypatch.setattr(os, name, self._wrapped(name, getattr(os, name)))
        monkeypatch.setattr(io, "open", self._wrapped("io.open", io.open))

    def _wrapped(self, name, call):
        def called(*args, **kwargs):
            if threading.current_thread() in self._others:
                return call(*args, **kwargs)
            self.count += 1
            if self.count - 1 == self._at:
                self.failed = f"{name}{args}"
                if name == "close":
                    call(*args)
                raise OSError(self._number, os.strerror(self._number), str(args[0]))
            return call(*args, **kwargs)

        return called


def names(folder):
    return sorted(path.name for path in (folder / manifest.FOLDER).iterdir())


# Each call fails in one way; with all ways it takes a minute.
WAYS = [1, pytest.param(len(ERRORS), marks=pytest.mark.exhaustive)]


def ways(count, num_ways):
    """Pairs of the call that fails, and how."""
    return [(at, ERRORS[(at + i) % len(ERRORS)]) for at in range(count) for i in range(num_ways)]


@pytest.fixture
def before(tmp_path, monkeypatch):
    """A run after step 10, with all that may be left in its folder."""
    monkeypatch.setattr(os, "fsync", lambda file: None)  # a hundred of them take a second
    monkeypatch.setattr(manifest, "THREADS", 1)
    folder = tmp_path / "before"
    Run(folder, keep=2).save(5, 10)
    checkpoints = folder / manifest.FOLDER
    for name in ("step_00000003", "step_00000004.removed", *DAMAGED):
        shutil.copytree(manifest.folder_of(folder, 5), checkpoints / name)
    (checkpoints / "step_00000003" / manifest.MANIFEST).unlink()
    return folder


DAMAGED = ("step_00000001.damaged", "step_00000007.damaged", "step_00000007.2.damaged")


def calls_of(act):
    with pytest.MonkeyPatch.context() as patch:
        failing = Failing(patch)
        act()
        return failing.count


@pytest.mark.parametrize("num_ways", WAYS)
def test_after_any_failing_call_of_a_save_the_newest_checkpoint_is_there(
    before, tmp_path, num_ways
):
    count = calls_of(lambda: Run(shutil.copytree(before, tmp_path / "whole")).save(20))
    assert names(tmp_path / "whole") == [*DAMAGED[2:], *DAMAGED[1:2], "step_00000020"]
    assert count > 50
    late = 0
    for at, number in ways(count, num_ways):
        folder = shutil.copytree(before, tmp_path / "run")
        run = Run(folder)
        with pytest.MonkeyPatch.context() as patch:
            failing = Failing(patch, at, number)
            try:
                run.save(20)
            except OSError:  # in what the test does in place of Orbax
                run.saves.failed(20, "no part")
        where = f"{os.strerror(number)} at {failing.failed}: {run.lines}"
        if run.committed:  # whatever has failed since, the work is done
            late += bool(failing.failed)
            assert not any("no checkpoint after" in line for line in run.lines), where
            run.saves.check(at_end=True)
        assert manifest.find(folder)[0].step == max(run.committed, default=10) or (
            manifest.find(folder)[0].step == 20  # told as failed, since it may not be durable
        ), where
        assert run.resume() in {20} | ({10} if not run.committed else set()), where
        assert not any("set aside" in line for line in run.lines), where
        run.save(30)  # tries again what could not be removed
        assert names(folder) == [*DAMAGED[2:], *DAMAGED[1:2], "step_00000030"], where
        shutil.rmtree(folder)
    assert late > 20


@pytest.mark.parametrize("num_ways", WAYS)
def test_after_any_failing_call_of_a_start_the_run_goes_on_from_the_same_checkpoint(
    before, tmp_path, num_ways
):
    count = calls_of(lambda: Run(shutil.copytree(before, tmp_path / "whole")).resume())
    assert count > 20
    for at, number in ways(count, num_ways):
        folder = shutil.copytree(before, tmp_path / "run")
        run = Run(folder)
        with pytest.MonkeyPatch.context() as patch:
            failing = Failing(patch, at, number)
            try:
                assert run.resume() == 10
            except HolmesError:
                assert run.resume() == 10
        assert Run(folder).resume() == 10, failing.failed
        left = [*DAMAGED[:1], "step_00000005", *DAMAGED[2:], *DAMAGED[1:2], "step_00000010"]
        assert names(folder) == left, failing.failed
        shutil.rmtree(folder)


@pytest.mark.parametrize("says_time", [True, False])
def test_one_of_each_period_stays_and_so_do_the_newest(tmp_path, monkeypatch, says_time):
    """The oracle: all steps that were ever saved, with their times.

    The files have the time of a copy of the run folder where the manifest says its own. A manifest
    of an earlier version does not say it.
    """
    clock, times = random.Random(1), {}
    run, now_s = Run(tmp_path, keep=2, hours=2.0), 1.7e9
    for step in range(1, 40):
        now_s += clock.choice((60, 1000, 3000, 9000))
        path = manifest.begin(tmp_path, step) / manifest.MANIFEST
        monkeypatch.setattr(manifest.time, "time", lambda: now_s)  # noqa: B023
        run.commit(step, ARRAYS, {})
        if not says_time:
            content = json.loads(path.read_text())
            del content["time_s"]
            path.write_text(manifest.text_of(content))
        os.utime(path, (1.6e9, 1.6e9) if says_time else (now_s, now_s))
        run.keeps.after_commit(step)
        times[step] = now_s
        periods = {int(s // 7200) for s in times.values()}
        first = {min(n for n, s in times.items() if s // 7200 == p) for p in periods}
        there = {checkpoint.step for checkpoint in manifest.find(tmp_path)}
        assert there == first | {step, max(step - 1, 1)}


def test_a_removal_that_fails_each_time_is_told_each_time_and_costs_nothing(tmp_path, monkeypatch):
    """NFS does so: a file that somebody has open leaves another one in its folder."""
    run = Run(tmp_path)

    def busy(path, **_):
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    monkeypatch.setattr(shutil, "rmtree", busy)
    run.save(1, 2, 3)
    assert [checkpoint.step for checkpoint in manifest.find(tmp_path)] == [3]
    run.saves.check(at_end=True)
    assert len(run.lines) == 2
    assert all(line.startswith("warning: old files of checkpoints") for line in run.lines)
    assert "resource busy; " in run.lines[1]
    monkeypatch.undo()
    run.save(4)
    assert names(tmp_path) == ["step_00000004"]


def test_a_name_that_was_not_there_is_asked_for_again(tmp_path, monkeypatch):
    """A client of NFS remembers that there was no manifest; a list comes from the server."""
    monkeypatch.setattr(manifest.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(manifest, "SEEN_S", 5.0)
    run = Run(tmp_path, keep=2)
    run.save(10, 20)
    stat, listdir, looks = os.stat, os.listdir, []

    def remembered(path, *args, **kwargs):
        if str(path).endswith("20/manifest.json"):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", remembered)
    assert run.resume() == 20
    assert names(tmp_path) == ["step_00000010", "step_00000020"]

    def late(path):
        if str(path).endswith("0000020"):
            looks.append(path)
            return [name for name in listdir(path) if name != manifest.MANIFEST or looks[4:]]
        return listdir(path)

    monkeypatch.setattr(os, "listdir", late)
    assert manifest.wait_for(tmp_path, 20).step == 20
    assert len(looks) == 5
    looks.clear()
    assert newest_whole.find(tmp_path, run.lines.append, move=Path.rename).step == 20
    monkeypatch.setattr(manifest, "SEEN_S", 0.2)
    looks.clear()
    with pytest.raises(PeerError, match="is not to be seen from this host"):
        manifest.wait_for(tmp_path, 30)


@pytest.mark.parametrize("left", [(), (10,)])
def test_a_run_that_has_lost_its_newest_checkpoint_is_refused(tmp_path, left, monkeypatch):
    monkeypatch.setattr(manifest, "SEEN_S", 0.0)
    run = Run(tmp_path, keep=2)
    assert run.resume() is None  # as one that was killed before its first checkpoint
    run.save(10, 20)
    for step in {10, 20} - set(left):
        shutil.rmtree(manifest.folder_of(tmp_path, step))
    for _ in range(2):
        with pytest.raises(CheckpointError, match="had a checkpoint after step 20") as error:
            run.resume()
    assert newest_whole.find(tmp_path, print) or not left  # a reader takes what there is
    assert ("to go on from step 10" if left else "to begin anew") in error.value.fix
    (tmp_path / committed.RECORD).unlink()
    assert run.resume() == (10 if left else None)


def test_a_step_that_was_set_aside_is_not_missed(tmp_path):
    run = Run(tmp_path, keep=2)
    run.save(10, 20)
    (manifest.folder_of(tmp_path, 20) / "part_0" / "d" / "a").write_text("other")
    assert run.resume() == 10
    assert run.resume() == 10
    assert json.loads((tmp_path / committed.RECORD).read_text()) == {"step": 10}
    committed.adopt(tmp_path, 20)  # what the starts of the job say counts only without a record
    assert run.resume() == 10


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"step": "x"}', "\xff"])
def test_a_record_that_makes_no_sense_is_named(tmp_path, content):
    (tmp_path / committed.RECORD).write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointError, match=f"{committed.RECORD}: cannot be read"):
        Run(tmp_path).resume()


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(tmp_path, monkeypatch):
    run = Run(tmp_path)
    run.save(10)
    listdir = os.listdir
    for number, kind in ((errno.EACCES, CheckpointError), (errno.EIO, PeerError)):

        def fails(path, number=number):
            if str(path).endswith(manifest.FOLDER):
                raise OSError(number, os.strerror(number), str(path))
            return listdir(path)

        monkeypatch.setattr(os, "listdir", fails)
        with pytest.raises(kind, match="cannot be read"):
            manifest.find(tmp_path)


@pytest.mark.parametrize(
    "number, kind", [(errno.EACCES, CheckpointError), (errno.ESTALE, PeerError), (errno.EIO, None)]
)
def test_what_is_withheld_is_no_damage(tmp_path, monkeypatch, number, kind):
    """Two processes of a host may both be refused a file that is whole; a broken disk gives EIO."""
    run = Run(tmp_path, keep=2)
    run.save(10, 20)
    describe = manifest._describe

    def fails(path, **how):
        if "step_00000020" in str(path):
            raise OSError(number, os.strerror(number), str(path))
        return describe(path, **how)

    monkeypatch.setattr(manifest, "_describe", fails)
    if kind is None:
        assert run.resume() == 10
        return
    with pytest.raises(kind, match="cannot be read") as error:
        run.resume()
    assert type(error.value) is kind
    assert names(tmp_path) == ["step_00000010", "step_00000020"]
    status = second_reading._look(manifest.folder_of(tmp_path, 20), [], None)
    assert status not in (0, second_reading.DAMAGED)


@pytest.mark.parametrize(
    "number, kind", [(errno.EACCES, CheckpointError), (errno.ESTALE, PeerError), (errno.EIO, None)]
)
def test_a_manifest_that_is_withheld_is_no_empty_one(tmp_path, monkeypatch, number, kind):
    run, told = Run(tmp_path, keep=2), []
    run.save(10, 20)
    path, withheld = manifest.folder_of(tmp_path, 20), manifest.folder_of(tmp_path, 10)
    open_file = os.open

    def fails(name, *how, **options):
        if str(name) == str(withheld / manifest.MANIFEST):
            raise OSError(number, os.strerror(number), str(name))
        return open_file(name, *how, **options)

    monkeypatch.setattr(os, "open", fails)
    assert run.resume() == 20  # an older one holds nothing up
    withheld = path
    assert manifest.newest_step(tmp_path) == 20
    if kind is None:
        assert run.resume() == 10
        said = "manifest.json: is damaged: it cannot be read\n  found: Input/output error"
        assert said in "".join(run.lines)
        return
    with pytest.raises(kind, match=r"manifest\.json: cannot be read") as error:
        run.resume()
    assert type(error.value) is kind
    assert names(tmp_path) == ["step_00000010", "step_00000020"]
    assert second_reading._look(path, [], None) not in (0, second_reading.DAMAGED)
    scrub.Scrub(tmp_path, 1.0, told.append)._read(20)
    assert f"is not read again: {path / manifest.MANIFEST}: cannot be read" in told[0]


def test_a_second_process_that_cannot_look_finds_no_damage(tmp_path, monkeypatch):
    """The first may have seen a broken disk, and the file server may be away for the second."""
    run = Run(tmp_path)
    run.save(10)

    def fails(*how):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "posix_fadvise", fails)
    status = second_reading._look(manifest.folder_of(tmp_path, 10), [], None)
    assert status not in (0, second_reading.DAMAGED)


def test_another_job_s_checkpoint_is_neither_begun_again_nor_replaced(tmp_path):
    run = Run(tmp_path)
    run.save(10)
    content = (manifest.folder_of(tmp_path, 10) / manifest.MANIFEST).read_bytes()
    with pytest.raises(FileExistsError):
        manifest.begin(tmp_path, 10)
    with pytest.raises(FileExistsError):
        run.commit(10, {}, {})
    run.save(10)
    assert (manifest.folder_of(tmp_path, 10) / manifest.MANIFEST).read_bytes() == content
    assert "no checkpoint after step 10" in run.lines[0]
    assert run.resume() == 10
