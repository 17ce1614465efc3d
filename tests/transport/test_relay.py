"""A relay joins processes that cannot call each other, and reads nothing of what it passes on."""

import contextlib
import itertools
import socket
import threading
import time
from dataclasses import dataclass
from unittest import mock

import pytest

from holmesjax.transport import connections, relay, relayed
from holmesjax.transport.admission import Admission
from holmesjax.transport.records import Record
from holmesjax.transport.relay import Relay
from holmesjax.transport.relay_messages import RelayHello, relay_key
from holmesjax.transport.relayed import RelayedPort, RelayPlace
from tests.jobs import own_address

KEY = bytes(range(32))
DEADLINE_S = 120.0  # for what must come: a hang guard
SECRET = b"the weights of a model " * 1000


@dataclass(frozen=True, kw_only=True)
class Hello(Record):
    kind = "test"
    name: str


class Listener:
    """A process that echoes what its callers send, and that is called through a relay alone.

    It began `age_s` ago, and the clock of its host says `clock_s`.
    """

    def __init__(self, stack, place, name="process 7", *, age_s=0.0, clock_s=None):
        self.met, self.told = [], []
        admission = Admission(
            connections.listen("127.0.0.1"),
            key=KEY,
            hello=Hello(name=name),
            expected=Hello,
            check=lambda hello: None,
            enter=self._enter,
        )
        stack.enter_context(admission)
        times = itertools.chain([relayed.now_s() - age_s], iter(relayed.now_s, None))
        with (
            mock.patch.object(relayed, "now_s", side_effect=times),
            mock.patch("time.time", return_value=clock_s or time.time()),
        ):
            self.port = RelayedPort(
                place, name, key=KEY, take=admission.bring, warn=self.told.append
            )
        stack.callback(self.port.close)

    def _enter(self, connection):
        self.met.append(connection.hello.name)
        threading.Thread(target=self._echo, args=(connection,), daemon=True).start()

    def _echo(self, connection):
        with contextlib.suppress(OSError), connection.sock:
            while message := connection.receive():
                connection.send(message)


def until(is_so):
    """Waits for what another thread does."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def to_relay(place, role, name):
    hello = RelayHello(role=role, name=name)
    return connections.connect_relay(*place, relay_key(KEY), hello, DEADLINE_S)


def once(place, name="process 7"):
    """One attempt to reach a process through a relay."""
    return connections._through_relay(*place, name, KEY, time.monotonic() + DEADLINE_S)


def call(place, name="process 7", key=KEY, me="process 3"):
    address, port = place.of(name)
    return connections.connect(
        address,
        port,
        key=key,
        hello=Hello(name=me),
        expected=Hello,
        check=lambda hello: None,
        where="a test",
        timeout_s=DEADLINE_S,
    )


@pytest.fixture
def stack():
    with contextlib.ExitStack() as opened:
        yield opened


def start(stack, port=0):
    said = []
    found = Relay(own_address(), port, key=relay_key(KEY), say=said.append)
    stack.callback(found.close)
    return found, RelayPlace(*found.address), said


def test_two_that_cannot_be_called_meet_and_the_relay_reads_nothing(stack, monkeypatch):
    passed = []
    monkeypatch.setattr(relay, "_pass_on", watched(passed))
    _, place, said = start(stack)
    listener = Listener(stack, place)
    ends = [call(place, me=f"process {n}") for n in range(3)]
    for n, end in enumerate(ends):
        end.send({"n": n, "text": SECRET.decode()})
    for n, end in enumerate(ends):
        assert end.receive() == {"n": n, "text": SECRET.decode()}
        assert end.hello == Hello(name="process 7")
        end.close()
    assert sorted(listener.met) == ["process 0", "process 1", "process 2"]
    assert said == ["process 7 can be called"]
    traffic = b"".join(passed)
    assert len(traffic) > 6 * len(SECRET), "both ways, for three"
    assert SECRET[:23] not in traffic
    assert b"process" not in traffic, "hellos go through TLS, too"


def watched(passed):
    """`relay._pass_on`, which shows what it passes on."""
    plain = relay._pass_on

    class Shown:
        def __init__(self, sock):
            self.sock = sock

        def recv_into(self, buffer):
            count = self.sock.recv_into(buffer)
            passed.append(bytes(buffer[:count]))
            return count

        def __getattr__(self, name):
            return getattr(self.sock, name)

    return lambda source, target: plain(Shown(source), target)


def test_who_is_not_there_and_who_has_no_key(stack, monkeypatch):
    _, place, _ = start(stack)
    with pytest.raises(OSError, match="process 7 has not called this relay"):
        once(place)
    Listener(stack, place)
    call(place).close()

    def warn(text):  # after the first attempt, which would be made again
        if "answers without the key of this job" in text:
            raise InterruptedError(text)

    monkeypatch.setattr(connections, "warn", warn)
    with pytest.raises(InterruptedError, match="the key"):
        call(place, key=bytes(32))
    # Who holds the key of the relay alone gets as far as a process, which lets nobody in with it.
    monkeypatch.setattr(connections, "relay_key", lambda key: key)
    with pytest.raises(InterruptedError, match="the key"):
        call(place, key=relay_key(KEY))


def test_a_process_that_does_not_take_calls_is_told(stack, monkeypatch):
    monkeypatch.setattr(relay, "TAKE_S", 0.2)
    _, place, said = start(stack)
    silent = to_relay(place, "listen", "process 7")
    until(lambda: said)
    with pytest.raises(OSError, match="process 7 does not take calls"):
        once(place)
    silent.close()
    late = to_relay(place, "take", "no ticket")
    late.sock.settimeout(DEADLINE_S)
    assert late.sock.recv(1) == b"", "whose caller has gone"
    late.close()
    assert said[0] == "process 7 can be called"


def test_a_relay_that_starts_again_is_called_again(stack):
    first, place, _ = start(stack)
    listener = Listener(stack, place)
    end = call(place)
    first.close()
    end.sock.settimeout(DEADLINE_S)
    with pytest.raises(OSError, match=r"closed|reset"):
        end.receive()
    end.close()
    with pytest.raises(OSError, match=r"the relay .* is not there") as error:
        once(place)
    assert not isinstance(error.value, ConnectionRefusedError), "nobody has died"
    start(stack, place.port)
    again = call(place)
    again.send({"n": 1})
    assert again.receive() == {"n": 1}
    again.close()
    assert "cannot be called through the relay" in listener.told[0]
    assert listener.told[1].endswith("is there again")


def test_the_youngest_process_of_a_name_is_called(stack):
    """However often an older one that still lives calls again, and whatever their clocks say."""
    _, place, _ = start(stack)
    old = Listener(stack, place)
    call(place).close()
    young = Listener(stack, place, clock_s=1.0)
    until(lambda: old.told)
    assert old.told == ["another process is called as process 7 from now on"]
    late = Listener(stack, place, age_s=2 * relay.COME_S, clock_s=1e10)
    until(lambda: late.told)
    for _ in range(10):
        call(place).close()
    until(lambda: len(young.met) == 10)
    assert (len(old.met), late.met, young.told) == (1, [], [])
    assert relayed.CALL_S < relay.TAKE_S, "a process gives a call up before its caller is told"


def test_strangers_cost_a_relay_little(stack):
    _, place, said = start(stack)
    crowd = [socket.create_connection(place) for _ in range(50)]
    for one in crowd[:25]:
        one.sendall(b"\xff" * 100)
    Listener(stack, place)
    call(place).close()
    for one in crowd:
        one.close()
    assert said == ["process 7 can be called"]
