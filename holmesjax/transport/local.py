"""Moves arrays from one stage to another inside a process, and the protocol of all transports.

`offer` announces an array under a key. `fetch` gives it on the other stage's mesh, once. Every
transport passes the same contract tests.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from holmesjax.layer_specs.array_boxes import Box, from_index, intersection, shape_of, within
from holmesjax.transport.crossings import Key


class Transport(Protocol):
    """A transport, as the pipeline uses it."""

    def offer(self, key: Key, array: jax.Array) -> None:
        """Announces an array. It must not be donated before it has been fetched."""

    def expect(self, keys: Sequence[Key]) -> None:
        """Announces the next fetches, in their order, so that arrays can be asked for ahead."""

    def ask(self, keys: Sequence[Key]) -> None:
        """Asks for arrays that are fetched some steps later; they come while steps go on."""

    def arrived(self, key: Key) -> bool:
        """Whether a fetch of that key would not wait."""

    def wait(self, keys: Collection[Key]) -> None:
        """Returns when one of them has arrived. Raises PeerError if none can."""

    def fetch(self, key: Key) -> jax.Array:
        """Returns the array of a key, laid out for its target. Each key can be fetched once."""

    def take_bytes(self) -> dict[str, int]:
        """Returns the bytes that crossed each link since the last call; replicas count once."""

    def close(self) -> None:
        """Returns when everything that was offered has been delivered."""


class LocalTransport:
    """A transport between meshes of one process.

    Args:
      targets: for each crossing, by name, the sharding at its target and the name of its link; None
        where its bytes are not counted.
    """

    def __init__(self, targets: Mapping[str, tuple[NamedSharding, str | None]]) -> None:
        self._targets = targets
        self._offers: dict[Key, jax.Array] = {}
        self._bytes: Counter[str] = Counter()

    def offer(self, key: Key, array: jax.Array) -> None:
        assert key not in self._offers, f"{key} is offered twice"
        self._offers[key] = array

    def expect(self, keys: Sequence[Key]) -> None:
        pass  # what is in this process needs no asking ahead

    def ask(self, keys: Sequence[Key]) -> None:
        pass

    def arrived(self, key: Key) -> bool:
        return key in self._offers

    def wait(self, keys: Collection[Key]) -> None:
        raise AssertionError(f"the schedule deadlocks: nobody offers {' or '.join(map(str, keys))}")

    def fetch(self, key: Key) -> jax.Array:
        array = self._offers.pop(key)
        target, link = self._targets[key.crossing]
        if link is not None:
            self._bytes[link] += array.nbytes
        return move(array, target)

    def take_bytes(self) -> dict[str, int]:
        taken, self._bytes = dict(self._bytes), Counter()
        return taken

    def close(self) -> None:
        pass


def move(array: jax.Array, target: NamedSharding) -> jax.Array:
    """Moves an array to another mesh, without waiting for it.

    `jax.device_put` between meshes goes through the host, and waits, if the shards differ. So each
    target shard is assembled from the pieces of source shards that it covers.
    """
    sources = {
        from_index(shard.index, array.shape): shard.data for shard in array.addressable_shards
    }
    devices, shards = [], []
    for device, index in target.addressable_devices_indices_map(array.shape).items():
        assert index is not None
        wanted = from_index(index, array.shape)
        if wanted not in sources:
            sources[wanted] = _assemble(wanted, sources, array.dtype)
        devices.append(device)
        shards.append(sources[wanted])
    shards = jax.device_put(shards, devices)
    return jax.make_array_from_single_device_arrays(array.shape, target, shards)


def _assemble(wanted: Box, sources: dict[Box, jax.Array], dtype: np.dtype) -> jax.Array:
    """Cuts the wanted box out of the source boxes, which tile the whole array."""
    out = None
    for have, data in sources.items():
        box = intersection(wanted, have)
        if box is None:
            continue
        piece = data[within(box, have)]
        if box == wanted:
            return piece
        if out is None:
            out = jnp.zeros(shape_of(wanted), dtype, device=next(iter(data.devices())))
        piece = jax.device_put(piece, next(iter(out.devices())))
        start = [a - c for (a, _), (c, _) in zip(box, wanted, strict=True)]
        out = jax.lax.dynamic_update_slice(out, piece, start)
    assert out is not None, f"no source shard covers {wanted}"
    return out
