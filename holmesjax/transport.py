"""Moves arrays from one stage to another.

A transport has two calls. `offer` announces an array under a key; `fetch` gives it on another mesh,
once. Both return at once: the data follows when it is there. Every implementation passes the same
contract tests.
"""

from collections import Counter
from collections.abc import Hashable
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding


class Transport(Protocol):
    """What the pipeline needs of any transport."""

    def offer(self, key: Hashable, array: jax.Array) -> None:
        """Announces an array. It must not be donated before it has been fetched."""

    def fetch(self, key: Hashable, target: NamedSharding, link: str) -> jax.Array:
        """The array of that key, laid out as `target`. Each key can be fetched once."""

    def offered(self, key: Hashable) -> bool:
        """Whether a fetch of that key could start now."""

    def take_bytes(self) -> dict[str, int]:
        """Bytes that crossed each link since the last call; replicas count once."""


class LocalTransport:
    """Between meshes of one process."""

    def __init__(self) -> None:
        self._offers: dict[Hashable, jax.Array] = {}
        self._bytes: Counter[str] = Counter()

    def offer(self, key: Hashable, array: jax.Array) -> None:
        assert key not in self._offers, f"{key} is offered twice"
        self._offers[key] = array

    def offered(self, key: Hashable) -> bool:
        return key in self._offers

    def fetch(self, key: Hashable, target: NamedSharding, link: str) -> jax.Array:
        array = self._offers.pop(key)
        self._bytes[link] += array.nbytes
        return move(array, target)

    def take_bytes(self) -> dict[str, int]:
        taken, self._bytes = dict(self._bytes), Counter()
        return taken


def move(array: jax.Array, target: NamedSharding) -> jax.Array:
    """The array on another mesh, without waiting for it.

    `jax.device_put` between meshes goes through the host, and waits, when the shards differ; so
    each target shard is put together from the pieces of source shards that it covers.
    """
    sources = {_bounds(shard.index, array.shape): shard.data for shard in array.addressable_shards}
    devices, shards = [], []
    for device, index in target.addressable_devices_indices_map(array.shape).items():
        assert index is not None
        wanted = _bounds(index, array.shape)
        if wanted not in sources:
            sources[wanted] = _assemble(wanted, sources, array.dtype)
        devices.append(device)
        shards.append(sources[wanted])
    shards = jax.device_put(shards, devices)
    return jax.make_array_from_single_device_arrays(array.shape, target, shards)


Bounds = tuple[tuple[int, int], ...]  # start and stop of every dim


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    return tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))


def _assemble(wanted: Bounds, sources: dict[Bounds, jax.Array], dtype: np.dtype) -> jax.Array:
    """Cuts the wanted box out of the source boxes, which tile the whole array."""
    out = None
    for have, data in sources.items():
        box = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, have, strict=True)]
        if any(start >= stop for start, stop in box):
            continue
        piece = data[tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box, have, strict=True))]
        if tuple(box) == wanted:
            return piece
        if out is None:
            device = next(iter(data.devices()))
            out = jnp.zeros([b - a for a, b in wanted], dtype, device=device)
        piece = jax.device_put(piece, next(iter(out.devices())))
        start = [a - c for (a, _), (c, _) in zip(box, wanted, strict=True)]
        out = jax.lax.dynamic_update_slice(out, piece, start)
    assert out is not None, f"no source shard covers {wanted}"
    return out
