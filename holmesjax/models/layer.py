"""A layer as arrays: the parameters that its kind states, and the function that computes it.

The function of a kind has the form `apply(params, x, context) -> (x, auxiliary)`. It is written for
one device; `sharding` spreads it over a mesh. The first layer takes None and returns the residual
stream; the last returns the loss of its tokens, summed, or logits where there are no targets.
"""

import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from holmesjax.config import ModelConfig
from holmesjax.hugging_face import folder as hugging_face, peft
from holmesjax.layer_specs.array_boxes import Box, shape_of
from holmesjax.layer_specs.kind import Constant, Drawn, Kind, Parameter
from holmesjax.layer_specs.model_layers import cached, import_object, layers
from holmesjax.models import initial_values, ops
from holmesjax.models.key_cache import Cache

Params = Any  # a nested dict of arrays


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "position_L",
        "token_BL",
        "target_BL",
        "segment_BL",
        "batch",
        "cache",
        "key_Bk",
        "trains",
    ],
    meta_fields=["model", "kind", "kernels"],
)
@dataclass(frozen=True, kw_only=True)
class Context:
    """The inputs of a layer besides its parameters and the residual stream."""

    model: ModelConfig
    kind: Kind
    kernels: ops.Kernels = ops.DEFAULT  # who computes the array functions, and on which mesh
    position_L: jax.Array  # of tokens: [L], or [B, L] where not all are the same
    token_BL: jax.Array | None = None  # of the first layer
    target_BL: jax.Array | None = None  # of the last layer; below 0: the token does not count
    segment_BL: jax.Array | None = None  # the document of each token; None: one a sequence
    batch: dict[str, jax.Array] = field(default_factory=dict)  # what the kind states that it reads
    cache: Cache | None = None  # keys and values of the tokens before, where text is generated
    key_Bk: jax.Array | None = None  # random bits of each sequence, for kinds that draw; uint32
    trains: jax.Array | None = None  # for the same: false in a validation, where nothing is drawn

    @property
    def sequence_cut(self) -> ops.SequenceCut | None:
        """How the sequences of the residual stream are cut here, if they are."""
        return self.kernels.sequence_cut if self.kind.cuts_sequences else None

    def random(self, draw: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """`draw(key)` of each sequence, an array [L, ...] each; of parts, as other arrays are."""
        assert self.key_Bk is not None, f"{self.kind.name} must state that it draws"
        drawn_BL = jax.vmap(lambda bits: draw(jax.random.wrap_key_data(bits)))(self.key_Bk)
        return ops.to_parts(drawn_BL, self.kernels)


def seed_key(seed: int) -> jax.Array:
    """The random key of a seed of 63 bits, of which JAX takes the lower 32 without a word."""
    key = jax.random.key(seed % 2**32)
    return jax.random.fold_in(key, seed >> 32) if seed >> 32 else key


def layer_key(seed: int, layer: str) -> jax.Array:
    """The random key of a layer, by its name."""
    return jax.random.fold_in(seed_key(seed), zlib.crc32(layer.encode()))


def keys_of(seed: int, layer: str, sequence_B: jax.Array) -> jax.Array:
    """`Context.key_Bk`: functions of the seed, the layer, and the number of a sequence in the run.

    No plan, and no size of a batch, changes what a sequence draws.
    """
    key = layer_key(seed, layer)
    return jax.vmap(lambda n: jax.random.key_data(jax.random.fold_in(key, n)))(sequence_B)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Auxiliary:
    """The results of a layer besides x."""

    losses: dict[str, jax.Array] = field(default_factory=dict)  # sums over tokens, by stated name
    metrics: dict[str, jax.Array] = field(default_factory=dict)  # the same; no gradients
    # By name, of the shape of each parameter that a step changes though it does not train: sums
    # over tokens, or what the parameter's `joined` says.
    sums: dict[str, jax.Array] = field(default_factory=dict)
    cache: Cache | None = None  # the extended cache


Function = Callable[[Params, jax.Array | None, Context], tuple[jax.Array, Auxiliary]]


@cached(256)
def function_of(kind: Kind) -> Function:
    """The function that computes layers of a kind; only x and losses have gradients."""
    function: Function = import_object(kind.function)

    def run(params: Params, x: jax.Array | None, context: Context) -> tuple[jax.Array, Auxiliary]:
        x, auxiliary = function(params, x, context)
        # Cut off here: a gradient of zero times, say, that of a maximum can be 0 / 0.
        metrics, sums = jax.lax.stop_gradient((auxiliary.metrics, auxiliary.sums))
        return x, replace(auxiliary, metrics=metrics, sums=sums)

    return run


def apply(
    layer: str, model: ModelConfig, params: Params, x: jax.Array | None, **context: Any
) -> tuple[jax.Array, Auxiliary]:
    """Computes a layer of a model.

    Args:
      layer: its name.
      model: the model's settings.
      params: of the layer, with those that it borrows under their whole names.
      x: the residual stream; None on the first layer.
      context: fields of `Context`.
    """
    kind = layers(model)[layer]
    return function_of(kind)(params, x, Context(model=model, kind=kind, **context))


def tree_of(kind: Kind) -> Params:
    """The parameters of a kind as the nested dict that its function reads."""
    tree: Params = {}
    for parameter in kind.parameters:
        *folders, name = parameter.path
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = parameter
    return tree


@cached(64)
def statements(model: ModelConfig) -> dict[str, Params]:
    """The parameters of all layers, by layer."""
    return {layer: tree_of(kind) for layer, kind in layers(model).items()}


@functools.cache
def changing(kind: Kind) -> tuple[Parameter, ...]:
    """The parameters of a kind that a step changes though they do not train."""
    return tuple(parameter for parameter in kind.parameters if parameter.changes)


def stated(tree: Params, path: tuple) -> Parameter:
    """The parameter at a path of JAX in a tree of parameters by layer."""
    found: Parameter = functools.reduce(lambda node, key: node[key.key], path, tree)
    return found


def split_trained(tree: Params) -> tuple[Params, Params]:
    """Splits statements by layer: trained ones in every layer, and frozen ones where any are.

    >>> from holmesjax.layer_specs.kind import Constant
    >>> one, two = (Parameter(name=f"{name}_D", shape=(1,), initial=Constant(0), trains=trains)
    ...             for name, trains in (("a", True), ("b", False)))
    >>> trained, frozen = split_trained({"head": {"norm": {"a_D": one}, "b_D": two}})
    >>> list(trained["head"]), list(frozen["head"])
    (['norm'], ['b_D'])
    """
    trained = {layer: _with(part, trains=True) for layer, part in tree.items()}
    frozen = {layer: _with(part, trains=False) for layer, part in tree.items()}
    return trained, {layer: part for layer, part in frozen.items() if part}


def _with(tree: Params, *, trains: bool) -> Params:
    """Returns the parameters of a nested dict that train, or that do not train."""
    found = {}
    for name, part in tree.items():
        if isinstance(part, Parameter):
            if part.trains == trains:
                found[name] = part
        elif inner := _with(part, trains=trains):
            found[name] = inner
    return found


def split_by(statements: Params, arrays: Params) -> tuple[Params, Params]:
    """Splits the arrays of one layer into those of trained and of frozen parameters."""
    trained, frozen = split_trained({"": statements})
    return named_as(trained[""], arrays), named_as(frozen.get("", {}), arrays)


def named_as(like: Params, arrays: Params) -> Params:
    """The arrays of a nested dict whose names another one has.

    >>> named_as({"norm": {"scale": 0}}, {"norm": {"scale": 1, "bias": 2}, "up": 3})
    {'norm': {'scale': 1}}
    """
    return {
        name: named_as(part, arrays[name]) if isinstance(part, dict) else arrays[name]
        for name, part in like.items()
    }


def merged(trained: Params, frozen: Params) -> Params:
    """The opposite of `split_trained`, of the arrays of one layer."""
    whole = dict(trained)
    for name, part in frozen.items():
        whole[name] = merged(whole.get(name, {}), part) if isinstance(part, dict) else part
    return whole


def param_shapes(layer: str, model: ModelConfig) -> dict[str, Params]:
    """Shape and dtype of each of the layer's parameters."""
    shape = lambda parameter: jax.ShapeDtypeStruct(parameter.shape, np.float32)
    shapes: dict[str, Params] = jax.tree.map(shape, statements(model)[layer])
    return shapes


def init_values(parameter: Parameter, layer: str, seed: int, box: Box) -> np.ndarray:
    """Initial values in a box of a parameter, float32: a function of the seed, not of any plan.

    They are drawn on the host: XLA takes seconds to compile the random numbers of one layer.

    Args:
      parameter: what is stated of it.
      layer: the name of its layer.
      seed: of the run.
      box: the elements that are wanted.
    """
    assert not isinstance(parameter.initial, Drawn), "its layer is drawn at once"
    if isinstance(parameter.initial, Constant):
        return np.full(shape_of(box), parameter.initial.value, np.float32)
    where = f"{seed}/{layer}/{parameter.name}"
    return initial_values.draw(where, parameter.shape, box, parameter.initial)


def source_of_values(model: ModelConfig, seed: int) -> Callable[[Parameter, str, Box], np.ndarray]:
    """The function that gives the initial values in a box of a parameter of a layer.

    They are drawn, or those of the folders that the model names: of weights, and of adapters.
    """
    drawn = lambda parameter, layer, box: init_values(parameter, layer, seed, box)
    of_weights = of_adapters = drawn
    base = replace(model, lora=None, fp8=None)
    places: Mapping[str, Mapping[str, Any]] = {}
    if model.hf is not None:
        weights = hugging_face.open_weights(Path(model.hf), base)
        places = weights.places
        of_weights = lambda parameter, layer, box: weights.read(layer, parameter.name, box)
    if model.lora is not None and model.lora.peft is not None:
        adapters = peft.open_adapters(Path(model.lora.peft), model)
        of_adapters = lambda parameter, layer, box: adapters.read(layer, parameter.name, box)

    def values(parameter: Parameter, layer: str, box: Box) -> np.ndarray:
        is_in_folder = parameter.name in places.get(layer, {})
        if parameter.changes and not is_in_folder:  # of the training, and not of the model
            return drawn(parameter, layer, box)
        is_adapter = model.lora is not None and parameter.trains
        return (of_adapters if is_adapter else of_weights)(parameter, layer, box)

    return values


def init_params(
    model: ModelConfig, seed: int, names: Sequence[str] | None = None
) -> dict[str, Params]:
    """The initial values of whole layers, NumPy by layer name.

    Args:
      model: the model's settings.
      seed: of the run.
      names: which of the model's layers; all if None.
    """
    whole = lambda parameter: tuple((0, size) for size in parameter.shape)
    values = source_of_values(model, seed)
    return {
        layer: jax.tree.map(
            lambda parameter, layer=layer: values(parameter, layer, whole(parameter)),
            statements(model)[layer],
        )
        for layer in names or layers(model)
    }
