"""When each task of a step ran, seen from the host while the devices work.

One thread per stage waits for the stage's tasks in the order in which they were dispatched. A task
starts when the one before it on its stage has ended and what it reads has arrived; it ends when its
result is ready.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol


class Awaitable(Protocol):
    """A `jax.Array`, as far as a clock needs to know it."""

    def block_until_ready(self) -> object: ...


class Interval(NamedTuple):
    """One task that ran; seconds on one clock for all stages."""

    stage: int
    kind: str  # F forward, B backward, W weight gradient, U update, S a whole step
    microbatch: int | None
    start_s: float
    end_s: float


class Clock:
    """The waiting threads of all stages; makes a `Timeline` for each step."""

    def __init__(self, num_stages: int):
        self._threads = [ThreadPoolExecutor(1, f"clock-{s}") for s in range(num_stages)]
        self._last_end_s = [0.0] * num_stages

    def timeline(self) -> "Timeline":
        return Timeline(self)

    def __enter__(self) -> "Clock":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()

    def begin(self, stage: int, arrived: Awaitable | None) -> "Future[float]":
        """When a task can start that is dispatched next, once it can.

        Args:
          stage: the number of the stage.
          arrived: the array that the task waits for; None: all is here.
        """
        dispatched_s = time.perf_counter()

        def run() -> float:
            if arrived is None:
                return dispatched_s
            arrived.block_until_ready()
            return max(dispatched_s, time.perf_counter())

        return self._threads[stage].submit(run)

    def end(
        self,
        stage: int,
        kind: str,
        microbatch: int | None,
        ready: "Future[float]",
        done: Awaitable,
    ) -> "Future[Interval]":
        """The interval of a task, once the task has ended.

        Args:
          stage: the number of the stage.
          kind: as in `Interval`.
          microbatch: None for a task of the whole step.
          ready: from `begin`.
          done: a result of the task.
        """

        def run() -> Interval:
            done.block_until_ready()
            end_s = time.perf_counter()
            start_s = min(max(self._last_end_s[stage], ready.result()), end_s)
            self._last_end_s[stage] = end_s
            return Interval(stage, kind, microbatch, start_s, end_s)

        return self._threads[stage].submit(run)


class Timeline:
    """The tasks of one step."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._futures: list[Future[Interval]] = []
        self._last: list[tuple[float, Awaitable]] = []  # tasks of the whole step, with their times

    def begin(self, stage: int, arrived: Awaitable | None = None) -> "Future[float]":
        """Notes a task before it is dispatched: its call may return only when it has ended.

        Args:
          stage: the number of the stage.
          arrived: the array that the task waits for; None: all is here.
        """
        return self._clock.begin(stage, arrived)

    def watch(
        self,
        stage: int,
        kind: str,
        microbatch: int | None,
        ready: "Future[float]",
        done: Awaitable,
    ) -> None:
        """Notes a task that was just dispatched.

        Args:
          stage: the number of the stage.
          kind: as in `Interval`.
          microbatch: None for a task of the whole step.
          ready: from `begin`.
          done: a result of the task.
        """
        self._futures.append(self._clock.end(stage, kind, microbatch, ready, done))
        if microbatch is None:
            self._last.append((time.perf_counter(), done))

    def intervals(self) -> list[Interval]:
        """All tasks, once they have ended, by `time.perf_counter`."""
        return [future.result() for future in self._futures]

    def has_ended(self, since_s: float) -> bool:
        """Whether the step's last tasks have ended and were dispatched before `since_s`."""
        return bool(self._last) and all(
            # Arrays of JAX have the method; their types leave it out.
            dispatched_s < since_s and done.is_ready()  # type: ignore[attr-defined]
            for dispatched_s, done in self._last
        )


def from_first_start(intervals: Sequence[Interval]) -> list[Interval]:
    """The same tasks, with seconds that count from the start of the first.

    >>> from_first_start([Interval(0, "F", 0, 8.0, 9.0)])
    [Interval(stage=0, kind='F', microbatch=0, start_s=0.0, end_s=1.0)]
    """
    zero_s = min(interval.start_s for interval in intervals)
    return [
        interval._replace(start_s=interval.start_s - zero_s, end_s=interval.end_s - zero_s)
        for interval in intervals
    ]


def busy_shares(intervals: Sequence[Interval]) -> list[float]:
    """The share of the step in which each stage computes; the rest is its bubble.

    >>> busy_shares([Interval(0, "F", 0, 0.0, 1.0), Interval(1, "F", 0, 1.0, 4.0)])
    [0.25, 0.75]
    """
    busy_s = [0.0] * (1 + max(interval.stage for interval in intervals))
    for interval in intervals:
        busy_s[interval.stage] += interval.end_s - interval.start_s
    span_s = max(i.end_s for i in intervals) - min(i.start_s for i in intervals)
    return [own_s / span_s for own_s in busy_s]
