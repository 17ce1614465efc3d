"""A process sends to its mailbox, fetches from it, waits and removes; some of it fails."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from holmesjax.checkpoints import skipped_data
from holmesjax.checkpoints.resume import Start
from holmesjax.checkpoints.skipped_data import Skipped
from holmesjax.config import PlaceConfig
from holmesjax.errors import HolmesError, PeerError
from holmesjax.islands import mailbox, mailbox_records as records, rejoining
from holmesjax.islands.global_weights import MOST_LOST
from holmesjax.islands.mailbox_records import IslandProgress
from holmesjax.islands.mailbox_seat import JobProgress
from holmesjax.islands.merge_duty import KEPT_ROUNDS
from holmesjax.plan.mailbox_cost import mailbox_cost
from tests.islands.stepless_islands import SHAPES, begun, raise_away


def test_what_an_island_has_sent_is_left_out_once_wherever_it_goes_on(
    make_island, tmp_path, monkeypatch
):
    """An entry of a newer checkpoint, which is gone, would leave out data that nobody has seen."""
    _, two = begun(make_island)
    two.send(1, seed=2, step=7)  # 8 sequences
    two.turn()
    monkeypatch.setattr(rejoining, "place_of", lambda config: two.box.place)
    parallel = SimpleNamespace(place=PlaceConfig(names=("a", "b"), number=1, steps=9))
    model, train = SimpleNamespace(context_length=8), SimpleNamespace(steps=9, global_batch=1)
    config = SimpleNamespace(parallel=parallel, model=model, train=train)
    job = SimpleNamespace(config=config, run_dir=tmp_path)
    before, after_4, after_2 = Skipped(1, 3, 1), Skipped(4, 0, 3), Skipped(2, 0, 5)
    skipped_data.write(tmp_path, [before])
    for step, found in ((4, (before, after_4)), (4, (before, after_4)), (2, (before, after_2))):
        checkpoint = SimpleNamespace(step=step, sequences=step + before.sequences)
        known = skipped_data.read(tmp_path)
        start = rejoining.go_on(Start(job=job, checkpoint=checkpoint, skipped=known), print)
        assert tuple(start.skipped) == skipped_data.read(tmp_path) == found


def test_a_mailbox_that_lacks_a_round_which_has_landed_is_refused(make_island):
    one, _ = begun(make_island)
    rejoining.refuse_older(one.box.place, 0)
    with pytest.raises(HolmesError, match="found: round 0 is its newest"):
        rejoining.refuse_older(one.box.place, 3)
    one.box.place.remove(one.box.place.listed("rounds"))
    rejoining.refuse_older(one.box.place, -1)
    with pytest.raises(HolmesError, match="found: no round"):
        rejoining.refuse_older(one.box.place, 0)


def test_a_place_that_is_away_is_said_once_and_tried_again(make_island):
    one, _ = begun(make_island)
    one.send(1, seed=1)
    listed, one.box.place.listed = one.box.place.listed, raise_away
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


def test_weights_that_stay_damaged_are_read_again_after_pauses_that_grow(make_island, tmp_path):
    one, two = begun(make_island)
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


def test_a_round_that_somebody_reads_stays(make_island, tmp_path):
    """The others go, and so does a file that a killed process has left half written."""
    scratch, half = tmp_path / "scratch/a/7.tmp", tmp_path / "box/rounds/00000001/b.bin.7.tmp"
    for left in (scratch, half):
        left.parent.mkdir(parents=True)
        left.write_bytes(bytes(10))
    one, two = begun(make_island)
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


def test_what_an_earlier_job_has_sent_is_sent_again_if_it_is_damaged(make_island, tmp_path):
    one, two = begun(make_island)
    two.send(1, seed=2, step=7)
    two.turn()
    again = make_island(1)
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


def test_a_wait_lasts_for_as_long_as_pieces_come(make_island, monkeypatch):
    """They are progress of the job then, and not while it makes steps."""
    one, told, waits = make_island(0), [], []
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


def test_a_disk_that_is_full_is_not_the_mailbox(make_island, monkeypatch):
    one, _ = begun(make_island)
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


def test_a_round_is_here_before_it_is_fetched_no_more(make_island):
    """Else whoever waits for it takes it for one that is gone, while others merge on."""
    one, two = begun(make_island)
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


def test_what_goes_before_turns_that_fail_again_and_again_is_no_progress(make_island):
    """Else an island that sends all of its weights anew each time would be waited for for ever."""
    one, _ = begun(make_island)
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


def test_bytes_and_requests_are_those_of_the_plan_and_old_rounds_go(make_island, monkeypatch):
    """The shapes are large enough that records are less than 2% of the bytes."""
    monkeypatch.setitem(SHAPES, "block_000.up_DF", (200, 1000))
    one, two = begun(make_island)
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
