"""Orders of experts over devices against every order there is."""

import itertools

import numpy as np
import pytest

from holmesjax.costs.expert_placement import EXACT, best, greedy, peak, placed


def partitions(items, each):
    """Every way to deal items into groups of equal size."""
    if not items:
        yield []
        return
    first, *rest = items
    for others in itertools.combinations(rest, each - 1):
        left = [item for item in rest if item not in others]
        for groups in partitions(left, each):
            yield [(first, *others), *groups]


@pytest.mark.parametrize("count, devices", [(8, 2), (8, 4), (9, 3)])
def test_no_order_has_a_smaller_peak_than_the_best(count, devices):
    rng, is_worse = np.random.default_rng(0), 0
    for draw in range(12):
        loads = rng.pareto(1.5, count) if draw % 2 else rng.integers(0, 6, count).astype(float)
        every = partitions(list(range(count)), count // devices)
        least = min(max(sum(loads[e] for e in group) for group in groups) for groups in every) / (
            loads.mean() * count / devices
        )
        found = {name: f(loads.tolist(), devices) for name, f in (("b", best), ("g", greedy))}
        assert all(sorted(order) == list(range(count)) for order in found.values())
        peaks = {name: peak(loads.tolist(), order, devices) for name, order in found.items()}
        assert peaks["b"] == pytest.approx(least)
        assert least <= peaks["g"] * (1 + 1e-12)
        is_worse += peaks["g"] > least * (1 + 1e-9)
    # Of pairs, the greedy order is the best one.
    assert (is_worse > 0) == (count // devices > 2), "no draw tells the two apart"


def test_experts_stay_by_number_where_nothing_is_gained():
    assert placed([0.0] * 8, 4) == placed([1.0] * 8, 4) == list(range(8))
    assert peak([0.0] * 8, range(8), 4) == 1.0
    many = np.random.default_rng(1).normal(1, 0.3, 4 * EXACT).clip(0).tolist()
    by_number, order = range(len(many)), placed(many, 8)
    assert peak(many, order, 8) < 1.03 < 1.08 < peak(many, by_number, 8)
