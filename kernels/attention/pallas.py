"""Attention by Pallas kernels for Hopper GPUs: forward and backward, on one device or on a mesh.

The kernels go through Pallas's Mosaic GPU backend.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from kernels.attention import pallas_backward, pallas_forward
from kernels.attention.choice import pallas_lacks
from kernels.attention.reference import CAUSAL
from kernels.attention.ring import Local, Placement, attention_on
from kernels.attention.shards import Shards
from kernels.attention.tiles import Rule, Segments
from kernels.attention.warpgroups import KernelTiles


def attention_pallas(
    q_BLHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    segments: Segments | None = None,
    rule: Rule = CAUSAL,
    *,
    shards: Shards | None = None,
    deterministic: bool = False,
    tiles: KernelTiles | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Computes `attention_reference` on a Hopper GPU.

    Args:
      q_BLHK: queries. H is a multiple of G.
      k_BMGK: keys; M = L if the rule is causal.
      v_BMGK: values.
      segments: the document of each query [B, L] and of each key [B, M]; a query sees its own only.
      rule: which keys a query sees besides, and what is done to scores.
      shards: how B, H and G are cut over the devices of a mesh; None: all is on one device.
      deterministic: gradients have the same bits each time: a kernel more sums the gradients of
        queries in one order.
      tiles: how the kernels cut their work; None takes the default.
      interpret: runs the kernels without a GPU, slowly, with simulated threads; from JAX 0.12 on.

    Raises:
      ValueError: the heads or the dtypes are none of those that the kernels can compute.
    """
    dtypes = {str(x.dtype) for x in (q_BLHK, k_BMGK, v_BMGK)}
    if reason := pallas_lacks(dtypes, q_BLHK.shape[3], deterministic):
        raise ValueError(f"attention_pallas cannot do {reason}")
    tiles = tiles or pallas_forward.default_tiles(q_BLHK.shape[3])
    backward = functools.partial(pallas_backward.backward, deterministic=deterministic)
    bound = lambda function: _one_by_one(
        lambda rule, *arrays: function(rule, tiles, interpret, *arrays)
    )
    local = Local(bound(pallas_forward.forward), bound(backward))
    return attention_on(Placement(rule, local, shards), q_BLHK, k_BMGK, v_BMGK, segments)


def _one_by_one(function: Callable) -> Callable:
    """Under `jax.vmap`: JAX before 0.11 cannot batch a kernel that changes arrays.

    The function's constants are arguments: the backward of a checkpoint batches them, too, and
    JAX's loop asserts that it gets no constant that is batched.
    """

    def run(rule: Rule, *arrays: Any) -> Any:
        traced = jax.make_jaxpr(functools.partial(function, rule), return_shape=True)
        program, out = traced(*arrays)

        @jax.custom_batching.sequential_vmap
        def flat(constants: Sequence[Any], *leaves: jax.Array) -> list[jax.Array]:
            return jaxpr_as_fun(ClosedJaxpr(program.jaxpr, constants))(*leaves)

        results = flat(program.consts, *jax.tree.leaves(arrays))
        return jax.tree.unflatten(jax.tree.structure(out), results)

    return run
