"""Connections let in who holds the key, and nobody else, however they try."""

import itertools
import os
import resource
import stat
import struct
import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from holmesjax.errors import HolmesError, PeerError, RefusedError
from holmesjax.hosts import process_environment
from holmesjax.transport import admission, connections, handshake, key_files, records
from holmesjax.transport.handshake import WRONG_KEY
from holmesjax.transport.records import Record
from tests.jobs import own_address
from tests.transport.calls import (
    DEADLINE_S,
    KEY,
    Inn,
    Named,
    call_at,
    frame,
    read_frame,
    rest_of,
    still_opens,
)


@pytest.fixture
def patience(monkeypatch):
    """Nobody is sent away, or given up, for what a busy machine does."""
    monkeypatch.setattr(connections, "HELLO_TIMEOUT_S", 1000.0)


@pytest.fixture
def impatience(patience, monkeypatch):
    """Whoever says nothing is soon sent away."""
    monkeypatch.setattr(connections, "HELLO_TIMEOUT_S", 0.5)


@pytest.fixture
def inn(patience):
    inn = Inn()
    yield inn
    inn.admission.close()


def test_both_ends_learn_the_others_hello(inn):
    guest = Named(name="guest", number=3)
    ours = inn.call(hello=guest, source="127.0.0.1")
    theirs = inn.entered.get(timeout=DEADLINE_S)
    assert (ours.hello, theirs.hello) == (Named(name="inn"), guest)
    theirs.send({"x": [1.5, "é"]})
    assert ours.receive() == {"x": [1.5, "é"]}
    theirs.close()
    with pytest.raises(ConnectionResetError, match="closed the connection"):
        ours.receive()
    ours.close()


@pytest.mark.parametrize(
    "encrypt, theirs, ours",
    [
        (False, repr(WRONG_KEY), WRONG_KEY),
        (True, "its certificate is not of this job", WRONG_KEY),
    ],
)
def test_a_wrong_key_is_refused_on_both_ends(inn, capsys, pauses, encrypt, theirs, ours):
    """Neither can prove anything to the other: the caller says so at once, and tries again."""
    with pytest.raises(PeerError, match="nobody who holds the key of this job answers") as error:
        inn.call(key=bytes(32), encrypt=encrypt)
    assert theirs in error.value.found
    assert inn.entered.empty()
    [said] = [line for line in capsys.readouterr().err.splitlines() if "without the key" in line]
    assert "trying again" in said
    assert ours in inn.warnings.get(timeout=DEADLINE_S)
    assert inn.warnings.empty()
    still_opens(inn)


def refuse(caller, **more):
    caller.sendall(frame({"kind": "challenge", "nonce": "0" * 32}))
    read_frame(caller)
    caller.sendall(frame({"kind": "rejection", "reason": "go away", **more}))


def let_in(caller):
    caller.sendall(frame({"kind": "challenge", "nonce": "0" * 32}))
    read_frame(caller)
    caller.sendall(frame({"kind": "welcome", "hello": {}, "mac": "0" * 64}))


STRANGERS = {
    "refuses": refuse,
    "refuses with a wrong proof": lambda caller: refuse(caller, mac="0" * 64),
    "lets everybody in": let_in,
    "speaks something else": lambda caller: caller.sendall(b"SSH-2.0-OpenSSH_9.2\r\n"),
    "says nothing": lambda caller: None,
}


