"""A round is merged by one island, of what all have sent, to the weights that the rule gives."""

import numpy as np
import pytest

from holmesjax.config import OuterConfig
from holmesjax.islands import mailbox_records as records
from holmesjax.islands.election import RoundWatch
from holmesjax.islands.mailbox_records import IslandProgress
from holmesjax.islands.merge import merge
from holmesjax.plan.outer_rule import weighted_mean
from tests.islands.stepless_islands import RULES, SHAPES, Clock, arrays, begun


@pytest.mark.parametrize("nesterov", [True, False])
def test_the_merge_is_the_rule_in_float64_with_weights_by_tokens(nesterov):
    outer, rng = OuterConfig(rate=0.7, momentum=0.9, nesterov=nesterov), np.random.default_rng(0)
    of_islands = rng.normal(size=(3, 50)).astype(np.float32)
    weights, momentum = rng.normal(size=(2, 50)).astype(np.float32)
    tokens = [300, 100, 7]
    mean = np.average(of_islands.astype(np.float64), axis=0, weights=tokens)
    gradient = weights - mean
    after = 0.9 * momentum.astype(np.float64) + gradient
    step = gradient + 0.9 * after if nesterov else after
    new, kept = merge(outer, of_islands, tokens, weights, momentum)
    assert (new.dtype, kept.dtype) == (np.float32, np.float32)
    np.testing.assert_allclose(new, weights - 0.7 * step, rtol=0, atol=2e-6)
    np.testing.assert_allclose(kept, after, rtol=0, atol=2e-6)


def test_one_island_and_equal_ones_are_their_own_mean_to_the_bit():
    x = arrays(0)["embed.token_VD"]
    for copies, tokens in (([x], [7]), ([x, x, x], [1, 5, 3])):
        np.testing.assert_array_equal(weighted_mean(copies, tokens), x)
    plain = OuterConfig(rate=1.0, momentum=0.0)
    np.testing.assert_array_equal(merge(plain, [x], [7], x + 1, 0 * x)[0], x)


@pytest.mark.parametrize(
    ("name", "sent", "live", "after_s"),
    [
        ("a", "ab", "ab", 0.0),  # all have sent
        ("b", "ab", "ab", 4.0),  # a merges, unless it lets a lease's time pass
        ("b", "ab", "b", 0.0),  # a is gone
        ("a", "a", "abc", None),  # no quorum
        ("a", "ab", "abc", 10.0),  # c is late, and gets its grace
        ("c", "ab", "abc", 18.0),  # whoever has not sent may merge: behind its grace, and a and b
        ("c", "bc", "c", 0.0),
    ],
)
def test_the_lowest_live_island_merges_and_the_next_ones_follow(name, sent, live, after_s):
    clock = Clock()
    watch = RoundWatch(
        number=1, name=name, order=("a", "b", "c"), quorum=2, grace_s=10.0, lease_s=4.0, clock=clock
    )
    found = None
    for half_seconds in range(60):
        clock.now_s = 100.0 + half_seconds / 2
        if watch.is_mine(set(sent), set(live)):
            found = half_seconds / 2
            break
    assert found == after_s


def test_a_round_has_the_weights_of_those_that_sent_by_their_tokens(make_island):
    one, two = begun(make_island)
    one.send(1, seed=1, tokens=30)
    two.send(1, seed=2, tokens=10)
    two.turn()
    one.turn()
    two.turn()
    record, weights = one.take(1)
    assert (record.tokens, record.islands, record.by) == (40, {"a": 30, "b": 10}, "a")
    assert record.known["b"] == IslandProgress(1, 1, 8, 10)
    for name in SHAPES:
        old, own = arrays(0)[name], [arrays(1)[name], arrays(2)[name]]
        new, _ = merge(RULES.outer, own, [30, 10], old, 0 * old)
        np.testing.assert_array_equal(weights[name], new)
    assert two.box.news().arrived == 1


def test_the_momentum_goes_on_whoever_merges(make_island):
    """An island that is gone is left out, and the next one merges with the momentum of before."""
    one, two = begun(make_island)
    one.send(1, seed=1)
    two.send(1, seed=2)
    two.turn()
    one.turn()  # and then it is gone
    for number in (2, 3):
        two.turn()
        two.take(number - 1)
        two.send(number, seed=number + 1)
        two.turn(later_s=5.0)
    two.turn()
    record, weights = two.take(3)
    assert (record.by, record.islands, record.known["a"].round) == ("b", {"b": 1}, 1)
    for name in SHAPES:
        new, momentum = arrays(0)[name], np.zeros(SHAPES[name], np.float32)
        for seeds in ((1, 2), (3,), (4,)):
            own = [arrays(seed)[name] for seed in seeds]
            new, momentum = merge(RULES.outer, own, [1] * len(own), new, momentum)
        np.testing.assert_array_equal(weights[name], new)


