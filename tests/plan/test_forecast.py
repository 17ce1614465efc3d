"""The predicted step, task by task: it is the plan's, and what is written of it can be opened."""

import dataclasses
import itertools
import json
from functools import partial

import pytest

from holmesjax.errors import PlanError
from holmesjax.plan import forecast
from holmesjax.plan.plan import Plan
from holmesjax.report import trace
from tests.clusters import (
    PLANS,
    golden_plan,
    make_cluster,
    make_config,
    make_topology,
    one_each,
    two_clusters,
)
from tests.jobs import run_launch_here


def with_schedule(name, **choice):
    config = make_config(schedule=name, chunks=choice.get("chunks"))
    return one_each(config, two_clusters(ethernet_bytes_per_s=3e8), **choice)


SCHEDULES = {
    "1f1b": lambda: with_schedule("1f1b"),
    "gpipe": lambda: with_schedule("gpipe"),
    "eager_1f1b": lambda: with_schedule("eager_1f1b", in_flight=(4, 1)),
    "zero_bubble": lambda: with_schedule("zero_bubble"),
    "interleaved_1f1b": lambda: with_schedule("interleaved_1f1b", chunks=2),
}
ALL = {**{name: partial(golden_plan, name) for name in PLANS}, **SCHEDULES}


@pytest.mark.parametrize("name", ALL)
def test_the_forecast_ends_when_the_plan_says(name):
    plan = ALL[name]()
    tasks = forecast.tasks(plan)
    assert max(task["end_s"] for task in tasks) == pytest.approx(plan.step_time_s, rel=1e-9)
    expected = {
        (s, t.kind, t.microbatch)
        for s, tasks_of_stage in enumerate(plan.tasks())
        for t in tasks_of_stage
    }
    found = {(t["stage"], t["kind"], t["microbatch"]) for t in tasks if t["kind"] in "FBW"}
    assert found == expected
    assert [t["stage"] for t in tasks if t["kind"] == "U"] == list(range(len(plan.stages)))


def test_tied_tables_come_after_the_forecast():
    config = make_config(model={"tied_embeddings": True})
    plan = one_each(config, two_clusters())
    end_s = max(task["end_s"] for task in forecast.tasks(plan))
    assert end_s < plan.step_time_s


@pytest.mark.parametrize("name", SCHEDULES)
def test_boundaries_go_one_at_a_time_from_their_tasks_to_those_that_wait(name):
    plan = SCHEDULES[name]()
    simulation = plan.simulate()
    ends = {(e.stage, e.task): e.end_s for e in simulation.events}
    starts = {(e.stage, e.task): e.start_s for e in simulation.events}
    last = len(plan.stages) - 1
    num_sent = 2 * plan.microbatches * (plan.num_chunks * len(plan.stages) - 1)
    assert len(simulation.transfers) == num_sent
    for sent in simulation.transfers:
        there_s, back_s = plan.stages[min(sent.source, sent.target)].task_seconds.transfer_s
        wrapped = plan.num_chunks > 1 and {sent.source, sent.target} == {0, last}
        forward = sent.task.kind == "F"
        if not wrapped:
            took_s = there_s if forward else back_s
            assert sent.end_s - sent.start_s == pytest.approx(took_s)
        assert sent.start_s >= ends[sent.source, sent.task] - 1e-12
        step = 1 if forward else -1
        chunk = sent.task.chunk + step * (sent.target != sent.source + step)
        waits = sent.task._replace(chunk=chunk)
        assert starts[sent.target, waits] >= sent.end_s - 1e-12
    for way in {(sent.source, sent.target) for sent in simulation.transfers}:
        own = [sent for sent in simulation.transfers if (sent.source, sent.target) == way]
        assert all(a.end_s <= b.start_s + 1e-12 for a, b in itertools.pairwise(own))


def test_a_plan_without_seconds_has_no_forecast():
    plan = PLANS["two_clusters"]()
    bare = [dataclasses.replace(stage, task_seconds=None) for stage in plan.stages]
    plan = dataclasses.replace(plan, stages=tuple(bare))
    assert plan.simulate() is None
    assert forecast.tasks(plan) == forecast.transfers(plan) == []


@pytest.mark.parametrize("key", ["forward_s", "transfer_s"])
def test_seconds_of_too_few_tasks_are_refused(key):
    content = json.loads(PLANS["two_clusters"]().to_json())
    del content["hash"]
    content["stages"][0]["task_seconds"][key] = []
    with pytest.raises(PlanError, match="a number for each chunk"):
        Plan.from_json(json.dumps(content))


# ---- the trace file ------------------------------------------------------------------------------


def test_a_trace_has_a_row_for_each_stage_and_way():
    plan = SCHEDULES["zero_bubble"]()
    tasks, sent = forecast.tasks(plan), forecast.transfers(plan)
    shifted = [t | {"start_s": t["start_s"] + 5, "end_s": t["end_s"] + 5} for t in tasks]
    found = trace.events("predicted", 1, tasks, sent) + trace.events("measured", 2, shifted)
    named = [e["args"]["name"] for e in found if e["ph"] == "M" and "name" in e["args"]]
    rows = ["stage 0", "stage 1"]
    assert named == ["predicted", *rows, "0 to 1", "1 to 0", "measured", *rows]
    bars = [e for e in found if e["ph"] == "X"]
    assert len(bars) == 2 * len(tasks) + len(sent)
    of = lambda number: [e for e in bars if e["pid"] == number and e["tid"] < 2]
    key = lambda e: (e["tid"], e["name"])
    one, two = (sorted(of(number), key=key) for number in (1, 2))
    assert [e["ts"] for e in two] == pytest.approx([e["ts"] for e in one])
    assert min(e["ts"] for e in one) == 0.0
    end_us = max(e["ts"] + e["dur"] for e in bars)
    assert end_us == pytest.approx(1e6 * plan.step_time_s)
    assert {e["cat"] for e in bars} >= {"forward", "backward", "weight gradient", "update"}


def test_a_device_alone_sums_no_gradients():
    topology = make_topology(make_cluster("only", "ethernet", (1,)))
    config = make_config(tensor=1, stages=1)
    plan = one_each(config, topology)
    assert {task["kind"] for task in forecast.tasks(plan)} == {"F", "B", "U"}


def test_the_verb_writes_the_trace(tmp_path, capsys):
    path = tmp_path / "trace.json"
    words = ["plan", "configs/runs/quickstart.yaml", "--trace"]
    run = lambda to: run_launch_here(capsys, *words, to)
    assert run(path).returncode == 0
    values = json.loads(path.read_text())
    assert {event["ph"] for event in values["traceEvents"]} == {"M", "X"}
    done = run(tmp_path / "no" / "trace.json")
    assert done.returncode == 2
    assert "--trace: cannot be written" in done.stderr
