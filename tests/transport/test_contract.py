"""The contract of every transport: what is fetched is what was offered, however it is laid out."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from holmesjax.parallel.sharding import from_axes, spec_axes
from holmesjax.transport.crossings import Key
from holmesjax.transport.local import LocalTransport
from tests.two_stages import make_crossing, make_plan, mesh_of, start_pair, together

SHAPE = (8, 6, 4)
MESHES = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1))
SPECS = [
    spec_axes(spec, 3)
    for spec in (
        P(),
        P("data"),
        P(None, "tensor"),
        P("tensor", None, "data"),
        P(("data", "tensor")),
    )
]


def open_local(plan, crossings):
    targets = {
        c.name: (from_axes(mesh_of(plan.stages[c.target]), c.target_spec), c.link)
        for c in crossings
    }
    transport = LocalTransport(targets)
    return transport, transport


TRANSPORTS = {
    "local": open_local,
    "tcp": start_pair,
}


class Rig:
    """A transport at both ends."""

    def __init__(self, open_pair, plan, crossings):
        self.plan, self.crossings = plan, {c.name: c for c in crossings}
        self.source, self.target = open_pair(plan, crossings)

    def put(self, host, name):
        crossing = self.crossings[name]
        mesh = mesh_of(self.plan.stages[crossing.source])
        return jax.device_put(host, from_axes(mesh, crossing.source_spec))

    def send(self, key, host):
        """Offers and fetches it."""
        self.source.offer(key, self.put(host, key.crossing))
        self.target.expect([key])
        return self.target.fetch(key)

    def close(self):
        together(self.source.close, self.target.close)


@pytest.fixture(params=TRANSPORTS.values(), ids=TRANSPORTS)
def rig(request):
    """Opens a rig: meshes of the stages, and crossings."""
    rigs = []

    def make(meshes, crossings):
        rigs.append(Rig(request.param, make_plan(*meshes), crossings))
        return rigs[-1]

    make.transport = request.node.callspec.id
    yield make
    for opened in rigs:
        opened.close()


@pytest.fixture
def plain(rig):
    """From one device to one device."""
    return rig(((1, 1), (1, 1)), [make_crossing("F0", SHAPE)])


def host_array(shape=SHAPE, dtype="float32", start=0):
    return (np.arange(np.prod(shape, dtype=int)) + start).reshape(shape).astype(jnp.dtype(dtype))


@pytest.mark.parametrize("meshes", list(itertools.product(MESHES, MESHES)), ids=str)
def test_any_layout_to_any_other(rig, meshes):
    # Each pair of specs meets every dtype, with some meshes or others.
    first = sum(map(sum, meshes))
    crossings = [
        make_crossing(f"F{i}", SHAPE, ("float32", "bfloat16", "int32")[(first + i) % 3], *specs)
        for i, specs in enumerate(itertools.product(SPECS, SPECS))
    ]
    opened = rig(meshes, crossings)
    for crossing in crossings:
        host = host_array(dtype=crossing.dtype)
        got = opened.send(Key(crossing.name, 1, 0), host)
        there = from_axes(mesh_of(opened.plan.stages[1]), crossing.target_spec)
        assert got.sharding.is_equivalent_to(there, 3)
        assert got.dtype == host.dtype
        for shard in got.addressable_shards:  # every replica, not only the first
            np.testing.assert_array_equal(np.asarray(shard.data), host[shard.index])


@pytest.mark.parametrize("shape", [(), (1,), (1, 5), (7, 1, 3)])
def test_any_shape(rig, shape):
    opened = rig(((2, 2), (2, 2)), [make_crossing("F0", shape)])
    np.testing.assert_array_equal(
        opened.send(Key("F0", 1, 0), host_array(shape)), host_array(shape)
    )


def test_replicas_are_counted_once(rig):
    opened = rig(((2, 2), (2, 2)), [make_crossing("F0", SHAPE), make_crossing("F1", SHAPE)])
    for m in range(3):
        opened.send(Key("F0", 1, m), host_array())
    opened.send(Key("F1", 1, 0), host_array())
    assert opened.target.take_bytes() == {"ib -> roce": 4 * 8 * 6 * 4 * 4}
    assert opened.target.take_bytes() == {}


def test_an_offer_is_fetched_once(plain):
    key = Key("F0", 1, 0)
    plain.target.expect([key])
    assert not plain.target.arrived(key)
    array = plain.put(host_array(), "F0")
    plain.source.offer(key, array)
    plain.target.fetch(key)
    assert not plain.target.arrived(key)
    with pytest.raises((KeyError, AssertionError)):
        plain.target.fetch(key)
    other = Key("F0", 1, 1)
    plain.source.offer(other, array)
    with pytest.raises(AssertionError, match="offered twice"):
        plain.source.offer(other, array)
    plain.target.expect([other])
    plain.target.fetch(other)


def test_offers_in_any_order_are_fetched_as_expected(plain):
    keys = [Key("F0", step, m) for step in (1, 2) for m in range(16)]
    plain.target.expect(keys[:16])
    plain.target.expect(keys[16:])
    for i in reversed(range(len(keys))):
        plain.source.offer(keys[i], plain.put(host_array(start=i), "F0"))
    for i, key in enumerate(keys):
        if not plain.target.arrived(key):
            plain.target.wait(keys[i : i + 1])
            assert plain.target.arrived(key)
        np.testing.assert_array_equal(plain.target.fetch(key), host_array(start=i))


def test_fetching_out_of_order_is_possible(plain):
    """Not what it is made for, but two stages of a process could be woken in another order."""
    keys = [Key("F0", 1, m) for m in range(6)]
    plain.target.expect(keys)
    for i in (4, 5, 0, 3, 1, 2):
        plain.source.offer(keys[i], plain.put(host_array(start=i), "F0"))
        np.testing.assert_array_equal(plain.target.fetch(keys[i]), host_array(start=i))


def test_both_directions_at_once(rig):
    crossings = [make_crossing("F0", SHAPE), make_crossing("B1", SHAPE, back=True)]
    opened = rig(((2, 1), (1, 2)), crossings)
    keys = {name: [Key(name, 1, m) for m in range(8)] for name in ("F0", "B1")}
    opened.target.expect(keys["F0"])
    opened.source.ask(keys["B1"])  # in the background
    for i, (there, back) in enumerate(zip(*keys.values(), strict=True)):
        opened.source.offer(there, opened.put(host_array(start=i), "F0"))
        opened.target.offer(back, opened.put(host_array(start=-i), "B1"))
    for i, (there, back) in enumerate(zip(*keys.values(), strict=True)):
        np.testing.assert_array_equal(opened.target.fetch(there), host_array(start=i))
        np.testing.assert_array_equal(opened.source.fetch(back), host_array(start=-i))


def busy(x):
    return jax.lax.fori_loop(0, 300, lambda _, y: jnp.sin(y), x)


@pytest.mark.parametrize("target", [((2, 2), SPECS[1]), ((4, 1), SPECS[1])])
def test_nothing_waits_for_the_data_but_waiting(rig, target):
    """The executor dispatches ahead: a call that waits would stop every other task."""
    shape = (64, 64, 64)
    mesh, spec = target
    opened = rig(((2, 2), mesh), [make_crossing("F0", shape, "float32", SPECS[1], spec)])
    x = opened.put(np.ones(shape, np.float32), "F0")
    slow = jax.jit(busy, out_shardings=x.sharding).lower(x).compile()
    for m in range(2):  # the first call warms up
        key = Key("F0", 1, m)
        y = slow(x)
        opened.target.expect([key])
        opened.source.offer(key, y)
        opened.target.arrived(key)
        got = opened.target.fetch(key) if rig.transport.startswith("local") else None
        is_waiting = not y.is_ready()
        got = opened.target.fetch(key) if got is None else got
        np.testing.assert_array_equal(got, y)
    assert is_waiting, "the data was already there"


def test_local_deadlock_is_our_bug():
    source, _ = open_local(make_plan((1, 1), (1, 1)), [make_crossing("F0", SHAPE)])
    with pytest.raises(AssertionError, match="deadlocks: nobody offers F0 of microbatch 2"):
        source.wait([Key("F0", 1, 2)])


def test_a_transport_between_meshes_gives_the_sharding_asked_for():
    plan = make_plan((1, 1), (2, 2))
    there = NamedSharding(mesh_of(plan.stages[1]), P(None, "tensor"))
    crossing = make_crossing("F0", SHAPE, target_spec=SPECS[2])
    source, target = open_local(plan, [crossing])
    source.offer(Key("F0", 1, 0), jnp.zeros(SHAPE))
    assert target.fetch(Key("F0", 1, 0)).sharding == there
