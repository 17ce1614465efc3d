"""Array functions that models are made of. Only this and `optimizers.update_ops` import `kernels`.

`Kernels` says which implementation of a function is asked for. `kernels.attention.choice` chooses
what computes attention.

Dims: see `models/transformer.py`. Each returns the dtype of its first argument, unless it says
otherwise.
"""

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from holmesjax.config import KernelsConfig
from holmesjax.costs import work
from holmesjax.costs.stage_shape import LOGIT_BYTES
from holmesjax.errors import ConfigError
from holmesjax.layer_specs.kind import (
    EXPERTS_DIM,
    TENSOR_DIMS,
    Attention,
)
from holmesjax.plan.plan import Axis
from kernels.attention.choice import (
    BEFORE_HOPPER,
    UNCHECKED,
    AttentionChoice,
    Device,
    Needs,
    UnsupportedError,
    capability,
    choose,
    is_hopper,
)
from kernels.attention.cudnn import PRIMITIVE as CUDNN_PRIMITIVE, attention_cudnn
from kernels.attention.installed import missing
from kernels.attention.reference import CAUSAL, MASKED, SAVED, attention_reference
from kernels.attention.ring import REFERENCE, Placement, attention_on, from_runs, to_runs
from kernels.attention.shards import Shards
from kernels.attention.tiles import Rule
from kernels.cross_entropy import capped, cross_entropy, linear_cross_entropy
from kernels.embedding import embedding
from kernels.expert_exchange import experts_feed_forward
from kernels.expert_slots import capacity_rows
from kernels.experts import (
    RESULTS,
    ROUTES,
    chosen,
    largest,
    router_logits,
    shares,
)
from kernels.experts_pallas import unsupported as unsupported_by_kernel
from kernels.fp8 import (
    Coded,
    coded,
    delayed_scale,
    fp8_linears,
    fp8_of_activation,
    later_maxima,
)
from kernels.linear import (
    UNCUT,
    Cuts,
    add_bias,
    feed_forward,
    linear,
    linear_of_activation,
    linear_transposed,
    linears,
)
from kernels.norm import layer_norm, rms_norm
from kernels.sequence_cut import SequenceCut, gathered, scattered

__all__ = [
    "CUDNN_PRIMITIVE",
    "DEFAULT",
    "RESULTS",
    "ROUTES",
    "SAVED",
    "UNCHECKED",
    "AttentionChoice",
    "Coded",
    "Cuts",
    "Kernels",
    "SequenceCut",
    "add_bias",
    "attention",
    "cached_attention",
    "capacity_rows",
    "capped",
    "choose_attention",
    "chosen",
    "coded",
    "contract",
    "cross_entropy",
    "delayed_scale",
    "embedding",
    "experts_feed_forward",
    "feed_forward",
    "fp8_linears",
    "fp8_of_activation",
    "from_parts",
    "gathered",
    "largest",
    "later_maxima",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "linear_of_activation",
    "linear_transposed",
    "linears",
    "rms_norm",
    "rotate",
    "router_logits",
    "rule_of",
    "scattered",
    "separate",
    "shares",
    "to_parts",
    "token_positions",
]


