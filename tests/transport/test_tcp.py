"""TCP beside the contract: memory, failures that are told well, and strangers."""

import contextlib
import gc
import re
import socket
import threading
import time
from collections import Counter, deque
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holmesjax.errors import HolmesError, PeerError, RefusedError
from holmesjax.parallel import compat
from holmesjax.transport import connections, frames, rendezvous, tcp
from holmesjax.transport.buffers import BufferPool, runs_of
from holmesjax.transport.crossings import Key
from holmesjax.transport.frames import Channel, Frame, FrameKind
from holmesjax.transport.rendezvous import NeighbourHello, Ports
from tests.two_stages import KEY, addresses, make_crossing, make_plan, start, start_pair, together

SHAPE = (16, 1 << 15)  # 2 MiB: more than one part
PLAN = make_plan((1, 1), (1, 1))
THERE, BACK = make_crossing("F0", SHAPE), make_crossing("B1", SHAPE, back=True)
KEYS = [Key("F0", 1, m) for m in range(40)]


@pytest.fixture
def pair():
    """Opens pairs; they are closed at the end."""
    opened = []

    def open_pair(crossings=(THERE, BACK), plan=PLAN, **changes):
        found = start_pair(plan, crossings, **changes)
        for one in found:
            if isinstance(one, Exception):
                raise one
        opened.append(found)
        return found

    yield open_pair
    for transports in opened:
        together(*(one.close for one in transports))


def array(value, device=0):
    return jax.device_put(np.full(SHAPE, value, np.float32), jax.devices()[device])


# ---- memory --------------------------------------------------------------------------------------


def test_no_array_is_overwritten_while_it_lives(pair):
    """Memory is used again only when nothing refers to it: not JAX, not NumPy, no computation."""
    source, target = pair()
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 8, lambda _, y: jnp.sin(y), x))
    rng, kept, results = np.random.default_rng(0), [], []
    keys = [Key("F0", 2, m) for m in range(60)]
    target.expect(keys)
    pointers = set()
    for m, key in enumerate(keys):
        source.offer(key, array(m))
        got = target.fetch(key)
        pointers.add(got.unsafe_buffer_pointer())
        choice = rng.integers(4)
        if choice == 0:
            kept.append((m, got))
        elif choice == 1:
            kept.append((m, np.asarray(got)[3:5]))
        elif choice == 2:
            results.append((m, slow(got)))
        if len(kept) > 5:
            del kept[0]
        del got
        for number, held in kept:
            assert (np.asarray(held) == number).all()
    for number, result in results:
        np.testing.assert_array_equal(result, slow(array(number)))
    assert len(pointers) < len(keys), "no memory was used again"


def test_memory_is_aligned_and_used_again_by_size():
    pool = BufferPool()
    first = pool.take((3, 5), np.dtype(np.float32))
    address = first.ctypes.data
    assert address % 64 == 0
    view = first[1:]
    del first
    gc.collect()
    assert pool.take((3, 5), np.dtype(np.float32)).ctypes.data != address
    del view
    gc.collect()
    assert pool.take((4, 5), np.dtype(np.float32)).ctypes.data != address
    assert pool.take((5, 6), np.dtype(np.int16)).ctypes.data == address  # as many bytes


@pytest.mark.parametrize(
    "index", [np.s_[:], np.s_[2:5], np.s_[:, 1:3], np.s_[1:4, :, 2:], np.s_[::2]]
)
def test_runs_are_the_bytes_of_a_range(index):
    whole = np.random.default_rng(0).integers(0, 255, (6, 5, 7)).astype(np.int16)
    view = whole[index]
    expected = view.tobytes()
    for offset, length in ((0, len(expected)), (1, 5), (3, len(expected) - 3), (13, 40)):
        runs = runs_of(view, offset, length)
        assert b"".join(runs) == expected[offset : offset + length]
    assert len(runs_of(whole, 0, whole.nbytes)) == 1
    runs_of(whole[2:4], 0, 2)[0][0] = 77
    assert whole[2].tobytes()[0] == 77  # it is the memory itself


def test_an_array_goes_out_and_comes_in_without_a_copy():
    on_device = array(1.0)
    host = np.asarray(compat.start_copy_to_host(on_device))
    assert host.ctypes.data == on_device.unsafe_buffer_pointer()
    block = BufferPool().take(SHAPE, np.dtype(np.float32))
    assert jax.device_put(block).unsafe_buffer_pointer() == block.ctypes.data


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_the_way_through_pinned_memory(dtype, monkeypatch, pair):
    """Other platforms than the CPU do this; its devices have that kind of memory too."""
    monkeypatch.setattr(compat, "start_copy_to_host", compat.copy_to_pinned)
    source, target = pair([make_crossing("F0", (4, 6), dtype)])
    x = jnp.arange(24).reshape(4, 6).astype(dtype)
    assert compat.copy_to_pinned(x).sharding.memory_kind == "pinned_host"
    source.offer(KEYS[0], x)
    target.expect(KEYS[:1])
    np.testing.assert_array_equal(target.fetch(KEYS[0]), np.asarray(x))


