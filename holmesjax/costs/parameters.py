"""The parameters of layers and stages, by the mesh axes that cut them.

All of it derives from what the kinds of a model's layers state (`layer_specs.kind`).

    D  model width   V  vocabulary size   T  tokens in all
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from holmesjax.config import TABLE, ModelConfig
from holmesjax.costs.stage_shape import DTYPE_BYTES, StageShape, stage_tokens
from holmesjax.layer_specs.distinct_kinds import block_counts, kinds
from holmesjax.layer_specs.kind import PARTS_DIM, Kind, Parameter
from holmesjax.layer_specs.model_layers import cached, layers
from holmesjax.topology.catalogue import FP8
from holmesjax.topology.machines import Numbers, Sizes


class Extent(NamedTuple):
    """Numbers of some parameters, by the mesh axes that cut them.

    `parts` are those of `fsdp`, `context` and `expert`, which cut the same dim; in the weights of
    experts, `expert` cuts another one.
    """

    whole: int = 0
    by_tensor: int = 0
    by_parts: int = 0
    by_both: int = 0

    @classmethod
    def of(cls, parameters: Iterable[Parameter]) -> "Extent":
        numbers = [0, 0, 0, 0]
        for parameter in parameters:
            numbers[parameter.is_cut + 2 * (PARTS_DIM in parameter.dims)] += parameter.size()
        return cls(*numbers)

    def times(self, number: int) -> "Extent":
        """The numbers of several equal layers."""
        return Extent(*(number * count for count in self))

    def without(self, other: "Extent") -> "Extent":
        return Extent(*(a - b for a, b in zip(self, other, strict=True)))

    @staticmethod
    def total(extents: Iterable["Extent"]) -> "Extent":
        return Extent(*map(sum, zip(*extents, strict=True)))

    @property
    def size(self) -> int:
        """All numbers."""
        return sum(self)

    def on(self, tensor: Sizes) -> Sizes:
        """Numbers on each of `tensor` devices, before `fsdp` and `context` cut them."""
        return self.in_parts(tensor) + self.out_of_parts(tensor)

    def in_parts(self, tensor: Sizes) -> Sizes:
        """The part of these numbers that `fsdp` and `context` cut."""
        return self.by_parts + self.by_both // tensor

    def out_of_parts(self, tensor: Sizes) -> Sizes:
        """The other numbers."""
        return self.whole + self.by_tensor // tensor

    def held(self, tensor: Sizes, num_parts: Sizes) -> Numbers:
        """Numbers on each device."""
        return self.in_parts(tensor) / num_parts + self.out_of_parts(tensor)


class _LayerExtents(NamedTuple):
    """The parameters of one layer, by what becomes of them."""

    all: Extent
    trained: Extent  # with a master, moments and gradients
    unread: Extent  # that its backward does not read, if its forward does not run again
    looked_up: Extent  # row by row
    trained_rows: Extent  # of what is looked up
    borrowed: Extent  # of other layers
    coded: Extent  # that replicas hold as codes, for products in fp8
    of_experts: Extent  # which `expert` cuts while layers compute, too
    trained_experts: Extent


@cached(256)
def _layer_extents(model: ModelConfig) -> tuple[_LayerExtents, ...]:
    """The extents of each kind of layer, in the order of `Kinds.in_order`."""
    return tuple(
        _LayerExtents(
            all=Extent.of(kind.parameters),
            trained=Extent.of(parameter for parameter in kind.parameters if parameter.trains),
            unread=Extent.of(
                parameter for parameter in kind.parameters if parameter.use == "added"
            ),
            looked_up=Extent.of(_looked_up(kind)),
            trained_rows=Extent.of(table for table in _looked_up(kind) if table.trains),
            borrowed=Extent.of(parameter for _, parameter in _borrowed(model, kind)),
            coded=Extent.of(_coded(kind)),
            of_experts=Extent.of(_of_experts(kind)),
            trained_experts=Extent.of(weight for weight in _of_experts(kind) if weight.trains),
        )
        for kind in kinds(model).in_order
    )


def _looked_up(kind: Kind) -> list[Parameter]:
    return [parameter for parameter in kind.parameters if parameter.use == "looked_up"]


def _of_experts(kind: Kind) -> list[Parameter]:
    return [parameter for parameter in kind.parameters if parameter.is_of_experts]


def _coded(kind: Kind) -> list[Parameter]:
    names = {name for product in kind.products if product.dtype == FP8 for name in product.weights}
    return [parameter for parameter in kind.parameters if parameter.name in names]


def _borrowed(model: ModelConfig, kind: Kind) -> list[tuple[str, Parameter]]:
    """Parameters of other layers that a layer reads, each beside the name of its layer."""
    found = []
    for path in kind.borrows:
        layer, _, name = path.partition("/")
        [parameter] = [stated for stated in layers(model)[layer].parameters if stated.name == name]
        found.append((layer, parameter))
    return found


class StageExtents(NamedTuple):
    """The parameters of a stage, by what becomes of them."""

    all: Extent  # with copies
    trained: Extent
    copies: tuple[Parameter, ...]  # of what its layers borrow from layers of other stages
    unread: Extent  # by a backward that computes nothing again
    tables: Extent  # of which only rows are read
    rows_alone: Extent  # trained tables of which only rows are read
    row_numbers: int  # of a token's rows of trained tables
    coded: Extent  # that replicas hold as codes
    of_experts: Extent
    trained_experts: Extent


@cached(100_000)
def stage_extents(model: ModelConfig, counts: tuple[int, ...]) -> StageExtents:
    """The extents of a stage with so many layers of each kind."""
    own = list(zip(counts, kinds(model).in_order, _layer_extents(model), strict=True))
    borrowed = {
        (layer, parameter.name): parameter
        for count, kind, _ in own
        for layer, parameter in (_borrowed(model, kind) if count else ())
    }
    present = {kind for count, kind, _ in own if count}
    is_here = lambda layer: layers(model)[layer] in present
    copies = tuple(item for (layer, _), item in borrowed.items() if not is_here(layer))
    read_whole = [item for (layer, _), item in borrowed.items() if is_here(layer)]
    total = lambda name: Extent.total(getattr(e, name).times(n) for n, _, e in own)
    alone = total("looked_up").without(Extent.of(read_whole))
    return StageExtents(
        all=Extent.total([total("all"), Extent.of(copies)]),
        trained=Extent.total([total("trained"), Extent.of(c for c in copies if c.trains)]),
        copies=copies,
        unread=Extent.total([total("unread"), alone]),
        tables=alone,
        rows_alone=total("trained_rows").without(Extent.of(p for p in read_whole if p.trains)),
        row_numbers=sum(n * row_numbers(kind, trains=True) for n, kind, _ in own),
        coded=total("coded"),
        of_experts=total("of_experts"),
        trained_experts=total("trained_experts"),
    )


def row_numbers(kind: Kind, *, trains: bool = False) -> int:
    """Numbers of the rows that a layer looks up for one token; with `trains`, of trained tables."""
    tables = [table for table in _looked_up(kind) if table.trains or not trains]
    return sum(table.size() // table.shape[0] for table in tables)


def table_parameters(model: ModelConfig) -> int:
    """The token table, V D: of the embedding, and of a tied output projection."""
    name = TABLE.rpartition("/")[2]
    return Extent.of(
        parameter for parameter in kinds(model).embed.parameters if parameter.name == name
    ).size


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
    return sum(n * (extents.all.size + extents.borrowed.size) for n, extents in pairs)


def parameter_counts(model: ModelConfig) -> tuple[int, int]:
    """Parameters of the model, and those of them that one token uses.

    A table that two layers share counts once. A token uses a share of the weights of a sparse layer
    (`Parameter.active_share`), and of others all; an embedding counts as a whole. What a step
    changes without a gradient is of the training, and does not count.

    >>> parameter_counts(ModelConfig(
    ...     num_layers=1, width=8, num_heads=2, context_length=4, vocab_size=16, mlp_width=8,
    ...     tied_embeddings=True, norm="rms_norm"))
    (536, 536)
    """
    counts = (1, *block_counts(model), 1)
    pairs = list(zip(counts, kinds(model).in_order, strict=True))
    rows = [
        (n, parameter)
        for n, kind in pairs
        for parameter in kind.parameters
        if not parameter.changes
    ]
    active = sum(n * parameter.size() * parameter.active_share for n, parameter in rows)
    return sum(n * parameter.size() for n, parameter in rows), round(active)


def stage_parameters(model: ModelConfig, stage: StageShape) -> Sizes:
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
    return stage_extents(model, stage.counts).all.on(stage.tensor)


def held_parameters(model: ModelConfig, stage: StageShape) -> tuple[Numbers, Numbers]:
    """Parameters of a replica on each device, and of these the parameters that train.

    A parameter without the model width is whole on all devices of `fsdp` and `context`.
    """
    own, parts = stage_extents(model, stage.counts), stage.parameter_parts
    return own.all.held(stage.tensor, parts), own.trained.held(stage.tensor, parts)


def gathered_parameters(model: ModelConfig, stage: StageShape) -> tuple[Sizes, Sizes]:
    """Parameters that a device gathers over `fsdp` in a forward, and in a backward.

    A forward reads all but `unsent_numbers`. A backward does not read a table whose rows were
    looked up, unless it is the output projection too, nor the bias of a norm that is not computed
    again. Here 4 of 16 rows are sent:

    >>> model = ModelConfig(
    ...     num_layers=1, width=8, num_heads=2, context_length=4, vocab_size=16, norm="rms_norm")
    >>> both = StageShape(blocks=(1,), is_first=True, is_last=True, data=1, tensor=1, fsdp=2,
    ...                   sequences=1, chunks=1, in_flight=1, head_in_flight=1, dtype="float32",
    ...                   checkpointing="none")
    >>> forward, backward = gathered_parameters(model, both)
    >>> [int(n) for n in (stage_parameters(model, both) - forward, forward - backward)]
    [96, 32]
    """
    own = stage_extents(model, stage.counts)
    # Layers that compute again read what their forward reads.
    read_again = stage_extents(model, (0, *stage.again, 0)).unread
    numbers = own.all.in_parts(stage.tensor)
    unread = own.unread.in_parts(stage.tensor) - read_again.in_parts(stage.tensor)
    return numbers - stage_unsent(model, stage), numbers - unread


def gathered_bytes(model: ModelConfig, stage: StageShape) -> tuple[Numbers, Numbers]:
    """Bytes that a device gathers over `fsdp` in a forward, and in a backward.

    Codes of fp8 have a byte a number, in a layout for the forward and another for the backward. A
    backward whose forward runs again gathers both; so is `down` counted, of which it reads one.
    """
    width = DTYPE_BYTES[stage.dtype]
    coded = stage_extents(model, stage.counts).coded.in_parts(stage.tensor)
    forward, backward = (
        width * numbers - (width - 1) * coded for numbers in gathered_parameters(model, stage)
    )
    again = stage_extents(model, (0, *stage.again, 0)).coded.in_parts(stage.tensor)
    return forward, backward + (stage.checkpointing == "full") * again


def reduced_numbers(model: ModelConfig, stage: StageShape) -> Sizes:
    """Numbers that a device gives to its reductions over `fsdp` in a backward.

    They are the gradients of all parameters that train. For a table whose rows are looked up they
    are the gradients of the rows, T D numbers, which XLA moves to the devices that hold the dims.
    """
    own = stage_extents(model, stage.counts)
    numbers = own.trained.on(stage.tensor) - own.rows_alone.on(stage.tensor)
    return numbers + stage_tokens(model, stage) * own.row_numbers


def uncut_numbers(model: ModelConfig, stage: StageShape) -> Sizes:
    """The part of `reduced_numbers` of parameters that are whole on all devices of `fsdp`.

    Their gradients are summed on all of these devices, which sends twice as much.
    """
    own = stage_extents(model, stage.counts)
    rows = own.rows_alone.out_of_parts(stage.tensor)
    return own.trained.out_of_parts(stage.tensor) - rows


def unsent_numbers(
    model: ModelConfig, ends: tuple[bool, bool], num_tokens: Sizes, tensor: Sizes
) -> Sizes:
    """Numbers of the embedding's tables that a device does not gather, as it gets rows instead.

    Each device looks up its part of the rows of all tokens of the replica, and they are then cut
    along tokens: T D numbers come in place of V D, where that is less. A table that the head
    multiplies with on the same stage is gathered for it. So is that of an embedding of your own.

    Args:
      ends: whether the stage has the embedding, and the head.
      num_tokens: on each device.
    """
    (is_first, is_last), embed = ends, kinds(model).embed
    if not is_first or embed.reads is not None:
        return 0
    blocks = (0,) * len(kinds(model).blocks)
    own = stage_extents(model, (1, *blocks, int(is_last)))
    rows = num_tokens * row_numbers(embed)
    return np.maximum(own.tables.in_parts(tensor) - rows, 0)


def stage_unsent(model: ModelConfig, stage: StageShape) -> Sizes:
    """The `unsent_numbers` of a stage."""
    ends = stage.is_first, stage.is_last
    return unsent_numbers(model, ends, stage_tokens(model, stage), stage.tensor)


def layer_parameters(model: ModelConfig, stage: StageShape) -> list[Numbers]:
    """Parameters that a layer of each kind of the stage reads, on each of its devices."""
    own = zip(stage.counts, _layer_extents(model), strict=True)
    return [
        extents.all.in_parts(stage.tensor)
        + extents.borrowed.in_parts(stage.tensor)
        - extents.of_experts.in_parts(stage.tensor) * (1 - 1 / stage.expert)
        for count, extents in own
        if count
    ]
