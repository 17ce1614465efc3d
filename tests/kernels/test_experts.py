"""Experts against a loop over tokens in float64 NumPy, and their gradients by themselves."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from kernels.attention.shards import Shards
from kernels.expert_exchange import _of_each, _routes, _Sent, _slots, experts_feed_forward
from kernels.experts import Static, from_slots, place_in_group, router_logits, shares, to_slots
from tests.kernels.attention.gpus import first_devices

B, L, K, E, D, F = 8, 8, 2, 4, 8, 12
RNG = np.random.default_rng(0)
X_BLD, DY_BLD = RNG.standard_normal((2, B, L, D))
WEIGHT_BLK = RNG.random((B, L, K))
W_IN, W_OUT = tuple(RNG.standard_normal((2, E, D, F))), RNG.standard_normal((E, F, D))


def random_choices():
    return np.array([[RNG.permutation(E)[:K] for _ in range(L)] for _ in range(B)])


ARRAYS = jax.tree.map(np.float32, (X_BLD, WEIGHT_BLK, W_IN, W_OUT, DY_BLD))


# The choices of all tokens. Blocks have 8 rows: no expert below has a multiple of them.
CHOICES = {
    "random": random_choices(),
    "two empty groups": np.where(random_choices()[..., :1] % 2, [3, 1], [1, 3]),
    "one group": np.tile([3, 2], (B, L, 1)),  # two rounds: of choices, or of rows
}


def silu(u):
    return u / (1 + np.exp(-u))


def by_tokens(choice_BLk, is_in_BLk):
    """The sum over choices, and its gradients, token by token."""
    y, dx = np.zeros((B, L, D)), np.zeros((B, L, D))
    dweight = np.zeros((B, L, K))
    dgate, dup, ddown = np.zeros((E, D, F)), np.zeros((E, D, F)), np.zeros((E, F, D))
    for b, t, j in np.ndindex(B, L, K):
        if not is_in_BLk[b, t, j]:
            continue
        e, x, dy, weight = choice_BLk[b, t, j], X_BLD[b, t], DY_BLD[b, t], WEIGHT_BLK[b, t, j]
        gate, up = x @ W_IN[0][e], x @ W_IN[1][e]
        hidden = silu(gate) * up
        y[b, t] += weight * hidden @ W_OUT[e]
        dweight[b, t, j] = dy @ (hidden @ W_OUT[e])
        ddown[e] += weight * np.outer(hidden, dy)
        dhidden = weight * W_OUT[e] @ dy
        share = 1 / (1 + np.exp(-gate))
        of_gate = dhidden * up * share * (1 + gate * (1 - share))
        of_up = dhidden * silu(gate)
        dx[b, t] += W_IN[0][e] @ of_gate + W_IN[1][e] @ of_up
        dgate[e] += np.outer(x, of_gate)
        dup[e] += np.outer(x, of_up)
    return y, (dx, dweight, (dgate, dup), ddown)


def places(choice_BLk):
    """How many choices of the same expert come before each in its sequence."""
    found = np.zeros((B, L, K), int)
    for b in range(B):
        seen = dict.fromkeys(range(E), 0)
        for t, j in np.ndindex(L, K):
            found[b, t, j] = seen[choice_BLk[b, t, j]]
            seen[choice_BLk[b, t, j]] += 1
    return found


def shards_of(**sizes):
    mesh = Mesh(first_devices(math.prod(sizes.values())).reshape(*sizes.values()), [*sizes])
    cuts = {"B": ("expert", "fsdp"), "E": ("expert",), "N": ("fsdp",), "F": ("tensor",)}
    has = lambda axes: tuple(axis for axis in axes if axis in sizes)
    return Shards(mesh, tuple((dim, has(axes)) for dim, axes in cuts.items()))


# How a mesh cuts them, and the chunks of an exchange: 3 of 27 slots, where 24 are an even load's.
MESHES = {
    "one device": (None, 1),
    "experts cut, chunks": (shards_of(expert=2, tensor=2), 3),
    "an expert each": (shards_of(expert=4, fsdp=2), 1),
}


@functools.cache
def compiled(capacity, shards, num_chunks):
    """The results and gradients of choices, tokens, weights and the gradient of results."""

    @jax.jit
    def run(choice, x, weight, w_in, w_out, dy):
        of = lambda x, weight, w_in, w_out: experts_feed_forward(
            *("swiglu", x, choice, weight, w_in, w_out),
            capacity=capacity,
            shards=shards,
            num_chunks=num_chunks,
        )
        y, pullback = jax.vjp(of, x, weight, w_in, w_out)
        return y, pullback(dy)

    return run.lower(jnp.asarray(CHOICES["random"]), *ARRAYS).compile()


@pytest.mark.parametrize("capacity", [None, 3])
@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("shards, num_chunks", MESHES.values(), ids=MESHES)
def test_results_and_gradients_are_those_of_each_token_by_itself(
    name, capacity, shards, num_chunks
):
    choice_BLk = CHOICES[name]
    is_in = places(choice_BLk) < (capacity or L * K)
    assert is_in.all() == (capacity is None)
    wanted, gradients = by_tokens(choice_BLk, is_in)

    y, got = compiled(capacity, shards, num_chunks)(jnp.asarray(choice_BLk), *ARRAYS)
    for one, want in zip(
        jax.tree.leaves((y, got)), jax.tree.leaves((wanted, gradients)), strict=True
    ):
        np.testing.assert_allclose(one, want, rtol=1e-4, atol=1e-4)
    for e in set(range(E)) - set(choice_BLk[is_in].tolist()):
        assert not any(np.any(one[e]) for one in (*got[2], got[3])), f"expert {e} has no token"


@pytest.mark.parametrize("choice_BLk", CHOICES.values(), ids=CHOICES)
def test_each_choice_has_a_place_of_its_own_and_comes_back_once(choice_BLk):
    choice_N = choice_BLk.reshape(-1)
    place_N, load_E = (np.asarray(x) for x in place_in_group(jnp.asarray(choice_N), E))
    assert load_E.sum() == B * L * K
    assert {*zip(choice_N, place_N, strict=True)} == {
        (e, i) for e in range(E) for i in range(load_E[e])
    }
    slot_BLk = jnp.asarray(choice_N * B * L + place_N).reshape(B, L, K)
    number_BLD = jnp.arange(B * L, dtype=jnp.float32).reshape(B, L, 1)
    come_S1 = to_slots(number_BLD, slot_BLk, E * B * L)
    np.testing.assert_array_equal(from_slots(come_S1, slot_BLk), K * number_BLD)
    np.testing.assert_array_equal(come_S1[slot_BLk], number_BLD[:, :, None].repeat(K, 2))


@pytest.mark.parametrize("name, products", [("one device", 9), ("an expert each", 11)])
def test_devices_that_share_experts_multiply_again_before_the_activation(name, products):
    """A backward has six gradients of three products."""
    found = compiled(None, *MESHES[name]).as_text()
    assert sum(" dot(" in line for line in found.splitlines()) == products


@functools.cache
def loops_and_exchanges(num_chunks):
    """For each loop of products of a program: the exchanges beside it, before it, and behind it."""
    text = compiled(None, shards_of(expert=4, fsdp=2), num_chunks).as_text()
    bodies = re.findall(r"^(?:ENTRY )?%?([\w.-]+) [^\n]*\{\n(.*?)^\}", text, re.M | re.S)
    fused = {name for name, body in bodies if " dot(" in body}
    called = lambda body: set(re.findall(r" calls=%([\w.-]+)", body))
    multiplies = fused | {name for name, body in bodies if fused & called(body)}
    found = []
    for _, body in bodies:
        reads, loops, sends = {}, [], []
        for name, value in re.findall(r"^ +(?:ROOT )?%([\w.-]+) = (.*)$", body, re.M):
            operands = {other for other in re.findall(r"%([\w.-]+)", value) if other in reads}
            reads[name] = operands.union(*(reads[other] for other in operands))
            loop = re.search(r" while\(.*body=%([\w.-]+)", value)
            loops += [name] if loop and loop[1] in multiplies else []
            sends += [name] if " all-to-all(" in value else []
        for loop in loops if sends else []:
            before = {send for send in sends if send in reads[loop]}
            behind = {send for send in sends if loop in reads[send]}
            beside = set(sends) - before - behind
            found.append(tuple(map(len, (beside, before, behind))))
    return found


def test_exchanges_of_a_chunk_may_run_beside_the_products_of_another():
    """By what instructions of the compiled program read; no time was measured.

    A forward has three exchanges in a chunk, and a backward five.
    """
    alone, found = loops_and_exchanges(1), loops_and_exchanges(2)
    assert {sum(counts) for counts in alone} == {3, 5}
    assert {beside for beside, *others in alone if sum(others) + beside == 3} == {0}
    assert {sum(counts) for counts in found} == {6, 10}
    assert all(beside >= before + behind for beside, before, behind in found)


def test_no_number_of_chunks_changes_a_result():
    arrays = jnp.asarray(CHOICES["random"]), *ARRAYS
    shards = MESHES["experts cut, chunks"][0]
    (one, _), (other, _) = (compiled(None, shards, count)(*arrays) for count in (1, 3))
    np.testing.assert_array_equal(one, other)


def test_a_router_multiplies_in_float32_what_is_in_bfloat16():
    x_BLD, w_DE = np.float32(X_BLD), np.float32(W_IN[0][0])
    x_BLD = np.asarray(jnp.asarray(x_BLD, jnp.bfloat16).astype(jnp.float32))
    logits, pullback = jax.vjp(router_logits, jnp.asarray(x_BLD, jnp.bfloat16), w_DE)
    np.testing.assert_allclose(logits, np.float64(x_BLD) @ w_DE, rtol=1e-5, atol=1e-5)
    dx, dw = pullback(logits)
    assert (dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.float32)
    wanted = np.einsum("bld,blf->df", np.float64(x_BLD), np.float64(logits))
    np.testing.assert_allclose(dw, wanted, rtol=1e-4, atol=1e-4)


def test_shares_of_scores_that_vanish_have_gradients():
    """The scores are sigmoids, as far down as float32 has none, against float64."""
    logit_TE = np.array([0, -20, -40, -45, -60, -200])[:, None] + RNG.standard_normal((6, E))
    dshare_TE = RNG.standard_normal((6, E))
    score_TE = 1 / (1 + np.exp(-logit_TE))
    total_T1 = score_TE.sum(-1, keepdims=True) + 1e-20
    share_TE = score_TE / total_T1
    dscore_TE = (dshare_TE - (share_TE * dshare_TE).sum(-1, keepdims=True)) / total_T1
    of = lambda logits: shares(jax.nn.sigmoid(logits))
    found, pullback = jax.vjp(of, jnp.float32(logit_TE))
    [gradient] = pullback(jnp.float32(dshare_TE))
    np.testing.assert_allclose(found, share_TE, rtol=1e-4, atol=1e-7)
    wanted = dscore_TE * score_TE * (1 - score_TE)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("n, num_chunks", [(2, 1), (2, 3), (4, 1)])
@pytest.mark.parametrize("name", CHOICES)
def test_a_token_goes_once_to_each_device_that_has_its_experts(name, n, num_chunks):
    """Over all rounds, in slots of their own, with as many choices to a device as it has room for.

    The choices of some tokens are left out.
    """
    is_out = np.arange(B)[:, None, None] % 5 == 0
    choice_BLk = np.where(is_out, E, CHOICES[name])
    static = Static("swiglu", E, None, shards_of(expert=n), num_chunks)
    routes = _routes(static, jnp.asarray(choice_BLk))
    rows, choices = _of_each(static, routes)
    sent, went = _Sent(jnp.zeros(n, int), jnp.zeros(n, int)), []
    for _ in range(2 * B * L):
        if np.array_equal(sent.choices_n, routes.count_Tn.sum(0)):
            break
        slot_Tm, sent = _slots(static, routes, sent)
        is_in = np.asarray(slot_Tm) < num_chunks * n * rows
        slot_N, count_N = np.asarray(slot_Tm)[is_in], np.zeros((num_chunks, n), int)
        assert len({*slot_N.tolist()}) == len(slot_N)
        for (token, column), slot in zip(np.argwhere(is_in), slot_N, strict=True):
            chunk, device = divmod(slot // rows, n)
            assert device == routes.device_Tm[token, column]
            count_N[chunk, device] += routes.count_Tn[token, device]
            went.append((token, int(device)))
        assert count_N.max() <= choices
    wanted = {
        (token, e // (E // n))
        for token, to in enumerate(choice_BLk.reshape(-1, K).tolist())
        for e in to
        if e < E
    }
    assert (len(went), {*went}) == (len(wanted), wanted)
