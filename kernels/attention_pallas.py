"""Fused attention of Pallas kernels: forward and backward, on one device or on a mesh.

They are Triton's, or on Hopper those of Mosaic; a backward of heads 256 wide is always Triton's.
Dims are those of `attention`.
"""

import functools
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.ad_checkpoint import checkpoint_name

from kernels import attention_mosaic, attention_mosaic_backward, attention_triton
from kernels.attention import CAUSAL, SAVED
from kernels.attention_tiles import Rule, Segments
from kernels.shards import Shards, on_shards
from kernels.tuned import Case, Kernels, tuned

Backend = Literal["triton", "mosaic"]


def unsupported(q_BLHK: Any, k_BMGK: Any, v_BMGK: Any, backend: Backend = "triton") -> str | None:
    """Why the kernels cannot do it, and what they can; None if they can."""
    module = attention_mosaic if backend == "mosaic" else attention_triton
    dtypes = {str(x.dtype) for x in (q_BLHK, k_BMGK, v_BMGK)}
    if len(dtypes) > 1 or not dtypes <= set(module.DTYPES):
        known = ", ".join(module.DTYPES)
        return f"dtypes {', '.join(sorted(dtypes))}: supported is one of {known}"
    if (width := q_BLHK.shape[3]) not in module.HEAD_WIDTHS:
        return f"heads {width} wide: supported are {', '.join(map(str, module.HEAD_WIDTHS))}"
    return None


def attention_pallas(
    q_BLHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    segments: Segments | None = None,
    rule: Rule = CAUSAL,
    *,
    shards: Shards | None = None,
    backend: Backend = "triton",
    tiles: Kernels | None = None,
    device_kind: str = "",
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """As `attention_reference`.

    Args:
      shards: how B, H and G are cut over the devices of a mesh; None: all is on one device.
      backend: mosaic needs a Hopper GPU.
      tiles: how the backend's kernels cut their work; None takes what is known to be good.
      device_kind: of the devices, to know what was measured on such.
      interpret: runs the kernels without a GPU, slowly: Triton's as ordinary JAX operations,
        Mosaic's with simulated threads, from JAX 0.11 on.

    Raises:
      ValueError: heads or dtypes that `unsupported` tells of.
    """
    if reason := unsupported(q_BLHK, k_BMGK, v_BMGK, backend):
        raise ValueError(f"attention_pallas cannot do {reason}")
    tiles = tiles or _tiles(backend, q_BLHK, k_BMGK, device_kind)
    forward = backward = (backend, tiles)
    if backend == "mosaic" and q_BLHK.shape[3] not in attention_mosaic_backward.HEAD_WIDTHS:
        backward = ("triton", _tiles("triton", q_BLHK, k_BMGK, device_kind))
    how = _How(rule, forward, backward, interpret, shards)
    return _attention(how, q_BLHK, k_BMGK, v_BMGK, segments)


def _tiles(backend: Backend, q_BLHK: jax.Array, k_BMGK: jax.Array, device_kind: str) -> Kernels:
    width, dtype = q_BLHK.shape[3], q_BLHK.dtype
    if backend == "mosaic":
        defaults = attention_mosaic.default_tiles(width)
    else:
        defaults = attention_triton.default_tiles(width, dtype)
    return tuned(defaults, Case(device_kind, backend, dtype.name, width, k_BMGK.shape[1]))


@dataclass(frozen=True)
class _How:
    """What a call of the kernels is told besides arrays."""

    rule: Rule
    forward: tuple[Backend, Kernels]
    backward: tuple[Backend, Kernels]
    interpret: bool
    shards: Shards | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    how: _How,
    q_BLHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    segments: Segments | None,
) -> tuple[jax.Array, jax.Array]:
    return _forward(how, q_BLHK, k_BMGK, v_BMGK, segments)[0]


def _dims(segments: Segments | None) -> tuple:
    """Of queries, keys, values and segments."""
    return "BLHK", "BMGK", "BMGK", segments and ("BL", "BM")


def _forward(
    how: _How,
    q_BLHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    segments: Segments | None,
) -> tuple[tuple[jax.Array, jax.Array], tuple]:
    backend, tiles = how.forward
    module: Any = attention_mosaic if backend == "mosaic" else attention_triton
    local = functools.partial(module.forward, how.rule, tiles, how.interpret)
    run = on_shards(local, how.shards, _dims(segments), ("BLHK", "BHL"))
    outs = run(q_BLHK, k_BMGK, v_BMGK, segments)
    out_BLHK, log_sum_BHL = (checkpoint_name(out, SAVED) for out in outs)
    saved = (q_BLHK, k_BMGK, v_BMGK, segments, out_BLHK, log_sum_BHL)
    return (out_BLHK, log_sum_BHL), saved


def _backward(how: _How, saved: tuple, gradients: tuple[jax.Array, jax.Array]) -> tuple:
    backend, tiles = how.backward
    module: Any = attention_mosaic_backward if backend == "mosaic" else attention_triton
    local = functools.partial(module.backward, how.rule, tiles, how.interpret)
    ins = (*_dims(saved[3]), "BLHK", "BHL", "BLHK", "BHL")
    run = on_shards(local, how.shards, ins, ("BLHK", "BMGK", "BMGK"))
    return *run(*saved, *gradients), None


_attention.defvjp(_forward, _backward)
