"""Softmax attention with grouped queries, in plain JAX: the reference.

Products take the dtype of their inputs and sum in float32; the softmax is float32. Queries go in
blocks that meet no key beyond what their rule lets them see, so most of what a causal mask would
drop is never computed. A loop goes through the chunks of a block, and has the scores of one chunk
at a time. The backward pass keeps the output and its log-sum-exp, and computes the probabilities
again. So memory is linear in L (Dao et al., arXiv:2205.14135).

Dims besides those of the package: l  the queries of a chunk, m  the keys that they meet.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.lax import optimization_barrier as materialize

from kernels.attention.tiles import Rule, Segments

QUERY_CHUNK = 128  # 64 is as fast and compiles slower (measured on a CPU, L = 256)
MAX_BLOCKS = 8  # longer sequences get blocks of more chunks, so that compile time stays bounded
MASKED = -1e30  # not -inf: its difference from itself is NaN
SAVED = "attention"  # the name of what a backward needs: `jax.checkpoint` policies may keep it
CAUSAL = Rule()


def attention_reference(
    q_BLHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    segments: Segments | None = None,
    rule: Rule = CAUSAL,
) -> tuple[jax.Array, jax.Array]:
    """softmax(q k^T scale) v over the keys that each query sees.

    Args:
      q_BLHK: queries. H is a multiple of G.
      k_BMGK: keys; M = L if the rule is causal.
      v_BMGK: values.
      segments: the document of each query [B, L] and of each key [B, M]; a query sees its own only.
      rule: which keys a query sees besides, and what is done to scores.

    Returns:
      The output [B, L, H, K], in the dtype of v, and the log-sum-exp of the scores [B, H, L],
      float32. A query that sees no key has the output 0 and the log-sum-exp `MASKED`.
    """
    return _attention(rule, q_BLHK, k_BMGK, v_BMGK, segments)


def forward_reference(
    rule: Rule,
    q_BLHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    segments: Segments | None,
) -> tuple[jax.Array, jax.Array]:
    """`attention_reference`, not to be differentiated: `backward_reference` is its gradient.

    Args: see `attention_reference`.
    """
    return _forward(rule, q_BLHK, k_BMGK, v_BMGK, segments)[0]


def backward_reference(
    rule: Rule,
    q_BLHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    segments: Segments | None,
    out_BLHK: jax.Array,
    log_sum_BHL: jax.Array,
    dout_BLHK: jax.Array,
    dlog_sum_BHL: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of queries, keys and values.

    Args:
      rule: which keys a query sees, and what is done to scores.
      q_BLHK: queries.
      k_BMGK: keys; all of them, or some.
      v_BMGK: values of these keys.
      segments: the document of each query [B, L] and of each key [B, M].
      out_BLHK: the output of attention to all keys.
      log_sum_BHL: the log-sum-exp of the scores of all keys.
      dout_BLHK: the gradient of the output.
      dlog_sum_BHL: the gradient of the log-sum-exp.
    """
    q, k, v = _operands(rule, q_BLHK, k_BMGK, v_BMGK)
    log_sum = log_sum_BHL.reshape(*q.shape[:4], 1)
    saved = (q, k, v, segments, out_BLHK, log_sum)
    return _backward(rule, saved, (dout_BLHK, dlog_sum_BHL))[:3]


def deltas(out_BLHK: jax.Array, dout_BLHK: jax.Array, dlog_sum_BHL: jax.Array) -> jax.Array:
    """Sums to subtract from the gradients of probabilities, for those of scores; [B, H, L]."""
    products = dout_BLHK.astype(jnp.float32) * out_BLHK.astype(jnp.float32)
    return products.sum(3).transpose(0, 2, 1) - dlog_sum_BHL


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    rule: Rule,
    q_BLHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    segments: Segments | None,
) -> tuple[jax.Array, jax.Array]:
    return _forward(rule, q_BLHK, k_BMGK, v_BMGK, segments)[0]


