"""The statements of kinds against published models, and against the functions that compute them."""

import jax
import jax.numpy as jnp
import pytest
from jax.interpreters import partial_eval

from holmesjax.config import LatentAttentionConfig, ModelConfig
from holmesjax.layer_specs.kind import Attention
from holmesjax.layer_specs.model_layers import layers
from holmesjax.models.layer import apply, param_shapes

# Meta's cards; sizes as in their params.json.
PUBLISHED = {
    6_738_415_616: {"num_layers": 32, "num_heads": 32, "mlp_width": 11008, "vocab_size": 32000},
    8_030_261_248: {
        "num_layers": 32,
        "num_heads": 32,
        "num_kv_heads": 8,
        "mlp_width": 14336,
        "vocab_size": 128256,
    },
}


@pytest.mark.parametrize("count", PUBLISHED)
def test_llamas_have_their_published_numbers_of_parameters(count):
    shape = {"width": 4096, "context_length": 4096, "activation": "swiglu", "norm": "rms_norm"}
    model = ModelConfig(**shape, **PUBLISHED[count])
    assert sum(kind.size() for kind in layers(model).values()) == count


SMALL = {"num_layers": 2, "width": 16, "num_heads": 2, "context_length": 8}
MODELS = {
    "gpt2": ModelConfig(**SMALL, positions="learned"),
    "llama": ModelConfig(**SMALL, num_kv_heads=1, activation="swiglu", norm="rms_norm"),
    "windows": ModelConfig(**SMALL, pattern=("window_block",), window=3),
    "tied": ModelConfig(**SMALL, tied_embeddings=True),
    "every norm and bias": ModelConfig(
        **SMALL, norms="both", qk_norm="all_heads", biases="all", activation="geglu"
    ),
    "latents": ModelConfig(
        **SMALL,
        head_dim=12,
        norm="rms_norm",
        latent_attention=LatentAttentionConfig(rank=10, query_rank=14, rotary_width=4),
    ),
    "norms of heads": ModelConfig(**SMALL, norms="after", qk_norm="head", norm="rms_norm"),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_layer_reads_every_parameter_that_its_kind_states(model):
    token_BL = jnp.zeros((1, model.context_length), int)
    x_BLD = jnp.zeros((1, model.context_length, model.width))
    table_VD = jax.ShapeDtypeStruct((model.vocab_size, model.width), "float32")
    arrays = {"token_BL": token_BL, "position_L": jnp.arange(model.context_length)}
    for layer, kind in layers(model).items():
        params = param_shapes(layer, model) | dict.fromkeys(kind.borrows, table_VD)
        x = None if kind.place == "first" else x_BLD
        run = lambda params, layer=layer, x=x: apply(layer, model, params, x, **arrays)[0]
        jaxpr = jax.make_jaxpr(run)(params).jaxpr
        _, is_read = partial_eval.dce_jaxpr(jaxpr, [True])
        assert all(is_read), f"{layer}: {is_read} of {list(params)}"


@pytest.mark.parametrize("window", [None, 1, 3, 8, 9])
def test_pairs_are_those_that_a_mask_shows(window):
    attention = Attention(heads=1, key_heads=1, head_width=1, window=window)
    shown = sum(0 <= i - j < (window or 8) for i in range(8) for j in range(8))
    assert attention.pairs(8) == shown
