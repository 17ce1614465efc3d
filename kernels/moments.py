"""An optimizer's moments in fewer bits than float32 has.

A step changes a moment by a few percent, which may be less than the distance between two numbers
that can be written. So numbers are rounded up or down at random, in proportion: the mean is exact.
The noise is a function of the step and of the place in the whole array: the same on any mesh.

    bfloat16   2 bytes a number
    int8       17/16 of a byte: a code, and a float32 scale for every 64 numbers along the last dim

Codes are not evenly spaced, since the numbers of a block differ much in size. With s for the scale,
the largest of its block, a code c stands for

    in a first moment     s (c / 127) |c / 127|,    c from -127 to 127
    in a second moment    s (c / 255)^4,            c from 0 to 255, stored less 128

The first moment is divided by the root of the second. The smallest numbers above zero of both have
a similar size, s / 127^2 and s / 255^2: a number that is rounded badly changes little. A second
moment above zero never becomes zero.

Blocks: Dettmers et al., arXiv:2110.02861. Why no zeros: Li et al., arXiv:2309.01507.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BLOCK = 64  # numbers that share a scale
MOST = {"first": 127, "second": 255}  # codes of the scale itself
OFFSET = 128  # of a second moment's stored codes

Kept = Literal["float32", "bfloat16", "int8"]
Which = Literal["first", "second"]


class Quantized(NamedTuple):
    """Numbers as int8."""

    codes: jax.Array  # int8 [..., n]
    scales: jax.Array  # float32 [..., n / BLOCK]


Moment = jax.Array | Quantized


def has_blocks(shape: Sequence[int]) -> bool:
    """Whether int8 can hold an array: a matrix, of whole blocks. Others stay in float32.

    >>> has_blocks((8, 128)), has_blocks((8, 100)), has_blocks((128,))
    (True, False, False)
    """
    return len(shape) > 1 and shape[-1] % BLOCK == 0


def zero_moment(shape: Sequence[int], kept: Kept, which: Which) -> Moment:
    if kept == "int8" and has_blocks(shape):
        codes = jnp.full(shape, 0 if which == "first" else -OFFSET, jnp.int8)
        return Quantized(codes, jnp.zeros((*shape[:-1], shape[-1] // BLOCK), jnp.float32))
    return jnp.zeros(shape, jnp.bfloat16 if kept == "bfloat16" else jnp.float32)


def widen(moment: Moment, which: Which) -> jax.Array:
    """The moment as float32."""
    if not isinstance(moment, Quantized):
        return moment.astype(jnp.float32)
    found = decode(_blocks(moment.codes), moment.scales, which)
    return found.reshape(moment.codes.shape)


def narrow(x: jax.Array, like: Moment, bits: jax.Array, which: Which) -> Moment:
    """float32 numbers as `like` is kept, rounded by 16 random bits of each."""
    if not isinstance(like, Quantized):
        return round_to_bfloat16(x, bits) if like.dtype == jnp.bfloat16 else x
    codes, scales = encode(_blocks(x), _blocks(bits), which)
    return Quantized(codes.reshape(x.shape), scales)


def _blocks(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:-1], -1, BLOCK)


# ---- of numbers ----------------------------------------------------------------------------------


def of_blocks(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """One number of each block [...], for all numbers of it [..., BLOCK]."""
    return lax.broadcast_in_dim(x, shape, range(x.ndim))


class Operations(NamedTuple):
    """The operations that a kernel writes in its own way.

    A compiler of kernels may join a product and a sum into one instruction, which rounds once, and
    divide faster than exactly.
    """

    times: Callable[[Any, Any], Any] = operator.mul  # the second may be a number
    over: Callable[[Any, Any], Any] = operator.truediv
    sqrt: Callable[[jax.Array], jax.Array] = jnp.sqrt
    of_blocks: Callable[[jax.Array, Sequence[int]], jax.Array] = of_blocks


PLAIN = Operations()


def decode(codes: jax.Array, scales: jax.Array, which: Which, by: Operations = PLAIN) -> jax.Array:
    """float32 numbers of codes [..., BLOCK] with scales [...]."""
    c, scales = codes.astype(jnp.float32), by.of_blocks(scales, codes.shape)
    if which == "first":
        c = by.times(c, 1 / MOST[which])
        return by.times(scales, by.times(c, jnp.abs(c)))
    return by.times(scales, _size(by.times(c + OFFSET, 1 / MOST[which]), which, by))


def _size(c: Any, which: Which, by: Operations = PLAIN) -> Any:
    """The value of a code above zero: its square, or its fourth power."""
    square = by.times(c, c)
    return square if which == "first" else by.times(square, square)


def encode(
    x: jax.Array, bits: jax.Array, which: Which, by: Operations = PLAIN
) -> tuple[jax.Array, jax.Array]:
    """Codes and scales of float32 numbers [..., BLOCK], rounded by 16 random bits of each."""
    size, most = jnp.abs(x), MOST[which]
    scales = jnp.max(size, axis=-1)
    share = by.over(size, by.of_blocks(jnp.where(scales > 0, scales, 1.0), x.shape))
    root = by.sqrt(share) if which == "first" else by.sqrt(by.sqrt(share))
    # Nothing is below zero, so this rounds down; a kernel has no `floor`.
    low = jnp.minimum(by.times(root, most).astype(jnp.int32), most - 1).astype(jnp.float32)
    start, end = _size(low, which, by), _size(low + 1, which, by)
    draw = by.times(bits.astype(jnp.int32).astype(jnp.float32) + 0.5, 2.0**-16)
    is_up = by.times(draw, end - start) < by.times(share, _size(float(most), which)) - start
    code = jnp.where(is_up, low + 1, low)
    if which == "first":
        code = jnp.where(x < 0, -code, code)
    else:
        code = jnp.where(size > 0, jnp.maximum(code, 1), code) - OFFSET
    return code.astype(jnp.int32).astype(jnp.int8), scales


def round_to_bfloat16(x: jax.Array, bits: jax.Array) -> jax.Array:
    """float32 numbers, rounded by 16 random bits of each; NaN stays NaN.

    To the bits of NVIDIA's NaN, 0x7fffffff, nothing can be added: they would become -0.
    """
    kept = (lax.bitcast_convert_type(x, jnp.uint32) + bits) & np.uint32(0xFFFF0000)
    rounded = lax.bitcast_convert_type(kept, jnp.float32)
    return jnp.where(jnp.isnan(x), x, rounded).astype(jnp.bfloat16)


def noise(position: jax.Array, seed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two times 16 random bits for each position; uint32, as are the arguments."""
    found = _mix(_mix(position) + seed)
    return found & np.uint32(0xFFFF), found >> np.uint32(16)


def step_seed(update: jax.Array, seed: int | jax.Array) -> jax.Array:
    """The seed of the noise of an array in an update, from both numbers; uint32."""
    return _mix(update.astype(jnp.int32).astype(jnp.uint32) ^ jnp.asarray(seed, jnp.uint32))


def _mix(x: jax.Array) -> jax.Array:
    """The last steps of MurmurHash3, by Appleby: each bit of x changes each bit of it."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def positions(shape: Sequence[int]) -> jax.Array:
    """The number of each entry in an array of this shape, modulo 2^32; uint32."""
    found, stride = jnp.zeros(shape, jnp.uint32), 1
    for dim in reversed(range(len(shape))):
        counted = lax.broadcasted_iota(jnp.uint32, shape, dim)
        found, stride = found + counted * np.uint32(stride % 2**32), stride * shape[dim]
    return found
