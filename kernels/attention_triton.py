"""Attention's kernels that Triton compiles, for NVIDIA GPUs from Ampere on.

The algorithm is FlashAttention-2's (Dao, arXiv:2307.08691). A program of the forward kernel holds a
tile of queries and goes through its run of keys (`attention_tiles`) with a running maximum and sum.
The backward is two kernels: one of the same shape for the queries' gradient, and one that holds a
tile of keys and goes through the queries of all heads that share it. No program writes where
another does, so results are the same each time; there is no faster, less orderly way to choose.

Dims are those of `attention`. Exponentials are powers of two: a score times log2(e) first.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels.attention import MASKED, deltas
from kernels.attention_tiles import LOG2_E, Rule, Segments, runs
from kernels.tuned import Kernels

HEAD_WIDTHS = (16, 32, 64, 128, 256)
DTYPES = ("bfloat16", "float16", "float32")
SMALLEST = 16  # queries or keys in a tile: what a tensor core multiplies at least

Ref = Any  # an array in the GPU's memory, as a kernel sees it


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """How a kernel cuts the scores, and what Triton is told."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int  # loads in flight


def default_tiles(head_width: int, dtype: jnp.dtype) -> Kernels:
    """What compiles for an H200 with its registers, and to its tensor cores' instructions.

    `benchmarks.kernels_compiled` tells; which of these are fast has not been measured.
    """
    if jnp.dtype(dtype) == jnp.float32:  # products of full precision take many registers
        warps = 4 if head_width <= 64 else 8
        square = Tiles(queries=32, keys=32, num_warps=warps, num_stages=1)
        dq = Tiles(queries=16, keys=32, num_warps=8, num_stages=1)
        return Kernels(forward=square, dq=dq, dkv=square)
    if head_width <= 64:
        square = Tiles(queries=64, keys=64, num_warps=4, num_stages=2)
        forward = Tiles(queries=128, keys=64, num_warps=4, num_stages=3)
        return Kernels(forward=forward, dq=square, dkv=square)
    square = Tiles(queries=64, keys=64, num_warps=8, num_stages=2)
    if head_width <= 128:
        forward = Tiles(queries=128, keys=64, num_warps=8, num_stages=2)
        return Kernels(forward=forward, dq=square, dkv=square)
    forward = Tiles(queries=128, keys=32, num_warps=8, num_stages=2)
    dq = Tiles(queries=64, keys=32, num_warps=8, num_stages=2)
    dkv = Tiles(queries=32, keys=64, num_warps=8, num_stages=2)
    return Kernels(forward=forward, dq=dq, dkv=dkv)


# ---- inside a kernel ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shape:
    """What a kernel knows of its arrays before it runs."""

    rule: Rule
    tile: Tiles
    num_queries: int
    num_keys: int
    num_heads: int
    num_kv_heads: int
    head_width: int

    @property
    def shared(self) -> int:
        """Query heads that share a key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def unit(self) -> float:
        return self.rule.unit(self.head_width)

    def raw(self, products: jax.Array) -> jax.Array:
        return self.rule.raw(products, self.head_width)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Float32 sums; float32 inputs are not rounded to the tensor cores' formats."""
    return pltriton.dot(a, b, allow_tf32=False if a.dtype == jnp.float32 else None)


def _span(start: jax.Array, size: int) -> jax.Array:
    return start + jax.lax.iota(jnp.int32, size)


def _rows(
    ref: Ref, batch: jax.Array, at: tuple[jax.Array, int], head: jax.Array, *, ragged: bool = True
) -> jax.Array:
    """A tile [size, K] of an array [B, positions, heads, K]; zeros behind its end, if ragged."""
    here = ref.at[batch, pl.ds(*at), head, :]
    if not ragged:
        return pltriton.load(here)
    return pltriton.load(here, mask=(_span(*at) < ref.shape[1])[:, None], other=0.0)


