"""The seconds of a run add up to its time on the wall, through validations and crashes."""

import io

import pytest

from holmesjax.job import load
from holmesjax.report import goodput, metrics
from holmesjax.report.recorder import Recorder
from tests.jobs import write_run
from tests.report.process_steps import process_step


class Hosts:
    """The clocks of the hosts that train one after the other; each counts from its own start."""

    def __init__(self, monkeypatch):
        self.now_s, self.booted_s = 1e9, 0.0
        monkeypatch.setattr(goodput.time, "time", lambda: self.now_s)
        monkeypatch.setattr(goodput.time, "monotonic", lambda: self.now_s - self.booted_s)

    def change(self, passed_s):
        self.now_s += passed_s
        self.booted_s = self.now_s - 17.0


def test_the_seconds_of_a_run_add_up_to_its_time(tmp_path, monkeypatch):
    """Steps of 10 s, a crash in the fourth, and a restart from the checkpoint after the second."""
    hosts, config = Hosts(monkeypatch), load(write_run(tmp_path, {"a": (1,)})).config
    first_s = hosts.now_s

    def session(done, steps):
        """Steps with what they measured besides, each in a number of seconds."""
        out = io.StringIO()
        began_s = goodput.time.monotonic()
        hosts.now_s += 30.0  # it compiles
        with Recorder(tmp_path, config, done_steps=done, stream=out, began_s=began_s) as recorder:
            for step, (passed_s, told) in enumerate(steps, start=done + 1):
                hosts.now_s += passed_s
                recorder.take({**process_step(step, 10.0), "input_wait_s": 1.0, **told})
            hosts.now_s += 2.0  # a crash
            return recorder.summary()

    session(
        0, [(10, {"compile_s": 21.0}), (14, {"validation_s": 4.0}), (13, {"checkpoint_s": 3.0})]
    )
    hosts.change(100.0)
    session(2, [(12, {"compile_s": 40.0}), (10, {"checkpoint_s": 99.0})])
    hosts.change(50.0)
    session(4, [])  # killed before its first step
    _, line = session(4, [(10, {})])
    last = metrics.read(tmp_path)[-1]
    assert last["wall_s"] == pytest.approx(
        {
            "step": 9 + 9 + 9 + 0 + 9,
            "input": 1 + 1 + 1 + 1 + 1,
            "validation": 4,
            "checkpoint": 9,  # no more than there is
            "start": 9 + 0 + 30,
            "compile": 21 + 32,  # no more than there is before the first step
            "lost": 13,
            "stopped": 2 + 100 + 2 + 50 + 30 + 2,
        }
    )
    assert sum(last["wall_s"].values()) == pytest.approx(last["time_s"] - first_s)
    assert last["time_s"] == pytest.approx(hosts.now_s - 2.0)
    assert goodput.goodput(last) == pytest.approx(36 / 345)
    assert line.startswith(
        "goodput     10.4% of the run's time to its last step: stopped 3 min 6 s"
    )
    assert [name for name, _ in goodput.rows(last)][:2] == ["stopped", "compile"]


def test_records_of_before_goodput_was_measured_are_no_time(tmp_path, monkeypatch):
    hosts = Hosts(monkeypatch)
    untimed = {"step": 5, "step_time_s": 3.0}
    clock = goodput.WallTime(untimed, untimed, goodput.time.monotonic())
    hosts.now_s += 4.0
    found = clock.step([process_step(6, 1.0), {**process_step(6, 3.0), "input_wait_s": 1.0}])[
        "wall_s"
    ]
    assert {name: s for name, s in found.items() if s} == {"start": 1.0, "input": 1.0, "step": 2.0}
