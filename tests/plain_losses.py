"""The losses of a run on one device, by `jax.grad` and optax."""

import functools
import tempfile
from pathlib import Path

import jax
import optax

from holmesjax import config as configs
from holmesjax.data.batches import model_inputs
from holmesjax.models.layer import init_params, statements
from holmesjax.optimizers.optimizer import make_optimizer
from holmesjax.training_setup import read_batches
from tests.jobs import write_run
from tests.one_device import plain_loss

# Settings of all jobs here: a block for each of two stages, and a few steps.
SHORT = ("train.steps=4", "model.num_layers=2")


@functools.cache
def plain_losses(*settings: str) -> list[float]:
    """A run by `jax.grad` and optax on one device, on the same batches."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_run(Path(folder), {"a": (1,)})
        config = configs.load(path, [*SHORT, *settings])
    model, batches = config.model, read_batches(config)
    params = init_params(model, config.train.seed)
    optimizer = make_optimizer(config.optimizer, config.train.steps, statements(model))
    clip = optax.clip_by_global_norm(config.optimizer.clip_norm)

    @jax.jit
    def train_step(params, opt_state, inputs):
        loss, gradient = jax.value_and_grad(plain_loss)(params, model, inputs)
        gradient, _ = clip.update(gradient, clip.init(params))
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state, losses = jax.jit(optimizer.init)(params), []
    for step in range(config.train.steps):
        inputs = model_inputs(batches.train(step * batches.global_batch))
        params, opt_state, loss = train_step(params, opt_state, inputs)
        losses.append(float(loss))
    return losses
