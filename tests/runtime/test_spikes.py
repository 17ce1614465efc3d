"""Spikes of the loss or the norm: the rule in float64, and what all stages do about one."""

import dataclasses

import jax
import numpy as np
import pytest

from holmesjax.checkpoints import manifest, restoring
from holmesjax.config import OptimizerConfig
from holmesjax.runtime import spikes
from holmesjax.runtime.pipeline import make_runner
from holmesjax.runtime.spikes import SpikeRule
from tests.hand_made_plans import hand_made_plan, make_chunks, make_model, put, train_step
from tests.one_device import SEED, step_inputs
from tests.versions import rows
from tests.written_checkpoints import write_states

pytestmark = pytest.mark.xdist_group("spikes")

RULE = SpikeRule(window=6, sigmas=3.0, skips=True)
# So slow that the same batch has nearly the same loss again.
CONFIG = OptimizerConfig(learning_rate=1e-6, schedule="constant")
MODEL = make_model(num_layers=2)


def wanted_limit(before, rule):
    """The mean and the standard deviation of a sample, of the last steps."""
    last = np.float64(before[-rule.window :])
    if len(last) < rule.window // 2:
        return np.inf
    return last.mean() + rule.sigmas * last.std(ddof=1)


def test_limits_are_those_of_the_last_steps():
    random = np.random.default_rng(0)
    losses, norms = random.normal(5, 0.1, 17), random.gamma(2, 1, 17)
    recent = spikes.none_yet(RULE.window)
    run = jax.jit(spikes.limits, static_argnums=1)
    for i in range(17):
        loss, square = run(recent, RULE)
        np.testing.assert_allclose(loss, wanted_limit(losses[:i], RULE), rtol=1e-5)
        np.testing.assert_allclose(np.sqrt(square), wanted_limit(norms[:i], RULE), rtol=1e-5)
        recent = spikes.remembering(recent, losses[i], norms[i], True)
        recent = spikes.remembering(recent, np.nan, np.nan, False)  # is not remembered


def chunks_of(plan, rule=RULE):
    chunks = make_chunks(MODEL, plan, config=CONFIG)
    return [dataclasses.replace(chunk, spike_rule=rule) for chunk in chunks]


@pytest.fixture(scope="module")
def batches():
    """Two batches, of which the second has the larger loss."""
    [chunk] = make_chunks(MODEL, hand_made_plan((2,), 1, 1))
    runner = make_runner(chunk.plan, [chunk])
    found = [step_inputs(chunk.plan.global_batch, 2 * i) for i in range(6)]
    states = runner.init(SEED)
    loss = lambda inputs: float(runner.evaluate(states, put(runner, inputs, trains=False)))
    in_order = sorted(found, key=loss)
    return in_order[0], in_order[-1]


@pytest.mark.parametrize(
    "plan, skips",
    rows(
        {
            "two stages": (hand_made_plan((1, 1), 2, 1), True),
            "one program": (hand_made_plan((2,), 1, 2, fsdp=2), True),
            "recorded": (hand_made_plan((2,), 1, 1), False),
        }
    ),
)
def test_a_spike_is_left_out_on_all_stages(plan, skips, batches, tmp_path):
    usual, other = batches
    rule = RULE._replace(skips=skips)
    chunks = chunks_of(plan, rule)
    runner = make_runner(plan, chunks)
    states = runner.init(SEED)
    losses, found = [], []
    for inputs in (usual, usual, usual, other, other, usual, usual):
        before = jax.tree.map(np.asarray, [state.params for state in states])
        states, metrics = train_step(runner, states, inputs)
        losses.append(float(metrics["loss"]))
        found.append(bool(metrics["spike"]))
        assert bool(metrics["skipped"]) == (found[-1] and skips)
        same = jax.tree.map(np.array_equal, before, [state.params for state in states])
        assert all(jax.tree.leaves(same)) == (found[-1] and skips)
    # Of three equal steps the fourth stands out. Remembered, it widens the limit for the next one.
    assert found == [False, False, False, True, False, False, False]
    check_resumption(tmp_path, chunks, states, losses)


def check_resumption(folder, chunks, states, losses):
    """On another plan the same steps are remembered; with another window, none."""
    write_states(folder, MODEL, chunks, (7,), states=states)
    [saved] = manifest.find(folder)
    plan = hand_made_plan((1, 1), 1, 1)
    first, last = restoring.restore(saved, chunks_of(plan))
    assert first.recent is None
    assert int(last.recent.steps) == len(losses)
    np.testing.assert_array_equal(np.sort(last.recent.losses), np.sort(np.float32(losses[-6:])))
    _, anew = restoring.restore(saved, chunks_of(plan, RULE._replace(window=8)))
    assert int(anew.recent.steps) == 0
