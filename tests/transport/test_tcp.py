"""TCP beside the contract: memory, and failures that are told well."""

import gc
import socket
import threading
import time
from collections import deque
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holmesjax.errors import PeerError
from holmesjax.parallel import platforms
from holmesjax.transport import tcp
from holmesjax.transport.buffers import BufferPool, runs_of
from holmesjax.transport.crossings import Key
from holmesjax.transport.frames import Channel
from tests.relays import Proxy
from tests.two_stages import (
    BACK,
    KEYS,
    PLAN,
    SHAPE,
    THERE,
    array,
    make_crossing,
    start_pair,
    together,
)


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
    host = np.asarray(platforms.start_copy_to_host(on_device))
    assert host.ctypes.data == on_device.unsafe_buffer_pointer()
    block = BufferPool().take(SHAPE, np.dtype(np.float32))
    assert jax.device_put(block).unsafe_buffer_pointer() == block.ctypes.data


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_the_way_through_pinned_memory(dtype, monkeypatch, pair):
    """Other platforms than the CPU do this; its devices have that kind of memory too."""
    monkeypatch.setattr(platforms, "start_copy_to_host", platforms.copy_to_pinned)
    source, target = pair([make_crossing("F0", (4, 6), dtype)])
    x = jnp.arange(24).reshape(4, 6).astype(dtype)
    assert platforms.copy_to_pinned(x).sharding.memory_kind == "pinned_host"
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
        silence_s=0.6,
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
    passed. Each is a sign of progress, long before the array is there.
    """
    monkeypatch.setattr(tcp, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    ends, signs_s = [], []

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
        silence_s=0.4,
        pull_timeout_s=0.3,
        streams=1,
        each=({}, {"advance": lambda: signs_s.append(clock.now_s)}),
    )
    source, target = ends
    source.offer(KEYS[0], array(5))
    target.expect(KEYS[:1])
    start_s = clock.now_s
    np.testing.assert_array_equal(target.fetch(KEYS[0]), np.full(SHAPE, 5))
    assert clock.now_s - start_s > 1
    assert np.diff([start_s, *signs_s, clock.now_s]).max() < 0.3


def test_a_process_that_lives_but_gives_nothing_is_given_up(pair, clock):
    failures = []
    _, target = pair(
        silence_s=0.3,
        pull_timeout_s=0.8,
        each=({}, {"on_failure": failures.append}),
    )
    start_s = time.monotonic()
    target.expect(KEYS[:2])
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


# ---- the end ------------------------------------------------------------------------------------


def test_closing_waits_as_long_as_a_link_may_be_silent(pair, monkeypatch):
    """For the deliveries and then for the goodbyes, on a clock that stands still."""
    source, _ = pair(silence_s=10.0)
    source.offer(KEYS[0], array(1))  # nobody asks for it
    waits_s = []
    monkeypatch.setattr(tcp, "time", SimpleNamespace(monotonic=lambda: 100.0))
    source._changed.wait_for = lambda is_over, limit_s: waits_s.append(limit_s)
    for channel in source._peer_of:
        channel.is_over.wait = waits_s.append
    source.close()
    assert waits_s == [10.0] * 3  # two streams


def test_after_the_end_nobody_misses_what_is_on_its_way(pair):
    failures = []
    source, target = pair(on_failure=failures.append)
    source.offer(KEYS[0], array(1))  # nobody asks for it
    target.ask(KEYS[1:3])  # nobody offers them
    source.finish()
    target.finish()
    source._changed.wait_for = lambda *args: failures.append("waits for a delivery")
    source.close()
    for channel in target._peer_of:
        assert channel.is_over.wait(60)
    assert not failures


def test_a_channel_needs_no_transport_to_be_closed_twice():
    ends = socket.socketpair()
    channel = Channel(ends[0], None, 1.0, deque())
    channel.start()
    for _ in range(2):
        channel.close()
        channel.join(1.0)
    ends[1].close()
