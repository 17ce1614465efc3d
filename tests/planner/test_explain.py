"""Explanations of a plan: shares that add up, comparisons that are plans themselves, upgrades."""

import dataclasses
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from holmesjax import config as configs
from holmesjax.config import KernelsConfig, ParallelConfig
from holmesjax.layer_specs.distinct_kinds import kind_names
from holmesjax.plan.device_pool import USABLE_MEMORY
from holmesjax.planner import explain, planner
from holmesjax.planner.assembly import as_plan
from holmesjax.planner.explain import Alternative
from holmesjax.planner.explanation_description import describe
from holmesjax.planner.planner import find, make_plan
from holmesjax.planner.stage_costs import StageCosts
from holmesjax.planner.stage_kernels import stage_attention, stage_update
from holmesjax.topology import description, loading, upgrades
from kernels import adamw_choice
from kernels.adamw_choice import MeasuredStep
from launch.__main__ import main
from tests.clusters import (
    GIB,
    golden_plan,
    make_cluster,
    make_config,
    make_topology,
    one_each,
    two_clusters,
    two_uneven,
)
from tests.layer_kinds import DEAR
from tests.planner.small_jobs import asked, small

ROOT = Path(__file__).parents[2]
WIDE = {"width": 4096, "num_heads": 32}  # so much to compute that two clusters pay
# Few plans to search, where a test is about any plan.
FEW = {"parallel": {"schedule": "1f1b", "activation_checkpointing": "none"}}
FEW["train"] = {"global_batch": 8}
IB_ROCE = ROOT / "configs/topologies/ib_roce.yaml"


def explained(config, topology):
    return explain.explain(config, topology)


def named(alternatives, start):
    [found] = [a for a in alternatives if a.what.startswith(start)]
    return found


# ---- what binds ----------------------------------------------------------------------------------


def test_a_plan_on_one_device_is_bound_by_it_alone():
    topology = make_topology(make_cluster("only", "ethernet", (1,)))
    binds = explained(make_config(**FEW), topology).best[0].binds
    assert binds == {"gpu-1 of only": pytest.approx(1.0)}


def test_a_slow_link_binds_the_more_the_slower_it_is():
    config = make_config(clusters=("ib", "roce"), model=WIDE)
    for bytes_per_s, least, most in ((1e11, 0.0, 0.1), (3e9, 0.1, 0.8), (3e7, 0.8, 1.0)):
        topology = two_clusters(ethernet_bytes_per_s=bytes_per_s)
        binds = explained(config, topology).best[0].binds
        assert list(binds.values()) == sorted(binds.values(), reverse=True), bytes_per_s
        assert least <= binds.get("ethernet ib<->roce", 0.0) <= most, bytes_per_s


def test_what_a_process_sends_binds_where_the_link_is_faster():
    topology = two_clusters(ethernet_bytes_per_s=1e11, transport_bytes_per_s=3e7)
    config = make_config(clusters=("ib", "roce"), model=WIDE)
    binds = explained(config, topology).best[0].binds
    assert binds["what a process sends over TCP"] > 0.8
    assert "ethernet ib<->roce" not in binds


def test_a_stage_over_two_clusters_is_bound_by_what_joins_them():
    """Its sums go over Ethernet, and neither cluster has room for its mesh."""
    infiniband = make_cluster("ib", "infiniband", (2,))
    roce = make_cluster("roce", "roce", (2,))
    topology = make_topology(infiniband, roce, ethernet_bytes_per_s=1e8)
    found = explained(make_config(stages=1, tensor=2, data=2), topology)
    assert "ib+roce 12 (data 2 x tensor 2)" in found.best[0].pipeline
    assert max(found.best[0].binds, key=found.best[0].binds.get) == "ethernet ib<->roce"
    assert [cluster.step_s for cluster in found.clusters] == [None, None]
    assert named(found.upgrades, "as much memory").step_s == found.step_s
    assert named(found.upgrades, "ethernet ib<->roce").step_s < found.step_s
    assert describe(found)


def test_what_goes_with_no_speed_is_latency():
    """A step is work over speeds, and what is left where all speeds are higher is fixed."""
    config, topology = make_config(clusters=("ib", "roce")), two_clusters()
    binds = explained(config, topology).best[0].binds
    problem, found = find(config, topology)
    step_s, factor = found.best[0].step_s, 1.001
    faster = problem.on(upgrades.faster_everything(topology, factor))
    work_s = (step_s - explain._step_s(faster, found.best[0])) / (1 - 1 / factor)
    assert binds["latencies"] == pytest.approx(1 - work_s / step_s, abs=0.01)
    assert binds["latencies"] > 0.2


