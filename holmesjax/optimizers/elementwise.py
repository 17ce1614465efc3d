"""Any elementwise transformation of optax as an optimizer.

Elementwise: each number of a direction depends on the same number of the gradients and of the
state, and on counters. So an update is the same however arrays are cut, and the state lies where
the parameters do.

    parameter <- parameter - rate (direction + weight_decay parameter)
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from holmesjax.config import OptimizerConfig
from holmesjax.config.update_rules import NumberFormat
from holmesjax.errors import ConfigError
from holmesjax.models import ops
from holmesjax.models.layer import stated
from holmesjax.optimizers import update_ops
from holmesjax.optimizers.groups import update_settings
from holmesjax.optimizers.optimizer import State, Tree, map_layers
from holmesjax.parallel import sharding

# By `optimizer.name`: the direction of an update, before weight decay and the learning rate.
DIRECTIONS: dict[str, Callable[[OptimizerConfig], optax.GradientTransformation]] = {
    "lion": lambda c: optax.scale_by_lion(c.beta1, c.beta2),
    "sgd": lambda c: optax.trace(c.beta1) if c.beta1 else optax.identity(),
    "rmsprop": lambda c: optax.scale_by_rms(c.beta2, c.epsilon),
    "optax": lambda c: of_function(c)[0],
}
SAMPLE = jax.ShapeDtypeStruct((3, 5), jnp.float32)  # a parameter, to see what is kept of it
COUNT = jax.ShapeDtypeStruct((), jnp.int32)  # of updates


def of_function(
    config: OptimizerConfig,
) -> tuple[optax.GradientTransformation, optax.Schedule | None]:
    """The transformation that `optimizer.function` gives, and the schedule where there is one.

    Raises:
      ConfigError: there is none, its state is not elementwise, or it has a schedule in itself.
    """
    name = config.function
    assert name is not None, "the check of the section sees to it"
    refuse = functools.partial(ConfigError, "optimizer.function")
    try:
        made, schedule = resolve_name(name)(config), None
        if not isinstance(made, optax.GradientTransformation):
            made, schedule = made
            assert jax.eval_shape(schedule, COUNT).shape == (), "a rate is one number"
        tree = {"layer": {"parameter": SAMPLE}}
        state = jax.eval_shape(made.init, tree)
        jax.eval_shape(made.update, tree, state, tree)
    except Exception as error:
        raise refuse(
            "must take the section `optimizer` and give a transformation of optax",
            found=f"{name}: {type(error).__name__}: {error}",
            fix="write module:function, of a module that each process of the run can import, as "
            "def my_optimizer(config): return optax.scale_by_adam(config.beta1, config.beta2)",
        ) from error
    if others := [x.shape for x in jax.tree.leaves(state) if x.shape not in ((), SAMPLE.shape)]:
        raise refuse(
            "is not elementwise: it keeps arrays of another shape than their parameter's",
            found=f"{name}: {', '.join(map(str, others))} for a parameter of {SAMPLE.shape}",
            fix="use a transformation that keeps arrays of the parameters' shapes, or numbers",
        )
    if any(map(_has_rate, jax.tree.leaves(state, is_leaf=_has_rate))):
        raise refuse(
            "has a schedule inside of its transformation, so no record could show the rate",
            found=name,
            fix="give the schedule beside the transformation, which then has none: "
            "return optax.scale_by_adam(config.beta1, config.beta2), my_schedule",
        )
    return made, schedule


def _has_rate(state: Any) -> bool:
    """Whether this is the state of a transformation that follows a schedule of learning rates."""
    injected = getattr(state, "hyperparams_states", {})
    return isinstance(state, optax.ScaleByScheduleState) or "learning_rate" in injected


def kept_by_function(config: OptimizerConfig) -> tuple[NumberFormat, ...]:
    """`UpdateRule.kept` of `optimizer.function`."""
    state = jax.eval_shape(of_function(config)[0].init, {"layer": {"parameter": SAMPLE}})
    kept = [x for x in jax.tree.leaves(state) if x.shape == SAMPLE.shape]
    return tuple("bfloat16" if x.dtype == jnp.bfloat16 else "float32" for x in kept)


class ElementwiseState(NamedTuple):
    """The state of an optax transformation, and a count."""

    updates: jax.Array  # so far, int32
    direction: Any


@dataclass(frozen=True)
class Elementwise:
    """An elementwise transformation of optax, with decoupled weight decay and a learning rate."""

    config: OptimizerConfig
    schedule: optax.Schedule
    statements: Tree  # the `Parameter`s of all layers
    direction: optax.GradientTransformation

    rounds_params: ClassVar[bool] = False

    @property
    def reads_names(self) -> bool:
        """Groups have patterns of names."""
        return bool(self.config.groups)

    def init(self, params: Tree) -> ElementwiseState:
        return ElementwiseState(jnp.zeros((), jnp.int32), self.direction.init(params))

    def shardings(self, params: Tree, mesh: Mesh) -> ElementwiseState:
        def of_master(path: tuple, _: jax.ShapeDtypeStruct) -> NamedSharding:
            return sharding.master_sharding(stated(self.statements, path), mesh)

        masters = jax.tree_util.tree_map_with_path(of_master, params)
        sizes, everywhere = jax.tree.map(jnp.shape, params), sharding.replicated(mesh)

        def of_layers(arrays: dict[str, Tree]) -> Tree:
            assert jax.tree.map(jnp.shape, arrays) == sizes, "the state is not elementwise"
            return masters

        laid = map_layers(of_layers, jax.eval_shape(self.init, params))
        is_done = lambda x: isinstance(x, jax.sharding.Sharding)
        return jax.tree.map(lambda x: x if is_done(x) else everywhere, laid, is_leaf=is_done)

    def choose_kernel(self, kernels: ops.Kernels) -> None:
        return None

    def apply(
        self,
        gradients: Tree,
        state: ElementwiseState,
        params: Tree,
        scale: jax.Array | float = 1.0,
        applies: jax.Array | bool = True,
        kernels: ops.Kernels = ops.DEFAULT,
    ) -> tuple[Tree, ElementwiseState]:
        """`Optimizer.apply`, by optax's formula.

        Args: those of `Optimizer.apply`.
        """

        def update(held: tuple[Tree, ElementwiseState]) -> tuple[Tree, ElementwiseState]:
            params, state = held
            scaled = jax.tree.map(lambda g: g.astype(jnp.float32) * scale, gradients)
            direction, inner = self.direction.update(scaled, state.direction, params)
            rate = self.schedule(state.updates)

            def moved(path: tuple, x: jax.Array, change: jax.Array) -> jax.Array:
                factor, decay = update_settings(self.config, path, stated(self.statements, path))
                own_rate = rate if factor == 1.0 else factor * rate
                return x - own_rate * (change + decay * x)

            new = jax.tree_util.tree_map_with_path(moved, params, direction)
            return new, ElementwiseState(state.updates + 1, inner)

        return update_ops.changed_if(jnp.asarray(applies), update, (params, state), kernels)

    def learning_rate(self, state: ElementwiseState) -> jax.Array:
        return self.schedule(state.updates)

    def with_jumps(self) -> "Elementwise":
        """Returns this one: transformations of optax count their own updates."""
        return self

    def as_written(self, settings: Mapping[str, Any]) -> "Elementwise":
        return self

    def adopt(self, state: State) -> State:
        return state


def make(config: OptimizerConfig, schedule: optax.Schedule, statements: Tree) -> Elementwise:
    if config.function is not None:
        schedule = _times(schedule, of_function(config)[1])
    return Elementwise(config, schedule, statements, DIRECTIONS[config.name](config))


def _times(schedule: optax.Schedule, own: optax.Schedule | None) -> optax.Schedule:
    """The schedule of the section, times that of a function."""
    return schedule if own is None else lambda update: schedule(update) * own(update)
