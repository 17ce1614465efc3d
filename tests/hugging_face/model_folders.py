"""Folders of small models, as they are published."""

import dataclasses
import json
from pathlib import Path

from safetensors.numpy import save_file

from holmesjax.config import ModelConfig
from holmesjax.hugging_face import config_json_export
from tests.hugging_face.families import tensors_of
from tests.models.families import MODELS


def write_folder(where: Path, family: str, num_layers: int, dtype: str = "F32") -> ModelConfig:
    """A small random model of a family that reads bytes."""
    model = dataclasses.replace(
        MODELS[family], vocab_size=256, context_length=32, num_layers=num_layers
    )
    where.mkdir()
    name = {"F32": "float32", "BF16": "bfloat16"}[dtype]
    config = config_json_export.write(model, family, name) | {"eos_token_id": 0}
    (where / "config.json").write_text(json.dumps(config))
    save_file(tensors_of(family, model, dtype), where / "model.safetensors")
    return model
