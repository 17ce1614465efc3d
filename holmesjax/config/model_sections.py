"""The section `model` of a run file, with its parts."""

import math
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from holmesjax.config.allowed_values import (
    STRICT,
    Count,
    Flag,
    Fraction,
    Length,
    Natural,
    NonNegative,
    NumLayers,
    Positive,
    RotaryBase,
    Share,
    Text,
    Wide,
    Width,
)
from holmesjax.config.mistakes import refuse_mistakes
from holmesjax.config.rotary import SCALINGS
from holmesjax.files import schema

PRESET = "preset"  # in section `model`: a file of configs/models/, for what the section leaves out
WINDOW_BLOCK = "window_block"  # the kind of layer that `model.window` is for
EXPERT_BLOCK = "expert_block"  # the kind of layer that `model.experts` is for
History = Annotated[int, Field(ge=1, le=4096, strict=True)]
Activation = Literal["gelu", "gelu_erf", "swiglu", "geglu"]
GATED = ("swiglu", "geglu")
KindsInTurns = Annotated[tuple[Text, ...], Field(min_length=1)]
FactorOfEachPair = Annotated[tuple[Positive, ...], Field(min_length=1)]

TABLE = "embed/token_VD"  # the token table, which a tied head borrows
ALL_LINEAR = "all-linear"
WEIGHTS = ("query", "key", "value", "out", "gate", "up", "down")  # of a block's products
# The weights of each target of LoRA, by our names and by the names of modules in Hugging Face's
# models. Weights in one tuple share an A, since they are one map there.
LORA_TARGETS: dict[str, tuple[tuple[str, ...], ...]] = {
    **{name: ((name,),) for name in WEIGHTS},
    **{f"{module}_proj": ((name,),) for module, name in zip("qkvo", WEIGHTS, strict=False)},
    **{f"{name}_proj": ((name,),) for name in WEIGHTS[4:]},
    "qkv_proj": (("query", "key", "value"),),
    "gate_up_proj": (("gate", "up"),),
    "c_attn": (("query", "key", "value"),),
    "c_proj": (("out",), ("down",)),
    "c_fc": (("up",),),
    ALL_LINEAR: tuple((name,) for name in WEIGHTS),  # those that the model has
}
LoraTargets = Annotated[tuple[Annotated[str, schema.OneOf(LORA_TARGETS)], ...], Field(min_length=1)]


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class RotaryScalingConfig:
    """Rotary frequencies for sequences that are longer than in a model's first training.

    `holmesjax.config.rotary` has the formula of each type, and the settings that it needs.
    """

    type: Annotated[str, schema.OneOf(SCALINGS)]  # name of the formula
    factor: Positive | None = None  # length of sequences, over that of the first training
    # Tokens in a sequence of the first training.
    original_max_position_embeddings: Length | None = None
    # For llama3: a pair that turns less often in such a sequence is scaled.
    low_freq_factor: Positive | None = None
    # For llama3: a pair that turns more often in such a sequence is not scaled.
    high_freq_factor: Positive | None = None
    # For yarn: a pair that turns more often in such a sequence is not scaled. None: 32.
    beta_fast: Positive | None = None
    # For yarn: a pair that turns less often in such a sequence is scaled. None: 1.
    beta_slow: Positive | None = None
    truncate: Flag | None = None  # for yarn: whether its ramp is between whole pairs. None: true
    # For yarn: the numerator of the attention factor, if mscale_all_dim is set too.
    mscale: Positive | None = None
    mscale_all_dim: Positive | None = None  # for yarn: the denominator of the attention factor
    # For longrope: a factor for each pair, in sequences up to original_max_position_embeddings.
    short_factor: FactorOfEachPair | None = None
    long_factor: FactorOfEachPair | None = None  # for longrope: the same in longer sequences
    attention_factor: Positive | None = None  # factor of cosines and sines. None: by the type


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class LoraPattern:
    """Another rank or alpha of some adapters. The first pattern that sets one counts."""

    # A shell pattern for whole names of targets, such as [qk]_proj, or of a layer and a target,
    # such as block_003/q_proj.
    maps: Text
    rank: Count | None = None  # rank of these adapters. None: as without the pattern
    alpha: Positive | None = None  # alpha of these adapters. None: as without the pattern

    def matches(self, layer: str, group: tuple[str, ...]) -> bool:
        """Whether the pattern matches the adapter of weights that share an A in a layer."""
        targets = [name for name, groups in LORA_TARGETS.items() if group in groups]
        names = [name for name in targets if name != ALL_LINEAR]
        names += [f"{layer}/{name}" for name in names]
        return any(fnmatchcase(name, self.maps) for name in names)


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class LoraConfig:
    """Low-rank adapters beside frozen weights. Hu et al., arXiv:2106.09685.

    A target's product W x becomes W x + s B (A x). A has `rank` rows, and B as many columns.
    """

    rank: Count = 8  # rows of A, and columns of B
    alpha: Positive = 16.0  # the product of an adapter is scaled by s = alpha / rank
    use_rslora: Flag = False  # whether s = alpha / sqrt(rank). Kalajdzievski, arXiv:2312.03732
    targets: LoraTargets = ("query", "value")  # weights of a block that have an adapter
    patterns: tuple[LoraPattern, ...] | None = None  # adapters with another rank or alpha
    # The share of an adapter's inputs that a step sets to zero. None: 0.
    dropout: Fraction | None = None
    # A folder in PEFT's format with the initial adapters. It also has the settings of this section
    # that the run file leaves out.
    peft: Text | None = None

    def rank_and_alpha(self, layer: str, group: tuple[str, ...]) -> tuple[int, float]:
        """The rank and the alpha of the adapter of weights that share an A in a layer."""
        own = [pattern for pattern in self.patterns or () if pattern.matches(layer, group)]
        rank = next((pattern.rank for pattern in own if pattern.rank is not None), self.rank)
        alpha = next((pattern.alpha for pattern in own if pattern.alpha is not None), self.alpha)
        return rank, alpha

    def rank_and_scale(self, layer: str, group: tuple[str, ...]) -> tuple[int, float]:
        """The rank and s, the scale of the adapter's product."""
        rank, alpha = self.rank_and_alpha(layer, group)
        return rank, alpha / (math.sqrt(rank) if self.use_rslora else rank)

    @property
    def adapters(self) -> tuple[tuple[str, ...], ...]:
        """The weights of each A: several, if a target is one map in another format."""
        return tuple(group for name in self.targets for group in LORA_TARGETS[name])


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class Fp8Config:
    """Products of blocks in 8-bit floating point. Micikevicius et al., arXiv:2209.05433.

    Activations and weights are e4m3, gradients e5m2, each with one scale for a whole array.
    """

    # Scales of activations. delayed: from their largest magnitudes in earlier steps. current: from
    # their largest magnitude in this step. Scales of weights and gradients are always current.
    scaling: Literal["delayed", "current"] = "delayed"
    history: History = 16  # earlier steps that a delayed scale reads
    exclude_first: Natural = 0  # blocks at the start with their products in train.compute_dtype
    exclude_last: Natural = 0  # blocks at the end with their products in train.compute_dtype
    exclude_down: Flag = False  # whether the product with down is in train.compute_dtype


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class ExpertsConfig:
    """The experts of layers of the kind expert_block. A router sends each token to some of them."""

    count: Count = 8  # experts of a layer
    active: Count = 2  # experts that each token goes to
    width: Wide | None = None  # width inside an expert. None: mlp_width
    # Numbers of a token that go to its experts and come back: one matrix of the layer takes a token
    # down to them, and one takes the sum of its experts up again (arXiv:2503.23100). The router
    # reads the whole token. None: width of the residual stream, without such matrices.
    latent_width: Wide | None = None
    # Width inside a feed-forward that all tokens pass beside the experts. None: there is none.
    shared_width: Wide | None = None
    # Scores of experts: a softmax over all of them, or a sigmoid of each.
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalized: Flag = True  # whether the scores of a token's experts are divided by their sum
    scale: Positive = 1.0  # factor of the scores by which the results of experts are added up
    groups: Count = (
        1  # groups of equal size of which a token chooses some before it chooses experts
    )
    active_groups: Count = 1  # groups that a token chooses, by the sum of their two best scores
    # Weight of the load-balancing loss (arXiv:2101.03961), with the loads of the whole global batch
    # of the step before.
    balance_loss: NonNegative = 0.0
    router_z_loss: NonNegative = 0.0  # weight of logsumexp(logits of the router)^2
    # With u, a number of each expert is added to its score for the choice alone. After a step, it
    # is u more where the expert had less than the mean load, and u less where more
    # (arXiv:2408.15664). 0: there are no such numbers.
    bias_rate: NonNegative = 0.0
    # Whether each expert has a fixed number besides, that of an imported model.
    biased: Flag = False
    # Slots of an expert for a sequence, over those of an even load. Tokens that find none pass
    # that expert by. None: no token is left out.
    capacity_factor: Positive | None = None


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class LatentAttentionConfig:
    """Attention whose keys and values come from few numbers of a token. arXiv:2405.04434.

    head_dim is the width of a query and of a key, its part that turns included.
    """

    rank: Count = 512  # numbers of a token from which the keys and values of all heads come
    # Numbers of a token from which its queries come. None: they come from the residual stream.
    query_rank: Count | None = None
    # Numbers of a head that turn by rotary positions, its last ones, in pairs of neighbours. Those
    # of keys are the same in all heads.
    rotary_width: Count = 64
    value_width: Count | None = None  # width of a head's values. None: head_dim - rotary_width


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class ModelConfig:
    """A decoder-only Transformer.

    In a run file `preset: NAME` stands for the settings of `configs/models/NAME.yaml`. Settings
    beside it replace those of the preset.
    """

    # Transformer layers, or layers of your own between the first and the last.
    num_layers: NumLayers
    width: Width  # width of the residual stream
    num_heads: Width  # query heads of a layer
    context_length: Length  # tokens in a sequence
    vocab_size: Wide = 256  # size of the vocabulary; 256 for bytes
    num_kv_heads: Width | None = None  # key and value heads of a layer. None: num_heads
    head_dim: Width | None = None  # width of a head. None: width / num_heads
    mlp_width: Wide | None = None  # width inside the feed-forward. None: 4 * width
    positions: Literal["learned", "rotary"] = "rotary"  # kind of position encoding
    rotary_base: RotaryBase = 10_000.0  # base of the wavelengths of rotary positions
    # Base of the wavelengths in a window_block, which are not scaled. None: as in other layers.
    window_rotary_base: RotaryBase | None = None
    rotary_fraction: Share = 1.0  # share of a head's dims that are rotated, the first ones
    # Scaling of rotary positions for longer sequences.
    rotary_scaling: RotaryScalingConfig | None = None
    activation: Activation = "gelu"  # function of the feed-forward; gelu: by tanh, gelu_erf: exact
    norm: Literal["layer_norm", "rms_norm"] = "layer_norm"  # kind of all norms
    norm_epsilon: Positive = 1e-5  # number that a norm adds to the variance or mean square
    zero_centered_norms: Flag = False  # whether a stored scale w of a norm counts as 1 + w
    # Places of a block's norms: before attention and feed-forward, after them, or both.
    norms: Literal["before", "after", "both"] = "before"
    # RMSNorm of queries and keys before the rotation: over each head, or over all heads together.
    qk_norm: Literal["none", "head", "all_heads"] = "none"
    biases: Literal["none", "qkv", "all"] = "none"  # products of a block that have a bias
    # Keys and values of all layers from few numbers of a token. None: each head projects its own.
    latent_attention: LatentAttentionConfig | None = None
    attention_scale: Positive | None = None  # factor of scores. None: 1 / sqrt(width of a head)
    attention_soft_cap: Positive | None = None  # with c, a score s becomes c tanh(s / c)
    logit_soft_cap: Positive | None = None  # with c, a logit l becomes c tanh(l / c)
    # With c, training adds c logsumexp(logits)^2 to the loss of a token (arXiv:2204.02311).
    z_loss_multiplier: NonNegative = 0.0
    scaled_embedding: Flag = False  # whether token vectors are multiplied by sqrt(width)
    tied_embeddings: Flag = False  # whether the output projection is the token table
    # Kinds of the Transformer layers, a pattern that repeats: block, window_block, expert_block, or
    # a kind of your own, as module:function.
    pattern: KindsInTurns = ("block",)
    experts: ExpertsConfig | None = None  # of layers of the kind expert_block
    window: Count | None = None  # keys that a query of a window_block sees, its own included
    # A model of your own, as module:function. The function returns its layers, and may read any
    # setting of this section. num_layers counts the layers between the first and the last.
    # context_length * width is the size of the array that a layer hands to the next for one
    # sequence.
    module: Text | None = None
    # A folder in Hugging Face's format with the initial parameters. It also has the settings of
    # this section that the run file leaves out.
    hf: Text | None = None
    # Low-rank adapters, the only parameters that train. None: no adapters.
    lora: LoraConfig | None = None
    # Shell patterns for whole names of parameters that do not train, such as block_*/query_DHK or
    # head/*; * matches slashes too.
    frozen: tuple[Text, ...] = ()
    fp8: Fp8Config | None = None  # products of blocks in fp8. None: all in train.compute_dtype

    def __post_init__(self) -> None:
        refuse_mistakes(model=self)

    def __hash__(self) -> int:
        """The hash of settings in which most models differ: a search looks models up very often."""
        return hash((self.num_layers, self.width, self.context_length, self.vocab_size))

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.width // self.num_heads

    @property
    def feed_forward_width(self) -> int:
        return self.mlp_width or 4 * self.width

    @property
    def sums_table(self) -> bool:
        """Whether the gradient of the token table is a sum of both uses, at both ends."""
        is_frozen = any(fnmatchcase(TABLE, pattern) for pattern in self.frozen)
        return self.tied_embeddings and self.lora is None and not is_frozen

    @property
    def is_gated(self) -> bool:
        return self.activation in GATED

    @property
    def rotary_width(self) -> int:
        """Numbers of a head that turn: an even number of its first ones, or of latent keys."""
        if self.latent_attention is not None:
            return self.latent_attention.rotary_width
        return int(self.head_width * self.rotary_fraction)
