"""Clocks that only the test moves."""

import time
from types import SimpleNamespace

import pytest

from holmesjax.transport import connections, heartbeats


@pytest.fixture
def clock(monkeypatch):
    """What silences are measured with; heartbeats still go, and bytes are heard, in real time."""
    clock = SimpleNamespace(now_s=time.monotonic())
    monkeypatch.setattr(heartbeats, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    return clock


@pytest.fixture
def pauses(monkeypatch):
    """For callers time passes only in the pauses between calls; after a stranger it is up."""
    now_s = 0.0

    def sleep(seconds):
        nonlocal now_s
        now_s += seconds

    times = SimpleNamespace(monotonic=lambda: now_s, sleep=sleep)
    monkeypatch.setattr(connections, "time", times)
    monkeypatch.setattr(connections, "STRANGER_PAUSE_S", 60.0)
