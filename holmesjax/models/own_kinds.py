"""The kinds of the layers of a model of your own: what the planner wants to know of them, traced.

`apply` and `draw` are the functions that these kinds name, which the runtime calls.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from holmesjax.config import TABLE, ModelConfig
from holmesjax.errors import ConfigError, HolmesError
from holmesjax.layer_specs.kind import PARTS_DIM, BatchArray, Drawn, Kind, Parameter
from holmesjax.layer_specs.model_layers import EMBED, HEAD, cached
from holmesjax.models import layer_tracing
from holmesjax.models.jaxprs import roots
from holmesjax.models.kept_parameters import without_weights
from holmesjax.models.layer import Auxiliary, Context, Params, layer_key, named_as
from holmesjax.models.own_model import Layer, Random, layers_of, wrong_model

SEQUENCES = 2  # of the shapes on which layers are traced
WHOLE = "W"  # a dim that no mesh axis but `data` cuts
LETTERS = {None: WHOLE, "fsdp": PARTS_DIM, "tensor": "F"}  # of the mesh axes that cut a dim


@cached(64)
def kinds_by_layer(model: ModelConfig) -> dict[str, Kind]:
    """The kinds of the layers by their names, traced. Equal layers share one kind.

    Raises:
      ConfigError: a layer does not give what the next one reads, or cannot be traced.
    """
    layers, found, by_layer = layers_of(model), dict[str, Kind](), dict[Any, Kind]()
    taken: dict[str, int] = {}
    boundary: jax.ShapeDtypeStruct | None = None
    for name, layer in layers.items():
        key = (name in (EMBED, HEAD) and name, layer)
        if key not in by_layer:
            taken[layer.label] = number = taken.get(layer.label, 0) + 1
            label = layer.label if number == 1 else f"{layer.label}_{number}"
            first = found.get(EMBED)
            by_layer[key], boundary = _kind(model, name, layer, label, boundary, first)
        found[name] = by_layer[key]
    return found


@cached(256)
def _layer_of(model: ModelConfig, kind: Kind) -> Layer:
    """The layer of a kind, the first of those that share it."""
    name = next(
        name for name, layer_kind in kinds_by_layer(model).items() if layer_kind.name == kind.name
    )
    return layers_of(model)[name]


def _kind(
    model: ModelConfig,
    name: str,
    layer: Layer,
    label: str,
    boundary: jax.ShapeDtypeStruct | None,
    first: Kind | None,
) -> tuple[Kind, jax.ShapeDtypeStruct]:
    """The kind of a layer, and what the layer hands on where the model is traced.

    Args:
      model: the settings.
      name: of the layer in the model.
      layer: the layer.
      label: the name of its kind.
      boundary: what the layer before hands on; None: it is the first.
      first: the kind of the first layer; None: it is this one.
    """
    where, is_last = f"{name} ({label})", name == HEAD
    is_middle = boundary is not None and not is_last
    reads = _reads(model, name, layer, where)
    arrays = [jax.ShapeDtypeStruct((SEQUENCES, *array.shape), array.dtype) for array in reads]
    inputs = [*([] if boundary is None else [boundary]), *arrays]
    of_apply = _inputs_of_apply(layer, inputs, len(reads))
    params, parameters = _parameters(where, layer, of_apply, is_first=boundary is None)
    statements = {parameter.path: parameter for parameter in parameters}
    borrows = (TABLE,) if is_last and model.tied_embeddings else ()
    if borrows:
        assert first is not None, "a model begins with another layer than its last"
        statements[TABLE,] = table = _table(model, first)
        params = {**params, TABLE: jax.ShapeDtypeStruct(table.shape, jnp.float32)}
    run = _computing(layer, layer_tracing.TRACED, len(reads) if is_last else None)
    narrow = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, layer_tracing.TRACED), params)
    paths = [_keys(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    if layer.draws:
        inputs += _random_shapes()
    with _explaining(where, "cannot be computed"):
        out = jax.eval_shape(run, narrow, *inputs)
    if not is_last:
        out = _checked_boundary(model, where, out, boundary)
    elif borrows:
        _refuse_unread_table(where, run, narrow, inputs)
    num_tokens = SEQUENCES * model.context_length
    with _explaining(where, "cannot be differentiated"):
        traced = layer_tracing.trace(
            run,
            narrow,
            [statements[path].dims for path in paths],
            inputs,
            num_tokens=num_tokens,
            is_middle=is_middle,
        )
    uses = dict(zip(paths, traced.uses, strict=True))
    kind = Kind(
        name=label,
        function=f"{__name__}:apply",
        parameters=tuple(
            dataclasses.replace(
                parameter, use=uses[parameter.path], matrix=int(is_middle and _is_matrix(parameter))
            )
            for parameter in parameters
        ),
        borrows=borrows,
        place="first" if boundary is None else "last" if is_last else "middle",
        products=traced.products,
        mixes=traced.mixes,
        moved=traced.moved,
        kept=traced.kept,
        needed=traced.needed,
        collectives=traced.collectives,
        reads=reads,
        boundary=out.shape[1:] if not is_last else (),
        draw=f"{__name__}:draw",
        draws=layer.draws,
    )
    return kind, out


def _reads(model: ModelConfig, name: str, layer: Layer, where: str) -> tuple[BatchArray, ...]:
    """The arrays of a batch that a layer reads."""
    if layer.reads is None:
        default = {EMBED: "token_BL", HEAD: "target_BL"}.get(name)
        return (BatchArray(default, (model.context_length,), "int32"),) if default else ()
    if name == EMBED and not layer.reads:
        fix = 'name what it reads: reads={"image": ((28, 28), "float32")}'
        raise wrong_model(f"has a first layer that reads nothing: {where}", "no array", fix)
    return layer.reads


def _random_shapes() -> list[jax.ShapeDtypeStruct]:
    """The shapes of the random bits of each sequence, and of `trains`."""
    bits = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    bits_Bk = jax.ShapeDtypeStruct((SEQUENCES, *bits.shape), bits.dtype)
    return [bits_Bk, jax.ShapeDtypeStruct((), jnp.bool)]


def _table(model: ModelConfig, first: Kind) -> Parameter:
    """The parameter of the first layer that a tied last layer reads, too."""
    name = TABLE.rpartition("/")[2]
    found = [parameter for parameter in first.parameters if parameter.name == name]
    if not found or len(found[0].shape) != 2:
        names = ", ".join(
            f"{parameter.name} {list(parameter.shape)}" for parameter in first.parameters
        )
        raise ConfigError(
            "model.tied_embeddings",
            f"ties the last layer to {name} of the first, a matrix that {model.module} lacks",
            found=names or "a first layer without parameters",
            fix=f"name the table {name} in what init of the first layer gives",
        )
    return found[0]


def _refuse_unread_table(
    where: str, run: Callable[..., Any], params: Params, inputs: Sequence[jax.ShapeDtypeStruct]
) -> None:
    jaxpr = jax.make_jaxpr(run)(params, *inputs).jaxpr
    paths = [path[0].key for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    [of_loss] = roots(jaxpr, [frozenset([i]) for i in range(len(jaxpr.invars))])
    if paths.index(TABLE) not in of_loss:
        raise ConfigError(
            "model.tied_embeddings",
            f"ties a last layer that does not read the table: {where}",
            found=f"no use of params[{TABLE!r}]",
            fix=f"multiply by params[{TABLE!r}].T in the last layer, or leave the setting out",
        )


def _checked_boundary(
    model: ModelConfig, where: str, out: Any, boundary: jax.ShapeDtypeStruct | None
) -> jax.ShapeDtypeStruct:
    shown = (
        ", ".join(str(getattr(leaf, "shape", leaf)) for leaf in jax.tree.leaves(out)) or "nothing"
    )
    if not isinstance(out, jax.ShapeDtypeStruct) or not out.shape or out.shape[0] != SEQUENCES:
        raise wrong_model(
            f"must give one array with a first dim for sequences in layer {where}",
            f"{shown} of {SEQUENCES} sequences",
            "return the array for the next layer, [sequences, ...]",
        )
    if boundary is not None and out.shape != boundary.shape:
        raise wrong_model(
            f"must give the shape that it takes in layer {where}: all layers hand on one shape",
            f"{list(boundary.shape[1:])} to {list(out.shape[1:])} for each sequence",
            "change the layer, or put both shapes into one layer",
        )
    numbers, wanted = out.size // SEQUENCES, model.context_length * model.width
    if numbers != wanted:
        raise wrong_model(
            f"must give model.context_length * model.width = {wanted} numbers in layer {where}",
            f"{list(out.shape[1:])}: {numbers} for each sequence",
            f"set model.width={out.shape[-1]} and model.context_length="
            f"{numbers // max(out.shape[-1], 1)}, or change the layer",
        )
    return out


def _is_matrix(parameter: Parameter) -> bool:
    """Whether it has rows and columns: which of three dims are rows, nothing says."""
    return parameter.decays and len(parameter.shape) == 2


def _parameters(
    where: str, layer: Layer, inputs: Sequence[jax.ShapeDtypeStruct], *, is_first: bool
) -> tuple[Params, tuple[Parameter, ...]]:
    """The shapes of a layer's parameters, and what is stated of them, in the order of the tree."""
    with _explaining(where, "cannot be initialised"):
        key = jax.eval_shape(jax.random.key, 0)
        params = jax.eval_shape(layer.init, key, *inputs)
    named = layer.named_axes(*inputs) if layer.named_axes else {}
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        keys = _keys(path)
        if not path or len(keys) < len(path):
            raise wrong_model(
                f"has a parameter without a name in layer {where}",
                f"{jax.tree_util.keystr(path) or 'an array'} in what init gives",
                'give parameters in dicts, such as {"up": {"kernel": array}}',
            )
        name = "/".join(keys)
        if name.count("/") >= len(keys):
            fix = "write dicts in dicts in its place"
            raise wrong_model(f"has a slash in the name of a parameter in layer {where}", name, fix)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise wrong_model(
                f"has a parameter that cannot train in layer {where}",
                f"{name} of {leaf.dtype}",
                "make it in apply, or give floating-point numbers",
            )
        found.append(
            Parameter(
                name=name,
                shape=leaf.shape,
                initial=Drawn(),
                dims=_dims(where, layer, name, leaf.shape, named),
                decays=len(leaf.shape) > 1 and not is_first and keys[-1] != "bias",
            )
        )
    return params, tuple(found)


