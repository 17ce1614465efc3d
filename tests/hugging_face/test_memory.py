"""An import and an export hold one layer at a time."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from holmesjax.config import ModelConfig
from holmesjax.hugging_face import config_json_export, safetensors_file
from holmesjax.hugging_face.tensors import places
from tests.models.families import MODELS

ROOT = Path(__file__).parent.parent.parent
MIB = 2**20
NOISE_MIB = 12  # buffers, and pages that the allocator keeps


def write_folder(where: Path, model: ModelConfig) -> list[float]:
    """A folder of zeros; returns the MiB of each layer."""
    where.mkdir()
    config = config_json_export.write(model, "llama", "float32")
    (where / "config.json").write_text(json.dumps(config))
    layers = [list(layer.values()) for layer in places(model, "llama").values()]
    shapes = {place.tensor: place.shape for layer in layers for place in layer}
    zeros = (np.zeros(shape, np.float32) for shape in shapes.values())
    safetensors_file.write(where / "model.safetensors", "F32", shapes, zeros)
    return [sum(4 * place.parameter.size() for place in layer) / MIB for layer in layers]


def test_an_import_and_an_export_hold_half_more_than_the_largest_layer(tmp_path):
    model = dataclasses.replace(MODELS["llama"], vocab_size=256)
    write_folder(tmp_path / "small", model)
    large = dataclasses.replace(
        model, width=512, vocab_size=49_152, mlp_width=512, tied_embeddings=True
    )
    layers_mib = write_folder(tmp_path / "large", large)
    assert sum(layers_mib) > 100
    argv = [sys.executable, "-m", "tests.hugging_face.peak_child"]
    argv += [str(tmp_path / name) for name in ("small", "large")]
    result = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    peaks = [(line[0], float(line[1])) for line in lines if line[0] in ("import", "export")]
    for verb, added_mib in peaks[2:]:
        assert added_mib < 1.5 * max(layers_mib) + NOISE_MIB, (verb, max(layers_mib), result.stdout)
