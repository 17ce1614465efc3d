"""The end of an optimizer step on one chunk: the loss, the norm of gradients, and the update."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from operator import getitem
from typing import Any

import jax
import jax.numpy as jnp

from holmesjax.layer_specs.model_layers import import_object
from holmesjax.models import ops
from holmesjax.models.layer import changing
from holmesjax.optimizers import update_ops
from holmesjax.optimizers.optimizer import State, rounding_seed
from holmesjax.runtime import (
    expert_loads,
    gradient_clipping,
    layer_statistics,
    microbatch,
    spikes,
    weight_average,
)
from holmesjax.runtime.chunk import Chunk, ChunkState, Tree, widened
from holmesjax.runtime.microbatch import Batch, Values

Sums = tuple[jax.Array, ...] | jax.Array  # of each microbatch, or of all of them stacked
JOIN: dict[str, Callable[..., jax.Array]] = {"sum": jnp.sum, "max": jnp.max}

# Scalars: loss, where the last stage is here; grad_norm, learning_rate, skipped; the auxiliary
# losses and metrics of layers, by name; spike, where the run looks for them; the choices of each
# expert of a layer here, by the names of `expert_loads`; and square_norms, a number for each stage.
Metrics = dict[str, Any]


def total_loss(losses_MR: tuple[jax.Array, ...] | jax.Array, weight: jax.Array) -> jax.Array:
    """The sum over all microbatches and replicas, times `weight`; a float32 scalar.

    With the weight of a token in the step, the result is the step's loss, in nats per token.
    """
    return jnp.sum(jnp.stack(losses_MR)) * weight


def auxiliary(chunk: Chunk, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the auxiliary losses and metrics, and statistics, among values by name."""
    return {name: value for name, value in values.items() if name in chunk.shared_names}


