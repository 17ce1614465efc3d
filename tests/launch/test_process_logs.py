"""The output of processes is kept, in bounds, and noise in it does not reach the console."""

from pathlib import Path

from holmesjax import job as jobs
from holmesjax.plan.processes import make_processes
from launch import process_logs
from launch.process_logs import is_noise
from tests.jobs import write_run
from tests.launch.scripted_supervisor import CLUSTERS


def test_what_gloo_prints_stays_in_the_logs_however_it_is_cut_or_mixed():
    line = (
        "[Gloo] Rank 1 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3"
    )
    cuts = range(1, len(line))
    fragments = [part for at in cuts for part in (line[:at], line[at:]) if part.strip()]
    pieces = ["[Gloo] Rank ", "[Gloo] Rank ", "0", "1", " is connected to ", " is connected to "]
    mixed = ["".join(pieces), "3 peer ranks. 3", " | 1".strip(" |"), "11"]
    assert not [text for text in (line, *fragments, *mixed) if not is_noise(text)]
    said = [
        "",
        "Traceback (most recent call last):",
        "RuntimeError: Gloo all-reduce failed",
        "step 1",
    ]
    assert not [text for text in said if is_noise(text)]


def test_logs_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(process_logs, "LIMIT_BYTES", 1000)
    job = jobs.load(write_run(tmp_path, CLUSTERS), ["model.num_layers=2", "model.width=16"])
    processes = make_processes(job.plan, job.topology, job.config.distributed.processes)
    job.run_dir.mkdir()
    logs = process_logs.ProcessLogs(job.run_dir, processes, Path.rename)
    for number in range(500):
        logs.write(0, f"line {number}")
    files = sorted(logs.folder.iterdir())
    assert [path.name for path in files] == [logs.path(0).name, f"{logs.path(0).name}.1"]
    assert all(path.stat().st_size <= 1010 for path in files)
    kept = "".join(path.read_text() for path in reversed(files)).splitlines()
    assert kept == [f"line {number}" for number in range(500 - len(kept), 500)]
