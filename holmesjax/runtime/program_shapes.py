"""The shapes and shardings of what a stage's programs take and give."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from holmesjax.layer_specs.kind import Parameter
from holmesjax.models.layer import changing
from holmesjax.parallel import sharding
from holmesjax.plan.plan import Axis
from holmesjax.runtime import coded_weights, layer_statistics
from holmesjax.runtime.chunk import Chunk, Tree

Shapes = dict[str, jax.ShapeDtypeStruct]


def replica_shapes(stage: Chunk) -> Tree:
    return coded_weights.shapes(stage.held, partial(_stacked, stage), stage.compute_dtype)


def gradient_shapes(stage: Chunk) -> Tree:
    return jax.tree.map(lambda own: _stacked(stage, own, "float32"), stage.trained)


def _stacked(stage: Chunk, parameter: Parameter, dtype: Any) -> jax.ShapeDtypeStruct:
    spec = sharding.replica_spec(parameter.dims, stage.mesh.shape)
    where = jax.sharding.NamedSharding(stage.mesh, spec)
    shape = stage.num_replicas, *parameter.shape
    return jax.ShapeDtypeStruct(shape, dtype, sharding=where)


def fixed_shapes(stage: Chunk) -> Tree:
    return stage.state_shapes.fixed


def boundary_shape(stage: Chunk) -> jax.ShapeDtypeStruct:
    """The shape of the activations that enter or leave a stage, and of their gradients."""
    shape = (stage.microbatch_size, *stage.boundary)
    where = sharding.batch_sharding(stage.mesh)
    return jax.ShapeDtypeStruct(shape, stage.compute_dtype, sharding=where)


def scalar_shape(stage: Chunk) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), jnp.float32, sharding=sharding.replicated(stage.mesh))


def totals_shape(stage: Chunk) -> jax.ShapeDtypeStruct:
    """The shape of one number for each stage of the plan, and for each shared number."""
    shape = (len(stage.plan.stages) + len(stage.shared_names),)
    where = sharding.replicated(stage.mesh)
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where)


def values_shapes(stage: Chunk) -> Shapes:
    """The shapes of the auxiliary values of a microbatch, by name; one for each replica."""
    losses = losses_shape(stage)
    names = [name for kind in stage.kinds.values() for name, _ in kind.losses]
    names += [name for kind in stage.kinds.values() for name in kind.metrics]
    if stage.has_statistics:
        handing = [kind for kind in stage.kinds.values() if kind.place != "last"]
        names += [layer_statistics.ACTIVATIONS + kind.name for kind in handing]
    found = dict.fromkeys(names, losses)
    for layer, kind in stage.kinds.items():
        for parameter in changing(kind):
            found[f"{layer}/{parameter.name}"] = jax.ShapeDtypeStruct(
                (stage.num_replicas, *parameter.shape), jnp.float32, sharding=losses.sharding
            )
    return found


def losses_shape(stage: Chunk) -> jax.ShapeDtypeStruct:
    """The shape of a microbatch's losses, one for each replica."""
    where = jax.sharding.NamedSharding(stage.mesh, jax.P(Axis.DATA.value))
    return jax.ShapeDtypeStruct((stage.num_replicas,), jnp.float32, sharding=where)


def batch_shapes(stage: Chunk, num_microbatches: int | None = None) -> Shapes:
    """The shapes of what the stage reads of a microbatch; with M, of all microbatches stacked."""
    lead = () if num_microbatches is None else (num_microbatches,)
    where = sharding.batch_sharding(stage.mesh, num_leading=len(lead))
    lead = (*lead, stage.microbatch_size)
    return {
        name: jax.ShapeDtypeStruct((*lead, *array.shape), array.dtype, sharding=where)
        for name, array in stage.input_arrays.items()
    }


def task_shapes(stage: Chunk, num_microbatches: int | None = None) -> Shapes:
    """Returns `batch_shapes`, with the number of the first sequence if layers draw."""
    found = batch_shapes(stage, num_microbatches)
    if stage.draws:
        lead = () if num_microbatches is None else (num_microbatches,)
        where = sharding.replicated(stage.mesh)
        found["sequence"] = jax.ShapeDtypeStruct(lead, np.int32, sharding=where)
    return found
