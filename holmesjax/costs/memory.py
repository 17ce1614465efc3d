"""Bytes per device of one stage, itemised. Closed form: no devices, no arrays.

The layouts are those of `sharding`: masters and moments lie cut over `data` (ZeRO-1, Rajbhandari et
al., arXiv:1910.02054), copies for compute and unreduced gradients once per data replica; all of
them cut over `fsdp` (ZeRO-3 there; Zhao et al., arXiv:2304.11277) and `context`.
"""

import functools
from collections.abc import Mapping

import numpy as np

from holmesjax.config import Checkpointing, ModelConfig
from holmesjax.costs import work
from holmesjax.costs.expert_exchange import sent_rows
from holmesjax.costs.implementation import HOLMESJAX, Implementation
from holmesjax.costs.optimizer_state import Matrix, hidden_matrices, kept_bytes
from holmesjax.costs.parameters import (
    held_parameters,
    layer_parameters,
    stage_extents,
    stage_unsent,
)
from holmesjax.costs.stage_shape import (
    DTYPE_BYTES,
    StageShape,
    is_cut_by_data,
    stage_tokens,
)
from holmesjax.layer_specs.distinct_kinds import kinds
from holmesjax.layer_specs.kind import Kind
from holmesjax.topology.machines import Numbers

# Buffers of each boundary array: one is sent or received while another is filled or read.
BUFFERS = 2

# Items that grow with the parameters; the others grow with the tokens of a microbatch.
PER_PARAMETER = (
    "parameters",
    "optimizer",
    "replicas",
    "gradients",
    "gathered",
    "waiting",
    "reduction",
    "orthogonalized",
)


def residual_bytes(
    model: ModelConfig,
    kind: Kind,
    stage: StageShape,
    implementation: Implementation = HOLMESJAX,
    checkpointing: Checkpointing | None = None,
) -> Numbers:
    """Bytes that one layer keeps per token from its forward to its backward.

    A Transformer layer keeps these, with c bytes per number of the compute dtype, and dims as in
    `work`; what is in brackets is cut over `tensor`:

        none   4 c D + [c (2 H K + 2 G K + a F) + 4 H],   a = 2 for SwiGLU, else 1
        dots   2 c D + [the same]
        full   c D

    With products in fp8, 2 D of the 4 D of `none` have a byte each. Other implementations keep
    more. Masks add to the part that is not cut. Scores replace the 4 H of log-sum-exps, and the
    result of the activation function makes a larger by 1; both are cut. They may also cut all of
    it.

    These are the residuals of `jax.vjp`, which the tests count: the inputs of norms and of matrix
    products, and attention's queries, keys, values, output and log-sum-exp. The ends of the model
    are never computed again.

    Args:
      model, kind: the layer.
      stage: how the layer is cut, and its dtype.
      implementation: how the layer is computed.
      checkpointing: of the layer; None: that of the stage. The ends of the model have none.
    """
    width = DTYPE_BYTES[stage.dtype]
    kept, attention = kind.kept, kind.attention
    is_middle = kind.place == "middle"
    policy = (checkpointing or stage.checkpointing) if is_middle else "none"
    cuts = work.stream_cuts(kind, model.context_length, stage, implementation)
    if policy == "full":
        return width * (kept.input.whole / cuts + kept.input.cut / stage.tensor)
    share = implementation.kept_products if policy == "dots" else 1.0
    whole = kept.input.whole + share * kept.products.whole
    results: Numbers = kept.products.cut + implementation.keeps_activation * kept.activation.cut
    if kind.exchange is not None:
        results = results - (np.asarray(stage.expert) > 1) * kind.exchange.kept.cut
    cut = kept.input.cut + share * results
    if policy == "dots":
        whole, cut = whole + kept.summed.whole, cut + kept.summed.cut
    gathered = 0.0  # kept whole though the stream is cut
    if policy == "none":
        # A code has a byte in the place of `width`; codes are made of what is gathered, and the
        # head keeps what it reads.
        in_codes = 1.0 - 1.0 / width
        whole += kept.between.whole - kept.codes.whole
        gathered = kept.codes.whole / width
        if not is_middle:
            whole, gathered = whole - kept.between.whole, kept.between.whole
        cut += kept.between.cut - in_codes * kept.codes.cut
    of_attention = 0.0
    if attention is not None:
        scores = implementation.kept_score_bytes * model.context_length * attention.heads
        if not implementation.score_bytes:
            scores += 4 * attention.heads
        of_attention = width * attention.heads * attention.head_width + scores
    masks = implementation.kept_mask_bytes * kept.input.whole * is_middle
    of_stream = (width * whole + masks) / cuts + width * gathered
    return of_stream + (of_attention + width * cut) / stage.tensor


