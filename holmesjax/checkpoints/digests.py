"""Digests of arrays: the same however an array is cut, computed where it lies.

A digest is two sums over all elements, mod 2^32, of a mix of the element's bits and of its index in
the whole array. So each device adds up its own shard, two integers leave it, and what one plan has
written another can check. A change of one element always changes the digest; other
damage leaves it as it was with a chance of 2^-64. It is a check of disks, not of forgers.

Small arrays are added up by NumPy on the host. Each shape would need a program of its own, which
takes longer to compile than all of its elements to add up.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from holmesjax.parallel import sharding

BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}  # by bytes of an element

PIECE_BYTES = 4 << 20  # bytes of a NumPy array that are summed at a time
SMALL = 1 << 16  # elements that NumPy sums in less time than a program for their shape compiles

INDEX = np.uint32(0x9E3779B1)
# The finalizer of MurmurHash3 (Appleby, 2011), a permutation of 32-bit words.
FIRST, SECOND = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)


def of(arrays: Mapping[str, jax.Array] | Mapping[str, np.ndarray]) -> dict[str, str]:
    """The digest of each array, 16 hexadecimal digits, in every process.

    All processes that hold parts of the arrays call it together, with the same arrays in the same
    order. One collective adds the sums of all processes.

    Args:
      arrays: on one mesh, on one device, or NumPy's.
    """
    # Programs without collectives: XLA:CPU may run several at once, in another order elsewhere.
    parts = jax.device_get([_parts(x) for x in arrays.values()])
    sums = np.array([np.sum(part, axis=(0, 1), dtype=np.uint32) for part in parts])
    where = getattr(next(iter(arrays.values())), "sharding", None)
    if where is not None and not where.is_fully_addressable:
        assert isinstance(where, NamedSharding), where
        sums = _sum_of_processes(sums, where)
    return {key: f"{a:08x}{b:08x}" for key, (a, b) in zip(arrays, sums.tolist(), strict=True)}


def _sum_of_processes(sums: np.ndarray, where: NamedSharding) -> np.ndarray:
    """Adds the sums of all processes over the mesh; one device of each process carries its own."""
    mesh, places = where.mesh, iter([sums])
    spread = NamedSharding(mesh, P(mesh.axis_names))
    each = jax.make_array_from_callback(
        (mesh.size, *sums.shape), spread, lambda _: next(places, np.zeros_like(sums))[None]
    )
    add = jax.jit(
        lambda x: jnp.sum(x, axis=0, dtype=jnp.uint32), out_shardings=NamedSharding(mesh, P())
    )
    return np.asarray(add(each))


def _parts(x: jax.Array | np.ndarray) -> list[jax.Array] | list[np.ndarray]:
    """Returns two sums, [1, 2], for each local device, or for each piece of a NumPy array."""
    if x.size <= SMALL:
        return _parts_of_small(x)
    if isinstance(x, jax.Array):
        return [shard.data for shard in _program(x.sharding)(x).addressable_shards]
    step = max(1, PIECE_BYTES * len(x) // x.nbytes)
    starts = range(0, len(x), step)
    # One after the other, and each a copy: JAX holds what it reads until some later call.
    of_rows = lambda a: jax.block_until_ready(
        _sums_of_rows(x[a : a + step].copy(), np.uint32(a), x.shape)
    )
    return [of_rows(start) for start in starts]


def _parts_of_small(x: jax.Array | np.ndarray) -> list[np.ndarray]:
    """Does what `_parts` does, in NumPy. A shard that several devices hold counts once."""
    held = [((slice(None),) * x.ndim, x)]
    if isinstance(x, jax.Array):
        held = [
            (shard.index, shard.data) for shard in x.addressable_shards if shard.replica_id == 0
        ]
    parts = [np.zeros((1, 2), np.uint32)]  # the sums of a process without a shard that counts
    for box, shard in held:
        bits = np.ascontiguousarray(shard).view(BITS[x.dtype.itemsize])  # of a scalar: [1]
        starts = [cut.start or 0 for cut in box] or [0]
        terms = _terms(np, bits, x.shape or (1,), starts)
        parts.append(np.array([[np.sum(term, dtype=np.uint32) for term in terms]]))
    return parts


@functools.partial(jax.jit, static_argnames="shape")
def _sums_of_rows(rows: jax.Array, start: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return _sums(rows, shape, (start, *(0,) * (len(shape) - 1)))[None]


@functools.cache
def _program(where: jax.sharding.Sharding) -> Callable[[jax.Array], jax.Array]:
    """Two sums for each device, [devices, 2]; compiled once for each shape, dtype and sharding."""
    if not isinstance(where, NamedSharding):
        return jax.jit(lambda x: _sums(x, x.shape, (0,) * x.ndim)[None])
    names = where.mesh.axis_names

    def on_shards(x: jax.Array) -> jax.Array:
        cuts = sharding.spec_axes(where.spec, x.ndim)
        others = [name for name in names if name not in sum(cuts, ())]

        def sums(shard: jax.Array) -> jax.Array:
            starts = tuple(
                jax.lax.axis_index(axes) * size if axes else 0
                for axes, size in zip(cuts, shard.shape, strict=True)
            )
            found = _sums(shard, x.shape, starts)
            # A shard that several devices hold counts once.
            is_first = sum((jax.lax.axis_index(name) for name in others), jnp.int32(0)) == 0
            return jnp.where(is_first, found, jnp.zeros_like(found))[None]

        return jax.shard_map(
            sums, mesh=where.mesh, in_specs=where.spec, out_specs=P(names), check_vma=False
        )(x)

    return jax.jit(on_shards)


def _sums(shard: jax.Array, shape: tuple[int, ...], starts: Sequence[Any]) -> jax.Array:
    """Returns both sums of a box, at its place in the whole array."""
    bits = jax.lax.bitcast_convert_type(shard, BITS[shard.dtype.itemsize])
    # Both sums in one reduction: XLA:CPU makes vector instructions of this one alone.
    add = lambda a, b: (a[0] + b[0], a[1] + b[1])
    terms = _terms(jnp, bits, shape, starts)
    return jnp.stack(jax.lax.reduce(terms, (np.uint32(0),) * 2, add, tuple(range(shard.ndim))))


def _terms(numpy: Any, bits: Any, shape: tuple[int, ...], starts: Sequence[Any]) -> tuple[Any, Any]:
    """Returns the terms of both sums for the bits of a box, at its place in the whole array.

    Args:
      numpy: the module that computes them, NumPy or JAX's.
    """
    index, stride = numpy.zeros(bits.shape, np.uint32), 1
    for dim in reversed(range(bits.ndim)):
        inside = numpy.arange(bits.shape[dim], dtype=np.uint32) + numpy.uint32(starts[dim])
        along = [-1 if other == dim else 1 for other in range(bits.ndim)]
        index += np.uint32(stride % 2**32) * inside.reshape(along)
        stride *= shape[dim]
    mixed = bits.astype(np.uint32) ^ (index * INDEX)
    mixed = (mixed ^ (mixed >> 16)) * FIRST
    mixed = (mixed ^ (mixed >> 13)) * SECOND
    mixed ^= mixed >> 16
    return mixed, mixed * (2 * index + 1)
