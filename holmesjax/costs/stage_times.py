"""Seconds of one stage of the pipeline: its work, divided by the speed of its devices.

`products`, `parameters` and `work` count what there is to do, `calibration` has the speed that a
device reaches, and `collective_times` the seconds of collectives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from holmesjax.config import Checkpointing, ModelConfig
from holmesjax.costs import collective_times, work
from holmesjax.costs.collective_times import OVERLAP_SLOWDOWN, Group, Groups
from holmesjax.costs.expert_exchange import exchange_s
from holmesjax.costs.implementation import HOLMESJAX, Implementation
from holmesjax.costs.layer_times import end_s, seconds_by_stage
from holmesjax.costs.optimizer_state import hidden_matrices, updated_bytes
from holmesjax.costs.parameters import (
    gathered_bytes,
    held_parameters,
    reduced_numbers,
    stage_extents,
    uncut_numbers,
)
from holmesjax.costs.products import (
    orthogonalizing_products,
)
from holmesjax.costs.stage_shape import (
    DTYPE_BYTES,
    StageShape,
    is_cut_by_data,
    stage_tokens,
)
from holmesjax.costs.tensor_times import tensor_s
from holmesjax.topology.catalogue import CPU
from holmesjax.topology.machines import DeviceKind, Numbers, Sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Predicted seconds of one stage, without its boundaries."""

    forward_s: Numbers  # of a microbatch: compute
    backward_s: Numbers
    weight_s: Numbers  # of the backward: the gradients of the weights, a W where it is split
    forward_tensor_s: Numbers  # of a microbatch: all-reduces over `tensor`
    backward_tensor_s: Numbers
    # Of a microbatch: parameters and gradients over `fsdp`, `context` and `expert`.
    forward_fsdp_s: Numbers
    backward_fsdp_s: Numbers
    forward_exchange_s: Numbers  # of a microbatch: tokens to experts and back over `expert`
    backward_exchange_s: Numbers
    exchange_chunks: Sizes  # of each of these
    forward_context_s: Numbers  # of a microbatch: keys and values, and their gradients
    backward_context_s: Numbers
    reduce_s: Numbers  # of a step: summing gradients over `data`
    gather_s: Numbers  # of a step: gathering parameters over `data`
    exposed_reduce_s: Numbers  # what that adds to the last backward, if it overlaps with it
    exposed_gather_s: Numbers  # what that adds to the first forward, if it overlaps with it
    update_s: Numbers  # of a step: optimizer

    @property
    def whole_forward_s(self) -> Numbers:
        sent_s = self.forward_tensor_s + self.forward_fsdp_s + self.forward_context_s
        return self.forward_s + sent_s + self.forward_exchange_s

    @property
    def whole_backward_s(self) -> Numbers:
        sent_s = self.backward_tensor_s + self.backward_fsdp_s + self.backward_context_s
        return self.backward_s + sent_s + self.backward_exchange_s

    @property
    def microbatch_s(self) -> Numbers:
        return self.whole_forward_s + self.whole_backward_s

    @property
    def once_s(self) -> Numbers:
        """Seconds that come once in a step, for any number of microbatches.

        This is an approximation: the bubble of the pipeline hides about as much of collectives that
        do not overlap with compute.
        """
        return self.exposed_reduce_s + self.exposed_gather_s + self.update_s


def exposed_s(collective_s: Numbers, compute_s: Numbers, num_parts: Numbers) -> Numbers:
    """Seconds that a collective in parts, such as layers, adds to what it overlaps with.

    One part overlaps with nothing. The others overlap, and slow the computation down.

    >>> [round(float(exposed_s(*both_s, 4)), 3) for both_s in ((1.0, 10.0), (10.0, 1.0))]
    [0.344, 9.126]
    """
    hidden_s = np.minimum(collective_s * (1 - 1 / num_parts), compute_s)
    return collective_s - hidden_s + (OVERLAP_SLOWDOWN - 1) * hidden_s


