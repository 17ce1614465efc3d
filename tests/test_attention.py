"""Every implementation of attention against float64 NumPy: values and all gradients.

Pallas kernels run as ordinary JAX operations here, with tiles so small that a few dozen tokens
make several of them, and are lowered for an NVIDIA GPU in every configuration they claim to have.
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import Mesh, PartitionSpec as P

from kernels import attention_mosaic, attention_triton, warpgroups
from kernels.attention import MASKED, MAX_BLOCKS, QUERY_BLOCK, SAVED, _blocks, attention_reference
from kernels.attention_pallas import attention_pallas
from kernels.attention_ring import REFERENCE, How, attention_on, from_runs, to_runs
from kernels.attention_tiles import Rule, runs
from kernels.attention_triton import Tiles
from kernels.shards import Shards
from kernels.tuned import Kernels
from tests.arrays import assert_near, normal, wide
from tests.gpus import INTERPRET, lowered_for_cuda

SMALL = Kernels(
    forward=Tiles(queries=16, keys=32, num_warps=4, num_stages=2),
    dq=Tiles(queries=32, keys=16, num_warps=4, num_stages=2),
    dkv=Tiles(queries=16, keys=16, num_warps=4, num_stages=2),
)
IMPLEMENTATIONS = {
    "reference": attention_reference,
    "triton": functools.partial(attention_pallas, tiles=SMALL, interpret=INTERPRET),
}


FULL = Rule(causal=False)


def inputs(L, M, H, G, K, *, dtype="float32", scale=1.0, batch=2):
    q = normal(0, batch, L, H, K, dtype=dtype, scale=scale)
    k = normal(1, batch, M, G, K, dtype=dtype, scale=scale)
    return q, k, normal(2, batch, M, G, K, dtype=dtype)


def documents(length, seed=0, batch=2):
    """Ids that rise by one at random places."""
    starts = np.random.default_rng([seed, length]).random((batch, length)) < 0.1
    return jnp.asarray(np.cumsum(starts, axis=1), jnp.int32)


def seen(L, M, rule, segments):
    """Which query sees which key, told one by one; [B, L, M]."""
    mask = np.zeros((1 if segments is None else len(segments[0]), L, M), bool)
    for b, i, j in np.ndindex(mask.shape):
        same = segments is None or segments[0][b, i] == segments[1][b, j]
        past = not rule.causal or j <= i
        near = rule.window is None or i - j < rule.window
        mask[b, i, j] = same and past and near
    return mask


def oracle(q, k, v, dout, dlog_sum, segments, rule):
    """Output, log-sum-exp, and the gradients of q, k and v, by hand and in float64."""
    q, k, v, dout, dlog_sum = wide((q, k, v, dout, dlog_sum))
    shared = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, shared, 2), np.repeat(v, shared, 2)
    ids = None if segments is None else [np.asarray(x) for x in segments]
    mask = seen(q.shape[1], k.shape[1], rule, ids)[:, None]
    scale = q.shape[3] ** -0.5 if rule.scale is None else rule.scale
    score, slope = np.einsum("blhk,bmhk->bhlm", q, k) * scale, 1.0
    if rule.soft_cap is not None:
        score = rule.soft_cap * np.tanh(score / rule.soft_cap)
        slope = 1 - (score / rule.soft_cap) ** 2
    score = np.where(mask, score, -np.inf)
    top = np.maximum(score.max(-1, keepdims=True), MASKED)
    weight = np.exp(score - top)
    total = weight.sum(-1, keepdims=True)
    p = weight / np.where(total, total, 1)
    log_sum = np.where(total, top + np.log(np.where(total, total, 1)), MASKED)[..., 0]
    out = np.einsum("bhlm,bmhk->blhk", p, v)
    dp = np.einsum("blhk,bmhk->bhlm", dout, v)
    delta = np.einsum("blhk,blhk->bhl", dout, out) - dlog_sum
    dscore = p * (dp - delta[..., None]) * slope * scale
    dq = np.einsum("bhlm,bmhk->blhk", dscore, k)
    dk = np.einsum("bhlm,blhk->bmhk", dscore, q)
    dv = np.einsum("bhlm,blhk->bmhk", p, dout)
    add = lambda x: x.reshape(*x.shape[:2], -1, shared, x.shape[3]).sum(3)
    return out, log_sum, dq, add(dk), add(dv)


def run(attention, arrays, segments, rule):
    """The same of an implementation, and the gradients that came in."""
    q, k, v = arrays
    dout = normal(3, *q.shape, dtype=q.dtype)
    dlog_sum = normal(4, q.shape[0], q.shape[2], q.shape[1])

    @jax.jit
    def values_and_gradients(q, k, v, segments):
        call = lambda q, k, v: attention(q, k, v, segments, rule)
        out, pullback = jax.vjp(call, q, k, v)
        return *out, *pullback((dout, dlog_sum))

    return values_and_gradients(q, k, v, segments), (dout, dlog_sum)


def check(attention, arrays, segments, rule, dtype="float32"):
    got, gradients = run(attention, arrays, segments, rule)
    want = oracle(*arrays, *gradients, segments, rule)
    sees_none = want[1] == MASKED
    np.testing.assert_array_equal(np.asarray(got[1])[sees_none], np.float32(MASKED))
    for i, (one, other) in enumerate(zip(got, want, strict=True)):
        if i == 1:
            one, other = np.where(sees_none, 0, one), np.where(sees_none, 0, other)
        assert_near(one, other, dtype)
    assert [x.dtype for x in got] == [dtype, "float32", dtype, dtype, dtype]


CASES = {  # L, M, H, G, K, rule, whether there are documents
    "one token": (1, 1, 2, 1, 16, Rule(), False),
    "whole tiles": (64, 64, 2, 2, 32, Rule(), False),
    "ragged": (77, 77, 4, 2, 16, Rule(), False),
    "documents": (77, 77, 3, 1, 16, Rule(), True),
    "window": (90, 90, 2, 1, 16, Rule(window=37), False),
    "window of one": (40, 40, 1, 1, 16, Rule(window=1), False),
    "documents in a window": (90, 90, 4, 4, 16, Rule(window=20), True),
    "soft cap": (50, 50, 2, 1, 64, Rule(soft_cap=0.7, scale=0.5), False),
    "everything": (70, 70, 6, 2, 32, Rule(window=33, soft_cap=2.0, scale=0.3), True),
    "full": (33, 70, 4, 2, 16, FULL, False),
    "full, fewer keys": (50, 17, 2, 2, 16, FULL, False),
    "full, documents elsewhere": (33, 50, 2, 1, 16, FULL, True),
    "128 wide": (40, 40, 2, 1, 128, Rule(), False),
    "256 wide": (40, 40, 1, 1, 256, Rule(), True),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case, implementation):
    L, M, H, G, K, rule, has_documents = CASES[case]
    segments = None
    if has_documents:  # with a rule that is not causal, some documents have no key here
        segments = (documents(L), documents(M) if rule.causal else documents(M, 1) + 2)
    check(IMPLEMENTATIONS[implementation], inputs(L, M, H, G, K), segments, rule)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes(dtype, implementation):
    arrays = inputs(70, 70, 2, 1, 64, dtype=dtype)
    check(IMPLEMENTATIONS[implementation], arrays, (documents(70),) * 2, Rule(window=50), dtype)


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
        (150, 150, 64, Rule(), False, True),
        (300, 300, 64, Rule(window=100, soft_cap=2.0), True, False),
        (300, 300, 64, Rule(window=100, soft_cap=2.0), True, True),
        (130, 300, 128, FULL, True, False),
        (130, 300, 128, FULL, True, True),
        (150, 150, 256, Rule(), False, False),
        (130, 300, 256, FULL, True, False),
        (200, 200, 256, Rule(window=100, soft_cap=2.0), True, False),
        (1, 1, 128, Rule(), False, False),
        (1, 1, 256, Rule(), False, False),
    ],
)
def test_mosaic(L, M, K, rule, has_documents, deterministic):
    """With simulated threads and barriers, and a look-out for races."""
    segments = None
    if has_documents:
        segments = (
            documents(L, batch=1),
            documents(M, batch=1) if rule.causal else documents(M, 1, 1) + 2,
        )
    mosaic = functools.partial(
        attention_pallas, backend="mosaic", deterministic=deterministic, interpret=INTERPRET
    )
    check(mosaic, inputs(L, M, 2, 1, K, dtype="bfloat16", batch=1), segments, rule, "bfloat16")


@simulated
def test_mosaic_with_other_tiles():
    """Each warpgroup adds to half of 128 queries, in place of every second 64."""
    tiles = attention_mosaic.default_tiles(64)
    wider = warpgroups.Tiles(streamed=128, slots=1)
    tiles = dataclasses.replace(tiles, forward=wider, joint=wider)
    mosaic = functools.partial(attention_pallas, backend="mosaic", tiles=tiles, interpret=INTERPRET)
    arrays = inputs(300, 300, 2, 1, 64, dtype="bfloat16", batch=1)
    check(mosaic, arrays, (documents(300, batch=1),) * 2, Rule(window=150), "bfloat16")


@simulated
def test_mosaic_in_float16_with_large_scores_of_many_heads():
    q, k, v = inputs(140, 140, 4, 1, 64, dtype="float16", batch=1)
    q, k = (jnp.round(24 * x) for x in (q, k))  # so that their products are exact
    mosaic = functools.partial(attention_pallas, backend="mosaic", interpret=INTERPRET)
    got, gradients = run(mosaic, (q, k, v), None, Rule())
    want = oracle(q, k, v, *gradients, None, Rule())
    assert_near(got[0], want[0], "float16")
    assert_near(got[1], want[1])
    assert np.abs(want[1]).max() > 1000
    assert all(np.isfinite(x).all() for x in got)


@simulated
def test_mosaic_under_vmap():
    arrays = [
        jnp.stack([x, x[:, ::-1]]) for x in inputs(70, 70, 2, 1, 64, dtype="bfloat16", batch=1)
    ]

    def gradients(q, k, v):
        mosaic = functools.partial(attention_pallas, backend="mosaic", interpret=INTERPRET)
        out, pullback = jax.vjp(lambda *args: mosaic(*args)[0], q, k, v)
        return out, *pullback(out)

    got = jax.jit(jax.vmap(gradients))(*arrays)
    for i in range(2):
        q, k, v = (x[i] for x in arrays)
        out = got[0][i]
        want = oracle(q, k, v, out, np.zeros((1, 2, 70)), None, Rule())
        for one, other in zip(got, (want[0], *want[2:]), strict=True):
            assert_near(one[i], other, "bfloat16")


def test_the_reference_with_more_blocks_than_it_unrolls():
    check(attention_reference, inputs(1050, 1050, 1, 1, 8, batch=1), None, Rule(window=300))


@pytest.mark.usefixtures("float64")
def test_the_oracle_has_the_gradients_of_its_formula():
    """By `jax.grad` of the formula, in float64."""
    q, k, v = inputs(12, 12, 2, 1, 8)
    segments, rule = (documents(12),) * 2, Rule(window=5, soft_cap=1.5)
    dout, dlog_sum = normal(3, *q.shape), normal(4, 2, 2, 12)

    def plain(q, k, v):
        k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
        score = jnp.einsum("blhk,bmhk->bhlm", q, k) / np.sqrt(q.shape[3])
        score = 1.5 * jnp.tanh(score / 1.5)
        mask = jnp.asarray(seen(12, 12, rule, [np.asarray(x) for x in segments]))[:, None]
        score = jnp.where(mask, score, -jnp.inf)
        out = jnp.einsum("bhlm,bmhk->blhk", jax.nn.softmax(score), v)
        return out, jax.nn.logsumexp(score, axis=-1)

    args = [jnp.asarray(x) for x in wide((q, k, v))]
    out, pullback = jax.vjp(plain, *args)
    want = (*out, *pullback((jnp.asarray(wide(dout)), jnp.asarray(wide(dlog_sum)))))
    got = oracle(q, k, v, dout, dlog_sum, segments, rule)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_large_scores_stay_finite(implementation):
    whole = lambda seed: jnp.round(normal(seed, 2, 40, 2, 16, scale=30.0))
    arrays = (whole(0), whole(1), normal(2, 2, 40, 2, 16))  # so that scores are exact in float32
    got, gradients = run(IMPLEMENTATIONS[implementation], arrays, None, Rule())
    want = oracle(*arrays, *gradients, None, Rule())
    assert_near(got[0], want[0])
    assert_near(got[1], want[1])
    assert np.abs(want[1]).max() > 1000
    assert all(np.isfinite(x).all() for x in got)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_twice_in_a_program_under_vmap_and_remat(implementation):
    attention = IMPLEMENTATIONS[implementation]
    q, k, v = (jnp.stack([x, x[::-1]]) for x in inputs(20, 20, 4, 2, 16))

    def twice(q, k, v):
        out, _ = attention(q, k, v)
        return attention(out, k, v, None, Rule(window=3))[0]

    total = lambda q, k, v: jax.vmap(jax.checkpoint(twice))(q, k, v).sum()
    got = jax.jit(jax.grad(total))(q, k, v)
    for i in range(2):
        args = (q[i], k[i], v[i])
        zeros = np.zeros((2, 4, 20))
        out, *_ = oracle(*args, np.zeros(q[i].shape), zeros, None, Rule())
        dout = np.ones(q[i].shape)
        _, _, dout, _, _ = oracle(out, *args[1:], dout, zeros, None, Rule(window=3))
        assert_near(got[i], oracle(*args, dout, zeros, None, Rule())[2])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_checkpoint_keeps_what_the_backward_needs(implementation, capsys):
    """Besides its arguments only the output and the log-sum-exp: the forward never runs again."""
    attention = lambda q, k, v: IMPLEMENTATIONS[implementation](q, k, v)[0]
    policy = jax.checkpoint_policies.save_only_these_names(SAVED)
    jax.ad_checkpoint.print_saved_residuals(
        jax.checkpoint(attention, policy=policy), *inputs(20, 20, 4, 2, 16)
    )
    lines = capsys.readouterr().out.splitlines()
    kept = [line.split()[0] for line in lines if "from the argument" not in line]
    floats = [shape for shape in kept if shape.startswith("f")]  # a table of runs is a constant
    assert len(floats) == 2
    assert "f32[2,20,4,16]" in floats


@pytest.mark.parametrize("names", [("data", "fsdp", "tensor"), ("fsdp", "tensor")])
def test_on_a_mesh_each_device_has_its_sequences_and_heads(names):
    sizes = (2, 2, 2)[-len(names) :]
    mesh = Mesh(np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), names)
    shards = Shards(mesh, (("B", ("fsdp",)), ("H", ("tensor",)), ("G", ("tensor",))))
    attention = functools.partial(IMPLEMENTATIONS["triton"], shards=shards)
    check(attention, inputs(37, 37, 4, 2, 16), (documents(37),) * 2, Rule())
    q, k, v = inputs(37, 37, 4, 2, 16)
    cut = jax.device_put(q, jax.NamedSharding(mesh, P("fsdp", None, "tensor")))
    text = jax.jit(lambda q: attention(q, k, v)[0]).lower(cut).compile().as_text()
    assert "all-gather" not in text


RINGS = {  # sizes of the mesh, rule, whether there are documents
    "two": ({"context": 2}, Rule(), False),
    "four": ({"context": 4}, Rule(soft_cap=2.0, scale=0.3), True),
    "beside others": ({"fsdp": 2, "context": 2, "tensor": 2}, Rule(), True),
}


@pytest.mark.parametrize("case", RINGS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sequences_cut_over_a_ring(implementation, case):
    sizes, rule, has_documents = RINGS[case]
    count = sizes["context"]
    devices = np.array(jax.devices()[: math.prod(sizes.values())])
    mesh = Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes))
    has = lambda *axes: tuple(axis for axis in axes if axis in sizes)
    heads = has("tensor")
    shards = Shards(mesh, (("B", has("context", "fsdp")), ("H", heads), ("G", heads)), "context")

    def attention(q, k, v, segments, rule):
        if implementation == "triton":
            kernel = functools.partial(IMPLEMENTATIONS["triton"], shards=shards)
        else:
            kernel = lambda *args: attention_on(How(args[4], REFERENCE, shards), *args[:4])
        out, log_sum = kernel(*jax.tree.map(cut, (q, k, v, segments)), rule)
        return join(out), join(log_sum.swapaxes(1, 2)).swapaxes(1, 2)

    def cut(x):
        runs = jnp.split(x, 2 * count, axis=1)
        parts = [jnp.concatenate([runs[i], runs[-1 - i]], axis=1) for i in range(count)]
        return jnp.concatenate(parts, axis=0)

    def join(x):
        halves = [jnp.split(part, 2, axis=1) for part in jnp.split(x, count, axis=0)]
        runs = [first for first, _ in halves] + [second for _, second in halves[::-1]]
        return jnp.concatenate(runs, axis=1)

    segments = (documents(48),) * 2 if has_documents else None
    check(attention, inputs(48, 48, 4, 2, 16), segments, rule)
    q, *_ = inputs(48, 48, 4, 2, 16)
    in_row = jnp.concatenate(jnp.split(q, count, axis=1), axis=0)
    np.testing.assert_array_equal(to_runs(shards, in_row), cut(q))
    np.testing.assert_array_equal(from_runs(shards, cut(q)), in_row)


def test_a_ring_has_no_branches():
    """XLA:GPU would wait on the host for the predicate of each, and half of the devices differ."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("context",))
    shards = Shards(mesh, (("B", ("context",)), ("H", ()), ("G", ())), "context")
    segments = (documents(48).reshape(8, 12),) * 2

    def total(*args):
        return attention_on(How(Rule(), REFERENCE, shards), *args, segments)[0].sum()

    args = [x.reshape(8, 12, *x.shape[2:]) for x in inputs(48, 48, 4, 2, 16)]
    step = jax.jit(jax.value_and_grad(total, (0, 1, 2)))
    assert "cond[" not in str(jax.make_jaxpr(step)(*args))
    assert " conditional(" not in step.lower(*args).compile().as_text()