def _numbers(ref: Ref, batch: jax.Array, at: tuple[jax.Array, int], head: jax.Array) -> jax.Array:
    """Part [size] of an array [B, H, L]; zeros behind its end."""
    here = ref.at[batch, head, pl.ds(*at)]
    return pltriton.load(here, mask=_span(*at) < ref.shape[2], other=0.0)


def _keep(
    shape: _Shape, query: jax.Array, key: jax.Array, query_ids: jax.Array, key_ids: jax.Array
) -> jax.Array:
    """Which scores of a tile count. Positions and ids broadcast to it."""
    keep = (query < shape.num_queries) & (key < shape.num_keys) & shape.rule.sees(query, key)
    return keep & (query_ids == key_ids)


def _ids(refs: list[Ref], which: int, batch: jax.Array, at: tuple[jax.Array, int]) -> jax.Array:
    """Segments of queries (0) or keys (1); all the same without segments."""
    if not refs:
        return jnp.zeros((at[1],), jnp.int32)
    here = refs[which].at[batch, pl.ds(*at)]
    return pltriton.load(here, mask=_span(*at) < refs[which].shape[1], other=0)


def _through(run_ref: Ref, at: tuple, step: Callable, carry: Any) -> Any:
    """`carry = step(masked, tile, carry)` for all tiles of the run of a row, in order."""
    first, first_whole, end_whole, end = (run_ref[(*at, i)] for i in range(4))
    carry = jax.lax.fori_loop(first, first_whole, functools.partial(step, True), carry)
    carry = jax.lax.fori_loop(first_whole, end_whole, functools.partial(step, False), carry)
    return jax.lax.fori_loop(end_whole, end, functools.partial(step, True), carry)


def _forward_kernel(
    run_ref: Ref, q_ref: Ref, k_ref: Ref, v_ref: Ref, *refs: Ref, shape: _Shape
) -> None:
    *segment_refs, out_ref, log_sum_ref = refs
    tile = shape.tile
    i = run_ref.shape[1] - 1 - pl.program_id(0)  # the longest runs of a causal rule first
    h, b = pl.program_id(1), pl.program_id(2)
    g = jax.lax.div(h, jnp.int32(shape.shared))
    at = (i * tile.queries, tile.queries)
    query, query_ids = _span(*at), _ids(segment_refs, 0, b, at)
    q = _rows(q_ref, b, at, h)

    def step(masked: bool, j: jax.Array, carry: tuple) -> tuple:
        acc, top, total = carry
        there = (j * tile.keys, tile.keys)
        raw = shape.raw(_dot(q, _rows(k_ref, b, there, g, ragged=masked).T))
        if masked:
            key, key_ids = _span(*there), _ids(segment_refs, 1, b, there)
            keep = _keep(shape, query[:, None], key[None], query_ids[:, None], key_ids[None])
            raw = jnp.where(keep, raw, MASKED)
        new_top = jnp.maximum(top, raw.max(1))
        p = jnp.exp2((raw - new_top[:, None]) * shape.unit)
        if masked:  # a query that has seen none yet has this as its maximum
            p = jnp.where(keep, p, 0.0)
        shrink = jnp.exp2((top - new_top) * shape.unit)
        v = _rows(v_ref, b, there, g, ragged=masked)
        acc = acc * shrink[:, None] + _dot(p.astype(v.dtype), v)
        return acc, new_top, total * shrink + p.sum(1)

    acc = jnp.zeros((tile.queries, shape.head_width), jnp.float32)
    top = jnp.full((tile.queries,), MASKED, jnp.float32)
    carry = (acc, top, jnp.zeros((tile.queries,), jnp.float32))
    acc, top, total = _through(run_ref, _row_of(run_ref, b, i), step, carry)
    sees_none = total == 0.0
    total = jnp.where(sees_none, 1.0, total)
    log_sum = (top * shape.unit + jnp.log2(total)) / LOG2_E
    log_sum = jnp.where(sees_none, MASKED, log_sum)
    out = (acc / total[:, None]).astype(out_ref.dtype)
    exists = query < shape.num_queries
    pltriton.store(out_ref.at[b, pl.ds(*at), h, :], out, mask=exists[:, None])
    pltriton.store(log_sum_ref.at[b, h, pl.ds(*at)], log_sum, mask=exists)


