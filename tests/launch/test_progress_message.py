"""Messages on stderr about work that takes long."""

import io
import time

import pytest

from launch import progress_message
from launch.progress_message import CLEAR, ProgressMessage


class Output(io.StringIO):
    def __init__(self, is_terminal):
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self):
        return self.is_terminal


@pytest.mark.parametrize("is_terminal", [False, True])
def test_long_work_is_told_of_again_and_again(is_terminal, monkeypatch):
    """A log gets lines; a terminal gets one line, which changes and goes away."""
    output = Output(is_terminal)
    monkeypatch.setattr("sys.stderr", output)
    monkeypatch.setattr(progress_message, "TERMINAL_S", 0.001)
    with ProgressMessage("planning", after_s=0.0, log_s=0.001) as say:
        for what in ("one node", "two nodes"):
            say(what)
            deadline_s = time.monotonic() + 60.0  # a hang guard
            while f"planning: {what} (" not in output.getvalue():
                assert time.monotonic() < deadline_s, output.getvalue()
                time.sleep(0.001)
    told = output.getvalue()
    assert told.endswith(CLEAR if is_terminal else "\n")
    assert ("\n" in told) != is_terminal


def test_short_work_is_not_told_of(monkeypatch):
    output = Output(is_terminal=False)
    monkeypatch.setattr("sys.stderr", output)
    with ProgressMessage("planning", after_s=3600.0) as say:
        say("one node")
    assert output.getvalue() == ""
