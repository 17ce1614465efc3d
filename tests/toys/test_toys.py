"""Toys of a schedule, an optimizer and a data source go through a run, by their own files alone.

A job of processes trains; one process with another plan resumes and goes on; the losses are those
of `jax.grad` and optax on one device.
"""

import io

import jax
import numpy as np
import optax
import pytest

from holmesjax import config as configs
from holmesjax.config.data_sources import SOURCES
from holmesjax.config.update_rules import RULES
from holmesjax.data.batches import model_inputs
from holmesjax.errors import CheckpointError, Mistakes
from holmesjax.generation.sampler import Sampler
from holmesjax.generation.sampling import Sampling
from holmesjax.layer_specs.model_layers import EMBED
from holmesjax.models.layer import init_params
from holmesjax.plan.plan import Plan
from holmesjax.report import metrics
from holmesjax.schedules.pipeline_schedules import SCHEDULES, TaskOrder, validate
from holmesjax.trainer import Trainer
from holmesjax.training_setup import read_batches
from launch.__main__ import main
from tests.jobs import ROOT, RunningJob, write_run
from tests.one_device import plain_loss
from tests.toys import data, optimizer, schedule

RTOL = 1e-5  # sums in another order, in float32
TOYS = {schedule: "parallel.schedule", optimizer: "optimizer.name", data: "data.source"}
CLUSTERS = {"ib": (2,), "roce": (2,)}
SMALL = ["model.num_layers=2", "model.width=16", "model.num_heads=2", "data.documents=mask"]
RATE = ["optimizer.schedule=constant", "optimizer.warmup_steps=0", "optimizer.clip_norm=0.5"]
RUN = [
    *SMALL,
    *RATE,
    "optimizer.epsilon=1e-8",
    *(f"{setting}={toy.NAME}" for toy, setting in TOYS.items()),
]
PLANS = [
    ["parallel.data=2", "parallel.microbatches=4"],
    ["parallel.data=1", "parallel.tensor=2", "parallel.microbatches=2"],
]
STEPS = (3, 5)  # of the job, and of the run that resumes


@pytest.fixture
def toys(monkeypatch):
    for table, toy in ((SCHEDULES, schedule), (RULES, optimizer), (SOURCES, data)):
        monkeypatch.setitem(table, toy.NAME, None)  # so that it is taken out again
        toy.add()


def plain_losses(run_file):
    """The losses of a run by `jax.grad` and optax on one device, on the same batches."""
    config = configs.load(run_file, [*RUN, *PLANS[0], f"train.steps={STEPS[1]}"])
    model, batches, c = config.model, read_batches(config), config.optimizer
    params = init_params(model, config.train.seed)
    is_matrix = lambda path, x: x.ndim > 1 and path[0].key != EMBED
    is_decayed = jax.tree_util.tree_map_with_path(is_matrix, params)
    update = optax.chain(
        optax.clip_by_global_norm(c.clip_norm),
        optax.scale_by_belief(c.beta1, c.beta2, **optimizer.EPSILON),
        optax.add_decayed_weights(c.weight_decay, is_decayed),
        optax.scale_by_learning_rate(c.learning_rate),
    )
    state = update.init(params)
    loss_and_gradient = jax.jit(jax.value_and_grad(plain_loss), static_argnums=(1, 3))
    for step in range(STEPS[1]):
        inputs = model_inputs(batches.train(step * batches.global_batch))
        assert 0 < np.count_nonzero(inputs["target_BL"] >= 0) < inputs["target_BL"].size / 2
        loss, gradient = loss_and_gradient(params, model, inputs, True)
        changes, state = update.update(gradient, state, params)
        params = optax.apply_updates(params, changes)
        yield float(loss)


@pytest.mark.one_version
def test_toys_train_in_processes_and_resume_on_another_plan(tmp_path, toys, capsys):
    run_file = write_run(tmp_path, CLUSTERS)
    path = f"{ROOT / 'tests/toys/on_path'}:{ROOT}"
    settings = [*RUN, *PLANS[0], f"train.steps={STEPS[0]}"]
    with RunningJob(run_file, "--launcher", "local", *settings, env={"PYTHONPATH": path}) as job:
        assert job.end() == 0, job.output
    plans = [Plan.load(tmp_path / "run/plan.yaml")]
    assert "beliefs in float32" in job.output
    out = io.StringIO()
    trainer = Trainer(run_file, [*RUN, *PLANS[1], f"train.steps={STEPS[1]}"], out)
    trainer.train()
    assert f"resuming after step {STEPS[0]}" in out.getvalue()
    plans.append(Plan.load(tmp_path / "run/plan.yaml"))
    assert [plan.schedule for plan in plans] == [schedule.NAME] * 2
    assert plans[0].stages[0].mesh != plans[1].stages[0].mesh
    losses = [record["loss"] for record in metrics.read(tmp_path / "run")]
    np.testing.assert_allclose(losses, list(plain_losses(run_file)), rtol=RTOL)
    [row], _ = Sampler.load(tmp_path / "run").complete(["123"], 5, Sampling())
    assert set(row.text) <= set("0123456789=")
    assert main(["plan", str(run_file), *RUN, *PLANS[0], "--explain"]) == 0
    assert f"schedule  {schedule.NAME}" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="is of another optimizer"):
        Trainer(run_file, [*RUN, *PLANS[1], "optimizer.name=sgd", "train.steps=7"], out).train()


@pytest.mark.parametrize("num_stages, microbatches", [(1, 1), (2, 4), (3, 5), (4, 8)])
def test_the_toy_schedule_keeps_its_promises(toys, num_stages, microbatches):
    order = TaskOrder(schedule.NAME, num_stages, microbatches)
    validate(schedule.NAME, order.tasks(), microbatches)


def test_a_vocabulary_must_hold_the_tokens_of_the_source(toys, tmp_path):
    with pytest.raises(Mistakes, match="must be at least 12: the tokens of the corpus are digits"):
        configs.load(write_run(tmp_path, CLUSTERS), [*RUN, "model.vocab_size=11"])


def test_no_toy_is_left_in_a_table():
    """Other tests of this process see none."""
    assert not [name for table in (SCHEDULES, RULES, SOURCES) for name in table if "toy" in name]
