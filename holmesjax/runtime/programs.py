"""A stage's functions, compiled for its mesh before the first step.

Everything is compiled ahead of time, so that no step waits for a compiler and a shape that does not
fit fails at the start. Programs are compiled side by side, by a few threads; each is lowered as
soon as what it depends on is known: a backward reads what XLA made of its forward.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from holmesjax.parallel import sharding
from holmesjax.plan.plan import Axis
from holmesjax.runtime import end_of_step, microbatch
from holmesjax.runtime.microbatch import Batch, Residuals
from holmesjax.runtime.split_backward import SplitBackward, split_backward
from holmesjax.runtime.stage import Stage, StageState, Tree

Compiled = Any  # a compiled program: to be called
MAX_THREADS = 8  # that compile: each program has its temporaries in the host's memory
Shapes = dict[str, jax.ShapeDtypeStruct]


class ProgramKey(NamedTuple):
    """A program of a chunk."""

    function: str
    sends: bool  # whether the program gathers or reduces over `data`


@dataclass(frozen=True, kw_only=True)
class Programs:
    """The compiled functions of one chunk; each takes and returns arrays on the chunk's mesh.

    `table` has the programs that the plan runs, and no others:

        gather            sends    params -> replicas
        forward                    replicas, x, batch -> out, residuals
        forward           sends    params, x, batch -> replicas, out, residuals
        zero_gradients             -> gradients
        backward                   replicas, residuals, gradients, dy -> gradients, dx
        backward          sends    the same -> reduced gradients, dx
        input_gradient             replicas, residuals, dy -> dx, passed
        weight_gradient            gradients, kept, passed -> gradients, a zero
        weight_gradient   sends    the same -> reduced gradients, a zero
        reduce            sends    gradients -> reduced gradients
        square_norm                reduced gradients -> a number for each stage
        update                     state, reduced gradients, norms -> state, metrics
        total_loss                 losses of all microbatches, weight -> loss; on the last chunk
        step              sends    state, batches, weight -> state, metrics; of a plan's only chunk

    A chunk whose first forward sends has no `gather`, and a chunk whose last backward or weight
    gradient sends has no `reduce`. With a single microbatch the first and the last are the only
    ones. With one replica there is no `reduce`; `update` reads the gradients directly.

    Donated, so not to be used again: the gradients by the programs that add to them, the state by
    `update` and `step`.
    """

    stage: Stage
    table: Mapping[ProgramKey, Compiled]
    # The arguments of `input_gradient` that `weight_gradient` reads.
    kept: Callable[..., list[jax.Array]] = lambda *args: []

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
        self, replicas: Tree, x_BLD: jax.Array | None, batch: Batch, *, is_first: bool
    ) -> tuple[Tree, jax.Array, Residuals]:
        """A microbatch.

        Args:
          replicas: from `gather`, or from the forward before.
          x_BLD: the boundary that comes in; None on the first chunk.
          batch: what the chunk reads of the microbatch.
          is_first: whether it is the first forward since `gather`.

        Returns:
          The replicas; the boundary, or the losses; and the residuals.
        """
        if is_first and (gathering := self.table.get(ProgramKey("forward", True))) is not None:
            found: tuple[Tree, jax.Array, Residuals] = gathering(replicas, x_BLD, batch)
            return found
        return replicas, *self.table[ProgramKey("forward", False)](replicas, x_BLD, batch)

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


def compile_stages(
    stages: Sequence[Stage], compiled: Callable[[], None] = lambda: None
) -> list[Programs]:
    """All programs of all stages. Chunks that differ only in their names share their programs.

    Args:
      compiled: called after each program.
    """
    first: dict[Any, Stage] = {}
    like = [first.setdefault(_form(stage), stage) for stage in stages]
    with Compiler(compiled) as compiler, ThreadPoolExecutor(len(first)) as pool:
        found = {s.index: pool.submit(compile_stage, s, compiler) for s in first.values()}
        made = {index: programs.result() for index, programs in found.items()}
    return [_renamed(made[other.index], stage) for stage, other in zip(stages, like, strict=True)]


def _form(stage: Stage) -> Any:
    """Equal for chunks whose programs are the same but for the names of their layers.

    Moments in fewer bits are rounded by noise whose seeds are names, so their programs differ.
    """
    if stage.is_first or stage.is_last or stage.optimizer.config.moments != "float32":
        return stage.index
    return stage.mesh, len(stage.layers)


def _renamed(programs: Programs, stage: Stage) -> Programs:
    """Programs of one chunk for another that differs only in the names of its layers.

    Arrays that pass from program to program keep the names of the first chunk.
    """
    if programs.stage is stage:
        return programs
    names = dict(zip(stage.layers, programs.stage.layers, strict=True))
    back = {other: own for own, other in names.items()}
    gather, update = programs["gather"], programs["update"]

    def gather_renamed(params: Tree) -> Tree:
        return gather({names[layer]: params[layer] for layer in params})

    def update_renamed(state: StageState, *args: Any) -> tuple[StageState, Any]:
        state, metrics = update(_with_layers(state, names), *args)
        return _with_layers(state, back), metrics

    renamed = {
        ProgramKey("gather", True): gather_renamed,
        ProgramKey("update", False): update_renamed,
    }
    return dataclasses.replace(programs, stage=stage, table={**programs.table, **renamed})


def _with_layers(state: StageState, names: dict[str, str]) -> StageState:
    rename = lambda tree: {names[layer]: part for layer, part in tree.items()}
    opt_state = state.opt_state
    opt_state = opt_state._replace(mu=rename(opt_state.mu), nu=rename(opt_state.nu))
    return StageState(rename(state.params), opt_state)


def compile_stage(stage: Stage, compiler: Compiler) -> Programs:
    """The programs of one chunk."""
    state, replicas, gradients = stage.state_shapes, replica_shapes(stage), gradient_shapes(stage)
    boundary, scalar = boundary_shape(stage), scalar_shape(stage)
    x_BLD = None if stage.is_first else boundary
    dy, dx = scalar if stage.is_last else boundary, scalar if stage.is_first else boundary
    submit = partial(_submit, compiler)
    found: dict[ProgramKey, Future[Compiled]] = {}
    forward: _Forward | None = None
    if _accumulates(stage) or not sends_within(stage):
        forward = _Forward(stage, replicas, x_BLD, compiler)
    if not sends_within(stage):
        found[ProgramKey("gather", True)] = submit(stage.gather, state.params, out=replicas)
    reduced, update = state.params, partial(end_of_step.update, stage)
    if stage.num_replicas == 1 and not stage.shares_table:
        reduced = gradients
        update = partial(end_of_step.reduce_and_update, stage)
    elif not last_reduces(stage):
        found[ProgramKey("reduce", True)] = submit(stage.reduce, gradients, out=reduced)
    found[ProgramKey("zero_gradients", False)] = submit(stage.zero_gradients, out=gradients)
    norms, square_norm = norms_shape(stage), partial(end_of_step.square_norm, stage)
    found[ProgramKey("square_norm", False)] = submit(square_norm, reduced, out=norms)
    out = (state, scalar)
    found[ProgramKey("update", False)] = submit(update, state, reduced, norms, out=out, donate=(0,))
    if stage.is_last:
        found[ProgramKey("total_loss", False)] = submit_total_loss(stage, compiler)
    forwards: dict[ProgramKey, _Forward | _FirstForward] = {}
    if sends_within(stage):
        first = _FirstForward(stage, forward, replicas, x_BLD, compiler)
        forwards[ProgramKey("forward", True)] = first
    if forward is not None:
        forwards[ProgramKey("forward", False)] = forward
    residuals = next(iter(forwards.values())).residuals
    kept: Callable[..., list[jax.Array]] = lambda *args: []
    if is_split(stage):
        kept, halves = _compile_split(stage, compiler, replicas, residuals, gradients, dy)
        found |= halves
    else:
        args = (replicas, residuals, gradients, dy)
        backward = partial(microbatch.backward, stage)
        found |= _submit_sums(
            stage, compiler, "backward", backward, *args, out=(gradients, dx), donate=2
        )
    table = {key: made.program for key, made in forwards.items()}
    table |= {key: program.result() for key, program in found.items()}
    return Programs(stage=stage, table=table, kept=kept)


def is_split(stage: Stage) -> bool:
    return stage.plan.schedule == "zero_bubble"


def submit_total_loss(stage: Stage, compiler: Compiler) -> "Future[Compiled]":
    losses, scalar = (losses_shape(stage),) * stage.plan.microbatches, scalar_shape(stage)
    return _submit(compiler, end_of_step.total_loss, losses, scalar, out=scalar)


def _accumulates(stage: Stage) -> bool:
    """Whether there are microbatches besides the last."""
    return stage.plan.microbatches > 1


def sends_within(stage: Stage) -> bool:
    """Whether the first forward gathers and the last backward reduces, in one program.

    XLA can then send one layer while it computes another, and nothing leaves the program before all
    has been sent. So only the first chunk of the model does that. The others gather while their
    first input is on its way, and reduce when the gradient of that input has left: while there is
    nothing else to do for them.
    """
    return stage.num_replicas > 1 and stage.is_first


def last_reduces(stage: Stage) -> bool:
    """Whether the last program that adds to the gradients also reduces them.

    No other stage waits for what a W gives, so where there are some, the last one does.
    """
    return stage.num_replicas > 1 if is_split(stage) else sends_within(stage)


def _submit_sums(
    stage: Stage,
    compiler: Compiler,
    name: str,
    function: Callable,
    *args: Any,
    out: tuple,
    donate: int,
) -> dict[ProgramKey, "Future[Compiled]"]:
    """A function whose first result is gradients; and the last one of a step, if that reduces."""
    found = {}
    if last_reduces(stage):
        # No result has the form of the gradients that come in: nothing to donate them to.
        masters = stage.state_shapes.params
        reducing = microbatch.reducing(stage, function)
        found[ProgramKey(name, True)] = _submit(compiler, reducing, *args, out=(masters, *out[1:]))
    if not found or _accumulates(stage):
        found[ProgramKey(name, False)] = _submit(
            compiler, function, *args, out=out, donate=(donate,)
        )
    return found


def _compile_split(
    stage: Stage,
    compiler: Compiler,
    replicas: Tree,
    residuals: Residuals,
    gradients: Tree,
    dy: jax.ShapeDtypeStruct,
) -> tuple[Callable[..., list[jax.Array]], dict[ProgramKey, "Future[Compiled]"]]:
    """A backward in two programs, and the arguments of the first that the second reads."""
    args = (replicas, residuals, dy)
    leaves = jax.tree.leaves(args)
    found: list[SplitBackward] = []

    def first_on(*own: Any) -> tuple:
        # Split where it runs: on a replica, with the arrays of that replica.
        found.append(split_backward(partial(microbatch.replica_gradients, stage), *own))
        dx, passed = found[-1].first(*jax.tree.leaves(own))
        return dx, microbatch.stack(stage, passed)

    def first(*args: Any) -> tuple:
        dx, passed = microbatch.on_replicas(stage, first_on)(*args)
        return dx[0] if dx else jnp.zeros(()), passed

    dx = sharding.replicated(stage.mesh) if stage.is_first else boundary_shape(stage).sharding
    lowered = jax.jit(first, out_shardings=(dx, None)).lower(*args)
    halves = found[-1]
    input_gradient = compiler.compile(lowered)
    passed = _with_shardings(lowered.out_info[1], input_gradient.result().output_shardings[1])

    def second_on(gradients: Tree, kept: list, passed: list) -> Tree:
        weights = halves.second(*kept, *microbatch.unstack(stage, passed))
        return microbatch.accumulate(gradients, weights)

    def weights(gradients: Tree, kept: list, passed: list) -> tuple[Tree, jax.Array]:
        # The zero tells a clock when it was done: the gradients are donated to the next one.
        run = microbatch.on_replicas(stage, second_on)
        return run(gradients, kept, passed), jnp.zeros(())

    kept = [leaves[i] for i in halves.keeps]
    out = (gradients, scalar_shape(stage))
    programs = _submit_sums(
        stage, compiler, "weight_gradient", weights, gradients, kept, passed, out=out, donate=0
    )
    programs[ProgramKey("input_gradient", False)] = input_gradient
    return lambda *args: [jax.tree.leaves(args)[i] for i in halves.keeps], programs


def compile_whole_step(
    stage: Stage, *, evaluates: bool = True, compiled: Callable[[], None] = lambda: None
) -> Programs:
    """The programs of a plan's only stage.

    Args:
      stage: all layers.
      evaluates: whether the run has validations.
      compiled: called after each program.
    """
    state, replicas, scalar = stage.state_shapes, replica_shapes(stage), scalar_shape(stage)
    with Compiler(compiled) as compiler:
        submit = partial(_submit, compiler)
        args = state, batch_shapes(stage, stage.plan.microbatches), scalar
        step = partial(end_of_step.step, stage)
        found = {ProgramKey("step", True): submit(step, *args, out=(state, scalar), donate=(0,))}
        table = {}
        if evaluates:
            forward = _Forward(stage, replicas, None, compiler)
            found[ProgramKey("gather", True)] = submit(stage.gather, state.params, out=replicas)
            found[ProgramKey("total_loss", False)] = submit_total_loss(stage, compiler)
            table = {ProgramKey("forward", False): forward.program}
        table |= {key: program.result() for key, program in found.items()}
        return Programs(stage=stage, table=table)


def replica_shapes(stage: Stage) -> Tree:
    return _stacked(stage, stage.compute_dtype)


def gradient_shapes(stage: Stage) -> Tree:
    return _stacked(stage, "float32")


def _stacked(stage: Stage, dtype: str) -> Tree:
    def stack(path: tuple, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = sharding.replica_spec(sharding.name_of(path), stage.mesh.shape)
        where = jax.sharding.NamedSharding(stage.mesh, spec)
        return jax.ShapeDtypeStruct((stage.num_replicas, *x.shape), dtype, sharding=where)

    return jax.tree_util.tree_map_with_path(stack, stage.state_shapes.params)


def boundary_shape(stage: Stage) -> jax.ShapeDtypeStruct:
    """The shape of the activations that enter or leave a stage, and of their gradients."""
    shape = (stage.microbatch_size, stage.model.context_length, stage.model.width)
    where = sharding.batch_sharding(stage.mesh)
    return jax.ShapeDtypeStruct(shape, stage.compute_dtype, sharding=where)


def scalar_shape(stage: Stage) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), jnp.float32, sharding=sharding.replicated(stage.mesh))


def norms_shape(stage: Stage) -> jax.ShapeDtypeStruct:
    """The shape of one number for each stage of the plan."""
    shape, where = (len(stage.plan.stages),), sharding.replicated(stage.mesh)
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where)


def losses_shape(stage: Stage) -> jax.ShapeDtypeStruct:
    """The shape of a microbatch's losses, one for each replica."""
    where = jax.sharding.NamedSharding(stage.mesh, jax.P(Axis.DATA.value))
    return jax.ShapeDtypeStruct((stage.num_replicas,), jnp.float32, sharding=where)


