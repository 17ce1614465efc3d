"""The Transformer layers of a model as a list that stages cut into ranges of consecutive layers.

counts  the number of layers of each kind, in the order of `Kinds.blocks`
span    a range: its first layer, and the number of its layers
load    a whole number for each layer, about its share of the model's work; for layers of one kind 1

Ranges with equal counts cost the same, so results are kept by counts.
"""

import itertools
import math
from collections.abc import Sequence
from functools import cached_property

from holmesjax.config import ModelConfig
from holmesjax.costs.products import layer_forward_flop
from holmesjax.layer_specs.distinct_kinds import block_counts, blocks_in_order, kinds

Counts = tuple[int, ...]
Span = tuple[int, int]

LOADS = 8  # the load of the cheapest kind, before common factors are divided out


class LayerRanges:
    """The layers of one model."""

    def __init__(self, model: ModelConfig):
        self._model = model
        self._counts: dict[tuple[int, int], Counts] = {}

    @cached_property
    def _before(self) -> list[Counts]:
        """The counts of the layers before each layer: prefix sums."""
        found = [[0] * self.num_kinds]
        for kind in blocks_in_order(self._model):
            found.append(found[-1].copy())
            found[-1][kind] += 1
        return list(map(tuple, found))

    @cached_property
    def num_kinds(self) -> int:
        return len(kinds(self._model).blocks)

    def counts(self, start: int, stop: int) -> Counts:
        """The counts of a range; stop is behind its last layer."""
        key = start, stop
        if key not in self._counts:
            pairs = zip(self._before[stop], self._before[start], strict=True)
            self._counts[key] = tuple(a - b for a, b in pairs)
        return self._counts[key]

    def of_size(self, size: int) -> list[Counts]:
        """The counts that ranges of some size have, each once."""
        last = len(self._before) - 1 - size
        return list(dict.fromkeys(self.counts(i, i + size) for i in range(last + 1)))

    def ranges(self, sizes: Sequence[int]) -> list[Counts]:
        """The counts of consecutive ranges of these sizes, from the first layer on."""
        edges = [0, *itertools.accumulate(sizes)]
        return [self.counts(start, stop) for start, stop in itertools.pairwise(edges)]

    def chunks(self, layers: Sequence[int], num_chunks: int) -> list[tuple[Counts, ...]]:
        """The counts of each chunk of every stage.

        Model order goes through all stages chunk by chunk.

        Args:
          layers: of each stage, in all its chunks.
          num_chunks: of each stage.
        """
        if num_chunks == 1:
            return [(counts,) for counts in self.ranges(layers)]
        shares = [split_chunks(n, num_chunks) for n in layers]
        found = self.ranges([share[chunk] for chunk in range(num_chunks) for share in shares])
        return [tuple(found[stage :: len(layers)]) for stage in range(len(layers))]

    def spans(self, layers: Sequence[int], num_chunks: int) -> list[tuple[Span, ...]]:
        """The layers of each chunk of every stage: the first of them, and their number."""
        shares = [split_chunks(n, num_chunks) for n in layers]
        sizes = [share[chunk] for chunk in range(num_chunks) for share in shares]
        starts = itertools.accumulate(sizes, initial=0)
        found = list(zip(starts, sizes, strict=False))
        return [tuple(found[stage :: len(layers)]) for stage in range(len(layers))]

    def first(self, spans: Sequence[Span], number: int) -> tuple[Counts, ...]:
        """The counts of the first layers of a stage, by its chunks.

        Args:
          spans: the layers of each of its chunks.
          number: of the first layers of all its chunks.
        """
        found = []
        for start, size in spans:
            own = min(number, size)
            found.append(self.counts(start, start + own))
            number -= own
        return tuple(found)

    @cached_property
    def loads(self) -> tuple[int, ...]:
        """The load of a layer of each kind: in proportion to the products of its forward."""
        flop = [
            layer_forward_flop(kind, self._model.context_length, num_tokens=1)
            for kind in kinds(self._model).blocks
        ]
        least = max(1.0, min(flop))
        found = [max(1, round(LOADS * flop_of_kind / least)) for flop_of_kind in flop]
        return tuple(load // math.gcd(*found) for load in found)

    @cached_property
    def load(self) -> int:
        """The load of all layers; their number if they are of one kind."""
        pairs = zip(block_counts(self._model), self.loads, strict=True)
        return sum(count * load for count, load in pairs)

    @cached_property
    def load_shares(self) -> tuple[float, ...]:
        """The share of the load of all layers that those of each kind have."""
        pairs = zip(block_counts(self._model), self.loads, strict=True)
        return tuple(count * load / self.load for count, load in pairs)

    @cached_property
    def proportions(self) -> Counts:
        """The counts of the whole model without their common factor."""
        counts = block_counts(self._model)
        return tuple(count // math.gcd(*counts) for count in counts)

    def unit(self, kind: int, number: int = 1) -> Counts:
        """The counts of so many layers of one kind."""
        return tuple(number * (kind == number_of_kind) for number_of_kind in range(self.num_kinds))


def split_chunks(num_layers: int, num_chunks: int) -> tuple[int, ...]:
    """Layers of each chunk of a stage: equal, or one more in the first ones.

    >>> split_chunks(5, 2)
    (3, 2)
    """
    each, rest = divmod(num_layers, num_chunks)
    return tuple(each + (chunk < rest) for chunk in range(num_chunks))


def sum_counts(counts: Sequence[Counts]) -> Counts:
    """The counts of several ranges together."""
    return counts[0] if len(counts) == 1 else tuple(map(sum, zip(*counts, strict=True)))
