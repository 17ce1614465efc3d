"""Adapters beside frozen weights equal `jax.grad` of weights into which they are merged."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holmesjax.config import LoraConfig, LoraPattern
from holmesjax.costs import memory
from holmesjax.costs.products import train_flop
from holmesjax.layer_specs.distinct_kinds import kinds
from holmesjax.layer_specs.model_layers import block_name
from holmesjax.models.activation_checkpointing import POLICIES
from holmesjax.models.layer import apply, init_params
from holmesjax.runtime.microbatch import Residuals
from holmesjax.runtime.pipeline import make_runner
from tests.hand_made_plans import hand_made_plan, make_chunks, make_model, train_step
from tests.one_device import (
    MICROBATCH,
    RTOL,
    SEED,
    check_gradient,
    logits_of,
    plain_loss,
    step_inputs,
)
from tests.random_adapters import adapted_states, apart, random_bs
from tests.shapes import shape_of
from tests.versions import rows

pytestmark = pytest.mark.xdist_group("lora")

WEIGHTS = {
    "query": ("DHK", "dr,rhk->dhk"),
    "key": ("DGK", "dr,rgk->dgk"),
    "value": ("DGK", "dr,rgk->dgk"),
    "out": ("HKD", "hkr,rd->hkd"),
    "gate": ("DF", "dr,rf->df"),
    "up": ("DF", "dr,rf->df"),
    "down": ("FD", "fr,rd->fd"),
}
LLAMA = make_model(
    num_layers=2,
    num_kv_heads=2,
    activation="swiglu",
    norm="rms_norm",
    norms="both",
    lora=LoraConfig(rank=4, alpha=6.0, targets=("all-linear",)),
)
GPT2 = make_model(
    num_layers=2,
    positions="learned",
    biases="all",
    tied_embeddings=True,
    lora=LoraConfig(rank=3, alpha=5.0, use_rslora=True, targets=("c_attn", "c_proj")),
)


def base_of(model):
    return dataclasses.replace(model, lora=None)


UNLIKE = make_model(
    num_layers=2,
    activation="swiglu",
    lora=LoraConfig(
        rank=4,
        alpha=6.0,
        targets=("all-linear",),
        patterns=(
            LoraPattern(maps="block_001/query", rank=2, alpha=2.5),
            LoraPattern(maps="[qk]_proj", alpha=3.0),
            LoraPattern(maps="*/down*", rank=5),
        ),
    ),
)
# By layer and weight, where they are not as `rank` and `alpha` say.
RANKS = {("block_001", "query"): 2, ("block_000", "down"): 5, ("block_001", "down"): 5}
ALPHAS = {("block_001", "query"): 2.5, ("block_000", "query"): 3.0}
ALPHAS |= {(layer, "key"): 3.0 for layer in ("block_000", "block_001")}


def scale_of(lora, layer, name):
    """PEFT's formula."""
    own = lora.patterns is not None
    rank = RANKS.get((layer, name), lora.rank) if own else lora.rank
    alpha = ALPHAS.get((layer, name), lora.alpha) if own else lora.alpha
    return alpha / (rank**0.5 if lora.use_rslora else rank)


def merged(model, base, adapters):
    """Weights plus s A B: nothing of the layers' own adapters is in it."""
    whole = {}
    for layer, weights in base.items():
        whole[layer] = dict(weights)
        shared = {}
        for name, (dims, product) in WEIGHTS.items():
            if adapter := adapters[layer].get(f"{name}_lora"):
                shared |= {key[0]: array for key, array in adapter.items()}
                delta = scale_of(model.lora, layer, name) * jnp.einsum(
                    product, shared["a"], shared["b"]
                )
                whole[layer][f"{name}_{dims}"] = weights[f"{name}_{dims}"] + delta
    return whole


@functools.cache
def plain_step(model):
    base, adapters = random_bs(model)
    inputs = step_inputs(MICROBATCH, 0)
    loss = lambda own: plain_loss(merged(model, base, own), base_of(model), inputs)
    return jax.jit(jax.value_and_grad(loss))(adapters)


PLANS = {
    "one program, computed again": (
        LLAMA,
        hand_made_plan((2,), 2, 2, fsdp=2, checkpointing="full"),
    ),
    "split backward, a tied table": (GPT2, hand_made_plan((1, 1), 1, 2, schedule="zero_bubble")),
    "unlike ranks, two stages": (UNLIKE, hand_made_plan((1, 1), 2, 2, checkpointing="dots")),
}


