"""`launch profile`: what explains the times of a device, and the file that the planner reads."""

import dataclasses
import subprocess
import sys

import jax
import numpy as np
import pytest
import yaml

from holmesjax import job as jobs
from holmesjax.config import CHECKOUT, ModelConfig
from holmesjax.costs.implementation import HOLMESJAX
from holmesjax.costs.layer_times import layers_s
from holmesjax.costs.products import attention_products
from holmesjax.costs.stage_shape import StageShape
from holmesjax.layer_specs.distinct_kinds import kinds
from holmesjax.runtime import device_profile
from holmesjax.runtime.device_profile import Timed
from holmesjax.topology import calibration, loading
from holmesjax.topology.calibration import Calibration, Product, ProductSpeed
from launch.__main__ import main

MODEL = ModelConfig(
    num_layers=2, width=1024, num_heads=16, num_kv_heads=4, context_length=1024, vocab_size=32000
)
TINY = ModelConfig(num_layers=2, width=32, num_heads=4, context_length=16, vocab_size=64)
KIND = loading.known_device("h100")
[BLOCK] = kinds(MODEL).blocks
TRUTH = ProductSpeed(share=0.6, rows=40, columns=200, depth=120)


def one_layer(sequences):
    return StageShape(
        **{"blocks": (1,), "is_first": False, "is_last": False, "data": 1, "tensor": 1},
        **{"sequences": sequences, "chunks": 1, "in_flight": 1, "head_in_flight": 1},
        **{"dtype": "bfloat16", "checkpointing": "none"},
    )


def test_layers_of_the_first_kind_alone_are_timed(monkeypatch):
    """Their window too: of a mean of kinds no calibration is right."""
    pattern = ("window_block", "block", "block")
    model = dataclasses.replace(TINY, num_layers=6, pattern=pattern, window=4)
    assert device_profile._timed_layers(model) == ["block_000", "block_003"]
    monkeypatch.setattr(device_profile, "UNCACHED", 1)
    assert device_profile._timed_layers(model) == ["block_000"]
    rules = []
    monkeypatch.setattr(device_profile, "_seconds", lambda run: run())
    attention = lambda q, k, v, rule: rules.append(rule) or q
    monkeypatch.setattr(device_profile.ops, "attention", attention)
    device_profile._attention_s(model, "float32")
    assert {rule.window for rule in rules} == {4}


def timed(noise=0.0, **changes):
    """The times that a device would show if `TRUTH` were its calibration."""
    peak = KIND.peak_flop_per_s["bfloat16"]
    jitter = np.random.default_rng(0).normal(size=1000)
    products = {
        product: TRUTH.seconds(product, peak) * np.exp(noise * jitter[i])
        for i, product in enumerate(device_profile.shapes(MODEL))
    }
    attention = attention_products(BLOCK, MODEL.context_length, 4096)
    attention_s = sum(TRUTH.seconds(product, peak) for product in attention)
    truth = Calibration(products=TRUTH, attention=0.8, memory=0.9, between=1.7, layer_s=2e-4)
    device = dataclasses.replace(KIND, calibration=truth)
    added_s = 12 * BLOCK.size() / (0.9 * 3.35e12)  # to the sums of gradients
    found = Timed(
        products=products,
        attention=attention,
        attention_s=0.8 * HOLMESJAX.attention_pairs * 3.5 * attention_s,
        block_s={
            n: added_s + layers_s(MODEL, one_layer(n), [device])[0]
            for n in device_profile.SEQUENCES
        },
        update_bytes=28e9,
        update_s=28e9 / (0.9 * 3.35e12),
        dtype="bfloat16",
    )
    return dataclasses.replace(found, **changes)


def test_the_calibration_behind_the_times_is_found():
    found, off = device_profile.explain(timed(), KIND, MODEL)
    assert found.products.share == pytest.approx(0.6, rel=0.02)
    assert found.attention == pytest.approx(0.8, rel=0.05)
    assert found.memory == pytest.approx(0.9, rel=0.01)
    assert found.between == pytest.approx(1.7, rel=0.1)
    assert found.layer_s == pytest.approx(2e-4, rel=0.1)
    assert max(map(abs, off.values())) < 0.03
    assert off.keys() == set(device_profile.shapes(MODEL))


def test_noise_and_one_strange_product_do_not_hide_it():
    noisy = timed(noise=0.03)
    strange = next(iter(noisy.products))
    products = noisy.products | {strange: 5 * noisy.products[strange]}
    found, off = device_profile.explain(dataclasses.replace(noisy, products=products), KIND, MODEL)
    assert found.products.share == pytest.approx(0.6, rel=0.05)
    assert off[strange] == pytest.approx(1 / 5 - 1, abs=0.05)
    assert sorted(map(abs, off.values()))[-2] < 0.12


