"""Restores the arrays of a checkpoint, with Orbax; `writing` writes them.

A part is what one stage wrote: a flat dict of arrays. A key is the array's path in the state
(`params.block_003.up_DF`), so it names the layer and never the stage, the mesh or the cluster, and
any plan restores what another has written. `manifest` says which checkpoints are whole, but for the
arrays: each has a digest, computed where it lies before it is written, and again where it is read.
"""

import dataclasses
import functools
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from holmesjax.checkpoints import island_states
from holmesjax.checkpoints.array_keys import flatten
from holmesjax.checkpoints.manifest import Checkpoint
from holmesjax.checkpoints.reading import read_tree
from holmesjax.config import ModelConfig
from holmesjax.errors import CheckpointError
from holmesjax.layer_specs.kind import Parameter
from holmesjax.layer_specs.model_layers import layers
from holmesjax.models.layer import merged, split_trained, stated, statements
from holmesjax.optimizers.optimizer import State
from holmesjax.plan.outer_rule import kept_by, outer_step, owner_of
from holmesjax.runtime import spikes
from holmesjax.runtime.chunk import Chunk, ChunkState, Dtypes, kept_leaves
from holmesjax.runtime.expert_placement import with_places
from holmesjax.runtime.outer_state import IslandArrays, Outer
from holmesjax.runtime.weight_average import Average

MAX_SHOWN = 3  # arrays that differ, in a message


def saved_name(chunk: Chunk, key: str) -> str:
    """The name in a checkpoint of an array of a chunk's state.

    With islands, `params` are the global weights, which their owners have; all else but what does
    not train is of one island.
    """
    of_all = ("outer.momentum.", "outer.before.", "outer.rounds.")
    if chunk.island is None or key.startswith(of_all):
        return key
    if key.startswith("outer.weights."):
        return key.replace("outer.weights.", "params.", 1)
    if key.startswith("fixed.") and chunk.island == 0:
        return key
    return f"island_{chunk.island}.{key}"


def restore(checkpoint: Checkpoint, chunks: Sequence[Chunk]) -> list[ChunkState]:
    """Returns the states of all stages, whichever plan wrote them. Call `manifest.verify` first.

    A state in other dtypes, or of another format, is read as it was written, and then converted to
    that of the stage. Without the state of an optimizer, as for imported weights, a new one begins.

    Raises:
      CheckpointError: the checkpoint has other arrays than the model; nothing is read.
      DamagedError: an array cannot be read, or is not what was written.
    """
    model = chunks[0].model
    optimizer = chunks[0].optimizer.as_written(_optimizer_settings(checkpoint))
    params, fixed = _param_shapes(model, _written(checkpoint))
    wide = jax.tree.map(lambda x: x.update(dtype="float32"), params)
    opt_state = jax.eval_shape(optimizer.init, wide) if _has_optimizer(checkpoint) else {}
    is_averaged = chunks[0].ema_decay is not None and has_average(checkpoint)
    average = _average_shapes(wide) if is_averaged else None
    remembered = chunks[0].spike_rule if _remembers(checkpoint, chunks[0]) else None
    recent = remembered and jax.eval_shape(lambda: spikes.none_yet(remembered.window))
    _check_arrays(checkpoint, ChunkState(params, opt_state, fixed, average, recent))
    if island_states.written(checkpoint):
        whole = jax.eval_shape(optimizer.init, wide)
        _check_islands(checkpoint, ChunkState(params, whole, fixed))
    bare = [dataclasses.replace(chunk, places_experts=False) for chunk in chunks]
    states = [_restore_state(checkpoint, chunk) for chunk in bare]
    return [with_places(*pair) for pair in zip(chunks, states, strict=True)]


def _has_optimizer(checkpoint: Checkpoint) -> bool:
    """Whether it has the state of an optimizer; a checkpoint of imported weights has none."""
    return any(key.startswith("opt_state.") for key in checkpoint.manifest["arrays"])


def _optimizer_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """The argument of `Optimizer.as_written`; earlier versions of islands had no `missed`."""
    jumps = any(key.endswith("opt_state.missed") for key in checkpoint.manifest["arrays"])
    return {**checkpoint.settings["optimizer"], "jumps": jumps}