def test_a_ring_refuses_windows():
    mesh = Mesh(np.array(jax.devices()[:2]), ("context",))
    how = How(Rule(window=3), REFERENCE, Shards(mesh, (("B", ("context",)),), "context"))
    with pytest.raises(ValueError, match="a causal rule without window, not Rule"):
        attention_on(how, *inputs(4, 4, 1, 1, 16), None)


# ---- what a query sees -------------------------------------------------------------------------


def check_runs(L, M, rule, segments, block):
    """Against all pairs of queries and keys; whole tiles have none that is masked."""
    rows, columns = (np.asarray(x)[0] for x in runs(rule, L, M, segments, block))
    all_of_it = seen(L, M, rule, segments and [np.asarray(x) for x in segments])[0]
    tables = ((rows, *block, all_of_it), (columns, *block[::-1], all_of_it.T))
    for table, size, other, mask in tables:
        assert len(table) == -(-len(mask) // size)
        for i, (first, first_whole, end_whole, end) in enumerate(table):
            here = mask[i * size : (i + 1) * size]
            assert 0 <= first <= first_whole <= end_whole <= end <= -(-mask.shape[1] // other)
            assert not here[:, : first * other].any()
            assert not here[:, end * other :].any()
            whole = here[:, first_whole * other : end_whole * other]
            assert whole.all()
            assert whole.size == (end_whole - first_whole) * size * other  # none is ragged
            if segments is None and end > first:  # and no more than it must
                assert here[:, first * other : (first + 1) * other].any()
                assert here[:, (end - 1) * other :].any()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_runs_visit_every_tile_that_counts(data):
    causal = data.draw(st.booleans())
    lengths = st.sampled_from([1, 7, 16, 40])  # each is a shape for which JAX compiles operations
    L = data.draw(lengths)
    M = L if causal else data.draw(lengths)
    window = data.draw(st.none() | st.integers(1, 40)) if causal else None
    rule = Rule(causal=causal, window=window)
    block = data.draw(st.sampled_from([(4, 4), (4, 16), (64, 8)]))
    ids = lambda n: jnp.asarray(data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)))[
        None
    ]
    segments = None
    if data.draw(st.booleans()):
        query_BL = ids(L)
        segments = (query_BL, query_BL if causal else ids(M))
    check_runs(L, M, rule, segments, block)


