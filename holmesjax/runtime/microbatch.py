"""One microbatch through one chunk: its forward and its backward, on each replica by itself."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from holmesjax.models import ops, transformer
from holmesjax.parallel import sharding
from holmesjax.plan.plan import EMBED, HEAD, Axis
from holmesjax.runtime.stage import Stage, Tree

Batch = dict[str, jax.Array]  # token_BL, target_BL, segment_BL: what the stage needs of them

# `dots` keeps the results of matrix products and of attention, and recomputes the rest.
CHECKPOINT_POLICIES = {
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_saveable,
        jax.checkpoint_policies.save_only_these_names(ops.SAVED),
    ),
    "full": jax.checkpoint_policies.nothing_saveable,
}


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["arrays"],
    meta_fields=["pullback", "parameter_of"],
)
@dataclass(frozen=True)
class Residuals:
    """The arrays that a microbatch's backward needs of its forward.

    The pullback of `jax.vjp` holds parameters too. `restore` takes the parameters from the step's
    replicas again, so that they are neither copied nor kept once per microbatch.
    `parameter_of[i]` is the number of the parameter that stands at leaf i of the pullback, or None
    where `arrays` has the leaf.
    """

    arrays: tuple[jax.Array, ...]
    pullback: jax.tree_util.PyTreeDef
    parameter_of: tuple[int | None, ...]

    @classmethod
    def of(cls, pullback: Callable, replicas: Tree) -> "Residuals":
        leaves, structure = jax.tree.flatten(pullback)
        number = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves(replicas))}
        parameter_of = tuple(number.get(id(leaf)) for leaf in leaves)
        arrays = tuple(leaf for leaf in leaves if id(leaf) not in number)
        return cls(arrays, structure, parameter_of)

    def restore(self, replicas: Tree) -> Callable:
        parameters, arrays = jax.tree.leaves(replicas), iter(self.arrays)
        leaves = [next(arrays) if i is None else parameters[i] for i in self.parameter_of]
        return jax.tree.unflatten(self.pullback, leaves)


def apply(stage: Stage, params: Tree, x_BLD: jax.Array | None, batch: Batch) -> jax.Array:
    """The layers of this stage on one replica: the boundary x_BLD, or its tokens' loss."""
    kernels = ops.Kernels(stage.kernels, stage.mesh, stage.compute_dtype)
    batch = {name: ops.to_parts(array, kernels) for name, array in batch.items()}
    x_BLD = None if x_BLD is None else ops.to_parts(x_BLD, kernels)
    sequences = stage.microbatch_size // stage.num_replicas
    position_L = ops.token_positions(sequences, stage.model.context_length, kernels)
    if kernels.context > 1:
        position_L = _cut_sequences(stage, position_L)
    segment_BL = batch.get("segment_BL")
    for layer in stage.layers:
        run: Callable[..., jax.Array] = functools.partial(
            transformer.apply, layer, stage.model, kernels=kernels
        )
        if layer == EMBED:
            x_BLD = _gathered(stage, run)(params[layer], batch["token_BL"], position_L)
        elif layer == HEAD:
            tied = {"token_VD": params[EMBED]["token_VD"]} if stage.model.tied_embeddings else {}
            head = lambda p, x_BLD, target_BL, run=run: run(
                p, x_BLD, p.get("token_VD"), target_BL, method="loss"
            )
            return _gathered(stage, head)(params[layer] | tied, x_BLD, batch["target_BL"])
        else:
            policy = CHECKPOINT_POLICIES.get(stage.plan.activation_checkpointing)
            run = _gathered(stage, run, policy)
            x_BLD = run(params[layer], x_BLD, position_L, segment_BL)
        x_BLD = _cut_sequences(stage, x_BLD)
    assert x_BLD is not None
    return ops.from_parts(x_BLD, kernels)


