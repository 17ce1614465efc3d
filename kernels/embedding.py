"""Rows of a table, whose gradients are sums of many.

Dims: V rows of the table, D its width, ... any, N all of them merged.
"""

import functools

import jax
import jax.numpy as jnp


def embedding(table_VD: jax.Array, row: jax.Array, dtype: str | None = None) -> jax.Array:
    """`table_VD[row]`; row is [...], of integers, and the result [..., D].

    It is in `dtype`, by default that of the table. Gradients of a row are summed in float32 at
    least, and rounded to the table's dtype: in bfloat16 the sum for a token that comes a thousand
    times in a microbatch is off by 7%.
    """
    static = (table_VD.shape[0], table_VD.dtype, jnp.dtype(dtype or table_VD.dtype))
    return _rows(static, table_VD, row)


_Static = tuple[int, jnp.dtype, jnp.dtype]  # rows of the table, its dtype, that of the result


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rows(static: _Static, table_VD: jax.Array, row: jax.Array) -> jax.Array:
    return table_VD.astype(static[2])[row]


def _forward(static: _Static, table_VD: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _rows(static, table_VD, row), row


def _backward(static: _Static, row: jax.Array, dy: jax.Array) -> tuple[jax.Array, None]:
    num_rows, dtype, _ = static
    wide = jnp.promote_types(dtype, jnp.float32)
    zeros_VD = jnp.zeros((num_rows, dy.shape[-1]), wide)
    return zeros_VD.at[row].add(dy.astype(wide)).astype(dtype), None


_rows.defvjp(_forward, _backward)
