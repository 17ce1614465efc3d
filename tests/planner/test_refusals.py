"""Machines on which no plan is possible: what is named, and remedies that work."""

import dataclasses
import re

import pytest

from holmesjax.config import Fp8Config
from holmesjax.plan.device_pool import USABLE_MEMORY
from holmesjax.plan.plan import Axis
from holmesjax.planner import selection, shortlist
from holmesjax.planner.planner import make_plan
from holmesjax.topology import loading, upgrades
from tests.clusters import (
    GIB,
    make_cluster,
    make_config,
    make_topology,
    one_each,
    refusal,
    split_of,
    two_clusters,
)


def test_more_devices_than_a_cluster_has_are_refused():
    error = refusal(make_config(tensor=2, data=4), make_topology(make_cluster("a", "roce", (6,))))
    assert error.where == "parallel.data"
    assert "'a', the largest, has 6 devices" in error.problem
    assert error.found == "4 * 1 * 2 = 8"


def test_devices_without_fp8_are_refused_unless_no_stage_is_there():
    h100, a100 = loading.known_device("h100"), loading.known_device("a100_80gb")
    of = lambda cluster, device: dataclasses.replace(
        cluster,
        nodes=tuple(dataclasses.replace(node, device=device) for node in cluster.nodes),
    )
    new, old = make_cluster("new", "infiniband", (8,)), make_cluster("old", "roce", (8,))
    topology = make_topology(of(new, h100), of(old, a100))
    in_fp8 = {"fp8": Fp8Config()}
    error = refusal(make_config(model=in_fp8), topology)
    assert (error.where, error.found) == ("model.fp8", "old has a100_80gb")
    assert error.fix.startswith("name only new in parallel.clusters, leave model.fp8 out, or add")
    error = refusal(make_config(model=in_fp8), make_topology(of(old, a100)))
    assert error.fix.startswith("leave model.fp8 out")
    cuts, wide = {"clusters": ("new",), "data": 8, "tensor": 1}, {"width": 2048}
    faster, before = (
        make_plan(make_config(model={**wide, **model}, **cuts), topology) for model in (in_fp8, {})
    )
    assert [stage.cluster for stage in faster.stages] == ["new"]
    assert before.step_time_s / 2 < faster.step_time_s < before.step_time_s


def test_more_stages_than_there_is_room_for_are_refused():
    topology = make_topology(make_cluster("a", "roce", (6,)))
    error = refusal(make_config(tensor=4, stages=2), topology)
    assert error.where == "parallel.stages"
    assert "must be at most 1" in error.problem


INTERLEAVED = {"schedule": "interleaved_1f1b", "chunks": 2}


def test_microbatches_that_do_not_come_in_groups_are_refused_with_values_that_work():
    sizes = {"microbatches": 6, "train": {"global_batch": 48}}
    error = refusal(make_config(**INTERLEAVED, stages=4, **sizes), two_clusters())
    assert error.where == "parallel.microbatches"
    assert "must be a multiple of the number of stages, 4, for interleaved_1f1b" in error.problem
    assert error.found == "6 / 4 leaves 2"
    assert "parallel.microbatches=4 or 8" in error.fix
    for microbatches in (4, 8):
        make_plan(make_config(**INTERLEAVED, stages=4, microbatches=microbatches), two_clusters())


def test_interleaving_needs_two_stages_and_a_layer_for_each_chunk():
    error = refusal(make_config(**INTERLEAVED, stages=1), two_clusters())
    assert error.where == "parallel.schedule"
    assert error.found == "1 stage"
    error = refusal(make_config(**INTERLEAVED | {"chunks": 7}), two_clusters())
    assert error.where == "parallel.chunks"
    assert error.found == "7 * 2 = 14"
    assert error.fix == "set parallel.chunks to 6 or less"
    few = make_config(**INTERLEAVED, model={"num_layers": 3})
    fix = "set parallel.schedule to 1f1b"  # two stages are the fewest, and two chunks
    assert refusal(few, two_clusters()).fix == fix
    unset = make_config(schedule="interleaved_1f1b", model={"num_layers": 3})
    assert refusal(unset, two_clusters()).where == "parallel.schedule"


