"""The lease of an island: who lives, and which of two jobs counts."""

import dataclasses
import threading
import time

import pytest

from holmesjax.errors import LostLeaseError
from holmesjax.islands.election import Leases
from holmesjax.islands.island_lease import IslandLease
from holmesjax.islands.mailbox_claim import claim
from holmesjax.islands.mailbox_places import Counted, Folder
from holmesjax.islands.mailbox_records import IslandProgress
from tests.islands.stepless_islands import RULES, Clock, arrays, begun, raise_away


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


def test_of_two_jobs_of_an_island_the_one_with_the_lease_counts(make_island):
    """The older one is further on; and it sends no more once it has lost the lease."""
    one, two = begun(make_island)
    one.turn()
    two.send(1, seed=2, step=40)
    two.turn()
    again = make_island(1)
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


def test_a_lease_counts_up_for_others_though_they_cannot_be_read(make_island):
    one, two = begun(make_island)
    real, one.box.place.listed = one.box.place.listed, raise_away
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


def test_a_lease_that_an_older_job_writes_late_is_written_over(make_island, tmp_path):
    path = tmp_path / "box/leases/a.json"
    old, young = make_island(0), make_island(0)
    old.box.lease.renew()
    late = path.read_bytes()
    young.box.lease.renew()
    path.write_bytes(late)  # it was on its way when the young one began
    young.box.lease.renew()
    with pytest.raises(LostLeaseError):
        old.box.lease.renew()
    young.box.lease.renew()


def test_a_job_whose_island_another_job_trains_ends(make_island):
    one, other = make_island(0), make_island(0)
    one.turn()
    other.turn()
    with pytest.raises(LostLeaseError, match="is trained by another job"):
        one.turn(later_s=2.0)


def test_a_lease_lives_while_a_transfer_is_long_and_ends_with_its_job(make_island):
    one = make_island(0, rules=dataclasses.replace(RULES, lease_s=0.04), clock=time.monotonic)
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
