"""Closed-form costs: numbers in, numbers out. No devices, no arrays, no state.

FLOP count a multiplication and an addition as two, of matrix products only: norms, activations and
softmax are left out, as in published model FLOP utilisations.

    D  model width   H  query heads   G  key-value heads   K  width of a head
    F  feed-forward width   V  vocabulary size   S  tokens in a sequence   T  tokens in all
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from holmesjax.config import ModelConfig
from holmesjax.topology import DeviceKind, Link

Checkpointing = Literal["none", "dots", "full"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}

# Share of a device's peak that matrix products reach. One plain factor between the 0.41 and 0.56 of
# Korthikanti et al. (arXiv:2205.05198, table 5); calibration per device and size comes later.
EFFICIENCY = 0.5

# float32 numbers that AdamW moves per parameter: reads parameter, gradient and two moments, writes
# parameter and two moments.
UPDATE_BYTES_PER_PARAMETER = 7 * 4

# float32 numbers moved per parameter to add a microbatch's gradient: reads both, writes the sum.
ACCUMULATE_BYTES_PER_PARAMETER = 3 * 4

# All-reduces over `tensor` in a Transformer layer's forward: after attention and the feed-forward.
FORWARD_ALL_REDUCES = 2


def block_parameters(model: ModelConfig, tensor: int = 1) -> int:
    """Parameters of one Transformer layer on one of `tensor` devices; both norms are on each.

        P = (2 D H K + 2 D G K + m D F) / tensor + norms,   m = 3 for SwiGLU, else 2

    GPT-2's 12 D^2 (1 + 13 / 12 D) less its 9 D biases, which our model does not have:
      >>> block_parameters(ModelConfig(
      ...     num_layers=12, width=768, num_heads=12, context_length=1024, norm="layer_norm"))
      7080960

    Reference: Narayanan et al., arXiv:2104.04473, section 5.
    """
    heads = 2 * (model.num_heads + model.kv_heads) * model.head_width
    matrices = 3 if model.activation == "swiglu" else 2
    cut = model.width * (heads + matrices * model.feed_forward_width)
    return cut // tensor + 2 * norm_parameters(model)


def norm_parameters(model: ModelConfig) -> int:
    """Scale, and bias where the norm has one."""
    return model.width * (2 if model.norm == "layer_norm" else 1)


def table_parameters(model: ModelConfig, tensor: int = 1) -> int:
    """The token table, V D / tensor: of the embedding, and of the output projection."""
    return model.vocab_size * model.width // tensor


def embed_parameters(model: ModelConfig, tensor: int = 1) -> int:
    """The token table, and the position table where positions are learned.

    >>> embed_parameters(ModelConfig(
    ...     num_layers=1, width=8, num_heads=2, context_length=4, vocab_size=16), tensor=2)
    64
    """
    positions = model.context_length * model.width if model.positions == "learned" else 0
    return table_parameters(model, tensor) + positions


def head_parameters(model: ModelConfig, tensor: int = 1) -> int:
    """The last norm, and the output projection. Tied to the token table or not, it is held.

    On the stage that also holds the embedding, a tied head has no table of its own: subtract
    `table_parameters`.
    """
    return table_parameters(model, tensor) + norm_parameters(model)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageShape:
    """What decides the costs of a stage, besides the model and the machines."""

    num_blocks: int  # Transformer layers
    is_first: bool  # holds the embedding
    is_last: bool  # holds the head
    data: int  # replicas
    tensor: int  # devices that share each matrix product
    fsdp: int = 1  # parts of each replica's parameters, and of its sequences
    sequences: int  # in a microbatch, on each part of a replica
    chunks: int  # runs of consecutive layers that it holds
    in_flight: float  # microbatches that wait for their backward: `schedule.max_in_flight`
    head_in_flight: float  # of them, those whose forward has run through the head
    dtype: str  # of the matrix products
    checkpointing: Checkpointing


def stage_parameters(model: ModelConfig, stage: StageShape) -> int:
    """Parameters of one replica on each of its devices, before `fsdp` cuts them.

    A tied head needs the token table: where the embedding is on another stage, it holds a copy.

    >>> model = ModelConfig(
    ...     num_layers=1, width=8, num_heads=2, context_length=4, vocab_size=16,
    ...     tied_embeddings=True, norm="rms_norm")
    >>> last = StageShape(num_blocks=0, is_first=False, is_last=True, data=1, tensor=1, sequences=1,
    ...                   chunks=1, in_flight=1, head_in_flight=1, dtype="float32",
    ...                   checkpointing="none")
    >>> stage_parameters(model, last) == 16 * 8 + 8
    True
    """
    num_parameters = stage.num_blocks * block_parameters(model, stage.tensor)
    if stage.is_first:
        num_parameters += embed_parameters(model, stage.tensor)
    if stage.is_last:
        num_parameters += head_parameters(model, stage.tensor)
        if stage.is_first and model.tied_embeddings:
            num_parameters -= table_parameters(model, stage.tensor)
    return num_parameters


def gathered_parameters(model: ModelConfig, stage: StageShape) -> tuple[int, int]:
    """Parameters that a device gathers over `fsdp` in a forward, and in a backward.

    A forward reads all. A backward does not read a table whose rows were looked up, unless it is
    the output projection too, nor the bias of a norm that is not computed again.

    >>> model = ModelConfig(
    ...     num_layers=1, width=8, num_heads=2, context_length=4, vocab_size=16, norm="rms_norm")
    >>> both = StageShape(num_blocks=1, is_first=True, is_last=True, data=1, tensor=1, fsdp=2,
    ...                   sequences=1, chunks=1, in_flight=1, head_in_flight=1, dtype="float32",
    ...                   checkpointing="none")
    >>> forward, backward = gathered_parameters(model, both)
    >>> forward == stage_parameters(model, both), forward - backward == 16 * 8
    (True, True)
    """
    num_parameters = stage_parameters(model, stage)
    num_norms = (2 * stage.num_blocks if stage.checkpointing == "none" else 0) + stage.is_last
    unread = num_norms * (norm_parameters(model) - model.width)
    if stage.is_first:
        unread += embed_parameters(model, stage.tensor)
        unread -= _projecting_table_parameters(model, stage)
    return num_parameters, num_parameters - unread


def reduced_numbers(model: ModelConfig, stage: StageShape) -> int:
    """Numbers that a device gives to its reductions over `fsdp` in a backward.

    The gradient of every parameter, but of looked-up rows of the token table the gradients of the
    rows, T D numbers: XLA moves those to the devices that hold the dims.
    """
    numbers = stage_parameters(model, stage)
    if stage.is_first:
        numbers -= table_parameters(model, stage.tensor)
        numbers += _projecting_table_parameters(model, stage)
        numbers += stage.sequences * model.context_length * model.width
    return numbers


def _projecting_table_parameters(model: ModelConfig, stage: StageShape) -> int:
    """The token table where the stage both looks up its rows and projects with it."""
    both = stage.is_first and stage.is_last and model.tied_embeddings
    return table_parameters(model, stage.tensor) if both else 0


def largest_layer_parameters(model: ModelConfig, stage: StageShape) -> int:
    """Parameters of the stage's largest layer on each device of `tensor`."""
    layers = [block_parameters(model, stage.tensor) if stage.num_blocks else 0]
    layers += [embed_parameters(model, stage.tensor)] if stage.is_first else []
    layers += [head_parameters(model, stage.tensor)] if stage.is_last else []
    return max(layers)


