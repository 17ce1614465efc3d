"""Steps with fewer microbatches than others equal steps of one device with these batches."""

import functools

import jax
import numpy as np
import pytest

from holmesjax import job as jobs
from holmesjax.config import RampupConfig, TrainConfig
from holmesjax.errors import ConfigError
from holmesjax.models.layer import init_params, statements
from holmesjax.optimizers.optimizer import make_optimizer
from holmesjax.runtime.pipeline import make_runner
from holmesjax.runtime.timeline import Clock
from tests.hand_made_plans import SMOOTH, hand_made_plan, make_chunks, make_model
from tests.jobs import write_run
from tests.one_device import (
    MICROBATCH,
    RTOL,
    SEED,
    assert_trees_near,
    loss_and_gradient,
    step_inputs,
)

pytestmark = pytest.mark.xdist_group("rampup")

MODEL = make_model(num_layers=2, tied_embeddings=True, z_loss_multiplier=0.01)
COUNTS = (1, 2, 4, 3)  # microbatches of each step


def test_batches_and_sequences_follow_the_parts():
    parts = RampupConfig(steps=2, global_batch=4), RampupConfig(steps=1, global_batch=8)
    train = TrainConfig(steps=9, global_batch=16, rampup=parts)
    assert [train.batch_of(step) for step in range(1, 6)] == [4, 4, 8, 16, 16]
    assert [train.sequences_after(step) for step in range(6)] == [0, 4, 8, 16, 32, 48]


@functools.cache
def wanted():
    """The loss of each step on one device, and the parameters after it."""
    params, found = init_params(MODEL, SEED), []
    optimizer = make_optimizer(SMOOTH, 100, statements(MODEL))
    opt_state, apply = optimizer.init(params), jax.jit(optimizer.apply)
    for step, count in enumerate(COUNTS):
        inputs = step_inputs(count * MICROBATCH, step)
        losses, gradient = loss_and_gradient(params, MODEL, inputs, False)
        params, opt_state = apply(jax.tree.map(np.float32, gradient), opt_state, params)
        found.append((sum(losses), jax.tree.map(np.asarray, params)))
    return found


@pytest.mark.parametrize(
    "plan",
    [
        hand_made_plan((1, 1), 2, 1, microbatches=4, schedule="zero_bubble"),
        hand_made_plan((1, 1), 1, 1, microbatches=4, schedule="eager_1f1b", in_flight=(3, 1)),
        hand_made_plan((2,), 2, 1, microbatches=4),
    ],
    ids=["zero bubble", "eager", "one stage"],
)
def test_small_batches_are_those_of_one_device(plan):
    runner = make_runner(plan, make_chunks(MODEL, plan), ramps=True)
    states, clock = runner.init(SEED), Clock(len(plan.stages))
    for step, (count, (loss, params)) in enumerate(zip(COUNTS, wanted(), strict=True)):
        inputs = step_inputs(count * MICROBATCH, step)
        num_targets = np.count_nonzero(inputs["target_BL"] >= 0)
        host = {name: inputs[name] for name in runner.placer.names}
        placed = runner.placer.place(host, num_targets, num_microbatches=count)
        states, metrics = runner.train_step(states, placed, clock.timeline())
        found = float(metrics["loss"]) + float(metrics["z_loss"])
        np.testing.assert_allclose(found, loss, rtol=1e-5)
        for state in states:
            assert_trees_near(state.params, params, RTOL, f"step {step}")
    clock.close()


@pytest.mark.parametrize(
    "settings, problem",
    [
        (["parallel.microbatches=4"], "must be a multiple of 2, the sequences of a microbatch"),
        (
            ["train.rampup=[{steps: 1, global_batch: 2}]", "parallel.schedule=interleaved_1f1b"],
            "gives 1 microbatches, and interleaved_1f1b needs a multiple of the 2",
        ),
    ],
)
def test_batches_that_a_plan_cannot_make_are_refused(settings, problem, tmp_path):
    file = write_run(tmp_path, {"a": (1,), "b": (1,)})
    base = ["train.global_batch=8", "train.rampup=[{steps: 1, global_batch: 3}]"]
    more = ["parallel.stages=2", "parallel.microbatches=4", "model.num_layers=4"]
    with pytest.raises(ConfigError, match=problem) as error:
        jobs.load(file, [*base, *more, *settings])
    assert error.value.where == "train.rampup[0].global_batch"