@pytest.mark.parametrize("model, plan", rows(PLANS))
def test_gradients_equal_those_of_merged_weights(model, plan):
    loss, gradient = plain_step(model)
    base, adapters = random_bs(model)
    runner = make_runner(plan, make_chunks(model, plan), evaluates=False)
    states = adapted_states(runner, adapters)
    states, found = train_step(runner, states, step_inputs(MICROBATCH, 0))
    assert float(found["loss"]) == pytest.approx(float(loss), rel=RTOL)
    for state in states:
        for layer, frozen in state.fixed.items():
            of_base = {name: base[layer][name] for name in frozen}  # or a copy of the table alone
            jax.tree.map(np.testing.assert_array_equal, frozen, of_base)
    assert len(check_gradient(states, gradient)) == len(jax.tree.leaves(gradient))


@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_a_new_adapter_changes_nothing(model):
    params = init_params(model, SEED)
    of = lambda model, params: logits_of(params, model, step_inputs(2, 0)["token_BL"])
    np.testing.assert_array_equal(of(model, params), of(base_of(model), apart(params)[0]))
    values = apart(params)[1][block_name(0)]["query_lora"]["a_DR"]
    assert 0.9 < np.abs(values).max() * model.width**0.5 <= 1


@pytest.mark.parametrize("policy", ["none", "dots", "full"])
@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_residuals_are_those_that_jax_keeps(model, policy):
    [kind] = kinds(model).blocks
    x_BLD = jnp.zeros((3, model.context_length, model.width))

    def run(adapters, x_BLD, base):
        arrays = {"position_L": jnp.arange(model.context_length)}
        return apply(block_name(0), model, base | adapters, x_BLD, **arrays)[0]

    if policy in POLICIES:
        run = jax.checkpoint(run, policy=POLICIES[policy])

    def kept(adapters, base, x_BLD):
        pullback = jax.vjp(lambda *args: run(*args, base), adapters, x_BLD)[1]
        return Residuals.of(pullback, (adapters, base)).arrays

    base, adapters = (values[block_name(0)] for values in apart(init_params(model, SEED)))
    arrays = jax.tree.leaves(jax.eval_shape(kept, adapters, base, x_BLD))
    found = sum(array.size * array.dtype.itemsize for array in arrays)
    stage = shape_of(sequences=3, checkpointing=policy)
    predicted = 3 * model.context_length * memory.residual_bytes(model, kind, stage)
    assert predicted == pytest.approx(found, rel=0.04)


def num_bytes(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def test_the_planner_knows_unlike_ranks():
    [chunk] = make_chunks(UNLIKE, hand_made_plan((2,), 1, 1))
    one, other = kinds(UNLIKE).blocks
    of_stage = memory.stage_memory_bytes(UNLIKE, shape_of(blocks=(1, 1)))
    shapes = chunk.state_shapes
    assert of_stage["parameters"] == num_bytes(shapes.params)
    assert of_stage["replicas"] == num_bytes((shapes.params, shapes.fixed))
    assert one.size() - other.size() == 2 * (32 + 32)  # the query's rank is 2 less


def test_the_planner_knows_that_nothing_else_trains():
    [chunk] = make_chunks(LLAMA, plan := hand_made_plan((2,), 1, 1))
    assert len(plan.stages) == 1
    of_stage = memory.stage_memory_bytes(LLAMA, shape_of())
    shapes = chunk.state_shapes
    assert of_stage["parameters"] == of_stage["gradients"] == num_bytes(shapes.params)
    assert of_stage["optimizer"] == num_bytes((shapes.opt_state.mu, shapes.opt_state.nu))
    assert of_stage["replicas"] == num_bytes((shapes.params, shapes.fixed))
    # Adapters of rank 4: of four maps of attention, and three of the feed-forward, in two layers.
    assert num_bytes(shapes.params) == 4 * 2 * 4 * (2 * 64 + 2 * (32 + 16) + 3 * (32 + 128))
    # A weight that does not train has two of three products.
    own = 2 * 4 * (2 * 64 + 2 * (32 + 16) + 3 * (32 + 128))
    base, scores = base_of(LLAMA), 2 * 4 * 16 * 32
    weights = train_flop(base, 1) / 6 - scores / 2
    assert train_flop(LLAMA, 1) == 4 * weights + 3 * scores + 6 * own
