"""Plans are data: checked against brute force, then pinned in files a reviewer can read."""

import dataclasses
import itertools
import json
import math
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from holmesjax import costs, routes, sharding
from holmesjax.catalogue import REACHED
from holmesjax.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from holmesjax.crossings import Crossing
from holmesjax.errors import PlanError
from holmesjax.plan import Axis, Plan, describe, layer_names
from holmesjax.planner import USABLE_MEMORY, choose_in_flight, make_plan, split_layers
from holmesjax.processes import make_processes
from holmesjax.schedule import schedule, simulate, validate
from holmesjax.stage_times import BACKWARD_NUMBERS, HOLMESJAX
from holmesjax.topology import Cluster, DeviceKind, Link, Nic, Node, Topology

GIB = 2.0**30
NIC = {"infiniband": (50e9, 8), "roce": (25e9, 4), "ethernet": (3e9, 1)}


def make_cluster(name, fabric, counts, *, speed=1.0, memory_gib=80.0):
    """`speed` 1 is about an H100."""
    device = DeviceKind(
        name=f"gpu-{speed:g}",
        peak_flop_per_s={"float32": 67e12 * speed, "bfloat16": 989e12 * speed},
        memory_bytes=memory_gib * GIB,
        memory_bandwidth_bytes_per_s=3.35e12 * speed,
        link=Link(fabric="nvlink", bandwidth_bytes_per_s=450e9, latency_s=2e-6),
    )
    rate, count = NIC[fabric]
    nic = Nic(name=fabric, fabric=fabric, rate_bytes_per_s=rate, latency_s=3e-6, count=count)
    nodes = tuple(
        Node(name=f"{name}-{i}", device=device, num_devices=num, nics=(nic,))
        for i, num in enumerate(counts)
    )
    return Cluster(name=name, fabric=fabric, nodes=nodes)


def make_topology(*clusters, ethernet_bytes_per_s=3e9):
    link = Link(fabric="ethernet", bandwidth_bytes_per_s=ethernet_bytes_per_s, latency_s=1e-4)
    names = [cluster.name for cluster in clusters]
    return Topology(
        name="test",
        clusters=clusters,
        links={pair: link for pair in itertools.permutations(names, 2)},
    )


def two_clusters(*, slow=0.5, **link):
    return make_topology(
        make_cluster("ib", "infiniband", (8, 8)),
        make_cluster("roce", "roce", (8, 8), speed=slow),
        **link,
    )


def make_config(*, model=None, train=None, **parallel):
    sizes = {"num_layers": 12, "width": 1024, "num_heads": 16, "context_length": 1024}
    return Config(
        topology="test.yaml",
        run=RunConfig(dir="run"),
        train=TrainConfig(
            **{"steps": 1, "global_batch": 64, "compute_dtype": "bfloat16", **(train or {})}
        ),
        model=ModelConfig(**{**sizes, "vocab_size": 32000, **(model or {})}),
        data=DataConfig(corpus="x"),
        optimizer=OptimizerConfig(learning_rate=1e-3),
        parallel=ParallelConfig(**{"tensor": 8, "microbatches": 8, **parallel}),
    )


def compositions(total, parts):
    """All ways to write a number as an ordered sum of positive numbers."""
    for cuts in itertools.combinations(range(1, total), parts - 1):
        edges = (0, *cuts, total)
        yield tuple(b - a for a, b in itertools.pairwise(edges))


def split_of(plan):
    return tuple(stage.num_blocks for stage in plan.stages)


def slowest_stage_s(plan):
    """Per step, everything that a stage does, compute and network."""
    return max(sum(stage.seconds.values()) for stage in plan.stages)


# ---- the layer split -----------------------------------------------------------------------------

SPEEDS = {"equal": [1, 1, 1], "two_speeds": [3, 3, 1], "steep": [5, 2, 1], "single": [4]}