def _keys(path: Sequence[Any]) -> tuple[str, ...]:
    """The names on a path of JAX: all of its steps, if all are keys of dicts."""
    steps = [getattr(step, "key", None) for step in path]
    return tuple(key for key in steps if isinstance(key, str))


def _dims(
    where: str,
    layer: Layer,
    name: str,
    shape: tuple[int, ...],
    named: Mapping[str, tuple[str | None, ...]],
) -> str:
    """A letter for each dim: by a rule, by the module's own names, or by the parameter's name."""
    axes = next(
        (axes_of_pattern for pattern, axes_of_pattern in layer.axes if re.search(pattern, name)),
        named.get(name),
    )
    suffix = name.rpartition("_")[2]
    if axes is None:
        is_stated = suffix.isalpha() and suffix.isupper() and len(suffix) == len(shape)
        return suffix if is_stated else WHOLE * len(shape)
    known = [axis for axis in axes if axis is not None]
    if len(axes) != len(shape) or len(set(known)) < len(known) or not set(axes) <= set(LETTERS):
        raise wrong_model(
            f"has axes that do not fit its parameter {name} in layer {where}",
            f"{tuple(axes)} for the shape {shape}",
            'give "tensor", "fsdp" or None for each dim, each axis once',
        )
    return "".join(LETTERS[axis] for axis in axes)