def _dq_kernel(
    run_ref: Ref,
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    dout_ref: Ref,
    log_sum_ref: Ref,
    delta_ref: Ref,
    *refs: Ref,
    shape: _Shape,
) -> None:
    *segment_refs, dq_ref = refs
    tile = shape.tile
    i = run_ref.shape[1] - 1 - pl.program_id(0)
    h, b = pl.program_id(1), pl.program_id(2)
    g = jax.lax.div(h, jnp.int32(shape.shared))
    at = (i * tile.queries, tile.queries)
    query, query_ids = _span(*at), _ids(segment_refs, 0, b, at)
    q, dout = _rows(q_ref, b, at, h), _rows(dout_ref, b, at, h)
    log_sum = _numbers(log_sum_ref, b, at, h) * LOG2_E
    delta = _numbers(delta_ref, b, at, h)

    def step(masked: bool, j: jax.Array, dq: jax.Array) -> jax.Array:
        there = (j * tile.keys, tile.keys)
        k = _rows(k_ref, b, there, g, ragged=masked)
        v = _rows(v_ref, b, there, g, ragged=masked)
        raw = shape.raw(_dot(q, k.T))
        p = jnp.exp2(raw * shape.unit - log_sum[:, None])
        if masked:
            key, key_ids = _span(*there), _ids(segment_refs, 1, b, there)
            keep = _keep(shape, query[:, None], key[None], query_ids[:, None], key_ids[None])
            p = jnp.where(keep, p, 0.0)
        ds = shape.rule.slope(raw, p * (_dot(dout, v.T) - delta[:, None]))
        return dq + _dot(ds.astype(k.dtype), k)

    dq = jnp.zeros((tile.queries, shape.head_width), jnp.float32)
    dq = _through(run_ref, _row_of(run_ref, b, i), step, dq) * shape.rule.factor(shape.head_width)
    here = dq_ref.at[b, pl.ds(*at), h, :]
    pltriton.store(here, dq.astype(dq_ref.dtype), mask=(query < shape.num_queries)[:, None])


def _dkv_kernel(
    run_ref: Ref,
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    dout_ref: Ref,
    log_sum_ref: Ref,
    delta_ref: Ref,
    *refs: Ref,
    shape: _Shape,
) -> None:
    *segment_refs, dk_ref, dv_ref = refs
    tile = shape.tile
    j = pl.program_id(0)
    g, b = pl.program_id(1), pl.program_id(2)
    at = (j * tile.keys, tile.keys)
    key, key_ids = _span(*at), _ids(segment_refs, 1, b, at)
    k, v = _rows(k_ref, b, at, g), _rows(v_ref, b, at, g)

    def head(shared: jax.Array, carry: tuple) -> tuple:
        h = g * shape.shared + shared

        def step(masked: bool, i: jax.Array, carry: tuple) -> tuple:
            dk, dv = carry
            there = (i * tile.queries, tile.queries)
            q = _rows(q_ref, b, there, h, ragged=masked)
            dout = _rows(dout_ref, b, there, h, ragged=masked)
            log_sum = _numbers(log_sum_ref, b, there, h) * LOG2_E
            raw = shape.raw(_dot(k, q.T))  # keys by queries: no product needs it turned
            p = jnp.exp2(raw * shape.unit - log_sum[None])
            if masked:
                query, query_ids = _span(*there), _ids(segment_refs, 0, b, there)
                keep = _keep(shape, query[None], key[:, None], query_ids[None], key_ids[:, None])
                p = jnp.where(keep, p, 0.0)
            dv = dv + _dot(p.astype(dout.dtype), dout)
            delta = _numbers(delta_ref, b, there, h)
            ds = shape.rule.slope(raw, p * (_dot(v, dout.T) - delta[None]))
            return dk + _dot(ds.astype(q.dtype), q), dv

        return _through(run_ref, _row_of(run_ref, b, j), step, carry)

    zeros = jnp.zeros((tile.keys, shape.head_width), jnp.float32)
    heads = jnp.int32(0), jnp.int32(shape.shared)
    dk, dv = jax.lax.fori_loop(*heads, head, (zeros, zeros))
    dk = dk * shape.rule.factor(shape.head_width)
    for ref, value in ((dk_ref, dk), (dv_ref, dv)):
        here = ref.at[b, pl.ds(*at), g, :]
        pltriton.store(here, value.astype(ref.dtype), mask=(key < shape.num_keys)[:, None])