def _gathered(stage: Stage, run: Callable, policy: Callable[..., bool] | None = None) -> Callable:
    """`run(params, *args)` for parameters of which each device has a part.

    The function gathers the parameters, and gathers them again for its gradient: nothing of their
    size is kept in between. The gradient of the parameters is summed over the devices, and cut as
    the parameters are. With a policy, arrays that the policy does not save are computed again.
    """
    if policy:
        run = jax.checkpoint(run, policy=policy, prevent_cse=False)
    elif stage.num_parts == 1:
        return run
    narrow = functools.partial(jax.tree.map, lambda x: x.astype(stage.compute_dtype))
    widen = functools.partial(jax.tree.map, lambda x: x.astype(jnp.float32))
    gather = lambda params: widen(_constrain(stage, params, sharding.tensor_spec))
    shard_spec = functools.partial(sharding.shard_spec, sizes=stage.mesh.shape)

    @jax.custom_vjp
    def gathered(params: Tree, *args: Any) -> jax.Array:
        return run(gather(narrow(params)), *args)

    def forward(params: Tree, *args: Any) -> tuple[jax.Array, tuple[Tree, Residuals]]:
        whole = gather(narrow(params))
        out, pullback = jax.vjp(run, whole, *args)
        return out, (params, Residuals.of(pullback, whole))

    def backward(residuals: tuple[Tree, Residuals], dy: jax.Array) -> tuple:
        params, saved = residuals
        # Or XLA could keep what `forward` gathered or computed, where both are in one program.
        # The barrier is around parameters in the compute dtype: XLA copies the arrays behind one.
        again = (narrow(params), saved if policy else (), dy)
        params, again, dy = jax.lax.optimization_barrier(again)
        dparams, *dargs = (again or saved).restore(gather(params))(dy)
        return _constrain(stage, dparams, shard_spec), *dargs

    gathered.defvjp(forward, backward)
    return gathered


def _constrain(stage: Stage, params: Tree, spec: Callable[[str], P]) -> Tree:
    if stage.num_parts == 1:
        return params

    def constrain(path: tuple, x: jax.Array) -> jax.Array:
        where = NamedSharding(stage.mesh, spec(sharding.name_of(path)))
        return jax.lax.with_sharding_constraint(x, where)

    return jax.tree_util.tree_map_with_path(constrain, params)


def _cut_sequences(stage: Stage, x_BLD: jax.Array) -> jax.Array:
    """The sequences of a replica stay cut over `fsdp` and `context`."""
    if stage.num_parts == 1:
        return x_BLD
    where = NamedSharding(stage.mesh, sharding.part_spec(stage.mesh.shape))
    return jax.lax.with_sharding_constraint(x_BLD, where)


# Inside a program, replicas have no dim R: XLA would copy arrays for a dim of size 1, and transpose
# weights. Only between programs are the arrays of replicas stacked along R.


def on_replicas(stage: Stage, function: Callable) -> Callable:
    """`function` of what one replica has, on each; it gives no scalars.

    Arrays are cut, and results joined, along their first dim; scalars all replicas have.
    """
    if stage.num_replicas == 1:
        return function
    data = Axis.DATA.value

    def run(*args: Any) -> Any:
        if stage.mesh.size == stage.num_replicas:
            specs = jax.tree.map(lambda x: P(data) if jnp.ndim(x) else P(), args)
            return stage.on_shards(function, specs, P(data))(*args)
        # XLA aborts where it has to cut a lookup over other axes inside of that.
        dims = jax.tree.map(lambda x: 0 if jnp.ndim(x) else None, args)
        by_replica = lambda x: x.reshape(stage.num_replicas, -1, *x.shape[1:]) if jnp.ndim(x) else x
        mapped = jax.vmap(function, in_axes=dims, spmd_axis_name=data)
        results = mapped(*jax.tree.map(by_replica, args))
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), results)

    return run


def stack(stage: Stage, tree: Tree) -> Tree:
    """The arrays of a replica with a dim R, along which they are joined; a single one has none."""
    return tree if stage.num_replicas == 1 else jax.tree.map(lambda x: x[None], tree)


def unstack(stage: Stage, tree: Tree) -> Tree:
    """The opposite of `stack`."""
    return tree if stage.num_replicas == 1 else jax.tree.map(lambda x: x[0], tree)