def has_average(checkpoint: Checkpoint) -> bool:
    """Whether it has an average of the weights."""
    return any(key.startswith("average.") for key in checkpoint.manifest["arrays"])


def _remembers(checkpoint: Checkpoint, chunk: Chunk) -> bool:
    """Whether it has as many recent steps as the stage's rule for spikes remembers."""
    saved = checkpoint.manifest["arrays"].get("recent.losses")
    rule = chunk.spike_rule
    return saved is not None and rule is not None and saved["shape"] == [rule.window]


def _average_shapes(params: Any) -> Average:
    return Average(jax.ShapeDtypeStruct((), "int32"), params)


def _check_islands(checkpoint: Checkpoint, state: ChunkState) -> None:
    """Raises as `_check_arrays` unless all islands that have written it have such a state."""
    kept = kept_by(island_states.rule(checkpoint))
    owned = {name: state.params for name in _owned_arrays(checkpoint)}
    wanted: dict[str, Any] = {"outer": owned} if owned else {}
    of_island = Outer({}, None, own=IslandArrays(**dict.fromkeys(kept.own, state.params)))
    for k, _ in enumerate(island_states.written(checkpoint)):
        fixed = state.fixed if k else {}
        wanted[f"island_{k}"] = ChunkState(state.params, state.opt_state, fixed, outer=of_island)
    _check_arrays(checkpoint, wanted)


def _rounds(checkpoint: Checkpoint, chunk: Chunk) -> Any:
    """How far an island was that is a job of its own, by layer; none of other islands."""
    arrays = checkpoint.manifest["arrays"]
    whole = jax.sharding.NamedSharding(chunk.mesh, jax.sharding.PartitionSpec())
    shape = jax.ShapeDtypeStruct((4,), "int32", sharding=whole)
    names = [layer for layer in chunk.layers if f"outer.rounds.{layer}" in arrays]
    wanted = {"outer": {"rounds": dict.fromkeys(names, shape)}}
    return read_tree(checkpoint, wanted)["outer"]["rounds"]


def _owned_arrays(checkpoint: Checkpoint) -> list[str]:
    """The names of what owners keep besides the global weights; a mailbox keeps it itself."""
    if any(key.startswith("outer.rounds.") for key in checkpoint.manifest["arrays"]):
        return []
    owned = kept_by(island_states.rule(checkpoint)).owned
    return [name for name in owned if name != "weights"]


def _restore_of_islands(checkpoint: Checkpoint, chunk: Chunk) -> ChunkState:
    """The state of a chunk from what islands have written, by the rules of `island_states`.

    An island of the same set goes on exactly. Others begin with the global weights, for which the
    old islands meet once more where they were between two meetings.
    """
    shapes, old = _writer(checkpoint, chunk).state_shapes, island_states.written(checkpoint)
    own = chunk.islands[chunk.island] if chunk.island is not None else ()
    found = island_states.sources(old, own)
    fixed = read_tree(checkpoint, {"fixed": shapes.fixed})["fixed"]
    opt_state = _mean_moments(checkpoint, chunk, shapes.opt_state, found)
    if island_states.go_on_exactly(checkpoint, chunk.islands, chunk.outer, chunk.island_shares):
        name_of = lambda key: f"island_{found[0]}.{key}"
        params = read_tree(checkpoint, {"params": shapes.params}, name_of)["params"]
        outer = _kept_outer(checkpoint, chunk, shapes.params, name_of)
    else:
        weights, momentum = _met_once_more(checkpoint, shapes.params)
        params = jax.tree.map(jnp.copy, weights)
        has_momentum = "momentum" in kept_by(chunk.outer).owned
        outer = Outer(_owned(chunk, weights), _owned(chunk, momentum) if has_momentum else None)
    params, fixed = (
        _cast(arrays, like)
        for arrays, like in ((params, chunk.state_shapes.params), (fixed, chunk.state_shapes.fixed))
    )
    state = ChunkState(params, opt_state, fixed, chunk.init_average(params), chunk.init_recent())
    return state if chunk.island is None else dataclasses.replace(state, outer=outer)


