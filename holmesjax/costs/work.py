"""The work of a stage in closed form: parameters, numbers and bytes, but no seconds.

All of it derives from what the kinds of a model's layers state (`layers.kind`). The matrix products
are in `products`.

Shapes: the sizes of a mesh and the sequences of a `StageShape` are NumPy arrays of one shape, a
number for each stage, or plain numbers for one stage. Each function works element by element, so
its results have the same shape. Nothing asks which of the two it has.

    D  model width   H  query heads   G  key-value heads   K  width of a head
    F  feed-forward width   V  vocabulary size   S  tokens in a sequence   T  tokens in all
"""

import functools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from holmesjax.config import Checkpointing, ModelConfig
from holmesjax.layers.kind import PARTS_DIM, TENSOR_DIMS, Kind, Parameter
from holmesjax.layers.model_layers import cached, layers
from holmesjax.update_rules import Kept, NumberFormat, factored_dims

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}

# Bytes of a number that an optimizer keeps; int8 has a float32 scale for 64 numbers.
KEPT_BYTES: dict[NumberFormat, float] = {"float32": 4, "bfloat16": 2, "int8": 1 + 4 / 64}
QUANTIZED = 64  # int8 holds matrices whose last dim is a multiple of this, others stay float32

# Bytes of float32 logits that a device computes at a time: more tokens are cut into chunks.
MAX_LOGIT_BYTES = 2**29


class Kinds(NamedTuple):
    """The kinds of a model's layers: those of its ends, and each kind of Transformer layer once."""

    embed: Kind
    blocks: tuple[Kind, ...]  # in the order in which the model first has them
    head: Kind

    @property
    def in_order(self) -> tuple[Kind, ...]:
        """All of them, as `StageShape.counts` counts them."""
        return self.embed, *self.blocks, self.head


@cached(256)  # a search asks over and over
def kinds(model: ModelConfig) -> Kinds:
    """The kinds of a model's layers.

    >>> model = ModelConfig(num_layers=3, width=8, num_heads=2, context_length=4)
    >>> [kind.name for kind in kinds(model).in_order]
    ['embed', 'block', 'head']
    """
    embed, *blocks, head = layers(model).values()
    return Kinds(embed, tuple(dict.fromkeys(blocks)), head)


@cached(256)
def blocks_in_order(model: ModelConfig) -> tuple[int, ...]:
    """The kind of each Transformer layer, as its place in `kinds(model).blocks`.

    >>> blocks_in_order(ModelConfig(num_layers=3, width=8, num_heads=2, context_length=4))
    (0, 0, 0)
    """
    _, *blocks, _ = layers(model).values()
    numbers = {kind: number for number, kind in enumerate(kinds(model).blocks)}
    return tuple(numbers[kind] for kind in blocks)


def kind_names(model: ModelConfig) -> dict[str, str]:
    """The kind of each Transformer layer by the layer's name; empty where all are of one kind.

    >>> kind_names(ModelConfig(num_layers=2, width=8, num_heads=2, context_length=4))
    {}
    """
    if len(kinds(model).blocks) == 1:
        return {}
    return {name: kind.name for name, kind in layers(model).items() if kind.place == "middle"}


@cached(256)
def block_counts(model: ModelConfig) -> tuple[int, ...]:
    """The number of Transformer layers of each kind in the whole model.

    >>> block_counts(ModelConfig(num_layers=3, width=8, num_heads=2, context_length=4))
    (3,)
    """
    return tuple(np.bincount(blocks_in_order(model)).tolist())


