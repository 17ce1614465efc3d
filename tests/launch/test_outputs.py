"""Whoever reads the output of a launcher, or does not, changes nothing of a training."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from holmesjax.errors import REQUEUE
from launch import outputs
from launch.loop_watch import LoopWatch
from launch.outputs import QueuedStream
from tests.jobs import ROOT, write_run

PIPE_BYTES = 4096


@pytest.fixture
def pipe():
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    yield reading, writing
    for descriptor in (reading, writing):
        with contextlib.suppress(OSError):
            os.close(descriptor)


def test_a_pipe_that_nobody_reads_drops_the_oldest_text_and_says_so(pipe, monkeypatch):
    reading, writing = pipe
    monkeypatch.setattr(outputs, "MOST_CHARACTERS", 1000)
    stream = QueuedStream(writing, pytest.fail)
    lines = [f"line {number:04}\n" for number in range(2000)]
    for line in lines:
        print(line, end="", file=stream, flush=True)  # none of them waits
    stream.drain(0.1)
    content = b""
    end = threading.Timer(5.0, os.close, (writing,))
    end.start()
    while b"line 1999" not in content:
        content += os.read(reading, 65536)
    end.cancel()
    text = content.decode()
    assert "pieces of output were dropped: nobody read them]\n" in text
    shown = [line for line in text.splitlines(keepends=True) if line.startswith("line")]
    assert shown == sorted(shown)
    assert shown[-90:] == lines[-90:]


def test_a_reader_that_has_gone_is_said_once(pipe):
    reading, writing = pipe
    losses = []
    stream = QueuedStream(writing, losses.append)
    os.close(reading)
    for _ in range(3):
        print("a line", file=stream, flush=True)
        stream.drain(5.0)
    assert losses == ["Broken pipe"]


def settings(tmp_path, steps):
    run_file = write_run(tmp_path, {"a": (1,)})
    return [str(run_file), f"train.steps={steps}", "train.log_every_s=0", "checkpoint.every=20"]


def steps_of(tmp_path):
    with contextlib.suppress(OSError):
        lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["step"] for line in lines]
    return []


@pytest.mark.parametrize("goes", [True, False])
def test_a_run_goes_on_whether_its_console_is_gone_or_not_read(pipe, goes, tmp_path):
    reading, writing = pipe
    command = [sys.executable, "-m", "launch", "train", *settings(tmp_path, 120)]
    run = subprocess.Popen(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    if goes:
        os.read(reading, 10)
        os.close(reading)
    try:
        _, errors = run.communicate(timeout=120)
    finally:
        run.kill()
    assert run.returncode == 0, errors
    assert steps_of(tmp_path) == list(range(1, 121))
    assert ("standard output is gone (Broken pipe)" in errors) == goes


@pytest.mark.parametrize("launcher", [[], ["--launcher", "local"]])
def test_a_hangup_is_a_stop(launcher, tmp_path):
    command = [sys.executable, "-m", "launch", "train", *settings(tmp_path, 10**6), *launcher]
    run = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline_s = time.monotonic() + 120
        while len(steps_of(tmp_path)) < 3 and time.monotonic() < deadline_s:
            time.sleep(0.1)
        run.send_signal(signal.SIGHUP)
        _, errors = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == REQUEUE, errors
    [*_, last] = steps_of(tmp_path)
    assert (tmp_path / f"run/checkpoints/{last:06}").is_dir() or any(
        path.name.endswith(str(last)) for path in (tmp_path / "run").rglob("*")
    )


def test_a_loop_that_stands_still_ends_the_launcher():
    ends = []
    done = threading.Event()

    def end(status, *last_words):
        ends.append(status)
        done.set()

    with LoopWatch(0.4, "distributed.start_timeout_s", lambda: None, end) as watch:
        for _ in range(8):
            time.sleep(0.1)
            watch.turn()
        assert not ends
        assert done.wait(10.0)
    assert ends == [REQUEUE]
