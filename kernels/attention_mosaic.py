"""Attention's forward for Hopper GPUs, through Pallas's Mosaic backend.

After FlashAttention-3 (Shah et al., arXiv:2407.08608): a block of threads has three warpgroups. One
copies keys and values from memory, ahead of the others by as many tiles as there are slots; two
hold 64 queries each and multiply on the tensor cores as soon as a tile has arrived. What a slot
holds is copied over once both have said that they are done with it. All three walk the same run of
tiles (`attention_tiles`), so nobody waits for a tile that does not come.

The copies clip what lies behind the end of an array, and read zeros there: lengths need not be
whole tiles. Probabilities go from registers to the second product. Dims are those of `attention`.
"""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.attention import MASKED
from kernels.attention_tiles import LOG2_E, Rule, Segments, runs

HEAD_WIDTHS = (64, 128, 256)
DTYPES = ("bfloat16", "float16")
COMPUTING = 2  # warpgroups; one more copies
QUERIES = 64  # of each: the rows of a product
SLOTS = 2  # tiles of keys and of values that are there at a time
# Of a thread, of 64 Ki for all of a block: what copies needs few.
REGISTERS_COMPUTING, REGISTERS_COPYING = 232, 40

Ref = Any  # an array in the GPU's memory, or in that of a block


def forward(
    rule: Rule,
    interpret: bool,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
) -> tuple[jax.Array, jax.Array]:
    """The output and the log-sum-exp, of one device's sequences and heads."""
    (B, L, H, K), M = q.shape, k.shape[1]
    rows, keys = COMPUTING * QUERIES, 128 if K <= 128 else 64
    table, _ = runs(rule, L, M, segments, (rows, keys))
    pad = lambda x, size: jnp.pad(x, [(0, 0), (0, -x.shape[1] % size)] + [(0, 0)] * (x.ndim - 2))
    ids = [pad(x, size) for x, size in zip(segments or (), (rows, keys), strict=False)]
    padded = table.shape[1] * rows
    # Copies come in groups of eight positions; simulated ones do not clip.
    whole_q, whole_k = (rows, keys) if interpret else (8, 8)
    q, k, v = pad(q, whole_q), pad(k, whole_k), pad(v, whole_k)
    untyped: Any = plgpu  # JAX 0.12 declares these two as if they were abstract
    transforms = (untyped.TilingTransform((8, 64)), untyped.SwizzleTransform(128))
    tile = lambda *shape: plgpu.SMEM(shape, q.dtype, transforms=transforms)
    scratch: dict[str, Any] = {
        "queries": tile(COMPUTING, QUERIES, K),
        "keys": tile(SLOTS, keys, K),
        "values": tile(SLOTS, keys, K),
        "log_sums": plgpu.SMEM((COMPUTING, QUERIES), jnp.float32),
        "queries_came": plgpu.Barrier(num_barriers=COMPUTING),
        "keys_came": plgpu.Barrier(num_barriers=SLOTS),
        "values_came": plgpu.Barrier(num_barriers=SLOTS),
        "keys_done": plgpu.Barrier(num_arrivals=COMPUTING, num_barriers=SLOTS),
        "values_done": plgpu.Barrier(num_arrivals=COMPUTING, num_barriers=SLOTS),
    }
    if interpret:
        scratch["probabilities"] = tile(COMPUTING, QUERIES, keys)
    out, log_sum = plgpu.kernel(
        functools.partial(_kernel, rule=rule, num_keys=M, interpret=interpret),
        out_type=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((B, H, padded), jnp.float32),
        ],
        scratch_types=scratch,
        grid=(table.shape[1], H, B),
        grid_names=("row", "head", "sequence"),
        num_threads=COMPUTING + 1,
        thread_name="warpgroup",
        interpret=_simulated() if interpret else None,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )(jnp.asarray(table), q, k, v, *ids)
    return out[:, :L], log_sum[:, :, :L]


