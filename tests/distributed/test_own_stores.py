"""A run whose nodes have run folders of their own: what is killed goes on, bit for bit."""

import json
import os
import shutil
import signal
import time

from holmesjax.checkpoints import manifest
from holmesjax.files import places
from holmesjax.report import metrics
from tests.data.object_store import object_store
from tests.jobs import RunningJob, compiling_as_here, run_launch, write_run

CLUSTERS = {"a": (1,), "b": (1,)}
SETTINGS = ["model.num_layers=2", "model.width=16", "train.steps=8", "checkpoint.every=2"]
SETTINGS += ["checkpoint.keep_every_hours=null"]  # so that the first is taken away, everywhere


def losses(folder):
    return {record["step"]: record["loss"] for record in metrics.read(folder)}


def url_of(tmp_path):
    return f"s3://site-b/{tmp_path.name}"


def start(tmp_path, *words):
    nodes = {"a-0": str(tmp_path / "run"), "b-0": url_of(tmp_path)}
    entries = [{"node": node, "run_dir": place} for node, place in nodes.items()]
    (tmp_path / "hosts.yaml").write_text(json.dumps({"hosts": entries}))
    run = [tmp_path / "run.yaml", "--launcher", "local", "--hosts", tmp_path / "hosts.yaml"]
    return RunningJob(*run, *SETTINGS, *words, env=compiling_as_here())


def kill_after(job, tmp_path, step):
    """Kills everything with SIGKILL once there is a checkpoint after a step."""
    deadline_s = time.monotonic() + 120
    while step not in dict(manifest.finished(tmp_path / "run")):
        assert job.process.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    job.note_workers()
    for pid in [job.process.pid, *job.workers()]:
        os.kill(pid, signal.SIGKILL)


def parts(folder, step):
    return sorted(path.name for path in manifest.folder_of(folder, step).glob("part_?"))


def test_a_run_of_two_folders_resumes_on_one_and_back_on_two(tmp_path):
    """Site b keeps its parts in an object store, and loses its disk with each kill."""
    with object_store("site-b") as store:
        trains_to_the_same_bits(tmp_path, store)


def trains_to_the_same_bits(tmp_path, store):
    run_file = write_run(tmp_path, CLUSTERS)
    undisturbed = tmp_path / "undisturbed"
    done = run_launch("train", run_file, *SETTINGS, f"run.dir={undisturbed}")
    assert done.returncode == 0, done.stderr
    home, far = tmp_path / "run", places.folder_of(url_of(tmp_path))
    with start(tmp_path) as job:
        kill_after(job, tmp_path, 2)
    assert (parts(home, 2), parts(far, 2)) == (["part_0"], ["part_1"])
    shutil.rmtree(far)
    with start(tmp_path, "parallel.clusters=[a]") as job:
        kill_after(job, tmp_path, 6)
    assert parts(home, 2) == ["part_0", "part_1"]
    with start(tmp_path) as job:
        assert job.end() == 0, job.output
    assert "b/b-0 | fetched part_0" in job.output
    assert (parts(home, 8), parts(far, 8)) == (["part_0"], ["part_1"])
    assert not (far / "metrics.jsonl").exists()
    shutil.rmtree(far)
    names = [name.split("step_")[1] for name in store.find(f"site-b/{tmp_path.name}/checkpoints")]
    found = {tuple(name.split("/")[::2][:2]) for name in names if "part_" in name}
    assert found == {("00000008", "part_1")}  # below the start that wrote it
    assert losses(home) == losses(undisturbed)
    assert_gathered_and_verified(tmp_path)


def assert_gathered_and_verified(tmp_path):
    """The gathered checkpoint is whole by itself."""
    home, here = tmp_path / "run", tmp_path / "gathered"
    hosts = ("--hosts", tmp_path / "hosts.yaml")
    done = run_launch("gather", home, "--to", here, "--launcher", "local", *hosts)
    assert done.returncode == 0, done.stderr
    [found] = manifest.find(here)
    manifest.verify(found)
    assert not manifest.elsewhere(found)
    done = run_launch("verify", here)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("as written") == 2
