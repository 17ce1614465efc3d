"""Batches are ready before steps ask for them, and a process makes its own rows alone."""

import threading

import jax
import numpy as np
import pytest

from holmesjax.data import text
from holmesjax.data.batches import Batches, model_inputs
from holmesjax.data.corpus import Corpus
from holmesjax.errors import DataError, LostDataError
from holmesjax.runtime.prefetch import Feed, Placer, Step, Validation
from tests.hand_made_plans import hand_made_plan, make_chunks, make_model

LENGTH, GLOBAL_BATCH = 16, 12


@pytest.fixture
def batches():
    tokens = np.random.default_rng(0).integers(256, size=30 * LENGTH + 1, dtype=np.uint8)
    corpus = Corpus(train=tokens, validation=tokens, source="", files={}, digests={})
    sizes = {"global_batch": GLOBAL_BATCH, "length": LENGTH, "num_validation": 2}
    return Batches(data=text.cut(corpus, LENGTH), seed=3, **sizes)


def stages_of(**options):
    plan = hand_made_plan((2, 2), 2, microbatches=3, **options)
    return make_chunks(make_model(), plan, mask=True)


def test_all_arrive_in_order_as_they_are_on_the_host(batches):
    """Steps over the end of an epoch, and a validation between them."""
    stages = stages_of(tensor=1, context=(1, 2))[1:]
    order = [Step(0, 12), Validation(1), Step(24, 8), Step(32, 12)]
    with Feed(batches, Placer(stages[0].plan, stages), iter(order), 60.0) as feed:
        taken = [feed.take() for _ in order]
    for what, inputs in zip(order, taken, strict=True):
        size, rows = GLOBAL_BATCH, batches.validation(1)
        if isinstance(what, Step):  # the second has two microbatches of three
            size = what.global_batch
            rows = batches.of_size(size).train(what.first_sequence)
        want = model_inputs(rows)
        assert inputs.num_targets == size * LENGTH
        assert len(inputs.microbatches[1]) == size // 4
        assert sorted(inputs.microbatches[1][0]) == ["segment_BL", "target_BL"]
        for name in inputs.microbatches[1][0]:
            got = np.concatenate([batch[name] for batch in inputs.microbatches[1]])
            np.testing.assert_array_equal(got, want[name])


def test_a_process_makes_the_rows_of_its_devices(batches, monkeypatch):
    """The second replica's rows of three microbatches of four sequences."""
    stages = stages_of(tensor=2)[:1]
    where = jax.sharding.NamedSharding.addressable_devices_indices_map
    own = list(stages[0].mesh.devices[1].flat)
    monkeypatch.setattr(
        jax.sharding.NamedSharding,
        "addressable_devices_indices_map",
        lambda self, shape: {d: i for d, i in where(self, shape).items() if d in own},
    )
    placer = Placer(stages[0].plan, stages)
    assert placer.row_MN.tolist() == [[2, 3], [6, 7], [10, 11]]
    rows = placer.row_MN.ravel()
    np.testing.assert_array_equal(
        batches.train(24, rows).token_NL, batches.train(24).token_NL[rows]
    )
    plan = hand_made_plan((1, 1, 2), 1, 1)
    idle = Placer(plan, make_chunks(make_model(), plan)[1:2])
    assert (idle.names, idle.row_MN.size) == ([], 0)  # a stage in the middle reads no batch
    monkeypatch.setattr(text.Windows, "__getitem__", lambda self, index: pytest.fail("it reads"))
    with Feed(batches, idle, iter([Step(0, 12), Validation(1)]), 60.0) as feed:
        assert [feed.take().num_targets for _ in range(2)] == [GLOBAL_BATCH * LENGTH] * 2


@pytest.mark.parametrize("hangs", [False, True])
def test_what_goes_wrong_is_told_where_a_step_asks(batches, monkeypatch, hangs):
    may_end = threading.Event()

    def train(*_):
        if hangs:
            may_end.wait(60)
        raise DataError("data.corpus", "was taken away", found="nothing", fix="put it back")

    monkeypatch.setattr(Batches, "train", train)
    words = "could not be made in time" if hangs else "was taken away"
    stages, order = stages_of(tensor=2)[:1], [Step(0, 12), Step(12, 12)]
    placer = Placer(stages[0].plan, stages)
    timeout_s = 0.1 if hangs else 60.0
    with (
        pytest.raises(LostDataError if hangs else DataError, match=words),
        Feed(batches, placer, iter(order), timeout_s) as feed,
    ):
        feed.take()
    may_end.set()
    for thread in [t for t in threading.enumerate() if t.name.startswith("feed")]:
        thread.join(60)
        assert not thread.is_alive()
