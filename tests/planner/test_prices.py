"""The price of a step, against arithmetic; and the best plans for it."""

import dataclasses
import itertools
from pathlib import Path

import pytest

from holmesjax import job, job_description
from holmesjax.errors import Mistakes, PlanError
from holmesjax.planner import prices
from holmesjax.planner.planner import make_plan
from holmesjax.planner.selection import make_problem
from holmesjax.topology import loading, saving
from tests.clusters import make_cluster, make_config, make_topology, one_each, two_clusters
from tests.planner.small_jobs import asked, priced, small

ROOT = Path(__file__).parents[2]


def dollars(plan):
    return sum(plan.step_dollars.values())


# ---- what a step costs ---------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [1, 2])
def test_nodes_are_paid_whole_and_boundaries_by_the_byte(chunks):
    schedule = {"schedule": "interleaved_1f1b", "chunks": 2} if chunks > 1 else {}
    topology = priced(two_clusters(), egress=0.5, ib=3.0, roce=1.0)
    plan = one_each(make_config(**schedule), topology, chunks=chunks)
    hours = plan.step_time_s / 3600
    crossings = 2 * chunks - 1  # from cluster to cluster, and all of them back
    sent_gb = 2 * crossings * plan.microbatches * plan.boundary_bytes / 1e9
    assert plan.step_dollars == {
        "nodes": pytest.approx(hours * (16 * 3.0 + 16 * 1.0)),
        "egress": pytest.approx(0.5 * sent_gb),
    }


def test_tied_tables_are_sent_and_paid_too():
    topology = priced(two_clusters(), egress=0.5, ib=0.0, roce=0.0)
    loose, tied = (
        one_each(make_config(model={"tied_embeddings": is_tied}), topology)
        for is_tied in (False, True)
    )
    table_gb = 4 * 32000 * 1024 / 1e9
    assert dollars(tied) - dollars(loose) == pytest.approx(2 * 0.5 * table_gb)


def test_idle_devices_of_a_node_are_paid():
    topology = priced(make_topology(make_cluster("only", "ethernet", (8, 8))), only=1.0)
    plan = make_plan(make_config(tensor=2, data=2, stages=1), topology)
    assert sum(plan.idle.values()) == 12
    assert dollars(plan) == pytest.approx(8.0 * plan.step_time_s / 3600)


def test_without_prices_nothing_is_said():
    plan = one_each(make_config(), two_clusters())
    assert plan.step_dollars == {}
    assert prices.unpriced(two_clusters()) == ["ib", "roce"]


def test_prices_of_a_file_are_read_and_written(tmp_path):
    text = (ROOT / "configs/topologies/ib_roce.yaml").read_text()
    text = text.replace("{kind: cpu, count: 2,", "{kind: cpu, count: 2, price: 0.5 $/h,")
    text = text.replace("latency: 50 us}", "latency: 50 us, egress: 20 $/TB}")
    path = tmp_path / "priced.yaml"
    path.write_text(text)
    topology = loading.load(path)
    assert {node.device.price_dollars_per_h for node in topology.nodes} == {0.5}
    assert {link.egress_dollars_per_gb for link in topology.links.values()} == {0.02}
    saving.save(topology, tmp_path / "saved.yaml")
    assert loading.load(tmp_path / "saved.yaml") == topology
    lines = job_description.describe(
        job.load(ROOT / "configs/runs/quickstart.yaml", [f"topology={path}"])
    )
    [line] = [line for line in lines if line.startswith("price")]
    assert "dollars a step (nodes " in line
    assert "for 200 steps" in line


@pytest.mark.parametrize("price", ["2.5", "-1 $/h", "2 $/GB", "cheap"])
def test_a_bad_price_is_refused(price):
    path = ROOT / "configs/topologies/ib_roce.yaml"
    with pytest.raises(Mistakes) as raised:
        loading.load(path, [f"clusters.ib.devices.price={price}"])
    assert f"override clusters.ib.devices.price={price}" in str(raised.value)


# ---- the best plan for a price -------------------------------------------------------------------


FREE = make_config(
    model={"width": 4096, "num_heads": 32, "num_layers": 4},
    parallel={"schedule": "1f1b"},
    train={"global_batch": 16},
)


def test_machines_are_chosen_by_cluster_and_by_halves():
    topology = small(ib=1.0, roce=1.0)
    chosen = list(prices.selections(make_problem(FREE, topology).pools))
    nodes = [tuple(node for pool in pools for node in pool.devices) for pools in chosen]
    ib, roce = (tuple(f"{name}-{i}" for i in range(4)) for name in ("ib", "roce"))
    assert nodes == [(*ib, *roce[:2]), roce[:2], ib, ib[:2], ib[:1], roce[:1]]


def test_of_many_clusters_each_is_tried_alone_and_left_out():
    names = [f"c{i}" for i in range(5)]
    topology = make_topology(*(make_cluster(name, "ethernet", (1,)) for name in names))
    chosen = list(prices.selections(make_problem(FREE, topology).pools))
    assert [len(pools) for pools in chosen] == [5] + [4] * 5 + [1] * 5


@pytest.mark.parametrize("rents", [{"ib": 1.0, "roce": 9.0}, {"ib": 9.0, "roce": 1.0}])
def test_a_dear_cluster_is_left_out_for_tokens_per_dollar(rents):
    topology = small(**rents)
    fastest = make_plan(FREE, topology)
    cheapest = make_plan(asked(FREE, objective="tokens_per_dollar"), topology)
    dear = max(rents, key=rents.get)
    assert dear not in {stage.cluster for stage in cheapest.stages}
    assert dollars(cheapest) < dollars(fastest)
    assert cheapest.step_time_s >= fastest.step_time_s
    numbers = [device for stage in cheapest.stages for device in stage.devices]
    for stage, device in itertools.product(cheapest.stages, numbers):
        assert device not in stage.devices or topology.node_of(device).name in stage.nodes


def test_a_budget_buys_the_fastest_plan_within_it():
    topology = small(ib=1.0, roce=9.0)
    config = dataclasses.replace(FREE, train=dataclasses.replace(FREE.train, steps=1000))
    fastest = make_plan(config, topology)
    cheapest = make_plan(asked(config, objective="tokens_per_dollar"), topology)
    low, high = 1000 * dollars(cheapest), 1000 * dollars(fastest)
    steps_s = []
    for budget in (1.001 * low, (low + high) / 2, 1.001 * high):
        plan = make_plan(asked(config, budget_dollars=budget), topology)
        assert 1000 * dollars(plan) <= budget
        steps_s.append(plan.step_time_s)
    assert steps_s == sorted(steps_s, reverse=True)
    assert steps_s[-1] == fastest.step_time_s
    assert steps_s[0] <= cheapest.step_time_s
    with pytest.raises(PlanError, match=f"takes {low:.2f} dollars for 1000 steps") as raised:
        make_plan(asked(config, budget_dollars=0.9 * low), topology)
    assert raised.value.where == "plan.budget_dollars"


def test_a_price_that_is_needed_and_missing_is_named():
    topology = two_clusters()
    for plan, key in (
        ({"objective": "tokens_per_dollar"}, "objective"),
        ({"budget_dollars": 5.0}, "budget_dollars"),
    ):
        with pytest.raises(PlanError, match="none for those of 'ib'") as raised:
            make_plan(asked(make_config(), **plan), topology)
        assert raised.value.where == f"plan.{key}"
