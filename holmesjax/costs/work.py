"""The work of a stage in closed form: parameters, matrix products, bytes, but no seconds.

FLOP count a multiplication and an addition as two, of matrix products only: norms, activations and
softmax are left out, as in published model FLOP utilisations.

    D  model width   H  query heads   G  key-value heads   K  width of a head
    F  feed-forward width   V  vocabulary size   S  tokens in a sequence   T  tokens in all
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from holmesjax.config import ModelConfig, Moments
from holmesjax.topology.calibration import Product, flop

Checkpointing = Literal["none", "dots", "full"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}

# Bytes of a number in each of AdamW's two moments; int8 has a float32 scale for 64 numbers.
MOMENT_BYTES: dict[Moments, float] = {"float32": 4, "bfloat16": 2, "int8": 1 + 4 / 64}
QUANTIZED = 64  # int8 holds matrices whose last dim is a multiple of this, others stay float32

# Bytes of float32 logits that a device computes at a time: more tokens are cut into chunks.
MAX_LOGIT_BYTES = 2**29

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


def logit_chunks(num_tokens: float, vocab_size: float, width: int) -> Any:
    """Chunks in which a device computes the logits of so many tokens, one after the other.

    1, all at once, keeps logits in float32 and has their gradients, (4 + c) T V bytes. A chunk of t
    tokens takes (4 + c) t V, and beside it the gradient of the weight is summed up and kept,
    (4 + c) D V: that is less only where there are more tokens than the model is wide.

    >>> int(logit_chunks(16_384, 128_256, 4096))
    16
    >>> int(logit_chunks(4096, 128_256, 4096))
    1
    """
    num_chunks = np.ceil(4.0 * num_tokens * vocab_size / MAX_LOGIT_BYTES).astype(int)
    return np.where(num_tokens > num_tokens / num_chunks + width, num_chunks, 1)[()]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageShape:
    """The shape of a stage, which decides its costs with the model and the machines.

    `data`, `tensor`, `fsdp`, `context` and `sequences` may be arrays: results are then arrays, too.
    """

    num_blocks: int  # Transformer layers
    is_first: bool  # holds the embedding
    is_last: bool  # holds the head
    data: int  # replicas
    tensor: int  # devices that share each matrix product
    fsdp: int = 1  # parts of each replica's parameters, and of its sequences
    context: int = 1  # parts of each sequence; each part of the parameters has as many
    sequences: int  # in a microbatch, of which a device has some part each
    chunks: int  # runs of consecutive layers that it holds
    in_flight: float  # microbatches that wait: `pipeline_schedules.max_in_flight`
    head_in_flight: float  # of them, those whose forward has run through the head
    dtype: str  # of the matrix products
    checkpointing: Checkpointing
    moments: Moments = "float32"

    @property
    def parameter_parts(self) -> int:
        """Parts of a replica's parameters, besides those of `tensor`."""
        return self.fsdp * self.context


def stage_tokens(model: ModelConfig, stage: StageShape) -> int:
    """Tokens of a microbatch on each device."""
    return stage.sequences * model.context_length // stage.context


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


def moment_bytes(model: ModelConfig, stage: StageShape) -> float:
    """Bytes of one of the two moments of `stage_parameters`, before `fsdp` and `data` cut them."""
    own = MOMENT_BYTES[stage.moments]
    num_bytes = own * stage_parameters(model, stage)
    if stage.moments != "int8":
        return num_bytes
    num_wide = norm_parameters(model) * (2 * stage.num_blocks + stage.is_last)
    num_wide += sum(count for last, count in _matrices(model, stage) if last % QUANTIZED)
    return num_bytes + (MOMENT_BYTES["float32"] - own) * num_wide


