"""Rows of a table, whose gradients are sums of many.

Dims: V rows of the table, D its width, ... any, N all of them merged.
"""

import functools

import jax
import jax.numpy as jnp


def embedding(table_VD: jax.Array, row: jax.Array) -> jax.Array:
    """`table_VD[row]`; row is [...], of integers, and the result [..., D].

    Gradients of a row are summed in float32 at least, and rounded once: in bfloat16 the sum for a
    token that comes a thousand times in a microbatch is off by 7%.
    """
    return _rows(table_VD.shape[0], table_VD, row)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rows(num_rows: int, table_VD: jax.Array, row: jax.Array) -> jax.Array:
    return table_VD[row]


def _forward(num_rows: int, table_VD: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
    return table_VD[row], row


def _backward(num_rows: int, row: jax.Array, dy: jax.Array) -> tuple[jax.Array, None]:
    zeros_VD = jnp.zeros((num_rows, dy.shape[-1]), dy.dtype)
    if dy.dtype.itemsize >= 4:
        return zeros_VD.at[row].add(dy), None
    # The first token of each row has its sum: a table in float32 would take much more memory.
    row_N, dy_ND = row.reshape(-1), dy.reshape(-1, dy.shape[-1])
    token_N = jnp.arange(row_N.size)
    first_N = jnp.full(num_rows, row_N.size).at[row_N].min(token_N)[row_N]
    sums_ND = jnp.zeros(dy_ND.shape, jnp.float32).at[first_N].add(dy_ND.astype(jnp.float32))
    kept_N = jnp.where(first_N == token_N, row_N, num_rows)  # others are dropped
    return zeros_VD.at[kept_N].set(sums_ND.astype(dy.dtype), mode="drop"), None


_rows.defvjp(_forward, _backward)
