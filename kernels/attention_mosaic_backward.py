"""Attention's backward for Hopper GPUs, through Pallas's Mosaic backend.

In the way of `warpgroups`, as in FlashAttention-3 (Shah et al., arXiv:2407.08608). One kernel holds
keys and goes through the queries of all heads that share them. Scores come again from queries,
keys and the log-sum-exp, once for all three gradients: five products a tile. The gradient of a
query has parts from the keys of many blocks, which are added in the GPU's memory in the order in
which they come: its last bits differ from run to run. Where they must not, queries have a kernel of
their own, which holds them and goes through keys: seven products, and no block writes where another
does. Dims are those of `attention`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

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
    Add,
    Products,
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
DK, DV = 0, 1  # the sums of a warpgroup that holds keys


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
    *,
    deterministic: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of q, k and v, of one device's sequences and heads."""
    (B, L, H, K), (_, M, G, _) = q.shape, k.shape
    keys_tiles = tiles.dkv if deterministic else tiles.joint
    most = max(HELD, tiles.dq.streamed, keys_tiles.streamed)  # all are powers of two
    # Of each query, in one array [B, H, 2, L]: the two come and go together.
    both = jnp.stack([log_sum * LOG2_E, deltas(out, dout, dlog_sum)], 2)
    arrays = [warpgroups.copied(x, most, interpret) for x in (q, k, v, dout)]
    arrays += [padded(both, most, 3), *(padded(x, most) for x in segments or ())]
    told = {"rule": rule, "num_queries": L, "num_keys": M, "interpret": interpret}

    def launch(
        kernel: Callable, table: Any, num_heads: int, tiles: Tiles, shared: Shared, outs: Sequence
    ) -> Sequence[jax.Array]:
        if interpret:
            factors = warpgroups.tiles(COMPUTING, ROWS, tiles.streamed, q.dtype)
            shared = shared | {"factors": factors}
        grid = table.shape[1], num_heads, B
        found = [(x.shape, x.dtype) for x in outs]
        run = warpgroups.launch(kernel, told, found, shared, grid, interpret)
        return run(jnp.asarray(table), *arrays)

    def streamed(tiles: Tiles, *names: str) -> Shared:
        tile = warpgroups.tiles(tiles.slots, tiles.streamed, K, q.dtype)
        return warpgroups.slots(dict.fromkeys(names, tile), tiles.slots)

    shared = warpgroups.held(["keys", "values"], k) | streamed(keys_tiles, "queries", "douts")
    number = warpgroups.numbers(keys_tiles.slots, 2, keys_tiles.streamed)
    shared |= warpgroups.slots({"both": number}, keys_tiles.slots)
    _, keys_table = runs(rule, L, M, segments, (keys_tiles.streamed, HELD))
    if deterministic:
        table, _ = runs(rule, L, M, segments, (HELD, tiles.dq.streamed))
        held = warpgroups.held(["queries", "douts"], q)
        held |= streamed(tiles.dq, "keys", "values")
        [dq] = launch(dq_kernel, table, H, tiles.dq, held, arrays[:1])
        dk, dv = launch(dkv_kernel, keys_table, G, keys_tiles, shared, arrays[1:3])
    else:
        assert keys_tiles.streamed * K == COMPUTING * ROWS * ROWS  # a square for each warpgroup
        shared |= warpgroups.meeting()
        # Two of each warpgroup: one may still be multiplied while the next is made.
        shared["dscores"] = warpgroups.tiles(2 * COMPUTING, ROWS, keys_tiles.streamed, q.dtype)
        shared["dqs"] = warpgroups.tiles(COMPUTING, ROWS, ROWS, jnp.float32)
        # Simulated copies cannot add: there each row of blocks has an array of its own.
        sums = jnp.zeros((keys_table.shape[1] if interpret else 1, *arrays[0].shape), jnp.float32)

        def run(refs: list[Ref]) -> None:
            arrays.append(refs[0])
            found = launch(joint_kernel, keys_table, G, keys_tiles, shared, arrays[1:3])
            refs[1][...], refs[2][...] = found

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

            def multiply(products: Products, add: Add) -> None:
                raw = rule.raw(products(0, num_later=1), width)
                p = jnp.exp2(raw * unit - by_row(log_sum, tile))
                if masked:
                    p = jnp.where(keep(j), p, 0.0)
                dp = products(1, num_later=0)
                warpgroups.is_done("values", j - first, shared)
                add(0, rule.slope(raw, p * (dp - by_row(delta, tile))), keys)

            factors = [(queries, keys), (douts, values)]
            [dq] = warpgroups.multiply(multiply, factors, [dq], warpgroup, shared)
            warpgroups.is_done("keys", j - first, shared)
            return dq

        dq = warpgroups.through(run, step, warpgroups.full((ROWS, width), ACROSS))
        result = dq * rule.factor(width), dq_ref.at[b, own, h]
        warpgroups.store({"queries": result}, warpgroup, shared)

    warpgroups.divide(compute, copy, interpret=interpret)