@pytest.mark.parametrize("stranger", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_at_the_right_address_is_not_believed(patience, stranger):
    """The caller tries again, and finds the one that holds the key."""
    sock = connections.listen("127.0.0.1")
    inns = []

    def take_over():
        caller, _ = sock.accept()
        caller.settimeout(DEADLINE_S)
        with caller:
            stranger(caller)
        inns.append(Inn(sock=sock))

    thread = threading.Thread(target=take_over)
    thread.start()
    call_at(connections.address_of(sock), encrypt=False).close()
    thread.join()
    inns[0].entered.get(timeout=DEADLINE_S).close()
    inns[0].admission.close()


def test_strangers_only_are_told_when_the_time_is_up(pauses):
    with connections.listen("127.0.0.1") as sock:

        def answer():
            caller, _ = sock.accept()
            with caller:
                refuse(caller)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(PeerError) as error:
            call_at(connections.address_of(sock), encrypt=False)
        thread.join()
    assert error.value.found == "something there answered without it: 'go away', without proof"


def pass_on(caller, onward, num):
    """The first messages of a conversation through a relay."""
    said = []
    for source, target in itertools.islice(
        itertools.cycle([(onward, caller), (caller, onward)]), num
    ):
        said.append(read_frame(source))
        target.sendall(frame(said[-1]))
    return said


def test_a_call_whose_last_answer_was_lost_is_repeated(patience):
    """It has no seat before it has said that it knows."""
    seats = set()
    inn = Inn(lambda hello: "is here already" if hello.name in seats else None)
    enter = inn.admission._enter
    inn.admission._enter = lambda connection: (
        seats.add(connection.hello.name),
        enter(connection),
    )
    with connections.listen("127.0.0.1") as tap:

        def relay():
            caller, _ = tap.accept()
            with caller, inn.stranger() as onward:
                pass_on(caller, onward, 2)
                assert "mac" in read_frame(onward)  # it would be let in
            caller, _ = tap.accept()
            with caller, inn.stranger() as onward:
                pass_on(caller, onward, 4)
                rest_of(caller)

        thread = threading.Thread(target=relay)
        thread.start()
        call_at(connections.address_of(tap), encrypt=False).close()
        thread.join()
    inn.entered.get(timeout=DEADLINE_S).close()
    with pytest.raises(RefusedError, match="is here already"):  # another one with its name
        inn.call()
    inn.admission.close()


def test_a_reason_reaches_the_other_end(patience):
    inn = Inn(check=lambda hello: f"plan {hello.number} there, plan 1 here")
    with pytest.raises(RefusedError, match="plan 2 there, plan 1 here"):
        inn.call(hello=Named(name="guest", number=2))
    with pytest.raises(RefusedError, match="wrong inn"):
        Inn().call(check=lambda hello: f"wrong {hello.name}")
    inn.admission.close()
    assert inn.entered.empty()


@dataclass(frozen=True, kw_only=True)
class NewNamed(Record):
    """The same hello in another version."""

    kind = "named"
    name: str
    age: int = 3


def test_a_hello_of_another_version_is_refused_by_the_name_of_its_field(inn):
    """Its sender holds the key, so both ends hear the reason at once."""
    with pytest.raises(RefusedError, match="a message named with an unknown field 'age'"):
        inn.call(hello=NewNamed(name="guest"))
    assert inn.entered.empty()


def test_a_hello_for_another_kind_of_connection_is_refused(inn):
    with pytest.raises(RefusedError, match="a message of unknown kind 'entered'"):
        inn.call(hello=handshake.Entered())


INTRODUCTION = {"kind": "introduction", "nonce": "n", "hello": {}, "mac": "m"}
DEEP = b'{"kind": "introduction", "nonce": "n", "hello": {"x": %b}, "mac": ""}'


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(bytes(range(256)) * 20, id="noise"),
        pytest.param(struct.pack(">I", 2**32 - 1), id="huge length"),
        pytest.param(struct.pack(">I", connections.HELLO_LIMIT_BYTES + 1), id="long length"),
        pytest.param(frame(b"{" * 1000), id="no JSON"),
        pytest.param(frame(b"[" * 60000), id="deep JSON"),
        pytest.param(frame(DEEP % (b"[" * 990 + b"]" * 990)), id="deep hello"),
        pytest.param(frame([1, 2]), id="no object"),
        pytest.param(frame(INTRODUCTION), id="wrong proof"),
        pytest.param(frame({**INTRODUCTION, "kind": "entered"}), id="another kind"),
        pytest.param(frame({**INTRODUCTION, "more": 1}), id="unknown field"),
        pytest.param(frame({"kind": "introduction", "nonce": "n", "hello": {}}), id="no mac"),
        pytest.param(frame({**INTRODUCTION, "mac": "é"}), id="not ASCII"),
        pytest.param(frame({**INTRODUCTION, "mac": 3}), id="no text"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="HTTP"),
    ],
)
def test_strangers_are_sent_away(inn, said):
    with inn.stranger() as stranger:
        assert "nonce" in read_frame(stranger)
        stranger.sendall(said)
        answer = rest_of(stranger)  # at once: a caller that says nothing could wait much longer
        assert answer == b"" or b"rejection" in answer
    assert inn.entered.empty()
    still_opens(inn)


def test_nesting_of_any_depth_is_survived(inn):
    """Between what JSON reads and what it writes, there are depths that only one of them takes."""
    for depth in range(900, 1000, 7):
        with inn.stranger() as stranger:
            read_frame(stranger)
            nested = b"[" * depth + b"]" * depth
            stranger.sendall(frame(DEEP % nested))
            answer = rest_of(stranger)
            assert answer == b"" or b"rejection" in answer
    still_opens(inn)