def _inputs_of_apply(layer: Layer, inputs: Sequence[Any], num_reads: int) -> list[Any]:
    """Returns the inputs of a layer that `apply` and `init` take; a loss takes the others."""
    return list(inputs[: len(inputs) - num_reads] if layer.loss is not None else inputs)


class _explaining:
    """Turns what a user's function raises into a message about its layer."""

    def __init__(self, where: str, problem: str):
        self._where, self._problem = where, problem

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, HolmesError):
            lines = str(error).strip().splitlines()
            fix = (
                "look at its functions and at the shapes of its inputs; the error above says where"
            )
            if isinstance(error, KeyError) and error.args == (TABLE,):
                fix = "set model.tied_embeddings=true, and read the table in the last layer alone"
            raise wrong_model(
                f"has a layer that {self._problem}: {self._where}",
                f"{type(error).__name__}: {lines[0] if lines else 'no more is said'}",
                fix,
            ) from error


# ---- what the runtime calls ----------------------------------------------------------------------


def _computing(layer: Layer, dtype: str | None, num_targets: int | None) -> Callable[..., Any]:
    """The layer of its parameters and inputs, in a compute dtype; the last gives a sum of losses.

    `num_targets` are the last inputs of a last layer, which its loss reads; None for other layers.
    Behind the inputs of a layer that draws are the random bits of each sequence, and `trains`.
    """

    def narrow(x: jax.Array) -> jax.Array:
        return x if dtype is None else x.astype(dtype)

    def run(params: Params, *inputs: jax.Array) -> Any:
        params = jax.tree.map(narrow, params)
        random: tuple[Random, ...] = ()
        if layer.draws:
            inputs, random = inputs[:-2], (Random(*inputs[-2:]),)
        if num_targets is None:
            return jax.tree.map(narrow, layer.apply(params, *inputs, *random))
        losses: Any
        if layer.loss is None:
            losses = layer.apply(params, *inputs, *random)
        else:
            of_layer = _inputs_of_apply(layer, inputs, num_targets)
            arrays = inputs[len(of_layer) :]
            outputs = layer.apply(params, *of_layer, *random)
            losses = layer.loss(jax.tree.map(lambda x: x.astype(jnp.float32), outputs), *arrays)
        return jnp.sum(jnp.asarray(losses).astype(jnp.float32))

    return run


