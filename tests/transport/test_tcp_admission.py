"""Whom TCP lets in, and what the others may say."""

import re
import socket
import threading
import time
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holmesjax.errors import HolmesError, PeerError, RefusedError
from holmesjax.transport import connections, frames, rendezvous
from holmesjax.transport.crossings import Key
from holmesjax.transport.frames import Frame, FrameKind
from holmesjax.transport.ports import Ports
from holmesjax.transport.rendezvous import NeighbourHello
from tests.jobs import own_address
from tests.two_stages import (
    BACK,
    KEY,
    KEYS,
    PLAN,
    SHAPE,
    THERE,
    addresses,
    array,
    make_crossing,
    start,
    start_pair,
    together,
)


@pytest.fixture
def one_call(monkeypatch, pauses):
    """The time of both processes is up when the first call has ended, however long it takes."""
    has_ended, call, wait = threading.Event(), connections.connect, rendezvous.Meeting._wait

    def connect(*args, **options):
        try:
            return call(*args, **options)
        finally:
            has_ended.set()

    def wait_for_call(meeting, deadline_s):
        assert has_ended.wait(60)
        wait(meeting, time.monotonic())

    monkeypatch.setattr(connections, "connect", connect)
    monkeypatch.setattr(rendezvous.Meeting, "_wait", wait_for_call)


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"about": {"plan hash": "aaa"}}, r"plan hash is '\w+' in \S+ and '\w+' in"),
        ({"about": {"plan hash": "aaa", "restart": 3, "jax": "0"}}, "restart is . in .* and . in"),
        ({"streams": 3}, "streams is . in .* and . in"),
        ({"silence_s": 3.0}, r"silence_s is [\d.]+ in .* and [\d.]+ in"),
    ],
)
def test_a_process_of_another_kind_is_refused(changes, expected, one_call):
    first, second = start_pair(PLAN, [THERE], each=(changes, {}), start_timeout_s=60.0)
    assert isinstance(first, RefusedError)
    assert re.search(expected, str(first)), first
    assert "3" in str(first) or "aaa" in str(first)
    assert isinstance(second, PeerError)
    assert "ib/ib-0 did not connect for 60 s" in str(second)
    assert re.search(expected, str(second)), second


def test_a_process_with_another_key_does_not_come_in(one_call):
    changes = ({"key": bytes(32)}, {})
    first, second = start_pair(PLAN, [THERE], each=changes, start_timeout_s=60.0)
    assert "nobody who holds the key of this job answers" in str(first)
    assert "ib/ib-0 did not connect for 60 s" in str(second)
    assert isinstance(first, PeerError)
    assert isinstance(second, PeerError)


@pytest.mark.parametrize(
    "change", [{"dtype": "bfloat16"}, {"shape": (32, 1 << 14)}, {"target_spec": (("data",), ())}]
)
def test_other_crossings_are_refused_with_both_digests(change, one_call):
    other = {"crossings": [replace(THERE, **change)]}
    first, second = start_pair(PLAN, [THERE], each=({}, other), start_timeout_s=60.0)
    assert isinstance(first, RefusedError)
    assert re.search(r"crossings is '(\w{16})' in \S+ and '(?!\1)\w{16}' in", str(first))
    assert isinstance(second, PeerError)


def test_nobody_there_is_told_in_time():
    ports = Ports.open(addresses())
    with connections.listen(own_address()) as sock:
        gone = {name: [connections.address_of(sock)] for name in ports.book}
    with pytest.raises(PeerError, match=f"nobody answers at {own_address()}"):
        start(0, PLAN, [THERE], ports, [ports.book, gone], start_timeout_s=0.3)


def test_an_address_of_the_right_network_is_needed():
    ports = Ports.open({"infiniband": ["127.0.0.1"]})
    with pytest.raises(HolmesError, match="HOLMES_ADDRESSES: has no address of roce-0 on ethernet"):
        start(0, PLAN, [THERE], ports, [ports.book] * 2)


@pytest.mark.parametrize("counts", [(8, 8), (3, 8), (8, 3), (1, 2)])
def test_all_nics_of_both_nodes_carry_as_many_streams_and_small_arrays_both_ways(counts):
    """A NIC is a loopback address: Linux has all of 127.0.0.0/8."""
    nics = [[f"127.0.0.{i + 1}" for i in range(count)] for count in counts]
    ports = [Ports.open(addresses(*names)) for names in nics]
    book = [p.book for p in ports]
    shape = (16,)
    crossings = [make_crossing("F0", shape), make_crossing("B1", shape, back=True)]
    ends = together(
        *(lambda n=n: start(n, PLAN, crossings, ports[n], book, streams=4) for n in range(2))
    )
    heard = [set(), set()]
    for one, seen in zip(ends, heard, strict=True):

        def landed(channel, frame, plain=one.landed, seen=seen):
            seen.add((channel._sock.getsockname()[0], channel._sock.getpeername()[0]))
            plain(channel, frame)

        one.landed = landed
    for source, target, name in ((*ends, "F0"), (*ends[::-1], "B1")):
        keys = [Key(name, 1, m) for m in range(40)]
        target.expect(keys)
        for m, key in enumerate(keys):
            device = jax.devices()[4 * (name == "B1")]
            source.offer(key, jnp.full(shape, m, np.float32, device=device))
            target.fetch(key)
    for n, one in enumerate(ends):
        own, theirs = nics[n], nics[1 - n]
        assert {address for address, _ in heard[n]} == set(own)
        assert {address for _, address in heard[n]} == set(theirs)
        [peer] = one._peers.values()
        used = Counter(channel._sock.getsockname()[0] for channel in peer.channels.values())
        assert max(used.values()) - min(used.values()) <= (len(own) < len(theirs))
        if len(own) == len(theirs):  # a switch that joins NICs of one number joins these
            assert all(a == b for a, b in heard[n])
    together(*(one.close for one in ends))