@pytest.mark.parametrize("speeds", SPEEDS.values(), ids=SPEEDS)
@pytest.mark.parametrize("num_layers", [4, 5, 10])
def test_no_split_has_a_faster_slowest_stage(num_layers, speeds):
    seconds = [lambda n, v=v: n / v for v in speeds]
    slowest = lambda layers: max(s(n) for s, n in zip(seconds, layers, strict=True))
    split = split_layers(num_layers, seconds)
    assert sum(split) == num_layers
    assert min(split) >= 1
    assert slowest(split) == min(map(slowest, compositions(num_layers, len(speeds))))


@settings(max_examples=200, deadline=None)
@given(
    stages=st.lists(
        st.tuples(st.integers(1, 20), st.integers(0, 50), st.integers(1, 9)), min_size=1, max_size=4
    ),
    extra=st.integers(0, 7),
)
def test_no_split_is_faster_whatever_the_stages_cost(stages, extra):
    """Each stage: seconds per layer, seconds besides, and the layers that its memory holds."""
    num_layers = len(stages) + extra
    seconds = [
        lambda n, a=a, b=b, most=most: a * n + b if n <= most else float("inf")
        for a, b, most in stages
    ]
    slowest = lambda layers: max(s(n) for s, n in zip(seconds, layers, strict=True))
    best = min(map(slowest, compositions(num_layers, len(stages))))
    assert slowest(split_layers(num_layers, seconds)) == best


def test_ties_go_to_the_stage_with_the_fewest_microbatches_in_flight():
    assert split_layers(4, [lambda n: n] * 3) == (1, 1, 2)


