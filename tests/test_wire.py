"""Connections let in who holds the key, and nobody else, however they try."""

import json
import os
import queue
import resource
import socket
import stat
import struct
import threading
import time

import pytest

from holmesjax import wire
from holmesjax.errors import HolmesError, PeerError, RefusedError

KEY = bytes(range(32))


@pytest.fixture
def patience(monkeypatch):
    monkeypatch.setattr(wire, "HELLO_TIMEOUT_S", 0.5)


class Inn:
    """A door and who came in."""

    def __init__(self, check=lambda hello: None, key=KEY):
        self.entered = queue.Queue()
        sock = wire.listen("127.0.0.1")
        self.address = wire.address_of(sock)
        self.door = wire.Door(
            sock, key=key, hello={"name": "inn"}, check=check, enter=self.entered.put
        )

    def call(self, key=KEY, check=lambda hello: None, hello=None, timeout_s=5.0, source=None):
        return wire.connect(
            *self.address,
            key=key,
            hello=hello or {"name": "guest"},
            check=check,
            where="a to b",
            timeout_s=timeout_s,
            source=source,
        )

    def stranger(self):
        sock = socket.create_connection(self.address)
        sock.settimeout(5)
        return sock


@pytest.fixture
def inn(patience):
    inn = Inn()
    yield inn
    inn.door.close()


def frame(message):
    text = message if isinstance(message, bytes) else json.dumps(message).encode()
    return struct.pack(">I", len(text)) + text


def read_frame(sock):
    (length,) = struct.unpack(">I", sock.recv(4, socket.MSG_WAITALL))
    return json.loads(sock.recv(length, socket.MSG_WAITALL))


def rest_of(sock):
    """What comes before the other end closes; a reset is an end too."""
    found = b""
    try:
        while part := sock.recv(65536):
            found += part
    except ConnectionResetError:
        pass
    return found


def still_opens(inn):
    ours = inn.call()
    theirs = inn.entered.get(timeout=5)
    ours.send({"text": "hello"})
    assert theirs.receive() == {"text": "hello"}
    ours.close()
    theirs.close()


def test_both_ends_learn_the_others_hello(inn):
    ours = inn.call(hello={"name": "guest", "number": 3}, source="127.0.0.1")
    theirs = inn.entered.get(timeout=5)
    assert (ours.hello, theirs.hello) == ({"name": "inn"}, {"name": "guest", "number": 3})
    theirs.send({"x": [1.5, "é"]})
    assert ours.receive() == {"x": [1.5, "é"]}
    theirs.close()
    with pytest.raises(ConnectionResetError, match="closed the connection"):
        ours.receive()
    ours.close()


def test_a_wrong_key_is_refused_on_both_ends(inn):
    with pytest.raises(RefusedError, match="does not hold the key of this job"):
        inn.call(key=bytes(32))
    assert inn.entered.empty()
    still_opens(inn)


def test_a_listener_without_the_key_is_refused(patience):
    """It lets everybody in, but cannot prove itself."""
    with wire.listen("127.0.0.1") as sock:

        def impostor():
            caller, _ = sock.accept()
            with caller:
                caller.sendall(frame({"nonce": "0" * 32}))
                read_frame(caller)
                caller.sendall(frame({"hello": {}, "mac": "0" * 64}))
                caller.recv(1)

        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(RefusedError, match="does not hold the key"):
            wire.connect(
                *wire.address_of(sock),
                key=KEY,
                hello={},
                check=lambda hello: None,
                where="a to b",
                timeout_s=5,
            )
        thread.join()


def test_a_reason_reaches_the_other_end(patience):
    inn = Inn(check=lambda hello: f"plan {hello['plan']} there, plan p1 here")
    with pytest.raises(RefusedError, match="plan p2 there, plan p1 here"):
        inn.call(hello={"plan": "p2"})
    with pytest.raises(RefusedError, match="wrong inn"):
        Inn().call(check=lambda hello: f"wrong {hello['name']}")
    inn.door.close()
    assert inn.entered.empty()


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(bytes(range(256)) * 20, id="noise"),
        pytest.param(struct.pack(">I", 2**32 - 1), id="huge length"),
        pytest.param(struct.pack(">I", wire.HELLO_LIMIT_BYTES + 1), id="long length"),
        pytest.param(frame(b"{" * 1000), id="no JSON"),
        pytest.param(frame(b"[" * 60000), id="deep JSON"),
        pytest.param(frame(b'{"nonce": ' + b"[" * 990 + b"]" * 990 + b"}"), id="deep nonce"),
        pytest.param(frame([1, 2]), id="no object"),
        pytest.param(frame({"nonce": "n"}), id="no mac"),
        pytest.param(frame({"nonce": "n", "hello": {}, "mac": "é"}), id="not ASCII"),
        pytest.param(frame({"nonce": "n", "hello": {}, "mac": 3}), id="no text"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="HTTP"),
    ],
)
def test_strangers_are_sent_away(inn, said):
    with inn.stranger() as stranger:
        assert "nonce" in read_frame(stranger)
        start_s = time.monotonic()
        stranger.sendall(said)
        answer = rest_of(stranger)
        assert not said or time.monotonic() - start_s < wire.HELLO_TIMEOUT_S  # at once
        assert answer == b"" or b"refused" in answer
    assert inn.entered.empty()
    still_opens(inn)


