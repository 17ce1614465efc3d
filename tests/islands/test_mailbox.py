"""The mailbox of islands that wait for nobody: who merges, what, and what a damaged one does."""

import dataclasses
import functools
import itertools
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from holmesjax.config import OuterConfig, PlaceConfig
from holmesjax.errors import HolmesError, LostLeaseError, PeerError
from holmesjax.islands import mailbox, mailbox_records as records, rejoining
from holmesjax.islands.election import Leases, RoundWatch
from holmesjax.islands.global_weights import MOST_LOST
from holmesjax.islands.island_lease import IslandLease
from holmesjax.islands.mailbox import KEPT_ROUNDS, Mailbox
from holmesjax.islands.mailbox_claim import claim
from holmesjax.islands.mailbox_places import Counted, Folder, open_place
from holmesjax.islands.mailbox_records import IslandProgress, Merged, Sent
from holmesjax.islands.mailbox_seat import JobProgress, MailboxSeat, Rules
from holmesjax.islands.merge import merge
from holmesjax.plan.mailbox_cost import mailbox_cost
from holmesjax.plan.outer_rule import weighted_mean
from tests.data.object_store import object_store

RULES = Rules(outer=OuterConfig(), quorum=1, grace_s=10.0, lease_s=4.0)
SHAPES = {"embed.token_VD": (64, 16), "block_000.up_DF": (16, 40), "head.scale_D": (16,)}


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def arrays(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


class Island:
    """An island without steps: what it sends is given to it."""

    def __init__(self, place, number, count=2, rules=RULES, clock=None, scratch=None):
        self.said, self.clock, self.beat_s = [], clock or Clock(), 0.0
        order = tuple("abcd"[:count])
        seat = MailboxSeat(
            order=order, number=number, part=0, parts=1, names=tuple(SHAPES), writes=True
        )
        scratch = scratch / order[number]
        self.box = Mailbox(Counted(place), seat, rules, scratch, self.said.append, self.clock)

    def send(self, number, seed, tokens=1, step=None):
        progress = IslandProgress(number, step or number, 8 * number, tokens)
        self.box.send(number, progress, arrays(seed).items)

    def turn(self, later_s=0.0):
        self.clock.now_s += later_s
        if self.clock.now_s - self.beat_s >= 1.0:
            self.beat_s = self.clock.now_s
            self.box.hold_lease()
        self.box.turn()

    def take(self, number):
        return self.box.take(number, 0.0)


@pytest.fixture
def make(tmp_path):
    place = Folder(tmp_path / "box")
    return functools.partial(Island, place, scratch=tmp_path / "scratch")


def begun(make, **more):
    """Two islands that have merged round 0, and have its weights."""
    one, two = make(0, **more), make(1, **more)
    one.send(0, seed=0)
    for island in (one, two):
        island.turn()
        island.take(0)
    return one, two


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


def test_a_lease_ends_by_the_clock_of_its_reader():
    clock = Clock()
    leases = Leases(4.0, clock)
    leases.take({"a": 1, "b": 1})
    clock.now_s += 3.0
    leases.take({"a": 2, "b": 1})
    assert leases.live() == {"a", "b"}
    clock.now_s += 2.0
    assert leases.live() == {"a"}
    leases.take({"b": 2})  # a has given it back
    assert leases.live() == {"b"}


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


def test_a_round_has_the_weights_of_those_that_sent_by_their_tokens(make):
    one, two = begun(make)
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


def test_the_momentum_goes_on_whoever_merges(make):
    """An island that is gone is left out, and the next one merges with the momentum of before."""
    one, two = begun(make)
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


def test_two_mergers_at_once_leave_one_result(make, tmp_path):
    """The second has seen more than the first, and comes to another result."""
    one, two = begun(make)
    one.send(1, seed=1)
    one.turn()
    two.send(1, seed=2)
    names = lambda: records.in_rounds(two.box.place.listed(records.ROUNDS))
    real_put = two.box.place.put

    def put(name, content, *, replaces=True):
        if name.endswith("merged.json"):  # between its sums and its record
            assert "merged.json" not in names()[1]
            one.turn(later_s=11.0)
            assert "merged.json" in names()[1]
        real_put(name, content, replaces=replaces)

    one.box.lease.leases.take({"b": "lives"})
    two.box.place.put = put
    two.turn(later_s=20.0)
    for island in (one, two):
        island.turn()
    found = [island.take(1) for island in (one, two)]
    assert found[0].record == found[1].record
    for name in SHAPES:
        np.testing.assert_array_equal(found[0].weights[name], found[1].weights[name])
    assert sum("global." in name for name in names()[1]) == 1


def test_what_is_damaged_is_left_out_or_merged_again(make, tmp_path):
    one, two = begun(make)
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


def test_a_merge_without_the_momentum_of_the_round_before_has_it_made_again(make, tmp_path):
    islands = one, two = begun(make)
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


def test_a_process_that_never_renews_a_lease_holds_it_with_those_that_do(tmp_path):
    """An island has several processes; the lease of the job before them is still there."""
    place = Counted(Folder(tmp_path))
    lease = lambda session: IslandLease(place, ("a", "b"), "a", session, 4.0, Clock())
    before, renews, sends = lease("f" * 16), lease("0" * 16), lease("0" * 16)
    before.renew()
    renews.renew()
    sends.refuse_lost()
    renews.renew()
    sends.refuse_lost()
    later = lease("1" * 16)
    later.renew()
    for lost in (before, renews, sends):
        with pytest.raises(LostLeaseError):
            lost.refuse_lost()


def test_of_two_jobs_of_an_island_the_one_with_the_lease_counts(make):
    """The older one is further on; and it sends no more once it has lost the lease."""
    one, two = begun(make)
    one.turn()
    two.send(1, seed=2, step=40)
    two.turn()
    again = make(1)
    again.turn()
    again.take(0)
    again.send(1, seed=3, step=20)
    again.turn()
    assert one.box.sent.of_round(1) == {}
    one.box.lease.leases.take({"b": "lives"})
    one.turn(later_s=2.0)
    [part] = one.box.sent.of_round(1)["b"]
    assert (part.session, part.progress.step) == (again.box.session, 20)
    two.send(1, seed=4, step=41)
    with pytest.raises(LostLeaseError):
        two.box.turn()
    two.box.lease.give_back()
    assert two.box.place.read("leases/b.json")
    again.box.lease.give_back()
    assert not two.box.place.read("leases/b.json")


def test_parts_of_unlike_steps_are_no_letter():
    part = Sent(
        round=1,
        island="a",
        session="0" * 16,
        part=0,
        parts=2,
        progress=IslandProgress(1, 2, 3, 4),
        file="x",
        index={},
    )
    other = dataclasses.replace(part, part=1)
    assert records.are_whole([part, other])
    late = dataclasses.replace(other, progress=IslandProgress(1, 3, 3, 4))
    for parts in ([], [part], [part, part], [part, late]):
        assert not records.are_whole(parts)


def test_a_record_names_nothing_that_is_not_its_own(make, tmp_path):
    """Neither another object, nor bytes outside of it, nor more than memory has."""
    one, two = begun(make)
    two.send(1, seed=2)
    two.turn()
    [path] = (tmp_path / "box").glob("rounds/00000001/b.*.json")
    name = path.relative_to(tmp_path / "box").as_posix()
    sent = Sent.from_bytes(path.read_bytes(), name)
    first = sent.index["head.scale_D"]
    for other in (
        dataclasses.replace(sent, file="../ib/config.bin"),
        dataclasses.replace(sent, index={"x": first._replace(shape=(2**40, 2**40))}),
        dataclasses.replace(sent, index={"x": first._replace(first=-4)}),
    ):
        path.write_bytes(other.to_bytes())
        one.turn()
        assert path.exists()
        one.turn()
        assert one.box.sent.of_round(1) == {}
        assert not path.exists()
    merged = dataclasses.replace(one.box._newest, file="rounds/00000000/../../x")
    with pytest.raises(records.DamagedObjectError):
        Merged.from_bytes(merged.to_bytes(), "rounds/00000000/merged.json")


def test_what_an_island_has_sent_is_its_own_and_whole(make, tmp_path):
    one, two = begun(make)
    place = lambda name: PlaceConfig(names=(name, "b"), number=0, steps=9)
    two.send(1, seed=2, step=7)
    two.turn()
    box = one.box.place
    assert rejoining.own_sent(box, place("b"))[1].step == 7
    [path] = (tmp_path / "box").glob("rounds/00000001/b.*.json")
    path.rename(path.with_name(f"b.{path.name}"))  # of the island b.b
    assert rejoining.own_sent(box, place("b")) is None
    path.write_text("{")
    assert rejoining.own_sent(box, place("b")) is None


def test_a_mailbox_that_lacks_a_round_which_has_landed_is_refused(make):
    one, _ = begun(make)
    rejoining.refuse_older(one.box.place, 0)
    with pytest.raises(HolmesError, match="found: round 0 is its newest"):
        rejoining.refuse_older(one.box.place, 3)
    one.box.place.remove(one.box.place.listed("rounds"))
    rejoining.refuse_older(one.box.place, -1)
    with pytest.raises(HolmesError, match="found: no round"):
        rejoining.refuse_older(one.box.place, 0)


def test_a_store_that_writes_over_what_is_there_is_refused(tmp_path):
    place = Folder(tmp_path / "box")
    real_put = place.put
    names = []

    def put(name, content, *, replaces=True):
        names.append(name)
        real_put(name, content)

    place.put = put
    with pytest.raises(HolmesError, match="without conditional writes"):
        claim(Counted(place), {"seed": 1}, "box")
    assert not (tmp_path / "box").exists()
    assert "run.json" not in names, "nobody may find a mailbox that is about to be refused"


def test_a_record_that_was_changed_is_none():
    sent = Sent(
        round=1,
        island="a",
        session="0" * 16,
        part=0,
        parts=1,
        progress=IslandProgress(1, 2, 3, 4),
        file=f"rounds/00000001/a.{'0' * 16}.0.bin",
        index={},
    )
    content, x = sent.to_bytes(), sent.file.replace("bin", "json")
    assert Sent.from_bytes(content, x) == sent
    for other in (content.replace(b'"part": 0', b'"part": 1'), content[:-9], b"", b"[1]", b"{}"):
        with pytest.raises(records.DamagedObjectError, match=rf"^{x} "):
            Sent.from_bytes(other, x)
    with pytest.raises(records.DamagedObjectError, match="other fields"):
        Sent.from_bytes(records.sealed({"round": 1}), "x")


def test_a_place_that_is_away_is_said_once_and_tried_again(make):
    one, _ = begun(make)
    one.send(1, seed=1)
    listed, one.box.place.listed = one.box.place.listed, _raise_away
    one.turn()
    one.turn(later_s=30.0)
    one.box.place.listed = listed
    one.turn()
    one.turn(later_s=2.0)  # it hears of b again, whose lease does not change any more
    one.turn(later_s=5.0)
    assert one.said == [
        "warning: the mailbox cannot be reached, steps go on: [Errno 5] away",
        "the mailbox is used again after 30 s",
    ]
    assert one.take(1).record.islands == {"a": 1}


def _raise_away(name):
    raise OSError(5, "away")


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(tmp_path):
    place = Folder(tmp_path)
    assert place.listed("rounds") == {}
    (tmp_path / "rounds").write_text("no folder")
    with pytest.raises(NotADirectoryError):
        place.listed("rounds")


def test_a_lease_counts_up_for_others_though_they_cannot_be_read(make):
    one, two = begun(make)
    real, one.box.place.listed = one.box.place.listed, _raise_away
    for _ in range(4):
        one.clock.now_s += 2.0
        one.box.hold_lease()
        two.turn(later_s=2.0)
        assert "a" in two.box.lease.leases.live()
    assert one.said == ["warning: the lease of the island cannot be renewed: [Errno 5] away"]
    one.box.place.listed = real
    one.send(1, seed=1)
    one.box.turn()
    one.box.turn()
    assert one.box.news().arrived == 0, "it does not know who lives"
    one.turn(later_s=2.0)
    one.turn(later_s=5.0)
    assert one.box.news().arrived == 1


def test_weights_that_stay_damaged_are_read_again_after_pauses_that_grow(make, tmp_path):
    one, two = begun(make)
    one.send(1, seed=1)
    one.turn(later_s=20.0)
    one.turn(later_s=5.0)
    for path in (tmp_path / "box/rounds/00000001").glob("a.*.bin"):
        path.unlink()
    [path] = (tmp_path / "box").glob("rounds/00000001/global.*.bin")
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\0")
    reads, real = [], two.box.place.read_piece

    def read_piece(name, *of):
        reads.extend([name] if name.startswith("rounds/00000001/global") else [])
        return real(name, *of)

    two.box.place.read_piece = read_piece
    for _ in range(600):
        two.turn(later_s=1.0)
    assert 10 <= len(reads) <= 20
    assert two.said.count("3 fetches of rounds in a row were given up") == 1
    with pytest.raises(PeerError, match=r"its weights are in the mailbox, and \d+ fetches"):
        two.take(1)
    assert two.box.overdue(1) == "round 1 is merged, and no weights have come here since"


def test_a_merge_that_takes_long_is_done_once(make):
    """The next one waits for as long as pieces go and come, and merges when they do not."""
    one, two = begun(make)
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


def test_a_round_that_somebody_reads_stays(make, tmp_path):
    """The others go, and so does a file that a killed process has left half written."""
    scratch, half = tmp_path / "scratch/a/7.tmp", tmp_path / "box/rounds/00000001/b.bin.7.tmp"
    for left in (scratch, half):
        left.parent.mkdir(parents=True)
        left.write_bytes(bytes(10))
    one, two = begun(make)
    assert not scratch.exists()
    two.box.lease.fetches = 0
    for number in range(1, KEPT_ROUNDS + 3):
        two.box.lease.renew()
        one.send(number, seed=number)
        one.turn(later_s=20.0)
        two.box.lease.renew()
        one.turn(later_s=20.0)
        one.take(number)
    rounds = sorted(records.in_rounds(one.box.place.listed(records.ROUNDS)))
    assert rounds == [0, *range(number - KEPT_ROUNDS + 1, number + 1)]
    assert not half.parent.exists()


def test_what_an_earlier_job_has_sent_is_sent_again_if_it_is_damaged(make, tmp_path):
    one, two = begun(make)
    two.send(1, seed=2, step=7)
    two.turn()
    again = make(1)
    again.box.adopt(1, IslandProgress(1, 7, 8, 1))
    for path in (tmp_path / "box/rounds/00000001").glob("b.*"):
        path.unlink()
    again.turn()
    again.turn()
    one.send(1, seed=1)
    one.turn()
    one.turn()
    record = one.take(1).record
    assert (record.islands, record.known["b"].step) == ({"a": 1, "b": 1}, 7)


def test_a_wait_lasts_for_as_long_as_pieces_come(make, monkeypatch):
    """They are progress of the job then, and not while it makes steps."""
    one, told, waits = make(0), [], []
    monkeypatch.setattr(mailbox, "time", SimpleNamespace(monotonic=one.clock))
    one.box._progress = JobProgress(lambda: told.append(one.clock()))
    one.box._moved()
    assert not told

    def wait(left_s):
        waits.append(left_s)
        one.clock.now_s += left_s
        if len(waits) < 3:
            one.box._moved()

    one.box._changed.wait = wait
    with pytest.raises(PeerError, match=r"round 0 .*was not merged within 9 s\n.*0 of 1 islands"):
        one.box.wait_for_any(9.0)
    assert waits == [9.0, 9.0, 9.0]
    assert len(told) == 2


def test_a_record_that_is_read_badly_once_is_read_again(make, tmp_path):
    one, _ = begun(make)
    path = tmp_path / "box/rounds/00000000/merged.json"
    content = path.read_bytes()
    path.write_bytes(b"{")
    assert rejoining.newest(one.box.place, lambda s: path.write_bytes(content)).round == 0
    path.write_bytes(b"{")
    with pytest.raises(records.DamagedObjectError):
        rejoining.newest(one.box.place, lambda s: None)


def test_a_disk_that_is_full_is_not_the_mailbox(make, monkeypatch):
    one, _ = begun(make)
    one.send(1, seed=1)

    def fail(path, arrays):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records, "write_arrays", fail)
    one.turn()
    [line] = one.said
    assert line.startswith(
        "warning: what is to be sent cannot be written here, steps go on: [Errno"
    )
    assert line.endswith("scratch/a'")


