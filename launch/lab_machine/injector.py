"""Injects faults into a lab at their steps and times, and undoes them."""

import heapq
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from holmesjax.errors import HolmesError
from holmesjax.lab.injected_faults import Fault
from holmesjax.lab.shell import Commands
from launch.lab_machine.namespaces import run_line


class _Due(NamedTuple):
    time_s: float  # since the start
    number: int  # of two at one time the first goes first
    said: str
    lines: list[str]


class Injector:
    """A context manager, whose thread injects and undoes what is due."""

    def __init__(self, commands: Commands, faults: Sequence[Fault]):
        self.done: list[dict[str, Any]] = []  # what was done, and how long after the start
        self._commands = commands
        self._waiting = [fault for fault in faults if fault.step is not None]
        self._due: list[_Due] = []
        self._num_planned = 0
        self._changed = threading.Condition()
        self._closed = False
        self._step = 0
        self._start_s = time.monotonic()
        for fault in faults:
            if fault.step is None:
                self._plan(fault, fault.time_s)
        self._thread = threading.Thread(target=self._work, name="injector", daemon=True)

    def __enter__(self) -> "Injector":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def step(self, step: int) -> None:
        """Notes that a step is done."""
        with self._changed:
            self._step = step
            reached = [fault for fault in self._waiting if (fault.step or 0) <= step]
            self._waiting = [fault for fault in self._waiting if fault not in reached]
            for fault in reached:
                self._plan(fault, time.monotonic() - self._start_s)
            self._changed.notify()

    def _plan(self, fault: Fault, time_s: float) -> None:
        doing, undoing = self._commands.fault(fault)
        self._push(time_s, fault.text, doing)
        if fault.duration_s is not None:
            self._push(time_s + fault.duration_s, f"over: {fault.text}", undoing)

    def _push(self, time_s: float, said: str, lines: list[str]) -> None:
        heapq.heappush(self._due, _Due(time_s, self._num_planned, said, lines))
        self._num_planned += 1

    def _work(self) -> None:
        with self._changed:
            while not self._closed:
                wait_s = self._due[0].time_s - self._now_s() if self._due else None
                if wait_s is None or wait_s > 0:
                    self._changed.wait(wait_s)
                    continue
                self._do(heapq.heappop(self._due))

    def _do(self, due: _Due) -> None:
        try:
            for line in due.lines:
                run_line(line)
        except HolmesError as error:
            print(f"fault       FAILED, {due.said}: {error}", flush=True)
            return
        now_s = self._now_s()
        self.done.append({"step": self._step, "time_s": round(now_s, 3), "fault": due.said})
        print(f"fault       after step {self._step}, {now_s:.1f} s: {due.said}", flush=True)

    def _now_s(self) -> float:
        return time.monotonic() - self._start_s
