"""Pipeline schedules: the order in which each stage runs its forwards (F) and backwards (B, W).

A schedule is plain data, `tuple[Task, ...]` per stage. It knows nothing of arrays or devices, so it
can be printed, simulated and tested on its own; `pipeline` executes it.

    chunk           a run of consecutive layers; a stage holds one, or several when interleaved
    virtual stage   a chunk by its place in the model: number chunk * num_stages + stage
    split           B makes the gradient of the input only, and a later W those of the weights
    in flight       chunks of microbatches whose forward has run on a stage and whose backward (W,
                    when split) has not: what holds activations
    bubble          share of the step during which a stage has nothing to run
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

TaskKind = Literal["F", "B", "W"]


class Task(NamedTuple):
    """One pass of one microbatch through a chunk of a stage.

    >>> print(Task("F", 3), Task("B", 3, chunk=1))
    F3 B3.1
    """

    kind: TaskKind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


def sender(stage: int, task: Task, num_stages: int, num_chunks: int = 1) -> tuple[int, Task] | None:
    """The stage and the task whose result a task waits for; None: nothing of another stage.

    A forward reads that of the virtual stage before its own, a backward that of the one after it.

    >>> sender(0, Task("F", 3, chunk=1), num_stages=2, num_chunks=2)
    (1, Task(kind='F', microbatch=3, chunk=0))
    """
    return _neighbour(stage, task, num_stages, num_chunks, {"F": -1, "B": 1})


def receiver(
    stage: int, task: Task, num_stages: int, num_chunks: int = 1
) -> tuple[int, Task] | None:
    """The stage and the task that wait for a task's result: the inverse of `sender`."""
    return _neighbour(stage, task, num_stages, num_chunks, {"F": 1, "B": -1})


def _neighbour(
    stage: int, task: Task, num_stages: int, num_chunks: int, steps: dict[str, int]
) -> tuple[int, Task] | None:
    if task.kind == "W":
        return None
    chunk, other = divmod(task.chunk * num_stages + stage + steps[task.kind], num_stages)
    return (other, task._replace(chunk=chunk)) if 0 <= chunk < num_chunks else None


# ---- the schedules -------------------------------------------------------------------------------


def gpipe(num_microbatches: int) -> tuple[Task, ...]:
    """GPipe: all forwards, then all backwards, on every stage; all microbatches are in flight.

    >>> print(*gpipe(3))
    F0 F1 F2 B0 B1 B2

    Reference: Huang et al., "GPipe", arXiv:1811.06965.
    """
    return one_f_one_b(num_microbatches, in_flight=num_microbatches)


def one_f_one_b(num_microbatches: int, *, in_flight: int) -> tuple[Task, ...]:
    """1F1B: warm up with forwards, then alternate, then drain the backwards.

    Stage s of `1f1b` keeps at most `num_stages - s` microbatches in flight, whatever their total
    number; that bound on activation memory is the point of the schedule:
      >>> for stage in range(3):
      ...     print(stage, *one_f_one_b(4, in_flight=3 - stage))
      0 F0 F1 F2 B0 F3 B1 B2 B3
      1 F0 F1 B0 F2 B1 F3 B2 B3
      2 F0 B0 F1 B1 F2 B2 F3 B3

    `eager_1f1b` keeps more of them in flight on the stages before a slow link, so that these have
    work while a microbatch travels there and back. A stage may never hold fewer than the next one.

    References: Narayanan et al., "PipeDream", arXiv:1806.03377; Zhuang et al., arXiv:2211.05322,
    section 4 (eager).
    """
    forwards = [Task("F", m) for m in range(num_microbatches)]
    return _alternate(forwards, [Task("B", m) for m in range(num_microbatches)], in_flight)


