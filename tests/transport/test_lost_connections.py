"""Connections are lost while both processes live: what crosses is the same, to the byte."""

import random
import re
import socket
import time
from collections import deque
from dataclasses import replace

import jax
import numpy as np
import pytest

from holmesjax.errors import PeerError
from holmesjax.transport import frames, tls
from holmesjax.transport.crossings import Key
from holmesjax.transport.frames import Channel, Frame, FrameKind
from holmesjax.transport.outbox import Outbox, Position
from holmesjax.transport.relay import Relay
from holmesjax.transport.relay_messages import relay_key
from holmesjax.transport.relayed import RelayPlace
from tests.relays import Breaker
from tests.two_stages import KEY, PLAN, make_crossing, start_pair, together


def test_what_is_sent_again_begins_where_the_other_end_stands():
    """Against one string of all bytes, with connections that are lost at random positions."""
    rng = random.Random(0)
    for _ in range(200):
        outbox, sent, ends = Outbox(), b"", [0]
        here = 0  # bytes that the other end has
        dropped = []
        for number in range(rng.randrange(1, 30)):
            parts = [rng.randbytes(rng.randrange(6)) for _ in range(rng.randrange(4))] + [b"x"]
            outbox.add(number, [memoryview(part) for part in parts])
            sent += b"".join(parts)
            ends.append(len(sent))
            here = rng.choice([here, rng.randrange(here, len(sent) + 1)])
            whole = sum(end <= here for end in ends[1:])
            dropped += outbox.received(rng.randrange(whole + 1))  # or what is known already
            assert dropped == list(range(len(dropped)))
            assert outbox.num_bytes == len(sent) - ends[len(dropped)]
            rest = outbox.rest(Position(messages=whole, num_bytes=here - ends[whole]))
            assert b"".join(bytes(one) for message in rest for one in message) == sent[here:]


@pytest.mark.parametrize(
    "position",
    [
        Position(messages=1),  # that is dropped
        Position(messages=5),
        Position(messages=4, num_bytes=1),
        Position(messages=2, num_bytes=3),
        Position(messages=2, num_bytes=-1),
    ],
    ids=str,
)
def test_nobody_can_go_on_where_nothing_is(position):
    outbox = Outbox()
    for number in range(4):
        outbox.add(number, [memoryview(b"abc")])
    assert outbox.received(2) == [0, 1]
    with pytest.raises(ValueError, match="goes on at"):
        outbox.rest(position)
    with pytest.raises(ValueError, match="5 messages were received, and 4 were sent"):
        outbox.received(5)


@pytest.fixture
def breakers():
    opened = []
    yield opened
    for breaker in opened:
        breaker.close()


def pair_through(breakers, crossings, lasts, flips=False, relay=None, **changes):
    """Two transports; all connections between them go through a breaker."""

    called = 0 if "roce" in changes.get("calls_out", ()) else 1
    if relay is not None:
        breakers.append(Breaker(relay.address, lasts, flips))
        changes |= {"calls_out": ("ib", "roce"), "relay": RelayPlace(*breakers[0].address)}

    def change(book):
        if relay is not None:
            return [
                {key: [("192.0.2.1", 9)] for key in places} for places in book
            ]  # nobody is there
        breakers.append(Breaker(book[called]["ethernet"][0], lasts, flips))
        book[called] = {**book[called], "ethernet": [breakers[0].address]}
        return book

    found = start_pair(PLAN, crossings, book_of=change, **changes)
    for one in found:
        if isinstance(one, Exception):
            raise one
    return found


SHAPES = [(1,), (3, 7), (1 << 8, 1 << 10), (5, 100_003)]  # of some bytes, 1 MiB and 2 MB


@pytest.fixture
def relay():
    with Relay("127.0.0.1", 0, key=relay_key(KEY), say=print) as opened:
        yield opened


@pytest.mark.parametrize(
    "seed, flips, by_relay",
    [(0, False, False), (1, False, False), (2, True, False), (3, True, False), (4, True, True)],
)
def test_arrays_are_whole_and_in_order_over_connections_that_are_lost(
    breakers, relay, seed, flips, by_relay, monkeypatch, capsys
):
    """Both ways at once, with random sizes, over connections that last for random bytes.

    With `flips` they are encrypted, and end where a bit is changed on the way, or where the keys
    have encrypted as much as they may. By a relay the ways to it are lost.
    """
    monkeypatch.setattr(tls, "KEY_LIMIT_BYTES", 5_000_000)
    monkeypatch.setattr(frames, "MAX_KEPT_BYTES", 1 << 21)  # so that senders wait for room, too
    rng, contents = random.Random(seed), np.random.default_rng(seed)
    lasts = lambda: rng.choice([20_000, 700_000, 4_000_000]) + rng.randrange(1 << 16)
    crossings = [
        make_crossing(f"{'B' if back else 'F'}{i}", shape, "uint32", back=back)
        for i, shape in enumerate(SHAPES)
        for back in (False, True)
    ]
    encrypt = "always" if flips else "never"
    only = {"calls_out": ("roce",)} if seed % 2 else {}  # nobody can call the other cluster then
    if by_relay:
        only, encrypt = {"relay": relay}, "auto"  # on one machine, which encrypts nothing else
    ends = pair_through(breakers, crossings, lasts, flips, streams=3, encrypt=encrypt, **only)
    order = [rng.randrange(len(SHAPES)) for _ in range(30)]
    sent = {
        (name, m): contents.integers(0, 1 << 32, SHAPES[i], np.uint32)
        for m, i in enumerate(order)
        for name in (f"F{i}", f"B{i}")
    }

    def run(end, gives, takes, device):
        keys = [Key(f"{takes}{i}", 1, m) for m, i in enumerate(order)]
        end.expect(keys)
        for m, i in enumerate(order):
            name = f"{gives}{i}"
            end.offer(Key(name, 1, m), jax.device_put(sent[name, m], jax.devices()[device]))
        for key in keys:
            got = np.asarray(end.fetch(key))
            np.testing.assert_array_equal(got, sent[key.crossing, key.microbatch])

    try:
        for outcome in together(
            lambda: run(ends[0], "F", "B", 0), lambda: run(ends[1], "B", "F", 4)
        ):
            if outcome is not None:
                raise outcome
        assert breakers[0].num_lost >= 10
        assert ("bytes were changed on the way" in capsys.readouterr().out) == flips
        breakers[0]._lasts = lambda: None
        # What an end hears last may be lost with its connection once the other has closed.
        deadline_s = time.monotonic() + 60
        while any(end._sending for end in ends):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
    finally:
        together(*(end.close for end in ends))


