"""Runs a schedule over the stages of one process.

The executor only dispatches: every call returns before its arrays are computed, and XLA orders the
work of each device. It goes round the stages and starts each one's next task as soon as what the
task reads has been offered, so no device queue holds a task that waits for one not yet dispatched.
What happened, and when, is a `Timeline`.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from holmesjax import sharding
from holmesjax.plan import EMBED, Plan
from holmesjax.programs import (
    Programs,
    WholeStep,
    batch_shapes,
    compile_stages,
    compile_whole_step,
)
from holmesjax.schedule import Task, schedule
from holmesjax.stage import Batch, Saved, Stage, StageState, Tree
from holmesjax.timeline import Timeline
from holmesjax.transport import LocalTransport, Transport

Metrics = dict[
    str, Any
]  # loss: a scalar, or one of each microbatch; grad_norm, learning_rate, skipped


@dataclass
class _Flight:
    """What one stage holds in the middle of a step."""

    replicas: Tree
    gradients: Tree | None  # None: no backward follows, as in a validation
    saved: dict[int, Saved]


class Pipeline:
    """All stages of a plan, in this process."""

    def __init__(self, plan: Plan, programs: Sequence[Programs], transport: Transport):
        self._plan, self._programs, self._transport = plan, programs, transport
        self._tasks = schedule(plan.schedule, len(plan.stages), plan.microbatches)
        weight = np.float32(1.0 / plan.microbatches)  # of each microbatch in the step's loss
        self._weight = jax.device_put(weight, sharding.replicated(programs[-1].stage.mesh))

    def init(self, seed: int) -> list[StageState]:
        return [programs.stage.init(seed) for programs in self._programs]

    def train_step(
        self, states: Sequence[StageState], inputs: dict[str, np.ndarray], timeline: Timeline
    ) -> tuple[list[StageState], Metrics]:
        """One optimizer step on the global batch; the old states are donated."""
        flights = self._take_off(states)
        losses = self._run(self._tasks, flights, split(inputs, self._plan.microbatches), timeline)
        return self._finish(states, flights, losses, timeline)

    def evaluate(self, states: Sequence[StageState], inputs: dict[str, np.ndarray]) -> list:
        """Mean loss of each microbatch of a global batch; changes nothing."""
        forwards = tuple(
            tuple(task for task in tasks if task.kind == "F")
            for tasks in schedule("gpipe", len(self._plan.stages), self._plan.microbatches)
        )
        flights = self._take_off(states, gradients=False)
        return self._run(forwards, flights, split(inputs, self._plan.microbatches), None)

    def take_link_bytes(self) -> dict[str, int]:
        return self._transport.take_bytes()

    def _take_off(self, states: Sequence[StageState], gradients: bool = True) -> list[_Flight]:
        return [
            _Flight(
                replicas=programs.gather(state.params),
                gradients=programs.zero_gradients() if gradients else None,
                saved={},
            )
            for programs, state in zip(self._programs, states, strict=True)
        ]

    # ---- tasks ---------------------------------------------------------------------------------

    def _run(
        self,
        tasks: Sequence[Sequence[Task]],
        flights: Sequence[_Flight],
        inputs: Sequence[dict[str, np.ndarray]],
        timeline: Timeline | None,
    ) -> list[jax.Array]:
        """Dispatches every task of the schedule; the losses, in order of their microbatch."""
        waiting = [deque(stage_tasks) for stage_tasks in tasks]
        losses: dict[int, jax.Array] = {}
        while any(waiting):
            progress = False
            for s, queue in enumerate(waiting):
                while queue and self._ready(s, queue[0]):
                    task, progress = queue.popleft(), True
                    m = task.microbatch
                    if task.kind == "F":
                        arrived, out = self._forward(s, m, flights[s], inputs[m])
                        if s == len(flights) - 1:
                            losses[m] = out
                    else:
                        arrived, out = self._backward(s, m, flights[s])
                    if timeline is not None:
                        timeline.watch(s, task.kind, m, arrived, out)
            assert progress, f"the schedule deadlocks at {[q[0] for q in waiting if q]}"
        return [losses[m] for m in sorted(losses)]

    def _ready(self, s: int, task: Task) -> bool:
        first, last = s == 0, s == len(self._programs) - 1
        if (task.kind == "F" and first) or (task.kind == "B" and last):
            return True
        neighbour = s - 1 if task.kind == "F" else s + 1
        return self._transport.offered((task.kind, neighbour, task.microbatch))

    def _forward(
        self, s: int, m: int, flight: _Flight, inputs: dict[str, np.ndarray]
    ) -> tuple[jax.Array | None, jax.Array]:
        """What the task waits for, and what it gives."""
        programs = self._programs[s]
        x_BLD = None if s == 0 else self._fetch(("F", s - 1, m), s - 1, s)
        out, saved = programs.forward(flight.replicas, x_BLD, _put_batch(programs.stage, inputs))
        if flight.gradients is not None:  # a backward will follow
            flight.saved[m] = saved
        if not programs.stage.is_last:
            self._transport.offer(("F", s, m), out)
        return x_BLD, out

    def _backward(self, s: int, m: int, flight: _Flight) -> tuple[jax.Array, jax.Array]:
        """What the task waits for, and what it gives."""
        programs = self._programs[s]
        is_last = programs.stage.is_last
        dy = self._weight if is_last else self._fetch(("B", s + 1, m), s + 1, s)
        flight.gradients, dx = programs.backward(
            flight.replicas, flight.saved.pop(m), flight.gradients, dy
        )
        if s > 0:
            self._transport.offer(("B", s, m), dx)
        return dy, dx

    def _fetch(self, key: tuple, source: int, target: int) -> jax.Array:
        where = sharding.batch_sharding(self._programs[target].stage.mesh)
        return self._transport.fetch(key, where, self._link(source, target))

    def _link(self, source: int, target: int) -> str:
        stages = self._plan.stages
        return f"{stages[source].cluster} -> {stages[target].cluster}"

    # ---- the end of a step ---------------------------------------------------------------------

    def _finish(
        self,
        states: Sequence[StageState],
        flights: Sequence[_Flight],
        losses: Sequence[jax.Array],
        timeline: Timeline,
    ) -> tuple[list[StageState], Metrics]:
        reduced = []
        for s, (programs, flight) in enumerate(zip(self._programs, flights, strict=True)):
            reduced.append(programs.reduce(flight.gradients))
            timeline.watch(s, "R", None, None, jax.tree.leaves(reduced[s])[0])
        if self._programs[-1].stage.borrows_table:
            self._add_tied_gradients(reduced)
        norms = [p.square_norm(g) for p, g in zip(self._programs, reduced, strict=True)]
        new_states, metrics = [], {}
        for s, programs in enumerate(self._programs):
            here = tuple(self._scalar(norm, o, s) for o, norm in enumerate(norms))
            state, metrics = programs.update(states[s], reduced[s], here)
            timeline.watch(s, "U", None, None, metrics["grad_norm"])
            new_states.append(state)
        return new_states, {"loss": losses, **metrics}

    def _add_tied_gradients(self, reduced: list[Tree]) -> None:
        """The table is used twice: both ends add the other's gradient, and stay equal."""
        last = len(reduced) - 1
        first_VD, last_VD = (reduced[s][EMBED]["token_VD"] for s in (0, last))
        for s, own_VD, other, other_VD in (
            (0, first_VD, last, last_VD),
            (last, last_VD, 0, first_VD),
        ):
            self._transport.offer(("tied", other), other_VD)
            moved = self._transport.fetch(("tied", other), own_VD.sharding, self._link(other, s))
            reduced[s] = {**reduced[s], EMBED: {**reduced[s][EMBED], "token_VD": own_VD + moved}}

    def _scalar(self, norm: jax.Array, source: int, target: int) -> jax.Array:
        if source == target:
            return norm
        key = ("norm", source, target)
        self._transport.offer(key, norm)
        where = sharding.replicated(self._programs[target].stage.mesh)
        return self._transport.fetch(key, where, self._link(source, target))