def test_an_array_of_another_layout_is_our_bug(pair):
    source, _ = pair()
    with pytest.raises(AssertionError, match="F0 of microbatch 0"):
        source.offer(KEYS[0], array(1)[:8])
    with pytest.raises(AssertionError, match="F0 of microbatch 0"):
        source.offer(KEYS[0], array(1).astype(jnp.bfloat16))
    with pytest.raises(AssertionError, match="F0 of microbatch 0"):
        source.offer(KEYS[0], array(1, device=1))


def test_what_is_delivered_is_dropped_and_closing_waits_for_the_rest(pair):
    source, target = pair()
    for m in range(3):
        source.offer(KEYS[m], array(m))
    target.expect(KEYS[:3])
    closing = threading.Thread(target=source.close)
    closing.start()
    time.sleep(0.2)
    assert closing.is_alive()  # only PREFETCH of three were asked for
    for m in range(3):
        np.testing.assert_array_equal(target.fetch(KEYS[m]), np.full(SHAPE, m))
    closing.join(60)
    assert not closing.is_alive()
    assert not source._sending


# ---- what goes wrong on the way ------------------------------------------------------------------


class Proxy:
    """Passes bytes on between two ends, until it is told to stop.

    `passed` is told how many bytes have gone to the address, before more go there.
    """

    def __init__(self, address, passed=lambda num_bytes: None):
        self._listener = connections.listen("127.0.0.1")
        self._address, self._passed = address, passed
        self.silent = threading.Event()
        self._socks = [self._listener]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def address(self):
        return connections.address_of(self._listener)

    def _run(self):
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._address)
            self._socks += [near, far]
            for way in ((near, far, self._passed), (far, near, lambda num_bytes: None)):
                threading.Thread(target=self._pass, args=way, daemon=True).start()

    def _pass(self, source, target, passed):
        try:
            while data := source.recv(1 << 17):
                while self.silent.is_set():
                    time.sleep(0.01)
                target.sendall(data)
                passed(len(data))
        except OSError:
            pass

    def close(self):
        self.silent.clear()
        for sock in self._socks:
            end(sock)


def end(sock):
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def through(proxies, **options):
    """Puts a proxy before the process that is called."""

    def change(book):
        [(fabric, [address])] = [("ethernet", book[1]["ethernet"])]
        proxies.append(Proxy(address, **options))
        return [book[0], {**book[1], fabric: [proxies[0].address]}]

    return change


@pytest.fixture
def proxies():
    opened = []
    yield opened
    for proxy in opened:
        proxy.close()


def test_a_link_that_goes_silent_is_lost(pair, proxies, clock):
    """On a clock of the test, which stands still until the link is silent."""
    failures = []
    source, target = pair(
        book_of=through(proxies),
        heartbeat_timeout_s=0.6,
        each=({}, {"on_failure": failures.append}),
    )
    source.offer(KEYS[0], array(5))
    target.expect(KEYS[:2])
    target.fetch(KEYS[0])
    proxies[0].silent.set()

    def pass_time():  # until all that was on its way has been heard
        while not failures:
            clock.now_s += 0.7
            time.sleep(0.02)

    passing = threading.Thread(target=pass_time)
    passing.start()
    with pytest.raises(PeerError, match=r"silent for 0\.6 s, while waiting for F0 of microbatch 1"):
        target.fetch(KEYS[1])
    passing.join()
    time.sleep(0.1)
    assert [error.where for error in failures] == ["link ib -> roce, from ib/ib-0 to roce/roce-0"]
    with pytest.raises(PeerError, match="silent"):
        target.offer(Key("B1", 1, 0), array(1, device=4))


