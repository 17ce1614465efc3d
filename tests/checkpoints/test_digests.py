"""A digest depends on what is in an array, and on nothing else."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from holmesjax.checkpoints import digests

DTYPES = ["float32", "bfloat16", "int8", "int32"]


def by_hand(x):
    """The same with Python's integers, element by element."""
    sums, mask = [0, 0], 2**32 - 1
    words = x.reshape(-1).view({1: np.uint8, 2: np.uint16, 4: np.uint32}[x.dtype.itemsize])
    for i, word in enumerate(words.tolist()):
        h = word ^ (i * 0x9E3779B1 & mask)
        h = (h ^ h >> 16) * 0x85EBCA6B & mask
        h = (h ^ h >> 13) * 0xC2B2AE35 & mask
        h ^= h >> 16
        sums = [(sums[0] + h) & mask, (sums[1] + h * (2 * i + 1)) & mask]
    return f"{sums[0]:08x}{sums[1]:08x}"


def digest(x):
    return digests.of({"x": x})["x"]


def values(shape, dtype):
    random = np.random.default_rng(0).normal(size=shape) * 50
    return np.array(jax.numpy.asarray(random).astype(dtype))


@pytest.mark.parametrize("small", [0, digests.SMALL], ids=["a program", "NumPy"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_digests_are_those_computed_by_hand_on_every_mesh(monkeypatch, dtype, small):
    monkeypatch.setattr(digests, "SMALL", small)
    host = values((4, 6, 8), dtype)
    want = by_hand(host)
    assert digest(jax.device_put(host, jax.devices()[0])) == want
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("a", "b"))
    for spec in (P(), P("b"), P("a", None, "b"), P(None, "a"), P(None, None, ("b", "a"))):
        assert digest(jax.device_put(host, NamedSharding(mesh, spec))) == want, spec
    assert digest(jax.numpy.int32(5)) == by_hand(np.array([5], np.int32))


def test_every_flipped_bit_and_every_swap_changes_it():
    host = values((8, 16), "float32")
    whole = digest(jax.numpy.asarray(host))
    flat = host.view(np.uint32).reshape(-1)
    found = {whole}
    for i in range(0, flat.size, 5):
        flat[i] ^= 1 << i % 32
        found.add(digest(jax.numpy.asarray(host)))
        flat[i] ^= 1 << i % 32
    found.add(digest(jax.numpy.asarray(host[::-1])))
    found.add(digest(jax.numpy.asarray(np.zeros_like(host))))
    assert len(found) == 1 + len(range(0, flat.size, 5)) + 2
