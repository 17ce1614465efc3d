"""One owner of a run folder: real processes that race, owners that die, sleep or are robbed."""

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from holmesjax.checkpoints import committed
from holmesjax.config import LogConfig
from holmesjax.errors import ConfigError, LeaseError, LostLeaseError
from holmesjax.files import regular_files, whole_files
from holmesjax.liveness import lease, lease_record
from holmesjax.liveness.lease import EPOCH, FILE, Lease
from holmesjax.planner import planner
from holmesjax.report import metrics
from holmesjax.report.metrics import Metrics
from holmesjax.trainer import Trainer
from launch.__main__ import main
from tests.jobs import HANG_S, ROOT, RunningJob, run_launch_here, write_run

OWNER = """
import sys
from holmesjax.errors import HolmesError
from holmesjax.liveness.lease import Lease
sys.stdin.readline()
try:
    with Lease(sys.argv[1]):
        print("won", flush=True)
        sys.stdin.read()
except HolmesError as error:
    print(str(error).replace(chr(10), " "), flush=True)
    sys.exit(error.exit_status)
"""


@contextlib.contextmanager
def contenders(folder, count):
    """Processes that want the folder, once a line is written to them."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", OWNER, str(folder)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(count)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.stdin.close()
            process.wait()
            process.stdout.close()


def race(processes, *, takes_over=False):
    """Starts them at once; the one that won, after all others were refused by its name.

    If a lease is taken over, one that gives way to the winner afterwards may be named.
    """
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    said = {process: process.stdout.readline() for process in processes}
    while any(line.startswith("taking ") for line in said.values()):
        for process, line in said.items():
            if line.startswith("taking "):
                said[process] = process.stdout.readline()
    [winner] = [process for process, line in said.items() if line == "won\n"]
    named = {process.pid for process in processes} if takes_over else {winner.pid}
    for process, line in said.items():
        if process is not winner:
            [pid] = re.findall(r"is in use by another process   found: process (\d+) on ", line)
            assert int(pid) in named
            assert process.wait(HANG_S) == 2
    return winner


def test_of_many_that_start_at_once_one_wins_and_the_others_name_it(tmp_path):
    with contenders(tmp_path / "run", 6) as first, contenders(tmp_path / "run", 4) as second:
        winner = race(first)
        winner.kill()
        os.waitid(os.P_PID, winner.pid, os.WEXITED | os.WNOWAIT)  # ended, and not gone yet
        again = race(second, takes_over=True)
        again.stdin.close()
        assert again.wait(HANG_S) == 0
    assert [path.name for path in (tmp_path / "run").iterdir()] == [EPOCH]


def foreign(**other):
    """A lease of a host that is not this one."""
    return {**lease_record.new_record(), "host": "far-away", "boot": "b", "token": "t", **other}


def put(folder, record):
    folder.mkdir(exist_ok=True)
    (folder / FILE).write_bytes(lease_record.text(record))
    return folder / FILE


def rob(folder, content):
    """Another lease in the place of what is there."""
    (folder / "other").write_bytes(content)
    (folder / "other").rename(folder / FILE)


class FakeTime:
    """Seconds pass when somebody sleeps; `on_sleep` is what happens meanwhile."""

    def __init__(self, on_sleep=lambda number: None, factor=1.0):
        self.now_s, self.number, self._on_sleep, self._factor = 0.0, 0, on_sleep, factor

    def clock(self):
        return self.now_s

    def sleep(self, seconds):
        self.number += 1
        self.now_s += seconds * self._factor
        self._on_sleep(self.number)

    def wait(self, path, record):
        said = []
        lease.wait_until_stale(path, record, said.append, clock=self.clock, sleep=self.sleep)
        return said


def test_an_owner_on_another_host_is_gone_when_its_counter_stands_for_a_term(tmp_path):
    record = foreign()
    path = put(tmp_path, record)
    clock = FakeTime()
    [said] = clock.wait(path, record)
    assert lease.TERM_S <= clock.now_s <= lease.TERM_S + 2 * lease.LOOK_S
    assert f"far-away (user {record['user']}" in said
    slow = FakeTime(factor=100.0)  # looks that take long are no silence of the owner
    slow.wait(path, record)
    assert slow.number >= lease.TERM_S / lease.LOOK_S / 2


def test_an_owner_on_another_host_lives_while_its_counter_moves(tmp_path):
    path = put(tmp_path, foreign())
    move = lambda number: number == 50 and put(tmp_path, foreign(counter="000000000001"))
    with pytest.raises(LeaseError, match="end it on far-away"):
        FakeTime(move).wait(path, foreign())


def test_waiting_ends_when_the_lease_is_given_up_or_another_s(tmp_path):
    path = put(tmp_path, foreign())
    for change in (lambda number: put(tmp_path, foreign(token="u")), lambda number: path.unlink()):
        clock = FakeTime(change)
        clock.wait(path, foreign())
        assert clock.number == 1


@pytest.mark.parametrize(
    "other, gone",
    [
        ({}, False),
        ({"started": "1"}, True),  # the number is another process's now
        ({"pid": 2**22 + 1}, True),
        ({"pid": 2**22 + 1, "host": "far-away"}, False),
        ({"pid": 2**22 + 1, "boot": "another"}, False),
        ({"pid": 2**22 + 1, "processes": "pid:[1]"}, False),  # in another container
        ({"pid": "1"}, False),
    ],
)
def test_only_here_does_a_number_say_whether_a_process_lives(other, gone):
    assert lease_record.is_gone({**lease_record.new_record(), **other}) is gone


def test_a_taker_that_is_too_late_puts_back_what_it_took(tmp_path, monkeypatch):
    """It saw the stale lease; by the time it renames, another has taken over."""
    stale = {**lease_record.new_record(), "pid": 2**22 + 1, "token": "stale"}
    with Lease(tmp_path) as held:
        read, looks = lease_record.read, []
        late = lambda path: looks.append(path) or (stale if len(looks) == 1 else read(path))
        monkeypatch.setattr(lease_record, "read", late)
        assert not lease_record.remove(tmp_path / FILE, stale)
        held._renew()
        held.check()
    assert [path.name for path in tmp_path.iterdir()] == [EPOCH]


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(lease, "RENEW_S", 0.02)
    monkeypatch.setattr(lease, "SETTLE_S", 0.02)


def wait_for(condition):
    deadline_s = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_the_counter_moves(tmp_path, quick):
    with Lease(tmp_path):
        count = lambda: int(json.loads((tmp_path / FILE).read_text())["counter"])
        wait_for(lambda: count() > 3)


@pytest.mark.parametrize("robbed", ["another's", "moved", "successor", "garbage"])
def test_a_lease_that_is_lost_is_told_once_and_nothing_is_touched(tmp_path, quick, robbed):
    told = []
    with Lease(tmp_path, on_loss=told.append) as held:
        if robbed == "moved":
            (tmp_path / FILE).rename(tmp_path / "aside")
        elif robbed == "successor":  # which has come and gone
            (tmp_path / EPOCH).write_text(json.dumps({"epoch": held.epoch + 1}))
            (tmp_path / FILE).unlink()
        else:
            content = lease_record.text(foreign()) if robbed == "another's" else b"x"
            rob(tmp_path, content)
        wait_for(lambda: told)
        with pytest.raises(LostLeaseError, match="has lost its lease"):
            held.check()
    assert len(told) == 1
    if robbed == "moved":
        assert {path.name for path in tmp_path.iterdir()} == {EPOCH, "aside"}
    elif robbed == "successor":
        assert [path.name for path in tmp_path.iterdir()] == [EPOCH]
    else:
        assert (tmp_path / FILE).read_bytes() == content


def test_a_deleted_lease_comes_back_and_is_held_on(tmp_path, monkeypatch, quick):
    """Whoever has deleted it needed room: there is none at first."""
    told, said, failed, link = [], [], [], os.link

    def link_late(*names):
        if len(failed) < 3:
            failed.append(names)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        link(*names)

    with Lease(tmp_path, on_loss=told.append, say=said.append) as held:
        monkeypatch.setattr(os, "link", link_late)
        check = lease.fence(tmp_path, held.epoch)
        for name in (FILE, EPOCH, FILE):
            (tmp_path / name).unlink()
            wait_for((tmp_path / name).exists)
        count = lambda: int(json.loads((tmp_path / FILE).read_text())["counter"])
        before = count()
        wait_for(lambda: count() > before + 2)
        held.check(at_once=True)
        check()
        with pytest.raises(LeaseError, match="is in use"):
            Lease(tmp_path)
        first = held.epoch
    assert not told
    assert [line.split("/")[-1] for line in said] == [
        f"{name} was removed, and is there again" for name in (FILE, EPOCH, FILE)
    ]
    with Lease(tmp_path) as next_one:
        assert next_one.epoch > first


def test_a_lease_is_not_put_back_in_another_folder_of_the_same_name(tmp_path, quick):
    """Its owner has deleted the run, or moved it, and begun another one there."""
    folder, told = tmp_path / "run", []
    with Lease(folder, on_loss=told.append):
        shutil.rmtree(folder)
        folder.mkdir()
        wait_for(lambda: told)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
def test_a_lease_that_is_not_to_be_seen_for_a_while_is_not_lost(
    tmp_path, monkeypatch, quick, number
):
    """Its server is away, has forgotten the open file when it comes back, and then stays away."""
    told, failed, calls = [], [], {"opens": regular_files.read_bytes, "lists": os.listdir}

    def fails(call):
        def called(*arguments):
            if is_away:
                failed.append(call)
                raise OSError(number, os.strerror(number))
            return call(*arguments)

        return called

    is_away = False
    monkeypatch.setattr(regular_files, "read_bytes", fails(calls["opens"]))
    monkeypatch.setattr(os, "listdir", fails(calls["lists"]))
    pwrite, stale = os.pwrite, []

    def forgotten(file, *arguments):
        if file in stale:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return pwrite(file, *arguments)

    monkeypatch.setattr(os, "pwrite", forgotten)
    count = lambda: int(json.loads((tmp_path / FILE).read_text())["counter"])
    monkeypatch.setattr(lease, "TERM_S", 1000.0)
    with Lease(tmp_path, on_loss=told.append) as held:
        is_away = True
        wait_for(lambda: len(failed) > 5)
        is_away, before = False, count()
        if number == errno.ESTALE:
            stale.append(held._file)
        wait_for(lambda: count() > before + 2)
        held.check(at_once=True)
        assert not told
        is_away = True
        monkeypatch.setattr(lease, "TERM_S", 0.2)
        wait_for(lambda: told)
        assert told[0].exit_status == 75
        is_away = False


def test_after_a_long_sleep_the_owner_looks_before_it_writes(tmp_path):
    with Lease(tmp_path) as held:
        rob(tmp_path, lease_record.text(foreign()))
        held.check()  # renewed a moment ago
        held._renewed_s -= lease.TERM_S
        with pytest.raises(LostLeaseError):
            held.check()


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_who_wakes_up_without_the_lease_takes_nothing_away(tmp_path, kind):
    """It looked, stood still, and renames what is its successor's by now."""
    path, target = tmp_path / "step", tmp_path / "step.removed"
    path.mkdir() if kind == "folder" else path.write_text("successor's")
    with Lease(tmp_path) as held:
        held.move(path, target)
        held.move(target, path)
        rob(tmp_path, lease_record.text(foreign()))
        with pytest.raises(LostLeaseError, match="has lost its lease to another process"):
            held.move(path, target)
        assert path.exists()
        assert not target.exists()
        with pytest.raises(LostLeaseError):
            held.move(path, target)


