"""The moving average of the weights against its formula in float64."""

import jax.numpy as jnp
import numpy as np

from holmesjax.models import ops
from holmesjax.runtime import weight_average


def test_an_average_keeps_little_of_its_beginning_and_nothing_of_steps_that_are_left_out():
    """It keeps min(decay, (1 + n) / (10 + n)) of itself after update n: the decay from n = 8 on."""
    random = np.random.default_rng(0)
    first = random.normal(size=3)
    found = weight_average.begin({"block_000": {"x_D": jnp.float32(first)}})
    wanted, n = first.copy(), 0
    for step in range(14):
        x, applies = random.normal(size=3), step not in (4, 11)
        params = {"block_000": {"x_D": jnp.float32(x)}}
        found = weight_average.after(found, 0.5, params, jnp.asarray(applies), ops.DEFAULT)
        if applies:
            keep = min(0.5, (1 + n) / (10 + n))
            wanted, n = keep * wanted + (1 - keep) * x, n + 1
        np.testing.assert_allclose(found.weights["block_000"]["x_D"], wanted, rtol=1e-5, atol=1e-6)
    assert int(found.updates) == n == 12