def _owned(chunk: Chunk, tree: Any) -> Any:
    """The parameters of a tree that a chunk's island owns; none where it is of no island."""
    owner = owner_of(chunk.model, max(len(chunk.islands), 1))
    return kept_leaves(tree, lambda name: owner[name] == chunk.island)


def _global(checkpoint: Checkpoint, shapes: Any) -> tuple[Any, Any]:
    """The global weights and the momentum of meetings; zeros where pairs have met."""
    weights = read_tree(checkpoint, {"params": shapes})["params"]
    if "momentum" in _owned_arrays(checkpoint):
        return weights, _restored_outer(checkpoint, "momentum", shapes)
    return weights, jax.tree.map(lambda x: jnp.zeros_like(x, device=x.sharding), weights)


def _restored_outer(checkpoint: Checkpoint, what: str, shapes: Any) -> Any:
    return read_tree(checkpoint, {"outer": {what: shapes}})["outer"][what]


def _kept_outer(
    checkpoint: Checkpoint, chunk: Chunk, shapes: Any, name_of: Callable[[str], str]
) -> Outer:
    """The state of meetings of an island of the same rule; `name_of` names an array of its own."""
    kept, owned = kept_by(chunk.outer), _owned(chunk, shapes)
    weights = read_tree(checkpoint, {"params": owned})["params"]
    found = {name: _restored_outer(checkpoint, name, owned) for name in _owned_arrays(checkpoint)}
    rounds = _rounds(checkpoint, chunk)
    outer = Outer(weights, found.get("momentum"), found.get("before"), rounds=rounds)
    if not kept.own:
        return outer
    own = {"outer": {"own": dict.fromkeys(kept.own, shapes)}}
    own_arrays = read_tree(checkpoint, own, name_of)["outer"]["own"]
    return dataclasses.replace(outer, own=IslandArrays(**own_arrays))


def _met_once_more(checkpoint: Checkpoint, shapes: Any) -> tuple[Any, Any]:
    """The global weights and the momentum, after a meeting where the islands were between two.

    Only the rule of DiLoCo takes a step then. Of pairs it is the mean of the islands. The global
    weights of late rules have what islands had sent, and get the mean of what they learned since.
    """
    weights, momentum = _global(checkpoint, shapes)
    if not island_states.is_between_meetings(checkpoint):
        return weights, momentum
    rule, shares = island_states.rule(checkpoint), island_states.shares(checkpoint)
    count = sum(shares)

    def total(what: str) -> Any:
        """The sum over islands of arrays that each has of all parameters, times their shares."""
        name_of = lambda k: lambda key: f"island_{k}.{key}"
        read = lambda k: read_tree(checkpoint, {what: shapes}, name_of(k))[what]
        times = lambda k: jax.tree.map(lambda x: shares[k] * x, read(k))
        parts = map(times, range(len(shares)))
        return functools.reduce(functools.partial(jax.tree.map, jnp.add), parts)

    trained = total("params")
    if rule.is_late:
        if rule.rule == "co2":  # islands have begun with these
            begun = jax.tree.map(lambda x: count * x, _restored_outer(checkpoint, "before", shapes))
        else:
            begun = total("outer.own.start")
        add = lambda weights, sum_of, begun: weights + (sum_of - begun) / count
        return jax.tree.map(add, weights, trained, begun), momentum
    where = jax.tree.map(lambda x: x.sharding, (shapes, shapes))

    def meet(total: Any, weights: Any, momentum: Any) -> tuple[Any, Any]:
        leaves, form = jax.tree.flatten(total)
        both = zip(leaves, jax.tree.leaves(weights), jax.tree.leaves(momentum), strict=True)
        steps = [
            (leaf / count, m) if rule.has_pairs else outer_step(rule, [leaf / count], before, m)
            for leaf, before, m in both
        ]
        one, two = zip(*steps, strict=True) if steps else ((), ())
        return jax.tree.unflatten(form, one), jax.tree.unflatten(form, two)

    return jax.jit(meet, out_shardings=where)(trained, weights, momentum)


