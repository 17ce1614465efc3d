"""A model's list of layers: names, kinds in turns, and mistakes in the names of kinds."""

import dataclasses

import pytest

from holmesjax.config import ModelConfig
from holmesjax.errors import ConfigError
from holmesjax.layer_specs.kind import Kind
from holmesjax.layer_specs.model_layers import layers
from holmesjax.layer_specs.transformer import block_spec

MODEL = ModelConfig(num_layers=5, width=8, num_heads=2, context_length=4)


def wide_block(model: ModelConfig) -> Kind:
    return dataclasses.replace(block_spec(model), name="wide_block")


def test_kinds_repeat_in_turns_and_names_count_layers():
    pattern = ("block", "block", f"{__name__}:wide_block")
    found = layers(dataclasses.replace(MODEL, pattern=pattern))
    assert {name: kind.name for name, kind in found.items()} == {
        "embed": "embed",
        "block_000": "block",
        "block_001": "block",
        "block_002": "wide_block",
        "block_003": "block",
        "block_004": "block",
        "head": "head",
    }


@pytest.mark.parametrize(
    "name", ["blok", "head", "no.such:kind", f"{__name__}:no_kind", "tests.layer_specs"]
)
def test_a_name_of_no_kind_is_refused_with_those_that_there_are(name):
    with pytest.raises(ConfigError, match=r"model\.pattern") as error:
        layers(dataclasses.replace(MODEL, pattern=(name,)))
    assert "use block" in str(error.value)
