"""Attention's backward for Hopper GPUs, through Pallas's Mosaic backend.

Two kernels in the way of `warpgroups`, as in FlashAttention-3 (Shah et al., arXiv:2407.08608). One
holds queries and goes through their run of keys, for the queries' gradient. The other holds keys
and goes through the queries of all heads that share them. No block writes where another does, so
results are the same each time. Scores come again from queries, keys and the log-sum-exp. Dims are
those of `attention`.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels import warpgroups
from kernels.attention import deltas
from kernels.attention_tiles import LOG2_E, Rule, Segments, runs
from kernels.tuned import Kernels
from kernels.warpgroups import (
    ACROSS,
    COMPUTING,
    OF_COLUMNS,
    OF_ROWS,
    ROWS,
    Ref,
    Shared,
    Tiles,
    by_column,
    by_row,
    load,
    padded,
)

# Wider ones have gradients that do not fit into the registers.
HEAD_WIDTHS = (64, 128)
HELD = COMPUTING * ROWS  # queries or keys of a block


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
    (B, L, H, K), (_, M, G, _) = q.shape, k.shape
    delta = deltas(out, dout, dlog_sum)
    most = max(HELD, tiles.dq.streamed, tiles.dkv.streamed)  # all are powers of two
    # Of each query, in one array [B, H, 2, L]: the two come and go together.
    both = padded(jnp.stack([log_sum * LOG2_E, delta], 2), most, 3)
    ids = [padded(x, most) for x in segments or ()]
    whole = lambda x: warpgroups.copied(x, most, interpret)
    args = (whole(q), whole(k), whole(v), whole(dout), both, *ids)
    told = {"rule": rule, "num_queries": L, "num_keys": M, "interpret": interpret}

    def memory(tiles: Tiles, names: Sequence[str], numbers: Sequence[str] = ()) -> Shared:
        tile = warpgroups.tiles(tiles.slots, tiles.streamed, K, q.dtype)
        number = warpgroups.numbers(tiles.slots, 2, tiles.streamed)
        streamed = dict.fromkeys(names, tile) | dict.fromkeys(numbers, number)
        found = warpgroups.slots(streamed, tiles.slots)
        if interpret:
            found["factors"] = warpgroups.tiles(COMPUTING, ROWS, tiles.streamed, q.dtype)
        return found

    table, _ = runs(rule, L, M, segments, (HELD, tiles.dq.streamed))
    shared = warpgroups.held(["queries", "douts"], q) | memory(tiles.dq, ["keys", "values"])
    [dq] = warpgroups.launch(
        dq_kernel,
        told,
        [(args[0].shape, q.dtype)],
        shared,
        (table.shape[1], H, B),
        interpret,
    )(jnp.asarray(table), *args)

    _, table = runs(rule, L, M, segments, (tiles.dkv.streamed, HELD))
    shared = warpgroups.held(["keys", "values"], k)
    shared |= memory(tiles.dkv, ["queries", "douts"], ["both"])
    dk, dv = warpgroups.launch(
        dkv_kernel,
        told,
        [(args[1].shape, k.dtype), (args[2].shape, v.dtype)],
        shared,
        (table.shape[1], G, B),
        interpret,
    )(jnp.asarray(table), *args)
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
        queries, douts = shared["queries"].at[warpgroup], shared["douts"].at[warpgroup]
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
            products, dp = warpgroups.products((queries, keys), (douts, values))
            warpgroups.is_done("values", j - first, shared)
            raw = rule.raw(products, width)
            p = jnp.exp2(raw * unit - by_row(log_sum, tile))
            if masked:
                p = jnp.where(keep(j), p, 0.0)
            ds = rule.slope(raw, p * (dp - by_row(delta, tile)))
            [dq] = warpgroups.add_products((dq, ds, keys), warpgroup=warpgroup, shared=shared)
            warpgroups.is_done("keys", j - first, shared)
            return dq

        dq = warpgroups.through(run, step, warpgroups.full((ROWS, width), ACROSS))
        result = dq * rule.factor(width), dq_ref.at[b, own, h]
        warpgroups.store({"queries": result}, warpgroup, shared)

    warpgroups.divide(compute, copy, interpret=interpret)


def dkv_kernel(
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
    *id_refs, dk_ref, dv_ref = refs
    j, g, b = warpgroups.place()
    num_shared = q_ref.shape[2] // k_ref.shape[2]  # query heads of these keys
    run = warpgroups.run_of(run_ref, b, j)
    first, _, _, end = run
    num_tiles = end - first
    _, size, width = shared["queries"].shape
    unit, tile = rule.unit(width), (ROWS, size)  # keys by queries

    def copy() -> None:
        def at(ref: Ref, n: jax.Array) -> Ref:
            h = g * num_shared + lax.div(n, num_tiles)
            there = pl.ds((first + lax.rem(n, num_tiles)) * size, size)
            return ref.at[b, h, :, there] if ref is both_ref else ref.at[b, there, h]

        refs = {"queries": q_ref, "both": both_ref, "douts": dout_ref}
        sources = {name: functools.partial(at, ref) for name, ref in refs.items()}
        warpgroups.copy_tiles(sources, num_shared * num_tiles, shared)

    def compute(warpgroup: jax.Array) -> None:
        start = (j * COMPUTING + warpgroup) * ROWS
        own = pl.ds(start, ROWS)
        sources = {"keys": k_ref.at[b, own, g], "values": v_ref.at[b, own, g]}
        warpgroups.fetch(sources, warpgroup, shared)
        keys, values = shared["keys"].at[warpgroup], shared["values"].at[warpgroup]

        def keep(i: jax.Array) -> jax.Array:
            key = warpgroups.positions(0, start, tile)
            query = warpgroups.positions(1, i * size, tile)
            kept = (query < num_queries) & (key < num_keys) & rule.sees(query, key)
            if not id_refs:
                return kept
            query_ids = load(id_refs[0].at[b, pl.ds(i * size, size)], OF_COLUMNS)
            key_ids = load(id_refs[1].at[b, own], OF_ROWS)
            return kept & (by_row(key_ids, tile) == by_column(query_ids, tile))

        def step(n: jax.Array, masked: bool, i: jax.Array, carry: tuple) -> tuple:
            dk, dv = carry
            number = n * num_tiles + i - first
            come = lambda name: warpgroups.wait_for(name, number, shared)
            queries, both, douts = come("queries"), come("both"), come("douts")
            products, dp = warpgroups.products((keys, queries), (values, douts))
            raw = rule.raw(products, width)
            log_sum, delta = (load(both.at[which], OF_COLUMNS) for which in (0, 1))
            p = jnp.exp2(raw * unit - by_column(log_sum, tile))
            if masked:
                p = jnp.where(keep(i), p, 0.0)
            ds = rule.slope(raw, p * (dp - by_column(delta, tile)))
            sums = (dk, ds, queries), (dv, p, douts)
            dk, dv = warpgroups.add_products(*sums, warpgroup=warpgroup, shared=shared)
            for name in ("queries", "both", "douts"):
                warpgroups.is_done(name, number, shared)
            return dk, dv

        head = lambda n, carry: warpgroups.through(run, functools.partial(step, n), carry)
        zeros = warpgroups.full((ROWS, width), ACROSS)
        dk, dv = lax.fori_loop(jnp.int32(0), jnp.int32(num_shared), head, (zeros, zeros))
        results = {
            "keys": (dk * rule.factor(width), dk_ref.at[b, own, g]),
            "values": (dv, dv_ref.at[b, own, g]),
        }
        warpgroups.store(results, warpgroup, shared)

    warpgroups.divide(compute, copy, interpret=interpret)