@pytest.mark.parametrize("block", [(4, 4), (4, 8), (8, 4)])
def test_runs_of_every_window(block):
    for window in range(1, 26):
        check_runs(24, 24, Rule(window=window), None, block)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_token_sees_the_future_or_another_document(implementation):
    """Changing tokens that must not be seen changes nothing, to the bit."""
    length = 50
    attention = jax.jit(IMPLEMENTATIONS[implementation])
    q, k, v = inputs(length, length, 2, 1, 16, batch=1)

    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.booleans(), min_size=length, max_size=length), st.integers(0, length - 1))
    def unchanged(starts, i):
        segment = np.cumsum(starts)
        hidden = (np.arange(length) > i) | (segment != segment[i])
        noise = jnp.asarray(hidden, jnp.float32)[None, :, None, None] * 7
        segments = (jnp.asarray(segment, jnp.int32)[None],) * 2
        before, _ = attention(q, k, v, segments)
        after, _ = attention(q, k + noise, v - noise, segments)
        np.testing.assert_array_equal(before[0, i], after[0, i])

    unchanged()


@given(st.integers(1, 5000))
def test_blocks_cover_every_query_once(length):
    blocks = _blocks(length)
    assert [start for start, _ in blocks] == [0, *(stop for _, stop in blocks[:-1])]
    assert blocks[-1][1] == length
    assert len(blocks) <= MAX_BLOCKS
    assert all(start < stop for start, stop in blocks)
    assert length > QUERY_BLOCK or len(blocks) == 1


