"""Buckets against NumPy: whole arrays cut by hand, and sums in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

from holmesjax.parallel import collectives

# Shape, and the dim that is cut: the first, one in the middle, the last, or none.
TREES = {
    "first, middle, last": {"a": ((8, 3), 0), "b": {"c": ((2, 4, 3), 1)}, "d": ((5, 12), 1)},
    "some whole": {"a": ((3, 5), -1), "b": ((4, 3), 0), "c": ((7,), -1), "d": ((3, 2, 8), 2)},
    "all whole": {"a": ((3, 5), -1), "b": ((), -1)},
    "one": {"a": ((8,), 0)},
}
is_entry = lambda x: isinstance(x, tuple)


def make(name, size, dtype="float32"):
    """Another tree of whole numbers for each device, the dims, and the specs of their shards."""
    tree, rng = TREES[name], np.random.default_rng(0)
    draw = lambda entry: rng.integers(-8, 8, (size, *entry[0])).astype(dtype)
    spec = lambda entry: P() if entry[1] < 0 else P(*[None] * entry[1], "x")
    of_each = functools.partial(jax.tree.map, tree=tree, is_leaf=is_entry)
    return of_each(draw), of_each(lambda entry: entry[1]), of_each(spec)


def on_devices(function, size, in_specs, out_specs):
    mesh = Mesh(np.array(jax.devices()[:size]), ("x",))
    return jax.jit(
        jax.shard_map(
            function, mesh=mesh, in_specs=(in_specs,), out_specs=out_specs, check_vma=False
        )
    )


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), y)


@pytest.mark.parametrize("dtype", ["float32", jnp.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", TREES)
def test_gathered_shards_are_the_whole_array(name, size, dtype):
    values, dims, specs = make(name, size, dtype)
    whole = jax.tree.map(lambda x: x[0], values)
    gather = lambda shards: [
        jax.tree.map(lambda x: x[None], collectives.all_gather(shards, dims, "x", apart=apart))
        for apart in (False, True)
    ]  # [1, ...] of each device, so that all of them are seen
    for got in on_devices(gather, size, specs, P("x"))(whole):
        assert_same(got, jax.tree.map(lambda x: np.stack([x] * size), whole))


@pytest.mark.parametrize("dtype", ["float32", "float16", jnp.bfloat16])
@pytest.mark.parametrize("name", TREES)
def test_two_devices_gather_by_a_sum(name, dtype):
    values, dims, specs = make(name, 2, dtype)
    whole = jax.tree.map(lambda x: x[0], values)
    gather = lambda shards: jax.tree.map(
        lambda x: x[None], collectives.all_gather(shards, dims, "x", by_sum=True)
    )
    got = on_devices(gather, 2, specs, P("x"))(whole)
    assert_same(got, jax.tree.map(lambda x: np.stack([x] * 2), whole))


@pytest.mark.parametrize("dtype", ["float32", "float16", jnp.bfloat16])
def test_a_sum_gathers_every_bit(dtype):
    """Numbers that sums of floats would change: -0, a subnormal, the payload of a NaN."""
    size = np.dtype(dtype).itemsize
    strange = [0x80 << 8 * (size - 1), 1, {2: 0x7FC1, 4: 0x7FC00001}[size], 0]
    bits = np.array(strange, f"uint{8 * size}")
    gather = lambda shard: collectives.all_gather(shard, 0, "x", by_sum=True)
    got = on_devices(gather, 2, P("x"), P())(bits.view(dtype))
    np.testing.assert_array_equal(np.asarray(got).view(bits.dtype), bits)


@pytest.mark.parametrize("dtype", ["float32", jnp.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", TREES)
def test_reduced_shards_are_those_of_the_sum(name, size, dtype):
    values, dims, specs = make(name, size, dtype)
    reduce = lambda x: [
        collectives.reduce_scatter(jax.tree.map(lambda x: x[0], x), dims, "x", **told)
        for told in ({}, {"by_ring": True}, {"apart": True})
    ]
    want = jax.tree.map(lambda x: x.astype(np.float64).sum(0).astype(x.dtype), values)
    for got in on_devices(reduce, size, P("x"), [specs] * 3)(values):
        assert_same(got, want)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("apart", [False, True])
def test_narrow_numbers_are_rounded_once_and_summed_in_float32(size, apart):
    """Arrays that cannot be cut are not rounded. In bfloat16, partial sums would be, too."""
    _, dims, specs = make("some whole", size)
    rng = np.random.default_rng(1)
    draw = lambda entry: rng.normal(size=(size, *entry[0])).astype(np.float32)
    values = jax.tree.map(draw, TREES["some whole"], is_leaf=is_entry)
    run = lambda x: collectives.reduce_scatter(
        jax.tree.map(lambda x: x[0], x), dims, "x", apart=apart, sent="bfloat16"
    )
    got = on_devices(run, size, P("x"), specs)(values)
    for x, dim, y in zip(*map(jax.tree.leaves, (got, dims, values)), strict=True):
        sent = y if dim < 0 or size == 1 else y.astype(jnp.bfloat16)
        want = sent.astype(np.float64).sum(0)
        np.testing.assert_allclose(np.asarray(x), want, rtol=0, atol=1e-6)
    if size > 1:
        text = str(jax.make_jaxpr(on_devices(run, size, P("x"), specs))(values))
        assert text.count(" all_to_all[") == (2 if apart else 1)
        assert " reduce_scatter[" not in text


@pytest.mark.parametrize("name", TREES)
def test_a_bucket_is_one_array(name):
    values, dims, specs = make(name, 2)
    kinds = [dim >= 0 for dim in jax.tree.leaves(dims)]
    whole = jax.tree.map(lambda x: x[0], values)
    gather = lambda x: collectives.all_gather(x, dims, "x")
    text = str(jax.make_jaxpr(on_devices(gather, 2, specs, P()))(whole))
    assert text.count(" all_gather[") == any(kinds)
    reduce = lambda x: collectives.reduce_scatter(x, dims, "x")
    text = str(jax.make_jaxpr(on_devices(reduce, 2, P(), specs))(whole))
    assert text.count(" reduce_scatter[") == any(kinds)
    assert text.count(" psum") == (not all(kinds))
    apart = lambda x: collectives.reduce_scatter(x, dims, "x", apart=True)
    text = str(jax.make_jaxpr(on_devices(apart, 2, P(), specs))(whole))
    assert " concatenate[" not in text
    assert text.count(" reduce_scatter[") == sum(kinds)


def test_a_ring_sends_a_shard_to_the_next_device_in_each_step():
    values, dims, specs = make("one", 4)
    whole = jax.tree.map(lambda x: x[0], values)
    reduce = lambda x: collectives.reduce_scatter(x, dims, "x", by_ring=True)
    jaxpr = str(jax.make_jaxpr(on_devices(reduce, 4, P(), specs))(whole))
    assert jaxpr.count(" ppermute[") == 3
    assert " reduce_scatter[" not in jaxpr


def test_a_bucket_has_one_dtype():
    mixed = {"a": np.zeros(4, np.float32), "b": np.zeros(4, jnp.bfloat16)}
    for function in (collectives.all_gather, collectives.reduce_scatter):
        run = lambda x, function=function: function(x, {"a": 0, "b": 0}, "x")
        with pytest.raises(AssertionError, match="a bucket of"):
            on_devices(run, 2, P(), P())(mixed)
