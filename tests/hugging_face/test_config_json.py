"""A config.json means the settings that it should, and so does the one that is written."""

import dataclasses
from typing import Any

import pytest

from holmesjax.config import ModelConfig
from holmesjax.config.rotary import ORIGINAL
from holmesjax.errors import ConfigError, HolmesError
from holmesjax.hugging_face import config_json, config_json_export
from holmesjax.hugging_face.config_json import ConfigJson
from holmesjax.hugging_face.config_json_export import canonical
from holmesjax.hugging_face.export import kept_dtype
from tests.cases import cases
from tests.hugging_face.families import CONFIGS, config_of, model_of


def read(family: str, **values: Any) -> dict[str, Any]:
    return ConfigJson(where="config.json", family=family, values=values).settings()


# V, D, F, n, H, G, K, epsilon, context and whether the table is tied, of the class in transformers.
DEFAULTS = {
    "gpt2": (50257, 768, 3072, 12, 12, 12, 64, 1e-5, 1024, True),
    "llama": (32000, 4096, 11008, 32, 32, 32, 128, 1e-6, 2048, False),
    "qwen2": (151936, 4096, 22016, 32, 32, 32, 128, 1e-6, 32768, False),
    "qwen3": (151936, 4096, 22016, 32, 32, 32, 128, 1e-6, 32768, False),
    "mistral": (32000, 4096, 14336, 32, 32, 8, 128, 1e-6, 131072, False),
    "gemma2": (256000, 2304, 9216, 26, 8, 4, 256, 1e-6, 8192, True),
    "gemma3_text": (262208, 2304, 9216, 26, 8, 4, 256, 1e-6, 131072, True),
    "olmo2": (50304, 4096, 11008, 32, 32, 32, 128, 1e-5, 2048, False),
    "phi3": (32064, 3072, 8192, 32, 32, 32, 96, 1e-5, 4096, False),
    "mixtral": (32000, 4096, 14336, 32, 32, 8, 128, 1e-5, 131072, False),
    "qwen3_moe": (151936, 2048, 6144, 24, 32, 4, 64, 1e-6, 32768, False),
    "deepseek_v3": (129280, 7168, 18432, 61, 128, 128, 192, 1e-6, 4096, False),
}
# Those besides that a class has otherwise than ours.
OTHERS = {
    "mistral": {"window": 4096, "pattern": ["window_block"]},
    "gemma2": {
        **{"attention_soft_cap": 50.0, "logit_soft_cap": 30.0, "attention_scale": 1 / 16},
        **{"pattern": ["window_block", "block"], "window": 4096},
    },
    "gemma3_text": {
        **{"logit_soft_cap": None, "rotary_base": 1e6, "window_rotary_base": 1e4},
        **{"pattern": [*["window_block"] * 5, "block"], "window": 4096},
    },
    "phi3": {"rotary_base": 1e4},
    "mixtral": {"rotary_base": 1e6, "experts": {"count": 8, "active": 2}},
    "qwen3_moe": {
        **{"rotary_base": 1e4, "pattern": ["expert_block"]},
        "experts": {"count": 128, "active": 8, "width": 768, "normalized": False},
    },
    "deepseek_v3": {
        "attention_scale": 192**-0.5,
        "latent_attention": {
            **{"rank": 512, "query_rank": 1536, "rotary_width": 64, "value_width": 128},
        },
        "pattern": [*["block"] * 3, *["expert_block"] * 58],
        "experts": {
            **{"count": 256, "active": 8, "width": 2048, "normalized": True, "scale": 2.5},
            **{"groups": 8, "active_groups": 4, "shared_width": 2048, "scores": "sigmoid"},
            "biased": True,
        },
    },
}


@pytest.mark.parametrize("family", CONFIGS)
def test_an_absent_key_means_the_default_of_the_class(family: str):
    settings = read(family)
    model = ModelConfig(**settings)
    found = (
        *(model.vocab_size, model.width, model.feed_forward_width, model.num_layers),
        *(model.num_heads, model.kv_heads, model.head_width),
        *(model.norm_epsilon, model.context_length, model.tied_embeddings),
    )
    assert found == DEFAULTS[family]
    assert {name: settings[name] for name in OTHERS.get(family, {})} == OTHERS.get(family, {})


