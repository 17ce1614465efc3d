"""One stage's compiled programs: init, gather, forward, backward, reduce, update.

A stage holds consecutive layers on one mesh. Its programs are pure functions of arrays on that
mesh; `pipeline` decides when they run and moves what crosses to other stages. Layouts of the
parameters (master, replicas, gradients) are those of `sharding`.

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
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from holmesjax.config import KernelsConfig, ModelConfig
from holmesjax.models import ops, transformer
from holmesjax.optimizers.adamw import AdamW, AdamWState
from holmesjax.parallel import collectives, compat, sharding
from holmesjax.plan.plan import EMBED, HEAD, Axis, Plan

Tree = Any  # a nested dict of arrays, keyed by layer and parameter name
Batch = dict[str, jax.Array]  # token_BL, target_BL, segment_BL: what the stage needs of them

# `dots` keeps the results of matrix products and of attention, and recomputes the rest.
CHECKPOINT_POLICIES = {
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_saveable,
        jax.checkpoint_policies.save_only_these_names(ops.SAVED),
    ),
    "full": jax.checkpoint_policies.nothing_saveable,
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StageState:
    """All of a stage that changes from step to step, in the master layout."""

    params: Tree
    opt_state: AdamWState


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["arrays"],
    meta_fields=["pullback", "parameter_of"],
)
@dataclass(frozen=True)
class Saved:
    """What a microbatch's backward needs of its forward.

    The pullback of `jax.vjp` holds parameters too; those are taken from the step's replicas again,
    so that they are neither copied nor kept once per microbatch. `parameter_of[i]` is the number of
    the parameter that stands at leaf i of the pullback, or None where `arrays` has the leaf.
    """

    arrays: tuple[jax.Array, ...]
    pullback: jax.tree_util.PyTreeDef
    parameter_of: tuple[int | None, ...]

    @classmethod
    def of(cls, pullback: Callable, replicas: Tree) -> "Saved":
        leaves, structure = jax.tree.flatten(pullback)
        number = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves(replicas))}
        parameter_of = tuple(number.get(id(leaf)) for leaf in leaves)
        arrays = tuple(leaf for leaf in leaves if id(leaf) not in number)
        return cls(arrays, structure, parameter_of)

    def restore(self, replicas: Tree) -> Callable:
        parameters, arrays = jax.tree.leaves(replicas), iter(self.arrays)
        leaves = [next(arrays) if i is None else parameters[i] for i in self.parameter_of]
        return jax.tree.unflatten(self.pullback, leaves)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The functions of one chunk of a stage. `programs` compiles them."""

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
        """What of a batch this stage reads."""
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
    def microbatch(self) -> int:
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
        return self._on_shards(gather_local, (master_specs,), replica_specs)(params)

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

        return self._on_shards(reduce_local, (replica_specs,), master_specs)(gradients)

    def _on_shards(self, function: Callable, in_specs: Tree, out_specs: Tree) -> Callable:
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

    # ---- one microbatch ------------------------------------------------------------------------

    def apply(self, params: Tree, x_BLD: jax.Array | None, batch: Batch) -> jax.Array:
        """The layers of this stage on one replica: the boundary x_BLD, or its tokens' loss."""
        kernels = ops.Kernels(self.kernels, self.mesh, self.compute_dtype)
        batch = {name: ops.to_parts(array, kernels) for name, array in batch.items()}
        x_BLD = None if x_BLD is None else ops.to_parts(x_BLD, kernels)
        sequences = self.microbatch // self.num_replicas
        position_L = ops.token_positions(sequences, self.model.context_length, kernels)
        if kernels.context > 1:
            position_L = self._cut_sequences(position_L)
        segment_BL = batch.get("segment_BL")
        for layer in self.layers:
            run: Callable[..., jax.Array] = functools.partial(
                transformer.apply, layer, self.model, kernels=kernels
            )
            if layer == EMBED:
                x_BLD = self._gathered(run)(params[layer], batch["token_BL"], position_L)
            elif layer == HEAD:
                tied = {"token_VD": params[EMBED]["token_VD"]} if self.model.tied_embeddings else {}
                head = lambda p, x_BLD, target_BL, run=run: run(
                    p, x_BLD, p.get("token_VD"), target_BL, method="loss"
                )
                return self._gathered(head)(params[layer] | tied, x_BLD, batch["target_BL"])
            else:
                policy = CHECKPOINT_POLICIES.get(self.plan.activation_checkpointing)
                run = self._gathered(run, policy)
                x_BLD = run(params[layer], x_BLD, position_L, segment_BL)
            x_BLD = self._cut_sequences(x_BLD)
        assert x_BLD is not None
        return ops.from_parts(x_BLD, kernels)

    def _gathered(self, run: Callable, policy: Callable[..., bool] | None = None) -> Callable:
        """`run(params, *args)` for parameters of which each device has a part.

        It gathers them, and for its gradient gathers them again: nothing of their size is kept in
        between. The gradient with respect to them is summed over the parts and cut as they are.

        With a policy, what that does not save is computed again, too.
        """
        if policy:
            run = jax.checkpoint(run, policy=policy, prevent_cse=False)
        elif self.num_parts == 1:
            return run
        narrow = functools.partial(jax.tree.map, lambda x: x.astype(self.compute_dtype))
        widen = functools.partial(jax.tree.map, lambda x: x.astype(jnp.float32))
        gather = lambda params: widen(self._constrain(params, sharding.tensor_spec))
        cut = functools.partial(
            self._constrain, spec=lambda n: sharding.shard_spec(n, self.mesh.shape)
        )

        @jax.custom_vjp
        def gathered(params: Tree, *args: Any) -> jax.Array:
            return run(gather(narrow(params)), *args)

        def forward(params: Tree, *args: Any) -> tuple[jax.Array, tuple[Tree, Saved]]:
            whole = gather(narrow(params))
            out, pullback = jax.vjp(run, whole, *args)
            return out, (params, Saved.of(pullback, whole))

        def backward(residuals: tuple[Tree, Saved], dy: jax.Array) -> tuple:
            params, saved = residuals
            # Or XLA could keep what `forward` gathered or computed, where both are in one program.
            # Of parameters in the compute dtype: XLA would make copies of what is behind one.
            again = (narrow(params), saved if policy else (), dy)
            params, again, dy = jax.lax.optimization_barrier(again)
            dparams, *dargs = (again or saved).restore(gather(params))(dy)
            return cut(dparams), *dargs

        gathered.defvjp(forward, backward)
        return gathered

    def _constrain(self, params: Tree, spec: Callable[[str], P]) -> Tree:
        if self.num_parts == 1:
            return params

        def constrain(path: tuple, x: jax.Array) -> jax.Array:
            where = NamedSharding(self.mesh, spec(sharding.name_of(path)))
            return jax.lax.with_sharding_constraint(x, where)

        return jax.tree_util.tree_map_with_path(constrain, params)

    def _cut_sequences(self, x_BLD: jax.Array) -> jax.Array:
        """The sequences of a replica stay cut over `fsdp` and `context`."""
        if self.num_parts == 1:
            return x_BLD
        where = NamedSharding(self.mesh, sharding.part_spec(self.mesh.shape))
        return jax.lax.with_sharding_constraint(x_BLD, where)

    # While they compute, replicas have no dim R: XLA would copy arrays for a dim of size 1, and
    # transpose weights. Only between programs are their arrays stacked along one.

    def on_replicas(self, function: Callable) -> Callable:
        """`function` of what one replica has, on each; it gives no scalars.

        Arrays are cut, and results joined, along their first dim; scalars all replicas have.
        """
        if self.num_replicas == 1:
            return function
        data = Axis.DATA.value

        def run(*args: Any) -> Any:
            if self.mesh.size == self.num_replicas:
                specs = jax.tree.map(lambda x: P(data) if jnp.ndim(x) else P(), args)
                return self._on_shards(function, specs, P(data))(*args)
            # XLA aborts where it has to cut a lookup over other axes inside of that.
            dims = jax.tree.map(lambda x: 0 if jnp.ndim(x) else None, args)
            split = lambda x: x.reshape(self.num_replicas, -1, *x.shape[1:]) if jnp.ndim(x) else x
            mapped = jax.vmap(function, in_axes=dims, spmd_axis_name=data)
            results = mapped(*jax.tree.map(split, args))
            return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), results)

        return run

    def stack(self, tree: Tree) -> Tree:
        """Arrays of one replica, to be joined along a dim R; those of a single one as they are."""
        return tree if self.num_replicas == 1 else jax.tree.map(lambda x: x[None], tree)

    def unstack(self, tree: Tree) -> Tree:
        """The opposite of `stack`."""
        return tree if self.num_replicas == 1 else jax.tree.map(lambda x: x[0], tree)

    def forward(
        self, replicas: Tree, x_BLD: jax.Array | None, batch: Batch
    ) -> tuple[jax.Array, Saved]:
        """One microbatch: the boundary, or the losses of its replicas; what backward needs.

        A replica's loss is the sum over its tokens that count. The losses are not added over `data`
        here: replicas would wait for each other in every microbatch.
        """
        return self.on_replicas(self._forward)(replicas, x_BLD, batch)

    def _forward(
        self, replica: Tree, x_BLD: jax.Array | None, batch: Batch
    ) -> tuple[jax.Array, Saved]:
        """On one replica, [1, ...]."""
        params = self._widened(replica)
        if self.is_first:
            out, pullback = jax.vjp(lambda p: self.apply(p, None, batch), params)
        else:
            out, pullback = jax.vjp(lambda p, x: self.apply(p, x, batch), params, x_BLD)
        saved = self.stack(Saved.of(pullback, params))
        return (out[None] if self.is_last else out), saved

    def backward(
        self, replicas: Tree, saved: Saved, gradients: Tree, dy: jax.Array
    ) -> tuple[Tree, jax.Array]:
        """Adds the microbatch's share to the gradients; also the gradient of the stage's input.

        `dy` is the gradient of the step's loss with respect to what `forward` returned: dy_BLD. On
        the last stage it is the weight of a token, one over the number of those that count in the
        whole step. On the first stage, which has no input to differentiate, the second result is a
        zero.
        """
        gradients, dx = self.on_replicas(self._backward)(replicas, saved, gradients, dy)
        return gradients, dx[0] if dx else jnp.zeros(())

    def _backward(
        self, replica: Tree, saved: Saved, gradients: Tree, dy: jax.Array
    ) -> tuple[Tree, list[jax.Array]]:
        """On one replica, [1, ...]; the second result is empty on the first stage."""
        new, dx = self.replica_gradients(replica, saved, dy)
        return self.accumulate(gradients, new), dx

    def replica_gradients(
        self, replica: Tree, saved: Saved, dy: jax.Array
    ) -> tuple[Tree, list[jax.Array]]:
        """The microbatch's share, float32, of one replica; the gradient of its input, if any."""
        params = self._widened(replica)
        new, *dx = self.unstack(saved).restore(params)(dy)
        return new, dx

    def accumulate(self, gradients: Tree, new: Tree) -> Tree:
        """Adds a microbatch's share to the gradients of one replica, [1, ...].

        In place: a product or an embedding's sum is added to what is there, without a place of its
        own, where XLA sees both in the same shape.
        """
        return jax.tree.map(lambda total, g: (total[0] + g)[None], gradients, new)

    def _widened(self, replica: Tree) -> Tree:
        """The parameters of one replica in float32, so that their gradients are float32, too.

        A product rounds its weight to the compute dtype again, inside of its own rule for
        gradients: XLA drops both conversions, so that no copy in float32 is ever there.
        """
        return jax.tree.map(lambda x: x[0].astype(jnp.float32), replica)

    # Gathering with the first forward of a step, and reducing with the last backward, in one
    # program: XLA can send one layer while it computes another.

    def first_forward(
        self, params: Tree, x_BLD: jax.Array | None, batch: Batch
    ) -> tuple[Tree, jax.Array, Saved]:
        """`gather` and `forward`: the replicas, and what `forward` returns."""
        replicas = self.gather(params)
        return replicas, *self.forward(replicas, x_BLD, batch)

    def reducing(self, backward: Callable[..., tuple]) -> Callable[..., tuple]:
        """`backward` and `reduce`: the gradients, its first result, come out reduced."""

        def last(*args: Any) -> tuple:
            gradients, *rest = backward(*args)
            return self.reduce(gradients), *rest

        return last

    # ---- the end of a step ---------------------------------------------------------------------

    def total_loss(
        self, losses_MR: tuple[jax.Array, ...] | jax.Array, weight: jax.Array
    ) -> jax.Array:
        """The sum over all microbatches and replicas, times `weight`; a float32 scalar.

        With the weight of a token in the step this is the step's loss, in nats per token.
        """
        return jnp.sum(jnp.stack(losses_MR)) * weight

    def square_norm(self, gradients: Tree) -> jax.Array:
        """Sum of squares of the reduced gradients that this chunk owns; float32.

        One number for each stage, and zeros for the others: those of all chunks add up to what
        `update` takes.
        """
        if self.borrows_table:
            gradients = {layer: gradients[layer] for layer in self.layers}
        own = sum((jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradients)), jnp.zeros(()))
        return jnp.zeros(len(self.plan.stages)).at[self.plan.chunks[self.index][0]].set(own)

    def update(
        self, state: StageState, gradients: Tree, square_norms: jax.Array
    ) -> tuple[StageState, dict[str, jax.Array]]:
        """Clips by the global norm and applies the optimizer; changes nothing if it is not finite.

        `square_norms` are those of all stages, in order, so that every stage decides alike.
        """
        norm = jnp.sqrt(sum(square_norms[i] for i in range(len(self.plan.stages))))
        finite = jnp.isfinite(norm)
        scale = jnp.ones(())
        if self.clip_norm is not None:
            scale = jnp.minimum(1.0, self.clip_norm / jnp.maximum(norm, 1e-12))
        kernels = ops.Kernels(self.kernels, self.mesh)
        args = gradients, state.opt_state, state.params, scale, finite, kernels
        metrics = {
            "grad_norm": norm,
            "learning_rate": self.optimizer.schedule(state.opt_state.updates),
            "skipped": ~finite,
        }
        return StageState(*self.optimizer.apply(*args)), metrics

    def step(
        self, state: StageState, batch_M: Batch, weight: jax.Array
    ) -> tuple[StageState, dict[str, jax.Array]]:
        """A whole optimizer step, for a plan with this stage only; batches have a leading M.

        `weight` is that of a token in the step's loss.
        """
        replicas = self.gather(state.params)

        def add_microbatch(gradients: Tree, batch: Batch) -> tuple[Tree, jax.Array]:
            losses_R, saved = self.forward(replicas, None, batch)
            gradients, _ = self.backward(replicas, saved, gradients, weight)
            return gradients, losses_R

        if self.plan.microbatches == 1:
            batch = jax.tree.map(lambda x: x[0], batch_M)
            gradients, losses_R = add_microbatch(self.zero_gradients(), batch)
            losses_MR = losses_R[None]
        else:
            gradients, losses_MR = jax.lax.scan(add_microbatch, self.zero_gradients(), batch_M)
        gradients = self.reduce(gradients)
        state, metrics = self.update(state, gradients, self.square_norm(gradients))
        return state, {"loss": self.total_loss(losses_MR, weight), **metrics}