def _row_of(run_ref: Ref, batch: jax.Array, row: jax.Array) -> tuple:
    """Where the run of a row is; without segments all sequences have the same."""
    return (0 if run_ref.shape[0] == 1 else batch), row


# ---- around the kernels ------------------------------------------------------------------------


def _shape(rule: Rule, tile: Tiles, q: jax.Array, k: jax.Array) -> _Shape:
    (_, L, H, K), (_, M, G, _) = q.shape, k.shape
    tile = Tiles(
        queries=min(tile.queries, max(SMALLEST, pl.next_power_of_2(L))),
        keys=min(tile.keys, max(SMALLEST, pl.next_power_of_2(M))),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return _Shape(rule, tile, L, M, H, G, K)


def _call(
    kernel: Callable, shape: _Shape, grid: tuple[int, ...], outs: list, interpret: bool, *args: Any
) -> Any:
    return pl.pallas_call(
        functools.partial(kernel, shape=shape),
        grid=grid,
        out_shape=[jax.ShapeDtypeStruct(*out) for out in outs],
        interpret=interpret,
        name=f"attention{kernel.__name__.removesuffix('_kernel')}",
        compiler_params=pltriton.CompilerParams(
            num_warps=shape.tile.num_warps, num_stages=shape.tile.num_stages
        ),
    )(*args)


def _runs(shape: _Shape, segments: Segments | None) -> tuple[jax.Array, jax.Array]:
    block = (shape.tile.queries, shape.tile.keys)
    rows, columns = runs(shape.rule, shape.num_queries, shape.num_keys, segments, block)
    return jnp.asarray(rows), jnp.asarray(columns)


def forward(
    rule: Rule,
    tiles: Kernels,
    interpret: bool,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
) -> tuple[jax.Array, jax.Array]:
    """The output and the log-sum-exp, of one device's sequences and heads."""
    B, L, H, _ = q.shape
    shape = _shape(rule, tiles.forward, q, k)
    rows, _ = _runs(shape, segments)
    outs = [(q.shape, q.dtype), ((B, H, L), jnp.float32)]
    args = (rows, q, k, v, *(segments or ()))
    out, log_sum = _call(_forward_kernel, shape, (rows.shape[1], H, B), outs, interpret, *args)
    return out, log_sum


def backward(
    rule: Rule,
    tiles: Kernels,
    interpret: bool,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    out: jax.Array,
    log_sum: jax.Array,
    dout: jax.Array,
    dlog_sum: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of q, k and v, of one device's sequences and heads."""
    B, _, H, _ = q.shape
    args = (q, k, v, dout, log_sum, deltas(out, dout, dlog_sum), *(segments or ()))
    shape = _shape(rule, tiles.dq, q, k)
    rows, _ = _runs(shape, segments)
    grid, outs = (rows.shape[1], H, B), [(q.shape, q.dtype)]
    [dq] = _call(_dq_kernel, shape, grid, outs, interpret, rows, *args)
    shape = _shape(rule, tiles.dkv, q, k)
    _, columns = _runs(shape, segments)
    grid, outs = (columns.shape[1], k.shape[2], B), [(k.shape, k.dtype), (v.shape, v.dtype)]
    dk, dv = _call(_dkv_kernel, shape, grid, outs, interpret, columns, *args)
    return dq, dk, dv
