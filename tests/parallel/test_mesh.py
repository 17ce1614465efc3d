"""From a plan to meshes: the devices the mapper chose, where the plan says."""

import sys
from importlib.metadata import EntryPoint

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from holmesjax import job, process_variables
from holmesjax.errors import PlanError
from holmesjax.parallel.mesh import build_meshes
from holmesjax.planner import planner

RUN = "configs/runs/quickstart.yaml"


def test_meshes_hold_the_devices_of_the_plan():
    plan = job.load(RUN).plan
    meshes = build_meshes(plan, jax.devices())
    seen = []
    for mesh, stage in zip(meshes, plan.stages, strict=True):
        assert mesh.axis_names == ("data", "tensor")  # slowest link first
        assert dict(mesh.shape) == {"data": 2, "tensor": 2}
        assert [d.id for d in mesh.devices.flat] == list(stage.devices)
        assert set(mesh.axis_types) == {AxisType.Auto}
        seen += stage.devices
    assert sorted(seen) == list(range(8))


def test_tensor_neighbours_share_a_node():
    loaded = job.load(RUN)
    for mesh in build_meshes(loaded.plan, jax.devices()):
        for group in mesh.devices.reshape(-1, mesh.shape["tensor"]):
            assert len({loaded.topology.node_of(device.id).name for device in group}) == 1


def test_too_few_devices_are_refused_with_a_way_out():
    plan = job.load(RUN).plan
    with pytest.raises(PlanError) as error:
        build_meshes(plan, jax.devices()[:6])
    assert "found: 6 (cpu); the plan needs 8" in str(error.value)
    assert "run.rehearse=true" in str(error.value)


def test_absent_accelerators_are_told_before_anything_is_planned(monkeypatch):
    monkeypatch.delitem(sys.modules, "jax")
    monkeypatch.setattr(process_variables, "may_have_accelerators", lambda: False)
    monkeypatch.setattr(planner, "make_plans", lambda *_, **__: 1 / 0)
    path = "configs/runs/gpt_39b1.yaml"
    with pytest.raises(PlanError, match="JAX shows no accelerator") as error:
        job.load(path, reads_data="process")
    assert "run.rehearse=true" in str(error.value)
    for reader, settings in (("process", ["run.rehearse=true"]), (None, [])):
        with pytest.raises(ZeroDivisionError):
            job.load(path, settings, reads_data=reader)


@pytest.mark.parametrize(
    ("plugins", "file", "may"),
    [
        ([], "/dev/null", False),
        (["xla_cuda12"], "/dev/absent", False),
        (["xla_cuda12"], "/dev/null", True),
        (["xla_rocm7"], "/dev/absent", True),
    ],
)
def test_jax_may_show_accelerators(monkeypatch, plugins, file, may):
    named = [EntryPoint(name, "", "jax_plugins") for name in plugins]
    monkeypatch.setattr(process_variables, "entry_points", lambda group: named)
    monkeypatch.setattr(process_variables, "find_spec", lambda name: None)
    monkeypatch.setattr(process_variables, "NVIDIA_FILES", (file,))
    assert process_variables.may_have_accelerators() == may


def test_a_topology_of_gpus_can_be_planned_here():
    plan = job.load(
        RUN,
        [
            "topology=configs/topologies/h100_a100.yaml",
            "train.global_batch=256",
            "parallel.tensor=4",
            "parallel.clusters=[h100, a100]",
        ],
    ).plan
    assert [stage.cluster for stage in plan.stages] == ["h100", "a100"]
    assert len(np.unique([d for stage in plan.stages for d in stage.devices])) == 128
