"""The feed-forward of experts: each token goes to k of E of them, and comes back as a weighted sum.

Tokens are copied into slots, in which those of one expert lie side by side, so that products are of
matrices. Dropless, slots come in blocks of some rows with one expert each, as many as any choice
could fill. With a capacity, each expert has as many slots for each sequence, and a choice that
finds none is left out. `jax.lax.ragged_dot` is not used: on a CPU it multiplies all tokens with all
experts.

Dims: B sequences, L tokens in each, T = B L, k choices of a token, E experts, D model width, F
width of an expert, S slots, n blocks.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import optimization_barrier as materialize

from kernels import experts_pallas
from kernels.attention.shards import Shards, on_shards
from kernels.expert_slots import block_rows, num_blocks
from kernels.linear import ACTIVATIONS

# Names of what `jax.checkpoint` policies may keep.
ROUTES = "routes"  # choices: computed again in 16 bits, a score could lead a token elsewhere
RESULTS = "experts"  # the sum over a token's choices


@jax.custom_vjp
def router_logits(x_BLD: jax.Array, w_DE: jax.Array) -> jax.Array:
    """`x @ w` in float32, whatever the dtype of x; what is kept are x and w as they are."""
    return _router_forward(x_BLD, w_DE)[0]


def _router_forward(x_BLD: jax.Array, w_DE: jax.Array) -> tuple[jax.Array, tuple]:
    return _wide("bld,de->ble", x_BLD, w_DE), (x_BLD, w_DE)


def _router_backward(saved: tuple, dlogits: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_BLD, w_DE = saved
    dx = _wide("ble,de->bld", dlogits, w_DE)
    return dx.astype(x_BLD.dtype), _wide("bld,ble->de", x_BLD, dlogits).astype(w_DE.dtype)


router_logits.defvjp(_router_forward, _router_backward)


def _wide(how: str, a: jax.Array, b: jax.Array) -> jax.Array:
    wide = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.einsum(how, *wide, precision=jax.lax.Precision.HIGHEST)


def largest(scores_BLE: jax.Array, k: int, shards: Shards | None = None) -> jax.Array:
    """The numbers of the k largest scores, int32 [B, L, k]; of equal ones the first. No gradient.

    Each device sorts its own tokens: XLA would gather them.
    """
    choose = lambda scores: jax.lax.top_k(scores, k)[1].astype(jnp.int32)
    return on_shards(choose, shards, ("BLe",), "BLk")(jax.lax.stop_gradient(scores_BLE))


@jax.custom_vjp
def chosen(scores_BLE: jax.Array, choice_BLk: jax.Array) -> jax.Array:
    """The scores of choices, [B, L, k]. What is kept are the choices alone.

    It is a sum with zeros: XLA would gather what devices share to index it.
    """
    is_chosen_BLkE = _is_chosen(choice_BLk, scores_BLE.shape[-1])
    return jnp.sum(jnp.where(is_chosen_BLkE, scores_BLE[:, :, None], 0.0), -1)


def _is_chosen(choice_BLk: jax.Array, num_experts: int) -> jax.Array:
    return choice_BLk[..., None] == jnp.arange(num_experts)[None, None, None]


def _chosen_forward(scores_BLE: jax.Array, choice_BLk: jax.Array) -> tuple:
    # Only the number of experts is read of the zeros.
    return chosen(scores_BLE, choice_BLk), (choice_BLk, jnp.zeros(scores_BLE.shape[-1:]))


def _chosen_backward(saved: tuple, dweight_BLk: jax.Array) -> tuple:
    choice_BLk, zero_E = saved
    is_chosen_BLkE = _is_chosen(choice_BLk, len(zero_E))
    return jnp.sum(jnp.where(is_chosen_BLkE, dweight_BLk[..., None], 0.0), 2), None


chosen.defvjp(_chosen_forward, _chosen_backward)


@jax.custom_jvp
def shares(scores: jax.Array) -> jax.Array:
    """Scores divided by their sum along the last dim, and a number too small to count.

    So scores of zero have shares of zero. The derivative that JAX would find divides by the sum's
    square, which is zero or subnormal in float32 for scores below 1e-17.
    """
    return scores / _sum(scores)


@shares.defjvp
def _shares_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    [scores], [change] = primals, tangents
    share = shares(scores)
    return share, (change - share * change.sum(-1, keepdims=True)) / _sum(scores)


def _sum(scores: jax.Array) -> jax.Array:
    total: jax.Array = scores.sum(-1, keepdims=True) + 1e-20
    return total


class Static(NamedTuple):
    activation: str
    num_experts: int
    capacity: int | None  # slots of an expert for each sequence; None: dropless
    shards: Shards | None
    num_chunks: int = 1  # of an exchange, where devices share experts
    by_kernel: bool = False  # whether products without a capacity are `kernels.experts_pallas`'s
    groups: tuple[int, int] = (1, 1)  # of experts, and those of a token's choices
    most_choices: int | None = None  # of all tokens, where many are left out; None: all choices

    @property
    def num_devices(self) -> int:
        """Devices of which each has some of the experts."""
        return 1 if self.shards is None else self.shards.count("E")

    @property
    def axis(self) -> str:
        """The axis of the mesh that cuts experts."""
        assert self.shards is not None, "only a mesh cuts experts"
        return dict(self.shards.axes_of)["E"][0]


def dims_of_arguments(w_in: tuple[jax.Array, ...]) -> tuple:
    """The dims of tokens, choices, their weights, `w_in` and `w_out`, for `on_shards`."""
    return "BLd", "BLk", "BLk", ("EdF",) * len(w_in), "EFd"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def local_experts(
    static: Static,
    x_BLD: jax.Array,
    choice_BLk: jax.Array,
    weight_BLk: jax.Array,
    w_in: tuple[jax.Array, ...],
    w_out: jax.Array,
) -> jax.Array:
    """The sum over choices, where each device has all experts (`experts_feed_forward`).

    A choice with the number behind the last expert is left out.

    Args:
      static: what is known as the program is traced.
      x_BLD, choice_BLk, weight_BLk, w_in, w_out: those of `experts_feed_forward`.
    """
    return _forward(static, x_BLD, choice_BLk, weight_BLk, w_in, w_out)[0]


def _forward(
    static: Static,
    x_BLD: jax.Array,
    choice_BLk: jax.Array,
    weight_BLk: jax.Array,
    w_in: tuple[jax.Array, ...],
    w_out: jax.Array,
) -> tuple[jax.Array, tuple]:
    outs = "BLd", "BLk", "B", ("BF",) * len(w_in)
    local = functools.partial(_local_forward, static)
    run = on_shards(local, static.shards, dims_of_arguments(w_in), outs)
    y_BLD, slot_BLk, expert_n, inner = run(x_BLD, choice_BLk, weight_BLk, w_in, w_out)
    return y_BLD, (x_BLD, slot_BLk, weight_BLk, expert_n, inner, w_in, w_out)


def _local_forward(
    static: Static,
    x_BLD: jax.Array,
    choice_BLk: jax.Array,
    weight_BLk: jax.Array,
    w_in: tuple[jax.Array, ...],
    w_out: jax.Array,
) -> tuple:
    slot_BLk, expert_n, num_slots = _slots(static, choice_BLk)
    x_SD = to_slots(x_BLD, slot_BLk, num_slots)
    inner = materialize(tuple(_products(static, x_SD, w, expert_n) for w in w_in))
    weight_S = _weights_in_slots(weight_BLk, slot_BLk, num_slots)
    hidden_SF = _activate(static, inner) * weight_S[:, None]
    out_SD = _products(static, hidden_SF.astype(x_BLD.dtype), w_out, expert_n)
    y_BLD = from_slots(out_SD, slot_BLk).astype(x_BLD.dtype)
    return over_width(static, y_BLD), slot_BLk, expert_n, inner


def _backward(static: Static, saved: tuple, dy_BLD: jax.Array) -> tuple:
    x_BLD, slot_BLk, weight_BLk, expert_n, inner, w_in, w_out = saved
    dy_BLD, inner = materialize((dy_BLD, inner))
    of_slots = ("BF",) * len(w_in)
    ins = "BLd", "BLk", "BLk", "B", of_slots, ("EdF",) * len(w_in), "EFd"
    run = on_shards(
        functools.partial(_local_backward, static),
        static.shards,
        ins,
        ("BLd", "BLk", of_slots, "BF"),
    )
    dx, dweight, dinner, hidden = run(dy_BLD, slot_BLk, weight_BLk, expert_n, inner, w_in, w_out)
    # Each gradient of a weight is a product of its own, which a split backward puts off.
    dw_in = tuple(
        _weight_gradient(static, "EdF", w, (x_BLD, du), (slot_BLk, expert_n))
        for w, du in zip(w_in, dinner, strict=True)
    )
    dw_out = _weight_gradient(static, "EFd", w_out, (hidden, dy_BLD), (slot_BLk, expert_n))
    return dx, None, dweight, dw_in, dw_out


def _local_backward(
    static: Static,
    dy_BLD: jax.Array,
    slot_BLk: jax.Array,
    weight_BLk: jax.Array,
    expert_n: jax.Array,
    inner: tuple[jax.Array, ...],
    w_in: tuple[jax.Array, ...],
    w_out: jax.Array,
) -> tuple:
    """Gradients of tokens, weights of choices and the activation's arguments; its results."""
    num_slots, dtype = len(inner[0]), dy_BLD.dtype
    dy_SD = to_slots(dy_BLD, slot_BLk, num_slots)
    weight_S = _weights_in_slots(weight_BLk, slot_BLk, num_slots)
    dhidden = _products(static, dy_SD, w_out, expert_n, is_turned=True).astype(jnp.float32)
    hidden, pullback = jax.vjp(functools.partial(_activate, static), inner)
    dweight_S = over_width(static, jnp.sum(dhidden * hidden, -1))
    dweight = jnp.take(dweight_S, slot_BLk, mode="fill", fill_value=0)
    [dinner] = materialize(pullback(dhidden * weight_S[:, None]))
    first, *rest = (
        _products(static, du, w, expert_n, is_turned=True)
        for du, w in zip(dinner, w_in, strict=True)
    )
    dx = from_slots(sum(rest, first), slot_BLk).astype(dtype)
    return over_width(static, dx), dweight, dinner, (hidden * weight_S[:, None]).astype(dtype)