def test_a_balanced_plan_is_bound_by_both_clusters():
    """Faster devices of one would gain nothing, and slower ones of either lose."""
    parallel = {"clusters": ("ib", "roce"), "layers": (6, 6), "tensor": 1, "data": 1}
    config = make_config(model=WIDE, train={"global_batch": 16}, schedule="gpipe", **parallel)
    uneven = make_plan(config, two_clusters(slow=1.0, ethernet_bytes_per_s=1e12))
    first_s, last_s = (stage.seconds["compute"] for stage in uneven.stages)
    topology = two_clusters(slow=last_s / first_s, ethernet_bytes_per_s=1e12)
    binds = explained(config, topology).best[0].binds
    devices = [share for what, share in binds.items() if what.startswith("gpu")]
    assert len(devices) == 2
    assert sum(devices) > 1.1


def test_the_best_plans_come_in_order_and_the_first_is_the_plan():
    best = explained(make_config(parallel={}), two_clusters()).best
    assert len(best) == explain.NUM_PLANS
    assert [plan.step_s for plan in best] == sorted(plan.step_s for plan in best)
    plan = golden_plan("all_free")
    assert best[0].step_s == plan.step_time_s
    assert best[0].schedule == plan.schedule
    assert best[0].microbatches == plan.microbatches
    capacity = two_clusters().nodes[0].device.memory_bytes
    fullest = max(sum(stage.memory_bytes.values()) for stage in plan.stages)
    assert best[0].memory_share == pytest.approx(fullest / capacity)


def test_a_pipeline_is_told_in_short():
    topology = two_clusters()
    config = make_config(clusters=("ib", "ib", "roce"), tensor=4)
    problem, found = find(config, topology)
    layers = found.best[0].assignment.layers
    text = explain._pipeline(problem, found.best[0])
    assert text.startswith(f"ib {layers[0]} + {layers[1]} (")
    assert f" > roce {layers[2]} (" in text
    assert "tensor 4" in text


def test_the_recipe_with_documents_names_what_will_compute_attention_and_its_price():
    """64 A100s, for which cuDNN has no documents and the Pallas kernels are not."""
    path = ROOT / "configs/recipes/llama3_8b_pretraining.yaml"
    config = configs.load(path)
    few = {"stages": 2, "microbatches": 8, "schedule": "1f1b", "activation_checkpointing": "none"}
    config = dataclasses.replace(config, parallel=ParallelConfig(**few))  # a short search
    problem, found = find(config, loading.load(configs.topology_path(config, path)))
    chosen = found.best[0]
    rows = [*stage_attention(problem, chosen)]
    wanted = {"a100_80gb": "JAX's Triton kernels (", "h100": "the Pallas kernels ("}
    kinds = [problem.pools[slot.pool].kinds[0].name for slot in chosen.assignment.slots]
    assert sorted(kinds) == sorted(wanted)
    for number, (row, kind) in enumerate(zip(rows, kinds, strict=True)):
        assert row.where == f"stage {number}, {kind}"
        assert row.what.startswith(wanted[kind])
        assert row.what.endswith("), once checked there")
    # A plan of the same stages with plain JAX is as much slower as its attention.
    plain = dataclasses.replace(config, kernels=KernelsConfig(attention="reference"))
    other = dataclasses.replace(problem, config=plain, stage_costs=StageCosts(plain))
    stages = [as_plan(each, chosen, 0.0).stages for each in (problem, other)]
    slow_rows = stage_attention(other, chosen)
    for fused, slow, row, slow_row in zip(*stages, rows, slow_rows, strict=True):
        assert slow_row.what == "plain JAX (kernels.attention asks for it)"
        assert slow_row.step_s > 2 * row.step_s
        more_s = slow.seconds["compute"] - fused.seconds["compute"]
        assert more_s == pytest.approx(slow_row.step_s - row.step_s)
    told = explained(make_config(**FEW), make_topology(make_cluster("only", "ethernet", (1,))))
    assert told.attention == ()  # of a kind that the catalogue does not have
    lines = "\n".join(describe(dataclasses.replace(told, attention=tuple(rows))))
    for row in rows:
        assert re.search(rf"{row.where} +[\d.]+ m?s +{re.escape(row.what)}", lines)


