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
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from holmesjax.config import KernelsConfig, ModelConfig, OuterConfig
from holmesjax.costs import work
from holmesjax.costs.expert_exchange import has_experts
from holmesjax.costs.parameters import unsent_numbers
from holmesjax.costs.stage_shape import LOGIT_BYTES
from holmesjax.layer_specs.experts import place_parameter
from holmesjax.layer_specs.kind import BatchArray, Kind, Parameter
from holmesjax.layer_specs.model_layers import EMBED, auxiliary_names, import_object, layers
from holmesjax.models import ops
from holmesjax.models.layer import (
    merged,
    source_of_values,
    split_by,
    split_trained,
    stated,
    statements,
)
from holmesjax.optimizers.optimizer import Optimizer, State
from holmesjax.parallel import collectives, platforms, sharding
from holmesjax.plan.plan import Axis, Plan
from holmesjax.runtime import coded_weights, layer_statistics, spikes, weight_average
from holmesjax.runtime.outer_state import Outer, Tree
from holmesjax.runtime.weight_average import Average


class Dtypes(NamedTuple):
    """The dtypes of the parameters of a state."""

    trained: str
    untrained: str

    def of(self, parameter: Parameter) -> str:
        """The dtype of one parameter; one that a step changes without a gradient is float32."""
        if parameter.trains:
            return self.trained
        return "float32" if parameter.changes else self.untrained


