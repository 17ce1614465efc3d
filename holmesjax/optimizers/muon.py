"""Muon: the momentum of each hidden matrix is orthogonalised; all else has AdamW.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024. With momentum m and
gradient g, and Newton-Schulz iterations NS that bring all singular values near 1:

    m <- beta m + (1 - beta) g
    matrix <- matrix - rate (s NS(beta m + (1 - beta) g) + weight_decay matrix)

The scale s is `muon_consistent_rms` sqrt(max(rows, columns)): then updates are about as large as
AdamW's, and its learning rates and weight decay carry over (Liu et al., arXiv:2502.16982). Without
that setting it is sqrt(max(1, columns / rows)), of matrices that are multiplied from the right.

A matrix is whole where it is orthogonalised: parts of it done apart would give another result.
The parts of equal matrices are dealt out over the devices that share them, so that each device has
some whole matrices, and come back after it (one all-to-all each way). The heads of a weight are one
matrix together.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from holmesjax.config import OptimizerConfig
from holmesjax.layer_specs.kind import Parameter
from holmesjax.models import ops
from holmesjax.models.layer import stated
from holmesjax.optimizers import update_ops
from holmesjax.optimizers.groups import update_settings
from holmesjax.optimizers.optimizer import Tree, none_missed, rounding_seed, seen
from holmesjax.parallel import sharding

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of a step: they let singular values end in 0.7 to 1.2
NUM_STEPS = 5
EPSILON = 1e-7  # beside the norm: a matrix of zeros stays one


class MuonState(NamedTuple):
    """The momentum, or the moments of AdamW."""

    updates: jax.Array  # so far, int32
    mu: Tree  # of the shapes of the parameters
    nu: Tree  # of those that are no hidden matrices
    # The updates of the schedule that these have not seen, int32; None: it does not jump.
    missed: Any = None


class _Row(NamedTuple):
    """A parameter, what is kept of it, and its gradient."""

    parameter: jax.Array
    mu: jax.Array
    gradient: jax.Array


def newton_schulz(x: jax.Array) -> jax.Array:
    """A matrix with about the same singular vectors, and singular values near 1."""
    a, b, c = COEFFICIENTS
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / (jnp.linalg.norm(x) + EPSILON)
    for _ in range(NUM_STEPS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if is_tall else x


def orthogonalized(
    arrays: Sequence[jax.Array], parameter: Parameter, mesh: Mesh | None
) -> list[jax.Array]:
    """`newton_schulz` of each array, as a matrix of `parameter.matrix` leading dims and the rest.

    Args:
      arrays: of one shape, and in the master layout of the mesh.
      parameter: what is stated of each.
      mesh: of the stage; None: one device.
    """
    num_rows = math.prod(parameter.shape[: parameter.matrix])

    def whole(x: jax.Array) -> jax.Array:
        return newton_schulz(x.reshape(num_rows, -1)).reshape(x.shape)

    run_all = functools.partial(jax.lax.map, whole)
    stacked = jnp.stack(arrays)
    if mesh is None or mesh.size == 1:
        return list(run_all(stacked))
    spec = sharding.master_spec(parameter.dims, parameter.shape, mesh.shape)
    axes_of_dims = sharding.spec_axes(spec, len(parameter.shape))
    axes = tuple(
        axis for axes_of_dim in axes_of_dims for axis in axes_of_dim if mesh.shape[axis] > 1
    )
    if not axes:
        return list(run_all(stacked))
    sizes = tuple(mesh.shape[axis] for axis in axes)
    num_devices = math.prod(sizes)
    padding = [(0, -len(arrays) % num_devices)] + [(0, 0)] * len(parameter.shape)
    exchange = functools.partial(
        jax.lax.all_to_all, axis_name=axes, split_axis=0, concat_axis=0, tiled=True
    )
    # The parts of a matrix as they come: [axes of the mesh, matrices, dims]; and each axis of the
    # mesh right before the dim that it cuts.
    num_dims, order = len(sizes) + 1 + len(parameter.shape), [len(sizes)]
    for dim, axes_of_dim in enumerate(axes_of_dims):
        order += [axes.index(axis) for axis in axes_of_dim if axis in axes]
        order.append(len(sizes) + 1 + dim)
    assert sorted(order) == list(range(num_dims)), f"{order} is no order of {num_dims} dims"

    def on_shards(parts: jax.Array) -> jax.Array:
        count, *local = parts.shape
        received = exchange(parts).reshape(*sizes, count // num_devices, *local)
        joined = jnp.transpose(received, order)
        done = run_all(joined.reshape(count // num_devices, *parameter.shape))
        split = jnp.transpose(done.reshape(joined.shape), [order.index(i) for i in range(num_dims)])
        return exchange(split.reshape(count, *local))

    of_stack = jax.P(None, *spec)
    run = jax.shard_map(on_shards, mesh=mesh, in_specs=of_stack, out_specs=of_stack)
    return list(run(jnp.pad(stacked, padding))[: len(arrays)])


@dataclass(frozen=True)
class Muon:
    """Muon for hidden matrices, which their layers state, and AdamW for all other parameters."""

    config: OptimizerConfig
    schedule: optax.Schedule
    statements: Tree  # the `Parameter`s of all layers
    jumps: bool = False

    rounds_params: ClassVar[bool] = True

    @property
    def reads_names(self) -> bool:
        """Groups have patterns of names."""
        return bool(self.config.groups)

    def init(self, params: Tree) -> MuonState:
        mu = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
        begun = jnp.zeros((), jnp.int32)
        return MuonState(begun, mu, self._others(mu), none_missed(self.jumps))

    def _others(self, tree: Tree) -> Tree:
        """The arrays of parameters that are no hidden matrices, in a dict of all layers."""

        def of_node(node: Tree, own: Tree) -> Tree:
            found = {
                name: of_node(x, own[name]) if isinstance(x, dict) else x
                for name, x in node.items()
                if isinstance(x, dict) or not own[name].matrix
            }
            return {name: x for name, x in found.items() if not isinstance(x, dict) or x}

        return {
            layer: of_node(matrices, self.statements[layer]) for layer, matrices in tree.items()
        }

    def shardings(self, params: Tree, mesh: Mesh) -> MuonState:
        def of_master(path: tuple, _: jax.ShapeDtypeStruct) -> NamedSharding:
            return sharding.master_sharding(stated(self.statements, path), mesh)

        masters = jax.tree_util.tree_map_with_path(of_master, params)
        everywhere: Any = sharding.replicated(mesh)
        missed = everywhere if self.jumps else None
        return MuonState._make([everywhere, masters, self._others(masters), missed])

    def with_jumps(self) -> "Muon":
        return dataclasses.replace(self, jumps=True)

    def choose_kernel(self, kernels: ops.Kernels) -> update_ops.OptimizerChoice:
        """The choice for parameters that have AdamW: matrices have products of cuBLAS."""
        return update_ops.choose_optimizer("float32", kernels)

    def apply(
        self,
        gradients: Tree,
        state: MuonState,
        params: Tree,
        scale: jax.Array | float = 1.0,
        applies: jax.Array | bool = True,
        kernels: ops.Kernels = ops.DEFAULT,
    ) -> tuple[Tree, MuonState]:
        """`Optimizer.apply`.

        Args: those of `Optimizer.apply`.
        """
        c, count, applies = self.config, seen(state) + 1, jnp.asarray(applies)
        rate = self.schedule(state.updates)
        paths, structure = jax.tree_util.tree_flatten_with_path(params)
        names = [path for path, _ in paths]  # none where a stage trains nothing
        trees = params, state.mu, gradients
        flat = zip(*map(jax.tree.leaves, trees), strict=True)
        rows = dict(zip(names, map(_Row._make, flat), strict=True))
        nu_of = dict(jax.tree_util.tree_flatten_with_path(state.nu)[0])
        hyperparameters = []
        statements = [stated(self.statements, path) for path in nu_of]
        for path, statement in zip(nu_of, statements, strict=True):
            own = update_settings(c, path, statement)
            told = c.beta1, c.beta2, c.epsilon, own.weight_decay
            seed = rounding_seed(path)
            hyperparameters.append(update_ops.Hyperparameters(*told, rate=own.rate, rounding=seed))
        leaves = [
            update_ops.Leaf(rows[path].parameter, rows[path].mu, nu) for path, nu in nu_of.items()
        ]
        step = update_ops.factors(count, scale, rate, c.beta1, c.beta2, applies)
        of_others = [rows[path].gradient for path in nu_of]
        specs = sharding.master_specs(statements, kernels.mesh)
        shared = step, hyperparameters, kernels, "float32", statements, specs
        others = update_ops.adamw(leaves, of_others, *shared)
        matrices = {path: row for path, row in rows.items() if path not in nu_of}
        of_matrices = {path: row.gradient for path, row in matrices.items()}
        move = functools.partial(self._moved, of_matrices, scale, rate, count, kernels.mesh)
        held = [(row.parameter, row.mu) for row in matrices.values()]
        new = dict(zip(matrices, update_ops.changed_if(applies, move, held, kernels), strict=True))
        new |= {path: leaf[:2] for path, leaf in zip(nu_of, others, strict=True)}
        masters, mu = (jax.tree.unflatten(structure, [new[p][i] for p in names]) for i in range(2))
        nu = jax.tree.unflatten(jax.tree.structure(state.nu), [leaf.nu for leaf in others])
        updates = jnp.where(applies, state.updates + 1, state.updates)
        return masters, MuonState(updates, mu, nu, state.missed)

    def _moved(
        self,
        gradients: Mapping[tuple, jax.Array],
        scale: jax.Array | float,
        rate: jax.Array,
        update: jax.Array,
        mesh: Mesh | None,
        held: list[tuple[jax.Array, jax.Array]],
    ) -> list[tuple[jax.Array, jax.Array]]:
        """Hidden matrices and their momentum after an update.

        Args:
          gradients: of each matrix, by its path.
          scale: by which gradients are multiplied.
          rate: the learning rate of the update.
          update: its number.
          mesh: of the stage; None: one device.
          held: each matrix and its momentum, in the same order.
        """
        c, groups = self.config, dict[tuple, list[tuple]]()
        momenta, directions = {}, {}
        for (path, gradient), (_, mu) in zip(gradients.items(), held, strict=True):
            g = gradient.astype(jnp.float32) * scale
            momenta[path] = c.muon_beta * mu + (1.0 - c.muon_beta) * g
            directions[path] = c.muon_beta * momenta[path] + (1.0 - c.muon_beta) * g
            own = stated(self.statements, path)
            groups.setdefault((own.shape, own.dims, own.matrix), []).append(path)
        for paths in groups.values():
            own = stated(self.statements, paths[0])
            found = orthogonalized([directions[path] for path in paths], own, mesh)
            directions |= dict(zip(paths, found, strict=True))
        new = []
        for path, (x, _) in zip(gradients, held, strict=True):
            own = stated(self.statements, path)
            factor, decay = update_settings(c, path, own)
            direction = scale_of(own, c.muon_consistent_rms) * directions[path]
            wide = x.astype(jnp.float32)
            wide = wide - factor * rate * (direction + decay * wide)
            if x.dtype == jnp.bfloat16:
                wide = update_ops.round_parameter(wide, update, rounding_seed(path))
            new.append((wide, momenta[path]))
        return new

    def learning_rate(self, state: MuonState) -> jax.Array:
        return self.schedule(state.updates)

    def as_written(self, settings: Mapping[str, Any]) -> "Muon":
        return dataclasses.replace(self, jumps=settings.get("jumps", False))

    def adopt(self, state: MuonState) -> MuonState:
        return state._replace(missed=none_missed(self.jumps, state))


def scale_of(parameter: Parameter, consistent_rms: float | None) -> float:
    """The factor of an orthogonalised matrix, [rows, columns] as it multiplies from the right."""
    rows = math.prod(parameter.shape[: parameter.matrix])
    columns = math.prod(parameter.shape[parameter.matrix :])
    if consistent_rms is None:
        return math.sqrt(max(1.0, columns / rows))
    return consistent_rms * math.sqrt(max(rows, columns))


def make(config: OptimizerConfig, schedule: optax.Schedule, statements: Tree) -> Muon:
    return Muon(config, schedule, statements)