def sums_of_layers(chunk: Chunk, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the other values by name: sums for changing parameters."""
    return {name: value for name, value in values.items() if name not in chunk.shared_names}


def chunk_totals(
    chunk: Chunk,
    gradients: Tree,
    values_MR: Mapping[str, Sums],
    weight: jax.Array | None,
    loss: jax.Array | None = None,
    recent: spikes.Recent | None = None,
    params: Tree = None,
) -> jax.Array:
    """The sum of squares of the reduced gradients that this chunk owns; float32 [stages + names].

    The number stands at the chunk's stage, and zeros elsewhere. Behind the stages stand the
    shared numbers (`Chunk.shared_names`). The results of all chunks add up to the `totals` of
    `update`.

    Args:
      chunk: the chunk.
      gradients: in the master layout.
      values_MR: the auxiliary values of all microbatches and replicas, by name.
      weight: of a token in the step; None where there are no values.
      loss: of the step, where this chunk remembers losses.
      recent: the steps before, likewise.
      params: where the run has statistics.
    """
    if chunk.borrows_table:
        gradients = {layer: gradients[layer] for layer in chunk.layers}
    own = sum((jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradients)), jnp.zeros(()))
    num_stages = len(chunk.plan.stages)
    totals = jnp.zeros(num_stages + len(chunk.shared_names))
    totals = totals.at[chunk.plan.chunks[chunk.index][0]].set(own)
    for name, value_MR in values_MR.items():
        assert weight is not None, "values need the weight of a token"
        at = num_stages + chunk.shared_names.index(name)
        is_mean = name in chunk.statistic_names
        own_weight = jnp.asarray(1.0 / (chunk.plan.microbatches * chunk.num_replicas))
        totals = totals.at[at].set(total_loss(value_MR, own_weight if is_mean else weight))
    if params is not None:
        for name, square in layer_statistics.squares(chunk.kinds, gradients, params).items():
            totals = totals.at[num_stages + chunk.shared_names.index(name)].set(square)
    if recent is not None:
        assert chunk.spike_rule is not None, "this chunk remembers losses"
        found = loss, *spikes.limits(recent, chunk.spike_rule)
        for name, value in zip(spikes.TOTALS, found, strict=True):
            totals = totals.at[num_stages + chunk.shared_names.index(name)].set(value)
    return totals


def update(
    chunk: Chunk,
    state: ChunkState,
    gradients: Tree,
    totals: jax.Array,
    sums_MR: Mapping[str, Sums],
    *,
    after_products: bool = False,
) -> tuple[ChunkState, dict[str, jax.Array]]:
    """Clips by the global norm and applies the optimizer, unless the step is left out.

    A step whose norm is not finite changes nothing, nor does a spike where the run skips them.

    Args:
      chunk: the chunk.
      state: of the step before.
      gradients: in the master layout.
      totals: the squared norms of all stages, in order, and then the shared numbers: so all stages
        decide alike.
      sums_MR: for parameters that do not train and yet change, by layer and name.
      after_products: whether `kernels.linear` gives the gradients in the same program.
    """
    num_stages = len(chunk.plan.stages)
    square = sum(totals[i] for i in range(num_stages))
    norm = jnp.sqrt(square)
    finite = applies = jnp.isfinite(norm)
    scale = gradient_clipping.scale(norm, chunk.clip_norm)
    kernels = dataclasses.replace(chunk.update_functions, after_products=after_products)
    shared = {name: totals[num_stages + i] for i, name in enumerate(chunk.shared_names)}
    recent = state.recent
    if chunk.spike_rule is not None:
        loss, *limits = (shared[name] for name in spikes.TOTALS)
        is_spike = finite & ((loss > limits[0]) | (square > limits[1]))
        applies = finite & ~is_spike if chunk.spike_rule.skips else finite
        if recent is not None:
            recent = spikes.remembering(recent, loss, norm, finite & jnp.isfinite(loss))
    args = gradients, state.opt_state, state.params, scale, applies, kernels
    metrics = {
        "grad_norm": norm,
        "learning_rate": chunk.optimizer.learning_rate(state.opt_state),
        "skipped": ~applies,
        **{name: shared[name] for name in chunk.auxiliary_names},
        **layer_statistics.finished(chunk.model, {n: shared[n] for n in chunk.statistic_names}),
    }
    metrics |= expert_loads.of_chunk(chunk, sums_MR)
    if chunk.spike_rule is not None:
        metrics["spike"] = is_spike
    apply = chunk.optimizer.apply
    if chunk.rounds_params and not chunk.optimizer.rounds_params:
        apply = functools.partial(_apply_rounded, chunk)
    fixed = _changed(chunk, state.fixed, sums_MR, applies)
    params, opt_state = apply(*args)
    average = state.average
    if average is not None:
        assert chunk.ema_decay is not None, "a stage with an average has its decay"
        average = weight_average.after(average, chunk.ema_decay, params, applies, kernels)
    return ChunkState(params, opt_state, fixed, average, recent), metrics


def _apply_rounded(
    chunk: Chunk,
    gradients: Tree,
    opt_state: State,
    params: Tree,
    scale: jax.Array,
    applies: jax.Array,
    kernels: ops.Kernels,
) -> tuple[Tree, State]:
    """`Optimizer.apply` of parameters in bfloat16, by an optimizer of float32."""

    def update(held: tuple[Tree, State]) -> tuple[Tree, State]:
        params, opt_state = held
        args = gradients, opt_state, widened(params), scale, True, kernels
        new, opt_state = chunk.optimizer.apply(*args)
        return _rounded(new, opt_state.updates), opt_state

    return update_ops.changed_if(applies, update, (params, opt_state), kernels)


def _rounded(params: Tree, update: jax.Array) -> Tree:
    """Parameters after an update in bfloat16."""

    rounded = lambda path, x: update_ops.round_parameter(x, update, rounding_seed(path))
    return jax.tree_util.tree_map_with_path(rounded, params)


def _changed(chunk: Chunk, fixed: Tree, sums_MR: Mapping[str, Sums], applies: jax.Array) -> Tree:
    """The parameters that do not train, after the step's change of those that change."""
    new = dict(fixed)
    for layer, kind in chunk.kinds.items():
        if not (own := {parameter.name: parameter for parameter in changing(kind)}):
            continue
        old = {name: functools.reduce(getitem, it.path, fixed[layer]) for name, it in own.items()}
        joined = {
            name: JOIN[parameter.joined](jnp.stack(sums_MR[f"{layer}/{name}"]), (0, 1))
            for name, parameter in own.items()
        }
        for name, value in import_object(kind.change)(old, joined).items():
            kept = jnp.where(applies, value, old[name])
            new[layer] = _replaced(new[layer], own[name].path, kept)
    return new


def _replaced(tree: Tree, path: Sequence[str], value: jax.Array) -> Tree:
    """A nested dict with another array at a path."""
    first, *rest = path
    return {**tree, first: _replaced(tree[first], rest, value) if rest else value}


def reduce_and_update(
    chunk: Chunk, state: ChunkState, gradients: Tree, *args: Any
) -> tuple[ChunkState, dict[str, jax.Array]]:
    """`update` of a chunk with one replica, from gradients in the layout of the replica."""
    return update(chunk, state, chunk.reduce(gradients), *args)


def step(
    chunk: Chunk, state: ChunkState, batch_M: Batch, weight: jax.Array
) -> tuple[ChunkState, dict[str, jax.Array]]:
    """A whole optimizer step, for a plan with this stage only; batches have a leading M.

    `weight` is the weight of a token in the step's loss.
    """
    replicas, fixed = chunk.gather(state.params), state.fixed
    for_losses = weight if chunk.has_auxiliary_losses else None

    def add_microbatch(gradients: Tree, batch: Batch) -> tuple[Tree, tuple[jax.Array, Values]]:
        losses_R, values_R, saved = microbatch.forward(chunk, fixed, replicas, None, batch)
        gradients, _ = microbatch.backward(
            chunk, fixed, replicas, saved, gradients, weight, for_losses
        )
        return gradients, (losses_R, values_R)

    if chunk.plan.microbatches == 1:
        batch = jax.tree.map(lambda x: x[0], batch_M)
        gradients, found = add_microbatch(chunk.zero_gradients(), batch)
        losses_MR, values_MR = jax.tree.map(lambda x: x[None], found)
    else:
        gradients, (losses_MR, values_MR) = jax.lax.scan(
            add_microbatch, chunk.zero_gradients(), batch_M
        )
    gradients = chunk.reduce(gradients)
    loss = total_loss(losses_MR, weight)
    by_name = auxiliary(chunk, values_MR)
    measured = state.params if chunk.has_statistics else None
    totals = chunk_totals(chunk, gradients, by_name, weight, loss, state.recent, measured)
    sums_MR = sums_of_layers(chunk, values_MR)
    # Products in fp8 give every gradient as its parameter lies.
    told = {"after_products": chunk.model.fp8 is None}
    state, metrics = update(chunk, state, gradients, totals, sums_MR, **told)
    return state, {"loss": loss, **metrics}
