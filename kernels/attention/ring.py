"""Attention on a mesh: each device computes its own part, and keys and values go round a ring.

Each device has some of the sequences and heads. Or n devices share a sequence: it is cut into 2n
runs of tokens, and device i has run i and run 2n - 1 - i. B then counts parts of sequences, and the
parts of the first device come first. A device meets the keys of all others: of those before it, its
queries see the first run; of those behind it, its second run sees both. So under a causal rule all
devices have equally much to do: the second run sees the first one of the others, and one run more
sees another. `jnp.where` chooses that one, since XLA:GPU would wait on the host for the predicate
of a `lax.cond`. The log-sum-exps say how much the keys of each device weigh. The backward has the
log-sum-exps of all keys, and computes the probabilities of each device's again. A device keeps
nothing of the others.

Under a rule with a window nothing goes round. Each run meets its own keys and those of as many runs
before it as the window reaches, which come straight from their devices: `_with_runs_before`. That
is attention on one device, of a sequence that begins with queries of no document.

References: Liu et al., "Ring Attention with Blockwise Transformers", arXiv:2310.01889. The order of
the runs is that of Llama 3, arXiv:2407.21783, section 3.3.2.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from kernels.attention.reference import MASKED, SAVED, backward_reference, forward_reference
from kernels.attention.shards import Shards, on_shards
from kernels.attention.tiles import Rule, Segments


@dataclass(frozen=True)
class Local:
    """Attention on one device."""

    # (rule, q_BLHK, k_BMGK, v_BMGK, segments) -> out_BLHK, log_sum_BHL
    forward: Callable[..., tuple[jax.Array, jax.Array]]
    # (the same, out_BLHK, log_sum_BHL, dout_BLHK, dlog_sum_BHL) -> dq_BLHK, dk_BMGK, dv_BMGK
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


REFERENCE = Local(forward_reference, backward_reference)


@dataclass(frozen=True)
class Placement:
    """A rule, what computes it on each device, and which devices there are."""

    rule: Rule
    local: Local
    shards: Shards | None  # None: all is on one device

    @property
    def ring(self) -> str | None:
        return None if self.shards is None else self.shards.ring


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention_on(
    placement: Placement,
    q_BLHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    segments: Segments | None,
) -> tuple[jax.Array, jax.Array]:
    """Computes `attention_reference` on each device's shards.

    Args:
      placement: the rule, what computes it on each device, and how B, H and G are cut.
      q_BLHK: queries. H is a multiple of G.
      k_BMGK: keys; M = L if the rule is causal.
      v_BMGK: values.
      segments: the document of each query [B, L] and of each key [B, M].

    Raises:
      ValueError: sequences are cut, and the rule is not causal.
    """
    return _forward(placement, q_BLHK, k_BMGK, v_BMGK, segments)[0]


def _dims(segments: Segments | None) -> tuple:
    """The dims of queries, keys, values and segments."""
    return "BLHK", "BMGK", "BMGK", segments and ("BL", "BM")


def _forward(
    placement: Placement,
    q_BLHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    segments: Segments | None,
) -> tuple[tuple[jax.Array, jax.Array], tuple]:
    if placement.ring is None:
        local = functools.partial(placement.local.forward, placement.rule)
    elif placement.rule.window is not None:
        local = functools.partial(_window_forward, placement, placement.ring)
    else:
        local = functools.partial(_ring_forward, placement, placement.ring)
    run = on_shards(local, placement.shards, _dims(segments), ("BLHK", "BHL"))
    outs = run(q_BLHK, k_BMGK, v_BMGK, segments)
    # Named, so that a checkpointing policy can keep them and never runs this pass again.
    out_BLHK, log_sum_BHL = (checkpoint_name(out, SAVED) for out in outs)
    saved = (q_BLHK, k_BMGK, v_BMGK, segments, out_BLHK, log_sum_BHL)
    return (out_BLHK, log_sum_BHL), saved


def _backward(placement: Placement, saved: tuple, gradients: tuple[jax.Array, jax.Array]) -> tuple:
    if placement.ring is None:
        local = functools.partial(placement.local.backward, placement.rule)
    elif placement.rule.window is not None:
        local = functools.partial(_window_backward, placement, placement.ring)
    else:
        local = functools.partial(_ring_backward, placement, placement.ring)
    ins = (*_dims(saved[3]), "BLHK", "BHL", "BLHK", "BHL")
    run = on_shards(local, placement.shards, ins, ("BLHK", "BMGK", "BMGK"))
    return *run(*saved, *gradients), None


attention_on.defvjp(_forward, _backward)


def _whole(rule: Rule) -> Rule:
    """The rule for keys of a part that lies before the query's own: every query sees all."""
    if not rule.causal:
        raise ValueError(f"sequences cut over devices need a causal rule, not {rule}")
    return replace(rule, causal=False)


