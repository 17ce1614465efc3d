"""The benchmark of training on one GPU, as far as it runs without one."""

import dataclasses
import importlib.util
import statistics
from types import SimpleNamespace

import pytest

from benchmarks import train_gpu
from benchmarks.train_gpu import MODELS, OPTIMIZER, SMALL, WARM_UP_STEPS
from holmesjax.config import ModelConfig
from holmesjax.costs.parameters import stage_parameters
from holmesjax.plan.device_pool import DevicePool
from tests.shapes import shape_of

needs_pytorch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"
)


def line(system, context=64):
    found = train_gpu.measure(system, "1.3B", context, 4 * context, "cpu")
    assert "failed" not in found, found["failed"]
    return train_gpu.judge(found, dataclasses.replace(SMALL, context_length=context))


def test_ours_is_measured():
    found = line("HolmesJAX")
    assert found["how"].endswith("activation checkpointing none")
    assert len(found["losses"]) == len(found["s"]) > WARM_UP_STEPS
    assert found["losses"][0] == pytest.approx(5.55, abs=0.1)  # log(256), near enough
    rate = found["tokens_per_s"]
    assert rate == pytest.approx(256 / statistics.median(found["s"][WARM_UP_STEPS:]))
    model = dataclasses.replace(SMALL, context_length=64)
    want = rate * train_gpu.token_flop(model, all_pairs=False) / 1e12
    assert found["tflop_per_s"] == pytest.approx(want)
    assert "| 1.3B | 64 | HolmesJAX |" in train_gpu.table([found])


@needs_pytorch
def test_pytorch_trains_the_same_model():
    lines = [line("HolmesJAX"), line("PyTorch")]
    for ours, theirs in zip(*(each["losses"] for each in lines), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    assert not train_gpu.disagreements(lines)
    lines[1]["losses"][3] += 0.03
    [said] = train_gpu.disagreements(lines)
    assert said == "1.3B at 64: losses differ by 0.030 nats"


@pytest.mark.parametrize("name, billions", [("1.3B", 1.3), ("3.6B", 3.6)])
def test_models_have_the_parameters_of_their_names(name, billions):
    model = MODELS[name]
    shape = shape_of(num_blocks=model.num_layers)
    assert stage_parameters(model, shape) / 1e9 == pytest.approx(billions, abs=0.06)


@pytest.mark.parametrize("kind", ["h100", "h200"])
@pytest.mark.parametrize("name", MODELS)
def test_the_planner_finds_a_plan_for_the_device(name, kind):
    """Or says by how much it does not fit."""
    model = dataclasses.replace(MODELS[name], context_length=4096)
    config = train_gpu.make_config(model, train_gpu.TOKENS, "bfloat16")
    job = train_gpu.make_job(config, kind)
    assert len(job.plan.stages) == 1
    assert job.config.optimizer == OPTIMIZER


def test_the_memory_is_that_of_a_run(monkeypatch):
    """A figure of more memory than `launch` takes would promise what a run does not have."""
    environments = []

    def run(command, env, **_):
        environments.append(env)
        return SimpleNamespace(returncode=0, stdout="")

    monkeypatch.setattr(train_gpu.subprocess, "run", run)
    for variables in ({}, {"XLA_CLIENT_MEM_FRACTION": "0.8"}):
        for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
            monkeypatch.delenv(name, raising=False)
        for name, text in variables.items():
            monkeypatch.setenv(name, text)
        train_gpu.measure("HolmesJAX", "1.3B", 64, 256, "h200")
        want = DevicePool.of_run(variables).variables
        assert {n: v for n, v in environments.pop().items() if n.endswith("MEM_FRACTION")} == want


def test_a_failure_is_told(monkeypatch):
    monkeypatch.setattr(train_gpu, "NAME", "absent")
    found = train_gpu.measure("HolmesJAX", "1.3B", 64, 256, "cpu")
    assert "No module named benchmarks.absent" in found["failed"][0]
    assert "failed: " in train_gpu.table([found])


def test_without_a_gpu_nothing_is_measured(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["train_gpu", "--out", str(tmp_path)])
    assert train_gpu.main() == 2
    assert "no GPU of a known kind here (cpu); not measured" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_flop_of_a_token_count_pairs_once():
    model = ModelConfig(num_layers=2, width=32, num_heads=4, context_length=16, vocab_size=64)
    products = 2 * 12 * 32**2 + 32 * 64
    assert train_gpu.token_flop(model, all_pairs=False) == 6 * products + 2 * 6 * 16 * 32
