"""The feed-forward of experts of which each device has some: tokens are exchanged, in rounds.

A token is sent once to each device that has some of its experts, with the numbers and weights of
its choices there, and comes back as their sum. Each device has as many slots for the rows that go
to each other device as even choices need, and a quarter, and `all_to_all` exchanges full and empty
ones alike. The choices of these rows are as many at most as an even load has, and a quarter. Rows
that are above either wait for the next round. All devices run as many rounds as the largest load
between two of them needs, so no choice is lost at any load, and no array is larger than an even
load makes it. With loads that are nearly even there is one round.

A round may be cut into chunks, each with a part of the slots for every device. No exchange of a
chunk waits for the products of another one, so that a compiler can hide one behind the other.

Dims: those of `kernels.experts`, of one device; n devices, m of them that a token may go to, R
rows that come in a chunk, or that go in all chunks of a round.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from kernels.attention.shards import Shards, on_shards
from kernels.expert_slots import choices_of_each, slots_of_each
from kernels.experts import (
    Static,
    dims_of_arguments,
    from_slots,
    in_capacity,
    local_experts,
    over_width,
    to_slots,
)

T = TypeVar("T")


class _Routes(NamedTuple):
    """The devices to which the tokens of a device go, and their choices there."""

    device_Tk: jax.Array  # of each choice; the number of devices where it is left out
    local_Tk: jax.Array  # the expert's number on that device
    device_Tm: jax.Array  # all devices that a token goes to, and the number of devices
    count_Tn: jax.Array  # the token's choices on each device
    rows_Tn: jax.Array  # how many earlier tokens go to the device
    choices_Tn: jax.Array  # the choices of this and earlier tokens on the device


class _Sent(NamedTuple):
    """Rows and choices that have gone to each device in earlier rounds and chunks."""

    rows_n: jax.Array
    choices_n: jax.Array


def experts_feed_forward(
    activation: str,
    x_BLD: jax.Array,
    choice_BLk: jax.Array,
    weight_BLk: jax.Array,
    w_in: tuple[jax.Array, ...],
    w_out: jax.Array,
    *,
    capacity: int | None = None,
    shards: Shards | None = None,
    num_chunks: int = 1,
    by_kernel: bool = False,
    groups: tuple[int, int] = (1, 1),
) -> jax.Array:
    """The sum over choices of weight * (activation(x @ w_in) @ w_out); [B, L, D].

    Products are in the dtype of x, gradients of weights in that of the weight, summed in float32.
    The gradient of an expert without a token is zero. Choices of a token are added up in float32,
    in their order; where devices share experts, first those of each device. The backward keeps the
    arguments of the activation and computes the rest again. The backward of devices that share
    experts keeps the arguments of this function alone, exchanges tokens again and computes all
    products again.

    Args:
      activation: a name of `kernels.linear.ACTIVATIONS`.
      x_BLD: the tokens.
      choice_BLk: the experts of each token, all different, int32.
      weight_BLk: of each choice, float32.
      w_in: one weight [E, D, F], or those of (gate, up).
      w_out: [E, F, D].
      capacity: slots of an expert for each sequence, which its first tokens get; None: as many as
        are needed.
      shards: how a mesh cuts B, E and F; None: there is no mesh.
      num_chunks: of each exchange between devices that share experts.
      groups: of equal numbers of experts, and of how many a token has its choices; the slots of an
        exchange follow from it, and no result.
      by_kernel: whether products without a capacity are those of `kernels.experts_pallas`, which
        give gradients of weights in the dtype of x.
    """
    static = Static(
        *(activation, w_out.shape[0], capacity, shards, num_chunks, by_kernel), groups=groups
    )
    run = local_experts if static.num_devices == 1 else _exchanged
    return run(static, x_BLD, choice_BLk, weight_BLk, w_in, w_out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchanged(
    static: Static,
    x_BLD: jax.Array,
    choice_BLk: jax.Array,
    weight_BLk: jax.Array,
    w_in: tuple[jax.Array, ...],
    w_out: jax.Array,
) -> jax.Array:
    return _forward(static, x_BLD, choice_BLk, weight_BLk, w_in, w_out)[0]


def _forward(static: Static, *arrays: Any) -> tuple[jax.Array, tuple]:
    local = functools.partial(_local_forward, static)
    run = on_shards(local, static.shards, dims_of_arguments(arrays[3]), "BLd")
    return run(*arrays), arrays


def _backward(static: Static, saved: tuple, dy_BLD: jax.Array) -> tuple:
    ins = dims_of_arguments(saved[3])
    # Devices that share sequences but no experts have sums of their own, which XLA adds up.
    outs = "BLd", "BLk", ("NEdF",) * len(saved[3]), "NEFd"
    run = on_shards(functools.partial(_local_backward, static), static.shards, (*ins, "BLd"), outs)
    dx, dweight, dw_in, dw_out = run(*saved, dy_BLD)
    add = lambda dw, w: dw.sum(0).astype(w.dtype)
    return dx, None, dweight, jax.tree.map(add, dw_in, saved[3]), add(dw_out, saved[4])


_exchanged.defvjp(_forward, _backward)


def _local_forward(
    static: Static,
    x_BLD: jax.Array,
    choice_BLk: jax.Array,
    weight_BLk: jax.Array,
    w_in: tuple[jax.Array, ...],
    w_out: jax.Array,
) -> jax.Array:
    routes = _routes(static, choice_BLk)

    def add_round(slot_Tm: jax.Array, y_TD: jax.Array) -> jax.Array:
        come = _come(static, routes, slot_Tm, x_BLD, weight_BLk)
        y_RD = jnp.concatenate(
            [_exchange(static, _own_experts(static, routes, *rows, w_in, w_out)) for rows in come]
        )
        return y_TD + from_slots(y_RD, slot_Tm)

    start_TD = jnp.zeros((x_BLD.shape[0] * x_BLD.shape[1], x_BLD.shape[2]), jnp.float32)
    y_TD = _rounds(static, routes, add_round, start_TD)
    return over_width(static, y_TD.astype(x_BLD.dtype).reshape(x_BLD.shape))


def _local_backward(
    static: Static,
    x_BLD: jax.Array,
    choice_BLk: jax.Array,
    weight_BLk: jax.Array,
    w_in: tuple[jax.Array, ...],
    w_out: jax.Array,
    dy_BLD: jax.Array,
) -> tuple:
    """Gradients of tokens, weights of choices and weights of experts; those with a dim N of 1."""
    routes = _routes(static, choice_BLk)

    def add_round(slot_Tm: jax.Array, sums: tuple) -> tuple:
        come = _come(static, routes, slot_Tm, x_BLD, weight_BLk)
        dy_RD = _chunks(static, to_slots(dy_BLD, slot_Tm, _num_slots(static, routes)))
        dx_RD, dweight_Rk, dw = [], [], list(sums[2:])
        run = functools.partial(_own_experts, static, routes)
        for (x, expert, weight), dy in zip(come, dy_RD, strict=True):
            of = lambda x, weight, *w, expert=expert: run(x, expert, weight, *w)
            dx, dweight, *own = jax.vjp(of, x, weight, w_in, w_out)[1](_exchange(static, dy))
            dx_RD.append(_exchange(static, dx))
            dweight_Rk.append(_exchange(static, dweight))
            dw = jax.tree.map(lambda total, own: total + own.astype(jnp.float32), dw, own)
        dx_TD = from_slots(jnp.concatenate(dx_RD), slot_Tm)
        dweight_Tk = from_slots(jnp.concatenate(dweight_Rk), slot_Tm)  # one of its parts is not 0
        return sums[0] + dx_TD, sums[1] + dweight_Tk, *dw

    by_token = lambda x: x.reshape(-1, x.shape[-1])
    start = jax.tree.map(
        lambda x: jnp.zeros(x.shape, jnp.float32),
        (by_token(x_BLD), by_token(weight_BLk), w_in, w_out),
    )
    dx_TD, dweight_Tk, *dw = _rounds(static, routes, add_round, start)
    dx_BLD = over_width(static, dx_TD.astype(x_BLD.dtype).reshape(x_BLD.shape))
    dweight_BLk = over_width(static, dweight_Tk.reshape(weight_BLk.shape))
    return dx_BLD, dweight_BLk, *jax.tree.map(lambda x: x[None], dw)


# ---- rounds --------------------------------------------------------------------------------------


def _routes(static: Static, choice_BLk: jax.Array) -> _Routes:
    num_devices, k = static.num_devices, choice_BLk.shape[-1]
    each = static.num_experts // num_devices
    device_BLk = choice_BLk // each
    if static.capacity is not None:
        _, is_in = in_capacity(static, choice_BLk)
        device_BLk = jnp.where(is_in, device_BLk, num_devices)
    device_Tk = device_BLk.reshape(-1, k)
    count_Tn = jnp.sum(device_Tk[..., None] == jnp.arange(num_devices)[None, None], 1)
    goes_Tn = count_Tn > 0
    device_Tn = jnp.where(goes_Tn, jnp.arange(num_devices)[None], num_devices)
    return _Routes(
        device_Tk=device_Tk,
        local_Tk=(choice_BLk % each).reshape(-1, k),
        device_Tm=jnp.sort(device_Tn, axis=-1)[:, : min(num_devices, k)],
        count_Tn=count_Tn,
        rows_Tn=jnp.cumsum(goes_Tn, 0) - goes_Tn,
        choices_Tn=jnp.cumsum(count_Tn, 0),
    )


def _slots(static: Static, routes: _Routes, sent: _Sent) -> tuple[jax.Array, _Sent]:
    """The slot of a token for each device of `device_Tm` in a round; and what is sent behind it.

    It lies behind the last slot where a token goes in another round.
    """
    num_devices, num_slots = static.num_devices, _num_slots(static, routes)
    rows, choices = _of_each(static, routes)
    slot_Tn = jnp.full(routes.count_Tn.shape, num_slots)
    for chunk in range(static.num_chunks):
        place_Tn = routes.rows_Tn - sent.rows_n[None]
        is_in = (routes.count_Tn > 0) & (place_Tn >= 0) & (place_Tn < rows)
        is_in &= routes.choices_Tn - sent.choices_n[None] <= choices
        first_n = (chunk * num_devices + jnp.arange(num_devices)) * rows
        slot_Tn = jnp.where(is_in, first_n[None] + place_Tn, slot_Tn)
        sent = _Sent(
            sent.rows_n + is_in.sum(0), sent.choices_n + jnp.sum(routes.count_Tn * is_in, 0)
        )
    take = functools.partial(jnp.take_along_axis, mode="fill", fill_value=num_slots)
    return take(slot_Tn, routes.device_Tm, axis=1), sent


def _rounds(static: Static, routes: _Routes, add_round: Callable[[jax.Array, T], T], start: T) -> T:
    """The sums that begin with `start`, when each round has added its own."""
    all_n = jnp.sum(routes.count_Tn, 0)

    def run(carry: tuple) -> tuple:
        _, sent, sums = carry
        slot_Tm, sent = _slots(static, routes, sent)
        waits = jnp.any(sent.choices_n < all_n)
        return jax.lax.pmax(waits, static.axis), sent, add_round(slot_Tm, sums)

    none = _Sent(jnp.zeros_like(all_n), jnp.zeros_like(all_n))
    waits = jax.lax.pmax(jnp.any(all_n > 0), static.axis)
    sums: T = jax.lax.while_loop(lambda carry: carry[0], run, (waits, none, start))[2]
    return sums


def _come(
    static: Static, routes: _Routes, slot_Tm: jax.Array, x_BLD: jax.Array, weight_BLk: jax.Array
) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
    """The rows of each chunk that come to this device, their experts' numbers here, their weights.

    [R, D] and twice [R, k]. A choice that is not here has the number behind the last expert.
    """
    each, num_slots = static.num_experts // static.num_devices, _num_slots(static, routes)
    k = routes.device_Tk.shape[-1]
    is_there_Tmk = routes.device_Tk[:, None] == routes.device_Tm[..., None]
    # One exchange has both: numbers of experts are exact in float32.
    number_Tmk = jnp.where(is_there_Tmk, routes.local_Tk[:, None], each).astype(jnp.float32)
    weight_Tmk = jnp.where(is_there_Tmk, weight_BLk.reshape(-1, 1, k), 0.0)
    both_N = jnp.concatenate([number_Tmk, weight_Tmk], -1).reshape(slot_Tm.size, 2 * k)
    empty = jnp.array([each] * k + [0] * k, jnp.float32)
    both_R = jnp.tile(empty, (num_slots, 1)).at[slot_Tm.reshape(-1)].set(both_N, mode="drop")
    x_RD = to_slots(x_BLD, slot_Tm, num_slots)
    come = []
    for chunks in zip(_chunks(static, both_R), _chunks(static, x_RD), strict=True):
        both, x = (_exchange(static, rows) for rows in chunks)
        come.append((x, both[:, :k].astype(jnp.int32), both[:, k:]))
    return come


def _own_experts(
    static: Static,
    routes: _Routes,
    x_RD: jax.Array,
    expert_Rk: jax.Array,
    weight_Rk: jax.Array,
    w_in: tuple[jax.Array, ...],
    w_out: jax.Array,
) -> jax.Array:
    """The sums of what the experts of this device give for the rows that came, [R, D].

    A device that shares the width of experts has its part of a sum.
    """
    each = static.num_experts // static.num_devices
    most = static.num_devices * _of_each(static, routes)[1]
    own = Static(
        *(static.activation, each, None, None), by_kernel=static.by_kernel, most_choices=most
    )
    return local_experts(own, x_RD[None], expert_Rk[None], weight_Rk[None], w_in, w_out)[0]


def _exchange(static: Static, rows: jax.Array) -> jax.Array:
    """The rows that all devices have for this one, those of the first device first."""
    return jax.lax.all_to_all(rows, static.axis, 0, 0, tiled=True)


def _of_each(static: Static, routes: _Routes) -> tuple[int, int]:
    """Slots of a chunk for the rows that go to each device, and the most choices of these rows."""
    num_tokens, k = routes.device_Tk.shape
    counts = static.num_experts, k, static.num_devices, static.num_chunks
    return slots_of_each(num_tokens, *counts, static.groups), choices_of_each(num_tokens, *counts)


def _num_slots(static: Static, routes: _Routes) -> int:
    """Slots of all rows that go in a round."""
    return static.num_chunks * static.num_devices * _of_each(static, routes)[0]


def _chunks(static: Static, rows: jax.Array) -> list[jax.Array]:
    """The rows of each chunk, one behind the other."""
    return jnp.split(rows, static.num_chunks)
