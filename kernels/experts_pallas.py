"""Products of groups of rows on Hopper GPUs, by JAX's own kernels, through Pallas's Mosaic backend.

The rows of a group lie side by side, and groups one behind the other: no row is empty but behind
the last group. A kernel multiplies tiles of 64 rows; a tile with rows of two groups is computed for
both, and each keeps its own. No group needs a size of its own: an empty one takes no time, and its
gradient is zero. The kernels leave rows behind the last group as they find them, so these are made
zeros.

Dims: S rows, E groups, D width of the input, F width of the output.
"""

import importlib
from typing import Any

import jax
import jax.numpy as jnp

# Imported by what multiplies with them alone: Mosaic takes half as long to import as JAX.
FORWARD = "jax.experimental.pallas.ops.gpu.ragged_dot_mgpu"
BACKWARD = "jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu"
ROWS = 64  # of a tile, and the numbers of which widths are multiples
DTYPES = ("bfloat16", "float16")


def unsupported(dtype: Any, *widths: int) -> str | None:
    """Why the kernels cannot multiply arrays of these, and which they can; None if they can."""
    if str(jnp.dtype(dtype)) not in DTYPES:
        return f"products in {jnp.dtype(dtype)}: supported are {' and '.join(DTYPES)}"
    if wrong := [width for width in widths if width % ROWS or not width]:
        return f"a width of {wrong[0]}: supported are multiples of {ROWS}"
    return None


def group_products(
    x_SD: jax.Array, w: jax.Array, size_E: jax.Array, *, is_turned: bool = False
) -> jax.Array:
    """The product of each row with the weight of its group, or with its transpose; [S, F].

    Args:
      x_SD: rows; S is a multiple of `ROWS`.
      w: [E, D, F], or if it `is_turned` [E, F, D].
      size_E: rows of each group, int32.
      is_turned: whether rows are multiplied with the transpose.
    """
    y_SF = importlib.import_module(FORWARD).ragged_dot(
        x_SD,
        w.astype(x_SD.dtype),
        group_sizes=size_E,
        transpose_rhs=is_turned,
        **_tiles(w.shape[1 if is_turned else 2]),
    )
    is_of_group = jnp.arange(len(x_SD)) < size_E.sum()
    return jnp.where(is_of_group[:, None], y_SF, jnp.zeros((), y_SF.dtype))


def group_gradients(x_SD: jax.Array, dy_SF: jax.Array, size_E: jax.Array) -> jax.Array:
    """The sum of x^T dy over the rows of each group, [E, D, F], in the dtype of x.

    Rows behind the last group are finite numbers.
    """
    gradient: jax.Array = importlib.import_module(BACKWARD).transposed_ragged_dot(
        x_SD, dy_SF, group_sizes=size_E, **_tiles(dy_SF.shape[1])
    )
    return gradient


def _tiles(width: int) -> dict[str, Any]:
    """The sizes of tiles: what fits into the memory of a block; which are fastest is not known."""
    wide = 128 if width % 128 == 0 else 64
    sizes = {"block_m": ROWS, "block_n": wide, "block_k": 64}
    return {**sizes, "max_concurrent_steps": 4, "grid_block_n": 1}
