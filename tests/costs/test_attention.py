"""The attention that a plan is priced by is what a run takes, and as slow as was measured."""

import dataclasses
from types import SimpleNamespace

import jax
import pytest

from holmesjax.config import KernelsConfig, ModelConfig
from holmesjax.costs.attention import AskedAttention, attention_s, choice_of
from holmesjax.costs.implementation import HOLMESJAX
from holmesjax.costs.products import attention_products
from holmesjax.costs.stage_times import stage_times
from holmesjax.errors import ConfigError
from holmesjax.layer_specs.distinct_kinds import kinds
from holmesjax.layer_specs.kind import Attention
from holmesjax.models import ops
from holmesjax.topology import catalogue, loading
from holmesjax.topology.calibration import UNKNOWN
from tests.shapes import shape_of

ASKED = AskedAttention(implementation="auto", has_documents=False, deterministic=False)
MASKED = dataclasses.replace(ASKED, has_documents=True)
WHOLE = Attention(heads=4, key_heads=2, head_width=128)


@pytest.fixture(scope="module")
def device(tmp_path_factory):
    """A kind of the catalogue by its name, with its calibration."""
    found = {}
    folder = tmp_path_factory.mktemp("kinds")
    for name in catalogue.DEVICES:
        path = folder / f"{name}.yaml"
        node = f"{{name: a, fabric: local, nodes: 1, devices: {{kind: {name}, count: 1}}}}"
        path.write_text(f"name: one\nclusters:\n  - {node}\n")
        [found[name]] = (node.device for node in loading.load(path).nodes)
    return found


def chosen(kind, asked=ASKED, attention=WHOLE, dtype="bfloat16", context=1):
    told = {"dtype": dtype, "length": 4096, "context": context}
    found = choice_of(attention, asked, kind, **told)
    return found and found.implementation


def test_documents_windows_widths_dtypes_and_kinds_decide(device):
    h100, a100 = device["h100"], device["a100_80gb"]
    assert chosen(h100) == chosen(a100) == "cudnn"
    assert chosen(h100, MASKED) == chosen(h100, context=2) == "pallas"
    assert chosen(a100, MASKED) == chosen(device["b200"], MASKED) == "triton"
    windowed, wide = (dataclasses.replace(WHOLE, **x) for x in ({"window": 9}, {"head_width": 256}))
    assert chosen(a100, attention=windowed) == chosen(h100, attention=wide) == "cudnn"
    assert chosen(a100, MASKED, windowed) == chosen(a100, attention=wide) == "reference"
    assert chosen(h100, dtype="float32") == chosen(a100, context=2) == "reference"
    assert chosen(device["mi300x"]) == chosen(device["cpu"]) == "reference"
    assert chosen(dataclasses.replace(h100, name="of my own")) is None
    assert chosen(a100, dataclasses.replace(ASKED, implementation="pallas")) is None


@pytest.mark.parametrize("asked", ["auto", "reference", "pallas", "triton", "cudnn"])
@pytest.mark.parametrize("kind", ["h100", "a100_80gb", "b200", "mi300x"])
def test_a_run_takes_what_its_plan_was_priced_by(device, monkeypatch, asked, kind):
    """All is installed and all checks pass, whatever the layers, documents and promises are."""
    platform, name, capability = catalogue.AS_JAX_SEES_THEM[kind]
    seen = SimpleNamespace(platform=platform, device_kind=name, compute_capability=capability)
    monkeypatch.setattr(ops.Kernels, "device", seen)
    monkeypatch.setattr(ops, "missing", lambda implementation: None)
    some = [WHOLE] + [
        dataclasses.replace(WHOLE, **change)
        for change in ({"window": 9}, {"soft_cap": 2.0}, {"head_width": 256}, {"head_width": 72})
    ]
    for attention in some:
        for documents, deterministic in ((False, False), (True, False), (True, True)):
            for dtype, length in (("bfloat16", 64), ("float32", 64), ("bfloat16", 63)):
                x = jax.ShapeDtypeStruct((1, length, 4, attention.head_width), dtype)
                config = KernelsConfig(attention=asked, deterministic_attention=deterministic)
                kernels, rule = ops.Kernels(config, unproven=None), ops.rule_of(attention)
                try:
                    runs = ops.choose_attention(x, x, x, documents, kernels, rule)
                except ConfigError:
                    runs = None
                needs = AskedAttention(
                    implementation=asked, has_documents=documents, deterministic=deterministic
                )
                told = {"dtype": dtype, "length": length, "context": 1}
                assert choice_of(attention, needs, device[kind], **told) == runs


# Milliseconds on an H200 at commit edcdd16: causal, 64 query and 8 key heads 128 wide. Those of
# the Pallas kernels are of their backward of two kernels.
MEASURED_MS = {
    "reference": {4096: (5.28, 8.36), 8192: (19.8, 30.5), 16384: (74.7, 112.2)},
    "pallas": {4096: (0.546, 2.06), 8192: (2.01, 6.72), 16384: (7.70, 25.5)},
}
CUDNN_MS = {4096: (0.557, 1.68), 8192: (2.07, 5.89), 16384: (7.82, 21.6)}


@pytest.mark.parametrize("name", MEASURED_MS)
def test_what_takes_the_place_of_cudnn_is_as_slow_as_it_was_measured(device, name):
    """The Pallas kernels beside cuDNN, and plain JAX by itself."""
    kind = device["h200"]
    model = ModelConfig(
        num_layers=1, width=64 * 128, num_heads=64, num_kv_heads=8, context_length=64
    )
    [block] = kinds(model).blocks
    for length, measured_ms in MEASURED_MS[name].items():
        products = attention_products(block, length, length)
        asked = dataclasses.replace(ASKED, implementation=name)
        given = (products, choice_of(WHOLE, asked, kind, dtype="bfloat16", length=8, context=1))
        found = attention_s(*given, kind, "bfloat16", 1, HOLMESJAX)
        if name == "pallas":
            usual = attention_s(products, None, kind, "bfloat16", 1, HOLMESJAX)
            found = [s / own_s for s, own_s in zip(found, usual, strict=True)]
            measured_ms = [
                ms / cudnn_ms for ms, cudnn_ms in zip(measured_ms, CUDNN_MS[length], strict=True)
            ]
        else:
            found = [1e3 * s for s in found]
        assert list(found) == pytest.approx(list(measured_ms), rel=0.15), length


def test_a_stage_takes_longer_by_what_computes_its_attention(device):
    """On an A100 in documents, and nothing where plain JAX is what was calibrated, or unknown."""
    model = ModelConfig(num_layers=2, width=512, num_heads=4, context_length=4096)
    times = lambda kind, asked, **changes: stage_times(
        model, shape_of(attention=asked, dtype="bfloat16", **changes), [kind], None, None
    )
    a100 = device["a100_80gb"]
    plain, fused, masked = (
        times(a100, asked)
        for asked in (dataclasses.replace(ASKED, implementation="reference"), ASKED, MASKED)
    )
    assert fused.forward_s < masked.forward_s < plain.forward_s
    assert fused.backward_s < masked.backward_s < plain.backward_s
    assert fused == times(a100, None)
    assert times(device["cpu"], MASKED) == times(device["cpu"], None)
    amd = device["mi300x"]
    assert amd.calibration == UNKNOWN
    assert times(amd, ASKED).forward_s > times(amd, None).forward_s
    measured = dataclasses.replace(amd, calibration=a100.calibration)
    assert times(measured, ASKED) == times(measured, None)
