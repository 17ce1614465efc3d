"""Twelve small models, one of each family, with the tensors of `transformers` and golden logits.

The numbers are those that transformers 5.23.0 computed in float32 of these tensors, on a CPU. Each
tensor is random by its name. All models have 7 layers, so that the sixth of Gemma 3 sees all keys.
"""

import zlib
from typing import NamedTuple

import jax
import numpy as np

from holmesjax.config import (
    ExpertsConfig,
    LatentAttentionConfig,
    ModelConfig,
    RotaryScalingConfig,
)
from holmesjax.hugging_face.tensors import places, shapes_of
from holmesjax.layer_specs.kind import Parameter
from holmesjax.models.layer import statements

SIZES = {"num_layers": 7, "width": 32, "num_heads": 4, "vocab_size": 96, "context_length": 64}
GATED = {"norm": "rms_norm", "norm_epsilon": 1e-6, "activation": "swiglu", "mlp_width": 48}
SMALL = SIZES | GATED | {"num_kv_heads": 2, "head_dim": 8}
GEMMA = SMALL | {
    "head_dim": 16,
    "activation": "geglu",
    "norms": "both",
    "zero_centered_norms": True,
    "scaled_embedding": True,
    "tied_embeddings": True,
    "attention_scale": 24**-0.5,
    "window": 5,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
FAMILIES: dict[str, dict] = {
    "gpt2": SIZES | {"positions": "learned", "biases": "all", "tied_embeddings": True},
    "llama": SMALL
    | {
        "rotary_base": 5e5,
        "rotary_scaling": RotaryScalingConfig(
            type="llama3", original_max_position_embeddings=32, **LLAMA3
        ),
    },
    "qwen2": SMALL
    | {
        "rotary_base": 1e6,
        "rotary_scaling": RotaryScalingConfig(type="yarn", **YARN),
        "biases": "qkv",
    },
    "qwen3": SMALL | {"head_dim": 16, "rotary_base": 1e6, "qk_norm": "head"},
    "mistral": SMALL | {"pattern": ("window_block",), "window": 5},
    "gemma2": GEMMA
    | {
        "pattern": ("window_block", "block"),
        "attention_soft_cap": 50.0,
        "logit_soft_cap": 30.0,
    },
    "gemma3_text": GEMMA
    | {
        "pattern": ("window_block",) * 5 + ("block",),
        "qk_norm": "head",
        "rotary_base": 1e6,
        "window_rotary_base": 1e4,
        "rotary_scaling": RotaryScalingConfig(type="linear", factor=8.0),
    },
    "olmo2": SMALL
    | {"norm_epsilon": 1e-5, "rotary_base": 5e5, "norms": "after", "qk_norm": "all_heads"},
    "phi3": SMALL
    | {"norm_epsilon": 1e-5, "rotary_fraction": 0.5, "pattern": ("window_block",), "window": 6},
    "mixtral": SMALL
    | {
        "norm_epsilon": 1e-5,
        "rotary_base": 1e6,
        "pattern": ("expert_block",),
        "experts": ExpertsConfig(count=4, active=2),
    },
    "qwen3_moe": SMALL
    | {
        "head_dim": 16,
        "rotary_base": 1e6,
        "qk_norm": "head",
        "pattern": ("expert_block",),
        "experts": ExpertsConfig(count=6, active=3, width=20, normalized=False),
    },
    "deepseek_v3": {key: x for key, x in SMALL.items() if key != "num_kv_heads"}
    | {
        "head_dim": 14,
        "rotary_scaling": RotaryScalingConfig(
            type="yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            mscale=1.0,
            mscale_all_dim=1.0,
        ),
        "attention_scale": 14**-0.5 * (0.1 * np.log(4) + 1) ** 2,
        "latent_attention": LatentAttentionConfig(
            rank=12, query_rank=20, rotary_width=6, value_width=10
        ),
        "pattern": ("block", *["expert_block"] * 6),
        "experts": ExpertsConfig(
            count=8,
            active=3,
            width=20,
            shared_width=40,
            scores="sigmoid",
            scale=2.5,
            groups=4,
            active_groups=2,
            biased=True,
        ),
    },
}
MODELS = {name: ModelConfig(**settings) for name, settings in FAMILIES.items()}
TOKENS = (7 * np.arange(40) + 3) % 96


class Golden(NamedTuple):
    parameters: int
    last: tuple[float, ...]  # logits of ids 0 to 3 after the last token
    likeliest: int  # after the last token
    total: float  # of the absolute values of all logits
    loss: float  # of the next tokens


GOLDEN = {
    "gpt2": Golden(94112, (-1.4478, -1.2965, 1.1723, 0.0353), 72, 3751.137, 5.78889),
    "llama": Golden(60384, (-1.7722, 1.2426, -0.6240, -0.4324), 31, 3545.319, 5.11013),
    "qwen2": Golden(60832, (-0.4040, 1.5061, -1.0403, -0.0969), 9, 3651.217, 5.04016),
    "qwen3": Golden(82112, (-1.2953, 1.0673, -0.4558, 0.8910), 27, 3428.407, 5.50134),
    "mistral": Golden(60384, (-0.4178, -0.7591, 0.3166, -0.5325), 80, 3619.014, 5.16525),
    "gemma2": Golden(79264, (0.7519, -0.5803, -0.8199, 0.1379), 84, 3871.289, 5.36856),
    "gemma3_text": Golden(79488, (-0.1580, 0.3540, 0.2307, 0.3876), 70, 3813.477, 5.33485),
    "olmo2": Golden(60720, (-0.6590, 0.4690, -1.9093, -0.4447), 51, 3601.840, 5.34654),
    "phi3": Golden(60384, (-0.0332, -0.4606, -0.3170, 0.3893), 34, 3687.574, 5.53156),
    "mixtral": Golden(158048, (0.0296, 1.6920, 2.7798, 0.4557), 2, 3437.785, 5.38477),
    "qwen3_moe": Golden(131840, (-1.1099, -0.7170, -1.6657, 1.2725), 31, 3459.864, 5.56214),
    "deepseek_v3": Golden(159600, (0.5574, 0.5315, -2.0415, -0.8681), 76, 3622.089, 5.40890),
}


def tensors(family: str) -> dict[str, np.ndarray]:
    """The tensors of a model by name, float64."""
    shapes = shapes_of(places(MODELS[family], family))
    return {name: _tensor(name, shape, family) for name, shape in shapes.items()}


def _tensor(name: str, shape: tuple[int, ...], family: str) -> np.ndarray:
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    norms = ("norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight")
    is_one = name.endswith(norms) and not family.startswith("gemma")
    return rng.standard_normal(shape) * 0.2 + is_one


def params(family: str, arrays: dict[str, np.ndarray] | None = None) -> dict[str, dict]:
    """The same as parameters of our layers, float32; or other tensors of these names."""
    found: dict[str, dict] = {}
    arrays = arrays or tensors(family)
    for layer, stated in statements(MODELS[family]).items():
        own = places(MODELS[family], family)[layer]
        found[layer] = jax.tree.map(
            lambda parameter, own=own: _value(parameter, own, arrays), stated
        )
    return found


def _value(parameter: Parameter, own: dict, arrays: dict[str, np.ndarray]) -> np.ndarray:
    if parameter.name not in own:  # of the run
        return np.zeros(parameter.shape, np.float32)
    places_of = own[parameter.name]
    parts = [np.float32(place.to_parameter(arrays[place.tensor])) for place in places_of]
    return parts[0] if places_of[0].expert is None else np.stack(parts)