def _mean_moments(
    checkpoint: Checkpoint, chunk: Chunk, shapes: State, islands: Sequence[int]
) -> State:
    """The state of the optimizer of an island, or the mean of several, as this run keeps it.

    A mean is taken in float32. Counts of updates are the largest, since an island leaves steps out.
    """
    settings, own = _optimizer_settings(checkpoint), chunk.optimizer
    written = own.as_written(settings)
    read = lambda k: read_tree(checkpoint, {"opt_state": shapes}, lambda key: f"island_{k}.{key}")[
        "opt_state"
    ]
    where = jax.tree.map(lambda x: x.sharding, chunk.state_shapes.opt_state)
    adopted = lambda state: jax.jit(own.adopt, out_shardings=where)(state)
    if len(islands) == 1:
        return read(islands[0]) if written == own else adopted(read(islands[0]))
    wide = own.as_written({**settings, "moments": "float32"})
    widened = jax.jit(wide.adopt)
    total = widened(read(islands[0]))
    is_count = lambda x: jnp.issubdtype(x.dtype, jnp.integer)
    for k in islands[1:]:
        add = lambda a, b: jnp.maximum(a, b) if is_count(a) else a + b
        total = jax.tree.map(add, total, widened(read(k)))
    mean: State = jax.tree.map(lambda x: x if is_count(x) else x / len(islands), total)
    return adopted(mean)


def parts_of(checkpoint: Checkpoint, chunks: Sequence[Chunk]) -> set[str]:
    """The names of the parts that `restore` reads for these stages, as far as they are known."""
    known = checkpoint.manifest["arrays"]
    keys = {key for chunk in chunks for key in flatten(_writer(checkpoint, chunk).state_shapes)}
    for k, _ in enumerate(island_states.written(checkpoint)):
        keys |= {f"island_{k}.{key}" for key in keys if not key.startswith("island_")}
    return {known[key]["part"] for key in keys & known.keys()}


def _writer(checkpoint: Checkpoint, chunk: Chunk) -> Chunk:
    """The stage, with a state in the form in which the checkpoint has it."""
    dtypes = _written(checkpoint)
    return dataclasses.replace(
        chunk,
        optimizer=chunk.optimizer.as_written(_optimizer_settings(checkpoint)),
        param_dtype=dtypes.trained,
        compute_dtype=dtypes.untrained,
        ema_decay=chunk.ema_decay if has_average(checkpoint) else None,
        spike_rule=chunk.spike_rule if _remembers(checkpoint, chunk) else None,
    )


def _restore_state(checkpoint: Checkpoint, chunk: Chunk) -> ChunkState:
    if island_states.written(checkpoint):
        return _restore_of_islands(checkpoint, chunk)
    writer = _writer(checkpoint, chunk)
    written = writer.optimizer
    shapes, own = writer.state_shapes, chunk.state_shapes
    if not _has_optimizer(checkpoint):
        found = read_tree(checkpoint, {"params": shapes.params, "fixed": shapes.fixed})
        params, fixed = _cast(found["params"], own.params), _cast(found["fixed"], own.fixed)
        begun = chunk.init_optimizer(params), fixed, chunk.init_average(params)
        return ChunkState(params, *begun, chunk.init_recent())
    state: ChunkState = read_tree(checkpoint, shapes)
    params, fixed = _cast(state.params, own.params), _cast(state.fixed, own.fixed)
    opt_state, average = state.opt_state, state.average or chunk.init_average(params)
    if written != chunk.optimizer:
        shardings = jax.tree.map(lambda x: x.sharding, own.opt_state)
        opt_state = jax.jit(chunk.optimizer.adopt, out_shardings=shardings)(opt_state)
    recent = state.recent or chunk.init_recent()
    return ChunkState(params, opt_state, fixed, average, recent)