def test_the_products_are_those_of_a_device_alone_and_of_one_of_eight():
    shapes = device_profile.shapes(dataclasses.replace(MODEL, num_kv_heads=16))
    assert len(shapes) == len(set(shapes))
    assert Product(1024, 4096, 1024) in shapes  # up, of one sequence
    assert Product(4096, 4096 / 8, 1024) in shapes  # of four, on one of eight devices
    assert Product(1024, 4096, 4096) in shapes  # the gradient of its weight
    # Four key-value heads are shared by four at most.
    assert Product(4096, 4096 / 8, 1024) not in device_profile.shapes(MODEL)
    assert Product(4096, 4096 / 4, 1024) in device_profile.shapes(MODEL)


def test_what_is_timed_is_what_is_said(monkeypatch):
    """Every program runs, with arrays of the shapes and the dtype that it stands for."""
    results, dtype = [], "bfloat16"  # float32 would be there without a word

    def seconds(run, round_s=0.0):
        results.append(jax.block_until_ready(run()))
        return 1.0

    monkeypatch.setattr(device_profile, "_seconds", seconds)
    monkeypatch.setattr(device_profile, "UNCACHED", 2**14)
    said = []
    found = device_profile.measure(TINY, dtype, said.append)
    shapes = device_profile.shapes(TINY)
    assert found.products == {product: product.times for product in shapes}
    for product, result in zip(shapes, results, strict=False):
        assert (result.shape, result.dtype) == ((product.rows, product.columns), dtype)
    attention, one, four, (params, _) = results[-4:]
    assert [g.shape for g in attention] == [(4, 16, 4, 8)] * 3
    for sequences, (weights, *ends) in zip(device_profile.SEQUENCES, (one, four), strict=True):
        assert [(x.shape, x.dtype) for x in ends] == [((sequences, 16, 32), dtype)] * 2
        assert weights.keys() == {"block_000", "block_001"}
        assert {str(x.dtype) for x in jax.tree.leaves(weights)} == {"float32"}  # sums
    assert params["block_000"]["up_DF"].size == 2**14
    assert found.update_bytes == 28 * 2**14
    assert len(said) == len(shapes) + 3


# ---- the command ---------------------------------------------------------------------------------

RUN = """\
topology: one.yaml
run: {dir: unset}
model: {num_layers: 2, width: 32, num_heads: 4, context_length: 16}
data: {corpus: python-stdlib}
train: {steps: 1, global_batch: 4}
optimizer: {learning_rate: 1.0e-3}
"""
TOPOLOGY = """\
name: one
clusters:
  - name: a
    fabric: local
    nodes: 1
    devices: {kind: cpu, count: 1}
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "one.yaml").write_text(TOPOLOGY)
    return tmp_path


def profile(folder, *arguments):
    command = [sys.executable, "-m", "launch", "profile", "run.yaml", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=250)


@pytest.mark.one_version
def test_a_device_is_measured_and_the_planner_takes_it(folder):
    done = profile(folder)
    assert done.returncode == 0, done.stderr
    assert "wrote cpu.yaml" in done.stdout
    file = calibration.read(folder / "cpu.yaml")
    assert (file.devices, file.measured_by) == (("cpu",), "HolmesJAX")
    assert "JAX" in file.sources.products
    table = [line for line in done.stdout.splitlines() if "of the time" in line]
    model = ModelConfig(num_layers=2, width=32, num_heads=4, context_length=16)
    assert len(table) == len(device_profile.shapes(model))
    described = yaml.safe_load(TOPOLOGY)
    described["clusters"][0]["devices"]["calibration"] = "cpu.yaml"
    (folder / "one.yaml").write_text(yaml.safe_dump(described))
    device = loading.load(folder / "one.yaml").nodes[0].device
    assert device.calibration == file.calibration


def test_a_device_that_is_not_here_is_refused(folder, monkeypatch, capsys):
    (folder / "one.yaml").write_text(TOPOLOGY.replace("kind: cpu", "kind: h100"))
    monkeypatch.chdir(folder)
    assert main(["profile", "run.yaml"]) == 2
    assert "this host has no h100" in capsys.readouterr().err
    assert {path.name for path in folder.glob("*.yaml")} == {"run.yaml", "one.yaml"}


@pytest.mark.parametrize(
    "more, arguments, problem",
    [
        ("", ("--node", "b-0"), "must be a node of the topology"),
        (
            "  - name: b\n    fabric: local\n    nodes: 1\n"
            "    devices: {kind: h100, count: 1}\nlinks:\n"
            "  - {between: [a, b], fabric: ethernet, bandwidth: 1 Gb/s, latency: 50 us}\n",
            (),
            "--node a-0 or b-0",
        ),
    ],
)
def test_which_device_must_be_clear(folder, monkeypatch, capsys, more, arguments, problem):
    (folder / "one.yaml").write_text(TOPOLOGY + more)
    monkeypatch.chdir(folder)
    assert main(["profile", "run.yaml", *arguments]) == 2
    assert problem in capsys.readouterr().err
    assert {path.name for path in folder.glob("*.yaml")} == {"run.yaml", "one.yaml"}


def test_devices_of_one_name_need_no_node():
    """The help says so; the file names the peak that its shares are of."""
    job = jobs.load(CHECKOUT / "configs/runs/quickstart.yaml")
    assert job.node_to_measure(None).name == "ib-0"
    assert job.node_to_measure("roce-1").device.peak_flop_per_s["float32"] == 30e9
