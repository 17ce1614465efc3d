"""A stage's functions, compiled for its mesh before the first step.

Everything is compiled ahead of time, so that no step waits for a compiler and a shape that does not
fit fails at the start. Programs are compiled side by side, by a few threads; each is lowered as
soon as what it depends on is known: a backward reads what XLA made of its forward.
"""

import dataclasses
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from holmesjax.parallel import sharding
from holmesjax.plan.plan import Axis
from holmesjax.runtime.split_backward import Split, split
from holmesjax.runtime.stage import Batch, Saved, Stage, StageState, Tree

Compiled = Any  # a compiled program: to be called
MAX_THREADS = 8  # that compile: each program has its temporaries in the host's memory
Shapes = dict[str, jax.ShapeDtypeStruct]


@dataclass(frozen=True, kw_only=True)
class Programs:
    """Compiled functions of one chunk of a pipeline; each takes and returns arrays on its mesh.

    Donated, so not to be used again: the gradients by what adds to them, the state by `update`.
    What a plan does not run is None. So where the first forward gathers, there is no `gather`, and
    where the last backward reduces, no `reduce`; nor are there others besides these two with a
    single microbatch. Of one replica the gradients are what the others reduce theirs to.
    """

    stage: Stage
    gather: Compiled | None  # params -> replicas
    first_forward: Compiled | None  # (params, x, batch) -> replicas, out, saved
    forward: Compiled | None  # (replicas, x, batch) -> out, saved
    zero_gradients: Compiled
    backward: Compiled | None  # (replicas, saved, gradients, dy) -> gradients, dx
    last_backward: Compiled | None  # the same -> reduced gradients, dx
    split: "SplitPrograms | None"  # in their place, where the schedule splits the backward
    reduce: Compiled | None  # gradients -> reduced gradients
    square_norm: Compiled
    update: Compiled
    total_loss: Compiled | None  # (losses of all microbatches, weight) -> scalar, on the last stage


@dataclass(frozen=True, kw_only=True)
class SplitPrograms:
    """A backward in two programs, with what the first hands to the second."""

    input_gradient: Compiled  # (replicas, saved, dy) -> dx, passed
    keep: Callable[[Tree, Saved, Any], list[jax.Array]]  # what of these W still needs
    weight_gradient: Compiled | None  # (gradients, kept, passed) -> gradients, a zero
    last_weight_gradient: Compiled | None  # the same -> reduced gradients, a zero


@dataclass(frozen=True, kw_only=True)
class WholeStep:
    """Compiled functions of a plan with one stage. `step` donates its state."""

    stage: Stage
    step: Compiled
    evaluation: "Evaluation | None"  # None: no run asks for it


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The programs of a loss without gradients, for a plan with one stage."""

    gather: Compiled
    forward: Compiled
    total_loss: Compiled


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
    """All programs of all stages. Chunks that differ in their names alone share theirs.

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
    """Equal for chunks whose programs are the same but for the names of their layers."""
    if stage.is_first or stage.is_last:
        return stage.index
    return stage.mesh, len(stage.layers)


def _renamed(programs: Programs, stage: Stage) -> Programs:
    """Programs of one chunk for another that is like it: its state has other names of layers.

    Arrays that pass from program to program keep the names of the first.
    """
    if programs.stage is stage:
        return programs
    names = dict(zip(stage.layers, programs.stage.layers, strict=True))
    back = {theirs: own for own, theirs in names.items()}
    gather, update = programs.gather, programs.update
    assert gather is not None, "only the first chunk gathers in its forward"

    def update_renamed(state: StageState, *args: Any) -> tuple[StageState, Any]:
        state, metrics = update(_with_layers(state, names), *args)
        return _with_layers(state, back), metrics

    return dataclasses.replace(
        programs,
        stage=stage,
        gather=lambda params: gather({names[layer]: params[layer] for layer in params}),
        update=update_renamed,
    )


def _with_layers(state: StageState, names: dict[str, str]) -> StageState:
    rename = lambda tree: {names[layer]: part for layer, part in tree.items()}
    opt_state = state.opt_state
    opt_state = opt_state._replace(mu=rename(opt_state.mu), nu=rename(opt_state.nu))
    return StageState(rename(state.params), opt_state)


