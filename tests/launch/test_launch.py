"""The command line as a user meets it: real commands, real processes, real files."""

import json
import re
import shutil
import signal
import subprocess
import sys

import pytest
import yaml

from holmesjax.checkpoints import manifest
from holmesjax.errors import REQUEUE
from holmesjax.liveness import lease
from holmesjax.plan.plan import Plan
from holmesjax.report import metrics
from tests.jobs import HANG_S, ROOT, run_launch, run_launch_here

# One worker runs them all: they share what is made once.
pytestmark = pytest.mark.xdist_group("launch")

TINY = """
topology: configs/topologies/ib_roce.yaml
run: {dir: unset}
model: {num_layers: 2, width: 32, num_heads: 4, context_length: 32}
data: {corpus: python-stdlib}
train: {steps: 8, global_batch: 8, log_every_s: 0, eval_every: 4, eval_batches: 1}
log: {report: false, tensorboard: false}
optimizer: {learning_rate: 3.0e-3, warmup_steps: 2}
parallel:
  clusters: [ib, roce]
  tensor: 2
  microbatches: 2
  fsdp: 1
  schedule: 1f1b
  activation_checkpointing: none
checkpoint: {every: 3, keep: 3}
"""


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path


def losses(run_dir):
    return {record["step"]: record["loss"] for record in metrics.read(run_dir)}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of 8 steps that was never stopped, and what it printed."""
    folder = tmp_path_factory.mktemp("launch")
    (folder / "tiny.yaml").write_text(TINY)
    log = ("log.report=true", "log.tensorboard=null")
    done = run_launch("train", folder / "tiny.yaml", f"run.dir={folder / 'run'}", *log)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run", done


def test_a_run_leaves_everything_behind(finished):
    run_dir, _ = finished
    names = {path.name for path in run_dir.iterdir()}
    files = {"config.yaml", "topology.yaml", "plan.yaml", "metrics.jsonl", "timeline.json"}
    assert files | {"report.html", "checkpoints", "tensorboard"} <= names
    assert not [name for name in names if lease.FILE in name]
    records = metrics.read(run_dir)
    assert [record["step"] for record in records] == list(range(1, 9))
    assert [record["step"] for record in records if "val_loss" in record] == [4, 8]
    for record in records:
        assert {"loss", "grad_norm", "tokens_per_s", "step_time_s"} <= record.keys()
    assert 5.3 < records[0]["loss"] < 5.8  # ln 256 = 5.545: nothing is known yet
    assert records[-1]["loss"] < records[0]["loss"] - 0.3
    tasks = json.loads((run_dir / "timeline.json").read_text())["tasks"]
    kinds = [(task["stage"], task["kind"]) for task in tasks]
    assert kinds.count((0, "F")) == kinds.count((1, "B")) == 2
    assert all(0 <= task["start_s"] <= task["end_s"] for task in tasks)


def test_the_console_says_what_matters_and_nothing_else(finished):
    run_dir, done = finished
    said = done.stderr.splitlines()
    assert all(line.startswith("planning: ") for line in said)  # on a busy machine
    lines = done.stdout.splitlines()
    first_step = next(i for i, line in enumerate(lines) if line.startswith("step "))
    assert first_step <= 30
    head = "\n".join(lines[:first_step])
    for word in ("infiniband", "roce", "ethernet", "tensor 2", "microbatches", "1f1b", "bubble"):
        assert word in head
    assert str(run_dir) in head
    steps = [line for line in lines if line.startswith("step ") and "val loss" not in line]
    assert len(steps) == 8
    assert all(len(line) < 120 for line in lines)
    assert "\x1b" not in done.stdout
    for word in ("loss", "tok/s", "|g|", "lr", "s/step", "bubble", "links 64"):
        assert word in steps[-1]


def test_plan_prints_the_plan_of_the_run(finished, run_file, capsys):
    run_dir, _ = finished
    printed = run_launch_here(capsys, "plan", run_file, "--json", f"run.dir={run_dir}")
    assert printed.returncode == 0
    assert json.loads(printed.stdout) == yaml.safe_load((run_dir / "plan.yaml").read_text())
    plan = Plan.load(run_dir / "plan.yaml")
    assert [stage.cluster for stage in plan.stages] == ["ib", "roce"]
    text = run_launch_here(capsys, "plan", run_file).stdout.replace(str(run_file.parent), "")
    trained = finished[1].stdout.replace(str(run_dir), "unset")
    assert text in trained.replace(str(run_dir.parent), "")


STOPPED = """
import sys, threading
from holmesjax.report.recorder import Recorder
from holmesjax.trainer import Trainer
from launch.__main__ import main

is_stopping, stop, take = threading.Event(), Trainer.stop, Recorder.take

def note_and_stop(trainer):
    is_stopping.set()
    stop(trainer)

def take_and_wait(recorder, part):
    take(recorder, part)
    while not is_stopping.wait(0.01):  # in pieces, so that signals are heard
        pass