@pytest.mark.parametrize("family", CONFIGS)
def test_what_is_written_means_the_same_in_either_spelling_of_rotary_positions(family: str):
    model = model_of(family)
    written = config_json_export.write(model, family, "bfloat16")
    old = {k: x for k, x in written.items() if k != "rope_parameters"}
    new = {k: x for k, x in written.items() if k not in ("rope_theta", "rope_scaling")}
    for values in (written, old, new):
        back = ModelConfig(**read(family, **values))
        assert canonical(back) == canonical(model)
    defaults = config_json.FAMILIES[family].defaults
    assert defaults.keys() - written.keys() <= {ORIGINAL}, "every key is written"


def test_a_file_with_both_spellings_means_what_transformers_makes_of_it():
    """The old section stands before the new one, and takes no base from it."""
    both = {
        "rope_theta": 77.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    }
    found = read("llama", **both)
    assert (found["rotary_base"], found["rotary_scaling"]["factor"]) == (77.0, 4.0)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_family_is_found_for_each_model(family: str):
    found = config_json_export.family_of(model_of(family))
    assert canonical(
        ModelConfig(**read(found, **config_json_export.write(model_of(family), found, "x")))
    )
    same = {"phi3": "phi3", "mistral": "mistral"}
    assert found == same.get(family, family)


def test_a_family_that_would_read_back_no_model_at_all_is_refused():
    """GPT-2 has no width of its heads, so their number would have to divide the model's."""
    heads = {"width": 32, "num_heads": 3, "num_kv_heads": 3, "head_dim": 8}
    model = dataclasses.replace(model_of("gpt2"), **heads)
    for refuse in (
        lambda: config_json_export.write(model, "gpt2", "float32"),
        lambda: config_json_export.family_of(model),
    ):
        with pytest.raises(ConfigError, match=r"model\.width: must be a multiple of .* = 3: 32"):
            refuse()


@pytest.mark.parametrize("family", CONFIGS)
def test_an_unchanged_model_keeps_the_keys_with_which_it_came(family: str):
    values = config_of(family) | {"an_unknown_key": [1]}
    kept = ConfigJson(where="config.json", family=family, values=values)
    model = ModelConfig(**kept.settings())
    exported = config_json_export.exported(model, kept, family, "bfloat16")
    assert exported | values == exported
    by_part = dataclasses.replace(kept, values=values | {"dtype": {"text_config": "bfloat16"}})
    assert kept_dtype(by_part) == "float32"
    if family != "gpt2":  # whose positions are an array
        shorter = dataclasses.replace(model, context_length=8)
        assert config_json_export.exported(shorter, kept, family, "bfloat16") == exported
        longer = dataclasses.replace(model, context_length=1 << 17)
        again = config_json_export.exported(longer, kept, family, "bfloat16")
        key = config_json.FAMILIES[family].keys["context_length"]
        assert (again[key], again["an_unknown_key"]) == (1 << 17, [1])
    wider = dataclasses.replace(model, vocab_size=100)
    changed = config_json_export.exported(wider, kept, family, "bfloat16")
    key = config_json.FAMILIES[family].keys["vocab_size"]
    assert (changed[key], changed["an_unknown_key"], changed["eos_token_id"]) == (100, [1], 2)


