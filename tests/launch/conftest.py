"""Fixtures of tests that run a launcher in pytest's own process."""

import functools

import pytest

import launch.attempt
from holmesjax.liveness import hung_main_thread
from launch import restarts
from launch.loop_watch import LoopWatch


@pytest.fixture
def process_goes_on(monkeypatch):
    """A launcher that stands still or is to leave ends its process, and here that is pytest's.

    On a machine that others use, too, a loop does not turn for longer than the limits of tests.
    """
    go_on = lambda *_: None
    monkeypatch.setattr(launch.attempt, "LoopWatch", functools.partial(LoopWatch, end=go_on))
    monkeypatch.setattr(hung_main_thread, "end_within", go_on)


@pytest.fixture
def no_pause(monkeypatch):
    monkeypatch.setattr(restarts, "FIRST_PAUSE_S", 0.001)
