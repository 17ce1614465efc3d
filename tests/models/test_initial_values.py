"""Values of a box are those of the whole array, and normal."""

import hashlib
import math
from statistics import NormalDist

import numpy as np
import pytest

from holmesjax.config import ModelConfig
from holmesjax.layer_specs.kind import Normal, Uniform
from holmesjax.models import initial_values
from holmesjax.models.layer import init_params

# Rows of odd and of even sizes, and rows longer than a block.
SHAPES = [(7,), (5, 3), (6, 4, 5), (3, 2 * initial_values.BLOCK + 9), (2, 3, 70001)]
STANDARD = Normal(1.0)


def whole(shape):
    return tuple((0, size) for size in shape)


def draw(shape, box=None, name="0/block_000/up_DF", initial=STANDARD):
    return initial_values.draw(name, shape, box or whole(shape), initial)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_box_is_that_box_of_the_whole_array(shape):
    random, array = np.random.default_rng(0), draw(shape)
    assert array.shape == shape
    for _ in range(40):
        ends = [sorted(random.choice(size + 1, 2, replace=False)) for size in shape]
        box = tuple((int(a), int(b)) for a, b in ends)
        index = tuple(slice(a, b) for a, b in box)
        np.testing.assert_array_equal(draw(shape, box), array[index])


def test_values_are_the_same_bits_everywhere():
    """The pinned values come of integers, and of a table of roundings to float32."""
    table = hashlib.sha256(initial_values._quantiles().tobytes()).hexdigest()
    values = hashlib.sha256(draw((300, 301), initial=Normal(0.02)).tobytes()).hexdigest()
    assert (table[:16], values[:16]) == ("1cfbba1e07e34386", "cd829714f18eb10d")


def test_values_are_normal_and_not_alike():
    """Against the normal distribution; five standard errors, of a million values."""
    shape = 1000, 1000
    x, other = draw(shape).astype(np.float64), draw(shape, name="0/block_001/up_DF")
    error = 5 / math.sqrt(x.size)
    assert abs(x.mean()) < error
    assert abs(x.var() - 1) < math.sqrt(2) * error
    assert abs((x**3).mean()) < math.sqrt(15) * error
    assert abs((x**4).mean() - 3) < math.sqrt(96) * error
    for p in (1e-4, 0.01, 0.1, 0.5, 0.9, 0.99, 1 - 1e-4):
        assert abs((x < NormalDist().inv_cdf(p)).mean() - p) < math.sqrt(p * (1 - p)) * error
    for y in (other, x.T, np.roll(x, 1, 0), np.roll(x, 1, 1), np.roll(x, 2, 1)):
        assert abs((x * y).mean()) < 2 * error  # the diagonal of the transpose is itself
        assert abs((x**2 * y**2).mean() - 1) < 16 * error
    assert len(np.unique(x)) > 0.9 * x.size


def test_a_model_starts_as_gpt_2_did():
    """Radford et al., 2019: 0.02, and for the 2 N products that add to the residual stream less."""
    sizes = {"num_layers": 8, "width": 64, "num_heads": 4, "context_length": 32}
    model = ModelConfig(**sizes, vocab_size=96, positions="learned", norm="layer_norm")
    seen = set()
    for layer, params in init_params(model, seed=0, names=("embed", "block_003", "head")).items():
        for name, x in params.items():
            if isinstance(x, dict):  # of a norm
                np.testing.assert_array_equal(x["scale_D"], 1.0)
                np.testing.assert_array_equal(x["bias_D"], 0.0)
                continue
            std = 0.02 / math.sqrt(2 * 8) if name in ("out_HKD", "down_FD") else 0.02
            assert abs(x.std() / std - 1) < 5 / math.sqrt(2 * x.size), f"{layer}.{name}"
            seen.add(name)
    assert seen >= {"token_VD", "position_PD", "query_DHK", "out_HKD", "up_DF", "down_FD"}


def test_uniform_values_fill_their_bounds_evenly():
    """Against the uniform distribution; five standard errors, of a million values."""
    shape, bound = (1000, 1000), 0.25
    x = draw(shape, initial=Uniform(bound))
    np.testing.assert_array_equal(
        draw(shape, ((3, 8), (1, 1000)), initial=Uniform(bound)), x[3:8, 1:]
    )
    counts, _ = np.histogram(x, 64, (-bound, bound))
    assert counts.sum() == x.size
    assert np.abs(counts / x.size - 1 / 64).max() < 5 / math.sqrt(64 * x.size)
    assert abs((x * np.roll(x, 1, 1)).mean()) < 5 * bound**2 / 3 / math.sqrt(x.size)