def _pass_on(arrays: Any, axis: str) -> Any:
    """Sends arrays to the next device of the ring, and returns those of the device before."""
    size = jax.lax.axis_size(axis)
    ahead = [(i, (i + 1) % size) for i in range(size)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axis, ahead), arrays)


def _halves(x: jax.Array, dim: int = 1) -> list[jax.Array]:
    """Splits a part into its two runs, or a part with its tokens in a row into two halves."""
    return jnp.split(x, 2, axis=dim)


def _ring_forward(
    placement: Placement,
    axis: str,
    q_BLHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    segments: Segments | None,
) -> tuple[jax.Array, jax.Array]:
    rule, local = placement.rule, placement.local
    whole = _whole(rule)
    out_BLHK, log_sum_BHL = local.forward(rule, q_BLHK, k_BMGK, v_BMGK, segments)
    runs = zip(_halves(out_BLHK.astype(jnp.float32)), _halves(log_sum_BHL, 2), strict=True)
    first, second = runs
    passing = (k_BMGK, v_BMGK, segments and segments[1])
    for step in range(1, jax.lax.axis_size(axis)):
        passing = _pass_on(passing, axis)
        is_earlier = jax.lax.axis_index(axis) >= step
        queries = functools.partial(_pair, is_earlier, 1)
        k, v, ids = jax.tree.map(functools.partial(_pair, is_earlier, 0), passing)
        both = segments and (queries(segments[0]), ids)
        new = local.forward(whole, queries(q_BLHK), k, v, both)
        always, other = zip(*map(jnp.split, new, (2, 2)), strict=True)
        second = _joined(second, always)
        joined = _joined(_chosen(is_earlier, first, second), other)
        first, second = _chosen(is_earlier, (joined, second), (first, joined))
    outs, log_sums = zip(first, second, strict=True)
    return jnp.concatenate(outs, 1).astype(v_BMGK.dtype), jnp.concatenate(log_sums, 2)


def _chosen(is_earlier: jax.Array, earlier: Any, later: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(is_earlier, a, b), earlier, later)


def _pair(is_earlier: jax.Array, always: int, x: jax.Array, dim: int = 1) -> jax.Array:
    """Returns [2B, ...]: the run `always`, then the first or the second run, for two products.

    The second run of queries always meets the first run of keys. If the part of the keys is
    earlier, its first run also meets the first run of queries; else its second run meets the second
    run of queries.
    """
    runs = _halves(x, dim)
    return jnp.concatenate([runs[always], jnp.where(is_earlier, runs[0], runs[1])])


def _add(is_earlier: jax.Array, always: int, total: jax.Array, new: jax.Array) -> jax.Array:
    """Adds new numbers to the runs that `_pair` has taken."""
    one, other = jnp.split(new.astype(total.dtype), 2)
    runs = _halves(total)
    runs[always] += one
    chosen = jnp.where(is_earlier, other, 0), jnp.where(is_earlier, 0, other)
    return jnp.concatenate([run + more for run, more in zip(runs, chosen, strict=True)], 1)


def _joined(a: tuple, b: tuple) -> tuple[jax.Array, jax.Array]:
    """Joins attention to two sets of keys: outputs and log-sum-exps; float32."""
    (a_BLHK, a_log_sum_BHL), (b_BLHK, b_log_sum_BHL) = a, b
    log_sum_BHL = jnp.maximum(jnp.logaddexp(a_log_sum_BHL, b_log_sum_BHL), MASKED)
    weight = lambda own: jnp.exp(own - log_sum_BHL).swapaxes(1, 2)[..., None]
    out_BLHK = a_BLHK * weight(a_log_sum_BHL) + b_BLHK * weight(b_log_sum_BHL)
    return out_BLHK, log_sum_BHL


