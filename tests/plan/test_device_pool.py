"""The pool of a GPU: JAX takes what we say it does, and a plan fits into it."""

import dataclasses

import pytest
from jax._src.lib import xla_client

from holmesjax import job as jobs, job_files
from holmesjax.errors import ConfigError, HolmesError, PlanError
from holmesjax.job import Job
from holmesjax.plan.device_pool import ALLOCATOR, NAME, OTHER_NAME, USABLE_MEMORY, DevicePool
from holmesjax.planner import planner
from launch import generation_job, supervisor
from launch.launchers.local import LocalLauncher
from launch.verbs import doctor
from tests.jobs import run_launch_here

VARIABLES = (NAME, OTHER_NAME, ALLOCATOR, "XLA_PYTHON_CLIENT_PREALLOCATE")
TOPOLOGY = """
name: shared
clusters:
  - {{name: a, fabric: local, nodes: 1, devices: {device}, nics: [{{kind: ethernet_25}}]}}
  - {{name: b, fabric: local, nodes: 1, devices: {device}, nics: [{{kind: ethernet_25}}]}}
links:
  - {{between: [a, b], fabric: ethernet, bandwidth: 25 Gb/s, latency: 50 us}}
"""
RUN = """
topology: {folder}/topology.yaml
run: {{dir: {folder}/run}}
model: {{num_layers: 2, width: 64, num_heads: 2, context_length: 32}}
data: {{corpus: python-stdlib}}
train: {{steps: 1, global_batch: 8}}
optimizer: {{learning_rate: 1.0e-3}}
parallel: {{stages: 2}}
log: {{tensorboard: false}}
"""


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def jax_takes(monkeypatch, env: dict[str, str]) -> float | None:
    """The share that JAX reads of an environment; None where it has no pool."""
    with monkeypatch.context() as patch:
        for name in VARIABLES:
            patch.delenv(name, raising=False)
        for name, text in env.items():
            patch.setenv(name, text)
        options = xla_client.generate_pjrt_gpu_plugin_options()
    return None if options["allocator"] == "platform" else options.get("memory_fraction", 0.75)