def _compute_s(
    model: ModelConfig, stage: StageShape, device: DeviceKind, implementation: Implementation
) -> tuple[Numbers, Numbers, Numbers, Numbers, Numbers, Numbers]:
    """Seconds on one kind of device: forward, backward, its weight gradients, update.

    The last two are of products of experts that devices share: forward, backward.
    """
    num_tokens = stage_tokens(model, stage)
    _, trained = held_parameters(model, stage)
    forward_s: Numbers = 0.0
    backward_s: Numbers = 0.0
    weight_s: Numbers = 0.0
    experts_forward_s: Numbers = 0.0
    experts_backward_s: Numbers = 0.0
    for number, (total, again) in enumerate(zip(stage.blocks, stage.again, strict=True)):
        of_policies: tuple[tuple[int, Checkpointing], ...] = (
            (again, stage.checkpointing),
            (total - again, "none"),
        )
        for count, policy in of_policies:
            if count:
                layer = seconds_by_stage(model, number, stage, policy, device, implementation)
                forward_s += count * layer.forward_s
                backward_s += count * layer.backward_s
                weight_s += count * layer.weight_s
                experts_forward_s += count * layer.experts_forward_s
                experts_backward_s += count * layer.experts_backward_s
    ends = [kind for _, kind in stage.counted_kinds(model) if kind.place != "middle"]
    ends_s = [end_s(model, kind, stage, device) for kind in ends]
    head_s = [sum(one_s[i] for one_s in ends_s) for i in range(3)]
    rows_s, trained_rows_s = (
        device.memory_s(
            sum(
                count * work.looked_up_bytes(kind, num_tokens, stage.dtype, trains=trains)
                for count, kind in stage.counted_kinds(model)
            )
        )
        for trains in (False, True)
    )
    added_s = device.memory_s(implementation.accumulate_bytes * trained)
    logits = num_tokens * model.vocab_size / stage.tensor if stage.is_last else 0.0
    loss_s = device.memory_s(implementation.loss_bytes * logits)
    return (
        forward_s + head_s[0] + rows_s,
        backward_s + head_s[1] + head_s[2] + 2 * trained_rows_s + added_s + loss_s,
        weight_s + head_s[2] + 2 * trained_rows_s + added_s,
        device.memory_s(updated_bytes(model, stage)) + _muon_s(model, stage, device),
        experts_forward_s,
        experts_backward_s,
    )


def _muon_s(model: ModelConfig, stage: StageShape, device: DeviceKind) -> Numbers:
    """Seconds in which a device orthogonalises its share of whole matrices; 0 without Muon."""
    num_devices = stage.data * stage.parameter_parts * stage.tensor
    seconds: Numbers = 0.0
    for matrix, count in hidden_matrices(model, stage).items():
        one_s = device.products_s(orthogonalizing_products(matrix), "float32")
        seconds = seconds + np.ceil(count / num_devices) * one_s
    return seconds


def _dealt_s(
    model: ModelConfig, stage: StageShape, groups: Sequence[Group | Groups | None]
) -> Numbers:
    """Seconds of Muon's exchanges of matrices, there and back; 0 without Muon.

    A device sends all but its own share of its parts; they are taken to go through each axis.
    """
    if not (matrices := hidden_matrices(model, stage)):
        return 0.0
    num_devices = stage.data * stage.parameter_parts * stage.tensor
    num_bytes = 4.0 * sum(n * matrix.size for matrix, n in matrices.items()) / num_devices
    return sum(2 * collective_times.permute_s(num_bytes, group) for group in groups)


