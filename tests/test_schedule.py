"""Schedules keep their promises, and the simulator agrees with a clock that ticks."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from holmesjax.schedule import (
    Task,
    gpipe,
    in_flight_bound,
    max_in_flight,
    one_f_one_b,
    picture,
    schedule,
    simulate,
    validate,
)

NAMES = ["gpipe", "1f1b"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
@pytest.mark.parametrize("num_microbatches", [1, 3, 8])
def test_schedules_run_every_task_once_and_bound_memory(name, num_stages, num_microbatches):
    schedules = schedule(name, num_stages, num_microbatches)
    validate(name, schedules, num_microbatches)
    for stage, tasks in enumerate(schedules):
        assert len(set(tasks)) == len(tasks) == 2 * num_microbatches
        in_flight = np.cumsum([1 if task.kind == "F" else -1 for task in tasks])
        bound = num_microbatches if name == "gpipe" else min(num_microbatches, num_stages - stage)
        assert in_flight.min() == 0
        assert in_flight.max() == max_in_flight(tasks) == bound
        assert in_flight_bound(name, stage, num_stages, num_microbatches) == bound


def test_tasks_print_as_text():
    assert str(Task("F", 12)) == "F12"
    assert " ".join(map(str, gpipe(1, 2, 2))) == "F0 F1 B0 B1"


def swap(tasks, i, j):
    tasks = list(tasks)
    tasks[i], tasks[j] = tasks[j], tasks[i]
    return tuple(tasks)


BROKEN = {
    "a task twice": lambda s: (s[0] + s[0][:1], s[1]),
    "a task missing": lambda s: (s[0][:-1], s[1]),
    "backward before its forward": lambda s: (s[0], swap(s[1], 0, 1)),
    "too many in flight": lambda s: (gpipe(0, 2, 4), s[1]),
    "waits forever": lambda s: (s[0], swap(swap(s[1], 0, 6), 1, 7)),
}


@pytest.mark.parametrize("breaks", BROKEN.values(), ids=BROKEN)
def test_validate_refuses_broken_schedules(breaks):
    with pytest.raises(AssertionError):
        validate("1f1b", breaks(schedule("1f1b", 2, 4)), 4)


def test_validate_names_the_stages_that_wait_forever():
    # Each order is right by itself; together, stage 0 needs B0 before F1, and stage 1 F1 before B0.
    schedules = [
        (Task("F", 0), Task("B", 0), Task("F", 1), Task("B", 1)),
        (Task("F", 1), Task("B", 1), Task("F", 0), Task("B", 0)),
    ]
    with pytest.raises(AssertionError, match="deadlock: stage 0 for B0, stage 1 for F1"):
        validate("1f1b", schedules, 2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_stages", [1, 2, 3, 6])
@pytest.mark.parametrize("num_microbatches", [1, 2, 6, 13])
def test_bubble_of_equal_stages_is_the_closed_form(name, num_stages, num_microbatches):
    """(p - 1) / (m + p - 1): Huang et al., arXiv:1811.06965; 1F1B only needs less memory."""
    p, m = num_stages, num_microbatches
    simulation = simulate(schedule(name, p, m), [1.0] * p, [2.0] * p, [(0.0, 0.0)] * (p - 1))
    assert simulation.step_time_s == 3.0 * (m + p - 1)
    # Sums of a few integers are exact; the one division rounds.
    assert simulation.bubbles == pytest.approx([(p - 1) / (m + p - 1)] * p, abs=1e-15)


def tick(schedules, forward, backward, transfer):
    """End of every task, from a clock that ticks: whole numbers of ticks, no event queue."""
    last = len(schedules) - 1
    done: dict[tuple[int, Task], int] = {}
    arrived = {(0, t): 0 for t in schedules[0] if t.kind == "F"}
    arrived |= {(last, t): 0 for t in schedules[last] if t.kind == "B"}
    queues = {way: [] for s in range(last) for way in ((s, s + 1), (s + 1, s))}
    on_link: dict[tuple[int, int], tuple[Task, int]] = {}
    position, running = [0] * (last + 1), [None] * (last + 1)
    for now in itertools.count():
        changed = True
        while changed:  # tasks and transfers of no duration end in the tick in which they start
            changed = False
            for s, tasks in enumerate(schedules):
                if running[s] and running[s][1] == now:
                    task, running[s] = running[s][0], None
                    done[s, task] = now
                    to = s + 1 if task.kind == "F" else s - 1
                    if 0 <= to <= last:
                        queues[s, to].append(task)
                    changed = True
                if not running[s] and position[s] < len(tasks):
                    task = tasks[position[s]]
                    if arrived.get((s, task), now + 1) <= now:
                        ticks = forward[s] if task.kind == "F" else backward[s]
                        running[s], position[s] = (task, now + ticks), position[s] + 1
                        changed = True
            for (a, b), queue in queues.items():
                if (a, b) in on_link and on_link[a, b][1] == now:
                    arrived[b, on_link.pop((a, b))[0]] = now
                    changed = True
                if (a, b) not in on_link and queue:
                    way = transfer[a][0] if b > a else transfer[b][1]
                    on_link[a, b] = queue.pop(0), now + way
                    changed = True
        if len(done) == sum(map(len, schedules)):
            return done


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_simulation_agrees_with_a_ticking_clock(data):
    num_stages = data.draw(st.integers(1, 4))
    name = data.draw(st.sampled_from(NAMES))
    schedules = schedule(name, num_stages, data.draw(st.integers(1, 6)))
    ticks = lambda low, count: data.draw(
        st.lists(st.integers(low, 5), min_size=count, max_size=count)
    )
    forward, backward = ticks(1, num_stages), ticks(1, num_stages)
    transfer = list(zip(ticks(0, num_stages - 1), ticks(0, num_stages - 1), strict=True))
    simulation = simulate(schedules, forward, backward, transfer)
    expected = tick(schedules, forward, backward, transfer)
    assert {(e.stage, e.task): e.end_s for e in simulation.events} == expected
    assert simulation.step_time_s == max(expected.values())
    for s in range(num_stages):
        busy = sum(forward[s] if t.kind == "F" else backward[s] for t in schedules[s])
        assert simulation.bubbles[s] == pytest.approx(1 - busy / simulation.step_time_s)
        assert simulation.finish_s(s) == max(end for (i, _), end in expected.items() if i == s)


def test_a_link_carries_one_transfer_at_a_time():
    # Three forwards end at 1, 2, 3; transfers of 4 end at 5, 9, 13, not at 5, 6, 7.
    simulation = simulate(schedule("gpipe", 2, 3), [1.0, 1.0], [1.0, 1.0], [(4.0, 0.0)])
    starts = [e.start_s for e in simulation.events if e.stage == 1 and e.task.kind == "F"]
    assert starts == [5.0, 9.0, 13.0]


def test_both_directions_of_a_link_are_independent():
    schedules = schedule("1f1b", 2, 8)
    one_way = simulate(schedules, [1.0, 1.0], [1.0, 1.0], [(2.0, 0.0)])
    both = simulate(schedules, [1.0, 1.0], [1.0, 1.0], [(2.0, 2.0)])
    assert both.step_time_s < one_way.step_time_s + 8 * 2.0


def test_1f1b_hides_transfers_only_behind_more_microbatches():
    """With one microbatch nothing overlaps: a step is all work plus all transfers."""
    simulation = simulate(schedule("1f1b", 3, 1), [1.0] * 3, [2.0] * 3, [(5.0, 7.0)] * 2)
    assert simulation.step_time_s == 3 * 3 + 2 * (5 + 7)


def test_picture_of_unequal_stages():
    simulation = simulate(schedule("1f1b", 2, 2), [1, 2], [2, 4], [(1, 1)])
    assert picture(simulation).splitlines() == [
        "0 |F0F1..............B0--........B1--|",
        "1 |....F0--B0------F1--B1------......|",
    ]


@pytest.mark.parametrize("stage", [-1, 3])
def test_stages_are_numbered_from_zero(stage):
    for tasks_of in (gpipe, one_f_one_b):
        with pytest.raises(AssertionError, match=f"no stage {stage} of 3"):
            tasks_of(stage, 3, 4)
