"""Sources of grain are sources of a run, and the splits of a run are sources of grain."""

import importlib
import re
import sys

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from holmesjax.config import CHECKOUT, DataConfig, data_sources
from holmesjax.data import sources
from holmesjax.data.batches import Batches
from holmesjax.data.random_access import RandomAccessItems
from holmesjax.data.sources import Item

LENGTH, BATCH = 7, 4


@pytest.fixture
def grain():
    return pytest.importorskip("grain", reason="grain is in the extra dev")


def records_of(count, seed):
    return np.random.default_rng(seed).integers(0, 256, (count, LENGTH + 1), np.int32)


def test_a_source_of_grain_is_a_source_of_a_run(grain, tmp_path, monkeypatch):
    """By the module and the row of the page on adding, as they stand there."""
    page = (CHECKOUT / "docs/extending_training.md").read_text()
    [(module, row)] = re.findall(
        r"# my_records.py\n(.*?)\n# holmesjax/config/data_sources.py\n(.*?)```", page, re.DOTALL
    )
    (tmp_path / "my_records.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    for name, table in eval(f"{{{row}}}", vars(data_sources)).items():
        monkeypatch.setitem(data_sources.SOURCES, name, table)
    written = {"train": records_of(9, seed=1), "validation": records_of(4, seed=2)}
    for name, records in written.items():
        writer = ArrayRecordWriter(str(tmp_path / f"{name}.array_record"), "group_size:1")
        for record in records:
            writer.write(record.tobytes())
        writer.close()
    config = DataConfig(corpus=str(tmp_path), source="my_records")
    splits = sources.module_of(config).read(config, LENGTH)
    batches = Batches(data=splits, seed=3, global_batch=BATCH, length=LENGTH, num_validation=1)
    epoch = [batches.train(first) for first in (0, BATCH)]
    seen = np.concatenate([rows.token_NL for rows in epoch])
    assert {row.tobytes() for row in seen} <= {row.tobytes() for row in written["train"]}
    assert len(np.unique(seen, axis=0)) == 2 * BATCH
    assert all(rows.num_targets == BATCH * LENGTH for rows in epoch)
    rows = batches.validation(0)
    assert sorted(rows.token_NL.tolist()) == sorted(written["validation"].tolist())
    importlib.invalidate_caches()
    del sys.modules["my_records"]


def test_splits_are_sources_of_grain(grain, tmp_path):
    for name in "abcd":
        (tmp_path / f"{name}.txt").write_text("To be, or not to be, that is the question.")
    config = DataConfig(corpus=str(tmp_path), pattern="*.txt", validation_fraction=0.2)
    train = sources.module_of(config).read(config, LENGTH).train
    dataset = grain.MapDataset.source(train)
    assert len(dataset) == len(train) > BATCH
    for index in range(len(train)):
        for ours, theirs in zip(train[index], dataset[index], strict=True):
            np.testing.assert_array_equal(ours, theirs)
    batch = dataset.shuffle(seed=1).batch(BATCH)[0]
    assert batch.tokens.shape == (BATCH, LENGTH + 1)


class Digits(list):
    """A source as grain's: a list of digits."""


def to_item(digits):
    tokens = np.array(digits, np.int32)
    targets = np.where(tokens[1:] > 4, tokens[1:], -1) if tokens[0] else None
    return Item(tokens, tokens == 0, targets)


def test_targets_are_counted_item_by_item():
    items = RandomAccessItems(Digits([[0, 5, 1, 9], [1, 5, 1, 9], [2, 1, 1, 1]]), to_item)
    assert [items.num_targets(index) for index in range(len(items))] == [3, 2, 0]


def test_a_digest_tells_sources_apart():
    digests = [
        RandomAccessItems(Digits(rows), to_item).digest()
        for rows in ([[0, 1]], [[0, 2]], [[0, 1], [0, 1]], [[1, 1]], [[0, 1]] * 200)
    ]
    assert len(set(digests)) == len(digests)
    assert RandomAccessItems(Digits([[0, 1]]), to_item).digest() == digests[0]