def block_weight_flop(model: ModelConfig, num_tokens: float) -> float:
    """FLOP of the products of one Transformer layer's activations with its weights.

        2 T (2 D H K + 2 D G K + m D F),   m = 3 for SwiGLU, else 2

    As many again make the gradients of the weights, and as many those of the activations.
    """
    heads = 2 * (model.num_heads + model.kv_heads) * model.head_width
    matrices = 3 if model.activation == "swiglu" else 2
    return 2.0 * num_tokens * model.width * (heads + matrices * model.feed_forward_width)


def block_forward_flop(model: ModelConfig, num_tokens: float) -> float:
    """FLOP of one Transformer layer's forward, over all devices that share it.

        2 T (2 D H K + 2 D G K + m D F) + 4 T S H K,   m = 3 for SwiGLU, else 2

    The last term is attention over all S x S pairs: causality does not halve it, because published
    utilisations do not. An attention that skips masked pairs takes less time than this predicts.

    A layer of 8 h^2 + 16 h^2 + 4 s h FLOP a token, for width h and s tokens:
      >>> model = ModelConfig(num_layers=1, width=64, num_heads=4, context_length=32)
      >>> block_forward_flop(model, num_tokens=1) == 24 * 64**2 + 4 * 32 * 64
      True

    Reference: Narayanan et al., arXiv:2104.04473, appendix.
    """
    pairs = 2 * model.context_length * model.num_heads * model.head_width
    return block_weight_flop(model, num_tokens) + 2.0 * num_tokens * pairs


def head_forward_flop(model: ModelConfig, num_tokens: float) -> float:
    """FLOP of the output projection's forward: 2 T D V.

    >>> head_forward_flop(ModelConfig(
    ...     num_layers=1, width=8, num_heads=2, context_length=4, vocab_size=16), num_tokens=3)
    768.0
    """
    return 2.0 * num_tokens * model.width * model.vocab_size


