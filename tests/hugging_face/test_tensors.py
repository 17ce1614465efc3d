"""Places of parameters in tensors, against the formulas that import each family, and back."""

from collections.abc import Callable

import numpy as np
import pytest

from holmesjax.hugging_face.tensors import places
from tests.hugging_face.families import CONFIGS, model_of, tensors_of

Tensors = dict[str, np.ndarray]


def llama_block(t: Tensors, i: int, h: int, g: int) -> Tensors:
    """The parameters of a block in a Llama or one like it, of those tensors that there are."""
    a, m, w = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp.", f"model.layers.{i}."
    heads = lambda x, n: x.reshape(n, -1, x.shape[1]).transpose(2, 0, 1)
    gated = lambda x: x.T
    # Norms behind attention and feed-forward take the name of the one before the feed-forward.
    is_post = f"{w}post_feedforward_layernorm.weight" in t
    post = "attention_post_norm" if is_post else "mlp_norm"
    size = lambda name: len(t.get(f"{a}{name}.weight", ()))
    is_per_head = size("q_norm") == size("q_proj")
    formulas: dict[str, tuple[str, Callable]] = {
        "query_DHK": (f"{a}q_proj.weight", lambda x: heads(x, h)),
        "key_DGK": (f"{a}k_proj.weight", lambda x: heads(x, g)),
        "value_DGK": (f"{a}v_proj.weight", lambda x: heads(x, g)),
        "query_HK": (f"{a}q_proj.bias", lambda x: x.reshape(h, -1)),
        "key_GK": (f"{a}k_proj.bias", lambda x: x.reshape(g, -1)),
        "value_GK": (f"{a}v_proj.bias", lambda x: x.reshape(g, -1)),
        "out_HKD": (f"{a}o_proj.weight", lambda x: x.T.reshape(h, -1, x.shape[0])),
        "gate_DF": (f"{m}gate_proj.weight", gated),
        "up_DF": (f"{m}up_proj.weight", gated),
        "down_FD": (f"{m}down_proj.weight", gated),
        "attention_norm/scale_D": (f"{w}input_layernorm.weight", lambda x: x),
        f"{post}/scale_D": (f"{w}post_attention_layernorm.weight", lambda x: x),
        "mlp_post_norm/scale_D": (f"{w}post_feedforward_layernorm.weight", lambda x: x),
    }
    if is_post:
        before = f"{w}pre_feedforward_layernorm.weight"
        formulas["mlp_norm/scale_D"] = (before, lambda x: x)
    for ours, theirs, n, letter in (("query", "q", h, "H"), ("key", "k", g, "G")):
        name = f"{ours}_norm/scale_{letter}K" if is_per_head else f"{ours}_norm/scale_K"
        shape = (n, -1) if is_per_head else (-1,)
        formulas[name] = (f"{a}{theirs}_norm.weight", lambda x, s=shape: x.reshape(s))
    found = {name: make(t[key]) for name, (key, make) in formulas.items() if key in t}
    return found | expert_weights(t, w)


def expert_weights(t: Tensors, w: str) -> Tensors:
    """The parameters of latents, the router and the experts of a layer, if it has any."""
    mlp, names, a = f"{w}mlp", ("gate_proj", "up_proj", "down_proj"), f"{w}self_attn."
    heads = lambda x: x.reshape(4, -1, x.shape[1]).transpose(2, 0, 1)
    formulas: dict[str, tuple[str, Callable]] = {
        "query_DQ": (f"{a}q_a_proj.weight", lambda x: x.T),
        "query_norm/scale_Q": (f"{a}q_a_layernorm.weight", lambda x: x),
        "query_QHK": (f"{a}q_b_proj.weight", heads),
        "latent_DJ": (f"{a}kv_a_proj_with_mqa.weight", lambda x: x.T),
        "latent_norm/scale_C": (f"{a}kv_a_layernorm.weight", lambda x: x),
        "key_value_CHX": (f"{a}kv_b_proj.weight", heads),
        "router/bias_E": (f"{mlp}.gate.e_score_correction_bias", lambda x: x),
        "gate_DF": (f"{mlp}.shared_experts.gate_proj.weight", lambda x: x.T),
        "up_DF": (f"{mlp}.shared_experts.up_proj.weight", lambda x: x.T),
        "down_FD": (f"{mlp}.shared_experts.down_proj.weight", lambda x: x.T),
    }
    found = {name: make(t[key]) for name, (key, make) in formulas.items() if key in t}
    if f"{w}block_sparse_moe.gate.weight" in t:
        mlp, names = f"{w}block_sparse_moe", ("w1", "w3", "w2")
    if f"{mlp}.gate.weight" not in t:
        return found
    router = t[f"{mlp}.gate.weight"]
    found["router/weight_DE"] = router.T
    for ours, theirs in zip(("gate_EDF", "up_EDF", "down_EFD"), names, strict=True):
        each = [t[f"{mlp}.experts.{e}.{theirs}.weight"].T for e in range(len(router))]
        found[ours] = np.stack(each)
    return found


