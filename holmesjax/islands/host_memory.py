"""Moves the state of meetings between devices and pinned memory of their hosts.

On the host it takes no room while steps compute. It is on the devices for a meeting alone, when
nothing else of a step is there: whoever moves it waits, so that both are never there at once.
"""

from dataclasses import replace

import jax
from jax.sharding import SingleDeviceSharding

from holmesjax.islands.meeting import States
from holmesjax.runtime.chunk import ChunkState

HOST = "pinned_host"


def to_hosts(states: States) -> States:
    """The states with what islands keep between meetings in memory of hosts."""
    return {k: list(map(_on_host, island)) for k, island in states.items()}


def to_devices(states: States) -> States:
    """The states with it on devices, once all that computes there is done."""
    jax.block_until_ready([state.params for island in states.values() for state in island])
    return {k: list(map(_on_devices, island)) for k, island in states.items()}


def _on_host(state: ChunkState) -> ChunkState:
    moved = jax.tree.map(lambda x: x if _kind(x) == HOST else _put(x, HOST), state.outer)
    return replace(state, outer=jax.block_until_ready(moved))


def _on_devices(state: ChunkState) -> ChunkState:
    def move(x: jax.Array) -> jax.Array:
        return _put(x, _device(x).default_memory().kind) if _kind(x) == HOST else x

    return replace(state, outer=jax.tree.map(move, state.outer))


def _kind(x: jax.Array) -> str | None:
    kind: str | None = x.sharding.memory_kind
    return kind


def _device(x: jax.Array) -> jax.Device:
    return x.addressable_shards[0].device


def _put(x: jax.Array, kind: str) -> jax.Array:
    """The array in another memory; each process moves its own shards."""
    shards = [
        jax.device_put(shard.data, SingleDeviceSharding(shard.device, memory_kind=kind))
        for shard in x.addressable_shards
    ]
    where = x.sharding.with_memory_kind(kind)
    return jax.make_array_from_single_device_arrays(x.shape, where, shards)
