"""A helper process is heard line by line, ends with its limit, and with whoever gives it up."""

import sys
import time
from pathlib import Path

import pytest

from holmesjax.liveness import helper_process
from holmesjax.liveness.helper_process import run_module

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
    deadline_s = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


def test_its_lines_its_status_and_its_last_words_are_heard(program):
    lines = []
    text = "import sys; print(*sys.argv[1:], sep='\\n'); sys.stderr.write('odd\\nend'); exit(3)"
    ended = run_module(program(text), ["a", "b"], limit_s=60, say=lines.append)
    assert (ended, lines) == ((3, "end"), ["a", "b"])


def test_more_output_than_a_pipe_holds_does_not_hold_it_up(program):
    text = "print('x' * 10**6); import sys; sys.stderr.write('y' * 10**6 + '\\nlast')"
    lines = []
    assert run_module(program(text), [], limit_s=60, say=lines.append) == (0, "last")
    assert [len(line) for line in lines] == [10**6]


def test_it_is_killed_at_its_limit(program):
    assert run_module(program(HANGS), [], limit_s=2.0).status is None
    assert is_gone(Path("pid").read_text())


def test_what_a_pause_raises_kills_it(program):
    def pause(seconds):
        if Path("pid").exists() and Path("pid").read_text():
            raise KeyboardInterrupt
        time.sleep(seconds)

    with pytest.raises(KeyboardInterrupt):
        run_module(program(HANGS), [], limit_s=60, pause=pause)
    assert is_gone(Path("pid").read_text())


def test_what_cannot_be_started_is_an_error_of_the_system(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(OSError, match="No such file"):
        helper_process.run_module("helped", [], limit_s=60)
