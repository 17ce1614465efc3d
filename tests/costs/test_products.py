"""Matrix products against the programs of layers, and FLOP against published runs."""

import jax
import jax.numpy as jnp
import pytest
from jax.interpreters import partial_eval

from holmesjax.config import ModelConfig
from holmesjax.costs.products import (
    backward_flop,
    blocks_forward_flop,
    head_forward_flop,
    head_product,
    layer_forward_flop,
    layer_products,
    layer_weight_flop,
)
from holmesjax.layer_specs.distinct_kinds import kinds
from holmesjax.layer_specs.model_layers import HEAD, block_name, layers
from holmesjax.models.layer import apply, param_shapes
from holmesjax.topology.calibration import flop
from tests.counted_models import MODELS
from tests.traced_flop import dot_flop


def forward_jaxpr(model, layer, *args):
    """A layer as a function of its parameters and the residual stream; the head gives logits."""
    position_L = jnp.arange(model.context_length)
    run = lambda params, *args: apply(layer, model, params, *args, position_L=position_L)[0]
    table_VD = jax.ShapeDtypeStruct((model.vocab_size, model.width), "float32")
    borrowed = dict.fromkeys(layers(model)[layer].borrows, table_VD)
    return run, param_shapes(layer, model) | borrowed, args


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_flop_are_those_of_the_models_matrix_products(model):
    x_BLD = jnp.zeros((2, model.context_length, model.width))
    num_tokens = 2 * model.context_length
    apply, params, args = forward_jaxpr(model, block_name(0), x_BLD)
    [block] = kinds(model).blocks
    flop = layer_forward_flop(block, model.context_length, num_tokens)
    assert flop == dot_flop(jax.make_jaxpr(apply)(params, *args).jaxpr)

    apply, params, args = forward_jaxpr(model, HEAD, x_BLD)
    assert head_forward_flop(model, num_tokens) == dot_flop(
        jax.make_jaxpr(apply)(params, *args).jaxpr
    )


@pytest.mark.parametrize("policy", ["none", "full"])
def test_backward_flop_are_those_of_the_gradient(policy):
    model = MODELS["llama"]
    x_BLD = jnp.zeros((2, model.context_length, model.width))
    apply, params, args = forward_jaxpr(model, block_name(0), x_BLD)
    if policy == "full":
        apply = jax.checkpoint(apply, policy=jax.checkpoint_policies.nothing_saveable)

    def loss(params, x_BLD):
        return apply(params, x_BLD, *args[1:]).sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(params, x_BLD).jaxpr
    [block] = kinds(model).blocks
    forward = layer_forward_flop(block, model.context_length, 2 * model.context_length)
    total = forward + backward_flop(forward, policy)
    num_tokens = 2 * model.context_length
    # Not counted: attention's backward computes the scores again.
    total += 2 * num_tokens * model.context_length * model.num_heads * model.head_width
    # Counted, not done: the last product of the forward that is run again, which nothing needs.
    if policy == "full":
        total -= 2 * num_tokens * model.width * model.feed_forward_width
    assert dot_flop(jaxpr) == total


# Published: Narayanan et al., arXiv:2104.04473; Korthikanti et al., arXiv:2205.05198, table 5.
PUBLISHED = {
    # layers, width, heads, batch, devices, seconds per step, model FLOP utilisation in percent
    "22B": (48, 6144, 64, 4, 8, 1.10, 41.5),
    "530B": (105, 20480, 128, 280, 280, 37.83, 56.0),
}


@pytest.mark.parametrize("size", PUBLISHED)
def test_flop_give_the_published_utilisation(size):
    num_layers, width, num_heads, batch, num_devices, step_s, percent = PUBLISHED[size]
    s, vocab = 2048, 51200
    model = ModelConfig(
        num_layers=num_layers,
        width=width,
        num_heads=num_heads,
        context_length=s,
        vocab_size=vocab,
        positions="learned",
    )
    blocks = blocks_forward_flop(model, batch * s)
    head = head_forward_flop(model, batch * s)
    total = blocks + head + backward_flop(blocks + head, "none")
    formula = 72 * batch * s * num_layers * width**2
    formula *= 1 + s / (6 * width) + vocab / (12 * num_layers * width)
    assert total == pytest.approx(formula, rel=1e-12)
    recomputed = total + backward_flop(blocks, "full") - backward_flop(blocks, "none")
    formula = 96 * batch * s * num_layers * width**2
    formula *= 1 + s / (6 * width) + vocab / (16 * num_layers * width)
    assert recomputed == pytest.approx(formula, rel=1e-12)
    # The step times are published with two or three digits.
    assert 100 * total / (step_s * num_devices * 312e12) == pytest.approx(percent, rel=0.006)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_gradients_of_weights_take_the_products_that_jax_does_for_them(model):
    """The backward's products that go when only the input's gradient is asked for."""
    x_BLD = jnp.zeros((2, model.context_length, model.width))
    apply, params, args = forward_jaxpr(model, block_name(0), x_BLD)
    loss = lambda params, x_BLD: apply(params, x_BLD, *args[1:]).sum()
    jaxpr = jax.make_jaxpr(jax.value_and_grad(loss, argnums=(0, 1)))(params, x_BLD).jaxpr
    only_loss_and_input = [True] + [False] * (len(jaxpr.outvars) - 2) + [True]
    without, _ = partial_eval.dce_jaxpr(jaxpr, only_loss_and_input)
    [block] = kinds(model).blocks
    expected = layer_weight_flop(block, 2 * model.context_length)
    assert dot_flop(jaxpr) - dot_flop(without) == expected


@pytest.mark.parametrize("policy, factor", [("none", 2.0), ("dots", 2.0), ("full", 3.0)])
def test_only_full_checkpointing_runs_the_forward_again(policy, factor):
    assert backward_flop(10.0, policy) == 10.0 * factor


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_products_are_those_of_one_device(model, tensor):
    """Cut over `tensor`, they do a part of the FLOP; neither tokens nor the width are cut."""
    num_tokens = 2 * model.context_length
    [block] = kinds(model).blocks
    products = layer_products(block, num_tokens, tensor)
    assert flop(products) * tensor == layer_weight_flop(block, num_tokens)
    assert {product.rows for product in products} == {num_tokens}
    assert all(model.width in (product.columns, product.depth) for product in products)
    for product in (*products, head_product(model, num_tokens, tensor)):
        inputs, weights = product.gradients
        assert inputs.flop == weights.flop == product.flop
        assert (inputs.rows, inputs.columns) == (
            product.rows,
            product.depth,
        )  # like its left operand
        assert (weights.rows, weights.columns) == (product.depth, product.columns)