@pytest.mark.parametrize(
    "wrong, problem",
    [
        ({"window": 0}, "window must be more than 0, not 0"),
        ({"soft_cap": -1.0}, "soft_cap must be more than 0, not -1.0"),
        ({"scale": 0.0}, "scale must be more than 0, not 0.0"),
        ({"causal": False, "window": 4}, "it needs causal=True"),
    ],
)
def test_rules_that_cannot_be(wrong, problem):
    with pytest.raises(ValueError, match=problem):
        Rule(**wrong)


# ---- on NVIDIA GPUs, without one ---------------------------------------------------------------


CONFIGURATIONS = [
    (name, dtype, width, deterministic)
    for name, module in (("triton", attention_triton), ("mosaic", attention_mosaic))
    for dtype, width in itertools.product(module.DTYPES, module.HEAD_WIDTHS)
    for deterministic in (False, True)
    if name == "mosaic" or not deterministic
]
RULES = itertools.cycle([Rule(), Rule(window=100, soft_cap=30.0), FULL])  # kernels take each alike


@pytest.mark.parametrize(
    "configuration, rule", [*zip(CONFIGURATIONS, RULES, strict=False)], ids=str
)
def test_every_configuration_lowers_for_cuda(configuration, rule):
    backend, dtype, head_width, deterministic = configuration
    run = functools.partial(attention_pallas, backend=backend, deterministic=deterministic)

    def total(q, k, v, ids):
        out, log_sum = run(q, k, v, (ids, ids), rule)
        return out.astype(jnp.float32).sum() + log_sum.sum()

    shapes = [jax.ShapeDtypeStruct((2, 500, heads, head_width), dtype) for heads in (4, 2, 2)]
    ids = jax.ShapeDtypeStruct((2, 500), jnp.int32)
    text = lowered_for_cuda(jax.grad(total, (0, 1, 2)), *shapes, ids)
    expected = (0, 3) if backend == "triton" else (2, 0)  # Mosaic has one for all gradients
    if deterministic:
        expected = (3, 0) if head_width < 256 else (1, 2)
    assert (text.count("mosaic_gpu_v2"), text.count("__gpu$xla.gpu.triton")) == expected


