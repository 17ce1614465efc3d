"""Kernels on a mesh: each device runs one on its own shards.

XLA cannot cut a kernel. Left alone, it gathers whole arrays on every device and runs the kernel
there on all of them; `jax.shard_map` is what gives each device its part.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P


@dataclass(frozen=True)
class Shards:
    """Which dims of a kernel's arrays are cut over which axis of a mesh."""

    mesh: Mesh
    axes_of: tuple[tuple[str, tuple[str, ...]], ...]  # ("B", ("fsdp",)), ...: dims by their letters
    ring: str | None = None  # the first axis of B, where devices along it share sequences

    def spec(self, dims: str) -> P:
        """
        >>> shards = Shards(None, (("B", ("context", "fsdp")), ("H", ("tensor",))))
        >>> shards.spec("BLHK") == P(("context", "fsdp"), None, "tensor", None)
        True
        """
        axes_of = dict(self.axes_of)
        return P(*(axes_of.get(dim) or None for dim in dims))


def on_shards(function: Callable, shards: Shards | None, ins: Any, outs: Any) -> Callable:
    """`function`, on each device's shards; as it is without a mesh.

    Args:
      ins: the dims of each argument, as "BLHK"; a tuple of them where an argument is a tuple.
      outs: likewise of the results.
    """
    if shards is None:
        return function
    specs = lambda dims: jax.tree.map(shards.spec, dims)
    return on_mesh(function, shards.mesh, specs(ins), specs(outs))


def on_mesh(function: Callable, mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable:
    """`jax.shard_map` without a check that a Pallas call fails: of where its results differ.

    Inside another one, arrays are shards already.
    """
    if set(jax.sharding.get_abstract_mesh().manual_axes) == set(mesh.axis_names):
        return function
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def num_parts(spec: P, dim: int, sizes: Mapping[str, int]) -> int:
    """Into how many parts a dim is cut, on a mesh with axes of these sizes.

    >>> num_parts(P("a", None, ("b", "c")), 2, {"a": 2, "b": 3, "c": 4})
    12
    """
    return math.prod(sizes[axis] for axis in _axes(spec, dim))


def first_index(spec: P, shape: Sequence[int]) -> jax.Array:
    """Where in the whole a device's part of this shape begins, inside `on_mesh`; int32 [dims]."""
    starts = []
    for dim, size in enumerate(shape):
        axes = _axes(spec, dim)
        starts.append(jax.lax.axis_index(axes) * size if axes else jnp.int32(0))
    return jnp.stack(starts).astype(jnp.int32)


def _axes(spec: P, dim: int) -> tuple[str, ...]:
    entry = spec[dim] if dim < len(spec) else None
    return (entry,) if isinstance(entry, str) else tuple(entry or ())
