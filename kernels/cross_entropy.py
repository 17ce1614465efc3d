"""Cross-entropy of logits, and of an output projection whose logits are never all there.

Dims: ... any, V vocabulary; B sequences, L tokens in each, l of them in a chunk, D model width; p
devices that share the sequences.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import optimization_barrier as materialize
from jax.sharding import NamedSharding, PartitionSpec as P

from kernels.attention.shards import Shards

IGNORED = -1  # in place of a target: the token does not count


def capped(logits: jax.Array, soft_cap: float | None) -> jax.Array:
    """c tanh(logits / c), in float32, as Gemma 2 has it (arXiv:2408.00118); None: the logits."""
    wide = logits.astype(jnp.float32)
    return wide if soft_cap is None else soft_cap * jnp.tanh(wide / soft_cap)


def _before_cap(dlogits: jax.Array, wide: jax.Array, soft_cap: float | None) -> jax.Array:
    """The gradient of logits from that of `capped` ones, which are `wide`."""
    return dlogits if soft_cap is None else dlogits * (1.0 - jnp.square(wide / soft_cap))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def cross_entropy(
    logits: jax.Array, target: jax.Array, soft_cap: float | None = None, z_loss: float = 0.0
) -> jax.Array:
    """-log softmax(logits)[target], in nats and float32, from logits [..., V] and target [...].

    The loss of a token whose target is below 0 is 0, and so is its gradient. The gradient of others
    is softmax - onehot, computed from the log-sum-exp and never scattered. With a soft cap, logits
    are `capped` first; what is kept are the logits before. The gradient, and it alone, is that of
    the loss with z_loss * logsumexp(logits)^2 added (PaLM, arXiv:2204.02311).
    """
    return _forward(logits, target, soft_cap, z_loss)[0]


def _forward(
    logits: jax.Array, target: jax.Array, soft_cap: float | None, z_loss: float
) -> tuple[jax.Array, tuple]:
    logits = materialize(logits)
    log_sum = jax.nn.logsumexp(capped(logits, soft_cap), axis=-1)
    picked = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
    loss = jnp.where(target < 0, 0.0, log_sum - capped(picked, soft_cap))
    return loss, (logits, target, log_sum)


def _backward(
    soft_cap: float | None, z_loss: float, saved: tuple, dloss: jax.Array
) -> tuple[jax.Array, None]:
    logits, target, log_sum = saved
    wide = capped(logits, soft_cap)
    softmax = jnp.exp(wide - log_sum[..., None])
    if z_loss:
        softmax = softmax * (1.0 + 2.0 * z_loss * log_sum)[..., None]
    weight = jnp.where(target < 0, 0.0, dloss)
    dlogits = (softmax - _is_target(logits, target)) * weight[..., None]
    return _before_cap(dlogits, wide, soft_cap).astype(logits.dtype), None


cross_entropy.defvjp(_forward, _backward)


def linear_cross_entropy(
    x_BLD: jax.Array,
    w: jax.Array,
    target_BL: jax.Array,
    *,
    is_transposed: bool = False,
    z_loss: float = 0.0,
    num_chunks: int = 1,
    soft_cap: float | None = None,
    shards: Shards | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Sums of -log softmax(x w)[target] and of logsumexp(x w)^2 over tokens; float32 scalars.

    The gradient of the first is that of the first plus z_loss times the second, which has none.

    The logits of L / num_chunks tokens of each sequence are there at a time, in float32. Where
    gradients are wanted, they are computed with them: a chunk's logits are needed once, no product
    is done twice, and what is kept for the backward has the sizes of x and w, as the gradients
    themselves. The gradient of w is summed over the chunks in float32: on each device those of its
    own sequences, and over devices once, after the last chunk. (The order of Liger Kernel,
    arXiv:2410.10989; z-loss of PaLM, arXiv:2204.02311.)

    Args:
      x_BLD: the input of the projection; products run in its dtype.
      w: [D, V]; if `is_transposed`, [V, D], as a token table. Its gradient is in its own dtype.
      target_BL: ids of tokens; one whose target is below 0 does not count.
      num_chunks: 1 to L.
      soft_cap: logits are `capped` with it.
      shards: how a mesh cuts B, V, and D of the gradient of w; None: there is no mesh.
    """
    length = target_BL.shape[1]
    if not 1 <= num_chunks <= length:
        raise ValueError(f"num_chunks must be 1 to {length}, the length, not {num_chunks}")
    static = _Static(num_chunks, z_loss, is_transposed, soft_cap, shards)
    return _linear(static, x_BLD, w, target_BL)


class _Static(NamedTuple):
    num_chunks: int
    z_loss: float
    is_transposed: bool
    soft_cap: float | None
    shards: Shards | None

    @property
    def num_parts(self) -> int:
        """Devices that share the sequences."""
        return 1 if self.shards is None else self.shards.count("B")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(
    static: _Static, x_BLD: jax.Array, w: jax.Array, target_BL: jax.Array
) -> tuple[jax.Array, jax.Array]:
    w_DV = _matrix(w, x_BLD, static.is_transposed)

    def add(totals: tuple, chunk: tuple) -> tuple[tuple, None]:
        sums, _, _ = _chunk_loss(static, w_DV, *chunk)
        return _added(totals, sums), None

    start = (jnp.zeros(()), jnp.zeros(()))
    return jax.lax.scan(add, start, _cut(static.num_chunks, x_BLD, target_BL))[0]


def _added(totals: tuple, sums: tuple) -> tuple[jax.Array, jax.Array]:
    return totals[0] + sums[0], totals[1] + sums[1]


