"""A controller and its members lose each other: by silence, or with a connection."""

import dataclasses
import queue
import random
import time

import pytest

from holmesjax.distributed import controller as controllers_end, member_records
from holmesjax.distributed.messages import Done, Verdict
from holmesjax.errors import RefusedError
from holmesjax.transport import connections
from holmesjax.transport.relay import Relay
from holmesjax.transport.relay_messages import relay_key
from holmesjax.transport.relayed import RelayPlace
from tests.distributed.joined_members import (
    DEADLINE_S,
    KEY,
    SILENCE_S,
    join,
    next_event,
    open_controller,
    pass_time,
    wait_until,
)
from tests.distributed.scripted_jobs import PROCESSES
from tests.jobs import own_address

pytestmark = pytest.mark.usefixtures("clock")


def test_a_closed_connection_is_told_at_once(controller, members):
    members[1].close()
    assert next_event(controller, "lost").process == 1


def test_a_silent_member_is_told_and_a_quiet_one_is_not(controller, members, clock, monkeypatch):
    members[2].status("waited for F0")
    for _ in range(3):  # all beat
        pass_time(clock, controller, 0.8 * SILENCE_S)
    with pytest.raises(queue.Empty):
        controller.events.get_nowait()
    assert controller.status(2) == "waited for F0"
    monkeypatch.setattr(members[0]._link, "send", lambda message: None)  # its beats
    for _ in range(3):
        pass_time(clock, controller, 0.4 * SILENCE_S, but=[0])
    assert next_event(controller, "silent").process == 0


def test_who_misses_heartbeats_is_known_before_its_time_is_up(
    controller, members, clock, monkeypatch
):
    monkeypatch.setattr(members[1]._link, "send", lambda message: None)
    for _ in range(2):  # what it has sent before is heard in the first round
        pass_time(clock, controller, 0.3 * SILENCE_S, but=[1])
    assert list(controller.overdue()) == [1]
    assert controller.events.empty()


def test_members_notice_that_the_controller_is_gone(controller):
    lost = queue.Queue()
    member = join(controller, PROCESSES[0], on_loss=lost.put)
    controller.__exit__()
    error = lost.get(timeout=DEADLINE_S)
    assert "the process that started this job is gone" in str(error)
    member.close()


def test_a_controller_that_stops_beating_is_gone(monkeypatch):
    """It holds the connection open and says nothing, as a stopped process does."""
    with open_controller(PROCESSES, silence_s=1000.0) as controller:
        controller._hear = lambda seat, record, standing: None  # it does not answer
        held = []
        controller._go_on = lambda seat, connection: held.append(connection)  # nor goes on
        lost = queue.Queue()
        member = join(controller, PROCESSES[0], on_loss=lost.put, silence_s=0.5)
        assert "silent for 0.5 s" in str(lost.get(timeout=DEADLINE_S))
        for closable in (member, *held):
            closable.close()


@pytest.mark.parametrize(
    "nonsense", [{"kind": "vote"}, {"kind": "beat", "work": "play"}], ids=["record", "standing"]
)
def test_a_member_that_talks_nonsense_is_lost_and_the_others_go_on(controller, members, nonsense):
    members[1]._link.send(nonsense)
    assert next_event(controller, "lost").process == 1
    members[0].vote(1)
    members[2].vote(1)
    assert members[2].verdict(1) == Verdict(step=1, stop=False, save=False)


def numbered(controller, members, count, at):
    """Lets each end tell the other numbers while `at` does its worst; returns what they heard."""
    heard, told = [], []
    for number in range(count):
        at(number)
        members[1].send(Done(step=number))
        controller.send(1, Verdict(step=number, stop=False, save=False))
    for _ in range(count):
        told.append(next_event(controller, "done").record.step)
        heard.append(members[1].wait_for(Verdict, DEADLINE_S).step)
    return told, heard


