"""Attention by JAX's own Triton kernels, for documents on GPUs for which Pallas has no others.

The kernels are those of `jax.experimental.pallas.ops.gpu.attention`: a forward, and a backward
whose blocks find the gradients of their keys and then those of their queries, so no two write to
one place and gradients have the same bits each time. They are causal and know documents. JAX's own
function repeats keys for all query heads that share them, and rounds what the backward subtracts
from the gradients of weights. Called here, blocks find the keys that they share, and nothing is
rounded. `installed` tells whether JAX still has these kernels.

All keys up to a query's block are visited, also those of other documents.
"""

import functools
import importlib
import math
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels.attention.installed import TRITON
from kernels.attention.reference import CAUSAL, deltas
from kernels.attention.ring import Local, Placement, attention_on
from kernels.attention.shards import Shards
from kernels.attention.tiles import LOG2_E, Rule, Segments

# Queries and keys of a tile of the forward; positions that a block of the backward holds, and those
# that go by. With heads 128 wide all of it has room in 99 KiB, the least shared memory of a block
# on GPUs from Ampere on. Which sizes are fast has not been measured.
QUERIES, KEYS = 128, 64
HELD, STREAMED = 64, 32
NUM_STAGES = 2
PADDING = -1  # the document of what fills up the last tile


