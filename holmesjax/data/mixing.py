"""The schedule of a mixture: which source gives the k-th sequence of a run, and which of its own.

The schedule is exact and keeps no state: the number of sequences of each source among the first k
is a function of k and the weights, never more than a few away from k times the weight. A source
takes its share of the k sequences by a floor, the next one its share of the rest, and so on.

Dims: K sequences of a run, S sources.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

TOTAL = 2**16  # of the whole weights of a mixture
MOST = 2**46  # sequences of a run: products with TOTAL are int64


class ItemTurn(NamedTuple):
    """The items of a source that are an island's: every so many-th one of its order."""

    number: int = 0  # of its first item
    readers: int = 1  # islands that take items in turn


class WeightsFrom(NamedTuple):
    """The weights from a sequence of the run on."""

    first: int
    weights: Mapping[str, float]  # by the name of a source; one that is not named has weight 0


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Whole numbers in proportion to weights, with the sum TOTAL, by largest remainder.

    >>> whole_weights([0.5, 0.3, 0.15, 0.05])
    [32768, 19661, 9830, 3277]
    """
    share_S = np.asarray(weights, np.float64) / sum(weights) * TOTAL
    whole_S = np.floor(share_S).astype(np.int64)
    largest = np.argsort(-(share_S - whole_S), kind="stable")  # of two equals the first
    whole_S[largest[: TOTAL - int(whole_S.sum())]] += 1
    found: list[int] = whole_S.tolist()
    return found


def picks(k_K: np.ndarray, whole: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The source of each sequence, and its place among those of this source; both int64 [K]."""
    assert (k_K < MOST).all(), f"too many sequences: {k_K.max()}"
    source_K, index_K = np.zeros_like(k_K), np.zeros_like(k_K)
    before_K, after_K, rest = k_K, k_K + 1, sum(whole)
    for source, weight in enumerate(whole):
        if not weight:
            continue
        left_before_K, left_after_K = (x * (rest - weight) // rest for x in (before_K, after_K))
        taken_K = after_K - left_after_K
        is_own_K = taken_K != before_K - left_before_K
        source_K[is_own_K], index_K[is_own_K] = source, taken_K[is_own_K] - 1
        before_K, after_K, rest = left_before_K, left_after_K, rest - weight
    return source_K, index_K


def counts(k: int, whole: Sequence[int]) -> list[int]:
    """The number of sequences of each source among the first k.

    >>> counts(1000, [32768, 19661, 9830, 3277])
    [500, 301, 150, 49]
    """
    found, rest = [], sum(whole)
    for weight in whole:
        left = k * (rest - weight) // rest if weight else k
        found.append(k - left)
        k, rest = left, rest - weight
    return found


class Schedule:
    """The schedule of a whole run, whose weights may change.

    Args:
      names: of the sources.
      phases: the weights, from sequence 0 on.
    """

    def __init__(self, names: Sequence[str], phases: Sequence[WeightsFrom]):
        assert phases[0].first == 0, "weights from the first sequence on"
        self.names = tuple(names)
        self._firsts = [phase.first for phase in phases]
        self._orders: list[list[int]] = []  # of each phase: its sources, the heaviest first
        self._wholes: list[list[int]] = []
        self._taken: list[np.ndarray] = []  # [S]: of each source before each phase
        for number, phase in enumerate(phases):
            order = sorted(
                range(len(self.names)),
                key=lambda s: (-phase.weights.get(self.names[s], 0.0), self.names[s]),
            )
            weights = [phase.weights.get(self.names[s], 0.0) for s in order]
            self._taken.append(self.counts(phase.first) if number else np.zeros(len(order), int))
            self._orders.append(order)
            self._wholes.append(whole_weights(weights))

    def reads(self, name: str) -> bool:
        """Whether it takes anything from a source."""
        number = self.names.index(name)
        pairs = zip(self._orders, self._wholes, strict=True)
        return any(whole[order.index(number)] for order, whole in pairs)

    def picks(self, k_K: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The number of each sequence's source, and its place among those of this source."""
        phase_K = np.searchsorted(self._firsts, k_K, side="right") - 1
        source_K, index_K = np.zeros_like(k_K), np.zeros_like(k_K)
        for phase in np.unique(phase_K).tolist():
            here = phase_K == phase
            place_K, own_K = picks(k_K[here] - self._firsts[phase], self._wholes[phase])
            source_K[here] = np.asarray(self._orders[phase])[place_K]
            index_K[here] = own_K + self._taken[phase][source_K[here]]
        return source_K, index_K

    def counts(self, k: int) -> np.ndarray:
        """The number of sequences of each source among the first k; int64 [S]."""
        phase = bisect_right(self._firsts[: len(self._wholes)], k) - 1
        own = counts(k - self._firsts[phase], self._wholes[phase])
        taken_S = self._taken[phase].copy()
        taken_S[self._orders[phase]] += own
        return taken_S
