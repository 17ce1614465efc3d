"""Plans are data: what they say is checked by hand, then pinned in files a reviewer can read."""

import dataclasses
import functools
import math
from collections import Counter

import pytest

from holmesjax.config import DistributedConfig, KernelsConfig
from holmesjax.costs.collective_times import OVERLAP_SLOWDOWN
from holmesjax.layer_specs.model_layers import layer_names
from holmesjax.parallel import sharding
from holmesjax.plan.device_pool import USABLE_MEMORY
from holmesjax.plan.plan import Axis, Plan
from holmesjax.plan.plan_description import describe
from holmesjax.plan.processes import make_processes
from holmesjax.planner.assignment import Segment
from holmesjax.planner.planner import make_plan
from holmesjax.planner.selection import make_problem
from holmesjax.planner.stage_layouts import MeshShape, Role, StepSettings
from holmesjax.topology.catalogue import TRANSPORT_BYTES_PER_S
from holmesjax.topology.fabrics import FABRICS
from holmesjax.topology.machines import Link, Measured
from holmesjax.transport import routes
from holmesjax.transport.crossings import Crossing
from tests.clusters import (
    GIB,
    PLANS,
    QUARTERS,
    chosen_plan,
    golden_plan,
    make_cluster,
    make_config,
    make_topology,
    one_each,
    refusal,
    split_of,
    two_clusters,
)
from tests.hand_made_plans import make_chunks


def test_the_slow_cluster_gets_fewer_layers():
    config = make_config(tensor=2, train={"global_batch": 128})
    splits = [split_of(one_each(config, two_clusters(slow=s))) for s in (0.25, 0.5, 1.0)]
    assert [first for first, _ in splits] == sorted((first for first, _ in splits), reverse=True)
    assert splits[0][0] > splits[0][1]
    # Of equal clusters, the one with the head, which costs as much as layers, holds fewer.
    assert splits[2][0] > splits[2][1]


# ---- the whole plan ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANS)
def test_plan_matches_golden(name, assert_golden):
    """To accept a change on purpose: pytest --update-golden, then read the diff."""
    text = dataclasses.replace(PLANS[name](), topology_hash="-").to_json()
    assert_golden(f"plan_{name}.json", text)


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_holds_every_layer_and_adds_up(name):
    plan = golden_plan(name)
    layers = [layer for _, chunk in plan.chunks for layer in chunk]
    others = {"gpt_3b6": 30, "gpt_7b5": 36, "gpt_39b1": 48}
    wide = dict.fromkeys(("three_clusters", "a_slow_link"), 24)
    num_layers = {**others, **wide}.get(name, 12)
    assert tuple(layers) == layer_names(num_layers)
    assert plan.num_layers == num_layers
    assert sum(plan.shares.values()) == pytest.approx(1.0, abs=1e-12)
    assert min(plan.shares.values()) >= 0.0
    parts = ["compute", "tensor", "fsdp", "data", "boundary", "bubble"]
    assert list(plan.shares) == [name for name in parts if name in plan.shares]
    devices = [device for stage in plan.stages for device in stage.devices]
    assert len(set(devices)) == len(devices)
    for stage in plan.stages:
        assert plan.global_batch % (stage.mesh[Axis.DATA] * plan.microbatches) == 0


def test_sequences_are_cut_where_that_is_asked_for_and_faster():
    config = make_config(stages=1, tensor=2, microbatches=1, schedule="gpipe")
    topology = make_topology(make_cluster("only", "ethernet", (4,)))

    def planned(asked):
        kernels = dataclasses.replace(config.kernels, sequence_parallel=asked)
        return make_plan(dataclasses.replace(config, kernels=kernels), topology)

    plans = {asked: planned(asked) for asked in ("off", "on", "auto")}
    assert plans["auto"].step_time_s == plans["on"].step_time_s < plans["off"].step_time_s
    assert [plan.stages[0].sequence_parallel for plan in plans.values()] == [False, True, True]
    said = {asked: "also cuts" in "".join(describe(plan)) for asked, plan in plans.items()}
    assert said == {"off": False, "on": True, "auto": True}
    assert Plan.from_json(plans["on"].to_json()) == plans["on"]