def _fsdp_s(
    model: ModelConfig,
    stage: StageShape,
    groups: tuple[Group | Groups | None, ...],
    implementation: Implementation,
) -> tuple[Numbers, Numbers]:
    """Seconds of a microbatch for parameters and gradients over `fsdp`: forward, backward.

    Each layer has one collective of the mean size over each axis. Experts stay cut over `expert`.
    The gradients of parameters that are whole are reduced, and their sums gathered.

    Args:
      model, stage: what is computed.
      groups: of `fsdp`, `context` and `expert`.
      implementation: how the layers are computed.
    """
    num_layers, (fsdp, context, expert) = stage.num_layers, groups
    own = stage_extents(model, stage.counts)

    def gather_s(num_bytes: Numbers, of_experts: Numbers) -> Numbers:
        each, dense = num_bytes / num_layers, (num_bytes - of_experts) / num_layers
        gather = collective_times.all_gather_s
        return num_layers * (
            gather(each / stage.context / stage.expert, fsdp)
            + gather(each / stage.expert, context)
            + gather(dense, expert)
        )

    of_experts = DTYPE_BYTES[stage.dtype] * own.of_experts.in_parts(stage.tensor)
    forward_s, backward_s = (gather_s(size, of_experts) for size in gathered_bytes(model, stage))
    width, trained = implementation.gradient_bytes, own.trained_experts.in_parts(stage.tensor)
    reduced = width * (reduced_numbers(model, stage) + uncut_numbers(model, stage))
    return forward_s, backward_s + gather_s(reduced, width * trained)


def _context_s(
    model: ModelConfig, stage: StageShape, context: Group | Groups | None
) -> tuple[Numbers, Numbers]:
    """Seconds of a microbatch for keys and values over `context`: forward, backward.

    The tokens of a boundary are in order and those of a ring are not, so each boundary is permuted.
    """
    num_tokens = stage_tokens(model, stage)
    forward_s: Numbers = 0.0
    backward_s: Numbers = 0.0
    for count, kind in stage.counted_kinds(model):
        if kind.attention is not None:
            # First as if the parts of all other devices came, then as many as the window needs.
            sent = stage.context * num_tokens * work.key_value_numbers(kind, stage.tensor)
            received = work.parts_received(kind, model.context_length, stage.context)
            sent = sent * (received / np.maximum(stage.context - 1, 1))
            ring_s = collective_times.all_gather_s(DTYPE_BYTES[stage.dtype] * sent, context)
            gradients_s = collective_times.reduce_scatter_s(DTYPE_BYTES["float32"] * sent, context)
            forward_s += count * ring_s
            backward_s += count * (ring_s + gradients_s)
    boundary = work.boundary_bytes(model, num_tokens, stage.dtype)
    permute_s = collective_times.permute_s(boundary, context)
    moved_s = (2 - stage.is_first - stage.is_last) * permute_s
    return forward_s + moved_s, backward_s + moved_s


def _are_cpus(devices: Sequence[DeviceKind]) -> bool:
    return any(device.name == CPU for device in devices)


def _reduce_s(
    model: ModelConfig,
    stage: StageShape,
    devices: Sequence[DeviceKind],
    trained: Numbers,
    data: Group | Groups | None,
    implementation: Implementation,
) -> Numbers:
    """Seconds of a step in which gradients are summed over `data`."""
    wide_s = collective_times.reduce_scatter_s(implementation.gradient_bytes * trained, data)
    if stage.reduction_dtype == "float32":
        return wide_s
    # Each device sums what all send it (`collectives.reduce_scatter`). XLA widens it on CPUs.
    sent_bytes = DTYPE_BYTES["float32" if _are_cpus(devices) else stage.reduction_dtype]
    narrow_s = collective_times.all_to_all_s(sent_bytes * trained, data)
    # What `data` does not cut is sent in float32 in any case.
    is_cut = is_cut_by_data(model, stage)
    return narrow_s * is_cut + wide_s * (1 - is_cut)


