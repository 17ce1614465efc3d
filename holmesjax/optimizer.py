"""AdamW and its learning-rate schedules.

Clipping is not in it: its norm is global over all stages, so `stage` says by how much the gradients
are to be scaled.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from holmesjax import ops, sharding
from holmesjax.config import OptimizerConfig
from holmesjax.plan import EMBED

Tree = Any


def learning_rate(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Learning rate of update n = 0, 1, ...: a linear warm-up, then the schedule of the config.

    The last update, `num_steps - 1`, has `final_fraction` of the peak, except for "constant".
    """
    peak, final = config.learning_rate, config.learning_rate * config.final_fraction
    warmup = config.warmup_steps
    rest = max(num_steps - 1 - warmup, 1)
    if config.schedule == "constant":
        after: optax.Schedule = optax.constant_schedule(peak)
    elif config.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, rest, alpha=config.final_fraction)
    elif config.schedule == "linear":
        after = optax.linear_schedule(peak, final, rest)
    else:  # warm-up, stable, decay: Hu et al., "MiniCPM", arXiv:2404.06395
        assert config.decay_steps is not None
        stable = max(num_steps - 1 - warmup - config.decay_steps, 0)
        decay = optax.linear_schedule(peak, final, config.decay_steps)
        after = optax.join_schedules([optax.constant_schedule(peak), decay], [stable])
    if not warmup:
        return after
    rise = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
    return optax.join_schedules([rise, after], [warmup])


def decays(path: tuple) -> bool:
    """Whether weight decay applies: to matrices, not to norms, biases and embeddings."""
    return len(sharding.dims(sharding.name_of(path))) > 1 and path[0].key != EMBED


class AdamWState(NamedTuple):
    """The moments have the shapes of the parameters, and their places."""

    updates: jax.Array  # so far, int32
    mu: Tree
    nu: Tree


@dataclass(frozen=True)
class AdamW:
    """AdamW with decoupled weight decay. Loshchilov and Hutter, arXiv:1711.05101.

    `init` and `update` make it one of optax's gradient transformations; `apply` changes parameters
    and moments in one pass, without a tree of changes in between.
    """

    config: OptimizerConfig
    schedule: optax.Schedule

    def init(self, params: Tree) -> AdamWState:
        zeros = lambda: jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        return AdamWState(jnp.zeros((), jnp.int32), zeros(), zeros())

    def update(
        self, gradients: Tree, state: AdamWState, params: Tree | None = None
    ) -> tuple[Tree, AdamWState]:
        """What to add to the parameters, and the next state."""
        assert params is not None, "weight decay needs the parameters"
        new, state = self.apply(gradients, state, params)
        return jax.tree.map(lambda new, old: new - old, new, params), state

    def apply(
        self,
        gradients: Tree,
        state: AdamWState,
        params: Tree,
        scale: jax.Array | float = 1.0,
        kernels: ops.Kernels = ops.DEFAULT,
    ) -> tuple[Tree, AdamWState]:
        """The parameters and the state after a step with gradients times `scale`.

        On the mesh of `kernels` parameters, moments and gradients are in the master layout.
        """
        c, count = self.config, state.updates + 1
        paths, structure = jax.tree_util.tree_flatten_with_path(params)
        parts = [jax.tree.leaves(tree) for tree in (params, state.mu, state.nu)]
        leaves = [ops.Leaf(*part) for part in zip(*parts, strict=True)]
        rules, specs = [], []
        for path, x in paths:
            decay = c.weight_decay if decays(path) else 0.0
            rules.append(ops.Rule(c.beta1, c.beta2, c.epsilon, decay))
            if kernels.mesh is not None:
                name = sharding.name_of(path)
                specs.append(sharding.master_spec(name, x.shape, kernels.mesh.shape))
        rate = self.schedule(state.updates)
        step = ops.factors(count, scale, rate, c.beta1, c.beta2)
        new = ops.adamw(leaves, jax.tree.leaves(gradients), step, rules, specs, kernels)
        trees = [jax.tree.unflatten(structure, column) for column in zip(*new, strict=True)]
        return trees[0], AdamWState(count, trees[1], trees[2])


def make_optimizer(config: OptimizerConfig, num_steps: int) -> AdamW:
    return AdamW(config, learning_rate(config, num_steps))
