"""LayerNorm and RMSNorm over the last dim.

Both compute in float32 and return the dtype of x [..., D]; the backward pass keeps x and its
statistics, one or two numbers for each row.
"""

import jax
import jax.numpy as jnp
from jax.lax import optimization_barrier as materialize

EPSILON = 1e-5


def _row(scale_D: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.expand_dims(scale_D.astype(jnp.float32), range(x.ndim - 1))


def _sum_rows(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1]).sum(0)


def _mean(x: jax.Array) -> jax.Array:
    return x.mean(-1, keepdims=True)


@jax.custom_vjp
def layer_norm(x: jax.Array, scale_D: jax.Array, bias_D: jax.Array) -> jax.Array:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias. Ba et al., arXiv:1607.06450."""
    return _layer_norm_forward(x, scale_D, bias_D)[0]


def _layer_norm_forward(
    x: jax.Array, scale_D: jax.Array, bias_D: jax.Array
) -> tuple[jax.Array, tuple]:
    x = materialize(x)
    wide = x.astype(jnp.float32)
    mean = _mean(wide)
    inverse = jax.lax.rsqrt(_mean(jnp.square(wide - mean)) + EPSILON)
    y = (wide - mean) * inverse * _row(scale_D, x) + _row(bias_D, x)
    return materialize(y.astype(x.dtype)), (x, mean, inverse, scale_D)


def _layer_norm_backward(saved: tuple, dy: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    x, mean, inverse, scale_D = saved
    dy = materialize(dy).astype(jnp.float32)
    unit = (x.astype(jnp.float32) - mean) * inverse
    dunit = dy * _row(scale_D, x)
    dx = inverse * (dunit - _mean(dunit) - unit * _mean(dunit * unit))
    dscale_D, dbias_D = _sum_rows(dy * unit), _sum_rows(dy)
    return dx.astype(x.dtype), dscale_D.astype(scale_D.dtype), dbias_D.astype(scale_D.dtype)


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


@jax.custom_vjp
def rms_norm(x: jax.Array, scale_D: jax.Array) -> jax.Array:
    """x / sqrt(mean(x^2) + epsilon) * scale. Zhang and Sennrich, arXiv:1910.07467."""
    return _rms_norm_forward(x, scale_D)[0]


def _rms_norm_forward(x: jax.Array, scale_D: jax.Array) -> tuple[jax.Array, tuple]:
    x = materialize(x)
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(_mean(jnp.square(wide)) + EPSILON)
    y = wide * inverse * _row(scale_D, x)
    return materialize(y.astype(x.dtype)), (x, inverse, scale_D)


def _rms_norm_backward(saved: tuple, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, inverse, scale_D = saved
    dy = materialize(dy).astype(jnp.float32)
    unit = x.astype(jnp.float32) * inverse
    dunit = dy * _row(scale_D, x)
    dx = inverse * (dunit - unit * _mean(dunit * unit))
    return dx.astype(x.dtype), _sum_rows(dy * unit).astype(scale_D.dtype)


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)
