"""A stage's functions, compiled for its mesh before the first step.

Everything is compiled ahead of time, the stages in parallel, so that no step waits for a compiler
and a shape that does not fit fails at the start.
"""

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from holmesjax import sharding
from holmesjax.plan import Axis
from holmesjax.split import Split, split
from holmesjax.stage import Batch, Saved, Stage, Tree

Compiled = Callable[..., Any]
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
    gather: Compiled
    forward: Compiled
    total_loss: Compiled


def compile_stages(stages: Sequence[Stage]) -> list[Programs]:
    """Compiles all programs of all stages, on one thread per stage."""
    with ThreadPoolExecutor(len(stages)) as pool:
        return list(pool.map(compile_stage, stages))


def compile_stage(stage: Stage) -> Programs:
    state, replicas, gradients = stage.state_shapes, replica_shapes(stage), gradient_shapes(stage)
    x_BLD = None if stage.is_first else boundary_shape(stage)
    scalar = scalar_shape(stage)
    dy = scalar if stage.is_last else boundary_shape(stage)
    dx = scalar if x_BLD is None else x_BLD
    is_split = stage.plan.schedule == "zero_bubble"
    gather = first_forward = None
    if sends_within(stage):
        first_forward, forward, saved = _compile_forwards(stage, replicas, x_BLD)
    else:
        gather = _compile(stage.gather, state.params, out=replicas)
        forward, saved = _compile_forward(stage, replicas, x_BLD)
    parts = backward = last_backward = None
    if is_split:
        parts = _compile_split(stage, replicas, saved, gradients, dy)
        last = parts.last_weight_gradient
    else:
        args = (replicas, saved, gradients, dy)
        backward, last_backward = _compile_sums(
            stage, sends_within(stage), stage.backward, *args, out=(gradients, dx), donate=2
        )
        last = last_backward
    reduce: Compiled | None = None
    reduced, update = state.params, cast(Callable, stage.update)
    if stage.num_replicas == 1 and not stage.shares_table:
        reduced = gradients
        update = lambda state, own, norms: stage.update(state, stage.reduce(own), norms)
    elif last is None:
        reduce = _compile(stage.reduce, gradients, out=reduced)
    return Programs(
        stage=stage,
        gather=gather,
        first_forward=first_forward,
        forward=forward,
        zero_gradients=_compile(stage.zero_gradients, out=gradients),
        backward=backward,
        last_backward=last_backward,
        split=parts,
        reduce=reduce,
        square_norm=_compile(stage.square_norm, reduced, out=scalar),
        update=_compile(
            update,
            *(state, reduced, (scalar,) * len(stage.plan.stages)),
            out=(state, scalar),
            donate=(0,),
        ),
        total_loss=compile_total_loss(stage) if stage.is_last else None,
    )


def compile_total_loss(stage: Stage) -> Compiled:
    losses, scalar = (losses_shape(stage),) * stage.plan.microbatches, scalar_shape(stage)
    return _compile(stage.total_loss, losses, scalar, out=scalar)


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


def _compile_sums(
    stage: Stage, reduces: bool, backward: Callable, *args: Any, out: tuple, donate: int
) -> tuple[Compiled | None, Compiled | None]:
    """A backward, whose first result are gradients, and the last one, if that reduces them."""
    last = accumulate = None
    if reduces:
        # No result has the form of the gradients that come in: nothing to donate them to.
        masters = stage.state_shapes.params
        last = _compile(stage.reducing(backward), *args, out=(masters, *out[1:]))
    if last is None or _accumulates(stage):
        accumulate = _compile(backward, *args, out=out, donate=(donate,))
    return accumulate, last


