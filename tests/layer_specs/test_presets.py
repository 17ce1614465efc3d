"""Models of `configs/models/` against their published sizes and settings of positions."""

import dataclasses
from typing import NamedTuple

from holmesjax import config as configs
from holmesjax.config import CHECKOUT, ModelConfig
from holmesjax.layer_specs.model_layers import layers
from tests.cases import cases

PUBLISHED = [
    ("gpt2", 124_439_808),
    ("gpt2_medium", 354_823_168),
    ("gpt2_large", 774_030_080),
    ("gpt2_xl", 1_557_611_200),
    ("gpt3_125m", 125_226_240),
    ("gpt3_350m", 355_871_744),
    ("gpt3_760m", 760_300_032),
    ("gpt3_1b3", 1_315_723_264),
    ("gpt3_2b7", 2_651_553_280),
    ("gpt3_6b7", 6_658_404_352),
    ("gpt3_13b", 12_853_386_240),
    ("gpt3_175b", 174_604_259_328),
    ("llama2_7b", 6_738_415_616),
    ("llama2_13b", 13_015_864_320),
    ("llama2_70b", 68_976_648_192),
    ("llama3_8b", 8_030_261_248),
    ("llama3_70b", 70_553_706_496),
    ("llama3_1_8b", 8_030_261_248),
    ("llama3_1_70b", 70_553_706_496),
    ("llama3_1_405b", 405_853_388_800),
    ("llama3_2_1b", 1_235_814_400),
    ("llama3_2_3b", 3_212_749_824),
    ("qwen2_5_0b5", 494_032_768),
    ("qwen2_5_1b5", 1_543_714_304),
    ("qwen2_5_3b", 3_085_938_688),
    ("qwen2_5_7b", 7_615_616_512),
    ("qwen2_5_14b", 14_770_033_664),
    ("qwen2_5_32b", 32_763_876_352),
    ("qwen2_5_72b", 72_706_203_648),
    ("qwen3_0b6", 596_049_920),
    ("qwen3_1b7", 1_720_574_976),
    ("qwen3_4b", 4_022_468_096),
    ("qwen3_8b", 8_190_735_360),
    ("qwen3_14b", 14_768_307_200),
    ("qwen3_32b", 32_762_123_264),
    ("mistral_7b_v0_1", 7_241_732_096),
    ("mistral_7b_v0_3", 7_248_023_552),
    ("gemma2_2b", 2_614_341_888),
    ("gemma2_9b", 9_241_705_984),
    ("gemma2_27b", 27_227_128_320),
    ("gemma3_270m", 268_098_176),
    ("gemma3_1b", 999_885_952),
    ("gemma3_4b", 3_880_263_168),
    ("gemma3_12b", 11_766_034_176),
    ("gemma3_27b", 27_009_346_304),
    ("olmo2_7b", 7_298_617_344),
    ("olmo2_13b", 13_716_198_400),
    ("olmo2_32b", 32_234_279_936),
    ("phi3_mini", 3_821_079_552),
    ("phi4_mini", 3_836_021_760),
    ("phi4", 14_659_507_200),
]


@cases("name, parameters", PUBLISHED)
def test_presets_have_their_published_numbers_of_parameters(name, parameters):
    """A tied token table counts once, and of Gemma 3 the text model alone counts."""
    model = ModelConfig(**configs.preset(name))
    assert sum(kind.size() for kind in layers(model).values()) == parameters
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
    published = {name: own for names, own in PUBLISHED_SETTINGS.items() for name in names.split()}
    assert published.keys() == dict(PUBLISHED).keys()
    for name, wanted in published.items():
        model = ModelConfig(**configs.preset(name))
        found = {field: getattr(model, field) for field in Published._fields}
        if scaling := model.rotary_scaling:
            stated = {key: x for key, x in dataclasses.asdict(scaling).items() if x is not None}
            found["rotary_scaling"] = stated
        assert found == wanted._asdict(), name
