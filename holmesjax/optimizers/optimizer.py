"""The protocol of an optimizer, and the one that a run names."""

import functools
import importlib
import zlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from holmesjax.config import OptimizerConfig
from holmesjax.config.update_rules import RULES
from holmesjax.models import ops
from holmesjax.optimizers import learning_rates, update_ops
from holmesjax.optimizers.learning_rates import StepTokens

Tree = Any  # a nested dict of arrays, keyed by layer and parameter name
State = Any  # arrays, and dicts keyed by layer and parameter name as parameters are


class Optimizer(Protocol):
    """The optimizer of a stage. Clipping is not in it: `end_of_step` gives the factor.

    A state is any tree of JAX with a number `updates` (int32) of the updates so far. Its arrays for
    each parameter stand in dicts with the keys of the parameters. So a checkpoint names arrays by
    layer, and any plan can read them.
    """

    # Whether `apply` takes parameters in bfloat16, too, and rounds them at random.
    rounds_params: ClassVar[bool]

    @property
    def reads_names(self) -> bool:
        """Whether an update depends on the names of layers, and not on arrays alone."""

    def init(self, params: Tree) -> State:
        """The state before the first update."""

    def shardings(self, params: Tree, mesh: Mesh) -> State:
        """The sharding of each array of the state, for parameters of these shapes."""

    def choose_kernel(self, kernels: ops.Kernels) -> update_ops.OptimizerChoice | None:
        """Returns what computes AdamW's step, and why; None: no parameter has it.

        Raises:
          ConfigError: the devices cannot run what the run asks for.
        """

    def apply(
        self,
        gradients: Tree,
        state: State,
        params: Tree,
        scale: jax.Array | float = 1.0,
        applies: jax.Array | bool = True,
        kernels: ops.Kernels = ops.DEFAULT,
    ) -> tuple[Tree, State]:
        """The parameters and the state after an update, if it applies; otherwise as they are.

        On the mesh of `kernels` parameters, state and gradients are in the master layout.

        Args:
          gradients: of the shapes of the parameters.
          state: of the update before.
          params: float32, or bfloat16 if this optimizer `rounds_params`.
          scale: by which gradients are multiplied, to clip their norm.
          applies: whether the update changes anything.
          kernels: the implementation that is asked for, and the mesh.
        """

    def learning_rate(self, state: State) -> jax.Array:
        """The learning rate of the next update."""

    def with_jumps(self) -> "Optimizer":
        """This optimizer where `updates` may jump: the schedule follows it, and bias does not."""

    def as_written(self, settings: Mapping[str, Any]) -> "Optimizer":
        """The optimizer of a checkpoint with these settings; equal to this one if they are.

        Beside those of the section `optimizer`, `jumps` is whether its states have `missed`.
        """

    def adopt(self, state: State) -> State:
        """A state of `as_written`, kept as this optimizer keeps it."""


def make_optimizer(
    config: OptimizerConfig, num_steps: int, statements: Tree, tokens: StepTokens | None = None
) -> Optimizer:
    """The optimizer that a run names.

    Args:
      config: its settings.
      num_steps: of the whole run.
      statements: the `Parameter`s of all layers, by layer.
      tokens: of each step, which a schedule by tokens needs.
    """
    module = importlib.import_module(RULES[config.name].module)
    schedule = learning_rate(config, num_steps, tokens)
    optimizer: Optimizer = module.make(config, schedule, statements)
    return optimizer


def learning_rate(
    config: OptimizerConfig, num_steps: int, tokens: StepTokens | None = None
) -> optax.Schedule:
    """`learning_rates.learning_rate` of update n = 0, 1, ..., as a program computes it."""
    own = learning_rates.learning_rate
    return functools.partial(own, config, num_steps, xp=jnp, tokens=tokens)


def seen(state: State) -> jax.Array:
    """The updates that the moments of a state have seen, by which their bias is corrected."""
    found: jax.Array = state.updates if state.missed is None else state.updates - state.missed
    return found


def none_missed(jumps: bool, state: State | None = None) -> jax.Array | None:
    """`missed` of a state that begins, or has been written by another; None without jumps."""
    known = state.missed if state is not None else None
    return (jnp.zeros((), jnp.int32) if known is None else known) if jumps else None


def rounding_seed(path: tuple) -> int:
    """The seed of the noise that rounds a parameter in bfloat16: another than its moments have."""
    return zlib.crc32("/".join(("rounded", *(key.key for key in path))).encode())


def map_layers(change: Callable[[dict[str, Tree]], Tree], state: State) -> State:
    """A state with each dict keyed by layer changed, and all else as it is."""
    is_dict = lambda x: isinstance(x, dict)
    return jax.tree.map(lambda x: change(x) if is_dict(x) else x, state, is_leaf=is_dict)
