"""A job ends when it is asked to, in time, whatever is under way."""

import functools
import json
import os
import re
import signal
import threading
import time

import pytest

import launch.attempt
from holmesjax.checkpoints import manifest, resume, second_reading
from holmesjax.distributed.messages import Up
from holmesjax.liveness import helper_process, hung_main_thread
from holmesjax.report import recorder
from launch import restarts
from launch.attempt import Attempt
from launch.loop_watch import LoopWatch
from launch.restarts import RECORD
from tests.jobs import HANG_S
from tests.launch.scripted_supervisor import MISTAKE, saving, supervise, told

pytestmark = pytest.mark.usefixtures("process_goes_on")


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 0), (signal.SIGTERM, 75)])
def test_all_stop_after_the_same_step_when_the_launcher_is_told_to(
    tmp_path, capsys, monkeypatch, number, status
):
    training = [["tell", "up"], ["train"]]
    supervisor, _ = supervise(tmp_path, dict.fromkeys(range(3), training))
    take = Attempt._take

    def take_and_tell(attempt, event):
        take(attempt, event)
        if isinstance(event.record, Up) and len(attempt.up) == 3:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Attempt, "_take", take_and_tell)
    assert supervisor.run() == status
    [saved] = manifest.find(tmp_path / "run")
    assert f"stopped after step {saved.step} of" in capsys.readouterr().out


@pytest.mark.parametrize("finds", ["a process", "the start"])
def test_a_stop_ends_the_second_reading_of_a_checkpoint(tmp_path, monkeypatch, capsys, finds):
    """Whoever has found the damage: the other process may read for an hour."""
    run, reading = helper_process.run_module, []

    def read_long(module, arguments, **how):
        assert module == second_reading.__name__
        reading.append(threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)))
        reading[-1].start()
        return run(
            "timeit", ["-n1", "-r1", "print('  1 of 9'); import time; time.sleep(600)"], **how
        )

    monkeypatch.setattr(helper_process, "run_module", read_long)
    where = manifest.folder_of(tmp_path / "run", 2) / manifest.part_name(0)
    unreadable = {**MISTAKE, "where": str(where), "damaged": True}
    second = {0: [told(unreadable, 2), ["exit", 2]]}
    supervisor, _ = supervise(tmp_path, saving(2), second, max_restarts=2)
    if finds == "the start":
        verify = manifest.verify

        def find_damage(checkpoint):
            verify(checkpoint)
            raise manifest.damaged(checkpoint, "part_0", "is damaged", "2")

        monkeypatch.setattr(manifest, "verify", find_damage)
    start_s = time.monotonic()
    with pytest.raises(SystemExit) as end:
        supervisor.run()
    assert end.value.code == 75
    assert time.monotonic() - start_s < HANG_S
    assert len(reading) == 1
    assert where.exists()
    assert json.loads((tmp_path / "run" / RECORD).read_text())["starts"][-1]["status"] == 75
    assert "reads" in capsys.readouterr().out


ENDING = {
    "its time is up": (0, 0, 10, "it took more than "),
    "a signal while it is written": (1, 0, 10, "the job is to end now"),
    "a second signal": (1, 75, 9, "the job is to end now"),
}


@pytest.mark.parametrize("num_signals, status, done, why", ENDING.values(), ids=ENDING)
def test_a_report_that_takes_long_holds_no_end_up(
    tmp_path, monkeypatch, capsys, num_signals, status, done, why
):
    """It is left out, and the last line says how it is written later."""
    begun = tmp_path / "begun"
    text = f"open({str(begun)!r}, 'w').close(); import time; time.sleep(600)"
    (tmp_path / "slow_page.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(recorder, "PAGE", "slow_page")
    limit_s = 1.1 * HANG_S if num_signals else 12  # 5 of them are for what comes behind a report
    settings = ["log.report=true", f"distributed.stop_timeout_s={limit_s}"]
    training = [["tell", "up"], ["steps", 1, done], ["done", done]]
    supervisor, _ = supervise(tmp_path, dict.fromkeys(range(3), training), settings=settings)
    take = Attempt._record

    def take_and_stop(*arguments):
        take(*arguments)
        if status == 75 and not supervisor._stops:
            supervisor._stops.add(signal.SIGTERM)  # a first one, during the steps

    monkeypatch.setattr(Attempt, "_record", take_and_stop)

    def kill():
        while not begun.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    if num_signals:
        threading.Thread(target=kill, daemon=True).start()
    before_s = time.monotonic()
    assert supervisor.run() == status
    assert time.monotonic() - before_s < HANG_S
    again = f"to write it: python -m launch report {tmp_path / 'run'}"
    assert re.search(f"no report: {why}.*; {re.escape(again)}", capsys.readouterr().out)


def test_what_hangs_behind_the_last_step_ends_with_the_status_of_the_job(tmp_path, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(launch.attempt, "LEAST_LEFT_S", 1.0)
    training = [["tell", "up"], ["steps", 1, 10], ["done", 10]]
    settings = ["distributed.stop_timeout_s=1"]
    supervisor, launcher = supervise(tmp_path, dict.fromkeys(range(3), training), settings=settings)
    statuses = []
    end = lambda status, *last_words: (statuses.append(status), ended.set())
    watch = functools.partial(LoopWatch, end=end)
    monkeypatch.setattr(launch.attempt, "LoopWatch", watch)
    real_end = launcher.end
    launcher.end = lambda: (ended.wait(30), real_end())  # `scancel`, say, does not return
    assert supervisor.run() == 0
    assert statuses == [0]


@pytest.mark.parametrize("moment", ["while it waits", "just before"])
def test_a_stop_ends_a_start_that_waits_for_a_store(tmp_path, monkeypatch, moment):
    """It fetches a part, say; and a file system that hangs holds the process for no longer."""
    limits, is_limited, begin = [], threading.Event(), restarts.Restarts.begin

    def begin_late(*arguments):
        begin(*arguments)
        if moment == "just before":
            os.kill(os.getpid(), signal.SIGTERM)

    def fetch(*_, **__):
        assert moment == "while it waits", "nothing is looked for"
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        finally:
            is_limited.wait(60)  # a call of the system that hangs

    def limit(*given):
        limits.append(given)
        is_limited.set()

    monkeypatch.setattr(hung_main_thread, "end_within", limit)
    monkeypatch.setattr(resume, "find", fetch)
    monkeypatch.setattr(restarts.Restarts, "begin", begin_late)
    supervisor, launcher = supervise(tmp_path, settings=["distributed.stop_timeout_s=50"])
    with pytest.raises(SystemExit) as end:
        supervisor.run()
    assert (end.value.code, limits, launcher.starts) == (75, [(50.0, 75)], 0)
    assert json.loads((tmp_path / "run" / RECORD).read_text())["starts"][0]["stopped"]
