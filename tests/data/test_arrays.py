"""A source of arrays: items by name, and what is refused."""

import numpy as np
import pytest

from holmesjax.config import DataConfig
from holmesjax.data import arrays
from holmesjax.data.batches import ArrayRows, Batches, model_inputs
from holmesjax.errors import DataError

COUNT = 6


def some():
    image_N = np.arange(COUNT * 4, dtype=np.float32).reshape(COUNT, 2, 2)
    counts_N = np.arange(COUNT)
    return {"train": {"image": image_N, "label": counts_N % 2, "num_targets": counts_N}}


def read(name):
    return arrays.read(DataConfig(corpus=name, source="arrays"), 4)


def test_items_are_arrays_by_name_and_rows_are_stacked():
    splits = read(f"{__name__}:some")
    assert (len(splits.train), len(splits.validation)) == (COUNT, 0)
    assert set(splits.train[1]) == {"image", "label"}
    batches = Batches(data=splits, seed=0, global_batch=COUNT, length=4, num_validation=0)
    rows = batches.train(0)
    assert isinstance(rows, ArrayRows)
    assert rows.num_targets == sum(range(COUNT))
    host = model_inputs(rows, ["image"])
    assert list(host) == ["image"]
    images = some()["train"]["image"]
    np.testing.assert_array_equal(np.sort(host["image"], axis=0), images)
    np.testing.assert_array_equal(
        batches.train(0, np.array([2])).arrays["image"], host["image"][2:3]
    )


def test_digests_tell_other_numbers_apart(monkeypatch):
    before = read(f"{__name__}:some").digests
    assert read(f"{__name__}:some").digests == before
    other = some()
    other["train"]["image"][3, 1, 1] += 1
    monkeypatch.setitem(globals(), "some", lambda: other)
    after = read(f"{__name__}:some").digests
    assert after["train"] != before["train"]
    assert after["validation"] == before["validation"]


@pytest.mark.parametrize(
    "made, message",
    [
        (3, r"must give the splits train and validation\n  found: .*:made: int"),
        ({"test": {}}, r"must give the splits train and validation\n  found: .*:made: \['test'\]"),
        ({"train": [1]}, r"must give arrays by name\n  found: list for train"),
        (
            {"train": {"a": np.zeros(3), "b": np.zeros(2)}},
            r"one first dim for the items\n  found: train: a of 3, b of 2",
        ),
        ({"train": {"a": np.zeros(())}}, r"one first dim for the items\n  found: train: a of 0"),
    ],
)
def test_what_a_function_must_give(made, message, monkeypatch):
    monkeypatch.setitem(globals(), "made", lambda: made)
    with pytest.raises(DataError, match=rf"data.corpus: .*{message}"):
        read(f"{__name__}:made")


@pytest.mark.parametrize("name", ["nothing:x", "numpy:nothing", "a folder", "__main__:x"])
def test_a_function_that_is_not_there_is_refused(name):
    with pytest.raises(DataError, match=r"data.corpus: names no function") as error:
        read(name)
    assert ("and not of a notebook" in str(error.value)) == name.startswith("__main__")
