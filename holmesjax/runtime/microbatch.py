"""One microbatch through one chunk: its forward and its backward, on each replica by itself."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from holmesjax.layer_specs.kind import Kind, Parameter
from holmesjax.layer_specs.model_layers import EMBED
from holmesjax.models import ops
from holmesjax.models.activation_checkpointing import checkpointed
from holmesjax.models.layer import (
    Auxiliary,
    Context,
    changing,
    function_of,
    keys_of,
    merged,
)
from holmesjax.models.transformer import TABLE
from holmesjax.parallel import sharding
from holmesjax.plan.plan import Axis
from holmesjax.runtime import coded_weights, layer_statistics
from holmesjax.runtime.chunk import Chunk, Tree

# Sums over the tokens of a microbatch: auxiliary losses and metrics by name, and those for changing
# parameters by layer and name.
Values = dict[str, jax.Array]
Batch = dict[str, jax.Array]  # token_BL, target_BL, segment_BL, or others: what the stage needs


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


def apply(
    chunk: Chunk, params: Tree, fixed: Tree, x_BLD: jax.Array | None, batch: Batch
) -> tuple[tuple[jax.Array, jax.Array | None], Values]:
    """The layers of this stage on one replica.

    Args:
      chunk: the chunk.
      params: of the layers, float32.
      fixed: what does not train, float32.
      x_BLD: the boundary that comes in; None on the first stage.
      batch: what the stage reads of the microbatch.

    Returns:
      The boundary x_BLD, or its tokens' loss; beside it the auxiliary losses of the layers here,
      weighted and added up, or None where there are none. Then all auxiliary values by name.
    """
    kernels = chunk.array_functions
    sequence_B = batch.get("sequence_B", jnp.zeros(()))
    of_tokens = {name: array for name, array in batch.items() if name != "sequence_B"}
    batch = {name: ops.to_parts(array, kernels) for name, array in of_tokens.items()}
    x_BLD = None if x_BLD is None else ops.to_parts(x_BLD, kernels)
    position_L, learned_L = _positions(chunk, of_tokens)
    token_BL = batch.get("token_BL")
    if chunk.sends_rows:  # each device looks up its part of the rows of all tokens
        token_BL, learned_L = _everywhere(chunk, (token_BL, learned_L))
    values: Values = {}
    weighted: jax.Array | None = None
    functions: dict[tuple[Kind, str], Callable] = {}
    trained, names = dict(params), list(chunk.kinds)
    for layer, later, kind in zip(names, [*names[1:], None], chunk.kinds.values(), strict=True):
        cut = kernels.sequence_cut if kind.cuts_sequences else None
        if x_BLD is not None and cut is not None:  # a boundary comes in whole
            x_BLD = cut.parts(x_BLD)
        if later is not None and x_BLD is not None and _reduces_in_order(chunk):
            x_BLD, trained[later] = _reduced_first(x_BLD, trained[later])
        sends_rows = chunk.sends_rows and kind.place == "first"
        own, of_own = _parameters(chunk, layer, params, fixed)
        differentiated, _ = _parameters(chunk, layer, trained, fixed)
        context = Context(
            model=chunk.model,
            kind=kind,
            kernels=replace(kernels, sequence_parallel=False) if sends_rows else kernels,
            position_L=learned_L if kind.place == "first" else position_L,
            token_BL=token_BL if kind.place == "first" and kind.reads is None else None,
            target_BL=batch["target_BL"] if kind.place == "last" and kind.reads is None else None,
            batch={array.name: batch[array.name] for array in kind.reads or ()},
            segment_BL=batch.get("segment_BL") if kind.place == "middle" else None,
            key_Bk=keys_of(chunk.seed, layer, sequence_B) if kind.draws else None,
            trains=sequence_B[0] >= 0 if kind.draws else None,
        )
        policy = chunk.plan.policy_of(layer)
        if (kind, policy) not in functions:
            functions[kind, policy] = _function(chunk, kind, of_own, policy)
        auxiliary: Auxiliary
        x_BLD, auxiliary = functions[kind, policy](own, differentiated, x_BLD, context)
        for name, weight in kind.losses:
            loss = weight * auxiliary.losses[name].astype(jnp.float32)
            weighted = loss if weighted is None else weighted + loss
        for name, value in {**auxiliary.losses, **auxiliary.metrics}.items():
            values[name] = values.get(name, 0.0) + value.astype(jnp.float32)
        for parameter in changing(kind):
            total = auxiliary.sums[parameter.name].astype(jnp.float32)
            values[f"{layer}/{parameter.name}"] = total
        if kind.place != "last" and chunk.has_statistics:
            name = layer_statistics.ACTIVATIONS + kind.name
            values[name] = values.get(name, 0.0) + layer_statistics.activation_square(x_BLD)
        if sends_rows:  # cut along the width until here; XLA can change one dim at a time
            x_BLD = ops.scattered(_on_replica(chunk, x_BLD), cut)
        if kind.place != "last":
            x_BLD = _on_replica(chunk, x_BLD) if cut is None else cut.parts(x_BLD)
    assert x_BLD is not None
    return (x_BLD if chunk.is_last else ops.from_parts(x_BLD, kernels), weighted), values


def _positions(chunk: Chunk, of_tokens: Batch) -> tuple[jax.Array, jax.Array]:
    """The positions of tokens in attention, and those whose vectors the embedding learns."""
    kernels, sequences = chunk.array_functions, chunk.microbatch_size // chunk.num_replicas
    position_L = ops.token_positions(sequences, chunk.model.context_length, kernels)
    learned_L = position_L  # attention has no others than its tokens'
    if chunk.restarts_positions:
        in_documents_BL = ops.positions_in_documents(of_tokens["segment_BL"])
        learned_L = ops.to_parts(in_documents_BL, kernels)
    if not chunk.sends_rows and (chunk.restarts_positions or kernels.context > 1):
        learned_L = _on_replica(chunk, learned_L)
    if kernels.context > 1:
        position_L = _on_replica(chunk, position_L)
    return position_L, learned_L


def _parameters(chunk: Chunk, layer: str, params: Tree, fixed: Tree) -> tuple[Tree, Tree]:
    """The parameters that a layer reads, and what is stated of them."""
    own = merged(params[layer], fixed.get(layer, {}))
    of_own = merged(chunk.statements[layer], coded_weights.of_layer(chunk.held[layer]))
    if TABLE in chunk.kinds[layer].borrows:
        of_embed = merged(params[EMBED], fixed.get(EMBED, {}))
        own = {**own, TABLE: of_embed["token_VD"]}
        of_own = {**of_own, TABLE: chunk.statements[EMBED]["token_VD"]}
    return own, of_own


def _function(chunk: Chunk, kind: Kind, statements: Tree, policy: str) -> Callable:
    """The function that computes the layers of a kind with a policy of checkpointing here.

    JAX traces, differentiates and lowers it once, however many layers call it. XLA puts it in the
    place of each call, so it compiles what it would compile without.
    """
    sends_rows = chunk.sends_rows and kind.place == "first"
    run = _gathered(chunk, statements, function_of(kind), policy, sends_rows=sends_rows)
    if kind.place != "middle":
        return run
    # A backward is divided by its equations: there each layer has its own.
    return jax.jit(run, inline=chunk.plan.order.splits_backward)


def _gathered(
    chunk: Chunk, statements: Tree, run: Callable, policy: str, *, sends_rows: bool
) -> Callable:
    """`run(params, *args)` as a function of (params, params, *args), each device with a part.

    The values are those of the first parameters, which are the arrays that residuals leave out, and
    the gradient is that of the second (`_reduced_first`). The function gathers the parameters, and
    gathers them again for its gradient: nothing of their size is kept in between. The gradient of
    the parameters is summed over the devices, and cut as the parameters are. Arrays that the policy
    of checkpointing does not save are computed again. With `sends_rows`, tables stay cut.
    """
    run = checkpointed(run, policy)
    if policy == "none" and chunk.num_parts == 1:
        return lambda _, params, *args: run(params, *args)

    def cast(dtype: str) -> Callable[[Tree], Tree]:
        # What a step changes without a gradient is float32, and codes have dtypes of their own.
        cast = lambda own, x: x if own.changes else x.astype(dtype)
        return functools.partial(jax.tree.map, cast, statements)

    narrow, widen = cast(chunk.compute_dtype), cast("float32")
    constrain = functools.partial(_constrain, chunk, statements)

    def shard_spec(parameter: Parameter) -> P:
        return sharding.shard_spec(parameter.dims, chunk.mesh.shape)

    def computed_spec(parameter: Parameter) -> P:
        if sends_rows and parameter.use == "looked_up":
            return shard_spec(parameter)
        return sharding.computed_spec(parameter.dims, chunk.mesh.shape)

    gather = lambda params: widen(constrain(params, computed_spec))

    @jax.custom_vjp
    def gathered(params: Tree, _: Tree, *args: Any) -> Tree:
        return run(gather(narrow(params)), *args)

    def forward(params: Tree, _: Tree, *args: Any) -> tuple[Tree, tuple[Tree, Residuals]]:
        whole = gather(narrow(params))
        out, pullback = jax.vjp(run, whole, *args)
        return out, (params, Residuals.of(pullback, whole))

    def backward(residuals: tuple[Tree, Residuals], dy: Tree) -> tuple:
        params, saved = residuals
        # Or XLA could keep what `forward` gathered or computed, where both are in one program.
        # What is kept without checkpointing need not wait: the gradient of a chunked head is part
        # of it, and its reduction has the next layer to hide behind.
        # The barrier is around parameters in the compute dtype: XLA copies the arrays behind one.
        again = (narrow(params), saved if policy != "none" else (), dy)
        params, again, dy = jax.lax.optimization_barrier(again)
        dparams, *dargs = (again or saved).restore(gather(params))(dy)
        return None, constrain(dparams, shard_spec), *dargs

    gathered.defvjp(forward, backward)
    return gathered


@jax.custom_vjp
def _reduced_first(x_BLD: jax.Array, later: Tree) -> tuple[jax.Array, Tree]:
    """The input of a layer and the parameters of the next one, as they are.

    Their gradients are there together: a backward goes on to the layer before this one when the
    next one's gradients are reduced, which this layer's products hide.
    """
    return x_BLD, later


_reduced_first.defvjp(
    lambda x_BLD, later: ((x_BLD, later), None),
    lambda _, gradients: jax.lax.optimization_barrier(gradients),
)


def _reduces_in_order(chunk: Chunk) -> bool:
    """Whether the gradients of layers are reduced one layer after the other.

    Otherwise XLA puts products of weights off, to hide collectives of other layers behind them. It
    then holds the inputs of these products, and whole gradients in float32, of many layers. A split
    backward puts these products off on purpose.
    """
    if chunk.plan.order.splits_backward:
        return False
    computes_again = "full" in map(chunk.plan.policy_of, chunk.kinds)
    return chunk.num_parts > 1 or (computes_again and chunk.mesh.shape[Axis.TENSOR] > 1)


def _constrain(
    chunk: Chunk, statements: Tree, params: Tree, spec: Callable[[Parameter], P]
) -> Tree:
    if chunk.num_parts == 1:
        return params

    def constrain(parameter: Parameter, x: jax.Array) -> jax.Array:
        where = NamedSharding(chunk.mesh, spec(parameter))
        return jax.lax.with_sharding_constraint(x, where)

    return jax.tree.map(constrain, statements, params)


def _on_replica(chunk: Chunk, x_BLD: jax.Array) -> jax.Array:
    """The sequences of a replica stay cut over `fsdp`, `context` and `expert`."""
    if chunk.num_parts == 1:
        return x_BLD
    where = NamedSharding(chunk.mesh, sharding.part_spec(chunk.mesh.shape))
    return jax.lax.with_sharding_constraint(x_BLD, where)


def _everywhere(chunk: Chunk, arrays: Tree) -> Tree:
    """Arrays of which each device of a replica has the whole."""
    return jax.lax.with_sharding_constraint(arrays, NamedSharding(chunk.mesh, P()))


# Inside a program, replicas have no dim R: XLA would copy arrays for a dim of size 1, and transpose
# weights. Only between programs are the arrays of replicas stacked along R.


def on_replicas(chunk: Chunk, function: Callable) -> Callable:
    """`function(shared, *args)` of what one replica has, on each; it gives no scalars.

    Arrays are cut, and results joined, along their first dim. All replicas have the whole of
    `shared`, and scalars.
    """
    if chunk.num_replicas == 1:
        return function
    data = Axis.DATA.value

    def run(shared: Tree, *args: Any) -> Any:
        if chunk.mesh.size == chunk.num_replicas:
            specs = jax.tree.map(lambda x: P(data) if jnp.ndim(x) else P(), args)
            whole = jax.tree.map(lambda _: P(), shared)
            return chunk.on_shards(function, (whole, *specs), P(data))(shared, *args)
        # XLA aborts where it has to cut a lookup over other axes inside of that.
        dims = jax.tree.map(lambda x: 0 if jnp.ndim(x) else None, args)
        by_replica = lambda x: x.reshape(chunk.num_replicas, -1, *x.shape[1:]) if jnp.ndim(x) else x
        mapped = jax.vmap(function, in_axes=(None, *dims), spmd_axis_name=data)
        results = mapped(shared, *jax.tree.map(by_replica, args))
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), results)

    return run


def stack(chunk: Chunk, tree: Tree) -> Tree:
    """The arrays of a replica with a dim R, along which they are joined; a single one has none."""
    return tree if chunk.num_replicas == 1 else jax.tree.map(lambda x: x[None], tree)


def unstack(chunk: Chunk, tree: Tree) -> Tree:
    """The opposite of `stack`."""
    return tree if chunk.num_replicas == 1 else jax.tree.map(lambda x: x[0], tree)


def forward(
    chunk: Chunk, fixed: Tree, replicas: Tree, x_BLD: jax.Array | None, batch: Batch
) -> tuple[jax.Array, Values, Residuals]:
    """One microbatch: the boundary, or the losses; auxiliary values; what backward needs.

    Losses and values are [R]: a replica's loss is the sum over its tokens that count. They are not
    added over `data` here: replicas would wait for each other in every microbatch.

    Args:
      chunk: the chunk.
      fixed: what does not train.
      replicas: the parameters, from `Chunk.gather`.
      x_BLD: the boundary that comes in; None on the first stage.
      batch: what the stage reads of the microbatch.
    """
    if "sequence" in batch:  # the number of the first one: each replica has some of them
        first, rest = batch["sequence"], {k: x for k, x in batch.items() if k != "sequence"}
        sequence_B = jnp.where(first < 0, -1, first + jnp.arange(chunk.microbatch_size))
        batch = {**rest, "sequence_B": sequence_B}
    return on_replicas(chunk, functools.partial(_forward, chunk))(fixed, replicas, x_BLD, batch)


def _forward(
    chunk: Chunk, fixed: Tree, replica: Tree, x_BLD: jax.Array | None, batch: Batch
) -> tuple[jax.Array, Values, Residuals]:
    """On one replica, [1, ...]."""
    params, wide = coded_weights.widened(replica, fixed)
    if chunk.is_first:
        run = lambda p: apply(chunk, p, wide, None, batch)
        (out, _), pullback, values = jax.vjp(run, params, has_aux=True)
    else:
        run_on = lambda p, x: apply(chunk, p, wide, x, batch)
        (out, _), pullback, values = jax.vjp(run_on, params, x_BLD, has_aux=True)
    saved = stack(chunk, Residuals.of(pullback, (params, wide)))
    values = jax.tree.map(lambda x: x[None], values)
    return (out[None] if chunk.is_last else out), values, saved


def backward(
    chunk: Chunk,
    fixed: Tree,
    replicas: Tree,
    saved: Residuals,
    gradients: Tree,
    dy: jax.Array,
    weight: jax.Array | None,
) -> tuple[Tree, jax.Array]:
    """Adds the microbatch's share to the gradients; also the gradient of the stage's input.

    Args:
      chunk: the chunk.
      fixed: what does not train, as `forward` read it.
      replicas: the parameters, as `forward` read them.
      saved: the residuals of the same microbatch.
      gradients: the sums so far.
      dy: the gradient of the step's loss with respect to the result of `forward`: dy_BLD. On the
        last stage, the weight of a token: one over the number of tokens that count in the step.
      weight: of a token, where layers here have auxiliary losses; else None.

    Returns:
      The gradients, and dx_BLD. The first stage has no input to differentiate: a zero.
    """
    run = on_replicas(chunk, functools.partial(_backward, chunk))
    gradients, dx = run(fixed, replicas, saved, gradients, dy, weight)
    return gradients, dx[0] if dx else jnp.zeros(())


def _backward(
    chunk: Chunk,
    fixed: Tree,
    replica: Tree,
    saved: Residuals,
    gradients: Tree,
    *cotangents: jax.Array | None,
) -> tuple[Tree, list[jax.Array]]:
    """On one replica, [1, ...]; the second result is empty on the first stage."""
    new, dx = replica_gradients(chunk, fixed, replica, saved, *cotangents)
    return accumulate(gradients, new), dx


def replica_gradients(
    chunk: Chunk, fixed: Tree, replica: Tree, saved: Residuals, *cotangents: jax.Array | None
) -> tuple[Tree, list[jax.Array]]:
    """The microbatch's share, float32, of one replica; the gradient of its input, if any.

    Args:
      chunk: the chunk.
      fixed: what does not train, as `forward` read it.
      replica: the parameters, [1, ...].
      saved: the residuals of the same microbatch.
      cotangents: `dy` and `weight` of `backward`.
    """
    params = coded_weights.widened(replica, fixed)
    new, *dx = unstack(chunk, saved).restore(params)(cotangents)
    return new, dx


def accumulate(gradients: Tree, new: Tree) -> Tree:
    """Adds a microbatch's share to the gradients of one replica, [1, ...].

    In place: a product or an embedding's sum is added to what is there, without a place of its
    own, where XLA sees both in the same shape.
    """
    return jax.tree.map(lambda total, g: (total[0] + g)[None], gradients, new)


# The first forward of a step may gather, and the last backward reduce, in one program: XLA can then
# send one layer while it computes another.


def first_forward(
    chunk: Chunk, fixed: Tree, params: Tree, x_BLD: jax.Array | None, batch: Batch
) -> tuple[Tree, jax.Array, Values, Residuals]:
    """`gather` and `forward`: the replicas, and what `forward` returns.

    Args:
      chunk: the chunk.
      fixed: what does not train.
      params: masters.
      x_BLD: the boundary that comes in; None on the first stage.
      batch: what the stage reads of the microbatch.
    """
    replicas = chunk.gather(params)
    return replicas, *forward(chunk, fixed, replicas, x_BLD, batch)


def reducing(chunk: Chunk, backward: Callable[..., tuple]) -> Callable[..., tuple]:
    """`backward` and `reduce`: the gradients, its first result, come out reduced."""

    def last(*args: Any) -> tuple:
        gradients, *rest = backward(*args)
        return chunk.reduce(gradients), *rest

    return last
