"""Calls of a device whose clock the test has."""

import time

import pytest

from holmesjax.runtime import call_times


@pytest.mark.parametrize("rounds, round_s, calls_of", [(3, 0.0, (1, 1)), (2, 1.0, (4, 2))])
def test_a_call_takes_its_share_of_a_round_and_takes_turns(monkeypatch, rounds, round_s, calls_of):
    """A call's work is done when its result is waited for; the first call also compiles."""
    now_s, open_s, order = [0.0], [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])

    def call(name, work_s):
        def run():
            open_s[0] += work_s if name in order else 100.0
            order.append(name)

        return run

    def wait(_):
        now_s[0] += open_s[0]
        open_s[0] = 0.0

    calls = {"short": call("short", 0.25), "long": call("long", 0.5)}
    found = call_times.rounds_s(calls, rounds=rounds, round_s=round_s, wait=wait)
    assert found == {"short": [0.25] * rounds, "long": [0.5] * rounds}
    short, long = calls_of
    assert order[4:] == (["short"] * short + ["long"] * long) * rounds
