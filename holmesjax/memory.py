"""Bytes per device of one stage, itemised. Closed form: no devices, no arrays.

The layouts are those of `sharding`: masters and moments lie cut over `data` (ZeRO-1, Rajbhandari et
al., arXiv:1910.02054), copies for compute and unreduced gradients once per data replica.
"""

from holmesjax import costs
from holmesjax.config import ModelConfig

# Buffers of each boundary array: one is sent or received while another is filled or read.
BUFFERS = 2

# Items that grow with the parameters; the others grow with the tokens of a microbatch.
PER_PARAMETER = ("parameters", "optimizer", "replicas", "gradients")


def block_residual_bytes(model: ModelConfig, stage: costs.StageShape) -> float:
    """Bytes that one Transformer layer keeps per token from its forward to its backward.

    With c bytes per number of the compute dtype, and dims as in `costs`; what is in brackets is cut
    over `tensor`:

        none   (2 c + 16) D + [c (2 H K + 2 G K + 6 F) + (9 + c) H S]
        dots   2 c D + [c (2 H K + 2 G K + a F) + 4 H S],   a = 2 for SwiGLU, else 1
        full   c D

    These are the residuals of `jax.vjp` of `models.gpt.Block`, which the tests count: norms keep
    float32, and attention keeps its S x S scores (float32 twice, once in the compute dtype, and a
    mask of one byte).
    """
    width = costs.DTYPE_BYTES[stage.dtype]
    heads = 2 * (model.num_heads + model.kv_heads) * model.head_width
    scores = model.num_heads * model.context_length
    if stage.checkpointing == "full":
        return width * model.width
    if stage.checkpointing == "dots":
        matrices = 2 if model.activation == "swiglu" else 1
        cut = width * (heads + matrices * model.feed_forward_width) + 4 * scores
        return 2 * width * model.width + cut / stage.tensor
    cut = width * (heads + 6 * model.feed_forward_width) + (9 + width) * scores
    return (2 * width + 16) * model.width + cut / stage.tensor


def stage_memory_bytes(model: ModelConfig, stage: costs.StageShape) -> dict[str, float]:
    """Bytes on each device of a stage, by what they hold. Temporaries inside a layer are left out.

    With P parameters per device of a replica, c bytes per number of the compute dtype, and T tokens
    of a microbatch on a replica:

        parameters    4 P / data    float32 masters
        optimizer     8 P / data    two float32 moments
        replicas      c P           what the forward reads
        gradients     4 P           float32, each replica's own sum until the last microbatch
        activations   in_flight * T * (residuals of all layers)
        logits        4 T V / tensor * (in_flight + 2)    kept, plus the array and its gradient
        boundaries    c T D * 2 ways * BUFFERS, for each neighbour

    `data` cuts nothing where the model width is not a multiple of it.
    """
    num_parameters = costs.stage_parameters(model, stage)
    num_tokens = stage.sequences * model.context_length
    width = costs.DTYPE_BYTES[stage.dtype]
    shards = stage.data if model.width % stage.data == 0 else 1
    residuals = stage.num_blocks * block_residual_bytes(model, stage)
    if stage.is_last:
        residuals += (width + 8) * model.width  # the last norm
    logits = 4.0 * num_tokens * model.vocab_size / stage.tensor * (stage.in_flight + 2)
    num_neighbours = (not stage.is_first) + (not stage.is_last)
    boundary = costs.boundary_bytes(model, num_tokens, stage.dtype)
    return {
        "parameters": 4.0 * num_parameters / shards,
        "optimizer": 8.0 * num_parameters / shards,
        "replicas": float(width * num_parameters),
        "gradients": 4.0 * num_parameters,
        "activations": float(stage.in_flight * num_tokens * residuals),
        "logits": logits if stage.is_last else 0.0,
        "boundaries": boundary * 2 * BUFFERS * num_neighbours,
    }