class Extent(NamedTuple):
    """Numbers of some parameters, by the mesh axes that cut them.

    `parts` are those of `fsdp` and `context`, which cut the same dim.
    """

    whole: int = 0
    by_tensor: int = 0
    by_parts: int = 0
    by_both: int = 0

    @classmethod
    def of(cls, parameters: Iterable[Parameter]) -> "Extent":
        numbers = [0, 0, 0, 0]
        for own in parameters:
            numbers[own.is_cut + 2 * (PARTS_DIM in own.dims)] += own.size()
        return cls(*numbers)

    def times(self, number: int) -> "Extent":
        """The numbers of several equal layers."""
        return Extent(*(number * own for own in self))

    def without(self, other: "Extent") -> "Extent":
        return Extent(*(a - b for a, b in zip(self, other, strict=True)))

    @staticmethod
    def total(extents: Iterable["Extent"]) -> "Extent":
        return Extent(*map(sum, zip(*extents, strict=True)))

    def on(self, tensor: int) -> int:
        """Numbers on each of `tensor` devices, before `fsdp` and `context` cut them."""
        return self.in_parts(tensor) + self.out_of_parts(tensor)

    def in_parts(self, tensor: int) -> int:
        """The part of these numbers that `fsdp` and `context` cut."""
        return self.by_parts + self.by_both // tensor

    def out_of_parts(self, tensor: int) -> int:
        """The other numbers."""
        return self.whole + self.by_tensor // tensor

    def held(self, tensor: int, num_parts: int) -> float:
        """Numbers on each device."""
        return self.in_parts(tensor) / num_parts + self.out_of_parts(tensor)


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
        for own in parameters:
            cut_by_data = next((i for i, d in enumerate(own.dims) if d not in TENSOR_DIMS), None)
            if (dims := factored_dims(own.shape)) is None:
                by_data.append(own)
                continue
            for dim in dims:
                (whole if dim == cut_by_data else by_data).append(_mean_over(own, dim))
        return cls(Extent.of(by_data), Extent.of(whole))

    def times(self, number: int) -> "_Squares":
        return _Squares(*(own.times(number) for own in self))

    @staticmethod
    def total(squares: Iterable["_Squares"]) -> "_Squares":
        return _Squares(*map(Extent.total, zip(*squares, strict=True)))


def _mean_over(parameter: Parameter, dim: int) -> Parameter:
    """An array of the shape of a parameter without one dim."""
    dims, shape = parameter.dims, parameter.shape
    return replace(
        parameter, dims=dims[:dim] + dims[dim + 1 :], shape=shape[:dim] + shape[dim + 1 :]
    )


class _LayerExtents(NamedTuple):
    """The parameters of one layer, by what becomes of them."""

    all: Extent
    trained: Extent  # with a master, moments and gradients
    wide: Extent  # trained, with moments that int8 keeps in float32
    squares: "_Squares"
    others: Extent  # trained, and no hidden matrices
    unread: Extent  # that its backward does not read, if its forward does not run again
    looked_up: Extent  # row by row
    trained_rows: Extent  # of what is looked up
    borrowed: Extent  # of other layers


@cached(256)
def _layer_extents(model: ModelConfig) -> tuple[_LayerExtents, ...]:
    """The extents of each kind of layer, in the order of `Kinds.in_order`."""
    return tuple(
        _LayerExtents(
            all=Extent.of(kind.parameters),
            trained=Extent.of(own for own in kind.parameters if own.trains),
            wide=Extent.of(own for own in kind.parameters if own.trains and _stays_wide(own)),
            squares=_Squares.of(own for own in kind.parameters if own.trains),
            others=Extent.of(own for own in kind.parameters if own.trains and not own.matrix),
            unread=Extent.of(own for own in kind.parameters if own.use == "added"),
            looked_up=Extent.of(_looked_up(kind)),
            trained_rows=Extent.of(own for own in _looked_up(kind) if own.trains),
            borrowed=Extent.of(own for _, own in _borrowed(model, kind)),
        )
        for kind in kinds(model).in_order
    )


def _looked_up(kind: Kind) -> list[Parameter]:
    return [own for own in kind.parameters if own.use == "looked_up"]


def _stays_wide(parameter: Parameter) -> bool:
    return len(parameter.shape) < 2 or parameter.shape[-1] % QUANTIZED != 0


def _borrowed(model: ModelConfig, kind: Kind) -> list[tuple[str, Parameter]]:
    """Parameters of other layers that a layer reads, each beside the name of its layer."""
    found = []
    for path in kind.borrows:
        layer, _, name = path.partition("/")
        [parameter] = [own for own in layers(model)[layer].parameters if own.name == name]
        found.append((layer, parameter))
    return found