def _cast(arrays: Any, shapes: Any) -> Any:
    """Returns the arrays in the dtypes of `shapes`, rounded to the nearest number."""

    def cast(x: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
        if x.dtype == like.dtype:
            return x
        found: jax.Array = jax.jit(lambda x: x.astype(like.dtype), out_shardings=like.sharding)(x)
        return found

    return jax.tree.map(cast, arrays, shapes)


# The sharding of a layer's parameter, by the name of the layer.
Where = Callable[[str, Parameter], jax.sharding.Sharding | None]


def restore_params(
    checkpoint: Checkpoint, model: ModelConfig, where: Where | None = None, *, ema: bool = False
) -> Any:
    """The parameters of all layers; on the first device, or as `restore_layers` takes it."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    where = where or (lambda layer, parameter: here)
    return dict(restore_layers(checkpoint, model, where, ema=ema))


def restore_layers(
    checkpoint: Checkpoint,
    model: ModelConfig,
    where: Where | None = None,
    *,
    ema: bool = False,
    only: Container[str] | None = None,
) -> Iterator[tuple[str, Any]]:
    """The parameters of one layer after the other. Verify first; raises as `restore`, at once.

    Args:
      checkpoint: which has them.
      model: the model's settings.
      where: the sharding of a layer's parameter. None: it is NumPy's, which is in memory once.
      ema: whether what trains is read of the average of the weights.
      only: the layers that are read; None: all.
    """
    if ema and not has_average(checkpoint):
        raise CheckpointError(
            str(checkpoint.path),
            "has no average of the weights",
            found="a run without optimizer.ema_decay",
            fix="leave --ema out, or train with optimizer.ema_decay",
        )
    sharding_of = where or (lambda layer, parameter: None)
    written = _written(checkpoint)
    both = _param_shapes(model, written._replace(trained="float32") if ema else written)
    parameter_at = functools.partial(stated, statements(model))
    put = lambda path, x: x.update(sharding=sharding_of(path[0].key, parameter_at(path)))
    trained, fixed = (jax.tree_util.tree_map_with_path(put, tree) for tree in both)
    of_trained = {"average": _average_shapes(trained)} if ema else {"params": trained}
    _check_arrays(checkpoint, {**of_trained, "fixed": fixed})

    def restored(layer: str) -> Any:
        own = {"fixed": {layer: fixed[layer]}} if layer in fixed else {"fixed": {}}
        here = {layer: trained[layer]}
        wanted = {"average": {"weights": here}} if ema else {"params": here}
        return _restore_layer(checkpoint, layer, {**wanted, **own})

    # What is handed on is not kept here.
    return ((name, restored(name)) for name in layers(model) if only is None or name in only)


def _restore_layer(checkpoint: Checkpoint, layer: str, wanted: dict[str, Any]) -> Any:
    found = read_tree(checkpoint, wanted)
    params = found["average"]["weights"] if "average" in found else found["params"]
    return merged(params[layer], found["fixed"].get(layer, {}))


def _written(checkpoint: Checkpoint) -> Dtypes:
    """The dtypes in which a checkpoint has its parameters."""
    train = checkpoint.settings["train"]
    return Dtypes(train.get("param_dtype", "float32"), train["compute_dtype"])


def _param_shapes(model: ModelConfig, dtypes: Dtypes) -> tuple[dict, dict]:
    """The shapes of the parameters that train, and of those that do not."""
    shape = lambda own: jax.ShapeDtypeStruct(own.shape, dtypes.of(own))
    trained, fixed = split_trained(statements(model))
    return jax.tree.map(shape, trained), jax.tree.map(shape, fixed)


def _check_arrays(checkpoint: Checkpoint, shapes: Any) -> None:
    """Raises unless it holds the arrays of a tree of the whole model, under the same roots."""
    wanted = {key: _show(str(x.dtype), x.shape) for key, x in flatten(shapes).items()}
    roots = {key.partition(".")[0] for key in wanted}
    saved = {
        key: _show(array["dtype"], array["shape"])
        for key, array in checkpoint.manifest["arrays"].items()
        if key.partition(".")[0] in roots
    }
    differ = [key for key in {**wanted, **saved} if saved.get(key) != wanted.get(key)]
    if not differ:
        return
    first = [
        f"{key} is {saved.get(key, 'missing')} (expected: {wanted.get(key, 'no such array')})"
        for key in differ[:MAX_SHOWN]
    ]
    if len(differ) > MAX_SHOWN:
        first.append(f"and {len(differ) - MAX_SHOWN} more")
    raise CheckpointError(
        str(checkpoint.path),
        f"does not hold the arrays of the model: {len(differ)} of {len({*wanted, *saved})} differ",
        found=", ".join(first),
        fix="use the version of HolmesJAX that wrote it, or another run.dir",
    )


def _show(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"
