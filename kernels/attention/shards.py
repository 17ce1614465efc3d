"""Kernels on a mesh: each device runs one on its own shards.

XLA cannot cut a kernel. Left alone, it gathers whole arrays on every device and runs the kernel
there on all of them; `jax.shard_map` is what gives each device its shard.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec as P


@dataclass(frozen=True)
class Shards:
    """The dims of a kernel's arrays that axes of a mesh cut."""

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

    def count(self, dim: str) -> int:
        """Devices that share the numbers of a dim."""
        return math.prod(self.mesh.shape[axis] for axis in dict(self.axes_of).get(dim, ()))


def on_shards(function: Callable, shards: Shards | None, ins: Any, outs: Any) -> Callable:
    """`function`, on each device's shards; as it is without a mesh.

    Inside a `jax.shard_map` over the whole mesh arrays are shards already. The check of where
    results differ is off, since a Pallas call fails it.

    Args:
      ins: the dims of each argument, as "BLHK"; a tuple of them where an argument is a tuple.
      outs: likewise of the results.
    """
    if shards is None:
        return function
    mesh = shards.mesh
    if set(jax.sharding.get_abstract_mesh().manual_axes) == set(mesh.axis_names):
        return function
    specs = lambda dims: jax.tree.map(shards.spec, dims)
    return jax.shard_map(
        function, mesh=mesh, in_specs=specs(ins), out_specs=specs(outs), check_vma=False
    )
