"""Bytes per device of one stage, itemised. Closed form: no devices, no arrays.

The layouts are those of `sharding`: masters and moments lie cut over `data` (ZeRO-1, Rajbhandari et
al., arXiv:1910.02054), copies for compute and unreduced gradients once per data replica; all of
them cut over `fsdp` (ZeRO-3 there; Zhao et al., arXiv:2304.11277) and `context`.
"""

import numpy as np

from holmesjax import costs
from holmesjax.config import ModelConfig

# Buffers of each boundary array: one is sent or received while another is filled or read.
BUFFERS = 2

# Items that grow with the parameters; the others grow with the tokens of a microbatch.
PER_PARAMETER = ("parameters", "optimizer", "replicas", "gradients", "gathered")


def block_residual_bytes(
    model: ModelConfig,
    stage: costs.StageShape,
    implementation: costs.Implementation = costs.HOLMESJAX,
) -> float:
    """Bytes that one Transformer layer keeps per token from its forward to its backward.

    With c bytes per number of the compute dtype, and dims as in `costs`; what is in brackets is cut
    over `tensor`:

        none   4 c D + [c (2 H K + 2 G K + a F) + 4 H],   a = 2 for SwiGLU, else 1
        dots   2 c D + [the same]
        full   c D

    Other implementations keep more: masks, with what is not cut; with what is, scores in place of
    the 4 H of log-sum-exps, and the result of the activation function (a larger by 1). They may
    also cut all of it.

    These are the residuals of `jax.vjp` of `models.gpt.Block`, which the tests count: the inputs of
    norms and of matrix products, and attention's queries, keys, values, output and log-sum-exp.
    """
    width = costs.DTYPE_BYTES[stage.dtype]
    cuts = stage.tensor if implementation.sequence_parallel else 1
    if stage.checkpointing == "full":
        return width * model.width / cuts
    share = implementation.kept_products if stage.checkpointing == "dots" else 1.0
    gates = (2 if model.activation == "swiglu" else 1) + implementation.keeps_activation
    results = (model.num_heads + 2 * model.kv_heads) * model.head_width
    results += gates * model.feed_forward_width
    scores = implementation.kept_score_bytes * model.context_length * model.num_heads
    if not implementation.score_bytes:
        scores += 4 * model.num_heads
    attention = width * model.num_heads * model.head_width + scores
    operands = 4 if stage.checkpointing == "none" else 1 + share
    whole = (operands * width + implementation.kept_mask_bytes) * model.width
    return whole / cuts + (attention + share * width * results) / stage.tensor


def stage_memory_bytes(
    model: ModelConfig,
    stage: costs.StageShape,
    implementation: costs.Implementation = costs.HOLMESJAX,
) -> dict[str, float]:
    """Bytes on each device of a stage, by what they hold. Temporaries inside a layer are left out.

    With P parameters of a replica on a device of `tensor`, Q of them in the largest layer, c bytes
    per number of the compute dtype, T tokens of a microbatch on a device, and parts = fsdp *
    context:

        parameters    4 P / (parts * data)   float32 masters
        optimizer     8 P / (parts * data)   two moments in float32, or less (`costs.moment_bytes`)
        replicas      c P / parts            what the forward reads
        gradients     4 P / parts            float32, each replica's own sum of a step
        activations   in_flight * T * (residuals of all layers)
        logits        c T V / tensor * (head_in_flight + 1)    those kept, and one gradient;
                      in chunks: (4 + c) of a chunk, 4 D V / tensor, and c D V / tensor kept
        boundaries    c T D * 2 ways * BUFFERS, for each neighbour; two when interleaved
        gathered      2 c Q                  of several parts: a layer's parameters, its gradients

    A microbatch that has been through some chunks of a stage counts in `in_flight` with their share
    of its layers. Between B and W it counts in full: W needs the inputs of all products, and the
    gradients of their outputs take the place of the rest.

    `data` cuts nothing where a part of the model width is not a multiple of it.
    """
    num_parameters = costs.stage_parameters(model, stage)
    num_tokens = costs.stage_tokens(model, stage)
    width = costs.DTYPE_BYTES[stage.dtype]
    parts = stage.parameter_parts
    held = num_parameters / parts
    is_whole = model.width // parts % stage.data == 0
    shards = 1 + (stage.data - 1) * (implementation.shards_optimizer & is_whole)
    residuals = stage.num_blocks * block_residual_bytes(model, stage, implementation)
    activations = stage.in_flight * num_tokens * residuals
    if stage.is_last:  # the input and the result of the last norm
        activations += stage.head_in_flight * num_tokens * 2 * width * model.width
    num_neighbours = 2 if stage.chunks > 1 else (not stage.is_first) + (not stage.is_last)
    boundary = costs.boundary_bytes(model, num_tokens, stage.dtype)
    items = {
        "parameters": 4.0 * held / shards,
        "optimizer": 2.0 * costs.moment_bytes(model, stage) / parts / shards,
        "replicas": 1.0 * width * held,
        "gradients": 4.0 * held,
        "activations": 1.0 * activations,
        "logits": _logit_bytes(model, stage, implementation) if stage.is_last else 0.0,
        "boundaries": boundary * 2 * BUFFERS * num_neighbours,
    }
    if np.any(is_cut := parts > 1):
        items["gathered"] = is_cut * 2.0 * width * costs.largest_layer_parameters(model, stage)
    return items


def _logit_bytes(
    model: ModelConfig, stage: costs.StageShape, implementation: costs.Implementation
) -> float:
    """Of the logits and their gradients, and in chunks of the weight's gradient too."""
    num_tokens = costs.stage_tokens(model, stage)
    vocab_size = model.vocab_size / stage.tensor
    if implementation.logit_bytes:
        return implementation.logit_bytes * num_tokens * vocab_size
    width = costs.DTYPE_BYTES[stage.dtype]
    at_once = width * (stage.head_in_flight + 1) * num_tokens * vocab_size
    num_chunks = costs.logit_chunks(num_tokens, vocab_size, model.width, width)
    if not np.any(is_cut := num_chunks > 1):
        return at_once
    kept = width * stage.head_in_flight * (model.width * vocab_size + num_tokens * model.width)
    chunk = (4 + width) * num_tokens / num_chunks * vocab_size
    in_chunks = chunk + 4 * model.width * vocab_size + kept
    return at_once + is_cut * (in_chunks - at_once)
