"""The end of an optimizer step on one chunk: the loss, the norm of gradients, and the update."""

import jax
import jax.numpy as jnp

from holmesjax.models import ops
from holmesjax.runtime import microbatch
from holmesjax.runtime.microbatch import Batch
from holmesjax.runtime.stage import Stage, StageState, Tree


def total_loss(losses_MR: tuple[jax.Array, ...] | jax.Array, weight: jax.Array) -> jax.Array:
    """The sum over all microbatches and replicas, times `weight`; a float32 scalar.

    With the weight of a token in the step, the result is the step's loss, in nats per token.
    """
    return jnp.sum(jnp.stack(losses_MR)) * weight


def square_norm(stage: Stage, gradients: Tree) -> jax.Array:
    """The sum of squares of the reduced gradients that this chunk owns; float32 [stages].

    The number stands at the chunk's stage, and zeros elsewhere: the results of all chunks add up to
    the `square_norms` of `update`.
    """
    if stage.borrows_table:
        gradients = {layer: gradients[layer] for layer in stage.layers}
    own = sum((jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradients)), jnp.zeros(()))
    return jnp.zeros(len(stage.plan.stages)).at[stage.plan.chunks[stage.index][0]].set(own)


def update(
    stage: Stage, state: StageState, gradients: Tree, square_norms: jax.Array
) -> tuple[StageState, dict[str, jax.Array]]:
    """Clips by the global norm and applies the optimizer; changes nothing if it is not finite.

    `square_norms` are the squared norms of all stages, in order, so that all stages decide alike.
    """
    norm = jnp.sqrt(sum(square_norms[i] for i in range(len(stage.plan.stages))))
    finite = jnp.isfinite(norm)
    scale = jnp.ones(())
    if stage.clip_norm is not None:
        scale = jnp.minimum(1.0, stage.clip_norm / jnp.maximum(norm, 1e-12))
    kernels = ops.Kernels(stage.kernels, stage.mesh)
    args = gradients, state.opt_state, state.params, scale, finite, kernels
    metrics = {
        "grad_norm": norm,
        "learning_rate": stage.optimizer.schedule(state.opt_state.updates),
        "skipped": ~finite,
    }
    return StageState(*stage.optimizer.apply(*args)), metrics


def reduce_and_update(
    stage: Stage, state: StageState, gradients: Tree, square_norms: jax.Array
) -> tuple[StageState, dict[str, jax.Array]]:
    """`update` of a chunk with one replica, from gradients in the layout of the replica."""
    return update(stage, state, stage.reduce(gradients), square_norms)


def step(
    stage: Stage, state: StageState, batch_M: Batch, weight: jax.Array
) -> tuple[StageState, dict[str, jax.Array]]:
    """A whole optimizer step, for a plan with this stage only; batches have a leading M.

    `weight` is the weight of a token in the step's loss.
    """
    replicas = stage.gather(state.params)

    def add_microbatch(gradients: Tree, batch: Batch) -> tuple[Tree, jax.Array]:
        losses_R, saved = microbatch.forward(stage, replicas, None, batch)
        gradients, _ = microbatch.backward(stage, replicas, saved, gradients, weight)
        return gradients, losses_R

    if stage.plan.microbatches == 1:
        batch = jax.tree.map(lambda x: x[0], batch_M)
        gradients, losses_R = add_microbatch(stage.zero_gradients(), batch)
        losses_MR = losses_R[None]
    else:
        gradients, losses_MR = jax.lax.scan(add_microbatch, stage.zero_gradients(), batch_M)
    gradients = stage.reduce(gradients)
    state, metrics = update(stage, state, gradients, square_norm(stage, gradients))
    return state, {"loss": total_loss(losses_MR, weight), **metrics}
