"""The training loops that `pipeline_overhead` compares; each takes one optimizer step a call.

`LOOPS` names them. A loop is built once and gives a function that dispatches a step and returns
its losses and its new state, which may not be computed yet. Loops with the same sizes start from
the same parameters and see the same batch, so their losses must agree.

Dims as in `models/gpt.py`; M microbatches.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from holmesjax.config import KernelsConfig, ModelConfig, OptimizerConfig
from holmesjax.layer_specs.model_layers import EMBED, HEAD, block_name, layer_names
from holmesjax.models import ops
from holmesjax.models.layer import apply, init_params, statements
from holmesjax.optimizers.optimizer import make_optimizer
from holmesjax.parallel.mesh import build_meshes
from holmesjax.plan.plan import Axis, Plan, StagePlan
from holmesjax.runtime.chunk import Chunk
from holmesjax.runtime.pipeline import make_runner
from holmesjax.runtime.timeline import Clock

Tree = Any
Inputs = dict[str, np.ndarray]  # token_BL, target_BL
Step = Callable[[], Any]  # dispatches a step; a tree, its losses first

SEED, NUM_STEPS = 0, 1000
OPTIMIZER = OptimizerConfig(learning_rate=3e-4, schedule="constant")
# Small enough that what a task costs beside its arithmetic shows.
SMALL = ModelConfig(num_layers=4, width=64, num_heads=4, context_length=64, positions="learned")
LARGE = ModelConfig(
    num_layers=8, width=256, num_heads=4, context_length=256, vocab_size=512, positions="learned"
)
# 10.1 million parameters.
LLAMA = ModelConfig(
    num_layers=6,
    width=320,
    num_heads=5,
    mlp_width=864,
    context_length=256,
    vocab_size=4096,
    activation="swiglu",
    norm="rms_norm",
)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The model of a loop, and its number of virtual devices."""

    model: ModelConfig = LARGE
    global_batch: int = 8  # sequences
    microbatches: int = 1
    stages: int = 1
    data: int = 1  # replicas of each stage
    tensor: int = 1  # devices of each replica

    @property
    def num_devices(self) -> int:
        return self.stages * self.data * self.tensor


def inputs(sizes: Sizes) -> Inputs:
    shape = (sizes.global_batch, sizes.model.context_length + 1)
    rows = np.random.default_rng(SEED).integers(sizes.model.vocab_size, size=shape, dtype=np.int32)
    return {"token_BL": rows[:, :-1].copy(), "target_BL": rows[:, 1:].copy()}


# ---- HolmesJAX -----------------------------------------------------------------------------------


def make_plan(sizes: Sizes) -> Plan:
    """Equal stages on consecutive devices."""
    blocks = [block_name(i) for i in range(sizes.model.num_layers)]
    size, num_devices = len(blocks) // sizes.stages, sizes.data * sizes.tensor
    stages = [
        StagePlan(
            cluster=f"c{s}",
            nodes=(f"c{s}-0",),
            chunks=(
                (
                    *([EMBED] if s == 0 else []),
                    *blocks[s * size : (s + 1) * size],
                    *([HEAD] if s == sizes.stages - 1 else []),
                ),
            ),
            devices=tuple(range(s * num_devices, (s + 1) * num_devices)),
            mesh={Axis.DATA: sizes.data, Axis.TENSOR: sizes.tensor},
            fabrics={},
            memory_bytes={},
            seconds={},
        )
        for s in range(sizes.stages)
    ]
    return Plan(
        topology="benchmark",
        topology_hash="",
        stages=tuple(stages),
        global_batch=sizes.global_batch,
        microbatches=sizes.microbatches,
        schedule="1f1b",
        activation_checkpointing="none",
        boundary_bytes=0.0,
        step_time_s=0.0,
        bound_s=0.0,
        shares={},
    )


def holmesjax(sizes: Sizes) -> Step:
    """A step as the trainer takes it: batch from the host, programs, transport and timeline."""
    plan = make_plan(sizes)
    chunks = [
        Chunk(
            model=sizes.model,
            plan=plan,
            index=index,
            mesh=mesh,
            optimizer=make_optimizer(OPTIMIZER, NUM_STEPS, statements(sizes.model)),
            compute_dtype="float32",
            clip_norm=OPTIMIZER.clip_norm,
            mask_documents=False,
            kernels=KernelsConfig(),
        )
        for index, mesh in enumerate(build_meshes(plan, jax.devices()))
    ]
    runner = make_runner(plan, chunks)
    states, batch, clock = runner.init(SEED), inputs(sizes), Clock(len(chunks))

    def step() -> Any:
        nonlocal states
        states, metrics = runner.train_step(
            states, runner.placer.place_all(batch), clock.timeline()
        )
        return metrics["loss"], states

    return step


# ---- plain JAX -----------------------------------------------------------------------------------


def composed_loss(model: ModelConfig, params: Tree, batch: dict[str, jax.Array]) -> jax.Array:
    """The same layer functions as HolmesJAX runs, one after the other."""
    position_L = jnp.arange(model.context_length)
    x: jax.Array | None = None
    for layer in layer_names(model.num_layers):
        arrays = {"position_L": position_L, "token_BL": batch["token_BL"]}
        x, _ = apply(layer, model, params[layer], x, **arrays)
    assert x is not None
    return jnp.mean(ops.cross_entropy(x, batch["target_BL"]))