class OneStage:
    """A plan with one stage: the pipeline disappears, a step is one program."""

    def __init__(self, plan: Plan, programs: WholeStep):
        self._plan, self._programs = plan, programs

    def init(self, seed: int) -> list[StageState]:
        return [self._programs.stage.init(seed)]

    def train_step(
        self, states: Sequence[StageState], inputs: dict[str, np.ndarray], timeline: Timeline
    ) -> tuple[list[StageState], Metrics]:
        stage = self._programs.stage
        shapes = batch_shapes(stage, self._plan.microbatches)
        batch_M = {
            name: jax.device_put(inputs[name].reshape(shape.shape), shape.sharding)
            for name, shape in shapes.items()
        }
        state, metrics = self._programs.step(states[0], batch_M)
        timeline.watch(0, "S", None, None, metrics["loss"])
        return [state], metrics

    def evaluate(
        self, states: Sequence[StageState], inputs: dict[str, np.ndarray]
    ) -> list[jax.Array]:
        replicas = self._programs.gather(states[0].params)
        return [
            self._programs.forward(replicas, None, _put_batch(self._programs.stage, microbatch))[0]
            for microbatch in split(inputs, self._plan.microbatches)
        ]

    def take_link_bytes(self) -> dict[str, int]:
        return {}


def make_runner(plan: Plan, stages: Sequence[Stage]) -> Pipeline | OneStage:
    """Compiles the stages of a plan, all of them in this process."""
    if len(stages) == 1:
        return OneStage(plan, compile_whole_step(stages[0]))
    return Pipeline(plan, compile_stages(stages), LocalTransport())


def split(inputs: dict[str, np.ndarray], num_microbatches: int) -> list[dict[str, np.ndarray]]:
    """The microbatches of a global batch, in order."""
    parts = {name: np.split(x, num_microbatches) for name, x in inputs.items()}
    return [{name: x[m] for name, x in parts.items()} for m in range(num_microbatches)]


def _put_batch(stage: Stage, inputs: dict[str, np.ndarray]) -> Batch:
    shapes = batch_shapes(stage)
    return {name: jax.device_put(inputs[name], shape.sharding) for name, shape in shapes.items()}
