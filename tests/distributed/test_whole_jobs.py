"""Whole jobs with a process for every node: what one device computes, and how they fail."""

import functools

import jax
import numpy as np
import optax
import pytest

from holmesjax import config as configs
from holmesjax.data.batches import model_inputs
from holmesjax.models import transformer
from holmesjax.optimizers.adamw import make_optimizer
from holmesjax.plan.plan import layer_names
from holmesjax.report import metrics
from holmesjax.session import read_batches
from tests.jobs import RunningJob, external_job, write_run
from tests.runtime.test_pipeline import plain_loss

RTOL = 1e-5  # sums in another order, in float32

# Settings of all jobs here: a block for each of two stages, and a few steps.
SHORT = ("train.steps=5", "model.num_layers=2")

# name -> nodes of each cluster, by their devices; settings
JOBS = {
    "three stages, unequal data over devices and nodes, tied, a process for each device": (
        {"a": (2,), "b": (1, 1), "c": (1,)},
        ["parallel.schedule=gpipe", "distributed.processes=device"],
        ["model.num_layers=3", "model.tied_embeddings=true"],
    ),
    "one stage over clusters, tensor over nodes": (
        {"ib": (1, 1), "roce": (1, 1)},
        ["parallel.clusters=null", "parallel.data=2", "parallel.tensor=2"],
        [],
    ),
}


@functools.cache
def plain_losses(*settings: str) -> list[float]:
    """A run by `jax.grad` and optax on one device, on the same batches."""
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        path = write_run(Path(folder), {"a": (1,)})
        config = configs.load(path, [*SHORT, *settings])
    model, batches = config.model, read_batches(config)
    params = transformer.init_params(model, config.train.seed, layer_names(model.num_layers))
    optimizer = make_optimizer(config.optimizer, config.train.steps)
    clip = optax.clip_by_global_norm(config.optimizer.clip_norm)
    opt_state, update = optimizer.init(params), jax.jit(optimizer.update)
    loss_and_gradient = jax.jit(jax.value_and_grad(plain_loss), static_argnums=1)
    losses = []
    for step in range(config.train.steps):
        inputs = model_inputs(batches.train(step * batches.global_batch))
        loss, gradient = loss_and_gradient(params, model, inputs)
        gradient, _ = clip.update(gradient, clip.init(params))
        updates, opt_state = update(gradient, opt_state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return losses


def losses_of(run_dir) -> list[float]:
    return [record["loss"] for record in metrics.read(run_dir)]


@pytest.mark.parametrize("name", JOBS)
def test_the_steps_are_those_of_one_device(tmp_path, name):
    clusters, settings, model = JOBS[name]
    run_file = write_run(tmp_path, clusters)
    with RunningJob(run_file, "--launcher", "local", *SHORT, *settings, *model) as job:
        assert job.end(120) == 0, job.output
    got = losses_of(tmp_path / "run")
    np.testing.assert_allclose(got, plain_losses(*model), rtol=RTOL)


def test_all_processes_of_a_stage_keep_to_the_schedule_whatever_comes_late(tmp_path):
    """A W that only one of them runs early holds collectives that the others reach later."""
    settings = ["parallel.schedule=zero_bubble", "parallel.fsdp=2", "parallel.data=1"]
    settings += ["parallel.microbatches=4"]
    odd = {number: {"late_s": 0.1} for number in range(4)}
    clusters = {"ib": (1, 1), "roce": (1, 1)}
    with external_job(tmp_path, clusters, *SHORT, *settings, odd=odd) as job:
        assert job.end(120) == 0, job.output
    got = losses_of(tmp_path / "run")
    np.testing.assert_allclose(got, plain_losses(), rtol=RTOL)
