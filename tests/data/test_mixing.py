"""A mixture is exact at any place, and its order a function of seed and step alone."""

import itertools
import math
import zlib
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, strategies as st

from holmesjax.data import mixing
from holmesjax.data.batches import Batches
from holmesjax.data.mixing import Schedule, WeightsFrom
from holmesjax.data.permutation import permute, round_keys
from holmesjax.data.sources import Item, Mixed, Splits

FOUR = [0.5, 0.3, 0.15, 0.05]
WHOLE = [32768, 19661, 9830, 3277]


def plain(k, whole):
    """The definition, for one sequence, in Python's integers."""
    rest, before, after = sum(whole), k, k + 1
    for source, weight in enumerate(whole):
        left = before * (rest - weight) // rest, after * (rest - weight) // rest
        if before - left[0] != after - left[1]:
            return source, after - left[1] - 1
        (before, after), rest = left, rest - weight
    raise AssertionError


def test_weights_become_whole_numbers_by_largest_remainder():
    assert mixing.whole_weights(FOUR) == WHOLE
    assert mixing.whole_weights([0.7, 0.3]) == [45875, 19661]
    assert mixing.whole_weights([1, 1, 1]) == [21846, 21845, 21845]  # of equals the first


def test_the_schedule_is_the_published_one():
    begin = (
        *((0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (2, 0), (0, 3), (1, 2), (0, 4), (1, 3)),
        *((0, 5), (2, 1), (0, 6), (1, 4), (0, 7), (2, 2), (0, 8), (1, 5), (0, 9), (1, 6)),
    )
    later = {65535: (3, 3276), 65536: (0, 32768), 10**12: (0, 500000000000)}
    wanted = dict(enumerate(begin)) | later
    found = mixing.picks(np.array(list(wanted)), WHOLE)
    assert list(zip(*(x.tolist() for x in found), strict=True)) == list(wanted.values())
    assert [plain(k, WHOLE) for k in wanted] == list(wanted.values())
    assert mixing.counts(1000, WHOLE) == [500, 301, 150, 49]
    assert mixing.counts(200000, WHOLE) == [100000, 60001, 29999, 10000]


@given(
    st.lists(st.integers(0, 1000), min_size=1, max_size=20).filter(any),
    st.integers(0, mixing.MOST - 300),
)
def test_each_source_counts_up_and_keeps_near_its_weight_at_any_place(weights, first):
    whole = mixing.whole_weights(sorted(weights, reverse=True))
    assert sum(whole) == mixing.TOTAL
    source_K, index_K = mixing.picks(first + np.arange(256), whole)
    expected = mixing.counts(first, whole)
    for source, index in zip(source_K.tolist(), index_K.tolist(), strict=True):
        assert (source, index) == (source, expected[source])
        expected[source] += 1
    assert expected == mixing.counts(first + 256, whole)
    for count, weight in zip(expected, whole, strict=True):
        away = abs(count * mixing.TOTAL - (first + 256) * weight) / mixing.TOTAL
        assert away < 1 + math.log(len(whole))


def test_a_change_of_weights_goes_on_where_each_source_was():
    weights = [{"a": 3, "b": 1}, {"b": 2, "c": 1}, {"a": 1, "b": 1, "c": 8}]
    firsts = [0, 100, 1000]
    schedule = Schedule(["c", "a", "b"], list(map(WeightsFrom, firsts, weights)))
    source_K, index_K = schedule.picks(np.arange(5000))
    for source, name in enumerate("cab"):
        own = index_K[source_K == source]
        assert own.tolist() == list(range(len(own)))  # none is left out or comes twice
        for first, last, phase in zip(firsts, [*firsts[1:], 5000], weights, strict=True):
            share = np.mean(source_K[first:last] == source)
            assert share == pytest.approx(phase.get(name, 0) / sum(phase.values()), abs=0.02)
    for k in (0, 99, 100, 101, 1000, 4321):
        assert schedule.counts(k).tolist() == np.bincount(source_K[:k], minlength=3).tolist()
    cut = [schedule.picks(np.arange(k, k + 500)) for k in range(0, 5000, 500)]
    np.testing.assert_array_equal(np.concatenate(cut, axis=1), [source_K, index_K])


@dataclass(frozen=True)
class Numbers:
    """Endless items that say which they are."""

    source: int
    size: int

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        tokens = np.array([self.source, index >> 31, index % 2**31], np.int32)
        return Item(tokens, np.zeros(3, bool))

    def num_targets(self, index):
        return 2


def make_batches(sizes, phases, **changes):
    parts = {f"source {n}": Numbers(n, size) for n, size in enumerate(sizes)}
    train = Mixed(parts=parts, schedule=Schedule(list(parts), phases))
    data = Splits(train=train, validation=Numbers(9, 9), place="", digests={}, files={})
    settings = {"seed": 5, "global_batch": 8, "length": 2, "num_validation": 0, **changes}
    return Batches(data=data, **settings)


def items(batches, first, rows=None):
    token_NL = batches.train(first, rows).token_NL.astype(np.int64)
    return [(row[0], row[1] * 2**31 + row[2]) for row in token_NL.tolist()]


def test_every_item_of_each_source_comes_once_an_epoch_of_its_own():
    weights = {"source 0": 0.75, "source 1": 0.25}
    batches = make_batches([31, 17], [WeightsFrom(0, weights)])
    seen = [item for first in range(0, 1600, 8) for item in items(batches, first)]
    for source, size in enumerate((31, 17)):
        own = [index for number, index in seen if number == source]
        epochs = [own[i : i + size] for i in range(0, len(own) - size, size)]
        assert len(epochs) > 10
        # Rows of a batch change places, so an epoch may begin and end inside of one.
        assert max(own.count(i) for i in range(size)) - min(own.count(i) for i in range(size)) <= 1
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


def test_sources_do_not_stay_in_rows_of_their_own():
    names = [f"source {n}" for n in range(4)]
    batches = make_batches(
        [9] * 4, [WeightsFrom(0, dict(zip(names, FOUR, strict=True)))], global_batch=20
    )
    places = [
        row
        for first in range(0, 20 * 200, 20)
        for row, (source, _) in enumerate(items(batches, first))
        if source == 3
    ]
    assert np.bincount(places, minlength=20).max() <= 25  # of 200; without a permutation, 200


def test_a_mixture_of_a_corpus_of_a_trillion_tokens_is_the_same_at_any_step_and_in_any_process():
    sizes, weights = [10**12 // 4096, 10**5], {"source 0": 0.7, "source 1": 0.3}
    batches = make_batches(sizes, [WeightsFrom(0, weights), WeightsFrom(10**7, {"source 0": 1})])
    first = 8 * 10**6
    whole = items(batches, first)
    split = [items(batches, first, np.array(rows)) for rows in ([0, 3], [5], [])]
    assert list(itertools.chain(*split)) == [whole[0], whole[3], whole[5]]
    wanted = []
    for row in permute(np.arange(8), 8, round_keys(5, 2**60 + first)).tolist():
        source, index = plain(first + row, [45875, 19661])
        epoch, place = divmod(index, sizes[source])
        stream = 2**20 * (1 + zlib.crc32(f"source {source}".encode())) + epoch
        [item] = permute(np.array([place]), sizes[source], round_keys(5, stream)).tolist()
        wanted.append((source, item))
    assert whole == wanted
    assert whole[:3] == [
        (1, 57324),
        (0, 1306557),
        (1, 97034),
    ]  # as it was: it must stay, or no run resumes
    assert {source for source, _ in items(batches, 10**9)} == {0}
