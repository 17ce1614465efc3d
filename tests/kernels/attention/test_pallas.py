"""The Pallas kernels: simulated against float64 NumPy, and lowered for an NVIDIA GPU."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from kernels.attention import pallas_backward, pallas_forward, warpgroups
from kernels.attention.choice import (
    DETERMINISTIC_HEAD_WIDTHS,
    HALF_PRECISION,
    PALLAS_HEAD_WIDTHS,
)
from kernels.attention.pallas import attention_pallas
from kernels.attention.reference import SAVED
from kernels.attention.shards import Shards
from kernels.attention.tiles import Rule
from tests.arrays import assert_near
from tests.kernels.attention.gpus import INTERPRET, first_devices, lowered_for_cuda
from tests.kernels.attention.oracle import FULL, check, documents, inputs, oracle, run

simulated = pytest.mark.skipif(
    INTERPRET and not warpgroups.CAN_SIMULATE,
    reason="JAX before 0.12 cannot simulate a Mosaic kernel",
)


@simulated
@pytest.mark.parametrize(
    "L, M, K, rule, has_documents, deterministic",
    [
        # Tiles are 128 by 128, or 64 by 64: the last of both is ragged.
        (150, 150, 64, Rule(), False, False),
        (300, 300, 64, Rule(window=100, soft_cap=2.0), True, False),
        (300, 300, 64, Rule(window=100, soft_cap=2.0), True, True),
        (130, 300, 128, FULL, True, False),
        (130, 300, 256, Rule(causal=False, soft_cap=2.0), True, False),
        (1, 1, 256, Rule(), False, False),
    ],
)
def test_values_and_gradients(L, M, K, rule, has_documents, deterministic):
    """With simulated threads and barriers, and a look-out for races."""
    segments = None
    if has_documents:
        segments = (
            documents(L, batch=1),
            documents(M, batch=1) if rule.causal else documents(M, 1, 1) + 2,
        )
    kernels = functools.partial(attention_pallas, deterministic=deterministic, interpret=INTERPRET)
    check(kernels, inputs(L, M, 1, 1, K, dtype="bfloat16", batch=1), segments, rule, "bfloat16")


@simulated
@pytest.mark.parametrize(
    "length, batch, blocks, deterministic, l2_bytes",
    [(150, 1, 0, False, 0), (70, 2, 0, True, 0), (70, 2, 100, False, 2**20)],
)
def test_sequences_and_heads_that_share_keys_are_kept_apart(
    length, batch, blocks, deterministic, l2_bytes, monkeypatch
):
    """Sequences with documents of their own, and two query heads for each of two key heads.

    On a GPU of so many blocks: with few, a block has the gradients of keys of all query heads. And
    of so much L2: without any, the rows of a head follow each other in all kernels.
    """
    monkeypatch.setattr(pallas_backward, "BLOCKS_OF_A_GPU", blocks)
    monkeypatch.setattr(warpgroups, "L2_BYTES", l2_bytes)
    monkeypatch.setattr(warpgroups, "MULTIPROCESSORS", 4)
    kernels = functools.partial(attention_pallas, deterministic=deterministic, interpret=INTERPRET)
    arrays = inputs(length, length, 4, 2, 64, dtype="bfloat16", batch=batch)
    check(kernels, arrays, (documents(length, batch=batch),) * 2, Rule(), "bfloat16")


@simulated
def test_with_other_tiles():
    """Each warpgroup adds to half of 128 queries, in place of every second 64."""
    tiles = pallas_forward.default_tiles(64)
    wider = warpgroups.Tiles(streamed=128, slots=1)
    tiles = dataclasses.replace(tiles, forward=wider, joint=wider)
    kernels = functools.partial(attention_pallas, tiles=tiles, interpret=INTERPRET)
    arrays = inputs(300, 300, 1, 1, 64, dtype="bfloat16", batch=1)
    check(kernels, arrays, (documents(300, batch=1),) * 2, Rule(window=150), "bfloat16")


@simulated
def test_in_float16_with_large_scores():
    q, k, v = inputs(140, 140, 1, 1, 64, dtype="float16", batch=1)
    q, k = (jnp.round(24 * x) for x in (q, k))  # so that their products are exact
    kernels = functools.partial(attention_pallas, interpret=INTERPRET)
    got, gradients = run(kernels, (q, k, v), None, Rule())
    want = oracle(q, k, v, *gradients, None, Rule())
    assert_near(got[0], want[0], "float16")
    assert_near(got[1], want[1])
    assert np.abs(want[1]).max() > 1000
    assert all(np.isfinite(x).all() for x in got)


@simulated
def test_under_vmap():
    arrays = [
        jnp.stack([x, x[:, ::-1]]) for x in inputs(70, 70, 1, 1, 64, dtype="bfloat16", batch=1)
    ]

    def gradients(q, k, v):
        kernels = functools.partial(attention_pallas, interpret=INTERPRET)
        out, pullback = jax.vjp(lambda *args: kernels(*args)[0], q, k, v)
        return out, *pullback(out)

    got = jax.jit(jax.vmap(gradients))(*arrays)
    for i in range(2):
        q, k, v = (x[i] for x in arrays)
        out = got[0][i]
        want = oracle(q, k, v, out, np.zeros((1, 1, 70)), None, Rule())
        for one, other in zip(got, (want[0], *want[2:]), strict=True):
            assert_near(one[i], other, "bfloat16")


CONFIGURATIONS = [
    (dtype, width, deterministic)
    for deterministic, widths in ((False, PALLAS_HEAD_WIDTHS), (True, DETERMINISTIC_HEAD_WIDTHS))
    for dtype, width in itertools.product(HALF_PRECISION, widths)
]
RULES = itertools.cycle([Rule(), Rule(window=100, soft_cap=30.0), FULL])  # kernels take each alike
# Every width with and without the same bits each time, and either in both dtypes.
ORDINARY = [
    ("bfloat16", 64, False),
    ("float16", 128, False),
    ("bfloat16", 256, False),
    ("float16", 64, True),
    ("bfloat16", 128, True),
]


@pytest.mark.parametrize(
    "configuration, rule",
    [
        pytest.param(*case, marks=[] if case[0] in ORDINARY else pytest.mark.exhaustive)
        for case in zip(CONFIGURATIONS, RULES, strict=False)
    ],
    ids=str,
)
def test_every_configuration_lowers_for_cuda(configuration, rule):
    """Kernels whose bits may differ are in loops, under `jax.vmap`; those of a ring are not."""
    dtype, head_width, deterministic = configuration

    def total(q, k, v, ids):
        run = functools.partial(attention_pallas, deterministic=deterministic)
        out, log_sum = run(q, k, v, (ids, ids), rule)
        return out.astype(jnp.float32).sum() + log_sum.sum()

    shapes = [(2, 500, heads, head_width) for heads in (4, 2, 2)]
    args = [(shape, dtype) for shape in shapes] + [((2, 500), jnp.int32)]
    gradients = jax.grad(total, (0, 1, 2))
    if not deterministic:
        gradients = jax.vmap(gradients)
        args = [((2, *shape), kind) for shape, kind in args]
    text = lowered_for_cuda(gradients, *(jax.ShapeDtypeStruct(*arg) for arg in args))
    separate = deterministic or head_width in pallas_backward.SEPARATE_WIDTHS
    assert text.count("mosaic_gpu_v2") == (3 if separate else 2)  # or one for all gradients


@pytest.mark.parametrize("length, is_for_each", [(2048, True), (8192, False)])
def test_few_blocks_are_made_more_by_one_for_each_query_head(length, is_for_each):
    """64 query and 8 key heads at 2k are 128 blocks of keys; an H200 has 132 multiprocessors."""
    shapes = [jax.ShapeDtypeStruct((1, length, n, 128), "bfloat16") for n in (64, 8, 8, 64)]
    gradients = lambda q, k, v, dout: jax.vjp(lambda *x: attention_pallas(*x)[0], q, k, v)[1](dout)
    # The gradients of all query heads that share keys, before their sum.
    assert (f"bf16[1,{length},8,8,128]" in str(jax.make_jaxpr(gradients)(*shapes))) == is_for_each


def test_the_grid_has_the_order_and_the_backward_the_kernels_that_were_fastest():
    """On an H200, commit edcdd16: TFLOP/s of all heads of a row first, and of all rows of a head.

    The kernels are those of queries, which go through keys, and of keys, which go through queries.
    """
    rows = [
        # B, L, H, G: of queries; of keys, alone and joint. Forward; backward, alone and joint.
        ((8, 4096, 16, 16), True, True, True),  # 418, 497; -, 358; 286, 340
        ((1, 8192, 64, 8), False, False, False),  # 554, 542; 409, 381; 392, 371
        ((4, 4096, 32, 8), True, True, False),  # 271, 279; -, 208; 194, 183
        ((1, 16384, 64, 8), False, False, False),  # 571, -; 432, -; 427, -
        ((8, 512, 16, 16), False, False, False),  # not measured: all keys and values fit into L2
    ]
    for (B, L, H, G), *want in rows:
        held, keys = L // 128, 2 * L * 128 * 2
        of_queries = warpgroups.rows_follow((held, H, B), H // G, keys)
        of_keys = (held, G, B), 1, H // G * keys
        found = [warpgroups.rows_follow(*of_keys, *more) for more in ((), (2,))]
        assert [of_queries, *found] == want, (B, L, H, G)
    assert pallas_backward.SEPARATE_WIDTHS == (128,)  # 329 to 334, 387 to 409, 427 to 432


@pytest.mark.parametrize("keeps, num_kernels", [(True, 2), (False, 3)])
def test_a_checkpoint_runs_mosaic_again_only_where_it_keeps_nothing(keeps, num_kernels):
    policies = jax.checkpoint_policies
    keep = policies.save_only_these_names(SAVED) if keeps else policies.nothing_saveable

    @functools.partial(jax.checkpoint, policy=keep)
    def layer(q, k, v):
        return attention_pallas(jnp.sin(q), k, v)[0]

    total = lambda q, k, v: jnp.square(layer(q, k, v).astype(jnp.float32)).sum()
    program = jax.make_jaxpr(jax.grad(total))(*inputs(256, 256, 4, 2, 64, dtype="bfloat16"))
    # Each call of a kernel is one: see `_one_by_one`.
    assert str(program).count("custom_vmap_call[") == num_kernels


def test_a_ring_of_kernels_is_lowered_for_a_gpu():
    mesh = Mesh(first_devices(2), ("context",))
    shards = Shards(mesh, (("B", ("context",)), ("H", ()), ("G", ())), "context")
    attention = functools.partial(attention_pallas, shards=shards)

    def gradients(q, k, v):
        out, pullback = jax.vjp(lambda *args: attention(*args)[0], q, k, v)
        return pullback(out)

    text = lowered_for_cuda(gradients, *inputs(256, 256, 2, 1, 128, dtype="bfloat16"))
    # Keys and values in both passes, and their gradients; kernels for own keys, and for others'.
    assert text.count("collective_permute") == 2 + 2 + 2
    assert text.count("mosaic_gpu_v2") == 3 * 2


def test_what_the_kernels_cannot_do_is_refused():
    q, k, v = inputs(20, 20, 4, 2, 64)
    with pytest.raises(ValueError, match="attention_pallas cannot do dtypes bfloat16, float32"):
        attention_pallas(q.astype(jnp.bfloat16), k, v)
    with pytest.raises(ValueError, match="heads 32 wide: supported are 64, 128, 256"):
        attention_pallas(*inputs(20, 20, 4, 2, 32, dtype="bfloat16"))
    with pytest.raises(ValueError, match="heads 256 wide with the same bits each time: supported"):
        attention_pallas(*inputs(20, 20, 4, 2, 256, dtype="float16"), deterministic=True)
