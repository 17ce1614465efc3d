"""Processes that end when they must: one whose last words fail or hang, and its children."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from holmesjax.distributed.messages import Exit, Output
from holmesjax.liveness import hung_main_thread
from launch import watchdog
from launch.launchers.launcher import Children
from tests.jobs import HANG_S, ROOT

GIVE_UP = """
import os, sys, threading, time
from holmesjax.liveness import hung_main_thread
from holmesjax.errors import PeerError
from holmesjax.distributed.worker import Worker

hung_main_thread.LAST_WORDS_S = 0.5

class Member:
    def send(self, record):
        {send}

worker = object.__new__(Worker)
worker._failing, worker._member = threading.Lock(), Member()
error = PeerError("a", "is gone", found="nothing", fix="start again")
sys.stdout = open("{output}", "w")
print("something for the buffer")
threading.Thread(target=worker._give_up, args=(error,), daemon=True).start()
time.sleep(100)
"""


@pytest.mark.parametrize(
    "send, output",
    [("pass", "/dev/full"), ("raise KeyError", "/dev/null"), ("time.sleep(100)", "/dev/null")],
)
def test_a_process_that_gives_up_ends_whatever_fails(send, output):
    """The disk is full, or telling fails or hangs; the main thread waits for ever."""
    script = GIVE_UP.format(send=send, output=output)
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=HANG_S, check=False)
    assert done.returncode == 75


MISTAKES = """
import os, threading
from holmesjax.errors import HolmesError
from holmesjax.distributed.worker import Worker

def give_up(has_trained, is_refused):
    class Member:
        is_over, send = threading.Event(), print

    Member.is_over.set()
    Member.is_refused = is_refused
    worker = object.__new__(Worker)
    worker._failing, worker._member, worker._has_trained = threading.Lock(), Member(), has_trained
    worker._give_up(HolmesError("a", "has 7 devices", found="7", fix="add one"))

for case in ((False, False), (True, False), (True, True)):
    if not (child := os.fork()):
        give_up(*case)
    print("ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_a_mistake_in_a_run_that_has_made_steps_is_final_if_the_launcher_says_so():
    """A scheduler that sees 2 starts no process again."""
    command = [sys.executable, "-c", MISTAKES]
    done = subprocess.run(command, cwd=ROOT, timeout=60, capture_output=True, text=True, check=True)
    ends = [line for line in done.stdout.splitlines() if line.startswith("ended with")]
    assert ends == ["ended with 2", "ended with 75", "ended with 2"]


def test_signals_are_heard_while_the_main_thread_hangs():
    """It waits outside of the interpreter's reach, as in a collective."""
    code = """
import ctypes, os, signal
from holmesjax.liveness import hung_main_thread

def heard(number):
    hung_main_thread.write_stacks()
    os._exit(number)

hung_main_thread.hear_signals([signal.SIGTERM], heard)
print("ready", flush=True)
while True:
    ctypes.CDLL(None).sleep(100)
"""
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGTERM)
        _, told = child.communicate(timeout=HANG_S)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == signal.SIGTERM
    assert "thread MainThread" in told.split("thread signals")[0]


def test_a_run_that_fails_gives_the_signals_back():
    """Another run of this process would be ended by the watchdog of the first."""
    state = lambda: [
        *map(signal.getsignal, hung_main_thread.stop_signals()),
        signal.set_wakeup_fd(-1),
    ]
    before, threads = state(), set(threading.enumerate())
    run = SimpleNamespace(progress=None, stop=lambda: None)
    with (
        pytest.raises(OSError, match="full"),
        watchdog.Watchdog(run, 100.0, lambda: None),
    ):
        raise OSError("full")
    assert state() == before
    left = [thread for thread in set(threading.enumerate()) - threads if thread.is_alive()]
    assert all(thread.name == "watchdog" for thread in left)  # it ends at its next look


def open_files() -> set[str]:
    """All that descriptors of this process lead to; earlier tests may have left some to close."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # of this look itself
            found.add(os.readlink(link))
    return found


@pytest.mark.parametrize("prefix", ["", "setsid "])
def test_the_end_does_not_wait_for_what_a_child_has_started(prefix):
    """It holds the child's output open; with a session of its own it even outlives the child."""
    children, events = Children(), queue.Queue()
    script = f"{prefix}sleep 300 & echo $!; exec sleep 300"
    children.start(0, ["sh", "-c", script], dict(os.environ), events)
    grandchild = int(events.get(timeout=HANG_S).record.line)
    ending = threading.Thread(target=children.end, daemon=True)
    ending.start()
    ending.join(HANG_S)
    try:
        assert not ending.is_alive()
        if not prefix:
            deadline_s = time.monotonic() + HANG_S
            stat = Path(f"/proc/{grandchild}/stat")
            while stat.exists() and stat.read_text().split()[2] != "Z":
                assert time.monotonic() < deadline_s, "it is left behind"
                time.sleep(0.02)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(grandchild, signal.SIGKILL)
    while not isinstance(events.get(timeout=HANG_S).record, Exit):  # its output is closed, too
        pass


def test_a_child_costs_one_descriptor_and_what_it_says_is_heard_to_its_end():
    """Also where it does not read what it is given, and ends in the middle of a line."""
    children, events = Children(), queue.Queue()
    before = open_files()
    try:
        for number in range(10):
            script = "echo one; printf two; " + ("exec sleep 300" if number else "exit 3")
            children.start(number, ["sh", "-c", script], dict(os.environ), events, stdin="x" * 100)
        heard = [events.get(timeout=HANG_S) for _ in range(12)]
        assert len(open_files() - before) <= 10
    finally:
        children.end()
    own = [record for number, record in heard if number == 0]
    assert own == [Output(line="one"), Output(line="two"), Exit(status=3)]
    assert open_files() <= before


def test_the_end_of_a_child_is_told_while_its_own_child_holds_its_output_open(tmp_path):
    """A loader of data that outlives its process, say; also where it goes on writing."""
    children, events = Children(), queue.Queue()
    told, lines, deadline_s = {}, [], time.monotonic() + HANG_S
    try:
        for number, does in enumerate(["sleep 300", "while :; do echo more; sleep 0.01; done"]):
            own = tmp_path / str(number)
            started = f"setsid sh -c 'echo $$ > {own}; {does}' & until [ -s {own} ]; do :; done"
            script = f"{started}; echo last words; exit {3 + number}"
            children.start(number, ["sh", "-c", script], dict(os.environ), events)
        while len(told) < 2:
            assert time.monotonic() < deadline_s, "no end is told"
            number, record = events.get(timeout=HANG_S)
            if isinstance(record, Exit):
                told[number] = record.status
            else:
                lines.append((number, record.line))
    finally:
        children.end()
        for pid_file in tmp_path.iterdir():
            os.killpg(int(pid_file.read_text()), signal.SIGKILL)
    assert told == {0: 3, 1: 4}
    assert {(0, "last words"), (1, "last words")} <= set(lines)
