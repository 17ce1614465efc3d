"""The numbers and bytes that layers move in device memory and between devices.

The matrix products are in `products`.

    D  model width   H  query heads   G  key-value heads   K  width of a head
    F  feed-forward width   V  vocabulary size   S  tokens in a sequence   T  tokens in all
"""

from typing import Protocol

import numpy as np

from holmesjax.config import Checkpointing, ModelConfig
from holmesjax.costs.implementation import HOLMESJAX, Implementation
from holmesjax.costs.parameters import row_numbers
from holmesjax.costs.stage_shape import DTYPE_BYTES, LOGIT_BYTES
from holmesjax.layer_specs.kind import Kind
from holmesjax.topology.machines import Numbers, Sizes


def logit_chunks(
    num_tokens: Numbers,
    vocab_size: Numbers,
    width: int,
    most_bytes: int = LOGIT_BYTES,
    asked: str = "auto",
) -> np.ndarray:
    """Chunks in which a device computes the logits of so many tokens, one after the other.

    1, all at once, keeps logits in float32 and has their gradients, (4 + c) T V bytes. A chunk of t
    tokens takes (4 + c) t V, and beside it the gradient of the weight is summed up and kept,
    (4 + c) D V: that is less only where there are more tokens than the model is wide.

    Args:
      num_tokens, vocab_size: of one device.
      width: of the model.
      most_bytes: of the float32 logits of a chunk.
      asked: `kernels.cross_entropy`: reference has all at once, and chunked at least two chunks.

    >>> int(logit_chunks(16_384, 128_256, 4096))
    16
    >>> int(logit_chunks(4096, 128_256, 4096))
    1
    """
    num_chunks = np.ceil(4.0 * num_tokens * vocab_size / most_bytes).astype(int)
    saves = (num_tokens > num_tokens / num_chunks + width) & (asked != "reference")
    return np.where(saves, num_chunks, 2 if asked == "chunked" else 1)


def key_value_numbers(kind: Kind, tensor: Sizes = 1) -> Numbers:
    """Numbers of a token's keys and values in one layer: 2 G K / tensor."""
    if (attention := kind.attention) is None:
        return 0.0
    return 2 * attention.key_heads * attention.head_width / tensor


def parts_received(kind: Kind, length: int, context: Sizes = 1) -> Numbers:
    """Parts of a sequence whose keys and values come to each device of `context` in a forward.

    A ring brings the parts of all other devices. With a window, a device receives the runs that
    precede each of its own two, as far as the window reaches (`kernels.attention.ring`).

    >>> from holmesjax.layer_specs.distinct_kinds import kinds
    >>> model = ModelConfig(num_layers=1, width=8, num_heads=2, context_length=64,
    ...                     pattern=("window_block",), window=9)
    >>> [block] = kinds(model).blocks  # runs of 8 tokens
    >>> float(parts_received(block, 64, context=4)), float(parts_received(block, 64, context=1))
    (1.0, 0.0)
    """
    others = context - 1.0
    if kind.attention is None or kind.attention.window is None:
        return others
    runs = np.ceil((kind.attention.window - 1) * 2 * context / length)
    return np.where(context > 1, np.minimum(runs, 2 * context - 1), 0.0)


def sequence_cuts(length: int, tensor: Sizes, context: Sizes = 1) -> Sizes:
    """Parts into which sequence parallelism cuts the tokens of a device between products.

    There are as many as devices share each product; 1 where the tokens do not divide.

    >>> int(sequence_cuts(64, 4)), int(sequence_cuts(64, 4, context=2)), int(sequence_cuts(6, 4))
    (4, 4, 1)
    """
    divides = length // context % tensor == 0
    if isinstance(divides, bool):  # of one stage: NumPy takes many times as long for one number
        return tensor if divides else 1
    return np.where(divides, tensor, 1)


class Cut(Protocol):
    """How a stage is cut, of which `StageShape` has more."""

    @property
    def tensor(self) -> Sizes: ...
    @property
    def context(self) -> Sizes: ...
    @property
    def sequence_parallel(self) -> Sizes: ...


def stream_cuts(
    kind: Kind, length: int, stage: Cut, implementation: Implementation = HOLMESJAX
) -> Sizes:
    """Parts into which `tensor` cuts what a layer has between its products, along sequences.

    Args:
      kind: of the layer.
      length: tokens of a sequence.
      stage: how the stage is cut.
      implementation: how layers are computed.
    """
    if implementation.sequence_parallel and kind.place == "middle":
        return stage.tensor
    if not kind.cuts_sequences:
        return 1
    cuts = sequence_cuts(length, stage.tensor, stage.context)
    asked = stage.sequence_parallel
    if isinstance(asked, int) and isinstance(cuts, int):
        return cuts if asked else 1
    return np.where(asked, cuts, 1)


def gathered_again(kind: Kind, numbers: int, width: int, is_cut: Sizes) -> Sizes:
    """How often a backward gathers an array again of which a device kept its own tokens alone.

    Those are the inputs of the first products of attention and of the feed-forward.
    """
    return 2 * is_cut * (kind.cuts_sequences and kind.place == "middle" and numbers == width)


def layer_numbers(kind: Kind, tensor: Sizes = 1, cuts: Sizes = 1) -> tuple[Numbers, Numbers]:
    """Numbers that a layer's forward moves between its products, per token: whole, and cut.

    `cuts` are those of the residual stream, from `sequence_cuts`.
    """
    return kind.moved.whole / cuts, kind.moved.cut / tensor


def looked_up_bytes(
    kind: Kind, num_tokens: Numbers, dtype: str, *, trains: bool = False
) -> Numbers:
    """Bytes of device memory that look-ups move: they read T rows and write T rows.

    With `trains`, only trained tables count: a backward moves the gradients of their rows.
    """
    return 2.0 * num_tokens * row_numbers(kind, trains=trains) * DTYPE_BYTES[dtype]


def all_reduces(kind: Kind, checkpointing: Checkpointing) -> list[tuple[int, int, int]]:
    """All-reduces over `tensor` of one layer and microbatch.

    Each entry has the numbers per token of the array, in the compute dtype, and how many such
    arrays are summed in a forward and in a backward. `full` checkpointing runs the forward of a
    Transformer layer again.

    >>> from holmesjax.layer_specs.distinct_kinds import kinds
    >>> [block] = kinds(ModelConfig(num_layers=1, width=8, num_heads=2, context_length=4)).blocks
    >>> all_reduces(block, "none"), all_reduces(block, "full")
    ([(8, 2, 2)], [(8, 2, 4)])

    Reference: Shoeybi et al., arXiv:1909.08053, section 3.
    """
    again = checkpointing == "full" and kind.place == "middle"
    return [
        (collective.numbers, collective.forward, collective.backward + again * collective.forward)
        for collective in kind.collectives
        if collective.axis == "tensor"
    ]


def boundary_bytes(model: ModelConfig, num_tokens: Numbers, dtype: str) -> Numbers:
    """Bytes of the array handed from stage to stage, and of its gradient: T D numbers.

    >>> model = ModelConfig(num_layers=1, width=8, num_heads=2, context_length=4)
    >>> boundary_bytes(model, num_tokens=4, dtype="bfloat16")
    64.0
    """
    return 1.0 * num_tokens * model.width * DTYPE_BYTES[dtype]
