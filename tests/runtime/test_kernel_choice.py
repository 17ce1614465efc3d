"""The attention kernels that a stage takes, what decides, and the line that says so."""

import dataclasses
from types import MappingProxyType, SimpleNamespace

import jax
import numpy as np
import pytest

from holmesjax.config import ExpertsConfig, KernelsConfig
from holmesjax.errors import ConfigError
from holmesjax.hosts import kernel_check
from holmesjax.hosts.kernel_check import CheckVerdict
from holmesjax.models import ops
from holmesjax.optimizers.optimizer import make_optimizer
from holmesjax.runtime import kernel_choice
from holmesjax.runtime.chunk import Chunk
from holmesjax.runtime.kernel_choice import attention_lines, optimizer_lines
from kernels import adamw_choice
from kernels.adamw_choice import MeasuredStep
from tests.clusters import make_config
from tests.host_files import gpu
from tests.kernels.attention.gpus import A100, H200

CAPPED = {"attention_soft_cap": 50.0}
HOPPER = gpu(0, "pci0000:15/0000:15:01.0/0000:1b:00.0")


def stage_on(device, number, **changes):
    """A chunk whose mesh has one device, which need not be there."""
    config = make_config(parallel={"tensor": 1}, model={"num_heads": 4, "width": 256})
    mesh = SimpleNamespace(devices=np.array([device]), shape={}, size=1)
    chunks = [(n // 2, ("block_000",)) for n in range(4)]
    told = {
        "model": config.model,
        "plan": SimpleNamespace(
            chunks=chunks,
            stages=2 * [SimpleNamespace(sequence_parallel=False, logit_bytes=None)],
        ),
        "index": number,
        "mesh": mesh,
        "optimizer": make_optimizer(config.optimizer, 100, {}),
        "compute_dtype": "bfloat16",
        "clip_norm": None,
        "mask_documents": True,
        "kernels": KernelsConfig(),
    }
    return Chunk(**told | changes)


def test_the_header_says_what_computes_attention_in_each_stage():
    """Chunks of the same stage are told once, and stages that do the same together."""
    assert attention_lines([stage_on(jax.devices()[0], 0)]) == []
    why = "cuDNN has no documents: supported is attention to all that came before"
    lack = "have no passed check on this machine"
    lack = f"the Pallas kernels {lack}; JAX's Triton kernels {lack}"
    stages = [stage_on(H200, number) for number in range(4)]
    told = f"plain JAX ({why}; {lack})"
    assert attention_lines(stages) == [f"attention   stages 0, 1: {told}"]
    stages[2:] = [stage_on(H200, number, unproven=None) for number in (2, 3)]
    assert attention_lines(stages) == [
        f"attention   stage 0: {told}",
        f"attention   stage 1: the Pallas kernels ({why})",
    ]
    asked = stage_on(H200, 0, kernels=KernelsConfig(attention="cudnn"))
    with pytest.raises(ConfigError, match="cudnn cannot do it"):
        attention_lines([asked])
    model = dataclasses.replace(stages[0].model, **CAPPED)
    [line] = attention_lines([stage_on(H200, 0, model=model, mask_documents=False)])
    why = "cuDNN has no soft cap of scores; the Pallas kernels have no passed check on this machine"
    assert f"plain JAX ({why}; JAX's Triton kernels have no soft cap of scores)" in line


def test_a_stage_hands_on_what_checked_kernels_lack():
    functions = stage_on(H200, 0, unproven="no check").update_functions
    assert (functions.unproven, functions.parameters) == ("no check", "float32")


def test_the_header_says_what_computes_adamws_step(monkeypatch):
    """Parameters in bfloat16 have no kernel, and Lion has no such step."""
    monkeypatch.setattr(adamw_choice, "MEASURED", ())
    never = "XLA (the kernel with moments in float32 has not been measured on NVIDIA H200)"
    assert optimizer_lines([stage_on(H200, n) for n in range(4)]) == [f"update      {never}"]
    assert optimizer_lines([stage_on(jax.devices()[0], 0)]) == []
    asked = stage_on(H200, 0, kernels=KernelsConfig(optimizer="pallas"))
    assert optimizer_lines([asked]) == [
        "update      the Pallas kernel (kernels.optimizer asks for it)"
    ]
    lion = make_optimizer(dataclasses.replace(asked.optimizer.config, name="lion"), 100, {})
    assert optimizer_lines([stage_on(H200, 0, optimizer=lion)]) == []
    muon = make_optimizer(dataclasses.replace(asked.optimizer.config, name="muon"), 100, {})
    assert len(optimizer_lines([dataclasses.replace(asked, optimizer=muon)])) == 1
    rounded = dataclasses.replace(stage_on(H200, 0), param_dtype="bfloat16")
    lack = "XLA (the kernel with parameters in bfloat16 has not been measured)"
    assert optimizer_lines([rounded]) == [f"update      {lack}"]
    with pytest.raises(ConfigError, match=r"kernels\.optimizer: pallas cannot run here"):
        optimizer_lines([dataclasses.replace(asked, mesh=stage_on(A100, 0).mesh)])


@pytest.fixture
def checks(monkeypatch):
    """The questions of checks, each of which fails, on a machine without cuDNN."""
    asked = []

    def verdict(question, gpus, env, say, advance):
        asked.append(question)
        return CheckVerdict(problem="the output is off by 0.5", versions={})

    monkeypatch.setattr(kernel_check, "verdict", verdict)
    monkeypatch.setattr(kernel_check, "find_assembler", lambda: (13, 0, 88))
    return asked


def find_unproven(
    *, kind="h100", gpus=(HOPPER,), context=1, rehearse=False, model=MappingProxyType({}), **kernels
):
    config = make_config(parallel={"tensor": 1}, model={"num_heads": 8, **model})
    sections = {"kernels": KernelsConfig(**kernels), "run": SimpleNamespace(rehearse=rehearse)}
    told = {
        name: getattr(config, name) for name in ("train", "model", "data", "optimizer")
    } | sections
    plan = SimpleNamespace(stages=[SimpleNamespace(mesh={"context": context})])
    topology = SimpleNamespace(device_kinds={kind})
    job = SimpleNamespace(config=SimpleNamespace(**told), plan=plan, topology=topology)
    find_host = lambda: SimpleNamespace(gpus=gpus)
    return kernel_choice.find_unproven(job, [0], find_host, {}, print)


def test_a_check_is_made_where_it_decides(checks):
    """Neither where cuDNN can do it, nor where there is no GPU for the kernels."""
    assert find_unproven() == ops.UNCHECKED  # cuDNN
    assert find_unproven(kind="cpu", context=2) == ops.UNCHECKED
    assert find_unproven(gpus=(), context=2) == ops.UNCHECKED
    assert find_unproven(rehearse=True, context=2) == ops.UNCHECKED
    assert find_unproven(attention="reference", context=2) == ops.UNCHECKED
    assert checks == []
    failed = "passed check: the output is off by 0.5"
    assert find_unproven(context=2) == find_unproven(deterministic_attention=True) == failed
    layer = {"head_width": 128, "window": None, "soft_cap": None, "scale": None}
    plain = {"attention": "auto", "dtype": "bfloat16", "has_documents": False, "layers": [layer]}
    plain["kernels"] = "pallas"
    cut = {"is_cut": True, "deterministic": False}
    assert checks == [plain | cut, plain | {"is_cut": False, "deterministic": True}]
    assert find_unproven(model=CAPPED) == failed


def test_a_check_of_the_update_is_made_where_a_measurement_makes_it_decide(checks, monkeypatch):
    row = MeasuredStep("NVIDIA H200", "float32", 3900.0, 3100.0, "a test")
    monkeypatch.setattr(adamw_choice, "MEASURED", (row,))
    h200 = dataclasses.replace(HOPPER, name="NVIDIA H200")
    failed = "passed check: the output is off by 0.5"
    assert find_unproven(gpus=[h200]) == find_unproven(gpus=[h200], attention="cudnn") == failed
    assert checks == [{"kernels": "pallas", "layers": [], "moments": "float32"}] * 2
    assert find_unproven() == find_unproven(gpus=[h200], optimizer="xla") == ops.UNCHECKED
    assert find_unproven(gpus=[h200], optimizer="xla", context=2) == failed
    assert "moments" not in checks[-1]


def test_kernels_of_experts_are_refused_where_their_check_fails(checks, monkeypatch):
    """They are asked for by name, and have never been measured on a GPU."""
    monkeypatch.setattr(kernel_check, "find_assembler", lambda: (13, 1, 0))
    experts = {"pattern": ("expert_block",), "experts": ExpertsConfig(width=128, latent_width=64)}
    asking = {"attention": "cudnn", "experts": "pallas", "model": experts}
    with pytest.raises(ConfigError, match=r"kernels.experts(.|\n)*passed check(.|\n)*off by 0.5"):
        find_unproven(**asking)
    asked = {"width": 64, "inner": 128, "dtype": "bfloat16"}
    assert checks == [{"kernels": "pallas", "layers": [], "experts": asked}]
    passed = CheckVerdict(problem=None, versions={})
    monkeypatch.setattr(kernel_check, "verdict", lambda *args, **more: passed)
    assert find_unproven(**asking) == ops.UNCHECKED
    checks.clear()
    a100 = dataclasses.replace(HOPPER, name="NVIDIA A100", compute_capability="8.0")
    with pytest.raises(ConfigError, match="A100 devices: supported are NVIDIA Hopper"):
        find_unproven(**asking, gpus=[a100])
    narrow = {**asking, "model": {**experts, "experts": ExpertsConfig(width=96)}}
    with pytest.raises(ConfigError, match="a width of "):
        find_unproven(**narrow)
    batched = ExpertsConfig(width=128, capacity_factor=1.0)
    with pytest.raises(ConfigError, match="no stage takes"):
        find_unproven(**{**asking, "model": {**experts, "experts": batched}})
    assert checks == []


def test_a_check_that_passes_is_all_that_the_kernels_lack(checks, monkeypatch):
    passed = CheckVerdict(problem=None, versions={})
    monkeypatch.setattr(kernel_check, "verdict", lambda *args, **more: passed)
    assert find_unproven(context=2) is None


def test_kernels_that_would_be_miscompiled_are_refused_by_name(checks):
    with pytest.raises(ConfigError, match=r"kernels.attention(.|\n)*ptxas 13.0.88(.|\n)*13.1"):
        find_unproven(attention="pallas")
