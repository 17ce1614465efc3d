"""The kernels of attention's backward on Hopper GPUs that hold keys.

In the way of `warpgroups`: a block holds keys and values, and goes through the queries of all heads
that share them. The joint kernels also add a block's part of the queries' gradients to the parts of
other blocks, in the GPU's memory.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels.attention import warpgroups
from kernels.attention.tiles import Rule
from kernels.attention.warpgroups import (
    ACROSS,
    COMPUTING,
    OF_COLUMNS,
    OF_ROWS,
    ROWS,
    Add,
    Arrays,
    Products,
    Ref,
    Shared,
    by_column,
    by_row,
    load,
)

DK, DV = 0, 1  # the sums of a warpgroup


@dataclass(frozen=True)
class ThreadBlock:
    """The numbers and arrays of a block, and the work that both kernels share."""

    rule: Rule
    num_queries: int
    num_keys: int
    interpret: bool
    q_ref: Ref
    k_ref: Ref
    v_ref: Ref
    dout_ref: Ref
    both_ref: Ref  # [B, H, 2, L]: log-sum-exps as exponents of two, and deltas
    id_refs: list[Ref]  # of the documents of queries and keys
    dq_ref: Ref | None  # [1, B, L, H, K]; simulated, one for each row of blocks
    dk_ref: Ref
    dv_ref: Ref
    shared: Shared
    row: jax.Array
    kv_head: jax.Array
    sequence: jax.Array
    run: tuple[jax.Array, ...]  # of tiles of queries

    @property
    def size(self) -> int:
        """Queries in a tile."""
        return int(self.shared["queries"].shape[1])

    @property
    def width(self) -> int:
        return int(self.shared["queries"].shape[2])

    @property
    def num_heads(self) -> int:
        """The number of query heads that share these keys."""
        return int(self.q_ref.shape[2] // self.k_ref.shape[2])

    @property
    def num_tiles(self) -> jax.Array:
        """The number of tiles of each head."""
        return self.run[3] - self.run[0]

    def head(self, n: jax.Array) -> jax.Array:
        return self.kv_head * self.num_heads + n

    def number(self, n: jax.Array, i: jax.Array) -> jax.Array:
        """The number of tile i of head n among all tiles."""
        return n * self.num_tiles + i - self.run[0]

    def copy_queries(self) -> None:
        """All tiles of all heads, with their log-sum-exps, and so on."""

        def at(ref: Ref, number: jax.Array) -> Ref:
            h = self.head(lax.div(number, self.num_tiles))
            i = self.run[0] + lax.rem(number, self.num_tiles)
            there = pl.ds(i * self.size, self.size)
            if ref is self.both_ref:
                return ref.at[self.sequence, h, :, there]
            return ref.at[self.sequence, there, h]

        refs = {"queries": self.q_ref, "both": self.both_ref, "douts": self.dout_ref}
        sources = {name: functools.partial(at, ref) for name, ref in refs.items()}
        warpgroups.copy_tiles(sources, self.num_heads * self.num_tiles, self.shared)

    def fetch(self, start: jax.Array, warpgroup: jax.Array | None) -> None:
        """The keys from `start` on, and their values: of a warpgroup, or of all together."""
        at = lambda ref: ref.at[self.sequence, pl.ds(start, ROWS), self.kv_head]
        sources = {"keys": at(self.k_ref), "values": at(self.v_ref)}
        warpgroups.fetch(sources, warpgroup, self.shared)

    def come(self, number: jax.Array) -> tuple[Ref, Ref, Ref]:
        """Queries of a tile, their numbers, and the gradients of their outputs, once there."""
        names = ("queries", "both", "douts")
        queries, both, douts = (warpgroups.wait_for(x, number, self.shared) for x in names)
        return queries, both, douts

    def through(self, step: Callable[..., Arrays], width: int) -> Arrays:
        """Two sums of [64, width], after `step(n, masked, i, sums)` for each tile i of head n."""
        head = lambda n, sums: warpgroups.through(self.run, functools.partial(step, n), sums)
        zeros = warpgroups.full((ROWS, width), ACROSS)
        return lax.fori_loop(jnp.int32(0), jnp.int32(self.num_heads), head, (zeros, zeros))

    def probabilities(
        self, raw: jax.Array, log_sum: Ref, masked: bool, start: jax.Array, i: jax.Array
    ) -> jax.Array:
        """Attention probabilities of 64 keys for a tile of queries [keys, queries].

        Args:
          raw: products of keys and queries [keys, queries], before they are scaled.
          log_sum: log-sum-exps of the queries, as exponents of two [queries].
          masked: whether some of the pairs do not count.
          start: the first of the keys.
          i: index of the tile of queries.
        """
        exponent = raw * self.rule.unit(self.width)
        p = jnp.exp2(exponent - by_column(load(log_sum, OF_COLUMNS), raw.shape))
        return jnp.where(self._keep(start, i), p, 0.0) if masked else p

    def _keep(self, start: jax.Array, i: jax.Array) -> jax.Array:
        """True for the scores that count."""
        tile = (ROWS, self.size)
        key = warpgroups.positions(0, start, tile)
        query = warpgroups.positions(1, i * self.size, tile)
        kept = (query < self.num_queries) & (key < self.num_keys) & self.rule.sees(query, key)
        if not self.id_refs:
            return kept
        query_ids, key_ids = (ref.at[self.sequence] for ref in self.id_refs)
        query_ids = load(query_ids.at[pl.ds(i * self.size, self.size)], OF_COLUMNS)
        key_ids = load(key_ids.at[pl.ds(start, ROWS)], OF_ROWS)
        return kept & (by_row(key_ids, tile) == by_column(query_ids, tile))

    def add_to_queries(
        self,
        n: jax.Array,
        start: jax.Array,
        dims: Any,
        factors: list[tuple[Ref, Ref]],
        warpgroup: Any,
    ) -> None:
        """Adds the contribution of some keys to the gradients of 64 queries.

        Args:
          n: index of the head among those that share the keys.
          start: the first of the queries.
          dims: the dims of a head that are added to.
          factors: pairs whose products are summed: gradients of scores [queries, keys], and keys.
          warpgroup: index of the warpgroup that adds.
        """
        dq = warpgroups.sum_of_products(*factors)
        row = self.row if self.interpret else 0
        assert self.dq_ref is not None
        target = self.dq_ref.at[row, self.sequence, pl.ds(start, ROWS), self.head(n), dims]
        here = self.shared["dqs"].at[warpgroup]
        warpgroups.add_to(target, dq, here, interpret=self.interpret)

    def less_delta(self, dp: jax.Array, delta: Ref) -> jax.Array:
        """The gradients of scores for each unit of their weights."""
        return dp - by_column(load(delta, OF_COLUMNS), dp.shape)

    def done(self, number: jax.Array) -> None:
        for name in ("queries", "both", "douts"):
            warpgroups.is_done(name, number, self.shared)


def _block(
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
) -> ThreadBlock:
    *id_refs, dk_ref, dv_ref = refs
    dq_ref = id_refs.pop() if joint else None
    told = (rule, num_queries, num_keys, interpret)
    ins = (q_ref, k_ref, v_ref, dout_ref, both_ref, id_refs)
    row, kv_head, sequence = warpgroups.place()
    run = warpgroups.run_of(run_ref, sequence, row)
    outs = (dq_ref, dk_ref, dv_ref)
    return ThreadBlock(*told, *ins, *outs, shared, row, kv_head, sequence, run)


def dkv_kernel(*refs: Ref, **told: Any) -> None:
    """The gradients of keys and values."""
    _each_its_keys(_block(*refs, joint=False, **told))


def joint_kernel(*refs: Ref, **told: Any) -> None:
    """The gradients of queries, keys and values."""
    _each_its_keys(_block(*refs, joint=True, **told))


def _each_its_keys(block: ThreadBlock) -> None:
    """Each of two warpgroups has 64 keys."""
    joint = block.dq_ref is not None
    # Two products at a time and a rule like these have more numbers than there are registers.
    one_by_one = not joint and (block.rule.window or block.rule.soft_cap) is not None
    shared, size, width = block.shared, block.size, block.width
    b, g = block.sequence, block.kv_head

    def compute(warpgroup: jax.Array) -> None:
        start = (block.row * COMPUTING + warpgroup) * ROWS
        own = pl.ds(start, ROWS)
        block.fetch(start, warpgroup)
        keys, values = warpgroups.wait_for_held(["keys", "values"], warpgroup, shared)

        def step(n: jax.Array, masked: bool, i: jax.Array, sums: Arrays) -> Arrays:
            number = block.number(n, i)
            queries, both, douts = block.come(number)

            def multiply(products: Products, add: Add) -> Arrays:
                """Exponentials are taken while the tensor cores are at the second product."""
                raw = block.rule.raw(products(0, num_later=1), width)
                p = block.probabilities(raw, both.at[0], masked, start, i)
                dp = products(1, num_later=0)
                ds = block.rule.slope(raw, p * block.less_delta(dp, both.at[1]))
                if joint:
                    warpgroups.put((ds, dscores(number, warpgroup)))
                add(DV, p, douts)
                add(DK, ds, queries)
                if joint:
                    add_to_queries(n, i, number)
                return ()

            def weigh(products: Products, add: Add) -> Arrays:
                raw = block.rule.raw(products(0, num_later=0), width)
                p = block.probabilities(raw, both.at[0], masked, start, i)
                slopes = block.rule.slope(raw, p)
                add(DV, p, douts)
                return (slopes,)

            factors = [(keys, queries), (values, douts)]
            run = functools.partial(warpgroups.multiply, warpgroup=warpgroup, shared=shared)
            if one_by_one:
                state = (warpgroups.full((ROWS, size), ACROSS),)
                sums, (slopes,) = run(weigh, factors[:1], sums, state)

                def slope(products: Products, add: Add) -> Arrays:
                    add(
                        DK, slopes * block.less_delta(products(0, num_later=0), both.at[1]), queries
                    )
                    return ()

                sums, _ = run(slope, factors[1:], sums, ())
            else:
                sums, _ = run(multiply, factors, sums, ())
            block.done(number)
            return sums

        def dscores(number: jax.Array, which: jax.Array | int) -> Ref:
            """The gradients of scores of a warpgroup's keys, by queries of a tile."""
            return shared["dscores"].at[lax.rem(number, jnp.int32(2)) * COMPUTING + which]

        def add_to_queries(n: jax.Array, i: jax.Array, number: jax.Array) -> None:
            """Adds the part of all keys of the block for 64 queries and 64 dims.

            Each warpgroup has one half of a tile. A tile that is one half alone is done by one of
            them, in turns.
            """
            half = warpgroup * ROWS if size > ROWS else 0
            dims = pl.ds(warpgroup * ROWS if width > ROWS else 0, ROWS)

            def add() -> None:
                factors = []
                for which in range(COMPUTING):
                    turned = warpgroups.turned(dscores(number, which).at[:, pl.ds(half, ROWS)])
                    factors.append((turned, shared["keys"].at[which, :, dims]))
                block.add_to_queries(n, i * size + half, dims, factors, warpgroup)

            warpgroups.meet(shared)
            if max(size, width) > ROWS:
                add()
            else:
                pl.when(lax.rem(number, jnp.int32(COMPUTING)) == warpgroup)(add)

        dk, dv = block.through(step, width)
        if joint:  # the other may still multiply by the keys that results are to be stored over
            warpgroups.meet(shared)
        dk = dk * block.rule.factor(width)
        results = [(dk, keys, block.dk_ref), (dv, values, block.dv_ref)]
        warpgroups.store(*((value, here, ref.at[b, own, g]) for value, here, ref in results))

    warpgroups.divide(compute, block.copy_queries, interpret=block.interpret)


