"""Attention on a mesh: each device computes its own part, and keys and values go round a ring.

Each device has some of the sequences and heads. Or it has only a part of each sequence: B counts
parts, first all first ones. It then meets one part of the keys after the other: its own by the
causal rule, those before it as a whole, those behind it not at all. The log-sum-exps say how much
each part weighs, and the backward, which has those of all parts, computes the probabilities of each
again. Nothing of other parts is kept.

Parts are runs of equally many tokens, so the device with the last one has most to do. Dims are
those of `attention`.

Reference: Liu et al., "Ring Attention with Blockwise Transformers", arXiv:2310.01889.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from kernels.attention import MASKED, SAVED, backward_reference, forward_reference
from kernels.attention_tiles import Rule, Segments
from kernels.shards import Shards, on_shards


@dataclass(frozen=True)
class Local:
    """Attention on one device."""

    # (rule, q_BLHK, k_BMGK, v_BMGK, segments) -> out_BLHK, log_sum_BHL
    forward: Callable[..., tuple[jax.Array, jax.Array]]
    # (rule, those, out_BLHK, log_sum_BHL, dout_BLHK, dlog_sum_BHL) -> dq_BLHK, dk_BMGK, dv_BMGK
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


REFERENCE = Local(forward_reference, backward_reference)


@dataclass(frozen=True)
class How:
    """What a call is told besides arrays."""

    rule: Rule
    local: Local
    shards: Shards | None = None  # None: all is on one device
    ring: str | None = None  # the axis, the first that cuts B, over which parts of sequences lie


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention_on(
    how: How,
    q_BLHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    segments: Segments | None,
) -> tuple[jax.Array, jax.Array]:
    """As `attention_reference`, on each device's shards.

    Raises:
      ValueError: sequences are cut, and the rule is not causal or has a window.
    """
    return _forward(how, q_BLHK, k_BMGK, v_BMGK, segments)[0]


def _dims(segments: Segments | None) -> tuple:
    """Of queries, keys, values and segments."""
    return "BLHK", "BMGK", "BMGK", segments and ("BL", "BM")


def _forward(
    how: How,
    q_BLHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    segments: Segments | None,
) -> tuple[tuple[jax.Array, jax.Array], tuple]:
    if how.ring is None:
        local = functools.partial(how.local.forward, how.rule)
    else:
        local = functools.partial(_ring_forward, how, how.ring)
    run = on_shards(local, how.shards, _dims(segments), ("BLHK", "BHL"))
    outs = run(q_BLHK, k_BMGK, v_BMGK, segments)
    # Named, so that a checkpointing policy can keep them and never runs this pass again.
    out_BLHK, log_sum_BHL = (checkpoint_name(out, SAVED) for out in outs)
    saved = (q_BLHK, k_BMGK, v_BMGK, segments, out_BLHK, log_sum_BHL)
    return (out_BLHK, log_sum_BHL), saved


def _backward(how: How, saved: tuple, gradients: tuple[jax.Array, jax.Array]) -> tuple:
    if how.ring is None:
        local = functools.partial(how.local.backward, how.rule)
    else:
        local = functools.partial(_ring_backward, how, how.ring)
    ins = (*_dims(saved[3]), "BLHK", "BHL", "BLHK", "BHL")
    run = on_shards(local, how.shards, ins, ("BLHK", "BMGK", "BMGK"))
    return *run(*saved, *gradients), None


attention_on.defvjp(_forward, _backward)


def _whole(rule: Rule) -> Rule:
    """What a query sees of a part that lies before its own."""
    if not rule.causal or rule.window is not None:
        raise ValueError(
            f"sequences cut over devices need a causal rule without window, not {rule}"
        )
    return replace(rule, causal=False)


def _pass_on(arrays: Any, axis: str) -> Any:
    """To the next device of the ring, from the one before."""
    size = jax.lax.axis_size(axis)
    ahead = [(i, (i + 1) % size) for i in range(size)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axis, ahead), arrays)


def _ring_forward(
    how: How,
    axis: str,
    q_BLHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    segments: Segments | None,
) -> tuple[jax.Array, jax.Array]:
    whole = _whole(how.rule)
    out_BLHK, log_sum_BHL = how.local.forward(how.rule, q_BLHK, k_BMGK, v_BMGK, segments)
    found = out_BLHK.astype(jnp.float32), log_sum_BHL
    passing = (k_BMGK, v_BMGK, segments and segments[1])

    def meet(found: tuple, passing: tuple) -> tuple:
        k_BMGK, v_BMGK, key_BM = passing
        ids = segments and (segments[0], key_BM)
        return _joined(found, how.local.forward(whole, q_BLHK, k_BMGK, v_BMGK, ids))

    for step in range(1, jax.lax.axis_size(axis)):
        passing = _pass_on(passing, axis)
        is_before = jax.lax.axis_index(axis) >= step
        found = jax.lax.cond(is_before, meet, lambda found, _: found, found, passing)
    return found[0].astype(v_BMGK.dtype), found[1]


def _joined(a: tuple, b: tuple) -> tuple[jax.Array, jax.Array]:
    """Attention to two sets of keys, from that to each: outputs and log-sum-exps; float32."""
    (a_BLHK, a_log_sum_BHL), (b_BLHK, b_log_sum_BHL) = a, b
    log_sum_BHL = jnp.maximum(jnp.logaddexp(a_log_sum_BHL, b_log_sum_BHL), MASKED)
    weight = lambda own: jnp.exp(own - log_sum_BHL).swapaxes(1, 2)[..., None]
    out_BLHK = a_BLHK * weight(a_log_sum_BHL) + b_BLHK * weight(b_log_sum_BHL)
    return out_BLHK, log_sum_BHL


def _ring_backward(
    how: How,
    axis: str,
    q_BLHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    segments: Segments | None,
    *rest: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of keys and values follow those, and go on to the device that has them."""
    whole = _whole(how.rule)
    own = how.local.backward(how.rule, q_BLHK, k_BMGK, v_BMGK, segments, *rest)
    dq_BLHK, dk_BMGK, dv_BMGK = (x.astype(jnp.float32) for x in own)
    passing = (k_BMGK, v_BMGK, segments and segments[1])
    following = jax.tree.map(jnp.zeros_like, (dk_BMGK, dv_BMGK))

    def meet(sums: tuple, passing: tuple) -> tuple:
        k_BMGK, v_BMGK, key_BM = passing
        ids = segments and (segments[0], key_BM)
        new = how.local.backward(whole, q_BLHK, k_BMGK, v_BMGK, ids, *rest)
        return tuple(total + x.astype(jnp.float32) for total, x in zip(sums, new, strict=True))

    for step in range(1, jax.lax.axis_size(axis)):
        passing = _pass_on(passing, axis)
        if step > 1:
            following = _pass_on(following, axis)
        is_before = jax.lax.axis_index(axis) >= step
        sums = (dq_BLHK, *following)
        dq_BLHK, *following = jax.lax.cond(is_before, meet, lambda sums, _: sums, sums, passing)
    others = _pass_on(tuple(following), axis)
    found = dq_BLHK, dk_BMGK + others[0], dv_BMGK + others[1]
    dtypes = (x.dtype for x in own)
    return tuple(x.astype(dtype) for x, dtype in zip(found, dtypes, strict=True))