class _StageExtents(NamedTuple):
    """The parameters of a stage, by what becomes of them."""

    kinds: list[tuple[int, Kind]]  # with the number of layers of each
    all: Extent  # with copies of what its layers borrow from layers of other stages
    trained: Extent
    wide: Extent
    squares: _Squares
    others: Extent
    # Trained parameters of one shape, each beside their number; without those that int8 keeps wide.
    in_blocks: tuple[tuple[Parameter, int], ...]
    unread: Extent  # by a backward that computes nothing again
    unread_again: Extent  # by one that runs the forwards of Transformer layers again
    rows_alone: Extent  # trained tables of which only rows are read
    row_numbers: int  # of a token's rows of trained tables


@cached(100_000)
def _stage_extents(model: ModelConfig, counts: tuple[int, ...]) -> _StageExtents:
    """The extents of a stage with so many layers of each kind."""
    own = list(zip(counts, kinds(model).in_order, _layer_extents(model), strict=True))
    borrowed = {
        (layer, parameter.name): parameter
        for count, kind, _ in own
        for layer, parameter in (_borrowed(model, kind) if count else ())
    }
    present = {id(kind) for count, kind, _ in own if count}
    is_here = lambda layer: id(layers(model)[layer]) in present
    copies = [item for (layer, _), item in borrowed.items() if not is_here(layer)]
    read_whole = [item for (layer, _), item in borrowed.items() if is_here(layer)]
    total = lambda name: Extent.total(getattr(e, name).times(n) for n, _, e in own)
    alone = total("looked_up").without(Extent.of(read_whole))
    ends = Extent.total(e.unread.times(n) for n, kind, e in own if kind.place != "middle")
    trained = [(own, n) for n, kind, _ in own for own in kind.parameters if own.trains]
    trained += [(item, 1) for item in copies if item.trains]
    return _StageExtents(
        kinds=[(count, kind) for count, kind, _ in own if count],
        all=Extent.total([total("all"), Extent.of(copies)]),
        trained=Extent.total([total("trained"), Extent.of(c for c in copies if c.trains)]),
        wide=Extent.total(
            [total("wide"), Extent.of(c for c in copies if c.trains and _stays_wide(c))]
        ),
        squares=_Squares.total(
            [*(e.squares.times(n) for n, _, e in own), _Squares.of(c for c in copies if c.trains)]
        ),
        in_blocks=_by_shape((item, n) for item, n in trained if n and not _stays_wide(item)),
        others=Extent.total([total("others"), Extent.of(c for c in copies if c.trains)]),
        unread=Extent.total([total("unread"), alone]),
        unread_again=Extent.total([ends, alone]),
        rows_alone=total("trained_rows").without(Extent.of(p for p in read_whole if p.trains)),
        row_numbers=sum(n * row_numbers(kind, trains=True) for n, kind, _ in own),
    )


def _by_shape(pairs: Iterable[tuple[Parameter, int]]) -> tuple[tuple[Parameter, int], ...]:
    """One parameter of each shape and dims, beside the sum of their numbers."""
    found: dict[tuple[str, tuple[int, ...]], tuple[Parameter, int]] = {}
    for own, number in pairs:
        first, before = found.get((own.dims, own.shape), (own, 0))
        found[own.dims, own.shape] = first, before + number
    return tuple(found.values())


