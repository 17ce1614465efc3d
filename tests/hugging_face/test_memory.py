"""An import and an export hold one layer at a time."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from holmesjax.config import ModelConfig
from holmesjax.hugging_face import config_json_export, safetensors_file
from holmesjax.hugging_face.tensors import places, shapes_of
from launch.__main__ import main
from tests.models.families import MODELS

ROOT = Path(__file__).parent.parent.parent
MIB = 2**20
# The allocator gives freed arrays back at once. Else it keeps some for each thread, as it happens.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def write_folder(where: Path, model: ModelConfig) -> list[float]:
    """A folder of zeros; returns the MiB of each layer."""
    where.mkdir()
    config = config_json_export.write(model, "llama", "float32")
    (where / "config.json").write_text(json.dumps(config))
    found = places(model, "llama")
    layers = [[place for each in layer.values() for place in each] for layer in found.values()]
    shapes = shapes_of(found)
    zeros = (np.zeros(shape, np.float32) for shape in shapes.values())
    safetensors_file.write(where / "model.safetensors", lambda _: "F32", shapes, zeros)
    return [sum(4 * place.parameter.size() for place in layer) / MIB for layer in layers]


def train_a_step(folder: Path, run_dir: Path) -> None:
    """A run with the weights of a folder, and the optimizer's state after its first step."""
    one = ["train.steps=1", "train.global_batch=1", "model.context_length=16"]
    one += ["log.report=false", "log.tensorboard=false"]
    topology = "topology=configs/topologies/one_cpu.yaml"
    assert main(["import", str(folder), "--to", str(run_dir), topology, *one]) == 0
    assert main(["train", str(run_dir)]) == 0


def test_an_import_and_an_export_hold_half_more_than_the_largest_layer(tmp_path):
    """Also an export of a trained run, whose checkpoint has twice as much besides."""
    model = dataclasses.replace(MODELS["llama"], vocab_size=256)
    write_folder(tmp_path / "small", model)
    large = dataclasses.replace(
        model, num_layers=2, width=512, vocab_size=49_152, mlp_width=512, tied_embeddings=True
    )
    layers_mib = write_folder(tmp_path / "large", large)
    assert sum(layers_mib) > 100
    train_a_step(tmp_path / "large", tmp_path / "trained")
    assert (tmp_path / "trained" / "checkpoints" / "step_00000001").is_dir()
    argv = [sys.executable, "-m", "tests.hugging_face.peak_child"]
    argv += [str(tmp_path / name) for name in ("small", "large", "trained")]
    env = {**os.environ, **ALLOCATOR}
    result = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    peaks = [(line[0], float(line[1])) for line in lines if line[0] in ("import", "export")]
    assert [verb for verb, _ in peaks] == ["import", "export", "import", "export", "export"]
    for verb, added_mib in peaks[2:]:
        assert added_mib < 1.5 * max(layers_mib), (verb, max(layers_mib), result.stdout)
