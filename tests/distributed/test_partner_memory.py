"""A run whose disks are lost comes back from the memory of partners, bit for bit."""

import json
import os
import shutil
import signal
import time

from holmesjax.checkpoints import manifest, stores
from holmesjax.distributed import partner_memory
from holmesjax.report import metrics
from tests.jobs import RunningJob, compiling_as_here, write_run
from tests.priced_saves import assert_priced_as_written

CLUSTERS = {"a": (1,), "b": (1,)}
SETTINGS = ["model.num_layers=2", "model.width=16", "checkpoint.every=4"]
SETTINGS += ["checkpoint.keep=20", "checkpoint.partner=true", "optimizer.schedule=constant"]
PART_OF = {"a": "part_0", "b": "part_1"}


def losses(folder):
    return {record["step"]: record["loss"] for record in metrics.read(folder)}


def start(tmp_path, steps):
    nodes = {"a-0": str(tmp_path / "run"), "b-0": str(tmp_path / "b")}
    entries = [{"node": node, "run_dir": place} for node, place in nodes.items()]
    (tmp_path / "hosts.yaml").write_text(json.dumps({"hosts": entries}))
    run = [tmp_path / "run.yaml", "--launcher", "local", "--hosts", tmp_path / "hosts.yaml"]
    return RunningJob(*run, *SETTINGS, f"train.steps={steps}", env=compiling_as_here())


def copies(tmp_path, cluster):
    """The steps of which the node of a cluster has a whole copy in memory, of the other's part."""
    folder = partner_memory.folder_of(stores.known_identifier(tmp_path / "run"), f"{cluster}-0")
    [part] = [part for other, part in PART_OF.items() if other != cluster]
    return {step for step, path in manifest.folders(folder) if (path / part).exists()}


def both(tmp_path):
    return copies(tmp_path, "a") & copies(tmp_path, "b")


def has_gone_on(tmp_path):
    """Whether steps were done after one of which all parts are in memory."""
    if not (tmp_path / "run" / stores.RECORD).exists() or not (steps := both(tmp_path)):
        return False
    return max(losses(tmp_path / "run"), default=0) > max(steps)


def test_lost_disks_come_back_from_memory(tmp_path):
    """All processes are killed, both disks lose all arrays, and only manifests are left."""
    write_run(tmp_path, CLUSTERS)
    home = tmp_path / "run"
    with start(tmp_path, 100_000) as job:  # it must not end by itself before it is killed
        deadline_s = time.monotonic() + 120
        while not has_gone_on(tmp_path):
            assert job.process.poll() is None, job.end()
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        job.note_workers()
        for pid in [job.process.pid, *job.workers()]:
            os.kill(pid, signal.SIGKILL)
    newest, undisturbed = max(both(tmp_path)), losses(home)
    assert max(undisturbed) > newest
    shutil.rmtree(tmp_path / "b")
    for _, path in manifest.folders(home):
        shutil.rmtree(path / "part_0", ignore_errors=True)
    with start(tmp_path, max(undisturbed) + 4) as job:
        assert job.end() == 0, job.output
    assert f"resuming after step {newest}" in job.output
    assert "a/a-0 | fetched part_" in job.output
    assert " at the link's " in job.output
    assert "b/b-0 | fetched part_" in job.output
    again = losses(home)
    assert undisturbed == {step: again[step] for step in undisturbed}
    assert_priced_as_written(tmp_path / "run")
    memory = partner_memory.folder_of(stores.known_identifier(home), "a-0")
    assert not memory.parent.exists()  # the run has ended, and gives it back
