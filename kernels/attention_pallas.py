"""Fused attention of Pallas kernels: forward and backward, on one device or on a mesh.

They are Triton's, or on Hopper those of Mosaic; a deterministic backward of heads 256 wide is
always Triton's.
Dims are those of `attention`.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax

from kernels import attention_mosaic, attention_mosaic_backward, attention_triton
from kernels.attention import CAUSAL
from kernels.attention_ring import How, Local, attention_on
from kernels.attention_tiles import Rule, Segments
from kernels.shards import Shards
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
    deterministic: bool = False,
    tiles: Kernels | None = None,
    device_kind: str = "",
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """As `attention_reference`.

    Args:
      shards: how B, H and G are cut over the devices of a mesh; None: all is on one device.
      backend: mosaic needs a Hopper GPU.
      deterministic: gradients have the same bits each time. Triton's always have; Mosaic's sum
        those of queries in one order then, in a kernel more.
      tiles: how the backend's kernels cut their work; None takes what is known to be good.
      device_kind: of the devices, to know what was measured on such.
      interpret: runs the kernels without a GPU, slowly: Triton's as ordinary JAX operations,
        Mosaic's with simulated threads, from JAX 0.12 on.

    Raises:
      ValueError: heads or dtypes that `unsupported` tells of.
    """
    if reason := unsupported(q_BLHK, k_BMGK, v_BMGK, backend):
        raise ValueError(f"attention_pallas cannot do {reason}")
    tiles = tiles or _tiles(backend, q_BLHK, k_BMGK, device_kind)
    forward, backward = attention_triton.forward, attention_triton.backward
    backward_tiles = tiles
    if backend == "mosaic":
        forward = _one_by_one(attention_mosaic.forward)
        own = attention_mosaic_backward
        widths = own.DETERMINISTIC_HEAD_WIDTHS if deterministic else own.HEAD_WIDTHS
        if q_BLHK.shape[3] in widths:
            backward = _one_by_one(functools.partial(own.backward, deterministic=deterministic))
        else:
            backward_tiles = _tiles("triton", q_BLHK, k_BMGK, device_kind)
    bound = lambda function, tiles: lambda rule, *arrays: function(rule, tiles, interpret, *arrays)
    local = Local(bound(forward, tiles), bound(backward, backward_tiles))
    return attention_on(How(rule, local, shards), q_BLHK, k_BMGK, v_BMGK, segments)


def _one_by_one(function: Callable) -> Callable:
    """Under `jax.vmap`: JAX before 0.11 cannot batch a kernel that changes arrays."""

    def run(rule: Rule, tiles: Kernels, interpret: bool, *arrays: Any) -> Any:
        told = functools.partial(function, rule, tiles, interpret)
        return jax.custom_batching.sequential_vmap(told)(*arrays)

    return run


def _tiles(backend: Backend, q_BLHK: jax.Array, k_BMGK: jax.Array, device_kind: str) -> Kernels:
    width, dtype = q_BLHK.shape[3], q_BLHK.dtype
    if backend == "mosaic":
        defaults = attention_mosaic.default_tiles(width)
    else:
        defaults = attention_triton.default_tiles(width, dtype)
    return tuned(defaults, Case(device_kind, backend, dtype.name, width, k_BMGK.shape[1]))