def batch_shapes(stage: Stage, num_microbatches: int | None = None) -> Shapes:
    """The shapes of what the stage reads of a microbatch; with M, of all microbatches stacked."""
    lead = () if num_microbatches is None else (num_microbatches,)
    where = sharding.batch_sharding(stage.mesh, num_leading=len(lead))
    shape = (*lead, stage.microbatch_size, stage.model.context_length)
    return {name: jax.ShapeDtypeStruct(shape, np.int32, sharding=where) for name in stage.inputs}


class _Forward:
    """A forward that is being compiled, and then the layouts that XLA chose for its residuals."""

    def __init__(
        self,
        stage: Stage,
        replicas: Tree,
        x_BLD: jax.ShapeDtypeStruct | None,
        compiler: Compiler,
    ):
        forward = partial(microbatch.forward, stage)
        function = jax.jit(forward, out_shardings=(_out_sharding(stage), None))
        self._lowered = function.lower(replicas, x_BLD, batch_shapes(stage))
        self._program = compiler.compile(self._lowered)

    @property
    def program(self) -> Compiled:
        return self._program.result()

    @property
    def residuals(self) -> Residuals:
        """Shapes, with the shardings that XLA chose."""
        shardings = self.program.output_shardings[1]
        return _with_shardings(self._lowered.out_info[1], shardings)