def interleaved_1f1b(
    stage: int, num_stages: int, num_microbatches: int, num_chunks: int
) -> tuple[Task, ...]:
    """Interleaved 1F1B: a stage holds several chunks, so the pipeline fills in smaller steps.

    Microbatches go through a stage in groups of `num_stages`, each group through all chunks. The
    bubble shrinks by `num_chunks`; the traffic between stages, and with the wrap-around from the
    last stage to the first, grows by it.

    >>> for stage in range(2):
    ...     print(stage, *interleaved_1f1b(stage, 2, num_microbatches=2, num_chunks=2))
    0 F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1
    1 F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1

    Reference: Narayanan et al., arXiv:2104.04473, section 2.2.
    """
    assert num_microbatches % num_stages == 0, f"{num_microbatches} in groups of {num_stages}"
    forwards, backwards = [], []
    for first in range(0, num_microbatches, num_stages):
        group = range(first, first + num_stages)
        forwards += [Task("F", m, c) for c in range(num_chunks) for m in group]
        backwards += [Task("B", m, c) for c in reversed(range(num_chunks)) for m in group]
    num_warmup = 2 * (num_stages - 1 - stage) + (num_chunks - 1) * num_stages
    return _alternate(forwards, backwards, num_warmup + 1)


def zero_bubble(stage: int, num_stages: int, num_microbatches: int) -> tuple[Task, ...]:
    """ZB-H1: 1F1B with split backwards, whose weights fill what is a bubble in 1F1B.

    Stage s runs a W after its B has run for s more microbatches. So every stage holds at most
    `num_stages` microbatches in flight: none more than the first one of 1F1B.

    >>> for stage in range(2):
    ...     print(stage, *zero_bubble(stage, 2, num_microbatches=3))
    0 F0 F1 B0 W0 F2 B1 W1 B2 W2
    1 F0 B0 F1 B1 W0 F2 B2 W1 W2

    Reference: Qi et al., "Zero Bubble Pipeline Parallelism", arXiv:2401.10241, section 2.
    """
    tasks = []
    for task in one_f_one_b(num_microbatches, in_flight=num_stages - stage):
        tasks.append(task)
        if task.kind == "B" and task.microbatch >= stage:
            tasks.append(Task("W", task.microbatch - stage))
    num_done = max(num_microbatches - stage, 0)
    return (*tasks, *(Task("W", m) for m in range(num_done, num_microbatches)))


def _alternate(
    forwards: Sequence[Task], backwards: Sequence[Task], in_flight: int
) -> tuple[Task, ...]:
    """`in_flight` forwards, then a backward and a forward in turn, then the other backwards."""
    assert in_flight >= 1, f"a stage needs a microbatch in flight, not {in_flight}"
    num_warmup = min(in_flight, len(forwards)) - 1
    tasks = list(forwards[:num_warmup])
    for pair in zip(forwards[num_warmup:], backwards, strict=False):
        tasks += pair
    return (*tasks, *backwards[len(forwards) - num_warmup :])


def schedule(
    name: str,
    num_stages: int,
    num_microbatches: int,
    *,
    num_chunks: int = 1,
    in_flight: Sequence[int] = (),
) -> tuple[tuple[Task, ...], ...]:
    """The tasks of every stage.

    Args:
      name: `schedule` of `ParallelConfig`.
      num_stages, num_microbatches: of the pipeline.
      num_chunks: chunks of a stage, `interleaved_1f1b` only.
      in_flight: microbatches in flight on each stage, `eager_1f1b` only.

    Example:
      >>> for tasks in schedule("eager_1f1b", 2, num_microbatches=4, in_flight=(3, 1)):
      ...     print(*tasks)
      F0 F1 F2 B0 F3 B1 B2 B3
      F0 B0 F1 B1 F2 B2 F3 B3
    """
    p, m = num_stages, num_microbatches
    assert (num_chunks > 1) == (name == "interleaved_1f1b"), f"{name} of {num_chunks} chunks"
    assert len(in_flight) == (p if name == "eager_1f1b" else 0), f"{name} of {in_flight} in flight"
    tasks_of = {
        "gpipe": lambda s: gpipe(m),
        "1f1b": lambda s: one_f_one_b(m, in_flight=p - s),
        "eager_1f1b": lambda s: one_f_one_b(m, in_flight=in_flight[s]),
        "interleaved_1f1b": lambda s: interleaved_1f1b(s, p, m, num_chunks),
        "zero_bubble": lambda s: zero_bubble(s, p, m),
    }[name]
    return tuple(tasks_of(s) for s in range(p))


