"""The reports of the clock about tasks whose times are known."""

import statistics
import threading
from types import SimpleNamespace

import pytest

from holmesjax.runtime import timeline as timelines
from holmesjax.runtime.timeline import Clock, Interval, busy_shares


class Later:
    """Stands for an array that is ready at a given time: a thread that waits sleeps until then."""

    def __init__(self, times, at_s):
        self._times, self._at_s = times, at_s

    def block_until_ready(self):
        self._times.now_s = max(self._times.now_s, self._at_s)


class Times(threading.local):
    """A clock for each thread, which moves only while the thread waits."""

    now_s = 10.0


def test_a_task_starts_when_its_stage_is_free_and_its_input_has_arrived(monkeypatch):
    times = Times()
    later = lambda at_s: Later(times, at_s)
    monkeypatch.setattr(timelines, "time", SimpleNamespace(perf_counter=lambda: times.now_s))
    with Clock(2) as clock:
        timeline = clock.timeline()
        first, second = timeline.begin(0), timeline.begin(0)
        third = timeline.begin(1, later(13.0))
        times.now_s = 11.9  # a call may return only when its task has nearly ended
        timeline.watch(0, "F", 0, first, later(12.0))
        timeline.watch(0, "F", 1, second, later(14.0))  # starts not when it was dispatched
        timeline.watch(1, "F", 0, third, later(15.0))
        assert timeline.intervals() == [
            (0, "F", 0, 10.0, 12.0),
            (0, "F", 1, 12.0, 14.0),
            (1, "F", 0, 13.0, 15.0),
        ]


@pytest.mark.parametrize("num_stages, num_microbatches", [(2, 4), (4, 4), (3, 1)])
def test_bubble_share_of_equal_stages(num_stages, num_microbatches):
    """GPipe's closed form, (p - 1) / (m + p - 1). Huang et al., arXiv:1811.06965."""
    intervals = [
        Interval(s, "F", m, float(s + m), float(s + m + 1))
        for s in range(num_stages)
        for m in range(num_microbatches)
    ]
    want = (num_stages - 1) / (num_microbatches + num_stages - 1)
    assert 1 - statistics.fmean(busy_shares(intervals)) == pytest.approx(want)
