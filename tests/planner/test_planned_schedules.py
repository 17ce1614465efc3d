"""Plans with each schedule: their stages, chunks, memory and bubbles."""

import dataclasses

import pytest

from holmesjax.costs import work
from holmesjax.costs.implementation import HOLMESJAX
from holmesjax.costs.layer_times import BACKWARD_NUMBERS
from holmesjax.costs.products import attention_products, layer_products
from holmesjax.layer_specs.distinct_kinds import kind_names, kinds
from holmesjax.layer_specs.model_layers import layer_names
from holmesjax.plan.device_pool import USABLE_MEMORY
from holmesjax.plan.plan import Plan
from holmesjax.plan.plan_description import describe
from holmesjax.planner.planner import make_plan
from holmesjax.schedules.pipeline_schedules import validate
from tests.clusters import (
    GIB,
    QUARTERS,
    chosen_plan,
    make_cluster,
    make_config,
    make_topology,
    one_each,
    split_of,
    two_clusters,
)
from tests.layer_kinds import DEAR


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
    sent = [sum(stage.seconds["context"] for stage in each.stages) for each in (plan, dense)]
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
