"""A stage's functions, compiled for its mesh before the first step.

Everything is compiled ahead of time, the stages in parallel, so that no step waits for a compiler
and a shape that does not fit fails at the start.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from holmesjax import sharding
from holmesjax.stage import Saved, Stage, Tree

Compiled = Callable[..., Any]
Shapes = dict[str, jax.ShapeDtypeStruct]


@dataclass(frozen=True, kw_only=True)
class Programs:
    """Compiled functions of one stage of a pipeline; each takes and returns arrays on its mesh.

    Donated, so not to be used again: the gradients by `backward`, the state by `update`.
    """

    stage: Stage
    gather: Compiled
    zero_gradients: Compiled
    forward: Compiled
    backward: Compiled
    reduce: Compiled
    square_norm: Compiled
    update: Compiled


@dataclass(frozen=True, kw_only=True)
class WholeStep:
    """Compiled functions of a plan with one stage. `step` donates its state."""

    stage: Stage
    step: Compiled
    gather: Compiled
    forward: Compiled


def compile_stages(stages: Sequence[Stage]) -> list[Programs]:
    """Compiles all programs of all stages, on one thread per stage."""
    with ThreadPoolExecutor(len(stages)) as pool:
        return list(pool.map(compile_stage, stages))


def compile_stage(stage: Stage) -> Programs:
    state, replicas, gradients = stage.state_shapes, replica_shapes(stage), gradient_shapes(stage)
    x_BLD = None if stage.is_first else boundary_shape(stage)
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=sharding.replicated(stage.mesh))
    dy = scalar if stage.is_last else boundary_shape(stage)
    forward, saved = _compile_forward(stage, replicas, x_BLD)
    return Programs(
        stage=stage,
        gather=_compile(stage.gather, state.params, out=replicas),
        zero_gradients=_compile(stage.zero_gradients, out=gradients),
        forward=forward,
        backward=_compile(
            stage.backward,
            *(replicas, saved, gradients, dy),
            out=(gradients, scalar if x_BLD is None else x_BLD),
            donate=(2,),
        ),
        reduce=_compile(stage.reduce, gradients, out=state.params),
        square_norm=_compile(stage.square_norm, state.params, out=scalar),
        update=_compile(
            stage.update,
            *(state, state.params, (scalar,) * len(stage.plan.stages)),
            out=(state, scalar),
            donate=(0,),
        ),
    )


def compile_whole_step(stage: Stage) -> WholeStep:
    state, replicas = stage.state_shapes, replica_shapes(stage)
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=sharding.replicated(stage.mesh))
    forward, _ = _compile_forward(stage, replicas, None)
    return WholeStep(
        stage=stage,
        step=_compile(
            stage.step,
            *(state, batch_shapes(stage, stage.plan.microbatches)),
            out=(state, scalar),
            donate=(0,),
        ),
        gather=_compile(stage.gather, state.params, out=replicas),
        forward=forward,
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
    mesh = stage.mesh
    out = sharding.replicated(mesh) if stage.is_last else sharding.batch_sharding(mesh)
    lowered = jax.jit(stage.forward, out_shardings=(out, None)).lower(
        replicas, x_BLD, batch_shapes(stage)
    )
    compiled = lowered.compile()
    saved = jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        lowered.out_info[1],
        compiled.output_shardings[1],
    )
    return compiled, saved


def _compile(function: Callable, *args: Any, out: Any, donate: tuple[int, ...] = ()) -> Compiled:
    shardings = jax.tree.map(lambda x: x.sharding, out)
    return jax.jit(function, out_shardings=shardings, donate_argnums=donate).lower(*args).compile()
