"""Seconds of one stage of the pipeline: its work, divided by the speed of its devices.

`products`, `parameters` and `work` count what there is to do, `calibration` has the speed that a
device reaches, and `collective_times` the seconds of collectives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from holmesjax.config import Checkpointing, ModelConfig
from holmesjax.costs import collective_times, work
from holmesjax.costs.attention import AskedAttention, attention_s, choice_of
from holmesjax.costs.collective_times import OVERLAP_SLOWDOWN, Group, Groups
from holmesjax.costs.expert_exchange import exchange_s, has_experts, peak_load
from holmesjax.costs.implementation import HOLMESJAX, Implementation
from holmesjax.costs.optimizer_state import hidden_matrices, updated_bytes
from holmesjax.costs.parameters import (
    gathered_bytes,
    held_parameters,
    reduced_numbers,
    stage_extents,
    uncut_numbers,
)
from holmesjax.costs.products import (
    attention_products,
    experts_products,
    layer_products,
    mixed_products,
    orthogonalizing_products,
    trained_products,
)
from holmesjax.costs.stage_shape import (
    DTYPE_BYTES,
    StageShape,
    is_cut_by_data,
    stage_tokens,
)
from holmesjax.costs.tensor_times import tensor_s
from holmesjax.layer_specs.distinct_kinds import kinds
from holmesjax.layer_specs.kind import Kind
from holmesjax.layer_specs.model_layers import cached
from holmesjax.topology.catalogue import CPU
from holmesjax.topology.machines import DeviceKind, Numbers, Sizes
from kernels.attention.choice import AttentionChoice

# Numbers that a layer's backward moves between its products, to those of its forward: the gradient
# of an operation reads the gradient of its result beside its operands. Counted over the operations
# of `work.layer_numbers` for GELU: 36 D to 28 D.
BACKWARD_NUMBERS = 1.3
# The share of the forward in the least seconds of a layer: the same as in its products.
FORWARD_SHARE = 1 / 3


# The fields of a `StageShape` that a search changes, and that decide the costs of a layer.
CUTS = ("sequences", "tensor", "context", "expert", "sequence_parallel")


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


class _LayerShape(NamedTuple):
    """The fields of a `StageShape` that decide the costs of a layer."""

    sequences: int
    tensor: int
    context: int
    expert: int
    places_experts: bool
    dtype: str
    checkpointing: Checkpointing
    attention: AskedAttention | None
    sequence_parallel: Sizes

    @classmethod
    def of(cls, stage: StageShape, **cuts: Any) -> "_LayerShape":
        """The shape in a stage, or with other fields: in one of many stages."""
        own = {name: getattr(stage, name) for name in cls._fields} | cuts
        return cls(**own)


class _LayerSeconds(NamedTuple):
    """Seconds of one Transformer layer on one device, without collectives."""

    forward_s: float
    backward_s: float  # with what is computed again
    # Of the backward: the products that make the gradients of weights, as far as they can be put
    # off. Those of experts that devices share cannot.
    weight_s: float
    # Of both: products of experts that devices share, behind which exchanges may be hidden.
    experts_forward_s: float
    experts_backward_s: float


class _SecondsByStage(NamedTuple):
    """Seconds of a layer on the devices of each stage."""

    forward_s: Numbers
    backward_s: Numbers
    weight_s: Numbers
    experts_forward_s: Numbers
    experts_backward_s: Numbers


def _layer_seconds(
    model: ModelConfig,
    number: int,  # of the kind, in `Kinds.blocks`
    stage: _LayerShape,
    device: DeviceKind,
    implementation: Implementation,
) -> _LayerSeconds:
    kind, length = kinds(model).blocks[number], model.context_length
    num_tokens = stage.sequences * length // stage.context
    experts = model.experts if has_experts(kind) else None
    peak = 1.0
    if experts is not None:
        peak = float(peak_load(experts, stage.expert, is_placed=stage.places_experts))
    cuts_of = stage.tensor, stage.expert, peak
    products = layer_products(kind, num_tokens, *cuts_of)
    mixed = mixed_products(kind, length, num_tokens, stage.tensor)
    attention = attention_products(kind, length, num_tokens, stage.tensor, stage.context)
    cuts = work.stream_cuts(kind, length, stage, implementation)
    whole, cut = work.layer_numbers(kind, stage.tensor, cuts)
    exchange = kind.exchange if stage.expert > 1 else None
    if exchange is not None:
        whole, cut = whole + exchange.moved.whole, cut + exchange.moved.cut / stage.tensor
    heads = kind.attention.heads if kind.attention else 0
    pairs = num_tokens * length * heads / stage.tensor
    products_s = device.products_s([*products, *mixed], stage.dtype)
    numbers_s = float(device.between_s(num_tokens * (whole + cut) * DTYPE_BYTES[stage.dtype]))
    choice = _choice(kind, stage, device, length)
    pass_s = attention_s(attention, choice, device, stage.dtype, stage.context, implementation)
    scores_s = float(device.memory_s(implementation.score_bytes * pairs))
    inputs = [product.gradients[0] for product in products]
    inputs += [gradient for product in mixed for gradient in product.gradients]
    trained = trained_products(kind, num_tokens, *cuts_of)
    weight_s = device.products_s([product.gradients[1] for product in trained], stage.dtype)
    always_s = device.calibration.layer_s
    forward_s = products_s + numbers_s + pass_s.forward + scores_s + FORWARD_SHARE * always_s
    backward_s = device.products_s(inputs, stage.dtype) + weight_s + (1 - FORWARD_SHARE) * always_s
    backward_s += pass_s.backward
    backward_s += BACKWARD_NUMBERS * (numbers_s + scores_s)
    calls = 2
    experts_forward_s = experts_backward_s = 0.0
    if exchange is not None:
        of_experts = experts_products(kind, products)
        put_off = [product.gradients[1] for product in of_experts]
        weight_s -= device.products_s(put_off, stage.dtype)
        gradients = [gradient for product in of_experts for gradient in product.gradients]
        experts_forward_s = device.products_s(of_experts, stage.dtype)
        experts_backward_s = device.products_s([*of_experts[:-1], *gradients], stage.dtype)
        again = exchange.again.whole + exchange.again.cut / stage.tensor
        backward_s += device.products_s(of_experts[:-1], stage.dtype)
        backward_s += float(device.between_s(num_tokens * again * DTYPE_BYTES[stage.dtype]))
        if stage.checkpointing == "full" and not exchange.is_read:
            unread = exchange.unread.whole + exchange.unread.cut / stage.tensor
            backward_s -= device.products_s(of_experts, stage.dtype)
            backward_s -= float(device.between_s(num_tokens * unread * DTYPE_BYTES[stage.dtype]))
    if stage.checkpointing == "full":
        backward_s += forward_s
        calls = 3
    elif implementation.recomputes_attention:
        backward_s += pass_s.forward + scores_s
    elif stage.checkpointing == "dots":
        backward_s += numbers_s
    return _LayerSeconds(
        forward_s=max(forward_s, implementation.layer_call_s),
        backward_s=max(backward_s, calls * implementation.layer_call_s),
        weight_s=weight_s,
        experts_forward_s=experts_forward_s,
        experts_backward_s=experts_backward_s,
    )


def _choice(
    kind: Kind, stage: _LayerShape, device: DeviceKind, length: int
) -> AttentionChoice | None:
    """Returns the choice for a layer; None: the implementation that a calibration is of."""
    if kind.attention is None or stage.attention is None:
        return None
    cut = {"length": length, "context": stage.context}
    return choice_of(kind.attention, stage.attention, device, dtype=stage.dtype, **cut)


def attention_in_stage(
    model: ModelConfig, stage: StageShape, device: DeviceKind
) -> dict[AttentionChoice, float]:
    """The implementations of attention on a kind of device, and their seconds in a microbatch.

    With what is computed again. There is nothing for kinds that the catalogue does not have.
    """
    found: dict[AttentionChoice, float] = {}
    length = model.context_length
    shape = _LayerShape.of(stage)
    num_tokens = shape.sequences * length // shape.context
    for count, kind, policy in stage.policies(model):
        forwards = 2 if policy == "full" else 1
        if (choice := _choice(kind, shape, device, length)) is not None:
            products = attention_products(kind, length, num_tokens, shape.tensor, shape.context)
            pass_s = attention_s(products, choice, device, shape.dtype, shape.context, HOLMESJAX)
            own_s = count * (forwards * pass_s.forward + pass_s.backward)
            found[choice] = found.get(choice, 0.0) + own_s
    return found


def layers_s(
    model: ModelConfig,
    stage: StageShape,
    devices: Sequence[DeviceKind],
    implementation: Implementation = HOLMESJAX,
) -> list[Numbers]:
    """Seconds of a microbatch in a layer of each kind on the slowest of some kinds of device.

    With the checkpointing of the stage. Forward and backward, without collectives.
    """
    found = []
    for i in range(len(stage.blocks)):
        layers = [
            _seconds_by_stage(model, i, stage, stage.checkpointing, device, implementation)
            for device in devices
        ]
        found.append(reduce(np.maximum, [layer.forward_s + layer.backward_s for layer in layers]))
    return found


def _seconds_by_stage(
    model: ModelConfig,
    number: int,
    stage: StageShape,
    policy: Checkpointing,
    device: DeviceKind,
    implementation: Implementation,
) -> _SecondsByStage:
    """Seconds of a layer of one kind with a checkpointing, in the shape of the stage's numbers."""
    uncut = dict.fromkeys(CUTS, 0)
    like = _LayerShape.of(stage, **uncut, checkpointing=policy)
    known = _known_layers(model, number, like, device, implementation)

    def of(cut: tuple[int, ...]) -> _LayerSeconds:
        if cut not in known:
            sizes: Any = dict(zip(CUTS, cut, strict=True))
            shape = like._replace(**sizes)
            known[cut] = _layer_seconds(model, number, shape, device, implementation)
        return known[cut]

    if not np.ndim(stage.sequences):
        return _SecondsByStage(*of(tuple(getattr(stage, name) for name in CUTS)))
    cuts = np.stack(np.broadcast_arrays(*(getattr(stage, name) for name in CUTS)))
    found = [of(cut) for cut in map(tuple, cuts.reshape(len(CUTS), -1).T.tolist())]
    return _SecondsByStage(*np.reshape(np.transpose(found), (-1, *cuts.shape[1:])))