def _blocks(length: int) -> list[tuple[int, int]]:
    """Start and stop of the blocks of queries: of whole chunks, but for a shorter last one.

    >>> _blocks(300)
    [(0, 128), (128, 256), (256, 300)]
    >>> _blocks(9 * 128 + 1)[-2:]
    [(1024, 1152), (1152, 1153)]
    """
    whole = length // QUERY_CHUNK
    size = QUERY_CHUNK * max(1, -(-whole // MAX_BLOCKS))
    starts = range(0, whole * QUERY_CHUNK, size)
    blocks = [(start, min(whole * QUERY_CHUNK, start + size)) for start in starts]
    rest = [(whole * QUERY_CHUNK, length)] if length % QUERY_CHUNK else []
    return blocks + rest


class _Chunk(NamedTuple):
    """Some queries and the keys that they meet: positions, which may be those of a loop."""

    query: int | jax.Array  # the first
    num_queries: int
    key: int | jax.Array
    num_keys: int

    def queries(self, x: jax.Array, dim: int) -> jax.Array:
        """The chunk's queries in an array, along its dim of queries."""
        return jax.lax.dynamic_slice_in_dim(x, self.query, self.num_queries, dim)

    def keys(self, x: jax.Array, dim: int) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, self.key, self.num_keys, dim)

    def add_at_keys(self, total_BGKM: jax.Array, new_BGKm: jax.Array) -> jax.Array:
        before = self.keys(total_BGKM, 3)
        return jax.lax.dynamic_update_slice_in_dim(total_BGKM, before + new_BGKm, self.key, 3)


def _for_each_chunk(
    rule: Rule,
    block: tuple[int, int],
    num_keys: int,
    carry: Any,
    step: Callable[[Any, _Chunk], tuple[Any, Any]],
) -> tuple[Any, Any]:
    """The carry after all chunks of a block, and what `step` found, joined along dim 3.

    Args:
      rule: which keys a query sees.
      block: the first and the end of its queries.
      num_keys: M.
      carry: what the first chunk gets.
      step: the carry and a chunk, to the next carry and arrays [B, G, R, l, ...].
    """
    start, stop = block
    first, end = rule.keys(start, stop, num_keys)
    if stop - start <= QUERY_CHUNK:
        return step(carry, _Chunk(start, stop - start, first, end - first))
    met = end - first  # by each chunk: with a window fewer than by all of them
    if rule.window is not None:
        met = min(met, QUERY_CHUNK + rule.window - 1)

    def one(carry: Any, i: jax.Array) -> tuple[Any, Any]:
        query = start + i * QUERY_CHUNK
        is_windowed = rule.window is not None
        key = jnp.clip(query + QUERY_CHUNK - met, first, end - met) if is_windowed else first
        return step(carry, _Chunk(query, QUERY_CHUNK, key, met))

    carry, found = jax.lax.scan(one, carry, jnp.arange((stop - start) // QUERY_CHUNK))
    # [chunks, B, G, R, l, ...]
    join = lambda x: jnp.moveaxis(x, 0, 3).reshape(*x.shape[1:4], -1, *x.shape[5:])
    return carry, jax.tree.map(join, found)


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
    rule: Rule,
    q_BGRlK: jax.Array,
    k_BGmK: jax.Array,
    segments: Segments | None,
    chunk: _Chunk,
) -> tuple[jax.Array, jax.Array]:
    """Scores of the queries of a chunk with its keys, and which count; [B, G, R, l, m] and less.

    q is multiplied by the scale already.
    """
    B, G, R, num_queries, _ = q_BGRlK.shape
    flat = _times(_merge(q_BGRlK), k_BGmK, transpose_b=True)
    scores = flat.reshape(B, G, R, num_queries, k_BGmK.shape[2])
    if rule.soft_cap is not None:
        scores = rule.soft_cap * jnp.tanh(scores / rule.soft_cap)
    query_l = chunk.query + jnp.arange(chunk.num_queries)
    key_m = chunk.key + jnp.arange(chunk.num_keys)
    mask = rule.sees(query_l[:, None], key_m[None])[None, None, None]
    if segments is not None:
        query_Bl, key_Bm = chunk.queries(segments[0], 1), chunk.keys(segments[1], 1)
        mask = mask & (query_Bl[:, :, None] == key_Bm[:, None])[:, None, None]
    return scores, mask


def _operands(
    rule: Rule, q_BLHK: jax.Array, k_BMGK: jax.Array, v_BMGK: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries times the scale [B, G, R, L, K], keys and values [B, G, M, K]."""
    K, G = q_BLHK.shape[3], k_BMGK.shape[2]
    q = materialize(_group(q_BLHK * rule.factor(K), G))
    k, v = materialize((k_BMGK.transpose(0, 2, 1, 3), v_BMGK.transpose(0, 2, 1, 3)))
    return q, k, v


def _forward(
    rule: Rule,
    q_BLHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    segments: Segments | None,
) -> tuple[tuple[jax.Array, jax.Array], tuple]:
    B, L, H, K = q_BLHK.shape
    M = k_BMGK.shape[1]
    q, k, v = _operands(rule, q_BLHK, k_BMGK, v_BMGK)

    def attend(_: None, chunk: _Chunk) -> tuple[None, tuple[jax.Array, jax.Array]]:
        scores, mask = _scores(rule, chunk.queries(q, 3), chunk.keys(k, 2), segments, chunk)
        scores = materialize(jnp.where(mask, scores, MASKED))
        top = scores.max(-1, keepdims=True)
        weights = materialize(jnp.exp(scores - top))
        total = weights.sum(-1, keepdims=True)
        out = _times(_merge(weights.astype(v.dtype)), chunk.keys(v, 2))
        out = out.reshape(*weights.shape[:4], K) / total
        log_sum = top + jnp.log(total)
        if segments is not None:  # all the keys of a document may be elsewhere
            sees_none = top == MASKED
            out, log_sum = jnp.where(sees_none, 0, out), jnp.where(sees_none, MASKED, log_sum)
        return None, (out.astype(v.dtype), log_sum)

    found = [_for_each_chunk(rule, block, M, None, attend)[1] for block in _blocks(L)]
    outs, log_sums = zip(*found, strict=True)
    # Named, so that a checkpointing policy can keep them and never runs this pass again.
    out_BLHK = checkpoint_name(materialize(_ungroup(jnp.concatenate(outs, 3))), SAVED)
    log_sum = checkpoint_name(jnp.concatenate(log_sums, 3), SAVED)
    saved = (q, k, v, segments, out_BLHK, log_sum)
    return (out_BLHK, log_sum.reshape(B, H, L)), saved


def _backward(rule: Rule, saved: tuple, gradients: tuple[jax.Array, jax.Array]) -> tuple:
    q, k, v, segments, out_BLHK, log_sum = saved
    dout_BLHK, dlog_sum_BHL = gradients
    K, G, L, M = q.shape[4], k.shape[1], q.shape[3], k.shape[2]
    dout_BLHK = materialize(dout_BLHK)
    product = dout_BLHK.astype(jnp.float32) * out_BLHK.astype(jnp.float32)
    delta = _group(product.sum(-1, keepdims=True), G) - dlog_sum_BHL.reshape(log_sum.shape)
    delta = materialize(delta)
    if segments is not None:
        log_sum = jnp.maximum(log_sum, MASKED / 2)  # so that its difference to MASKED is not 0
    dout = materialize(_group(dout_BLHK, G))

    def gradients_of(
        sums: tuple[jax.Array, jax.Array], chunk: _Chunk
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        """The gradients of a chunk's queries, and those of all keys with what it adds."""
        q_here, dout_here = chunk.queries(q, 3), chunk.queries(dout, 3)
        k_here, v_here = chunk.keys(k, 2), chunk.keys(v, 2)
        scores, mask = _scores(rule, q_here, k_here, segments, chunk)
        p = jnp.where(mask, scores, MASKED) - chunk.queries(log_sum, 3)
        p = materialize(jnp.exp(p))
        dp = _times(_merge(dout_here), v_here, transpose_b=True).reshape(p.shape)
        ds = p * (materialize(dp) - chunk.queries(delta, 3))
        if rule.soft_cap is not None:
            ds = ds * (1 - jnp.square(scores / rule.soft_cap))
        ds = materialize(ds.astype(k.dtype))
        dq = _times(_merge(ds), k_here).reshape(q_here.shape)
        q_turned = materialize(_merge(q_here).swapaxes(2, 3))
        dout_turned = materialize(_merge(dout_here).swapaxes(2, 3))
        dk_BGKM = chunk.add_at_keys(sums[0], _times(q_turned, _merge(ds)))
        dv_BGKM = chunk.add_at_keys(sums[1], _times(dout_turned, _merge(p.astype(v.dtype))))
        return (dk_BGKM, dv_BGKM), dq * rule.factor(K)

    dqs = []
    sums = (jnp.zeros((*k.shape[:2], K, M), jnp.float32),) * 2  # transposed: no product is
    for block in reversed(_blocks(L)):
        sums, dq = _for_each_chunk(rule, block, M, sums, gradients_of)
        dqs.append(dq)
    dk_BGKM, dv_BGKM = sums
    dq_BLHK = _ungroup(materialize(jnp.concatenate(dqs[::-1], 3)))
    dk_BMGK, dv_BMGK = (materialize(x).transpose(0, 3, 1, 2) for x in (dk_BGKM, dv_BGKM))
    return dq_BLHK.astype(q.dtype), dk_BMGK.astype(k.dtype), dv_BMGK.astype(v.dtype), None


_attention.defvjp(_forward, _backward)
