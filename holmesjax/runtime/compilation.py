"""A stage's functions, compiled for its mesh before the first step.

Everything is compiled ahead of time, so that no step waits for a compiler and a shape that does not
fit fails at the start. Programs are compiled side by side, by a few threads; each is lowered as
soon as what it depends on is known: a backward reads what XLA made of its forward.
"""

import dataclasses
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from holmesjax.optimizers.optimizer import map_layers
from holmesjax.parallel import sharding
from holmesjax.runtime import end_of_step, microbatch
from holmesjax.runtime.chunk import Chunk, ChunkState, Tree
from holmesjax.runtime.end_of_step import auxiliary, sums_of_layers
from holmesjax.runtime.microbatch import Residuals
from holmesjax.runtime.program_shapes import (
    boundary_shape,
    fixed_shapes,
    gradient_shapes,
    losses_shape,
    replica_shapes,
    scalar_shape,
    task_shapes,
    totals_shape,
    values_shapes,
)
from holmesjax.runtime.programs import Compiled, ProgramKey, Programs
from holmesjax.runtime.split_backward import SplitBackward, split_backward
from holmesjax.runtime.weight_copies import refuse_weight_copies

MAX_THREADS = 8  # that compile: each program has its temporaries in the host's memory


class Compiler:
    """Compiles what is lowered for it, several programs at once; a context manager.

    Args:
      compiled: called after each program, from any thread.
    """

    def __init__(self, compiled: Callable[[], None] = lambda: None):
        self._compiled = compiled
        # XLA compiles without the GIL, and the parts of one program on threads of its own, too.
        self._pool = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "compiler")

    def __enter__(self) -> "Compiler":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def compile(self, lowered: jax.stages.Lowered) -> "Future[Compiled]":
        return self._pool.submit(self._run, lowered)

    def _run(self, lowered: jax.stages.Lowered) -> Compiled:
        program = lowered.compile()
        self._compiled()
        return program


def compile_chunks(
    chunks: Sequence[Chunk], compiled: Callable[[], None] = lambda: None
) -> list[Programs]:
    """All programs of all stages. Chunks that differ only in their names share their programs.

    Args:
      compiled: called after each program.
    """
    first: dict[Any, Chunk] = {}
    like = [first.setdefault(_form(chunk), chunk) for chunk in chunks]
    with Compiler(compiled) as compiler, ThreadPoolExecutor(len(first)) as pool:
        found = {s.index: pool.submit(compile_chunk, s, compiler) for s in first.values()}
        made = {index: programs.result() for index, programs in found.items()}
    return [_renamed(made[other.index], chunk) for chunk, other in zip(chunks, like, strict=True)]


def _form(chunk: Chunk) -> Any:
    """Equal for chunks whose programs are the same but for the names of their layers.

    An optimizer may read these names; then programs differ.
    """
    has_fixed = bool(jax.tree.leaves(fixed_shapes(chunk)))
    is_own = chunk.is_first or chunk.is_last or has_fixed or chunk.draws
    if is_own or chunk.optimizer.reads_names or chunk.rounds_params:
        return chunk.index
    policies = map(chunk.plan.policy_of, chunk.layers)
    return chunk.mesh, tuple(chunk.kinds.values()), tuple(policies)


def _renamed(programs: Programs, chunk: Chunk) -> Programs:
    """Programs of one chunk for another that differs only in the names of its layers.

    Arrays that pass from program to program keep the names of the first chunk.
    """
    if programs.chunk is chunk:
        return programs
    names = dict(zip(chunk.layers, programs.chunk.layers, strict=True))
    back = {other: name for name, other in names.items()}
    gather, update = programs["gather"], programs["update"]

    def gather_renamed(params: Tree) -> Tree:
        return gather({names[layer]: params[layer] for layer in params})

    def update_renamed(state: ChunkState, *args: Any) -> tuple[ChunkState, Any]:
        state, metrics = update(_with_layers(state, names), *args)
        return _with_layers(state, back), metrics

    renamed = {
        ProgramKey("gather", True): gather_renamed,
        ProgramKey("update", False): update_renamed,
    }
    return dataclasses.replace(programs, chunk=chunk, table={**programs.table, **renamed})


