"""The state that an optimizer keeps of a stage's parameters, and the bytes that an update moves.

The formats are those of `update_rules`. Masters are parameters, not state (`parameters`).
"""

import functools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from holmesjax.config import ModelConfig
from holmesjax.config.update_rules import Kept, NumberFormat, factored_dims
from holmesjax.costs.parameters import Extent, stage_extents
from holmesjax.costs.stage_shape import DTYPE_BYTES, StageShape
from holmesjax.layer_specs.distinct_kinds import kinds
from holmesjax.layer_specs.kind import PARTS_DIM, TENSOR_DIMS, Parameter
from holmesjax.layer_specs.model_layers import cached
from holmesjax.topology.machines import Numbers, Sizes

# Bytes of a number that an optimizer keeps; int8 has a float32 scale for 64 numbers.
KEPT_BYTES: dict[NumberFormat, float] = {"float32": 4, "bfloat16": 2, "int8": 1 + 4 / 64}

QUANTIZED = 64  # int8 holds matrices whose last dim is a multiple of this, others stay float32


class _Squares(NamedTuple):
    """Numbers of the mean squares that Adafactor keeps of trained parameters.

    A mean over the dim that `data` cuts is whole on all replicas.
    """

    by_data: Extent
    whole: Extent

    @classmethod
    def of(cls, parameters: Iterable[Parameter]) -> "_Squares":
        by_data: list[Parameter] = []
        whole: list[Parameter] = []
        for parameter in parameters:
            cut_by_data = next(
                (i for i, d in enumerate(parameter.dims) if d not in TENSOR_DIMS), None
            )
            if (dims := factored_dims(parameter.shape)) is None:
                by_data.append(parameter)
                continue
            for dim in dims:
                (whole if dim == cut_by_data else by_data).append(_mean_over(parameter, dim))
        return cls(Extent.of(by_data), Extent.of(whole))

    def times(self, number: int) -> "_Squares":
        return _Squares(*(extent.times(number) for extent in self))

    @staticmethod
    def total(squares: Iterable["_Squares"]) -> "_Squares":
        return _Squares(*map(Extent.total, zip(*squares, strict=True)))


def _mean_over(parameter: Parameter, dim: int) -> Parameter:
    """An array of the shape of a parameter without one dim."""
    dims, shape = parameter.dims, parameter.shape
    return replace(
        parameter, dims=dims[:dim] + dims[dim + 1 :], shape=shape[:dim] + shape[dim + 1 :]
    )


def _stays_wide(parameter: Parameter) -> bool:
    return len(parameter.shape) < 2 or parameter.shape[-1] % QUANTIZED != 0


def _by_shape(pairs: Iterable[tuple[Parameter, int]]) -> tuple[tuple[Parameter, int], ...]:
    """One parameter of each shape and dims, beside the sum of their numbers."""
    found: dict[tuple[str, tuple[int, ...]], tuple[Parameter, int]] = {}
    for parameter, number in pairs:
        first, before = found.get((parameter.dims, parameter.shape), (parameter, 0))
        found[parameter.dims, parameter.shape] = first, before + number
    return tuple(found.values())


class _State(NamedTuple):
    """Trained parameters, by what the formats make of them."""

    wide: Extent  # whose moments int8 keeps in float32
    squares: _Squares
    others: Extent  # no hidden matrices

    @classmethod
    def of(cls, parameters: Iterable[Parameter]) -> "_State":
        trained = [parameter for parameter in parameters if parameter.trains]
        return cls(
            wide=Extent.of(parameter for parameter in trained if _stays_wide(parameter)),
            squares=_Squares.of(trained),
            others=Extent.of(parameter for parameter in trained if not parameter.matrix),
        )

    def times(self, number: int) -> "_State":
        wide, squares, others = self
        return _State(wide.times(number), squares.times(number), others.times(number))


@cached(256)
def _layer_states(model: ModelConfig) -> tuple[_State, ...]:
    """The state of each kind of layer, in the order of `Kinds.in_order`."""
    return tuple(_State.of(kind.parameters) for kind in kinds(model).in_order)


