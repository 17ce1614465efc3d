"""One chunk of a stage: its layers, its state, and the layouts of its parameters.

A stage holds consecutive layers on one mesh. Its functions are pure functions of arrays on that
mesh. `gather` and `reduce` are here: they take parameters and gradients from one layout to another
(master, replicas, gradients: see `sharding`). `microbatch` has the forward and the backward, and
`end_of_step` the update. `pipeline` decides when they run, and moves what crosses to other stages.

Dims besides those of the model: R data replicas of the stage, M microbatches. Arrays that come in
or go out have their sequences merged, [B, ...] with B = R * b, so that a neighbour with another
number of replicas can read them; inside, each replica computes by itself.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from holmesjax.config import KernelsConfig, ModelConfig
from holmesjax.models import transformer
from holmesjax.optimizers.adamw import AdamW, AdamWState
from holmesjax.parallel import collectives, compat, sharding
from holmesjax.plan.plan import EMBED, Axis, Plan

Tree = Any  # a nested dict of arrays, keyed by layer and parameter name


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StageState:
    """All of a stage that changes from step to step, in the master layout."""

    params: Tree
    opt_state: AdamWState


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One chunk of a stage: its layers, its state, and the layouts of its parameters.

    `microbatch` and `end_of_step` have the other functions of a chunk; `programs` compiles all.
    """

    model: ModelConfig
    plan: Plan
    index: int  # of its chunk in the model: the number of the stage, where each has one
    mesh: Mesh
    optimizer: AdamW
    compute_dtype: str
    clip_norm: float | None
    mask_documents: bool
    kernels: KernelsConfig

    @property
    def layers(self) -> tuple[str, ...]:
        return self.plan.chunks[self.index][1]

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == len(self.plan.chunks) - 1

    @property
    def shares_table(self) -> bool:
        """Whether the token table is used by this stage and by another one."""
        return self.model.tied_embeddings and self.is_first != self.is_last

    @property
    def borrows_table(self) -> bool:
        """Whether this stage holds a copy of the token table, which the first stage owns."""
        return self.shares_table and self.is_last

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the arrays of a batch that this stage reads."""
        names = ["token_BL"] if self.is_first else []
        names += ["target_BL"] if self.is_last else []
        return (*names, "segment_BL") if self.mask_documents else tuple(names)

    @property
    def num_replicas(self) -> int:
        return self.mesh.shape[Axis.DATA]

    @property
    def num_parts(self) -> int:
        """Devices over which the parameters of a replica are cut, besides `tensor`."""
        return sharding.num_parts(self.mesh.shape)

    @property
    def microbatch_size(self) -> int:
        """Sequences in a microbatch, over all replicas."""
        return self.plan.global_batch // self.plan.microbatches

    # ---- state ---------------------------------------------------------------------------------

    def init(self, seed: int, drawn: Callable[[], None] = lambda: None) -> StageState:
        """The state before the first step: a function of the seed, whatever the plan.

        `drawn` is called after each layer.
        """

        def build(path: tuple, x: jax.ShapeDtypeStruct) -> jax.Array:
            make = functools.partial(transformer.init_values, self.model, seed, path, x.shape)
            return sharding.build(x.shape, x.sharding, make)

        params: dict[str, Tree] = {}
        for layer, shapes in self.state_shapes.params.items():
            built = jax.tree_util.tree_map_with_path(build, {layer: shapes})
            params |= jax.block_until_ready(built)  # the host holds one layer at a time
            drawn()
        out_shardings = jax.tree.map(lambda x: x.sharding, self.state_shapes.opt_state)
        init_optimizer = jax.jit(self.optimizer.init, out_shardings=out_shardings)
        return StageState(params, init_optimizer(params))

    @functools.cached_property
    def state_shapes(self) -> StageState:
        """Shape, dtype and sharding of every array of the state."""
        shapes = {layer: transformer.param_shapes(layer, self.model) for layer in self.layers}
        if self.borrows_table:
            shapes[EMBED] = {"token_VD": transformer.param_shapes(EMBED, self.model)["token_VD"]}
        put = lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
        shardings = sharding.master_shardings(shapes, self.mesh)
        opt_state = jax.tree.map(
            put,
            jax.eval_shape(self.optimizer.init, shapes),
            self.optimizer.shardings(shapes, self.mesh),
        )
        return StageState(jax.tree.map(put, shapes, shardings), opt_state)

    def _specs(self) -> tuple[Tree, Tree]:
        """Partition specs of the replicas and of the masters."""
        replica = jax.tree_util.tree_map_with_path(
            lambda path, _: sharding.replica_spec(sharding.name_of(path), self.mesh.shape),
            self.state_shapes.params,
        )
        return replica, jax.tree.map(lambda x: x.sharding.spec, self.state_shapes.params)

    def gather(self, params: Tree) -> Tree:
        """Masters to replicas: cast to the compute dtype, then all-gathered over `data`.

        Each layer is a bucket, gathered by one collective.
        """
        replica_specs, master_specs = self._specs()
        dims = self._data_dims(params)
        by_sum = compat.gathers_by_sum(self.mesh, Axis.DATA)

        def gather_layer(masters: Tree, dims: Tree) -> Tree:
            copies = jax.tree.map(lambda x: x.astype(self.compute_dtype), masters)
            whole = collectives.all_gather(copies, dims, Axis.DATA, by_sum=by_sum)
            return jax.tree.map(lambda x: x[None], whole)

        gather_local = lambda local: {name: gather_layer(local[name], dims[name]) for name in local}
        return self.on_shards(gather_local, (master_specs,), replica_specs)(params)

    def reduce(self, gradients: Tree) -> Tree:
        """Gradients of the replicas, reduce-scattered over `data` into the master layout.

        Each layer is a bucket, reduced by one collective, and one more for what cannot be cut.
        """
        replica_specs, master_specs = self._specs()
        dims = self._data_dims(self.state_shapes.params)
        by_ring = compat.sums_by_ring(self.mesh, Axis.DATA)

        def reduce_local(local: Tree) -> Tree:
            own = jax.tree.map(lambda x: x[0], local)
            return {
                name: collectives.reduce_scatter(own[name], dims[name], Axis.DATA, by_ring=by_ring)
                for name in local
            }

        return self.on_shards(reduce_local, (replica_specs,), master_specs)(gradients)

    def on_shards(self, function: Callable, in_specs: Tree, out_specs: Tree) -> Callable:
        """`function` of each device's shards."""
        # Unchecked: in a bucket, JAX loses sight of which arrays are the same all over `tensor`.
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def _data_dims(self, params: Tree) -> Tree:
        """The dim of each parameter that is cut over `data`; -1 for those that are not."""

        def dim(path: tuple, x: Any) -> int:
            name, shape = sharding.name_of(path), x.shape
            found = sharding.data_dim(name, shape, self.num_replicas, self.num_parts)
            return -1 if found is None or self.num_replicas == 1 else found

        return jax.tree_util.tree_map_with_path(dim, params)

    def zero_gradients(self) -> Tree:
        return jax.tree.map(
            lambda x: jnp.zeros((self.num_replicas, *x.shape), jnp.float32),
            self.state_shapes.params,
        )
