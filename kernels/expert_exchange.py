"""The feed-forward of experts of which each device has some: tokens are exchanged, in rounds.

Each device has as many slots for the choices that go to each other device as an even load needs,
and a quarter, and `all_to_all` exchanges full and empty ones alike. Choices that find no
slot wait for the next round. All devices run as many rounds as the largest load between two of them
needs, so no choice is lost at any load, and no array is larger than an even load makes it. With
loads that are nearly even there is one round.

A round may be cut into chunks, each with a part of the slots for every device. No exchange of a
chunk waits for the products of another one, so that a compiler can hide one behind the other.

Dims: those of `kernels.experts`, of one device; n devices, S slots for each, R = n S rows, those of
a chunk included.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from kernels.attention.shards import Shards, on_shards
from kernels.expert_slots import slots_of_each
from kernels.experts import (
    Static,
    dims_of_arguments,
    from_slots,
    in_capacity,
    local_experts,
    over_width,
    place_in_group,
    to_slots,
)

T = TypeVar("T")


class _Routes(NamedTuple):
    """The devices and places to which the choices of a device go."""

    device_N: jax.Array  # the number of devices where a choice is left out
    place_N: jax.Array  # how many choices to the same device come before it
    local_N: jax.Array  # the expert's number on that device
    num_rounds: jax.Array  # the same on all devices


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
) -> jax.Array:
    """The sum over choices of weight * (activation(x @ w_in) @ w_out); [B, L, D].

    Products are in the dtype of x, gradients of weights in that of the weight, summed in float32.
    The gradient of an expert without a token is zero. Choices of a token are added up in float32,
    in their order. The backward keeps the arguments of the activation and computes the rest again.
    The backward of devices that share experts keeps the arguments of this function alone, exchanges
    tokens again and computes all products again.

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
      by_kernel: whether products without a capacity are those of `kernels.experts_pallas`, which
        give gradients of weights in the dtype of x.
    """
    static = Static(activation, w_out.shape[0], capacity, shards, num_chunks, by_kernel)
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

    def add_round(i: jax.Array, y_BLD: jax.Array) -> jax.Array:
        slot_BLk = _slots(static, routes, i, choice_BLk.shape)
        come = _sent(static, routes, slot_BLk, x_BLD, weight_BLk)
        y_RD = _joined(
            static, [_exchange(static, _own_experts(static, *rows, w_in, w_out)) for rows in come]
        )
        return y_BLD + from_slots(y_RD, slot_BLk)

    start_BLD = jnp.zeros(x_BLD.shape, jnp.float32)
    y_BLD = _rounds(routes, add_round, start_BLD).astype(x_BLD.dtype)
    return over_width(static, y_BLD)


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
    num_slots = static.num_devices * _slots_of_each(static, choice_BLk.size)

    def add_round(i: jax.Array, sums: tuple) -> tuple:
        slot_BLk = _slots(static, routes, i, choice_BLk.shape)
        come = _sent(static, routes, slot_BLk, x_BLD, weight_BLk)
        dy_RD = _chunks(static, to_slots(dy_BLD, slot_BLk, num_slots))
        dx_RD, dweight_R, dw = [], [], list(sums[2:])
        for (x, expert, weight), dy in zip(come, dy_RD, strict=True):
            of = lambda x, weight, *w, expert=expert: _own_experts(static, x, expert, weight, *w)
            dx, dweight, *own = jax.vjp(of, x, weight, w_in, w_out)[1](_exchange(static, dy))
            dx_RD.append(_exchange(static, dx))
            dweight_R.append(_exchange(static, dweight))
            dw = jax.tree.map(lambda total, own: total + own.astype(jnp.float32), dw, own)
        dweight = jnp.take(_joined(static, dweight_R), slot_BLk, mode="fill", fill_value=0)
        return sums[0] + from_slots(_joined(static, dx_RD), slot_BLk), sums[1] + dweight, *dw

    start = jax.tree.map(
        lambda x: jnp.zeros(x.shape, jnp.float32), (x_BLD, weight_BLk, w_in, w_out)
    )
    dx_BLD, dweight_BLk, *dw = _rounds(routes, add_round, start)
    dx_BLD = over_width(static, dx_BLD.astype(x_BLD.dtype))
    return dx_BLD, over_width(static, dweight_BLk), *jax.tree.map(lambda x: x[None], dw)


# ---- rounds --------------------------------------------------------------------------------------


def _routes(static: Static, choice_BLk: jax.Array) -> _Routes:
    each = static.num_experts // static.num_devices
    device_BLk, local_BLk = choice_BLk // each, choice_BLk % each
    if static.capacity is not None:
        _, is_in = in_capacity(static, choice_BLk)
        device_BLk = jnp.where(is_in, device_BLk, static.num_devices)
    device_N = device_BLk.reshape(-1)
    place_N, load_n = place_in_group(device_N, static.num_devices)
    rounds = -(-load_n.max() // _slots_of_each(static, choice_BLk.size))
    num_rounds = jax.lax.pmax(rounds, static.axis)
    return _Routes(device_N, place_N, local_BLk.reshape(-1), num_rounds)


def _slots(static: Static, routes: _Routes, i: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The slot of each choice in round i; behind the last one for choices of other rounds."""
    each = _slots_of_each(static, len(routes.device_N))
    own_N = routes.place_N - i * each
    is_in = (own_N >= 0) & (own_N < each) & (routes.device_N < static.num_devices)
    slot_N = jnp.where(is_in, routes.device_N * each + own_N, static.num_devices * each)
    return slot_N.reshape(shape)