def compile_stage(stage: Stage, compiler: Compiler) -> Programs:
    state, replicas, gradients = stage.state_shapes, replica_shapes(stage), gradient_shapes(stage)
    x_BLD = None if stage.is_first else boundary_shape(stage)
    scalar = scalar_shape(stage)
    dy = scalar if stage.is_last else boundary_shape(stage)
    dx = scalar if x_BLD is None else x_BLD
    submit = partial(_submit, compiler)
    gather = reduce = total_loss = None
    forward: _Forward | None = None
    if _accumulates(stage) or not sends_within(stage):
        forward = _Forward(stage, replicas, x_BLD, compiler)
    if not sends_within(stage):
        gather = submit(stage.gather, state.params, out=replicas)
    reduced, update = state.params, cast(Callable, stage.update)
    if stage.num_replicas == 1 and not stage.shares_table:
        reduced = gradients
        update = lambda state, own, norms: stage.update(state, stage.reduce(own), norms)
    elif not last_reduces(stage):
        reduce = submit(stage.reduce, gradients, out=reduced)
    zero_gradients = submit(stage.zero_gradients, out=gradients)
    norms = norms_shape(stage)
    square_norm = submit(stage.square_norm, reduced, out=norms)
    updated = submit(update, state, reduced, norms, out=(state, scalar), donate=(0,))
    if stage.is_last:
        total_loss = submit_total_loss(stage, compiler)
    forwards: list[_Forward | _FirstForward] = [forward] if forward else []
    if sends_within(stage):
        forwards.append(_FirstForward(stage, forward, replicas, x_BLD, compiler))
    saved = forwards[0].saved
    parts = backward = last_backward = None
    if is_split(stage):
        parts = _compile_split(stage, compiler, replicas, saved, gradients, dy)
    else:
        args = (replicas, saved, gradients, dy)
        backward, last_backward = _submit_sums(
            stage, compiler, stage.backward, *args, out=(gradients, dx), donate=2
        )
    return Programs(
        stage=stage,
        gather=_result(gather),
        first_forward=forwards[-1].program if sends_within(stage) else None,
        forward=forward and forward.program,
        zero_gradients=zero_gradients.result(),
        backward=_result(backward),
        last_backward=_result(last_backward),
        split=parts,
        reduce=_result(reduce),
        square_norm=square_norm.result(),
        update=updated.result(),
        total_loss=_result(total_loss),
    )


def is_split(stage: Stage) -> bool:
    return stage.plan.schedule == "zero_bubble"


def submit_total_loss(stage: Stage, compiler: Compiler) -> "Future[Compiled]":
    losses, scalar = (losses_shape(stage),) * stage.plan.microbatches, scalar_shape(stage)
    return _submit(compiler, stage.total_loss, losses, scalar, out=scalar)


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
    stage: Stage, compiler: Compiler, backward: Callable, *args: Any, out: tuple, donate: int
) -> tuple["Future[Compiled] | None", "Future[Compiled] | None"]:
    """A backward, whose first result are gradients, and the last one, if that reduces them."""
    last = accumulate = None
    if last_reduces(stage):
        # No result has the form of the gradients that come in: nothing to donate them to.
        masters = stage.state_shapes.params
        last = _submit(compiler, stage.reducing(backward), *args, out=(masters, *out[1:]))
    if last is None or _accumulates(stage):
        accumulate = _submit(compiler, backward, *args, out=out, donate=(donate,))
    return accumulate, last


def _compile_split(
    stage: Stage,
    compiler: Compiler,
    replicas: Tree,
    saved: Saved,
    gradients: Tree,
    dy: jax.ShapeDtypeStruct,
) -> SplitPrograms:
    args = (replicas, saved, dy)
    leaves = jax.tree.leaves(args)
    found: list[Split] = []

    def first_on(*own: Any) -> tuple:
        # Split where it runs: on a replica, with what that has.
        found.append(split(stage.replica_gradients, *own))
        dx, passed = found[-1].first(*jax.tree.leaves(own))
        return dx, stage.stack(passed)

    def first(*args: Any) -> tuple:
        dx, passed = stage.on_replicas(first_on)(*args)
        return dx[0] if dx else jnp.zeros(()), passed

    dx = sharding.replicated(stage.mesh) if stage.is_first else boundary_shape(stage).sharding
    lowered = jax.jit(first, out_shardings=(dx, None)).lower(*args)
    parts = found[-1]
    input_gradient = compiler.compile(lowered).result()
    passed = _with_shardings(lowered.out_info[1], input_gradient.output_shardings[1])

    def second_on(gradients: Tree, kept: list, passed: list) -> Tree:
        return stage.accumulate(gradients, parts.second(*kept, *stage.unstack(passed)))

    def weights(gradients: Tree, kept: list, passed: list) -> tuple[Tree, jax.Array]:
        # The zero tells a clock when it was done: the gradients are donated to the next one.
        return stage.on_replicas(second_on)(gradients, kept, passed), jnp.zeros(())

    kept = [leaves[i] for i in parts.keeps]
    out = (gradients, scalar_shape(stage))
    accumulate, last = _submit_sums(
        stage, compiler, weights, gradients, kept, passed, out=out, donate=0
    )
    return SplitPrograms(
        input_gradient=input_gradient,
        keep=lambda *args: [jax.tree.leaves(args)[i] for i in parts.keeps],
        weight_gradient=_result(accumulate),
        last_weight_gradient=_result(last),
    )


