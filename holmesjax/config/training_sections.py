"""The sections `train` and `optimizer` of a run file, with their parts."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from holmesjax.config.allowed_values import (
    STRICT,
    Count,
    Flag,
    Fraction,
    Natural,
    NonNegative,
    NoSeconds,
    Positive,
    Rate,
    RateOrZero,
    Seed,
    Text,
    Tokens,
)
from holmesjax.config.mistakes import refuse_mistakes
from holmesjax.config.update_rules import RATE_SCHEDULES, REFUSED, RULES, NumberFormat
from holmesjax.files import schema

FINAL_FRACTION = 0.1  # of the learning rate, by default


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class RampupConfig:
    """A number of steps at the start of a run, with smaller batches than later steps."""

    steps: Count  # steps with this batch
    global_batch: Count  # sequences of each of these steps


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class TrainConfig:
    """The length of a run, its batches, and its number formats."""

    steps: Count  # optimizer steps of the whole run
    global_batch: Count  # sequences per step, over all replicas and microbatches
    # Smaller batches of the first steps, in order. A smaller batch has fewer microbatches.
    rampup: tuple[RampupConfig, ...] = ()
    seed: Seed = 0  # seed of the initial parameters and of the order of the data
    # Format of products, and of the parameters that they read. float16 is refused.
    compute_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    # Format of the parameters that are kept and trained. With bfloat16 there is no float32 copy,
    # and each update is rounded at random. float16 is refused.
    param_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    # Format in which gradients cross `data`, once a step. bfloat16 sends half of the bytes, for
    # slow networks between replicas with nodes of their own. Each share is rounded once, and summed
    # in float32.
    reduction_dtype: Literal["float32", "bfloat16"] = "float32"
    # Whether two runs on the same machines agree to the bit. GPUs then sum in a fixed order, which
    # is slower.
    deterministic: Flag = False
    log_every_s: NoSeconds = 2.0  # seconds between step lines on the console
    eval_every: Natural = 0  # steps between validations, besides one at the end; 0: none
    eval_batches: Count = 4  # global batches per validation
    # Whether validations use the average of the weights (optimizer.ema_decay).
    eval_ema: Flag = False
    # The response to a spike: a step whose loss or gradient norm is more than `spike_sigmas`
    # standard deviations above the mean of the last `spike_window` steps. record: the spike is
    # recorded. skip: it also changes no parameter. roll_back: the run goes back to its last
    # checkpoint, and leaves out the data since then.
    spike_policy: Literal["none", "record", "skip", "roll_back"] = "none"
    # Steps over which the mean and the standard deviation are taken.
    spike_window: Annotated[int, Field(ge=4, le=65536, strict=True)] = 128
    spike_sigmas: Positive = 6.0  # standard deviations above the mean that make a spike
    # Steps that JAX's profiler records in each process, in `profiles/` of the run folder.
    profile_steps: tuple[Count, ...] = ()
    max_skipped: Count = 20  # steps in a row whose gradient is not finite, before the run ends

    def __post_init__(self) -> None:
        refuse_mistakes(train=self)

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
class ParameterGroupConfig:
    """Parameters with a learning rate or a weight decay of their own."""

    # A shell pattern for whole names, such as block_*/query_DHK or */attention_norm/*; * matches
    # slashes too. The first group whose pattern matches a parameter counts.
    pattern: Text
    # Their peak learning rate; with 0 they do not change. None: the learning rate of the section.
    learning_rate: RateOrZero | None = None
    # Their weight decay, for norms and biases too. None: the weight decay of the section.
    weight_decay: NonNegative | None = None


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class OptimizerConfig:
    """An optimizer with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101)."""

    name: Annotated[str, schema.OneOf(RULES, REFUSED)] = "adamw"  # name of the optimizer
    learning_rate: Rate  # peak learning rate
    # The shape of the learning rate after the warm-up.
    schedule: Annotated[str, schema.OneOf(RATE_SCHEDULES)] = "cosine"
    # Whether the learning rate follows the number of updates or of tokens. The two differ where
    # batches grow.
    schedule_by: Literal["steps", "tokens"] = "steps"
    warmup_steps: Natural = 0  # steps in which the learning rate rises
    warmup_tokens: Tokens | None = None  # for a schedule by tokens: tokens in which the rate rises
    decay_steps: Count | None = None  # for wsd: steps of the final decay
    decay_tokens: Tokens | None = None  # for wsd by tokens: tokens of the final decay
    final_fraction: Fraction = (
        FINAL_FRACTION  # learning rate of the last step, as a share of the peak
    )
    # Decay of the first moment, or of the momentum. adafactor reads neither beta nor epsilon.
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95  # decay of the second moment, or of the momentum that lion keeps
    epsilon: Positive = 1e-8  # number that is added to the root of the second moment
    # Weight decay of all parameters but norms, biases and embeddings.
    weight_decay: NonNegative = 0.1
    # The largest norm of the gradient over all stages. None: the gradient is not clipped.
    clip_norm: Positive | None = 1.0
    # Decay of an exponential moving average of the weights. None: there is no average.
    ema_decay: Fraction | None = None
    # Groups of parameters with a learning rate or a weight decay of their own.
    groups: tuple[ParameterGroupConfig, ...] = ()
    muon_beta: Fraction = 0.95  # for muon: the decay of a matrix's momentum
    # For muon: the root mean square of an update. An update of AdamW has about 0.2, so with 0.2 the
    # learning rates and weight decay of AdamW fit. None: Jordan's scale sqrt(max(1, columns /
    # rows)), which needs a learning rate of about 0.02.
    muon_consistent_rms: Positive | None = 0.2
    # For optax: a transformation of optax of your own, as module:function.
    function: Text | None = None
    # Format of both moments of adamw: 4, 2 or 17/16 bytes a number (kernels/moments.py).
    moments: NumberFormat = "float32"

    def __post_init__(self) -> None:
        refuse_mistakes(optimizer=self)
