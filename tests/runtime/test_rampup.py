"""A run that begins with smaller batches: which it has, and which its plan cannot fill.

The rows of `tests/whole_steps.py` that have a ramp compare its steps with those of one device.
"""

import pytest

from holmesjax import job as jobs
from holmesjax.config import RampupConfig, TrainConfig
from holmesjax.errors import ConfigError
from tests.jobs import write_run


def test_batches_and_sequences_follow_the_parts():
    parts = RampupConfig(steps=2, global_batch=4), RampupConfig(steps=1, global_batch=8)
    train = TrainConfig(steps=9, global_batch=16, rampup=parts)
    assert [train.batch_of(step) for step in range(1, 6)] == [4, 4, 8, 16, 16]
    assert [train.sequences_after(step) for step in range(6)] == [0, 4, 8, 16, 32, 48]


@pytest.mark.parametrize(
    "settings, problem",
    [
        (["parallel.microbatches=4"], "must be a multiple of 2, the sequences of a microbatch"),
        (
            ["train.rampup=[{steps: 1, global_batch: 2}]", "parallel.schedule=interleaved_1f1b"],
            "gives 1 microbatches, and interleaved_1f1b needs a multiple of the 2",
        ),
    ],
)
def test_batches_that_a_plan_cannot_make_are_refused(settings, problem, tmp_path):
    file = write_run(tmp_path, {"a": (1,), "b": (1,)})
    base = ["train.global_batch=8", "train.rampup=[{steps: 1, global_batch: 3}]"]
    more = ["parallel.stages=2", "parallel.microbatches=4", "model.num_layers=4"]
    with pytest.raises(ConfigError, match=problem) as error:
        jobs.load(file, [*base, *more, *settings])
    assert error.value.where == "train.rampup[0].global_batch"
