"""The sections of a run file, as frozen dataclasses.

A field's type, its constraint and its default stand beside it. The rules between settings are in
`checks`; every section runs those that read it alone, and `Config` runs all of them.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from holmesjax import schema
from holmesjax.data_sources import SOURCES
from holmesjax.errors import ConfigError, HolmesError, Mistakes
from holmesjax.rotary import SCALINGS
from holmesjax.schedules.pipeline_schedules import SCHEDULES
from holmesjax.update_rules import RULES, NumberFormat

STRICT = ConfigDict(extra="forbid")
MIXTURE = "mixture"  # a corpus that stands for those of `data.mixture`
PYTHON_STDLIB = "python-stdlib"  # a corpus that every machine has
BYTES = "bytes"  # the tokenizer without files

# Strict: a text is no number, and true is not 1. A list may stand for a tuple.
# Sizes have an end far beyond any model or machine, so that a slip is told as one, and what is
# computed with them stays within 64 bits.
Count = Annotated[int, Field(ge=1, le=2**31 - 1, strict=True)]
Tokens = Annotated[int, Field(ge=1, le=2**46 - 1, strict=True)]
Natural = Annotated[int, Field(ge=0, le=2**31 - 1, strict=True)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1, strict=True)]
NumLayers = Annotated[int, Field(ge=1, le=2**14, strict=True)]
Width = Annotated[int, Field(ge=1, le=2**20, strict=True)]
Wide = Annotated[int, Field(ge=1, le=2**24, strict=True)]
Length = Annotated[int, Field(ge=1, le=2**27, strict=True)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
HeartbeatTimeout = Annotated[float, Field(ge=0.1, allow_inf_nan=False, strict=True)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False, strict=True)]
History = Annotated[int, Field(ge=1, le=4096, strict=True)]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False, strict=True)]
Text = Annotated[str, Field(min_length=1, strict=True)]
AUTO = "auto"
PRESET = "preset"  # in section `model`: a file of configs/models/, for what the section leaves out
WINDOW_BLOCK = "window_block"  # the kind of layer that `model.window` is for
Flag = Annotated[bool, Field(strict=True)]
Streams = Annotated[int, Field(ge=1, le=64, strict=True)]  # each is a socket and two threads
Port = Annotated[int, Field(ge=0, le=65535, strict=True)]
Checkpointing = Literal["none", "dots", "full"]
Schedule = Annotated[str, schema.OneOf(SCHEDULES)]
Activation = Literal["gelu", "gelu_erf", "swiglu", "geglu"]
GATED = ("swiglu", "geglu")
ClusterOfEachStage = Annotated[tuple[Text, ...], Field(min_length=1)]
LayersPerStage = Annotated[tuple[Count, ...], Field(min_length=1)]
KindsInTurns = Annotated[tuple[Text, ...], Field(min_length=1)]
FactorOfEachPair = Annotated[tuple[Positive, ...], Field(min_length=1)]

TABLE = "embed/token_VD"  # the token table, which a tied head borrows
ALL_LINEAR = "all-linear"
WEIGHTS = ("query", "key", "value", "out", "gate", "up", "down")  # of a block's products
# The weights of each target of LoRA: our names, and those of modules of Hugging Face's models. What
# stands together shares an A: it is one map there.
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
class RunConfig:
    """The folders of a run."""

    dir: Text  # the run folder, which the run makes
    rehearse: Flag = False  # whether virtual CPU devices stand for those of the topology
    # The folder of compiled programs, kept from run to run. auto: holmesjax/programs in the user's
    # cache folder ($XDG_CACHE_HOME or ~/.cache). None: programs are not kept.
    compilation_cache: Text | None = AUTO

    def __post_init__(self) -> None:
        _refuse_mistakes(run=self)


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class RampupConfig:
    """Some of the first steps, with smaller batches than later ones."""

    steps: Count  # steps with this batch
    global_batch: Count  # sequences of each of these steps


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class TrainConfig:
    """The length of a run, its batches, and its number formats."""

    steps: Count  # optimizer steps of the whole run
    global_batch: Count  # sequences per step, over all replicas and microbatches
    # The batches of the first steps, in order. They have fewer microbatches of the same size.
    rampup: tuple[RampupConfig, ...] = ()
    seed: Seed = 0  # seed of the initial parameters and of the order of the data
    # Format of products, and of the parameters that they read. float16 is refused.
    compute_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    # Format of the parameters that are kept and trained. With bfloat16 there is no float32 copy,
    # and each update is rounded at random. float16 is refused.
    param_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    # Whether two runs agree to the bit on the same machines. GPUs then sum in fixed orders, more
    # slowly.
    deterministic: Flag = False
    log_every_s: NonNegative = 2.0  # seconds between step lines on the console
    eval_every: Natural = 0  # steps between validations, besides one at the end; 0: none
    eval_batches: Count = 4  # global batches per validation
    eval_ema: Flag = False  # whether validations are of the average of optimizer.ema_decay
    # What is done about a step whose loss or norm is more than `spike_sigmas` standard deviations
    # above the mean of the last `spike_window` steps: it is recorded; it also changes nothing; or
    # the run goes back to its last checkpoint, and the data since then are left out.
    spike_policy: Literal["none", "record", "skip", "roll_back"] = "none"
    # Steps before a step that give the mean and the deviation.
    spike_window: Annotated[int, Field(ge=4, le=65536, strict=True)] = 128
    spike_sigmas: Positive = 6.0  # standard deviations above the mean that make a spike
    # Steps of which each process writes what JAX's profiler sees of its devices, into `profiles/`.
    profile_steps: tuple[Count, ...] = ()
    max_skipped: Count = 20  # steps in a row whose gradient is not finite, before the run ends

    def __post_init__(self) -> None:
        _refuse_mistakes(train=self)

    def batch_of(self, step: int) -> int:
        """The sequences of step 1, 2, ..."""
        return self.sequences_after(step) - self.sequences_after(step - 1)

    def sequences_after(self, step: int) -> int:
        """The sequences of the first so many steps."""
        found, left = 0, step
        for part in self.rampup:
            here = min(part.steps, left)
            found, left = found + here * part.global_batch, left - here
        return found + left * self.global_batch


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class RotaryScalingConfig:
    """Rotary frequencies for sequences longer than those of a model's first training.

    `holmesjax.rotary` has the formula of each type, and the settings that it needs.
    """

    type: Annotated[str, schema.OneOf(SCALINGS)]  # the formula
    factor: Positive | None = None  # how many times as long sequences are
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
    # For yarn: the numerator of the attention factor, where mscale_all_dim is given too.
    mscale: Positive | None = None
    mscale_all_dim: Positive | None = None  # for yarn: the denominator of the attention factor
    # For longrope: a factor for each pair, in sequences of that length.
    short_factor: FactorOfEachPair | None = None
    long_factor: FactorOfEachPair | None = None  # for longrope: the same in longer sequences
    attention_factor: Positive | None = None  # factor of cosines and sines. None: that of the type


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class LoraPattern:
    """Another rank or alpha of some adapters. The first pattern that gives one counts."""

    # A shell pattern of whole names: of targets, as q_proj or [qk]_proj, or of a layer and a
    # target, as block_003/q_proj.
    maps: Text
    rank: Count | None = None  # rank of these adapters. None: as without the pattern
    alpha: Positive | None = None  # alpha of these adapters. None: as without the pattern

    def matches(self, layer: str, group: tuple[str, ...]) -> bool:
        """Whether it is for the adapter of weights with one A in a layer."""
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
    alpha: Positive = 16.0  # the product of an adapter counts s = alpha / rank times
    use_rslora: Flag = False  # whether s = alpha / sqrt(rank). Kalajdzievski, arXiv:2312.03732
    targets: LoraTargets = ("query", "value")  # weights of a block that have an adapter
    patterns: tuple[LoraPattern, ...] | None = None  # adapters with another rank or alpha
    # The share of an adapter's input numbers that a step takes as zero. None: 0.
    dropout: Fraction | None = None
    # A folder of PEFT's format. It has the initial adapters, and the settings of this section that
    # the run file leaves out.
    peft: Text | None = None

    def rank_and_alpha(self, layer: str, group: tuple[str, ...]) -> tuple[int, float]:
        """The rank and the alpha of the adapter of weights with one A in a layer."""
        own = [pattern for pattern in self.patterns or () if pattern.matches(layer, group)]
        rank = next((pattern.rank for pattern in own if pattern.rank is not None), self.rank)
        alpha = next((pattern.alpha for pattern in own if pattern.alpha is not None), self.alpha)
        return rank, alpha

    def rank_and_scale(self, layer: str, group: tuple[str, ...]) -> tuple[int, float]:
        """The same with s, by which the product of the adapter counts, in place of alpha."""
        rank, alpha = self.rank_and_alpha(layer, group)
        return rank, alpha / (math.sqrt(rank) if self.use_rslora else rank)

    @property
    def adapters(self) -> tuple[tuple[str, ...], ...]:
        """The weights of each A: several, where a target is one map of another format."""
        return tuple(group for name in self.targets for group in LORA_TARGETS[name])


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class Fp8Config:
    """Products of blocks in 8-bit floating point. Micikevicius et al., arXiv:2209.05433.

    Activations and weights are e4m3, gradients e5m2, each with one scale for a whole array.
    """

    # How scales of activations are found. delayed: from their largest magnitudes in the steps
    # before. current: from their own. Weights and gradients always have their own.
    scaling: Literal["delayed", "current"] = "delayed"
    history: History = 16  # steps that a delayed scale looks back


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class ModelConfig:
    """A decoder-only Transformer.

    In a run file `preset: NAME` stands for the settings of `configs/models/NAME.yaml`, on top of
    which are those beside it.
    """

    num_layers: NumLayers  # Transformer layers, or those of your own between first and last
    width: Width  # numbers of a token in the residual stream
    num_heads: Width  # query heads of a layer
    context_length: Length  # tokens in a sequence
    vocab_size: Wide = 256  # tokens that the model knows; bytes are 256
    num_kv_heads: Width | None = None  # key and value heads of a layer. None: num_heads
    head_dim: Width | None = None  # numbers of a head. None: width / num_heads
    mlp_width: Wide | None = None  # numbers of a token inside the feed-forward. None: 4 * width
    positions: Literal["learned", "rotary"] = "rotary"  # how a layer knows the place of a token
    rotary_base: Positive = 10_000.0  # base of the wavelengths of rotary positions
    # Base of the wavelengths in a window_block, unscaled. None: as in other layers.
    window_rotary_base: Positive | None = None
    rotary_fraction: Share = 1.0  # share of a head's numbers that turn, its first ones
    rotary_scaling: RotaryScalingConfig | None = None  # positions for longer sequences
    activation: Activation = "gelu"  # function of the feed-forward; gelu is by tanh, gelu_erf exact
    norm: Literal["layer_norm", "rms_norm"] = "layer_norm"  # kind of all norms
    norm_epsilon: Positive = 1e-5  # what a norm adds to the variance or mean square
    zero_centered_norms: Flag = False  # whether a stored scale w of a norm counts as 1 + w
    # Places of a block's norms: before attention and feed-forward, after each, or both.
    norms: Literal["before", "after", "both"] = "before"
    # An RMSNorm of queries and of keys before they turn: of each head, or of all heads together.
    qk_norm: Literal["none", "head", "all_heads"] = "none"
    biases: Literal["none", "qkv", "all"] = "none"  # products of a block that have a bias
    attention_scale: Positive | None = None  # factor of scores. None: 1 / sqrt(width of a head)
    attention_soft_cap: Positive | None = None  # with c, a score s becomes c tanh(s / c)
    logit_soft_cap: Positive | None = None  # with c, a logit l becomes c tanh(l / c)
    # With c, training adds c logsumexp(logits)^2 to the loss of a token (arXiv:2204.02311).
    z_loss_multiplier: NonNegative = 0.0
    scaled_embedding: Flag = False  # whether token vectors are multiplied by sqrt(width)
    tied_embeddings: Flag = False  # whether the output projection is the token table
    # Kinds of the Transformer layers, which repeat in turns: block, window_block, or one of your
    # own, as module:function.
    pattern: KindsInTurns = ("block",)
    window: Count | None = None  # keys that a query of a window_block sees, with its own
    # A model of your own, as module:function: the function gives its layers, and reads from this
    # section what it likes. num_layers counts those between the first and the last; context_length
    # times width are the numbers of a sequence that one layer hands to the next.
    module: Text | None = None
    # A folder of Hugging Face's format. It has the initial parameters, and the settings of this
    # section that the run file leaves out.
    hf: Text | None = None
    lora: LoraConfig | None = None  # adapters, which alone train. None: all parameters train
    # Shell patterns of the parameters that do not train, for whole names such as block_*/query_DHK
    # or head/*; * reaches over slashes.
    frozen: tuple[Text, ...] = ()
    fp8: Fp8Config | None = None  # products of blocks in fp8. None: all in train.compute_dtype

    def __post_init__(self) -> None:
        _refuse_mistakes(model=self)

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
        """Numbers of a head that turn: an even number of its first ones."""
        return int(self.head_width * self.rotary_fraction)


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class NamedCorpus:
    """One of several corpora, with the other settings of the section `data`."""

    name: Text  # name in records and in other settings
    corpus: Text  # as data.corpus
    source: Annotated[str, schema.OneOf(SOURCES)] = "text"  # as data.source
    pattern: Text | None = None  # as data.pattern


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class MixedCorpus(NamedCorpus):
    """A corpus of a mixture."""

    weight: NonNegative = 1.0  # share of the sequences, as a part of the sum of all weights


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class MixtureChange:
    """Other weights of a mixture, from a place of the run on."""

    tokens: Tokens  # tokens that the run consumes before the change
    weights: dict[str, NonNegative]  # weights by name; a corpus that is not named is not read


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class DataConfig:
    """The data and how documents become sequences."""

    # The folder, file or function that the source reads; python-stdlib: Python's standard library.
    corpus: Text = MIXTURE
    mixture: tuple[MixedCorpus, ...] | None = None  # several corpora in place of one
    mixture_changes: tuple[MixtureChange, ...] | None = None  # changes of their weights, in order
    validation: tuple[NamedCorpus, ...] | None = None  # sets to validate on, besides held-out data
    source: Annotated[str, schema.OneOf(SOURCES)] = "text"  # what reads the corpus
    # Files of the folder that are read, as a glob. None: every text file that is not hidden.
    pattern: Text | None = None
    # The word bytes, or a folder or file of a Hugging Face, tiktoken or sentencepiece tokenizer.
    tokenizer: Text = BYTES
    # Share of the data that is held out. Files of text are chosen by a hash of their path.
    validation_fraction: Fraction = 0.05
    # Whether attention reaches over the ends of documents; with mask it stays inside of each.
    documents: Literal["concatenate", "mask"] = "concatenate"
    # How documents are put into sequences. None: sequences are windows of all tokens.
    packing: Literal["best_fit"] | None = None
    # Format of the tokens in files that do not state it, as nanoGPT and OLMo write them.
    dtype: Literal["uint16", "uint32", "int32", "int64"] | None = None
    # For a cluster: beginnings of the paths above, and what they are there.
    paths: dict[str, dict[str, Text]] | None = None

    def __post_init__(self) -> None:
        _refuse_mistakes(data=self)


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class ParameterGroupConfig:
    """Parameters that train otherwise than the section `optimizer` says."""

    # A shell pattern of whole names, as block_*/query_DHK or */attention_norm/*; * reaches over
    # slashes. The first group whose pattern fits a parameter counts.
    pattern: Text
    # The peak of their learning rate; with 0 they do not change. None: that of the section.
    learning_rate: NonNegative | None = None
    # Their weight decay, which then holds for norms and biases too. None: that of the section.
    weight_decay: NonNegative | None = None


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class OptimizerConfig:
    """An optimizer with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101)."""

    name: Annotated[str, schema.OneOf(RULES)] = "adamw"  # the optimizer
    learning_rate: Positive  # the peak of the learning rate
    # How the learning rate falls after the warm-up.
    schedule: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    # Whether the learning rate follows the number of updates or their tokens; these differ where
    # batches grow.
    schedule_by: Literal["steps", "tokens"] = "steps"
    warmup_steps: Natural = 0  # steps in which the learning rate rises
    warmup_tokens: Tokens | None = None  # for a schedule by tokens: tokens in which the rate rises
    decay_steps: Count | None = None  # for wsd: steps of the final decay
    decay_tokens: Tokens | None = None  # for wsd by tokens: tokens of the final decay
    final_fraction: Fraction = 0.1  # share of the peak that is left at the last step
    # Decay of the first moment, or of the momentum. adafactor reads neither beta nor epsilon.
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95  # decay of the second moment, or of the momentum that lion keeps
    epsilon: Positive = 1e-8  # what is added to the root of the second moment
    weight_decay: NonNegative = 0.1  # weight decay, but for norms, biases and embeddings
    # The largest norm of the gradient over all stages. None: the gradient is not clipped.
    clip_norm: Positive | None = 1.0
    # Decay of a moving average of the weights, which is kept beside them. None: there is none.
    ema_decay: Fraction | None = None
    # Learning rates and weight decay of parameters by pattern.
    groups: tuple[ParameterGroupConfig, ...] = ()
    muon_beta: Fraction = 0.95  # for muon: the decay of a matrix's momentum
    # For muon: the size of an update, as a root of a mean square. AdamW's is about 0.2, so its
    # learning rates and weight decay fit. None: Jordan's scale sqrt(max(1, columns / rows)), which
    # wants a learning rate of about 0.02.
    muon_consistent_rms: Positive | None = 0.2
    # For optax: a transformation of optax of your own, as module:function.
    function: Text | None = None
    # Format of both moments of adamw: 4, 2 or 17/16 bytes a number (kernels/moments.py).
    moments: NumberFormat = "float32"

    def __post_init__(self) -> None:
        _refuse_mistakes(optimizer=self)


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class KernelsConfig:
    """Who computes an array function; auto takes the best that the devices and the shapes allow."""

    # What computes attention. auto: on NVIDIA GPUs cuDNN where it can, else plain JAX, or our own
    # kernels where a check of them has passed. reference: plain JAX.
    attention: Literal["auto", "reference", "pallas", "cudnn"] = "auto"
    # Whether attention gives the same gradients from the same inputs, to the bit. It is slower on
    # Hopper, and never cuDNN.
    deterministic_attention: Flag = False
    # How the loss is computed from the logits. chunked: not all of them at once. auto: chunked for
    # a large vocabulary, where this saves memory.
    cross_entropy: Literal["auto", "reference", "chunked"] = "auto"


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class ParallelConfig:
    """The cut of a step over devices. The planner chooses each setting that is None."""

    stages: Count | None = None  # stages of the pipeline
    clusters: ClusterOfEachStage | None = None  # cluster of each stage, in the pipeline's order
    layers: LayersPerStage | None = None  # Transformer layers of each stage
    data: Count | None = None  # replicas inside a stage
    fsdp: Count | None = None  # parts of each replica's parameters, gathered by layer (ZeRO-3)
    # Devices that share each sequence by ring attention; they also cut parameters, as fsdp does.
    context: Count | None = None
    tensor: Count | None = None  # devices that share each matrix product
    microbatches: Count | None = None  # microbatches of a step
    schedule: Schedule | None = None  # order of forwards and backwards on each stage
    chunks: Count | None = None  # runs of consecutive layers of a stage, in schedules with several
    # What is computed again in a backward: nothing, all but matrix products (dots), or all (full).
    activation_checkpointing: Checkpointing | None = None

    def __post_init__(self) -> None:
        _refuse_mistakes(parallel=self)


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class PlanConfig:
    """The measure by which plans are compared; the topology has the prices."""

    # Whether the shortest step makes the best plan, or the most tokens for a dollar.
    objective: Literal["step_time", "tokens_per_dollar"] = "step_time"
    budget_dollars: Positive | None = None  # dollars for all steps of the run. None: without limit


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class DistributedConfig:
    """The processes of a run with a launcher, and how long they wait for each other."""

    processes: Literal["node", "device"] = "node"  # whether each node or each device has a process
    streams: Streams = 4  # connections between two processes, or more, so that all NICs have some
    # Port of the first stage's coordinator, with the next one for each further stage; 0: free ones.
    port: Port = 0
    # Seconds until the end of a job that has lost a process or a link.
    heartbeat_timeout_s: HeartbeatTimeout = 60.0
    # Seconds until the next sign of progress of a job that starts: a process comes, a program is
    # compiled, a layer is drawn.
    start_timeout_s: Positive = 600.0
    # Seconds for a step. None: 10 times the median so far, and at least 60 s. The first step has
    # start_timeout_s, and so has a checkpoint.
    step_timeout_s: Positive | None = None
    # Seconds for the step and the checkpoint of a run that is asked to stop. This is a little less
    # than the 120 s of our files for Slurm and Kubernetes; both give 30 s where nothing is said.
    stop_timeout_s: Positive = 100.0
    # Seconds for one boundary of a process that lives, but is slow.
    pull_timeout_s: Positive = 1800.0

    @property
    def silence_s(self) -> float:
        """After which a process or link is lost; the rest of the timeout is for saying so."""
        return 0.8 * self.heartbeat_timeout_s


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class CheckpointConfig:
    """When the state is written, besides at the end, and how much of it is kept."""

    every: Count | None = None  # steps between checkpoints. None: every_minutes counts
    every_minutes: Positive | None = None  # minutes between them. None: 10, where every is not set
    keep: Count = 2  # newest checkpoints that are kept

    def __post_init__(self) -> None:
        _refuse_mistakes(checkpoint=self)

    @property
    def minutes(self) -> float:
        """Between checkpoints, where steps do not say when."""
        return self.every_minutes or 10.0


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class LogConfig:
    """Outputs of a run besides the console and metrics.jsonl."""

    # Whether report.html and trace.json are drawn at the end, which takes a second.
    report: Flag = True
    # Whether TensorBoard's events are written, with the extra tb. None: if it is installed.
    tensorboard: Flag | None = None
    wandb: Flag = False  # whether Weights & Biases gets the records, with the extra wandb
    # Whether records have norms by kind of layer: of gradients and parameters, and root mean
    # squares of what layers hand on.
    statistics: Flag = False


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class Config:
    """One run."""

    topology: Text  # a file of configs/topologies/
    run: RunConfig
    train: TrainConfig
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    plan: PlanConfig = dataclasses.field(default_factory=PlanConfig)
    kernels: KernelsConfig = dataclasses.field(default_factory=KernelsConfig)
    distributed: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        _refuse_mistakes(**{name: getattr(self, name) for name in SECTIONS})


SECTIONS = tuple(field.name for field in dataclasses.fields(Config) if field.name != "topology")

# By the sections that a check reads: the checks. `checks` fills it.
Check = Callable[..., Iterator[ConfigError]]
CHECKS: dict[tuple[str, ...], tuple[Check, ...]] = {}


def mistakes_of(sections: Mapping[str, Any]) -> Iterator[HolmesError]:
    """Yields the mistakes found by the checks that read only these sections."""
    for names, checks in CHECKS.items():
        if sections.keys() >= set(names):
            for check in checks:
                yield from schema.findings(check, *(sections[name] for name in names))


def _refuse_mistakes(**sections: Any) -> None:
    if mistakes := list(mistakes_of(sections)):
        raise Mistakes(mistakes)