def test_what_does_the_update_is_named_with_the_reason(monkeypatch):
    """By the function of the run: the table decides where the kernel was measured."""
    slower = MeasuredStep("NVIDIA H200", "float32", 1.0, 2.0, "a day")
    monkeypatch.setattr(adamw_choice, "MEASURED", (slower,))
    cluster = make_cluster("only", "ethernet", (1,))
    [node] = cluster.nodes
    node = dataclasses.replace(node, device=loading.known_device("h200"))
    topology = make_topology(dataclasses.replace(cluster, nodes=(node,)))

    problem, found = find(make_config(**FEW), topology)
    chosen = found.best[0]

    def rows(**sections):
        config = dataclasses.replace(problem.config, **sections)
        return [*stage_update(dataclasses.replace(problem, config=config), chosen)]

    [row] = rows()
    assert row.where == "stage 0, h200"
    never = "XLA (the kernel is not faster: 1 beside 2 GB/s, a day)"
    assert row.what == never
    [stage] = as_plan(problem, chosen, 0.0).stages
    assert 0 < row.step_s < stage.seconds["compute"]
    [line] = [x for x in describe(explained(make_config(**FEW), topology)) if never in x]
    assert re.search(rf"{row.where} +[\d.]+ \S+ +{re.escape(never)}", line)
    [asked] = rows(kernels=KernelsConfig(optimizer="pallas"))
    assert asked.what == "the Pallas kernel (kernels.optimizer asks for it)"
    faster = MeasuredStep("NVIDIA H200", "float32", 3.0, 2.0, "a day")
    monkeypatch.setattr(adamw_choice, "MEASURED", (faster,))
    [measured] = rows()
    why = "it is faster: 3 beside 2 GB/s, a day"
    assert measured.what == f"the Pallas kernel ({why}), once checked there"
    train = dataclasses.replace(problem.config.train, param_dtype="bfloat16")
    [rounded] = rows(train=train)
    assert rounded.what == "XLA (the kernel with parameters in bfloat16 has not been measured)"
    assert rows(optimizer=dataclasses.replace(problem.config.optimizer, name="lion")) == []


# ---- in place of the plan ------------------------------------------------------------------------


def test_layers_of_several_kinds_are_told_by_kind():
    """Each stage of an interleaved pipeline has two runs of the model's layers."""
    model = {"num_layers": 7, "pattern": (DEAR, "block", "block")}
    config = make_config(model=model, schedule="interleaved_1f1b", layers=(4, 3))
    plan, [told] = make_plan(config, two_clusters()), explained(config, two_clusters()).best[:1]
    kinds = kind_names(config.model)
    for stage in plan.stages:
        held = Counter(kinds[name] for name in stage.layers if name in kinds)
        text = f"{stage.num_blocks}: {held['dear']} dear, {held['block']} block"
        assert f"{stage.cluster} {text} (" in told.pipeline


def test_an_even_split_is_the_plan_with_as_many_layers_on_each_stage():
    topology, config = two_clusters(slow=0.3), make_config(clusters=("ib", "roce"), fsdp=1)
    found = named(explained(config, topology).against, "as many layers")
    even = one_each(config, topology, layers=(6, 6)).step_time_s
    assert found.step_s == pytest.approx(even, rel=1e-9)
    assert found.step_s > make_plan(config, topology).step_time_s


def test_data_parallelism_in_one_cluster_is_a_plan_of_one_stage():
    topology = make_topology(make_cluster("only", "infiniband", (4, 4)))
    config = make_config(parallel={}, train={"global_batch": 8})
    found = explain._data_parallel(config, topology)
    alone = dataclasses.replace(config, parallel=ParallelConfig(stages=1, tensor=1))
    assert found.step_s == make_plan(alone, topology).step_time_s


