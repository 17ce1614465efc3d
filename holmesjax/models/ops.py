"""Array functions that models are made of; the only importer of `kernels`.

Where a function has several implementations, `Kernels` says which one runs: plain JAX, a Pallas
kernel, or NVIDIA's library.

Dims: see `models/gpt.py`. Each returns the dtype of its first argument, unless it says otherwise.
"""

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from holmesjax.config import KernelsConfig
from holmesjax.costs import work
from holmesjax.errors import ConfigError
from holmesjax.plan.plan import Axis
from kernels.adamw import Leaf, Part, Rule, adamw_reference, adamw_triton, factors
from kernels.attention import CAUSAL, SAVED, attention_reference
from kernels.attention_pallas import Backend, attention_pallas, unsupported
from kernels.attention_ring import REFERENCE, How, attention_on, from_runs, to_runs
from kernels.cross_entropy import cross_entropy, linear_cross_entropy
from kernels.embedding import embedding
from kernels.linear import feed_forward, linear, linear_transposed, linears
from kernels.moments import (
    Moment,
    Quantized,
    Which,
    narrow,
    noise,
    positions,
    step_seed,
    widen,
    zero_moment,
)
from kernels.norm import layer_norm, rms_norm
from kernels.shards import Shards, first_index, num_parts, on_mesh

__all__ = [
    "DEFAULT",
    "SAVED",
    "Kernels",
    "Leaf",
    "Quantized",
    "Rule",
    "adamw",
    "attention",
    "cached_attention",
    "cross_entropy",
    "embedding",
    "factors",
    "feed_forward",
    "from_parts",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "linear_transposed",
    "merge_heads",
    "moment_spec",
    "project_heads",
    "rms_norm",
    "rotate",
    "round_moment",
    "separate",
    "to_parts",
    "token_positions",
    "widen",
    "zero_moment",
]


@dataclass(frozen=True)
class Kernels:
    """What the layers of a stage are computed with, and on which devices."""

    config: KernelsConfig = field(default_factory=KernelsConfig)
    mesh: Mesh | None = None  # None: JAX's default device
    dtype: str | None = None  # of matrix products; None: that of the parameters

    @property
    def device(self) -> jax.Device:
        return jax.devices()[0] if self.mesh is None else self.mesh.devices.flat[0]

    @property
    def is_nvidia(self) -> bool:
        return self.device.platform == "gpu" and "NVIDIA" in self.device.device_kind

    @property
    def is_hopper(self) -> bool:
        return self.is_nvidia and str(getattr(self.device, "compute_capability", "")) == "9.0"

    @property
    def interpret(self) -> bool:
        """Whether Pallas kernels run as ordinary JAX operations: in a rehearsal, in a test."""
        return self.device.platform == "cpu"

    @property
    def shards(self) -> Shards | None:
        """How `sharding` cuts the dims of attention: sequences, or their parts, and heads."""
        if self.mesh is None or self.mesh.size == 1:
            return None
        has = lambda *axes: tuple(axis.value for axis in axes if axis in self.mesh.shape)
        heads = has(Axis.TENSOR)
        axes_of = (("B", has(Axis.CONTEXT, Axis.FSDP)), ("H", heads), ("G", heads))
        return Shards(self.mesh, axes_of, Axis.CONTEXT.value if self.context > 1 else None)

    @property
    def context(self) -> int:
        """Devices that share each sequence."""
        return self._size(Axis.CONTEXT)

    def logit_chunks(self, x_BLD: jax.Array, vocab_size: int) -> int:
        """Chunks in which the logits of a replica's sequences are computed; 1: all at once."""
        if self.config.cross_entropy == "reference":
            return 1
        B, L, D = x_BLD.shape
        num_tokens = B * L // (self._size(Axis.FSDP) * self.context)
        cut = vocab_size // self._size(Axis.TENSOR)
        num_chunks = work.logit_chunks(num_tokens, cut, D)
        least = 2 if self.config.cross_entropy == "chunked" else 1
        return min(max(least, int(num_chunks)), L)

    def _size(self, axis: Axis) -> int:
        return 1 if self.mesh is None else self.mesh.shape.get(axis, 1)


DEFAULT = Kernels()


def separate(x: jax.Array) -> jax.Array:
    """x, computed once: XLA does not fuse it, or its gradient, into what reads it."""
    return jax.lax.optimization_barrier(x)