Trainer.stop, Recorder.take = note_and_stop, take_and_wait
sys.exit(main(["train", *sys.argv[1:]]))
"""


def test_interrupted_runs_resume_bit_for_bit(finished, run_file, tmp_path):
    """SIGINT in the middle, then SIGTERM, then to the end: the losses of a run never stopped.

    Each of the first two goes on after its first step only once it has heard its signal.
    """
    run_dir = tmp_path / "run"
    for number, status in ((signal.SIGINT, 0), (signal.SIGTERM, 75)):
        target = run_dir if run_dir.exists() else run_file
        arguments = () if run_dir.exists() else (f"run.dir={run_dir}",)
        process = subprocess.Popen(
            [sys.executable, "-c", STOPPED, target, *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            seen = []
            for line in process.stdout:
                seen.append(line)
                if line.startswith("step "):
                    process.send_signal(number)
                    break
            seen += process.stdout.readlines()
            assert process.wait(HANG_S) == status, "".join(seen)
        finally:
            process.kill()
            process.stdout.close()
            process.wait()
        assert f"python -m launch train {run_dir}" in "".join(seen)
        done = manifest.find(run_dir)[0].step
        assert max(losses(run_dir)) == done < 8
    last = run_launch("train", run_dir)
    assert last.returncode == 0, last.stdout + last.stderr
    assert f"resuming after step {done}" in last.stdout
    assert losses(run_dir) == losses(finished[0])


def test_a_damaged_checkpoint_is_noticed_and_one_before_resumes_on_another_plan(
    finished, tmp_path, capsys
):
    """From step 3 on one stage: the same losses up to rounding, until two saves in a row fail."""
    run_dir = tmp_path / "run"
    shutil.copytree(finished[0], run_dir)
    checkpoints = run_dir / "checkpoints"
    shutil.rmtree(checkpoints / "step_00000006")
    for step in (4, 6):  # where a folder should be
        (checkpoints / f"step_{step:08d}").touch()
    newest = checkpoints / "step_00000008"
    largest = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    damaged = bytearray(largest.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    largest.write_bytes(damaged)
    text = run_launch_here(capsys, "generate", run_dir, "--prompt", "def ", "--max-tokens", "20")
    assert text.returncode == 0, text.stderr
    assert text.stdout.startswith("def ")
    *warned, rate = text.stderr.splitlines()
    assert "is damaged" in "".join(warned)
    assert re.fullmatch(r"5 tokens of prompt and the first \d+ in .* tokens/s", rate)
    assert newest.exists()  # a reader renames nothing

    one_node = ["topology=configs/topologies/one_node.yaml", "parallel.clusters=null"]
    settings = [*one_node, "parallel.microbatches=1", "checkpoint.every=2"]
    settings += ["checkpoint.failing_minutes=0"]
    done = run_launch("train", run_dir, *settings)
    assert done.returncode == REQUEUE, done.stdout + done.stderr
    assert "is damaged" in done.stdout
    assert "resuming after step 3" in done.stdout
    assert [path.name for path in checkpoints.glob("*.damaged")] == ["step_00000008.damaged"]
    assert done.stdout.count("warning: no checkpoint after step 4: File exists") == 1
    assert "step 5/8" in done.stdout
    assert "a checkpoint could not be written" in done.stderr
    assert "Traceback" not in done.stderr
    got, want = losses(run_dir), losses(finished[0])
    for step in (4, 5):
        assert got[step] == pytest.approx(want[step], rel=1e-5)


def test_another_model_is_refused(finished, capsys):
    done = run_launch_here(capsys, "train", finished[0], "model.width=64")
    assert done.returncode == 2
    assert "model.width" in done.stderr


MISTAKES = [
    (["train.stepz=3"], "train.stepz", "did you mean"),
    (["train.steps=many"], "train.steps", "whole number"),
    (["train.global_batch=9"], "train.global_batch", "multiple"),
    (["topology=nowhere.yaml"], "topology", "no such file"),
    (["parallel.stages=4"], "parallel.stages", ""),
    (["parallel.layers=[2,2]"], "parallel.layers", "sum"),
    (["train"], "train", ""),
]


@pytest.mark.parametrize("overrides, where, words", MISTAKES)
@pytest.mark.parametrize("verb", ["train", "plan"])
def test_mistakes_are_refused_at_once(run_file, capsys, verb, overrides, where, words):
    done = run_launch_here(capsys, verb, run_file, *overrides)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("error: ")
    for word in (where, words, "found:", "fix:"):
        assert word in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["train"],
        ["trane", "x.yaml"],
        ["train", "missing.yaml"],
        ["generate", "/nowhere"],
        ["plan", "/"],
    ],
)
def test_wrong_command_lines_exit_with_2(capsys, arguments):
    done = run_launch_here(capsys, *arguments)
    assert done.returncode == 2
    assert done.stderr


def test_a_second_run_file_in_a_used_folder_is_not_mixed_up(finished, run_file, capsys):
    """The same command again, as a scheduler repeats it, goes on where the run is."""
    done = run_launch_here(capsys, "train", run_file, f"run.dir={finished[0]}")
    assert done.returncode == 0
    assert "8 of 8 steps are done" in done.stdout