def wide_kernel(*refs: Ref, **told: Any) -> None:
    """Computes `joint_kernel` for wider heads.

    Both warpgroups have the same 64 keys, and each half of the dims of all gradients. One has
    the scores and the probabilities, the other the gradients of both.
    """
    block = _block(*refs, joint=True, **told)
    shared, width = block.shared, block.width
    b, g = block.sequence, block.kv_head
    share = width // COMPUTING  # of the dims
    start = block.row * ROWS
    own = pl.ds(start, ROWS)

    def copy() -> None:
        block.fetch(start, None)
        block.copy_queries()

    def compute_as(which: int) -> None:
        keys, values = warpgroups.wait_for_held(["keys", "values"], None, shared)
        weights, slopes, dscores = (shared[x] for x in ("weights", "slopes", "dscores"))
        first = which * share
        half = pl.ds(first, share)

        def step(n: jax.Array, masked: bool, i: jax.Array, sums: Arrays) -> Arrays:
            number = block.number(n, i)
            queries, both, douts = block.come(number)

            def with_scores(products: Products, add: Add) -> Arrays:
                raw = block.rule.raw(products(0, num_later=0), width)
                p = block.probabilities(raw, both.at[0], masked, start, i)
                warpgroups.put((p, weights), (block.rule.slope(raw, p), slopes))
                warpgroups.meet(shared)
                add(DV, weights, douts.at[:, half])
                return then(add)

            def with_gradients(products: Products, add: Add) -> Arrays:
                dp = products(0, num_later=0)
                warpgroups.meet(shared)
                add(DV, weights, douts.at[:, half])
                ds = load(slopes, ACROSS) * block.less_delta(dp, both.at[1])
                products(0, num_later=0)  # for all: beyond the meeting, weights are the next tile's
                warpgroups.put((ds, dscores))
                return then(add)

            def then(add: Add) -> Arrays:
                warpgroups.meet(shared)
                add(DK, dscores, queries.at[:, half])
                for dim in range(first, first + share, ROWS):
                    dims = pl.ds(dim, ROWS)
                    factors = [(warpgroups.turned(dscores), keys.at[:, dims])]
                    block.add_to_queries(n, i * block.size, dims, factors, which)
                return ()

            multiply, factors = [
                (with_scores, [(keys, queries)]),
                (with_gradients, [(values, douts)]),
            ][which]
            sums, _ = warpgroups.multiply(multiply, factors, sums, (), which, shared)
            block.done(number)
            return sums

        dk, dv = block.through(step, share)
        # The other may still multiply by the keys that results are to be stored over.
        warpgroups.meet(shared)
        dk = dk * block.rule.factor(width)
        warpgroups.put((dk, keys.at[:, half]), (dv, values.at[:, half]))
        warpgroups.meet(shared)
        here, ref = [(keys, block.dk_ref), (values, block.dv_ref)][which]
        warpgroups.send((here, ref.at[b, own, g]))

    def compute(warpgroup: jax.Array) -> None:
        for which in range(COMPUTING):
            pl.when(warpgroup == which)(functools.partial(compute_as, which))

    warpgroups.divide(compute, copy, interpret=block.interpret)
