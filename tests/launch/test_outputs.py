"""Whoever reads the output of a launcher, or does not, changes nothing of a training."""

import contextlib
import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from holmesjax.errors import REQUEUE
from launch import loop_watch, outputs
from launch.__main__ import main
from launch.loop_watch import LoopWatch
from launch.outputs import QueuedStream
from launch.process_logs import ProcessLogs
from tests.disks import files_of_at_most
from tests.jobs import HANG_S, ROOT, run_launch, write_run

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
    end = threading.Timer(60.0, os.close, (writing,))  # a hang guard
    end.start()
    while b"line 1999" not in content:
        content += os.read(reading, 65536)
    end.cancel()
    text = content.decode()
    assert "pieces of output were dropped: nobody took them]\n" in text
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
    assert losses == ["is gone (Broken pipe), and the run goes on without it"]


def settings(tmp_path, steps):
    run_file = write_run(tmp_path, {"a": (1,)})
    return [str(run_file), f"train.steps={steps}", "train.log_every_s=0", "checkpoint.every=20"]


def steps_of(tmp_path):
    """The steps whose lines are whole: the last one may be on its way to the file."""
    with contextlib.suppress(OSError):
        *lines, _ = (tmp_path / "run/metrics.jsonl").read_text().split("\n")
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
        _, errors = run.communicate(timeout=HANG_S)
    finally:
        run.kill()
    assert run.returncode == 0, errors
    assert steps_of(tmp_path) == list(range(1, 121))
    assert ("standard output is gone (Broken pipe)" in errors) == goes


def test_a_run_whose_outputs_were_closed_before_it_began_trains(tmp_path):
    words = [sys.executable, "-m", "launch", "train", *settings(tmp_path, 3)]
    command = " ".join(words) + " --launcher local >&- 2>&-"
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, timeout=HANG_S, check=False)
    assert (done.returncode, steps_of(tmp_path)) == (0, [1, 2, 3])


def test_a_log_that_finds_no_room_ends_nothing_and_says_what_is_missing(tmp_path):
    process = SimpleNamespace(file_name="a_a-0")
    logs = ProcessLogs(tmp_path, [process], Path.rename)
    logs.write(0, "first")
    with files_of_at_most(6):
        logs.write(0, "second")
        logs.write(0, "third")
    logs.write(0, "fourth\udcff")  # half a character, and a lone byte of a name, can be in a line
    lines = logs.path(0).read_text().splitlines()
    assert logs.told(0) == f"; its output is in {logs.path(0)}"
    logs.path(0).unlink()
    assert logs.told(0) == ""  # no file is named that is not there
    assert lines == ["first", "[2 lines are missing: they could not be written]", r"fourth\udcff"]
    assert logs.last_lines(0) == ("first", "second", "third", "fourth\udcff")
    logs.folder.rmdir()
    logs.write(0, "fifth")
    logs.write(0, "sixth")
    lines = logs.path(0).read_text().splitlines()
    assert lines == ["[1 lines are missing: they could not be written]", "sixth"]


@pytest.mark.parametrize("launcher", [[], ["--launcher", "local"]])
def test_a_hangup_is_a_stop(launcher, tmp_path):
    command = [sys.executable, "-m", "launch", "train", *settings(tmp_path, 10**6), *launcher]
    run = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline_s = time.monotonic() + HANG_S
        while len(steps_of(tmp_path)) < 3 and time.monotonic() < deadline_s:
            time.sleep(0.1)
        run.send_signal(signal.SIGHUP)
        _, errors = run.communicate(timeout=HANG_S)
    finally:
        run.kill()
    assert run.returncode == REQUEUE, errors
    [*_, last] = steps_of(tmp_path)
    assert (tmp_path / f"run/checkpoints/{last:06}").is_dir() or any(
        path.name.endswith(str(last)) for path in (tmp_path / "run").rglob("*")
    )


def test_a_pause_of_the_launcher_is_known_for_a_while(monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(loop_watch, "_now_s", lambda: now_s)
    with LoopWatch(1000.0, "distributed.start_timeout_s", lambda: None) as watch:
        for seconds, pause_s in ((0.3, 0.0), (7.0, 7.0), (0.2, 7.0), (20.0, 20.0), (0.2, 20.0)):
            now_s += seconds
            watch.turn()
            assert watch.pause_s(within_s=10.0) == pytest.approx(pause_s)
        now_s += 9.9
        assert watch.pause_s(within_s=10.0) == 0.0


def test_a_loop_that_stands_still_ends_the_launcher(monkeypatch):
    """It turns for 30 s, and stands from then on. The clock is ours, and so is the thread."""
    limit_s, turns_s, now_s, ends = 10.0, 30.0, 0.0, []
    monkeypatch.setattr(loop_watch, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(loop_watch, "_now_s", lambda: now_s)
    end = lambda status, *last_words: ends.append((status, now_s))
    watch = LoopWatch(limit_s, "distributed.start_timeout_s", lambda: None, end)

    def wait(seconds):
        nonlocal now_s
        now_s += seconds
        if now_s <= turns_s:
            watch.turn()
        return now_s > 10 * turns_s

    watch._watch(SimpleNamespace(wait=wait))
    [(status, ended_s)] = ends
    assert status == REQUEUE
    assert turns_s + limit_s < ended_s <= turns_s + limit_s + 2 * loop_watch.CHECK_S


@pytest.mark.parametrize(
    "encoding, shown", [("ascii", b"\\xe9 \\u2192"), ("latin-1", b"\xe9 \\u2192")]
)
def test_output_of_any_encoding_takes_any_text(tmp_path, monkeypatch, encoding, shown):
    """Characters that an encoding lacks are shown by their number, also of names of files."""
    (tmp_path / "a.txt").write_text("é → " * 99)
    (tmp_path / os.fsdecode(b"caf\xe9.tar")).write_bytes(b"\0")
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding=encoding))
    assert main(["data", str(tmp_path), "model.context_length=16"]) == 0
    sys.stdout.flush()
    assert shown in out.getvalue()
    assert b"caf\\udce9.tar" in out.getvalue()
    reading, writing = os.pipe()
    stream = QueuedStream(writing, pytest.fail, encoding)
    print("é →", file=stream)
    stream.drain()
    assert os.read(reading, 99) == shown + b"\n"
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize(
    "words, where",
    [
        (("tokenizer", "caf\udce9", "--vocab=300", "--out=b.json"), "tokenizer"),
        (("tokenize", "a.txt", "--tokenizer=caf\udce9", "--out=b"), "--tokenizer"),
        (("plan", "caf\udce9.yaml"), "plan"),
        (("train", "a.yaml", "run.dir=caf\udce9"), "train"),
    ],
)
def test_words_that_the_encoding_of_the_shell_lacks_are_refused(words, where, capsys):
    """Under LC_ALL=C without UTF-8, each letter but those of ASCII is such bytes."""
    assert main([*words]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {where}: has what is no text in utf-8\n  found: '")
    assert "caf\\udce9" in said


@pytest.mark.parametrize(
    "words", [("nics",), ("--help",), ("plan", "configs/runs/quickstart.yaml")]
)
def test_output_that_finds_no_room_is_one_sentence(words):
    with open("/dev/full", "w") as full:
        done = run_launch(*words, stdout=full)
    assert done.returncode == 2
    # A machine that is busy plans for so long that a line says so.
    lines = [line for line in done.stderr.splitlines() if not line.startswith("planning: ")]
    assert lines[:2] == [
        "error: standard output: cannot be written",
        "  found: No space left on device",
    ]
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
