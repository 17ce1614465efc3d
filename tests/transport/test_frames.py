"""Channels carry frames in order, show that they live, and end at the first thing that is wrong."""

import socket
import threading
import time
from collections import deque

import pytest

from holmesjax.transport import frames
from holmesjax.transport.frames import Channel, Frame, FrameKind, ViolationError

PULL = Frame(FrameKind.PULL, 2**20, 2**40, 7, 5, 2**35, 2**33)
DEADLINE_S = 60.0  # for what must come: a hang guard


def wait_until(condition):
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it does not come"
        time.sleep(0.005)


class Notes:
    """A handler that writes down what it is told."""

    def __init__(self):
        self.pulls, self.landings, self.outs, self.errors = [], [], [], []
        self.memory = {}
        self.gone = threading.Event()
        self.told = threading.Condition()

    def _note(self, where, what):
        with self.told:
            where.append(what)
            self.told.notify_all()

    def pulled(self, channel, frame):
        self._note(self.pulls, frame)

    def landing(self, channel, frame):
        if frame not in self.memory:
            raise ViolationError("data that was not asked for")
        return self.memory[frame]

    def landed(self, channel, frame):
        self._note(self.landings, frame)

    def delivered(self, channel, frame):
        self._note(self.outs, frame)

    def left(self, channel):
        self.gone.set()

    def broken(self, channel, error):
        self._note(self.errors, error)

    def wait(self, list_, count=1):
        with self.told:
            assert self.told.wait_for(lambda: len(list_) >= count, DEADLINE_S), list_
        return list_[count - 1]


@pytest.fixture
def opened():
    """Makes channels over socket pairs; everything is closed at the end."""
    things = []

    def make(silence_s=DEADLINE_S, ends=2, parts=None):
        socks = socket.socketpair()
        notes = [Notes() for _ in range(ends)]
        channels = [
            Channel(sock, note, silence_s, deque() if parts is None else parts)
            for sock, note in zip(socks, notes, strict=False)
        ]
        for channel in channels:
            channel.start()
        things.extend(channels)
        things.extend(socks[ends:])
        return channels, notes, socks

    yield make
    for thing in things:
        thing.close()
        if isinstance(thing, Channel):
            thing.join(DEADLINE_S)


def give(channel, frame, payload):
    channel._parts.append((frame, payload))
    channel.take_part()


def test_payload_goes_from_memory_to_memory(opened):
    (a, _), (told_a, told_b), _ = opened()
    source, target = bytearray(range(250)) * 40000, bytearray(250 * 40000)
    frame = Frame(FrameKind.DATA, length=len(source))
    rows = 3000  # more than one system call takes
    told_b.memory[frame] = [memoryview(target)[i : i + 7000] for i in range(0, len(target), 7000)]
    step = len(source) // rows
    rows = [memoryview(source)[i : i + step] for i in range(0, len(source), step)]
    give(a, frame, rows)
    a.send(PULL)
    assert told_b.wait(told_b.pulls) == PULL
    told_b.wait(told_b.landings)
    assert told_a.wait(told_a.outs) == frame
    assert target == source


def test_parts_are_spread_over_the_free_channels(opened):
    parts = deque()
    channels = [opened(ends=1, parts=parts)[0][0] for _ in range(4)]
    large = memoryview(bytes(1 << 24))  # more than a socket takes: nobody reads, so each is busy
    time.sleep(0.1)  # all idle
    for offset in range(4):
        parts.append((Frame(FrameKind.DATA, offset=offset, length=len(large)), [large]))
        any(channel.take_part() for channel in channels)
    wait_until(lambda: not parts)
    assert not any(channel.take_part() for channel in channels)