def in_flight_bound(
    name: str,
    stage: int,
    num_stages: int,
    num_microbatches: int,
    *,
    num_chunks: int = 1,
    in_flight: Sequence[int] = (),
) -> int:
    """The most chunks of microbatches that a stage may hold in flight under a schedule.

    This number is the promise of a schedule about memory.

    Args:
      name: `schedule` of `ParallelConfig`.
      stage: index of the stage, from 0.
      num_stages, num_microbatches: sizes of the pipeline.
      num_chunks: chunks of a stage, `interleaved_1f1b` only.
      in_flight: microbatches in flight on each stage, `eager_1f1b` only.

    Example:
      >>> [in_flight_bound("1f1b", s, num_stages=3, num_microbatches=8) for s in range(3)]
      [3, 2, 1]
    """
    all_of_them = num_microbatches * num_chunks
    bound = {
        "gpipe": all_of_them,
        "1f1b": num_stages - stage,
        "eager_1f1b": in_flight[stage] if in_flight else 0,
        "interleaved_1f1b": 2 * (num_stages - 1 - stage) + (num_chunks - 1) * num_stages + 1,
        "zero_bubble": num_stages,
    }[name]
    return min(bound, all_of_them)


def max_in_flight(tasks: Sequence[Task], weights: Sequence[float] | None = None) -> float:
    """Most that a stage holds in flight at a time; `weights` are those of its chunks, or all 1.

    >>> max_in_flight(one_f_one_b(8, in_flight=3))
    3
    >>> tasks = interleaved_1f1b(1, 2, num_microbatches=8, num_chunks=2)
    >>> max_in_flight(tasks), max_in_flight(tasks, [0.75, 0.25]), max_in_flight(tasks, [0, 1])
    (3, 2.25, 1)
    """
    last = "W" if any(task.kind == "W" for task in tasks) else "B"
    change = {"F": 1, "B": 0, "W": 0, last: -1}
    weight = lambda task: 1 if weights is None else weights[task.chunk]
    return max(itertools.accumulate(change[task.kind] * weight(task) for task in tasks))


def validate(
    name: str,
    schedules: Sequence[Sequence[Task]],
    num_microbatches: int,
    *,
    num_chunks: int = 1,
    in_flight: Sequence[int] = (),
) -> None:
    """Asserts the properties of a schedule that `pipeline` relies on.

    Every task runs once. For each chunk and microbatch F runs first, then B, then W. No stage holds
    more in flight than `in_flight_bound` promises. No stage waits forever.

    Args:
      name: `schedule` of `ParallelConfig`.
      schedules: tasks of each stage, in the order in which they run.
      num_microbatches: microbatches of a step.
      num_chunks: chunks of a stage, `interleaved_1f1b` only.
      in_flight: microbatches in flight on each stage, `eager_1f1b` only.

    Raises:
      AssertionError: the schedule lacks one of these properties.
    """
    num_stages = len(schedules)
    kinds: tuple[TaskKind, ...] = ("F", "B", "W") if name == "zero_bubble" else ("F", "B")
    passes = list(itertools.product(range(num_microbatches), range(num_chunks)))
    for stage, tasks in enumerate(schedules):
        position = {task: i for i, task in enumerate(tasks)}
        expected = {Task(kind, m, c) for kind in kinds for m, c in passes}
        runs = f"stage {stage} must run every task once, runs {' '.join(map(str, tasks))}"
        assert position.keys() == expected, runs
        assert len(tasks) == len(expected), runs
        for first, second in itertools.pairwise(kinds):
            for m, c in passes:
                before, after = Task(first, m, c), Task(second, m, c)
                assert position[before] < position[after], f"stage {stage}: {after} before {before}"
        bound = in_flight_bound(
            name, stage, num_stages, num_microbatches, num_chunks=num_chunks, in_flight=in_flight
        )
        most = max_in_flight(tasks)
        assert most <= bound, f"stage {stage}: {most} in flight, {name} promises {bound}"
    ones = [1.0] * num_stages * num_chunks
    num_links = num_stages - (num_chunks == 1)
    simulate(schedules, ones, ones, [(0.0, 0.0)] * num_links, weight_s=ones)


# ---- simulation ----------------------------------------------------------------------------------


class Event(NamedTuple):
    """A task when and where it runs."""

    stage: int
    task: Task
    start_s: float
    end_s: float


