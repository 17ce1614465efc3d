"""The planner's division of a batch over islands, by their speeds."""

import dataclasses
import itertools
import math
from types import SimpleNamespace

import pytest

from holmesjax.errors import Mistakes, PlanError
from holmesjax.planner.island_batches import by_speed
from holmesjax.planner.islands import island_config
from tests.clusters import make_cluster, make_config, make_topology


def config_of(batch, **parallel):
    return make_config(
        train={"global_batch": batch, "eval_every": 0},
        parallel={"across": "local_updates", "shares": "speed", **parallel},
    )


def islands_in(devices, rates, refused=lambda sizes: False):
    """Plans islands whose devices each take whole sequences, at rates of their own."""
    seen = []

    def plan_islands(sizes):
        seen.append(tuple(sizes))
        if refused(sizes):
            raise PlanError("stages", "does not fit", found=sizes, fix="take less")
        step_s = [math.ceil(n / d) / rate for n, d, rate in zip(sizes, devices, rates, strict=True)]
        return [
            SimpleNamespace(global_batch=n, step_time_s=s)
            for n, s in zip(sizes, step_s, strict=True)
        ]

    return seen, plan_islands


@pytest.mark.parametrize(
    "batch, devices, rates",
    [(16, (2, 2), (3, 2)), (64, (8, 4), (1, 1)), (96, (4, 4, 2), (5, 1, 3)), (7, (1, 1), (4, 1))],
)
def test_the_slowest_island_is_as_fast_as_in_the_best_of_all_divisions(batch, devices, rates):
    """Or within a tenth of it, after few plans; and no slower than with equal parts."""
    parts = [make_topology(make_cluster("a", "infiniband", (d,))) for d in devices]
    seen, plan_islands = islands_in(devices, rates)
    slowest_s = lambda islands: max(island.step_time_s for island in islands)
    islands = by_speed(config_of(batch), parts, plan_islands)
    assert sum(island.global_batch for island in islands) == batch
    assert len(seen) <= 10
    all_divisions = (
        sizes
        for sizes in itertools.product(range(1, batch), repeat=len(devices))
        if sum(sizes) == batch
    )
    best_s = min(slowest_s(plan_islands(sizes)) for sizes in all_divisions)
    assert slowest_s(islands) <= 1.1 * best_s
    if batch % len(devices) == 0:
        assert slowest_s(islands) <= slowest_s(plan_islands([batch // len(devices)] * len(devices)))


def test_divisions_without_a_plan_are_left_out_and_all_of_them_are_refused():
    parts = [make_topology(make_cluster("a", "infiniband", (2,)))] * 2
    _, odd = islands_in((2, 2), (3, 1), refused=lambda sizes: sizes[0] % 4)
    islands = by_speed(config_of(24), parts, odd)
    assert [island.global_batch for island in islands] == [20, 4]
    _, none = islands_in((2, 2), (3, 1), refused=lambda sizes: True)
    with pytest.raises(PlanError, match="does not fit"):
        by_speed(config_of(24), parts, none)
    with pytest.raises(PlanError, match="must be at least 2 times"):
        by_speed(config_of(4, microbatches=4), parts, odd)


def test_divisions_that_the_checks_of_settings_refuse_are_left_out():
    """Each island is to cut its sequences over two replicas, and an odd number has no halves."""
    parts = [make_topology(make_cluster("a", "infiniband", (2,)))] * 2
    seen, plan_any = islands_in((2, 2), (3, 2))

    def planned_by(config):
        def plan_islands(sizes):
            islands = plan_any(sizes)
            for size in sizes:
                island_config(config, size)
            return islands

        return by_speed(config, parts, plan_islands)

    islands = planned_by(config_of(22, data=2))
    assert any(sizes[0] % 2 for sizes in seen)
    assert [island.global_batch % 2 for island in islands] == [0, 0]
    with pytest.raises(Mistakes, match=r"must be a multiple of parallel\.data = 2"):
        planned_by(config_of(3, data=2))


def test_layers_of_the_user_need_whole_parts_of_a_validation():
    """Nothing can fill their last part: 16 sequences twice are no whole parts of 10 or 12."""
    parts = [make_topology(make_cluster("a", "infiniband", (2,)))] * 2
    config = config_of(16)
    train = dataclasses.replace(config.train, eval_every=50, eval_batches=2)
    seen, plan_islands = islands_in((2, 2), (3, 2))
    own = SimpleNamespace(
        parallel=config.parallel, train=train, model=SimpleNamespace(module="a.py")
    )
    by_speed(own, parts, plan_islands)
    assert all(32 % sizes[0] == 0 for sizes in seen)
