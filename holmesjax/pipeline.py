"""Runs a schedule over the stages that live in this process: all of them, or one.

The executor only dispatches: every call returns before its arrays are computed, and XLA orders the
work of each device. It goes round its stages and starts each one's next task as soon as what the
task reads has arrived, so no device queue holds a task that waits for one not yet dispatched. What
happened, and when, is a `Timeline`.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding

from holmesjax import sharding
from holmesjax.crossings import Crossing, Key
from holmesjax.plan import EMBED, Plan
from holmesjax.programs import (
    Programs,
    WholeStep,
    batch_shapes,
    boundary_shape,
    compile_stages,
    compile_whole_step,
)
from holmesjax.schedule import Task, schedule
from holmesjax.stage import Batch, Saved, Stage, StageState, Tree
from holmesjax.timeline import Timeline
from holmesjax.transport import LocalTransport, Transport, move

# loss: a scalar, or one of each microbatch, where the last stage is here; grad_norm, learning_rate,
# skipped; square_norms: of each stage.
Metrics = dict[str, Any]


class Agreement(Protocol):
    """How the stages of a plan come to know the same scalars."""

    def square_norms(self, own: Mapping[int, jax.Array]) -> Sequence[jax.Array | float]:
        """Squared gradient norms of all stages, in order, from those of the stages here."""


class Alone:
    """All stages are in this process."""

    def square_norms(self, own: Mapping[int, jax.Array]) -> list[jax.Array]:
        return [own[stage] for stage in sorted(own)]


@dataclass
class _Flight:
    """What one stage holds in the middle of a step."""

    replicas: Tree
    gradients: Tree | None  # None: no backward follows, as in a validation
    saved: dict[int, Saved]


def crossings(stage: Stage) -> tuple[Crossing, ...]:
    """Everything that crosses between the stages of a plan, as any one of them can tell."""
    plan, last = stage.plan, len(stage.plan.stages) - 1
    boundary = boundary_shape(stage)
    found = []

    def add(
        name: str, source: int, target: int, shape: tuple[int, ...], dtype: str, specs: tuple
    ) -> None:
        link = f"{plan.stages[source].cluster} -> {plan.stages[target].cluster}"
        found.append(
            Crossing(
                name=name,
                source=source,
                target=target,
                link=link,
                shape=shape,
                dtype=dtype,
                source_spec=sharding.spec_axes(specs[0], len(shape)),
                target_spec=sharding.spec_axes(specs[1], len(shape)),
            )
        )

    for s in range(last):
        for name, source, target in ((f"F{s}", s, s + 1), (f"B{s + 1}", s + 1, s)):
            pair = tuple(sharding.batch_spec(plan.stages[end].mesh) for end in (source, target))
            add(name, source, target, boundary.shape, str(boundary.dtype), pair)
    if stage.model.tied_embeddings and last > 0:
        shape = (stage.model.vocab_size, stage.model.width)
        specs = [
            sharding.master_spec("token_VD", shape, plan.stages[s].mesh) for s in range(last + 1)
        ]
        for source, target in ((0, last), (last, 0)):
            pair = (specs[source], specs[target])
            add(f"table{source}", source, target, shape, "float32", pair)
    return tuple(found)


def local_targets(
    stages: Sequence[Stage],
) -> dict[str, tuple[NamedSharding, str]]:
    """The sharding at its target, and the link, of each crossing between stages of a process."""
    return {
        crossing.name: (
            sharding.from_axes(stages[crossing.target].mesh, crossing.target_spec),
            crossing.link,
        )
        for crossing in crossings(stages[0])
    }


class Pipeline:
    """The stages of a plan that are in this process.

    Args:
      plan: of all stages.
      programs: of the stages here, in order.
      transport: moves boundaries between stages.
      agreement: shares scalars with the other stages.
      waits_for: told what the process waits for, and "" when that has come.
    """

    def __init__(
        self,
        plan: Plan,
        programs: Sequence[Programs],
        transport: Transport,
        agreement: Agreement,
        waits_for: Callable[[str], None] = lambda text: None,
    ):
        self._plan, self._transport, self._agreement = plan, transport, agreement
        self._waits_for = waits_for
        self._programs = {p.stage.index: p for p in programs}
        self._last = len(plan.stages) - 1
        self._tasks = self._here(schedule(plan.schedule, len(plan.stages), plan.microbatches))
        stage = next(iter(self._programs.values())).stage
        self._links = {crossing.name: crossing.link for crossing in crossings(stage)}
        self._round = 0  # counts train steps and validation batches: part of each key
        if self._last in self._programs:
            weight = np.float32(1.0 / plan.microbatches)  # of each microbatch in the step's loss
            self._weight = sharding.put(
                weight, sharding.replicated(self._programs[self._last].stage.mesh)
            )

    def _here(self, tasks: Sequence[Sequence[Task]]) -> dict[int, Sequence[Task]]:
        return {s: tasks[s] for s in self._programs}

    def init(self, seed: int) -> list[StageState]:
        return [programs.stage.init(seed) for programs in self._programs.values()]

    def train_step(
        self, states: Sequence[StageState], inputs: dict[str, np.ndarray], timeline: Timeline
    ) -> tuple[list[StageState], Metrics]:
        """One optimizer step on the global batch; the old states are donated."""
        flights = self._take_off(states)
        losses = self._run(self._tasks, flights, split(inputs, self._plan.microbatches), timeline)
        return self._finish(states, flights, losses, timeline)

    def evaluate(self, states: Sequence[StageState], inputs: dict[str, np.ndarray]) -> list:
        """Mean loss of each microbatch, where the last stage is here; changes nothing."""
        forwards = [
            tuple(task for task in tasks if task.kind == "F")
            for tasks in schedule("gpipe", len(self._plan.stages), self._plan.microbatches)
        ]
        flights = self._take_off(states, gradients=False)
        microbatches = split(inputs, self._plan.microbatches)
        return self._run(self._here(forwards), flights, microbatches, None)

    def take_link_bytes(self) -> dict[str, int]:
        return self._transport.take_bytes()

    def close(self) -> None:
        self._transport.close()

    def _take_off(self, states: Sequence[StageState], gradients: bool = True) -> dict[int, _Flight]:
        return {
            s: _Flight(
                replicas=programs.gather(state.params),
                gradients=programs.zero_gradients() if gradients else None,
                saved={},
            )
            for (s, programs), state in zip(self._programs.items(), states, strict=True)
        }

    # ---- tasks ---------------------------------------------------------------------------------

    def _run(
        self,
        tasks: Mapping[int, Sequence[Task]],
        flights: Mapping[int, _Flight],
        inputs: Sequence[dict[str, np.ndarray]],
        timeline: Timeline | None,
    ) -> list[jax.Array]:
        """Dispatches every task of the schedule; the losses, in order of their microbatch."""
        self._round += 1
        waiting = {s: deque(stage_tasks) for s, stage_tasks in tasks.items()}
        for s, stage_tasks in tasks.items():
            keys = (self._input(s, task) for task in stage_tasks)
            self._transport.expect([key for key in keys if key])
        losses: dict[int, jax.Array] = {}
        while any(waiting.values()):
            progress = False
            for s, queue in waiting.items():
                while queue and self._is_ready(s, queue[0]):
                    task, progress = queue.popleft(), True
                    m = task.microbatch
                    if task.kind == "F":
                        arrived, out = self._forward(s, task, flights[s], inputs[m])
                        if s == self._last:
                            losses[m] = out
                    else:
                        arrived, out = self._backward(s, task, flights[s])
                    if timeline is not None:
                        timeline.watch(s, task.kind, m, arrived, out)
            if not progress:
                heads = [self._input(s, queue[0]) for s, queue in waiting.items() if queue]
                self._wait([key for key in heads if key])
        return [losses[m] for m in sorted(losses)]

    def _input(self, s: int, task: Task) -> Key | None:
        """What a task reads from another stage."""
        if task.kind == "F" and s > 0:
            return Key(f"F{s - 1}", self._round, task.microbatch)
        if task.kind == "B" and s < self._last:
            return Key(f"B{s + 1}", self._round, task.microbatch)
        return None

    def _is_ready(self, s: int, task: Task) -> bool:
        key = self._input(s, task)
        return key is None or self._transport.arrived(key)

    def _wait(self, keys: Sequence[Key]) -> None:
        self._waits_for(" or ".join(f"{key} over {self._links[key.crossing]}" for key in keys))
        self._transport.wait(keys)
        self._waits_for("")

    def _forward(
        self, s: int, task: Task, flight: _Flight, inputs: dict[str, np.ndarray]
    ) -> tuple[jax.Array | None, jax.Array]:
        """What the task waits for, and what it gives."""
        programs, key = self._programs[s], self._input(s, task)
        x_BLD = self._transport.fetch(key) if key else None
        out, saved = programs.forward(flight.replicas, x_BLD, _put_batch(programs.stage, inputs))
        if flight.gradients is not None:  # a backward will follow
            flight.saved[task.microbatch] = saved
        if s < self._last:
            self._transport.offer(Key(f"F{s}", self._round, task.microbatch), out)
        return x_BLD, out

    def _backward(self, s: int, task: Task, flight: _Flight) -> tuple[jax.Array, jax.Array]:
        """What the task waits for, and what it gives."""
        programs, key = self._programs[s], self._input(s, task)
        dy = self._transport.fetch(key) if key else self._weight
        flight.gradients, dx = programs.backward(
            flight.replicas, flight.saved.pop(task.microbatch), flight.gradients, dy
        )
        if s > 0:
            self._transport.offer(Key(f"B{s}", self._round, task.microbatch), dx)
        return dy, dx

    # ---- the end of a step ---------------------------------------------------------------------

    def _finish(
        self,
        states: Sequence[StageState],
        flights: Mapping[int, _Flight],
        losses: Sequence[jax.Array],
        timeline: Timeline,
    ) -> tuple[list[StageState], Metrics]:
        reduced = {}
        for s, flight in flights.items():
            reduced[s] = self._programs[s].reduce(flight.gradients)
            timeline.watch(s, "R", None, None, jax.tree.leaves(reduced[s])[0])
        if next(iter(self._programs.values())).stage.model.tied_embeddings:
            self._add_tied_gradients(reduced)
        own = {s: self._programs[s].square_norm(gradients) for s, gradients in reduced.items()}
        norms = self._agreement.square_norms(own)
        new_states, metrics = [], {}
        for (s, programs), state in zip(self._programs.items(), states, strict=True):
            where = sharding.replicated(programs.stage.mesh)
            here = tuple(own[s] if o == s else _put_scalar(n, where) for o, n in enumerate(norms))
            state, metrics = programs.update(state, reduced[s], here)
            timeline.watch(s, "U", None, None, metrics["grad_norm"])
            new_states.append(state)
        return new_states, {"loss": losses, "square_norms": norms, **metrics}

    def _add_tied_gradients(self, reduced: dict[int, Tree]) -> None:
        """The table is used twice: both ends add the other's gradient, and stay equal."""
        ends = {s: self._last - s for s in (0, self._last) if s in reduced}
        own = {s: reduced[s][EMBED]["token_VD"] for s in ends}
        for s, own_VD in own.items():
            self._transport.offer(Key(f"table{s}", self._round, 0), own_VD)
        for s, other in ends.items():
            key = Key(f"table{other}", self._round, 0)
            self._transport.expect([key])
            if not self._transport.arrived(key):
                self._wait([key])
            total_VD = own[s] + self._transport.fetch(key)
            reduced[s] = {**reduced[s], EMBED: {**reduced[s][EMBED], "token_VD": total_VD}}


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
            name: sharding.put(inputs[name].reshape(shape.shape), shape.sharding)
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
    return in_one_process(plan, compile_stages(stages))


def in_one_process(plan: Plan, programs: Sequence[Programs]) -> Pipeline:
    """The pipeline of a plan whose stages are all here."""
    targets = local_targets([p.stage for p in programs])
    return Pipeline(plan, programs, LocalTransport(targets), Alone())


def split(inputs: dict[str, np.ndarray], num_microbatches: int) -> list[dict[str, np.ndarray]]:
    """The microbatches of a global batch, in order."""
    parts = {name: np.split(x, num_microbatches) for name, x in inputs.items()}
    return [{name: x[m] for name, x in parts.items()} for m in range(num_microbatches)]


def _put_batch(stage: Stage, inputs: dict[str, np.ndarray]) -> Batch:
    shapes = batch_shapes(stage)
    return {name: sharding.put(inputs[name], shape.sharding) for name, shape in shapes.items()}


def _put_scalar(value: jax.Array | float, where: NamedSharding) -> jax.Array:
    if isinstance(value, jax.Array):
        return move(value, where)
    return sharding.put(np.float32(value), where)
