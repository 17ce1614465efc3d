"""A model of your own: a function that gives its layers, which `model.module` of a run names.

    def my_model(settings: ModelConfig) -> list[Layer]:
        return [functions(init_embed, embed), *settings.num_layers * [block], head]

A layer is a pair of functions (`functions`), or a module of flax (`flax_layers`). The first layer
reads arrays of a batch, each layer hands one array to the next, and the last gives losses. No layer
states any costs: `own_kinds` traces them.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from holmesjax.config import ModelConfig
from holmesjax.errors import ConfigError, HolmesError
from holmesjax.layer_specs.kind import BatchArray
from holmesjax.layer_specs.model_layers import EMBED, HEAD, block_name, cached, import_object
from holmesjax.models.layer import Params
from holmesjax.parallel import platforms

WHERE = "model.module"
Array = jax.Array | jax.ShapeDtypeStruct


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer of a model of your own. Layers that are equal are one kind, and compiled once.

    Args:
      init: `init(key, *inputs)` draws the parameters: arrays in dicts.
      apply: `apply(params, *inputs)`, of the array that the layer before gives and of the arrays
        that the layer reads, each with a first dim for sequences. It gives the array for the next
        layer. A last layer without `loss` gives the losses. One that draws has a `Random` behind
        its arrays, `apply(params, *inputs, random)`.
      loss: of a last layer: `loss(outputs, *arrays)`, of what `apply` gives of the layer before
        alone, in float32, and of the arrays that the layer reads. It gives losses, which are added.
      reads: the arrays of a batch, each with the shape and the dtype that one sequence has.
        None: the first layer reads the tokens, the last the targets, and others nothing.
      axes: for parameters whose names match a regular expression, the mesh axis that cuts each dim:
        "tensor", "fsdp" or None.
      label: for messages and the plan.
      draws: whether `apply` reads random numbers.
      named_axes: gives the axes of parameters that the module itself names, by parameter.
    """

    init: Callable[..., Params]
    apply: Callable[..., Any]
    loss: Callable[..., Any] | None = None
    reads: tuple[BatchArray, ...] | None = None
    axes: tuple[tuple[str, tuple[str | None, ...]], ...] = ()
    label: str = "layer"
    draws: bool = False
    named_axes: Callable[..., Mapping[str, tuple[str | None, ...]]] | None = None


Reads = Mapping[str, tuple[Sequence[int], str]] | None
Axes = Mapping[str, Sequence[str | None]]


@dataclass(frozen=True)
class _OfKeyAlone:
    """`init(key)` as a function that may be given inputs."""

    init: Callable[[jax.Array], Params]

    def __call__(self, key: jax.Array, *inputs: Array) -> Params:
        return self.init(key)


def functions(
    init: Callable[[jax.Array], Params],
    apply: Callable[..., Any],
    *,
    loss: Callable[..., Any] | None = None,
    reads: Reads = None,
    axes: Axes = {},  # noqa: B006  # never changed
    draws: bool = False,
) -> Layer:
    """A layer of two functions, `init(key)` and `apply(params, *inputs)`.

    Args:
      init: draws the parameters: arrays in dicts.
      apply: computes the layer.
      loss: of a last layer, as in `Layer`.
      reads: the arrays of a batch that the layer reads: `{"image": ((28, 28), "float32")}`.
      axes: regular expressions of parameter names, and the mesh axis that cuts each of their dims.
      draws: whether `apply` has a `Random` behind its inputs: `apply(params, *inputs, random)`.
    """
    label = getattr(apply, "__name__", type(apply).__name__)
    return Layer(
        init=_OfKeyAlone(init),
        apply=apply,
        loss=loss,
        reads=reads_of(reads),
        axes=axes_of(axes),
        label=label,
        draws=draws,
    )


class Random:
    """The random numbers of a layer: others for each sequence, step and layer.

    They are functions of the seed of the run, the name of the layer and the number of the sequence
    in the run, so that no plan changes them. `trains` is an array: false in a validation.
    """

    def __init__(self, bits_Bk: jax.Array, trains: jax.Array):
        self.trains = trains
        self._bits_Bk, self._count = bits_Bk, itertools.count()

    def keys(self) -> jax.Array:
        """A key for each sequence, [B]; another one in each call."""
        number = next(self._count)
        key_of = lambda bits: jax.random.fold_in(jax.random.wrap_key_data(bits), number)
        return jax.vmap(key_of)(self._bits_Bk)

    def dropout(self, x: jax.Array, rate: float) -> jax.Array:
        """x [B, ...] with a share of its numbers as zeros, the others divided by 1 - rate.

        In a validation x as it is. (Srivastava et al., JMLR 15, 2014.)

        Raises:
          ConfigError: the rate is not from 0 to below 1.
        """
        if not isinstance(rate, int | float) or not 0 <= rate < 1:
            problem, fix = "drops a share that is no number from 0 to below 1", "use 0.1, say"
            raise wrong_model(problem, repr(rate), fix)
        keeps = lambda key: jax.random.bernoulli(key, 1 - rate, x.shape[1:])
        is_kept = jax.vmap(keeps)(self.keys()) | ~self.trains
        scale = jnp.where(self.trains, 1 / (1 - rate), 1.0).astype(x.dtype)
        return jnp.where(is_kept, x * scale, jnp.zeros((), x.dtype))