def stage_memory_bytes(
    model: ModelConfig,
    stage: StageShape,
    implementation: Implementation = HOLMESJAX,
) -> dict[str, Numbers]:
    """Bytes on each device of a stage, by what they hold, when it holds most.

    With P parameters of a replica on a device of `tensor`, c bytes per number of the compute dtype,
    T tokens of a microbatch on a device, and parts = fsdp * context:

        parameters    4 P / (parts * data)   float32 masters; 2 P where they are bfloat16
        optimizer     8 P / (parts * data)   for AdamW in float32; else `kept_bytes`
        replicas      c P / parts            what the forward reads
        gradients     4 P / parts            float32, each replica's own sum of a step; of a whole
                      step in one program, as far as there is no room where activations were
        activations   in_flight * T * (residuals of all layers)
        logits        4 T V / tensor * head_in_flight    those kept; c D (T + V / tensor) in chunks,
                      or of several parts D (c T + 4 V / (tensor * parts))
        temporaries   of a layer's or the head's backward: `_temporary_bytes`, `_logit_bytes`
        boundaries    c T D * 2 ways * BUFFERS, for each neighbour; two when interleaved
        gathered      of several parts: parameters and whole gradients of a layer's backward, beside
                      its temporaries: `_gathered_bytes`
        waiting       the gradients of experts that devices share, from a B to its W
        reduction     4 P / parts * (1 + 1 / data)    of several replicas: gradients, copied to be
                      sent and summed, as far as there is no room yet where activations were,
                      temporaries of later stages, and replicas of a whole step in one program
        orthogonalized    of Muon's update: momenta of hidden matrices as they are cut, dealt out
                      and coming back, 12 bytes each, and 16 of one whole matrix, as far as there
                      is no room where activations were

    A microbatch that has been through some chunks of a stage counts in `in_flight` with their share
    of its layers. Between B and W it counts in full: W needs the inputs of all products, and the
    gradients of their outputs take the place of the rest.

    `data` cuts nothing where a part of the model width is not a multiple of it.
    """
    num_tokens = stage_tokens(model, stage)
    width = DTYPE_BYTES[stage.dtype]
    parts = stage.parameter_parts
    held, trained = held_parameters(model, stage)
    is_cut = is_cut_by_data(model, stage)
    shards = 1 + (stage.data - 1) * (implementation.shards_optimizer & is_cut)
    residuals: dict[str, Numbers] = {"middle": 0.0, "last": 0.0}
    for count, kind, policy in stage.policies(model):
        place = "middle" if kind.place == "first" else kind.place
        residuals[place] += count * residual_bytes(model, kind, stage, implementation, policy)
    activations = stage.in_flight * num_tokens * residuals["middle"]
    activations += stage.head_in_flight * num_tokens * residuals["last"]
    num_neighbours = 2 if stage.chunks > 1 else (not stage.is_first) + (not stage.is_last)
    num_neighbours *= not stage.is_whole_step
    boundary = work.boundary_bytes(model, num_tokens, stage.dtype)
    items = {
        "parameters": 1.0 * DTYPE_BYTES[stage.param_dtype] * trained / shards,
        "optimizer": 1.0 * kept_bytes(model, stage, shards),
        "replicas": 1.0 * width * held,
        "gradients": 4.0 * trained,
        "activations": 1.0 * activations,
        "logits": 0.0,
        "temporaries": _neediest_bytes(model, stage, implementation),
        "boundaries": boundary * 2 * BUFFERS * num_neighbours,
    }
    if stage.is_last:
        items["logits"], in_head = _logit_bytes(model, stage, implementation)
        items["temporaries"] = np.maximum(items["temporaries"], in_head)
    freed = items["activations"] + items["logits"]  # by the end of the last backward
    if stage.is_whole_step:
        freed, items["gradients"] = _left(freed, items["gradients"])
    if np.any(is_in_parts := parts > 1):
        needed = _gathered_bytes(model, stage, implementation, items["logits"])
        items["gathered"] = is_in_parts * np.maximum(0.0, needed - items["temporaries"])
    if np.any(stage.waiting) and np.any(stage.expert > 1):
        items["waiting"] = _waiting_bytes(model, stage)
    if np.any(is_summed := stage.data > 1):
        needed = 4.0 * trained * (1 + 1 / shards)
        room = _room_of_reduction(stage, items, freed)
        items["reduction"] = is_summed * np.maximum(0.0, needed - room)
    if matrices := hidden_matrices(model, stage):
        needed = _orthogonalizing_bytes(matrices, stage.parameter_parts * stage.tensor * shards)
        items["orthogonalized"] = np.maximum(0.0, needed - freed)
    return items