def test_nothing_is_taken_away_while_the_lease_is_not_to_be_seen(tmp_path, monkeypatch, quick):
    """A file server may be busy just then."""
    path, target, read = tmp_path / "step", tmp_path / "step.removed", lease_record.read
    path.mkdir()
    with Lease(tmp_path) as held:
        for answers in ([None], [OSError(errno.EIO, "Input/output error")]):

            def look(path, answers=answers):
                if not answers or threading.current_thread() is not threading.main_thread():
                    return read(path)
                answer = answers.pop()
                if answer is not None:
                    raise answer
                return None

            monkeypatch.setattr(lease_record, "read", look)
            with pytest.raises(OSError, match=r"not to be seen|Input/output error"):
                held.move(path, target)
            assert path.exists()
            held.move(path, target)  # the next time
            held.move(target, path)


def test_other_processes_of_a_job_see_that_its_folder_is_another_s(tmp_path, quick):
    with Lease(tmp_path) as held:
        check = lease.fence(tmp_path, held.epoch)
        check()
        taken = lease_record.text(foreign())
        aside = (tmp_path / FILE).rename(tmp_path / "aside")
        with pytest.raises(LostLeaseError, match=f"no {FILE}"):
            check()
        aside.rename(tmp_path / FILE)
        check()
        rob(tmp_path, taken)
        with pytest.raises(LostLeaseError, match="on far-away"):
            check()


