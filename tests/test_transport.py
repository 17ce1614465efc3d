"""The contract of every transport: what is fetched is what was offered, however it is laid out."""

import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from holmesjax.transport import LocalTransport

SHAPE = (8, 6, 4)
TRANSPORTS = {"local": LocalTransport}


def mesh_of(first, data, tensor):
    devices = np.array(jax.devices()[first : first + data * tensor]).reshape(data, tensor)
    return Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


LAYOUTS = [
    (data, tensor, spec)
    for data, tensor in ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1))
    for spec in (
        P(),
        P("data"),
        P(None, "tensor"),
        P("tensor", None, "data"),
        P(("data", "tensor")),
    )
]


@pytest.fixture(params=TRANSPORTS.values(), ids=TRANSPORTS)
def transport(request):
    return request.param()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_any_layout_to_any_other(transport, dtype):
    host = np.arange(np.prod(SHAPE)).reshape(SHAPE).astype(jnp.dtype(dtype))
    for i, (source, target) in enumerate(itertools.product(LAYOUTS, LAYOUTS)):
        here = NamedSharding(mesh_of(0, *source[:2]), source[2])
        there = NamedSharding(mesh_of(4, *target[:2]), target[2])
        transport.offer(i, jax.device_put(host, here))
        got = transport.fetch(i, there, "a -> b")
        assert got.sharding == there
        assert got.dtype == host.dtype
        for shard in got.addressable_shards:  # every replica, not only the first
            np.testing.assert_array_equal(np.asarray(shard.data), host[shard.index])


def test_replicas_are_counted_once(transport):
    replicated = NamedSharding(mesh_of(0, 2, 2), P())
    array = jax.device_put(np.zeros(SHAPE, np.float32), replicated)
    for key in range(3):
        transport.offer(key, array)
        transport.fetch(key, NamedSharding(mesh_of(4, 2, 2), P()), "a -> b")
    assert transport.take_bytes() == {"a -> b": 3 * 8 * 6 * 4 * 4}
    assert transport.take_bytes() == {}


def test_an_offer_is_fetched_once(transport):
    here = NamedSharding(mesh_of(0, 1, 1), P())
    assert not transport.offered("x")
    transport.offer("x", jax.device_put(np.zeros(2), here))
    assert transport.offered("x")
    with pytest.raises(AssertionError, match="offered twice"):
        transport.offer("x", jax.device_put(np.zeros(2), here))
    transport.fetch("x", here, "a -> b")
    assert not transport.offered("x")
    with pytest.raises(KeyError):
        transport.fetch("x", here, "a -> b")


@pytest.mark.parametrize("target", [(2, 2, P("data")), (4, 1, P(None, None, "data"))])
def test_a_fetch_does_not_wait_for_the_data(transport, target):
    """The executor dispatches ahead: a fetch that waits would stop every other stage."""
    here = NamedSharding(mesh_of(0, 2, 2), P("data"))
    there = NamedSharding(mesh_of(4, *target[:2]), target[2])

    def busy(x):
        return jax.lax.fori_loop(0, 600, lambda _, y: jnp.sin(y), x)

    x = jax.device_put(np.ones((64, 64, 64), np.float32), here)
    slow = jax.jit(busy, out_shardings=here).lower(x).compile()
    for key in ("warm", "timed"):
        start = time.perf_counter()
        y = slow(x)
        transport.offer(key, y)
        got = transport.fetch(key, there, "a -> b")
        fetched = time.perf_counter() - start
        waiting = not y.is_ready()
        got.block_until_ready()
        total = time.perf_counter() - start
    assert waiting, f"fetch took {fetched:.3f} of {total:.3f} s: the data was already there"
