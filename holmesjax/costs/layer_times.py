"""Seconds of one layer on one kind of device, without collectives."""

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from holmesjax.config import Checkpointing, ModelConfig
from holmesjax.costs import work
from holmesjax.costs.attention import AskedAttention, attention_s, choice_of
from holmesjax.costs.expert_exchange import exchanged_numbers, has_experts, multiplied_rows
from holmesjax.costs.implementation import HOLMESJAX, Implementation
from holmesjax.costs.products import (
    attention_products,
    experts_products,
    layer_products,
    mixed_products,
    trained_products,
)
from holmesjax.costs.stage_shape import (
    DTYPE_BYTES,
    StageShape,
    stage_tokens,
)
from holmesjax.layer_specs.distinct_kinds import kinds
from holmesjax.layer_specs.kind import Kind
from holmesjax.layer_specs.model_layers import cached
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


class _LayerShape(NamedTuple):
    """The fields of a `StageShape` that decide the costs of a layer."""

    sequences: int
    tensor: int
    context: int
    expert: int
    places_experts: bool
    expert_chunks: int | None
    experts_by_kernel: bool
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


class SecondsByStage(NamedTuple):
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
    rows = 1.0
    if experts is not None:
        rows = multiplied_rows(
            experts,
            length,
            num_tokens,
            stage.expert,
            num_chunks=stage.expert_chunks or 1,
            is_placed=stage.places_experts,
            by_kernel=stage.experts_by_kernel,
        )
    cuts_of = stage.tensor, stage.expert, rows
    products = layer_products(kind, num_tokens, *cuts_of)
    mixed = mixed_products(kind, length, num_tokens, stage.tensor)
    attention = attention_products(kind, length, num_tokens, stage.tensor, stage.context)
    cuts = work.stream_cuts(kind, length, stage, implementation)
    whole, cut = work.layer_numbers(kind, stage.tensor, cuts)
    exchange = kind.exchange if stage.expert > 1 else None
    if exchange is not None and experts is not None:
        whole = whole + exchanged_numbers(exchange.moved, experts, stage)
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
    if exchange is not None and experts is not None:
        of_experts = experts_products(kind, products)
        trained_here = experts_products(kind, products, trained=True)
        put_off = [product.gradients[1] for product in trained_here]
        weight_s -= device.products_s(put_off, stage.dtype)
        gradients = [product.gradients[0] for product in of_experts] + put_off
        experts_forward_s = device.products_s(of_experts, stage.dtype)
        experts_backward_s = device.products_s([*of_experts[:-1], *gradients], stage.dtype)
        again = exchanged_numbers(exchange.again, experts, stage)
        backward_s += device.products_s(of_experts[:-1], stage.dtype)
        backward_s += float(device.between_s(num_tokens * again * DTYPE_BYTES[stage.dtype]))
        if stage.checkpointing == "full" and not exchange.is_read:
            unread = exchanged_numbers(exchange.unread, experts, stage)
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
            seconds_by_stage(model, i, stage, stage.checkpointing, device, implementation)
            for device in devices
        ]
        found.append(reduce(np.maximum, [layer.forward_s + layer.backward_s for layer in layers]))
    return found


def seconds_by_stage(
    model: ModelConfig,
    number: int,
    stage: StageShape,
    policy: Checkpointing,
    device: DeviceKind,
    implementation: Implementation,
) -> SecondsByStage:
    """Seconds of a layer of one kind with a checkpointing, in the shape of the stage's numbers.

    Args:
      model: the model's settings.
      number: of the kind of layer.
      stage: the shape of the stage, whose sizes may be arrays.
      policy: what the layer computes again.
      device: the kind of device.
      implementation: how layers are computed.
    """
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
        return SecondsByStage(*of(tuple(getattr(stage, name) for name in CUTS)))
    cuts = np.stack(np.broadcast_arrays(*(getattr(stage, name) for name in CUTS)))
    found = [of(cut) for cut in map(tuple, cuts.reshape(len(CUTS), -1).T.tolist())]
    return SecondsByStage(*np.reshape(np.transpose(found), (-1, *cuts.shape[1:])))


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


def end_s(
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