def _rounds(routes: _Routes, add_round: Callable[[jax.Array, T], T], start: T) -> T:
    """The sums that begin with `start`, when each round has added its own."""

    def run(carry: tuple) -> tuple:
        i, sums = carry
        return i + 1, add_round(i, sums)

    first = jnp.zeros((), routes.num_rounds.dtype), start
    sums: T = jax.lax.while_loop(lambda carry: carry[0] < routes.num_rounds, run, first)[1]
    return sums


def _sent(
    static: Static, routes: _Routes, slot_BLk: jax.Array, x_BLD: jax.Array, weight_BLk: jax.Array
) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
    """The rows of each chunk that come to this device, their experts' numbers here, their weights.

    An empty row has the number behind the last expert.
    """
    each = static.num_experts // static.num_devices
    num_slots = static.num_devices * _slots_of_each(static, slot_BLk.size)
    # One exchange has both: numbers of experts are exact in float32.
    both_N2 = jnp.stack([routes.local_N.astype(jnp.float32), weight_BLk.reshape(-1)], -1)
    empty_R2 = jnp.tile(jnp.array([each, 0], jnp.float32), (num_slots, 1))
    both_R2 = empty_R2.at[slot_BLk.reshape(-1)].set(both_N2, mode="drop")
    x_RD = to_slots(x_BLD, slot_BLk, num_slots)
    come = []
    for chunks in zip(_chunks(static, both_R2), _chunks(static, x_RD), strict=True):
        both, x = (_exchange(static, rows) for rows in chunks)
        come.append((x, both[:, 0].astype(jnp.int32), both[:, 1]))
    return come


def _own_experts(
    static: Static,
    x_RD: jax.Array,
    expert_R: jax.Array,
    weight_R: jax.Array,
    w_in: tuple[jax.Array, ...],
    w_out: jax.Array,
) -> jax.Array:
    """The results of the experts of this device for the rows that came, [R, D].

    A device that shares the width of experts has its part of a sum.
    """
    each = static.num_experts // static.num_devices
    own = Static(static.activation, each, None, None, by_kernel=static.by_kernel)
    column = lambda x_R: x_R[None, :, None]  # one sequence, of whose tokens each has one choice
    arrays = x_RD[None], column(expert_R), column(weight_R)
    return local_experts(own, *arrays, w_in, w_out)[0]


def _exchange(static: Static, rows: jax.Array) -> jax.Array:
    """The rows that all devices have for this one, those of the first device first."""
    return jax.lax.all_to_all(rows, static.axis, 0, 0, tiled=True)


def _slots_of_each(static: Static, num_choices: int) -> int:
    each: int = slots_of_each(num_choices, static.num_devices, static.num_chunks)
    return each


def _chunks(static: Static, rows: jax.Array) -> list[jax.Array]:
    """The rows of each chunk: the same part of the slots for every device."""
    if static.num_chunks == 1:
        return [rows]
    of_each = rows.reshape(static.num_devices, static.num_chunks, -1, *rows.shape[1:])
    return [of_each[:, i].reshape(-1, *rows.shape[1:]) for i in range(static.num_chunks)]


def _joined(static: Static, chunks: list[jax.Array]) -> jax.Array:
    """The rows of which these are the chunks."""
    if static.num_chunks == 1:
        return chunks[0]
    of_each = [chunk.reshape(static.num_devices, -1, *chunk.shape[1:]) for chunk in chunks]
    return jnp.concatenate(of_each, axis=1).reshape(-1, *chunks[0].shape[1:])
