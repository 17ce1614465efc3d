"""A decoder-only Transformer, written for one device; `sharding` spreads it over a mesh.

Layers have the names of `plan`: `embed`, `block_000`, ..., `head`. Each is a flax module of its
own, so that a stage holds just its own layers. Suffixes of array and parameter names give their
dims, one capital letter each, in order; they are logical dims, and `sharding` maps them to axes.

    B  sequences in the batch   D  model width            H  query heads       K  width of a head
    L  tokens in a sequence     F  feed-forward width     G  key-value heads   V  vocabulary size
    P  positions                T  tokens in a key-value cache

Matrix products run in the dtype of the parameters they are given; norms, softmax and the loss
compute in float32.
"""

import zlib
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from holmesjax import ops
from holmesjax.config import ModelConfig
from holmesjax.plan import EMBED, HEAD, layer_names

INIT_STD = 0.02  # Radford et al., "Language Models are Unsupervised Multitask Learners", 2019

Cache = dict[str, jax.Array]  # key_BTGK, value_BTGK


def normal(std: float) -> Callable[..., jax.Array]:
    return nn.initializers.normal(std)


class Norm(nn.Module):
    """LayerNorm (Ba et al., arXiv:1607.06450) or RMSNorm (Zhang and Sennrich, arXiv:1910.07467)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        scale_D = self.param("scale_D", nn.initializers.ones, (self.config.width,))
        if self.config.norm == "rms_norm":
            return ops.rms_norm(x_BLD, scale_D)
        bias_D = self.param("bias_D", nn.initializers.zeros, (self.config.width,))
        return ops.layer_norm(x_BLD, scale_D, bias_D)


class Embed(nn.Module):
    """Token vectors, plus position vectors where positions are learned."""

    config: ModelConfig

    @nn.compact
    def __call__(self, token_BL: jax.Array, position_L: jax.Array) -> jax.Array:
        config = self.config
        token_VD = self.param("token_VD", normal(INIT_STD), (config.vocab_size, config.width))
        x_BLD = ops.lookup(token_VD, token_BL)
        if config.positions == "learned":
            shape = (config.context_length, config.width)
            position_PD = self.param("position_PD", normal(INIT_STD), shape)
            x_BLD = x_BLD + position_PD[position_L][None]
        return x_BLD


class Block(nn.Module):
    """Attention, then feed-forward, each behind a norm and added to the residual stream."""

    config: ModelConfig

    def setup(self) -> None:
        c = self.config
        residual_std = INIT_STD / (2 * c.num_layers) ** 0.5  # the same paper, section 2.3
        self.attention_norm, self.mlp_norm = Norm(c), Norm(c)
        kv_shape = (c.width, c.kv_heads, c.head_width)
        self.query_DHK = self.param(
            "query_DHK", normal(INIT_STD), (c.width, c.num_heads, c.head_width)
        )
        self.key_DGK = self.param("key_DGK", normal(INIT_STD), kv_shape)
        self.value_DGK = self.param("value_DGK", normal(INIT_STD), kv_shape)
        self.out_HKD = self.param(
            "out_HKD", normal(residual_std), (c.num_heads, c.head_width, c.width)
        )
        self.up_DF = self.param("up_DF", normal(INIT_STD), (c.width, c.feed_forward_width))
        if c.activation == "swiglu":
            self.gate_DF = self.param("gate_DF", normal(INIT_STD), (c.width, c.feed_forward_width))
        self.down_FD = self.param("down_FD", normal(residual_std), (c.feed_forward_width, c.width))

    def __call__(
        self, x_BLD: jax.Array, position_L: jax.Array, segment_BL: jax.Array | None
    ) -> jax.Array:
        q_BLHK, k_BLGK, v_BLGK = self._project(x_BLD, position_L)
        return self._finish(x_BLD, ops.attention(q_BLHK, k_BLGK, v_BLGK, segment_BL))

    def decode(
        self, x_BLD: jax.Array, position_L: jax.Array, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        """The same for tokens that follow those in the cache; returns the extended cache."""
        q_BLHK, k_BLGK, v_BLGK = self._project(x_BLD, position_L)
        start = (0, position_L[0], 0, 0)
        key_BTGK = jax.lax.dynamic_update_slice(cache["key_BTGK"], k_BLGK, start)
        value_BTGK = jax.lax.dynamic_update_slice(cache["value_BTGK"], v_BLGK, start)
        attention_BLHK = ops.cached_attention(q_BLHK, key_BTGK, value_BTGK, position_L)
        return self._finish(x_BLD, attention_BLHK), {
            "key_BTGK": key_BTGK,
            "value_BTGK": value_BTGK,
        }

    def _project(
        self, x_BLD: jax.Array, position_L: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        h_BLD = self.attention_norm(x_BLD)
        q_BLHK = ops.project_heads(h_BLD, self.query_DHK)
        k_BLGK = ops.project_heads(h_BLD, self.key_DGK)
        v_BLGK = ops.project_heads(h_BLD, self.value_DGK)
        if self.config.positions == "rotary":
            q_BLHK = ops.rotate(q_BLHK, position_L, self.config.rotary_base)
            k_BLGK = ops.rotate(k_BLGK, position_L, self.config.rotary_base)
        return q_BLHK, k_BLGK, v_BLGK

    def _finish(self, x_BLD: jax.Array, attention_BLHK: jax.Array) -> jax.Array:
        x_BLD = x_BLD + ops.merge_heads(attention_BLHK, self.out_HKD)
        h_BLD = self.mlp_norm(x_BLD)
        if self.config.activation == "swiglu":  # Shazeer, arXiv:2002.05202
            h_BLF = jax.nn.silu(h_BLD @ self.gate_DF) * (h_BLD @ self.up_DF)
        else:
            h_BLF = ops.gelu(h_BLD @ self.up_DF)
        return x_BLD + h_BLF @ self.down_FD


class Head(nn.Module):
    """The last norm and the output projection: logits, in float32."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BLD: jax.Array, token_VD: jax.Array | None) -> jax.Array:
        h_BLD = Norm(self.config, name="norm")(x_BLD)
        if self.config.tied_embeddings:
            assert token_VD is not None, "a tied head needs the token table"
            output_DV = token_VD.T
        else:
            shape = (self.config.width, self.config.vocab_size)
            output_DV = self.param("output_DV", normal(INIT_STD), shape)
        return jnp.matmul(h_BLD, output_DV, preferred_element_type=jnp.float32)


def module(layer: str, config: ModelConfig) -> nn.Module:
    """The module of a layer by its name."""
    return {EMBED: Embed, HEAD: Head}.get(layer, Block)(config)


def init_params(
    model: ModelConfig, key: jax.Array, layers: Sequence[str] | None = None
) -> dict[str, dict]:
    """Parameters in float32 by layer name: a function of the key alone, not of any plan.

    Args:
      layers: which of the model's layers; all if None.
    """
    return {
        layer: _init_layer(layer, model, jax.random.fold_in(key, zlib.crc32(layer.encode())))
        for layer in layers or layer_names(model.num_layers)
    }


def _init_layer(layer: str, config: ModelConfig, key: jax.Array) -> dict:
    position_L = jnp.zeros((1,), jnp.int32)
    x_BLD = jnp.zeros((1, 1, config.width))
    token_BL = jnp.zeros((1, 1), jnp.int32)
    if layer == EMBED:
        args: tuple = (token_BL, position_L)
    elif layer == HEAD:
        args = (x_BLD, jnp.zeros((config.vocab_size, config.width)))
    else:
        args = (x_BLD, position_L, None)
    return module(layer, config).init(key, *args)["params"]
