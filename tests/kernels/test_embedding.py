"""Rows of a table, and the gradient of the table against `numpy.add.at`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from kernels.embedding import embedding
from tests.arrays import assert_near, normal, wide
from tests.kernels.attention.gpus import first_devices
from tests.kernels.gradients import DTYPES

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding(dtype):
    """Half of the tokens are the same one."""
    often = np.random.default_rng(0).random((4, 300)) < 0.5
    row = jnp.asarray(np.where(often, 3, np.random.default_rng(1).integers(0, 7, (4, 300))))
    table, dy = normal(2, 7, 5, dtype=dtype), normal(3, 4, 300, 5, dtype=dtype) + 1
    y, pullback = jax.vjp(lambda table: embedding(table, row), table)
    np.testing.assert_array_equal(y, table[row])
    [got] = jax.jit(pullback)(dy)
    want = np.zeros((7, 5))
    np.add.at(want, row, wide(dy))
    assert got.dtype == table.dtype
    rounding = {"float32": 1e-5, "bfloat16": 2.0**-8}[dtype]  # of the sum: one of bfloat16
    np.testing.assert_allclose(wide(got), want, rtol=rounding)


def test_embedding_on_a_mesh():
    """Tokens and the table are cut: what one row gets comes from all devices."""
    mesh = Mesh(first_devices(4).reshape(2, 2), ("fsdp", "tensor"))
    on = lambda x, *axes: jax.device_put(x, NamedSharding(mesh, P(*axes)))
    row = np.random.default_rng(0).integers(0, 3, (4, 50))
    dy = normal(1, 4, 50, 8, dtype="bfloat16")
    table = on(jnp.zeros((6, 8), jnp.bfloat16), "tensor", "fsdp")
    gradient = jax.jit(lambda table, row, dy: jax.vjp(lambda t: embedding(t, row), table)[1](dy)[0])
    got = gradient(table, on(row, "fsdp"), on(dy, "fsdp"))
    want = np.zeros((6, 8))
    np.add.at(want, row, wide(dy))
    assert_near(got, want, "bfloat16")
