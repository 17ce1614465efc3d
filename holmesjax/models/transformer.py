"""A decoder-only Transformer, written for one device; `sharding` spreads it over a mesh.

Layers have the names of `plan`: `embed`, `block_000`, ..., `head`. Each is a flax module of its
own, so that a stage holds just its own layers. Suffixes of array and parameter names give their
dims, one capital letter each, in order; they are logical dims, and `sharding` maps them to axes.

    B  sequences in the batch   D  model width            H  query heads       K  width of a head
    L  tokens in a sequence     F  feed-forward width     G  key-value heads   V  vocabulary size
    P  positions                T  tokens in a key-value cache

Positions of tokens are [L], or [B, L] where not all sequences start at the same one.

Matrix products run in the dtype of the kernels, if they say one, else of the parameters; norms,
softmax and the loss compute in float32, and logits are float32.
"""

import functools
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from holmesjax.boxes import Box, shape_of
from holmesjax.config import ModelConfig
from holmesjax.models import initial_values, ops
from holmesjax.plan.plan import EMBED, HEAD, layer_names

# Initial values. Radford et al., "Language Models are Unsupervised Multitask Learners", 2019:
# weights that add to the residual stream start smaller, by the root of the number of additions.
INIT_STD = 0.02
RESIDUAL = {"out_HKD", "down_FD"}
CONSTANTS = {"scale_D": 1.0, "bias_D": 0.0}

Params = Any  # a nested dict of arrays
Cache = dict[str, jax.Array]  # key_BTGK, value_BTGK


def declare(layer: nn.Module, name: str, *shape: int) -> jax.Array:
    """A parameter of a layer. flax wants an initial value; the real ones are `init_values`."""
    return layer.param(name, nn.initializers.zeros, shape)


