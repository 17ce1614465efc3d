"""No more layers of a stage compute again than memory asks for, and no plan gets slower by it."""

import dataclasses
import itertools
import math

import pytest

from holmesjax.config import ParallelConfig
from holmesjax.errors import PlanError
from holmesjax.plan import pins, plan_description
from holmesjax.plan.device_pool import USABLE_MEMORY
from holmesjax.planner.assembly import as_plan
from holmesjax.planner.assignment import Assignment, Segment
from holmesjax.planner.layer_ranges import sum_counts
from holmesjax.planner.planner import find, make_plan
from holmesjax.planner.recomputation import with_fewest
from holmesjax.planner.selection import make_problem
from holmesjax.planner.stage_kernels import stage_recomputed
from holmesjax.planner.stage_layouts import MeshShape, StepSettings
from holmesjax.planner.step_time import step_seconds
from holmesjax.planner.trials import Candidate
from holmesjax.schedules.pipeline_schedules import TaskOrder
from tests.clusters import make_cluster, make_config, make_topology
from tests.layer_kinds import DEAR

SMALL = {"width": 1024, "num_heads": 4, "vocab_size": 32000, "context_length": 2048}
# The schedules, and the layers of two stages.
LAYOUTS = {
    "1f1b": ({"num_layers": 7}, (3, 4), TaskOrder("1f1b", 2, 4)),
    "chunks": ({"num_layers": 8}, (5, 3), TaskOrder("interleaved_1f1b", 2, 4, 2)),
    "several kinds": (
        {"num_layers": 6, "pattern": ("block", DEAR, DEAR)},
        (4, 2),
        TaskOrder("1f1b", 2, 4),
    ),
}
SEGMENTS = tuple(Segment(i, MeshShape(1, 1, 1, 1), 1) for i in range(2))


def two_devices(*memory_gib):
    both = zip(("infiniband", "roce"), memory_gib, strict=True)
    clusters = [
        make_cluster(f"c{i}", fabric, (1,), memory_gib=gib) for i, (fabric, gib) in enumerate(both)
    ]
    return make_topology(*clusters, ethernet_bytes_per_s=1e10)


def memory_between(config, layers, order, policy, shares):
    """GiB of each device: so much of the way from all layers that compute again to none."""
    problem, found = make_problem(config, two_devices(80.0, 80.0)), []
    assignment = Assignment(SEGMENTS, layers)
    for place, share in enumerate(shares):
        blocks = sum_counts(problem.ranges.chunks(layers, order.chunks)[place])
        in_flight = problem.in_flight(order, place, layers[place])
        most, least = (
            problem.stages(assignment.slots, StepSettings(4, name))[place].memory_bytes(
                blocks, in_flight
            )
            for name in ("none", policy)
        )
        found.append((least + share * (most - least)) / USABLE_MEMORY / 2**30)
    return found


@pytest.mark.parametrize("policy", ["dots", "full"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_no_other_numbers_of_layers_are_faster(name, policy):
    sizes, layers, order = LAYOUTS[name]
    config = make_config(model=SMALL | sizes, parallel={}, train={"global_batch": 4})
    memory_gib = memory_between(config, layers, order, policy, (0.5, 0.5))
    problem, settings = make_problem(config, two_devices(*memory_gib)), StepSettings(4, policy)
    every = itertools.product(*(range(n + 1) for n in layers))
    ways = [Assignment(SEGMENTS, layers, numbers) for numbers in every]
    seconds = step_seconds(problem, ways, settings, order)
    plain = Assignment(SEGMENTS, layers)
    candidate = Candidate(assignment=plain, settings=settings, order=order, step_s=math.inf)
    found = with_fewest(problem, candidate, [plain])
    assert found.step_s == seconds.min()
    assert 0 < sum(found.assignment.recomputed) < sum(layers)
    # All and none are what they are for a search that knows nothing else.
    [all_s] = step_seconds(problem, [plain], settings, order)
    [none_s] = step_seconds(problem, [plain], StepSettings(4, "none"), order)
    assert seconds[-1] == pytest.approx(all_s, rel=1e-12)
    assert seconds[0] == none_s == math.inf
    assert found.step_s < all_s


def little_memory(**parallel):
    """A run that does not fit without computing layers again, and has room for some."""
    model, train = SMALL | {"num_layers": 8}, {"global_batch": 4}
    return make_config(model=model, parallel=parallel, train=train), two_devices(2.2, 2.2)


def test_a_plan_says_which_layers_compute_again_and_can_be_pinned_to_them():
    config, topology = little_memory()
    problem, found = find(config, topology)
    best = found.best[0]
    plan = as_plan(problem, best, found.bound_s, found.best)
    assert (plan.recomputed_layers, [stage.num_blocks for stage in plan.stages]) == ((4, 0), [5, 3])
    told = "\n".join(plan_description.describe(plan))
    assert "layers that compute again (full), the first of each stage: 4, 0" in told
    assert "no plan whose layers all compute again, or none, is faster" in told
    own = list(stage_recomputed(problem, best))
    assert [kernel.what for kernel in own] == ["the first 4 of 5 layers", "none of 3 layers"]
    assert own[0].step_s > own[1].step_s == 0.0
    pinned = {"stages": 2, "microbatches": 4, "activation_checkpointing": "full"}
    assert not pins.keeps(plan, pinned)  # without numbers it is for all layers
    whole = make_plan(dataclasses.replace(config, parallel=ParallelConfig(**pinned)), topology)
    assert whole.recomputed_layers == ()
    assert whole.step_time_s > plan.step_time_s
    pinned["recomputed_layers"] = plan.recomputed_layers
    assert pins.keeps(plan, pinned)
    again = make_plan(dataclasses.replace(config, parallel=ParallelConfig(**pinned)), topology)
    assert again.step_time_s == plan.step_time_s
    assert again.recomputed_layers == plan.recomputed_layers


def test_numbers_alone_are_refused_only_if_they_fit_with_no_split():
    """The first stage has six that compute again: more layers than its speed asks for."""
    config, topology = little_memory(recomputed_layers=(6, 0))
    plan = make_plan(config, topology)
    assert [stage.num_blocks for stage in plan.stages] == [6, 2]
    assert plan.recomputed_layers == (6, 0)


def test_numbers_of_layers_that_do_not_fit_are_refused_with_what_would():
    settings = {"schedule": "1f1b", "microbatches": 4, "activation_checkpointing": "full"}
    config, topology = little_memory(**settings, recomputed_layers=(0, 0))
    with pytest.raises(PlanError) as refusal:
        make_plan(config, topology)
    assert "does not fit" in refusal.value.problem
    assert refusal.value.fix.startswith("set parallel.recomputed_layers=[")
