"""Modules of flax as layers of a model of your own: `linen` and `nnx`.

Axes of parameters come from the metadata that a module gives them, `nn.with_logical_partitioning`
or `nnx.with_partitioning`: names of dims, which `LOGICAL_AXES` maps to the axes of a mesh.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import linen as nn, nnx as objects
from flax.errors import InvalidRngError

from holmesjax.errors import ConfigError
from holmesjax.models.layer import Params
from holmesjax.models.own_model import Array, Axes, Layer, Reads, axes_of, reads_of, wrong_model

# Names of dims that flax's own examples use, and those of the axes themselves. Others are whole.
LOGICAL_AXES = {
    "embed": "fsdp",
    "fsdp": "fsdp",
    "heads": "tensor",
    "mlp": "tensor",
    "tensor": "tensor",
    "vocab": "tensor",
}
Names = Mapping[str, str]
NamedAxes = dict[str, tuple[str | None, ...]]


def linen(
    module: nn.Module,
    *,
    loss: Callable[..., Any] | None = None,
    reads: Reads = None,
    axes: Axes = {},  # noqa: B006  # never changed
    logical_axes: Names = LOGICAL_AXES,
) -> Layer:
    """A layer that a module of `flax.linen` computes. Layers with equal modules are equal.

    Args:
      module: with parameters, and no other variables.
      loss: of a last layer, as in `own_model.Layer`.
      reads: the arrays of a batch that the layer reads: `{"image": ((28, 28), "float32")}`.
      axes: regular expressions of parameter names, and the mesh axis that cuts each of their dims.
      logical_axes: the mesh axis for each logical name of a dim.
    """
    own = _Linen(module, tuple(logical_axes.items()))
    label = type(module).__name__
    return _layer(own, label, loss, reads, axes)


def nnx(
    make: Callable[[objects.Rngs], Any],
    *,
    loss: Callable[..., Any] | None = None,
    reads: Reads = None,
    axes: Axes = {},  # noqa: B006  # never changed
    logical_axes: Names = LOGICAL_AXES,
) -> Layer:
    """A layer that a module of `flax.nnx` computes. Layers with the same `make` are equal.

    Args:
      make: `make(rngs)` gives the module, with parameters and no other variables. A module that is
        already there would have been drawn on one device.
      loss: of a last layer, as in `own_model.Layer`.
      reads: the arrays of a batch that the layer reads: `{"image": ((28, 28), "float32")}`.
      axes: regular expressions of parameter names, and the mesh axis that cuts each of their dims.
      logical_axes: the mesh axis for each logical name of a dim.
    """
    own = _Nnx(make, tuple(logical_axes.items()))
    with objects.use_eager_sharding(False):
        label = type(objects.eval_shape(lambda: make(objects.Rngs(0)))).__name__
    return _layer(own, label, loss, reads, axes)


def _layer(
    own: "_Linen | _Nnx",
    label: str,
    loss: Callable[..., Any] | None,
    reads: Reads,
    axes: Axes,
) -> Layer:
    """The layer. Those of equal modules are equal, so that they are one kind."""
    shared: Any = {"loss": loss, "reads": reads_of(reads), "axes": axes_of(axes), "label": label}
    try:
        hash(own)
    except TypeError:  # a module with an array, say: it is equal to itself alone
        return Layer(init=own.init, apply=own.apply, named_axes=own.named_axes, **shared)
    init, apply, named_axes = (_Method(own, name) for name in ("init", "apply", "named_axes"))
    return Layer(init=init, apply=apply, named_axes=named_axes, **shared)


@dataclass(frozen=True)
class _Method:
    """A method of a module's functions. Python compares bound methods by identity."""

    functions: "_Linen | _Nnx"
    name: str

    def __call__(self, *arguments: Any) -> Any:
        return getattr(self.functions, self.name)(*arguments)


