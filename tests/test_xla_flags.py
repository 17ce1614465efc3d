"""The flags that a run gives to XLA, which the XLA installed here takes."""

import dataclasses
import os
import queue
import subprocess
import sys

import pytest
import yaml

from holmesjax import job as jobs, xla_flags
from holmesjax.config import CHECKOUT
from holmesjax.errors import ConfigError
from holmesjax.job import ENVIRONMENT, Job
from holmesjax.parallel import platforms
from holmesjax.plan.device_pool import DevicePool
from holmesjax.process_variables import ALLOCATOR
from holmesjax.topology import loading
from holmesjax.trainer import Trainer
from launch import supervisor
from launch.launchers import launcher as launchers
from launch.launchers.external import ExternalLauncher
from launch.launchers.launcher import ProcessStart
from launch.launchers.local import LocalLauncher
from launch.supervisor import Supervisor

RUN = """
topology: {topology}
run: {{dir: {run_dir}}}
model: {{num_layers: 4, width: 64, num_heads: 8, context_length: 32}}
data: {{corpus: python-stdlib}}
train: {{steps: 1, global_batch: 64}}
optimizer: {{learning_rate: 1.0e-3}}
"""
POOL = DevicePool().variables
GPU_FLAGS = xla_flags.for_devices({"h100"}, hang_s=600.0)


def start_jax(flags):
    code = "import jax; print(len(jax.devices('cpu')))"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )


def test_xla_knows_every_flag_and_the_last_value_wins():
    count = "--xla_force_host_platform_device_count"
    every = xla_flags.for_devices({"h100"}, deterministic=True, hang_s=600.0)
    every += f" {xla_flags.NO_AUTOTUNING}"
    flags = xla_flags.joined(f"{every} {count}=2", f"{count}=3")
    done = start_jax(flags)
    assert (done.returncode, done.stdout.split()) == (0, ["3"]), done.stderr


def test_xla_aborts_for_an_unknown_flag():
    """Or the test above would show nothing."""
    done = start_jax(f"{GPU_FLAGS} --xla_gpu_no_such_flag=true")
    assert done.returncode != 0
    assert "xla_gpu_no_such_flag" in done.stderr


@pytest.fixture
def job(tmp_path) -> Job:
    """The flags of a run on GPUs of two kinds."""
    path = CHECKOUT / "configs/topologies/h100_a100.yaml"
    assert loading.load(path).device_kinds.isdisjoint({"cpu"})
    file = tmp_path / "run.yaml"
    file.write_text(RUN.format(topology=path, run_dir=tmp_path / "run"))
    return jobs.load(file)


def test_a_trainer_gives_them_to_jax_unless_it_has_started(job, monkeypatch):
    train = dataclasses.replace(job.config.train, deterministic=True)
    kernels = dataclasses.replace(job.config.kernels, deterministic_attention=True)
    config = dataclasses.replace(job.config, train=train, kernels=kernels)
    trainer = Trainer(dataclasses.replace(job, config=config))
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    monkeypatch.setattr(platforms, "has_devices", lambda: True)
    with pytest.raises(ConfigError, match=r"lacks the flag that train\.deterministic needs"):
        trainer._set_flags()
    assert os.environ["XLA_FLAGS"] == "--xla_a=1"
    monkeypatch.setattr(platforms, "has_devices", lambda: False)
    trainer._set_flags()
    asked = f"--{xla_flags.DETERMINISTIC}=true"
    assert os.environ["XLA_FLAGS"] == f"{GPU_FLAGS} {asked} --xla_a=1"


def test_only_processes_with_gpus_get_flags(job):
    assert job.environment({}) == {"XLA_FLAGS": GPU_FLAGS, **POOL}
    run = dataclasses.replace(job.config.run, rehearse=True)
    rehearsal = dataclasses.replace(job, config=dataclasses.replace(job.config, run=run))
    assert rehearsal.environment({}) == {}
    own = {"XLA_FLAGS": "--xla_a=1", "PATH": "/bin"}
    kernels = {"kernels": dataclasses.replace(job.config.kernels, deterministic_attention=True)}
    assert rehearsal.environment(own) == {"XLA_FLAGS": "--xla_a=1"}
    assert job.environment(own) == {"XLA_FLAGS": f"{GPU_FLAGS} --xla_a=1", **POOL}
    assert job.environment({"XLA_FLAGS": "file"}) == {"XLA_FLAGS": "file", **POOL}
    train = dataclasses.replace(job.config.train, deterministic=True)
    fixed = dataclasses.replace(job, config=dataclasses.replace(job.config, **kernels, train=train))
    asked = f"--{xla_flags.DETERMINISTIC}=true"
    assert fixed.environment(own)["XLA_FLAGS"] == f"{GPU_FLAGS} {asked} --xla_a=1"
    for undone in (f"--{xla_flags.DETERMINISTIC}=false", "file"):
        with pytest.raises(ConfigError, match="turns off the flag"):
            fixed.environment({"XLA_FLAGS": undone})
    waits = dataclasses.replace(job.config.distributed, step_timeout_s=100.0)
    short = dataclasses.replace(job, config=dataclasses.replace(job.config, distributed=waits))
    assert "_execution_terminate_timeout=65s" in short.environment({})["XLA_FLAGS"]
    islands = {"across": "local_updates", "outer_memory": "host"}
    away = dataclasses.replace(job.config.parallel, **islands)
    away = dataclasses.replace(job, config=dataclasses.replace(job.config, parallel=away))
    assert int(away.environment({})[xla_flags.HOST_MEMORY]) > 1024  # XLA itself stops at 64
    assert away.environment({xla_flags.HOST_MEMORY: "9"})[xla_flags.HOST_MEMORY] == "9"
    assert job.process_environment(own) == job.environment(own)
    assert rehearsal.process_environment(own) == {"XLA_FLAGS": "--xla_a=1", **ALLOCATOR}
    assert rehearsal.process_environment({"GLIBC_TUNABLES": "glibc.malloc.perturb=1"}) == {}


class Started(Exception):
    pass


def started(job, launcher, monkeypatch) -> dict[str, str]:
    """The environment of the first process that the supervisor starts."""
    environments = []

    def popen(arguments, env, **_):
        environments.append(env)
        raise Started

    monkeypatch.setattr(launchers.subprocess, "Popen", popen)
    with pytest.raises(Started):
        Supervisor(job, launcher).run()
    return environments[0]


def test_the_supervisor_gives_and_records_them(job, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    env = started(job, LocalLauncher(job.topology), monkeypatch)
    assert env["XLA_FLAGS"] == f"{GPU_FLAGS} --xla_a=1"
    record = yaml.safe_load((job.run_dir / ENVIRONMENT).read_text())
    for name in POOL:
        assert record.pop(name) == env[name]
    assert record.pop("XLA_FLAGS") == env["XLA_FLAGS"]
    own = (
        "plan hash",
        "settings hash",
        "data.tokenizer (library and hash of its files)",
        "restart",
    )
    assert record == {name: v for name, v in job.about(0).items() if name not in own}


def test_processes_that_others_start_are_told_to_have_them(job, capsys):
    launcher = ExternalLauncher("127.0.0.1:7000")
    [first, *_] = supervisor.make_processes(job.plan, job.topology, "node")
    command, env = ["worker", str(job.run_dir)], job.process_environment({})
    launcher.start(ProcessStart(process=first, command=command, env=env), queue.Queue())
    printed = capsys.readouterr().out
    assert f"  XLA_FLAGS='{GPU_FLAGS}'\n" in printed
    assert "  XLA_PYTHON_CLIENT_MEM_FRACTION=0.93\n" in printed
