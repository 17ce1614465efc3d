"""Attention by hand, in float64: what every implementation is compared with."""

import jax
import jax.numpy as jnp
import numpy as np

from kernels.attention.reference import MASKED
from kernels.attention.tiles import Rule
from tests.arrays import assert_near, normal, wide

FULL = Rule(causal=False)


def inputs(L, M, H, G, K, *, dtype="float32", scale=1.0, batch=2):
    q = normal(0, batch, L, H, K, dtype=dtype, scale=scale)
    k = normal(1, batch, M, G, K, dtype=dtype, scale=scale)
    return q, k, normal(2, batch, M, G, K, dtype=dtype)


def documents(length, seed=0, batch=2):
    """Ids that rise by one at random places."""
    starts = np.random.default_rng([seed, length]).random((batch, length)) < 0.1
    return jnp.asarray(np.cumsum(starts, axis=1), jnp.int32)


def seen(L, M, rule, segments):
    """The mask of the keys that each query sees, decided one by one; [B, L, M]."""
    mask = np.zeros((1 if segments is None else len(segments[0]), L, M), bool)
    for b, i, j in np.ndindex(mask.shape):
        same = segments is None or segments[0][b, i] == segments[1][b, j]
        past = not rule.causal or j <= i
        near = rule.window is None or i - j < rule.window
        mask[b, i, j] = same and past and near
    return mask


def oracle(q, k, v, dout, dlog_sum, segments, rule):
    """Output, log-sum-exp, and the gradients of q, k and v, by hand and in float64."""
    q, k, v, dout, dlog_sum = wide((q, k, v, dout, dlog_sum))
    shared = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, shared, 2), np.repeat(v, shared, 2)
    ids = None if segments is None else [np.asarray(x) for x in segments]
    mask = seen(q.shape[1], k.shape[1], rule, ids)[:, None]
    scale = q.shape[3] ** -0.5 if rule.scale is None else rule.scale
    score, slope = np.einsum("blhk,bmhk->bhlm", q, k) * scale, 1.0
    if rule.soft_cap is not None:
        score = rule.soft_cap * np.tanh(score / rule.soft_cap)
        slope = 1 - (score / rule.soft_cap) ** 2
    score = np.where(mask, score, -np.inf)
    top = np.maximum(score.max(-1, keepdims=True), MASKED)
    weight = np.exp(score - top)
    total = weight.sum(-1, keepdims=True)
    p = weight / np.where(total, total, 1)
    log_sum = np.where(total, top + np.log(np.where(total, total, 1)), MASKED)[..., 0]
    out = np.einsum("bhlm,bmhk->blhk", p, v)
    dp = np.einsum("blhk,bmhk->bhlm", dout, v)
    delta = np.einsum("blhk,blhk->bhl", dout, out) - dlog_sum
    dscore = p * (dp - delta[..., None]) * slope * scale
    dq = np.einsum("bhlm,bmhk->blhk", dscore, k)
    dk = np.einsum("bhlm,blhk->bmhk", dscore, q)
    dv = np.einsum("bhlm,blhk->bmhk", p, dout)
    add = lambda x: x.reshape(*x.shape[:2], -1, shared, x.shape[3]).sum(3)
    return out, log_sum, dq, add(dk), add(dv)


def run(attention, arrays, segments, rule):
    """The same of an implementation, and the gradients that came in."""
    q, k, v = arrays
    dout = normal(3, *q.shape, dtype=q.dtype)
    dlog_sum = normal(4, q.shape[0], q.shape[2], q.shape[1])

    @jax.jit
    def values_and_gradients(q, k, v, segments):
        call = lambda q, k, v: attention(q, k, v, segments, rule)
        out, pullback = jax.vjp(call, q, k, v)
        return *out, *pullback((dout, dlog_sum))

    return values_and_gradients(q, k, v, segments), (dout, dlog_sum)


def check(attention, arrays, segments, rule, dtype="float32"):
    got, gradients = run(attention, arrays, segments, rule)
    want = oracle(*arrays, *gradients, segments, rule)
    sees_none = want[1] == MASKED
    np.testing.assert_array_equal(np.asarray(got[1])[sees_none], np.float32(MASKED))
    for i, (one, other) in enumerate(zip(got, want, strict=True)):
        if i == 1:
            one, other = np.where(sees_none, 0, one), np.where(sees_none, 0, other)
        assert_near(one, other, dtype)
    assert [x.dtype for x in got] == [dtype, "float32", dtype, dtype, dtype]