def phi3_block(t: Tensors, i: int, h: int, g: int) -> Tensors:
    a, m = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
    qkv = t[f"{a}.qkv_proj.weight"]
    k = len(qkv) // (h + 2 * g)
    query, key, value = np.split(qkv, [h * k, (h + g) * k])
    gate, up = np.split(t[f"{m}.gate_up_proj.weight"], 2)
    split = {f"{a}.q_proj.weight": query, f"{a}.k_proj.weight": key, f"{a}.v_proj.weight": value}
    split |= {f"{m}.gate_proj.weight": gate, f"{m}.up_proj.weight": up}
    return llama_block({**t, **split}, i, h, g)


def gpt2_block(t: Tensors, i: int, h: int, g: int) -> Tensors:
    w = f"transformer.h.{i}."
    d = len(t[f"{w}ln_1.weight"])
    weight = t[f"{w}attn.c_attn.weight"].reshape(d, 3, h, -1)
    bias = t[f"{w}attn.c_attn.bias"].reshape(3, h, -1)
    return {
        **{name: weight[:, j] for j, name in enumerate(("query_DHK", "key_DGK", "value_DGK"))},
        **{name: bias[j] for j, name in enumerate(("query_HK", "key_GK", "value_GK"))},
        "out_HKD": t[f"{w}attn.c_proj.weight"].reshape(h, -1, d),
        "out_D": t[f"{w}attn.c_proj.bias"],
        "up_DF": t[f"{w}mlp.c_fc.weight"],
        "up_F": t[f"{w}mlp.c_fc.bias"],
        "down_FD": t[f"{w}mlp.c_proj.weight"],
        "down_D": t[f"{w}mlp.c_proj.bias"],
        "attention_norm/scale_D": t[f"{w}ln_1.weight"],
        "attention_norm/bias_D": t[f"{w}ln_1.bias"],
        "mlp_norm/scale_D": t[f"{w}ln_2.weight"],
        "mlp_norm/bias_D": t[f"{w}ln_2.bias"],
    }


def ends(t: Tensors) -> dict[str, Tensors]:
    if "transformer.wte.weight" in t:
        w = "transformer."
        return {
            "embed": {"token_VD": t[f"{w}wte.weight"], "position_PD": t[f"{w}wpe.weight"]},
            "head": {"norm/scale_D": t[f"{w}ln_f.weight"], "norm/bias_D": t[f"{w}ln_f.bias"]},
        }
    output = {"output_DV": t["lm_head.weight"].T} if "lm_head.weight" in t else {}
    return {
        "embed": {"token_VD": t["model.embed_tokens.weight"]},
        "head": {"norm/scale_D": t["model.norm.weight"], **output},
    }


@pytest.mark.parametrize("family", CONFIGS)
def test_places_are_those_of_the_formulas_and_fill_each_tensor_once(family: str):
    model = model_of(family)
    found, tensors = places(model, family), tensors_of(family, model)
    block = {"gpt2": gpt2_block, "phi3": phi3_block}.get(family, llama_block)
    sizes = model.num_heads, model.kv_heads
    expected = ends(tensors)
    expected |= {f"block_00{i}": block(tensors, i, *sizes) for i in range(model.num_layers)}
    assert found.keys() == expected.keys()
    back = {name: np.full_like(tensor, np.nan) for name, tensor in tensors.items()}
    for layer, its_places in found.items():
        assert its_places.keys() == expected[layer].keys()
        for name, place in ((name, place) for name, boxes in its_places.items() for place in boxes):
            parameter = place.to_parameter(tensors[place.tensor])
            assert parameter.shape == place.parameter.shape
            np.testing.assert_array_equal(parameter, place.values(expected[layer]), err_msg=name)
            assert np.isnan(back[place.tensor][place.index]).all(), "two parameters in one place"
            back[place.tensor][place.index] = place.to_box(parameter)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(back[name], tensor, err_msg=name)