def stage_times(
    model: ModelConfig,
    stage: StageShape,
    devices: Sequence[DeviceKind],
    data: Group | Groups | None,
    tensor: Group | Groups | None,
    fsdp: Group | Groups | None = None,
    context: Group | Groups | None = None,
    implementation: Implementation = HOLMESJAX,
    expert: Group | Groups | None = None,
) -> StageTimes:
    """Predicted seconds of one stage; its slowest kind of device sets the pace.

    Matrix products take the time of their FLOP at the speed that their shapes reach. The operations
    between them, the embedding's rows, sums of gradients and the optimizer take the time of their
    bytes.
    Collectives over `data` may overlap with the last backward and the first forward; others do not.

    Over `fsdp` (ZeRO-3, Rajbhandari et al., arXiv:1910.02054; Zhao et al., arXiv:2304.11277), each
    microbatch gathers the parameters of every layer in the forward and again in the backward, which
    also reduce-scatters their gradients: three times c P bytes, in the compute dtype. They are cut
    over `context` and `expert`, too: they go through one axis, then through the next.

    Over `context`, each layer's keys and values go round a ring (Liu et al., arXiv:2310.01889), and
    in the backward again, with their gradients in float32.

    Devices of `expert` compute the products of their experts in the backward again, but the last
    ones, with any checkpointing. With `full` they compute all of them only where a norm reads them.

    `weight_s` is the part of a backward with one product for each weight, the embedding's rows and
    the sums of gradients. Attention scores have no weight: both products of their backward belong
    to the rest, like its all-reduces.

    Args:
      model, stage: what is computed.
      devices: the kinds of device of the stage.
      data, tensor, fsdp, context: the slowest group of each axis; None for size 1.
      implementation: how the layers are computed.
      expert: as `data`.
    """
    of_kinds = [_compute_s(model, stage, device, implementation) for device in devices]
    forward_s, backward_s, weight_s, update_s, *experts_s = (
        reduce(np.maximum, seconds_of_kinds) for seconds_of_kinds in zip(*of_kinds, strict=True)
    )
    _, trained = held_parameters(model, stage)
    forward_tensor_s, backward_tensor_s, beside_s = tensor_s(model, stage, tensor)
    hidden_s = np.minimum(beside_s, weight_s)
    backward_tensor_s = backward_tensor_s - (2 - OVERLAP_SLOWDOWN) * hidden_s
    if implementation.tensor_overlaps:
        forward_tensor_s = exposed_s(forward_tensor_s, forward_s, stage.tensor)
        backward_tensor_s = exposed_s(backward_tensor_s, backward_s, stage.tensor)
    forward_fsdp_s, backward_fsdp_s = _fsdp_s(model, stage, (fsdp, context, expert), implementation)
    exchange = exchange_s(model, stage, expert, experts_s, hides=not _are_cpus(devices))
    forward_context_s, backward_context_s = _context_s(model, stage, context)
    reduce_s = _reduce_s(model, stage, devices, trained, data, implementation)
    gather_s = collective_times.all_gather_s(DTYPE_BYTES[stage.dtype] * trained, data)
    exposed_reduce_s, exposed_gather_s = reduce_s, gather_s
    if implementation.overlaps:
        exposed_reduce_s = exposed_s(reduce_s, backward_s, stage.num_layers)
        exposed_gather_s = exposed_s(gather_s, forward_s, stage.num_layers)
    return StageTimes(
        forward_s=forward_s,
        backward_s=backward_s,
        weight_s=weight_s,
        forward_tensor_s=forward_tensor_s,
        backward_tensor_s=backward_tensor_s,
        forward_fsdp_s=forward_fsdp_s,
        backward_fsdp_s=backward_fsdp_s,
        forward_exchange_s=exchange.forward_s,
        backward_exchange_s=exchange.backward_s,
        exchange_chunks=exchange.chunks,
        forward_context_s=forward_context_s,
        backward_context_s=backward_context_s,
        reduce_s=reduce_s,
        gather_s=gather_s,
        exposed_reduce_s=exposed_reduce_s,
        exposed_gather_s=exposed_gather_s,
        update_s=update_s + _dealt_s(model, stage, (data, tensor, fsdp, context, expert)),
    )