def _with_layers(state: ChunkState, names: dict[str, str]) -> ChunkState:
    rename = lambda tree: {names[layer]: part for layer, part in tree.items()}
    opt_state = map_layers(rename, state.opt_state)
    average = state.average and state.average._replace(weights=rename(state.average.weights))
    return ChunkState(rename(state.params), opt_state, state.fixed, average, state.recent)


def compile_chunk(chunk: Chunk, compiler: Compiler) -> Programs:
    """The programs of one chunk."""
    state, replicas, gradients = chunk.state_shapes, replica_shapes(chunk), gradient_shapes(chunk)
    boundary, scalar = boundary_shape(chunk), scalar_shape(chunk)
    x_BLD = None if chunk.is_first else boundary
    dy, dx = scalar if chunk.is_last else boundary, scalar if chunk.is_first else boundary
    cotangents = dy, scalar if chunk.has_auxiliary_losses else None
    fixed = fixed_shapes(chunk)
    submit = partial(_submit, compiler)
    found: dict[ProgramKey, Future[Compiled]] = {}
    forward: _Forward | None = None
    if _accumulates(chunk) or not sends_within(chunk):
        forward = _Forward(chunk, replicas, x_BLD, compiler)
    if not sends_within(chunk):
        found[ProgramKey("gather", True)] = submit(chunk.gather, state.params, out=replicas)
    reduced, update = chunk.reduced_shapes, partial(end_of_step.update, chunk)
    if chunk.num_replicas == 1 and not chunk.shares_table:
        reduced = gradients
        update = partial(end_of_step.reduce_and_update, chunk)
    elif not last_reduces(chunk):
        found[ProgramKey("reduce", True)] = submit(chunk.reduce, gradients, out=reduced)
    found[ProgramKey("zero_gradients", False)] = submit(chunk.zero_gradients, out=gradients)
    totals, chunk_totals = totals_shape(chunk), partial(end_of_step.chunk_totals, chunk)
    values = {name: (x,) * chunk.plan.microbatches for name, x in values_shapes(chunk).items()}
    by_name, sums = auxiliary(chunk, values), sums_of_layers(chunk, values)
    watched = scalar if chunk.remembers else None, state.recent
    measured = state.params if chunk.has_statistics else None
    counted = reduced, by_name, scalar if by_name else None, *watched, measured
    found[ProgramKey("chunk_totals", False)] = submit(chunk_totals, *counted, out=totals)
    args, out = (state, reduced, totals, sums), (state, scalar)
    found[ProgramKey("update", False)] = submit(update, *args, out=out, donate=(0,))
    if chunk.is_last:
        found[ProgramKey("total_loss", False)] = submit_total_loss(chunk, compiler)
    forwards: dict[ProgramKey, _Forward | _FirstForward] = {}
    if sends_within(chunk):
        first = _FirstForward(chunk, forward, replicas, x_BLD, compiler)
        forwards[ProgramKey("forward", True)] = first
    if forward is not None:
        forwards[ProgramKey("forward", False)] = forward
    residuals = next(iter(forwards.values())).residuals
    kept: Callable[..., tuple] = lambda *args: ()
    held = fixed, replicas, residuals
    if is_split(chunk):
        kept, halves = _compile_split(chunk, compiler, gradients, *held, *cotangents)
        found |= halves
    else:
        backward = partial(microbatch.backward, chunk)
        taken, given = (*held, gradients, *cotangents), (gradients, dx)
        found |= _submit_sums(chunk, compiler, "backward", backward, *taken, out=given, donate=3)
    table = {key: made.program for key, made in forwards.items()}
    table |= {key: program.result() for key, program in found.items()}
    return Programs(chunk=chunk, table=table, kept=kept)


def is_split(chunk: Chunk) -> bool:
    """Whether gradients of weights are tasks of their own."""
    return chunk.plan.order.splits_backward


def submit_total_loss(chunk: Chunk, compiler: Compiler) -> "Future[Compiled]":
    losses, scalar = (losses_shape(chunk),) * chunk.plan.microbatches, scalar_shape(chunk)
    return _submit(compiler, end_of_step.total_loss, losses, scalar, out=scalar)


def _accumulates(chunk: Chunk) -> bool:
    """Whether there are microbatches besides the last."""
    return chunk.plan.microbatches > 1


