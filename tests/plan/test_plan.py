"""The plan as a file and as text: read back equal, and refused where it is damaged."""

import dataclasses
import json

import pytest

from holmesjax.errors import PlanError
from holmesjax.plan.plan import Plan
from holmesjax.plan.plan_description import describe
from tests.clusters import PLANS, golden_plan, make_config, one_each, two_clusters


def interleaved():
    config = make_config(schedule="interleaved_1f1b", chunks=2)
    return one_each(config, two_clusters(), chunks=2)


# ---- the plan's file and its text ----------------------------------------------------------------


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_a_saved_plan_is_read_back_equal(name, suffix, tmp_path):
    plan, path = golden_plan(name), tmp_path / f"plan.{suffix}"
    plan.save(path)
    again = Plan.load(path)
    assert again == plan
    assert [list(stage.mesh) for stage in again.stages] == [list(s.mesh) for s in plan.stages]
    assert again.hash() == plan.hash()
    assert Plan.from_json(plan.to_json()) == Plan.from_yaml(plan.to_yaml()) == plan


def test_the_hash_changes_with_the_plan_and_with_the_order_of_axes():
    plan = PLANS["two_clusters"]()
    assert len(plan.hash()) == 12
    assert plan.hash() == PLANS["two_clusters"].__wrapped__().hash()  # made again
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
    content = json.loads(interleaved().to_json())
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
    lines = describe(golden_plan(name))
    assert max(map(len, lines)) <= 100
    plan = golden_plan(name)
    extra = bool(plan.in_flight) + bool(plan.idle) + len(plan.idle_because)
    assert len(lines) == 4 + extra + 4 * len(plan.stages)


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