class Impostor:
    """A process that holds the key and knows the digest, and then says what it likes."""

    def __init__(self):
        self.failures = []
        self._ports = Ports.open(addresses())
        address = self._ports.book["ethernet"][0]
        other = {name: [("127.0.0.1", 1)] for name in self._ports.book}
        opened = threading.Thread(target=self._open, args=([other, self._ports.book],))
        opened.start()
        about = {"plan hash": PLAN.hash(), "restart": 0, "jax": jax.__version__}
        hello = NeighbourHello(
            process=0,
            stream=0,
            about={**about, "silence_s": 10.0},
            streams={"1": 1},
            digests={},
            session="impostor",
        )

        def connect(hello):
            return connections.connect(
                *address,
                key=KEY,
                hello=hello,
                expected=NeighbourHello,
                check=lambda hello: None,
                where="impostor",
                timeout_s=60,
            )

        with pytest.raises(RefusedError) as refused:
            connect(hello)
        [digest] = re.findall(r"crossings is '(\w+)'", str(refused.value))
        self.sock = connect(replace(hello, digests={"1": digest})).sock
        opened.join()
        self._sequence = 0

    def _open(self, book):
        self.transport = start(
            1,
            PLAN,
            [THERE, BACK],
            self._ports,
            book,
            streams=1,
            on_failure=self.failures.append,
        )

    def say(self, frame, payload=b""):
        self.sock.sendall(frames._encode(frame, self._sequence) + payload)
        self._sequence += 1

    def hears(self, kind):
        size = frames.HEADER.size + frames.CRC.size
        while True:
            header = self.sock.recv(size, socket.MSG_WAITALL)
            sequence = int.from_bytes(header[8:16], "big")
            frame, _ = frames._decode(bytearray(header), sequence)
            if frame.kind is kind:
                return frame


@pytest.fixture
def impostor():
    opened = Impostor()
    yield opened
    opened.sock.close()
    opened.transport.close()


def test_the_impostor_is_believed_while_it_behaves(impostor):
    key = Key("F0", 7, 3)
    impostor.transport.expect([key])
    wish = impostor.hears(FrameKind.PULL)
    assert wish == Frame(FrameKind.PULL, 0, 7, 3, 0, 0, 1 << 21)
    said = np.random.default_rng(0).bytes(wish.length)
    impostor.say(wish._replace(kind=FrameKind.DATA), said)
    assert np.asarray(impostor.transport.fetch(key)).tobytes() == said


@pytest.mark.parametrize(
    "said, problem",
    [
        (Frame(FrameKind.PULL, 3, 1, 0, 0, 0, 1 << 21), "a PULL for what is not sent from here"),
        (Frame(FrameKind.DATA, 0, 1, 1, 0, 0, 1 << 20), "data that was not asked for"),
    ],
)
def test_what_was_not_agreed_ends_the_job(impostor, said, problem):
    """`test_pull` has all that a process may not say."""
    impostor.transport.expect([Key("F0", 1, 0)])
    impostor.say(said)
    with pytest.raises(PeerError, match="the other end broke the protocol") as caught:
        impostor.transport.wait([Key("F0", 1, 0)])
    assert problem in str(caught.value)


def test_strangers_at_the_ports_do_not_keep_the_neighbour_out():
    ports = [Ports.open(addresses(own_address())) for _ in range(2)]
    book = [p.book for p in ports]
    crowd = [socket.create_connection(book[1]["ethernet"][0]) for _ in range(200)]
    for stranger in crowd[::2]:
        stranger.sendall(b"\xff" * 100)
    first, second = together(
        *(lambda n=n: start(n, PLAN, [THERE, BACK], ports[n], book) for n in range(2))
    )
    first.offer(KEYS[0], array(2))
    second.expect(KEYS[:1])
    np.testing.assert_array_equal(second.fetch(KEYS[0]), np.full(SHAPE, 2))
    for stranger in crowd:
        stranger.close()
    together(first.close, second.close)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(book[1]["ethernet"][0])


def test_ports_are_of_a_range_and_addresses_as_others_see_them():
    with connections.listen("127.0.0.1") as taken:
        first = connections.address_of(taken)[1]
        last = min(first + 40, 65535)
        seen = {"ethernet": ["203.0.113.5"]}
        ports = Ports.open(addresses(), ports=(first, last), advertised=seen)
        numbers = [port for listening in ports.local.values() for _, port in listening]
        assert all(first < number <= last for number in numbers)
        assert len(set(numbers)) == 3
        [(address, port)] = ports.local["ethernet"]
        assert address == "127.0.0.1"
        assert ports.book == {**ports.local, "ethernet": [("203.0.113.5", port)]}
        ports.close()
        with pytest.raises(HolmesError, match="cannot listen here"):
            Ports.open(addresses(), ports=(first, first))
    with pytest.raises(HolmesError, match="HOLMES_ADVERTISED: must have as many"):
        Ports.open(addresses(), advertised={"ethernet": ["203.0.113.5", "203.0.113.6"]})


def test_two_clusters_that_cannot_be_called_are_told():
    found = start_pair(PLAN, [THERE], calls_out=("ib", "roce"), start_timeout_s=60.0)
    for error in found:
        assert isinstance(error, HolmesError)
        assert "can both not be called" in str(error)


def test_a_taken_port_is_told():
    with pytest.raises(HolmesError, match=r"192\.0\.2\.1:0: cannot listen here"):
        Ports.open({"ethernet": ["127.0.0.1", "192.0.2.1"]})