def test_a_lease_that_an_older_job_writes_late_is_written_over(make, tmp_path):
    path = tmp_path / "box/leases/a.json"
    old, young = make(0), make(0)
    old.box.lease.renew()
    late = path.read_bytes()
    young.box.lease.renew()
    path.write_bytes(late)  # it was on its way when the young one began
    young.box.lease.renew()
    with pytest.raises(LostLeaseError):
        old.box.lease.renew()
    young.box.lease.renew()


def test_a_job_whose_island_another_job_trains_ends(make):
    one, other = make(0), make(0)
    one.turn()
    other.turn()
    with pytest.raises(LostLeaseError, match="is trained by another job"):
        one.turn(later_s=2.0)


def test_a_lease_lives_while_a_transfer_is_long_and_ends_with_its_job(make):
    one = make(0, rules=dataclasses.replace(RULES, lease_s=0.04), clock=time.monotonic)
    is_over, put_file = threading.Event(), one.box.place.put_file
    one.box.place.put_file = lambda *args: is_over.wait(60.0) and put_file(*args)
    claim(one.box.place, {"seed": 0}, "parallel.mailbox")
    one.box.start(IslandProgress(0, 0, 0, 0), arrays(0).items)
    end_s = time.monotonic() + 60.0
    while one.box.lease.beat < 5:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    assert one.box.place.read("leases/a.json")
    is_over.set()
    one.box.wait_for_any(60.0)
    one.box.close()
    assert not one.box.place.read("leases/a.json")


