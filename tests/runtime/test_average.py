"""The moving average of the weights against its formula in float64."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np

from holmesjax.models import ops
from holmesjax.runtime.end_of_step import _averaged
from holmesjax.runtime.stage import Average


def test_an_average_keeps_little_of_its_beginning_and_nothing_of_steps_that_are_left_out():
    """It keeps min(decay, (1 + n) / (10 + n)) of itself after update n: the decay from n = 8 on."""
    random, stage = np.random.default_rng(0), SimpleNamespace(ema_decay=0.5)
    first = random.normal(size=3)
    found = Average(jnp.zeros((), jnp.int32), {"block_000": {"x_D": jnp.float32(first)}})
    wanted, n = first.copy(), 0
    for step in range(14):
        x, applies = random.normal(size=3), step not in (4, 11)
        params = {"block_000": {"x_D": jnp.float32(x)}}
        found = _averaged(stage, found, params, jnp.asarray(applies), ops.DEFAULT)
        if applies:
            keep = min(0.5, (1 + n) / (10 + n))
            wanted, n = keep * wanted + (1 - keep) * x, n + 1
        np.testing.assert_allclose(found.weights["block_000"]["x_D"], wanted, rtol=1e-5, atol=1e-6)
    assert int(found.updates) == n == 12