def forward(
    stage: Stage, replicas: Tree, x_BLD: jax.Array | None, batch: Batch
) -> tuple[jax.Array, Residuals]:
    """One microbatch: the boundary, or the losses of its replicas; what backward needs.

    A replica's loss is the sum over its tokens that count. The losses are not added over `data`
    here: replicas would wait for each other in every microbatch.
    """
    return on_replicas(stage, functools.partial(_forward, stage))(replicas, x_BLD, batch)


def _forward(
    stage: Stage, replica: Tree, x_BLD: jax.Array | None, batch: Batch
) -> tuple[jax.Array, Residuals]:
    """On one replica, [1, ...]."""
    params = _widened(replica)
    if stage.is_first:
        out, pullback = jax.vjp(lambda p: apply(stage, p, None, batch), params)
    else:
        out, pullback = jax.vjp(lambda p, x: apply(stage, p, x, batch), params, x_BLD)
    saved = stack(stage, Residuals.of(pullback, params))
    return (out[None] if stage.is_last else out), saved


def backward(
    stage: Stage, replicas: Tree, saved: Residuals, gradients: Tree, dy: jax.Array
) -> tuple[Tree, jax.Array]:
    """Adds the microbatch's share to the gradients; also the gradient of the stage's input.

    Args:
      stage: the chunk.
      replicas: the parameters, as `forward` read them.
      saved: the residuals of the same microbatch.
      gradients: the sums so far.
      dy: the gradient of the step's loss with respect to the result of `forward`: dy_BLD. On the
        last stage, the weight of a token: one over the number of tokens that count in the step.

    Returns:
      The gradients, and dx_BLD. The first stage has no input to differentiate: a zero.
    """
    run = on_replicas(stage, functools.partial(_backward, stage))
    gradients, dx = run(replicas, saved, gradients, dy)
    return gradients, dx[0] if dx else jnp.zeros(())


def _backward(
    stage: Stage, replica: Tree, saved: Residuals, gradients: Tree, dy: jax.Array
) -> tuple[Tree, list[jax.Array]]:
    """On one replica, [1, ...]; the second result is empty on the first stage."""
    new, dx = replica_gradients(stage, replica, saved, dy)
    return accumulate(gradients, new), dx


def replica_gradients(
    stage: Stage, replica: Tree, saved: Residuals, dy: jax.Array
) -> tuple[Tree, list[jax.Array]]:
    """The microbatch's share, float32, of one replica; the gradient of its input, if any."""
    params = _widened(replica)
    new, *dx = unstack(stage, saved).restore(params)(dy)
    return new, dx


def accumulate(gradients: Tree, new: Tree) -> Tree:
    """Adds a microbatch's share to the gradients of one replica, [1, ...].

    In place: a product or an embedding's sum is added to what is there, without a place of its
    own, where XLA sees both in the same shape.
    """
    return jax.tree.map(lambda total, g: (total[0] + g)[None], gradients, new)


def _widened(replica: Tree) -> Tree:
    """The parameters of one replica in float32, so that their gradients are float32, too.

    A product rounds its weight to the compute dtype again, inside of its own rule for
    gradients: XLA drops both conversions, so that no copy in float32 is ever there.
    """
    return jax.tree.map(lambda x: x[0].astype(jnp.float32), replica)


# The first forward of a step may gather, and the last backward reduce, in one program: XLA can then
# send one layer while it computes another.


def first_forward(
    stage: Stage, params: Tree, x_BLD: jax.Array | None, batch: Batch
) -> tuple[Tree, jax.Array, Residuals]:
    """`gather` and `forward`: the replicas, and what `forward` returns."""
    replicas = stage.gather(params)
    return replicas, *forward(stage, replicas, x_BLD, batch)


def reducing(stage: Stage, backward: Callable[..., tuple]) -> Callable[..., tuple]:
    """`backward` and `reduce`: the gradients, its first result, come out reduced."""

    def last(*args: Any) -> tuple:
        gradients, *rest = backward(*args)
        return stage.reduce(gradients), *rest

    return last
