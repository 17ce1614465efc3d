"""AdamW, with moments that may be kept in fewer bits than float32 has."""

import dataclasses
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from holmesjax.config import OptimizerConfig
from holmesjax.models import ops
from holmesjax.models.layer import stated
from holmesjax.optimizers import update_ops
from holmesjax.optimizers.groups import update_settings
from holmesjax.optimizers.optimizer import Tree, none_missed, rounding_seed, seen
from holmesjax.parallel import sharding


def _seed(path: tuple) -> int:
    """The seed of the noise of a parameter's moments: a hash of its name in the model."""
    return zlib.crc32("/".join(key.key for key in path).encode())


def _moments(tree: Tree) -> list[Any]:
    """The moments of each parameter, in the order of the parameters."""
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, update_ops.Quantized))


class AdamWState(NamedTuple):
    """The moments have the shapes of the parameters, and their places."""

    updates: jax.Array  # so far, int32
    mu: Tree  # of `update_ops.Quantized` where they are kept as int8
    nu: Tree
    # The updates of the schedule that the moments have not seen, int32; None: it does not jump.
    missed: Any = None


@dataclass(frozen=True)
class AdamW:
    """AdamW with decoupled weight decay. Loshchilov and Hutter, arXiv:1711.05101.

    `init` and `update` make it one of optax's gradient transformations; `apply` changes parameters
    and moments in one pass, without a tree of changes in between.
    """

    config: OptimizerConfig
    schedule: optax.Schedule
    statements: Tree  # the `Parameter`s of all layers
    jumps: bool = False

    rounds_params: ClassVar[bool] = True

    @property
    def reads_names(self) -> bool:
        """Groups have patterns of names, and the noise that rounds moments has seeds of them."""
        return self.config.moments != "float32" or bool(self.config.groups)

    def init(self, params: Tree) -> AdamWState:
        zeros = lambda which: jax.tree.map(
            lambda p: update_ops.zero_moment(p.shape, self.config.moments, which), params
        )
        moments = zeros("first"), zeros("second")
        return AdamWState(jnp.zeros((), jnp.int32), *moments, none_missed(self.jumps))

    def shardings(self, params: Tree, mesh: Mesh) -> AdamWState:
        """The shardings of the state; moments lie as their parameters do."""

        def of_moment(path: tuple, _: jax.ShapeDtypeStruct, moment: Any) -> Any:
            master = sharding.master_sharding(stated(self.statements, path), mesh)
            specs = update_ops.moment_spec(moment, master.spec, mesh.shape)
            is_spec = lambda x: isinstance(x, PartitionSpec)
            return jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=is_spec)

        state = jax.eval_shape(self.init, params)
        of = lambda moments: jax.tree_util.tree_map_with_path(of_moment, params, moments)
        everywhere: Any = sharding.replicated(mesh)
        missed = everywhere if self.jumps else None
        return AdamWState._make([everywhere, of(state.mu), of(state.nu), missed])

    def with_jumps(self) -> "AdamW":
        return dataclasses.replace(self, jumps=True)

    def learning_rate(self, state: AdamWState) -> jax.Array:
        return self.schedule(state.updates)

    def as_written(self, settings: Mapping[str, Any]) -> "AdamW":
        """Returns this optimizer with moments as these settings keep them."""
        config = dataclasses.replace(self.config, moments=settings["moments"])
        return dataclasses.replace(self, config=config, jumps=settings.get("jumps", False))

    def adopt(self, state: AdamWState) -> AdamWState:
        """A state with moments that are kept in another way, kept in this one's."""

        def kept(path: tuple, moment: Any, which: Any) -> Any:
            wide = update_ops.widen(moment, which)
            like = update_ops.zero_moment(wide.shape, self.config.moments, which)
            return update_ops.round_moment(wide, like, state.updates, _seed(path), which)

        of = lambda moments, which: jax.tree_util.tree_map_with_path(
            lambda path, moment: kept(path, moment, which),
            moments,
            is_leaf=lambda x: isinstance(x, update_ops.Quantized),
        )
        moments = of(state.mu, "first"), of(state.nu, "second")
        return AdamWState(state.updates, *moments, none_missed(self.jumps, state))

    def update(
        self, gradients: Tree, state: AdamWState, params: Tree | None = None
    ) -> tuple[Tree, AdamWState]:
        """Returns the changes to add to the parameters, and the next state."""
        assert params is not None, "weight decay needs the parameters"
        new, state = self.apply(gradients, state, params)
        return jax.tree.map(lambda new, old: new - old, new, params), state

    def choose_kernel(self, kernels: ops.Kernels) -> update_ops.OptimizerChoice:
        return update_ops.choose_optimizer(self.config.moments, kernels)

    def apply(
        self,
        gradients: Tree,
        state: AdamWState,
        params: Tree,
        scale: jax.Array | float = 1.0,
        applies: jax.Array | bool = True,
        kernels: ops.Kernels = ops.DEFAULT,
    ) -> tuple[Tree, AdamWState]:
        """`Optimizer.apply`, in one pass over parameters, gradients and moments.

        Args: those of `Optimizer.apply`.
        """
        c, count = self.config, seen(state) + 1
        paths, structure = jax.tree_util.tree_flatten_with_path(params)
        parts = zip([x for _, x in paths], _moments(state.mu), _moments(state.nu), strict=True)
        leaves = [update_ops.Leaf(*part) for part in parts]
        hyperparameters = []
        statements = [stated(self.statements, path) for path, _ in paths]
        for (path, _), statement in zip(paths, statements, strict=True):
            rate, decay = update_settings(c, path, statement)
            seeds = {"seed": _seed(path), "rounding": rounding_seed(path)}
            own = update_ops.Hyperparameters(c.beta1, c.beta2, c.epsilon, decay, rate=rate, **seeds)
            hyperparameters.append(own)
        rate = self.schedule(state.updates)
        step = update_ops.factors(count, scale, rate, c.beta1, c.beta2, applies)
        specs = sharding.master_specs(statements, kernels.mesh)
        told = step, hyperparameters, kernels, c.moments, statements, specs
        new = update_ops.adamw(leaves, jax.tree.leaves(gradients), *told)
        columns = zip(*new, strict=True) if new else ((), (), ())  # a stage may train nothing
        trees = [jax.tree.unflatten(structure, column) for column in columns]
        updates = jnp.where(applies, state.updates + 1, state.updates)
        return trees[0], AdamWState(updates, trees[1], trees[2], state.missed)


def make(config: OptimizerConfig, schedule: optax.Schedule, statements: Tree) -> AdamW:
    return AdamW(config, schedule, statements)