@cached(1_000)
def _known_layers(
    model: ModelConfig,
    number: int,
    like: _LayerShape,
    device: DeviceKind,
    implementation: Implementation,
) -> dict[tuple[int, ...], _LayerSeconds]:
    """The known seconds of a layer by its `CUTS`.

    A search asks for the same layers over and over, and hashing a model takes longer than that.
    """
    return {}


def _end_s(
    model: ModelConfig, kind: Kind, stage: StageShape, device: DeviceKind
) -> tuple[float, float, float]:
    """Seconds of a first or last layer: forward, gradient of its input, gradient of its weights.

    Only the output projection of our own layers is one.
    """
    # A stage with an end of the model comes alone.
    num_tokens, tensor = int(stage_tokens(model, stage)), int(stage.tensor)
    products = layer_products(kind, num_tokens, tensor)
    mixed = mixed_products(kind, model.context_length, num_tokens, tensor)
    inputs = [product.gradients[0] for product in products]
    inputs += [gradient for product in mixed for gradient in product.gradients]
    trained = trained_products(kind, num_tokens, tensor)
    weights = [product.gradients[1] for product in trained]
    times = (device.products_s(p, stage.dtype) for p in ([*products, *mixed], inputs, weights))
    forward_s, input_s, weight_s = times
    cuts = work.stream_cuts(kind, model.context_length, stage)
    whole, cut = work.layer_numbers(kind, tensor, cuts)
    numbers_s = float(device.between_s(num_tokens * (whole + cut) * DTYPE_BYTES[stage.dtype]))
    return forward_s + numbers_s, input_s + BACKWARD_NUMBERS * numbers_s, weight_s


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
                layer = _seconds_by_stage(model, number, stage, policy, device, implementation)
                forward_s += count * layer.forward_s
                backward_s += count * layer.backward_s
                weight_s += count * layer.weight_s
                experts_forward_s += count * layer.experts_forward_s
                experts_backward_s += count * layer.experts_backward_s
    ends = [kind for _, kind in stage.counted_kinds(model) if kind.place != "middle"]
    ends_s = [_end_s(model, kind, stage, device) for kind in ends]
    head_s = [sum(end_s[i] for end_s in ends_s) for i in range(3)]
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