class _FirstForward:
    """The first forward of a step. Its residuals have the layouts of other forwards'."""

    def __init__(
        self,
        stage: Stage,
        others: _Forward | None,
        replicas: Tree,
        x_BLD: jax.ShapeDtypeStruct | None,
        compiler: Compiler,
    ):
        where = others and jax.tree.map(lambda x: x.sharding, others.residuals.arrays)
        forms = []

        def first(params: Tree, x_BLD: jax.Array | None, batch: Batch) -> tuple:
            here, out, residuals = microbatch.first_forward(stage, params, x_BLD, batch)
            forms.append(dataclasses.replace(residuals, arrays=()))
            return here, out, residuals.arrays

        shardings = (jax.tree.map(lambda x: x.sharding, replicas), _out_sharding(stage), where)
        params = stage.state_shapes.params
        lowered = jax.jit(first, out_shardings=shardings).lower(params, x_BLD, batch_shapes(stage))
        self._program = compiler.compile(lowered)
        if others is not None:
            self.residuals = others.residuals
        else:
            arrays = _with_shardings(
                lowered.out_info[2], self._program.result().output_shardings[2]
            )
            self.residuals = dataclasses.replace(forms[-1], arrays=arrays)
        same = self.residuals.parameter_of == forms[-1].parameter_of
        assert same, "the first forward saves something else"

    @property
    def program(self) -> Compiled:
        return partial(_forward_with, self.residuals, self._program.result())


def _forward_with(form: Residuals, forward: Compiled, *args: Any) -> tuple:
    replicas, out, arrays = forward(*args)
    return replicas, out, dataclasses.replace(form, arrays=arrays)


def _out_sharding(stage: Stage) -> jax.sharding.NamedSharding:
    return (losses_shape if stage.is_last else boundary_shape)(stage).sharding


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