def test_a_slow_link_is_not_lost(pair, proxies, clock, monkeypatch):
    """2 MiB at 1 MiB/s: several times as long as a link may be silent, or a pull may take.

    On a clock that bytes move: once both ends have heard some, the time that these have taken has
    passed.
    """
    monkeypatch.setattr(tcp, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    ends = []

    def passed(num_bytes):
        channels = [channel for end in ends for channel in end._peer_of]
        while not all(
            channel._silence.heard_s == clock.now_s or channel.is_over.is_set()
            for channel in channels
        ):
            time.sleep(0.005)
        clock.now_s += num_bytes / 2**20

    ends += pair(
        book_of=through(proxies, passed=passed),
        heartbeat_timeout_s=0.4,
        pull_timeout_s=0.3,
        streams=1,
    )
    source, target = ends
    source.offer(KEYS[0], array(5))
    target.expect(KEYS[:1])
    start_s = clock.now_s
    np.testing.assert_array_equal(target.fetch(KEYS[0]), np.full(SHAPE, 5))
    assert clock.now_s - start_s > 1


def test_a_process_that_lives_but_gives_nothing_is_given_up(pair, clock):
    failures = []
    _, target = pair(
        heartbeat_timeout_s=0.3,
        pull_timeout_s=0.8,
        each=({}, {"on_failure": failures.append}),
    )
    target.expect(KEYS[:2])
    start_s = time.monotonic()
    with pytest.raises(PeerError, match=r"F0 of microbatch 1 did not come for 0\.8 s") as caught:
        target.wait([KEYS[1]])
    assert time.monotonic() - start_s > 0.7
    assert "its heartbeat, but no data" in str(caught.value)
    assert failures == [caught.value]


def test_a_process_that_leaves_early_is_told_of(pair):
    source, target = pair()
    target.expect(KEYS[:1])
    source.close()
    with pytest.raises(PeerError, match="left the job, while waiting for F0 of microbatch 0"):
        target.fetch(KEYS[0])


def test_a_failed_computation_ends_the_job(pair, monkeypatch):
    failures = []
    source, _ = pair(each=({"on_failure": failures.append}, {}))

    def fail(x):
        raise FloatingPointError("no good")

    some = array(1)
    monkeypatch.setattr(np, "asarray", fail)
    source.offer(KEYS[0], some)
    while not failures:
        time.sleep(0.01)
    monkeypatch.undo()
    with pytest.raises(FloatingPointError, match="no good"):
        source.offer(KEYS[1], some)


# ---- who is let in, and what they may say --------------------------------------------------------


@pytest.fixture
def one_call(monkeypatch, pauses):
    """The time of both processes is up when the first call has ended, however long it takes."""
    has_ended, call, wait = threading.Event(), connections.connect, rendezvous._Meeting._wait

    def connect(*args, **options):
        try:
            return call(*args, **options)
        finally:
            has_ended.set()

    def wait_for_call(meeting, deadline_s):
        assert has_ended.wait(60)
        wait(meeting, time.monotonic())

    monkeypatch.setattr(connections, "connect", connect)
    monkeypatch.setattr(rendezvous._Meeting, "_wait", wait_for_call)


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"about": {"plan hash": "aaa"}}, r"plan hash is '\w+' in \S+ and '\w+' in"),
        ({"about": {"plan hash": "aaa", "restart": 3, "jax": "0"}}, "restart is . in .* and . in"),
        ({"streams": 3}, "streams is . in .* and . in"),
        ({"heartbeat_timeout_s": 3.0}, r"heartbeat_timeout_s is [\d.]+ in .* and [\d.]+ in"),
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
    with connections.listen("127.0.0.1") as sock:
        gone = {name: [connections.address_of(sock)] for name in ports.book}
    with pytest.raises(PeerError, match=r"nobody answers at 127\.0\.0\.1"):
        start(0, PLAN, [THERE], ports, [ports.book, gone], start_timeout_s=0.3)


def test_an_address_of_the_right_network_is_needed():
    ports = Ports.open({"infiniband": ["127.0.0.1"]})
    with pytest.raises(HolmesError, match="HOLMES_ADDRESSES: has no address of roce-0 on ethernet"):
        start(0, PLAN, [THERE], ports, [ports.book] * 2)


@pytest.mark.parametrize("counts", [(8, 8), (3, 8), (8, 3), (1, 2)])
def test_all_nics_of_both_nodes_carry_as_many_streams_and_small_arrays_both_ways(counts):
    """A NIC is a loopback address: Linux has all of 127.0.0.0/8."""
    nics = [[f"127.0.0.{i + 1}" for i in range(count)] for count in counts]
    ports = [Ports.open(addresses(*found)) for found in nics]
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
            about={**about, "heartbeat_timeout_s": 10.0},
            streams={"1": 1},
            digests={},
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
            frame = frames._decode(bytearray(header), sequence)
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
        (Frame(FrameKind.PULL, 3, 1, 0, 0, 0, 1 << 21), "a wish for what is not sent from here"),
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
    ports = [Ports.open(addresses()) for _ in range(2)]
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
    with pytest.raises(OSError, match="refused"):  # the ports are closed by now
        socket.create_connection(book[1]["ethernet"][0])
    for stranger in crowd:
        stranger.close()
    together(first.close, second.close)


def test_a_taken_port_is_told():
    with pytest.raises(HolmesError, match=r"192\.0\.2\.1:0: cannot listen here"):
        Ports.open({"ethernet": ["127.0.0.1", "192.0.2.1"]})


def test_closing_waits_as_long_as_a_link_may_be_silent(pair, monkeypatch):
    """For the deliveries and then for the goodbyes, on a clock that stands still."""
    source, _ = pair(heartbeat_timeout_s=10.0)
    source.offer(KEYS[0], array(1))  # nobody asks for it
    waits_s = []
    monkeypatch.setattr(tcp, "time", SimpleNamespace(monotonic=lambda: 100.0))
    source._changed.wait_for = lambda is_over, limit_s: waits_s.append(limit_s)
    for channel in source._peer_of:
        channel.is_over.wait = waits_s.append
    source.close()
    assert waits_s == [10.0] * 3  # two streams


def test_a_channel_needs_no_transport_to_be_closed_twice():
    ends = socket.socketpair()
    channel = Channel(ends[0], None, 1.0, deque())
    channel.start()
    for _ in range(2):
        channel.close()
        channel.join(1.0)
    ends[1].close()