def test_wishes_do_not_queue_behind_data(opened):
    (a,), (told,), (_, sock) = opened(ends=1)
    large = memoryview(bytes(1 << 24))
    for offset in (0, 1):
        give(a, Frame(FrameKind.DATA, offset=offset, length=len(large)), [large])
    a.send(PULL)
    size = frames.HEADER.size + frames.CRC.size
    seen = []
    while len(seen) < 3:
        header = bytearray(sock.recv(size, socket.MSG_WAITALL))
        seen.append(frames._decode(header, len(seen))[0])
        if seen[-1].kind is FrameKind.DATA:
            sock.recv(seen[-1].length, socket.MSG_WAITALL)
    assert [frame.kind for frame in seen] in (
        [FrameKind.DATA, FrameKind.PULL, FrameKind.DATA],
        [FrameKind.PULL, FrameKind.DATA, FrameKind.DATA],
    )
    assert not told.errors


def wait_until_heard(clock, *channels):
    """Waits until these channels have heard something since the clock was moved."""
    wait_until(lambda: all(channel._silence.heard_s == clock.now_s for channel in channels))


def test_a_quiet_channel_beats_and_a_goodbye_is_no_failure(opened, clock):
    (a, b), notes, _ = opened(silence_s=0.2)
    for _ in range(3):
        clock.now_s += 0.15
        wait_until_heard(clock, a, b)
    assert not notes[0].errors + notes[1].errors
    a.leave()
    assert notes[1].gone.wait(DEADLINE_S)
    assert a.is_over.wait(DEADLINE_S)
    assert b.is_over.wait(DEADLINE_S)
    clock.now_s += 1.0  # neither says any more
    time.sleep(0.1)
    a.close()
    time.sleep(0.05)
    assert not notes[0].errors + notes[1].errors


@pytest.mark.parametrize("num_bytes", [0, 6])
def test_silence_is_noticed_when_its_time_is_up(opened, clock, num_bytes):
    """In the middle of a frame, too. Nothing happens just before the time is up, whoever looks."""
    (channel,), (told,), (_, sock) = opened(silence_s=0.4, ends=1)
    for byte in GOOD[:num_bytes]:
        clock.now_s += 0.399
        sock.sendall(bytes([byte]))
        wait_until_heard(clock, channel)
    clock.now_s += 0.399
    time.sleep(0.2)  # the channel looks every 50 ms
    assert not told.errors
    clock.now_s += 0.002
    assert isinstance(told.wait(told.errors), TimeoutError)


def test_bytes_that_trickle_in_are_no_silence(opened, clock):
    (channel,), (told,), (_, sock) = opened(silence_s=0.3, ends=1)
    for byte in frames._encode(PULL, 0)[:20]:
        clock.now_s += 0.05
        sock.sendall(bytes([byte]))
        wait_until_heard(clock, channel)
    assert not told.errors
    sock.sendall(frames._encode(PULL, 0)[20:])
    assert told.wait(told.pulls) == PULL


def flipped(data, position):
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


GOOD = frames._encode(PULL, 0)


@pytest.mark.parametrize(
    "sent, problem",
    [
        pytest.param(b"GET / HTTP/1.1\r\n" * 8, "begins with b'GET '", id="magic"),
        *[
            pytest.param(flipped(GOOD, i), "a header with CRC", id=f"byte {i}")
            for i in range(4, len(GOOD))
        ],
        pytest.param(frames._encode(PULL, 1), "frame number 1, not 0", id="skipped"),
        pytest.param(GOOD + GOOD, "frame number 0, not 1", id="repeated"),
        pytest.param(frames._encode(PULL._replace(kind=9), 0), "kind 9", id="kind"),
        pytest.param(
            frames._encode(PULL._replace(kind=FrameKind.DATA), 0),
            "not asked for",
            id="unasked data",
        ),
    ],
)
def test_what_is_wrong_ends_the_connection(opened, sent, problem):
    _, (told,), (_, sock) = opened(ends=1)
    sock.sendall(sent)
    error = told.wait(told.errors)
    assert isinstance(error, ViolationError)
    assert problem in str(error)


@pytest.mark.parametrize("sent", [b"", GOOD[:10], frames._encode(Frame(FrameKind.PING), 0)])
def test_a_closed_connection_is_noticed_at_once(opened, sent):
    _, (told,), (_, sock) = opened(ends=1)
    sock.sendall(sent)
    sock.close()
    assert isinstance(told.wait(told.errors), ConnectionResetError)