def test_a_slow_hello_is_cut_off(inn, impatience):
    with inn.stranger() as stranger:
        assert "nonce" in read_frame(stranger)

        def trickle():
            for byte in frame({**INTRODUCTION, "nonce": "n" * 1000}):
                stranger.sendall(bytes([byte]))
                time.sleep(0.05)

        with pytest.raises((BrokenPipeError, ConnectionResetError)):  # long before its end
            trickle()


def test_who_says_nothing_is_sent_away(inn, impatience):
    with inn.stranger() as stranger:
        assert "nonce" in read_frame(stranger)
        assert rest_of(stranger) == b""
    assert inn.entered.empty()


def introduce(sock, guest):
    """Proves the key to a listener."""
    talk = handshake.call(KEY, guest, Named, lambda hello: None, "")
    next(talk)
    sock.sendall(connections.pack(talk.send(read_frame(sock))))


def test_nobody_is_sent_away_because_the_listener_took_its_time(monkeypatch):
    """A caller that speaks while another is judged is heard, however long that takes."""
    monkeypatch.setattr(connections, "HELLO_TIMEOUT_S", 100.0)
    late_s, has_spoken, is_judging = [0.0], threading.Event(), threading.Event()
    now_s = time.monotonic
    clock = SimpleNamespace(monotonic=lambda: now_s() + late_s[0])
    monkeypatch.setattr(admission, "time", clock)

    def judge(hello):
        if hello.name == "slow":
            is_judging.set()
            assert has_spoken.wait(DEADLINE_S)
            late_s[0] += 1000.0

    inn = Inn(check=judge)
    with inn.stranger() as early, inn.stranger() as slow:
        introduce(slow, Named(name="slow"))
        assert is_judging.wait(DEADLINE_S)
        introduce(early, Named(name="early"))
        has_spoken.set()
        assert read_frame(slow)["kind"] == read_frame(early)["kind"] == "welcome"
    inn.admission.close()


def test_who_has_proved_the_key_may_take_its_time(inn, monkeypatch):
    """A stranger that comes later is sent away earlier."""
    with inn.stranger() as member:
        introduce(member, Named(name="guest"))
        assert read_frame(member)["kind"] == "welcome"
        monkeypatch.setattr(connections, "HELLO_TIMEOUT_S", 0.5)
        with inn.stranger() as stranger:
            read_frame(stranger)
            assert rest_of(stranger) == b""
        member.sendall(connections.pack(records.encode(handshake.Entered())))
        connection = inn.entered.get(timeout=DEADLINE_S)
        assert connection.hello.name == "guest"
        connection.close()


def test_a_replayed_hello_is_refused(inn):
    """A recorded conversation does not open the door a second time: the nonces are fresh."""
    with connections.listen("127.0.0.1") as tap:
        recorded = []

        def relay():
            caller, _ = tap.accept()
            with caller, inn.stranger() as onward:
                recorded.extend(pass_on(caller, onward, 4))
                caller.recv(1)

        thread = threading.Thread(target=relay)
        thread.start()
        call_at(connections.address_of(tap), encrypt=False).close()
        thread.join()
    inn.entered.get(timeout=DEADLINE_S).close()
    with inn.stranger() as stranger:
        read_frame(stranger)
        stranger.sendall(frame(recorded[1]))
        assert read_frame(stranger) == {"kind": "rejection", "reason": WRONG_KEY, "mac": None}
        assert rest_of(stranger) == b""
    assert inn.entered.empty()


def test_a_crowd_of_strangers_does_not_keep_others_out(inn):
    """1,500 connections that say nothing and are long waited for, and members among them."""
    connections.raise_open_files()
    threads = set(threading.enumerate())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    crowd = [inn.stranger() for _ in range(750)]
    still_opens(inn)
    crowd += [inn.stranger() for _ in range(750)]
    still_opens(inn)
    assert set(threading.enumerate()) <= threads
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024  # KiB
    for stranger in crowd:
        stranger.close()


def test_members_that_come_all_at_once_are_all_let_in(monkeypatch, patience):
    """Each takes its time to answer, so that all of them wait at once, and beside strangers."""
    monkeypatch.setattr(admission, "STRANGERS", 20)
    inn = Inn(num_callers=150)
    strangers = [inn.stranger() for _ in range(100)]
    members = [inn.stranger() for _ in range(150)]
    hellos = [Named(name="guest", number=i) for i in range(150)]
    talks = [handshake.call(KEY, hello, Named, lambda hello: None, "") for hello in hellos]
    for talk in talks:
        next(talk)
    for _ in range(2):
        heard = [read_frame(member) for member in members]  # all of them, before one answers
        for member, talk, message in zip(members, talks, heard, strict=True):
            try:
                member.sendall(connections.pack(talk.send(message)))
            except StopIteration:
                member.sendall(connections.pack(records.encode(handshake.Entered())))
    names = [inn.entered.get(timeout=DEADLINE_S) for _ in range(150)]
    assert sorted(connection.hello.number for connection in names) == [*range(150)]
    for sock in (*members, *strangers, *names):
        sock.close()
    inn.admission.close()