@pytest.mark.parametrize("head_width", [64, 128, 256])
def test_mosaic_kernels_lower_under_vmap(head_width):
    q, k, v = inputs(256, 256, 2, 1, head_width, dtype="bfloat16")

    def gradients(q, k, v):
        out, pullback = jax.vjp(lambda *args: attention_pallas(*args, backend="mosaic")[0], q, k, v)
        return pullback(out)

    args = [jnp.stack([x, x]) for x in (q, k, v)]
    text = lowered_for_cuda(jax.vmap(gradients), *args)
    assert text.count("mosaic_gpu_v2") == 2  # in loops


@pytest.mark.parametrize("keeps, num_kernels", [(True, 2), (False, 3)])
def test_a_checkpoint_runs_mosaic_again_only_where_it_keeps_nothing(keeps, num_kernels):
    policies = jax.checkpoint_policies
    keep = policies.save_only_these_names(SAVED) if keeps else policies.nothing_saveable

    @functools.partial(jax.checkpoint, policy=keep)
    def layer(q, k, v):
        return attention_pallas(jnp.sin(q), k, v, backend="mosaic")[0]

    total = lambda q, k, v: jnp.square(layer(q, k, v).astype(jnp.float32)).sum()
    text = lowered_for_cuda(jax.grad(total), *inputs(256, 256, 4, 2, 64, dtype="bfloat16"))
    assert text.count("mosaic_gpu_v2") == num_kernels


def test_a_ring_of_kernels_is_lowered_for_a_gpu():
    mesh = Mesh(np.array(jax.devices()[:2]), ("context",))
    shards = Shards(mesh, (("B", ("context",)), ("H", ()), ("G", ())), "context")
    attention = functools.partial(attention_pallas, shards=shards, backend="mosaic")

    def gradients(q, k, v):
        out, pullback = jax.vjp(lambda *args: attention(*args)[0], q, k, v)
        return pullback(out)

    text = lowered_for_cuda(gradients, *inputs(256, 256, 2, 1, 128, dtype="bfloat16"))
    # Keys and values in both passes, and their gradients; kernels for own keys, and for others'.
    assert text.count("collective_permute") == 2 + 2 + 2
    assert text.count("mosaic_gpu_v2") == 2 * 2


def test_what_the_kernels_cannot_do_is_refused():
    q, k, v = inputs(20, 20, 4, 2, 16)
    with pytest.raises(ValueError, match="attention_pallas cannot do dtypes bfloat16, float32"):
        attention_pallas(q.astype(jnp.bfloat16), k, v)
    with pytest.raises(ValueError, match="heads 8 wide"):
        attention_pallas(*inputs(20, 20, 4, 2, 8))
