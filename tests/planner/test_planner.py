"""Plans are data: what they say is checked by hand, then pinned in files a reviewer can read."""

import dataclasses
import functools
import math
import re
from collections import Counter

import pytest

from holmesjax.config import DistributedConfig, Fp8Config
from holmesjax.costs import work
from holmesjax.costs.products import attention_products, layer_products
from holmesjax.costs.stage_times import BACKWARD_NUMBERS, HOLMESJAX, OVERLAP_SLOWDOWN
from holmesjax.errors import PlanError
from holmesjax.layers.distinct_kinds import kind_names, kinds
from holmesjax.layers.model_layers import layer_names
from holmesjax.parallel import sharding
from holmesjax.plan.plan import Axis, Plan, describe
from holmesjax.plan.processes import make_processes
from holmesjax.planner import selection, shortlist
from holmesjax.planner.planner import make_plan
from holmesjax.planner.problem import Segment
from holmesjax.planner.selection import make_problem
from holmesjax.planner.stage_layouts import USABLE_MEMORY, MeshShape, Role, StepSettings
from holmesjax.schedules.pipeline_schedules import validate
from holmesjax.topology import loading, upgrades
from holmesjax.topology.catalogue import TRANSPORT_BYTES_PER_S
from holmesjax.topology.fabrics import FABRICS
from holmesjax.topology.machines import Link, Measured
from holmesjax.transport import routes
from holmesjax.transport.crossings import Crossing
from holmesjax.units import show
from tests.clusters import (
    GIB,
    PLANS,
    ROOT,
    chosen_plan,
    golden_plan,
    make_cluster,
    make_config,
    make_topology,
    one_each,
    two_clusters,
)
from tests.layer_kinds import DEAR


def split_of(plan):
    return tuple(stage.num_blocks for stage in plan.stages)


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


@pytest.mark.parametrize("name", ["gpt_3b6", "gpt_7b5", "gpt_39b1"])
def test_the_header_of_a_run_tells_its_prediction(name):
    header = (ROOT / f"configs/runs/{name}.yaml").read_text()
    expected = f"a step of {show(golden_plan(name).step_time_s, 's')} is predicted"
    assert expected in header.replace("\n#            ", " ")


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_holds_every_layer_and_adds_up(name):
    plan = golden_plan(name)
    layers = [layer for _, chunk in plan.chunks for layer in chunk]
    others = {"gpt_3b6": 30, "gpt_7b5": 36, "gpt_39b1": 48}
    wide = dict.fromkeys(("three_clusters", "a_slow_link", "two_kinds"), 24)
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
    config = make_config(parallel={"fsdp": 1}, model=model, train={"global_batch": 16})

    def stages(rate):
        return len(make_plan(config, make_topology(cluster, transport_bytes_per_s=rate)).stages)

    assert (stages(400e9), stages(3.3e9)) == (4, 1)


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


# ---- schedules -----------------------------------------------------------------------------------


QUARTERS = ("ib", (1, 1, 1), 4)  # four stages of a device each


def plan_of(schedule, topology=None, layers=None, **changes):
    """One stage on each cluster."""
    chunks = 2 if schedule == "interleaved_1f1b" else 1
    config = make_config(schedule=schedule, **changes)
    topology = topology or two_clusters()
    if schedule == "eager_1f1b":
        return make_plan(dataclasses.replace(config, parallel=dataclasses.replace(
            config.parallel, stages=len(topology.clusters), layers=layers)), topology)  # fmt: skip
    return one_each(config, topology, layers=layers, chunks=chunks)


