"""AdamW and its learning-rate schedules.

Clipping is not in it: the norm is global over all stages, so `end_of_step` says by which factor the
gradients are to be scaled.
"""

import functools
import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from holmesjax.config import OptimizerConfig
from holmesjax.models import ops
from holmesjax.optimizers import learning_rates
from holmesjax.parallel import sharding
from holmesjax.plan.plan import EMBED

Tree = Any


def learning_rate(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """`learning_rates.learning_rate` of update n = 0, 1, ..., as a program computes it."""
    return functools.partial(learning_rates.learning_rate, config, num_steps, xp=jnp)


def decays(path: tuple) -> bool:
    """Whether weight decay applies: to matrices, not to norms, biases and embeddings."""
    return len(sharding.dims(sharding.name_of(path))) > 1 and path[0].key != EMBED


def _seed(path: tuple) -> int:
    """The seed of the noise of a parameter's moments: a hash of its name in the model."""
    return zlib.crc32("/".join(key.key for key in path).encode())


def _moments(tree: Tree) -> list[Any]:
    """The moments of each parameter, in the order of the parameters."""
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, ops.Quantized))


class AdamWState(NamedTuple):
    """The moments have the shapes of the parameters, and their places."""

    updates: jax.Array  # so far, int32
    mu: Tree  # of `ops.Quantized` where they are kept as int8
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
        zeros = lambda which: jax.tree.map(
            lambda p: ops.zero_moment(p.shape, self.config.moments, which), params
        )
        return AdamWState(jnp.zeros((), jnp.int32), zeros("first"), zeros("second"))

    def shardings(self, params: Tree, mesh: Mesh) -> AdamWState:
        """The shardings of the state, for parameters of these shapes; moments lie as they do."""

        def of_moment(path: tuple, x: jax.ShapeDtypeStruct, moment: Any) -> Any:
            spec = sharding.master_spec(sharding.name_of(path), x.shape, mesh.shape)
            specs = ops.moment_spec(moment, spec, mesh.shape)
            is_spec = lambda x: isinstance(x, PartitionSpec)
            return jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=is_spec)

        state = jax.eval_shape(self.init, params)
        of = lambda moments: jax.tree_util.tree_map_with_path(of_moment, params, moments)
        return AdamWState._make([sharding.replicated(mesh), of(state.mu), of(state.nu)])

    def adopt(self, state: AdamWState) -> AdamWState:
        """A state with moments that are kept in another way, kept in this one's."""

        def kept(path: tuple, moment: Any, which: Any) -> Any:
            wide = ops.widen(moment, which)
            like = ops.zero_moment(wide.shape, self.config.moments, which)
            return ops.round_moment(wide, like, state.updates, _seed(path), which)

        of = lambda moments, which: jax.tree_util.tree_map_with_path(
            lambda path, moment: kept(path, moment, which),
            moments,
            is_leaf=lambda x: isinstance(x, ops.Quantized),
        )
        return AdamWState(state.updates, of(state.mu, "first"), of(state.nu, "second"))

    def update(
        self, gradients: Tree, state: AdamWState, params: Tree | None = None
    ) -> tuple[Tree, AdamWState]:
        """Returns the changes to add to the parameters, and the next state."""
        assert params is not None, "weight decay needs the parameters"
        new, state = self.apply(gradients, state, params)
        return jax.tree.map(lambda new, old: new - old, new, params), state

    def apply(
        self,
        gradients: Tree,
        state: AdamWState,
        params: Tree,
        scale: jax.Array | float = 1.0,
        applies: jax.Array | bool = True,
        kernels: ops.Kernels = ops.DEFAULT,
    ) -> tuple[Tree, AdamWState]:
        """The parameters and the state after a step, if it applies; otherwise as they are.

        On the mesh of `kernels` parameters, moments and gradients are in the master layout.

        Args:
          gradients: of the shapes of the parameters.
          state: of the step before.
          params: float32.
          scale: by which gradients are multiplied, to clip their norm.
          applies: whether the step changes anything.
          kernels: tells the mesh.
        """
        c, count = self.config, state.updates + 1
        paths, structure = jax.tree_util.tree_flatten_with_path(params)
        parts = zip([x for _, x in paths], _moments(state.mu), _moments(state.nu), strict=True)
        leaves = [ops.Leaf(*part) for part in parts]
        hyperparameters = []
        for path, _ in paths:
            decay = c.weight_decay if decays(path) else 0.0
            own = ops.Hyperparameters(c.beta1, c.beta2, c.epsilon, decay, _seed(path))
            hyperparameters.append(own)
        rate = self.schedule(state.updates)
        step = ops.factors(count, scale, rate, c.beta1, c.beta2, applies)
        new = ops.adamw(leaves, jax.tree.leaves(gradients), step, hyperparameters, kernels)
        trees = [jax.tree.unflatten(structure, column) for column in zip(*new, strict=True)]
        return trees[0], AdamWState(jnp.where(applies, count, state.updates), trees[1], trees[2])


def make_optimizer(config: OptimizerConfig, num_steps: int) -> AdamW:
    return AdamW(config, learning_rate(config, num_steps))
