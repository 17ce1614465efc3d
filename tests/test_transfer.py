"""JAX's transfer beside the contract: where it would abort, hang or lie, and we do not let it."""

import gc
import re
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from holmesjax import wire
from holmesjax.crossings import Key
from holmesjax.errors import PeerError, RefusedError
from holmesjax.frames import Frame, Kind, ViolationError
from holmesjax.remote import PREFETCH
from tests.two_stages import make_crossing, make_plan, start_pair, together

SHAPE = (16, 1 << 10)
PLAN = make_plan((1, 1), (1, 1))
THERE = make_crossing("F0", SHAPE)
KEYS = [Key("F0", 1, m) for m in range(8)]


@pytest.fixture
def pair():
    """Opens pairs; they are closed at the end."""
    opened = []

    def open_pair(**changes):
        opened.append(start_pair(PLAN, [THERE], kind="transfer", **changes))
        return opened[-1]

    yield open_pair
    for transports in opened:
        together(*(one.close for one in transports))


def array(value):
    return jnp.full(SHAPE, value, np.float32, device=jax.devices()[0])


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"streams": 3}, r"sockets is (2|3) in .* and (?!\1)[23] in"),
        ({"kind": "tcp"}, r"transport is '(tcp|transfer)' in .* and '(?!\1)\w+' in"),
        (
            {"crossings": [make_crossing("F0", SHAPE, "bfloat16")]},
            r"crossings is '(\w+)' in .* and '(?!\1)\w+' in",
        ),
    ],
)
def test_what_would_abort_jax_or_give_wrong_data_is_refused_before(changes, expected, monkeypatch):
    monkeypatch.setattr(transfer.TransferServer, "connect", None)  # it is not even tried
    first, second = start_pair(
        PLAN, [THERE], each=(changes, {}), kind="transfer", start_timeout_s=1.0
    )
    assert isinstance(first, RefusedError)
    assert isinstance(second, PeerError)
    assert re.search(expected, str(first))
    assert re.search(expected, str(second))


def test_a_server_that_nobody_reaches_is_told(monkeypatch):
    """JAX would try for ever, without a word."""
    with wire.listen("127.0.0.1") as sock:
        host, port = wire.address_of(sock)

    class Gone:
        def address(self):
            return f"{host}:{port}"

    monkeypatch.setattr(transfer, "start_transfer_server", lambda *_, **__: Gone())
    for error in start_pair(PLAN, [THERE], kind="transfer", start_timeout_s=2.0):
        assert isinstance(error, PeerError)
        assert f"nobody answers at {host}:{port}" in str(error)


def test_nothing_is_pulled_that_was_not_offered(pair):
    failures = []
    source, target = pair(pull_timeout_s=0.5, each=({}, {"on_failure": failures.append}))
    target.expect(KEYS[:3])
    source.offer(KEYS[1], array(1))
    target.wait([KEYS[1]])
    with pytest.raises(PeerError, match=r"F0 of microbatch 0 did not come for 0\.5 s") as caught:
        target.wait([KEYS[0]])
    assert "its heartbeat, but no data" in str(caught.value)
    assert failures == [caught.value]
    assert not target._pulled


def test_an_offer_is_kept_until_it_is_acknowledged_and_then_dropped(pair):
    source, target = pair()
    x = array(3)
    alive = weakref.ref(x)
    source.offer(KEYS[0], x)
    del x
    target.expect(KEYS)
    np.testing.assert_array_equal(target.fetch(KEYS[0]), np.full(SHAPE, 3))
    deadline_s = time.monotonic() + 5
    while (source._offers or alive()) and time.monotonic() < deadline_s:
        gc.collect()
    assert not source._offers
    assert alive() is None
    for m in range(1, len(KEYS)):
        source.offer(KEYS[m], array(m))
    time.sleep(0.3)
    assert len(source._offers) == len(KEYS) - 1 - PREFETCH
    closing = threading.Thread(target=source.close)
    closing.start()
    for m in range(1, len(KEYS)):
        if m < len(KEYS) - PREFETCH:  # the last ones have been asked for
            assert closing.is_alive()
        np.testing.assert_array_equal(target.fetch(KEYS[m]), np.full(SHAPE, m))
    closing.join(5)
    assert not closing.is_alive()


def test_a_process_that_leaves_early_is_told_of(pair):
    source, target = pair()
    target.expect(KEYS[:1])
    source.close()
    with pytest.raises(PeerError, match="left the job, while waiting for F0 of microbatch 0"):
        target.fetch(KEYS[0])


def test_a_failed_computation_ends_the_job(pair):
    failures = []
    source, _ = pair(each=({"on_failure": failures.append}, {}))
    aval = jax.ShapeDtypeStruct(SHAPE, np.float32, sharding=SingleDeviceSharding(jax.devices()[0]))
    source.offer(KEYS[0], transfer.make_error_array(aval, "no good"))
    while not failures:
        time.sleep(0.01)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no good"):
        source.offer(KEYS[1], array(1))


def test_a_pull_that_fails_is_told(pair):
    """As where the source has donated what it offered."""
    failures = []
    source, target = pair(each=({}, {"on_failure": failures.append}))
    kept = source._start
    source._start = lambda *args: {i: part + 0 for i, part in kept(*args).items()}
    given = source._give
    source._give = lambda peer, frame, part: (given(peer, frame, part), part.delete())
    source.offer(KEYS[0], array(1))
    target.expect(KEYS[:1])
    with pytest.raises(PeerError, match="JAX could not pull, while waiting for F0"):
        target.fetch(KEYS[0])


@pytest.mark.parametrize("kind", [Kind.GOT, Kind.DATA])
def test_frames_that_nobody_asked_for_are_refused(pair, kind):
    for transport in pair():
        [channel] = transport._peer_of
        hear = {Kind.GOT: transport.got, Kind.DATA: transport.landing}[kind]
        with pytest.raises(ViolationError):
            hear(channel, Frame(kind, 0, 1, 0, 0, 0, 4 * SHAPE[0] * SHAPE[1]))


def test_no_number_is_given_twice(pair):
    source, target = pair()
    frames = [Frame(Kind.DATA, *where) for where in np.ndindex(2, 3, 4, 5)]
    numbers = [source._number(frame) for frame in frames]
    assert len(set(numbers)) == len(frames)
    assert numbers == [target._number(frame) for frame in frames]
    later, _ = pair(about={"restart": 1})
    assert set(numbers).isdisjoint(map(later._number, frames))
