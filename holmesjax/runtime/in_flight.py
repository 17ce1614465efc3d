"""The tasks that a stage has dispatched and not computed yet, up to a limit.

XLA's client of the CPU takes 32 programs for each device. In jaxlib 0.10 the next one takes a
thread of the pool that computes, and waits on it for one of these to end. Where a stage has
several devices, a collective of that one then lacks the thread, and the process hangs: "Expected 2
threads to join the rendezvous, but not all of them arrived on time". So whoever dispatches tasks
that wait for nothing, such as the forwards of a validation, waits for an earlier one here. A few
tasks ahead are enough to keep a device busy.
"""

from collections import deque

import jax

MOST = 8  # tasks, each of which is a few programs


class TasksAhead:
    """The tasks of one stage that are dispatched and not computed yet, in their order."""

    def __init__(self) -> None:
        self._results: deque[jax.Array] = deque()

    def is_full(self) -> bool:
        """Whether a task has to end before the next one is dispatched."""
        # Arrays of JAX have the method; their types leave it out.
        while self._results and self._results[0].is_ready():  # type: ignore[attr-defined]
            self._results.popleft()
        return len(self._results) >= MOST

    def wait(self) -> None:
        """Returns when the first of the tasks has ended."""
        self._results[0].block_until_ready()

    def add(self, result: jax.Array) -> None:
        """Notes a task that was just dispatched, by a result that is not donated."""
        assert len(self._results) < MOST, "the stage is full"
        self._results.append(result)
