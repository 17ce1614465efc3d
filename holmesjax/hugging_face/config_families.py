"""The families of models that have a format of Hugging Face, and what their keys mean. No JAX."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holmesjax.config.rotary import ORIGINAL

# Setting -> key, of a Llama and those like it, and of GPT-2.
LLAMA_KEYS = {
    "num_layers": "num_hidden_layers",
    "width": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp_width": "intermediate_size",
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
    "activation": "hidden_act",
}
GEMMA_KEYS = {
    **LLAMA_KEYS,
    "activation": "hidden_activation",
    "attention_soft_cap": "attn_logit_softcapping",
    "logit_soft_cap": "final_logit_softcapping",
}
GPT2_KEYS = {
    "num_layers": "n_layer",
    "width": "n_embd",
    "num_heads": "n_head",
    "mlp_width": "n_inner",
    "vocab_size": "vocab_size",
    "context_length": "n_positions",
    "norm_epsilon": "layer_norm_epsilon",
    "tied_embeddings": "tie_word_embeddings",
    "activation": "activation_function",
}
# A value of theirs -> ours, and the value that is written.
GATED = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"}
UNGATED = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_erf"}

INTEGERS = (
    *("num_layers", "width", "num_heads", "num_kv_heads", "head_dim", "mlp_width", "vocab_size"),
    "context_length",
)
MAY_BE_NULL = ("num_kv_heads", "head_dim", "mlp_width", "attention_soft_cap", "logit_soft_cap")

# Keys with the values that we can compute, of all families and of some.
ANY: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False, None),
    "is_encoder_decoder": (False, None),
    # Of all classes of transformers 5: attention to later tokens, and values by layer.
    "is_causal": (True,),
    "per_layer_config": (None, {}),
    "compression_config": (None, {}),  # an older name of quantization_config
}
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
NO_EXPERTS: dict[str, tuple[Any, ...]] = {key: (None, 0) for key in EXPERT_COUNTS}
NO_BIAS = {"attention_bias": (False, None)}
ROTATES_ALL = {"partial_rotary_factor": (1, 1.0, None)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """The meaning of a config.json of one `model_type`."""

    architecture: str
    keys: Mapping[str, str] = field(default_factory=lambda: LLAMA_KEYS)
    defaults: Mapping[str, Any]  # of keys that are absent
    settings: Mapping[str, Any]  # that all models of the family have
    computes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # besides `ANY`
    # Which layers have a window: none, all where there is a window, or those in a list.
    windows: str = "none"
    # Setting of `model.experts` -> key, of a family with experts. A key that it lacks has the
    # setting's default; without the width, that of a feed-forward is the width of an expert.
    experts: Mapping[str, str] = field(default_factory=dict)
    expert_settings: Mapping[str, Any] = field(default_factory=dict)  # that all of its experts have


RMS = {"norm": "rms_norm"}
_llama = {
    **{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008},
    **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None},
    **{"head_dim": None, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    **{"tie_word_embeddings": False, "hidden_act": "silu", "rope_theta": 10_000.0},
}
_qwen2 = {
    **_llama,
    **{"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32},
    **{"max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096},
    **{"max_window_layers": 28},
}
_gemma2 = {
    **{key: value for key, value in _llama.items() if key != "hidden_act"},
    **{"vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216},
    **{"num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4},
    **{"head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True},
    **{"hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096},
    **{"query_pre_attn_scalar": 256, "final_logit_softcapping": 30.0},
}
_gemma = {**RMS, "norms": "both", "zero_centered_norms": True, "scaled_embedding": True}

FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        keys=GPT2_KEYS,
        defaults={
            **{"vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None},
            **{"n_positions": 1024, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
            **{"activation_function": "gelu_new"},
        },
        settings={"norm": "layer_norm", "positions": "learned", "biases": "all"},
        computes={
            "scale_attn_by_inverse_layer_idx": (False, None),
            "reorder_and_upcast_attn": (False, None),
            "scale_attn_weights": (True,),
        },
    ),
    "llama": Family(
        architecture="LlamaForCausalLM",
        defaults=_llama,
        settings=RMS,
        computes={**NO_BIAS, **ROTATES_ALL, "mlp_bias": (False, None)},
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        defaults={
            **_llama,
            **{"intermediate_size": 14336, "num_key_value_heads": 8},
            **{"max_position_embeddings": 131072, "sliding_window": 4096},
        },
        settings=RMS,
        computes={**NO_BIAS, **ROTATES_ALL},
        windows="all",
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        defaults=_qwen2,
        settings={**RMS, "biases": "qkv"},
        computes=ROTATES_ALL,
        windows="listed",
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        defaults={**_qwen2, "head_dim": 128},
        settings={**RMS, "qk_norm": "head"},
        computes={**NO_BIAS, **ROTATES_ALL},
        windows="listed",
    ),
    "gemma2": Family(
        architecture="Gemma2ForCausalLM",
        keys=GEMMA_KEYS,
        defaults={**_gemma2, "attn_logit_softcapping": 50.0},
        settings=_gemma,
        computes={**NO_BIAS, **ROTATES_ALL, "use_bidirectional_attention": (False, None)},
        windows="listed",
    ),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        # The class reads a cap of scores and never uses it.
        keys={key: x for key, x in GEMMA_KEYS.items() if key != "attention_soft_cap"},
        defaults={
            **_gemma2,
            **{"vocab_size": 262208, "max_position_embeddings": 131072},
            **{"final_logit_softcapping": None, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
        },
        settings={**_gemma, "qk_norm": "head"},
        computes={**NO_BIAS, **ROTATES_ALL, "use_bidirectional_attention": (False, None)},
        windows="listed",
    ),
    "olmo2": Family(
        architecture="Olmo2ForCausalLM",
        defaults={**_llama, "vocab_size": 50304, "rms_norm_eps": 1e-5},
        settings={**RMS, "norms": "after", "qk_norm": "all_heads"},
        computes={**NO_BIAS, **ROTATES_ALL},
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        defaults={
            **_llama,
            **{"vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192},
            **{"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "sliding_window": None},
            **{ORIGINAL: 4096, "partial_rotary_factor": 1.0},
        },
        settings=RMS,
        computes=NO_BIAS,
        windows="all",
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        defaults={
            **_llama,
            **{"intermediate_size": 14336, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
            **{"max_position_embeddings": 131072, "rope_theta": 1e6},
            **{"num_local_experts": 8, "num_experts_per_tok": 2},
        },
        settings=RMS,
        computes={
            **NO_BIAS,
            **ROTATES_ALL,
            "sliding_window": (None,),
            "router_jitter_noise": (0.0, None),
        },
        experts={"count": "num_local_experts", "active": "num_experts_per_tok"},
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        defaults={
            **_llama,
            **{"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144},
            **{"num_hidden_layers": 24, "num_key_value_heads": 4},
            **{"max_position_embeddings": 32768, "num_experts": 128, "num_experts_per_tok": 8},
            **{"moe_intermediate_size": 768, "norm_topk_prob": False},
            **{"decoder_sparse_step": 1, "mlp_only_layers": None},
        },
        settings={**RMS, "qk_norm": "head"},
        computes={**NO_BIAS, **ROTATES_ALL, "use_sliding_window": (False, None)},
        experts={
            "count": "num_experts",
            "active": "num_experts_per_tok",
            "width": "moe_intermediate_size",
            "normalized": "norm_topk_prob",
        },
    ),
    "deepseek_v3": Family(
        architecture="DeepseekV3ForCausalLM",
        keys={key: x for key, x in LLAMA_KEYS.items() if key not in ("num_kv_heads", "head_dim")},
        defaults={
            **{
                key: x
                for key, x in _llama.items()
                if key not in ("num_key_value_heads", "head_dim")
            },
            **{"vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432},
            **{"num_hidden_layers": 61, "num_attention_heads": 128},
            **{"max_position_embeddings": 4096, "first_k_dense_replace": 3},
            **{"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64},
            **{"qk_nope_head_dim": 128, "v_head_dim": 128},
            **{"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8},
            **{"moe_intermediate_size": 2048, "norm_topk_prob": True},
            **{"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4},
        },
        settings=RMS,
        computes={
            **NO_BIAS,
            **ROTATES_ALL,
            "rms_norm_eps": (1e-6,),  # that of the norms of latents, whatever the others have
            "rope_interleave": (True, None),
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
            "moe_layer_freq": (1,),
        },
        experts={
            "count": "n_routed_experts",
            "active": "num_experts_per_tok",
            "width": "moe_intermediate_size",
            "normalized": "norm_topk_prob",
            "scale": "routed_scaling_factor",
            "groups": "n_group",
            "active_groups": "topk_group",
        },
        expert_settings={"scores": "sigmoid", "biased": True},
    ),
}
