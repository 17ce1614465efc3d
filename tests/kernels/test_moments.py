"""Moments in fewer bits: what is rounded is right on average, wherever it lies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import moments
from kernels.moments import BLOCK, Quantized
from tests.arrays import wide

STEPS = 2000
WHICH = ["first", "second"]


def values(seed, which, *shape, powers=6):
    """Over so many powers of ten; second moments are squares."""
    random = np.random.default_rng(seed)
    size = 10.0 ** random.uniform(-powers / 2, powers / 2, shape)
    sign = random.choice([-1, 1], shape) if which == "first" else 1
    return jnp.asarray(size * sign, jnp.float32)


def bits_of(shape, which, step, seed=7):
    both = moments.noise(moments.positions(shape), moments.step_seed(jnp.int32(step), seed))
    return both[which == "second"]


def rounded(x, kept, which, steps=STEPS):
    """x, as it is kept in each of many steps; float64 [steps, ...]."""
    like = moments.zero_moment(x.shape, kept, which)

    def keep(step):
        return moments.widen(moments.narrow(x, like, bits_of(x.shape, which, step), which), which)

    return wide(jax.jit(jax.vmap(keep))(jnp.arange(steps)))


def levels(x, kept, which):
    """The numbers below and above each entry that can be kept, in float64, in order of size."""
    x = wide(x)
    if kept == "bfloat16":
        exponent = np.floor(np.log2(np.abs(x)))
        step = 2.0 ** (exponent - 7)
        low = np.floor(np.abs(x) / step)
        return low * step, (low + 1) * step
    blocks = np.abs(x).reshape(*x.shape[:-1], -1, BLOCK)
    scale = blocks.max(-1, keepdims=True)
    most, power = (127, 2) if which == "first" else (255, 4)
    low = np.minimum(np.floor((blocks / scale) ** (1 / power) * most + 1e-6), most - 1)
    both = (scale * ((low + i) / most) ** power for i in (0, 1))
    return tuple(level.reshape(x.shape) for level in both)


@pytest.mark.parametrize("kept", ["bfloat16", "int8"])
@pytest.mark.parametrize("which", WHICH)
def test_numbers_are_rounded_up_and_down_in_proportion(kept, which):
    x = values(0, which, 4, 2 * BLOCK)
    low, high = levels(x, kept, which)
    got = rounded(x, kept, which)
    assert np.all(np.sign(got) * np.sign(wide(x)) >= 0)
    # Each time one of the two neighbours.
    off = np.minimum(np.abs(np.abs(got) - low), np.abs(np.abs(got) - high)) / high
    assert off.max() < 1e-5
    # On average the number itself: 6 standard deviations, and three draws where those are few.
    share = np.clip((np.abs(wide(x)) - low) / (high - low), 0, 1)
    mean = (np.abs(got).mean(0) - low) / (high - low)
    assert np.all(np.abs(mean - share) < 6 * np.sqrt(share * (1 - share) / STEPS) + 3 / STEPS)
    assert np.ptp(mean) > 0.9  # they do lie all over


@pytest.mark.parametrize("which", WHICH)
def test_blocks_of_zeros_and_of_one_number(which):
    x = jnp.zeros((1, 3 * BLOCK)).at[0, BLOCK].set(1e-30).at[0, 2 * BLOCK :].set(3.0)
    got = rounded(x, "int8", which, steps=3)
    np.testing.assert_allclose(got, np.broadcast_to(wide(x), got.shape), rtol=1e-6)


def test_a_second_moment_above_zero_never_becomes_zero():
    x = jnp.full((1, BLOCK), 1e-25).at[0, 0].set(1.0)
    got = rounded(x, "int8", "second", steps=50)
    assert got.min() == pytest.approx(255.0**-4, rel=1e-6)


def test_what_has_no_blocks_stays_float32():
    for shape in ((BLOCK,), (8, BLOCK + 1)):
        assert moments.zero_moment(shape, "int8", "first").dtype == jnp.float32
    for which in WHICH:
        zero = moments.zero_moment((8, 2 * BLOCK), "int8", which)
        assert isinstance(zero, Quantized)
        assert (zero.codes.dtype, zero.codes.shape) == (jnp.int8, (8, 2 * BLOCK))
        assert (zero.scales.dtype, zero.scales.shape) == (jnp.float32, (8, 2))
        assert not np.any(wide(moments.widen(zero, which)))


@pytest.mark.parametrize("kept", ["bfloat16", "int8"])
@pytest.mark.parametrize("which", WHICH)
def test_small_changes_add_up(kept, which):
    """A change of 1 in 1000 a step is far less than the distance between two numbers.

    Rounding to the nearest would leave everything as it is.
    """
    target = values(1, which, 64, BLOCK, powers=1)
    like = moments.zero_moment(target.shape, kept, which)

    def step(t, moment):
        x = 0.999 * moments.widen(moment, which) + 0.001 * target
        return moments.narrow(x, like, bits_of(target.shape, which, t), which)

    start = moments.narrow(target / 2, like, bits_of(target.shape, which, 0), which)
    got = wide(moments.widen(jax.jit(lambda m: jax.lax.fori_loop(1, 1001, step, m))(start), which))
    want = wide(target) * (1 - 0.5 * 0.999**1000)
    assert np.mean(got / want) == pytest.approx(1.0, abs=0.02)


def test_noise_is_even_and_new_in_every_step():
    count = 2**16
    draws = np.stack(
        [np.asarray(bits_of((count,), which, step)) for step in (1, 2) for which in WHICH]
    )
    assert draws.max() < 2**16
    for bit in range(16):
        ones = (draws >> bit & 1).mean(1)
        np.testing.assert_allclose(ones, 0.5, atol=5 * 0.5 / count**0.5)
    centred = draws / 2**16 - 0.5
    neighbours = np.concatenate([centred, np.roll(centred, 1, axis=1)])
    correlation = np.corrcoef(neighbours) - np.eye(len(neighbours))
    assert np.abs(correlation).max() < 6 / count**0.5
    other = np.asarray(bits_of((count,), "first", 1, seed=8)) / 2**16 - 0.5
    assert abs(np.corrcoef(other, centred[0])[0, 1]) < 6 / count**0.5


@pytest.mark.parametrize("shape", [(5,), (2, 3, 4)])
def test_every_entry_has_a_position_of_its_own(shape):
    want = np.arange(np.prod(shape)).reshape(shape)
    np.testing.assert_array_equal(moments.positions(shape), want)


@pytest.mark.parametrize("kept", ["bfloat16", "int8"])
@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7FC00000, 0xFFFFFFFF, 0x7F800001])
def test_what_is_no_number_stays_none(kept, bits):
    """Whatever the noise; the first is what NVIDIA's GPUs compute. Infinity is kept, too."""
    x = jnp.asarray(np.full((2, BLOCK), bits, np.uint32).view(np.float32))
    for noise in (0, 1, 0xFFFF):
        narrow = lambda x, noise=noise: moments.narrow(
            x,
            moments.zero_moment(x.shape, kept, "second"),
            jnp.full(x.shape, noise, jnp.uint32),
            "second",
        )
        assert np.isnan(moments.widen(jax.jit(narrow)(x), "second")).all()
    if kept == "bfloat16":
        assert np.isposinf(moments.round_to_bfloat16(jnp.float32(np.inf), np.uint32(0xFFFF)))
