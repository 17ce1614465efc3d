"""The compiled functions of one chunk, by name: the programs that a step calls."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from holmesjax.runtime.chunk import Chunk, Tree
from holmesjax.runtime.microbatch import Batch, Residuals, Values

Compiled = Any  # a compiled program: to be called


class ProgramKey(NamedTuple):
    """A program of a chunk."""

    function: str
    sends: bool  # whether the program gathers or reduces over `data`


@dataclass(frozen=True, kw_only=True)
class Programs:
    """The compiled functions of one chunk; each takes and returns arrays on the chunk's mesh.

    `table` has the programs that the plan runs, and no others:

        gather            sends    params -> replicas
        forward                    fixed, replicas, x, batch -> out, values, residuals
        forward           sends    fixed, params, x, batch -> replicas, out, values, residuals
        zero_gradients             -> gradients
        backward                   fixed, replicas, residuals, gradients, dy, weight
                                       -> gradients, dx
        backward          sends    the same -> reduced gradients, dx
        input_gradient             fixed, replicas, residuals, dy, weight -> dx, passed
        weight_gradient            gradients, kept, passed -> gradients, a zero
        weight_gradient   sends    the same -> reduced gradients, a zero
        reduce            sends    gradients -> reduced gradients
        chunk_totals               reduced gradients, values of all microbatches, weight, loss and
                                       recent steps, where the chunk remembers them, params, where
                                       there are statistics -> totals
        update                     state, reduced gradients, totals, sums -> state, metrics
        total_loss                 losses of all microbatches, weight -> loss; on the last chunk
        step              sends    state, batches, weight -> state, metrics; of a plan's only chunk

    A weight is None where there are no auxiliary losses, or no values, to be weighted. Totals are a
    number for each stage, and one for each shared number. Sums are those for changing parameters.

    A chunk whose first forward sends has no `gather`, and a chunk whose last backward or weight
    gradient sends has no `reduce`. With a single microbatch the first and the last are the only
    ones. With one replica there is no `reduce`; `update` reads the gradients directly.

    Donated, so not to be used again: the gradients by the programs that add to them, the state by
    `update` and `step`.
    """

    chunk: Chunk
    table: Mapping[ProgramKey, Compiled]
    # The arguments of `input_gradient` that `weight_gradient` reads.
    kept: Callable[..., tuple] = lambda *args: ()

    @property
    def is_split(self) -> bool:
        """Whether a backward is two programs."""
        return ProgramKey("input_gradient", False) in self.table

    def __getitem__(self, function: str) -> Compiled:
        """The only program of a function."""
        [program] = (program for key, program in self.table.items() if key.function == function)
        return program

    def gather(self, params: Tree) -> Tree:
        """The replicas; or the parameters as they are, where the first forward gathers."""
        gather = self.table.get(ProgramKey("gather", True))
        return params if gather is None else gather(params)

    def forward(
        self,
        fixed: Tree,
        replicas: Tree,
        x_BLD: jax.Array | None,
        batch: Batch,
        *,
        is_first: bool,
    ) -> tuple[Tree, jax.Array, Values, Residuals]:
        """A microbatch.

        Args:
          fixed: what does not train.
          replicas: from `gather`, or from the forward before.
          x_BLD: the boundary that comes in; None on the first chunk.
          batch: what the chunk reads of the microbatch.
          is_first: whether it is the first forward since `gather`.

        Returns:
          The replicas; the boundary, or the losses; auxiliary values; and the residuals.
        """
        args = fixed, replicas, x_BLD, batch
        if is_first and (gathering := self.table.get(ProgramKey("forward", True))) is not None:
            found: tuple[Tree, jax.Array, Values, Residuals] = gathering(*args)
            return found
        return replicas, *self.table[ProgramKey("forward", False)](*args)

    def add_gradients(self, function: str, *args: Any, is_last: bool) -> tuple[Tree, Any]:
        """Runs `backward` or `weight_gradient`; the last one of a step may reduce.

        Args:
          function: its name in the table.
          args: its arguments.
          is_last: whether no other will add to the gradients.
        """
        reducing = self.table.get(ProgramKey(function, True)) if is_last else None
        program = self.table[ProgramKey(function, False)] if reducing is None else reducing
        gradients, out = program(*args)
        return gradients, out

    def reduce(self, gradients: Tree) -> Tree:
        """The gradients of a step, reduced; as they are, where another program reduces."""
        reduce = self.table.get(ProgramKey("reduce", True))
        return gradients if reduce is None else reduce(gradients)
