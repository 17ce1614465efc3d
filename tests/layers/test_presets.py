"""Models of `configs/models/` against their published numbers of parameters."""

from holmesjax import config as configs
from holmesjax.config import CHECKOUT, ModelConfig
from holmesjax.layers.model_layers import layers
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
