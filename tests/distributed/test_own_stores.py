"""Runs whose processes have run folders of their own: what is killed goes on, bit for bit."""

import json
import os
import signal
import time

import pytest

from holmesjax.checkpoints import manifest
from holmesjax.report import metrics
from tests.jobs import RunningJob, compiling_once, write_run

CLUSTERS = {"a": (1,), "b": (1,)}
SETTINGS = ["model.num_layers=2", "model.width=16", "train.steps=8", "checkpoint.every=2"]
SETTINGS += ["checkpoint.keep=2"]


def write_hosts(folder, **run_dirs):
    """A hosts file, by node."""
    hosts = [
        {"node": node, "run_dir": str(folder / name)}
        for node, name in {
            "a-0": "run",
            **{k.replace("_", "-"): v for k, v in run_dirs.items()},
        }.items()
    ]
    path = folder / "hosts.yaml"
    path.write_text(json.dumps({"hosts": hosts}))
    return path


def losses(folder):
    return {record["step"]: record["loss"] for record in metrics.read(folder)}


def start(tmp_path, *words, settings=SETTINGS):
    hosts = write_hosts(tmp_path, b_0="site_b")
    run = [tmp_path / "run.yaml", "--launcher", "local", "--hosts", hosts]
    return RunningJob(*run, *settings, *words, env=compiling_once(tmp_path))


def kill_after(job, tmp_path, step):
    """Kills everything with SIGKILL once there is a checkpoint after a step."""
    deadline_s = time.monotonic() + 120
    while step not in dict(manifest.finished(tmp_path / "run")):
        assert job.process.poll() is None and time.monotonic() < deadline_s, job.output
        time.sleep(0.02)
    job.note_workers()
    for pid in [job.process.pid, *job.workers()]:
        os.kill(pid, signal.SIGKILL)


def test_a_run_of_two_folders_resumes_on_one_and_back_on_two(tmp_path):
    run_file = write_run(tmp_path, CLUSTERS)
    undisturbed = tmp_path / "undisturbed"
    with RunningJob(
        run_file,
        *("--launcher", "local", *SETTINGS, f"run.dir={undisturbed}"),
        env=compiling_once(tmp_path),
    ) as job:
        assert job.end() == 0, job.output
    with start(tmp_path) as job:
        kill_after(job, tmp_path, 2)
    with start(tmp_path, "parallel.clusters=[a]") as job:
        kill_after(job, tmp_path, 6)
    with start(tmp_path) as job:
        assert job.end() == 0, job.output
    print(job.output)
    import subprocess

    print(
        subprocess.run(
            f"cd {tmp_path}; find run site_b | sort; cat run/checkpoints/*8/manifest.json | tail -30; grep -rh fetch run/logs",
            shell=True,
            text=True,
            capture_output=True,
        ).stdout
    )
    assert losses(tmp_path / "run") == losses(undisturbed)
