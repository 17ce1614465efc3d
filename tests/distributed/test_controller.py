"""The controller and its members, over real sockets, and with a clock that the tests move.

Heartbeats go many times a second, by the machine's own clock; silence and patience are measured by
the clock of the tests. So no machine is too busy for them.
"""

import contextlib
import dataclasses
import itertools
import queue
import random
import re
import socket
import threading
import time
from types import SimpleNamespace
from unittest import mock

import pytest
from jax._src.lib import _jax  # its coordinator by itself, without a job

from holmesjax.config import DistributedConfig
from holmesjax.distributed import (
    controller as controllers_end,
    member as members_end,
    member_link,
    member_records,
)
from holmesjax.distributed.controller import Controller, differences
from holmesjax.distributed.member import ClockOffset, Member
from holmesjax.distributed.messages import (
    PROTOCOL,
    Addresses,
    AskFiles,
    Beat,
    ControllerHello,
    Done,
    Go,
    Heartbeat,
    JobStart,
    MemberHello,
    Ready,
    Verdict,
)
from holmesjax.distributed.worker import _Reporter
from holmesjax.errors import DataError, HolmesError, PeerError, RefusedError
from holmesjax.runtime.domain import hold_coordinator_port
from holmesjax.runtime.step_timeout import Progress
from holmesjax.runtime.timeline import Interval
from holmesjax.transport import connection_loop, connections, key_files
from holmesjax.transport.handshake import WRONG_KEY
from holmesjax.transport.relay import Relay
from holmesjax.transport.relay_messages import relay_key
from holmesjax.transport.relayed import RelayPlace
from tests.clock import stop_callers_clock
from tests.distributed.scripted_jobs import PROCESSES, process
from tests.jobs import own_address

ABOUT = {"plan hash": "aaaa", "jax": "1.0"}
KEY = b"k" * key_files.KEY_BYTES
SILENCE_S = 20.0
DEADLINE_S = 60.0  # for what must come: a hang guard


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    clock = SimpleNamespace(now_s=1000.0)

    def sleep(seconds):
        clock.now_s += seconds

    times = SimpleNamespace(
        monotonic=lambda: clock.now_s, perf_counter=time.perf_counter, sleep=sleep
    )
    for module in (controllers_end, members_end, connection_loop, member_records):
        monkeypatch.setattr(module, "time", times)
    for module in (controllers_end, members_end):
        monkeypatch.setattr(module, "BEATS", 400)
    return clock


def wait_until(condition):
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it does not come"
        time.sleep(0.005)


def pass_time(clock, controller, seconds, *, but=()):
    """Moves the clock, and waits until all members, but some, have been heard at that time."""
    clock.now_s += seconds
    heard = [seat for seat in controller._seats if seat.process.number not in but]
    wait_until(lambda: all(seat.connection.heard_s == clock.now_s for seat in heard))


def open_controller(processes, silence_s=SILENCE_S, allow=(), relay=None):
    return Controller(
        processes,
        address="127.0.0.1",
        port=0,
        about=ABOUT,
        resume=7,
        key=KEY,
        silence_s=silence_s,
        is_saving=lambda step: step % 2 == 0,
        progress=Progress(DistributedConfig()),
        allow=allow,
        relay=relay,
    )


@pytest.fixture
def controller():
    with open_controller(PROCESSES) as controller:
        yield controller


def join(
    controller,
    who,
    *,
    key=KEY,
    about=ABOUT,
    computing=None,
    on_loss=None,
    silence_s=SILENCE_S,
    address=None,
):
    address, port = address or controller.address
    return Member(
        process=who,
        address=address,
        port=port,
        key=key,
        about=about,
        computing=computing or {},
        timeout_s=silence_s,
        start_timeout_s=DEADLINE_S,
        on_loss=on_loss or (lambda error: None),
    )


