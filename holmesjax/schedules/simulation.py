"""How long the tasks of a pipeline take: a simulation of one step, or of many at once.

bubble   share of the step during which a stage has nothing to run
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from holmesjax.schedules.tasks import Task


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
    though its own link may take longer. Where its way goes through several pipes, it waits at each
    by itself, and is there when the last of them has let it through.
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
        kinds, microbatches, chunks = zip(*itertools.chain(*schedules), strict=True)
        nothing = len(self.tasks)
        number = np.arange(nothing)
        stage = np.repeat(np.arange(p), lengths)
        kind = np.array([*map("FBW".index, kinds)])
        microbatch, virtual = np.array(microbatches), np.array(chunks) * p + stage
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
        self._wave = np.empty(nothing, int)  # of each task
        num_waves = 0
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
            self._wave[first[ready]] = num_waves
            num_waves += 1
            done[first[ready]] = True
            turn[ready] += 1
        # In turn of their waves, tasks of one wave lie beside each other.
        in_waves = np.argsort(self._wave, kind="stable")
        edges = np.searchsorted(self._wave[in_waves], np.arange(num_waves + 1))
        place = np.concatenate([np.empty(nothing, int), np.arange(nothing, nothing + 1 + p)])
        place[in_waves] = number
        self._place, (_, before, source, kind, link_before, way) = place, rows[:, in_waves]
        self._waits = np.stack([place[before], place[source], place[link_before]])
        behind = np.arange(1 + p)  # nothing, and readiness
        self._seconds_of = np.concatenate([kind, 3 * num_virtual + behind])
        self._way_of = np.concatenate([way, np.full_like(behind, -1)])
        self._waves = [
            (start, stop, *self._waits[:, start:stop])
            for start, stop in itertools.pairwise(edges.tolist())
        ]

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
            return self._all_times(*self._run(forward_s, backward_s, transfer_s, weight_s, ready_s))
        at_once = self._all_times(
            *self._run(forward_s, backward_s, 0 * transfer_s, weight_s, ready_s)
        )
        task_s = np.concatenate([forward_s, backward_s, weight_s])
        return self._queue(self._in_turn(*at_once[:2]), task_s, transfer_s, ready_s, queues)

    def finish_s(
        self,
        forward_s: np.ndarray,
        backward_s: np.ndarray,
        transfer_s: np.ndarray,
        weight_s: np.ndarray,
        ready_s: np.ndarray,
        queues: Sequence[Sequence[Queue]] = (),
    ) -> np.ndarray:
        """When every stage ends its last task, [stages, cases].

        Args:
          forward_s, backward_s, transfer_s, weight_s, ready_s, queues: those of `run`.
        """
        tasks = forward_s, backward_s, transfer_s, weight_s, ready_s
        if any(queues):
            return self.run(*tasks, queues)[1][self._last]
        end_s, _ = self._run(*tasks)
        return end_s[self._place[self._last]]

    def _in_turn(self, start_s: np.ndarray, end_s: np.ndarray) -> np.ndarray:
        """Tasks (by number) and transfers (those of task i as count + i) by time, [both, cases].

        Among those of one time, the one that another may wait for comes first.
        """
        rank = np.concatenate([2 * self._wave, 2 * self._wave + 1])[:, None]
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
        counts = (Counter(queue[:2] for queue in of_case) for of_case in queues)
        most = max(max(count.values(), default=0) for count in counts)  # pipes of one link
        # By link, the last for what is sent to no other stage; -1: no queue.
        pipe = np.full((most, num_stages**2 + 1, num_cases), -1)
        hold_s, latency_s = np.zeros(pipe.shape), np.zeros(pipe.shape)
        for k, of_case in enumerate(queues):
            names, taken = list(dict.fromkeys(queue.pipe for queue in of_case)), Counter[int]()
            for queue in of_case:
                link = queue.source * num_stages + queue.target
                at = taken[link], link, k
                pipe[at], hold_s[at] = names.index(queue.pipe), queue.hold_s
                latency_s[at] = queue.latency_s
                taken[link] += 1
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
            for pipe_LC, hold_s_LC, latency_s_LC in zip(pipe, hold_s, latency_s, strict=True):
                waits = pipe_LC[self._link[number], own] >= 0
                waiting, cases, link = number[waits], own[waits], self._link[number[waits]]
                place = pipe_LC[link, cases], cases
                through_s = np.maximum(leaves_s[waits], free_s[place]) + hold_s_LC[link, cases]
                free_s[place] = through_s
                arrives_s = through_s + latency_s_LC[link, cases]
                sent_s[waiting, cases] = np.maximum(sent_s[waiting, cases], arrives_s)
        return start_s[:count], end_s[:count], sent_s[:count]

    def _run(
        self,
        forward_s: np.ndarray,
        backward_s: np.ndarray,
        transfer_s: np.ndarray,
        weight_s: np.ndarray,
        ready_s: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """When tasks end and their results are where they go, in turn of their waves.

        Behind the tasks, [tasks, cases], come nothing, and the readiness of each stage.
        """
        num_cases = forward_s.shape[1]
        nothing_s = np.zeros((1, num_cases))
        task_s = np.concatenate([forward_s, backward_s, weight_s, nothing_s, ready_s])
        ways_s = np.concatenate([transfer_s.reshape(-1, num_cases), nothing_s])
        # The seconds that a task and its transfer take, until its wave adds what they wait for.
        end_s, sent_s = task_s.take(self._seconds_of, 0), ways_s.take(self._way_of, 0)
        for start, stop, before, source, link_before in self._waves:
            ends_s, arrives_s = end_s[start:stop], sent_s[start:stop]
            ends_s += np.maximum(end_s.take(before, 0), sent_s.take(source, 0))
            arrives_s += np.maximum(ends_s, sent_s.take(link_before, 0))
        return end_s, sent_s

    def _all_times(
        self, end_s: np.ndarray, sent_s: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The times of `run`, from those of `_run`."""
        place = self._place[: len(self.tasks)]
        start_s = np.maximum(end_s[self._waits[0]], sent_s[self._waits[1]])
        return start_s[place], end_s[place], sent_s[place]

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
      >>> from holmesjax.schedules.pipeline_schedules import schedule
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
