"""Pipeline schedules: in which order each stage runs its forwards (F) and backwards (B).

A schedule is plain data, `tuple[Task, ...]` per stage. It knows nothing of arrays or devices, so it
can be printed, simulated and tested on its own; `pipeline` executes it.

    in flight   microbatches whose forward has run on a stage and whose backward has not
    bubble      share of the step during which a stage has nothing to run
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple


class Task(NamedTuple):
    """One pass of one microbatch through a stage."""

    kind: Literal["F", "B"]
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}"


class Event(NamedTuple):
    """A task when and where it runs."""

    stage: int
    task: Task
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """One simulated step."""

    events: tuple[Event, ...]  # by start, then by stage
    step_time_s: float  # from the start of the first task to the end of the last
    bubbles: tuple[float, ...]  # idle share of `step_time_s`, for each stage

    def finish_s(self, stage: int) -> float:
        """When a stage ends its last task."""
        return max(event.end_s for event in self.events if event.stage == stage)


def gpipe(stage: int, num_stages: int, num_microbatches: int) -> tuple[Task, ...]:
    """GPipe: all forwards, then all backwards; every microbatch is in flight at once.

    The order is the same for every stage.

    >>> print(*gpipe(0, num_stages=2, num_microbatches=3))
    F0 F1 F2 B0 B1 B2

    Reference: Huang et al., "GPipe", arXiv:1811.06965.
    """
    assert 0 <= stage < num_stages, f"no stage {stage} of {num_stages}"
    return tuple(Task(kind, m) for kind in ("F", "B") for m in range(num_microbatches))


def one_f_one_b(stage: int, num_stages: int, num_microbatches: int) -> tuple[Task, ...]:
    """1F1B: warm up with forwards, then alternate, then drain the backwards.

    Stage s keeps at most `num_stages - s` microbatches in flight, whatever their total number;
    that bound on activation memory is the point of the schedule.

    >>> for stage in range(3):
    ...     print(stage, *one_f_one_b(stage, num_stages=3, num_microbatches=4))
    0 F0 F1 F2 B0 F3 B1 B2 B3
    1 F0 F1 B0 F2 B1 F3 B2 B3
    2 F0 B0 F1 B1 F2 B2 F3 B3

    Reference: Narayanan et al., "PipeDream", arXiv:1806.03377.
    """
    assert 0 <= stage < num_stages, f"no stage {stage} of {num_stages}"
    num_warmup = min(num_stages - 1 - stage, num_microbatches)
    tasks = [Task("F", m) for m in range(num_warmup)]
    for m in range(num_microbatches - num_warmup):
        tasks += [Task("F", num_warmup + m), Task("B", m)]
    tasks += [Task("B", m) for m in range(num_microbatches - num_warmup, num_microbatches)]
    return tuple(tasks)


def schedule(name: str, num_stages: int, num_microbatches: int) -> tuple[tuple[Task, ...], ...]:
    """The tasks of every stage, by the schedule's name in `ParallelConfig`.

    >>> [len(tasks) for tasks in schedule("1f1b", num_stages=2, num_microbatches=4)]
    [8, 8]
    """
    tasks_of = {"gpipe": gpipe, "1f1b": one_f_one_b}[name]
    return tuple(tasks_of(s, num_stages, num_microbatches) for s in range(num_stages))


def in_flight_bound(name: str, stage: int, num_stages: int, num_microbatches: int) -> int:
    """Most microbatches a schedule may hold in flight on a stage: its promise about memory.

    >>> [in_flight_bound("1f1b", s, num_stages=3, num_microbatches=8) for s in range(3)]
    [3, 2, 1]
    """
    bound = {"gpipe": num_microbatches, "1f1b": num_stages - stage}[name]
    return min(bound, num_microbatches)


def max_in_flight(tasks: Sequence[Task]) -> int:
    """Most microbatches that a stage holds in flight.

    >>> max_in_flight(one_f_one_b(0, num_stages=3, num_microbatches=8))
    3
    """
    return max(itertools.accumulate(1 if task.kind == "F" else -1 for task in tasks))


def validate(name: str, schedules: Sequence[Sequence[Task]], num_microbatches: int) -> None:
    """Asserts what `pipeline` relies on.

    Every task runs once, a backward follows its own forward, the promised bound on microbatches in
    flight holds, and no stage waits forever.
    """
    for stage, tasks in enumerate(schedules):
        position = {task: i for i, task in enumerate(tasks)}
        expected = {Task(kind, m) for kind in ("F", "B") for m in range(num_microbatches)}
        runs = f"stage {stage} must run every task once, runs {' '.join(map(str, tasks))}"
        assert position.keys() == expected, runs
        assert len(tasks) == len(expected), runs
        for m in range(num_microbatches):
            assert position[Task("F", m)] < position[Task("B", m)], (
                f"stage {stage}: B{m} before F{m}"
            )
        bound = in_flight_bound(name, stage, len(schedules), num_microbatches)
        in_flight = max_in_flight(tasks)
        assert in_flight <= bound, f"stage {stage}: {in_flight} in flight, {name} promises {bound}"
    ones = [1.0] * len(schedules)
    simulate(schedules, ones, ones, [(0.0, 0.0)] * (len(schedules) - 1))


def simulate(
    schedules: Sequence[Sequence[Task]],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    transfer_s: Sequence[tuple[float, float]],
) -> Simulation:
    """Runs the schedules against the clock: each stage in its order, as soon as inputs arrive.

    A transfer overlaps with compute. Each link carries one transfer at a time in each direction, in
    the order in which the results were made. Asserts that no stage waits forever.

    Args:
      schedules: the tasks of every stage, in order.
      forward_s: seconds of one forward, for each stage.
      backward_s: seconds of one backward, for each stage.
      transfer_s: for each stage but the last, seconds of one transfer (to the next stage, back).

    Example, equal stages; their bubble is (p - 1) / (m + p - 1) = 2 / 6 for p stages and m
    microbatches (Huang et al., arXiv:1811.06965):
      >>> schedules = schedule("1f1b", num_stages=3, num_microbatches=4)
      >>> simulation = simulate(schedules, [1] * 3, [2] * 3, [(0, 0)] * 2)
      >>> print(picture(simulation))
      0 |F0F1F2........B0--F3B1--..B2--..B3--|
      1 |..F0F1....B0--F2B1--F3B2--..B3--....|
      2 |....F0B0--F1B1--F2B2--F3B3--........|
      >>> simulation.step_time_s, round(simulation.bubbles[0], 4)
      (18.0, 0.3333)
    """
    num_stages = len(schedules)
    assert len(forward_s) == len(backward_s) == len(transfer_s) + 1 == num_stages
    seconds = {"F": forward_s, "B": backward_s}
    arrival_s = {(0, task): 0.0 for task in schedules[0] if task.kind == "F"}
    arrival_s |= {(num_stages - 1, task): 0.0 for task in schedules[-1] if task.kind == "B"}
    link_free_s: dict[tuple[int, int], float] = {}
    stage_free_s = [0.0] * num_stages
    waiting = [list(reversed(tasks)) for tasks in schedules]
    events: list[Event] = []
    while any(waiting):
        num_events = len(events)
        for stage, tasks in enumerate(waiting):
            while tasks and (arrived_s := arrival_s.get((stage, tasks[-1]))) is not None:
                task = tasks.pop()
                start_s = max(arrived_s, stage_free_s[stage])
                end_s = stage_free_s[stage] = start_s + seconds[task.kind][stage]
                events.append(Event(stage, task, start_s, end_s))
                to = stage + 1 if task.kind == "F" else stage - 1
                if 0 <= to < num_stages:
                    way_s = transfer_s[stage][0] if to > stage else transfer_s[to][1]
                    sent_s = max(end_s, link_free_s.get((stage, to), 0.0)) + way_s
                    arrival_s[to, task] = link_free_s[stage, to] = sent_s
        waits = [f"{s} for {tasks[-1]}" for s, tasks in enumerate(waiting) if tasks]
        assert len(events) > num_events, f"deadlock: stage {', stage '.join(waits)}"
    step_time_s = max(stage_free_s)
    busy_s = [sum(e.end_s - e.start_s for e in events if e.stage == s) for s in range(num_stages)]
    return Simulation(
        events=tuple(sorted(events, key=lambda event: (event.start_s, event.stage))),
        step_time_s=step_time_s,
        bubbles=tuple(1.0 - busy / step_time_s for busy in busy_s),
    )


def picture(simulation: Simulation) -> str:
    """The step as text: one row a stage, time to the right, the shortest task as wide as its name.

    Dots are idle time; see `simulate` for an example.
    """
    column_s = min(event.end_s - event.start_s for event in simulation.events)
    width = max(len(str(event.task)) for event in simulation.events)
    column = lambda time_s: round(time_s / column_s) * width
    rows: dict[int, str] = {}
    for event in simulation.events:
        row = rows.get(event.stage, "").ljust(column(event.start_s), ".")
        rows[event.stage] = row + str(event.task).ljust(column(event.end_s) - len(row), "-")
    end = column(simulation.step_time_s)
    return "\n".join(f"{s} |{rows[s].ljust(end, '.')}|" for s in sorted(rows))