def _waiting_bytes(model: ModelConfig, stage: StageShape) -> Numbers:
    """Bytes of the gradients of experts that devices share: a B makes them whole, in float32."""
    own = stage_extents(model, stage.counts).trained_experts.in_parts(stage.tensor)
    return (np.asarray(stage.expert) > 1) * stage.waiting * 4.0 * own / stage.expert


def _room_of_reduction(stage: StageShape, items: Mapping[str, Numbers], freed: Numbers) -> Numbers:
    """Bytes of other items that are gone, of those `freed` in all, when gradients are reduced.

    The first stage reduces in its last backward: before that, activations are still there. A stage
    alone does it after a loop over microbatches, and reads no replicas then. Later stages do it in
    a program of its own, which no backward's temporaries are beside. A divided backward reduces in
    its last W.
    """
    is_loop = stage.is_alone and not stage.is_whole_step
    share = (stage.in_flight - 1) / stage.in_flight if stage.is_first and not is_loop else 1.0
    room = np.minimum(share * items["activations"] + items["logits"], freed)
    is_apart = (not stage.is_first) & (np.asarray(stage.waiting) == 0)
    of_backward = items["temporaries"] + items.get("gathered", 0.0)
    return room + is_loop * items["replicas"] + is_apart * of_backward


def _left(room: Numbers, needed: Numbers) -> tuple[Numbers, Numbers]:
    """The rest of some room, and the part of what is needed that does not fit into it."""
    return np.maximum(0.0, room - needed), np.maximum(0.0, needed - room)


def _orthogonalizing_bytes(matrices: Mapping[Matrix, int], num_devices: Numbers) -> Numbers:
    """Bytes on each device that an update of Muon needs for matrices and their numbers."""
    dealt = [np.ceil(n / num_devices) * matrix.size for matrix, n in matrices.items()]
    return 12.0 * sum(dealt) + 16.0 * max(matrix.size for matrix in matrices)


def _neediest_bytes(
    model: ModelConfig, stage: StageShape, implementation: Implementation
) -> Numbers:
    """Temporary bytes of the layer whose backward needs most, with its gradients not yet added."""
    sizes = _kind_parameters(model, stage)
    needs = [
        _temporary_bytes(model, kind, stage, implementation, policy)
        + _new_gradient_bytes(model, kind, stage, sizes[kind])
        for _, kind, policy in stage.policies(model)
    ]
    return functools.reduce(np.maximum, needs)


def _kind_parameters(model: ModelConfig, stage: StageShape) -> dict[Kind, Numbers]:
    """`layer_parameters` of each kind of the stage's layers."""
    own = [kind for _, kind in stage.counted_kinds(model)]
    return dict(zip(own, layer_parameters(model, stage), strict=True))


def _temporary_bytes(
    model: ModelConfig,
    kind: Kind,
    stage: StageShape,
    implementation: Implementation,
    policy: Checkpointing,
) -> Numbers:
    """Temporary bytes of a layer's backward with its checkpointing, but for our own head's logits.

    It needs what is computed again, the result of the activation function and the gradients of that
    and of its arguments, and some arrays of the residual stream, c T (a F / tensor + n D) with a =
    2, or 3 for SwiGLU, n = 4, or 8 with `tensor`. With sequences cut between products, what is
    gathered takes as much as what was whole. It is what XLA allots on a GPU
    (`benchmarks.memory_compiled`); on a CPU it allots more.
    """
    width = DTYPE_BYTES[stage.dtype]
    twice = 1 + (stage.tensor > 1)
    whole: Numbers = kind.needed.whole
    cut: Numbers = kind.needed.cut
    if kind.exchange is not None:
        shares = np.asarray(stage.expert) > 1
        needed = kind.exchange.needed
        assert model.experts is not None, "only experts are shared"
        rows = sent_rows(model.experts, stage.expert, is_placed=stage.places_experts)
        whole = whole + shares * (needed.whole + needed.row * rows)
        cut = cut + shares * needed.cut
    per_token = (
        width * (cut / stage.tensor + twice * whole)
        + residual_bytes(model, kind, stage, implementation, "none")
        - residual_bytes(model, kind, stage, implementation, policy)
    )
    return stage_tokens(model, stage) * per_token