def row_numbers(kind: Kind, *, trains: bool = False) -> int:
    """Numbers of the rows that a layer looks up for one token; with `trains`, of trained tables."""
    tables = [own for own in _looked_up(kind) if own.trains or not trains]
    return sum(own.size() // own.shape[0] for own in tables)


def table_parameters(model: ModelConfig, tensor: int = 1) -> int:
    """The token table, V D / tensor: of the embedding, and of a tied output projection."""
    return Extent.of(_looked_up(kinds(model).embed)).on(tensor)


def num_parameters(model: ModelConfig) -> int:
    """Parameters of all layers, each with what it borrows: a tied table counts twice.

    GPT-2's layers have 12 D^2 (1 + 13 / 12 D) less their 9 D biases, which our model does not have:
      >>> gpt2 = ModelConfig(
      ...     num_layers=12, width=768, num_heads=12, context_length=1024, norm="layer_norm")
      >>> kinds(gpt2).blocks[0].size()
      7080960

    Reference: Narayanan et al., arXiv:2104.04473, section 5.
    """
    counts = (1, *block_counts(model), 1)
    pairs = zip(counts, _layer_extents(model), strict=True)
    return sum(n * (extents.all.on(1) + extents.borrowed.on(1)) for n, extents in pairs)


def parameter_counts(model: ModelConfig) -> tuple[int, int]:
    """Parameters of the model, and those of them that one token uses.

    A table that two layers share counts once. A token uses a share of the weights of a sparse layer
    (`Parameter.active_share`), and of others all; an embedding counts as a whole.

    >>> parameter_counts(ModelConfig(
    ...     num_layers=1, width=8, num_heads=2, context_length=4, vocab_size=16, mlp_width=8,
    ...     tied_embeddings=True, norm="rms_norm"))
    (536, 536)
    """
    counts = (1, *block_counts(model), 1)
    pairs = list(zip(counts, kinds(model).in_order, strict=True))
    active = sum(n * own.size() * own.active_share for n, kind in pairs for own in kind.parameters)
    return sum(n * kind.size() for n, kind in pairs), round(active)


def logit_chunks(num_tokens: float, vocab_size: float, width: int) -> np.ndarray:
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
    return np.where(num_tokens > num_tokens / num_chunks + width, num_chunks, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageShape:
    """The shape of a stage, which decides its costs with the model and the machines.

    `data`, `tensor`, `fsdp`, `context` and `sequences` may be arrays of one shape.
    """

    blocks: tuple[int, ...]  # Transformer layers of each kind, in the order of `Kinds.blocks`
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
    param_dtype: str = "float32"  # of the parameters that are kept and updated
    checkpointing: Checkpointing
    # Format of each array that the optimizer keeps of a parameter (`update_rules`).
    kept: tuple[Kept, ...] = ("float32", "float32")

    @property
    def parameter_parts(self) -> int:
        """Parts of a replica's parameters, besides those of `tensor`."""
        return self.fsdp * self.context

    @property
    def counts(self) -> tuple[int, ...]:
        """Layers of each kind, in the order of `Kinds.in_order`."""
        return int(self.is_first), *self.blocks, int(self.is_last)

    @property
    def num_layers(self) -> int:
        """The number of layers, with the embedding and the head."""
        return sum(self.blocks) + self.is_first + self.is_last

    def kinds(self, model: ModelConfig) -> list[tuple[int, Kind]]:
        """The kinds of the stage's layers, each beside the number of these layers."""
        return _stage_extents(model, self.counts).kinds


def stage_tokens(model: ModelConfig, stage: StageShape) -> int:
    """Tokens of a microbatch on each device."""
    return stage.sequences * model.context_length // stage.context


def stage_parameters(model: ModelConfig, stage: StageShape) -> int:
    """Parameters of one replica on each of its devices, before `fsdp` cuts them.

    A tied head needs the token table: where the embedding is on another stage, it holds a copy.

    >>> model = ModelConfig(
    ...     num_layers=1, width=8, num_heads=2, context_length=4, vocab_size=16,
    ...     tied_embeddings=True, norm="rms_norm")
    >>> last = StageShape(blocks=(0,), is_first=False, is_last=True, data=1, tensor=1, sequences=1,
    ...                   chunks=1, in_flight=1, head_in_flight=1, dtype="float32",
    ...                   checkpointing="none")
    >>> stage_parameters(model, last) == 16 * 8 + 8
    True
    """
    return _stage_extents(model, stage.counts).all.on(stage.tensor)


def held_parameters(model: ModelConfig, stage: StageShape) -> tuple[float, float]:
    """Parameters of a replica on each device, and of these the parameters that train.

    A parameter without the model width is whole on all devices of `fsdp` and `context`.
    """
    own, parts = _stage_extents(model, stage.counts), stage.parameter_parts
    return own.all.held(stage.tensor, parts), own.trained.held(stage.tensor, parts)


def kept_bytes(model: ModelConfig, stage: StageShape, shards: float = 1) -> float:
    """Bytes that the optimizer keeps on each device, where `data` cuts masters into `shards`."""
    in_parts, rest = _kept_bytes(model, stage)
    return (in_parts / stage.parameter_parts + rest) / shards + _undivided_bytes(model, stage)


def checkpoint_bytes(
    model: ModelConfig, kept: tuple[Kept, ...], param_dtype: str = "float32"
) -> float:
    """Bytes of a checkpoint of the whole model: its parameters, and what the optimizer keeps."""
    numbers = num_parameters(model)
    whole = _stage_extents(model, (1, *block_counts(model), 1))
    squares, others = sum(extent.on(1) for extent in whole.squares), whole.others.on(1)
    own = sum(_format_bytes(form, numbers, 0, squares, others) for form in kept)
    return DTYPE_BYTES[param_dtype] * numbers + own


def _undivided_bytes(model: ModelConfig, stage: StageShape) -> float:
    """Bytes that the optimizer keeps on each device although other devices keep them too.

    These are Adafactor's means over the dim that `data` cuts, and the scales of int8 blocks that
    devices share, without the part that is counted as cut.
    """
    own = _stage_extents(model, stage.counts)
    numbers = 0.0
    if means := stage.kept.count("factored"):
        numbers += means * own.squares.whole.held(stage.tensor, stage.parameter_parts)
    if arrays := stage.kept.count("int8"):
        for parameter, number in own.in_blocks:
            numbers += arrays * number * _repeated_scales(parameter, stage)
    return KEPT_BYTES["float32"] * numbers


def _repeated_scales(parameter: Parameter, stage: StageShape) -> Any:
    """Scales on each device of an array in int8, without its share of all scales.

    Devices between which the last dim does not lie in whole blocks all hold its scales
    (`ops.moment_spec`). Dims are cut as `sharding.master_spec` cuts them.

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
    is_free: Any = True  # whether `data` has cut no dim yet
    cuts: Any = 1
    of_last: Any = 1
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


def _kept_bytes(model: ModelConfig, stage: StageShape) -> tuple[float, float]:
    """Bytes that `data` cuts: those that `fsdp` and `context` cut too, and the others."""
    own = _stage_extents(model, stage.counts)
    extents = own.trained, own.wide, own.squares.by_data, own.others
    both = (
        tuple(extent.in_parts(stage.tensor) for extent in extents),
        tuple(extent.out_of_parts(stage.tensor) for extent in extents),
    )
    in_parts, rest = (sum(_format_bytes(form, *own) for form in stage.kept) for own in both)
    return in_parts, rest


def _format_bytes(form: Kept, numbers: int, wide: int, squares: int, others: int) -> float:
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
    for count, kind in stage.kinds(model) if "others" in stage.kept else ():
        for own in kind.parameters:
            if own.trains and own.matrix:
                sides = (math.prod(own.shape[: own.matrix]), math.prod(own.shape[own.matrix :]))
                found[Matrix(min(sides), max(sides))] += count
    return found


def updated_bytes(model: ModelConfig, stage: StageShape) -> float:
    """Bytes that the optimizer moves on each device."""
    in_parts, rest = _kept_bytes(model, stage)
    trained = _stage_extents(model, stage.counts).trained
    of = functools.partial(update_bytes, dtype=stage.param_dtype)
    moved = of(trained.in_parts(stage.tensor), in_parts) / stage.parameter_parts
    moved += of(trained.out_of_parts(stage.tensor), rest)
    return moved / stage.data + update_bytes(0, _undivided_bytes(model, stage))


def update_bytes(num_parameters: float, kept: float, dtype: str = "float32") -> float:
    """Bytes that an update moves: parameters and state, read and written; gradients, read.

    Args:
      num_parameters: that are updated.
      kept: bytes that the optimizer keeps: for AdamW, of both moments.
      dtype: of the parameters; gradients are float32.

    >>> update_bytes(1, 2 * KEPT_BYTES["float32"]), update_bytes(1, 2 * KEPT_BYTES["int8"])
    (28, 16.25)
    """
    return (2 * DTYPE_BYTES[dtype] + 4) * num_parameters + 2 * kept


def gathered_parameters(model: ModelConfig, stage: StageShape) -> tuple[int, int]:
    """Parameters that a device gathers over `fsdp` in a forward, and in a backward.

    A forward reads all. A backward does not read a table whose rows were looked up, unless it is
    the output projection too, nor the bias of a norm that is not computed again.

    >>> model = ModelConfig(
    ...     num_layers=1, width=8, num_heads=2, context_length=4, vocab_size=16, norm="rms_norm")
    >>> both = StageShape(blocks=(1,), is_first=True, is_last=True, data=1, tensor=1, fsdp=2,
    ...                   sequences=1, chunks=1, in_flight=1, head_in_flight=1, dtype="float32",
    ...                   checkpointing="none")
    >>> forward, backward = gathered_parameters(model, both)
    >>> forward == stage_parameters(model, both), forward - backward == 16 * 8
    (True, True)
    """
    own = _stage_extents(model, stage.counts)
    unread = own.unread if stage.checkpointing == "none" else own.unread_again
    numbers = own.all.in_parts(stage.tensor)
    return numbers, numbers - unread.in_parts(stage.tensor)


def reduced_numbers(model: ModelConfig, stage: StageShape) -> int:
    """Numbers that a device gives to its reductions over `fsdp` in a backward.

    The gradient of every parameter that trains. Where rows of a table are looked up, these are the
    gradients of the rows, T D numbers: XLA moves those to the devices that hold the dims.
    """
    own = _stage_extents(model, stage.counts)
    numbers = own.trained.on(stage.tensor) - own.rows_alone.on(stage.tensor)
    return numbers + stage_tokens(model, stage) * own.row_numbers


def largest_layer_parameters(model: ModelConfig, stage: StageShape) -> int:
    """Parameters that the stage's largest layer reads, on each device of `tensor`."""
    own = zip(stage.counts, _layer_extents(model), strict=True)
    sizes = [
        extents.all.in_parts(stage.tensor) + extents.borrowed.in_parts(stage.tensor)
        for count, extents in own
        if count
    ]
    return functools.reduce(lambda a, b: np.maximum(a, b), sizes)


def key_value_numbers(kind: Kind, tensor: int = 1) -> float:
    """Numbers of a token's keys and values in one layer: 2 G K / tensor."""
    if (attention := kind.attention) is None:
        return 0.0
    return 2 * attention.key_heads * attention.head_width / tensor


def parts_received(kind: Kind, length: int, context: int = 1) -> Any:
    """Parts of a sequence whose keys and values come to each device of `context` in a forward.

    A ring brings those of all others. To a window come the runs before each of a device's two, as
    far as it reaches (`kernels.attention.ring`).

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


def layer_numbers(kind: Kind, tensor: int = 1) -> tuple[float, float]:
    """Numbers that a layer's forward moves between its products, per token: whole, and cut."""
    return float(kind.moved.whole), kind.moved.cut / tensor


def looked_up_bytes(kind: Kind, num_tokens: float, dtype: str, *, trains: bool = False) -> float:
    """Bytes of device memory that look-ups move: they read T rows and write T rows.

    With `trains`, those of trained tables: a backward moves the gradients of their rows.
    """
    return 2.0 * num_tokens * row_numbers(kind, trains=trains) * DTYPE_BYTES[dtype]


def all_reduces(kind: Kind, checkpointing: Checkpointing) -> list[tuple[int, int, int]]:
    """All-reduces over `tensor` of one layer and microbatch.

    Each entry has the numbers per token of the array, in the compute dtype, and how many such
    arrays are summed in a forward and in a backward. `full` checkpointing runs the forward of a
    Transformer layer again.

    >>> [block] = kinds(ModelConfig(num_layers=1, width=8, num_heads=2, context_length=4)).blocks
    >>> all_reduces(block, "none"), all_reduces(block, "full")
    ([(8, 2, 2)], [(8, 2, 4)])

    Reference: Shoeybi et al., arXiv:1909.08053, section 3.
    """
    again = checkpointing == "full" and kind.place == "middle"
    return [
        (own.numbers, own.forward, own.backward + again * own.forward)
        for own in kind.collectives
        if own.axis == "tensor"
    ]


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

    def pairs(self, context: int) -> float:
        """Share of the pairs that are computed where `context` devices share a sequence.

        Each meets its own keys, and half as many pairs with those of every other.

        >>> HOLMESJAX.pairs(1), HOLMESJAX.pairs(4)
        (0.5625, 0.515625)
        """
        return (self.attention_pairs + (context - 1) / 2) / context


HOLMESJAX = Implementation()
