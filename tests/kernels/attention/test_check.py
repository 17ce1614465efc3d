"""The check of attention kernels passes right ones, and sees what is wrong."""

import re

import pytest

from holmesjax.hosts import kernel_check
from kernels import adamw_check
from kernels.attention.check import Case, cases, check, results
from kernels.attention.tiles import Rule
from tests.kernels.attention import planted

SMALL = Case(batch=2, length=20, heads=4, kv_heads=2, head_width=8)


@pytest.mark.parametrize(
    "case",
    [
        SMALL._replace(has_documents=True),
        SMALL._replace(dtype="float16", rule=Rule(window=5, soft_cap=2.0), deterministic=True),
    ],
)
def test_a_right_kernel_passes(case):
    found = check(case, planted.right, 2)
    assert found["problem"] is None
    assert found["changed"] == []
    assert all(error < 2.0**-7 for error in found["errors"].values())


@pytest.mark.parametrize(
    "attention, problem",
    [
        (planted.wrong, "the key gradient is off by 0.0"),
        (planted.not_a_number, "the output is off by nan"),
        (planted.changing, "the log-sum-exp changes from run to run"),
    ],
)
def test_what_is_wrong_is_named(attention, problem):
    said = check(SMALL, attention, 3)["problem"]
    assert said.startswith("2 x 20 tokens, 4/2 heads 8 wide, bfloat16, causal: ")
    assert re.search(problem, said)
    assert said.count(";") == 0  # nothing else is


ASKED = {"dtype": "bfloat16", "has_documents": False, "deterministic": False, "is_cut": False}
PLAIN = {"head_width": 8, "window": None, "soft_cap": None, "scale": None}


@pytest.mark.parametrize(
    "attention, layer, change",
    [
        (planted.without("window"), {"window": 4096}, {}),
        (planted.without("soft_cap"), {"soft_cap": 50.0}, {}),
        (planted.without("scale"), {"scale": 0.25}, {}),
        (planted.wrong_where_wide, {"head_width": 16}, {}),
        (planted.without_documents, {}, {"has_documents": True}),
        (planted.wrong_in_float16, {}, {"dtype": "float16"}),
    ],
    ids=["window", "soft cap", "scale", "width", "documents", "dtype"],
)
def test_what_is_wrong_for_one_need_of_a_run_is_found_where_a_run_needs_it(
    attention, layer, change
):
    asked = ASKED | change | {"layers": [PLAIN | layer]}
    [found] = results(asked, attention, small=True)
    assert found["problem"] is not None
    assert max(found["errors"].values()) > 2.0**-5
    [found] = results(asked, planted.right, small=True)
    assert found["problem"] is None


@pytest.mark.parametrize(
    "attention, layer",
    [
        (planted.wrong_where_all_is_seen, {}),
        (planted.without_documents, {"window": 4096}),
    ],
)
def test_kernels_that_are_wrong_where_devices_share_sequences_are_found(attention, layer):
    asked = ASKED | {"is_cut": True, "layers": [PLAIN | layer]}
    first, second = results(asked, attention, small=True)
    assert first["problem"] is None
    assert second["problem"] is not None


def test_kernels_that_are_wrong_for_another_layer_alone_are_found():
    asked = ASKED | {"layers": [PLAIN, PLAIN | {"window": 4096}]}
    first, second = results(asked, planted.without("window"), small=True)
    assert (first["problem"], first["left"], second["left"]) == (None, 1, 0)
    assert second["problem"].startswith("2 x 20 tokens, 4/2 heads 8 wide, bfloat16, causal, window")


def test_a_check_has_ragged_tiles_grouped_queries_and_more_blocks_than_a_gpu():
    near = {"head_width": 128, "window": 4096, "soft_cap": 50.0, "scale": 0.0625}
    far = near | {"window": None, "head_width": 256}
    asked = ASKED | {"has_documents": True, "layers": [near, far]}
    *small, large = cases(asked)
    for case in small:
        assert (case.batch, case.heads, case.kv_heads, case.length) == (2, 4, 2, 397)
        assert case.has_documents
        assert case.length % 64
    assert small[0].rule == Rule(window=148, soft_cap=2.0, scale=0.0625)
    assert small[1].rule == Rule(soft_cap=2.0, scale=0.0625)
    assert [case.head_width for case in (*small, large)] == [128, 256, 128]
    assert large.rule == small[0].rule
    *cut, _ = cases(asked | {"is_cut": True})
    assert cut == [*small, small[1]._replace(rule=Rule(causal=False, soft_cap=2.0, scale=0.0625))]
    assert large.batch * large.kv_heads * (large.length // 128) > 300


@pytest.mark.parametrize("layers", [[], [PLAIN]], ids=["update", "both"])
def test_the_update_is_checked_behind_attention(layers, monkeypatch):
    bad = {"what": "AdamW", "problem": "0.5 of the parameters differ"}
    found = {"int8": [("AdamW", lambda: bad)], None: []}
    monkeypatch.setattr(adamw_check, "checks", lambda kept, small: found[kept])
    asked = ASKED | {"layers": layers, "moments": "int8"}
    said = list(results(asked, planted.right, small=True))
    assert [one["left"] for one in said] == [*range(len(layers), -1, -1)]
    assert [bool(one["problem"]) for one in said] == [False] * len(layers) + [True]
    without = list(results(ASKED | {"layers": layers}, planted.right, small=True))
    assert [one["problem"] for one in without] == [None] * len(layers)


def test_each_format_of_moments_has_cases():
    for kept in ("float32", "bfloat16", "int8"):
        assert len(adamw_check.checks(kept)) == kernel_check.CASES_OF_UPDATE
    assert adamw_check.checks(None) == []