def test_an_interleaved_pipeline_gets_as_many_stages_as_go_into_its_microbatches():
    config = make_config(**INTERLEAVED, microbatches=6, train={"global_batch": 48})
    assert 6 % len(make_plan(config, two_clusters()).stages) == 0


def test_more_stages_than_devices_are_refused():
    small = make_topology(make_cluster("a", "roce", (2,)))
    assert "2, the number of devices" in refusal(make_config(tensor=1, stages=3), small).problem


@pytest.mark.parametrize("name", ["layers", "recomputed_layers", "clusters"])
def test_a_refusal_names_the_setting_that_says_how_many_stages_there_are(name):
    values = {"layers": (2, 2, 2), "clusters": ("a",) * 3}.get(name, (0, 0, 0))
    sizes = {"model": {"num_layers": 6}, "stages": None, name: values}
    small = make_topology(make_cluster("a", "roce", (2,)))
    error = refusal(make_config(tensor=1, **sizes), small)
    assert error.where == f"parallel.{name}"
    assert "parallel.stages" not in error.fix
    wide = make_topology(make_cluster("a", "roce", (4,)))
    error = refusal(make_config(tensor=2, **sizes), wide)
    assert error.where == f"parallel.{name}"
    assert "parallel.stages" not in error.fix


def test_a_plan_that_does_not_fit_is_refused_with_a_remedy_that_works():
    topology = make_topology(make_cluster("a", "roce", (2,), memory_gib=8.1))
    config = make_config(tensor=2, microbatches=1, stages=1, train={"global_batch": 32})
    error = refusal(config, topology)
    assert error.where == "stage 0"
    assert "does not fit gpu-1 in cluster 'a'" in error.problem
    assert "GiB more than 90% of its 8.1 GiB" in error.problem
    assert "activations" in error.found
    assert "activation_checkpointing=dots" in error.fix
    changed = make_config(
        tensor=2,
        microbatches=1,
        stages=1,
        train={"global_batch": 32},
        activation_checkpointing="dots",
    )
    [stage] = make_plan(changed, topology).stages
    assert sum(stage.memory_bytes.values()) <= USABLE_MEMORY * 8.1 * GIB


def test_a_zero_bubble_that_does_not_fit_is_not_told_to_compute_again():
    topology = make_topology(make_cluster("a", "roce", (2,), memory_gib=6.0))
    sizes = {"tensor": 1, "microbatches": 2, "stages": 2, "train": {"global_batch": 32}}
    error = refusal(make_config(**sizes, schedule="zero_bubble"), topology)
    assert "checkpointing" not in error.fix


def test_fsdp_fits_a_model_that_data_alone_does_not():
    topology = make_topology(make_cluster("a", "roce", (8,), memory_gib=6))
    sizes = {"tensor": 1, "microbatches": 1, "stages": 1, "activation_checkpointing": "full"}
    model = {"num_layers": 24, "width": 2048}
    error = refusal(make_config(model=model, **sizes), topology)
    assert error.fix.startswith("set parallel.fsdp=8")
    [stage] = make_plan(make_config(model=model, **sizes, fsdp=8), topology).stages
    assert stage.mesh == {Axis.DATA: 1, Axis.FSDP: 8, Axis.TENSOR: 1}


@pytest.mark.parametrize("fabric", ["roce", "local"])
def test_a_model_that_fits_nowhere_needs_other_machines(fabric):
    """A host without a network is not tried with others beside it."""
    cluster = make_cluster("a", "roce", (1,), memory_gib=1.0)
    if fabric == "local":
        nodes = tuple(dataclasses.replace(node, nics=()) for node in cluster.nodes)
        cluster = dataclasses.replace(cluster, fabric="local", nodes=nodes)
    topology = make_topology(cluster)
    error = refusal(make_config(parallel={}), topology)
    assert "in the plan that comes nearest" in error.problem
    assert error.fix.startswith("use more nodes")