def _simulated() -> Any:
    """Threads, copies and barriers as a GPU has them; races are errors."""
    if not hasattr(plgpu, "InterpretGPUParams"):
        raise NotImplementedError("this JAX cannot simulate a GPU kernel: 0.11 or newer can")
    return plgpu.InterpretGPUParams(detect_races=True)


def _turned(ref: Ref) -> Ref:
    return ref.transpose((1, 0)) if hasattr(ref, "transpose") else plgpu.transpose_ref(ref, (1, 0))


def _load(ref: Ref, layout: Any) -> jax.Array:
    load: Any = plgpu.load
    index = () if "idx" not in inspect.signature(load).parameters else ((),)  # until JAX 0.11
    return load(ref, *index, layout=layout, optimized=False)


def _kernel(
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
    *id_refs, out_ref, log_sum_ref = refs
    warpgroup = lax.axis_index("warpgroup")
    i = run_ref.shape[1] - 1 - lax.axis_index("row")  # the longest runs of a causal rule first
    h, b = lax.axis_index("head"), lax.axis_index("sequence")
    g = lax.div(h, jnp.int32(q_ref.shape[2] // k_ref.shape[2]))
    row = (b if run_ref.shape[0] > 1 else 0, i)
    run = tuple(run_ref[(*row, n)] for n in range(4))

    @pl.when(warpgroup < COMPUTING)
    def _() -> None:
        if not interpret:
            plgpu.set_max_registers(REGISTERS_COMPUTING, action="increase")
        start = (i * COMPUTING + warpgroup) * QUERIES
        _compute(
            q_ref.at[b, pl.ds(start, QUERIES), h],
            out_ref.at[b, pl.ds(start, QUERIES), h],
            log_sum_ref.at[b, h, pl.ds(start, QUERIES)],
            [ref.at[b] for ref in id_refs],
            start,
            run,
            warpgroup,
            shared,
            rule=rule,
            num_keys=num_keys,
        )

    @pl.when(warpgroup == COMPUTING)
    def _() -> None:
        if not interpret:
            plgpu.set_max_registers(REGISTERS_COPYING, action="decrease")
        _copy(k_ref.at[b], v_ref.at[b], g, run, shared)


def _copy(k_ref: Ref, v_ref: Ref, g: jax.Array, run: tuple, shared: dict[str, Ref]) -> None:
    """Every tile of keys and values of the run, in turn, when its slot is free."""
    first, _, _, end = run
    size = shared["keys"].shape[1]

    def load(j: jax.Array, _: None) -> None:
        slot = lax.rem(j - first, jnp.int32(SLOTS))
        for ref, name in ((k_ref, "keys"), (v_ref, "values")):
            is_reused = j - first >= SLOTS
            wait = functools.partial(plgpu.barrier_wait, shared[f"{name}_done"].at[slot])
            pl.when(is_reused)(wait)
            here = ref.at[pl.ds(j * size, size), g]
            plgpu.copy_gmem_to_smem(here, shared[name].at[slot], shared[f"{name}_came"].at[slot])

    lax.fori_loop(first, end, load, None)


def _compute(
    q_ref: Ref,
    out_ref: Ref,
    log_sum_ref: Ref,
    id_refs: list[Ref],
    start: jax.Array,
    run: tuple,
    warpgroup: jax.Array,
    shared: dict[str, Ref],
    *,
    rule: Rule,
    num_keys: int,
) -> None:
    """64 queries, with all the tiles of the run."""
    first, first_whole, end_whole, end = run
    queries = shared["queries"].at[warpgroup]
    came = shared["queries_came"].at[warpgroup]
    plgpu.copy_gmem_to_smem(q_ref, queries, came)
    plgpu.barrier_wait(came)
    width, size = queries.shape[1], shared["keys"].shape[1]
    unit = rule.unit(width)
    tile = (QUERIES, size)
    of_row, of_key = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
    down = lambda x, shape: lax.broadcast_in_dim(x, shape, [0])

    def keep(j: jax.Array) -> jax.Array:
        """Which scores of a tile count."""
        at = lambda dim: plgpu.broadcasted_iota(jnp.int32, tile, dim, layout=plgpu.Layout.WGMMA)
        query, key = at(0) + start, at(1) + j * size
        kept = (key < num_keys) & rule.sees(query, key)
        if not id_refs:
            return kept
        query_ids = _load(id_refs[0].at[pl.ds(start, QUERIES)], of_row)
        key_ids = _load(id_refs[1].at[pl.ds(j * size, size)], of_key)
        return kept & (down(query_ids, tile) == lax.broadcast_in_dim(key_ids, tile, [1]))

    def step(masked: bool, j: jax.Array, carry: tuple) -> tuple:
        acc, top, total = carry
        slot = lax.rem(j - first, jnp.int32(SLOTS))
        plgpu.barrier_wait(shared["keys_came"].at[slot])

        def scores(ref: Ref) -> jax.Array:
            plgpu.wgmma(ref, queries, _turned(shared["keys"].at[slot]))
            return ref[...]

        raw = rule.raw(pl.run_scoped(scores, plgpu.ACC(tile, jnp.float32)), width)
        plgpu.barrier_arrive(shared["keys_done"].at[slot])
        if masked:
            kept = keep(j)
            raw = jnp.where(kept, raw, MASKED)
        new_top = jnp.maximum(top, raw.max(axis=1))
        p = jnp.exp2((raw - down(new_top, tile)) * unit)
        if masked:  # a query that has seen none yet has this as its maximum
            p = jnp.where(kept, p, 0.0)
        shrink = jnp.exp2((top - new_top) * unit)
        total = total * shrink + p.sum(axis=1)
        acc = acc * down(shrink, acc.shape)
        plgpu.barrier_wait(shared["values_came"].at[slot])
        acc = _add_product(acc, p, shared["values"].at[slot], warpgroup, shared)
        plgpu.barrier_arrive(shared["values_done"].at[slot])
        return acc, new_top, total

    zeros = lambda shape, layout, value=0.0: plgpu.layout_cast(
        jnp.full(shape, value, jnp.float32), layout
    )
    acc = zeros((QUERIES, width), plgpu.Layout.WGMMA)
    carry: Any = (acc, zeros((QUERIES,), of_row, MASKED), zeros((QUERIES,), of_row))
    carry = lax.fori_loop(first, first_whole, functools.partial(step, True), carry)
    carry = lax.fori_loop(first_whole, end_whole, functools.partial(step, False), carry)
    acc, top, total = lax.fori_loop(end_whole, end, functools.partial(step, True), carry)
    sees_none = total == 0.0
    total = jnp.where(sees_none, 1.0, total)
    log_sum = jnp.where(sees_none, MASKED, top * (unit / LOG2_E) + jnp.log(total))
    queries[...] = (acc / down(total, acc.shape)).astype(queries.dtype)
    log_sums = shared["log_sums"].at[warpgroup]
    log_sums[...] = log_sum
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(queries, out_ref)
    plgpu.copy_smem_to_gmem(log_sums, log_sum_ref)
    plgpu.wait_smem_to_gmem(0)


def _add_product(
    acc: jax.Array, p: jax.Array, values: Ref, warpgroup: jax.Array, shared: dict[str, Ref]
) -> jax.Array:
    """acc + p @ values, with p rounded to their dtype."""
    p = p.astype(values.dtype)
    if "probabilities" not in shared:
        multiply = pl.run_state(lambda ref: plgpu.wgmma(ref, p, values))
        return multiply(plgpu.ACC.init(acc))
    # Simulated products have both factors in shared memory, and start from zero.
    here = shared["probabilities"].at[warpgroup]
    here[...] = p
    plgpu.commit_smem()

    def product(ref: Ref) -> jax.Array:
        plgpu.wgmma(ref, here, values)
        return ref[...]

    rows, columns = acc.shape
    return acc + pl.run_scoped(product, plgpu.ACC((rows, columns), jnp.float32))