def widened(params: Tree) -> Tree:
    """Parameters in float32, as optimizers read them."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), params)


def kept_leaves(tree: Tree, is_kept: Callable[[str], bool]) -> Tree:
    """A tree with some of its leaves, by their names "block_000.up_DF"; dicts stay, if empty."""

    def kept(name: str, own: Tree) -> Tree:
        names = {key: f"{name}.{key}" if name else key for key in own}
        return {
            key: kept(names[key], x) if isinstance(x, dict) else x
            for key, x in own.items()
            if isinstance(x, dict) or is_kept(names[key])
        }

    return kept("", tree)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChunkState:
    """All arrays of a stage that outlive a step."""

    params: Tree  # those that train, in `Chunk.param_dtype` and the master layout
    opt_state: State
    # The parameters that do not train, in the compute dtype, or in float32 if a step changes them.
    # They are equal on every replica, and cut as a replica is between its uses.
    fixed: Tree
    average: Average | None = None  # where the run asks for one
    recent: spikes.Recent | None = None  # of the last chunk, where the run looks for spikes
    outer: Outer | None = None  # of an island; only meetings read and change it


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One chunk of a stage: its layers, its state, and the layouts of its parameters.

    `microbatch` and `end_of_step` have the other functions of a chunk; `programs` compiles all.
    """

    model: ModelConfig
    plan: Plan
    index: int  # of its chunk in the model: the number of the stage, where each has one
    mesh: Mesh
    optimizer: Optimizer
    compute_dtype: str
    clip_norm: float | None
    mask_documents: bool
    kernels: KernelsConfig
    restarts_positions: bool = False  # whether learned ones begin anew in each document
    ema_decay: float | None = None  # of an average of the parameters; None: there is none
    spike_rule: spikes.SpikeRule | None = None  # None: nothing looks for spikes
    has_statistics: bool = False  # whether steps have norms by kind of layer
    places_experts: bool = False  # whether devices that share experts have them by their loads
    expert_chunks: int = 1  # of an exchange between these
    seed: int = 0  # of random numbers that layers draw
    param_dtype: str = "float32"  # of the parameters that are kept and updated
    reduction_dtype: str = "float32"  # of gradients that cross `data`
    unproven: str | None = ops.UNCHECKED  # what the Pallas kernels lack for `auto`, if anything
    island: int | None = None  # whose plan `plan` is, in a run with islands
    before: int = 0  # chunks of the islands before it
    islands: tuple[tuple[str, ...], ...] = ()  # the clusters of each island of the run
    island_shares: tuple[int, ...] = ()  # of the batch, of each; empty: equal ones
    outer: OuterConfig = field(default_factory=OuterConfig)  # the rule by which islands meet

    @property
    def number(self) -> int:
        """Its place among the chunks of the run: that in the model, except with islands."""
        return self.before + self.index

    @property
    def layers(self) -> tuple[str, ...]:
        return self.plan.chunks[self.index][1]

    @functools.cached_property
    def kinds(self) -> dict[str, Kind]:
        """The kinds of its layers, by name."""
        return {layer: layers(self.model)[layer] for layer in self.layers}

    @functools.cached_property
    def statements(self) -> Tree:
        """The parameters of the layers here as they are stated, with those that are borrowed.

        Layers with placed experts have a table of their slots besides.
        """
        found = {layer: statements(self.model)[layer] for layer in self.layers}
        for layer in self.placed_layers:
            table = place_parameter(self.model)
            router, name = table.path
            own = found[layer]
            found[layer] = {**own, router: {**own[router], name: table}}
        if self.borrows_table:
            found[EMBED] = {"token_VD": statements(self.model)[EMBED]["token_VD"]}
        return found

    @functools.cached_property
    def placed_layers(self) -> tuple[str, ...]:
        """The names of the layers here whose experts lie on devices by their loads."""
        if not self.places_experts or self.mesh.shape.get(Axis.EXPERT, 1) == 1:
            return ()
        return tuple(layer for layer, kind in self.kinds.items() if has_experts(kind))

    @property
    def auxiliary_names(self) -> tuple[str, ...]:
        """The names of auxiliary losses and metrics of the whole model."""
        return auxiliary_names(self.model)

    @property
    def shared_names(self) -> tuple[str, ...]:
        """The names of numbers of a step that all stages know, besides their squared norms."""
        of_spikes = spikes.TOTALS * (self.spike_rule is not None)
        return self.auxiliary_names + self.statistic_names + of_spikes

    @property
    def statistic_names(self) -> tuple[str, ...]:
        """The names of the norms by kind of layer; none unless the run asks for them."""
        return layer_statistics.names(self.model) if self.has_statistics else ()

    @property
    def remembers(self) -> bool:
        """Whether this chunk remembers the steps that a spike is compared with."""
        return self.is_last and self.spike_rule is not None

    @property
    def has_auxiliary_losses(self) -> bool:
        """Whether a layer here adds to the loss."""
        return any(kind.losses for kind in self.kinds.values())

    @property
    def has_auxiliary(self) -> bool:
        """Whether a layer here has auxiliary losses, metrics or statistics."""
        return self.has_statistics or any(
            kind.losses or kind.metrics for kind in self.kinds.values()
        )

    @property
    def draws(self) -> bool:
        """Whether a layer here reads random numbers."""
        return any(kind.draws for kind in self.kinds.values())

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == len(self.plan.chunks) - 1

    @property
    def shares_table(self) -> bool:
        """Whether the gradient of the token table is a sum of this stage's and another one's."""
        return self.model.sums_table and self.is_first != self.is_last

    @property
    def borrows_table(self) -> bool:
        """Whether this stage holds a copy of the token table, which the first stage owns."""
        return self.model.tied_embeddings and self.is_last and not self.is_first

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the arrays of a batch that this stage reads."""
        return tuple(self.input_arrays)

    @functools.cached_property
    def input_arrays(self) -> dict[str, BatchArray]:
        """The arrays of a batch that this stage reads, by name."""
        found: dict[str, BatchArray] = {}
        of_tokens = {"first": ("token_BL",), "middle": (), "last": ("target_BL",)}
        for kind in self.kinds.values():
            names = of_tokens[kind.place] if kind.reads is None else ()
            arrays = kind.reads or [self._of_tokens(name) for name in names]
            found |= {array.name: array for array in arrays}
        return found | (
            {"segment_BL": self._of_tokens("segment_BL")} if self.mask_documents else {}
        )

    def _of_tokens(self, name: str) -> BatchArray:
        return BatchArray(name, (self.model.context_length,), "int32")

    @property
    def rounds_params(self) -> bool:
        """Whether an update is rounded, by noise whose seeds are names."""
        return self.param_dtype != "float32"

    @property
    def boundary(self) -> tuple[int, ...]:
        """The shape of what layers hand to each other for one sequence."""
        shape = layers(self.model)[EMBED].boundary
        return shape or (self.model.context_length, self.model.width)

    @property
    def num_replicas(self) -> int:
        return self.mesh.shape[Axis.DATA]

    @property
    def num_parts(self) -> int:
        """Devices over which the parameters of a replica are cut, besides `tensor`."""
        return sharding.num_parts(self.mesh.shape)

    @property
    def sends_rows(self) -> bool:
        """Whether devices send the rows of tokens to each other, not the table that has them."""
        if self.num_parts == 1:
            return False
        sequences = self.microbatch_size // self.num_replicas
        num_tokens = sequences * self.model.context_length // self.num_parts
        tensor = self.mesh.shape[Axis.TENSOR]
        ends = self.is_first, self.is_last
        return bool(unsent_numbers(self.model, ends, num_tokens, tensor) > 0)

    @property
    def sequence_parallel(self) -> bool:
        """Whether `tensor` cuts the sequences of the residual stream here."""
        stage, _ = self.plan.chunks[self.index]
        size = lambda axis: self.mesh.shape.get(axis, 1)
        cut = size(Axis.TENSOR), size(Axis.CONTEXT)
        divides = work.sequence_cuts(self.model.context_length, *cut) > 1
        return bool(self.plan.stages[stage].sequence_parallel and divides)

    @property
    def microbatch_size(self) -> int:
        """Sequences in a microbatch, over all replicas."""
        return self.plan.global_batch // self.plan.microbatches

    @property
    def array_functions(self) -> ops.Kernels:
        """The implementations of array functions that its layers ask for."""
        stage, _ = self.plan.chunks[self.index]
        return ops.Kernels(
            self.kernels,
            self.mesh,
            self.compute_dtype,
            self.unproven,
            sequence_parallel=self.sequence_parallel,
            logit_bytes=self.plan.stages[stage].logit_bytes or LOGIT_BYTES,
            expert_chunks=self.expert_chunks,
        )

    @property
    def update_functions(self) -> ops.Kernels:
        """The implementations that its optimizer asks for."""
        return replace(self.array_functions, parameters=self.param_dtype)

    def choose_attention(self) -> dict[ops.AttentionChoice, None]:
        """Tells which kernel computes attention in its layers, and why. Raises ConfigError."""
        found: dict[ops.AttentionChoice, None] = {}
        for attention in dict.fromkeys(kind.attention for kind in self.kinds.values()):
            if attention is not None:
                shape = lambda heads, width=attention.head_width: jax.ShapeDtypeStruct(
                    (1, self.model.context_length, heads, width), self.compute_dtype
                )
                q, k = shape(attention.heads), shape(attention.key_heads)
                arrays = q, k, k, self.mask_documents, self.array_functions
                found[ops.choose_attention(*arrays, ops.rule_of(attention))] = None
        return found

    # ---- state ---------------------------------------------------------------------------------

    def init(self, seed: int, drawn: Callable[[], None] = lambda: None) -> ChunkState:
        """The state before the first step: a function of the run, whatever the plan.

        `drawn` is called after each layer.
        """

        values = source_of_values(self.model, seed)

        def build(path: tuple, x: jax.ShapeDtypeStruct) -> jax.Array:
            parameter, layer = stated(self.statements, path), path[0].key
            make = lambda box: values(parameter, layer, box).astype(x.dtype, copy=False)
            return sharding.build(x.shape, x.sharding, make)

        shapes = self.state_shapes
        params: dict[str, Tree] = {}
        fixed: dict[str, Tree] = {}
        for layer in shapes.params:
            if function := layers(self.model)[layer].draw:
                own = merged(shapes.params[layer], shapes.fixed.get(layer, {}))
                where = jax.tree.map(lambda x: x.sharding, own)
                values_here = import_object(function)(self.model, layer, seed, where)
                kept = jax.tree.map(lambda x, like: x.astype(like.dtype), values_here, own)
                jax.block_until_ready(kept)
                params[layer], frozen = split_by(self.statements[layer], kept)
                fixed |= {layer: frozen} if frozen else {}
                drawn()
                continue
            for tree, tree_shapes in ((params, shapes.params), (fixed, shapes.fixed)):
                own = {layer: tree_shapes[layer]} if layer in tree_shapes else {}
                # The host holds one layer at a time.
                tree |= jax.block_until_ready(jax.tree_util.tree_map_with_path(build, own))
            drawn()
        state = params, self.init_optimizer(params), fixed
        return ChunkState(*state, self.init_average(params), self.init_recent())

    def init_optimizer(self, params: Tree) -> State:
        """The optimizer's state before the first step."""
        shardings = jax.tree.map(lambda x: x.sharding, self.state_shapes.opt_state)
        init = lambda params: self.optimizer.init(widened(params))
        state: State = jax.jit(init, out_shardings=shardings)(params)
        return state

    def init_average(self, params: Tree) -> Average | None:
        """An average that begins with these parameters."""
        if self.ema_decay is None:
            return None
        shardings = jax.tree.map(lambda x: x.sharding, self.state_shapes.average)
        begin = lambda params: weight_average.begin(widened(params))
        average: Average = jax.jit(begin, out_shardings=shardings)(params)
        return average

    def init_recent(self) -> spikes.Recent | None:
        """No steps, where this chunk remembers some."""
        if not self.remembers or self.spike_rule is None:
            return None
        begin = functools.partial(spikes.none_yet, self.spike_rule.window)
        recent: spikes.Recent = jax.jit(begin, out_shardings=sharding.replicated(self.mesh))()
        return recent

    @functools.cached_property
    def state_shapes(self) -> ChunkState:
        """Shape, dtype and sharding of every array of the state."""
        sizes, dtypes = self.mesh.shape, Dtypes(self.param_dtype, self.compute_dtype)
        put = lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

        def fixed(parameter: Parameter) -> jax.ShapeDtypeStruct:
            where = NamedSharding(self.mesh, sharding.shard_spec(parameter.dims, sizes))
            return jax.ShapeDtypeStruct(parameter.shape, dtypes.of(parameter), sharding=where)

        wide = self.reduced_shapes
        params = jax.tree.map(lambda x: x.update(dtype=self.param_dtype), wide)
        opt_state = jax.tree.map(
            put,
            jax.eval_shape(self.optimizer.init, wide),
            self.optimizer.shardings(wide, self.mesh),
        )
        average = None
        if self.ema_decay is not None:
            everywhere = sharding.replicated(self.mesh)
            updates = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
            average = Average(updates, wide)
        recent = None
        if self.remembers and self.spike_rule is not None:
            shapes = jax.eval_shape(functools.partial(spikes.none_yet, self.spike_rule.window))
            recent = jax.tree.map(lambda x: put(x, sharding.replicated(self.mesh)), shapes)
        return ChunkState(params, opt_state, jax.tree.map(fixed, self.untrained), average, recent)

    @functools.cached_property
    def reduced_shapes(self) -> Tree:
        """The shapes of reduced gradients: float32, in the layout of the masters."""

        def master(parameter: Parameter) -> jax.ShapeDtypeStruct:
            where = sharding.master_sharding(parameter, self.mesh)
            return jax.ShapeDtypeStruct(parameter.shape, jnp.float32, sharding=where)

        return jax.tree.map(master, self.trained)

    @functools.cached_property
    def trained(self) -> Tree:
        """The statements of the parameters that train, as `params` of the state has them."""
        return split_trained(self.statements)[0]

    @functools.cached_property
    def held(self) -> Tree:
        """The statements of what replicas hold."""
        return coded_weights.statements(self.kinds, self.trained)

    @functools.cached_property
    def untrained(self) -> Tree:
        """The statements of the parameters that do not train, as `fixed` of the state has them."""
        return split_trained(self.statements)[1]

    def _specs(self) -> tuple[Tree, Tree]:
        """Partition specs of the replicas and of the masters."""
        spec = lambda parameter: sharding.replica_spec(parameter.dims, self.mesh.shape)
        masters = jax.tree.map(lambda x: x.sharding.spec, self.state_shapes.params)
        return jax.tree.map(spec, self.trained), masters

    def gather(self, params: Tree) -> Tree:
        """Masters to replicas: cast to the compute dtype, then all-gathered over `data`.

        Each layer is a bucket, gathered by one collective, where XLA does not join collectives.
        Weights of products in fp8 become codes.
        """
        replica_specs, master_specs = self._specs()
        dims = self._data_dims()
        told = {
            "by_sum": platforms.gathers_by_sum(self.mesh, Axis.DATA),
            "apart": platforms.joins_collectives(self.mesh),
        }

        def gather_layer(masters: Tree, dims: Tree) -> Tree:
            copies = jax.tree.map(lambda x: x.astype(self.compute_dtype), masters)
            whole = collectives.all_gather(copies, dims, Axis.DATA, **told)
            return jax.tree.map(lambda x: x[None], whole)

        gather_local = lambda local: {
            name: gather_layer(masters, dims[name]) if masters else {}
            for name, masters in local.items()
        }
        replicas = self.on_shards(gather_local, (master_specs,), replica_specs)(params)
        return coded_weights.coded(self.held, replicas, self.mesh)

    def reduce(self, gradients: Tree) -> Tree:
        """Gradients of the replicas, reduce-scattered over `data` into the master layout.

        Each layer is a bucket, reduced by one collective, and one more for what cannot be cut,
        where XLA does not join collectives. What cannot be cut crosses in float32: it is all where
        `data` divides no dim of a replica's parts.
        """
        replica_specs, master_specs = self._specs()
        dims = self._data_dims()
        scatter = functools.partial(
            collectives.reduce_scatter,
            axis=Axis.DATA,
            by_ring=platforms.sums_by_ring(self.mesh, Axis.DATA),
            apart=platforms.joins_collectives(self.mesh),
            sent=self.reduction_dtype,
        )

        def reduce_local(local: Tree) -> Tree:
            own = jax.tree.map(lambda x: x[0], local)
            return {name: scatter(x, dims[name]) if x else {} for name, x in own.items()}

        return self.on_shards(reduce_local, (replica_specs,), master_specs)(gradients)

    def on_shards(self, function: Callable, in_specs: Tree, out_specs: Tree) -> Callable:
        """`function` of each device's shards."""
        # Unchecked: in a bucket, JAX loses sight of which arrays are the same all over `tensor`.
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def _data_dims(self) -> Tree:
        """The dim of each parameter that is cut over `data`; -1 for those that are not."""

        def dim(parameter: Parameter) -> int:
            found = sharding.data_dim(parameter.dims, parameter.shape, self.mesh.shape)
            return -1 if found is None or self.num_replicas == 1 else found

        return jax.tree.map(dim, self.trained)

    def zero_gradients(self) -> Tree:
        return jax.tree.map(
            lambda x: jnp.zeros((self.num_replicas, *x.shape), jnp.float32),
            self.state_shapes.params,
        )
