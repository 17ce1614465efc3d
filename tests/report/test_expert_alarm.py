"""Experts that no token reaches, and those that too many reach, are named when that begins."""

import dataclasses

from holmesjax.config import ExpertsConfig
from holmesjax.report.expert_alarm import COUNT, FIELD, MAX_NAMED, ExpertAlarm
from holmesjax.report.metrics import _scalars
from holmesjax.report.process_step import known_of

EXPERTS = ExpertsConfig(count=4, active=2)


def record(step, *loads):
    return {"step": step, "expert_load_steps": 10, "expert_loads": {"block_001": list(loads)}}


def test_a_dead_expert_and_a_loaded_one_are_named_when_they_begin_and_end():
    alarm = ExpertAlarm(EXPERTS, limit=2.0)
    assert alarm.step({"step": 9}) == ({}, None)
    assert alarm.step(record(10, 10, 10, 10, 10)) == ({COUNT: 0}, None)
    found, line = alarm.step(record(20, 21, 19, 0, 0))
    named = {"block_001/0": 2.1, "block_001/2": 0.0, "block_001/3": 0.0}
    assert found == {FIELD: named, COUNT: 3}
    assert _scalars({"step": 20, **found}) == {COUNT: 3.0}
    assert line == (
        "ALARM: in the 10 steps to step 20, 2 experts without a token: block_001/2, block_001/3; "
        "1 expert above the limit of 2 times the mean load: block_001/0 with 2.1"
    )
    again, line = alarm.step(record(30, 21, 19, 0, 0))
    assert (again, line) == (found, None)
    found, line = alarm.step(record(40, 10, 10, 10, 10))
    assert found == {COUNT: 0}
    assert line.endswith("the alarm is over")


def test_a_capacity_is_the_limit_if_it_is_smaller():
    own = dataclasses.replace(EXPERTS, capacity_factor=1.25)
    found, line = ExpertAlarm(own, limit=2.0).step(record(10, 14, 10, 8, 8))
    assert found == {FIELD: {"block_001/0": 1.4}, COUNT: 1}
    assert "above the capacity of 1.25 times" in line
    assert ExpertAlarm(EXPERTS, limit=2.0).step(record(10, 14, 10, 8, 8)) == ({COUNT: 0}, None)


def test_a_record_names_the_experts_that_are_farthest_from_the_mean():
    loads = [10] * 100
    loads[:40], loads[-1] = [25] * 40, 70
    found, _ = ExpertAlarm(EXPERTS, limit=1.2).step(record(10, *loads))
    assert found[COUNT] == 41
    assert len(found[FIELD]) == MAX_NAMED
    assert max(found[FIELD], key=found[FIELD].__getitem__) == "block_001/99"


def test_loads_of_all_stages_are_known():
    stages = [{"expert_loads": {"block_001": [3, 5]}}, {"expert_loads": {"block_003": [8, 0]}}]
    assert known_of(stages)["expert_loads"] == {"block_001": [3, 5], "block_003": [8, 0]}
