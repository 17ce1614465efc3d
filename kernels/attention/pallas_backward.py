"""Attention's backward for Hopper GPUs, through Pallas's Mosaic GPU backend.

In the way of `warpgroups`, as in FlashAttention-3 (Shah et al., arXiv:2407.08608). One kernel holds
keys and goes through queries (`pallas_backward_keys`). Scores come again from queries, keys and
the log-sum-exp, once for all three gradients: five products a tile. The gradient of a query has
parts from the keys of many blocks, which are added in the GPU's memory in the order in which they
come: its last bits differ from run to run. Or queries have a kernel of their own, which holds them
and goes through keys: seven products, and no block writes where another does, so that all bits are
the same. That is also what is faster for heads 128 wide.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels.attention import warpgroups
from kernels.attention.pallas_backward_keys import dkv_kernel, joint_kernel, wide_kernel
from kernels.attention.reference import deltas
from kernels.attention.tiles import LOG2_E, Rule, Segments, runs
from kernels.attention.warpgroups import (
    ACROSS,
    COMPUTING,
    OF_COLUMNS,
    OF_ROWS,
    ROWS,
    Add,
    Arrays,
    KernelTiles,
    Products,
    Ref,
    Shared,
    Tiles,
    by_column,
    by_row,
    load,
    padded,
)

HELD = COMPUTING * ROWS  # queries of a block, and keys
WIDEST_OF_EACH = 128  # in wider heads, both warpgroups have the same keys
# Of heads for which two kernels are as fast as the joint one or faster: measured on an H200, with
# 4,096 to 16,384 tokens, 8 to 64 heads and one or several sequences. 64 was not measured.
SEPARATE_WIDTHS = (128,)
BLOCKS_OF_A_GPU = 2 * warpgroups.MULTIPROCESSORS  # with fewer, some of them are idle


def backward(
    rule: Rule,
    tiles: KernelTiles,
    interpret: bool,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    out: jax.Array,
    log_sum: jax.Array,
    dout: jax.Array,
    dlog_sum: jax.Array,
    *,
    deterministic: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of q, k and v, of one device's sequences and heads.

    Args:
      rule: which keys a query sees, and what is done to scores.
      tiles: how the kernels cut their work.
      interpret: whether threads are simulated.
      q: queries [B, L, H, K].
      k: keys [B, M, G, K].
      v: values [B, M, G, K].
      segments: the document of each query [B, L] and of each key [B, M].
      out: the output [B, L, H, K].
      log_sum: the log-sum-exp of the scores [B, H, L].
      dout: the gradient of the output.
      dlog_sum: the gradient of the log-sum-exp.
      deterministic: whether gradients must have the same bits each time.
    """
    (B, _, H, K), (_, M, G, _) = q.shape, k.shape
    others = out, log_sum, dout, dlog_sum
    separate = deterministic or K in SEPARATE_WIDTHS
    run = functools.partial(_backward, rule, tiles, interpret, separate=separate)
    if G == H or B * G * -(-M // _held(K)) >= BLOCKS_OF_A_GPU:
        return run(q, k, v, segments, *others)
    # A block for each query head: then they are more, and each is done sooner.
    each_k, each_v = (jnp.repeat(x, H // G, axis=2) for x in (k, v))
    dq, *of_heads = run(q, each_k, each_v, segments, *others)
    dk, dv = (x.reshape(B, M, G, -1, K).sum(3, dtype=jnp.float32) for x in of_heads)
    return dq, dk.astype(k.dtype), dv.astype(v.dtype)


def _held(width: int) -> int:
    """Keys of a block."""
    return ROWS if width > WIDEST_OF_EACH else HELD


def _backward(
    rule: Rule,
    tiles: KernelTiles,
    interpret: bool,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    out: jax.Array,
    log_sum: jax.Array,
    dout: jax.Array,
    dlog_sum: jax.Array,
    *,
    separate: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes `backward` with a block for all query heads that share keys.

    Args: see `backward`; `separate` says whether queries have a kernel of their own.
    """
    (B, L, H, K), (_, M, G, _) = q.shape, k.shape
    of_keys = tiles.dkv if separate else tiles.joint
    held = _held(K)
    most = max(HELD, tiles.dq.streamed, of_keys.streamed)  # all are powers of two
    # Log-sum-exp and delta of each query in one array [B, H, 2, L]: they are copied together.
    both = jnp.stack([log_sum * LOG2_E, deltas(out, dout, dlog_sum)], 2)
    arrays = [warpgroups.copied(x, most, interpret) for x in (q, k, v, dout)]
    arrays += [padded(both, most, 3), *(padded(x, most) for x in segments or ())]
    told = {"rule": rule, "num_queries": L, "num_keys": M, "interpret": interpret}
    _, keys_table = runs(rule, L, M, segments, (of_keys.streamed, held))

    def launch(
        kernel: Callable,
        table: Any,
        num_heads: int,
        streamed: tuple[int, int],  # positions of a head's blocks, and heads that share them
        tiles: Tiles,
        shared: Shared,
        outs: Sequence[jax.Array],
        *sums: Ref,
    ) -> Sequence[jax.Array]:
        if interpret:
            factors = warpgroups.tiles(COMPUTING, ROWS, tiles.streamed, dtype=q.dtype)
            shared = shared | {"factors": factors}
        grid = table.shape[1], num_heads, B
        found = [(x.shape, x.dtype) for x in outs]
        num_positions, readers = streamed
        num_bytes = 2 * num_positions * K * q.dtype.itemsize
        enough = warpgroups.ENOUGH_READERS if separate else warpgroups.ENOUGH_ADDING
        follow = warpgroups.rows_follow(grid, readers, num_bytes, enough)
        run = warpgroups.launch(kernel, told, found, shared, grid, interpret, rows_follow=follow)
        return run(jnp.asarray(table), *arrays, *sums)

    def slots_of(tiles: Tiles, *names: str) -> Shared:
        tile = warpgroups.tiles(tiles.slots, tiles.streamed, K, dtype=q.dtype)
        return warpgroups.slots(dict.fromkeys(names, tile), tiles.slots)

    queries = L * H // G, 1
    shared = slots_of(of_keys, "queries", "douts")
    number = warpgroups.numbers(of_keys.slots, 2, of_keys.streamed)
    shared |= warpgroups.slots({"both": number}, of_keys.slots)
    shared |= warpgroups.held(["keys", "values"], k, by_all=held < HELD)
    if separate:
        table, _ = runs(rule, L, M, segments, (HELD, tiles.dq.streamed))
        of_queries = warpgroups.held(["queries", "douts"], q)
        of_queries |= slots_of(tiles.dq, "keys", "values")
        [dq] = launch(dq_kernel, table, H, (M, H // G), tiles.dq, of_queries, arrays[:1])
        dk, dv = launch(dkv_kernel, keys_table, G, queries, of_keys, shared, arrays[1:3])
        return dq[:, :L], dk[:, :M], dv[:, :M]

    shared |= warpgroups.meeting()
    shared["dqs"] = warpgroups.tiles(COMPUTING, ROWS, ROWS, dtype=jnp.float32)
    if held == HELD:
        kernel = joint_kernel
        assert of_keys.streamed * K <= COMPUTING * ROWS * ROWS  # a square for each warpgroup
        # Two of each warpgroup: one may still be multiplied while the next is made.
        dscores = warpgroups.tiles(2 * COMPUTING, ROWS, of_keys.streamed, dtype=q.dtype)
        shared["dscores"] = dscores
    else:
        kernel = wide_kernel
        assert of_keys.streamed == ROWS
        only = warpgroups.tiles(1, ROWS, K, dtype=q.dtype)  # there is no room for more
        shared |= warpgroups.slots({"douts": only}, 1)
        square = warpgroups.tiles(ROWS, ROWS, dtype=q.dtype)
        shared |= {"weights": square, "dscores": square}
        shared["slopes"] = warpgroups.tiles(ROWS, ROWS, dtype=jnp.float32)
    # Simulated copies cannot add: there each row of blocks has an array of its own.
    sums = jnp.zeros((keys_table.shape[1] if interpret else 1, *arrays[0].shape), jnp.float32)

    def run(refs: list[Ref]) -> None:
        sums_ref, dk_ref, dv_ref = refs
        found = launch(kernel, keys_table, G, queries, of_keys, shared, arrays[1:3], sums_ref)
        dk_ref[...], dv_ref[...] = found

    sums, dk, dv = pl.run_state(run)([sums, *map(jnp.zeros_like, arrays[1:3])])
    dq = (sums.sum(0) * rule.factor(K)).astype(q.dtype)
    return dq[:, :L], dk[:, :M], dv[:, :M]


def dq_kernel(
    run_ref: Ref,
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    dout_ref: Ref,
    both_ref: Ref,
    *refs: Ref,
    rule: Rule,
    num_queries: int,
    num_keys: int,
    interpret: bool,
    **shared: Ref,
) -> None:
    """Computes the gradients of the queries of one block: 64 queries for each warpgroup.

    Args:
      run_ref: the run of tiles of keys for each block of queries, as made by `runs`.
      q_ref, dout_ref: queries and gradients of outputs [B, L, H, K].
      k_ref, v_ref: keys and values [B, M, G, K].
      both_ref: log-sum-exps as exponents of two, and deltas [B, H, 2, L].
      refs: with segments the documents of queries [B, L] and keys [B, M]; then the result
        [B, L, H, K].
      rule: which keys a query sees, and what is done to scores.
      num_queries, num_keys: lengths without padding.
      interpret: whether threads are simulated.
      shared: arrays in the shared memory of a block, by name.
    """
    *id_refs, dq_ref = refs
    row, h, b = warpgroups.place()
    i = run_ref.shape[1] - 1 - row  # the longest runs of a causal rule first
    g = lax.div(h, jnp.int32(q_ref.shape[2] // k_ref.shape[2]))
    run = warpgroups.run_of(run_ref, b, i)
    first, _, _, end = run
    _, size, width = shared["keys"].shape
    unit, tile = rule.unit(width), (ROWS, size)

    def copy() -> None:
        at = lambda ref: lambda n: ref.at[b, pl.ds((first + n) * size, size), g]
        warpgroups.copy_tiles({"keys": at(k_ref), "values": at(v_ref)}, end - first, shared)

    def compute(warpgroup: jax.Array) -> None:
        start = (i * COMPUTING + warpgroup) * ROWS
        own = pl.ds(start, ROWS)
        sources = {"queries": q_ref.at[b, own, h], "douts": dout_ref.at[b, own, h]}
        warpgroups.fetch(sources, warpgroup, shared)
        queries, douts = warpgroups.wait_for_held(["queries", "douts"], warpgroup, shared)
        log_sum, delta = (load(both_ref.at[b, h, which, own], OF_ROWS) for which in (0, 1))

        def keep(j: jax.Array) -> jax.Array:
            query = warpgroups.positions(0, start, tile)
            key = warpgroups.positions(1, j * size, tile)
            kept = (query < num_queries) & (key < num_keys) & rule.sees(query, key)
            if not id_refs:
                return kept
            query_ids = load(id_refs[0].at[b, own], OF_ROWS)
            key_ids = load(id_refs[1].at[b, pl.ds(j * size, size)], OF_COLUMNS)
            return kept & (by_row(query_ids, tile) == by_column(key_ids, tile))

        def step(masked: bool, j: jax.Array, dq: jax.Array) -> jax.Array:
            keys = warpgroups.wait_for("keys", j - first, shared)
            values = warpgroups.wait_for("values", j - first, shared)

            def multiply(products: Products, add: Add) -> Arrays:
                raw = rule.raw(products(0, num_later=1), width)
                p = jnp.exp2(raw * unit - by_row(log_sum, tile))
                if masked:
                    p = jnp.where(keep(j), p, 0.0)
                dp = products(1, num_later=0)
                warpgroups.is_done("values", j - first, shared)
                add(0, rule.slope(raw, p * (dp - by_row(delta, tile))), keys)
                return ()

            factors = [(queries, keys), (douts, values)]
            (dq,), _ = warpgroups.multiply(multiply, factors, (dq,), (), warpgroup, shared)
            warpgroups.is_done("keys", j - first, shared)
            return dq

        dq = warpgroups.through(run, step, warpgroups.full((ROWS, width), ACROSS))
        warpgroups.store((dq * rule.factor(width), queries, dq_ref.at[b, own, h]))

    warpgroups.divide(compute, copy, interpret=interpret)