@dataclass(frozen=True)
class Kernels:
    """The implementations that the layers of a stage ask for, and the devices of the stage."""

    config: KernelsConfig = field(default_factory=KernelsConfig)
    mesh: Mesh | None = None  # None: JAX's default device
    dtype: str | None = None  # of matrix products; None: the dtype of the parameters
    unproven: str | None = UNCHECKED  # what checked kernels lack for `auto`, if anything
    # Whether gradients come from `kernels.linear` in the program that updates: those of which
    # devices keep a part each may then lie with their dims exchanged (`_turn`).
    after_products: bool = False
    parameters: str = "float32"  # how those that train are kept
    # Whether `tensor` cuts sequences between products, for the kinds that state that they can.
    sequence_parallel: bool = False
    logit_bytes: int = LOGIT_BYTES  # of the float32 logits of a chunk of the loss
    expert_chunks: int = 1  # of an exchange between devices that share experts

    @property
    def device(self) -> jax.Device | Device:
        """The device whose kernels the stage has: of unlike ones, the oldest.

        Kernels for Hopper GPUs alone run on no later ones, so that unlike devices have none.
        """
        if self.mesh is None:
            return jax.devices()[0]
        oldest = min(self.mesh.devices.flat, key=capability)
        if {*map(capability, self.mesh.devices.flat)} == {capability(oldest)}:
            return oldest
        shared = min(capability(oldest), BEFORE_HOPPER)
        return Device(oldest.platform, oldest.device_kind, ".".join(map(str, shared)))

    @property
    def shards(self) -> Shards | None:
        """How `sharding` cuts dims: sequences, or their parts, heads, the vocabulary, the width."""
        if self.mesh is None or self.mesh.size == 1:
            return None
        parts = (
            ("B", self._axes(Axis.CONTEXT, Axis.FSDP, Axis.EXPERT)),
            ("N", self._axes(Axis.CONTEXT, Axis.FSDP)),
            ("D", self._axes(Axis.FSDP, Axis.CONTEXT, Axis.EXPERT)),
            (EXPERTS_DIM, self._axes(Axis.EXPERT)),
        )
        heads = self._axes(Axis.TENSOR)
        axes_of = (*parts, *((dim, heads) for dim in TENSOR_DIMS))
        return Shards(self.mesh, axes_of, Axis.CONTEXT.value if self.context > 1 else None)

    @property
    def sequence_cut(self) -> SequenceCut | None:
        """How `tensor` cuts sequences between products; None: it does not."""
        if self.mesh is None or not self.sequence_parallel:
            return None
        sequences = self._axes(Axis.CONTEXT, Axis.FSDP, Axis.EXPERT)
        return SequenceCut(self.mesh, sequences, Axis.TENSOR.value)

    @property
    def num_parts(self) -> int:
        """Devices that share the sequences of a replica."""
        return self.size(Axis.FSDP) * self.size(Axis.CONTEXT) * self.size(Axis.EXPERT)

    @property
    def context(self) -> int:
        """Devices that share each sequence."""
        return self.size(Axis.CONTEXT)

    def logit_chunks(self, x_BLD: jax.Array, vocab_size: int) -> int:
        """Chunks in which the logits of a replica's sequences are computed; 1: all at once."""
        B, L, D = x_BLD.shape
        num_tokens = B * L // self.num_parts
        cut = vocab_size // self.size(Axis.TENSOR)
        asked = self.config.cross_entropy
        return min(int(work.logit_chunks(num_tokens, cut, D, self.logit_bytes, asked)), L)

    def _axes(self, *axes: Axis) -> tuple[str, ...]:
        """Those of the axes that the mesh has."""
        assert self.mesh is not None, "a mesh has axes"
        return tuple(axis.value for axis in axes if axis in self.mesh.shape)

    def size(self, axis: Axis) -> int:
        """Devices along an axis of the mesh."""
        return 1 if self.mesh is None else self.mesh.shape.get(axis, 1)


DEFAULT = Kernels()


def separate(x: jax.Array) -> jax.Array:
    """x, computed once: XLA does not fuse it, or its gradient, into what reads it."""
    return jax.lax.optimization_barrier(x)


def contract(x: jax.Array, w: jax.Array, cuts: Cuts = UNCUT) -> jax.Array:
    """x [B, L, *I] times w [*I, *F]: [B, L, *F]."""
    return linears(x, (w,), x.ndim - 2, None, cuts)[0]


