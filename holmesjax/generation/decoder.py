"""A model that computes logits of the next tokens, on one device or over the stages of a plan.

Dims: see `models/transformer.py`. A part of the model is the layers of a stage, on its mesh:
`tensor` cuts weights and caches of keys, `fsdp` and `context` cut weights, and the replicas of
`data` all compute the same. Parts run one after the other; the residual stream goes from mesh to
mesh.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from holmesjax.checkpoints import restoring
from holmesjax.checkpoints.manifest import Checkpoint
from holmesjax.config import ModelConfig
from holmesjax.errors import ConfigError
from holmesjax.layer_specs.array_boxes import Box
from holmesjax.layer_specs.kind import PARTS_DIM, TENSOR_DIMS, Kind, Parameter
from holmesjax.layer_specs.model_layers import layers
from holmesjax.models import key_cache
from holmesjax.models.key_cache import Cache
from holmesjax.models.layer import apply, statements
from holmesjax.parallel import first_calls, sharding
from holmesjax.plan.plan import Axis

Params = dict[str, dict]
Tokens = tuple[np.ndarray, np.ndarray, np.ndarray | None]  # token_BL, position_BL, wanted_B
LEAST_BUCKET = 16  # tokens


@dataclass(frozen=True, kw_only=True)
class ModelPart:
    """Layers of a model, and the mesh on which they are."""

    layers: tuple[str, ...]
    mesh: Mesh

    def sharding_of(self, parameter: Parameter) -> NamedSharding:
        """How a parameter is cut."""
        return NamedSharding(self.mesh, sharding.shard_spec(parameter.dims, self.mesh.shape))

    def cache_sharding(self, num_heads: int) -> NamedSharding:
        """How a cache of keys is cut: over `tensor`, if the heads can be."""
        cut = num_heads % self.mesh.shape[Axis.TENSOR] == 0
        return NamedSharding(self.mesh, P(None, None, Axis.TENSOR.value if cut else None, None))


def on_devices(model: ModelConfig, count: int = 1) -> list[ModelPart]:
    """The whole model on the first devices of this process: cut over `tensor`, else over `fsdp`.

    Raises ConfigError if there are not so many, or if they cannot share the model.
    """
    first_calls.take_turns()
    where = "--devices"
    if not 1 <= count <= len(jax.devices()):
        found = f"{count}; this process has {len(jax.devices())}"
        flag = f"XLA_FLAGS=--xla_force_host_platform_device_count={count}"
        fix = f"{flag} before the command gives so many on a CPU" if count > 0 else "use 1 or more"
        problem = "must be devices of this process"
        raise ConfigError(where, problem, found=found, fix=fix)
    cut = [p for kind in layers(model).values() for p in kind.parameters]
    sizes = lambda dims: [
        n for p in cut for dim, n in zip(p.dims, p.shape, strict=True) if dim in dims
    ]
    tensor = math.gcd(count, *sizes(TENSOR_DIMS))
    fsdp = count // tensor
    if math.gcd(fsdp, *sizes(PARTS_DIM)) != fsdp:
        problem = "cannot share the model: a parameter cannot be cut into so many parts"
        fix = "use a number that divides heads, width and ranks of latents, such as a power of two"
        raise ConfigError(where, problem, found=count, fix=fix)
    axes = Axis.DATA.value, Axis.FSDP.value, Axis.TENSOR.value
    devices = np.array(jax.devices()[:count]).reshape(1, fsdp, tensor)
    return [ModelPart(layers=tuple(layers(model)), mesh=Mesh(devices, axes))]


def _homes(model: ModelConfig, parts: Sequence[ModelPart]) -> dict[str, ModelPart]:
    """The shardings of the layers that some part has, or borrows from another one."""
    kinds = layers(model)
    homes: dict[str, ModelPart] = {}
    for part in parts:
        homes |= dict.fromkeys(part.layers, part)
    for part in parts:
        for layer in part.layers:
            for path in kinds[layer].borrows:
                homes.setdefault(path.partition("/")[0], part)
    return homes


def restored_params(
    found: Checkpoint,
    model: ModelConfig,
    parts: Sequence[ModelPart],
    *,
    ema: bool = False,
    advance: Callable[[], object] = lambda: None,
) -> Params:
    """Reads the parameters that some parts need of a checkpoint, each to where it lies.

    Args:
      found: the checkpoint.
      model: the model's settings.
      parts: layers on their meshes.
      ema: whether the weights are the average that the run keeps.
      advance: called after each layer.
    """
    homes = _homes(model, parts)
    where = lambda layer, own: homes[layer].sharding_of(own) if layer in homes else None
    params = {}
    for layer, tree in restoring.restore_layers(found, model, where, ema=ema, only=homes):
        params[layer] = tree
        advance()
    return params


def built_params(
    model: ModelConfig,
    parts: Sequence[ModelPart],
    make: Callable[[Parameter, str, Box], np.ndarray],
) -> Params:
    """Makes the parameters that some parts need; for the arguments see `Decoder.built`."""
    homes = _homes(model, parts)

    def array(layer: str, parameter: Parameter) -> jax.Array:
        own = functools.partial(make, parameter, layer)
        return sharding.build(parameter.shape, homes[layer].sharding_of(parameter), own)

    return {
        layer: jax.tree.map(functools.partial(array, layer), tree)
        for layer, tree in statements(model).items()
        if layer in homes
    }


def bucket(length: int, most: int) -> int:
    """The length that texts of a length are padded to, so that few lengths are compiled.

    >>> [bucket(length, 100) for length in (1, 17, 64, 65)]
    [16, 32, 64, 100]
    """
    return min(max(LEAST_BUCKET, 1 << (length - 1).bit_length()), most)


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A model with its parameters, in parts."""

    model: ModelConfig
    parts: Sequence[ModelPart]
    params: Params  # by layer, each where its part says

    @classmethod
    def restored(
        cls, found: Checkpoint, model: ModelConfig, parts: Sequence[ModelPart], *, ema: bool = False
    ) -> "Decoder":
        """Reads the parameters of a checkpoint, each to where it lies; with `ema` their average."""
        params = restored_params(found, model, parts, ema=ema)
        return cls(model=model, parts=parts, params=params)

    @classmethod
    def built(
        cls,
        model: ModelConfig,
        parts: Sequence[ModelPart],
        make: Callable[[Parameter, str, Box], np.ndarray],
    ) -> "Decoder":
        """Makes the parameters where they lie.

        Args:
          model: the model's settings.
          parts: its layers on their meshes.
          make: the numbers in a box of a parameter of a layer, float32.
        """
        return cls(model=model, parts=parts, params=built_params(model, parts, make))

    @functools.cached_property
    def _params(self) -> list[Params]:
        """The parameters of each part, with a copy of those that a layer of it borrows."""
        kinds, found = layers(self.model), []
        for part in self.parts:
            own = {layer: dict(self.params[layer]) for layer in part.layers}
            for layer in part.layers:
                for path in kinds[layer].borrows:
                    owner, _, name = path.partition("/")
                    where = part.sharding_of(_stated(kinds[owner], name))
                    array = _at(self.params[owner], name)
                    # Always, where other processes have parts of the mesh.
                    is_there = isinstance(array, jax.Array) and array.sharding == where
                    own[layer][path] = array if is_there else jax.device_put(array, where)
            found.append(own)
        return found

    def empty_caches(self, num_rows: int, length: int) -> list[dict[str, Cache]]:
        """Caches of all parts for so many texts of a length."""

        def empty(part: ModelPart, kind: Kind) -> Cache:
            assert kind.attention is not None
            heads = kind.attention.key_heads if kind.attention.latents is None else 1
            where = part.cache_sharding(heads)
            return key_cache.empty(kind.attention, num_rows, length, where)

        kinds = layers(self.model)
        return [
            {layer: empty(p, kinds[layer]) for layer in p.layers if kinds[layer].attention}
            for p in self.parts
        ]

    def extend(
        self,
        caches: Sequence[dict[str, Cache]],
        token_BL: np.ndarray,
        position_BL: np.ndarray,
        wanted_B: np.ndarray | None = None,
    ) -> tuple[jax.Array | None, list[dict[str, Cache]]]:
        """Computes logits after tokens, and adds the tokens to the caches.

        Args:
          caches: of all parts; donated.
          token_BL: tokens that follow those in the caches, with padding behind them.
          position_BL: their positions; -1 for padding.
          wanted_B: the place of the one token of each row whose logits are wanted; None: all.

        Returns:
          Logits, [B, L, V] or [B, 1, V] float32, and the caches with the new tokens.
        """
        x: jax.Array | None = None
        after = []
        for i, (part, cache) in enumerate(zip(self.parts, caches, strict=True)):
            if x is not None:
                x = jax.device_put(x, sharding.replicated(part.mesh))
            x, cache = self.run_part(i, cache, x, (token_BL, position_BL, wanted_B))
            after.append(cache)
        return x, after

    def run_part(
        self, i: int, cache: dict[str, Cache], x_BLD: jax.Array | None, tokens: Tokens
    ) -> tuple[jax.Array, dict[str, Cache]]:
        """Runs a part on the residual stream, which every device of its mesh has."""
        part = self.parts[i]
        put = functools.partial(sharding.put, where=sharding.replicated(part.mesh))
        inputs = jax.tree.map(put, tokens)
        names = part.layers
        return _run_part(self._params[i], cache, x_BLD, *inputs, model=self.model, names=names)

    def shared(self, token_B: jax.Array | None) -> np.ndarray:
        """The tokens that were drawn, for all who wait for them."""
        assert token_B is not None, "all parts are here, the last one too"
        return np.asarray(token_B)