def test_an_owned_folder_is_refused_before_anything_is_planned(tmp_path, monkeypatch, capsys):
    path, run_dir = write_run(tmp_path, {"a": (1,)}), tmp_path / "run"
    lease.refuse_owned(run_dir)  # nobody owns it
    monkeypatch.setattr(planner, "make_plans", lambda *_, **__: pytest.fail("is planned"))
    with Lease(run_dir):
        assert main(["train", str(path), f"run.dir={run_dir}"]) == 2
        assert "is in use by another process" in capsys.readouterr().err
    lease.refuse_owned(run_dir)  # its owner gave it up


def test_a_folder_that_cannot_be_owned_is_told_in_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    (tmp_path / "used" / FILE).mkdir(parents=True)
    for folder in (tmp_path / "file", tmp_path / "file/run", tmp_path / "used"):
        with pytest.raises(ConfigError, match=r"run.dir: the run folder cannot be written") as e:
            Lease(folder)
        assert e.value.fix == "use another run.dir"

    def no_links(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(ConfigError, match="has no hard links"):
        Lease(tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []


def epoch(folder):
    return json.loads((folder / EPOCH).read_text())


def test_each_owner_has_a_greater_epoch_than_all_before(tmp_path):
    """Whether it was given up, taken over, taken over unsaid, or the record is damaged."""
    found = []
    for content in (None, None, "{", '{"epoch": "x"}', None):
        if content:
            (tmp_path / EPOCH).write_text(content)
        with Lease(tmp_path) as held:
            found.append(held.epoch)
            assert json.loads((tmp_path / FILE).read_text())["epoch"] == f"{held.epoch:020}"
            assert epoch(tmp_path)["epoch"] == held.epoch
    gone = {"pid": 2**22 + 1, "epoch": f"{found[-1] + 7:020}"}  # it had not written it down yet
    put(tmp_path, {**lease_record.new_record(), **gone})
    with Lease(tmp_path, say=lambda text: None) as held:
        found.append(held.epoch)
        assert held.is_taken_over
    with Lease(tmp_path) as held:
        found.append(held.epoch)
        assert held.is_taken_over  # the one before has not settled it
        held.settle()
    with Lease(tmp_path) as held:
        assert not held.is_taken_over
    assert found[:2] == [1, 2]
    assert found == sorted(set(found))
    assert found[-1] == int(gone["epoch"]) + 2


def test_who_has_lost_the_run_writes_no_record_and_cuts_none(tmp_path):
    log, path = LogConfig(tensorboard=False), tmp_path / metrics.FILE
    with Lease(tmp_path) as held:
        written = Metrics(tmp_path, log, owner=held)
        written.write({"step": 1})
        before = path.read_bytes()
        rob(tmp_path, lease_record.text(foreign()))
        held._renewed_s -= lease.TERM_S  # it stood still
        with pytest.raises(LostLeaseError):
            written.write({"step": 2})
        with pytest.raises(LostLeaseError):
            Metrics(tmp_path, log, owner=held)
        written.close()
    assert path.read_bytes() == before


def test_who_takes_over_writes_into_files_of_its_own(tmp_path):
    """Whatever the call was in which the one before stood still."""
    log, path = LogConfig(tensorboard=False), tmp_path / metrics.FILE
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 9)))
    put(tmp_path, {**lease_record.new_record(), "pid": 2**22 + 1})
    with path.open("r+b") as sleeping, Lease(tmp_path, say=lambda text: None) as held:
        with Metrics(tmp_path, log, done_steps=5, owner=held) as written:
            written.write({"step": 6})
        sleeping.truncate(3)
        sleeping.write(b"...")
    assert [record["step"] for record in metrics.read(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert not epoch(tmp_path)["is_taken_over"]
    inode = path.stat().st_ino
    with Lease(tmp_path) as held, Metrics(tmp_path, log, done_steps=2, owner=held):
        assert path.stat().st_ino == inode  # a long file is copied for no other reason
    assert [record["step"] for record in metrics.read(tmp_path)] == [1, 2]


def test_a_commit_of_who_has_lost_the_run_is_taken_back(tmp_path):
    done = []
    with Lease(tmp_path) as held:
        held.act(lambda: done.append("do"), lambda: done.append("undo"))
        rob(tmp_path, lease_record.text(foreign()))
        with pytest.raises(LostLeaseError, match=r"epoch .*this process has 1"):
            held.act(lambda: done.append("do"), lambda: done.append("undo"))
    assert done == ["do", "do", "undo"]


SUCCESSOR = """
import sys
from holmesjax.checkpoints import committed
from holmesjax.liveness.lease import Lease
with Lease(sys.argv[1]):
    committed.note(sys.argv[1], 9)
"""


STOPS = [(whole_files, "temporary_of"), (Path, "replace")]


@pytest.mark.parametrize("call", STOPS, ids=lambda call: call[1])
def test_who_wakes_up_in_a_write_replaces_nothing_of_its_successor_s(tmp_path, monkeypatch, call):
    """It stood still behind its first look, or behind its second, with its content on the disk."""
    own = getattr(*call)

    def sleeps(*args):
        monkeypatch.undo()
        rob(tmp_path, lease_record.text({**lease_record.new_record(), "pid": 2**22 + 1}))
        subprocess.run([sys.executable, "-c", SUCCESSOR, tmp_path], cwd=ROOT, check=True)
        return own(*args)

    with Lease(tmp_path) as held:
        committed.note(tmp_path, 1)
        monkeypatch.setattr(*call, sleeps)
        with pytest.raises((FileNotFoundError, LostLeaseError)):
            held.guard(committed.note)(tmp_path, 2)
    assert committed.read(tmp_path) == 9
    assert not list(tmp_path.glob("*.tmp"))


SHORT = """
import sys
from holmesjax.liveness import lease
lease.TERM_S, lease.RENEW_S = 3.0, 0.5
from launch.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_launcher_that_is_woken_behind_its_successor_leaves_without_a_write(
    tmp_path, monkeypatch
):
    """The successor is on another host, and waits for a term."""
    run_file, run_dir = write_run(tmp_path, {"a": (1,), "b": (1,)}), tmp_path / "run"
    small = ["model.num_layers=2", "model.width=16", "train.steps=100000", "checkpoint.every=20"]
    words = ["train", str(run_file), "--launcher", "local", *small]
    with subprocess.Popen(
        [sys.executable, "-c", SHORT, *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as first:
        try:
            wait_for(lambda: (run_dir / "committed.json").exists())
            first.send_signal(signal.SIGSTOP)
            monkeypatch.setattr(lease, "TERM_S", 3.0)
            monkeypatch.setattr(lease_record, "is_here", lambda record: False)
            said = []
            with Lease(run_dir, say=said.append) as held:
                monkeypatch.undo()
                assert held.epoch == 2
                assert "taking the run folder over" in said[-1]
                done = json.loads((run_dir / "committed.json").read_text())["step"]
                own = Metrics(run_dir, LogConfig(tensorboard=False), done_steps=done, owner=held)
                own.write({"step": done + 1})
                owned = {
                    path: value
                    for path, value in state(run_dir).items()
                    if path.name != FILE and "logs" not in path.parts
                }
                first.send_signal(signal.SIGCONT)
                output, _ = first.communicate(timeout=HANG_S)
                left = state(run_dir)
                assert {path: left.get(path) for path in owned} == owned
                assert {path for path in left if path.name == "manifest.json"} <= set(owned)
                own.write({"step": done + 2})
                own.close()
        finally:
            first.kill()
    assert first.returncode == 1
    assert "has lost its lease to another process" in output
    assert "with epoch 2; this process has 1" in output
    assert "Traceback" not in output
    assert [record["step"] for record in metrics.read(run_dir)][-2:] == [done + 1, done + 2]


def state(folder):
    """Every file below a folder, with what makes it another one."""
    return {
        path.relative_to(folder): (path.stat().st_mtime_ns, path.stat().st_size)
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_job_owns_its_folder_until_it_loses_it(tmp_path, capsys):
    run_file = write_run(tmp_path, {"a": (1,), "b": (1,)})
    endless = ["model.num_layers=2", "model.width=16", "train.steps=100000"]
    with RunningJob(run_file, "--launcher", "local", *endless, "checkpoint.every=20") as job:
        job.until("step ")
        other = run_launch_here(capsys, "train", run_file, *endless)
        assert (other.returncode, other.stdout) == (2, "")
        assert f"error: {tmp_path / 'run'}: is in use by another process" in other.stderr
        assert f"process {job.process.pid} on " in other.stderr
        assert f"launch train {run_file} --launcher local" in other.stderr
        with pytest.raises(LeaseError):
            Trainer(run_file, endless).train()
        taken = lease_record.text(foreign())
        rob(tmp_path / "run", taken)
        assert job.end() == 1
        left = state(tmp_path / "run")
    assert "has lost its lease to another process" in job.output
    assert "on far-away" in job.output
    assert "Traceback" not in job.output
    time.sleep(0.5)
    assert state(tmp_path / "run") == left
    assert (tmp_path / "run" / FILE).read_bytes() == taken