def to_parts(x_BL: jax.Array, kernels: Kernels) -> jax.Array:
    """[B, L, ...] to [context * B, L / context, ...], as devices that share sequences have them.

    The parts of the first device come first. Each part has two runs of tokens
    (`kernels.attention.ring`). XLA could not merge B with an L that is cut, so a part is a sequence
    of its own.
    """
    if kernels.context == 1:
        return x_BL
    count, (B, L, *rest) = kernels.context, x_BL.shape
    x_CBl = x_BL.reshape(B, count, L // count, *rest).swapaxes(0, 1)
    return to_runs(kernels.shards, x_CBl.reshape(count * B, -1, *rest))


def from_parts(x_Bl: jax.Array, kernels: Kernels) -> jax.Array:
    """The opposite of `to_parts`."""
    if kernels.context == 1:
        return x_Bl
    x_Bl = from_runs(kernels.shards, x_Bl)
    count, (B, L, *rest) = kernels.context, x_Bl.shape
    x_CBl = x_Bl.reshape(count, B // count, L, *rest)
    return x_CBl.swapaxes(0, 1).reshape(B // count, -1, *rest)


def token_positions(num_sequences: int, length: int, kernels: Kernels) -> jax.Array:
    """The positions of tokens: [L]; where devices share sequences, [B, L] of their parts."""
    if kernels.context == 1:
        return jnp.arange(length)
    count = kernels.context
    size = length // (2 * count)
    device_Cl, token_Cl = jnp.indices((count, 2 * size))
    run_Cl = jnp.where(token_Cl < size, device_Cl, 2 * count - 1 - device_Cl)
    position_Cl = run_Cl * size + token_Cl % size
    return jnp.repeat(position_Cl, num_sequences, axis=0)


def positions_in_documents(segment_BL: jax.Array) -> jax.Array:
    """The position of each token in its document, of which a row has one behind the other."""
    place_BL = jnp.indices(segment_BL.shape)[1]
    begins_BL = jnp.diff(segment_BL, axis=1, prepend=segment_BL[:, :1] - 1) != 0
    return place_BL - jax.lax.cummax(jnp.where(begins_BL, place_BL, 0), axis=1)


def rotate(
    x_BLHK: jax.Array,
    position_L: jax.Array,
    frequency_R: jax.Array | np.ndarray,
    factor: float = 1.0,
) -> jax.Array:
    """Rotary positions, halves paired as in GPT-NeoX. Su et al., arXiv:2104.09864.

    Args:
      x_BLHK: queries or keys. The first numbers of a head turn, two for each frequency.
      position_L: of the tokens: [L], or [B, L].
      frequency_R: of each pair (`holmesjax.config.rotary`): [R], or [B, R].
      factor: of cosines and sines.
    """
    width = 2 * frequency_R.shape[-1]
    position_BL = position_L.reshape(-1, x_BLHK.shape[1]).astype(jnp.float32)
    frequency_BR = jnp.asarray(frequency_R).reshape(-1, frequency_R.shape[-1])
    angle_BLR = position_BL[..., None] * frequency_BR[:, None]
    cos, sin = jnp.cos(angle_BLR)[:, :, None], jnp.sin(angle_BLR)[:, :, None]
    if factor != 1.0:
        cos, sin = factor * cos, factor * sin
    low, high = jnp.split(x_BLHK[..., :width].astype(jnp.float32), 2, axis=-1)
    turned = [low * cos - high * sin, high * cos + low * sin]
    if width < x_BLHK.shape[-1]:
        turned.append(x_BLHK[..., width:].astype(jnp.float32))
    return jnp.concatenate(turned, axis=-1).astype(x_BLHK.dtype)


def rule_of(attention: Attention) -> Rule:
    """The keys that the queries of a layer see, and what is done to its scores."""
    return Rule(window=attention.window, soft_cap=attention.soft_cap, scale=attention.scale)


def choose_attention(
    q_BLHK: Any,
    k_BLGK: Any,
    v_BLGK: Any,
    has_segments: bool,
    kernels: Kernels,
    rule: Rule = CAUSAL,
) -> AttentionChoice:
    """Returns what computes `attention` of these arrays, and why.

    Args:
      q_BLHK: queries, or their shape and dtype.
      k_BLGK: keys, likewise.
      v_BLGK: values, likewise.
      has_segments: whether segments tell documents apart.
      kernels: the implementation that is asked for, and the mesh.
      rule: which keys a query sees, and what is done to scores.

    Raises:
      ConfigError: the implementation that is asked for cannot compute these arrays.
    """
    config = kernels.config
    _, length, _, head_width = q_BLHK.shape
    needs = Needs(
        dtype="/".join(sorted({str(x.dtype) for x in (q_BLHK, k_BLGK, v_BLGK)})),
        head_width=head_width,
        length=length,
        window=rule.window,
        soft_cap=rule.soft_cap,
        has_documents=has_segments,
        is_cut=kernels.context > 1,
        deterministic=config.deterministic_attention,
    )
    asked, unproven = config.attention, kernels.unproven
    try:
        return choose(asked, kernels.device, needs, missing=missing, unproven=unproven)
    except UnsupportedError as reason:
        problem = f"{config.attention} cannot do it"
        fix = "use auto, which takes the best that can, or reference"
        raise ConfigError("kernels.attention", problem, found=str(reason), fix=fix) from None


def attention(
    q_BLHK: jax.Array,
    k_BLGK: jax.Array,
    v_BLGK: jax.Array,
    segment_BL: jax.Array | None = None,
    kernels: Kernels = DEFAULT,
    rule: Rule = CAUSAL,
) -> jax.Array:
    """Causal attention, inside each document where segments tell them apart; [B, L, H, K].

    B counts the parts of sequences, as `to_parts` gives them, if devices share sequences.

    Args:
      q_BLHK: queries. H is a multiple of G.
      k_BLGK: keys.
      v_BLGK: values.
      segment_BL: the number of each token's document; None: a sequence is one document.
      kernels: the implementation that is asked for, and the mesh.
      rule: which keys a query sees, and what is done to scores.

    Raises:
      ConfigError: the implementation that is asked for cannot compute these arrays.
    """
    arrays = q_BLHK, k_BLGK, v_BLGK
    implementation = choose_attention(*arrays, segment_BL is not None, kernels, rule).implementation
    if implementation == "cudnn":
        return attention_cudnn(*arrays, rule)
    segments = None if segment_BL is None else (segment_BL, segment_BL)
    # Imported where a GPU runs them: JAX takes a third of a second to import what they need.
    if implementation == "pallas":
        from kernels.attention.pallas import attention_pallas

        deterministic = kernels.config.deterministic_attention
        run = functools.partial(attention_pallas, deterministic=deterministic)
        return run(*arrays, segments, rule, shards=kernels.shards)[0]
    if implementation == "triton":
        from kernels.attention.triton import attention_triton

        return attention_triton(*arrays, segments, rule, shards=kernels.shards)[0]
    if kernels.context > 1:
        return attention_on(Placement(rule, REFERENCE, kernels.shards), *arrays, segments)[0]
    return attention_reference(*arrays, segments, rule)[0]


def cached_attention(
    q_BLHK: jax.Array,
    key_BTGK: jax.Array,
    value_BTGK: jax.Array,
    position_BT: jax.Array,
    position_BL: jax.Array,
    rule: Rule = CAUSAL,
) -> jax.Array:
    """Attention of new tokens to cached ones up to and including their own.

    Args:
      q_BLHK: queries of the new tokens.
      key_BTGK: cached keys, with those of the new tokens.
      value_BTGK: cached values.
      position_BT: the positions of the keys; below 0: no key.
      position_BL: the positions of the new tokens; below 0: padding, whose results mean nothing.
      rule: which keys a query sees, and what is done to scores.
    """
    B, L, H, K = q_BLHK.shape
    G = key_BTGK.shape[2]
    q_BLGhK = q_BLHK.reshape(B, L, G, H // G, K)
    multiply = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    raw = rule.raw(multiply("blghk,btgk->bghlt", q_BLGhK, key_BTGK), K)
    scores = raw * (rule.soft_cap or rule.factor(K))
    key_B1T = position_BT[:, None]
    seen_BLT = rule.sees(position_BL[..., None], key_B1T) & (key_B1T >= 0)
    weights = jax.nn.softmax(jnp.where(seen_BLT[:, None, None], scores, MASKED))
    out = multiply("bghlt,btgk->blghk", weights.astype(value_BTGK.dtype), value_BTGK)
    return out.reshape(B, L, H, K).astype(value_BTGK.dtype)


def unsupported_experts(device: Any, dtype: Any, *widths: int) -> str | None:
    """Why a device's kernels cannot multiply experts of these widths; None if they can."""
    if not is_hopper(device):
        return f"{device.device_kind} devices: supported are NVIDIA Hopper GPUs"
    return unsupported_by_kernel(dtype, *widths)
