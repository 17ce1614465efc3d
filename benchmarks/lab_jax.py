"""One process of plain JAX over all nodes: python -m benchmarks.lab_jax dp|fsdp RUN RANK ADDRESS

The model of `loops.composed_loss` in one jitted step over a mesh of all nodes, a device each.

    dp      parameters and moments on every node
    fsdp    each cut over the nodes along its first dim that divides, and gathered for the loss
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from benchmarks.lab_steps import tell_step
from benchmarks.loops import composed_loss, plain_optimizer
from holmesjax import config as configs
from holmesjax.data.batches import model_inputs
from holmesjax.models.layer import init_params
from holmesjax.training_setup import read_batches

NUM_NODES = 4
Tree = Any


def main() -> None:
    mode, run_file, rank, address = sys.argv[1:]
    config = configs.load(run_file)
    jax.config.update("jax_platforms", "cpu")
    jax.distributed.initialize(address, NUM_NODES, int(rank), cluster_detection_method="deactivate")
    mesh = Mesh(np.array(jax.devices()), ("data",))
    whole, cut_batch = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    optimizer = plain_optimizer(config.optimizer, config.model)

    def sharding(x: jax.Array) -> NamedSharding:
        dims = [i for i, n in enumerate(x.shape) if n % NUM_NODES == 0]
        return NamedSharding(mesh, P(*[None] * dims[0], "data")) if dims else whole

    def loss(params: Tree, batch: dict[str, jax.Array]) -> jax.Array:
        if mode == "fsdp":
            params = jax.lax.with_sharding_constraint(params, whole)
        return composed_loss(config.model, params, batch)

    def update(params: Tree, opt_state: Tree, batch: dict[str, jax.Array]) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return value, optax.apply_updates(params, updates), opt_state

    host = init_params(config.model, config.train.seed)
    place = sharding if mode == "fsdp" else lambda x: whole
    params = jax.tree.map(lambda x: jax.device_put(jnp.asarray(x), place(x)), host)
    shapes = jax.eval_shape(optimizer.init, host)
    state_shardings = jax.tree.map(place, shapes)
    opt_state = jax.jit(optimizer.init, out_shardings=state_shardings)(params)
    shardings = (whole, jax.tree.map(place, host), state_shardings)
    step = jax.jit(update, donate_argnums=(0, 1), out_shardings=shardings)

    batches, each = read_batches(config), config.train.global_batch // NUM_NODES
    for i in range(config.train.steps):
        inputs = model_inputs(batches.train(i * batches.global_batch))
        batch = {
            name: jax.make_array_from_process_local_data(
                cut_batch, inputs[name][int(rank) * each :][:each]
            )
            for name in ("token_BL", "target_BL")
        }
        value, params, opt_state = jax.block_until_ready(step(params, opt_state, batch))
        tell_step(float(value))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
