"""Whole jobs with a process for every node: what one device computes, and how they fail."""

import numpy as np
import pytest

from holmesjax.report import metrics
from tests.jobs import RunningJob, compiling_once, external_job, write_run
from tests.plain_losses import SHORT, plain_losses

RTOL = 1e-5  # sums in another order, in float32


# name -> nodes of each cluster, by their devices; settings
SELDOM = "one stage over clusters, tensor over nodes"
EXPERTS = "devices that share experts, a process for each"
VALIDATING = "validations of many microbatches, two devices in a process"
JOBS = {
    "three stages, unequal data, tied, a process for each device, encrypted": (
        {"a": (2,), "b": (1,), "c": (1,)},
        [
            *("parallel.schedule=gpipe", "distributed.processes=device"),
            "distributed.encrypt=always",
        ],
        ["model.num_layers=3", "model.tied_embeddings=true"],
    ),
    SELDOM: (
        {"ib": (1, 1), "roce": (1, 1)},
        ["parallel.clusters=null", "parallel.data=2", "parallel.tensor=2"],
        ["model.num_layers=1"],
    ),
    EXPERTS: (
        {"a": (2,)},
        ["parallel.expert=2", "distributed.processes=device"],
        ["model.pattern=[block,expert_block]", "model.experts={count: 4, width: 16}"],
    ),
    # The first stage has 96 forwards that wait for nothing, three times what XLA's client takes.
    # They are so large that they take longer than their dispatch.
    VALIDATING: (
        {"a": (2,), "b": (2,)},
        [
            *("parallel.layers=[2,1]", "parallel.tensor=2", "parallel.microbatches=16"),
            "train.eval_every=1",
        ],
        [
            *("train.steps=1", "model.num_layers=3", "model.width=128"),
            *("model.context_length=256",),
            *("train.global_batch=16", "train.eval_batches=6"),
        ],
    ),
}


def losses_of(run_dir) -> list[float]:
    return [record["loss"] for record in metrics.read(run_dir)]


# A stage that spans clusters is no plan that the planner makes, and costs as much as another job.


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(VALIDATING, marks=pytest.mark.one_version),
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in (SELDOM, EXPERTS)),
        *(name for name in JOBS if name not in (VALIDATING, SELDOM, EXPERTS)),
    ],
)
def test_the_steps_are_those_of_one_device(tmp_path, name):
    clusters, settings, model = JOBS[name]
    run_file = write_run(tmp_path, clusters)
    words = [run_file, "--launcher", "local", *SHORT, *settings, *model]
    with RunningJob(*words, env=compiling_once(tmp_path)) as job:
        assert job.end() == 0, job.output
    records = list(metrics.read(tmp_path / "run"))
    got = [record["loss"] for record in records]
    np.testing.assert_allclose(got, plain_losses(*model), rtol=RTOL)
    validates = any(word.startswith("train.eval_every") for word in settings)
    assert [record["step"] for record in records if "val_loss" in record] == [1] * validates


@pytest.mark.one_version
def test_all_processes_of_a_stage_keep_to_the_schedule_whatever_comes_late(tmp_path):
    """A W that only one of them runs early holds collectives that the others reach later."""
    settings = ["parallel.schedule=zero_bubble", "parallel.fsdp=2", "parallel.data=1"]
    settings += ["parallel.microbatches=4"]
    odd = {number: {"late_s": 0.1} for number in range(3)}
    clusters, env = {"ib": (2,), "roce": (1, 1)}, compiling_once(tmp_path)
    with external_job(tmp_path, clusters, *SHORT, *settings, odd=odd, env=env) as job:
        assert job.end() == 0, job.output
    got = losses_of(tmp_path / "run")
    np.testing.assert_allclose(got, plain_losses(), rtol=RTOL)