def project_heads(x_BLD: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
    """x [B, L, D] times each weight [D, H, K]; [B, L, H, K] each."""
    return linears(x_BLD, weights)


def merge_heads(x_BLHK: jax.Array, w_HKD: jax.Array) -> jax.Array:
    """Sum over the heads of x times w; [B, L, D]."""
    return linears(x_BLHK, (w_HKD,), 2)[0]


def to_parts(x_BL: jax.Array, kernels: Kernels) -> jax.Array:
    """[B, L, ...] to [context * B, L / context, ...], as devices that share sequences have them.

    First the parts of the first device. Each has two runs of tokens (`attention_ring`). XLA could
    not merge B with an L that is cut: so a part is a sequence of its own.
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
    """Of the tokens of sequences: [L]; of their parts, [B, L]."""
    if kernels.context == 1:
        return jnp.arange(length)
    count = kernels.context
    size = length // (2 * count)
    device_Cl, token_Cl = jnp.indices((count, 2 * size))
    run_Cl = jnp.where(token_Cl < size, device_Cl, 2 * count - 1 - device_Cl)
    position_Cl = run_Cl * size + token_Cl % size
    return jnp.repeat(position_Cl, num_sequences, axis=0)


def rotate(x_BLHK: jax.Array, position_L: jax.Array, base: float) -> jax.Array:
    """Rotary positions, halves paired as in GPT-NeoX. Su et al., arXiv:2104.09864."""
    half = x_BLHK.shape[-1] // 2
    frequency_K = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    position_BL = position_L.reshape(-1, x_BLHK.shape[1]).astype(jnp.float32)
    angle_BLK = position_BL[..., None] * frequency_K[None, None]
    cos, sin = jnp.cos(angle_BLK)[:, :, None], jnp.sin(angle_BLK)[:, :, None]
    low, high = jnp.split(x_BLHK.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return rotated.astype(x_BLHK.dtype)


def attention(
    q_BLHK: jax.Array,
    k_BLGK: jax.Array,
    v_BLGK: jax.Array,
    segment_BL: jax.Array | None = None,
    kernels: Kernels = DEFAULT,
) -> jax.Array:
    """Causal attention, inside each document where segments tell them apart; [B, L, H, K].

    Where devices share sequences, B counts the parts of sequences, as `to_parts` gives them.
    """
    segments = None if segment_BL is None else (segment_BL, segment_BL)
    refusals = {
        "cudnn": _cudnn_refuses(kernels, q_BLHK, segment_BL),
        "pallas": unsupported(q_BLHK, k_BLGK, v_BLGK),
    }
    match _choose("attention", kernels, refusals):
        case "cudnn":
            return jax.nn.dot_product_attention(
                q_BLHK, k_BLGK, v_BLGK, is_causal=True, implementation="cudnn"
            )
        case "pallas":
            backend: Backend = "triton"
            if kernels.is_hopper and not unsupported(q_BLHK, k_BLGK, v_BLGK, "mosaic"):
                backend = "mosaic"
            args = (q_BLHK, k_BLGK, v_BLGK, segments)
            return attention_pallas(
                *args,
                shards=kernels.shards,
                backend=backend,
                deterministic=kernels.config.deterministic_attention,
                device_kind=kernels.device.device_kind,
                interpret=kernels.interpret,
            )[0]
    if kernels.context > 1:
        how = How(CAUSAL, REFERENCE, kernels.shards)
        return attention_on(how, q_BLHK, k_BLGK, v_BLGK, segments)[0]
    return attention_reference(q_BLHK, k_BLGK, v_BLGK, segments)[0]


def adamw(
    leaves: Sequence[Leaf],
    gradients: Sequence[jax.Array],
    factors: jax.Array,
    rules: Sequence[Rule],
    specs: Sequence[PartitionSpec],
    kernels: Kernels,
) -> list[Leaf]:
    """Parameters and moments after a step, if it applies; in place where they are donated.

    Args:
      factors: those of the step (`factors`).
      specs: how each leaf lies on the mesh.
    """
    is_alone = kernels.mesh is None or kernels.mesh.size == 1
    sizes = {} if kernels.mesh is None else kernels.mesh.shape
    by_kernel = [
        i
        for i, leaf in enumerate(leaves)
        if kernels.config.adamw == "pallas"
        and (is_alone or _has_whole_blocks(leaf.mu, specs[i], sizes))
    ]
    new = _adamw_reference(
        {i: leaf for i, leaf in enumerate(leaves) if i not in by_kernel},
        gradients,
        factors,
        rules,
        kernels,
    )
    if by_kernel:
        found = _adamw_kernel(
            [leaves[i] for i in by_kernel],
            [gradients[i] for i in by_kernel],
            [rules[i] for i in by_kernel],
            factors,
            None if is_alone else [specs[i] for i in by_kernel],
            kernels,
        )
        new |= dict(zip(by_kernel, found, strict=True))
    return [new[i] for i in range(len(leaves))]


def _adamw_reference(
    leaves: dict[int, Leaf],
    gradients: Sequence[jax.Array],
    factors: jax.Array,
    rules: Sequence[Rule],
    kernels: Kernels,
) -> dict[int, Leaf]:
    """In place, where donated, on either kind of device.

    On a GPU a conditional keeps a copy of all that it may change; on a CPU a choice between new and
    old keeps one.
    """
    applies = factors[5] > 0

    def update(leaves: dict[int, Leaf]) -> dict[int, Leaf]:
        return {
            i: adamw_reference(leaf, gradients[i], factors, rules[i]) for i, leaf in leaves.items()
        }

    if kernels.device.platform == "cpu":
        return jax.lax.cond(applies, update, lambda leaves: leaves, leaves)
    choose = lambda new, old: jnp.where(applies, new, old)
    return jax.tree.map(choose, update(leaves), leaves)


def _adamw_kernel(
    leaves: Sequence[Leaf],
    gradients: Sequence[jax.Array],
    rules: Sequence[Rule],
    factors: jax.Array,
    specs: Sequence[PartitionSpec] | None,
    kernels: Kernels,
) -> list[Leaf]:
    run = functools.partial(adamw_triton, rules=rules, interpret=kernels.interpret)
    if specs is None:
        return run(leaves, gradients, factors)
    assert kernels.mesh is not None, "specs are of a mesh"

    def on_device(own: list[Leaf], gradients: list[jax.Array], factors: jax.Array) -> list[Leaf]:
        parts = [
            Part(leaf.parameter.shape, first_index(spec, gradient.shape))
            for leaf, gradient, spec in zip(leaves, gradients, specs, strict=True)
        ]
        return run(own, gradients, factors, parts=parts)

    sizes = kernels.mesh.shape
    cut = [
        Leaf._make([spec, *(moment_spec(moment, spec, sizes) for moment in (leaf.mu, leaf.nu))])
        for leaf, spec in zip(leaves, specs, strict=True)
    ]
    on_devices = on_mesh(on_device, kernels.mesh, (cut, list(specs), PartitionSpec()), cut)
    return on_devices(list(leaves), list(gradients), factors)


def moment_spec(moment: Moment, spec: PartitionSpec, sizes: Mapping[str, int]) -> Any:
    """How a moment lies on a mesh, for that of its parameter: the same way.

    Scales that the devices of the last dim share lie on all of them.
    """
    if not isinstance(moment, Quantized):
        return spec
    scales = spec if _has_whole_blocks(moment, spec, sizes) else PartitionSpec(*spec[:-1])
    return Quantized._make([spec, scales])


def _has_whole_blocks(moment: Moment, spec: PartitionSpec, sizes: Mapping[str, int]) -> bool:
    """Whether each device has the scales of its own numbers, and of no others."""
    if not isinstance(moment, Quantized):
        return True
    num_blocks, last = moment.scales.shape[-1], len(moment.codes.shape) - 1
    return num_blocks % num_parts(spec, last, sizes) == 0


def round_moment(x: jax.Array, like: Moment, update: jax.Array, seed: int, which: Which) -> Moment:
    """float32 numbers as `like` is kept, rounded by the noise of an update."""
    bits = noise(positions(x.shape), step_seed(update, seed))
    return narrow(x, like, bits[0 if which == "first" else 1], which)


def _cudnn_refuses(kernels: Kernels, q: jax.Array, segment: jax.Array | None) -> str | None:
    if not kernels.is_nvidia:
        return f"{kernels.device.device_kind} devices: supported are NVIDIA GPUs"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{q.dtype}: supported are bfloat16, float16"
    if q.shape[-1] > 128 or q.shape[-1] % 8:
        return f"heads {q.shape[-1]} wide: supported are multiples of 8 up to 128"
    if kernels.context > 1:
        return "sequences that several devices share: supported are whole ones"
    if kernels.config.deterministic_attention:
        return "gradients of the same bits each time: kernels.deterministic_attention asks for them"
    if segment is not None:
        return "documents: supported is attention to all that came before"
    return _cudnn_is_missing()


@functools.cache
def _cudnn_is_missing() -> str | None:
    """Why JAX cannot call it on this machine."""
    x = jax.ShapeDtypeStruct((1, 64, 1, 64), jnp.bfloat16)
    call = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    try:
        jax.eval_shape(call, x, x, x)
    except RuntimeError as error:
        return f"library that JAX finds here: {error}"
    return None


def _choose(name: str, kernels: Kernels, refusals: dict[str, str | None]) -> str:
    """The implementation that the config asks for; for auto, the first that can do it.

    Args:
      refusals: implementations, the fastest first, with why each cannot compute these arrays.
    """
    asked = getattr(kernels.config, name)
    if asked == "reference" or (asked == "auto" and not kernels.is_nvidia):
        return "reference"
    if asked != "auto":
        if reason := refusals[asked]:
            fix = "use auto, which takes the best that can, or reference"
            raise ConfigError(f"kernels.{name}", f"{asked} cannot do it", found=reason, fix=fix)
        return asked
    reasons = []
    for option, reason in refusals.items():
        if reason is None:
            return option
        reasons.append(f"{option} has no {reason}")
    _say(f"{name} runs as plain JAX: {'; '.join(reasons)}")
    return "reference"


@functools.cache
def _say(line: str) -> None:
    """Once for each thing there is to say, not for every layer."""
    logging.getLogger(__name__).warning(line)


def cached_attention(
    q_BLHK: jax.Array, key_BTGK: jax.Array, value_BTGK: jax.Array, position_L: jax.Array
) -> jax.Array:
    """Attention of tokens at `position_L` to all cached tokens up to and including their own."""
    mask = jnp.arange(key_BTGK.shape[1])[None] <= position_L[:, None]
    return jax.nn.dot_product_attention(q_BLHK, key_BTGK, value_BTGK, mask=mask[None, None])
