"""The shape of a stage: its layers and how they are cut, which decide what it costs.

The sizes of a mesh and the sequences of a `StageShape` are NumPy arrays of one shape, a number for
each stage, or plain numbers for one stage. Each function of the costs works element by element, so
its results have the same shape. Only `stage_times` asks which of the two it has, where it looks up
the seconds of layers.
"""

from dataclasses import dataclass
from typing import Any

from holmesjax.config import Checkpointing, ModelConfig
from holmesjax.config.update_rules import Kept
from holmesjax.costs.attention import AskedAttention
from holmesjax.layer_specs.distinct_kinds import kinds
from holmesjax.layer_specs.kind import Kind
from holmesjax.layer_specs.model_layers import cached
from holmesjax.topology.machines import Sizes

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
# Float32 logits that a device computes at a time, at least: more tokens are cut into chunks.
LOGIT_BYTES = 2**29


@dataclass(frozen=True, kw_only=True, slots=True)
class StageShape:
    """The shape of a stage, which decides its costs with the model and the machines.

    `data`, `tensor`, `fsdp`, `context`, `expert` and `sequences` may be arrays of one shape.
    """

    blocks: tuple[int, ...]  # Transformer layers of each kind, in the order of `Kinds.blocks`
    is_first: bool  # holds the embedding
    is_last: bool  # holds the head
    data: Sizes  # replicas
    tensor: Sizes  # devices that share each matrix product
    fsdp: Sizes = 1  # parts of each replica's parameters, and of its sequences
    context: Sizes = 1  # parts of each sequence; each part of the parameters has as many
    expert: Sizes = 1  # devices that share experts; they also cut other parameters and sequences
    places_experts: bool = False  # whether these have experts by their loads
    expert_chunks: int | None = None  # of an exchange between them; None: the fastest number
    # Whether a kernel multiplies the rows of each expert, and no empty slot.
    experts_by_kernel: bool = False
    sequences: Sizes  # in a microbatch, of which a device has some part each
    chunks: int  # runs of consecutive layers that it holds
    in_flight: float  # microbatches that wait: `tasks.max_in_flight`
    head_in_flight: float  # of them, those whose forward has run through the head
    waiting: float = 0  # of them, those between their B and their W: `tasks.max_waiting`
    dtype: str  # of the matrix products
    param_dtype: str = "float32"  # of the parameters that are kept and updated
    reduction_dtype: str = "float32"  # of gradients that cross `data`
    checkpointing: Checkpointing
    # Transformer layers of each kind that `checkpointing` is for; the others compute nothing again.
    # None: it is for all.
    recomputed: tuple[int, ...] | None = None
    # What the run asks of attention; None: nothing is chosen, and its time is as calibrated.
    attention: AskedAttention | None = None
    # Format of each array that the optimizer keeps of a parameter (`update_rules`).
    kept: tuple[Kept, ...] = ("float32", "float32")
    logit_bytes: int = LOGIT_BYTES  # of the float32 logits of a chunk of the loss
    cross_entropy: str = "auto"  # whether it has chunks, as `kernels.cross_entropy` says
    # Whether `tensor` cuts sequences between products, where their tokens divide; may be an array.
    sequence_parallel: Sizes = 0
    # Whether it is a plan's only stage and a step has one microbatch: one program has both passes
    # then, and gradients come where activations were.
    is_whole_step: bool = False

    @property
    def parameter_parts(self) -> Sizes:
        """Parts of a replica's parameters, besides those of `tensor`."""
        return self.fsdp * self.context * self.expert

    @property
    def is_alone(self) -> bool:
        """Whether it is a plan's only stage, whose step is one program."""
        return self.is_first and self.is_last and self.chunks == 1

    @property
    def again(self) -> tuple[int, ...]:
        """Transformer layers of each kind that compute anything again."""
        if self.checkpointing == "none":
            return (0,) * len(self.blocks)
        return self.blocks if self.recomputed is None else self.recomputed

    @property
    def counts(self) -> tuple[int, ...]:
        """Layers of each kind, in the order of `Kinds.in_order`."""
        return int(self.is_first), *self.blocks, int(self.is_last)

    @property
    def num_layers(self) -> int:
        """The number of layers, with the embedding and the head."""
        return sum(self.blocks) + self.is_first + self.is_last

    def counted_kinds(self, model: ModelConfig) -> tuple[tuple[int, Kind], ...]:
        """The kinds of the stage's layers, each beside the number of these layers."""
        return _counted(model, self.counts)

    def policies(self, model: ModelConfig) -> tuple[tuple[int, Kind, Checkpointing], ...]:
        """The kinds of the stage's layers with their checkpointing, and the number of each."""
        return _with_policies(model, self.counts, self.again, self.checkpointing)


def is_cut_by_data(model: ModelConfig, stage: StageShape) -> Any:
    """Whether `data` cuts the model width of a replica's part; an array for a stage of arrays."""
    return model.width // stage.parameter_parts % stage.data == 0


@cached(10_000)  # a search asks over and over
def _counted(model: ModelConfig, counts: tuple[int, ...]) -> tuple[tuple[int, Kind], ...]:
    pairs = zip(counts, kinds(model).in_order, strict=True)
    return tuple((count, kind) for count, kind in pairs if count)


@cached(10_000)
def _with_policies(
    model: ModelConfig, counts: tuple[int, ...], again: tuple[int, ...], policy: Checkpointing
) -> tuple[tuple[int, Kind, Checkpointing], ...]:
    pairs = zip(counts, (0, *again, 0), kinds(model).in_order, strict=True)
    both: list[tuple[int, Kind, Checkpointing]] = []
    for count, number, kind in pairs:
        both += [(number, kind, policy), (count - number, kind, "none")]
    return tuple(item for item in both if item[0])


def stage_tokens(model: ModelConfig, stage: StageShape) -> Sizes:
    """Tokens of a microbatch on each device."""
    return stage.sequences * model.context_length // stage.context