def test_two_clusters_become_two_stages_with_data_on_rdma_and_tensor_on_nvlink():
    plan = PLANS["two_clusters"]()
    assert [stage.cluster for stage in plan.stages] == ["ib", "roce"]
    assert [stage.nodes for stage in plan.stages] == [("ib-0", "ib-1"), ("roce-0", "roce-1")]
    for stage, fabric in zip(plan.stages, ("infiniband", "roce"), strict=True):
        assert stage.mesh == {Axis.DATA: 2, Axis.TENSOR: 8}
        assert stage.fabrics == {Axis.DATA: fabric, Axis.TENSOR: "nvlink"}
    assert plan.stages[1].devices == tuple(range(16, 32))
    # 8 sequences of 1024 tokens of width 1024, in two bytes.
    assert plan.boundary_bytes == 8 * 1024 * 1024 * 2


def test_only_the_first_stage_hides_what_it_sends_over_data_behind_its_own_work():
    """One of seven layers has nothing to hide behind, and the others slow the work down by 13%."""
    topology = make_topology(*(make_cluster(name, "roce", (8, 8)) for name in "ab"))
    plan = one_each(make_config(tensor=1, train={"global_batch": 1024}), topology, layers=(6, 6))
    first, last = (stage.task_seconds for stage in plan.stages)
    hidden = 1 / 7 + 6 / 7 * (OVERLAP_SLOWDOWN - 1)
    # Both hold a table of tokens; the first also has positions.
    assert first.gather_s == pytest.approx(hidden * last.gather_s, rel=0.05)
    assert first.reduce_s == pytest.approx(hidden * last.reduce_s, rel=0.05)
    assert plan.simulate().events[0].start_s == first.gather_s


@pytest.mark.parametrize("global_batch, inner", [(4, Axis.DATA), (8, Axis.TENSOR)])
def test_the_axis_that_moves_more_bytes_lies_inside_the_nodes(global_batch, inner):
    """Width D, T tokens a replica: 18 D^2 bytes a layer of gradients and parameters along data,
    8 T D along tensor. They are equal at T = 2.25 D = 2304 tokens, between these two batches."""
    topology = make_topology(make_cluster("a", "roce", (2, 2)))
    config = make_config(tensor=2, microbatches=1, train={"global_batch": global_batch})
    [stage] = one_each(config, topology).stages
    assert list(stage.mesh)[-1] == inner
    assert stage.fabrics[inner] == "nvlink"


def test_one_stage_takes_the_sum_of_its_parts():
    plan = PLANS["one_stage"]()
    [stage] = plan.stages
    assert stage.seconds["boundary"] == plan.boundary_bytes == plan.shares["boundary"] == 0.0
    assert plan.step_time_s == pytest.approx(sum(stage.seconds.values()))
    assert plan.shares["bubble"] == pytest.approx(0.0, abs=1e-12)
    assert plan.shares["compute"] == pytest.approx(stage.seconds["compute"] / plan.step_time_s)


def test_the_bubble_of_even_stages_is_near_the_closed_form():
    """(p - 1) / (m + p - 1), when layers are all there is: a tiny vocabulary, no network."""
    model = {"vocab_size": 256, "num_layers": 64}
    cluster = make_cluster("ib", "infiniband", (1,) * 4)
    parallel = {"tensor": 1, "microbatches": 8, "activation_checkpointing": "full"}
    plan = chosen_plan(make_config(model=model, **parallel), make_topology(cluster), QUARTERS)
    assert split_of(plan) == (16, 16, 16, 16)
    assert plan.shares["bubble"] == pytest.approx(3 / 11 * (1 - plan.shares["boundary"]), rel=0.02)