class _TrainedParameters(NamedTuple):
    """The trained parameters of a stage, by what the formats make of them."""

    wide: Extent
    squares: _Squares
    others: Extent
    # Parameters of one shape, each beside their number; without those that int8 keeps wide.
    in_blocks: tuple[tuple[Parameter, int], ...]


@cached(100_000)  # a search asks over and over
def _trained_parameters(model: ModelConfig, counts: tuple[int, ...]) -> _TrainedParameters:
    # Muon orthogonalises a matrix where its layer is: a copy of it is none.
    copies = [replace(copy, matrix=0) for copy in stage_extents(model, counts).copies]
    own = zip(counts, _layer_states(model), strict=True)
    states = [_State.of(copies), *(state.times(n) for n, state in own)]
    trained = [
        (parameter, n)
        for n, kind in zip(counts, kinds(model).in_order, strict=True)
        for parameter in kind.parameters
        if parameter.trains and n
    ]
    trained += [(copy, 1) for copy in copies if copy.trains]
    return _TrainedParameters(
        wide=Extent.total(state.wide for state in states),
        squares=_Squares.total(state.squares for state in states),
        others=Extent.total(state.others for state in states),
        in_blocks=_by_shape(
            (parameter, n) for parameter, n in trained if not _stays_wide(parameter)
        ),
    )


def kept_bytes(model: ModelConfig, stage: StageShape, shards: Numbers = 1) -> Numbers:
    """Bytes that the optimizer keeps on each device, where `data` cuts masters into `shards`."""
    in_parts, rest = _kept_bytes(model, stage)
    return (in_parts / stage.parameter_parts + rest) / shards + _undivided_bytes(model, stage)


def saved_bytes(
    parameters: Iterable[Parameter], kept: tuple[Kept, ...], param_dtype: str, compute_dtype: str
) -> float:
    """Bytes of a layer in a checkpoint: of its parameters, and of what the optimizer keeps of some.

    Those that do not train are in the compute dtype, or in float32 if a step changes them.
    """
    parameters = list(parameters)
    numbers = sum(parameter.size() for parameter in parameters if parameter.trains)
    fixed = sum(
        parameter.size() * DTYPE_BYTES["float32" if parameter.changes else compute_dtype]
        for parameter in parameters
        if not parameter.trains
    )
    wide, squares, others = _State.of(parameters)
    of_means = sum(extent.size for extent in squares)
    own = sum(_format_bytes(form, numbers, wide.size, of_means, others.size) for form in kept)
    return float(DTYPE_BYTES[param_dtype] * numbers + fixed + own)


def _undivided_bytes(model: ModelConfig, stage: StageShape) -> Numbers:
    """Bytes that the optimizer keeps on each device although other devices keep them too.

    These are Adafactor's means over the dim that `data` cuts, and the scales of int8 blocks that
    devices share, without the part that is counted as cut.
    """
    own = _trained_parameters(model, stage.counts)
    numbers: Numbers = 0.0
    if means := stage.kept.count("factored"):
        numbers += means * own.squares.whole.held(stage.tensor, stage.parameter_parts)
    if arrays := stage.kept.count("int8"):
        for parameter, number in own.in_blocks:
            numbers += arrays * number * _repeated_scales(parameter, stage)
    return KEPT_BYTES["float32"] * numbers


def _repeated_scales(parameter: Parameter, stage: StageShape) -> Numbers:
    """Scales on each device of an array in int8, without its share of all scales.

    Devices between which the last dim does not lie in whole blocks all hold its scales
    (`update_ops.moment_spec`). Dims are cut as `sharding.master_spec` cuts them.

    With 2 scales for each row of 128, on 4 devices of `fsdp`:
      >>> model = ModelConfig(
      ...     num_layers=1, width=128, num_heads=2, context_length=4, vocab_size=512)
      >>> [table] = kinds(model).embed.parameters
      >>> stage = StageShape(
      ...     blocks=(1,), is_first=True, is_last=False, data=1, tensor=1, fsdp=4, sequences=4,
      ...     chunks=1, in_flight=1, head_in_flight=1, dtype="float32", checkpointing="none")
      >>> float(_repeated_scales(table, stage)) == 512 * 2 * (1 - 1 / 4)
      True
    """
    is_free: bool | np.ndarray = True  # whether `data` has cut no dim yet
    cuts: Sizes = 1
    of_last: Sizes = 1
    for dim, size in zip(parameter.dims, parameter.shape, strict=True):
        of_last = stage.parameter_parts if dim == PARTS_DIM else 1
        if dim in TENSOR_DIMS:
            of_last = stage.tensor
        else:
            is_here = np.logical_and(is_free, size % (stage.data * of_last) == 0)
            of_last = of_last * np.where(is_here, stage.data, 1)
            is_free = np.logical_and(is_free, np.logical_not(is_here))
        cuts = cuts * of_last
    shared = parameter.shape[-1] // QUANTIZED % of_last != 0
    return parameter.size() / QUANTIZED / cuts * (of_last - 1) * shared