local_experts.defvjp(_forward, _backward)


def _weight_gradient(
    static: Static,
    dims: str,
    w: jax.Array,
    arrays: tuple[jax.Array, jax.Array],
    where: tuple[jax.Array, jax.Array],
) -> jax.Array:
    """The gradient of a weight, of arrays that lie by tokens, [B, L, D], or by slots, [S, F]."""
    by = ["BLd" if x.ndim == 3 else "BF" for x in arrays]

    def run(a: jax.Array, b: jax.Array, slot_BLk: jax.Array, expert_n: jax.Array) -> jax.Array:
        num_slots = next(len(x) for x in (a, b) if x.ndim == 2)
        a, b = (to_slots(x, slot_BLk, num_slots) if x.ndim == 3 else x for x in (a, b))
        return _group_gradients(static, a, b, expert_n).astype(w.dtype)[None]

    # Devices that share the sequences have sums of their own, which XLA adds up as it cuts them.
    return on_shards(run, static.shards, (*by, "BLk", "B"), "B" + dims)(*arrays, *where).sum(0)


# ---- slots ---------------------------------------------------------------------------------------


def _slots(static: Static, choice_BLk: jax.Array) -> tuple[jax.Array, jax.Array, int]:
    """The slot of each choice, the expert of each block, and how many slots there are.

    The slot of a choice that is left out lies behind the last one. A kernel has the choices of each
    expert in the place of blocks.
    """
    (B, L, k), E = choice_BLk.shape, static.num_experts
    if static.capacity is not None:
        of_expert = B * static.capacity
        place_BLk, is_in = in_capacity(static, choice_BLk)
        own = jnp.arange(B)[:, None, None] * static.capacity + place_BLk
        slot_BLk = choice_BLk * of_expert + own
        return jnp.where(is_in, slot_BLk, E * of_expert), jnp.arange(E), E * of_expert
    most = static.most_choices or B * L * k
    rows, count = block_rows(most, E), num_blocks(most, E)
    choice_N = choice_BLk.reshape(-1)
    place_N, load_E = place_in_group(choice_N, E)
    if static.by_kernel:  # groups lie one behind the other
        num_slots = most + -most % experts_pallas.ROWS
        start_E = jnp.cumsum(load_E) - load_E
        slot_N = jnp.where(choice_N < E, start_E[choice_N] + place_N, num_slots)
        return slot_N.reshape(B, L, k), load_E, num_slots
    end_E = jnp.cumsum(-(-load_E // rows))  # blocks up to the end of each expert's
    start_E = end_E - -(-load_E // rows)
    slot_N = start_E[choice_N] * rows + place_N
    slot_N = jnp.where(choice_N < E, slot_N, count * rows)
    expert_n = jnp.sum(jnp.arange(count)[:, None] >= end_E[None], -1)
    return slot_N.reshape(B, L, k), jnp.minimum(expert_n, E - 1), count * rows


def in_capacity(static: Static, choice_BLk: jax.Array) -> tuple[jax.Array, jax.Array]:
    """How many choices of its expert and sequence come before each; whether capacity has it."""
    assert static.capacity is not None, "without a capacity no choice is left out"
    place = functools.partial(place_in_group, num_experts=static.num_experts)
    place_BN, _ = jax.vmap(place)(choice_BLk.reshape(len(choice_BLk), -1))
    place_BLk = place_BN.reshape(choice_BLk.shape)
    is_in = place_BLk < static.capacity
    return place_BLk, is_in


def place_in_group(choice_N: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """How many choices of the same expert come before each, and how many each expert has.

    The place of a choice with the number behind the last expert means nothing.
    """
    order_N = jnp.argsort(choice_N, stable=True)
    load_E = jnp.sum(choice_N[:, None] == jnp.arange(num_experts)[None], 0, dtype=jnp.int32)
    start_E = jnp.cumsum(load_E) - load_E
    place_N = jnp.arange(len(choice_N)) - start_E[choice_N[order_N]]
    return jnp.zeros_like(place_N).at[order_N].set(place_N), load_E


def to_slots(x_BLD: jax.Array, slot_BLk: jax.Array, num_slots: int) -> jax.Array:
    """The tokens in the slots of their choices; zeros in empty slots."""
    x_TD, k = x_BLD.reshape(-1, x_BLD.shape[-1]), slot_BLk.shape[-1]
    token_N = jnp.arange(slot_BLk.size) // k
    token_S = jnp.full(num_slots, len(x_TD)).at[slot_BLk.reshape(-1)].set(token_N, mode="drop")
    return jnp.take(x_TD, token_S, axis=0, mode="fill", fill_value=0)


def _weights_in_slots(weight_BLk: jax.Array, slot_BLk: jax.Array, num_slots: int) -> jax.Array:
    weight_S = jnp.zeros(num_slots, jnp.float32)
    return weight_S.at[slot_BLk.reshape(-1)].set(weight_BLk.reshape(-1), mode="drop")


def from_slots(x_SD: jax.Array, slot_BLk: jax.Array) -> jax.Array:
    """The sum over a token's choices that have a slot, float32 [B, L, D]."""
    take = functools.partial(jnp.take, x_SD, axis=0, mode="fill", fill_value=0)
    parts = [take(slot_BLk[..., j]).astype(jnp.float32) for j in range(slot_BLk.shape[-1])]
    return sum(parts[1:], parts[0])


def over_width(static: Static, x: jax.Array) -> jax.Array:
    """The sum over devices that share the width of experts."""
    if static.shards is None or static.shards.count("F") == 1:
        return x
    total: jax.Array = jax.lax.psum(x, static.shards.spec("F")[0])
    return total


# ---- products of groups --------------------------------------------------------------------------


def _activate(static: Static, inner: tuple[jax.Array, ...]) -> jax.Array:
    """In float32."""
    return ACTIVATIONS[static.activation](*(u.astype(jnp.float32) for u in inner))


def _products(
    static: Static, x_SD: jax.Array, w: jax.Array, expert_n: jax.Array, *, is_turned: bool = False
) -> jax.Array:
    """The product of each slot with the weight of its expert, or with its transpose; [S, ...]."""
    if static.by_kernel and static.capacity is None:
        return experts_pallas.group_products(x_SD, w, expert_n, is_turned=is_turned)
    x_nrD = x_SD.reshape(len(expert_n), -1, x_SD.shape[-1])
    if static.capacity is not None:
        how = "erf,edf->erd" if is_turned else "erd,edf->erf"
        return jnp.einsum(how, x_nrD, w.astype(x_SD.dtype)).reshape(len(x_SD), -1)

    def multiply(_: None, block: tuple) -> tuple[None, jax.Array]:
        x_rD, expert = block
        own = jax.lax.dynamic_index_in_dim(w, expert, keepdims=False).astype(x_rD.dtype)
        return None, x_rD @ (own.T if is_turned else own)

    return jax.lax.scan(multiply, None, (x_nrD, expert_n))[1].reshape(len(x_SD), -1)


def _group_gradients(
    static: Static, x_SD: jax.Array, dy_SF: jax.Array, expert_n: jax.Array
) -> jax.Array:
    """The sum of x^T dy over the slots of each expert, float32 [E, D, F]."""
    if static.by_kernel and static.capacity is None:
        return experts_pallas.group_gradients(x_SD, dy_SF.astype(x_SD.dtype), expert_n)
    x_nrD, dy_nrF = (a.reshape(len(expert_n), -1, a.shape[-1]) for a in (x_SD, dy_SF))
    wide = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    if static.capacity is not None:
        return wide("erd,erf->edf", x_nrD, dy_nrF)

    def add(total: jax.Array, block: tuple) -> tuple[jax.Array, None]:
        x_rD, dy_rF, expert = block
        own = jax.lax.dynamic_index_in_dim(total, expert, keepdims=False)
        own = own + wide("rd,rf->df", x_rD, dy_rF)
        return jax.lax.dynamic_update_index_in_dim(total, own, expert, 0), None

    start = jnp.zeros((static.num_experts, x_SD.shape[-1], dy_SF.shape[-1]), jnp.float32)
    return jax.lax.scan(add, start, (x_nrD, dy_nrF, expert_n))[0]