def _linear_forward(
    static: _Static, x_BLD: jax.Array, w: jax.Array, target_BL: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], tuple]:
    w_DV = _matrix(w, x_BLD, static.is_transposed)

    def add(carry: tuple, chunk: tuple) -> tuple[tuple, jax.Array]:
        totals, dw = carry
        x_BlD, target_Bl = chunk
        sums, logits_BlV, log_sum_Bl = _chunk_loss(static, w_DV, *chunk)
        slope = 1.0 + 2.0 * static.z_loss * log_sum_Bl
        softmax = jnp.exp(logits_BlV - log_sum_Bl[..., None])
        dlogits = softmax * slope[..., None] - _is_target(logits_BlV, target_Bl)
        dlogits = _before_cap(dlogits, logits_BlV, static.soft_cap)
        dlogits_BlV = jnp.where(target_Bl[..., None] < 0, 0.0, dlogits).astype(x_BlD.dtype)
        dx_BlD = jnp.einsum("blv,dv->bld", dlogits_BlV, w_DV)
        return (_added(totals, sums), _add_product(static, dw, x_BlD, dlogits_BlV)), dx_BlD

    start = ((jnp.zeros(()), jnp.zeros(())), _no_products(static, w_DV))
    chunks = _cut(static.num_chunks, x_BLD, target_BL)
    (totals, dw), dx_CBlD = jax.lax.scan(add, start, chunks)
    dw_DV = _over_devices(static, dw)
    B, L, D = x_BLD.shape
    dx_BLD = dx_CBlD.swapaxes(0, 1).reshape(B, -1, D)[:, :L]
    dw = dw_DV.T if static.is_transposed else dw_DV
    return totals, (dx_BLD, dw.astype(w.dtype))


# XLA would reduce the gradient of w over the devices in every chunk. A dim p, cut over them, keeps
# the sum of each device until the last chunk.


def _no_products(static: _Static, w_DV: jax.Array) -> jax.Array:
    """The gradient of w before the first chunk, [D, V], or [p, D, V] of several devices."""
    if static.num_parts == 1:
        return jnp.zeros(w_DV.shape, jnp.float32)
    return _apart(static, jnp.zeros((static.num_parts, *w_DV.shape), jnp.float32))


def _add_product(
    static: _Static, dw: jax.Array, x_BlD: jax.Array, dlogits_BlV: jax.Array
) -> jax.Array:
    wide = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    if static.num_parts == 1:
        return dw + wide("bld,blv->dv", x_BlD, dlogits_BlV)
    apart = lambda x: x.reshape(static.num_parts, -1, *x.shape[1:])
    return _apart(static, dw + wide("pbld,pblv->pdv", apart(x_BlD), apart(dlogits_BlV)))


def _apart(static: _Static, dw_pDV: jax.Array) -> jax.Array:
    assert static.shards is not None, "several parts are on a mesh"
    (sequences, vocabulary) = static.shards.spec("BV")
    where = NamedSharding(static.shards.mesh, P(sequences, None, vocabulary))
    return jax.lax.with_sharding_constraint(dw_pDV, where)


def _over_devices(static: _Static, dw: jax.Array) -> jax.Array:
    """The gradient of w, [D, V], of which each device keeps a part."""
    if static.num_parts == 1:
        return dw
    assert static.shards is not None, "several parts are on a mesh"
    where = NamedSharding(static.shards.mesh, static.shards.spec("DV"))
    return jax.lax.with_sharding_constraint(dw.sum(0), where)


def _linear_backward(static: _Static, saved: tuple, cotangents: tuple) -> tuple:
    dloss, _ = cotangents
    dx_BLD, dw = ((g * dloss).astype(g.dtype) for g in saved)
    return dx_BLD, dw, None


_linear.defvjp(_linear_forward, _linear_backward)


def _matrix(w: jax.Array, x: jax.Array, is_transposed: bool) -> jax.Array:
    """[D, V], in the dtype of x."""
    w = w.astype(x.dtype)
    return w.T if is_transposed else w


def _cut(num_chunks: int, x_BLD: jax.Array, target_BL: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[B, L, ...] to [chunks, B, l, ...]; what the last chunk lacks does not count.

    L is cut, so that sequences stay where they are on a mesh.
    """

    def cut(array: jax.Array, fill: int) -> jax.Array:
        B, L, *rest = array.shape
        pad = [(0, 0), (0, -L % num_chunks)] + [(0, 0)] * len(rest)
        padded = jnp.pad(array, pad, constant_values=fill)
        return padded.reshape(B, num_chunks, -1, *rest).swapaxes(0, 1)

    return cut(x_BLD, 0), cut(target_BL, IGNORED)


def _chunk_loss(
    static: _Static, w_DV: jax.Array, x_BlD: jax.Array, target_Bl: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], jax.Array, jax.Array]:
    """Both sums of a chunk, its logits, capped, and their log-sum-exp."""
    logits = jnp.einsum("bld,dv->blv", x_BlD, w_DV, preferred_element_type=jnp.float32)
    logits_BlV = materialize(capped(logits, static.soft_cap))
    log_sum_Bl = jax.nn.logsumexp(logits_BlV, axis=-1)
    # A sum over the vocabulary, which may be cut over devices, where a look-up would gather it.
    picked_Bl = jnp.where(_is_target(logits_BlV, target_Bl), logits_BlV, 0.0).sum(-1)
    total = lambda x_Bl: jnp.sum(jnp.where(target_Bl < 0, 0.0, x_Bl))
    sums = total(log_sum_Bl - picked_Bl), total(jnp.square(log_sum_Bl))
    return sums, logits_BlV, log_sum_Bl


def _is_target(logits: jax.Array, target: jax.Array) -> jax.Array:
    token = jax.lax.broadcasted_iota(target.dtype, logits.shape, logits.ndim - 1)
    return token == target[..., None]
