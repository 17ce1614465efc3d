"""Collectives over many arrays at once: a bucket is sent as one array, or each by itself.

One collective for each parameter of a layer would pay the latency of the network a dozen times. On
a CPU arrays are joined to one. XLA joins the collectives of a GPU itself, without copies of arrays.
Every function runs inside `jax.shard_map`, on the shards of one device.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Tree = Any  # of arrays; `dims` is a tree of the same form, of ints


def all_gather(
    shards: Tree, dims: Tree, axis: str, *, by_sum: bool = False, apart: bool = False
) -> Tree:
    """Whole arrays from their shards along `dims`; where that is -1 they are whole already.

    Args:
      shards: arrays of one dtype.
      dims: along which each is cut.
      axis: of the mesh.
      by_sum: two devices exchange their shards as a reduce-scatter, for a platform on which a
        reduce-scatter is faster.
      apart: each array has a collective of its own.
    """
    if apart:
        gather = lambda x, dim: jax.lax.all_gather(x, axis, axis=dim, tiled=True)
        return jax.tree.map(lambda x, dim: x if dim < 0 else gather(x, dim), shards, dims)
    leaves, structure = jax.tree.flatten(shards)
    cut = jax.tree.leaves(dims)
    sent = [x.reshape(-1) for x, dim in zip(leaves, cut, strict=True) if dim >= 0]
    if not sent:
        return shards
    bucket = _bucket(sent)
    rows = _gather_by_sum(bucket, axis) if by_sum else jax.lax.all_gather(bucket, axis)
    parts = _divide(rows, [x.size for x in sent])
    out = [
        x if dim < 0 else _join(next(parts), x.shape, dim)
        for x, dim in zip(leaves, cut, strict=True)
    ]
    return jax.tree.unflatten(structure, out)


def reduce_scatter(
    arrays: Tree,
    dims: Tree,
    axis: str,
    *,
    by_ring: bool = False,
    apart: bool = False,
    sent: str | None = None,
) -> Tree:
    """This device's shard, along `dims`, of the sums over `axis`; all of it where that is -1.

    Args:
      arrays: of one dtype.
      dims: along which each is cut.
      axis: of the mesh.
      by_ring: shards are passed on from device to device, for a platform that has nothing as good.
      apart: each array has a collective of its own.
      sent: the dtype in which numbers cross that are cut, and are summed in their own. None: also
        their own.
    """
    size = jax.lax.axis_size(axis)
    if size == 1:  # XLA would run a collective of one, and copy for it
        return arrays
    narrow = lambda x: sent is not None and np.dtype(sent).itemsize < x.dtype.itemsize
    if apart:

        def scatter(x: jax.Array, dim: int) -> jax.Array:
            if narrow(x):
                return _sum_of_narrow(x, dim, axis, sent)
            return jax.lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)

        add = lambda x, dim: jax.lax.psum(x, axis) if dim < 0 else scatter(x, dim)
        return jax.tree.map(add, arrays, dims)
    leaves, structure = jax.tree.flatten(arrays)
    cut = jax.tree.leaves(dims)
    rows = [_cut(x, dim, size) for x, dim in zip(leaves, cut, strict=True) if dim >= 0]
    whole = [x.reshape(-1) for x, dim in zip(leaves, cut, strict=True) if dim < 0]
    if rows:
        bucket = _bucket(rows)
        if narrow(bucket):
            mine = _sum_of_narrow(bucket, 0, axis, sent)[0]
        elif by_ring:
            mine = _sum_by_ring(bucket, axis)
        else:
            mine = jax.lax.psum_scatter(bucket, axis, scatter_dimension=0)
        shards = _divide(mine[None], [x.shape[1] for x in rows])
    if whole:
        sums = _divide(jax.lax.psum(_bucket(whole), axis)[None], [x.size for x in whole])
    out = []
    for x, dim in zip(leaves, cut, strict=True):
        shape = list(x.shape)
        if dim >= 0:
            shape[dim] //= size
        out.append(next(shards if dim >= 0 else sums).reshape(shape))
    return jax.tree.unflatten(structure, out)


def _gather_by_sum(row: jax.Array, axis: str) -> jax.Array:
    """Gathers as `all_gather` does: [2, n] from [n].

    Each device adds its row to the zeros of the other: as integers, which keeps every bit.
    """
    assert jax.lax.axis_size(axis) == 2, "the sum is of one other row"
    bits = jax.lax.bitcast_convert_type(row, f"uint{8 * row.dtype.itemsize}")
    is_other = jnp.arange(2)[:, None] != jax.lax.axis_index(axis)
    sent = jnp.where(is_other, bits[None], 0)
    other = jax.lax.psum_scatter(sent, axis, scatter_dimension=0)
    return jax.lax.bitcast_convert_type(jnp.where(is_other, other[None], bits[None]), row.dtype)


def _sum_of_narrow(x: jax.Array, dim: int, axis: str, sent: str | None) -> jax.Array:
    """Does what a tiled `psum_scatter` does, of numbers that cross in a narrower dtype.

    Each number is rounded once, before it is sent. A reduce-scatter of narrow numbers would send as
    many bytes, and round each partial sum besides.
    """
    size = jax.lax.axis_size(axis)
    rows = jax.lax.all_to_all(x.astype(sent), axis, dim, dim, tiled=True)
    shape = (*x.shape[:dim], size, x.shape[dim] // size, *x.shape[dim + 1 :])
    return rows.reshape(shape).astype(x.dtype).sum(dim)


def _sum_by_ring(rows: jax.Array, axis: str) -> jax.Array:
    """Does what `psum_scatter` does, [n] from [devices, n], in steps that send one row on.

    Row i starts at device i + 1, and gathers what each device has of it until it is at i.
    Reference: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms ...", JPDC 69(2), 2009.
    """
    size, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    ahead = [(i, (i + 1) % size) for i in range(size)]
    own = lambda step: jax.lax.dynamic_index_in_dim(rows, (me - step) % size, keepdims=False)
    total = own(1)
    for step in range(2, size + 1):
        total = jax.lax.ppermute(total, axis, ahead) + own(step)
    return total


def _bucket(arrays: list[jax.Array]) -> jax.Array:
    dtypes = {x.dtype for x in arrays}
    assert len(dtypes) == 1, f"a bucket of {dtypes}: some would come back as another"
    return jnp.concatenate(arrays, axis=-1)


def _divide(rows: jax.Array, sizes: list[int]) -> Any:
    """The columns of each array of a bucket, one after the other."""
    assert rows.shape[1] == sum(sizes), f"{rows.shape[1]} columns for {sizes}"
    starts = [sum(sizes[:i]) for i in range(1, len(sizes))]
    return iter(jnp.split(rows, starts, axis=1))


def _cut(x: jax.Array, dim: int, parts: int) -> jax.Array:
    """[parts, n]: a row for each device."""
    shape = (*x.shape[:dim], parts, x.shape[dim] // parts, *x.shape[dim + 1 :])
    return jnp.moveaxis(x.reshape(shape), dim, 0).reshape(parts, -1)


def _join(rows: jax.Array, shard_shape: tuple[int, ...], dim: int) -> jax.Array:
    """The opposite of `_cut`."""
    parts = jnp.moveaxis(rows.reshape(-1, *shard_shape), 0, dim)
    shape = [*shard_shape]
    shape[dim] *= math.prod(parts.shape) // math.prod(shard_shape)
    return parts.reshape(shape)
