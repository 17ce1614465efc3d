"""Who is let in over TLS, who is not, and what somebody between two ends can do."""

import contextlib
import datetime
import queue
import random
import socket
import ssl
import threading
from dataclasses import replace

import pytest

from holmesjax.errors import RefusedError
from holmesjax.transport import connections, tls
from holmesjax.transport.rendezvous import Rendezvous
from holmesjax.transport.tls import TlsSocket
from tests.transport.calls import DEADLINE_S, KEY, Inn, call_at, read_frame, rest_of, still_opens
from tests.two_stages import PLAN, TOPOLOGY, whole_stages


@pytest.fixture
def inn(monkeypatch):
    monkeypatch.setattr(connections, "HELLO_TIMEOUT_S", 1000.0)
    inn = Inn(may_be_plain=False)
    yield inn
    inn.admission.close()


def days(number):
    return datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=number)


def caller_context(pem, trusted=None):
    """A context of a caller with some certificate, or with none, which trusts the job's end."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cadata=(trusted or tls.authority(KEY).pem).decode())
    if pem:
        with contextlib.closing(tls.SecretFile(pem)) as file:
            context.load_cert_chain(file.path)
    return context


def old_tls():
    context = caller_context(tls.authority(KEY).issue())
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


CALLERS = {
    "expired": (
        lambda: caller_context(tls.authority(KEY).issue(now=days(-8))),
        "its certificate has expired",
    ),
    "not yet": (
        lambda: caller_context(tls.authority(KEY).issue(now=days(2))),
        "its certificate is not valid yet",
    ),
    "of another job": (
        lambda: caller_context(tls.authority(bytes(32)).issue()),
        "its certificate is not of this job",
    ),
    "without a certificate": (
        lambda: caller_context(b""),
        "peer did not return a certificate",
    ),
    "TLS 1.2": (old_tls, "unsupported protocol"),
}


@pytest.mark.parametrize("make, reason", CALLERS.values(), ids=CALLERS)
def test_a_certificate_that_is_not_good_is_refused_with_who_and_why(inn, make, reason):
    with inn.stranger() as stranger:
        who = "{}:{}".format(*stranger.getsockname())
        read_frame(stranger)
        with (
            pytest.raises((ssl.SSLError, ConnectionResetError)),
            make().wrap_socket(stranger) as secure,
        ):
            secure.recv(1)  # a caller of TLS 1.3 is done before the listener has seen who it is
    said = inn.warnings.get(timeout=DEADLINE_S)
    assert said.startswith(f"refused a call from {who}: ")
    assert reason in said
    assert inn.entered.empty()
    still_opens(inn)


@pytest.mark.parametrize("begin", [days(-8), days(2)])
def test_a_listener_with_an_old_certificate_is_not_believed(inn, begin, monkeypatch, pauses):
    own = tls.make_context(
        tls.authority(KEY).pem, tls.authority(KEY).issue(now=begin), server_side=True
    )
    honest = tls.context
    monkeypatch.setattr(
        tls, "context", lambda key, server_side: own if server_side else honest(key, server_side=0)
    )
    with pytest.raises(Exception, match=r"answered without it: its certificate (has|is not)"):
        inn.call()
    assert inn.entered.empty()


def test_a_certificate_is_made_anew_after_a_day(monkeypatch):
    first = tls.context(KEY, server_side=True)
    assert tls.context(KEY, server_side=True) is first
    monkeypatch.setattr(tls, "RENEW_S", -1.0)
    assert tls.context(KEY, server_side=True) is not first


def test_a_plain_call_is_refused_where_this_end_encrypts(inn):
    with pytest.raises(RefusedError, match="the call is in the clear"):
        inn.call(encrypt=False)
    assert inn.entered.empty()
    still_opens(inn)


def tap(inn):
    """A relay of one connection; returns its address, and what each end has said once it ends."""
    listener, said = connections.listen("127.0.0.1"), queue.Queue()

    def run():
        near, _ = listener.accept()
        far = inn.stranger()
        heard = {near: bytearray(), far: bytearray()}

        def pass_on(source, target):
            while data := source.recv(65536):
                heard[source] += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

        ways = [threading.Thread(target=pass_on, args=way) for way in ((near, far), (far, near))]
        for way in ways:
            way.start()
        for way in ways:
            way.join()
        for sock in (near, far, listener):
            sock.close()
        said.put((bytes(heard[near]), bytes(heard[far])))

    threading.Thread(target=run, daemon=True).start()
    return connections.address_of(listener), said


@pytest.mark.parametrize("encrypt", [True, False])
def test_a_reader_of_the_network_learns_nothing_and_can_replay_nothing(inn, encrypt):
    """In the clear it reads everything, so the tap does see what is sent."""
    inn.admission._may_be_plain = lambda hello: not encrypt
    address, said = tap(inn)
    ours = call_at(address, encrypt=encrypt)
    theirs = inn.entered.get(timeout=DEADLINE_S)
    ours.send({"secret": "of the caller"})
    theirs.send({"secret": "of the listener"})
    assert (theirs.receive(), ours.receive()) == (
        {"secret": "of the caller"},
        {"secret": "of the listener"},
    )
    ours.close()
    theirs.close()
    from_caller, from_listener = said.get(timeout=DEADLINE_S)
    assert (b"secret" in from_caller, b"secret" in from_listener) == (not encrypt, not encrypt)
    with inn.stranger() as stranger:
        stranger.sendall(from_caller)
        with contextlib.suppress(OSError):  # the listener may have sent it away already
            stranger.shutdown(socket.SHUT_WR)
        assert b"welcome" not in rest_of(stranger)
    still_opens_to_us = inn.call(encrypt=encrypt)
    inn.entered.get(timeout=DEADLINE_S).close()
    still_opens_to_us.close()
    assert inn.entered.empty()


def test_bytes_that_cross_in_both_directions_at_once_are_whole():
    """Four threads on two ends, pieces of all sizes, from many buffers and into many."""
    pair = socket.socketpair()
    ends = [
        TlsSocket(sock, tls.context(KEY, server_side=side), server_side=side)
        for sock, side in zip(pair, (False, True), strict=True)
    ]
    hands = [threading.Thread(target=end.shake_hands) for end in ends]
    for hand in hands:
        hand.start()
    for hand in hands:
        hand.join()
    rng = random.Random(0)
    sent = [rng.randbytes(3_000_000 + 7 * i) for i in range(2)]
    got = [bytearray(len(data)) for data in reversed(sent)]

    def cut(data):
        rest, cuts = memoryview(data), random.Random(1)
        while rest:
            sizes = [cuts.choice([1, 100, 20_000, 400_000]) for _ in range(cuts.randrange(1, 9))]
            parts = []
            for size in sizes:
                parts.append(rest[:size])
                rest = rest[size:]
            yield [part for part in parts if part]

    def send(end, data):
        for buffers in cut(data):
            while buffers:
                count = end.sendmsg(buffers)
                while buffers and count >= len(buffers[0]):
                    count -= len(buffers.pop(0))
                if count:
                    buffers[0] = buffers[0][count:]

    def receive(end, data):
        for buffers in cut(data):
            assert end.recvmsg_into(buffers, 0, socket.MSG_WAITALL)[0] == sum(map(len, buffers))

    threads = [
        threading.Thread(target=run, args=(end, data))
        for run, all_data in ((send, sent), (receive, got))
        for end, data in zip(ends, all_data, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert [bytes(data) for data in got] == sent[::-1]
    ends[0].close()
    assert ends[1].recv(1) == b""
    ends[1].close()


BOOK = {name: [("10.0.0.1", 1)] for name in ("ethernet", "infiniband", "roce")}
HERE = {name: [("127.0.0.1", 1)] for name in BOOK}


@pytest.mark.parametrize(
    "setting, books, expected",
    [
        ("auto", (BOOK, BOOK), (False, True)),
        ("auto", (HERE, BOOK), (False, True)),  # it may be reached through a tunnel
        ("auto", (HERE, HERE), (False, False)),
        ("always", (HERE, HERE), (True, True)),
        ("never", (BOOK, BOOK), (False, False)),
    ],
)
def test_links_between_clusters_are_encrypted_and_both_ends_agree(setting, books, expected):
    me, beyond = whole_stages(PLAN)
    beside = replace(me, number=2)
    book = dict.fromkeys((beside.number, beyond.number), books[1]) | {me.number: books[0]}

    def encrypts(one, other):
        found = Rendezvous(
            me=one,
            processes=(),
            topology=TOPOLOGY,
            ports=None,
            look_up=None,
            key=KEY,
            about={},
            min_streams=1,
            timeout_s=1.0,
            encrypt=setting,
        )
        return found.encrypts(other, book)

    for peer, due in zip((beside, beyond), expected, strict=True):
        assert encrypts(me, peer) == encrypts(peer, me) == due
