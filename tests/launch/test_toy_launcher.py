"""A launcher is added by one module and one row of the table: here, one that starts a script."""

from functools import partial

from holmesjax.report import metrics
from tests.jobs import run_launch, write_run

run_with_script_launcher = partial(run_launch, module="tests.launch.script_launcher")
SHORT = ("train.steps=2", "model.num_layers=2", "log.report=true")


def test_a_launcher_of_a_table_row_trains_a_job(tmp_path):
    run_file = write_run(tmp_path, {"a": (1,), "b": (1,)})
    words = ["train", run_file, "--launcher", "script", "--max-restarts", "0", *SHORT]
    done = run_with_script_launcher(tmp_path, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [record["step"] for record in metrics.read(tmp_path / "run")] == [1, 2]
    assert (tmp_path / "run" / "report.html").exists()
    assert len(list(tmp_path.glob("start-*.sh"))) == 2


def test_options_that_it_does_not_read_are_refused_by_its_row(tmp_path):
    run_file = write_run(tmp_path, {"a": (1,), "b": (1,)})
    words = ["train", run_file, "--launcher", "script", "--listen", "10.0.0.1"]
    done = run_with_script_launcher(tmp_path, *words)
    assert done.returncode == 2
    assert "--listen: is only for --launcher external or ssh or slurm" in done.stderr