def test_two_mergers_at_once_leave_one_result(make_island, tmp_path):
    """The second has seen more than the first, and comes to another result."""
    one, two = begun(make_island)
    one.box.lease.leases.take({"b": "lives"})  # so that a waits for it
    one.send(1, seed=1)
    one.turn()
    two.send(1, seed=2)
    names = lambda: records.in_rounds(two.box.place.listed(records.ROUNDS))
    real_put, at_once = two.box.place.put, []

    def put(name, content, *, replaces=True):
        if name.endswith("merged.json"):  # between its sums and its record
            at_once.append("merged.json" not in names()[1])
            one.turn(later_s=11.0)
            at_once.append("merged.json" in names()[1])
        real_put(name, content, replaces=replaces)

    two.box.place.put = put
    two.turn(later_s=20.0)
    assert at_once == [True, True]
    for island in (one, two):
        island.turn()
    found = [island.take(1) for island in (one, two)]
    assert found[0].record == found[1].record
    for name in SHAPES:
        np.testing.assert_array_equal(found[0].weights[name], found[1].weights[name])
    assert sum("global." in name for name in names()[1]) == 1


def test_what_is_damaged_is_left_out_or_merged_again(make_island, tmp_path):
    one, two = begun(make_island)
    one.send(1, seed=1)
    two.send(1, seed=2)
    two.turn()
    [path] = (tmp_path / "box").glob("rounds/00000001/b.*.bin")
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\0")
    one.turn()
    assert "has not the SHA-256 of its record" in one.said[0]
    assert list((tmp_path / "box/rounds/00000001").glob("b.*.json")), "it may be a bad read"
    one.turn()
    two.turn()  # its record is gone: it sends again
    two.turn()
    one.turn()
    assert one.take(1).record.islands == {"a": 1, "b": 1}
    for kind in ("global", "momentum"):
        [path] = (tmp_path / "box").glob(f"rounds/00000001/{kind}.a.*.bin")
        path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\0")
    two.turn()
    two.turn()  # writes it again, of the same
    two.turn()
    record, weights = two.take(1)
    for name in SHAPES:
        old, own = arrays(0)[name], [arrays(1)[name], arrays(2)[name]]
        new, _ = merge(RULES.outer, own, [1, 1], old, 0 * old)
        np.testing.assert_array_equal(weights[name], new)
    assert record == one.box._newest


def test_a_merge_without_the_momentum_of_the_round_before_has_it_made_again(make_island, tmp_path):
    islands = one, two = begun(make_island)
    for number in (1, 2):
        for island in islands:
            island.send(number, seed=number)
        two.turn()
        if number == 1:
            one.turn()
            two.turn()
            for island in islands:
                island.take(1)
    [path] = (tmp_path / "box").glob("rounds/00000001/momentum.a.*.bin")
    content = path.read_bytes()
    path.unlink()
    one.turn()
    assert path.read_bytes() == content
    one.turn()
    assert one.box.news().arrived == 1  # it waits a while behind a failure
    one.turn(later_s=6.0)
    assert one.take(2).record.islands == {"a": 1, "b": 1}
    for path in (tmp_path / "box/rounds/00000002").glob("a.*.bin"):
        path.unlink()
    next((tmp_path / "box/rounds/00000002").glob("global.*.bin")).unlink()
    two.turn()
    two.turn(later_s=6.0)
    assert "round 2 is damaged and cannot be written again" in two.said[-1]
    said = len(two.said)
    two.turn(later_s=6.0)
    assert two.said[said:] == ["3 fetches of rounds in a row were given up"]


def test_a_merge_that_takes_long_is_done_once(make_island):
    """The next one waits for as long as pieces go and come, and merges when they do not."""
    one, two = begun(make_island)
    one.send(1, seed=1)
    two.send(1, seed=2)
    two.turn()
    one.turn()  # sends
    one.box.place.remove(["rounds/00000001/merged.json"])
    one.box.lease.merges = 1
    for _ in range(10):
        one.box.place.advance()
        one.box.place.pieces += 1
        one.box.lease.renew()
        two.turn(later_s=1.9)
        assert two.box.news().arrived == 0
    for _ in range(6):  # its lease lives, and nothing moves
        one.box.lease.renew()
        two.turn(later_s=1.9)
    two.turn()
    assert two.take(1).record.by == "b"
