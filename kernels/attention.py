"""Causal softmax attention with grouped queries: the reference.

    B  sequences            H  query heads        K  width of a head
    L  query positions      G  key-value heads    M  key positions
    R  H / G, the query heads that share a key-value head

Products take the dtype of their inputs and sum in float32; the softmax is float32. Queries go in
blocks that see no key beyond their own end, so what the causal mask would drop is never computed.
The backward pass keeps the output and its log-sum-exp, and computes the probabilities again: memory
is linear in L (Dao et al., arXiv:2205.14135).
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.lax import optimization_barrier as materialize

QUERY_BLOCK = 128  # 64 is as fast and compiles slower (measured on a CPU, L = 256)
MAX_BLOCKS = 8  # longer sequences get longer blocks, so that compile time stays bounded
MASKED = -1e30  # not -inf: its difference from itself is NaN


def attention_reference(
    q_BLHK: jax.Array, k_BMGK: jax.Array, v_BMGK: jax.Array, segment_BL: jax.Array | None = None
) -> jax.Array:
    """softmax(q k^T / sqrt(K)) v over the keys at or before each query; [B, L, H, K].

    Args:
      q_BLHK: queries. H is a multiple of G.
      k_BMGK: keys, M = L.
      v_BMGK: values, M = L.
      segment_BL: the document of each token; attention stays inside it.
    """
    return _attention(q_BLHK, k_BMGK, v_BMGK, segment_BL)


@jax.custom_vjp
def _attention(
    q_BLHK: jax.Array, k_BMGK: jax.Array, v_BMGK: jax.Array, segment_BL: jax.Array | None
) -> jax.Array:
    return _forward(q_BLHK, k_BMGK, v_BMGK, segment_BL)[0]


def _blocks(length: int) -> list[tuple[int, int]]:
    """Start and stop of the blocks of queries.

    >>> _blocks(300)
    [(0, 128), (128, 256), (256, 300)]
    """
    count = -(-length // QUERY_BLOCK)
    size = QUERY_BLOCK * -(-count // MAX_BLOCKS)
    return [(start, min(length, start + size)) for start in range(0, length, size)]


def _group(x_BLHK: jax.Array, num_groups: int) -> jax.Array:
    """[B, L, H, K] to [B, G, R, L, K]."""
    B, L, H, K = x_BLHK.shape
    return x_BLHK.reshape(B, L, num_groups, H // num_groups, K).transpose(0, 2, 3, 1, 4)


def _ungroup(x_BGRLK: jax.Array) -> jax.Array:
    B, G, R, L, K = x_BGRLK.shape
    return x_BGRLK.transpose(0, 3, 1, 2, 4).reshape(B, L, G * R, K)


def _merge(x_BGRLK: jax.Array) -> jax.Array:
    """[B, G, R, L, K] to [B, G, R * L, K]: one product for each key-value head."""
    B, G, R, L, K = x_BGRLK.shape
    return x_BGRLK.reshape(B, G, R * L, K)


def _times(a: jax.Array, b: jax.Array, *, transpose_b: bool = False) -> jax.Array:
    """Matrix products over two batch dims, summed and returned in float32."""
    contracting = ((3,), (3 if transpose_b else 2,))
    dims = (contracting, ((0, 1), (0, 1)))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def _scores(
    q_BGRlK: jax.Array, k_BGMK: jax.Array, segment_BL: jax.Array | None, start: int, stop: int
) -> jax.Array:
    """Masked scores of the queries from start to stop; [B, G, R, stop - start, stop]."""
    B, G, R, num_queries, _ = q_BGRlK.shape
    flat = _times(_merge(q_BGRlK), k_BGMK[:, :, :stop], transpose_b=True)
    mask = (jnp.arange(start, stop)[:, None] >= jnp.arange(stop)[None])[None, None, None]
    if segment_BL is not None:
        same = segment_BL[:, start:stop, None] == segment_BL[:, None, :stop]
        mask = mask & same[:, None, None]
    return jnp.where(mask, flat.reshape(B, G, R, num_queries, stop), MASKED)


def _forward(
    q_BLHK: jax.Array, k_BMGK: jax.Array, v_BMGK: jax.Array, segment_BL: jax.Array | None
) -> tuple[jax.Array, tuple]:
    K, G = q_BLHK.shape[3], k_BMGK.shape[2]
    q = materialize(_group(q_BLHK * K**-0.5, G))
    k, v = materialize((k_BMGK.transpose(0, 2, 1, 3), v_BMGK.transpose(0, 2, 1, 3)))
    outs, log_sums = [], []
    for start, stop in _blocks(q_BLHK.shape[1]):
        scores = materialize(_scores(q[:, :, :, start:stop], k, segment_BL, start, stop))
        top = scores.max(-1, keepdims=True)
        weights = materialize(jnp.exp(scores - top))
        total = weights.sum(-1, keepdims=True)
        out = _times(_merge(weights.astype(v.dtype)), v[:, :, :stop])
        outs.append((out.reshape(*weights.shape[:4], K) / total).astype(v.dtype))
        log_sums.append(top + jnp.log(total))
    # Named, so that a checkpointing policy can keep them and never runs this pass again.
    out_BLHK = checkpoint_name(materialize(_ungroup(jnp.concatenate(outs, 3))), "attention")
    log_sum = checkpoint_name(jnp.concatenate(log_sums, 3), "attention")
    return out_BLHK, (q, k, v, segment_BL, out_BLHK, log_sum)


def _backward(saved: tuple, dout_BLHK: jax.Array) -> tuple:
    q, k, v, segment_BL, out_BLHK, log_sum = saved
    K, G, L = q.shape[4], k.shape[1], q.shape[3]
    dout_BLHK = materialize(dout_BLHK)
    product = dout_BLHK.astype(jnp.float32) * out_BLHK.astype(jnp.float32)
    delta = materialize(_group(product.sum(-1, keepdims=True), G))
    dout = materialize(_group(dout_BLHK, G))
    dqs = []
    dk_BGKM = jnp.zeros((*k.shape[:2], K, L), jnp.float32)  # transposed, so that no product is
    dv_BGKM = dk_BGKM
    for start, stop in reversed(_blocks(L)):
        here = slice(start, stop)
        q_here, dout_here = q[:, :, :, here], dout[:, :, :, here]
        p = _scores(q_here, k, segment_BL, start, stop) - log_sum[:, :, :, here]
        p = materialize(jnp.exp(p))
        dp = _times(_merge(dout_here), v[:, :, :stop], transpose_b=True).reshape(p.shape)
        ds = (p * (materialize(dp) - delta[:, :, :, here])).astype(k.dtype)
        ds = materialize(ds)
        dq = _times(_merge(ds), k[:, :, :stop]).reshape(q_here.shape)
        dqs.append(dq * K**-0.5)
        q_turned = materialize(_merge(q_here).swapaxes(2, 3))
        dout_turned = materialize(_merge(dout_here).swapaxes(2, 3))
        pad = [(0, 0)] * 3 + [(0, L - stop)]
        dk_BGKM = dk_BGKM + jnp.pad(_times(q_turned, _merge(ds)), pad)
        dv_BGKM = dv_BGKM + jnp.pad(_times(dout_turned, _merge(p.astype(v.dtype))), pad)
    dq_BLHK = _ungroup(materialize(jnp.concatenate(dqs[::-1], 3)))
    dk_BMGK, dv_BMGK = (materialize(x).transpose(0, 3, 1, 2) for x in (dk_BGKM, dv_BGKM))
    return dq_BLHK.astype(q.dtype), dk_BMGK.astype(k.dtype), dv_BMGK.astype(v.dtype), None


_attention.defvjp(_forward, _backward)