def keys_kernel(
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
    joint: bool,
    **shared: Ref,
) -> None:
    """The gradients of keys and values; where `joint`, those of queries are added to."""
    *id_refs, dk_ref, dv_ref = refs
    if joint:
        *id_refs, dq_ref = id_refs
    j, g, b = warpgroups.place()
    num_shared = q_ref.shape[2] // k_ref.shape[2]  # query heads of these keys
    run = warpgroups.run_of(run_ref, b, j)
    first, _, _, end = run
    num_tiles = end - first
    _, size, width = shared["queries"].shape
    unit, tile = rule.unit(width), (ROWS, size)  # keys by queries

    def head(n: jax.Array) -> jax.Array:
        return g * num_shared + n

    def copy() -> None:
        def at(ref: Ref, n: jax.Array) -> Ref:
            h = head(lax.div(n, num_tiles))
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
            number = n * num_tiles + i - first
            come = lambda name: warpgroups.wait_for(name, number, shared)
            queries, both, douts = come("queries"), come("both"), come("douts")

            def multiply(products: Products, add: Add) -> None:
                """Exponentials are taken while the tensor cores are at the second product."""
                raw = rule.raw(products(0, num_later=1), width)
                p = jnp.exp2(raw * unit - by_column(load(both.at[0], OF_COLUMNS), tile))
                if masked:
                    p = jnp.where(keep(i), p, 0.0)
                dp = products(1, num_later=0)
                ds = rule.slope(raw, p * (dp - by_column(load(both.at[1], OF_COLUMNS), tile)))
                if joint:
                    here = dscores_of(number, warpgroup)
                    here[...] = ds.astype(here.dtype)
                    warpgroups.commit()
                add(DV, p, douts)
                add(DK, ds, queries)
                if joint:
                    add_to_queries(n, i, number)

            factors = [(keys, queries), (values, douts)]
            carry = warpgroups.multiply(multiply, factors, carry, warpgroup, shared)
            for name in ("queries", "both", "douts"):
                warpgroups.is_done(name, number, shared)
            return carry

        def dscores_of(number: jax.Array, which: jax.Array | int) -> Ref:
            """Those of a warpgroup's keys, in a tile; keys by queries."""
            return shared["dscores"].at[lax.rem(number, jnp.int32(2)) * COMPUTING + which]

        def add_to_queries(n: jax.Array, i: jax.Array, number: jax.Array) -> None:
            """What all keys of the block give to half of a tile: half of its queries, or dims."""
            queries = pl.ds(warpgroup * ROWS if size > ROWS else 0, ROWS)
            dims = pl.ds(warpgroup * ROWS if width > ROWS else 0, ROWS)
            warpgroups.meet(shared)
            factors = [
                (
                    warpgroups.turned(dscores_of(number, which).at[:, queries]),
                    shared["keys"].at[which, :, dims],
                )
                for which in range(COMPUTING)
            ]
            dq = warpgroups.sum_of_products(*factors)
            there = pl.ds(i * size + queries.start, ROWS)
            target = dq_ref.at[j if interpret else 0, b, there, head(n), dims]
            warpgroups.add_to(target, dq, shared["dqs"].at[warpgroup], interpret=interpret)

        each = lambda n, carry: warpgroups.through(run, functools.partial(step, n), carry)
        zeros = warpgroups.full((ROWS, width), ACROSS)
        dk, dv = lax.fori_loop(jnp.int32(0), jnp.int32(num_shared), each, (zeros, zeros))
        if joint:  # the other may still multiply by the keys that results are to be stored over
            warpgroups.meet(shared)
        results = {
            "keys": (dk * rule.factor(width), dk_ref.at[b, own, g]),
            "values": (dv, dv_ref.at[b, own, g]),
        }
        warpgroups.store(results, warpgroup, shared)

    warpgroups.divide(compute, copy, interpret=interpret)


def dkv_kernel(*refs: Ref, **told: Any) -> None:
    keys_kernel(*refs, joint=False, **told)


def joint_kernel(*refs: Ref, **told: Any) -> None:
    keys_kernel(*refs, joint=True, **told)