def test_nesting_of_any_depth_is_survived(inn):
    """Between what JSON reads and what it writes, there are depths that only one of them takes."""
    for depth in range(900, 1000, 7):
        with inn.stranger() as stranger:
            read_frame(stranger)
            nested = b"[" * depth + b"]" * depth
            stranger.sendall(frame(b'{"nonce": ' + nested + b', "hello": {}, "mac": ""}'))
            answer = rest_of(stranger)
            assert answer == b"" or b"refused" in answer
    still_opens(inn)


def test_a_slow_hello_is_cut_off(inn):
    start_s = time.monotonic()
    with inn.stranger() as stranger:
        read_frame(stranger)
        try:
            for byte in frame({"nonce": "n" * 1000}):
                stranger.sendall(bytes([byte]))
                time.sleep(0.05)
        except (BrokenPipeError, ConnectionResetError):
            pass
    assert time.monotonic() - start_s < 3 * wire.HELLO_TIMEOUT_S


def test_a_replayed_hello_is_refused(inn):
    """A recorded conversation does not open the door a second time: the nonces are fresh."""
    with wire.listen("127.0.0.1") as tap:
        recorded = []

        def relay():
            caller, _ = tap.accept()
            with caller, inn.stranger() as onward:
                onward.settimeout(5)
                caller.sendall(frame(read_frame(onward)))
                recorded.append(read_frame(caller))
                onward.sendall(frame(recorded[0]))
                caller.sendall(frame(read_frame(onward)))
                caller.recv(1)

        thread = threading.Thread(target=relay)
        thread.start()
        wire.connect(
            *wire.address_of(tap),
            key=KEY,
            hello={},
            check=lambda hello: None,
            where="a to b",
            timeout_s=5,
        ).close()
        thread.join()
    inn.entered.get(timeout=5).close()
    with inn.stranger() as stranger:
        read_frame(stranger)
        stranger.sendall(frame(recorded[0]))
        assert read_frame(stranger) == {"refused": "it does not hold the key of this job"}
        assert rest_of(stranger) == b""
    assert inn.entered.empty()


def test_a_crowd_of_strangers_does_not_keep_others_out(monkeypatch):
    """With the real patience: 500 connections that say nothing, and a member among them."""
    inn = Inn()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    crowd = [inn.stranger() for _ in range(250)]
    start_s = time.monotonic()
    still_opens(inn)
    crowd += [inn.stranger() for _ in range(250)]
    still_opens(inn)
    assert time.monotonic() - start_s < wire.HELLO_TIMEOUT_S
    greeting = sum(thread.name == "greet" for thread in threading.enumerate())
    assert greeting <= wire.MAX_PENDING + 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024  # KiB
    for stranger in crowd:
        stranger.close()
    inn.door.close()


def test_connecting_waits_for_the_listener_and_gives_up_in_time(patience):
    with wire.listen("127.0.0.1") as sock:
        address, port = wire.address_of(sock)
    start_s = time.monotonic()
    with pytest.raises(PeerError, match=rf"a to b: nobody answers at 127.0.0.1:{port} for 0.3 s"):
        wire.connect(
            address,
            port,
            key=KEY,
            hello={},
            check=lambda hello: None,
            where="a to b",
            timeout_s=0.3,
        )
    assert 0.25 < time.monotonic() - start_s < 10  # above: a hang guard


def test_a_taken_port_and_a_foreign_address_are_refused():
    with wire.listen("127.0.0.1") as sock:
        port = wire.address_of(sock)[1]
        with pytest.raises(HolmesError, match=rf"127.0.0.1:{port}: cannot listen here"):
            wire.listen("127.0.0.1", port)
    with pytest.raises(HolmesError, match="name an address of this machine"):
        wire.listen("192.0.2.1")
    with pytest.raises(HolmesError, match="port must be 0-65535"):
        wire.listen("127.0.0.1", 65536)  # of the second stage, where the first has the last port


def test_a_key_file_is_private(tmp_path):
    path = tmp_path / "key"
    path.write_text("old")
    key = wire.make_key_file(path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert wire.read_key_file(path) == key
    path.chmod(0o640)
    with pytest.raises(HolmesError, match=r"mode 0640\n  fix: chmod 600"):
        wire.read_key_file(path)
    path.chmod(0o600)
    path.write_text("ab")
    with pytest.raises(HolmesError, match="must hold 32 bytes in hex"):
        wire.read_key_file(path)
    path.write_text("no key")
    with pytest.raises(HolmesError, match="holds no key of a job"):
        wire.read_key_file(path)
