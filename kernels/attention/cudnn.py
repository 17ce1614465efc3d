"""Attention by cuDNN, through JAX's public function."""

from typing import Any

import jax
import jax.numpy as jnp

from kernels.attention.tiles import Rule

PRIMITIVE = "dot_product_attention_fwd_wrapper"  # JAX's name for a forward by cuDNN


def attention_cudnn(
    q_BLHK: jax.Array,
    k_BLGK: jax.Array,
    v_BLGK: jax.Array,
    rule: Rule,
    *,
    implementation: Any = "cudnn",
    return_residual: bool = False,
) -> Any:
    """Causal attention of whole sequences, in the dtype of the queries: [B, L, H, K].

    JAX passes an empty array to cuDNN where there is no bias, and its rule for gradients takes it
    for one (0.10.2 to 0.12). Then it refuses every odd length. Such arrays get a token more at
    their end: no query sees its key, and its own output is dropped, so nothing else changes.

    Args:
      q_BLHK: queries. H is a multiple of G.
      k_BLGK: keys.
      v_BLGK: values.
      rule: which keys a query sees; causal, without a soft cap.
      implementation: that of `jax.nn.dot_product_attention`.
      return_residual: whether log-sum-exps [B, L, H] are returned, too.
    """
    assert rule.causal, f"a key more would be seen: {rule}"
    assert rule.soft_cap is None, f"cuDNN has no soft cap: {rule}"
    length = q_BLHK.shape[1]
    pad = lambda x: jnp.pad(x, [(0, 0), (0, length % 2), (0, 0), (0, 0)])
    untyped: Any = jax.nn.dot_product_attention
    found = untyped(
        *map(pad, (q_BLHK, k_BLGK, v_BLGK)),
        is_causal=True,
        scale=rule.scale,
        local_window_size=None if rule.window is None else (rule.window - 1, 0),
        implementation=implementation,
        return_residual=return_residual,
    )
    return jax.tree.map(lambda x: x[:, :length], found)
