"""The outer rules: what islands do with their weights when they meet. Does not import JAX.

DiLoCo (arXiv 2311.08105) takes a step of Nesterov's momentum along the mean difference between the
global weights and those of the islands. CO2 (arXiv 2401.16265) takes such a step one round late.
With eager updates (arXiv 2502.12996) an island takes its own part of it at once. NoLoCo is in
`gossip`. The functions work for NumPy and for JAX.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from holmesjax.config import ModelConfig, OuterConfig
from holmesjax.layer_specs.model_layers import layers
from holmesjax.plan.codecs import codec_of

WORD_BYTES = 4  # of a number that islands keep, in float32


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
    outer: OuterConfig,
    island_weights: Sequence[Any],
    weights: Any,
    momentum: Any,
    shares: Sequence[int] = (),
) -> tuple[Any, Any]:
    """The global weights and the momentum after a meeting; all arrays have one shape, float32.

    It is G - rate * (D + momentum * V) with D = G - mean and V = momentum * V + D, arranged so that
    rate 1 and momentum 0 give the mean to the bit (docs/design/islands.md).

    Args:
      outer: the rate, the momentum, and whether the momentum is Nesterov's.
      island_weights: of each island, in the order of the islands.
      weights: the global weights of the meeting before.
      momentum: of the meeting before; zeros at first.
      shares: as `mean_of` takes them.
    """
    mean = mean_of(island_weights, shares)
    difference = weights - mean
    after = outer.decay * momentum + difference
    ahead = after if outer.nesterov else momentum
    kept, pushed = 1.0 - outer.rate, outer.rate * outer.decay
    return mean + kept * difference - pushed * ahead, after


def mean_of(arrays: Sequence[Any], shares: Sequence[int] = ()) -> Any:
    """The mean of arrays, added in their order; where their shares differ, `weighted_mean`.

    Args:
      arrays: of one shape.
      shares: of the tokens behind each; empty: equal ones.
    """
    if len(set(shares)) > 1:
        return weighted_mean(arrays, shares)
    total = arrays[0]
    for array in arrays[1:]:
        total = total + array
    return total / len(arrays)


def weighted_mean(arrays: Sequence[Any], tokens: Sequence[int]) -> Any:
    """The mean of float32 arrays with a weight for each, summed in their order.

    It is the first one and a share of the differences of the others to it: equal arrays, and one
    alone, are their own mean to the bit.
    """
    total, mean = sum(tokens), arrays[0]
    for array, count in zip(arrays[1:], tokens[1:], strict=True):
        mean = mean + (count / total) * (array - arrays[0])
    return mean


def stepped(outer: OuterConfig, difference: Any, momentum: Any) -> tuple[Any, Any]:
    """The step along a difference and the momentum after it, by the rule of DiLoCo.

    Args:
      outer: as `outer_step` takes it.
      difference: of the global weights to the mean of the islands, or a part of it.
      momentum: before.
    """
    after = outer.decay * momentum + difference
    ahead = difference + outer.decay * after if outer.nesterov else after
    return outer.rate * ahead, after


def late_step(
    outer: OuterConfig, difference: Any, weights: Any, before: Any, momentum: Any
) -> tuple[Any, Any]:
    """The global weights and the momentum of CO2 after the difference of the round before has come.

    The momentum is clipped. The step is shortened by its staleness gap: how far the weights have
    moved since those that the difference is of, in units of the clip. Clip, units and penalty are
    ours; the paper's are not known here.

    Args:
      outer: the rate, the momentum, the clip and the penalty.
      difference: of the weights `before` to the mean of the islands that began with them.
      weights: the global weights, with which the islands are under way.
      before: the global weights of the round before.
      momentum: of the round before; zeros at first.
    """
    most = outer.largest
    after = (outer.decay * momentum + difference).clip(-most, most)
    gap = 1.0 + (outer.shortens / most) * abs(weights - before)
    return weights - outer.rate * after / gap, after


def owner_step(
    outer: OuterConfig,
    sent: Sequence[Any],
    weights: Any,
    momentum: Any,
    before: Any,
    shares: Sequence[int] = (),
) -> tuple[Any, Any]:
    """The global weights and the momentum of what an owner has after a meeting, by the rule.

    Args:
      outer: the rule.
      sent: what each island has sent, in the order of the islands: weights, or encoded differences.
      weights: the global weights.
      momentum: before.
      before: the global weights of the meeting before the last, which CO2 needs; else None.
      shares: as `mean_of` takes them.
    """
    if outer.rule == "nesterov" and sends_weights(outer):
        return outer_step(outer, sent, weights, momentum, shares)
    if sends_weights(outer):
        difference = before - mean_of(sent, shares)
    else:
        difference = mean_of(list(map(codec_of(outer).decode, sent)), shares)
    if outer.rule == "co2":
        return late_step(outer, difference, weights, before, momentum)
    step, after = stepped(outer, difference, momentum)
    return weights - step, after


def own_step(outer: OuterConfig, sent: Any, parts: float, momentum: Any) -> tuple[Any, Any]:
    """An island's own part of the next step, which it takes at once, and the momentum of its parts.

    By linearity the steps of eager updates are those of the global weights one round late, and
    behind them this part, which the next global weights have too.

    Args:
      outer: the rule.
      sent: the encoded difference that the island sends.
      parts: by which the island's tokens are those of all: of equal ones, how many there are.
      momentum: of its own parts, before.
    """
    return stepped(outer, codec_of(outer).decode(sent) / parts, momentum)


class KeptArrays(NamedTuple):
    """The arrays that an island keeps between meetings, by their names in the state."""

    owned: tuple[str, ...]  # of the parameters that it owns
    own: tuple[str, ...]  # of all of its parameters

    def num_bytes(self, num_owned: int, num_all: int) -> int:
        """Their bytes, of so many numbers that the island owns among so many that it has."""
        return WORD_BYTES * (len(self.owned) * num_owned + len(self.own) * num_all)


def kept_by(outer: OuterConfig) -> KeptArrays:
    """The arrays that the islands of a run keep between meetings, float32 all of them.

    >>> kept_by(OuterConfig()), kept_by(OuterConfig(rule="eager", codec="bfloat16")).own
    (KeptArrays(owned=('weights', 'momentum'), own=()), ('start', 'momentum', 'known'))
    """
    owned = {"noloco": ("weights",), "co2": ("weights", "momentum", "before")}
    known = () if codec_of(outer).is_exact or outer.has_pairs else ("known",)
    own = ("start", "momentum") if outer.rule in ("noloco", "eager") else ()
    return KeptArrays(owned.get(outer.rule, ("weights", "momentum")), own + known)


def kept_bytes(sizes: Mapping[str, int], num_islands: int, outer: OuterConfig) -> list[int]:
    """The bytes that each island keeps between meetings, over all of its devices.

    >>> kept_bytes({"a": 4, "b": 3}, 2, OuterConfig())
    [32, 24]

    Args:
      sizes: numbers of each parameter that trains, by its name.
      num_islands: of the run.
      outer: the rule of the meetings.
    """
    owner, kept = owners(sizes, num_islands), kept_by(outer)
    owned = [sum(n for name, n in sizes.items() if owner[name] == k) for k in range(num_islands)]
    return [kept.num_bytes(n, sum(sizes.values())) for n in owned]


def sends_weights(outer: OuterConfig) -> bool:
    """Whether islands send owners their weights, or else differences: these can be rounded."""
    return codec_of(outer).is_exact and outer.rule in ("nesterov", "co2")


def blend(share: float, own: Any, weights: Any) -> Any:
    """The weights that an island goes on with: global ones in a share, its own in the rest."""
    return (1.0 - share) * own + share * weights


class WayBytes(NamedTuple):
    """The bytes that an island sends in a meeting."""

    to_owners: int
    from_owner: int


def way_bytes(
    sizes: Mapping[str, int],
    num_islands: int,
    names: Collection[str] | None = None,
    number_bytes: int = 4,
) -> list[WayBytes]:
    """The bytes that each island sends in a meeting, each way.

    >>> way_bytes({"a": 3, "b": 3, "c": 1}, 2, ["b", "c"])
    [WayBytes(to_owners=12, from_owner=4), WayBytes(to_owners=4, from_owner=12)]

    Args:
      sizes: numbers of each parameter that trains, by its name.
      num_islands: of the run.
      names: the parameters that meet; None: all.
      number_bytes: of a number that crosses.
    """
    owner = owners(sizes, num_islands)
    met = {name: n for name, n in sizes.items() if names is None or name in names}
    owned = [sum(n for name, n in met.items() if owner[name] == k) for k in range(num_islands)]
    total, others = sum(met.values()), num_islands - 1
    return [WayBytes(number_bytes * (total - n), number_bytes * n * others) for n in owned]


def meeting_bytes(
    sizes: Mapping[str, int], num_islands: int, outer: OuterConfig | None = None
) -> list[int]:
    """The bytes that each island sends in a meeting of all parameters: as many as it receives.

    >>> meeting_bytes({"a": 3, "b": 3}, 2)
    [24, 24]
    >>> meeting_bytes({"a": 3, "b": 3}, 3, OuterConfig(rule="noloco", codec="bfloat16"))
    [36, 36, 36]

    Args:
      sizes: numbers of each parameter that trains, by its name.
      num_islands: of the run.
      outer: the rule of the meetings; None: that of DiLoCo, in float32. In pairs, where one island
        of an odd number sits out, it sends nothing in that meeting.
    """
    outer = outer or OuterConfig()
    num_bytes = codec_of(outer).num_bytes
    if outer.has_pairs:
        of_pair = pair_bytes(sum(sizes.values()), outer) if num_islands > 1 else 0
        return [of_pair] * num_islands
    return [sum(ways) for ways in way_bytes(sizes, num_islands, number_bytes=num_bytes)]


def pair_bytes(numbers: int, outer: OuterConfig) -> int:
    """The bytes that one of a pair sends: its difference by the codec, slow weights in float32."""
    return numbers * (codec_of(outer).num_bytes + 4)