@pytest.mark.parametrize("slow", [0.1, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("microbatches", [1, 8])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_no_plan_has_a_faster_slowest_stage(slow, microbatches, stages):
    topology = two_clusters(slow=slow)
    if stages == 3:
        topology = make_topology(*topology.clusters, make_cluster("eth", "ethernet", (8,)))
    plan = make_plan(make_config(microbatches=microbatches, stages=stages), topology)
    clusters = [stage.cluster for stage in plan.stages]
    for layers in compositions(12, stages):
        config = make_config(microbatches=microbatches, stages=stages, layers=layers)
        other = make_plan(config, topology)
        assert split_of(other) == layers
        if [stage.cluster for stage in other.stages] == clusters:
            assert slowest_stage_s(plan) <= slowest_stage_s(other)


def test_the_slow_cluster_gets_fewer_layers():
    config = make_config(tensor=2, train={"global_batch": 128})
    splits = [split_of(make_plan(config, two_clusters(slow=s))) for s in (0.25, 0.5, 1.0)]
    assert [first for first, _ in splits] == sorted((first for first, _ in splits), reverse=True)
    assert splits[0][0] > splits[0][1]
    # Of equal clusters, the one with the head, which costs as much as layers, holds fewer.
    assert splits[2][0] > splits[2][1]


# ---- the whole plan ------------------------------------------------------------------------------


def two_uneven():
    return make_topology(
        make_cluster("ib", "infiniband", (4, 2)), make_cluster("roce", "roce", (3,), speed=0.7)
    )


PLANS = {
    "two_clusters": lambda: make_plan(make_config(), two_clusters()),
    "uneven_nodes": lambda: make_plan(
        make_config(tensor=1, microbatches=2, train={"global_batch": 48}), two_uneven()
    ),
    "one_stage": lambda: make_plan(
        make_config(stages=1, tensor=2, microbatches=1, schedule="gpipe"),
        make_topology(make_cluster("only", "ethernet", (4,))),
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_plan_matches_golden(name, request):
    """To accept a change on purpose: pytest --update-golden, then read the diff."""
    path = Path(__file__).parent / "golden" / f"plan_{name}.json"
    text = dataclasses.replace(PLANS[name](), topology_hash="-").to_json()
    if request.config.getoption("--update-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.read_text() == text


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_holds_every_layer_and_adds_up(name):
    plan = PLANS[name]()
    layers = [layer for stage in plan.stages for layer in stage.layers]
    assert tuple(layers) == layer_names(12)
    assert plan.num_layers == 12
    assert sum(plan.shares.values()) == pytest.approx(1.0, abs=1e-12)
    assert min(plan.shares.values()) >= 0.0
    assert list(plan.shares) == ["compute", "tensor", "data", "boundary", "bubble"]
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


@pytest.mark.parametrize("global_batch, inner", [(4, Axis.DATA), (8, Axis.TENSOR)])
def test_the_axis_that_moves_more_bytes_lies_inside_the_nodes(global_batch, inner):
    """Width D, T tokens a replica: 18 D^2 bytes a layer of gradients and parameters along data,
    8 T D along tensor. They are equal at T = 2.25 D = 2304 tokens, between these two batches."""
    topology = make_topology(make_cluster("a", "roce", (2, 2)))
    config = make_config(tensor=2, microbatches=1, train={"global_batch": global_batch})
    [stage] = make_plan(config, topology).stages
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
    plan = make_plan(make_config(stages=4, model=model, **parallel), make_topology(cluster))
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
    sizes = {"tensor": tensor, "microbatches": 2, "data": 1 if tensor == 8 else None}
    plan = make_plan(make_config(**sizes), topology)
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
    transfer_s = 1e-4 + max(moved.values()) / (REACHED["ethernet"] * 3e9)
    assert [s.seconds["boundary"] for s in plan.stages] == pytest.approx([2 * transfer_s] * 2)


def test_tied_embeddings_send_the_table_once_a_step():
    topology = two_clusters()
    plans = [make_plan(make_config(model={"tied_embeddings": t}), topology) for t in (False, True)]
    # Two nodes of each side send half of it each.
    table_s = 4 * 32000 * 1024 / 2 / (REACHED["ethernet"] * 3e9) + 1e-4
    untied, tied = plans
    assert tied.step_time_s >= untied.step_time_s + 2 * table_s - 1e-9
    for before, after in zip(untied.stages, tied.stages, strict=True):
        sent_s = after.seconds["boundary"] - before.seconds["boundary"]
        assert sent_s == pytest.approx(table_s)


def test_a_slower_ethernet_makes_a_slower_plan():
    steps = [
        make_plan(make_config(), two_clusters(ethernet_bytes_per_s=rate)).step_time_s
        for rate in (1e8, 1e9, 1e10, 1e11)
    ]
    assert steps == sorted(steps, reverse=True)
    assert len(set(steps)) == 4


# ---- schedules -----------------------------------------------------------------------------------


def plan_of(schedule, topology=None, **changes):
    chunks = {"chunks": 2} if schedule == "interleaved_1f1b" else {}
    config = make_config(schedule=schedule, **chunks, **changes)
    return make_plan(config, topology or two_clusters())


SCHEDULES = ["gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "zero_bubble"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [2, 4])
def test_a_plan_of_any_schedule_adds_up_and_gives_its_tasks(schedule, stages):
    plan = plan_of(schedule, stages=stages)
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
    sizes = {"stages": 4, "tensor": 1, "layers": (16,) * 4}
    changes = {"vocab_size": 256, "num_layers": 64}
    plan = plan_of(schedule, make_topology(cluster), model=changes, **sizes)
    step_s = plan.step_time_s * (1 - plan.shares["boundary"])  # as if transfers took no time
    kind, model = cluster.nodes[0].device, make_config(model=changes).model
    num_tokens = 8 * 1024
    products_s = 16 * kind.products_s(costs.block_products(model, num_tokens), "bfloat16")
    attention = costs.attention_products(model, num_tokens)
    attention_s = 16 * HOLMESJAX.attention_pairs * kind.attention_s(attention, "bfloat16")
    numbers_s = 16 * kind.memory_s(2 * num_tokens * sum(costs.block_numbers(model)))
    added_s = kind.memory_s(12 * 16 * costs.block_parameters(model))
    forward_s = products_s + attention_s + numbers_s
    both_s = 2 * products_s + 2.5 * attention_s + BACKWARD_NUMBERS * numbers_s + added_s
    weight_s = products_s + added_s
    bubble_s = {
        "1f1b": forward_s + both_s,
        "interleaved_1f1b": (forward_s + both_s) / 2,
        "zero_bubble": forward_s + both_s - 2 * weight_s,  # F + B - W
    }[schedule]
    update_s = 28 * 16 * costs.block_parameters(model) / kind.memory_bandwidth_bytes_per_s
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
    sizes = {"layers": (6, 6), "tensor": 1, "model": {"vocab_size": 1_024_000}}
    plan = plan_of("interleaved_1f1b", topology, **sizes)
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
    plain, eager = plan_of("1f1b", slow), plan_of("eager_1f1b", slow)
    assert eager.in_flight == (4, 1)
    assert eager.step_time_s < plain.step_time_s
    ratio = eager.stages[0].memory_bytes["activations"]
    assert ratio == 2 * plain.stages[0].memory_bytes["activations"]
    assert "in flight on the stages: 4, 1" in "\n".join(describe(eager))
    one = make_topology(make_cluster("ib", "infiniband", (8,)))
    assert plan_of("eager_1f1b", one, stages=1).in_flight == (1,)


def test_eager_1f1b_stays_inside_the_memory():
    """The deeper of the two needs 1.16 GiB a device of the first stage."""
    plain = plan_of("1f1b", layers=(8, 4))
    for memory_gib, in_flight in ((1.2, (2, 1)), (1.3, (3, 1))):
        topology = make_topology(
            make_cluster("ib", "infiniband", (8, 8), memory_gib=memory_gib),
            make_cluster("roce", "roce", (8, 8), speed=0.5, memory_gib=memory_gib),
        )
        plan = plan_of("eager_1f1b", topology, layers=(8, 4))
        assert plan.in_flight == in_flight
        for stage in plan.stages:
            assert sum(stage.memory_bytes.values()) <= USABLE_MEMORY * memory_gib * GIB
        assert (plan.step_time_s == plain.step_time_s) == (in_flight == (2, 1))


def simulated(forward_s, backward_s, transfer_s, microbatches):
    def step_s(in_flight):
        tasks = schedule("eager_1f1b", len(forward_s), microbatches, in_flight=in_flight)
        return simulate(tasks, forward_s, backward_s, transfer_s).step_time_s

    return step_s


def every_depth(num_stages, microbatches):
    depths = itertools.product(range(1, microbatches + 1), repeat=num_stages)
    return [depth for depth in depths if list(depth) == sorted(depth, reverse=True)]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_no_numbers_in_flight_are_faster_on_two_stages(data):
    times = lambda low: data.draw(st.tuples(*[st.integers(low, 9)] * 2))
    microbatches = data.draw(st.integers(1, 8))
    step_s = simulated(times(1), times(1), [times(0)], microbatches)
    chosen = choose_in_flight(2, microbatches, step_s)
    best_s = min(map(step_s, every_depth(2, microbatches)))
    assert step_s(chosen) == best_s
    # The fewest of those that are as fast, next to those of 1F1B.
    fewer = [(n, 1) for n in range(min(2, microbatches), chosen[0])]
    assert all(step_s(depth) > best_s for depth in fewer)


def test_numbers_in_flight_are_chosen_link_by_link_which_can_miss_a_twentieth():
    step_s = simulated([2, 2, 3], [2, 4, 1], [(6, 6), (3, 3)], 8)
    chosen = choose_in_flight(3, 8, step_s)
    assert (chosen, step_s(chosen)) == ((5, 3, 1), 80)
    assert min(map(step_s, every_depth(3, 8))) == 76


# ---- clusters, stages and idle devices -----------------------------------------------------------


def three_clusters():
    return make_topology(
        make_cluster("slow", "ethernet", (8,), speed=0.2),
        make_cluster("ib", "infiniband", (8, 8)),
        make_cluster("roce", "roce", (8, 8), speed=0.9),
    )


def test_fewer_stages_than_clusters_use_the_best_and_name_the_idle():
    plan = make_plan(make_config(stages=2), three_clusters())
    assert [stage.cluster for stage in plan.stages] == ["ib", "roce"]
    assert plan.idle == {"slow-0": 8}
    assert any("idle" in line and "slow-0 8" in line for line in describe(plan))
    one = make_plan(make_config(stages=1), three_clusters())
    assert [stage.cluster for stage in one.stages] == ["ib"]
    assert one.idle == {"slow-0": 8, "roce-0": 8, "roce-1": 8}


def test_more_stages_than_clusters_are_shared_out_and_take_whole_nodes():
    plan = make_plan(make_config(stages=4), two_clusters())
    assert [stage.nodes for stage in plan.stages] == [
        ("ib-0",),
        ("ib-1",),
        ("roce-0",),
        ("roce-1",),
    ]
    assert plan.idle == {}
    # Three stages: the fast cluster may hold one or two; no other split is faster.
    three = make_plan(make_config(stages=3), two_clusters())
    assert {stage.cluster for stage in three.stages} == {"ib", "roce"}
    assert sum(len(stage.devices) for stage in three.stages) == 32


def test_the_layers_of_the_run_decide_the_number_of_stages():
    plan = make_plan(make_config(layers=(3, 4, 5)), two_clusters())
    assert split_of(plan) == (3, 4, 5)


def test_asked_for_fewer_replicas_the_rest_stays_idle_in_whole_groups():
    topology = make_topology(make_cluster("ib", "infiniband", (3, 3)))
    plan = make_plan(make_config(tensor=2, data=2), topology)
    [stage] = plan.stages
    assert stage.devices == (0, 1, 3, 4)  # a pair from each node, not a pair across both
    assert stage.fabrics[Axis.TENSOR] == "nvlink"
    assert plan.idle == {"ib-0": 1, "ib-1": 1}


def test_stages_may_have_different_numbers_of_replicas():
    plan = PLANS["uneven_nodes"]()
    assert [stage.mesh[Axis.DATA] for stage in plan.stages] == [6, 3]


def test_fsdp_takes_devices_from_data_and_is_shown():
    config = partial(make_config, tensor=4, layers=(6, 6))
    plain, cut = (make_plan(config(fsdp=fsdp), two_clusters()) for fsdp in (1, 2))
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


def test_fsdp_fits_a_model_that_data_alone_does_not():
    topology = make_topology(make_cluster("a", "roce", (8,), memory_gib=6))
    config = partial(make_config, tensor=1, microbatches=1, activation_checkpointing="full")
    model = {"num_layers": 24, "width": 2048}
    error = refusal(config(model=model), topology)
    assert error.fix.startswith("raise parallel.fsdp, ")
    [stage] = make_plan(config(model=model, fsdp=8), topology).stages
    assert stage.mesh == {Axis.DATA: 1, Axis.FSDP: 8, Axis.TENSOR: 1}


def test_asked_for_fewer_replicas_the_groups_of_fsdp_stay_inside_nodes():
    topology = make_topology(make_cluster("ib", "infiniband", (6, 6)))
    [stage] = make_plan(make_config(tensor=2, fsdp=2, data=2), topology).stages
    assert stage.devices == (0, 1, 2, 3, 6, 7, 8, 9)
    assert stage.fabrics[Axis.FSDP] == stage.fabrics[Axis.TENSOR] == "nvlink"


# ---- refusals ------------------------------------------------------------------------------------


def refusal(config, topology):
    with pytest.raises(PlanError) as raised:
        make_plan(config, topology)
    return raised.value


def test_a_batch_that_does_not_divide_is_refused_with_a_value_that_works():
    config = make_config(tensor=1, microbatches=2, train={"global_batch": 20})
    error = refusal(config, two_uneven())
    assert error.where == "train.global_batch"
    assert "on stage 0 6 * 2 = 12" in error.problem
    assert "20 / 12 leaves 8" in error.found
    assert "train.global_batch=12 or 24" in error.fix
    for batch in (12, 24):
        make_plan(
            make_config(tensor=1, microbatches=2, train={"global_batch": batch}), two_uneven()
        )


def test_the_batch_must_divide_on_every_stage():
    topology = make_topology(make_cluster("a", "roce", (6,)), make_cluster("b", "roce", (4,)))
    error = refusal(make_config(tensor=1, microbatches=1, train={"global_batch": 18}), topology)
    assert "on stage 1 4 * 1 = 4" in error.problem
    assert "data is 6, 4 on the stages" in error.found
    assert "train.global_batch=12 or 24" in error.fix


def test_devices_that_tensor_does_not_divide_are_refused():
    error = refusal(make_config(tensor=4), two_uneven())
    assert error.where == "parallel.tensor"
    assert "stage 0 has 6 devices of cluster 'ib'" in error.problem
    assert error.found == "6 / 4 leaves 2"
    assert "parallel.tensor=1 or 2 or 3 or 6" in error.fix


def test_more_replicas_than_devices_are_refused():
    error = refusal(make_config(tensor=2, data=4), make_topology(make_cluster("a", "roce", (6,))))
    assert error.where == "parallel.data"
    assert error.found == "4 * 2 = 8"
    assert "parallel.data=3 or less" in error.fix


def test_devices_that_fsdp_does_not_divide_are_refused():
    error = refusal(make_config(tensor=2, fsdp=2), two_uneven())
    assert "no multiple of parallel.fsdp * parallel.tensor = 2 * 2 = 4" in error.problem
    assert error.found == "6 / 4 leaves 2"
    assert "parallel.tensor=1 or 3" in error.fix
    six = make_topology(make_cluster("a", "roce", (6,)))
    error = refusal(make_config(tensor=2, fsdp=2, data=2), six)
    assert error.found == "2 * 2 * 2 = 8"
    assert "parallel.data=1 or less" in error.fix
    error = refusal(make_config(tensor=4, fsdp=2, data=1), six)
    assert error.fix == "use a smaller parallel.fsdp"


def test_a_batch_that_fsdp_does_not_divide_is_refused():
    topology = make_topology(make_cluster("a", "roce", (6,)))
    config = partial(make_config, tensor=1, fsdp=2, microbatches=1)
    error = refusal(config(train={"global_batch": 8}), topology)
    assert "data * parallel.fsdp * parallel.microbatches, on stage 0 3 * 2 * 1 = 6" in error.problem
    assert "train.global_batch=6 or 12" in error.fix
    assert make_plan(config(train={"global_batch": 12}), topology).stages[0].mesh[Axis.DATA] == 3


def test_devices_that_stages_cannot_share_are_refused():
    error = refusal(make_config(tensor=1, stages=4), make_topology(make_cluster("a", "roce", (6,))))
    assert error.where == "parallel.stages"
    assert "6 / 4 stages leaves 2" in error.problem
    assert "1, 2, 3, 6" in error.fix


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


def test_a_zero_bubble_that_does_not_fit_is_not_told_to_compute_again():
    topology = make_topology(make_cluster("a", "roce", (2,), memory_gib=9.5))
    sizes = {"tensor": 2, "microbatches": 1, "train": {"global_batch": 32}}
    error = refusal(make_config(**sizes, schedule="zero_bubble"), topology)
    assert error.fix.startswith("raise parallel.microbatches")


def test_more_stages_than_layers_or_devices_are_refused():
    error = refusal(make_config(model={"num_layers": 2}), three_clusters())
    assert "at most 2, the number of layers" in error.problem
    assert "3 stages, one for each of 3 clusters" in error.found
    assert split_of(make_plan(make_config(model={"num_layers": 2}, stages=2), three_clusters()))
    small = make_topology(make_cluster("a", "roce", (2,)))
    assert "2, the number of devices" in refusal(make_config(tensor=1, stages=3), small).problem


def test_a_stage_that_does_not_fit_is_refused_with_a_remedy_that_works():
    topology = make_topology(make_cluster("a", "roce", (2,), memory_gib=9.5))
    config = make_config(tensor=2, microbatches=1, train={"global_batch": 32})
    error = refusal(config, topology)
    assert error.where == "stage 0"
    assert "does not fit gpu-1 in cluster 'a'" in error.problem
    assert "GiB more than 90% of its 9.5 GiB" in error.problem
    assert "activations" in error.found
    assert "activation_checkpointing=dots" in error.fix
    changed = make_config(
        tensor=2, microbatches=1, train={"global_batch": 32}, activation_checkpointing="dots"
    )
    [stage] = make_plan(changed, topology).stages
    assert sum(stage.memory_bytes.values()) <= USABLE_MEMORY * 9.5 * GIB


@pytest.mark.parametrize(
    "memory_gib, num_layers, fix",
    [(1.0, 12, "parallel.tensor or parallel.stages"), (5.0, 12, "raise parallel.microbatches")],
)
def test_the_remedy_follows_from_what_fills_the_memory(memory_gib, num_layers, fix):
    topology = make_topology(make_cluster("a", "roce", (1,), memory_gib=memory_gib))
    config = make_config(
        tensor=1,
        microbatches=1,
        model={"num_layers": num_layers},
        train={"global_batch": 64},
        activation_checkpointing="full",
    )
    assert fix in refusal(config, topology).fix


def test_layers_move_to_where_they_fit():
    """The fast cluster has little memory: it holds what fits, and the plan is not refused."""
    roomy = make_topology(
        make_cluster("fast", "infiniband", (8,)), make_cluster("slow", "roce", (8,), speed=0.3)
    )
    tight = make_topology(
        make_cluster("fast", "infiniband", (8,), memory_gib=1.5),
        make_cluster("slow", "roce", (8,), speed=0.3),
    )
    assert (
        split_of(make_plan(make_config(), roomy))[0] > split_of(make_plan(make_config(), tight))[0]
    )


# ---- the plan's file and its text ----------------------------------------------------------------


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_a_saved_plan_is_read_back_equal(name, suffix, tmp_path):
    plan, path = PLANS[name](), tmp_path / f"plan.{suffix}"
    plan.save(path)
    again = Plan.load(path)
    assert again == plan
    assert [list(stage.mesh) for stage in again.stages] == [list(s.mesh) for s in plan.stages]
    assert again.hash() == plan.hash()
    assert Plan.from_json(plan.to_json()) == Plan.from_yaml(plan.to_yaml()) == plan


def test_the_hash_changes_with_the_plan_and_with_the_order_of_axes():
    plan = PLANS["two_clusters"]()
    assert len(plan.hash()) == 12
    assert plan.hash() == PLANS["two_clusters"]().hash()
    stage = plan.stages[0]
    turned = dataclasses.replace(stage, mesh=dict(reversed(stage.mesh.items())))
    others = [
        dataclasses.replace(plan, microbatches=4),
        dataclasses.replace(plan, stages=(turned, *plan.stages[1:])),
    ]
    assert len({plan.hash(), *(other.hash() for other in others)}) == 3


DAMAGE = {
    "not a mapping": (lambda c: [1], "holds no plan"),
    "a missing field": (lambda c: {k: v for k, v in c.items() if k != "stages"}, "stages"),
    "an unknown field": (lambda c: c | {"stage": 1}, "stage"),
    "a wrong type": (lambda c: c | {"microbatches": "many"}, "microbatches"),
    "a changed number": (lambda c: c | {"microbatches": 9}, "hash"),
    "a dropped layer": (
        lambda c: (
            c
            | {
                "stages": [
                    c["stages"][0],
                    c["stages"][1] | {"chunks": [c["stages"][1]["chunks"][0][1:]]},
                ]
            }
        ),
        "every layer once",
    ),
    "an unknown schedule": (lambda c: c | {"schedule": "2f2b"}, "schedule"),
    "a chunk of nothing": (
        lambda c: c | {"stages": [c["stages"][0] | {"chunks": [*c["stages"][0]["chunks"], []]}]},
        "equally many chunks, none empty",
    ),
    "other chunks on a stage": (
        lambda c: (
            c
            | {
                "stages": [
                    c["stages"][0] | {"chunks": [[x] for x in c["stages"][0]["chunks"][0]]},
                    c["stages"][1],
                ]
            }
        ),
        "equally many chunks",
    ),
    "no stages": (lambda c: c | {"stages": []}, "equally many chunks"),
    "interleaved without chunks": (
        lambda c: c | {"schedule": "interleaved_1f1b"},
        "interleaved_1f1b, 1 chunk",
    ),
    "eager without numbers": (lambda c: c | {"schedule": "eager_1f1b"}, "number for each stage"),
    "numbers without eager": (lambda c: c | {"in_flight": [2, 1]}, "number for each stage"),
    "more in flight than there are": (
        lambda c: c | {"schedule": "eager_1f1b", "in_flight": [9, 1]},
        "from 1 to 8",
    ),
    "in flight that deadlocks": (
        lambda c: c | {"schedule": "eager_1f1b", "in_flight": [1, 2]},
        "deadlock",
    ),
    "a device twice": (
        lambda c: c | {"stages": [c["stages"][0], c["stages"][1] | {"devices": list(range(16))}]},
        "one stage only",
    ),
    "a mesh of another size": (
        lambda c: c | {"stages": [c["stages"][0] | {"mesh": {"data": 3}}, c["stages"][1]]},
        "stages.0: its mesh of 3 devices",
    ),
}


@pytest.mark.parametrize("damage, problem", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_plan_is_refused(damage, problem, tmp_path):
    content = json.loads(PLANS["two_clusters"]().to_json())
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(damage(content)))
    with pytest.raises(PlanError, match=problem) as raised:
        Plan.load(path)
    assert raised.value.where == str(path)
    assert "launch plan" in raised.value.fix


@pytest.mark.parametrize(
    "change, problem",
    [
        (lambda c: c | {"microbatches": 7}, "a multiple of them"),
        (lambda c: c | {"schedule": "1f1b"}, "1f1b, 2 chunks"),
        (lambda c: c | {"stages": c["stages"][::-1]}, "in model order"),
        (
            lambda c: c | {"stages": [s | {"chunks": s["chunks"][::-1]} for s in c["stages"]]},
            "in model order",
        ),
    ],
)
def test_an_interleaved_plan_that_contradicts_itself_is_refused(change, problem):
    content = json.loads(plan_of("interleaved_1f1b").to_json())
    with pytest.raises(PlanError, match=problem):
        Plan.from_json(json.dumps(change(content)))


def test_text_that_is_no_plan_at_all_is_refused(tmp_path):
    with pytest.raises(PlanError, match="cannot be read"):
        Plan.load(tmp_path / "none.yaml")
    with pytest.raises(PlanError, match="is not YAML"):
        Plan.from_yaml("a: [1")
    with pytest.raises(PlanError, match="is not JSON"):
        Plan.from_json(PLANS["one_stage"]().to_json()[:-9])


def test_an_edit_is_accepted_without_the_hash():
    content = json.loads(PLANS["two_clusters"]().to_json())
    del content["hash"]
    assert Plan.from_json(json.dumps(content | {"microbatches": 4})).microbatches == 4


@pytest.mark.parametrize("name", PLANS)
def test_the_description_fits_the_console(name):
    lines = describe(PLANS[name]())
    assert max(map(len, lines)) <= 100
    assert len(lines) == 3 + 4 * len(PLANS[name]().stages)


def test_the_description_says_what_goes_where():
    text = "\n".join(describe(PLANS["two_clusters"]()))
    for part in (
        "12 layers in 2 stages on 32 devices",
        "ib-0, ib-1      embed + ",
        "layers + head",
        "data 2 (roce) x tensor 8 (nvlink)",
        "1f1b, 8 microbatches of 8 sequences, 16 MiB",
        "bubble",
    ):
        assert part in text