def test_a_round_is_here_before_it_is_fetched_no_more(make):
    """Else whoever waits for it takes it for one that is gone, while others merge on."""
    one, two = begun(make)
    fetches = []

    class Noted(dict):
        def __setitem__(self, number, arrived):
            fetches.append((number, two.box.lease.fetches))
            super().__setitem__(number, arrived)

    two.box._arrived = Noted(two.box._arrived)
    one.send(1, seed=1)
    one.turn()
    one.turn(later_s=11.0)  # behind the grace
    two.turn()
    assert fetches == [(1, 1)]
    assert two.box.lease.fetches is None


def test_what_goes_before_turns_that_fail_again_and_again_is_no_progress(make):
    """Else an island that sends all of its weights anew each time would be waited for for ever."""
    one, _ = begun(make)
    moved, real_put = [], one.box.place.put
    one.box._progress = JobProgress(lambda: moved.append(one.box._num_failed))

    def put(name, content, *, replaces=True):
        if name.startswith("rounds/"):
            raise OSError("refused")
        real_put(name, content, replaces=replaces)

    one.box.place.put = put
    one.send(1, seed=1)
    with one.box.waited_for():
        for _ in range(MOST_LOST + 2):
            one.turn()
        assert moved == list(range(MOST_LOST))
        one.box.place.put = real_put
        one.turn()
        assert one.box._num_failed == 0
        before = len(moved)
        one.send(2, seed=2)
        one.turn()
    assert len(moved) > before


