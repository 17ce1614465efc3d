"""A run that goes back after a spike leaves data out, and its order follows the record alone."""

import io
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from holmesjax.checkpoints import skipped_data
from holmesjax.checkpoints.skipped_data import RECORD, Skipped
from holmesjax.config import RampupConfig, TrainConfig
from holmesjax.data.batches import Batches
from holmesjax.errors import CheckpointError, FatalError
from holmesjax.trainer import Trainer
from holmesjax.training_loop import TrainingLoop
from tests.jobs import write_run

TRAIN = TrainConfig(steps=40, global_batch=8, rampup=[RampupConfig(steps=10, global_batch=4)])


def order(skipped, done=0, sequences=0):
    """The range of sequences of each step after `done`, as a session reads them."""
    session = SimpleNamespace(
        config=SimpleNamespace(train=TRAIN), skipped=skipped, _is_evaluating=lambda step: False
    )
    steps = TrainingLoop._order(session, done, sequences)
    ranges = [
        range(one_step.first_sequence, one_step.first_sequence + one_step.global_batch)
        for one_step in steps
    ]
    return dict(enumerate(ranges, done + 1))


def test_each_return_goes_on_behind_the_spike(tmp_path):
    """The walk itself: a pointer that never goes back, and steps that do."""
    before, seen = order(()), []
    for spike, back in ((13, 8), (12, 8), (30, 20), (25, 0), (9, 8), (39, 20)):
        skipped_data.add(tmp_path, TRAIN, spike, back)
        after = order(skipped_data.read(tmp_path))
        assert [after[step] for step in range(1, back + 1)] == [
            before[step] for step in range(1, back + 1)
        ]
        assert after[back + 1].start == before[spike].stop
        seen += [before[step] for step in range(back + 1, spike + 1)]
        before = after
    used = [number for sequences in after.values() for number in sequences]
    assert len(used) == len(set(used)) == TRAIN.sequences_after(40)
    # A start from any checkpoint comes to the same data.
    skipped = skipped_data.read(tmp_path)
    for step in (0, 8, 9, 19, 20, 21, 39):
        consumed = TRAIN.sequences_after(step) + skipped_data.sequences(skipped, 0, step)
        assert order(skipped, step, consumed) == {
            s: sequences for s, sequences in after.items() if s > step
        }


def test_a_run_does_not_go_back_to_one_step_for_ever(tmp_path):
    for spike in (12, 13, 11):
        skipped_data.add(tmp_path, TRAIN, spike, 10)
    skipped_data.add(tmp_path, TRAIN, 22, 20)
    with pytest.raises(FatalError, match="has gone back to step 10 3 times") as error:
        skipped_data.add(tmp_path, TRAIN, 14, 10)
    assert error.value.found == "spikes in steps 12, 13, 11 and now 14"
    assert [part.step for part in skipped_data.read(tmp_path)] == [10, 10, 10, 20]


@pytest.mark.parametrize("content", ["[", "{}1", "[3]", '[{"step": 1}]'])
def test_a_damaged_record_is_named(tmp_path, content):
    (tmp_path / RECORD).write_text(content)
    with pytest.raises(CheckpointError, match="the order of the data depends on it") as error:
        skipped_data.read(tmp_path)
    assert error.value.where == str(tmp_path / RECORD)


# The first sequence of a batch whose tokens mean nothing: of step 12, behind which a save is due.
BAD = 88
SETTINGS = [
    *("model.num_layers=2", "model.width=16", "model.num_heads=2", "checkpoint.every=4"),
    *("train.spike_policy=roll_back", "train.spike_window=16", "train.spike_sigmas=4"),
    *("optimizer.schedule=constant", "optimizer.learning_rate=1e-2", "train.steps=14"),
]


def train(folder, name, *settings):
    out = io.StringIO()
    run_file = write_run(folder, {"a": (1,)}, name=name)
    trainer = Trainer(run_file, [*SETTINGS, *settings], out)
    trainer.train()
    numbers = [(r["step"], r["loss"], r["grad_norm"], r["spike"]) for r in trainer.history]
    return numbers, out.getvalue()


@pytest.mark.one_version
def test_after_a_spike_the_losses_are_those_of_a_run_without_its_data(tmp_path, monkeypatch):
    firsts, train_of = [], Batches.train

    def read(self, first_sequence, row_N=None):
        firsts.append(first_sequence)
        rows = train_of(self, first_sequence, row_N)
        if first_sequence == BAD:
            random = np.random.default_rng(0)
            return rows._replace(token_NL=random.integers(128, 256, rows.token_NL.shape))
        return rows

    monkeypatch.setattr(Batches, "train", read)
    found, said = train(tmp_path, "run")
    [skipped] = skipped_data.read(tmp_path / "run")
    assert skipped == Skipped(step=8, spike=12, sequences=32)
    assert "spike       step 12, loss " in said
    assert (
        "going back to step 8; 32 sequences behind step 8 (spike in step 12) are left out" in said
    )
    assert said.index("going back") < said.index("resuming after step 8\n  leaves out 32 sequences")
    assert [step for step, *_ in found] == list(range(1, 15))
    assert not any(spike for *_, spike in found)
    assert firsts[-6:] == list(range(96, 96 + 6 * 8, 8))
    assert BAD in firsts[:-6]
    manifest = tmp_path / "run/checkpoints/step_00000014/manifest.json"
    assert json.loads(manifest.read_text())["sequences"] == 14 * 8 + 32
    firsts.clear()
    # The record is there from the beginning, and the run stops and resumes where data is left out.
    (tmp_path / "again").mkdir()
    shutil.copy(tmp_path / "run" / RECORD, tmp_path / "again" / RECORD)
    train(tmp_path, "again", "train.steps=8")
    assert train(tmp_path, "again")[0] == found
    assert BAD not in firsts