def test_code_beside_a_model_counts_where_its_class_is_another_than_the_familys():
    """Phi-3, Phi-4-mini and DeepSeek-V3 are published with copies of classes of transformers."""
    published = {
        "phi3": {
            **{"AutoConfig": "configuration_phi3.Phi3Config", "AutoTokenizer": "Xenova/gpt-4o"},
            "AutoModelForCausalLM": "org/name--modeling_phi3.Phi3ForCausalLM",
        },
        "deepseek_v3": {
            "AutoConfig": "configuration_deepseek.DeepseekV3Config",
            "AutoModel": "modeling_deepseek.DeepseekV3Model",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
        },
    }
    for family, classes in published.items():
        values = config_of(family) | {"auto_map": classes}
        kept = ConfigJson(where="config.json", family=family, values=values)
        model = ModelConfig(**kept.settings())
        assert canonical(model) == canonical(model_of(family))
        exported = config_json_export.exported(model, kept, family, "bfloat16")
        assert "auto_map" not in exported, "it has no such files"


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"attention_bias": True}, "attention_bias"),
    ("qwen3", {"attention_bias": True}, "attention_bias"),
    ("llama", {"mlp_bias": True}, "mlp_bias"),
    (
        "qwen2",
        {ORIGINAL: 8, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 16}},
        ORIGINAL,
    ),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("llama", {"compression_config": {"quant_method": "x"}}, "compression_config"),
    ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    (
        "deepseek_v3",
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
        "weight_block_size",
    ),
    ("llama", {"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
    ("phi3", {"auto_map": {"AutoModelForCausalLM": "x.Phi3SmallForCausalLM"}}, "auto_map"),
    (
        "phi3",
        {"auto_map": {"AutoModelForCausalLM": "x.Phi3ForCausalLM", "AutoConfig": "x.OtherConfig"}},
        "auto_map",
    ),
    ("llama", {"auto_map": "x.LlamaForCausalLM"}, "auto_map"),
    ("llama", {"is_causal": False}, "is_causal"),
    ("qwen3", {"per_layer_config": {"1": {"sliding_window": 8}}}, "per_layer_config"),
    ("qwen2", {"num_experts": 8}, "num_experts"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type"),
    ("llama", {"rope_parameters": {"rope_type": "axial"}}, "rope_parameters.rope_type"),
    ("phi3", {"rope_scaling": {"type": "su"}}, "rope_scaling.rope_type"),
    ("phi3", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_scaling.rope_type"),
    # What transformers 5.23 and 4.57 make of these is not the same, or no more than a default.
    ("llama", {"rope_scaling": {"type": "linear", "rope_type": "default"}}, "rope_scaling.type"),
    ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 8.0}}, "rope_scaling.type"),
    ("gemma3_text", {"rope_parameters": {"rope_theta": 5e5}}, "rope_parameters"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 5e5}}}, "rope_parameters"),
    ("llama", {"rope_scaling": [1]}, "rope_scaling"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ("llama", {"hidden_act": "relu"}, "hidden_act"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("mistral", {"layer_types": ["full_attention"] * 32}, "layer_types"),
    ("gemma2", {"layer_types": ["full_attention"]}, "layer_types"),
    ("gemma2", {"layer_types": ["chunked_attention"] * 26}, "layer_types"),
    ("llama", {"hidden_size": "4096"}, "hidden_size"),
    ("llama", {"hidden_size": 4096.0}, "hidden_size"),
    ("llama", {"hidden_size": True}, "hidden_size"),
    ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ("llama", {"rms_norm_eps": 0}, "rms_norm_eps"),
    ("llama", {"rms_norm_eps": 10**400}, "rms_norm_eps"),
    ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings"),
    ("llama", {"rope_theta": "1e4"}, "rope_theta"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
    ("mixtral", {"sliding_window": 4096}, "sliding_window"),
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
    ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok"),
    ("mixtral", {"num_local_experts": 8, "num_experts": 4}, "num_local_experts"),
    ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
    ("qwen3_moe", {"mlp_only_layers": ["1"]}, "mlp_only_layers"),
    ("qwen3_moe", {"norm_topk_prob": "yes"}, "norm_topk_prob"),
    ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": True}, "num_experts_per_tok"),
    ("qwen3_moe", {"num_experts": 0}, "num_experts"),
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave"),
    ("deepseek_v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps"),
    ("deepseek_v3", {"num_key_value_heads": 8}, "num_key_value_heads"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
    ("deepseek_v3", {"kv_lora_rank": None}, "kv_lora_rank"),
    ("deepseek_v3", {"num_nextn_predict_layers": "1"}, "num_nextn_predict_layers"),
    ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace"),
]


@cases("family, values, key", REFUSED)
def test_what_cannot_be_computed_is_refused_with_its_key_and_value(
    family: str, values: dict[str, Any], key: str
):
    with pytest.raises(ConfigError) as error:
        read(family, **values)
    assert error.value.where.startswith("config.json: ")
    assert key in error.value.where
    assert error.value.found


def test_a_scaling_without_a_factor_has_that_of_its_lengths_unless_its_class_refuses_it():
    turns = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    lengths = {"original_max_position_embeddings": 512}
    found = read("llama", rope_parameters={"rope_type": "yarn", **lengths})
    assert found["rotary_scaling"]["factor"] == 2048 / 512
    found = read("llama", rope_parameters={"rope_type": "llama3", **lengths, **turns})
    with pytest.raises(HolmesError, match=r"rotary_scaling.factor: is missing"):
        ModelConfig(**found)


def test_settings_of_training_alone_do_not_stand_in_the_way_of_an_export():
    model = dataclasses.replace(model_of("qwen3_moe"), z_loss_multiplier=1e-4)
    losses = {"balance_loss": 0.01, "router_z_loss": 1e-3, "capacity_factor": 2.0}
    trained = dataclasses.replace(model, experts=dataclasses.replace(model.experts, **losses))
    assert config_json_export.write(trained, "qwen3_moe", "x") == config_json_export.write(
        model_of("qwen3_moe"), "qwen3_moe", "x"
    )


def test_layers_with_experts_are_those_of_both_keys():
    """And a number of experts has the two names that versions of `transformers` give it."""
    assert model_of("qwen3_moe").pattern == ("block", "expert_block", "block", "block")
    newer = {"num_local_experts": 6, "num_hidden_layers": 2, "mlp_only_layers": [0]}
    found = read("qwen3_moe", **newer)
    assert (found["experts"]["count"], found["pattern"]) == (6, ["block", "expert_block"])


def test_another_family_is_refused(tmp_path):
    for text in ('{"model_type": "bert"}', "{}", '{"model_type": ["llama"]}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match="of a family that is not supported"):
            ConfigJson.load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(HolmesError, match="must be an object"):
        ConfigJson.load(tmp_path)


def test_a_model_that_a_family_cannot_hold_is_refused_with_its_setting():
    model = dataclasses.replace(model_of("llama"), activation="gelu")
    found = r"model\.activation: .* of a llama\n  found: gelu\n  fix: use geglu or swiglu"
    with pytest.raises(ConfigError, match=found):
        config_json_export.write(model, "llama", "float32")
    each = r"found: gpt2: model\.\w+ [^;]*; llama, mistral, [^;]*: model\.activation gelu\n"
    with pytest.raises(ConfigError, match=each):
        config_json_export.family_of(model)
    biased = {"bias_rate": 0.001}, r"experts\.bias_rate: .* of a mixtral\n  found: 0.001"
    latent = {"latent_width": 8}, r"experts\.latent_width"
    for changes, message in (biased, latent, ({"scale": 2.5}, r"experts\.scale")):
        own = model_of("mixtral")
        own = dataclasses.replace(own, experts=dataclasses.replace(own.experts, **changes))
        with pytest.raises(ConfigError, match=rf"model\.{message}"):
            config_json_export.write(own, "mixtral", "float32")
    for other_family, family, where in (
        ("qwen3", "qwen3_moe", "experts"),
        ("qwen3_moe", "deepseek_v3", "latent_attention"),
    ):
        with pytest.raises(ConfigError, match=rf"model\.{where}: is missing: a {family} has"):
            config_json_export.write(model_of(other_family), family, "float32")
    windows = model_of("mistral")
    with pytest.raises(ConfigError, match=r"model\.pattern"):
        config_json_export.write(windows, "llama", "float32")
    gated = dataclasses.replace(model_of("qwen3"), qk_norm="none")
    with pytest.raises(ConfigError, match=r"gpt2\n  found: swiglu\n  fix: use gelu"):
        config_json_export.write(gated, "gpt2", "float32")