def attention_triton(
    q_BLHK: jax.Array,
    k_BLGK: jax.Array,
    v_BLGK: jax.Array,
    segments: Segments | None = None,
    rule: Rule = CAUSAL,
    *,
    shards: Shards | None = None,
    deterministic: bool = False,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Computes `attention_reference` on an NVIDIA GPU, from Ampere on.

    Args:
      q_BLHK: queries. H is a multiple of G.
      k_BLGK: keys.
      v_BLGK: values.
      segments: the document of each query and of each key [B, L], which are the same.
      rule: causal, without a window and a soft cap.
      shards: how B, H and G are cut over the devices of a mesh; None: all is on one device.
      deterministic: gradients have the same bits each time in any case.
      interpret: runs the kernels without a GPU, slowly.
    """
    del deterministic
    assert rule.causal, f"queries see what came before: {rule}"
    assert (rule.window, rule.soft_cap) == (None, None), f"the kernels have neither: {rule}"
    assert shards is None or shards.ring is None, "queries and keys are those of one part"
    local = Local(functools.partial(_forward, interpret), functools.partial(_backward, interpret))
    return attention_on(Placement(rule, local, shards), q_BLHK, k_BLGK, v_BLGK, segments)


def _jax_kernels() -> Any:
    with warnings.catch_warnings(action="ignore"):
        return importlib.import_module(TRITON)


def _call(
    kernel: Any,
    grid: Sequence[int],
    ins: Sequence[tuple[jax.Array | None, Any]],
    outs: Sequence[tuple[Any, Any]],
    num_warps: int,
    interpret: bool,
) -> Sequence[jax.Array]:
    """Runs a kernel on arrays, each beside the spec of its blocks."""
    from jax.experimental.pallas import triton  # where it still is

    arrays, in_specs = zip(*ins, strict=True)
    shapes, out_specs = zip(*outs, strict=True)
    run = pl.pallas_call(
        kernel,
        grid=tuple(grid),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=shapes,
        compiler_params=triton.CompilerParams(num_warps=num_warps, num_stages=NUM_STAGES),
        interpret=interpret,
        name=kernel.func.__name__,
    )
    found: Sequence[jax.Array] = run(*arrays)
    return found


def _whole_tiles(x: jax.Array, dim: int = 1, fill: float = 0) -> jax.Array:
    """Fills up the positions of an array to whole tiles, behind all that queries see."""
    widths = [(0, 0)] * x.ndim
    widths[dim] = (0, -x.shape[dim] % QUERIES)
    return jnp.pad(x, widths, constant_values=fill)


def _ids(segments: Segments | None) -> jax.Array | None:
    return None if segments is None else _whole_tiles(segments[0], fill=PADDING)


def _width(head_width: int) -> int:
    """The width of tiles: a power of two, and at least 16 for the tensor cores."""
    return max(16, pl.next_power_of_2(head_width))


def _forward(
    interpret: bool,
    rule: Rule,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
) -> tuple[jax.Array, jax.Array]:
    """The output [B, L, H, K] and the log-sum-exp [B, H, L] of one device."""
    (B, length, H, K), shared = q.shape, q.shape[2] // k.shape[2]
    q, k, v, ids = *map(_whole_tiles, (q, k, v)), _ids(segments)
    L, width = q.shape[1], _width(K)
    kernel = functools.partial(
        _jax_kernels().mha_forward_kernel,
        sm_scale=rule.factor(K),
        causal=True,
        block_q=QUERIES,
        block_k=KEYS,
        head_dim=K,
    )
    rows = pl.BlockSpec((None, QUERIES, None, width), lambda i, b, h: (b, i, h, 0))
    keys = pl.BlockSpec((None, L, None, width), lambda i, b, h: (b, 0, lax.div(h, shared), 0))
    out, log_sum = _call(
        kernel,
        (L // QUERIES, B, H),
        [(q, rows), (k, keys), (v, keys), (ids, _ids_spec(ids, lambda i, b, h: (b, 0)))],
        [
            (q, rows),
            (
                jax.ShapeDtypeStruct((B, H, L), jnp.float32),
                pl.BlockSpec((None, None, QUERIES), lambda i, b, h: (b, h, i)),
            ),
        ],
        num_warps=4 if K <= 64 else 8,
        interpret=interpret,
    )
    return out[:, :length], log_sum[:, :, :length] * math.log(2)


def _ids_spec(ids: jax.Array | None, index_map: Any) -> pl.BlockSpec | None:
    return None if ids is None else pl.BlockSpec((None, ids.shape[1]), index_map)


def _backward(
    interpret: bool,
    rule: Rule,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    out: jax.Array,
    log_sum: jax.Array,
    dout: jax.Array,
    dlog_sum: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of q, k and v, of one device."""
    (B, length, H, K), G = q.shape, k.shape[2]
    delta = deltas(out, dout, dlog_sum)
    q, k, v, out, dout = map(_whole_tiles, (q, k, v, out, dout))
    log_sum, delta = (_whole_tiles(x, 2) for x in (log_sum * LOG2_E, delta))
    ids, L, width = _ids(segments), q.shape[1], _width(K)
    kernel = functools.partial(
        _jax_kernels().mha_backward_kernel,
        sm_scale=rule.factor(K),
        causal=True,
        block_q_dkv=STREAMED,
        block_kv_dkv=HELD,
        block_q_dq=HELD,
        block_kv_dq=STREAMED,
        head_dim=K,
    )
    whole = pl.BlockSpec((None, L, None, width), lambda b, h, i: (b, 0, h, 0))
    keys = pl.BlockSpec((None, L, None, width), lambda b, h, i: (b, 0, lax.div(h, H // G), 0))
    numbers = pl.BlockSpec((None, None, L), lambda b, h, i: (b, h, 0))
    held = pl.BlockSpec((None, HELD, None, width), lambda b, h, i: (b, i, h, 0))
    dq, *of_heads = _call(
        kernel,
        (B, H, L // HELD),
        [
            (q, whole),
            (k, keys),
            (v, keys),
            (ids, _ids_spec(ids, lambda b, h, i: (b, 0))),
            (out, whole),
            (dout, whole),
            (log_sum, numbers),
            (delta, numbers),
        ],
        [(jax.ShapeDtypeStruct(q.shape, q.dtype), held)] * 3,
        num_warps=4,
        interpret=interpret,
    )
    # Those of each query head, rounded once, added in float32.
    dk, dv = (x.reshape(B, L, G, -1, K).sum(3, dtype=jnp.float32) for x in of_heads)
    return dq[:, :length], dk[:, :length].astype(k.dtype), dv[:, :length].astype(v.dtype)
