"""A step equals a step on one device, however it is cut, scheduled and computed.

The rows are in `tests/whole_steps.py`, and the steps on one device in `tests/one_device.py`.
"""

import dataclasses
import itertools
from collections import Counter

import pytest

from holmesjax.models.layer import init_params
from tests.one_device import MICROBATCH, SEED, check, step_inputs, steps, summed_loss
from tests.whole_steps import PARAMETERS, ROWS, Row, compiled, runner

# What cannot occur together: one stage has no other, the second part of a divided backward would
# compute layers again, without checkpointing none is, and each stage of an interleaved schedule has
# several microbatches.
NEVER = {
    *((("cut", "one program"), (axis, "unequal")) for axis in ("data", "fsdp")),
    *((("cut", "zero_bubble"), ("checkpointing", policy)) for policy in ("dots", "full")),
    (("cut", "zero_bubble"), ("computed again", "some layers")),
    (("checkpointing", "none"), ("computed again", "some layers")),
    (("cut", "interleaved_1f1b"), ("microbatches", "one")),
}


def test_every_two_values_that_can_occur_together_do():
    factors = {name: {row.values[name] for row in ROWS} for name in ROWS[0].values}
    assert all(len(values) > 1 for values in factors.values())
    every = {
        pair
        for (a, b) in itertools.combinations(factors, 2)
        for pair in itertools.product([(a, x) for x in factors[a]], [(b, y) for y in factors[b]])
    }
    occur = {pair for row in ROWS for pair in itertools.combinations(row.values.items(), 2)}
    assert every - occur == NEVER


def test_a_document_does_not_see_the_one_before():
    """Both sides of the table use the same layers, so it would not notice."""
    row = next(row for row in ROWS if row.mask)
    params, inputs = init_params(row.model, SEED), step_inputs(MICROBATCH, 0)
    changed = {**inputs, "token_BL": inputs["token_BL"].copy()}
    changed["token_BL"][:, :8] += 1  # the first document
    target_BL = inputs["target_BL"].copy()
    target_BL[:, :8] = -1  # the second document alone counts
    losses = {
        mask: [
            summed_loss(params, row.model, {**row_inputs, "target_BL": target_BL}, mask)[0][0]
            for row_inputs in (inputs, changed)
        ]
        for mask in (True, False)
    }
    assert losses[True][0] == losses[True][1]
    assert losses[False][0] != losses[False][1]


@pytest.mark.parametrize("row", PARAMETERS)
def test_every_row_equals_one_device(row):
    check_row(row)


@pytest.mark.exhaustive
def test_chunks_that_differ_in_names_alone_round_their_moments_by_their_own_names():
    changed = {"split": (3, 3), "chunks": 3, "schedule": "interleaved_1f1b", "microbatches": 4}
    check_row(Row(**changed, moments="int8"))


def check_plan(row, plan, ramp=()):
    counts = tuple(n * MICROBATCH for n in ramp)
    wanted = steps(row.model, row.optimizer, counts or plan.global_batch, row.mask)
    check(runner(row, plan, ramps=bool(ramp)), plan, wanted, row.moments, ramp)


def check_row(row):
    check_plan(row, row.plan)
    if row.ramp:
        check_plan(row, row.plan, row.ramp)
    programs = compiled(row)
    if not isinstance(programs, list):
        return
    if row.microbatches == 1:  # what such a plan does not run is not compiled
        for chunk in programs:
            assert max(Counter(key.function for key in chunk.table).values()) == 1
    elif row.schedule == "1f1b":
        in_flight = {2: (3, 1), 3: (4, 3, 1)}[len(row.split)]
        for changes in ({"schedule": "gpipe"}, {"schedule": "eager_1f1b", "in_flight": in_flight}):
            check_plan(row, dataclasses.replace(row.plan, **changes), row.ramp)
