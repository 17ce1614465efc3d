"""Changes the statements of a kind of layer for low-rank adapters.

All parameters of the kind are frozen. Beside a target's weight stand an A and a B, which train:

    query_lora/a_DR, query_lora/b_RHK     the product h W becomes h W + s (h A) B

R is the rank. B begins as zeros, so a new adapter changes nothing. If several weights share an A,
the first weight has the A, and each has a B of its own.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from holmesjax.config import ModelConfig
from holmesjax.errors import ConfigError
from holmesjax.layer_specs.kind import (
    TENSOR_DIMS,
    Constant,
    Kind,
    LayerCollective,
    Parameter,
    PerToken,
    Uniform,
    WeightProduct,
)

ADAPTED = "holmesjax.models.transformer:block"  # the function that knows adapters


def adapted(kinds: Mapping[str, Kind], model: ModelConfig) -> dict[str, Kind]:
    """The kinds of a model's layers with its adapters; equal layers share a kind.

    Raises:
      ConfigError: a layer between the ends has another function than our block's, or a pattern
        matches no adapter.
    """
    made: dict[Kind, Kind] = {}
    found = {layer: _adapted(layer, kind, model) for layer, kind in kinds.items()}
    _refuse_unmatched(found, model)
    return {layer: made.setdefault(kind, kind) for layer, kind in found.items()}


def _refuse_unmatched(kinds: Mapping[str, Kind], model: ModelConfig) -> None:
    assert model.lora is not None, "the model has adapters"
    weights = [(layer, {name for name, _ in kind.scales}) for layer, kind in kinds.items()]
    adapters = [
        (layer, group)
        for layer, weight in weights
        for group in model.lora.adapters
        if weight.intersection(group)
    ]
    for i, pattern in enumerate(model.lora.patterns or ()):
        if not any(pattern.matches(layer, group) for layer, group in adapters):
            problem = "matches no adapter"
            fix = "use names of targets, as q_proj, or of a layer and a target, as block_003/q_proj"
            raise ConfigError(
                f"model.lora.patterns[{i}].maps", problem, found=pattern.maps, fix=fix
            )


def _adapted(layer: str, kind: Kind, model: ModelConfig) -> Kind:
    """A kind with its adapters, in which nothing else trains."""
    assert model.lora is not None, "the model has adapters"
    kind = replace(
        kind,
        parameters=tuple(replace(parameter, trains=False) for parameter in kind.parameters),
        products=tuple(replace(product, trains=False) for product in kind.products),
    )
    if kind.place != "middle":
        return kind
    if kind.function != ADAPTED:
        problem = "must have only blocks with model.lora: other layers take no adapters"
        fix = "use block or window_block, or leave model.lora out"
        raise ConfigError("model.pattern", problem, found=kind.name, fix=fix)
    parameters = {
        parameter.name.partition("_")[0]: parameter
        for parameter in kind.parameters
        if parameter.decays
    }
    for group in model.lora.adapters:
        if weights := [parameters[name] for name in group if name in parameters]:
            # Without a norm behind the feed-forward, nothing in a backward reads its result.
            is_read = group != ("down",) or model.norms != "before"
            rank, scale = model.lora.rank_and_scale(layer, group)
            scales = [(weight.name.partition("_")[0], scale) for weight in weights]
            kind = replace(kind, scales=(*kind.scales, *scales))
            kind = _with_adapter(kind, weights, rank, is_read)
            if model.lora.dropout:
                kind = _with_dropout(kind, weights[0])
    return kind


def adapters(kind: Kind) -> Iterator[tuple[Parameter, Parameter, Parameter]]:
    """Each weight that has an adapter, with its A and its B."""
    is_map = lambda own: own.decays and not own.trains
    weights = {
        parameter.name.partition("_")[0]: parameter
        for parameter in kind.parameters
        if is_map(parameter)
    }
    a: Parameter | None = None
    for parameter in kind.parameters:
        name, _, part = parameter.name.partition("_lora/")
        if part.startswith("a_"):
            a = parameter
        elif part:
            assert a is not None, f"{name} has no A"
            yield weights[name], a, parameter


def merged(kind: Kind, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The parameters of a layer without its adapters, W + s A B, in float32.

    Args:
      kind: of the layer.
      values: the layer's parameters by name.
    """
    scales = dict(kind.scales)
    wide = lambda own: np.asarray(values[own.name], np.float32)
    found = {
        parameter.name: wide(parameter) for parameter in kind.parameters if not parameter.trains
    }
    for weight, a, b in adapters(kind):
        delta = np.tensordot(wide(a), wide(b), 1)
        scale = np.float32(scales[weight.name.partition("_")[0]])
        found[weight.name] = found[weight.name] + scale * delta
    return found