def connect_once(controller, who):
    """Calls as a member does; the connection."""
    hello = MemberHello(
        process=who.number, about=ABOUT, computing={}, protocol=PROTOCOL, session="another"
    )
    return connections.connect(
        *controller.address,
        key=KEY,
        hello=hello,
        expected=ControllerHello,
        check=lambda hello: None,
        where="here",
        timeout_s=DEADLINE_S,
    )


@pytest.fixture
def members(controller):
    members = [join(controller, who) for who in PROCESSES]
    wait_until(lambda: all(seat.connection for seat in controller._seats))
    yield members
    for member in members:
        member.close()


def next_event(controller, kind):
    event = controller.events.get(timeout=DEADLINE_S)
    assert event.record.kind == kind, event
    return event


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


def test_a_process_whose_predecessor_is_not_missed_yet_calls_again(
    controller, members, monkeypatch
):
    """Kubernetes, say, has replaced it at once; a mistake would end the whole run for good."""
    monkeypatch.setattr(member_link, "TAKEN_S", 0.01)
    with pytest.raises(RefusedError) as taken:
        connect_once(controller, PROCESSES[1])
    changed = RefusedError("", "", found="its plan differs", fix="")
    answers = mock.Mock(side_effect=[taken.value, taken.value, changed])
    monkeypatch.setattr(connections, "connect", answers)
    with pytest.raises(RefusedError, match="its plan differs"):
        join(controller, PROCESSES[1])
    answers.side_effect = itertools.repeat(taken.value)
    monkeypatch.setattr(member_link, "TAKEN_S", 2 * DEADLINE_S)
    with pytest.raises(PeerError, match="is here already"):
        join(controller, PROCESSES[1])


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
        start = JobStart(coordinator=["there", leader], resume=7, unproven=unproven, in_memory=[])
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


def test_the_coordinators_of_a_node_do_not_share_a_port():
    address = own_address()  # neighbouring ports are free
    with connections.listen(address) as taken:
        config = DistributedConfig(port=connections.address_of(taken)[1] - 2)
        with (
            hold_coordinator_port(address, config, 0) as first,
            hold_coordinator_port(address, config, 1) as second,
        ):
            assert connections.address_of(first) != connections.address_of(second)
        with pytest.raises(HolmesError, match="the coordinator of stage 2 cannot listen") as error:
            hold_coordinator_port(address, config, 2)
    assert error.value.where == f"distributed.port, {address}:{config.port + 2}"
    assert "choose another distributed.port" in error.value.fix


@pytest.mark.parametrize("port", [0, 7421])
def test_a_port_that_is_held_is_for_the_coordinator_alone(port):
    """JAX 0.10.2 would end the process with a segmentation fault."""
    address = own_address()
    with hold_coordinator_port(address, DistributedConfig(port=port), 0) as held:
        place = connections.address_of(held)
        with pytest.raises(HolmesError, match="cannot listen here"):
            connections.listen(*place)
        if port:  # a second job of this user, before the coordinator listens
            with pytest.raises(HolmesError, match="cannot listen there"):
                hold_coordinator_port(address, DistributedConfig(port=port), 0)
        with _coordinator(place):
            if port:
                with pytest.raises(HolmesError, match="cannot listen there"):
                    hold_coordinator_port(address, DistributedConfig(port=port), 0)


@contextlib.contextmanager
def _coordinator(place):
    """JAX's own, which listens at an address."""
    service = _jax.get_distributed_runtime_service("{}:{}".format(*place), 1)
    with socket.create_connection(place, timeout=DEADLINE_S):
        yield
    service.shutdown()


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


def test_a_mistake_of_the_job_ends_all_members_with_it(controller):
    ends = [queue.Queue() for _ in PROCESSES]
    members = [
        join(controller, who, on_loss=end.put) for who, end in zip(PROCESSES, ends, strict=True)
    ]
    for member in members:  # who has told something is seated
        member.send_compiled({}, "here", {})
        next_event(controller, "compiled")
    mistake = DataError("c0/n0", "has other data", found="1, not 2", fix="copy it")
    controller.refuse(mistake)
    controller.__exit__()  # its closing the connection comes too late to be the reason
    for member, end in zip(members, ends, strict=True):
        error = end.get(timeout=DEADLINE_S)
        assert (str(error), error.exit_status) == (str(mistake), 2)
        member.close()


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


