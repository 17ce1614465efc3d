"""The controller and its members tell each other things, and wait for each other."""

import queue
import random
import threading
from types import SimpleNamespace

import pytest

from holmesjax.config import DistributedConfig
from holmesjax.distributed import member as members_end
from holmesjax.distributed.member import ClockOffset, Member
from holmesjax.distributed.messages import Addresses, AskFiles, Beat, Go, Heartbeat, JobStart, Ready
from holmesjax.distributed.worker import _Reporter
from holmesjax.errors import PeerError
from holmesjax.runtime.timeline import Interval
from tests.distributed.joined_members import (
    ABOUT,
    DEADLINE_S,
    KEY,
    SILENCE_S,
    SKIPPED,
    join,
    next_event,
    open_controller,
    pass_time,
    wait_until,
)
from tests.distributed.scripted_jobs import PROCESSES, process

pytestmark = pytest.mark.usefixtures("clock")


def tell_ready(member, unproven=None):
    number = member.process.number
    coordinator = ["there", number] if member.process.leads else None
    addresses = {"data": ["here", number], "coordinator": coordinator}
    member.send(Ready(addresses=addresses, unproven=unproven))


def test_a_start_of_the_job_has_a_name_of_its_own(controller, members):
    """Islands by mailbox know a job by it. A key may outlive its launcher."""
    [session] = {member.session for member in members}
    with open_controller(PROCESSES[:1]) as later:
        member = join(later, PROCESSES[0])
        assert len(member.session) == len(session) == 16
        assert member.session != session
        member.close()


@pytest.mark.parametrize("says", [0, 1])
def test_the_start_comes_when_all_are_there_and_has_what_one_needs(controller, members, says):
    for number in (0, 1):
        tell_ready(members[number], "passed check" if number == says else None)
    with pytest.raises(PeerError, match="not all processes came"):
        members[0].wait_for(JobStart, 0.2)
    tell_ready(members[2])
    for member in members:
        leader = 0 if member.process.stage == 0 else 2
        # What one member of a stage says of its kernels counts for all of the stage.
        unproven = "passed check" if member.process.stage == 0 else None
        coordinator = ["there", leader]
        facts = {"resume": 7, "unproven": unproven, "in_memory": [], "skipped": SKIPPED}
        start = JobStart(coordinator=coordinator, **facts)
        assert member.wait_for(JobStart, DEADLINE_S) == start
    assert members[0].addresses([2, 0], DEADLINE_S) == {2: ["here", 2], 0: ["here", 0]}


