"""Models of `configs/models/` against their published sizes and settings of positions."""

import dataclasses
from typing import NamedTuple

from holmesjax import config as configs
from holmesjax.config import CHECKOUT, ModelConfig
from holmesjax.costs.parameters import parameter_counts
from tests.cases import cases
from tests.published_sizes import PUBLISHED

# Of models with experts. Their publishers say 12.9, 3.3, 22 and 37 billion; the second has 3.353,
# and the last 36.6 without its token table. Its biases of experts are no weights.
ACTIVE_BILLIONS = {
    **{"mixtral_8x7b": 12.9, "qwen3_30b_a3b": 3.4, "qwen3_235b_a22b": 22.2},
    "deepseek_v3": 37.6,
}


@cases("name, parameters", PUBLISHED)
def test_presets_have_their_published_numbers_of_parameters(name, parameters):
    """A tied token table counts once, and of Gemma 3 the text model alone counts."""
    model = ModelConfig(**configs.preset(name))
    total, active = parameter_counts(model)
    assert total == parameters
    assert round(active / 1e9, 1) == ACTIVE_BILLIONS.get(name, round(total / 1e9, 1))
    header = (CHECKOUT / f"configs/models/{name}.yaml").read_text()
    assert f"{parameters:,} parameters" in header


def test_every_preset_is_in_the_table():
    files = {path.stem for path in CHECKOUT.glob("configs/models/*.yaml")}
    assert files == {name for name, _ in PUBLISHED}


class Published(NamedTuple):
    """Positions, windows and norms of a published config.json."""

    context_length: int  # max_position_embeddings
    norm_epsilon: float = 1e-5
    rotary_base: float = 10_000.0
    rotary_scaling: dict | None = None
    window: int | None = None
    window_rotary_base: float | None = None


LINEAR = {"type": "linear", "factor": 8.0}


YARN = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
YARN |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}


def llama3(factor):
    scaling = {"type": "llama3", "factor": factor, "original_max_position_embeddings": 8192}
    turns = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return Published(131072, 1e-5, 5e5, scaling | turns)


# Of Qwen 2.5 and OLMo 2 the base models: those of Qwen 2.5 that follow instructions have 32768 in
# all sizes. Of Gemma 3 the text models; of Phi-4 mini the length of its first training.
PUBLISHED_SETTINGS = {
    "gpt2 gpt2_medium gpt2_large gpt2_xl": Published(1024),
    "gpt3_125m gpt3_350m gpt3_760m gpt3_1b3 gpt3_2b7 gpt3_6b7 gpt3_13b gpt3_175b": Published(2048),
    "llama2_7b llama2_13b llama2_70b": Published(4096),
    "llama3_8b llama3_70b": Published(8192, 1e-5, 5e5),
    "llama3_1_8b llama3_1_70b llama3_1_405b": llama3(8.0),
    "llama3_2_1b llama3_2_3b": llama3(32.0),
    "qwen2_5_0b5 qwen2_5_3b": Published(32768, 1e-6, 1e6),
    "qwen2_5_1b5 qwen2_5_7b": Published(131072, 1e-6, 1e6),
    "qwen2_5_14b qwen2_5_32b qwen2_5_72b": Published(131072, 1e-5, 1e6),
    "qwen3_0b6 qwen3_1b7 qwen3_4b qwen3_8b qwen3_14b qwen3_32b": Published(40960, 1e-6, 1e6),
    "qwen3_30b_a3b qwen3_235b_a22b": Published(40960, 1e-6, 1e6),
    "mixtral_8x7b": Published(32768, 1e-5, 1e6),
    "deepseek_v3": Published(163840, 1e-6, 1e4, YARN),
    "mistral_7b_v0_1": Published(32768, window=4096),
    "mistral_7b_v0_3": Published(32768, 1e-5, 1e6),
    "gemma2_2b gemma2_9b gemma2_27b": Published(8192, 1e-6, window=4096),
    "gemma3_270m gemma3_1b": Published(32768, 1e-6, 1e6, None, 512, 1e4),
    "gemma3_4b gemma3_12b gemma3_27b": Published(131072, 1e-6, 1e6, LINEAR, 1024, 1e4),
    "olmo2_7b olmo2_13b olmo2_32b": Published(4096, 1e-6, 5e5),
    "phi3_mini": Published(4096, window=2047),
    "phi4_mini": Published(4096),
    "phi4": Published(16384, 1e-5, 250_000.0),
}


def test_presets_have_their_published_lengths_and_rotary_settings():
    published = {
        name: settings for names, settings in PUBLISHED_SETTINGS.items() for name in names.split()
    }
    assert published.keys() == dict(PUBLISHED).keys()
    for name, wanted in published.items():
        model = ModelConfig(**configs.preset(name))
        found = {field: getattr(model, field) for field in Published._fields}
        if scaling := model.rotary_scaling:
            stated = {key: x for key, x in dataclasses.asdict(scaling).items() if x is not None}
            found["rotary_scaling"] = stated
        assert found == wanted._asdict(), name
