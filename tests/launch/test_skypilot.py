"""The launcher `skypilot`: its tasks against SkyPilot's own schema, and what their nodes run.

There is no cloud here. The tasks run as SkyPilot would run them, on nodes that are folders.
"""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from holmesjax import job as jobs
from holmesjax.errors import HolmesError
from holmesjax.report import metrics
from launch.launchers import skypilot
from launch.launchers.table import LauncherOptions
from tests.jobs import HANG_S, ROOT, compiling_once, free_listen, write_run
from tests.launch.gpu_jobs import gpu_job
from tests.one_device import RTOL
from tests.plain_losses import plain_losses

EVERYTHING = """
listen: 10.0.0.1:7000
controller: 203.0.113.7:7001
setup: [pip install holmesjax, "echo 'ready'"]
workdir: .
python: python3.12
address_command: hostname -I | cut -d' ' -f1
env: {HF_HOME: /data/hf}
resources: {use_spot: true, disk_size: 512}
clusters:
  - name: hopper
    resources: {infra: aws/us-east-1, use_spot: false}
    env: {NCCL_IB_HCA: mlx5}
    run_dir: s3://runs/hopper
    file_mounts: {/data: s3://data}
  - {name: ampere, resources: {infra: gcp, instance_type: a2-ultragpu-4g}, run_dir: /shared/run}
"""
CLUSTERS = {"a": (1, 1), "b": (1,)}
SETTINGS = ["model.num_layers=2", "model.width=16", "train.steps=6"]


def write(tmp_path, job, text=EVERYTHING, **options) -> dict[str, dict]:
    """The tasks of a job, by the name of their cluster."""
    file = tmp_path / "sky.yaml"
    file.write_text(text)
    assert skypilot.for_job(job, LauncherOptions(options=str(file), **options)) == 0
    paths = sorted((job.run_dir / "skypilot").iterdir())
    return {path.stem: yaml.safe_load(path.read_text()) for path in paths}


def test_every_option_has_its_place_in_the_tasks(tmp_path, capsys):
    job = gpu_job(tmp_path, "distributed.ports=[7100, 7199]")
    tasks = write(tmp_path, job, max_restarts=5, allow=("source",))
    assert list(tasks) == ["run-ampere", "run-hopper"]
    ampere, hopper = tasks.values()
    assert hopper["resources"] == {
        "use_spot": False,
        "disk_size": 512,
        "infra": "aws/us-east-1",
        "accelerators": "H100:8",
        "ports": ["7100-7199"],
    }
    assert "accelerators" not in ampere["resources"]  # the type of the machine says it
    key = job.run_dir / "skypilot.key"
    assert key.stat().st_mode & 0o777 == 0o600
    for task, numbers in ((hopper, "0 1"), (ampere, "2 3")):
        assert task["num_nodes"] == 2
        assert task["file_mounts"]["~/.holmesjax/run.key"] == str(key.absolute())
        assert task["setup"] == "set -e\npip install holmesjax\necho 'ready'\n"
        assert task["envs"]["HOLMES_CONTROLLER"] == "203.0.113.7:7001"
        assert task["envs"]["HF_HOME"] == "/data/hf"
        assert "xla_gpu" in task["envs"]["XLA_FLAGS"]
        assert f"numbers=({numbers})" in task["run"]
    assert hopper["envs"]["NCCL_IB_HCA"] == "mlx5"
    assert hopper["file_mounts"]["/data"] == "s3://data"
    assert "python3.12 -m launch worker s3://runs/hopper;" in hopper["run"]
    assert "python3.12 -m launch worker /shared/run;" in ampere["run"]
    printed = capsys.readouterr().out
    assert "--listen 10.0.0.1:7000 --max-restarts 5 --allow source\n" in printed
    assert "sky down run-hopper run-ampere" in printed


def bash(script, folder: Path, **env) -> subprocess.CompletedProcess:
    folder.mkdir(exist_ok=True)
    env = {"HOME": str(folder), "PATH": os.environ["PATH"], **env}
    words = ["bash", "-c", script]
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=HANG_S)


