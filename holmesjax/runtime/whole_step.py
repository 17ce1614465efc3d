"""Runs the steps of a plan with one stage: each is one program."""

from collections.abc import Callable, Sequence

import jax
import numpy as np

from holmesjax.parallel import sharding
from holmesjax.runtime.chunk import ChunkState
from holmesjax.runtime.end_of_step import Metrics
from holmesjax.runtime.in_flight import TasksAhead
from holmesjax.runtime.overlapped_work import BUSY, OverlappedWork
from holmesjax.runtime.prefetch import Inputs, Placer
from holmesjax.runtime.programs import Programs
from holmesjax.runtime.timeline import Timeline


class WholeStep:
    """A plan with one stage: the pipeline disappears, a step is one program."""

    def __init__(self, programs: Programs):
        self._programs = programs
        self.placer = Placer(programs.chunk.plan, [programs.chunk], is_one_program=True)
        self._in_flight = TasksAhead()  # forwards of validations

    def init(self, seed: int, drawn: Callable[[], None] = lambda: None) -> list[ChunkState]:
        return [self._programs.chunk.init(seed, drawn)]

    def train_step(
        self,
        states: Sequence[ChunkState],
        inputs: Inputs,
        timeline: Timeline,
        meanwhile: OverlappedWork = BUSY,
    ) -> tuple[list[ChunkState], Metrics]:
        chunk = self._programs.chunk
        weight = sharding.put(
            np.float32(1.0 / max(inputs.num_targets, 1)), sharding.replicated(chunk.mesh)
        )
        [batch_M] = inputs.microbatches[chunk.index]
        ready = timeline.begin(0)
        state, metrics = self._programs["step"](states[0], batch_M, weight)
        timeline.watch(0, "S", None, ready, metrics["loss"])
        meanwhile.nearly()
        meanwhile.idle()
        return [state], metrics

    def evaluate(self, states: Sequence[ChunkState], inputs: Inputs) -> jax.Array:
        """Sum of the losses of a batch's tokens."""
        programs, stage = self._programs, self._programs.chunk
        replicas, losses = programs.gather(states[0].params), []
        for batch in inputs.microbatches[stage.index]:
            while self._in_flight.is_full():
                self._in_flight.wait()
            losses_R, *_ = programs["forward"](states[0].fixed, replicas, None, batch)
            self._in_flight.add(losses_R)
            losses.append(losses_R)
        one = sharding.put(np.float32(1.0), sharding.replicated(stage.mesh))
        total: jax.Array = programs["total_loss"](tuple(losses), one)
        return total

    def take_link_bytes(self) -> dict[str, int]:
        return {}
