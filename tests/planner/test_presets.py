"""The models of `configs/models/` are planned on H100 and A100, where JAX cannot be imported."""

import itertools
import math
import re
import subprocess
import sys

import pytest

from holmesjax import config as configs
from holmesjax.config import ModelConfig
from holmesjax.plan.device_pool import USABLE_MEMORY
from holmesjax.plan.plan import Axis, Plan
from holmesjax.topology import loading
from tests.clusters import ROOT
from tests.published_sizes import PUBLISHED

LARGEST = "llama3_1_405b"
RUN = """\
topology: {nodes}.yaml
run: {{dir: run}}
model: {{preset: {name}, context_length: {length}}}
data: {{corpus: python-stdlib}}
train: {{steps: 1, global_batch: 256, compute_dtype: bfloat16}}
optimizer: {{learning_rate: 1e-3}}
parallel: {{clusters: [a100, h100], microbatches: 8, schedule: 1f1b}}
"""
PLAN = """\
import contextlib, sys
sys.modules.update(dict.fromkeys(("jax", "jaxlib", "flax", "optax", "orbax")))  # no longer there
from launch.__main__ import main
for path in sys.argv[1:]:
    with open(path.replace(".yaml", ".json"), "w") as file, contextlib.redirect_stdout(file):
        assert main(["plan", path, "--json"]) == 0, path
"""


def by_family():
    """The largest preset, and in make test-all the others, a process for each family."""
    yield pytest.param([preset for preset in PUBLISHED if preset[0] == LARGEST], id=LARGEST)
    for family, presets in itertools.groupby(PUBLISHED, lambda own: re.match("[a-z]+", own[0])[0]):
        others = [preset for preset in presets if preset[0] != LARGEST]
        yield pytest.param(others, id=family, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize("presets", [*by_family()])
def test_presets_are_planned_on_two_clusters_without_jax(presets, tmp_path):
    """A stage on each cluster: each fits its devices, and both together hold the model."""
    machines = (ROOT / "configs/topologies/h100_a100.yaml").read_text()
    paths = []
    for name, parameters in presets:
        nodes = 1 if parameters < 2e10 else 16  # in each cluster, of 8 devices
        (tmp_path / f"{nodes}.yaml").write_text(machines.replace("nodes: 8", f"nodes: {nodes}"))
        length = min(configs.preset(name)["context_length"], 2048)
        paths.append(tmp_path / f"{name}.yaml")
        paths[-1].write_text(RUN.format(name=name, nodes=nodes, length=length))
    argv = [sys.executable, "-c", PLAN, *map(str, paths)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    for (name, parameters), path in zip(presets, paths, strict=True):
        model, plan = ModelConfig(**configs.preset(name)), Plan.load(path.with_suffix(".json"))
        topology = loading.load(configs.topology_path(configs.load(path), path))
        device = {cluster.name: cluster.nodes[0].device for cluster in topology.clusters}
        assert [stage.cluster for stage in plan.stages] == ["a100", "h100"], name
        assert plan.num_layers == model.num_layers, name  # `load` refuses layers twice
        held = 0.0
        for stage in plan.stages:
            most = USABLE_MEMORY * device[stage.cluster].memory_bytes
            assert sum(stage.memory_bytes.values()) <= most, name
            axes = Axis.FSDP, Axis.CONTEXT, Axis.TENSOR, Axis.EXPERT
            cuts = (stage.mesh.get(axis, 1) for axis in axes)
            held += stage.memory_bytes["gradients"] / 4 * math.prod(cuts)
        # The last stage has a copy of a tied table. All devices of `fsdp` have whole biases, and
        # those of `tensor` whole norms: 0.15% of GPT-3 175B.
        copied = model.tied_embeddings * model.vocab_size * model.width
        assert held == pytest.approx(parameters + copied, rel=3e-3), name
