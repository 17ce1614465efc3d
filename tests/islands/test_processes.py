"""Islands of processes: the bits of one process, whoever is killed, and who is named."""

import io
import os
import random
import signal

import numpy as np
import pytest

from holmesjax import Trainer
from holmesjax.checkpoints import manifest
from holmesjax.report import metrics
from tests.jobs import ROOT, RunningJob, compiling_once, external_job, write_run

SETTINGS = [
    *("parallel.clusters=null", "parallel.across=local_updates", "parallel.every=2"),
    *("parallel.microbatches=1", "model.num_layers=2", "model.width=16", "model.num_heads=2"),
    *("train.steps=7", "train.eval_every=4", "train.eval_batches=1", "checkpoint.every=3"),
]
# Each fragment meets every two steps, and lands a step later.
STREAM = ["parallel.fragments=2", "parallel.delay=1", "parallel.blend=0.75"]
PAIRS = ["parallel.islands=[[a,b],[c,d]]", "parallel.stages=2"]
CLUSTERS = dict.fromkeys("abcd", (1,))


def saved(run_dir, step):
    """The digests of all arrays of a checkpoint."""
    arrays = manifest.at(manifest.folder_of(run_dir, step)).manifest["arrays"]
    return {name: facts["digest"] for name, facts in arrays.items()}


def assert_same_runs(one, other, streams=False):
    """Both runs have the same bits between two meetings and at their end, and the same numbers.

    If fragments stream, how many bytes come while which step goes on is chance. Pairs that go on
    from a checkpoint have the mean in it, whose bytes they do not send again.
    """
    for step in (3, 7):
        assert saved(one, step) == saved(other, step)
    ours, theirs = (list(metrics.read(folder)) for folder in (one, other))
    assert [x.get("val_loss") for x in ours] == [x.get("val_loss") for x in theirs]
    for name in ("loss", "grad_norm", "learning_rate"):
        np.testing.assert_allclose(
            *([x[name] for x in records] for records in (ours, theirs)), rtol=3e-7
        )
    if streams:
        return
    assert [x["link_bytes"] for x in ours] == [x["link_bytes"] for x in theirs]
    assert ours[3]["link_bytes"].keys() > ours[2]["link_bytes"].keys()


KILLS = """
import os
from pathlib import Path

begun = Path({folder!r}, "begun")
if os.environ.get("HOLMES_PROCESS") == "{number}" and not begun.exists():
    begun.touch()
    from tests import odd_worker
    odd_worker.die_at({batch})
"""


def killing(folder, number, after_step):
    """Variables with which a process of a job kills itself after a step, the first time.

    It has then taken the batches of these steps, and that of the validation after step 4.
    """
    batch = after_step + (after_step > 4) + 1
    text = KILLS.format(folder=str(folder), number=number, batch=batch)
    (folder / "sitecustomize.py").write_text(text)
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


def test_a_process_is_killed_and_the_bits_are_those_of_one_process(tmp_path):
    """Each island is a pipeline of two stages. A fragment is on its way after each step.

    The islands take unlike shares of a batch, which no validation is a multiple of. Processes keep
    the state of meetings in memory of the host.
    """
    run_file = write_run(tmp_path, CLUSTERS)
    settings = [*SETTINGS, *PAIRS, *STREAM, "parallel.shares=[5,3]"]
    words = [run_file, "--launcher", "local", "--max-restarts", 1, *settings]
    words += ["parallel.outer_memory=host"]
    env = compiling_once(tmp_path) | killing(tmp_path, 3, after_step=5)
    with RunningJob(*words, env=env) as job:
        assert job.end() == 0, job.output
    assert "starting again" in job.output
    one = [*settings, f"run.dir={tmp_path / 'one'}"]
    Trainer(run_file, one, io.StringIO()).run()
    assert_same_runs(tmp_path / "run", tmp_path / "one", streams=True)


RULES = [
    pytest.param("{rule: noloco}", marks=pytest.mark.exhaustive),
    pytest.param("{rule: co2}", marks=pytest.mark.exhaustive),
    pytest.param("{rule: eager, codec: bfloat16}", marks=pytest.mark.exhaustive),
    pytest.param("{rule: nesterov, codec: bfloat16}", marks=pytest.mark.exhaustive),
]


@pytest.mark.exhaustive
def test_pairs_of_processes_have_the_bits_of_one_process(tmp_path):
    """Three islands, of which one sits out each meeting."""
    assert_bits_of_one_process(tmp_path, "{rule: noloco, codec: bfloat16}", kills=False)


@pytest.mark.parametrize("rule", RULES)
def test_rules_have_the_bits_of_one_process_whoever_is_killed(tmp_path, rule):
    assert_bits_of_one_process(tmp_path, rule, kills=True)


def assert_bits_of_one_process(tmp_path, rule, kills):
    run_file = write_run(tmp_path, dict.fromkeys("abc", (1,)))
    settings = [*SETTINGS, "train.global_batch=12", f"parallel.outer={rule}"]
    settings += ["model.num_layers=1"]
    words = [run_file, "--launcher", "local", "--max-restarts", 1, *settings]
    env = compiling_once(tmp_path) | (killing(tmp_path, 1, after_step=4) if kills else {})
    with RunningJob(*words, env=env) as job:
        assert job.end() == 0, job.output
    assert ("starting again" in job.output) == kills
    one = [*settings, f"run.dir={tmp_path / 'one'}"]
    Trainer(run_file, one, io.StringIO()).run()
    late = "co2" in rule or "eager" in rule
    assert_same_runs(tmp_path / "run", tmp_path / "one", streams=late or kills)
    if "noloco" in rule:
        records = (metrics.read(tmp_path / name) for name in ("run", "one"))
        spreads = [[x["island_spread"] for x in of if "island_spread" in x] for of in records]
        np.testing.assert_allclose(*spreads, rtol=1e-5)
        assert min(spreads[0]) > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("step", [2, 4, 6])
def test_three_islands_go_on_to_the_same_bits_whoever_is_killed(tmp_path, number, step):
    run_file = write_run(tmp_path, dict.fromkeys("abc", (1,)))
    settings = [*SETTINGS, "train.global_batch=12"]
    words = [run_file, "--launcher", "local", "--max-restarts", 1, *settings]
    with RunningJob(*words, env=killing(tmp_path, number, step)) as job:
        assert job.end() == 0, job.output
    assert "starting again" in job.output
    Trainer(run_file, [*settings, f"run.dir={tmp_path / 'one'}"], io.StringIO()).run()
    assert_same_runs(tmp_path / "run", tmp_path / "one")


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(20))
def test_an_island_that_ends_inside_a_meeting_is_named_and_all_go_on(tmp_path, seed):
    """Killed or stopped after a random part of the arrays that come to it in four meetings."""
    rng = random.Random(seed)
    odd, clusters = rng.randrange(2), dict.fromkeys("ab", (1,))
    ends_in = [rng.choice([signal.SIGKILL, signal.SIGSTOP]), rng.randrange(1, 60)]
    settings = [*SETTINGS, "distributed.heartbeat_timeout_s=8"]
    with external_job(tmp_path, clusters, *settings, odd={odd: {"ends_in": ends_in}}) as job:
        assert job.end() != 0, job.output
    assert f"process {odd})" in job.output
    run_file = tmp_path / "run.yaml"
    with RunningJob(run_file, "--launcher", "local", *settings) as job:
        assert job.end() == 0, job.output
    Trainer(run_file, [*settings, f"run.dir={tmp_path / 'one'}"], io.StringIO()).run()
    assert_same_runs(tmp_path / "run", tmp_path / "one")
