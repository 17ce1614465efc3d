"""A tiny model of each family as its config.json, and random weights in a folder."""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from holmesjax.config import ModelConfig
from holmesjax.hugging_face import config_json
from holmesjax.hugging_face.safetensors_file import DTYPES
from holmesjax.hugging_face.tensors import WIDE, places, shapes_of

# All products of sizes differ, so that no wrong reshape has the right shape.
D, H, G, K, F, V, P = 40, 4, 2, 16, 48, 96, 64
_llama = dict(
    vocab_size=V,
    hidden_size=D,
    intermediate_size=F,
    num_hidden_layers=7,
    num_attention_heads=H,
    num_key_value_heads=G,
    head_dim=K,
    max_position_embeddings=P,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    rope_theta=10_000.0,
)
_gemma = dict(_llama, tie_word_embeddings=True, sliding_window=5, query_pre_attn_scalar=24)
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": dict(
        vocab_size=V,
        n_embd=D,
        n_layer=7,
        n_head=H,
        n_inner=F,
        n_positions=P,
        layer_norm_epsilon=1e-5,
        activation_function="gelu_new",
        tie_word_embeddings=True,
    ),
    "llama": dict(
        _llama,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        rope_scaling=dict(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "mistral": dict(_llama, sliding_window=5),
    "qwen2": dict(
        {key: value for key, value in _llama.items() if key != "head_dim"},
        rope_theta=1e6,
        rope_scaling=dict(type="yarn", factor=4.0, original_max_position_embeddings=16),
    ),
    "qwen3": dict(_llama, rope_theta=1e6),
    "gemma2": _gemma,
    "gemma3_text": dict(
        _gemma,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling=dict(rope_type="linear", factor=8.0),
    ),
    "olmo2": dict(_llama, rope_theta=5e5),
    "phi3": dict(
        {key: value for key, value in _llama.items() if key != "head_dim"},
        partial_rotary_factor=0.6,
        sliding_window=6,
    ),
    "mixtral": dict(_llama, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "qwen3_moe": dict(
        _llama,
        moe_intermediate_size=28,
        num_experts=6,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
    ),
    "deepseek_v3": dict(
        {key: x for key, x in _llama.items() if key not in ("head_dim", "num_key_value_heads")},
        first_k_dense_replace=2,
        kv_lora_rank=12,
        q_lora_rank=20,
        qk_rope_head_dim=6,
        qk_nope_head_dim=8,
        v_head_dim=10,
        n_routed_experts=8,
        n_shared_experts=2,
        num_experts_per_tok=3,
        moe_intermediate_size=28,
        n_group=4,
        topk_group=2,
        rope_scaling=dict(
            type="yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            mscale=1.0,
            mscale_all_dim=1.0,
        ),
    ),
}


def config_of(family: str) -> dict[str, Any]:
    ids = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    return dict(CONFIGS[family], model_type=family, **ids)


def model_of(family: str) -> ModelConfig:
    read = config_json.ConfigJson(where=family, family=family, values=config_of(family))
    return ModelConfig(**read.settings())


def tensors_of(family: str, model: ModelConfig, dtype: str = "F32") -> dict[str, np.ndarray]:
    """Random tensors by name, in Hugging Face's shapes: functions of their names alone."""
    found = {}
    for name, shape in shapes_of(places(model, family)).items():
        seed = zlib.crc32(name.encode())
        values = np.random.default_rng(seed).standard_normal(shape) * 0.2
        is_scale = name.endswith(("norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight"))
        values += is_scale and not family.startswith("gemma")
        found[name] = values.astype(DTYPES["F32" if name.endswith(WIDE) else dtype])
    return found


def write_config(folder: Path, family: str, **changes: Any) -> None:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text(json.dumps({**config_of(family), **changes}))
