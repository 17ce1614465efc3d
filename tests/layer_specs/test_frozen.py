"""Frozen parameters stay as they are, the others train as with all, and the planner knows."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from holmesjax.config import LoraConfig
from holmesjax.costs import memory
from holmesjax.costs.products import train_flop
from holmesjax.errors import ConfigError, Mistakes
from holmesjax.layer_specs.model_layers import layers
from holmesjax.models.layer import init_params
from holmesjax.runtime.pipeline import make_runner
from tests.hand_made_plans import hand_made_plan, make_chunks, make_model, train_step
from tests.one_device import (
    MICROBATCH,
    RTOL,
    SEED,
    check_gradient,
    loss_and_gradient,
    pairs,
    step_inputs,
)
from tests.own_model_steps import initial, plain_loss
from tests.shapes import shape_of
from tests.versions import rows

pytestmark = pytest.mark.xdist_group("frozen")

GATED = {"num_layers": 2, "num_kv_heads": 2, "activation": "swiglu", "norm": "rms_norm"}
ENDS = make_model(**GATED, frozen=("embed/*", "*norm/scale_D", "*/key_DGK"))
FIRST = make_model(**GATED, frozen=("embed/*", "block_000/*"))  # all of the first stage
TIED = make_model(num_layers=2, tied_embeddings=True, frozen=("embed/token_VD", "*/up_DF"))
HEAD_ALONE = make_model(num_layers=2, frozen=("embed/*", "block_*"))
CASES = {
    "one program": (ENDS, hand_made_plan((2,), 2, 2, fsdp=2, checkpointing="full")),
    "all of one stage, one replica": (FIRST, hand_made_plan((1, 1), 1, 2, microbatches=2)),
    "all of one stage, a divided backward": (
        FIRST,
        hand_made_plan((1, 1), 2, 1, schedule="zero_bubble"),
    ),
    "a frozen table at both ends, a divided backward": (
        TIED,
        hand_made_plan((1, 1), (1, 2), 1, schedule="zero_bubble"),
    ),
    "the head alone trains": (HEAD_ALONE, hand_made_plan((1, 1), 2, 1, fsdp=2)),
}


@functools.cache
def plain_step(model, num_sequences):
    whole = dataclasses.replace(model, frozen=())
    params = init_params(whole, SEED)
    inputs = step_inputs(num_sequences, 0)
    (loss, *_), gradient = loss_and_gradient(params, whole, inputs, False)
    return params, loss, gradient


@pytest.mark.parametrize("model, plan", rows(CASES, 2))
def test_what_trains_trains_as_with_all_and_the_rest_stays(model, plan):
    params, loss, gradient = plain_step(model, plan.global_batch)
    runner = make_runner(plan, make_chunks(model, plan), evaluates=False)
    states, found = train_step(runner, runner.init(SEED), step_inputs(plan.global_batch, 0))
    assert float(found["loss"]) == pytest.approx(loss, rel=RTOL)
    kinds = layers(model)
    for state in states:
        for path, x, began in pairs(state.fixed, params):
            np.testing.assert_array_equal(x, began, str(path))
    trained = {
        f"{layer}/{parameter.name}"
        for layer, kind in kinds.items()
        for parameter in kind.parameters
        if parameter.trains
    }
    names = {f"{n}/{parameter.name}" for n in kinds for parameter in kinds[n].parameters}
    assert check_gradient(states, gradient) == trained < names
    squares = sum(
        np.square(x).sum()
        for path, x in jax.tree_util.tree_leaves_with_path(gradient)
        if "/".join(key.key for key in path) in trained
    )
    assert float(found["grad_norm"]) == pytest.approx(squares**0.5, rel=RTOL)


@pytest.mark.parametrize("model", [ENDS, TIED], ids=["ends", "tied"])
def test_the_planner_knows_what_trains(model):
    [chunk] = make_chunks(model, hand_made_plan((2,), 1, 1))
    shapes, items = chunk.state_shapes, memory.stage_memory_bytes(model, shape_of())
    num_bytes = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
    assert items["parameters"] == items["gradients"] == num_bytes(shapes.params)
    assert items["optimizer"] == num_bytes((shapes.opt_state.mu, shapes.opt_state.nu))
    assert items["replicas"] == num_bytes((shapes.params, shapes.fixed))
    # A weight that does not train has two of three products.
    weights = {ENDS: 2 * 32 * 2 * 8, TIED: 2 * 32 * 128 + 256 * 32}[model]
    whole = dataclasses.replace(model, frozen=())
    assert train_flop(whole, 1) - train_flop(model, 1) == 2 * weights


@pytest.mark.parametrize(
    "pattern, problem",
    [
        ("query_DHK", "matches no parameter"),
        ("block_9*", "matches no parameter"),
        ("*", "freezes all parameters"),
    ],
)
def test_patterns_that_mean_nothing_are_refused(pattern, problem):
    with pytest.raises(ConfigError, match=problem) as refused:
        layers(make_model(frozen=("embed/*", pattern)))
    assert refused.value.where == "model.frozen"


def test_adapters_leave_nothing_to_freeze():
    with pytest.raises(Mistakes, match=r"cannot be set beside model\.lora"):
        make_model(lora=LoraConfig(), frozen=("head/*",))


def test_a_model_of_your_own_may_be_frozen_in_part():
    frozen = ("embed/*", "block_000/*")
    module = "tests.own_models:language_model"
    model = make_model(num_layers=2, width=16, num_heads=1, module=module, frozen=frozen)
    plan, inputs = hand_made_plan((1, 1), 1, 1), step_inputs(MICROBATCH, 0)
    params = initial(model, SEED)
    loss, gradient = jax.jit(jax.value_and_grad(plain_loss))(params, inputs)
    runner = make_runner(plan, make_chunks(model, plan), evaluates=False)
    (first, last), found = train_step(runner, runner.init(SEED), inputs)
    assert float(found["loss"]) == pytest.approx(float(loss), rel=RTOL)
    assert not jax.tree.leaves(first.params)
    assert first.fixed.keys() == {"embed", "block_000"}
    for path, got, began in pairs(first.fixed, params):
        np.testing.assert_array_equal(got, began, str(path))
    assert last.params.keys() == {"block_001", "head"}
    check_gradient([last], gradient)
