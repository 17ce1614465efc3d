"""A folder becomes a run, trains on two plans, and leaves as a folder of the same model."""

import dataclasses
import io
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from holmesjax import job as jobs
from holmesjax.checkpoints import manifest, restoring
from holmesjax.config import ModelConfig
from holmesjax.liveness import lease
from holmesjax.models.layer import init_params
from holmesjax.parallel.mesh import build_meshes
from holmesjax.trainer import Trainer
from holmesjax.training_setup import make_chunks
from launch.__main__ import main
from tests import one_device
from tests.hugging_face import transformers_child
from tests.hugging_face.families import tensors_of, write_config
from tests.hugging_face.model_folders import write_folder
from tests.models import family_oracle
from tests.models.families import MODELS

SLOW = pytest.mark.exhaustive
# Layers of a family, the one with the most settings first; others in make test-all.
FAMILIES = [
    pytest.param("gemma2", 2, marks=[pytest.mark.one_version]),
    *(pytest.param(family, 7, marks=[SLOW]) for family in MODELS if family != "gemma2"),
]
TOKENS = (7 * np.arange(32) + 3) % 256
NEAR = 1e-4
PLANS = [
    {"topology": "configs/topologies/ib_roce.yaml", "parallel.stages": 2, "parallel.data": 2},
    {"topology": "configs/topologies/one_node.yaml", "parallel.stages": 1, "parallel.data": 1},
]


def logits_of(model: ModelConfig, params: dict, tokens: np.ndarray = TOKENS) -> np.ndarray:
    """The logits of tokens, [L, V]."""
    return np.asarray(one_device.logits_of(params, model, tokens[None])[0])


def refuse_damaged(source: Path, run_dir: Path, capsys) -> None:
    """An import that meets a NaN in its second layer leaves no file behind."""
    path = source / "model.safetensors"
    whole, tensors = path.read_bytes(), load_file(path)
    name = next(name for name in tensors if ".0." in name)
    tensors[name].flat[3] = np.nan
    save_file(tensors, path)
    assert main(["import", str(source), "--to", str(run_dir)]) == 2
    assert f"{name} that are NaN or infinite" in capsys.readouterr().err
    assert {left.name for left in run_dir.rglob("*") if left.is_file()} <= {lease.EPOCH}
    path.write_bytes(whole)


@pytest.mark.parametrize("family, num_layers", FAMILIES)
def test_a_model_comes_trains_on_two_plans_and_leaves(family, num_layers, tmp_path, capsys):
    source, run_dir, out = tmp_path / "in", tmp_path / "run", tmp_path / "out"
    model = write_folder(source, family, num_layers)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/digits.txt").write_text("0123456789" * 1000)
    settings = [f"data.corpus={tmp_path / 'corpus'}", "data.validation_fraction=0"]
    settings += ["log.report=false", "log.tensorboard=false"]
    refuse_damaged(source, run_dir, capsys)
    assert main(["import", str(source), "--to", str(run_dir), *settings]) == 0
    shared = {"parallel.tensor": 2, "train.global_batch": 8, "optimizer.learning_rate": 1e-3}
    for plan, steps in zip(PLANS, (10, 12), strict=True):
        # A microbatch of two sequences for each replica.
        overrides = shared | plan | {"train.steps": steps, "parallel.microbatches": 2}
        told = io.StringIO()
        trainer = Trainer(run_dir, overrides, told)
        records = trainer.train()
        assert f"resuming after step {steps - 2 if steps > 10 else 0}" in told.getvalue()
    assert records[-1]["loss"] < records[0]["loss"]
    arguments = ["--out", str(out), "--dtype", "float32", "--max-shard-size", "100kB"]
    assert main(["export", str(run_dir), *arguments]) == 0
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["eos_token_id"]) == (family, 0)
    tensors = {}
    for path in out.glob("*.safetensors"):
        tensors |= load_file(path)
    [newest, *_] = manifest.find(run_dir)
    found = logits_of(model, restoring.restore_params(newest, model))
    wide = {name: x.astype(np.float64) for name, x in tensors.items()}
    expected = family_oracle.logits(family, wide, TOKENS, num_layers)
    np.testing.assert_allclose(found, expected, atol=NEAR)
    before = tensors_of(family, model)
    for name, x in tensors.items():
        trains = not name.endswith("e_score_correction_bias")
        assert (np.abs(x - before[name]).max() > 1e-6) == trains, name
    # The folder is a source of the same parameters, whatever part is asked for.
    again = dataclasses.replace(model, hf=str(out))
    np.testing.assert_array_equal(logits_of(model, init_params(again, 0)), found)
    if transformers_child.is_installed():
        theirs = transformers_child.run(out, TOKENS)
        assert not theirs.problems
        np.testing.assert_allclose(found, theirs.logits, atol=NEAR)


