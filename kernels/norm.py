"""LayerNorm and RMSNorm over the last dims: as many as the scale has.

Both compute in float32 and return the dtype of x [..., D]; the backward pass keeps x and its
statistics, one or two numbers for each row.
"""

import functools

import jax
import jax.numpy as jnp
from jax.lax import optimization_barrier as materialize


def _row(scale: jax.Array, x: jax.Array, offset: float = 0.0) -> jax.Array:
    row = jnp.expand_dims(scale.astype(jnp.float32), range(x.ndim - scale.ndim))
    return row + offset if offset else row


def _sum_rows(x: jax.Array, num_dims: int) -> jax.Array:
    """The sum over all dims but the last ones; heads, which a mesh may cut, join no other dim."""
    merged = min(x.ndim - num_dims, 2)
    rows = x.reshape(-1, *x.shape[merged:])
    return rows.sum(tuple(range(rows.ndim - num_dims)))


def _mean(x: jax.Array, num_dims: int) -> jax.Array:
    return x.mean(tuple(range(x.ndim - num_dims, x.ndim)), keepdims=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def layer_norm(
    x: jax.Array,
    scale_D: jax.Array,
    bias_D: jax.Array,
    epsilon: float = 1e-5,
    offset: float = 0.0,
) -> jax.Array:
    """(x - mean) / sqrt(variance + epsilon) * (scale + offset) + bias. Ba et al., arXiv:1607.06450.

    Args:
      x: [..., D].
      scale_D: of each number.
      bias_D: of each number.
      epsilon: added to the variance.
      offset: added to the scale; 1 for one that is stored around 0.
    """
    return _layer_norm_forward(x, scale_D, bias_D, epsilon, offset)[0]


def _layer_norm_forward(
    x: jax.Array, scale_D: jax.Array, bias_D: jax.Array, epsilon: float, offset: float
) -> tuple[jax.Array, tuple]:
    x = materialize(x)
    wide, n = x.astype(jnp.float32), scale_D.ndim
    mean = _mean(wide, n)
    inverse = jax.lax.rsqrt(_mean(jnp.square(wide - mean), n) + epsilon)
    y = (wide - mean) * inverse * _row(scale_D, x, offset) + _row(bias_D, x)
    return materialize(y.astype(x.dtype)), (x, mean, inverse, scale_D)


def _layer_norm_backward(
    epsilon: float, offset: float, saved: tuple, dy: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    x, mean, inverse, scale_D = saved
    n = scale_D.ndim
    dy = materialize(dy).astype(jnp.float32)
    unit = (x.astype(jnp.float32) - mean) * inverse
    dunit = dy * _row(scale_D, x, offset)
    dx = inverse * (dunit - _mean(dunit, n) - unit * _mean(dunit * unit, n))
    dscale_D, dbias_D = _sum_rows(dy * unit, n), _sum_rows(dy, n)
    return dx.astype(x.dtype), dscale_D.astype(scale_D.dtype), dbias_D.astype(scale_D.dtype)


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def rms_norm(
    x: jax.Array, scale: jax.Array, epsilon: float = 1e-5, offset: float = 0.0
) -> jax.Array:
    """x / sqrt(mean(x^2) + epsilon) * (scale + offset). Zhang and Sennrich, arXiv:1910.07467.

    Args: see `layer_norm`. A scale [H, K] takes the mean over both dims.
    """
    return _rms_norm_forward(x, scale, epsilon, offset)[0]


def _rms_norm_forward(
    x: jax.Array, scale: jax.Array, epsilon: float, offset: float
) -> tuple[jax.Array, tuple]:
    x = materialize(x)
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(_mean(jnp.square(wide), scale.ndim) + epsilon)
    y = wide * inverse * _row(scale, x, offset)
    return materialize(y.astype(x.dtype)), (x, inverse, scale)


def _rms_norm_backward(
    epsilon: float, offset: float, saved: tuple, dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, inverse, scale = saved
    dy = materialize(dy).astype(jnp.float32)
    unit = x.astype(jnp.float32) * inverse
    dunit = dy * _row(scale, x, offset)
    dx = inverse * (dunit - unit * _mean(dunit * unit, scale.ndim))
    return dx.astype(x.dtype), _sum_rows(dy * unit, scale.ndim).astype(scale.dtype)


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)
