"""The outer rule: what islands do with their weights when they meet. Does not import JAX.

DiLoCo (arXiv 2311.08105) takes a step of Nesterov's momentum along the mean difference between the
global weights and those of the islands. The functions work for NumPy and for JAX.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from holmesjax.config import ModelConfig, OuterConfig
from holmesjax.layer_specs.model_layers import layers


def trained_sizes(model: ModelConfig) -> dict[str, int]:
    """Numbers of each parameter that trains, by layer and name: "block_000.up_DF"."""
    return {
        ".".join((layer, *parameter.path)): math.prod(parameter.shape)
        for layer, kind in layers(model).items()
        for parameter in kind.parameters
        if parameter.trains
    }


def owner_of(model: ModelConfig, num_islands: int) -> dict[str, int]:
    """The island that owns each parameter that trains."""
    return owners(trained_sizes(model), num_islands)


def owners(sizes: Mapping[str, int], num_islands: int) -> dict[str, int]:
    """The island that owns each parameter: each island owns about as many numbers.

    >>> owners({"a": 4, "b": 3, "c": 2}, 2)
    {'a': 0, 'b': 1, 'c': 1}

    Args:
      sizes: numbers of each parameter, by its name.
      num_islands: of the run.
    """
    loads, found = [0] * num_islands, {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        found[name] = island = loads.index(min(loads))
        loads[island] += sizes[name]
    return {name: found[name] for name in sizes}


def outer_step(
    outer: OuterConfig, island_weights: Sequence[Any], weights: Any, momentum: Any
) -> tuple[Any, Any]:
    """The global weights and the momentum after a meeting; all arrays have one shape, float32.

    It is G - rate * (D + momentum * V) with D = G - mean and V = momentum * V + D, arranged so that
    rate 1 and momentum 0 give the mean to the bit (docs/design/islands.md).

    Args:
      outer: the rate, the momentum, and whether the momentum is Nesterov's.
      island_weights: of each island, in the order of the islands.
      weights: the global weights of the meeting before.
      momentum: of the meeting before; zeros at first.
    """
    mean = island_weights[0]
    for of_island in island_weights[1:]:
        mean = mean + of_island
    mean = mean / len(island_weights)
    difference = weights - mean
    after = outer.momentum * momentum + difference
    ahead = after if outer.nesterov else momentum
    kept, pushed = 1.0 - outer.rate, outer.rate * outer.momentum
    return mean + kept * difference - pushed * ahead, after


def blend(share: float, own: Any, weights: Any) -> Any:
    """The weights that an island goes on with: global ones in a share, its own in the rest."""
    return (1.0 - share) * own + share * weights


class WayBytes(NamedTuple):
    """The bytes that an island sends in a meeting."""

    to_owners: int
    from_owner: int


def way_bytes(
    sizes: Mapping[str, int], num_islands: int, names: Collection[str] | None = None
) -> list[WayBytes]:
    """The bytes that each island sends in a meeting, each way.

    >>> way_bytes({"a": 3, "b": 3, "c": 1}, 2, ["b", "c"])
    [WayBytes(to_owners=12, from_owner=4), WayBytes(to_owners=4, from_owner=12)]

    Args:
      sizes: numbers of each parameter that trains, by its name.
      num_islands: of the run.
      names: the parameters that meet; None: all.
    """
    owner = owners(sizes, num_islands)
    met = {name: n for name, n in sizes.items() if names is None or name in names}
    owned = [sum(n for name, n in met.items() if owner[name] == k) for k in range(num_islands)]
    return [WayBytes(4 * (sum(met.values()) - n), 4 * n * (num_islands - 1)) for n in owned]


def meeting_bytes(sizes: Mapping[str, int], num_islands: int) -> list[int]:
    """The bytes that each island sends in a meeting of all parameters: as many as it receives.

    >>> meeting_bytes({"a": 3, "b": 3}, 2)
    [24, 24]
    """
    return [sum(ways) for ways in way_bytes(sizes, num_islands)]
