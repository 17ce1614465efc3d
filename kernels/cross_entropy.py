"""Cross-entropy of logits: the reference.

Dims: ... any, V vocabulary.
"""

import jax
import jax.numpy as jnp
from jax.lax import optimization_barrier as materialize


@jax.custom_vjp
def cross_entropy(logits: jax.Array, target: jax.Array) -> jax.Array:
    """-log softmax(logits)[target], in nats and float32, from logits [..., V] and target [...].

    The gradient is softmax - onehot, computed from the log-sum-exp and never scattered.
    """
    return _forward(logits, target)[0]


def _forward(logits: jax.Array, target: jax.Array) -> tuple[jax.Array, tuple]:
    logits = materialize(logits)
    log_sum = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)
    picked = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
    return log_sum - picked.astype(jnp.float32), (logits, target, log_sum)


def _backward(saved: tuple, dloss: jax.Array) -> tuple[jax.Array, None]:
    logits, target, log_sum = saved
    token = jax.lax.broadcasted_iota(target.dtype, logits.shape, logits.ndim - 1)
    softmax = jnp.exp(logits.astype(jnp.float32) - log_sum[..., None])
    dlogits = (softmax - (token == target[..., None])) * dloss[..., None]
    return dlogits.astype(logits.dtype), None


cross_entropy.defvjp(_forward, _backward)
