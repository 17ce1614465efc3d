"""Adafactor: it keeps the mean squares of a matrix's rows and columns, not of each number.

Shazeer and Stern, arXiv:1804.04235, with the constants of `optax.adafactor`. There is no momentum,
and no scale of the parameter: learning rate and weight decay are those of all our optimizers. So
`beta1`, `beta2` and `epsilon` of the section `optimizer` are not read.

The rule is written here and not taken from `optax.scale_by_factored_rms`, since that sorts sizes of
dims by a sort that is not stable. Which of two equal dims are the rows would then depend on the
machine, and processes of one stage, or a run and its resumption, would not agree.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from holmesjax.config import OptimizerConfig
from holmesjax.config.update_rules import factored_dims
from holmesjax.models.layer import stated
from holmesjax.optimizers.elementwise import Elementwise, ElementwiseState
from holmesjax.optimizers.optimizer import Tree
from holmesjax.parallel import sharding

DECAY_EXPONENT = 0.8  # update n = 1, 2, ... keeps 1 - n^-0.8 of the mean squares
EPSILON = 1e-30  # is added to each square
CLIP = optax.clip_by_block_rms(1.0)  # of the direction of each parameter


class Factored(NamedTuple):
    """The mean squares of one parameter, over each of its two largest dims."""

    rows: jax.Array  # without the largest dim
    columns: jax.Array  # without the second largest


class AdafactorState(NamedTuple):
    """Mean squares of gradients: `Factored`, or of the parameter's shape."""

    updates: jax.Array  # so far, int32
    squares: Tree


def _is_factored(x: object) -> bool:
    return isinstance(x, Factored)


def _init(params: Tree) -> AdafactorState:
    def zeros(parameter: jax.Array) -> jax.Array | Factored:
        shape = parameter.shape
        if (dims := factored_dims(shape)) is None:
            return jnp.zeros(shape, jnp.float32)
        without = lambda dim: jnp.zeros(shape[:dim] + shape[dim + 1 :], jnp.float32)
        return Factored._make(map(without, dims))

    return AdafactorState(jnp.zeros((), jnp.int32), jax.tree.map(zeros, params))


def _squares(gradient: jax.Array, old: jax.Array | Factored, keep: jax.Array) -> Tree:
    """The next mean squares of a parameter."""
    square = jnp.square(gradient) + EPSILON
    mean = lambda old, new: keep * old + (1.0 - keep) * new
    if not isinstance(old, Factored):
        return mean(old, square)
    dims = factored_dims(gradient.shape)
    assert dims is not None
    pairs = zip(old, dims, strict=True)
    return Factored._make(
        mean(square_mean, jnp.mean(square, axis=dim)) for square_mean, dim in pairs
    )


def _direction(gradient: jax.Array, squares: jax.Array | Factored) -> jax.Array:
    """A gradient over the root of its mean squares, of which rows and columns give an estimate.

    The estimate is rows times columns, over the mean of the rows.
    """
    if not isinstance(squares, Factored):
        return gradient * jax.lax.rsqrt(squares)
    dims = factored_dims(gradient.shape)
    assert dims is not None
    largest, second = dims
    rows = jnp.expand_dims(squares.rows, largest)
    columns = jnp.expand_dims(squares.columns, second)
    row_factor = jnp.sqrt(jnp.mean(rows, axis=second, keepdims=True)) * jax.lax.rsqrt(rows)
    return gradient * row_factor * jax.lax.rsqrt(columns)


def _update(
    gradients: Tree, state: AdafactorState, params: Tree | None = None
) -> tuple[Tree, AdafactorState]:
    count = state.updates + 1
    keep = 1.0 - count.astype(jnp.float32) ** -DECAY_EXPONENT
    squares = jax.tree.map(lambda g, old: _squares(g, old, keep), gradients, state.squares)
    direction = jax.tree.map(_direction, gradients, squares)
    clipped, _ = CLIP.update(direction, CLIP.init(params))
    return clipped, AdafactorState(count, squares)


class Adafactor(Elementwise):
    """Adafactor, applied as directions of optax are; its state has shapes of its own."""

    def shardings(self, params: Tree, mesh: Mesh) -> ElementwiseState:
        """The shardings of the state: a mean over a dim is cut as its parameter's other dims."""

        def of_squares(path: tuple, squares: jax.ShapeDtypeStruct | Factored) -> Tree:
            parameter = stated(self.statements, path)
            master = sharding.master_sharding(parameter, mesh)
            if not isinstance(squares, Factored):
                return master
            axes = sharding.spec_axes(master.spec, len(parameter.shape))
            dims = factored_dims(parameter.shape)
            assert dims is not None

            def without(dim: int) -> NamedSharding:
                return sharding.from_axes(mesh, axes[:dim] + axes[dim + 1 :])

            return Factored._make(map(without, dims))

        shapes = jax.eval_shape(_init, params).squares
        laid = jax.tree_util.tree_map_with_path(of_squares, shapes, is_leaf=_is_factored)
        everywhere = sharding.replicated(mesh)
        return ElementwiseState._make([everywhere, AdafactorState._make([everywhere, laid])])


def make(config: OptimizerConfig, schedule: optax.Schedule, statements: Tree) -> Adafactor:
    return Adafactor(config, schedule, statements, optax.GradientTransformation(_init, _update))