def test_a_mailbox_is_that_of_one_run(tmp_path):
    place = Counted(Folder(tmp_path))
    claim(place, {"model": "x", "seed": 1}, "box")
    claim(place, {"model": "x", "seed": 1}, "box")
    with pytest.raises(HolmesError, match="mailbox of another run\n  found: seed: 1, not 2"):
        claim(place, {"model": "x", "seed": 2}, "box")
    claim(place, {"model": "x", "seed": 1, "data.corpus": "unknown to an earlier version"}, "box")
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(HolmesError, match="box: is no mailbox"):
        claim(place, {"model": "x", "seed": 1}, "box")


def test_bytes_and_requests_are_those_of_the_plan_and_old_rounds_go(make, monkeypatch):
    """The shapes are large enough that records are less than 2% of the bytes."""
    monkeypatch.setitem(SHAPES, "block_000.up_DF", (200, 1000))
    one, two = begun(make)
    sizes = {name: int(np.prod(shape)) for name, shape in SHAPES.items()}
    cost = mailbox_cost(sizes, 2, [[name.partition(".")[0] for name in SHAPES]])
    for number in range(1, KEPT_ROUNDS + 3):
        before = [dataclasses.replace(island.box.place) for island in (one, two)]
        for island, seed in ((two, 1), (one, 2)):
            island.send(number, seed=seed)
            island.turn()
        two.turn()
        for island in (one, two):
            island.take(number)
        now = [island.box.place for island in (one, two)]
        sent, received = (
            [getattr(y, name) - getattr(x, name) for x, y in zip(before, now, strict=True)]
            for name in ("sent", "received")
        )
    expected = [cost.sent + cost.merge_sent, cost.sent]
    np.testing.assert_allclose(sent, expected, rtol=0.02)
    expected = [cost.received + cost.merge_received, cost.received]
    np.testing.assert_allclose(received, expected, rtol=0.02)
    requests = now[0].requests - before[0].requests
    # Besides: two lists, the lease, the records of what both have sent, and an old round goes.
    assert requests == cost.requests + cost.merge_requests + 2 + 1 + 2 + 1
    rounds = records.in_rounds(one.box.place.listed(records.ROUNDS))
    assert sorted(rounds) == list(range(number - KEPT_ROUNDS + 1, number + 1))


