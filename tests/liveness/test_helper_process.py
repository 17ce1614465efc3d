"""A helper process is heard line by line, ends with its limit, and with whoever gives it up."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from holmesjax.liveness import helper_process
from holmesjax.liveness.helper_process import run_module
from tests.jobs import HANG_S

HANGS = "open('pid', 'w').write(str(__import__('os').getpid())); import time; time.sleep(600)"


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Makes a module that is found from here, of some lines."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def make(text):
        (tmp_path / "helped.py").write_text(text)
        return "helped"

    return make


def is_gone(pid):
    """Whether a process has ended and was reaped."""
    deadline_s = time.monotonic() + HANG_S
    while Path(f"/proc/{pid}").exists():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


def test_its_lines_its_status_and_its_last_words_are_heard(program):
    lines = []
    text = "import sys; print(*sys.argv[1:], sep='\\n'); sys.stderr.write('odd\\nend'); exit(3)"
    ended = run_module(program(text), ["a", "b"], limit_s=HANG_S, say=lines.append)
    assert (ended, lines) == ((3, "end"), ["a", "b"])


def test_more_output_than_a_pipe_holds_does_not_hold_it_up(program):
    text = "print('x' * 10**6); import sys; sys.stderr.write('y' * 10**6 + '\\nlast')"
    lines = []
    assert run_module(program(text), [], limit_s=HANG_S, say=lines.append) == (0, "last")
    assert [len(line) for line in lines] == [10**6]


def has_begun():
    return Path("pid").exists() and Path("pid").read_text()


@pytest.mark.parametrize("limit", ["limit_s", "silence_s"])
def test_it_is_killed_at_its_limit(program, monkeypatch, limit):
    """Its time passes once it has begun, however long that takes."""
    clock = SimpleNamespace(monotonic=lambda: HANG_S + 1 if has_begun() else 0.0)
    monkeypatch.setattr(helper_process, "time", clock)
    assert run_module(program(HANGS), [], **{limit: HANG_S}, pause=time.sleep).status is None
    assert is_gone(Path("pid").read_text())


def test_it_may_take_as_long_as_it_says_how_far_it_is(program, monkeypatch):
    """50 s pass with each line, and 60 s without one are too many."""
    lines = []
    clock = SimpleNamespace(monotonic=lambda: 50.0 * len(lines))
    monkeypatch.setattr(helper_process, "time", clock)
    text = "print(*range(9), sep='\\n')"
    ended = run_module(program(text), [], silence_s=60, pause=time.sleep, say=lines.append)
    assert (ended.status, len(lines)) == (0, 9)


def test_what_a_pause_raises_kills_it(program):
    def pause(seconds):
        if has_begun():
            raise KeyboardInterrupt
        time.sleep(seconds)

    with pytest.raises(KeyboardInterrupt):
        run_module(program(HANGS), [], limit_s=HANG_S, pause=pause)
    assert is_gone(Path("pid").read_text())


def test_what_cannot_be_started_is_an_error_of_the_system(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(OSError, match="No such file"):
        helper_process.run_module("helped", [], limit_s=HANG_S)
