"""The kinds of a model's layers, each once, and how many layers have each kind."""

from typing import NamedTuple

import numpy as np

from holmesjax.config import ModelConfig
from holmesjax.layer_specs.kind import Kind
from holmesjax.layer_specs.model_layers import cached, layers


class Kinds(NamedTuple):
    """The kinds of a model's layers: its ends, and each kind of Transformer layer once."""

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
    """The kind's name of each Transformer layer by the layer's name; empty where all have one.

    Layers of several kinds may have one name: blocks with other adapters, or in fp8 and not.

    >>> kind_names(ModelConfig(num_layers=2, width=8, num_heads=2, context_length=4))
    {}
    """
    if len({kind.name for kind in kinds(model).blocks}) == 1:
        return {}
    return {name: kind.name for name, kind in layers(model).items() if kind.place == "middle"}


@cached(256)
def block_counts(model: ModelConfig) -> tuple[int, ...]:
    """The number of Transformer layers of each kind in the whole model.

    >>> block_counts(ModelConfig(num_layers=3, width=8, num_heads=2, context_length=4))
    (3,)
    """
    return tuple(np.bincount(blocks_in_order(model)).tolist())
