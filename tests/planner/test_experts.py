"""Plans of models with experts: how many devices share them, over which links, at what price."""

import math
from dataclasses import replace

import pytest

from holmesjax import config as configs
from holmesjax.config import ExpertsConfig
from holmesjax.plan.device_pool import USABLE_MEMORY
from holmesjax.plan.plan import Axis
from holmesjax.planner.explain import explain
from holmesjax.planner.planner import make_plan
from holmesjax.planner.selection import make_problem
from holmesjax.planner.stage_layouts import MeshShape
from tests.clusters import make_cluster, make_config, make_topology, refusal

EXPERTS = {
    "pattern": ("block", "expert_block"),
    "activation": "swiglu",
    "experts": ExpertsConfig(count=16, active=2, width=1024),
}
# Microbatches are given, so that a search is short.
FEW = {"microbatches": 8, "schedule": "1f1b", "activation_checkpointing": "full"}


def test_tokens_are_exchanged_over_fast_links_alone():
    ethernet = make_topology(make_cluster("a", "ethernet", (4, 4)))
    rdma = make_topology(make_cluster("a", "infiniband", (4, 4)))
    eight = make_config(model=EXPERTS, parallel=FEW, expert=8, tensor=1, fsdp=1)
    error = refusal(eight, ethernet)
    assert error.where == "parallel.expert"
    assert "a has ethernet between nodes of 4" in error.found
    [stage] = make_plan(eight, rdma).stages
    assert (stage.fabrics[Axis.EXPERT], stage.mesh[Axis.EXPERT]) == ("infiniband", 8)
    assert stage.seconds["expert"] > 0
    four = make_config(model=EXPERTS, parallel=FEW, expert=4, data=2, tensor=1, fsdp=1)
    [stage] = make_plan(four, ethernet).stages
    assert (stage.fabrics[Axis.EXPERT], stage.fabrics[Axis.DATA]) == ("nvlink", "ethernet")
    for stage in make_plan(make_config(model=EXPERTS, parallel=FEW, stages=1), ethernet).stages:
        assert stage.fabrics.get(Axis.EXPERT, "local") in ("local", "nvlink")


def test_experts_that_lie_by_their_loads_make_a_step_shorter():
    """16 experts on 8 devices, whose loads vary: the plan, and its explanation, say how much."""
    topology = make_topology(make_cluster("a", "infiniband", (8,)))
    config = make_config(model=EXPERTS, parallel=FEW, expert=8, tensor=1, fsdp=1)
    by_load = replace(config.parallel, expert_placement="load")
    placed = replace(config, parallel=by_load)
    steps_s = [make_plan(x, topology).step_time_s for x in (config, placed)]
    assert steps_s[1] < 0.99 * steps_s[0]
    others = {x.what: x.step_s for x in explain(config, topology).against}
    assert others["parallel.expert_placement=load"] == pytest.approx(steps_s[1])
    in_two = replace(config, parallel=replace(config.parallel, expert_chunks=2))
    step_s = make_plan(in_two, topology).step_time_s
    assert others["parallel.expert_chunks=2"] == pytest.approx(step_s)
    assert step_s > steps_s[0]  # a collective takes longer to start than there is to hide
    train = replace(config.train, deterministic=True)
    kernels = replace(config.kernels, deterministic_attention=True)
    against = explain(replace(config, train=train, kernels=kernels), topology).against
    [refused] = [x for x in against if x.what == "parallel.expert_placement=load"]
    assert (refused.step_s, refused.why[:42]) == (
        None,
        "must be number for train.deterministic: el",
    )


def test_as_many_gradients_of_shared_experts_wait_as_backwards_are_cut_in_two():
    """Under zero bubble a stage and those before it: 1, 2, 3 and 4 of 8 microbatches."""
    model = EXPERTS | {"num_layers": 8}
    zero_bubble = FEW | {"schedule": "zero_bubble", "activation_checkpointing": "none"}
    config = make_config(model=model, parallel=zero_bubble, expert=2, tensor=1, fsdp=1)
    stages = {"stages": 4, "layers": (2, 2, 2, 2), "data": 1}
    config = replace(config, parallel=replace(config.parallel, **stages))
    plan = make_plan(config, make_topology(make_cluster("a", "infiniband", (8,))))
    first, *others = (stage.memory_bytes["waiting"] for stage in plan.stages)
    assert others == [2 * first, 3 * first, 4 * first]


def test_a_stage_does_not_cross_nodes_that_have_room_for_it():
    """Three stages of three devices: equal runs of the twelve would put one into both nodes."""
    model = EXPERTS | {
        "experts": ExpertsConfig(count=18, active=2, width=1024),
        "num_layers": 6,
        "width": 1152,
        "num_heads": 6,
    }
    train, few = {"global_batch": 36}, FEW | {"microbatches": 2, "stages": 3}
    topology = make_topology(make_cluster("a", "ethernet", (6, 6), memory_gib=2.5))
    config = make_config(model=model, train=train, parallel=few)
    [pool] = make_problem(config, topology).pools
    for mesh in (MeshShape(3, 1, 1), MeshShape(1, 2, 1), MeshShape(6, 1, 1)):
        for stages in range(1, 12 // mesh.num_devices + 1):
            assert pool.is_even(mesh)
            assert {len(devices) for devices in pool.slots(mesh, stages)} == {1}, (mesh, stages)
    for stage in make_plan(config, topology).stages:
        assert stage.fabrics.get(Axis.EXPERT, "local") in ("local", "nvlink")


def test_a_large_model_is_planned_on_unlike_clusters():
    """Experts are shared inside nodes, which is better than to gather all of them.

    The faster devices exchange tokens in other chunks than the slower ones, which takes less time
    than any number for all of them.
    """
    model = {**configs.preset("qwen3_235b_a22b"), "context_length": 4096}
    topology = make_topology(
        make_cluster("ib", "infiniband", (8,) * 24),
        make_cluster("roce", "roce", (8,) * 16, speed=0.5),
    )
    train = {"global_batch": 512}
    config = make_config(model=model, train=train, parallel=FEW, clusters=("roce", "ib"))
    plan = make_plan(config, topology)
    for stage in plan.stages:
        assert sum(stage.memory_bytes.values()) <= USABLE_MEMORY * 80 * 2**30
        assert stage.mesh[Axis.EXPERT] > 1
        assert stage.fabrics[Axis.EXPERT] != "ethernet"
        assert math.prod(stage.mesh.values()) == len(stage.devices)
    assert plan.shares["expert"] > 0
    slow, fast = (stage.expert_chunks for stage in plan.stages)
    assert 1 < fast < slow
    for chunks in (1, fast):
        same = replace(config, parallel=replace(config.parallel, expert_chunks=chunks))
        assert make_plan(same, topology).step_time_s > plan.step_time_s