@pytest.mark.parametrize("who", ["member", "controller", "both"])
def test_what_is_said_while_a_connection_is_lost_comes_once_and_in_order(controller, members, who):
    """At random moments, a reset that both ends hear of; messages of some sizes fill the socket."""
    rng, link, seat = random.Random(0), members[1]._link, controller._seats[1]
    num_lost = 0

    def lose(number):
        nonlocal num_lost
        time.sleep(rng.choice([0.0, 0.0, 0.003]))
        if rng.random() < 0.15:
            # What is lost again has been made anew, however long that takes.
            wait_until(lambda: seat.attempt >= num_lost and link._is_up)
            socks = {"member": link._connection.sock, "controller": seat.connection.sock}
            for name in socks if who == "both" else [who]:
                connections.shut(socks[name])
            num_lost += 1

    assert numbered(controller, members, 150, lose) == (list(range(150)),) * 2
    assert seat.attempt >= num_lost >= 15
    with pytest.raises(queue.Empty):
        controller.events.get_nowait()  # nobody is lost
    question = controller.ask()
    wait_until(lambda: not controller.unanswered(question))
    for end in (members[1]._link._outbox, controller._seats[1].outbox):
        wait_until(lambda end=end: len(end._kept) < 50)  # what has come is not kept


def test_a_member_that_does_not_come_back_is_lost_after_a_moment(controller, members, clock):
    """The end of its connection was heard of, so it would have come at once."""
    members[1]._closed.set()
    members[1]._link.close()
    seat = controller._seats[1]
    wait_until(lambda: seat.away_until_s is not None)
    question = controller.ask()
    assert 1 in controller.unanswered(question)  # it may still come back
    clock.now_s += member_records.RETURN_S - 0.1
    time.sleep(0.2)
    assert controller.events.empty()
    clock.now_s += 0.2
    assert next_event(controller, "lost").process == 1
    assert 1 not in controller.unanswered(question)


def test_a_relay_may_be_away_for_as_long_as_a_member_may_be_silent(clock):
    """Its end looks like that of the member, which comes back when the relay has started again."""
    relay = Relay(own_address(), 0, key=relay_key(KEY), say=lambda line: None)
    place = RelayPlace(*relay.address)
    with open_controller(PROCESSES[:1], relay=place) as controller:
        wait_until(lambda: relay._listeners)
        member = join(controller, PROCESSES[0], address=place.of(controllers_end.NAME_AT_RELAY))
        [seat] = controller._seats
        wait_until(lambda: seat.connection)
        relay.close()
        wait_until(lambda: seat.is_away)
        clock.now_s += member_records.RETURN_S + 1.0
        time.sleep(0.2)
        assert not seat.is_lost
        with Relay(*place, key=relay_key(KEY), say=lambda line: None):
            wait_until(lambda: not seat.is_away)
            member.send(Done(step=3))
            kinds = [controller.events.get(timeout=DEADLINE_S).record.kind for _ in range(3)]
            assert kinds == ["warning", "warning", "done"]  # the relay is away, and there again
            member.close()


def test_a_member_that_the_system_gives_up_has_the_time_of_a_silence(controller, members, clock):
    seat = controller._seats[1]
    connection, members[1]._link._call_again = seat.connection, lambda error: time.sleep(60)
    controller._loop._forget(connection)
    controller._lose(connection, TimeoutError(110, "Connection timed out"))
    assert seat.away_until_s == connection.heard_s + SILENCE_S
    connection.close()


def test_another_process_does_not_take_the_place_of_one_that_was_lost(controller, members):
    """It is of the same plan, and holds the key; nor does one of another start of the job."""
    link = members[1]._link
    real, again = link._hello, link._go_on
    for hello, session, words in (
        (dataclasses.replace(real, session="another"), link.session, "another process"),
        (real, "another", "another start of the job"),
    ):
        link._hello, link.session = hello, session
        with pytest.raises(RefusedError, match=words):
            again(5.0)