def _with_adapter(kind: Kind, weights: list[Parameter], rank: int, is_read: bool) -> Kind:
    """The kind with one A, and a B for each weight.

    An adapter's sum with the product beside it reads both and is written. `tensor` cuts an adapter
    as it cuts the weight, so that one of A x and its gradient is a sum over `tensor`.
    """
    parts = [_parts(weight) for weight in weights]
    (into, depth), (_, columns) = parts[0][0], zip(*(out for _, out in parts), strict=True)
    cut = "depth" if _is_cut(into) else "columns"
    numbers = sum(columns)
    out = PerToken(numbers) if cut == "depth" else PerToken(0, numbers)
    a = WeightProduct(depth, rank, "depth" if cut == "depth" else "none")
    b = WeightProduct(rank, numbers, "columns" if cut == "columns" else "none")
    sums = LayerCollective(
        axis="tensor",
        numbers=rank,
        forward=int(cut == "depth"),
        backward=int(cut == "columns"),
    )
    kept = replace(
        kind.kept,
        products=_sum(kind.kept.products, PerToken(rank)),
        summed=_sum(kind.kept.summed, out) if is_read else kind.kept.summed,
    )
    return replace(
        kind,
        parameters=(*kind.parameters, *_parameters(weights, rank)),
        products=(*kind.products, a, b),
        moved=_sum(kind.moved, PerToken(3 * out.whole + 2 * rank, 3 * out.cut)),
        kept=kept,
        collectives=(*kind.collectives, sums),
    )


def _with_dropout(kind: Kind, weight: Parameter) -> Kind:
    """The kind with random numbers that drop some of an adapter's input.

    The input is read and written once more. A backward draws again, but for the input of `down`, of
    which a byte for each number is kept: half a number of bfloat16.
    """
    (into, depth), _ = _parts(weight)
    own = PerToken(0, depth) if _is_cut(into) else PerToken(depth)
    moved, kept = PerToken(2 * own.whole, 2 * own.cut), kind.kept
    if weight.name.startswith("down"):
        kept = replace(kept, between=_sum(kept.between, PerToken(0, depth // 2)))
    return replace(kind, draws=True, moved=_sum(kind.moved, moved), kept=kept)


def _parameters(weights: list[Parameter], rank: int) -> Iterator[Parameter]:
    """A and the Bs, with the initial values that PEFT gives them."""
    for i, weight in enumerate(weights):
        name = weight.name.partition("_")[0]
        (into, depth), (out, _) = _parts(weight)
        sizes = {**dict(zip(weight.dims, weight.shape, strict=True)), "R": rank}
        shape = lambda dims, sizes=sizes: tuple(sizes[dim] for dim in dims)
        if not i:
            yield Parameter(
                name=f"{name}_lora/a_{into}R",
                shape=shape(into + "R"),
                initial=Uniform(depth**-0.5),
                decays=True,
                matrix=len(into),
            )
        yield Parameter(
            name=f"{name}_lora/b_R{out}",
            shape=shape("R" + out),
            initial=Constant(0.0),
            decays=True,
            matrix=1,
        )


def _parts(weight: Parameter) -> tuple[tuple[str, int], tuple[str, int]]:
    """The dims of a weight's input and of its output, and the numbers of both.

    >>> _parts(Parameter(name="out_HKD", shape=(2, 3, 5), initial=Constant(0.0)))
    (('HK', 6), ('D', 5))
    """
    dims, num_in = weight.dims, weight.dims.startswith("HK") + 1
    size = weight.size()
    depth = weight.shape[0] * (weight.shape[1] if num_in == 2 else 1)
    return (dims[:num_in], depth), (dims[num_in:], size // depth)


def _is_cut(dims: str) -> bool:
    return any(dim in TENSOR_DIMS for dim in dims)


def _sum(a: PerToken, b: PerToken) -> PerToken:
    return PerToken(a.whole + b.whole, a.cut + b.cut)