def _matrices(model: ModelConfig, stage: StageShape) -> list[tuple[int, int]]:
    """The last dims of a stage's matrices, and how many numbers: those of `models.gpt`."""
    d, k, f = model.width, model.head_width, model.feed_forward_width
    gates = 2 if model.activation == "swiglu" else 1
    table = table_parameters(model, stage.tensor)
    numbers = [
        (k, stage.num_blocks * d * (model.num_heads + 2 * model.kv_heads) * k // stage.tensor),
        (d, stage.num_blocks * d * (model.num_heads * k + f) // stage.tensor),
        (f, stage.num_blocks * d * gates * f // stage.tensor),
        (d, stage.is_first * embed_parameters(model, stage.tensor)),
    ]
    if stage.is_last and not model.tied_embeddings:
        numbers.append((model.vocab_size, table))
    elif stage.is_last and not stage.is_first:
        numbers.append((d, table))
    return numbers


def update_bytes(num_parameters: float, one_moment: float) -> float:
    """Bytes that AdamW moves: parameters and both moments, read and written; gradients, read.

    Args:
      one_moment: bytes of one of the two.

    >>> update_bytes(1, MOMENT_BYTES["float32"]), update_bytes(1, MOMENT_BYTES["int8"])
    (28, 16.25)
    """
    return 3 * 4 * num_parameters + 4 * one_moment


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
        numbers += stage_tokens(model, stage) * model.width
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


def block_products(model: ModelConfig, num_tokens: float, tensor: int = 1) -> list[Product]:
    """The products of one Transformer layer's activations with its weights, on each device.

    Of T tokens, in a forward; `tensor` cuts the dims in brackets:

        [T, D] [D, (H K + 2 G K)]      [T, (H K)] [(H K), D]
        [T, D] [D, (m F)]              [T, (F)] [(F), D],     m = 2 for SwiGLU, else 1
    """
    heads = model.num_heads * model.head_width / tensor
    groups = model.kv_heads * model.head_width / tensor
    inner = model.feed_forward_width / tensor
    gates = 2 if model.activation == "swiglu" else 1
    return [
        Product(num_tokens, heads + 2 * groups, model.width),
        Product(num_tokens, model.width, heads),
        Product(num_tokens, gates * inner, model.width),
        Product(num_tokens, model.width, inner),
    ]


def attention_products(
    model: ModelConfig, num_tokens: float, tensor: int = 1, context: int = 1
) -> list[Product]:
    """Scores and weighted values of one Transformer layer's forward, over all S x S pairs.

    A device's tokens meet one part of their sequences after the other, of S / context tokens.
    """
    s, k = model.context_length // context, model.head_width
    times = num_tokens / s * context * model.num_heads / tensor
    return [Product(s, s, k, times), Product(s, k, s, times)]


def key_value_numbers(model: ModelConfig, tensor: int = 1) -> float:
    """Numbers of a token's keys and values in one Transformer layer: 2 G K / tensor."""
    return 2 * model.kv_heads * model.head_width / tensor


def head_product(model: ModelConfig, num_tokens: float, tensor: int = 1) -> Product:
    """The output projection: [T, D] [D, V]."""
    return Product(num_tokens, model.vocab_size / tensor, model.width)


def block_weight_flop(model: ModelConfig, num_tokens: float) -> float:
    """FLOP of the products of one Transformer layer's activations with its weights.

        2 T (2 D H K + 2 D G K + m D F),   m = 3 for SwiGLU, else 2

    As many again make the gradients of the weights, and as many those of the activations.
    """
    return flop(block_products(model, num_tokens))


def block_forward_flop(model: ModelConfig, num_tokens: float) -> float:
    """FLOP of one Transformer layer's forward, over all devices that share it.

        2 T (2 D H K + 2 D G K + m D F) + 4 T S H K,   m = 3 for SwiGLU, else 2

    The last term is attention over all S x S pairs: causality does not halve it, because published
    utilisations do not.

    A layer of 8 h^2 + 16 h^2 + 4 s h FLOP a token, for width h and s tokens:
      >>> model = ModelConfig(num_layers=1, width=64, num_heads=4, context_length=32)
      >>> block_forward_flop(model, num_tokens=1) == 24 * 64**2 + 4 * 32 * 64
      True

    Reference: Narayanan et al., arXiv:2104.04473, appendix.
    """
    return block_weight_flop(model, num_tokens) + flop(attention_products(model, num_tokens))


def head_forward_flop(model: ModelConfig, num_tokens: float) -> float:
    """FLOP of the output projection's forward: 2 T D V.

    >>> head_forward_flop(ModelConfig(
    ...     num_layers=1, width=8, num_heads=2, context_length=4, vocab_size=16), num_tokens=3)
    768.0
    """
    return head_product(model, num_tokens).flop


def train_flop(model: ModelConfig, num_tokens: float) -> float:
    """Model FLOP of training on T tokens, over all devices: a forward and two backwards' products.

    Recomputation that saves memory does not count: utilisation is a share of this number.

        3 (L (2 T (2 D H K + 2 D G K + m D F) + 4 T S H K) + 2 T D V),   m = 3 for SwiGLU, else 2

    GPT-3 175B in Megatron-LM, its table 1: 96 T l h^2 (1 + s / 6h + V / 16lh) with activations
    computed again, that is 72 T l h^2 (1 + s / 6h + V / 12lh) without:
      >>> gpt = ModelConfig(num_layers=96, width=12288, num_heads=96, context_length=2048,
      ...                   vocab_size=51200)
      >>> l, h, s, v = 96, 12288, 2048, 51200
      >>> published = 72 * l * h**2 * (1 + s / (6 * h) + v / (12 * l * h))
      >>> round(train_flop(gpt, 1) / published, 9)
      1.0

    Reference: Narayanan et al., arXiv:2104.04473, appendix.
    """
    layers = model.num_layers * block_forward_flop(model, num_tokens)
    return 3.0 * (layers + head_forward_flop(model, num_tokens))


def block_numbers(model: ModelConfig, tensor: int = 1) -> tuple[float, float]:
    """Numbers that a layer's forward moves between its products, per token: whole, and cut.

    Whole, on every device of `tensor`, are both norms, read twice and written, and both additions
    to the residual stream, 12 D. Cut over `tensor` are rotations of queries and keys, what
    attention reads and writes, and the activation function, which reads and writes F, or reads
    2 F and writes F for SwiGLU:

        (2 (H + G) K + (2 H + 2 G) K + a F) / tensor,   a = 3 for SwiGLU, else 2
    """
    heads = (model.num_heads + model.kv_heads) * model.head_width
    inner = model.feed_forward_width * (3 if model.activation == "swiglu" else 2)
    return 12.0 * model.width, (4 * heads + inner) / tensor


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
    return 1.0 * num_tokens * model.width * DTYPE_BYTES[dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class Implementation:
    """The details in which training systems differ; the defaults are those of HolmesJAX.

    Others are for predicting what has been published of them.
    """

    # Share of the pairs of tokens whose scores are computed: queries go in 8 blocks, each without
    # the keys after its end.
    attention_pairs: float = 0.5625
    attention_backward: float = 2.5  # its products, to the two of the forward: scores come again
    recomputes_attention: bool = False  # also where nothing else is computed again
    score_bytes: float = 0.0  # moved per pair and query head in a forward; 0: they stay on the chip
    sequence_parallel: bool = False  # whether `tensor` cuts the residual stream, too
    layer_call_s: float = 0.0  # of the host, for a layer's forward; a backward takes it twice
    gradient_bytes: float = 4.0  # of each number that is summed over `data` or `fsdp`
    overlaps: bool = True  # collectives over `data` with the last backward and the first forward
    accumulate_bytes: float = 12.0  # moved per parameter to add a microbatch's float32 gradient
    shards_optimizer: bool = True  # over `data`: ZeRO-1
    # Kept by a layer for its backward besides the operands of its products, for each token.
    kept_score_bytes: float = 0.0  # per key and query head
    kept_mask_bytes: float = 0.0  # per number of the residual stream: where dropout hit
    kept_products: float = 1.0  # share of products whose results `dots` keeps
    keeps_activation: bool = False  # the result of the activation function beside its operand
    # Bytes of each logit in the backward, with none kept before; None: as `memory` says.
    logit_bytes: float | None = None

    def pairs(self, context: Any) -> Any:
        """Share of the pairs that are computed where `context` devices share a sequence.

        Each meets its own keys, and half as many pairs with those of every other.

        >>> HOLMESJAX.pairs(1), HOLMESJAX.pairs(4)
        (0.5625, 0.515625)
        """
        return (self.attention_pairs + (context - 1) / 2) / context


HOLMESJAX = Implementation()