def backward_flop(forward_flop: float, checkpointing: Checkpointing) -> float:
    """FLOP of a backward: two products for each of the forward's, plus what is computed again.

    `full` checkpointing runs the whole forward again; `dots` keeps the matrix products. Attention
    scores that a kernel computes again to save memory are not counted.

    >>> [backward_flop(1.0, policy) for policy in ("none", "dots", "full")]
    [2.0, 2.0, 3.0]

    Reference: Korthikanti et al., arXiv:2205.05198, appendix A.
    """
    return (3.0 if checkpointing == "full" else 2.0) * forward_flop


def embed_bytes(model: ModelConfig, num_tokens: float, dtype: str) -> float:
    """Bytes of device memory that an embedding's forward moves: reads T rows, writes T rows."""
    return 2.0 * num_tokens * model.width * DTYPE_BYTES[dtype]


def compute_time_s(flop: float, device: DeviceKind, dtype: str) -> float:
    """Seconds of matrix products on one device: flop / (peak * EFFICIENCY)."""
    return flop / (device.peak_flop_per_s[dtype] * EFFICIENCY)


def memory_time_s(num_bytes: float, device: DeviceKind) -> float:
    """Seconds to move bytes from or to one device's memory: bytes / bandwidth."""
    return num_bytes / device.memory_bandwidth_bytes_per_s


def ring_reduce_scatter_time_s(num_bytes: float, num_ranks: int, link: Link | None) -> float:
    """Predicted seconds of a ring reduce-scatter over equal links; 0.0 for one rank.

    Each of the n - 1 steps sends one n-th of the array over every link at once:

        t = (n - 1) * (latency + num_bytes / (n * bandwidth))

    Args:
      num_bytes: size of the array on each rank before the reduction, in bytes.
      num_ranks: ranks in the ring, n >= 1.
      link: the slowest link of the ring; one rank needs none.

    Example, 1 GB over 8 ranks at 25 GB/s:
      >>> link = Link(fabric="infiniband", bandwidth_bytes_per_s=25e9, latency_s=0.0)
      >>> round(ring_reduce_scatter_time_s(1e9, 8, link), 4)
      0.035

    Reference: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms ...", JPDC 69(2), 2009.
    """
    if num_ranks == 1:
        return 0.0
    assert link is not None, f"a ring of {num_ranks} ranks needs a link"
    return (num_ranks - 1) * link.time_s(num_bytes / num_ranks)


def ring_all_gather_time_s(num_bytes: float, num_ranks: int, link: Link | None) -> float:
    """Predicted seconds of a ring all-gather: a reduce-scatter backwards, without the sums.

    `num_bytes` is the size of the gathered array; the rest is as in `ring_reduce_scatter_time_s`.
    """
    return ring_reduce_scatter_time_s(num_bytes, num_ranks, link)


def ring_all_reduce_time_s(num_bytes: float, num_ranks: int, link: Link | None) -> float:
    """Predicted seconds of a ring all-reduce: a reduce-scatter, then an all-gather.

        t = 2 (n - 1) * (latency + num_bytes / (n * bandwidth))

    Example, 1 GB over 8 ranks at 25 GB/s:
      >>> link = Link(fabric="infiniband", bandwidth_bytes_per_s=25e9, latency_s=0.0)
      >>> round(ring_all_reduce_time_s(1e9, 8, link), 4)
      0.07
    """
    return 2 * ring_reduce_scatter_time_s(num_bytes, num_ranks, link)


def block_all_reduces(checkpointing: Checkpointing) -> int:
    """All-reduces over `tensor` per Transformer layer and microbatch, forward and backward.

    One after attention and one after the feed-forward, in each pass; `full` checkpointing runs the
    forward's again. Each sums an array of T D numbers of the compute dtype.

    >>> block_all_reduces("none"), block_all_reduces("full")
    (4, 6)

    Reference: Shoeybi et al., arXiv:1909.08053, section 3.
    """
    return (3 if checkpointing == "full" else 2) * FORWARD_ALL_REDUCES


