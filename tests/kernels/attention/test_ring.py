"""Attention on meshes: sequences and heads of each device, and sequences that devices share."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

from kernels.attention.reference import CAUSAL
from kernels.attention.ring import REFERENCE, Placement, attention_on, from_runs, to_runs
from kernels.attention.shards import Shards
from kernels.attention.tiles import Rule
from tests.kernels.attention.gpus import first_devices
from tests.kernels.attention.oracle import check, documents, inputs


def test_on_a_mesh_each_device_has_its_sequences_and_heads():
    devices = first_devices(8).reshape(2, 2, 2)
    mesh = Mesh(devices, ("data", "fsdp", "tensor"))
    shards = Shards(mesh, (("B", ("fsdp",)), ("H", ("tensor",)), ("G", ("tensor",))))

    def attention(q, k, v, segments=None, rule=CAUSAL):
        return attention_on(Placement(rule, REFERENCE, shards), q, k, v, segments)

    check(attention, inputs(37, 37, 4, 2, 16), (documents(37),) * 2, Rule())
    q, k, v = inputs(37, 37, 4, 2, 16)
    cut = jax.device_put(q, jax.NamedSharding(mesh, P("fsdp", None, "tensor")))
    text = jax.jit(lambda q: attention(q, k, v)[0]).lower(cut).compile().as_text()
    assert "all-gather" not in text


RINGS = {  # sizes of the mesh, rule, whether there are documents
    "four": ({"context": 4}, Rule(soft_cap=2.0, scale=0.3), True),
    "beside others": ({"fsdp": 2, "context": 2, "tensor": 2}, Rule(), False),
    # Runs have 12 and 6 tokens: a window reaches into one run before, or into all of them.
    "window": ({"context": 2, "tensor": 2}, Rule(window=5, soft_cap=2.0), False),
    "windows over several runs": ({"context": 4}, Rule(window=15), True),
    "a window as long as the sequence": ({"context": 2}, Rule(window=48), True),
}


@pytest.mark.parametrize("case", RINGS)
def test_sequences_cut_over_a_ring(case):
    sizes, rule, has_documents = RINGS[case]
    count = sizes["context"]
    devices = first_devices(math.prod(sizes.values()))
    mesh = Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes))
    has = lambda *axes: tuple(axis for axis in axes if axis in sizes)
    heads = has("tensor")
    shards = Shards(mesh, (("B", has("context", "fsdp")), ("H", heads), ("G", heads)), "context")

    def attention(q, k, v, segments, rule):
        parts = jax.tree.map(cut, (q, k, v, segments))
        out, log_sum = attention_on(Placement(rule, REFERENCE, shards), *parts)
        return join(out), join(log_sum.swapaxes(1, 2)).swapaxes(1, 2)

    def cut(x):
        runs = jnp.split(x, 2 * count, axis=1)
        parts = [jnp.concatenate([runs[i], runs[-1 - i]], axis=1) for i in range(count)]
        return jnp.concatenate(parts, axis=0)

    def join(x):
        halves = [jnp.split(part, 2, axis=1) for part in jnp.split(x, count, axis=0)]
        runs = [first for first, _ in halves] + [second for _, second in halves[::-1]]
        return jnp.concatenate(runs, axis=1)

    segments = (documents(48),) * 2 if has_documents else None
    check(attention, inputs(48, 48, 4, 2, 16), segments, rule)
    q, *_ = inputs(48, 48, 4, 2, 16)
    in_row = jnp.concatenate(jnp.split(q, count, axis=1), axis=0)
    np.testing.assert_array_equal(to_runs(shards, in_row), cut(q))
    np.testing.assert_array_equal(from_runs(shards, cut(q)), in_row)


def test_a_ring_has_no_branches():
    """XLA:GPU would wait on the host for the predicate of each, and half of the devices differ."""
    mesh = Mesh(first_devices(4), ("context",))
    shards = Shards(mesh, (("B", ("context",)), ("H", ()), ("G", ())), "context")
    segments = (documents(48).reshape(8, 12),) * 2

    def total(*args):
        return attention_on(Placement(Rule(), REFERENCE, shards), *args, segments)[0].sum()

    args = [x.reshape(8, 12, *x.shape[2:]) for x in inputs(48, 48, 4, 2, 16)]
    step = jax.jit(jax.value_and_grad(total, (0, 1, 2)))
    assert "cond[" not in str(jax.make_jaxpr(step)(*args))
    assert " conditional(" not in step.lower(*args).compile().as_text()


def test_a_ring_refuses_what_is_not_causal():
    mesh = Mesh(first_devices(2), ("context",))
    shards = Shards(mesh, (("B", ("context",)),), "context")
    placement = Placement(Rule(causal=False), REFERENCE, shards)
    with pytest.raises(ValueError, match="need a causal rule, not Rule"):
        attention_on(placement, *inputs(4, 4, 1, 1, 16), None)
