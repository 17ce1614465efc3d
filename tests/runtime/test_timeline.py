"""What the clock reports of tasks whose times are known."""

import statistics
import time

import pytest

from holmesjax.runtime.timeline import Clock, Interval, busy_shares, from_first_start


class Later:
    """Stands for an array that is ready at a given time."""

    def __init__(self, at_s):
        self._at_s = at_s

    def block_until_ready(self):
        time.sleep(max(0.0, self._at_s - time.perf_counter()))


def test_a_task_starts_when_its_stage_is_free_and_its_input_has_arrived():
    clock, now = Clock(2), time.perf_counter()
    timeline = clock.timeline()
    timeline.watch(0, "F", 0, None, Later(now + 0.2))
    timeline.watch(0, "F", 1, None, Later(now + 0.4))
    timeline.watch(1, "F", 0, Later(now + 0.3), Later(now + 0.5))
    first, second, other = from_first_start(timeline.intervals())
    clock.close()
    assert [first.start_s, first.microbatch, other.stage] == [0.0, 0, 1]
    assert second.start_s == first.end_s  # not when it was dispatched
    # A sleeping thread may wake late, never early.
    assert first.end_s >= 0.19
    assert other.start_s >= 0.29
    assert other.end_s >= 0.49


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