@dataclass(frozen=True)
class _Linen:
    """The functions of a linen module."""

    module: nn.Module
    logical_axes: tuple[tuple[str, str], ...]

    def _variables(self, key: jax.Array, *inputs: Array) -> Any:
        variables = dict(self.module.init(key, *inputs))
        params = variables.pop("params", {})
        _refuse_others(type(self.module).__name__, sorted(variables))
        return params

    def init(self, key: jax.Array, *inputs: Array) -> Params:
        return nn.meta.unbox(self._variables(key, *inputs))

    def apply(self, params: Params, *inputs: jax.Array) -> Any:
        try:
            return self.module.apply({"params": params}, *inputs)
        except InvalidRngError as error:
            found = f"random numbers: {str(error).splitlines()[0]}"
            raise _more_than_parameters(type(self.module).__name__, found) from error

    def named_axes(self, *inputs: Array) -> NamedAxes:
        key = jax.eval_shape(jax.random.key, 0)
        boxed = jax.eval_shape(self._variables, key, *inputs)
        specs = nn.get_partition_spec(boxed)
        return _axes_by_name(specs, dict(self.logical_axes))


@dataclass(frozen=True)
class _Nnx:
    """The functions of an nnx module."""

    make: Callable[[objects.Rngs], Any]
    logical_axes: tuple[tuple[str, str], ...]

    def _split(self, key: jax.Array | int) -> tuple[Any, Any]:
        """The structure of the module, and its parameters."""
        with objects.use_eager_sharding(False):
            module = self.make(objects.Rngs(key))
        definition, *states = objects.split(module, objects.Param, ...)
        params, others = states
        names = ["/".join(map(str, path)) for path, _ in objects.to_flat_state(others)]
        _refuse_others(type(module).__name__, names)
        return definition, params

    def _abstract(self) -> tuple[Any, Any]:
        found: list[Any] = []

        def split() -> Any:
            definition, params = self._split(0)
            found.append(definition)
            return params

        return jax.eval_shape(split), found[-1]

    def init(self, key: jax.Array, *inputs: Array) -> Params:
        _, params = self._split(key)
        return _with_text_keys(objects.to_pure_dict(params))

    def apply(self, params: Params, *inputs: jax.Array) -> Any:
        state, definition = self._abstract()
        flat = []
        for path, variable in objects.to_flat_state(state):
            value = params
            for key in path:
                value = value[str(key)]
            flat.append((path, variable.replace(value)))
        return objects.merge(definition, objects.from_flat_state(flat))(*inputs)

    def named_axes(self, *inputs: Array) -> NamedAxes:
        state, _ = self._abstract()
        specs = _with_text_keys(objects.to_pure_dict(objects.get_partition_spec(state)))
        return _axes_by_name(specs, dict(self.logical_axes))


def _with_text_keys(tree: Params) -> Params:
    """The keys of lists are numbers."""
    if not isinstance(tree, dict):
        return tree
    return {str(key): _with_text_keys(value) for key, value in tree.items()}


def _axes_by_name(specs: Params, logical_axes: dict[str, str]) -> NamedAxes:
    """The mesh axis of each dim, of parameters with any; of two dims, the first has the axis."""
    found: NamedAxes = {}
    is_spec = lambda x: isinstance(x, jax.P)
    for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec):
        axes = [logical_axes.get(name) if isinstance(name, str) else None for name in spec]
        own = tuple(axis if axis and axis not in axes[:i] else None for i, axis in enumerate(axes))
        if any(own):
            found["/".join(key.key for key in path)] = own
    return found


def _refuse_others(module: str, names: list[str]) -> None:
    if names:
        raise _more_than_parameters(module, ", ".join(names))


def _more_than_parameters(module: str, found: str) -> ConfigError:
    return wrong_model(
        f"has a module with more than parameters: {module}",
        found,
        "use LayerNorm in the place of BatchNorm; for dropout use functions(init, apply, "
        "draws=True), with random.dropout(x, rate) in apply",
    )