@functools.partial(jax.jit, static_argnames=("model", "names"), donate_argnames="caches")
def _run_part(
    params: Params,
    caches: dict[str, Cache],
    x_BLD: jax.Array | None,
    token_BL: jax.Array,
    position_BL: jax.Array,
    wanted_B: jax.Array | None,
    *,
    model: ModelConfig,
    names: tuple[str, ...],
) -> tuple[jax.Array, dict[str, Cache]]:
    """The layers of a part, in turn. Compiled once for each number of rows and of tokens.

    Args:
      params: by layer, with those that are borrowed.
      caches: by layer; donated.
      x_BLD: the residual stream; None where the part begins the model.
      token_BL: the tokens.
      position_BL: their positions.
      wanted_B: the place of the one token of each row whose logits are wanted; None: all.
      model: the model's settings.
      names: the layers.
    """
    after = {}
    for layer in names:
        kind = layers(model)[layer]
        if kind.place == "last" and wanted_B is not None:
            assert x_BLD is not None
            x_BLD = jnp.take_along_axis(x_BLD, wanted_B[:, None, None], axis=1)
        arrays = {"position_L": position_BL, "token_BL": token_BL, "cache": caches.get(layer)}
        if kind.draws:  # nothing, since this is no training
            unused_Bk = jnp.zeros((len(token_BL), 2), jnp.uint32)
            arrays |= {"key_Bk": unused_Bk, "trains": jnp.array(False)}
        x_BLD, auxiliary = apply(layer, model, params[layer], x_BLD, **arrays)
        if auxiliary.cache is not None:
            after[layer] = auxiliary.cache
    assert x_BLD is not None
    return x_BLD, after


def _stated(kind: Kind, name: str) -> Parameter:
    return next(parameter for parameter in kind.parameters if parameter.name == name)


def _at(params: Mapping[str, Any], path: str) -> jax.Array:
    """The array at a path of names that slashes separate."""
    found: Any = params
    for name in path.split("/"):
        found = found[name]
    array: jax.Array = found
    return array