@pytest.mark.parametrize(
    "nodes, tensor",
    [
        (n, t)
        for n in [(2, 2), (1, 2), (4, 2), (2, 4), (1, 1)]
        for t in (1, 4, 8)
        if t <= 4 * min(n)
    ],
)
def test_a_boundary_takes_as_long_as_the_node_that_sends_or_receives_most(nodes, tensor):
    first, second = ((4,) * n for n in nodes)
    topology = make_topology(
        make_cluster("ib", "infiniband", first), make_cluster("roce", "roce", second)
    )
    meshes = [(1 if tensor == 8 else 4 * n // tensor, 1, tensor) for n in nodes]
    config = make_config(tensor=tensor, microbatches=2)
    plan = chosen_plan(config, topology, ("ib", meshes[0], 1), ("roce", meshes[1], 1))
    processes = make_processes(plan, topology, "node")
    specs = (sharding.batch_spec(stage.mesh) for stage in plan.stages)
    source_spec, target_spec = (sharding.spec_axes(spec, 3) for spec in specs)
    crossing = Crossing(
        name="F0",
        source=0,
        target=1,
        link="ib -> roce",
        shape=(32, 1024, 1024),
        dtype="bfloat16",
        source_spec=source_spec,
        target_spec=target_spec,
    )
    moved = Counter()
    for piece in routes.pieces(crossing, plan, processes):
        num_bytes = 2 * math.prod(stop - start for start, stop in piece.box)
        moved[piece.source, "sent"] += num_bytes
        moved[piece.target, "received"] += num_bytes
    transfer_s = 1e-4 + max(moved.values()) / (FABRICS["ethernet"].reached * 3e9)
    assert [s.seconds["boundary"] for s in plan.stages] == pytest.approx([2 * transfer_s] * 2)


@pytest.mark.parametrize("processes, num_each", [("node", 1), ("device", 4)])
@pytest.mark.parametrize("measured", [None, 1.5e9])
def test_a_boundary_is_no_faster_than_the_processes_that_send_it(processes, num_each, measured):
    """Eight NICs of 50 GB/s, but 3.3 GB/s of one process, or what was measured of it."""
    cluster = make_cluster("ib", "infiniband", (4, 4, 4, 4))
    topology = make_topology(cluster, transport_bytes_per_s=measured)
    config = make_config(tensor=4, microbatches=2)
    distributed = DistributedConfig(processes=processes)
    config = dataclasses.replace(config, distributed=distributed)
    plan = chosen_plan(config, topology, ("ib", (2, 1, 4), 2))
    one = measured or TRANSPORT_BYTES_PER_S
    assert TRANSPORT_BYTES_PER_S == 3.3e9
    # Two nodes of each stage: each has half of 32 sequences of 1024 tokens of width 1024.
    half = 32 * 1024 * 1024 * 2 / 2
    transfer_s = 3e-6 + half / (num_each * one)
    assert [s.seconds["boundary"] for s in plan.stages] == pytest.approx([2 * transfer_s] * 2)


def test_a_boundary_is_no_faster_than_its_slower_end():
    """On a link that is much faster than a process at either end."""
    topology = make_topology(
        *(make_cluster(name, "infiniband", (4,)) for name in ("a", "b")), ethernet_bytes_per_s=1e11
    )
    rates = Measured(date="2026-01-01", pairs={}, transports={"a": 1e9, "b": 2e9})
    topology = dataclasses.replace(topology, measured=rates)
    for way in (("a-0", "b-0"), ("b-0", "a-0")):
        assert topology.boundary_link(*way).bandwidth_bytes_per_s == 1e9


@pytest.mark.parametrize("is_first", [False, True])
def test_a_backward_takes_as_long_in_one_piece_as_in_two_whichever_is_asked_for_first(is_first):
    problem = make_problem(make_config(), two_clusters())
    [slot] = Segment(0, MeshShape(data=2, fsdp=1, tensor=8), 1).slots
    settings = StepSettings(microbatches=8, checkpointing="none")
    of = {
        is_split: problem.seconds(slot, settings, Role(), (2,), is_split)
        for is_split in (is_first, not is_first)
    }
    assert of[True].forward == of[False].forward
    assert 0 < of[True].weight < of[False].backward
    assert of[True].backward + of[True].weight == pytest.approx(of[False].backward)


def test_a_measured_pair_was_measured_as_boundaries_are_sent():
    """So it may be faster than what one process is taken to reach."""
    topology = make_topology(make_cluster("ib", "infiniband", (4, 4)))
    fast = Link(fabric="infiniband", bandwidth_bytes_per_s=20e9, latency_s=1e-4)
    pairs = {("ib-0", "ib-1"): fast}
    measured = dataclasses.replace(topology, measured=Measured(date="2026-01-01", pairs=pairs))
    assert measured.boundary_link("ib-0", "ib-1") == fast
    assert measured.boundary_link("ib-1", "ib-0").bandwidth_bytes_per_s == TRANSPORT_BYTES_PER_S
    assert measured.boundary_link("ib-0", "ib-0").bandwidth_bytes_per_s == TRANSPORT_BYTES_PER_S


def test_a_plan_sends_fewer_boundaries_where_the_transport_is_slow():
    """On one cluster of fast NICs, stages are worth their boundaries only if these are quick."""
    cluster = make_cluster("ib", "infiniband", (8,) * 4)
    model = {"num_layers": 24, "width": 8192, "num_heads": 64}
    few = {"fsdp": 1, "schedule": "1f1b", "activation_checkpointing": "none"}  # a short search
    config = make_config(parallel=few, model=model, train={"global_batch": 16})

    def stages(rate):
        return len(make_plan(config, make_topology(cluster, transport_bytes_per_s=rate)).stages)

    assert (stages(400e9), stages(15e9), stages(1e9)) == (4, 2, 1)


def test_tied_embeddings_send_the_table_once_a_step():
    topology = two_clusters()
    plans = [one_each(make_config(model={"tied_embeddings": t}), topology) for t in (False, True)]
    # Two nodes of each side send half of it each.
    table_s = 4 * 32000 * 1024 / 2 / (FABRICS["ethernet"].reached * 3e9) + 1e-4
    untied, tied = plans
    assert tied.step_time_s >= untied.step_time_s + 2 * table_s - 1e-9
    for before, after in zip(untied.stages, tied.stages, strict=True):
        sent_s = after.seconds["boundary"] - before.seconds["boundary"]
        assert sent_s == pytest.approx(table_s)


def test_a_slower_ethernet_makes_a_slower_plan():
    steps = [
        one_each(
            make_config(), two_clusters(ethernet_bytes_per_s=rate, transport_bytes_per_s=1e11)
        ).step_time_s
        for rate in (1e8, 1e9, 1e10, 1e11)
    ]
    assert steps == sorted(steps, reverse=True)
    assert len(set(steps)) == 4


# ---- clusters, stages and idle devices -----------------------------------------------------------


def three_clusters():
    return make_topology(
        make_cluster("slow", "ethernet", (8,), speed=0.05),
        make_cluster("ib", "infiniband", (8, 8)),
        make_cluster("roce", "roce", (8, 8), speed=0.9),
    )


def test_a_cluster_that_would_hold_the_others_up_stays_idle_and_is_named():
    plan = make_plan(make_config(parallel={}), three_clusters())
    assert "slow" not in [stage.cluster for stage in plan.stages]
    assert plan.idle["slow-0"] == 8
    assert any("idle" in line and "slow-0 8" in line for line in describe(plan))


def test_the_stages_that_the_run_asks_for_are_made():
    for stages in (1, 2, 3, 4):
        plan = make_plan(make_config(stages=stages), two_clusters())
        assert len(plan.stages) == stages
    plan = make_plan(make_config(layers=(3, 4, 5)), two_clusters())
    assert split_of(plan) == (3, 4, 5)


@pytest.mark.parametrize(
    "clusters", [("roce", "ib"), ("ib", "roce"), ("ib", "ib", "roce"), ("roce",)]
)
def test_the_stages_are_on_the_clusters_that_the_run_names(clusters):
    plan = make_plan(make_config(clusters=clusters), two_clusters())
    assert tuple(stage.cluster for stage in plan.stages) == clusters
    free = make_plan(make_config(stages=len(clusters)), two_clusters())
    assert free.step_time_s <= plan.step_time_s


def test_a_cluster_that_there_is_not_is_refused():
    error = refusal(make_config(clusters=("ib", "rose")), two_clusters())
    assert error.where == "parallel.clusters"
    assert error.found == "rose"
    assert error.fix == "use ib or roce"


def test_stages_of_a_cluster_take_whole_nodes():
    plan = chosen_plan(make_config(), two_clusters(), ("ib", (1, 1, 8), 2), ("roce", (1, 1, 8), 2))
    nodes = [stage.nodes for stage in plan.stages]
    assert nodes == [("ib-0",), ("ib-1",), ("roce-0",), ("roce-1",)]
    assert plan.idle == {}


def test_of_more_devices_than_are_needed_the_rest_stays_idle_in_whole_groups():
    topology = make_topology(make_cluster("ib", "infiniband", (3, 3)))
    [stage] = (plan := chosen_plan(make_config(), topology, ("ib", (2, 1, 2), 1))).stages
    assert stage.devices == (0, 1, 3, 4)  # a pair from each node, not a pair across both
    assert stage.fabrics[Axis.TENSOR] == "nvlink"
    assert plan.idle == {"ib-0": 1, "ib-1": 1}
    topology = make_topology(make_cluster("ib", "infiniband", (6, 6)))
    [stage] = chosen_plan(make_config(), topology, ("ib", (2, 2, 2), 1)).stages
    assert stage.devices == (0, 1, 2, 3, 6, 7, 8, 9)
    assert stage.fabrics[Axis.FSDP] == stage.fabrics[Axis.TENSOR] == "nvlink"


def test_stages_may_have_different_numbers_of_replicas():
    plan = PLANS["uneven_nodes"]()
    assert [stage.mesh[Axis.DATA] for stage in plan.stages] == [6, 3]


def test_chunks_of_the_loss_are_as_large_as_the_plan_leaves_room():
    model = {"num_layers": 1, "width": 64, "vocab_size": 32_000, "context_length": 4096}
    sizes = {"stages": 1, "microbatches": 1, "activation_checkpointing": "none", "tensor": 1}
    config = make_config(model=model, train={"global_batch": 16}, **sizes)
    held_bytes = {}
    for mib in (512, 1024, 2048):  # what the run asks for is taken
        asked = dataclasses.replace(config, kernels=KernelsConfig(loss_chunk_mib=mib))
        [stage] = make_plan(asked, one_device(80.0)).stages
        assert stage.logit_bytes == mib * 2**20
        held_bytes[mib] = sum(stage.memory_bytes.values())
    # By hand: 4 + 2 bytes of each logit of a chunk. The 7.8 GiB of logits make 16, 8 or 4 chunks.
    logits_bytes = (4 + 2) * 16 * 4096 * 32_000
    assert held_bytes[1024] - held_bytes[512] == pytest.approx(logits_bytes * (1 / 8 - 1 / 16))
    assert held_bytes[2048] - held_bytes[1024] == pytest.approx(logits_bytes * (1 / 4 - 1 / 8))
    for mib, logit_bytes in ((512, None), (1024, 2**30), (2048, 2**31)):
        gib = 1.001 * held_bytes[mib] / USABLE_MEMORY / GIB
        plan = make_plan(config, one_device(gib))
        [stage] = plan.stages
        assert stage.logit_bytes == logit_bytes
        assert Plan.from_json(plan.to_json()) == plan
    assert ", 2 GiB of logits at a time" in "\n".join(describe(plan))
    [chunk] = make_chunks(config.model, plan)
    assert chunk.array_functions.logit_bytes == 2**31


def one_device(memory_gib):
    return make_topology(make_cluster("a", "roce", (1,), memory_gib=memory_gib))


def test_fsdp_takes_devices_from_data_and_is_shown():
    plain, cut = (
        one_each(make_config(tensor=4, fsdp=fsdp), two_clusters(), layers=(6, 6)) for fsdp in (1, 2)
    )
    for before, after in zip(plain.stages, cut.stages, strict=True):
        assert before.mesh == {Axis.DATA: 4, Axis.TENSOR: 4}
        assert after.mesh == {Axis.DATA: 2, Axis.FSDP: 2, Axis.TENSOR: 4}
        assert after.fabrics[Axis.FSDP] == "nvlink"  # it moves more bytes than data
        assert list(after.seconds) == ["compute", "tensor", "fsdp", "data", "boundary"]
        assert after.memory_bytes["gradients"] == before.memory_bytes["gradients"] / 2
        assert after.memory_bytes["parameters"] == before.memory_bytes["parameters"]
        assert after.memory_bytes["activations"] == before.memory_bytes["activations"]
    assert list(cut.shares) == ["compute", "tensor", "fsdp", "data", "boundary", "bubble"]
    assert sum(cut.shares.values()) == pytest.approx(1.0, abs=1e-12)
    assert "fsdp 2 (nvlink)" in "\n".join(describe(cut))
    assert Plan.from_json(cut.to_json()) == cut


LONG = {"num_layers": 12, "context_length": 32768}


def test_context_cuts_sequences_that_no_device_holds():
    """One sequence at a time: without `context` only `tensor` and layers could be cut further."""
    topology = make_topology(make_cluster("a", "infiniband", (4, 4), memory_gib=1.8))
    make = functools.partial(make_config, model=LONG, train={"global_batch": 1})
    plan = make_plan(make(parallel={"tensor": 1}), topology)
    assert plan.stages[0].mesh == {Axis.DATA: 1, Axis.CONTEXT: 8, Axis.TENSOR: 1}
    error = refusal(make(parallel={"tensor": 1, "context": 1}), topology)
    assert error.fix == "set parallel.context=8, or leave it to the planner"
    assert Plan.from_json(plan.to_json()) == plan


def test_context_is_shown_with_what_it_sends():
    plan = make_plan(make_config(fsdp=None, context=2, tensor=1, microbatches=4), two_clusters())
    for stage in plan.stages:
        assert stage.mesh[Axis.CONTEXT] == 2
        assert stage.seconds["context"] > 0
        assert stage.seconds["fsdp"] > 0
    assert "context" in plan.shares
    assert "context 2 (nvlink)" in "\n".join(describe(plan))


def test_a_context_for_which_there_are_no_devices():
    error = refusal(make_config(context=64, tensor=1), two_clusters())
    assert (error.where, error.found) == ("parallel.context", "1 * 1 * 64 = 64")


def test_a_batch_that_all_devices_cannot_share_leaves_some_idle():
    topology = make_topology(make_cluster("a", "roce", (6,)))
    config = make_config(tensor=1, microbatches=1, train={"global_batch": 20})
    [stage] = (plan := make_plan(config, topology)).stages
    assert stage.mesh[Axis.DATA] == 5
    assert plan.idle == {"a-0": 1}
    assert plan.idle_because["a"].startswith("the best plan found with more of it takes")


def test_nodes_of_unlike_devices_in_a_cluster_may_be_stages_of_their_own():
    fast, slow = (make_cluster("c", "infiniband", (8,), speed=speed) for speed in (1.0, 0.3))
    nodes = (fast.nodes[0], dataclasses.replace(slow.nodes[0], name="c-1"))
    topology = make_topology(dataclasses.replace(fast, nodes=nodes))
    config = make_config(stages=2, tensor=1, microbatches=None)
    plan = make_plan(config, topology)
    assert {stage.nodes for stage in plan.stages} == {("c-0",), ("c-1",)}
    by_node = {stage.nodes[0]: stage.num_blocks for stage in plan.stages}
    assert by_node["c-0"] > by_node["c-1"]


# ---- stages over several clusters ----------------------------------------------------------------


def one_node_each(memory_gib=80.0):
    return make_topology(
        make_cluster("ib", "infiniband", (2,), memory_gib=memory_gib),
        make_cluster("roce", "roce", (2,), memory_gib=memory_gib),
    )


def test_a_mesh_that_no_cluster_has_crosses_clusters_and_the_plan_says_so():
    config = make_config(tensor=2, stages=1, data=2)
    plan = make_plan(config, one_node_each())
    [stage] = plan.stages
    assert (stage.cluster, stage.nodes) == ("ib+roce", ("ib-0", "roce-0"))
    assert stage.fabrics == {Axis.DATA: "ethernet", Axis.TENSOR: "nvlink"}
    # A ring of two over 3 GB/s of Ethernet, which two rings share: slower than any other fabric.
    assert stage.seconds["data"] > 0.1 * stage.seconds["compute"]
    for words in (
        "stage 0 crosses clusters ib and roce",
        "collectives stay within one fabric",
        "must be at most 2: a stage lies in one cluster",
    ):
        assert words in plan.exception
    assert f"  exception {plan.exception}" in describe(plan)


def test_a_cluster_that_a_stage_over_others_leaves_out_is_wholly_idle():
    topology = make_topology(*(make_cluster(name, "infiniband", (1,)) for name in "abc"))
    plan = make_plan(make_config(tensor=1, stages=1, data=2), topology)
    [idle] = plan.idle_because
    assert plan.idle == {f"{idle}-0": 1}
    assert plan.idle_because[idle].startswith("no plan with it was found")


def test_memory_that_no_cluster_has_makes_a_stage_cross_clusters():
    """One layer cannot be cut into stages; over four devices a quarter of its state is on each."""
    model = {"num_layers": 1, "width": 4096, "num_heads": 32, "context_length": 128}
    config = make_config(
        model=model, train={"global_batch": 4}, parallel={"tensor": 1, "microbatches": 1}
    )
    plan = make_plan(config, one_node_each(memory_gib=5.0))
    [stage] = plan.stages
    assert stage.cluster == "ib+roce"
    assert "does not fit" in plan.exception
    assert sum(stage.memory_bytes.values()) <= 0.9 * 5.0 * 2**30
    inside = make_plan(config, one_node_each())
    assert inside.exception == ""
    assert {"+" in stage.cluster for stage in inside.stages} == {False}


def test_stages_whose_clusters_are_named_stay_there():
    config = make_config(tensor=2, data=2, clusters=("ib",))
    error = refusal(config, one_node_each())
    assert error.where == "parallel.data"