def test_pauses_grow_and_differ():
    pauses_s = [[connections.pause_after(attempt) for _ in range(100)] for attempt in range(12)]
    assert max(pauses_s[0]) <= connections.PAUSE_S < min(pauses_s[5]) <= max(pauses_s[11]) <= 2.0
    assert min(pauses_s[-1]) >= 1.0
    assert all(len(set(tried)) > 90 for tried in pauses_s)


def test_connecting_waits_for_the_listener_and_gives_up_in_time(patience):
    with connections.listen(own_address()) as sock:
        address, port = connections.address_of(sock)
    start_s = time.monotonic()
    with pytest.raises(PeerError, match=rf"a to b: nobody answers at {address}:{port} for 0.3 s"):
        call_at((address, port), timeout_s=0.3)
    assert time.monotonic() - start_s > 0.25


def test_a_taken_port_and_a_foreign_address_are_refused():
    with connections.listen("127.0.0.1") as sock:
        port = connections.address_of(sock)[1]
        with pytest.raises(HolmesError, match=rf"127.0.0.1:{port}: cannot listen here"):
            connections.listen("127.0.0.1", port)
    with pytest.raises(HolmesError, match="name an address of this machine"):
        connections.listen("192.0.2.1")
    with pytest.raises(HolmesError, match="port must be 0-65535"):
        connections.listen(
            "127.0.0.1", 65536
        )  # of the second stage, where the first has the last port


def test_a_key_file_is_private(tmp_path):
    path = tmp_path / "key"
    path.write_text("old")
    key = key_files.make_key_file(path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert key_files.read_key_file(path) == key
    path.chmod(0o640)
    with pytest.raises(HolmesError, match=r"mode 0640\n  fix: chmod 600"):
        key_files.read_key_file(path)
    path.chmod(0o600)
    path.write_text("ab")
    with pytest.raises(HolmesError, match="must hold 32 bytes in hex"):
        key_files.read_key_file(path)
    path.write_text("no key")
    with pytest.raises(HolmesError, match="holds no key of a job"):
        key_files.read_key_file(path)


def test_another_key_than_the_launchers_is_told_before_anybody_is_called(tmp_path, monkeypatch):
    """Once the file has had time to be the newest."""
    old = key_files.make_key_file(tmp_path / "key")
    env = {
        "HOLMES_PROCESS": "0",
        "HOLMES_CONTROLLER": "10.0.0.1:7000",
        "HOLMES_ADDRESSES": "{}",
        "HOLMES_KEY_FILE": str(tmp_path / "key"),
        "HOLMES_KEY_DIGEST": key_files.key_digest(bytes(32)),
    }
    monkeypatch.setattr(process_environment, "KEY_S", 0.2)
    with pytest.raises(HolmesError, match="not the key that the launcher has"):
        process_environment.ProcessEnvironment.read(env, lambda: None)
    monkeypatch.setattr(process_environment, "KEY_S", 30.0)
    newest = tmp_path / "newest"
    newest.write_text(bytes(32).hex())
    newest.chmod(0o600)
    change = threading.Timer(0.3, newest.replace, [tmp_path / "key"])
    change.start()
    assert process_environment.ProcessEnvironment.read(env, lambda: None).key == bytes(32) != old
    change.join()
    # A launcher that ends takes its key with it, and the next one writes another.
    (tmp_path / "key").rename(newest)
    change = threading.Timer(0.3, newest.replace, [tmp_path / "key"])
    change.start()
    assert process_environment.ProcessEnvironment.read(env, lambda: None).key == bytes(32)
    change.join()
    (tmp_path / "key").unlink()
    monkeypatch.setattr(process_environment, "KEY_S", 0.2)
    with pytest.raises(PeerError, match="the launcher has ended, or has not begun"):
        process_environment.ProcessEnvironment.read(env, lambda: None)
    with pytest.raises(HolmesError, match="holds no key of a job") as refused:
        process_environment.ProcessEnvironment.read(
            {**env, "HOLMES_KEY_FILE": str(tmp_path / "no folder" / "key")}, lambda: None
        )
    assert refused.value.exit_status == 2