@pytest.mark.parametrize("family, settings", [("qwen3_moe", []), ("llama", ["model.fp8={}"])])
def test_an_imported_model_is_exported_with_all_its_bits(family, settings, tmp_path, capsys):
    """Loads of experts are parameters of the run, and of no folder; fp8 is of training alone."""
    source, out = tmp_path / "in", tmp_path / "out"
    write_folder(source, family, 2)
    about = json.loads((source / "config.json").read_text())
    dropped = {"attention_dropout": 0.1, "resid_pdrop": 0.0, "hidden_dropout": None}
    (source / "config.json").write_text(json.dumps({**about, **dropped}))
    assert main(["import", str(source), "--to", str(tmp_path / "run"), *settings]) == 0
    assert "not used    attention_dropout 0.1: steps drop" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "run"), "--out", str(out)]) == 0
    found, wanted = (load_file(where / "model.safetensors") for where in (out, source))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)


@pytest.mark.parametrize("plan", PLANS, ids=["stages", "one stage"])
def test_the_devices_of_any_plan_read_what_they_hold(plan, tmp_path):
    model = write_folder(tmp_path / "in", "gemma2", 2, "BF16")
    hf = {"model.hf": str(tmp_path / "in"), "run.dir": str(tmp_path / "run")}
    shared = {"parallel.tensor": 2, "parallel.fsdp": 2, "parallel.data": 1}
    job = jobs.load("configs/runs/quickstart.yaml", hf | plan | shared)
    assert dataclasses.replace(job.config.model, hf=None) == model
    whole = init_params(job.config.model, 0)
    meshes = build_meshes(job.plan, jax.devices())
    for chunk in make_chunks(job, dict(enumerate(meshes)), {}):
        for layer, params in chunk.init(0).params.items():
            jax.tree.map(
                np.testing.assert_array_equal, params, {k: whole[layer][k] for k in params}
            )


@SLOW
@pytest.mark.parametrize("family", MODELS)
def test_transformers_computes_the_same_logits_and_tokens(family, tmp_path):
    if not transformers_child.is_installed():
        pytest.skip("needs the extra parity")
    model = dataclasses.replace(write_folder(tmp_path / "in", family, 7), hf=str(tmp_path / "in"))
    theirs = transformers_child.run(tmp_path / "in", TOKENS)
    params = init_params(model, 0)
    np.testing.assert_allclose(logits_of(model, params), theirs.logits, atol=NEAR)
    # Each of their tokens is our likeliest one after those before it; what follows changes nothing.
    size = theirs.greedy.size
    assert size == 8 + transformers_child.NUM_NEW
    padded = np.pad(theirs.greedy, (0, TOKENS.size - size))
    likeliest = logits_of(model, params, padded).argmax(-1)
    np.testing.assert_array_equal(likeliest[7 : size - 1], theirs.greedy[8:])


def test_a_mistake_of_an_import_names_its_setting_and_no_file_of_ours(tmp_path, capsys):
    write_config(tmp_path / "llama", "llama")
    argv = ["import", str(tmp_path / "llama"), "--to", str(tmp_path / "run"), "parallel.tensor=5"]
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert "error: model.num_heads: must be a multiple of parallel.tensor = 5" in said
    assert "error: model.vocab_size: must be at least 256" in said
    assert "import.yaml" not in said