class Transfer(NamedTuple):
    """The result of a task on its way to another stage."""

    source: int
    target: int
    task: Task  # whose result it is
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """One simulated step."""

    events: tuple[Event, ...]  # by start, then by stage
    transfers: tuple[Transfer, ...]  # the same
    step_time_s: float  # to the end of the last task
    bubbles: tuple[float, ...]  # idle share of `step_time_s`, for each stage

    def finish_s(self, stage: int) -> float:
        """When a stage ends its last task."""
        return max(event.end_s for event in self.events if event.stage == stage)


class Queue(NamedTuple):
    """A pipe that transfers between two stages share with those between others.

    An array waits until those before it are through; then it holds the pipe for its own bytes,
    though its own link may take longer.
    """

    source: int  # stage
    target: int
    pipe: str
    hold_s: float  # its bytes over the capacity
    latency_s: float


class Simulator:
    """The tasks of a pipeline as arrays, to be timed for many cases at once.

    Tasks that wait for none of each other make a wave, and all of a wave are timed together. Waves
    depend on who waits for whom, not on how long anything takes.
    """

    def __init__(self, schedules: Sequence[Sequence[Task]], num_chunks: int = 1):
        """Asserts that no stage waits forever."""
        p = len(schedules)
        num_virtual, lengths = p * num_chunks, np.array([len(tasks) for tasks in schedules])
        self.tasks = [(stage, task) for stage, tasks in enumerate(schedules) for task in tasks]
        nothing = len(self.tasks)
        number = np.arange(nothing)
        stage = np.repeat(np.arange(p), lengths)
        kind = np.array(["FBW".index(task.kind) for _, task in self.tasks])
        microbatch = np.array([task.microbatch for _, task in self.tasks])
        virtual = np.array([task.chunk for _, task in self.tasks]) * p + stage
        number_of = np.full((3, num_virtual, microbatch.max() + 1), -1)
        number_of[kind, virtual, microbatch] = number
        step = np.array([1, -1, 0])[kind]  # from virtual stage to virtual stage; a W stays
        inside = lambda other: (step != 0) & (other >= 0) & (other < num_virtual)
        source = number_of[kind, (virtual - step) % num_virtual, microbatch]
        source = np.where(inside(virtual - step), source, nothing)
        to = (virtual + step) % p
        link = np.where(inside(virtual + step), stage * p + to, -1)
        in_turn = np.argsort(link, kind="stable")  # of each link, as results are made
        same = (link[in_turn][1:] == link[in_turn][:-1]) & (link[in_turn][1:] >= 0)
        link_before = np.full(nothing, nothing)
        link_before[in_turn[1:][same]] = in_turn[:-1][same]
        way = np.where(link < 0, -1, np.where(kind == 0, 2 * stage, 2 * to + 1))
        starts = np.cumsum(lengths) - lengths
        readiness = nothing + 1 + stage  # rows behind that of nothing
        before = np.where(np.isin(number, starts), readiness, number - 1)
        rows = np.stack([number, before, source, kind * num_virtual + virtual, link_before, way])
        self._rows = rows
        self._link = link  # source * p + target, of every task; -1: its result stays
        self._last = starts + lengths - 1
        self._waves = []
        done = np.zeros(nothing + 1, bool)
        done[nothing] = True
        turn = starts.copy()
        while (waiting := turn <= self._last).any():
            first = np.minimum(turn, self._last)
            # A source that no stage has is -1, and never done.
            ready = waiting & (source[first] >= 0) & done[source[first]]
            waits = (
                [f"{s} for {self.tasks[turn[s]][1]}" for s in np.flatnonzero(waiting)]
                if not ready.any()
                else []
            )
            assert ready.any(), f"deadlock: stage {', stage '.join(waits)}"
            self._waves.append(rows[:, first[ready]])
            done[first[ready]] = True
            turn[ready] += 1

    def run(
        self,
        forward_s: np.ndarray,
        backward_s: np.ndarray,
        transfer_s: np.ndarray,
        weight_s: np.ndarray,
        ready_s: np.ndarray,
        queues: Sequence[Sequence[Queue]] = (),
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """When every task starts and ends, and its result is where it goes, [tasks, cases] each.

        Args:
          forward_s, backward_s, weight_s: [virtual stages, cases], as in `simulate`.
          transfer_s: [links, 2, cases]: to the next stage, and back.
          ready_s: before which no task of a stage starts, [stages, cases].
          queues: of each case, or none of any.
        """
        if not any(queues):
            return self._run(forward_s, backward_s, transfer_s, weight_s, ready_s)
        at_once = self._run(forward_s, backward_s, 0 * transfer_s, weight_s, ready_s)
        task_s = np.concatenate([forward_s, backward_s, weight_s])
        return self._queue(self._in_turn(*at_once[:2]), task_s, transfer_s, ready_s, queues)

    def _in_turn(self, start_s: np.ndarray, end_s: np.ndarray) -> np.ndarray:
        """Tasks (by number) and transfers (those of task i as count + i) by time, [both, cases].

        Among those of one time, the one that another may wait for comes first.
        """
        wave = np.empty(len(self.tasks), int)
        for number, rows in enumerate(self._waves):
            wave[rows[0]] = number
        rank = np.concatenate([2 * wave, 2 * wave + 1])[:, None]
        times_s = np.concatenate([start_s, end_s])
        return np.lexsort((np.broadcast_to(rank, times_s.shape), times_s), axis=0)

    def _queue(
        self,
        turns: np.ndarray,
        task_s: np.ndarray,
        transfer_s: np.ndarray,
        ready_s: np.ndarray,
        queues: Sequence[Sequence[Queue]],
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Times the tasks as `run` does, while arrays queue at pipes.

        The order of a queue is the order in which arrays are made if sending takes no time. This
        order does not depend on links, so a smaller capacity is never faster.
        """
        before, source, kind, link_before, way = (self._rows[i] for i in (1, 2, 3, 4, 5))
        count, num_cases = len(self.tasks), task_s.shape[1]
        case, num_stages = np.arange(num_cases), len(self._last)
        ways_s = np.concatenate([transfer_s.reshape(-1, num_cases), np.zeros((1, num_cases))])
        # By link, the last for what is sent to no other stage; -1: no queue.
        pipe = np.full((num_stages**2 + 1, num_cases), -1)
        hold_s, latency_s = np.zeros(pipe.shape), np.zeros(pipe.shape)
        for k, own in enumerate(queues):
            names = list(dict.fromkeys(queue.pipe for queue in own))
            for queue in own:
                link = queue.source * num_stages + queue.target
                pipe[link, k] = names.index(queue.pipe)
                hold_s[link, k], latency_s[link, k] = queue.hold_s, queue.latency_s
        free_s = np.zeros((pipe.max() + 1, num_cases))  # of each pipe
        start_s = np.zeros((count + 1 + len(ready_s), num_cases))
        end_s, sent_s = np.zeros_like(start_s), np.zeros_like(start_s)
        end_s[count + 1 :] = ready_s
        for turn in turns:
            task, is_task = turn % count, turn < count
            number, own = task[is_task], case[is_task]
            begins_s = np.maximum(end_s[before[number], own], sent_s[source[number], own])
            start_s[number, own] = begins_s
            end_s[number, own] = begins_s + task_s[kind[number], own]
            number, own = task[~is_task], case[~is_task]
            leaves_s = np.maximum(end_s[number, own], sent_s[link_before[number], own])
            sent_s[number, own] = leaves_s + ways_s[way[number], own]
            waits = pipe[self._link[number], own] >= 0
            number, own, leaves_s = number[waits], own[waits], leaves_s[waits]
            link = self._link[number]
            through_s = np.maximum(leaves_s, free_s[pipe[link, own], own]) + hold_s[link, own]
            free_s[pipe[link, own], own] = through_s
            arrives_s = through_s + latency_s[link, own]
            sent_s[number, own] = np.maximum(sent_s[number, own], arrives_s)
        return start_s[:count], end_s[:count], sent_s[:count]

    def _run(
        self,
        forward_s: np.ndarray,
        backward_s: np.ndarray,
        transfer_s: np.ndarray,
        weight_s: np.ndarray,
        ready_s: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        count, num_cases = len(self.tasks), forward_s.shape[1]
        task_s = np.concatenate([forward_s, backward_s, weight_s])
        ways_s = np.concatenate([transfer_s.reshape(-1, num_cases), np.zeros((1, num_cases))])
        start_s = np.zeros((count + 1 + len(ready_s), num_cases))  # then nothing, and readiness
        end_s, sent_s = np.zeros_like(start_s), np.zeros_like(start_s)
        end_s[count + 1 :] = ready_s
        for number, before, source, kind, link_before, way in self._waves:
            start_s[number] = np.maximum(end_s[before], sent_s[source])
            end_s[number] = ends_s = start_s[number] + task_s[kind]
            sent_s[number] = np.maximum(ends_s, sent_s[link_before]) + ways_s[way]
        return start_s[:count], end_s[:count], sent_s[:count]

    def transfers(self, end_s: np.ndarray, sent_s: np.ndarray) -> list[Transfer]:
        """Transfers of one case, from the results of `run`, [tasks] each."""
        num_stages, free_s = len(self._last), dict[int, float]()
        found = []
        for number in np.argsort(end_s, kind="stable"):
            if (link := int(self._link[number])) >= 0:
                start_s = max(float(end_s[number]), free_s.get(link, 0.0))
                free_s[link] = float(sent_s[number])
                task = self.tasks[number][1]
                found.append(Transfer(*divmod(link, num_stages), task, start_s, free_s[link]))
        return sorted(found, key=lambda transfer: (transfer.start_s, transfer.source))

    def finish_s(self, end_s: np.ndarray) -> np.ndarray:
        """When every stage ends its last task, [stages, cases], of what `run` gives."""
        return end_s[self._last]


def simulate(
    schedules: Sequence[Sequence[Task]],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    transfer_s: Sequence[tuple[float, float]],
    *,
    weight_s: Sequence[float] = (),
    ready_s: Sequence[float] = (),
    queues: Sequence[Queue] = (),
) -> Simulation:
    """Simulates the schedules: each stage runs its tasks in order, as soon as inputs arrive.

    A transfer overlaps with compute. From one stage to another there is one transfer at a time, in
    the order in which the results were made. Asserts that no stage waits forever.

    Args:
      schedules: the tasks of every stage, in order.
      forward_s: seconds of one forward, for each virtual stage.
      backward_s: seconds of one backward, for each virtual stage.
      transfer_s: for each stage but the last, seconds of one transfer (to the next stage, back);
        with several chunks a stage also for the last: (to the first stage, back).
      weight_s: seconds of one W, for each virtual stage; needed when backwards are split.
      ready_s: when each stage can start its first task; at once where it is left out.
      queues: of transfers that share a pipe with those of other stages.

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

    With half of each backward as a W, the same work ends 4 seconds earlier:
      >>> split = schedule("zero_bubble", num_stages=3, num_microbatches=4)
      >>> print(picture(simulate(split, [1] * 3, [1] * 3, [(0, 0)] * 2, weight_s=[1] * 3)))
      0 |F0F1F2....B0W0F3B1W1B2W2B3W3|
      1 |..F0F1..B0F2B1W0F3B2W1B3W2W3|
      2 |....F0B0F1B1F2B2W0F3B3W1W2W3|
    """
    num_stages = len(schedules)
    num_chunks = len(forward_s) // num_stages
    assert len(forward_s) == len(backward_s) == num_chunks * num_stages
    assert len(transfer_s) == num_stages - (num_chunks == 1)
    column = lambda seconds: np.array(seconds, float).reshape(-1, 1)
    weight = column(weight_s if len(weight_s) else [0.0] * len(forward_s))
    simulator = Simulator(schedules, num_chunks)
    transfers = np.array(transfer_s, float).reshape(-1, 2, 1)
    ready = column(ready_s if len(ready_s) else [0.0] * num_stages)
    tasks = column(forward_s), column(backward_s), transfers, weight, ready
    starts, ends, sent = simulator.run(*tasks, queues=[queues])
    events = [
        Event(stage, task, start_s, end_s)
        for (stage, task), start_s, end_s in zip(
            simulator.tasks, starts[:, 0].tolist(), ends[:, 0].tolist(), strict=True
        )
    ]
    step_time_s = max(event.end_s for event in events)
    busy_s = [sum(e.end_s - e.start_s for e in events if e.stage == s) for s in range(num_stages)]
    return Simulation(
        events=tuple(sorted(events, key=lambda event: (event.start_s, event.stage))),
        transfers=tuple(simulator.transfers(ends[:, 0], sent[:, 0])),
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
