"""Weights of products in fp8, as the replicas of a step hold them: as codes, made once a step.

`Stage.gather` makes the codes of a weight in both layouts with their scale (`ops.Coded`), two bytes
a number and nothing else. All microbatches read them. A weight's gradient is that of zeros of its
shape, which no program ever makes: nothing but the codes has numbers.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from holmesjax.layer_specs.fp8 import weights_by_input
from holmesjax.layer_specs.kind import Kind, Parameter
from holmesjax.models import ops
from holmesjax.models.layer import merged
from holmesjax.parallel import sharding

Tree = Any  # a nested dict of arrays, keyed by layer and parameter name


def _is_coded(own: Any) -> bool:
    return isinstance(own, ops.Coded)


def statements(kinds: Mapping[str, Kind], trained: Tree) -> Tree:
    """The statements of what replicas hold: `trained`, with codes where a layer reads them.

    Args:
      kinds: of layers, by name.
      trained: the parameters that train, by layer.
    """
    found = dict(trained)
    for layer, kind in kinds.items():
        names = [name for names in weights_by_input(kind).values() for name in names]
        found[layer] = {**trained[layer], **{name: _stated(trained[layer][name]) for name in names}}
    return found


def _stated(weight: Parameter) -> ops.Coded:
    """The statements of a weight's codes."""
    own = replace(weight, trains=False, changes=True)  # so that no layer casts them
    turn = lambda dims: dims[weight.matrix :] + dims[: weight.matrix]
    turned = replace(own, dims=turn(weight.dims), shape=turn(weight.shape))
    return ops.Coded._make([own, turned, replace(own, dims="", shape=())])


def shapes(
    stated: Tree, stack: Callable[[Parameter, Any], jax.ShapeDtypeStruct], dtype: str
) -> Tree:
    """The shapes of replicas.

    Args:
      stated: `statements`.
      stack: the shape of the replicas of a parameter, in a dtype.
      dtype: of the parameters that are held as they are.
    """

    def shape(own: Any) -> Any:
        if not _is_coded(own):
            return stack(own, dtype)
        weight = jax.ShapeDtypeStruct(own.codes.shape, dtype)
        found = jax.eval_shape(partial(ops.coded, num_in=own.codes.matrix), weight)
        return jax.tree.map(lambda like, x: stack(like, x.dtype), own, found)

    return jax.tree.map(shape, stated, is_leaf=_is_coded)


def coded(stated: Tree, replicas: Tree, mesh: Mesh) -> Tree:
    """The replicas of parameters, [R, ...], with codes in the place of weights that are read so."""

    def code(own: Any, w: jax.Array) -> Any:
        if not _is_coded(own):
            return w
        found = jax.vmap(partial(ops.coded, num_in=own.codes.matrix))(w)
        if mesh.size == 1:
            return found
        cut = lambda like, x: jax.lax.with_sharding_constraint(
            x, NamedSharding(mesh, sharding.replica_spec(like.dims, mesh.shape))
        )
        return jax.tree.map(cut, own, found)

    return jax.tree.map(code, stated, replicas, is_leaf=_is_coded)


def widened(replica: Tree, fixed: Tree) -> tuple[Tree, Tree]:
    """The parameters that train and those that do not, in float32, as layers read them.

    Gradients of float32 are float32. A product rounds its weight to the compute dtype again, inside
    of its own rule for gradients: XLA drops both conversions, so that no copy in float32 is ever
    there. Codes stand among what does not train.

    Args:
      replica: the parameters of one replica, [1, ...], by layer.
      fixed: what does not train, by layer.
    """
    params: Tree = {}
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), fixed)
    for layer, weights in replica.items():
        codes = {name: x for name, x in weights.items() if _is_coded(x)}
        others = {name: x for name, x in weights.items() if name not in codes}
        params[layer] = jax.tree.map(lambda x: x[0].astype(jnp.float32), others)
        if codes:
            zeros = {name: jnp.zeros(x.codes.shape[1:], jnp.float32) for name, x in codes.items()}
            params[layer] |= zeros
            codes = jax.tree.map(lambda x: x[0], codes)
            wide[layer] = merged(wide.get(layer, {}), in_layer(codes))
    return params, wide


def in_layer(codes: Mapping[str, Any]) -> Tree:
    """Codes by name, where a layer finds them among its parameters."""
    return {"fp8": {"codes": dict(codes)}} if codes else {}


def of_layer(stated: Mapping[str, Any]) -> Tree:
    """The statements of a layer's codes, as `in_layer`, of its `statements`."""
    return in_layer({name: parameter for name, parameter in stated.items() if _is_coded(parameter)})
