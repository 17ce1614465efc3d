"""The pull protocol alone: a scripted byte mover delivers, loses, repeats and reorders frames."""

import itertools

import pytest
from hypothesis import given, settings, strategies as st

from holmesjax.transport.crossings import Key
from holmesjax.transport.frames import Frame, FrameKind, ViolationError
from holmesjax.transport.pull import PREFETCH, Shared, Source, Target, Traffic

MIB = 1 << 20
SIZES = {0: 3 * MIB, 1: 5, 2: 9 * MIB}  # of the pieces of F0, by number: some have several parts
# Process 0 and process 1 each send pieces of F0 to process 2.
SENDERS = {0: 0, 1: 1, 2: 0}
STREAMS = {0: 2, 1: 1}


def source_of(number):
    sends = {i: Shared(2, SIZES[i], STREAMS[number]) for i, who in SENDERS.items() if who == number}
    return Source([Traffic(index=4, name="F0", sends=sends)])


def target():
    receives = {i: Shared(who, SIZES[i], STREAMS[who]) for i, who in SENDERS.items()}
    return Target([Traffic(index=4, name="F0", receives=receives)])


def keys(count):
    return [Key("F0", 7, m) for m in range(count)]


class Mover:
    """Carries frames between two sources and a target, in any order, and checks what they do."""

    def __init__(self, count):
        self.sources, self.target = {n: source_of(n) for n in STREAMS}, target()
        self.keys, self.taken = keys(count), []
        self.pulls, self.parts = [], []  # under way: process and frame
        self.seen = {}  # (key, piece) -> the bytes that have landed, as ranges
        self.asked = []
        self.todo = [("offer", n, key) for key in self.keys for n in STREAMS]
        self.staged = []
        self.ask(self.target.expect(self.keys))

    def ask(self, found):
        self.asked += found
        assert len(self.asked) - len(self.taken) <= PREFETCH
        for key in found:
            self.pulls += self.target.ask(key)

    def choices(self):
        taken = [("take", key) for key in self.asked if self.target.arrived(key)]
        staged = [("ready", *one) for one in self.staged]
        pulls = [("pull", *one) for one in self.pulls]
        return self.todo[:3] + staged + pulls + [("data", *one) for one in self.parts] + taken

    def act(self, what, *about):
        if what == "offer":
            self.todo.remove((what, *about))
            number, key = about
            assert self.sources[number].offer(key)
            self.staged.append(about)
        elif what == "ready":
            self.staged.remove(about)
            number, key = about
            for piece in self.sources[number].ready(key):
                self.answer(number, key, piece)
        elif what == "pull":
            self.pulls.remove(about)
            number, frame = about
            if key := self.sources[number].pulled(2, frame):
                self.answer(number, key, frame.piece)
        elif what == "data":
            self.parts.remove(about)
            self.land(*about)
        else:
            self.taken.append(about[0])
            self.ask(self.target.take(*about))

    def answer(self, number, key, piece):
        self.parts += [(number, frame) for frame in self.sources[number].parts(key, piece)]

    def land(self, number, frame):
        key = self.target.landing(number, frame)
        ranges = self.seen.setdefault((key, frame.piece), [])
        ranges.append((frame.offset, frame.offset + frame.length))
        num_bytes, whole = self.target.landed(number, frame)
        self.sources[number].delivered(frame)
        covered = sorted(ranges) if num_bytes else []
        if num_bytes:  # the parts tile the piece
            assert num_bytes == SIZES[frame.piece]
            assert (covered[0][0], covered[-1][1]) == (0, num_bytes)
            assert all(a[1] == b[0] for a, b in itertools.pairwise(covered))
        if whole:
            assert not self.target.arrive(whole)