def _kept_bytes(model: ModelConfig, stage: StageShape) -> tuple[Numbers, Numbers]:
    """Bytes that `data` cuts: those that `fsdp` and `context` cut too, and the others."""
    trained = stage_extents(model, stage.counts).trained
    own = _trained_parameters(model, stage.counts)
    extents = trained, own.wide, own.squares.by_data, own.others
    both = (
        tuple(extent.in_parts(stage.tensor) for extent in extents),
        tuple(extent.out_of_parts(stage.tensor) for extent in extents),
    )
    in_parts, rest = (sum(_format_bytes(form, *numbers) for form in stage.kept) for numbers in both)
    return in_parts, rest


def _format_bytes(
    form: Kept, numbers: Sizes, wide: Sizes, squares: Sizes, others: Sizes
) -> Numbers:
    """Bytes kept of some numbers in a format.

    Args:
      form: the format.
      numbers: how many there are.
      wide: those of them that stay float32 in place of int8.
      squares: how many are kept if they are factored.
      others: those of them that are in no hidden matrix.
    """
    if form == "factored":
        return KEPT_BYTES["float32"] * squares
    if form == "others":
        return KEPT_BYTES["float32"] * others
    own = KEPT_BYTES[form]
    return own * numbers + (KEPT_BYTES["float32"] - own) * wide * (form == "int8")


class Matrix(NamedTuple):
    """A hidden matrix, which Muon orthogonalises."""

    short: int
    long: int

    @property
    def size(self) -> int:
        return self.short * self.long


def hidden_matrices(model: ModelConfig, stage: StageShape) -> Counter[Matrix]:
    """The number of a stage's trained hidden matrices of each shape; none without Muon."""
    found: Counter[Matrix] = Counter()
    for count, kind in stage.counted_kinds(model) if "others" in stage.kept else ():
        for parameter in kind.parameters:
            if parameter.trains and parameter.matrix:
                sides = (
                    math.prod(parameter.shape[: parameter.matrix]),
                    math.prod(parameter.shape[parameter.matrix :]),
                )
                found[Matrix(min(sides), max(sides))] += count
    return found


def updated_bytes(model: ModelConfig, stage: StageShape) -> Numbers:
    """Bytes that the optimizer moves on each device."""
    in_parts, rest = _kept_bytes(model, stage)
    trained = stage_extents(model, stage.counts).trained
    of = functools.partial(update_bytes, dtype=stage.param_dtype)
    moved = of(trained.in_parts(stage.tensor), in_parts) / stage.parameter_parts
    moved += of(trained.out_of_parts(stage.tensor), rest)
    return moved / stage.data + update_bytes(0, _undivided_bytes(model, stage))


def update_bytes(num_parameters: Numbers, kept: Numbers, dtype: str = "float32") -> Numbers:
    """Bytes that an update moves: parameters and state, read and written; gradients, read.

    Args:
      num_parameters: that are updated.
      kept: bytes that the optimizer keeps: for AdamW, of both moments.
      dtype: of the parameters; gradients are float32.

    >>> update_bytes(1, 2 * KEPT_BYTES["float32"]), update_bytes(1, 2 * KEPT_BYTES["int8"])
    (28, 16.25)
    """
    return (2 * DTYPE_BYTES[dtype] + 4) * num_parameters + 2 * kept