SCHEDULES = ["gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "zero_bubble"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [2, 4])
def test_a_plan_of_any_schedule_adds_up_and_gives_its_tasks(schedule, stages):
    config = make_config(schedule=schedule, stages=stages)
    plan = make_plan(config, two_clusters())
    assert plan.schedule == schedule
    validate(schedule, plan.tasks(), 8, num_chunks=plan.num_chunks, in_flight=plan.in_flight)
    assert sum(plan.shares.values()) == pytest.approx(1.0, abs=1e-12)
    assert min(plan.shares.values()) >= 0.0
    layers = [layer for _, chunk in plan.chunks for layer in chunk]
    assert tuple(layers) == layer_names(12)
    assert Plan.from_json(plan.to_json()) == Plan.from_yaml(plan.to_yaml()) == plan
    assert max(map(len, describe(plan))) <= 100


def test_interleaved_stages_share_their_layers_over_chunks_in_model_order():
    plan = plan_of("interleaved_1f1b", layers=(7, 5))
    sizes = [(stage, len(chunk)) for stage, chunk in plan.chunks]
    assert sizes == [(0, 1 + 4), (1, 3), (0, 3), (1, 2 + 1)]  # with the embedding and the head
    assert plan.stages[1].layers == (*layer_names(12)[5:8], *layer_names(12)[11:])
    assert any("embed + 7 layers in 2 chunks" in line for line in describe(plan))


def test_stages_tell_the_kinds_of_their_layers():
    model = {"num_layers": 6, "pattern": (DEAR, *["block"] * 5)}
    config = make_config(model=model, clusters=("ib", "roce"), layers=(3, 3), schedule="1f1b")
    text = "\n".join(describe(make_plan(config, two_clusters()), kind_names(config.model)))
    assert "embed + 3 layers (1 dear, 2 block)\n" in text
    assert " 3 layers (3 block) + head\n" in text


def test_devices_share_sequences_of_layers_with_windows():
    model = {"pattern": ("block", "tests.layer_kinds:near")}
    plan = make_plan(make_config(model=model, context=2, tensor=1), two_clusters())
    assert all(stage.mesh["context"] == 2 for stage in plan.stages)
    dense = make_plan(make_config(context=2, tensor=1), two_clusters())
    sent = [sum(stage.seconds["context"] for stage in own.stages) for own in (plan, dense)]
    assert 0 < sent[0] <= sent[1]


def test_interleaving_sends_every_boundary_of_its_chunks():
    """Four virtual stages on two: three boundaries each way for a microbatch, not one."""
    even = {"layers": (6, 6)}
    once, thrice = (plan_of(name, **even) for name in ("1f1b", "interleaved_1f1b"))
    for a, b in zip(once.stages, thrice.stages, strict=True):
        assert b.seconds["boundary"] == pytest.approx(3 * a.seconds["boundary"])
        for part in ("compute", "tensor", "data"):
            assert b.seconds[part] == pytest.approx(a.seconds[part])


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zero_bubble"])
def test_the_predicted_bubble_of_even_stages_is_near_that_of_the_papers(schedule):
    """p - 1 times F + B + W; over the chunks when interleaved; F + B - W when split.

    Four stages where layers are all there is: a tiny vocabulary, next to no network.
    """
    cluster = make_cluster("ib", "infiniband", (1,) * 4)
    changes = {"vocab_size": 256, "num_layers": 64}
    config = make_config(schedule=schedule, tensor=1, model=changes)
    chunks = 2 if schedule == "interleaved_1f1b" else 1
    topology = make_topology(cluster)
    plan = chosen_plan(config, topology, QUARTERS, layers=(16,) * 4, chunks=chunks)
    step_s = plan.step_time_s * (1 - plan.shares["boundary"])  # as if transfers took no time
    kind, model = cluster.nodes[0].device, make_config(model=changes).model
    [block], num_tokens = kinds(model).blocks, 8 * 1024
    products_s = 16 * kind.products_s(layer_products(block, num_tokens), "bfloat16")
    attention = attention_products(block, model.context_length, num_tokens)
    attention_s = 16 * HOLMESJAX.attention_pairs * kind.attention_s(attention, "bfloat16")
    numbers_s = 16 * kind.memory_s(2 * num_tokens * sum(work.layer_numbers(block)))
    added_s = kind.memory_s(12 * 16 * block.size())
    forward_s = products_s + attention_s + numbers_s
    both_s = 2 * products_s + 2.5 * attention_s + BACKWARD_NUMBERS * numbers_s + added_s
    weight_s = products_s + added_s
    bubble_s = {
        "1f1b": forward_s + both_s,
        "interleaved_1f1b": (forward_s + both_s) / 2,
        "zero_bubble": forward_s + both_s - 2 * weight_s,  # F + B - W
    }[schedule]
    update_s = 28 * 16 * block.size() / kind.memory_bandwidth_bytes_per_s
    expected_s = 8 * (forward_s + both_s) + 3 * bubble_s + update_s
    assert step_s == pytest.approx(expected_s, rel=0.01)  # the embedding and the head


def test_interleaved_activations_are_those_of_the_layers_in_flight():
    """Chunks of 4 and 3 layers hold different amounts; a microbatch in one is not in the other."""
    plain, plan = (plan_of(name, layers=(7, 5)) for name in ("1f1b", "interleaved_1f1b"))
    layer_bytes = plain.stages[0].memory_bytes["activations"] / (2 * 7)  # two in flight
    now = most = 0
    for task in plan.tasks()[0]:
        now += (4, 3)[task.chunk] * (1 if task.kind == "F" else -1)
        most = max(most, now)
    activations = plan.stages[0].memory_bytes["activations"]
    assert activations == pytest.approx(most * layer_bytes)
    logits = [stages[1].memory_bytes["logits"] for stages in (plain.stages, plan.stages)]
    assert logits[0] == logits[1]  # one microbatch at a time has been through the last chunk


def test_the_head_takes_its_time_in_the_last_chunk_only():
    """A vocabulary so large that its stage has nothing else to do, and hardly ever waits."""
    topology = make_topology(make_cluster("ib", "infiniband", (1, 1), memory_gib=800.0))
    config = make_config(schedule="interleaved_1f1b", tensor=1, model={"vocab_size": 1_024_000})
    parts = ("ib", (1, 1, 1), 2)
    plan = chosen_plan(config, topology, parts, layers=(6, 6), chunks=2)
    compute_s = plan.stages[1].seconds["compute"]
    assert compute_s < plan.step_time_s * (1 - plan.shares["boundary"]) < 1.1 * compute_s


def test_zero_bubble_holds_on_later_stages_what_the_first_holds():
    """Until their W: two microbatches on the second stage of two, where 1F1B holds one."""
    plain, split = (plan_of(name, layers=(6, 6)) for name in ("1f1b", "zero_bubble"))
    activations = [
        [stage.memory_bytes["activations"] for stage in plan.stages] for plan in (plain, split)
    ]
    assert activations[1][0] == activations[0][0]
    assert activations[1][1] == 2 * activations[0][1]


def test_eager_1f1b_covers_a_slow_link_and_1f1b_is_enough_without_one():
    slow = two_clusters(ethernet_bytes_per_s=1.5e9)
    plain = plan_of("1f1b", slow)
    eager = plan_of("eager_1f1b", slow)
    deep, last = eager.in_flight
    assert deep > 2
    assert last == 1
    assert eager.step_time_s < plain.step_time_s
    config, layers = make_config(schedule="eager_1f1b"), split_of(eager)
    plans = [one_each(config, slow, layers=layers, in_flight=(n, 1)) for n in range(2, 9)]
    assert eager.step_time_s <= min(plan.step_time_s for plan in plans)
    kept = [plan.stages[0].memory_bytes["activations"] for plan in plans]
    assert kept[2] == 2 * kept[0]
    assert f"in flight on the stages: {deep}, 1" in "\n".join(describe(eager))
    one = make_topology(make_cluster("ib", "infiniband", (8,)))
    assert plan_of("eager_1f1b", one).in_flight == (1,)


def test_eager_1f1b_stays_inside_the_memory():
    """The deeper of the two needs 1.23 GiB a device of the first stage."""
    plain = plan_of("1f1b", layers=(8, 4))
    for memory_gib, in_flight in ((1.3, (2, 1)), (1.4, (3, 1))):
        topology = make_topology(
            make_cluster("ib", "infiniband", (8, 8), memory_gib=memory_gib),
            make_cluster("roce", "roce", (8, 8), speed=0.5, memory_gib=memory_gib),
        )
        plan = plan_of("eager_1f1b", topology, layers=(8, 4))
        assert plan.in_flight == in_flight
        for stage in plan.stages:
            assert sum(stage.memory_bytes.values()) <= USABLE_MEMORY * memory_gib * GIB
        assert (plan.step_time_s == plain.step_time_s) == (in_flight == (2, 1))


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


def test_memory_that_no_cluster_has_makes_a_stage_cross_clusters():
    """One layer cannot be cut into stages; over four devices a quarter of its state is on each."""
    model = {"num_layers": 1, "width": 4096, "num_heads": 32, "context_length": 128}
    config = make_config(
        model=model, train={"global_batch": 4}, parallel={"tensor": 1, "microbatches": 1}
    )
    plan = make_plan(config, one_node_each(memory_gib=4.0))
    [stage] = plan.stages
    assert stage.cluster == "ib+roce"
    assert "does not fit" in plan.exception
    assert sum(stage.memory_bytes.values()) <= 0.9 * 4.0 * 2**30
    inside = make_plan(config, one_node_each())
    assert inside.exception == ""
    assert {"+" in stage.cluster for stage in inside.stages} == {False}


def test_stages_whose_clusters_are_named_stay_there():
    config = make_config(tensor=2, data=2, clusters=("ib",))
    error = refusal(config, one_node_each())
    assert error.where == "parallel.data"


# ---- refusals ------------------------------------------------------------------------------------


def refusal(config, topology):
    with pytest.raises(PlanError) as raised:
        make_plan(config, topology)
    return raised.value


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
    assert refusal(few, two_clusters()).fix == "use fewer stages"  # one chunk is no interleaving


def test_an_interleaved_pipeline_gets_as_many_stages_as_go_into_its_microbatches():
    config = make_config(**INTERLEAVED, microbatches=6, train={"global_batch": 48})
    assert 6 % len(make_plan(config, two_clusters()).stages) == 0


def test_more_stages_than_devices_are_refused():
    small = make_topology(make_cluster("a", "roce", (2,)))
    assert "2, the number of devices" in refusal(make_config(tensor=1, stages=3), small).problem


def test_a_plan_that_does_not_fit_is_refused_with_a_remedy_that_works():
    topology = make_topology(make_cluster("a", "roce", (2,), memory_gib=8.5))
    config = make_config(tensor=2, microbatches=1, stages=1, train={"global_batch": 32})
    error = refusal(config, topology)
    assert error.where == "stage 0"
    assert "does not fit gpu-1 in cluster 'a'" in error.problem
    assert "GiB more than 90% of its 8.5 GiB" in error.problem
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
    assert sum(stage.memory_bytes.values()) <= USABLE_MEMORY * 8.5 * GIB


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
    assert len(searched) <= 4  # for the nearest plan: no search has to show that none fits
    [more] = map(int, re.findall(r"use more nodes, about (\d+) more in 'a'", error.fix))
    for num_nodes, is_enough in ((more // 2, False), (more, True)):
        changed = upgrades.with_more_nodes(topology, "a", num_nodes)
        [problem] = selection.make_problems(config, changed)
        assert (shortlist.least_memory(problem, 1.0, 1e9) == 1.0) == is_enough


def test_a_cluster_that_is_named_more_often_than_it_has_room_is_refused():
    error = refusal(make_config(tensor=8, clusters=("ib", "ib", "ib")), two_clusters())
    assert error.where == "parallel.clusters"
    assert "names 'ib' 3 times: its stages need at least 24 devices" in error.problem
    assert error.fix.startswith("name 'ib' at most 2 times")
