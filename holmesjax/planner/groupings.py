"""Groupings of clusters into islands that are worth a look.

Few clusters have few groupings, and all are returned. Of more clusters the near ones are joined,
by each rate of a link in turn: islands are then what links of that rate or more hold together.
"""

from collections.abc import Callable, Iterator, Sequence

from holmesjax.plan.ways import Grouping

EXHAUSTIVE = 6  # clusters of which all groupings are returned: 813 for 6


def groupings(
    names: Sequence[str], rate_between: Callable[[str, str], float]
) -> Iterator[Grouping]:
    """Yields groupings of clusters into two or more islands.

    >>> list(groupings("abc", lambda x, y: 1.0))[:3]
    [(('a',), ('b',), ('c',)), (('a', 'c'), ('b',)), (('a',), ('b', 'c'))]

    Args:
      names: of the clusters; with few of them, some may be in no island.
      rate_between: the bytes/s between two clusters, the same both ways.
    """
    found = _all(names) if len(names) <= EXHAUSTIVE else _joined(names, rate_between)
    return (grouping for grouping in found if len(grouping) > 1)


def _all(names: Sequence[str]) -> Iterator[Grouping]:
    """Yields the partitions of each subset of some names."""
    if not names:
        yield ()
        return
    *others, last = names
    for grouping in _all(others):
        yield (*grouping, (last,))
        for k, island in enumerate(grouping):
            yield (*grouping[:k], (*island, last), *grouping[k + 1 :])
        yield grouping


def _joined(names: Sequence[str], rate_between: Callable[[str, str], float]) -> Iterator[Grouping]:
    """Yields the groupings by the rates of links, from single clusters on."""
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    island_of = {name: i for i, name in enumerate(names)}
    last = None
    rates = sorted({rate_between(a, b) for a, b in pairs}, reverse=True)
    for rate in (None, *rates):
        for a, b in pairs:
            if rate is not None and rate_between(a, b) >= rate:
                old, new = island_of[b], island_of[a]
                island_of = {name: new if i == old else i for name, i in island_of.items()}
        numbers = dict.fromkeys(island_of.values())
        found = tuple(tuple(n for n in names if island_of[n] == number) for number in numbers)
        if found != last:
            yield found
        last = found