def _compile_split(
    stage: Stage, replicas: Tree, saved: Saved, gradients: Tree, dy: jax.ShapeDtypeStruct
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
    input_gradient = lowered.compile()
    passed = _with_shardings(lowered.out_info[1], input_gradient.output_shardings[1])

    def second_on(gradients: Tree, kept: list, passed: list) -> Tree:
        return stage.accumulate(gradients, parts.second(*kept, *stage.unstack(passed)))

    def weights(gradients: Tree, kept: list, passed: list) -> tuple[Tree, jax.Array]:
        # The zero tells a clock when it was done: the gradients are donated to the next one.
        return stage.on_replicas(second_on)(gradients, kept, passed), jnp.zeros(())

    kept = [leaves[i] for i in parts.keeps]
    out = (gradients, scalar_shape(stage))
    # No other stage waits for what W gives.
    reduces = stage.num_replicas > 1
    accumulate, last = _compile_sums(
        stage, reduces, weights, gradients, kept, passed, out=out, donate=0
    )
    return SplitPrograms(
        input_gradient=input_gradient,
        keep=lambda *args: [jax.tree.leaves(args)[i] for i in parts.keeps],
        weight_gradient=accumulate,
        last_weight_gradient=last,
    )


def compile_whole_step(stage: Stage) -> WholeStep:
    state, replicas = stage.state_shapes, replica_shapes(stage)
    scalar = scalar_shape(stage)
    forward, _ = _compile_forward(stage, replicas, None)
    return WholeStep(
        stage=stage,
        step=_compile(
            stage.step,
            *(state, batch_shapes(stage, stage.plan.microbatches), scalar),
            out=(state, scalar),
            donate=(0,),
        ),
        gather=_compile(stage.gather, state.params, out=replicas),
        forward=forward,
        total_loss=compile_total_loss(stage),
    )


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


def _compile_forward(
    stage: Stage, replicas: Tree, x_BLD: jax.ShapeDtypeStruct | None
) -> tuple[Compiled, Saved]:
    """The program, and the shapes and shardings that XLA chose for what it saves."""
    lowered = jax.jit(stage.forward, out_shardings=(_out_sharding(stage), None)).lower(
        replicas, x_BLD, batch_shapes(stage)
    )
    compiled = lowered.compile()
    return compiled, _with_shardings(lowered.out_info[1], compiled.output_shardings[1])


def _compile_forwards(
    stage: Stage, replicas: Tree, x_BLD: jax.ShapeDtypeStruct | None
) -> tuple[Compiled, Compiled | None, Saved]:
    """The first forward of a step, the others if there are any, and what both save."""
    params = stage.state_shapes.params
    others, where = None, None
    if _accumulates(stage):
        others, saved = _compile_forward(stage, replicas, x_BLD)
        where = jax.tree.map(lambda x: x.sharding, saved.arrays)
    forms = []

    def first(params: Tree, x_BLD: jax.Array | None, batch: Batch) -> tuple:
        here, out, kept = stage.first_forward(params, x_BLD, batch)
        forms.append(dataclasses.replace(kept, arrays=()))
        return here, out, kept.arrays

    shardings = (jax.tree.map(lambda x: x.sharding, replicas), _out_sharding(stage), where)
    lowered = jax.jit(first, out_shardings=shardings).lower(params, x_BLD, batch_shapes(stage))
    compiled = lowered.compile()
    arrays = _with_shardings(lowered.out_info[2], compiled.output_shardings[2])
    form = dataclasses.replace(forms[-1], arrays=arrays)
    if others is None:
        saved = form
    assert saved.parameter_of == form.parameter_of, "the first forward saves something else"
    return partial(_forward_with, saved, compiled), others, saved


def _forward_with(form: Saved, forward: Compiled, *args: Any) -> tuple:
    replicas, out, arrays = forward(*args)
    return replicas, out, dataclasses.replace(form, arrays=arrays)


def _out_sharding(stage: Stage) -> jax.sharding.NamedSharding:
    return (losses_shape if stage.is_last else boundary_shape)(stage).sharding


def _with_shardings(shapes: Tree, shardings: Tree) -> Tree:
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes, shardings
    )


def _compile(function: Callable, *args: Any, out: Any, donate: tuple[int, ...] = ()) -> Compiled:
    shardings = jax.tree.map(lambda x: x.sharding, out)
    return jax.jit(function, out_shardings=shardings, donate_argnums=donate).lower(*args).compile()
