"""The costs that programs of our own layers give are those of the closed forms of their kinds.

Neither is made of the other, so each is a check of the other.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from holmesjax.config import ModelConfig
from holmesjax.costs import memory, work
from holmesjax.costs.products import layer_forward_flop, layer_products, layer_weight_flop
from holmesjax.layer_specs.kind import ActivationProduct, LayerCollective, PerToken, WeightProduct
from holmesjax.layer_specs.model_layers import EMBED, HEAD, block_name, layers
from holmesjax.models import layer_tracing
from holmesjax.models.layer import apply, tree_of
from tests.shapes import shape_of

LENGTH, SEQUENCES = 64, 2
SIZES = {
    "num_layers": 2,
    "width": 256,
    "num_heads": 4,
    "context_length": LENGTH,
    "vocab_size": 512,
}
MODELS = {
    "gpt2": ModelConfig(**SIZES, positions="learned"),
    "llama": ModelConfig(
        **SIZES, num_kv_heads=2, mlp_width=640, activation="swiglu", norm="rms_norm"
    ),
    "window": ModelConfig(**SIZES, pattern=("window_block",), window=16),
    "gemma": ModelConfig(
        **SIZES, norm="rms_norm", norms="both", qk_norm="head", biases="all", activation="geglu"
    ),
}
WITHIN = 0.02


def shapes_of(kind):
    return jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, "bfloat16"), tree_of(kind))


def trace(run, kind, inputs):
    """The kind, with what programs say of it in the place of the closed forms."""
    parameters = jax.tree.leaves(tree_of(kind))
    traced = layer_tracing.trace(
        run,
        shapes_of(kind),
        [parameter.dims for parameter in parameters],
        inputs,
        num_tokens=SEQUENCES * LENGTH,
        is_middle=kind.place == "middle",
    )
    uses = dict(zip((parameter.name for parameter in parameters), traced.uses, strict=True))
    statements = {
        field.name: getattr(traced, field.name)
        for field in dataclasses.fields(traced)
        if field.name != "uses"
    }
    return dataclasses.replace(kind, attention=None, **statements), uses


def traced(model, layer):
    kind, position_L = layers(model)[layer], jnp.arange(LENGTH)
    token_BL = jax.ShapeDtypeStruct((SEQUENCES, LENGTH), "int32")
    x_BLD = jax.ShapeDtypeStruct((SEQUENCES, LENGTH, model.width), "bfloat16")

    def run(params, *inputs):
        x_BLD = None if kind.place == "first" else inputs[0]
        names = {"first": ["token_BL"], "middle": [], "last": ["target_BL"]}[kind.place]
        arrays = dict(zip(names, inputs[-1:], strict=False))
        return apply(layer, model, params, x_BLD, position_L=position_L, **arrays)[0]

    inputs = {"first": [token_BL], "middle": [x_BLD], "last": [x_BLD, token_BL]}[kind.place]
    return trace(run, kind, inputs)


@pytest.mark.parametrize("layer", [EMBED, block_name(0), HEAD])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_programs_say_what_the_closed_forms_say(model, layer):
    stated = layers(model)[layer]
    found, uses = traced(model, layer)
    assert uses == {parameter.name: parameter.use for parameter in stated.parameters}
    if model.window is None or layer != block_name(0):
        flop = [layer_forward_flop(kind, LENGTH, 1) for kind in (found, stated)]
        assert flop[0] == flop[1]
    assert layer_weight_flop(found, 1) == layer_weight_flop(stated, 1)
    of_tensor = lambda kind, policy: sum(
        n * (forward + backward) for n, forward, backward in work.all_reduces(kind, policy)
    )
    for policy in ("none", "dots", "full"):
        assert of_tensor(found, policy) == of_tensor(stated, policy)
        for tensor in (1, 2):
            shape = shape_of(dtype="bfloat16", checkpointing=policy, tensor=tensor)
            kept = memory.residual_bytes(model, found, shape)
            wanted = memory.residual_bytes(model, stated, shape) + 4 * stated.logits / tensor
            # An embedding keeps its tokens, of 4 bytes, which no closed form counts.
            wanted += 4 * (stated.place == "first")
            assert kept == pytest.approx(wanted, rel=WITHIN), (policy, tensor)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_what_tensor_cuts_is_seen(model):
    stated = layers(model)[block_name(0)]
    found, _ = traced(model, block_name(0))
    flop = [sum(p.flop for p in layer_products(kind, 1, 2)) for kind in (found, stated)]
    assert flop[0] == flop[1]
    assert all(mix.is_cut for mix in found.mixes)
    # Of what moves, norms and sums of the residual stream are whole: 12 D.
    assert found.moved.whole == pytest.approx(stated.moved.whole, rel=0.3)
    needed = [kind.needed.whole + kind.needed.cut for kind in (found, stated)]
    assert needed[0] == pytest.approx(needed[1], rel=0.3)


# ---- worked by hand ------------------------------------------------------------------------------

D, C = 8, 6


def by_hand(apply_layer, params, dims, sequences=SEQUENCES):
    shape = lambda size: jax.ShapeDtypeStruct(size, "bfloat16")
    return layer_tracing.trace(
        apply_layer,
        {name: shape(size) for name, size in params.items()},
        dims,
        [shape((sequences, LENGTH, D))],
        num_tokens=sequences * LENGTH,
        is_middle=True,
    )


def test_a_product_that_mixes_tokens():
    """Each of D columns of a sequence, [D, L] [L, C] [C, L]: D / L rows for each token."""

    def mixer(params, x_BLD):
        h_BDC = jnp.einsum("bld,lc->bdc", x_BLD, params["up"])
        return x_BLD + jnp.einsum("bdc,cl->bld", h_BDC, params["down"])

    found = by_hand(mixer, {"down": (C, LENGTH), "up": (LENGTH, C)}, ["FW", "WF"])
    assert set(found.products) == {
        WeightProduct(LENGTH, C, "columns", D / LENGTH),
        WeightProduct(C, LENGTH, "depth", D / LENGTH),
    }
    assert found.mixes == ()
    assert found.kept.input == PerToken(D)
    # The second product needs the result of the first, C D numbers of a sequence.
    assert found.kept.products.cut == round(C * D / LENGTH)
    assert {
        (collective.numbers, collective.forward, collective.backward)
        for collective in found.collectives
    } == {(D, 1, 1)}


def test_heads_that_are_merged_before_a_product():
    """The dim that is cut is found again after a reshape of the weight."""

    def heads(params, x_BLD):
        w_DF = params["query"].reshape(D, 2 * 4)
        q_BLHK = (x_BLD @ w_DF).reshape(*x_BLD.shape[:2], 2, 4)
        scores_BHLL = jnp.einsum("blhk,bmhk->bhlm", q_BLHK, q_BLHK)
        return x_BLD + jnp.einsum("bhlm,bmhk->blhk", scores_BHLL, q_BLHK).reshape(x_BLD.shape)

    found = by_hand(heads, {"query": (D, 2, 4)}, ["DHK"])
    assert found.products == (WeightProduct(D, 8, "columns", 1.0),)
    assert set(found.mixes) == {
        ActivationProduct(LENGTH, LENGTH, 4, 2, is_cut=True),
        ActivationProduct(4, LENGTH, LENGTH, 2, is_cut=True),
    }
    # Devices have parts of the result, which are gathered: that counts like a sum.
    both = LayerCollective(axis="tensor", numbers=D, forward=1, backward=1)
    assert found.collectives == (both,)


def test_a_loop_counts_as_often_as_it_runs():
    def loop(params, x_BLD):
        step = lambda x_BLD, w_DD: (x_BLD @ w_DD, None)
        return jax.lax.scan(step, x_BLD, params["w"])[0]

    found = by_hand(loop, {"w": (3, D, D)}, ["WWW"])
    assert found.products == (WeightProduct(D, D, "none", 1.0, 3),)


def test_a_convolution():
    def conv(params, x_BLD):
        window = dict(window_strides=(1,), padding="SAME", dimension_numbers=("NWC", "WIO", "NWC"))
        return jax.lax.conv_general_dilated(x_BLD, params["w"], **window)

    found = by_hand(conv, {"w": (3, D, D)}, ["WWF"])
    assert found.products == (WeightProduct(3 * D, D, "columns", 1.0),)
    assert [collective.backward for collective in found.collectives] == [1]