def compile_whole_step(
    stage: Stage, *, evaluates: bool = True, compiled: Callable[[], None] = lambda: None
) -> WholeStep:
    """The programs of a plan's only stage.

    Args:
      evaluates: whether the run has validations.
      compiled: called after each program.
    """
    state, replicas = stage.state_shapes, replica_shapes(stage)
    scalar, evaluation = scalar_shape(stage), None
    with Compiler(compiled) as compiler:
        step = _submit(
            compiler,
            stage.step,
            *(state, batch_shapes(stage, stage.plan.microbatches), scalar),
            out=(state, scalar),
            donate=(0,),
        )
        if evaluates:
            forward = _Forward(stage, replicas, None, compiler)
            gather = _submit(compiler, stage.gather, state.params, out=replicas)
            total_loss = submit_total_loss(stage, compiler)
            evaluation = Evaluation(
                gather=gather.result(), forward=forward.program, total_loss=total_loss.result()
            )
        return WholeStep(stage=stage, step=step.result(), evaluation=evaluation)


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
    """Of the activations that enter or leave a stage, and of their gradients."""
    shape = (stage.microbatch, stage.model.context_length, stage.model.width)
    where = sharding.batch_sharding(stage.mesh)
    return jax.ShapeDtypeStruct(shape, stage.compute_dtype, sharding=where)


def scalar_shape(stage: Stage) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), jnp.float32, sharding=sharding.replicated(stage.mesh))


def norms_shape(stage: Stage) -> jax.ShapeDtypeStruct:
    """The shape of one number for each stage of the plan."""
    shape, where = (len(stage.plan.stages),), sharding.replicated(stage.mesh)
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where)


def losses_shape(stage: Stage) -> jax.ShapeDtypeStruct:
    """Of a microbatch, one for each replica."""
    where = jax.sharding.NamedSharding(stage.mesh, jax.P(Axis.DATA.value))
    return jax.ShapeDtypeStruct((stage.num_replicas,), jnp.float32, sharding=where)


def batch_shapes(stage: Stage, num_microbatches: int | None = None) -> Shapes:
    """What a microbatch brings to this stage; with M, of all microbatches stacked."""
    lead = () if num_microbatches is None else (num_microbatches,)
    where = sharding.batch_sharding(stage.mesh, num_leading=len(lead))
    shape = (*lead, stage.microbatch, stage.model.context_length)
    return {name: jax.ShapeDtypeStruct(shape, np.int32, sharding=where) for name in stage.inputs}


class _Forward:
    """A forward that is being compiled, and then what XLA made of what it saves."""

    def __init__(
        self,
        stage: Stage,
        replicas: Tree,
        x_BLD: jax.ShapeDtypeStruct | None,
        compiler: Compiler,
    ):
        function = jax.jit(stage.forward, out_shardings=(_out_sharding(stage), None))
        self._lowered = function.lower(replicas, x_BLD, batch_shapes(stage))
        self._program = compiler.compile(self._lowered)

    @property
    def program(self) -> Compiled:
        return self._program.result()

    @property
    def saved(self) -> Saved:
        """Shapes, with the shardings that XLA chose."""
        shardings = self.program.output_shardings[1]
        return _with_shardings(self._lowered.out_info[1], shardings)


class _FirstForward:
    """The first forward of a step, which saves as the others do, if there are any."""

    def __init__(
        self,
        stage: Stage,
        others: _Forward | None,
        replicas: Tree,
        x_BLD: jax.ShapeDtypeStruct | None,
        compiler: Compiler,
    ):
        where = others and jax.tree.map(lambda x: x.sharding, others.saved.arrays)
        forms = []

        def first(params: Tree, x_BLD: jax.Array | None, batch: Batch) -> tuple:
            here, out, kept = stage.first_forward(params, x_BLD, batch)
            forms.append(dataclasses.replace(kept, arrays=()))
            return here, out, kept.arrays

        shardings = (jax.tree.map(lambda x: x.sharding, replicas), _out_sharding(stage), where)
        params = stage.state_shapes.params
        lowered = jax.jit(first, out_shardings=shardings).lower(params, x_BLD, batch_shapes(stage))
        self._program = compiler.compile(lowered)
        if others is not None:
            self.saved = others.saved
        else:
            arrays = _with_shardings(
                lowered.out_info[2], self._program.result().output_shardings[2]
            )
            self.saved = dataclasses.replace(forms[-1], arrays=arrays)
        same = self.saved.parameter_of == forms[-1].parameter_of
        assert same, "the first forward saves something else"

    @property
    def program(self) -> Compiled:
        return partial(_forward_with, self.saved, self._program.result())


def _forward_with(form: Saved, forward: Compiled, *args: Any) -> tuple:
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


def _result(program: "Future[Compiled] | None") -> Compiled | None:
    return None if program is None else program.result()