def test_data_parallelism_over_two_clusters_goes_at_the_speed_of_their_link():
    """The plan is that of one cluster whose network is as slow as the link between the two."""
    fast = make_cluster("a", "infiniband", (4, 4)), make_cluster("b", "roce", (4, 4))
    two = make_topology(*fast, ethernet_bytes_per_s=3e9)
    links = {way: dataclasses.replace(link, latency_s=3e-6) for way, link in two.links.items()}
    two = dataclasses.replace(two, links=links)
    one = make_topology(make_cluster("slow", "ethernet", (4, 4, 4, 4)))
    config = make_config(parallel={})
    found = explain._data_parallel(config, two)
    on_all = [ParallelConfig(stages=1, tensor=1, data=16 // n, fsdp=n) for n in (1, 4, 16)]
    plans = [make_plan(dataclasses.replace(config, parallel=parallel), one) for parallel in on_all]
    assert found.step_s == pytest.approx(min(plan.step_time_s for plan in plans), rel=0.01)


def test_what_does_not_fit_is_said():
    config = make_config(model=WIDE, clusters=("ib", "roce"))
    even = one_each(config, two_clusters(), layers=(6, 6)).stages[1]
    room_gib = 0.95 * sum(even.memory_bytes.values()) / USABLE_MEMORY / GIB
    topology = make_topology(
        make_cluster("ib", "infiniband", (8, 8)),
        make_cluster("roce", "roce", (8, 8), speed=0.5, memory_gib=room_gib),
    )
    said = explained(config, topology)
    found = named(said.against, "as many layers")
    assert found == Alternative(
        what=found.what, step_s=None, why="does not fit the devices' memory"
    )
    assert found.why in "\n".join(describe(said))


def test_a_random_order_of_equal_nodes_is_no_worse_and_of_unequal_clusters_is():
    one = make_topology(make_cluster("only", "infiniband", (4, 4, 4, 4)))
    config = make_config(parallel={"tensor": 4, "stages": 2})
    found = named(explained(config, one).against, "the same on nodes")
    assert found.step_s == pytest.approx(make_plan(config, one).step_time_s, rel=1e-9)
    config = make_config(model=WIDE, clusters=("ib", "roce"))
    two = two_clusters(ethernet_bytes_per_s=1e9)
    found = named(explained(config, two).against, "the same on nodes")
    assert found.step_s > 1.05 * make_plan(config, two).step_time_s


# ---- clusters and upgrades -----------------------------------------------------------------------


def test_a_cluster_is_worth_what_a_plan_without_it_lacks():
    config, topology = make_config(model=WIDE), two_clusters(ethernet_bytes_per_s=1e11)
    found = named(explained(config, topology).clusters, "without roce")
    alone = make_topology(make_cluster("ib", "infiniband", (8, 8)))
    assert found.step_s == make_plan(config, alone).step_time_s


def test_a_cluster_that_is_left_out_is_named():
    topology = make_topology(
        make_cluster("ib", "infiniband", (2, 2)),
        make_cluster("tiny", "ethernet", (1,), speed=0.01),
        ethernet_bytes_per_s=1e7,
    )
    found = explained(make_config(**FEW), topology)
    alternative = named(found.clusters, "with tiny")
    assert alternative.step_s is None or alternative.step_s > found.step_s


def test_no_upgrade_makes_it_slower_and_a_bottleneck_is_worth_one():
    topology = two_clusters(ethernet_bytes_per_s=3e7)
    found = explained(make_config(clusters=("ib", "roce")), topology)
    assert [a.what for a in found.upgrades] == [
        "as much memory as could be used",
        "ethernet ib<->roce 2 times as fast",
        "infiniband of ib 2 times as fast",
        "roce of roce 2 times as fast",
        "a node more in ib",
        "a node more in roce",
    ]
    assert all(a.step_s <= found.step_s * (1 + 1e-9) for a in found.upgrades[:4])
    assert named(found.upgrades, "ethernet").step_s < 0.7 * found.step_s


def test_a_faster_link_brings_its_nics_and_its_measured_pairs_with_it(tmp_path):
    path = tmp_path / "t.yaml"
    pairs = "measured:\n  date: 2026-01-01\n  pairs:\n"
    for ends, fabric in (("ib-0, roce-0", "ethernet"), ("ib-0, ib-1", "infiniband")):
        pairs += (
            f"    - {{between: [{ends}], fabric: {fabric}, bandwidth: 8 Gb/s, latency: 9 us}}\n"
        )
    pairs += "  collectives:\n"
    for cluster in ("ib", "roce"):
        own = f"cluster: {cluster}, nodes: 2, kind: all_gather, size: 1 MiB, bandwidth: 1 Gb/s"
        pairs += f"    - {{{own}}}\n"
    path.write_text(IB_ROCE.read_text() + pairs)
    before = loading.load(path)
    collected = lambda topology: [
        8e-9 * collective.bandwidth_bytes_per_s for collective in topology.measured.collectives
    ]
    rates = lambda topology: {
        pair: topology.link(*pair).bandwidth_bytes_per_s / before.link(*pair).bandwidth_bytes_per_s
        for pair in [("ib-0", "roce-0"), ("roce-0", "ib-0"), ("ib-0", "ib-1"), ("ib-1", "ib-0")]
    }
    linked = upgrades.faster_link(before, ("ib", "roce"), 3.0)
    assert list(rates(linked).values()) == [3.0, 3.0, 1.0, 1.0]
    assert collected(linked) == pytest.approx([1.0, 1.0])
    inside = upgrades.faster_fabric(before, "ib", 3.0)
    assert list(rates(inside).values()) == [1.0, 1.0, 3.0, 3.0]
    assert collected(inside) == pytest.approx([3.0, 1.0])
    device = upgrades.faster_devices(before, "ib", "cpu", 3.0).node("ib-1").device
    old = before.node("ib-1").device
    assert device.peak_flop_per_s == {k: 3 * v for k, v in old.peak_flop_per_s.items()}
    assert device.memory_bandwidth_bytes_per_s == 3 * old.memory_bandwidth_bytes_per_s
    assert upgrades.faster_devices(before, "ib", "h100", 3.0) == before
    assert rates(upgrades.faster_node_links(before, "ib", 3.0)) == rates(before)
    everything = upgrades.faster_everything(before, 3.0)
    assert list(rates(everything).values()) == [3.0, 3.0, 3.0, 3.0]
    assert collected(everything) == pytest.approx([3.0, 3.0])
    assert everything.node("ib-1").device.peak_flop_per_s == device.peak_flop_per_s


def test_nodes_and_clusters_come_and_go():
    before = loading.load(IB_ROCE)
    more = upgrades.with_more_nodes(before, "ib", 2)
    names = [node.name for node in more.nodes]
    assert names == ["ib-0", "ib-1", "ib-2", "ib-3", "roce-0", "roce-1"]
    assert more.nominal_link("ib-3", "roce-0") == before.nominal_link("ib-0", "roce-0")
    left = upgrades.without_cluster(before, "ib")
    assert [node.name for node in left.nodes] == ["roce-0", "roce-1"]
    assert left.links == {}


def test_unlike_devices_and_unlike_nodes_are_explained_without_dollars_if_they_have_no_price():
    found = explained(make_config(model={"num_layers": 4}, **FEW), two_uneven())
    lines = describe(found)
    assert any(line.startswith("what upgrades would buy") for line in lines)
    assert sum(line.startswith("  1 ") for line in lines) == 1
    assert found.best[0].dollars is None
    assert "dollars" not in "\n".join(lines)


# ---- prices --------------------------------------------------------------------------------------

SHALLOW = WIDE | {"num_layers": 2}


def test_what_is_best_for_its_price_is_explained_by_dollars():
    topology = small(ib=4.0, roce=3.0)
    config = asked(make_config(model=SHALLOW, **FEW), objective="tokens_per_dollar")
    found = explained(config, topology)
    assert found.by_dollars
    dollars = [plan.dollars for plan in found.best]
    assert dollars == sorted(dollars)
    plan = make_plan(config, topology)
    assert (found.best[0].step_s, dollars[0]) == (plan.step_time_s, sum(plan.step_dollars.values()))
    for alternative in found.clusters:
        assert alternative.dollars is None or alternative.dollars >= dollars[0]
    for alternative in found.upgrades:
        assert alternative.dollars <= dollars[0] * (1 + 1e-9)
    assert named(found.against, "data parallelism").dollars is None
    lines = describe(found)
    assert lines[1].split()[:3] == ["step", "dollars", "dearer"]
    assert any(line.endswith("% dearer") for line in lines)
    assert any("no price" in line for line in lines)


def test_within_a_budget_what_is_too_dear_is_not_possible():
    topology = small(ib=4.0, roce=0.5)
    config = make_config(model=SHALLOW, **FEW)
    cheapest = make_plan(asked(config, objective="tokens_per_dollar"), topology)
    budget = 1.05 * config.train.steps * sum(cheapest.step_dollars.values())
    found = explained(asked(config, budget_dollars=budget), topology)
    assert not found.by_dollars
    refused = [a for a in found.clusters if "the cheapest plan that was found takes" in a.why]
    assert refused
    assert all(alternative.step_s is None for alternative in refused)
    header = describe(found)[1].split()
    assert header[:3] == ["step", "dollars", "slower"]


# ---- the verb ------------------------------------------------------------------------------------


@pytest.fixture
def plan(capsys, monkeypatch):
    """Runs the verb; returns its exit status, and the text on stdout and stderr."""
    monkeypatch.chdir(ROOT)

    def run(*words):
        status = main(["plan", "configs/runs/quickstart.yaml", *words])
        return status, *capsys.readouterr()

    return run


def test_the_verb_explains_and_plans_again(plan):
    status, out, err = plan("--explain", "--what-if", "links.ib<->roce.bandwidth=100 Mb/s")
    assert status == 0
    assert all(line.startswith("planning: ") for line in err.splitlines())  # on a busy machine
    titles = ["the best plans, side by side", "in place of the plan", "what upgrades would buy"]
    titles[1:] = [f"{title}, with the pinned settings" for title in titles[1:]]
    assert [title for title in titles if title in out.splitlines()] == titles
    assert "no plan is faster" not in out  # of any, since only those with the pins were compared
    first, changed = [line for line in out.splitlines() if line.startswith("plan ")]
    assert first.split()[1] != changed.split()[1]
    assert "longer than the" in out
    limit = "limited by the link to 94 Mb/s a node (23.5 Gb/s before) each way"
    assert out.splitlines()[-1].strip().endswith(limit)


def test_the_verb_tells_programs_the_same(plan):
    change = "clusters.ib.devices.memory=1 GiB"
    status, out, _ = plan("--explain", "--json", "--what-if", change)
    values = json.loads(out)
    assert status == 0
    assert values.keys() == {"plan", "explanation", "what_if"}
    assert values["explanation"]["best"][0]["step_s"] == values["plan"]["step_time_s"]
    assert values["what_if"]["topology_hash"] != values["plan"]["topology_hash"]
    status, out, _ = plan("--json", "--topology", "configs/topologies/two_sites.yaml")
    assert (status, json.loads(out)["topology"]) == (0, "two_sites")


@pytest.mark.parametrize(
    "change, limit",
    [
        (
            "bandwidth=100 Gb/s",
            "the NICs of ib and the NICs of roce to 23.5 Gb/s a node (as before)",
        ),
        ("capacity=1 Gb/s", "the capacity to 940 Mb/s a node (23.5 Gb/s before)"),
        ("latency=50 ms", "the windows of TCP to 7.16 Gb/s a node (23.5 Gb/s before)"),
    ],
)
def test_a_changed_link_says_what_limits_it(change, limit):
    path = ROOT / "configs/topologies/ib_roce.yaml"
    changed = loading.load(path, [f"links.ib<->roce.{change}"])
    [line] = description.changed_ways(loading.load(path), changed)
    assert line.strip() == f"roce <-> ib limited by {limit} each way"
    assert description.changed_ways(changed, changed) == []
    ends = "ib-0", "roce-0"
    least = min(changed.boundary_limits(*ends).values())
    assert least == changed.boundary_link(*ends).bandwidth_bytes_per_s


BAD_CHANGES = {
    "clusters.ibb.nodes=3": "clusters has no ibb\n  found: it has ib, roce",
    "clusters.ib.nodes=0": "override clusters.ib.nodes=0: must be at least 1",
    "clusters.ib.nodes=many": "override clusters.ib.nodes=many",
    "links.roce<->ib.bandwidth=fast": "links has no roce<->ib",
    "links.0.bandwidth=fast": "override links.0.bandwidth=fast",
    "links.ib<->roce.bandwidth=100 Gigabits": "bandwidth",
    "links.ib<->roce.latency=3 km": "latency",
    "nodes": "must be key=value",
}


def test_a_bad_change_is_refused_before_anything_is_planned(plan, monkeypatch):
    monkeypatch.setattr(planner, "make_plan", lambda *_: pytest.fail("is planned"))
    for change, problem in BAD_CHANGES.items():
        status, out, err = plan("--what-if", change)
        assert (status, out) == (2, ""), change
        assert problem in err, change