OWN = [
    ({}, 0.93),
    ({NAME: ""}, 0.93),
    ({NAME: "0.5"}, 0.5),
    ({OTHER_NAME: "0.97"}, 0.97),
    ({NAME: "1e-1", OTHER_NAME: ""}, 0.1),
    ({NAME: "0.6", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, 0.6),
    ({NAME: "0.6", ALLOCATOR: "cuda_async"}, 0.6),
    ({ALLOCATOR: "Platform", NAME: "0.6"}, None),
]


@pytest.mark.parametrize("processes", [1, 2, 7])
@pytest.mark.parametrize(("own", "share"), OWN)
def test_jax_takes_the_pool(monkeypatch, own, share, processes):
    """JAX itself reads the variables of a process that is started from the user's shell."""
    pool = DevicePool.of_run(own).among(processes)
    taken = jax_takes(monkeypatch, own | pool.variables)
    if share is None:
        assert taken is None
        assert pool.usable_memory == pytest.approx(USABLE_MEMORY / processes)
        return
    assert taken == pytest.approx(share / processes, abs=2e-6)
    assert taken * processes <= share  # all of them together
    # The 2% are those that CUDA shows less of a GPU than its data sheet, and some for a layer.
    assert pool.usable_memory <= min(0.98 * taken, USABLE_MEMORY)
    assert DevicePool.of_process(own | pool.variables).share == pytest.approx(taken)


def test_a_process_that_nobody_gave_a_share_has_what_jax_takes(monkeypatch):
    assert DevicePool.of_process({}).share == jax_takes(monkeypatch, {}) == 0.75


@pytest.mark.parametrize("share", ["0", "-0.5", "1.01", "93", "93%", "nan", "inf", "most"])
@pytest.mark.parametrize("name", [NAME, OTHER_NAME])
def test_a_share_that_cannot_be_is_refused(name, share):
    with pytest.raises(ConfigError, match=f"{name}: must be the share .*\n  found: {share}\n"):
        DevicePool.of_run({name: share})


def test_two_names_of_one_share_are_refused(monkeypatch):
    both = {NAME: "0.9", OTHER_NAME: "0.9"}
    with pytest.raises(ConfigError, match=f"{OTHER_NAME}: is set beside {NAME}"):
        DevicePool.of_run(both)
    with pytest.raises(ValueError, match="is specified together"):  # which JAX says in a traceback
        jax_takes(monkeypatch, both)


# ---- the plan ------------------------------------------------------------------------------------


def write(folder, memory="2 GiB"):
    device = f"{{kind: h100, count: 1, memory: {memory}}}"
    (folder / "topology.yaml").write_text(TOPOLOGY.format(device=device))
    (folder / "run.yaml").write_text(RUN.format(folder=folder))
    return folder / "run.yaml"


def most_bytes(job: Job) -> float:
    return max(sum(stage.memory_bytes.values()) for stage in job.plan.stages)


@pytest.fixture(scope="module")
def full(tmp_path_factory) -> Job:
    """A job whose plan fills 80% of its devices."""
    folder = tmp_path_factory.mktemp("full")
    job = jobs.load(write(folder))
    job = jobs.load(write(folder, f"{most_bytes(job) / 0.8 / 2**20:.6f} MiB"))
    [share] = {round(most_bytes(job) / node.device.memory_bytes, 4) for node in job.topology.nodes}
    assert share == 0.8
    return job


def test_a_plan_counts_with_a_smaller_pool(full):
    file, memory_bytes = (
        full.run_dir.parent / "run.yaml",
        full.topology.nodes[0].device.memory_bytes,
    )
    assert jobs.load(file, env={NAME: "0.9"}).plan == full.plan
    small = jobs.load(file, env={NAME: "0.8"})
    assert 0.8 * memory_bytes * 0.95 > most_bytes(small)
    assert small.plan != full.plan
    with pytest.raises(PlanError, match=rf"fix: raise {NAME}, .*") as refused:
        jobs.load(file, env={NAME: "0.07"})
    assert "more than 7% of its" in str(refused.value)
    rehearsal = jobs.load(file, ["run.rehearse=true"], env={NAME: "no share"})
    assert rehearsal.pool({NAME: "no share"}) is None  # CPUs have no pool


def test_a_pool_below_the_parameters_is_refused_before_a_plan_is_searched(full, monkeypatch):
    monkeypatch.setattr(planner, "make_plan", pytest.fail)
    with pytest.raises(ConfigError, match=f"{NAME}: leaves too little of all GPUs together: the"):
        jobs.load(full.run_dir.parent / "run.yaml", env={NAME: "1e-9"})


def test_header_and_plan_say_the_pool(full, capsys, monkeypatch):
    needed = most_bytes(full) / 2**20
    room = full.topology.nodes[0].device.memory_bytes / 2**20
    line = "memory      JAX's pool is 93% of each GPU; the plan fills up to 86% of it "
    line += f"({needed:.3g} MiB of {0.93 * room:.3g} MiB)"
    done = run_launch_here(capsys, "plan", full.run_dir.parent / "run.yaml")
    assert line in done.stdout.splitlines()
    monkeypatch.setenv(NAME, "nothing")
    done = run_launch_here(capsys, "plan", full.run_dir.parent / "run.yaml")
    assert done.returncode == 2
    assert f"error: {NAME}: must be the share" in done.stderr


# ---- the processes -------------------------------------------------------------------------------


class Started(Exception):
    """The processes would run now."""


class Recording:
    """A launcher that keeps the environment of the first process."""

    address, port, sees_exits, files_each = "127.0.0.1", 0, True, 1

    def __init__(self, is_here):
        self.is_here, self.env = is_here, {}

    def start(self, start, events):
        self.env = dict(start.env)
        raise Started

    def end(self):
        pass


def train(job, launcher):
    supervisor.Supervisor(job, launcher).run()


def generate(job, launcher):
    job_files.save(job)
    found = type("Found", (), {"step": 0})
    generation_job.GenerationJob(job, launcher, print).run(found, None, print)


@pytest.mark.parametrize("verb", [train, generate])
@pytest.mark.parametrize(
    ("is_here", "own", "name", "share"),
    [
        (False, {}, NAME, "0.93"),
        (True, {}, NAME, "0.465"),  # both nodes are this machine, and its only GPU
        (True, {OTHER_NAME: "0.9"}, OTHER_NAME, "0.45"),
    ],
)
def test_workers_are_given_the_pool(full, monkeypatch, capsys, verb, is_here, own, name, share):
    small = dataclasses.replace(
        full,
        plan=dataclasses.replace(
            full.plan,
            stages=tuple(
                dataclasses.replace(stage, memory_bytes={"activations": 1.0})
                for stage in full.plan.stages
            ),
        ),
    )
    for variable, text in own.items():
        monkeypatch.setenv(variable, text)
    launcher = Recording(is_here)
    with pytest.raises(Started):
        verb(small, launcher)
    assert {n: launcher.env[n] for n in (NAME, OTHER_NAME) if n in launcher.env} == {name: share}
    if verb is train:
        shared = f" ({name})" * bool(own) + ", which 2 processes share" * is_here
        assert f"{100 * float(share):.3g}% of each GPU{shared};" in capsys.readouterr().out


class Overriding(LocalLauncher):
    """A launcher to nodes whose own environment has the last word."""

    is_here = False

    def start(self, start, events):
        env = {name: text for name, text in start.env.items() if name != NAME}
        super().start(dataclasses.replace(start, env={**env, OTHER_NAME: "0.7"}), events)


def test_a_process_with_a_smaller_pool_than_was_planned_refuses_before_jax_starts(full):
    """Nobody but the process sees what its node sets."""
    with pytest.raises(HolmesError) as refused:
        supervisor.Supervisor(full, Overriding(full.topology)).run()
    assert refused.value.exit_status == 2
    assert f"{OTHER_NAME}: leaves too little of each GPU: a stage needs" in str(refused.value)
    assert f"JAX's pool is 70% of each GPU ({OTHER_NAME})" in str(refused.value)


def test_a_job_whose_processes_do_not_fit_one_gpu_is_refused_before_they_start(full):
    with pytest.raises(HolmesError) as refused:
        supervisor.Supervisor(full, Recording(is_here=True)).run()
    assert refused.value.exit_status == 2
    assert "leaves too little of each GPU: a stage needs" in str(refused.value)
    assert "which 2 processes share" in str(refused.value)


def test_doctor_says_the_pool_and_what_does_not_fit(full):
    assert str(doctor._memory(full, Recording(is_here=False))).startswith(
        "ok       memory: JAX's pool is 93% of each GPU; the plan fills up to 86% of it ("
    )
    found = doctor._memory(full, Recording(is_here=True))
    assert found.level == "problem"
    assert "start fewer processes for each GPU" in found.fix


def test_a_process_with_another_share_than_was_planned_refuses(full):
    """JAX takes 75% where nobody sets a share, as in a notebook; this plan needs 83%."""
    assert full.check_pool({NAME: "0.83"}, [0, 1])
    with pytest.raises(ConfigError, match=f"fix: set {NAME} to 0.83 or more before JAX starts"):
        full.check_pool({}, [1])