def boundary_bytes(model: ModelConfig, num_tokens: float, dtype: str) -> float:
    """Bytes of the array handed from stage to stage, and of its gradient: T D numbers.

    >>> model = ModelConfig(num_layers=1, width=8, num_heads=2, context_length=4)
    >>> boundary_bytes(model, num_tokens=4, dtype="bfloat16")
    64.0
    """
    return float(num_tokens * model.width * DTYPE_BYTES[dtype])


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Predicted seconds of one stage, without its boundaries."""

    forward_s: float  # of a microbatch: compute
    backward_s: float
    weight_s: float  # of the backward: the gradients of the weights, a W where it is split
    forward_tensor_s: float  # of a microbatch: all-reduces over `tensor`
    backward_tensor_s: float
    forward_fsdp_s: float  # of a microbatch: parameters and gradients over `fsdp`
    backward_fsdp_s: float
    reduce_s: float  # of a step: gradients over `data`
    gather_s: float  # of a step: parameters over `data`
    update_s: float  # of a step: optimizer

    @property
    def whole_forward_s(self) -> float:
        return self.forward_s + self.forward_tensor_s + self.forward_fsdp_s

    @property
    def whole_backward_s(self) -> float:
        return self.backward_s + self.backward_tensor_s + self.backward_fsdp_s

    @property
    def microbatch_s(self) -> float:
        return self.whole_forward_s + self.whole_backward_s

    @property
    def once_s(self) -> float:
        """What comes once in a step, however many microbatches it has."""
        return self.reduce_s + self.gather_s + self.update_s


def stage_times(
    model: ModelConfig,
    stage: StageShape,
    devices: Sequence[DeviceKind],
    data_link: Link | None,
    tensor_link: Link | None,
    fsdp_link: Link | None = None,
) -> StageTimes:
    """Predicted seconds of one stage; its slowest kind of device sets the pace.

    Matrix products take the time of their FLOP. The embedding's rows, adding up gradients and the
    optimizer take the time of their bytes. Collectives are rings over the slowest link of their
    axis, and overlap with nothing. All terms grow linearly with the number of Transformer layers.

    Over `fsdp` (ZeRO-3, Rajbhandari et al., arXiv:1910.02054; Zhao et al., arXiv:2304.11277), each
    microbatch gathers the parameters of every layer in the forward and again in the backward, which
    also reduce-scatters their gradients: three times c P bytes, in the compute dtype.

    Of a backward, `weight_s` is one product for each weight, the embedding's rows and the sums of
    gradients. Attention scores have no weight: both products of their backward belong to the rest,
    like its all-reduces.

    Args:
      model, stage: what is computed.
      devices: the kinds of device of the stage.
      data_link, tensor_link, fsdp_link: what each ring of the axis has of its slowest link; None
        for size 1.
    """
    num_tokens = stage.sequences * model.context_length
    num_parameters = stage_parameters(model, stage)
    blocks = stage.num_blocks * block_forward_flop(model, num_tokens) / stage.tensor
    head = stage.is_last * head_forward_flop(model, num_tokens) / stage.tensor
    backward = backward_flop(blocks, stage.checkpointing) + backward_flop(head, "none")
    weights = stage.num_blocks * block_weight_flop(model, num_tokens) / stage.tensor + head
    rows = stage.is_first * embed_bytes(model, num_tokens, stage.dtype)
    held = num_parameters / stage.fsdp
    accumulated = ACCUMULATE_BYTES_PER_PARAMETER * held
    updated = UPDATE_BYTES_PER_PARAMETER * held / stage.data
    compute_s = lambda flop: max(compute_time_s(flop, device, stage.dtype) for device in devices)
    memory_s = lambda num_bytes: max(memory_time_s(num_bytes, device) for device in devices)
    summed = boundary_bytes(model, num_tokens, stage.dtype)
    all_reduce_s = ring_all_reduce_time_s(summed, stage.tensor, tensor_link)
    num_backward = block_all_reduces(stage.checkpointing) - FORWARD_ALL_REDUCES
    gathered = DTYPE_BYTES[stage.dtype] * held
    # A ring's time is linear in its bytes: one per layer, each of the mean size.
    num_layers = stage.num_blocks + stage.is_first + stage.is_last
    layer_bytes = lambda numbers: DTYPE_BYTES[stage.dtype] * numbers / num_layers
    fsdp_s = lambda numbers: (
        num_layers * ring_all_gather_time_s(layer_bytes(numbers), stage.fsdp, fsdp_link)
    )
    forward_gathers, backward_gathers = gathered_parameters(model, stage)
    return StageTimes(
        forward_s=compute_s(blocks + head) + memory_s(rows),
        backward_s=compute_s(backward) + memory_s(2 * rows + accumulated),
        weight_s=compute_s(weights) + memory_s(2 * rows + accumulated),
        forward_tensor_s=(FORWARD_ALL_REDUCES * stage.num_blocks + stage.is_first) * all_reduce_s,
        backward_tensor_s=(num_backward * stage.num_blocks + stage.is_last) * all_reduce_s,
        forward_fsdp_s=fsdp_s(forward_gathers),
        backward_fsdp_s=fsdp_s(backward_gathers) + fsdp_s(reduced_numbers(model, stage)),
        reduce_s=ring_reduce_scatter_time_s(4 * held, stage.data, data_link),
        gather_s=ring_all_gather_time_s(gathered, stage.data, data_link),
        update_s=memory_s(updated),
    )