def test_an_object_store_is_a_mailbox(tmp_path):
    """Its records are written once, and its arrays are read in pieces."""
    with object_store("runs"):
        place = open_place("s3://runs/box")
        make = functools.partial(Island, place, scratch=tmp_path / "scratch")
        one, two = begun(make)
        for number in range(1, 3):
            for island in (two, one):
                island.send(number, seed=number)
                island.turn()
            two.turn()
            taken = [island.take(number) for island in (one, two)]
        for name in SHAPES:
            np.testing.assert_array_equal(taken[0].weights[name], taken[1].weights[name])
        place.put("once", b"x", replaces=False)
        place.put("once", b"x", replaces=False)  # an answer that was lost
        with pytest.raises(FileExistsError):
            place.put("once", b"y", replaces=False)
        claim(Counted(place), {"seed": 1}, "box")
        with pytest.raises(HolmesError, match="of another run"):
            claim(Counted(place), {"seed": 2}, "box")
        place.close()


def test_neighbours_are_read_at_once_and_the_rest_is_not(tmp_path):
    place = Counted(Folder(tmp_path))
    index = records.write_arrays(tmp_path / "x", arrays(0).items())
    names = list(SHAPES)
    for some in itertools.combinations(names, 2):
        place.requests = place.received = 0
        found = records.read_arrays(place, "x", index, some)
        for name in some:
            np.testing.assert_array_equal(found[name], arrays(0)[name])
        assert place.received == sum(found[name].nbytes for name in some)
        assert place.requests == (2 if some == (names[0], names[2]) else 1)