def sends_within(chunk: Chunk) -> bool:
    """Whether the first forward gathers and the last backward reduces, in one program.

    XLA can then send one layer while it computes another, and nothing leaves the program before all
    has been sent. So only the first chunk of the model does that. The others gather while their
    first input is on its way, and reduce when the gradient of that input has left: while there is
    nothing else to do for them.
    """
    return chunk.num_replicas > 1 and chunk.is_first


def last_reduces(chunk: Chunk) -> bool:
    """Whether the last program that adds to the gradients also reduces them.

    No other stage waits for the result of a W. So if backwards are split, the last W reduces.
    """
    return chunk.num_replicas > 1 if is_split(chunk) else sends_within(chunk)


def _submit_sums(
    chunk: Chunk,
    compiler: Compiler,
    name: str,
    function: Callable,
    *args: Any,
    out: tuple,
    donate: int,
) -> dict[ProgramKey, "Future[Compiled]"]:
    """A function whose first result is gradients; and the last one of a step, if that reduces."""
    found = {}
    if last_reduces(chunk):
        # No result has the form of the gradients that come in: nothing to donate them to.
        masters = chunk.reduced_shapes
        reducing = microbatch.reducing(chunk, function)
        found[ProgramKey(name, True)] = _submit(compiler, reducing, *args, out=(masters, *out[1:]))
    if not found or _accumulates(chunk):
        found[ProgramKey(name, False)] = _submit(
            compiler, function, *args, out=out, donate=(donate,)
        )
    return found


def _compile_split(
    chunk: Chunk, compiler: Compiler, gradients: Tree, *args: Any
) -> tuple[Callable[..., tuple], dict[ProgramKey, "Future[Compiled]"]]:
    """A backward in two programs, and the arguments of the first that the second reads.

    `args` are those of the first, shapes. The second reads some of `fixed`, and some of the others.
    """
    found: list[SplitBackward] = []

    def first_on(*own: Any) -> tuple:
        # Split where it runs: on a replica, with the arrays of that replica.
        found.append(split_backward(partial(microbatch.replica_gradients, chunk), *own))
        dx, passed = found[-1].first(*jax.tree.leaves(own))
        return dx, microbatch.stack(chunk, passed)

    def first(*args: Any) -> tuple:
        dx, passed = microbatch.on_replicas(chunk, first_on)(*args)
        return dx[0] if dx else jnp.zeros(()), passed

    dx = sharding.replicated(chunk.mesh) if chunk.is_first else boundary_shape(chunk).sharding
    lowered = jax.jit(first, out_shardings=(dx, None)).lower(*args)
    halves = found[-1]
    input_gradient = compiler.compile(lowered)
    passed = _with_shardings(lowered.out_info[1], input_gradient.result().output_shardings[1])

    num_fixed = len(jax.tree.leaves(args[0]))

    def kept(*args: Any) -> tuple[list, list]:
        leaves = jax.tree.leaves(args)
        own = [i for i in halves.keeps if i >= num_fixed]
        return [leaves[i] for i in halves.keeps if i < num_fixed], [leaves[i] for i in own]

    def second_on(fixed: list, gradients: Tree, kept: list, passed: list) -> Tree:
        weights = halves.second(*fixed, *kept, *microbatch.unstack(chunk, passed))
        return microbatch.accumulate(gradients, weights)

    def weights(gradients: Tree, kept: tuple, passed: list) -> tuple[Tree, jax.Array]:
        # The zero tells a clock when it was done: the gradients are donated to the next one.
        run, (fixed, own) = microbatch.on_replicas(chunk, second_on), kept
        return run(fixed, gradients, own, passed), jnp.zeros(())

    out = (gradients, scalar_shape(chunk))
    passing = gradients, kept(*args), passed
    programs = _submit_sums(
        chunk, compiler, "weight_gradient", weights, *passing, out=out, donate=0
    )
    programs[ProgramKey("input_gradient", False)] = input_gradient
    return kept, programs