def test_each_process_of_a_node_starts_again_until_it_is_done(tmp_path):
    """Nodes have four processes each; what another one does is nothing to them.

    Each sees a GPU of its own.
    """
    text = EVERYTHING.replace("python3.12", str(tmp_path / "python"))
    tasks = write(tmp_path, gpu_job(tmp_path, "distributed.processes=device"), text=text)
    assert "i < 4" in tasks["run-ampere"]["run"]
    script = tasks["run-ampere"]["run"].replace("sleep 5", "sleep 0.01")
    (tmp_path / "python").write_text(f"""#!/bin/sh
said="$HOLMES_PROCESS gpu=$CUDA_VISIBLE_DEVICES $HOLMES_ADVERTISED $HOLMES_KEY_FILE $*"
echo "$said" >> {tmp_path}/calls
last=$(grep -c "^$HOLMES_PROCESS " {tmp_path}/calls)
set -- $STATUSES
shift $((last - 1))
exit $1
""")
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "home/.holmesjax").mkdir(parents=True)
    lost = script.replace("address=$(hostname -I | cut -d' ' -f1)", "address=$(echo '<html>')")
    lost = bash(lost.replace("chmod", "true"), tmp_path / "home", SKYPILOT_NODE_RANK="0")
    assert (lost.returncode, "prints no address: '<html>'" in lost.stdout) == (2, True)
    key = tmp_path / "home/.holmesjax/run.key"
    key.touch(0o644)
    for statuses, rank, ends, visible in (
        ("1 137 75 0", "1", 0, {}),
        ("0", "0", 0, {"CUDA_VISIBLE_DEVICES": "7,5,3,1"}),
        ("75 2", "0", 2, {}),
    ):
        (tmp_path / "calls").unlink(missing_ok=True)
        env = {"SKYPILOT_NODE_RANK": rank, "STATUSES": statuses, **visible}
        done = bash(script, tmp_path / "home", **env)
        assert done.returncode == ends, done.stderr
        calls = (tmp_path / "calls").read_text().splitlines()
        numbers = re.search(r"numbers=\((.*)\)", script)[1].split()
        mine = numbers[4 * int(rank) : 4 * int(rank) + 4]
        assert {call.split()[0] for call in calls} <= {*mine}
        if ends == 0:  # a mistake of one ends the script at once
            assert len(calls) == 4 * len(statuses.split())
            gpus = visible.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(",")
            given = {tuple(call.split()[:2]) for call in calls}
            assert given == {(n, f"gpu={gpu}") for n, gpu in zip(mine, gpus, strict=True)}
        rest = rf'{{"ethernet": \["[0-9.]+"\]}} {key} -m launch worker /shared/run'
        assert all(re.fullmatch(rf"\d+ gpu=\d {rest}", call) for call in calls), calls
    assert key.stat().st_mode & 0o777 == 0o600


def test_tasks_and_launcher_train_a_run(tmp_path, capsys):
    """Each node has a home of its own. The losses are those of one device."""
    listen = free_listen()
    text = f"listen: {listen}\nsetup: []\npython: {sys.executable}\n"
    text += f"clusters: [{{name: a, run_dir: {tmp_path}/shared}}]\n"
    job = jobs.load(write_run(tmp_path, CLUSTERS), SETTINGS)
    tasks = write(tmp_path, job, text=text)
    [line] = re.findall(r"^  (HOLMES_KEY_FILE=.*)$", capsys.readouterr().out, re.MULTILINE)
    scripts = [(line.replace(" python ", f" {shlex.quote(sys.executable)} "), {}, tmp_path)]
    for task in tasks.values():
        for rank in range(task["num_nodes"]):
            home = tmp_path / f"home{len(scripts)}"
            for there, here in task["file_mounts"].items():
                place = Path(there.replace("~", str(home)))
                place.parent.mkdir(parents=True)
                place.write_bytes(Path(here).read_bytes())
            address = f'["127.0.8.{len(scripts)}"]'
            nics = ", ".join(f'"{fabric}": {address}' for fabric in FABRICS)
            env = {"SKYPILOT_NODE_RANK": str(rank), "HOLMES_ADDRESSES": f"{{{nics}}}"}
            scripts.append((task["run"], {**task["envs"], **env}, home))
    started = []
    try:
        for number, (script, env, home) in enumerate(scripts):
            env = {**os.environ, **compiling_once(tmp_path), **env, "HOME": str(home)}
            how = {"env": {**env, "PYTHONPATH": str(ROOT)}, "cwd": ROOT, "start_new_session": True}
            with (tmp_path / f"{number}.out").open("w") as output:
                words = ["bash", "-c", script]
                started.append(subprocess.Popen(words, stdout=output, stderr=output, **how))
        statuses = [process.wait(HANG_S) for process in started]
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    said = "".join(path.read_text() for path in sorted(tmp_path.glob("*.out")))
    assert statuses == [0] * len(scripts), said
    losses = [record["loss"] for record in metrics.read(job.run_dir)]
    np.testing.assert_allclose(losses, plain_losses(*SETTINGS), rtol=RTOL)
    assert (tmp_path / "shared").is_dir()
    assert (tmp_path / "home3/runs/run").is_dir()