def textbook_loss(model: ModelConfig, params: Tree, batch: dict[str, jax.Array]) -> jax.Array:
    """The same model as one first writes it, with JAX's own functions and gradients."""

    def norm(x: jax.Array, p: Tree) -> jax.Array:
        unit = jax.nn.standardize(x, epsilon=1e-5)
        return unit * p["scale_D"] + p["bias_D"]

    x = params[EMBED]["token_VD"][batch["token_BL"]] + params[EMBED]["position_PD"]
    mask = jnp.tril(jnp.ones((model.context_length, model.context_length), bool))
    for layer in layer_names(model.num_layers)[1:-1]:
        p = params[layer]
        h = norm(x, p["attention_norm"])
        names = ("query_DHK", "key_DGK", "value_DGK")
        q, k, v = (jnp.einsum("bld,dhk->blhk", h, p[name]) for name in names)
        scores = jnp.einsum("blhk,bmhk->bhlm", q, k) / model.head_width**0.5
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e30))
        attention = jnp.einsum("bhlm,bmhk->blhk", weights, v)
        x = x + jnp.einsum("blhk,hkd->bld", attention, p["out_HKD"])
        h = norm(x, p["mlp_norm"])
        x = x + jax.nn.gelu(h @ p["up_DF"]) @ p["down_FD"]
    log_p = jax.nn.log_softmax(norm(x, params[HEAD]["norm"]) @ params[HEAD]["output_DV"])
    return -jnp.take_along_axis(log_p, batch["target_BL"][..., None], axis=-1).mean()


def plain_optimizer(c: OptimizerConfig, model: ModelConfig) -> optax.GradientTransformation:
    """AdamW at a constant rate behind a clipping of the global norm."""
    mask = jax.tree.map(lambda parameter: parameter.decays, statements(model))
    assert c.clip_norm is not None
    return optax.chain(
        optax.clip_by_global_norm(c.clip_norm),
        optax.adamw(
            c.learning_rate, c.beta1, c.beta2, c.epsilon, weight_decay=c.weight_decay, mask=mask
        ),
    )


def plain_jax(sizes: Sizes, loss: Callable[..., jax.Array] = composed_loss) -> Step:
    """One jitted function: value_and_grad, then an optax chain; its state is donated."""
    optimizer = plain_optimizer(OPTIMIZER, sizes.model)
    loss_and_gradient = jax.value_and_grad(functools.partial(loss, sizes.model))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params: Tree, opt_state: Tree, batch: dict[str, jax.Array]) -> Any:
        def add_microbatch(total: Tree, microbatch: dict[str, jax.Array]) -> tuple[Tree, None]:
            new = loss_and_gradient(params, microbatch)
            return jax.tree.map(jnp.add, total, new), None

        if sizes.microbatches == 1:
            value, gradients = loss_and_gradient(params, batch)
        else:
            split = lambda x: x.reshape(sizes.microbatches, -1, *x.shape[1:])
            zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
            total, _ = jax.lax.scan(add_microbatch, zeros, jax.tree.map(split, batch))
            value, gradients = jax.tree.map(lambda x: x / sizes.microbatches, total)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return value, optax.apply_updates(params, updates), opt_state

    params = jax.device_put(init_params(sizes.model, SEED))
    opt_state, batch = optimizer.init(params), inputs(sizes)

    def step() -> Any:
        nonlocal params, opt_state
        value, params, opt_state = update(params, opt_state, batch)
        return value, params

    return step


def textbook_jax(sizes: Sizes) -> Step:
    return plain_jax(sizes, textbook_loss)


# ---- PyTorch -------------------------------------------------------------------------------------


def pytorch(sizes: Sizes) -> Step:
    # Here, as PyTorch is an extra that nothing else needs.
    from benchmarks import pytorch_loop

    return pytorch_loop.make_step(
        sizes.model, OPTIMIZER, init_params(sizes.model, SEED), inputs(sizes)
    )


def transformers(sizes: Sizes) -> Step:
    # Here, as the packages are extras.
    from benchmarks import transformers_loop

    return transformers_loop.make_step(
        sizes.model, OPTIMIZER, init_params(sizes.model, SEED), inputs(sizes)
    )


ONE = Sizes()
FOUR = replace(ONE, microbatches=4)
SMALL_ONE = Sizes(model=SMALL, microbatches=8, global_batch=32)
LLAMA_ONE = Sizes(model=LLAMA)
SMALL_2x2 = replace(SMALL_ONE, data=2, tensor=2)

LOOPS: dict[str, tuple[Callable[[Sizes], Step], Sizes]] = {
    "holmesjax": (holmesjax, ONE),
    "plain jax": (plain_jax, ONE),
    "holmesjax, 4 microbatches": (holmesjax, FOUR),
    "plain jax, 4 microbatches": (plain_jax, FOUR),
    "textbook jax": (textbook_jax, ONE),
    "pytorch": (pytorch, ONE),
    "holmesjax, a Llama": (holmesjax, LLAMA_ONE),
    "transformers, a Llama": (transformers, LLAMA_ONE),
    "1 stage": (holmesjax, SMALL_ONE),
    "2 stages": (holmesjax, replace(SMALL_ONE, stages=2)),
    "1 stage of 2x2": (holmesjax, SMALL_2x2),
    "2 stages of 2x2": (holmesjax, replace(SMALL_2x2, stages=2)),
}