def compile_whole_step(
    chunk: Chunk, *, evaluates: bool = True, compiled: Callable[[], None] = lambda: None
) -> Programs:
    """The programs of a plan's only stage.

    Args:
      chunk: all layers.
      evaluates: whether the run has validations.
      compiled: called after each program.
    """
    state, replicas, scalar = chunk.state_shapes, replica_shapes(chunk), scalar_shape(chunk)
    with Compiler(compiled) as compiler:
        submit = partial(_submit, compiler)
        args = state, task_shapes(chunk, chunk.plan.microbatches), scalar
        step = partial(end_of_step.step, chunk)
        found = {ProgramKey("step", True): submit(step, *args, out=(state, scalar), donate=(0,))}
        table = {}
        if evaluates:
            forward = _Forward(chunk, replicas, None, compiler)
            found[ProgramKey("gather", True)] = submit(chunk.gather, state.params, out=replicas)
            found[ProgramKey("total_loss", False)] = submit_total_loss(chunk, compiler)
            table = {ProgramKey("forward", False): forward.program}
        table |= {key: program.result() for key, program in found.items()}
        return Programs(chunk=chunk, table=table)


class _Forward:
    """A forward that is being compiled, and then the layouts that XLA chose for its residuals."""

    def __init__(
        self,
        chunk: Chunk,
        replicas: Tree,
        x_BLD: jax.ShapeDtypeStruct | None,
        compiler: Compiler,
    ):
        forward = partial(microbatch.forward, chunk)
        function = jax.jit(forward, out_shardings=(*_out_shardings(chunk), None))
        args = fixed_shapes(chunk), replicas, x_BLD, task_shapes(chunk)
        traced = function.trace(*args)
        weights = jax.tree.leaves((chunk.untrained, chunk.held))
        refuse_weight_copies(traced.jaxpr, weights, len(jax.tree.leaves(traced.out_info[-1])))
        self._lowered = traced.lower()
        self._program = compiler.compile(self._lowered)

    @property
    def program(self) -> Compiled:
        return self._program.result()

    @property
    def residuals(self) -> Residuals:
        """Shapes, with the shardings that XLA chose."""
        shardings = self.program.output_shardings[-1]
        return _with_shardings(self._lowered.out_info[-1], shardings)


class _FirstForward:
    """The first forward of a step. Its residuals have the layouts of other forwards'."""

    def __init__(
        self,
        chunk: Chunk,
        others: _Forward | None,
        replicas: Tree,
        x_BLD: jax.ShapeDtypeStruct | None,
        compiler: Compiler,
    ):
        where = others and jax.tree.map(lambda x: x.sharding, others.residuals.arrays)
        forms = []

        def first(*args: Any) -> tuple:
            *here, residuals = microbatch.first_forward(chunk, *args)
            forms.append(dataclasses.replace(residuals, arrays=()))
            return *here, residuals.arrays

        shardings = (jax.tree.map(lambda x: x.sharding, replicas), *_out_shardings(chunk), where)
        args = fixed_shapes(chunk), chunk.state_shapes.params, x_BLD, task_shapes(chunk)
        lowered = jax.jit(first, out_shardings=shardings).lower(*args)
        self._program = compiler.compile(lowered)
        if others is not None:
            self.residuals = others.residuals
        else:
            arrays = _with_shardings(
                lowered.out_info[-1], self._program.result().output_shardings[-1]
            )
            self.residuals = dataclasses.replace(forms[-1], arrays=arrays)
        same = self.residuals.parameter_of == forms[-1].parameter_of
        assert same, "the first forward saves something else"

    @property
    def program(self) -> Compiled:
        return partial(_forward_with, self.residuals, self._program.result())


def _forward_with(form: Residuals, forward: Compiled, *args: Any) -> tuple:
    *found, arrays = forward(*args)
    return *found, dataclasses.replace(form, arrays=arrays)


def _out_shardings(chunk: Chunk) -> tuple[Any, dict[str, Any]]:
    """The shardings of the boundary or the losses, and of auxiliary values."""
    out = (losses_shape if chunk.is_last else boundary_shape)(chunk).sharding
    return out, {name: x.sharding for name, x in values_shapes(chunk).items()}


def _with_shardings(shapes: Tree, shardings: Tree) -> Tree:
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes, shardings
    )


def _submit(
    compiler: Compiler, function: Callable, *args: Any, out: Any, donate: tuple[int, ...] = ()
) -> "Future[Compiled]":
    shardings = jax.tree.map(lambda x: x.sharding, out)
    program = jax.jit(function, out_shardings=shardings, donate_argnums=donate)
    return compiler.compile(program.lower(*args))