@given(st.integers(1, 5), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_every_array_arrives_once_in_whatever_order_frames_come(count, rng):
    mover = Mover(count)
    while choices := mover.choices():
        mover.act(*rng.choice(choices))
    assert sorted(mover.taken) == mover.keys
    assert mover.seen.keys() == {(key, piece) for key in mover.keys for piece in SIZES}
    assert not any(source.owed_to for source in mover.sources.values())


def test_what_is_waited_for_is_asked_before_its_turn():
    pulls = target()
    first, second, third, last = keys(4)
    assert pulls.expect([first, second, third, last]) == [first, second]
    assert pulls.hurry(last) == [last]
    assert pulls.hurry(last) == pulls.hurry(first) == []
    with pytest.raises(AssertionError, match="expected twice"):
        pulls.expect([last])


def test_what_comes_in_the_background_takes_no_place_of_what_is_expected(monkeypatch):
    monkeypatch.setattr("holmesjax.transport.pull.IN_BACKGROUND", 2)
    pulls = target()
    later, soon = keys(7)[:4], keys(7)[4:]
    assert pulls.expect_later(later) == later[:2]
    assert pulls.expect(soon) == soon[:PREFETCH]
    assert pulls.arrive(later[0]) == [later[2]]
    assert pulls.hurry(later[3]) == [later[3]]
    assert pulls.arrive(soon[0]) == []
    assert pulls.take(soon[0]) == [soon[2]]
    assert pulls.take(later[0]) == []
    with pytest.raises(AssertionError, match="expected twice"):
        pulls.expect_later([later[1]])


def test_a_lost_part_keeps_the_array_from_arriving_and_names_who_owes_it():
    mover = Mover(1)
    [key] = mover.keys
    for n in STREAMS:
        mover.act("offer", n, key)
        mover.act("ready", n, key)
    for pull in list(mover.pulls):
        mover.act("pull", *pull)
    lost = next(one for one in mover.parts if one[1].piece == 2 and one[1].offset)
    for part in [one for one in mover.parts if one != lost]:
        mover.act("data", *part)
    assert not mover.target.arrived(key)
    assert mover.target.owing(key) == [0]
    assert mover.target.awaited_from(0) == key
    assert mover.target.awaited_from(1) is None
    assert [n for n in STREAMS if mover.sources[n].owed_to] == [0]
    mover.act("data", *lost)
    assert mover.target.arrived(key)
    assert mover.target.owing(key) == []


def pull(**changes):
    return Frame(FrameKind.PULL, 4, 7, 0, 0, 0, SIZES[0])._replace(**changes)


@pytest.mark.parametrize(
    "frame, problem",
    [
        (pull(crossing=3), "a PULL for what is not sent from here"),
        (pull(piece=1, length=5), "a PULL for what is not sent from here"),  # process 1 sends it
        (pull(piece=9), "a PULL for what is not sent from here"),
        (pull(length=0), "a PULL for another range than the 3145728 bytes"),
        (pull(length=3 * MIB + 1), "a PULL for another range"),
        (pull(offset=1), "a PULL for another range"),
        (pull(offset=2**64 - 1), "a PULL for another range"),
    ],
)
@pytest.mark.parametrize("is_offered", [True, False])
def test_a_wish_for_what_was_not_agreed_is_refused(frame, problem, is_offered):
    source = source_of(0)
    if is_offered:
        source.offer(Key("F0", 7, 0))
        source.ready(Key("F0", 7, 0))
    with pytest.raises(ViolationError, match=problem):
        source.pulled(2, frame)
    with pytest.raises(ViolationError, match="from here to there"):
        source.pulled(1, pull())


@pytest.mark.parametrize("is_ready", [True, False])
def test_a_repeated_wish_is_refused(is_ready):
    source, key = source_of(0), Key("F0", 7, 0)
    source.offer(key)
    if is_ready:
        source.ready(key)
    assert source.pulled(2, pull()) == (key if is_ready else None)
    expected = "a PULL for what it has got" if is_ready else "a PULL that is one too many"
    with pytest.raises(ViolationError, match=expected):
        source.pulled(2, pull())
    if not is_ready:
        assert source.ready(key) == [0]  # once, however often it was asked for
        with pytest.raises(ViolationError, match="a PULL for what it has got"):
            source.pulled(2, pull())


def test_only_so_many_arrays_may_be_asked_for_before_they_are_offered(monkeypatch):
    monkeypatch.setattr("holmesjax.transport.pull.MAX_WAITING", 3)
    source = source_of(0)
    for m in range(3):
        assert source.pulled(2, pull(microbatch=m)) is None
    with pytest.raises(ViolationError, match="one too many"):
        source.pulled(2, pull(microbatch=3))


def data(**changes):
    return Frame(FrameKind.DATA, 4, 7, 0, 0, 0, 3 * MIB // 2)._replace(**changes)


@pytest.mark.parametrize(
    "frame",
    [
        data(microbatch=1),  # not asked for yet
        data(crossing=5, length=2**63),
        data(piece=1),  # owed by process 1
        data(length=3 * MIB // 2 + 1),
        data(offset=1),
        data(offset=3 * MIB, length=3 * MIB),
    ],
)
def test_data_that_was_not_asked_for_is_refused(frame):
    pulls = target()
    for key in pulls.expect(keys(1)):
        pulls.ask(key)
    with pytest.raises(ViolationError, match="data that was not asked for"):
        pulls.landing(0, frame)


def test_no_part_lands_twice():
    pulls = target()
    for key in pulls.expect(keys(1)):
        pulls.ask(key)
    pulls.landing(0, data())
    with pytest.raises(ViolationError, match="data that was not asked for"):
        pulls.landing(0, data())  # a second time, while the first still comes
    pulls.landed(0, data())
    with pytest.raises(ViolationError, match="data that was not asked for"):
        pulls.landing(0, data())
