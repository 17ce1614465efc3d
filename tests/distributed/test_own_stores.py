"""A run whose nodes have run folders of their own: what is killed goes on, with the same losses."""

import io
import json
import os
import shutil
import signal
import time

import pytest

from holmesjax import Trainer
from holmesjax.checkpoints import manifest, skipped_data
from holmesjax.files import places
from holmesjax.report import metrics
from tests.data.object_store import object_store
from tests.jobs import HANG_S, RunningJob, compiling_as_here, run_launch_here, write_run

CLUSTERS = {"a": (1,), "b": (1,)}
SETTINGS = ["model.num_layers=2", "model.width=16", "checkpoint.every=2"]
SETTINGS += ["optimizer.schedule=constant"]  # however many steps there are
ENDLESS = "train.steps=100000"
ROUNDING = 1e-6  # of losses, where one site has gone on alone: its plan has other programs


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


def newest(folder):
    return max(dict(manifest.finished(folder)), default=0)


def kill_with_a_checkpoint(job, tmp_path):
    """Kills everything with SIGKILL once there is a checkpoint; the step of the newest."""
    deadline_s = time.monotonic() + HANG_S
    while not newest(tmp_path / "run"):
        assert job.process.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    job.note_workers()
    for pid in [job.process.pid, *job.workers()]:
        os.kill(pid, signal.SIGKILL)
    return newest(tmp_path / "run")


def parts(folder, step):
    return sorted(path.name for path in manifest.folder_of(folder, step).glob("part_?"))


def slowly(step):
    """Lets a store take its time to list a checkpoint, which then goes behind the last step."""
    late = f"step_{step:08}"

    def rule(method, path, env):
        is_listed = method == "GET" and late in env["QUERY_STRING"]
        time.sleep(3 if is_listed and "manifest" not in env["QUERY_STRING"] else 0)

    return rule


def test_a_run_of_two_folders_resumes_on_one_and_back_on_two(tmp_path, capsys):
    """Site b keeps its parts in an object store, and loses its disk with each kill."""
    with object_store("site-b") as store:
        trains_to_the_same_losses(tmp_path, capsys, store)


def trains_to_the_same_losses(tmp_path, capsys, store):
    run_file = write_run(tmp_path, CLUSTERS)
    home, far = tmp_path / "run", places.folder_of(url_of(tmp_path))
    with start(tmp_path, ENDLESS) as job:
        first = kill_with_a_checkpoint(job, tmp_path)
    assert (parts(home, first), parts(far, first)) == (["part_0"], ["part_1"])
    shutil.rmtree(far)
    alone, last = first + 4, first + 6
    with start(tmp_path, "parallel.clusters=[a]", f"train.steps={alone}") as job:
        assert job.end() == 0, job.output
    assert parts(home, first) == ["part_0", "part_1"]
    # What all others have written is taken away, everywhere.
    of_one = ["checkpoint.keep=1", "checkpoint.keep_every_hours=null"]
    store.refusals.rule = slowly(first)
    far.mkdir(exist_ok=True)  # with a record of an earlier start that the launcher has no more
    (far / skipped_data.RECORD).write_text('[{"step": 0, "spike": 1, "sequences": 4}]')
    with start(tmp_path, f"train.steps={last}", *of_one) as job:
        assert job.end() == 0, job.output
    assert "b/b-0 | fetched part_0" in job.output
    assert (parts(home, last), parts(far, last)) == (["part_0"], ["part_1"])
    assert not (far / "metrics.jsonl").exists()
    shutil.rmtree(far)
    names = [name.split("step_")[1] for name in store.find(f"site-b/{tmp_path.name}/checkpoints")]
    written = {tuple(name.split("/")[::2][:2]) for name in names if "part_" in name}
    assert written == {(f"{last:08}", "part_1")}  # below the start that wrote it
    undisturbed = tmp_path / "undisturbed"
    words = [*SETTINGS, f"train.steps={last}", f"run.dir={undisturbed}"]
    Trainer(run_file, words, io.StringIO()).run()
    ours, theirs = losses(home), losses(undisturbed)
    assert ours == pytest.approx(theirs, rel=ROUNDING)
    assert all(ours[step] == theirs[step] for step in range(1, first + 1))
    assert_gathered_and_verified(tmp_path, capsys)


def assert_gathered_and_verified(tmp_path, capsys):
    """The gathered checkpoint is whole by itself."""
    home, here = tmp_path / "run", tmp_path / "gathered"
    hosts = ("--hosts", tmp_path / "hosts.yaml")
    done = run_launch_here(capsys, "gather", home, "--to", here, "--launcher", "local", *hosts)
    assert done.returncode == 0, done.stderr
    [gathered] = manifest.find(here)
    manifest.verify(gathered)
    assert not manifest.elsewhere(gathered)
    done = run_launch_here(capsys, "verify", here)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("as written") == 2