def test_a_start_is_as_long_in_a_large_job_as_in_a_small_one():
    """It says nothing of the others of a stage; whoever needs their addresses asks for them."""
    sizes = []
    for count in (2, 200):
        made = [process(number, number % 2, number // 2) for number in range(count)]
        with open_controller(made) as controller:
            sent = []
            connection = SimpleNamespace(send=sent.append)
            for seat in controller._seats:
                seat.connection = connection
                seat.addresses = {"data": ["here"] * 8, "coordinator": ["there", 1]}
            controller._start_all()
            assert len(sent) == count
            sizes.append(max(map(len, sent)))
    assert sizes[0] == sizes[1]


def test_clocks_are_set_by_the_soonest_answer_and_follow_a_drift():
    """Waits on one way, as a busy process or a full queue makes them, spoil most answers."""
    rng = random.Random(0)
    clock, ahead_s = ClockOffset(), 5000.0
    for i in range(200):
        there_s, back_s = (0.1 + rng.choice([0.0, rng.expovariate(0.5)]) for _ in range(2))
        asked_s = 10.0 * i
        clock.hear(asked_s, asked_s + there_s + ahead_s, asked_s + there_s + back_s)
        if i > 20:
            assert abs(clock.offset_s - ahead_s) <= 0.02  # a tenth of the round trip
        ahead_s += 1e-4  # 10 parts in a million


def test_tasks_of_all_hosts_stand_on_the_clock_of_the_controller():
    """The same second, seen on hosts whose clocks are behind and ahead; followers tell none."""
    told = []
    for ahead_s, rank in ((5000.0, 0), (-70.0, 0), (30.0, 1)):  # of the controller's clock
        clock = ClockOffset()
        clock.hear(10.0, 10.1 + ahead_s, 10.2)
        member = SimpleNamespace(
            process=process(0, 0, rank),
            clock=clock,
            send=lambda record: told.append(record.measured),
        )
        task = Interval(0, "F", 0, 9000.0 - ahead_s, 9001.0 - ahead_s)
        _Reporter(member)({"step": 1, "intervals": [task]})
    times_s = [[(i.start_s, i.end_s) for i in part["intervals"]] for part in told]
    want = [(pytest.approx(9000.0), pytest.approx(9001.0))]
    assert times_s == [want, want, []]


def test_a_member_asks_for_the_time_again_and_again(controller, members):
    wait_until(lambda: all(len(member.clock._found) >= 3 for member in members))
    for member in members:  # both ends have one clock
        assert abs(member.clock.offset_s) <= min(member.clock._found)[0] / 2


def test_a_member_that_takes_nothing_holds_up_nobody(controller, members, clock, monkeypatch):
    """It lives, and its connection is full: the others have their verdict all the same."""
    takes_no_more, over = threading.Event(), threading.Event()

    def receive():
        takes_no_more.set()
        over.wait(60)
        raise OSError("the test is over")

    monkeypatch.setattr(members[1]._link, "receive", receive)
    for _ in range(2):  # it may be about to take one
        controller.send(1, Addresses(found=["x" * (1 << 25)]))
    assert takes_no_more.wait(DEADLINE_S)
    for step in (1, 2):
        members[0].vote(step)
        members[2].vote(step)
        for member in (members[0], members[2]):
            assert not member.verdict(step).stop
    for _ in range(20):  # the system may still take some bytes at first
        if controller.events.empty():
            pass_time(clock, controller, 0.4 * SILENCE_S, but=[1])
    assert next_event(controller, "silent").process == 1
    over.set()


def test_nobody_goes_before_all_are_told_to(controller, members):
    for member in members:
        member.send_compiled({"train": "1"}, "here", {})
        event = next_event(controller, "compiled")
        assert event.process == member.process.number
        assert event.record.digests == {"train": "1"}
    with pytest.raises(PeerError, match="has not started within"):
        members[0].wait_for(Go, 0.2)
    controller.broadcast(Go(epoch=3))
    for member in members:
        assert member.wait_for(Go, DEADLINE_S) == Go(epoch=3)


def test_a_member_tells_the_digests_of_the_files_that_are_asked_for(controller, members):
    members[1].send_compiled({}, "here", {"a": "1", "b": "2", "c": "3"})
    next_event(controller, "compiled")
    controller.send(1, AskFiles(first=1, count=2))
    assert next_event(controller, "files").record.files == [["b", "2"], ["c", "3"]]


def test_all_get_the_same_verdict(controller, members):
    for step in (1, 2):
        if step == 2:
            controller.stop()
        members[0].vote(step)
        members[1].vote(step)  # does not lead its stage: it has no say
        members[2].vote(step)
        for member in members:
            verdict = member.verdict(step)
            assert verdict.stop == verdict.save == (step == 2)


def test_a_round_lands_when_all_processes_have_it_and_opens_when_one_knows(controller, members):
    """Member 1 leads no stage, and is the last to have the round."""
    for step, (of_last, agreed) in enumerate([(-1, -1), (4, 4)], 1):
        members[1].vote(step, of_last)
        wait_until(lambda of_last=of_last: controller._seats[1].arrived == of_last)
        members[0].vote(step, 4, 5)
        members[2].vote(step, 4)
        for member in members:
            verdict = member.verdict(step)
            assert (verdict.arrived, verdict.opened) == (agreed, 5)


def test_what_it_is_asked_to_tell_comes_at_once(controller, members):
    members[2].status("waited for B1")
    question = controller.ask()
    wait_until(lambda: controller.status(2) == "waited for B1")
    wait_until(lambda: not controller.unanswered(question))
    members[1]._take = lambda record: True  # it hears, and answers nothing
    assert controller.unanswered(controller.ask()) >= {1}


def test_what_is_done_at_a_start_is_progress_and_a_heartbeat_is_none(controller, members):
    def noted(step):
        for member in (members[0], members[2]):
            member.vote(step)
        members[1].verdict(step)  # all that was told before has been heard
        return controller._progress.num_noted

    before = noted(1)
    members[0].send(Beat())
    assert noted(2) == before
    members[0].advance()
    assert noted(3) == before + 1


def test_the_patience_of_a_member_counts_from_the_last_progress(monkeypatch):
    """On a clock that moves only while the member waits; progress is heard of after 100 s."""
    monkeypatch.setattr(members_end, "BEATS", 4)
    monkeypatch.setattr(Member, "__post_init__", lambda self: None)  # it calls nobody
    now_s = 0.0

    class Inbox:
        def get(self, timeout):
            nonlocal now_s
            now_s += timeout
            member._take(Heartbeat(num_noted=1 if now_s < 100 else 2, limit_s=100.0))
            raise queue.Empty

    member = Member(
        process=PROCESSES[0], address="", port=0, key=KEY, about=ABOUT, computing={}, timeout_s=8.0,
        start_timeout_s=1.0, on_loss=lambda error: None,
    )  # fmt: skip
    member._inbox = Inbox()
    monkeypatch.setattr(members_end, "time", SimpleNamespace(monotonic=lambda: now_s))
    with pytest.raises(PeerError, match="no progress for 210 s"):
        member.verdict(1)
    # Twice the limit and one silence, in beats of 2 s.
    assert now_s == 100 + 210


def test_a_member_waits_while_there_is_progress_and_no_longer(controller, members, clock):
    """Twice as long as that may take, and for what a controller may be silent."""
    controller._progress._config = DistributedConfig(step_timeout_s=0.01, start_timeout_s=0.01)
    wait_until(lambda: members[0]._patience_s < 1.1 * SILENCE_S)  # it was that of 600 s
    waits = []

    def wait():
        with pytest.raises(PeerError, match="waited too long for the verdict") as error:
            members[0].verdict(1)
        waits.append(error.value)

    waiting = threading.Thread(target=wait)
    waiting.start()
    wait_until(lambda: members[0]._noted_s == clock.now_s)
    for step in range(1, 5):
        pass_time(clock, controller, 0.8 * SILENCE_S)
        members[2].begin("validation", step)
        wait_until(lambda: members[0]._noted_s == clock.now_s)
    assert not waits
    for _ in range(2):
        pass_time(clock, controller, 0.8 * SILENCE_S)
    waiting.join(DEADLINE_S)
    assert waits