@pytest.fixture
def fragile(breakers):
    """Two transports, and the breaker between them, which loses nothing by itself."""
    opened = []

    def open_pair(**changes):
        crossings = [make_crossing("F0", SHAPES[2]), make_crossing("B1", SHAPES[2], back=True)]
        opened.extend(pair_through(breakers, crossings, lambda: None, **changes))
        return *opened, breakers[0]

    yield open_pair
    together(*(end.close for end in opened))


def cross(source, target, name, m):
    key = Key(name, 1, m)
    target.expect([key])
    device = jax.devices()[4 * (name == "B1")]
    source.offer(key, jax.device_put(np.full(SHAPES[2], m, np.float32), device))
    assert (np.asarray(target.fetch(key)) == m).all()


def channels_of(*ends):
    return [channel for end in ends for channel in end._peer_of]


@pytest.mark.parametrize("who", [0, 1])
def test_a_connection_that_one_end_alone_has_lost_is_made_anew(fragile, who, capsys):
    """The end that calls, or the one that is called, which then asks for a call."""
    *ends, breaker = fragile()
    breaker.silence()  # the other end does not hear of it
    for channel in channels_of(ends[who]):
        channel.drop(TimeoutError(110, "Connection timed out"))
    for m in range(2):
        cross(*ends, "F0", m)
        cross(*ends[::-1], "B1", m)
    told = capsys.readouterr().out
    assert re.search(r"\d of 2 connections were lost \(\[Errno 110\] .*\), and go on after", told)
    [(link, loss)] = ends[1].take_losses().items()
    assert (link, loss.connections) == ("ib -> roce", 2)
    assert loss.lost_s < 60
    assert not ends[1].take_losses()


def test_a_connection_is_made_anew_before_the_silence_is_too_long(fragile, clock):
    """The system would try again ever later: a cut may be over long before it notices."""
    *ends, breaker = fragile(silence_s=10.0)
    breaker.silence()
    clock.now_s += 6.0
    for m in range(2):
        cross(*ends, "F0", m)
        cross(*ends[::-1], "B1", m)
    assert breaker.num_calls >= 4


def test_a_process_that_has_started_again_does_not_take_the_place_of_the_old_one():
    """It listens where the old one did, holds the key and is of the same plan."""
    failures = []
    crossing = make_crossing("F0", SHAPES[2])
    ends = start_pair(PLAN, [crossing], on_failure=failures.append)
    meeting = ends[1]._meeting
    meeting._hello = other = replace(meeting._hello, session="another")
    for admission in meeting._admissions:
        admission._hello = other
    channels_of(ends[0])[0].drop(ConnectionResetError("reset"))
    with pytest.raises(PeerError, match="the connection was lost"):
        cross(*ends, "F0", 0)
    while len(failures) < 2:
        time.sleep(0.01)
    assert any("another process" in str(failure) for failure in failures)
    together(*(end.close for end in ends))


def test_a_goodbye_that_is_lost_is_said_again(fragile):
    *ends, _ = fragile()
    cross(*ends, "F0", 0)
    for channel in channels_of(ends[0]):
        with channel._wakeup:  # what is sent from here on is lost
            channel._sock.shutdown(socket.SHUT_RDWR)
        channel.leave()
    for channel in channels_of(*ends):
        assert channel.is_over.wait(60)
    assert not [end._error for end in ends if end._error]


def test_what_is_kept_is_bounded(monkeypatch):
    """By whole parts: an end that hears nothing of the other sends no more of them."""
    monkeypatch.setattr(frames, "MAX_KEPT_BYTES", 2000)
    near, far = socket.socketpair()
    parts = deque()
    channel = Channel(near, None, 60.0, parts)
    channel.start()
    for offset in range(10):
        parts.append((Frame(FrameKind.DATA, offset=offset, length=1000), [memoryview(bytes(1000))]))
    channel.take_part()
    far.settimeout(60)
    while len(parts) > 8:
        time.sleep(0.005)
    time.sleep(0.1)
    assert len(parts) == 8
    channel.close()
    channel.join(1.0)
    far.close()