@pytest.mark.parametrize(
    "change, words",
    [
        ({"about": {**ABOUT, "plan hash": "bbbb"}}, ["plan hash is bbbb, not aaaa"]),
        ({"about": {**ABOUT, "jax": "0.9"}}, ["jax is 0.9, not 1.0"]),
        ({"who": process(9, 1)}, ["3 processes", "number 9"]),
    ],
)
def test_who_does_not_belong_is_refused(controller, members, change, words):
    who = change.pop("who", PROCESSES[0])
    with pytest.raises(RefusedError) as error:
        join(controller, who, **change)
    for word in words:
        assert word in str(error.value)
    if "about" in change:  # whoever started the job is told too
        assert words[0] in str(next_event(controller, "refused").record)


FACTS = {"source": "12", "jax": "0.10.2", "--xla_a": "1", "driver": "570"}


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"source": "34"}, "its source is 34, not 12 as on"),
        ({"--xla_a": "2", "jax": "0.12.0"}, "its jax is 0.12.0, not 0.10.2, its --xla_a is 2"),
        ({"--xla_b": "1"}, "its --xla_b is 1, not unset as on"),
        ({"NVIDIA_TF32_OVERRIDE": "0"}, "its NVIDIA_TF32_OVERRIDE is 0, not unset as on"),
        ({"driver": "580"}, "its driver is 580, not 570 as on"),
    ],
)
def test_a_member_that_computes_otherwise_than_the_first_is_refused(controller, changed, words):
    """Clusters may have drivers of their own; the processes of a stage may not."""
    first = join(controller, PROCESSES[0], computing=FACTS)
    with pytest.raises(RefusedError, match=re.escape(words)):
        join(controller, PROCESSES[1], computing={**FACTS, **changed})
    refused = next_event(controller, "refused").record
    assert words in refused.reason
    assert set(refused.unlike) == set(changed)
    of_other_stage = {**FACTS, "driver": "580"}
    others = [join(controller, PROCESSES[1], computing=FACTS)]
    others.append(join(controller, PROCESSES[2], computing=of_other_stage))
    for member in (first, *others):
        member.close()


def test_unlike_members_are_taken_where_it_is_permitted_by_name():
    with open_controller(PROCESSES, allow=("source", "--xla_b")) as controller:
        unlike = {**FACTS, "source": "34", "--xla_b": "1"}
        for who, facts in zip(PROCESSES[:2], (FACTS, unlike), strict=True):
            join(controller, who, computing=facts).close()
        with pytest.raises(RefusedError, match=r"its jax is 0\.12\.0"):
            join(controller, PROCESSES[2], computing={**unlike, "jax": "0.12.0"})


def test_a_wrong_key_is_told_on_both_ends(controller, monkeypatch):
    stop_callers_clock(monkeypatch)
    with pytest.raises(PeerError, match="nobody who holds the key of this job answers"):
        join(controller, PROCESSES[0], key=b"x" * key_files.KEY_BYTES)
    assert WRONG_KEY in next_event(controller, "warning").record.text


def test_differences_are_told_with_both_values():
    assert differences(ABOUT, {**ABOUT, "more": 1}) is None
    assert differences(ABOUT, {}) == "its plan hash is None, not aaaa, its jax is None, not 1.0"


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


def test_strangers_cost_nothing(controller, members):
    strangers = [socket.create_connection(controller.address) for _ in range(20)]
    for i, stranger in enumerate(strangers):
        stranger.sendall([b"", b"\xff" * 100, b"\x7f\xff\xff\xff{", b"\x00\x00\x00\x02[]"][i % 4])
    members[0].vote(1)
    members[2].vote(1)
    assert not members[1].verdict(1).stop
    for stranger in strangers:
        stranger.close()


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


# ---- a connection is lost ------------------------------------------------------------------------


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
