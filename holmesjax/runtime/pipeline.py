"""Runs a schedule over the stages that live in this process: all of them, or one.

The executor only dispatches: every call but a program's first returns before its arrays are
computed, and XLA orders the work of each device. It goes round its stages and starts each one's
next task as soon as what the task reads has arrived, so no device queue holds a task that waits for
one not yet dispatched. A stage has a few tasks ahead (`in_flight`), in steps and validations. While
a stage waits it may run a W early, but only where no other process shares the stage: tasks hold
collectives, which all of a stage's processes must dispatch in one order. What happened, and when,
is a `Timeline`.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from holmesjax.layer_specs.model_layers import EMBED
from holmesjax.parallel import sharding
from holmesjax.plan.plan import Plan
from holmesjax.runtime.chunk import Chunk, ChunkState, Tree
from holmesjax.runtime.compilation import compile_chunks, compile_whole_step
from holmesjax.runtime.end_of_step import Metrics, auxiliary, sums_of_layers
from holmesjax.runtime.in_flight import TasksAhead
from holmesjax.runtime.microbatch import Batch, Residuals, Values
from holmesjax.runtime.overlapped_work import BUSY, OverlappedWork
from holmesjax.runtime.prefetch import Inputs, Placer
from holmesjax.runtime.programs import Programs
from holmesjax.runtime.stage_crossings import above, below, crossings, local_targets
from holmesjax.runtime.timeline import Timeline
from holmesjax.runtime.whole_step import WholeStep
from holmesjax.schedules.tasks import Task
from holmesjax.transport.crossings import Key
from holmesjax.transport.local import LocalTransport, Transport


def _nothing(*_: Any) -> None:
    pass


@dataclass
class _Flight:
    """The arrays that one chunk holds in the middle of a step."""

    params: Tree  # masters
    fixed: Tree
    gradients: Tree | None  # None: no backward follows, as in a validation
    left: int  # tasks that will add to the gradients: B, or W where backwards are split
    replicas: Tree = None  # once `gather` has been called
    has_begun: bool = False  # whether a forward has been dispatched
    values: dict[int, Values] = field(default_factory=dict)  # by microbatch
    saved: dict[int, Residuals] = field(default_factory=dict)
    passed: dict[int, tuple] = field(default_factory=dict)  # between B and W


class Pipeline:
    """The stages of a plan that are in this process.

    Args:
      plan: of all stages.
      programs: of the chunks here, in the order of the model.
      transport: moves boundaries and norms between stages.
      waits_for: told what the process waits for, and "" when that has come.
    """

    def __init__(
        self,
        plan: Plan,
        programs: Sequence[Programs],
        transport: Transport,
        waits_for: Callable[[str], None] = lambda text: None,
    ):
        self._plan, self._transport = plan, transport
        self._waits_for = waits_for
        self.placer = Placer(plan, [p.chunk for p in programs])
        self._programs = {p.chunk.index: p for p in programs}
        self._last = len(plan.chunks) - 1
        self._here = sorted({plan.chunks[v][0] for v in self._programs})
        # Of each stage, from one step or validation batch to the next.
        self._in_flight = {s: TasksAhead() for s in self._here}
        # Stages that other processes share: what arrives late in one is in time in another.
        self._shared = {
            plan.chunks[v][0] for v, p in self._programs.items() if p.chunk.mesh.is_multi_process
        }
        self._tasks = plan.tasks()
        self._forwards = [tuple(t for t in tasks if t.kind == "F") for tasks in self._tasks]
        stage = programs[0].chunk
        self._is_tied = stage.model.sums_table and self._last > 0
        self._links = {crossing.name: crossing.link for crossing in crossings(stage)}
        self._round = 0  # counts train steps and validation batches: part of each key

    def init(self, seed: int, drawn: Callable[[], None] = _nothing) -> list[ChunkState]:
        """The states of the chunks here; `drawn` is called after each layer."""
        return [programs.chunk.init(seed, drawn) for programs in self._programs.values()]

    def train_step(
        self,
        states: Sequence[ChunkState],
        inputs: Inputs,
        timeline: Timeline,
        meanwhile: OverlappedWork = BUSY,
    ) -> tuple[list[ChunkState], Metrics]:
        """One optimizer step on the global batch; the old states are donated."""
        count = len(next(iter(inputs.microbatches.values())))
        flights = self._take_off(states, count)
        weights = self._put_weight(1.0 / max(inputs.num_targets, 1))
        idle = _Once(meanwhile.idle)
        tasks = self._tasks_of(count)
        losses = self._run(tasks, flights, inputs, weights, timeline, meanwhile.nearly, idle)
        loss = self._total(self._filled(losses), weights)
        done = self._finish(states, flights, weights, loss, timeline, idle)
        idle()
        return done

    def evaluate(self, states: Sequence[ChunkState], inputs: Inputs) -> jax.Array | None:
        """Sum of the losses of a batch's tokens, where the last stage is here; changes nothing."""
        flights = self._take_off(states, self._plan.microbatches, gradients=False)
        losses = self._run(self._forwards, flights, inputs)
        return self._total(losses, self._put_weight(1.0))

    def take_link_bytes(self) -> dict[str, int]:
        return self._transport.take_bytes()

    def close(self) -> None:
        self._transport.close()

    def _by_name(self, flight: _Flight) -> dict[str, tuple[jax.Array, ...]]:
        """The values of all microbatches, in their order."""
        in_order = [flight.values[m] for m in sorted(flight.values)]
        return {
            name: self._filled(tuple(values[name] for values in in_order)) for name in in_order[0]
        }

    def _tasks_of(self, count: int) -> tuple[tuple[Task, ...], ...]:
        """The tasks of a step with so many microbatches."""
        return self._tasks if count == self._plan.microbatches else self._plan.tasks(count)

    def _filled(self, of_microbatch: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Fills in zeros for the microbatches that a small batch lacks, as programs expect them."""
        missing = self._plan.microbatches - len(of_microbatch)
        if not missing or not of_microbatch:
            return of_microbatch
        like = of_microbatch[0]
        zeros = np.zeros(like.shape, like.dtype)
        fill = jax.make_array_from_callback(like.shape, like.sharding, lambda index: zeros[index])
        return of_microbatch + (fill,) * missing

    def _take_off(
        self, states: Sequence[ChunkState], count: int, gradients: bool = True
    ) -> dict[int, _Flight]:
        flights = {
            v: _Flight(
                params=state.params,
                fixed=state.fixed,
                gradients=programs["zero_gradients"]() if gradients else None,
                left=count,
            )
            for (v, programs), state in zip(self._programs.items(), states, strict=True)
        }
        for v, flight in flights.items():
            # The first chunk of a stage: what it waits for comes later than its parameters.
            if v < len(self._plan.stages):
                self._gather(v, flight)
        return flights

    def _gather(self, v: int, flight: _Flight) -> None:
        """Once for each chunk."""
        if flight.replicas is None:
            flight.replicas = self._programs[v].gather(flight.params)

    # ---- tasks ---------------------------------------------------------------------------------

    def _run(
        self,
        tasks: Sequence[Sequence[Task]],
        flights: Mapping[int, _Flight],
        inputs: Inputs,
        weights: Mapping[int, jax.Array] = MappingProxyType({}),
        timeline: Timeline | None = None,
        nearly: Callable[[], None] = _nothing,
        idle: Callable[[], None] = _nothing,
    ) -> tuple[jax.Array, ...]:
        """Dispatches every task of the stages here; the losses_R, in order of their microbatch."""
        self._round += 1
        waiting = {s: deque(tasks[s]) for s in self._here}
        for s in self._here:
            keys = [self._input(s, task) for task in tasks[s]]
            self._transport.expect([key for key in keys if key])
        losses: dict[int, jax.Array] = {}
        num_forwards = sum(task.kind == "F" for s in self._here for task in tasks[s])

        def run(s: int, task: Task) -> None:
            nonlocal num_forwards
            waiting[s].remove(task)
            v, m = self._chunk(s, task), task.microbatch
            key = self._input(s, task)
            arrived = self._transport.fetch(key) if key else None
            ready = None if timeline is None else timeline.begin(s, arrived)
            offered: Key | None = None
            if task.kind == "F":
                out = self._forward(v, m, flights[v], arrived, inputs.microbatches[v][m])
                if v == self._last:
                    losses[m] = out
                else:
                    offered = Key(f"F{v}", self._round, m)
                num_forwards -= 1
            elif task.kind == "B":
                out = self._backward(v, m, flights[v], arrived, weights.get(v))
                offered = Key(f"B{v}", self._round, m) if v else None
            else:
                out = self._weight_gradient(v, m, flights[v])
            self._in_flight[s].add(out)
            # Before the offer: the copy to the host that it starts can wait for the task's end.
            if timeline is not None and ready is not None:
                timeline.watch(s, task.kind, m, ready, out)
            if offered:
                self._transport.offer(offered, out)
            if task.kind != "F":
                self._reduce(v, flights[v])
            if task.kind == "F" and not num_forwards:
                nearly()

        while any(waiting.values()):
            progress = False
            # As each stage was found when its next task did not start: a later look may find that
            # a full stage is free, and there would be nothing to wait for.
            full: list[int] = []
            for s, queue in waiting.items():
                while queue:
                    if self._in_flight[s].is_full():
                        full.append(s)
                        break
                    if not self._is_ready(s, queue[0]):
                        break
                    run(s, queue[0])
                    progress = True
            if progress:
                continue
            if full:
                idle()
                self._in_flight[full[0]].wait()
                continue
            if early := self._weight_gradients(waiting, flights):
                run(*early[0])
                continue
            heads = [self._input(s, queue[0]) for s, queue in waiting.items() if queue]
            idle()
            self._wait([key for key in heads if key])
        return tuple(losses[m] for m in sorted(losses))

    def _weight_gradients(
        self, waiting: Mapping[int, Iterable[Task]], flights: Mapping[int, _Flight]
    ) -> list[tuple[int, Task]]:
        """The tasks that can run while stages wait: the next W of each, so that sums stay in order.

        Stages that other processes share keep to the order of the schedule.
        """
        nexts = [
            (s, next((task for task in queue if task.kind == "W"), None))
            for s, queue in waiting.items()
            if s not in self._shared
        ]
        return [
            (s, task)
            for s, task in nexts
            if task and task.microbatch in flights[self._chunk(s, task)].passed
        ]

    def _chunk(self, s: int, task: Task) -> int:
        """The place in the model of the chunk that a task of a stage runs through."""
        return task.chunk * len(self._plan.stages) + s

    def _input(self, s: int, task: Task) -> Key | None:
        """The key of the array that a task reads from another stage."""
        v = self._chunk(s, task)
        if task.kind == "F" and v > 0:
            return Key(f"F{v - 1}", self._round, task.microbatch)
        if task.kind == "B" and v < self._last:
            return Key(f"B{v + 1}", self._round, task.microbatch)
        return None

    def _is_ready(self, s: int, task: Task) -> bool:
        key = self._input(s, task)
        return key is None or self._transport.arrived(key)

    def _wait(self, keys: Sequence[Key]) -> None:
        self._waits_for(" or ".join(f"{key} over {self._links[key.crossing]}" for key in keys))
        self._transport.wait(keys)
        self._waits_for("")

    def _forward(
        self, v: int, m: int, flight: _Flight, x_BLD: jax.Array | None, batch: Batch
    ) -> jax.Array:
        """Returns the boundary that goes out, or the losses."""
        self._gather(v, flight)
        flight.replicas, out, values, saved = self._programs[v].forward(
            flight.fixed, flight.replicas, x_BLD, batch, is_first=not flight.has_begun
        )
        flight.values[m] = values
        flight.has_begun = True
        if flight.gradients is not None:  # a backward will follow
            flight.saved[m] = saved
        return out

    def _backward(
        self,
        v: int,
        m: int,
        flight: _Flight,
        dy_BLD: jax.Array | None,
        weight: jax.Array | None,
    ) -> jax.Array:
        """Returns the gradient of the boundary that came in."""
        programs, saved = self._programs[v], flight.saved.pop(m)
        dy = weight if dy_BLD is None else dy_BLD
        cotangents = dy, weight if programs.chunk.has_auxiliary_losses else None
        held = flight.fixed, flight.replicas, saved
        if programs.is_split:
            dx, passed = programs["input_gradient"](*held, *cotangents)
            flight.passed[m] = programs.kept(*held, *cotangents), passed
        else:
            flight.left -= 1
            args = *held, flight.gradients, *cotangents
            flight.gradients, dx = programs.add_gradients(
                "backward", *args, is_last=not flight.left
            )
        return dx

    def _reduce(self, v: int, flight: _Flight) -> None:
        """After the last task that adds to the gradients."""
        if not flight.left:
            flight.gradients = self._programs[v].reduce(flight.gradients)

    def _weight_gradient(self, v: int, m: int, flight: _Flight) -> jax.Array:
        """Returns a result of the task; it waits for nothing."""
        flight.left -= 1
        args = flight.gradients, *flight.passed.pop(m)
        flight.gradients, done = self._programs[v].add_gradients(
            "weight_gradient", *args, is_last=not flight.left
        )
        return done

    # ---- the end of a step ---------------------------------------------------------------------

    def _finish(
        self,
        states: Sequence[ChunkState],
        flights: Mapping[int, _Flight],
        weights: Mapping[int, jax.Array],
        loss: jax.Array | None,
        timeline: Timeline,
        idle: Callable[[], None],
    ) -> tuple[list[ChunkState], Metrics]:
        reduced = {v: flight.gradients for v, flight in flights.items()}
        if self._is_tied:
            self._add_tied_gradients(reduced)
        own: dict[int, jax.Array] = {}
        for (v, programs), state in zip(self._programs.items(), states, strict=True):
            s = self._plan.chunks[v][0]
            values_MR = auxiliary(programs.chunk, self._by_name(flights[v]))
            weight = weights[v] if values_MR else None
            watched = None if state.recent is None else loss, state.recent
            measured = state.params if programs.chunk.has_statistics else None
            args = reduced[v], values_MR, weight, *watched, measured
            norm = programs["chunk_totals"](*args)
            own[s] = own[s] + norm if s in own else norm
        norms = self._share_norms(own, idle)
        new_states: list[ChunkState] = []
        metrics: Metrics = {}
        for (v, programs), state in zip(self._programs.items(), states, strict=True):
            s = self._plan.chunks[v][0]
            sums_MR = sums_of_layers(programs.chunk, self._by_name(flights[v]))
            ready = timeline.begin(s)
            state, of_chunk = programs["update"](state, reduced[v], norms[s], sums_MR)
            metrics |= of_chunk  # what all chunks know is the same in all
            timeline.watch(s, "U", None, ready, of_chunk["grad_norm"])
            new_states.append(state)
        if loss is not None:
            metrics["loss"] = loss
        square_norms = norms[self._here[0]][: len(self._plan.stages)]
        return new_states, {"square_norms": square_norms, **metrics}

    def _share_norms(
        self, own: Mapping[int, jax.Array], idle: Callable[[], None]
    ) -> dict[int, jax.Array]:
        """The squared norms of all stages, for each stage here.

        Norms go from neighbour to neighbour, as boundaries do, and no host waits for a device. The
        first stage ends last, and has the norms of all others by then. The norm of the first stage
        is ahead of the first boundary of the next step.
        """
        norms = dict(own)
        last = len(self._plan.stages) - 1
        sources = {}
        for s in own:
            for there, name in ((s + 1, above), (s - 1, below)):
                if 0 <= there <= last:
                    sources[Key(name(there), self._round, 0)] = s
                elif last:  # nobody is beyond this end of the pipeline
                    self._pass_on(name, s, own[s])
        self._transport.expect(list(sources))
        while sources:
            arrived = [key for key in sources if self._transport.arrived(key)]
            if not arrived:
                idle()
                self._wait(list(sources))
            for key in arrived:
                s, others = sources.pop(key), self._transport.fetch(key)
                norms[s] = norms[s] + others
                name = above if key.crossing == above(s + 1) else below
                if 0 < s < last:
                    self._pass_on(name, s, own[s] + others)
        return norms

    def _pass_on(self, name: Callable[[int], str], s: int, norms: jax.Array) -> None:
        """Sends the norms of a stage and all beyond it: with `above` back, else on."""
        self._transport.offer(Key(name(s), self._round, 0), norms)

    def _put_weight(self, weight: float) -> dict[int, jax.Array]:
        """The weight of a token in the loss, for the chunks here that have losses or values."""
        return {
            v: sharding.put(np.float32(weight), sharding.replicated(programs.chunk.mesh))
            for v, programs in self._programs.items()
            if v == self._last or programs.chunk.has_auxiliary
        }

    def _total(
        self, losses_MR: tuple[jax.Array, ...], weights: Mapping[int, jax.Array]
    ) -> jax.Array | None:
        if self._last not in self._programs:
            return None
        total: jax.Array = self._programs[self._last]["total_loss"](losses_MR, weights[self._last])
        return total

    def _add_tied_gradients(self, reduced: dict[int, Tree]) -> None:
        """The table is used twice: both ends add the other's gradient, and stay equal."""
        ends = {v: self._last - v for v in (0, self._last) if v in reduced}
        own = {v: reduced[v][EMBED]["token_VD"] for v in ends}
        for v, own_VD in own.items():
            self._transport.offer(Key(f"table{v}", self._round, 0), own_VD)
        for v, other in ends.items():
            key = Key(f"table{other}", self._round, 0)
            self._transport.expect([key])
            if not self._transport.arrived(key):
                self._wait([key])
            total_VD = own[v] + self._transport.fetch(key)
            reduced[v] = {**reduced[v], EMBED: {**reduced[v][EMBED], "token_VD": total_VD}}


class _Once:
    """A function that runs when it is called first."""

    def __init__(self, function: Callable[[], None]):
        self._function: Callable[[], None] | None = function

    def __call__(self) -> None:
        function, self._function = self._function, None
        if function is not None:
            function()


def make_runner(
    plan: Plan,
    chunks: Sequence[Chunk],
    *,
    evaluates: bool = True,
    ramps: bool = False,
    connect: Callable[[], Transport] | None = None,
    compiled: Callable[[], None] = _nothing,
    waits_for: Callable[[str], None] = _nothing,
) -> Pipeline | WholeStep:
    """Compiles the chunks of a plan that are in this process.

    Args:
      plan: of the run.
      chunks: those here.
      evaluates: whether the run has validations.
      ramps: whether some steps have fewer microbatches: a step is then no program of its own.
      connect: makes the transport to other stages, which other processes have; None: all are here.
      compiled: called after each program.
      waits_for: as `Pipeline` takes it.
    """
    if len(plan.chunks) == 1 and not ramps:
        return WholeStep(compile_whole_step(chunks[0], evaluates=evaluates, compiled=compiled))
    if connect is None or len(plan.stages) == 1:
        return in_one_process(plan, compile_chunks(chunks, compiled))
    # First, while all are as far: some compile for longer than a neighbour would wait.
    transport = connect()
    return Pipeline(plan, compile_chunks(chunks, compiled), transport, waits_for)


def in_one_process(plan: Plan, programs: Sequence[Programs]) -> Pipeline:
    """The pipeline of a plan whose stages are all here."""
    targets = local_targets([p.chunk for p in programs])
    return Pipeline(plan, programs, LocalTransport(targets))