def _ring_backward(
    placement: Placement,
    axis: str,
    q_BLHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    segments: Segments | None,
    out_BLHK: jax.Array,
    log_sum_BHL: jax.Array,
    dout_BLHK: jax.Array,
    dlog_sum_BHL: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of keys and values travel with them, and end at the device that has them."""
    rule, local = placement.rule, placement.local
    whole = _whole(rule)
    rest = (out_BLHK, log_sum_BHL, dout_BLHK, dlog_sum_BHL)
    own = local.backward(rule, q_BLHK, k_BMGK, v_BMGK, segments, *rest)
    dq, dk, dv = (x.astype(jnp.float32) for x in own)
    passing = (k_BMGK, v_BMGK, segments and segments[1])
    following = [jnp.zeros_like(dk), jnp.zeros_like(dv)]

    for step in range(1, jax.lax.axis_size(axis)):
        passing = _pass_on(passing, axis)
        if step > 1:
            following = _pass_on(following, axis)
        is_earlier = jax.lax.axis_index(axis) >= step
        queries = functools.partial(_pair, is_earlier, 1)
        k, v, ids = jax.tree.map(functools.partial(_pair, is_earlier, 0), passing)
        both = segments and (queries(segments[0]), ids)
        out, dout = queries(out_BLHK), queries(dout_BLHK)
        log_sum, dlog_sum = queries(log_sum_BHL, 2), queries(dlog_sum_BHL, 2)
        new = placement.local.backward(
            whole, queries(q_BLHK), k, v, both, out, log_sum, dout, dlog_sum
        )
        dq = _add(is_earlier, 1, dq, new[0])
        following = [
            _add(is_earlier, 0, total, gradient)
            for total, gradient in zip(following, new[1:], strict=True)
        ]
    others = _pass_on(tuple(following), axis)
    found = dq, dk + others[0], dv + others[1]
    dq, dk, dv = (x.astype(one.dtype) for x, one in zip(found, own, strict=True))
    return dq, dk, dv


# ---- windows -------------------------------------------------------------------------------------


NOWHERE, DUMMY = -1, -2  # documents of missing keys, and of dummy queries


def _num_before(window: int, run: int, count: int) -> int:
    """Runs before its own that a query may see, of 2 * count runs of so many tokens.

    >>> [_num_before(window, run=4, count=2) for window in (1, 2, 5, 6, 100)]
    [0, 1, 1, 2, 3]
    """
    return min(-(-(window - 1) // run), 2 * count - 1)


def _with_runs_before(x_BL: jax.Array, num_before: int, axis: str) -> jax.Array:
    """Returns [2B, L, ...]: all first runs, then all second ones, each behind its runs before.

    Runs that do not exist are zeros. Linear in x.
    """
    count = jax.lax.axis_size(axis)
    first, second = _halves(x_BL)

    def run_before(back: int) -> jax.Array:
        """Returns the run that is `back` before each of the two runs."""
        send = lambda x, pairs: jax.lax.ppermute(x, axis, pairs)
        before_first = send(first, [(i - back, i) for i in range(back, count)])
        before_second = send(second, [(i + back, i) for i in range(count - back)])
        homes = [(2 * count - 1 - back - i, i) for i in range(count)]
        turned = [(home, i) for home, i in homes if 0 <= home < count and i + back >= count]
        return jnp.concatenate([before_first, before_second + send(first, turned)])

    own = jnp.concatenate([first, second])
    return jnp.concatenate([*map(run_before, range(num_before, 0, -1)), own], axis=1)


def _behind_dummies(x_BL: jax.Array, num_before: int, fill: float, dim: int = 1) -> jax.Array:
    """Returns [2B, L, ...] of an array of queries: each run behind dummies in place of others."""
    own = jnp.concatenate(_halves(x_BL, dim))
    pad = [(0, 0)] * own.ndim
    pad[dim] = (num_before * own.shape[dim], 0)
    return jnp.pad(own, pad, constant_values=fill)


def _of_runs(x_BL: jax.Array, num_before: int, dim: int = 1) -> jax.Array:
    """The opposite of `_behind_dummies`."""
    length = x_BL.shape[dim] // (num_before + 1)
    own = jax.lax.slice_in_dim(x_BL, num_before * length, None, axis=dim)
    return jnp.concatenate(jnp.split(own, 2), axis=dim)


def _window_inputs(
    num_before: int,
    axis: str,
    q_BLHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    segments: Segments | None,
) -> tuple[jax.Array, jax.Array, jax.Array, Segments]:
    """Queries, keys, values and segments of attention on one device."""
    ids_BL, ids_BM = segments or (jnp.zeros(q_BLHK.shape[:2], jnp.int32),) * 2
    # Documents are shifted, since missing runs come as 0.
    keys = _with_runs_before(ids_BM - NOWHERE, num_before, axis) + NOWHERE
    both = _behind_dummies(ids_BL, num_before, DUMMY), keys
    k, v = (_with_runs_before(x, num_before, axis) for x in (k_BMGK, v_BMGK))
    return _behind_dummies(q_BLHK, num_before, 0), k, v, both


def _window_forward(
    placement: Placement,
    axis: str,
    q_BLHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    segments: Segments | None,
) -> tuple[jax.Array, jax.Array]:
    num_before = _runs_seen(placement.rule, q_BLHK, axis)
    arrays = _window_inputs(num_before, axis, q_BLHK, k_BMGK, v_BMGK, segments)
    out, log_sum = placement.local.forward(placement.rule, *arrays)
    return _of_runs(out, num_before), _of_runs(log_sum, num_before, 2)


def _window_backward(
    placement: Placement,
    axis: str,
    q_BLHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    segments: Segments | None,
    out_BLHK: jax.Array,
    log_sum_BHL: jax.Array,
    dout_BLHK: jax.Array,
    dlog_sum_BHL: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of keys and values of other runs go back to their devices, in float32."""
    num_before = _runs_seen(placement.rule, q_BLHK, axis)
    arrays = _window_inputs(num_before, axis, q_BLHK, k_BMGK, v_BMGK, segments)
    behind = functools.partial(_behind_dummies, num_before=num_before)
    out, dout = behind(out_BLHK, fill=0), behind(dout_BLHK, fill=0)
    log_sum = behind(log_sum_BHL, fill=MASKED, dim=2)
    dlog_sum = behind(dlog_sum_BHL, fill=0, dim=2)
    dq, *dkv = placement.local.backward(placement.rule, *arrays, out, log_sum, dout, dlog_sum)
    there = functools.partial(_with_runs_before, num_before=num_before, axis=axis)
    back = jax.linear_transpose(there, jax.ShapeDtypeStruct(k_BMGK.shape, jnp.float32))
    dk, dv = (back(x.astype(jnp.float32))[0].astype(x.dtype) for x in dkv)
    return _of_runs(dq, num_before), dk, dv


def _runs_seen(rule: Rule, q_BLHK: jax.Array, axis: str) -> int:
    assert rule.window is not None, "a rule without a window goes round the ring"
    return _num_before(rule.window, q_BLHK.shape[1] // 2, jax.lax.axis_size(axis))


# ---- from tokens in a row to runs, and back ------------------------------------------------------


def _homes(count: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The devices to which the two halves of device i's tokens in a row belong: (i, device).

    >>> _homes(4)
    ([(0, 0), (1, 2), (2, 3), (3, 1)], [(0, 1), (1, 3), (2, 2), (3, 0)])
    """
    home = lambda run: min(run, 2 * count - 1 - run)
    first, second = ([(i, home(2 * i + half)) for i in range(count)] for half in (0, 1))
    return first, second


def _take_turns(halves: Sequence[jax.Array], axis: str) -> list[jax.Array]:
    """Even runs, then odd ones, from a device's first and second; and the other way round."""
    is_even = jax.lax.axis_index(axis) % 2 == 0
    first, second = halves
    return [jnp.where(is_even, first, second), jnp.where(is_even, second, first)]


def _to_runs(x_BL: jax.Array, axis: str) -> jax.Array:
    halves = zip(_halves(x_BL), _homes(jax.lax.axis_size(axis)), strict=True)
    sent = [jax.lax.ppermute(half, axis, homes) for half, homes in halves]
    return jnp.concatenate(_take_turns(sent, axis), 1)


def _from_runs(x_BL: jax.Array, axis: str) -> jax.Array:
    turns = _take_turns(_halves(x_BL), axis)
    halves = zip(turns, _homes(jax.lax.axis_size(axis)), strict=True)
    back = [jax.lax.ppermute(half, axis, [(b, a) for a, b in homes]) for half, homes in halves]
    return jnp.concatenate(back, 1)


def _moved(function: Callable, shards: Shards, x_BL: jax.Array) -> jax.Array:
    dims = "BL" + "." * (x_BL.ndim - 2)
    return on_shards(lambda x: function(x, shards.ring), shards, (dims,), dims)(x_BL)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def to_runs(shards: Shards, x_BL: jax.Array) -> jax.Array:
    """[B, L, ...] of parts with their tokens in a row, to parts of two runs."""
    return _moved(_to_runs, shards, x_BL)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def from_runs(shards: Shards, x_BL: jax.Array) -> jax.Array:
    """The opposite of `to_runs`."""
    return _moved(_from_runs, shards, x_BL)


# Their own gradients: JAX would sum over the axes that do not cut x.
to_runs.defvjp(lambda *args: (to_runs(*args), None), lambda shards, _, dx: (from_runs(shards, dx),))
from_runs.defvjp(
    lambda *args: (from_runs(*args), None), lambda shards, _, dx: (to_runs(shards, dx),)
)