class Norm(nn.Module):
    """LayerNorm (Ba et al., arXiv:1607.06450) or RMSNorm (Zhang and Sennrich, arXiv:1910.07467)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        scale_D = declare(self, "scale_D", self.config.width)
        if self.config.norm == "rms_norm":
            return ops.rms_norm(x_BLD, scale_D)
        bias_D = declare(self, "bias_D", self.config.width)
        return ops.layer_norm(x_BLD, scale_D, bias_D)


class Embed(nn.Module):
    """Token vectors, plus position vectors where positions are learned."""

    config: ModelConfig
    kernels: ops.Kernels = ops.DEFAULT

    @nn.compact
    def __call__(self, token_BL: jax.Array, position_L: jax.Array) -> jax.Array:
        config = self.config
        token_VD = declare(self, "token_VD", config.vocab_size, config.width)
        x_BLD = ops.embedding(token_VD, token_BL, self.kernels.dtype)
        if config.positions == "learned":
            position_PD = declare(self, "position_PD", config.context_length, config.width)
            vectors = ops.embedding(position_PD, position_L)
            # Added in the dtype of the table, in which its gradient is then summed over sequences.
            x_BLD = (x_BLD + vectors.reshape(-1, *x_BLD.shape[1:])).astype(x_BLD.dtype)
        return x_BLD


class Block(nn.Module):
    """Attention, then feed-forward, each behind a norm and added to the residual stream."""

    config: ModelConfig
    kernels: ops.Kernels = ops.DEFAULT

    def setup(self) -> None:
        c = self.config
        self.attention_norm, self.mlp_norm = Norm(c), Norm(c)
        self.query_DHK = declare(self, "query_DHK", c.width, c.num_heads, c.head_width)
        self.key_DGK = declare(self, "key_DGK", c.width, c.kv_heads, c.head_width)
        self.value_DGK = declare(self, "value_DGK", c.width, c.kv_heads, c.head_width)
        self.out_HKD = declare(self, "out_HKD", c.num_heads, c.head_width, c.width)
        self.up_DF = declare(self, "up_DF", c.width, c.feed_forward_width)
        if c.activation == "swiglu":
            self.gate_DF = declare(self, "gate_DF", c.width, c.feed_forward_width)
        self.down_FD = declare(self, "down_FD", c.feed_forward_width, c.width)

    def __call__(
        self, x_BLD: jax.Array, position_L: jax.Array, segment_BL: jax.Array | None
    ) -> jax.Array:
        x_BLD = ops.separate(x_BLD)
        q_BLHK, k_BLGK, v_BLGK = self._project(x_BLD, position_L)
        attention_BLHK = ops.attention(q_BLHK, k_BLGK, v_BLGK, segment_BL, self.kernels)
        return self._finish(x_BLD, attention_BLHK)

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
        weights = (self.query_DHK, self.key_DGK, self.value_DGK)
        q_BLHK, k_BLGK, v_BLGK = ops.project_heads(self.attention_norm(x_BLD), *weights)
        if self.config.positions == "rotary":
            q_BLHK = ops.rotate(q_BLHK, position_L, self.config.rotary_base)
            k_BLGK = ops.rotate(k_BLGK, position_L, self.config.rotary_base)
        return q_BLHK, k_BLGK, v_BLGK

    def _finish(self, x_BLD: jax.Array, attention_BLHK: jax.Array) -> jax.Array:
        x_BLD = ops.separate(x_BLD + ops.merge_heads(attention_BLHK, self.out_HKD))
        w_in = (self.up_DF,) if self.config.activation == "gelu" else (self.gate_DF, self.up_DF)
        return x_BLD + ops.feed_forward(self.mlp_norm(x_BLD), w_in, self.down_FD)


class Head(nn.Module):
    """The last norm and the output projection: logits, or their loss."""

    config: ModelConfig
    kernels: ops.Kernels = ops.DEFAULT

    def setup(self) -> None:
        c = self.config
        self.norm = Norm(c)
        if not c.tied_embeddings:
            self.output_DV = declare(self, "output_DV", c.width, c.vocab_size)

    def __call__(self, x_BLD: jax.Array, token_VD: jax.Array | None) -> jax.Array:
        h_BLD = self.norm(ops.separate(x_BLD))
        if self.config.tied_embeddings:
            assert token_VD is not None, "a tied head needs the token table"
            return ops.linear_transposed(h_BLD, token_VD, "float32")
        return ops.linear(h_BLD, self.output_DV, "float32")

    def loss(self, x_BLD: jax.Array, token_VD: jax.Array | None, target_BL: jax.Array) -> jax.Array:
        """The cross-entropy of the next tokens, summed over those whose target is not below 0.

        The logits are computed in chunks where they are many.
        """
        num_chunks = self.kernels.logit_chunks(x_BLD, self.config.vocab_size)
        if num_chunks == 1:
            return jnp.sum(ops.cross_entropy(self(x_BLD, token_VD), target_BL))
        h_BLD = self.norm(ops.separate(x_BLD))
        is_tied = self.config.tied_embeddings
        w = token_VD if is_tied else self.output_DV
        assert w is not None, "a tied head needs the token table"
        return ops.linear_cross_entropy(
            h_BLD, w, target_BL, is_transposed=is_tied, num_chunks=num_chunks
        )


def module(layer: str, config: ModelConfig, kernels: ops.Kernels = ops.DEFAULT) -> nn.Module:
    """The module of a layer by its name."""
    if layer == EMBED:
        return Embed(config, kernels)
    return Head(config, kernels) if layer == HEAD else Block(config, kernels)


def apply(
    layer: str,
    config: ModelConfig,
    params: Params,
    *args: Any,
    kernels: ops.Kernels = ops.DEFAULT,
    method: str = "",
) -> Any:
    """Runs a layer on its parameters.

    Args:
      layer: its name in the plan.
      config: of the model.
      params: of the layer.
      args: of the layer's method.
      kernels: who computes the array functions, and on which mesh.
      method: its name; "" is `__call__`.
    """
    return module(layer, config, kernels).apply({"params": params}, *args, method=method or None)


def param_shapes(layer: str, config: ModelConfig) -> dict:
    """Shape and dtype of each of the layer's parameters."""
    position_L = jnp.zeros((1,), jnp.int32)
    x_BLD = jnp.zeros((1, 1, config.width))
    if layer == EMBED:
        args: tuple = (jnp.zeros((1, 1), jnp.int32), position_L)
    elif layer == HEAD:
        args = (x_BLD, jnp.zeros((config.vocab_size, config.width)))
    else:
        args = (x_BLD, position_L, None)
    init = functools.partial(module(layer, config).init, jax.random.key(0))
    return jax.eval_shape(init, *args)["params"]


def init_values(
    config: ModelConfig, seed: int, path: tuple, shape: tuple[int, ...], box: Box
) -> np.ndarray:
    """Initial values in a box of a parameter, float32: a function of the seed, not of any plan.

    They are drawn on the host: XLA takes seconds to compile the random numbers of one layer.

    Args:
      config: of the model.
      seed: of the run.
      path: of the parameter, in a tree by layer name.
      shape: of the whole parameter.
      box: the elements that are wanted.
    """
    name = path[-1].key
    if name in CONSTANTS:
        return np.full(shape_of(box), CONSTANTS[name], np.float32)
    where = "/".join(key.key for key in path)
    shrink = (2 * config.num_layers) ** -0.5 if name in RESIDUAL else 1.0
    return initial_values.draw(f"{seed}/{where}", shape, box, INIT_STD * shrink)


def init_params(
    config: ModelConfig, seed: int, layers: Sequence[str] | None = None
) -> dict[str, dict]:
    """The initial values of whole layers, NumPy by layer name.

    Args:
      layers: which of the model's layers; all if None.
    """
    names = layers or layer_names(config.num_layers)
    return jax.tree_util.tree_map_with_path(
        lambda path, x: init_values(
            config, seed, path, x.shape, tuple((0, size) for size in x.shape)
        ),
        {layer: param_shapes(layer, config) for layer in names},
    )