@pytest.mark.parametrize(
    "model, train, where, says",
    [
        ({"width": 2**20}, {}, "model", "1.58e+14 parameters"),
        ({"context_length": 2**27}, {}, "model.context_length", "134,217,728 tokens"),
        ({}, {"global_batch": 10**9}, "train.global_batch", "between two layers"),
        ({"num_layers": 2000, "width": 256}, {"global_batch": 4}, "stage 0", "GiB more than"),
    ],
    ids=["width", "context", "batch", "layers"],
)
def test_sizes_that_are_absurd_are_named(model, train, where, says):
    topology = make_topology(
        make_cluster("a", "roce", (1,), memory_gib=2.0),
        make_cluster("b", "roce", (1,), memory_gib=2.0),
    )
    error = refusal(make_config(parallel={}, model=model, train=train), topology)
    assert error.where == where
    assert says in error.problem
    assert "parallel" not in error.fix


def test_more_nodes_are_named_with_which_a_plan_fits():
    model, train = {"num_layers": 4}, {"global_batch": 4}
    topology = make_topology(make_cluster("a", "roce", (2,), memory_gib=1.0))
    config = make_config(parallel={}, model=model, train=train)
    error = refusal(config, topology)
    assert "more than 90% of its 1 GiB" in error.problem
    [more] = re.findall(r"use more nodes, such as (\d+) more in 'a'", error.fix)
    assert make_plan(config, upgrades.with_more_nodes(topology, "a", int(more)))


def test_layers_move_to_where_they_fit():
    """The fast cluster has little memory: it holds what fits, and the plan is not refused."""
    splits = []
    for memory_gib in (80.0, 1.5):
        topology = make_topology(
            make_cluster("fast", "infiniband", (8,), memory_gib=memory_gib),
            make_cluster("slow", "roce", (8,), speed=0.3),
        )
        splits.append(split_of(one_each(make_config(), topology)))
    assert splits[0][0] > splits[1][0]


def test_a_refusal_takes_few_searches_and_names_how_many_nodes_every_plan_needs(monkeypatch):
    searched, search = [], selection.search
    monkeypatch.setattr(selection, "search", lambda *args: searched.append(args) or search(*args))
    topology = make_topology(make_cluster("a", "roce", (8,) * 64, memory_gib=0.25))
    config = make_config(parallel={}, model={"num_layers": 2000})
    error = refusal(config, topology)
    # For the nearest plan, with tensor inside nodes and leaving them: no search with all its effort
    # has to show that none fits.
    assert len(searched) <= 9
    [more] = map(int, re.findall(r"use more nodes, about (\d+) more in 'a'", error.fix))
    for num_nodes, is_enough in ((more // 2, False), (more, True)):
        changed = upgrades.with_more_nodes(topology, "a", num_nodes)
        [problem] = selection.make_problems(config, changed)
        assert (shortlist.least_memory(problem, 1.0, 1e9) == 1.0) == is_enough


def test_a_step_in_one_program_is_planned_on_a_device_with_no_room_for_its_gradients_alone():
    """They come where activations were, and no bound of the search refuses such a plan."""
    of = lambda memory_gib: make_topology(make_cluster("a", "roce", (1,), memory_gib=memory_gib))
    cut = {"microbatches": 1, "activation_checkpointing": "none"}
    config = make_config(model={"vocab_size": 256}, train={"global_batch": 4}, parallel=cut)
    [stage] = make_plan(config, of(80.0)).stages
    assert stage.memory_bytes["gradients"] == 0
    held_gib = sum(stage.memory_bytes.values()) / GIB
    [least] = make_plan(config, of(1.002 * held_gib / USABLE_MEMORY)).stages
    assert least.memory_bytes == stage.memory_bytes


def test_a_cluster_that_is_named_more_often_than_it_has_room_is_refused():
    error = refusal(make_config(tensor=8, clusters=("ib", "ib", "ib")), two_clusters())
    assert error.where == "parallel.clusters"
    assert "names 'ib' 3 times: its stages need at least 24 devices" in error.problem
    assert error.fix.startswith("name 'ib' at most 2 times")