FABRICS = ("infiniband", "roce", "ethernet")
WRONG = {
    "listen: 10.0.0.1\nsetup: []": r"sky\.yaml:1: listen: needs a port",
    "listen: 0.0.0.0:7000\nsetup: []": "listen: must be one address of this machine",
    "listen: 10.0.0.1:7000": "setup",
    "listen: 10.0.0.1:7000\nsetup: pip install x": "setup",
    "listen: 10.0.0.1:7000\nsetup: []\ncontroller: somewhere": "controller: must be HOST:PORT",
    "listen: 10.0.0.1:7000\nsetup: []\nworkdir: /no/such": "workdir: is no folder of this machine",
    "listen: 10.0.0.1:7000\nsetup: []\nenv: {HOLMES_X: a}": "cannot be the name of a variable",
    "listen: 10.0.0.1:7000\nsetup: []\nclusters: [{name: hoper}]": "no such cluster",
    "listen: 10.0.0.1:7000\nsetup: []\nclusters: [{name: hopper, image: x}]": "image",
    "listen: 10.0.0.1:7000\nsetup: []\nclusters: [{name: hopper, run_dir: x}]": "whole path",
    "listen: 10.0.0.1:7000\nsetup: []\nrun_dir: ~/x": "run_dir: must be a whole path",
    "listen: 10.0.0.1:7000\nsetup: []": "a run folder that the nodes of hopper share",
}


@pytest.mark.parametrize("text", WRONG)
def test_options_that_cannot_be_are_told(text, tmp_path):
    job = gpu_job(tmp_path)
    with pytest.raises(HolmesError, match=WRONG[text]):
        write(tmp_path, job, text=text)
    assert not (job.run_dir / "skypilot").exists()


def test_a_device_without_a_name_in_skypilot_needs_one(tmp_path, monkeypatch):
    monkeypatch.delitem(skypilot.ACCELERATORS, "h100")
    with pytest.raises(HolmesError, match="what SkyPilot calls a h100"):
        write(tmp_path, gpu_job(tmp_path), text="listen: 10.0.0.1:7000\nsetup: []\nrun_dir: /x\n")


def test_two_clusters_of_one_name_are_refused(tmp_path):
    text = "listen: 10.0.0.1:7000\nsetup: []\n"
    job = jobs.load(write_run(tmp_path, {"a_b": (1,), "a-b": (1,)}))
    with pytest.raises(HolmesError, match="two clusters that SkyPilot would call run-a-b"):
        write(tmp_path, job, text=text)


def test_no_options_are_too_few(tmp_path):
    with pytest.raises(HolmesError, match="needs an address of the launcher"):
        skypilot.for_job(gpu_job(tmp_path), LauncherOptions())


READ = """
import json, sys
import jsonschema
from sky.utils import schemas
task = json.load(sys.stdin)
for part, schema in ((task, schemas.get_task_schema()),
                     (task["resources"], schemas.get_resources_schema())):
    for error in jsonschema.Draft202012Validator(schema).iter_errors(part):
        print(error.message)
"""


@pytest.mark.exhaustive
def test_the_tasks_fit_the_schema_of_skypilot(tmp_path):
    python = Path(sys.prefix) / "skypilot/bin/python"
    if not python.exists():
        pytest.skip("needs SkyPilot: make test-all")

    def mistakes_in(task):
        how = {"capture_output": True, "text": True, "timeout": HANG_S, "check": True}
        return subprocess.run([python, "-c", READ], input=json.dumps(task), **how).stdout

    tasks = write(tmp_path, gpu_job(tmp_path, "distributed.ports=[7100, 7199]"))
    for task in tasks.values():
        assert mistakes_in(task) == ""
    task["resources"]["ports"] = {"first": 7100}
    assert "ports" in mistakes_in(task) or "7100" in mistakes_in(task)
    assert "nodes" in mistakes_in({**tasks["run-ampere"], "nodes": 2})
