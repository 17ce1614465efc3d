"""Attention's forward for Hopper GPUs, through Pallas's Mosaic GPU backend.

After FlashAttention-3 (Shah et al., arXiv:2407.08608), in the way of `warpgroups`: each of two
warpgroups holds 64 queries and goes through their run of keys (`tiles`). While it takes
the exponentials of a tile, the tensor cores multiply the weights and values of the tile before. And
the two take turns: one has products to do when the other has none. Weights go from registers to the
second product.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels.attention import warpgroups
from kernels.attention.reference import MASKED
from kernels.attention.tiles import LOG2_E, Rule, Segments, runs
from kernels.attention.warpgroups import (
    COMPUTING,
    OF_COLUMNS,
    OF_ROWS,
    ROWS,
    Add,
    Arrays,
    KernelTiles,
    Products,
    Ref,
    Tiles,
    by_column,
    by_row,
    load,
    padded,
)


def default_tiles(head_width: int) -> KernelTiles:
    """Tiles that compile for an H200; which are fast has not been measured."""
    forward = Tiles(streamed=128 if head_width <= 128 else 64, slots=2)
    backward = Tiles(streamed=64, slots=2)
    return KernelTiles(forward=forward, dq=backward, dkv=backward, joint=backward)


def forward(
    rule: Rule,
    tiles: KernelTiles,
    interpret: bool,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
) -> tuple[jax.Array, jax.Array]:
    """The output and the log-sum-exp, of one device's sequences and heads.

    Args:
      rule: which keys a query sees, and what is done to scores.
      tiles: how the kernel cuts its work.
      interpret: whether threads are simulated.
      q: queries [B, L, H, K].
      k: keys [B, M, G, K].
      v: values [B, M, G, K].
      segments: the document of each query [B, L] and of each key [B, M].
    """
    (B, L, H, K), M = q.shape, k.shape[1]
    rows, keys = COMPUTING * ROWS, tiles.forward.streamed
    table, _ = runs(rule, L, M, segments, (rows, keys))
    ids = [padded(x, size) for x, size in zip(segments or (), (rows, keys), strict=False)]
    q = warpgroups.copied(q, rows, interpret)
    k, v = (warpgroups.copied(x, keys, interpret) for x in (k, v))
    tile = warpgroups.tiles(tiles.forward.slots, keys, K, dtype=k.dtype)
    shared = {
        **warpgroups.held(["queries"], q),
        **warpgroups.slots({"keys": tile, "values": tile}, tiles.forward.slots),
        **warpgroups.meeting(),
        "log_sums": warpgroups.numbers(COMPUTING, ROWS),
    }
    if interpret:
        shared["factors"] = warpgroups.tiles(COMPUTING, ROWS, keys, dtype=q.dtype)
    num_rows = table.shape[1]
    grid = num_rows, H, B
    streamed_bytes = 2 * M * K * k.dtype.itemsize
    out, log_sum = warpgroups.launch(
        forward_kernel,
        {"rule": rule, "num_keys": M, "interpret": interpret},
        [(q.shape, q.dtype), ((B, H, num_rows * rows), jnp.float32)],
        shared,
        grid,
        interpret,
        rows_follow=warpgroups.rows_follow(grid, H // k.shape[2], streamed_bytes),
    )(jnp.asarray(table), q, k, v, *ids)
    return out[:, :L], log_sum[:, :, :L]


def forward_kernel(
    run_ref: Ref,
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    *refs: Ref,
    rule: Rule,
    num_keys: int,
    interpret: bool,
    **shared: Ref,
) -> None:
    """Computes attention of the queries of one block: 64 queries for each warpgroup.

    Args:
      run_ref: the run of tiles of keys for each block of queries, as made by `runs`.
      q_ref: queries [B, L, H, K].
      k_ref, v_ref: keys and values [B, M, G, K].
      refs: with segments the documents of queries [B, L] and keys [B, M]; then the output
        [B, L, H, K] and the log-sum-exp [B, H, L].
      rule: which keys a query sees, and what is done to scores.
      num_keys: keys without padding.
      interpret: whether threads are simulated.
      shared: arrays in the shared memory of a block, by name.
    """
    *id_refs, out_ref, log_sum_ref = refs
    row, h, b = warpgroups.place()
    i = run_ref.shape[1] - 1 - row  # the longest runs of a causal rule first
    g = lax.div(h, jnp.int32(q_ref.shape[2] // k_ref.shape[2]))
    run = warpgroups.run_of(run_ref, b, i)
    first, first_whole, end_whole, end = run
    _, size, width = shared["keys"].shape
    unit, tile = rule.unit(width), (ROWS, size)

    def copy() -> None:
        at = lambda ref: lambda n: ref.at[b, pl.ds((first + n) * size, size), g]
        warpgroups.copy_tiles({"keys": at(k_ref), "values": at(v_ref)}, end - first, shared)

    def compute(warpgroup: jax.Array) -> None:
        start = (i * COMPUTING + warpgroup) * ROWS
        own = pl.ds(start, ROWS)
        warpgroups.fetch({"queries": q_ref.at[b, own, h]}, warpgroup, shared)
        (queries,) = warpgroups.wait_for_held(["queries"], warpgroup, shared)
        meet = functools.partial(warpgroups.meet, shared)

        def keep(j: jax.Array) -> jax.Array:
            """True for the scores of a tile that count."""
            query = warpgroups.positions(0, start, tile)
            key = warpgroups.positions(1, j * size, tile)
            kept = (key < num_keys) & rule.sees(query, key)
            if not id_refs:
                return kept
            query_ids = load(id_refs[0].at[b, own], OF_ROWS)
            key_ids = load(id_refs[1].at[b, pl.ds(j * size, size)], OF_COLUMNS)
            return kept & (by_row(query_ids, tile) == by_column(key_ids, tile))

        zeros = functools.partial(warpgroups.full, layout=warpgroups.ACROSS)

        def softmax(
            masked: bool, j: jax.Array, raw: jax.Array, top: jax.Array, total: jax.Array
        ) -> Arrays:
            """Weights of a tile, how much those before weigh now, and the maximum and the sum."""
            if masked:
                kept = keep(j)
                raw = jnp.where(kept, raw, MASKED)
            new_top = jnp.maximum(top, raw.max(axis=1) * unit)
            p = jnp.exp2(raw * unit - by_row(new_top, tile))  # a fused multiply-add
            if masked:  # a query that has seen none yet has this as its maximum
                p = jnp.where(kept, p, 0.0)
            shrink = jnp.exp2(top - new_top)
            total = total * shrink + p.sum(axis=1)
            return p, shrink, new_top, total

        def begin(j: jax.Array, state: Arrays) -> Arrays:
            """The first tile's weights."""
            _, top, total = state
            keys = warpgroups.wait_for("keys", j - first, shared)
            raw = rule.raw(warpgroups.product(queries, keys, meet), width)
            warpgroups.is_done("keys", j - first, shared)
            p, _, top, total = softmax(True, j, raw, top, total)
            meet()
            return p.astype(v_ref.dtype), top, total

        def step(masked: bool, j: jax.Array, carry: tuple[jax.Array, Arrays]) -> tuple:
            """The weights of a tile, while the values of the one before are multiplied."""
            acc, (p, top, total) = carry
            keys = warpgroups.wait_for("keys", j - first, shared)

            def multiply(products: Products, add: Add) -> Arrays:
                add(0, p, warpgroups.wait_for("values", j - 1 - first, shared))
                meet()
                raw = rule.raw(products(0, num_later=1), width)
                warpgroups.is_done("keys", j - first, shared)
                return softmax(masked, j, raw, top, total)

            factors, like = [(queries, keys)], (zeros(tile), top, top, total)
            (acc,), found = warpgroups.multiply(multiply, factors, (acc,), like, warpgroup, shared)
            warpgroups.is_done("values", j - 1 - first, shared)
            # Rounded only here: until then the registers of the last weights are multiplied.
            p, shrink, top, total = found
            acc = acc * by_row(shrink, acc.shape)
            meet()
            return acc, (p.astype(v_ref.dtype), top, total)

        def finish(p: jax.Array, j: jax.Array, acc: jax.Array) -> jax.Array:
            """The last tile's values."""
            values = warpgroups.wait_for("values", j - first, shared)
            multiply = lambda _, add: add(0, p, values) or ()
            (acc,), _ = warpgroups.multiply(multiply, [], (acc,), (), warpgroup, shared)
            warpgroups.is_done("values", j - first, shared)
            return acc

        of_rows = functools.partial(warpgroups.full, (ROWS,), OF_ROWS)
        state = zeros(tile).astype(v_ref.dtype), of_rows(MASKED), of_rows()
        # One is a meeting behind the other, and so multiplies while that one does not.
        pl.when(warpgroup == 1)(meet)
        second = jnp.minimum(first + 1, end)
        state = lax.fori_loop(first, second, begin, state)
        rest = (second, jnp.maximum(first_whole, second), jnp.maximum(end_whole, second), end)
        acc, state = warpgroups.through(rest, step, (zeros((ROWS, width)), state))
        p, top, total = state
        last = jnp.maximum(first, end - 1)
        acc = lax.fori_loop(last, end, functools.partial(finish, p), acc)
        pl.when(warpgroup == 0)(meet)
        sees_none = total == 0.0
        total = jnp.where(sees_none, 1.0, total)
        log_sum = jnp.where(sees_none, MASKED, top / LOG2_E + jnp.log(total))
        out = acc / by_row(total, acc.shape)
        warpgroups.store(
            (out, queries, out_ref.at[b, own, h]),
            (log_sum, shared["log_sums"].at[warpgroup], log_sum_ref.at[b, h, own]),
        )

    warpgroups.divide(compute, copy, interpret=interpret)
