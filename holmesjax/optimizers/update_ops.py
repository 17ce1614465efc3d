"""Array functions of the optimizer's step: what computes it, and how it is applied and rounded.

`Kernels` of `models.ops` says which implementation is asked for.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from holmesjax.errors import ConfigError
from holmesjax.layer_specs.kind import (
    PARTS_DIM,
    Parameter,
)
from holmesjax.models.ops import Kernels
from holmesjax.plan.plan import Axis
from kernels.adamw import Hyperparameters, Leaf, Turn, adamw_step, factors
from kernels.adamw_choice import (
    OptimizerChoice,
    choose_optimizer as choose_adamw,
    depends_on_check as update_depends_on_check,
)
from kernels.attention.choice import (
    UnsupportedError,
)
from kernels.moments import (
    Moment,
    Quantized,
    Which,
    narrow,
    noise,
    positions,
    round_to_bfloat16,
    step_seed,
    widen,
    zero_moment,
)

__all__ = [
    "Hyperparameters",
    "Leaf",
    "OptimizerChoice",
    "Quantized",
    "adamw",
    "changed_if",
    "choose_optimizer",
    "factors",
    "moment_spec",
    "round_moment",
    "round_parameter",
    "update_depends_on_check",
    "widen",
    "zero_moment",
]

T = TypeVar("T")


def choose_optimizer(moments: str, kernels: Kernels) -> OptimizerChoice:
    """Returns what computes AdamW's step, and why.

    Args:
      moments: how they are kept.
      kernels: the implementation that is asked for, and the mesh.

    Raises:
      ConfigError: the devices cannot run the implementation that is asked for.
    """
    config = kernels.config
    try:
        return choose_adamw(
            config.optimizer,
            kernels.device,
            moments,
            parameters=kernels.parameters,
            unproven=kernels.unproven,
        )
    except UnsupportedError as reason:
        problem = f"{config.optimizer} cannot run here"
        fix = "use auto, which takes what the devices can run, or xla"
        raise ConfigError("kernels.optimizer", problem, found=str(reason), fix=fix) from None


def adamw(
    leaves: Sequence[Leaf],
    gradients: Sequence[jax.Array],
    factors: jax.Array,
    hyperparameters: Sequence[Hyperparameters],
    kernels: Kernels,
    moments: str = "float32",
    statements: Sequence[Parameter] | None = None,
    specs: Sequence[PartitionSpec] | None = None,
) -> list[Leaf]:
    """Parameters and moments after a step, if it applies; in place where they are donated.

    Args:
      leaves: parameters and their moments.
      gradients: of the shapes of the parameters.
      factors: those of the step (`factors`).
      hyperparameters: of each leaf.
      kernels: the implementation that is asked for, and the mesh.
      moments: how they are kept.
      statements: of each parameter; None: nobody knows how its gradient lies.
      specs: of each parameter on the mesh; None: there is no mesh.

    Raises:
      ConfigError: the devices cannot run the implementation that is asked for.
    """
    if choose_optimizer(moments, kernels).implementation == "pallas":
        from kernels.adamw_shards import adamw_on_shards  # `kernels.attention.choice` says why here

        mesh, of_leaves, turns = kernels.mesh, None, None
        if mesh is not None and specs is not None:
            rows = zip(leaves, specs, strict=True)
            of_leaves = [
                Leaf._make([spec, *(moment_spec(x, spec, mesh.shape) for x in leaf[1:])])
                for leaf, spec in rows
            ]
        if statements is not None and kernels.after_products:
            turns = [_turn(statement, kernels) for statement in statements]
        told = factors, hyperparameters, mesh, of_leaves, turns
        return adamw_on_shards(leaves, gradients, *told)
    applies = factors[5] > 0

    def update(leaves: list[Leaf]) -> list[Leaf]:
        rows = zip(leaves, gradients, hyperparameters, strict=True)
        return [adamw_step(leaf, gradient, factors, h) for leaf, gradient, h in rows]

    return changed_if(applies, update, list(leaves), kernels)


def _turn(parameter: Parameter, kernels: Kernels) -> Turn | None:
    """How the gradient of a parameter lies that `kernels.linear` has computed in this program.

    It lies as the parameter, but where devices sum it and keep a part each: XLA has the dim that
    they cut in front. Replicas sum gradients in a bucket, in which all lie as parameters.
    """
    rows = parameter.matrix
    if not rows or kernels.size(Axis.DATA) > 1 or kernels.num_parts == 1:
        return None
    return Turn(rows) if PARTS_DIM in parameter.dims[rows:] else None


def changed_if(applies: jax.Array, update: Callable[[T], T], held: T, kernels: Kernels) -> T:
    """Changes some arrays by `update`, if it applies; in place where they are donated.

    A conditional is in place on a CPU, and a choice between new and old on a GPU. On a GPU a
    conditional keeps a copy of all that it may change; on a CPU a choice keeps one.
    """
    if kernels.device.platform == "cpu":
        found: T = jax.lax.cond(applies, update, lambda held: held, held)
        return found
    choose = lambda new, old: jnp.where(applies, new, old)
    chosen: T = jax.tree.map(choose, update(held), held)
    return chosen


def moment_spec(moment: Moment, spec: PartitionSpec, sizes: Mapping[str, int]) -> Any:
    """The partition spec of a moment: that of its parameter.

    Scales that the devices of the last dim share lie on all of them.
    """
    if not isinstance(moment, Quantized):
        return spec
    scales = spec if _has_whole_blocks(moment, spec, sizes) else PartitionSpec(*spec[:-1])
    return Quantized._make([spec, scales])


def _has_whole_blocks(moment: Moment, spec: PartitionSpec, sizes: Mapping[str, int]) -> bool:
    """Whether each device has the scales of its own numbers, and of no others."""
    if not isinstance(moment, Quantized):
        return True
    last = len(moment.codes.shape) - 1
    entry = spec[last] if last < len(spec) else None
    axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
    return moment.scales.shape[-1] % math.prod(sizes[axis] for axis in axes) == 0


def round_moment(x: jax.Array, like: Moment, update: jax.Array, seed: int, which: Which) -> Moment:
    """float32 numbers in the format of a moment, rounded by the noise of an update.

    Args:
      x: the numbers.
      like: a moment of the same shape.
      update: the number of the update, int32.
      seed: of the parameter.
      which: the first moment or the second.
    """
    bits = noise(positions(x.shape), step_seed(update, seed))
    return narrow(x, like, bits[0 if which == "first" else 1], which)


def round_parameter(x: jax.Array, update: jax.Array, seed: int) -> jax.Array:
    """float32 numbers in bfloat16, rounded up or down at random so that their mean is exact.

    Args:
      x: the numbers.
      update: the number of the update, int32.
      seed: of the parameter.
    """
    bits, _ = noise(positions(x.shape), step_seed(update, seed))
    return round_to_bfloat16(x, bits)