def _new_gradient_bytes(
    model: ModelConfig, kind: Kind, stage: StageShape, num_parameters: Numbers
) -> Numbers:
    """Bytes of a layer's gradients before they are added to a step's, where sequences are cut.

    They come out of a barrier (`kernels.linear._cut_backward`), and so as float32 arrays of their
    own. Elsewhere a product adds to the sum in its place.
    """
    cuts = work.stream_cuts(kind, model.context_length, stage)
    return np.where((cuts > 1) & (kind.place == "middle"), 4.0 * num_parameters, 0.0)


def _gathered_bytes(
    model: ModelConfig, stage: StageShape, implementation: Implementation, logits: Numbers
) -> Numbers:
    """Bytes of parameters, whole gradients and temporaries in the backward of the neediest layer.

    The parameters are in the compute dtype. Gradients are whole, in float32, until they are
    reduced: those of a block, and of the block whose reduction it hides
    (`microbatch._reduced_first`). Where a step is one program, the head's gradient comes where its
    logits were, or is among its temporaries, and logits are gone before other layers. Elsewhere
    they are an argument of the backward, and stay.

    Args:
      model, stage, implementation: the stage.
      logits: the bytes that it keeps of them.
    """
    width = DTYPE_BYTES[stage.dtype]
    gradients = {"first": 4.0, "middle": 8.0, "last": 0.0 if stage.is_alone else 4.0}
    freed = logits if stage.is_alone else 0.0
    most: Numbers = 0.0
    sizes = _kind_parameters(model, stage)
    for _, kind, policy in stage.policies(model):
        num_parameters = sizes[kind]
        if kind.place == "first":
            num_parameters = num_parameters - stage_unsent(model, stage)
        needed = (width + gradients[kind.place]) * num_parameters
        needed = needed + _temporary_bytes(model, kind, stage, implementation, policy)
        if kind.place == "last":
            in_head = _logit_bytes(model, stage, implementation)[1]
            needed = np.maximum(needed, (width + gradients["last"]) * num_parameters + in_head)
        else:
            needed = needed - freed
        most = np.maximum(most, needed)
    return most


def _logit_bytes(
    model: ModelConfig, stage: StageShape, implementation: Implementation
) -> tuple[Numbers, Numbers]:
    """Bytes that are kept, and bytes that the backward of the head needs beside them.

    It needs a gradient of the logits and the weight's, c V (T + D) / tensor; in chunks, (4 + c) for
    each logit of one and 4 D V / tensor. Of several parts, a chunked head keeps its part of the
    weight's gradient, in float32; at once, the gradient comes where the logits were.
    """
    num_tokens = stage_tokens(model, stage)
    if not (of_whole := kinds(model).head.logits):
        return 0.0, 0.0
    vocab_size = of_whole / stage.tensor
    if implementation.logit_bytes:
        return 0.0, implementation.logit_bytes * num_tokens * vocab_size
    width = DTYPE_BYTES[stage.dtype]
    cut = num_tokens, vocab_size, model.width
    num_chunks = work.logit_chunks(*cut, stage.logit_bytes, stage.cross_entropy)
    table = model.width * vocab_size
    logits, chunk = num_tokens * vocab_size, num_tokens / num_chunks * vocab_size
    in_chunks = num_chunks > 1
    is_cut = stage.parameter_parts > 1
    gradient = np.where(is_cut, 4.0 * table / stage.parameter_parts, width * table)
    kept = np.where(in_chunks, gradient + width * num_tokens * model.width, 4 * logits)
    at_once = width * (logits + np.where(is_cut, 0.0, table))
    needed = np.where(in_chunks, (4 + width) * chunk + 4 * table, at_once)
    return stage.head_in_flight * kept, needed