def reads_of(reads: Reads) -> tuple[BatchArray, ...] | None:
    """`Layer.reads` of a mapping from names to shapes and dtypes."""
    if reads is None:
        return None
    return tuple(
        BatchArray(name, tuple(shape), str(jnp.dtype(dtype)))
        for name, (shape, dtype) in reads.items()
    )


def axes_of(axes: Axes) -> tuple[tuple[str, tuple[str | None, ...]], ...]:
    """`Layer.axes` of a mapping from regular expressions to mesh axes."""
    return tuple((pattern, tuple(axes_of_pattern)) for pattern, axes_of_pattern in axes.items())


def next_token_losses(logits_BLV: jax.Array, target_BL: jax.Array) -> jax.Array:
    """The cross-entropy of each token that counts, [B, L]; others have 0."""
    log_p_BLV = jax.nn.log_softmax(logits_BLV)
    target_BL1 = jnp.maximum(target_BL, 0)[..., None]
    picked_BL = jnp.take_along_axis(log_p_BLV, target_BL1, axis=-1)[..., 0]
    return jnp.where(target_BL >= 0, -picked_BL, 0.0)


def name_of(model: Callable[..., Any]) -> str:
    """The "module:function" of a model, by which any process finds it.

    Raises:
      ConfigError: no module has it under its name.
    """
    module, name = getattr(model, "__module__", ""), getattr(model, "__qualname__", "")
    text = f"{module}:{name}"
    try:
        if import_object(text) is model:
            return text
    except (ImportError, AttributeError, ValueError):
        pass
    raise ConfigError(
        WHERE,
        "must be a function or a class at the top level of a module, found by its name",
        found=text if name else repr(model),
        fix="define it with `def` or `class` outside of functions, and give it as it is",
    )


@cached(64)
def layers_of(model: ModelConfig) -> dict[str, Layer]:
    """The layers of a model that `model.module` names, by the names of `model_layers`.

    Raises:
      ConfigError: nothing has this name, it gives something else than layers, or it starts devices.
    """
    assert model.module is not None
    had_devices = platforms.has_devices()
    make = _named(model.module)
    try:
        found: Any = make(model)
    except HolmesError:
        raise
    except Exception as error:
        raise wrong_model(
            "cannot be called with the section `model`",
            f"{model.module}: {type(error).__name__}: {error}",
            "write it as def my_model(settings), where settings has num_layers, width and the rest",
        ) from error
    layers = list(found) if isinstance(found, Iterable) else []
    if platforms.has_devices() and not had_devices:
        raise wrong_model(
            "makes arrays of JAX before the run has its devices",
            model.module,
            "make them in init or apply, or with NumPy: JAX starts with the first array, and then "
            "takes neither the devices nor the flags nor the memory of the run",
        )
    wrong = [type(layer).__name__ for layer in layers if not isinstance(layer, Layer)]
    if wrong or not isinstance(found, Iterable):
        raise wrong_model(
            "must give a list of layers",
            f"{wrong[0]} in its list" if wrong else type(found).__name__,
            "make layers with functions(init, apply) of holmesjax.models.own_model, or with linen "
            "or nnx of holmesjax.models.flax_layers",
        )
    for layer in layers:
        try:
            hash(layer)
        except TypeError as error:
            fix = "write functions, or callables of a class with @dataclass(frozen=True)"
            problem = "must give layers that can be compared"
            raise wrong_model(problem, f"{layer.label}: {error}", fix) from None
    if len(layers) != model.num_layers + 2:
        most = max(len(layers) - 2, 0)
        raise wrong_model(
            f"must give model.num_layers = {model.num_layers} layers between its first and last",
            f"{len(layers)} layers in all",
            f"set model.num_layers={most}, and parallel.layers to numbers with this sum"
            if most
            else "give a first layer, one or more layers, and a last one",
        )
    middle = map(block_name, range(model.num_layers))
    return dict(zip((EMBED, *middle, HEAD), layers, strict=True))


def _named(name: str) -> Callable[[ModelConfig], Sequence[Layer]]:
    try:
        make: Callable[[ModelConfig], Sequence[Layer]] = import_object(name)
    except (ImportError, AttributeError, ValueError) as error:
        fix = "write module:function, of a module that each process of the run can import: "
        fix += "install it, or start in its folder"
        problem = "names no model"
        if name.startswith("__main__:"):
            problem = "was defined in a notebook or a script, which other processes cannot import"
            fix = "move it to a module, such as my_model.py, and name it as my_model:my_function"
        raise wrong_model(problem, f"{name}: {error}", fix) from None
    return make


def wrong_model(problem: str, found: str, fix: str) -> ConfigError:
    """A mistake in what `model.module` names."""
    return ConfigError(WHERE, problem, found=found, fix=fix)
