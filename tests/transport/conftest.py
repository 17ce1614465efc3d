"""Clocks that only the test moves."""

import time
from types import SimpleNamespace

import pytest

from holmesjax.transport import heartbeats
from tests.clock import stop_callers_clock


@pytest.fixture
def clock(monkeypatch):
    """A clock that measures silences; heartbeats still go, and bytes are heard, in real time."""
    clock = SimpleNamespace(now_s=time.monotonic())
    monkeypatch.setattr(heartbeats, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    return clock


@pytest.fixture
def pauses(monkeypatch):
    stop_callers_clock(monkeypatch)