def apply(params: Params, x: jax.Array | None, context: Context) -> tuple[jax.Array, Auxiliary]:
    """`models.layer.Function` of these layers."""
    kind = context.kind
    assert kind.reads is not None, "such a kind states what it reads"
    layer = _layer_of(context.model, kind)
    num_targets = len(kind.reads) if kind.place == "last" else None
    run = _computing(layer, context.kernels.dtype, num_targets)
    inputs = [*([] if x is None else [x]), *(context.batch[array.name] for array in kind.reads)]
    if layer.draws:
        assert context.key_Bk is not None, f"{kind.name} states that it draws"
        assert context.trains is not None, "a kind that draws knows whether it trains"
        inputs += [context.key_Bk, context.trains]
    return without_weights(run)(params, *inputs), Auxiliary()


def draw(model: ModelConfig, layer: str, seed: int, shardings: Params) -> Params:
    """The initial values of a layer: a function of the seed and of its name, whatever the plan.

    Each device draws its own part, by `jax.random` as `init` does; of parameters that `shardings`
    has alone.
    """
    own, kind = layers_of(model)[layer], kinds_by_layer(model)[layer]
    before = kinds_by_layer(model)[EMBED].boundary
    arrays = [jnp.zeros((SEQUENCES, *array.shape), array.dtype) for array in kind.reads or ()]
    is_first = kind.place == "first"
    inputs = [*([] if is_first else [jnp.zeros((SEQUENCES, *before))]), *arrays]
    inputs = _inputs_of_apply(own, inputs, len(arrays))

    def run(key: jax.Array) -> Params:
        drawn = named_as(shardings, own.init(key, *inputs))
        return jax.tree.map(lambda x: x.astype(jnp.float32), drawn)

    return jax.jit(run, out_shardings=shardings)(layer_key(seed, layer))
