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


def replica_shapes(chunk: Chunk) -> Tree:
    return coded_weights.shapes(chunk.held, partial(_stacked, chunk), chunk.compute_dtype)


def gradient_shapes(chunk: Chunk) -> Tree:
    return jax.tree.map(lambda own: _stacked(chunk, own, "float32"), chunk.trained)


def _stacked(chunk: Chunk, parameter: Parameter, dtype: Any) -> jax.ShapeDtypeStruct:
    spec = sharding.replica_spec(parameter.dims, chunk.mesh.shape)
    where = jax.sharding.NamedSharding(chunk.mesh, spec)
    shape = chunk.num_replicas, *parameter.shape
    return jax.ShapeDtypeStruct(shape, dtype, sharding=where)


def fixed_shapes(chunk: Chunk) -> Tree:
    return chunk.state_shapes.fixed


def boundary_shape(chunk: Chunk) -> jax.ShapeDtypeStruct:
    """The shape of the activations that enter or leave a stage, and of their gradients."""
    shape = (chunk.microbatch_size, *chunk.boundary)
    where = sharding.batch_sharding(chunk.mesh)
    return jax.ShapeDtypeStruct(shape, chunk.compute_dtype, sharding=where)


def scalar_shape(chunk: Chunk) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), jnp.float32, sharding=sharding.replicated(chunk.mesh))


def totals_shape(chunk: Chunk) -> jax.ShapeDtypeStruct:
    """The shape of one number for each stage of the plan, and for each shared number."""
    shape = (len(chunk.plan.stages) + len(chunk.shared_names),)
    where = sharding.replicated(chunk.mesh)
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where)


def values_shapes(chunk: Chunk) -> Shapes:
    """The shapes of the auxiliary values of a microbatch, by name; one for each replica."""
    losses = losses_shape(chunk)
    names = [name for kind in chunk.kinds.values() for name, _ in kind.losses]
    names += [name for kind in chunk.kinds.values() for name in kind.metrics]
    if chunk.has_statistics:
        handing = [kind for kind in chunk.kinds.values() if kind.place != "last"]
        names += [layer_statistics.ACTIVATIONS + kind.name for kind in handing]
    found = dict.fromkeys(names, losses)
    for layer, kind in chunk.kinds.items():
        for parameter in changing(kind):
            found[f"{layer}/{parameter.name}"] = jax.ShapeDtypeStruct(
                (chunk.num_replicas, *parameter.shape), jnp.float32, sharding=losses.sharding
            )
    return found


def losses_shape(chunk: Chunk) -> jax.ShapeDtypeStruct:
    """The shape of a microbatch's losses, one for each replica."""
    where = jax.sharding.NamedSharding(chunk.mesh, jax.P(Axis.DATA.value))
    return jax.ShapeDtypeStruct((chunk.num_replicas,), jnp.float32, sharding=where)


def batch_shapes(chunk: Chunk, num_microbatches: int | None = None) -> Shapes:
    """The shapes of what the stage reads of a microbatch; with M, of all microbatches stacked."""
    lead = () if num_microbatches is None else (num_microbatches,)
    where = sharding.batch_sharding(chunk.mesh, num_leading=len(lead))
    lead = (*lead, chunk.microbatch_size)
    return {
        name: jax.ShapeDtypeStruct((*lead, *array.shape), array.dtype, sharding=where)
        for name, array in chunk.input_arrays.items()
    }


def task_shapes(chunk: Chunk, num_microbatches: int | None = None) -> Shapes:
    """Returns `batch_shapes`, with the number of the first sequence if layers draw."""
    found = batch_shapes(chunk, num_microbatches)
    if chunk.draws:
        lead = () if num_microbatches is None else (num_microbatches,)
        where = sharding.replicated(chunk.mesh)
        found["sequence"] = jax.ShapeDtypeStruct(lead, np.int32, sharding=where)
    return found
