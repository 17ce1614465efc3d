"""Tasks of a pipeline: the forwards (F) and backwards (B, W) that its stages run.

chunk           a run of consecutive layers; a stage holds one, or several when interleaved
virtual stage   a chunk by its place in the model: number chunk * num_stages + stage
split           B makes the gradient of the input only, and a later W those of the weights
in flight       chunks of microbatches whose forward has run on a stage and whose backward (W,
                when split) has not: what holds activations
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

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


def max_in_flight(tasks: Sequence[Task], weights: Sequence[float] | None = None) -> float:
    """Most that a stage holds in flight at a time; `weights` are those of its chunks, or all 1.

    >>> forwards = [Task("F", 0), Task("F", 1), Task("F", 0, chunk=1)]
    >>> tasks = [*forwards, Task("B", 0, chunk=1), Task("B", 0), Task("B", 1)]
    >>> max_in_flight(tasks), max_in_flight(tasks, [0.75, 0.25]), max_in_flight(tasks, [0, 1])
    (3, 1.75, 1)
    """
    last: TaskKind = "W" if any(task.kind == "W" for task in tasks) else "B"
    return _most(tasks, {"F": 1, "B": 0, "W": 0, last: -1}, weights)


def max_waiting(tasks: Sequence[Task], weights: Sequence[float] | None = None) -> float:
    """Most that a stage holds at a time between their B and their W, or runs the B of.

    `weights` are those of its chunks, or all 1.

    >>> max_waiting([Task("F", 0), Task("B", 0)])
    0
    >>> max_waiting([Task("F", 0), Task("F", 1), *(Task(kind, m) for kind in "BW" for m in (0, 1))])
    2
    """
    if not any(task.kind == "W" for task in tasks):
        return 0
    return _most(tasks, {"F": 0, "B": 1, "W": -1}, weights)


def _most(
    tasks: Sequence[Task], change: Mapping[TaskKind, int], weights: Sequence[float] | None
) -> float:
    """The most that tasks add up to, where each changes the sum by its kind and chunk."""
    weight = lambda task: 1 if weights is None else weights[task.chunk]
    return max(itertools.accumulate(change[task.kind] * weight(task) for task in tasks))
