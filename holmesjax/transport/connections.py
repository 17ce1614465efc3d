"""Authenticated connections between the processes of a job. No JAX, no pickle.

Whoever connects or listens must hold the job's key, 32 random bytes in a file that only its owner
can read; `handshake` has the messages that prove it. A caller that hears an answer without the key
says so at once, and calls again until its time is up: a stranger at the right address delays a job,
and cannot end it.

A message is JSON behind its length, four bytes, which is checked before memory is taken for it.
The listener's first message goes in the clear. A caller that encrypts begins TLS after it (`tls`),
so what strangers read on the network tells them nothing, and what they change ends the connection.
A caller that does not encrypt goes on in the clear; then the key keeps out strangers, and not those
who can read the network.
"""

import contextlib
import errno
import itertools
import json
import random
import resource
import socket
import struct
import sys
import threading
import time
from collections.abc import Generator, Mapping
from typing import Any, Generic

from holmesjax.errors import HolmesError, PeerError
from holmesjax.transport import addresses, handshake, records, tls
from holmesjax.transport.handshake import Check
from holmesjax.transport.records import Message, R, Record
from holmesjax.transport.relay_messages import JoinedCall, RelayHello, RelayWelcome, relay_key
from holmesjax.transport.tls import TlsSocket

HELLO_LIMIT_BYTES = 64 * 1024  # before the other end has proved that it holds the key
MESSAGE_LIMIT_BYTES = 64 * 1024 * 1024
HELLO_TIMEOUT_S = 5.0  # for a caller that has not proved the key: it may be a stranger
PROVEN_TIMEOUT_S = 30.0  # for a caller that has, whose host may be busy
LISTENER_TIMEOUT_S = 30.0  # for a listener, which may hear thousands; a lost one needs a new call
OPEN_FILES = 65_536  # sockets of some ten thousand processes
OWN_FILES = 64  # of a launcher: its logs, its run folder, strangers that call
PAUSE_S = 0.1  # before a call that did not get through is repeated; longer each time
MAX_PAUSE_S = 2.0
STRANGER_PAUSE_S = 1.0  # the same after an answer without the key
BACKLOG = 4096  # calls that the system holds until they are accepted; it may allow fewer
CLOSED = "the other end closed the connection"
LENGTH = struct.Struct(">I")  # before each message


def warn(text: str) -> None:
    """Prints a warning."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


def raise_open_files(needed: int = 0) -> None:
    """Lets this process, and those that it starts, open as many files as the host allows.

    Args:
      needed: descriptors for the processes of a job.

    Raises HolmesError where the host does not allow so many.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    total = needed + OWN_FILES if needed else 0
    if hard != resource.RLIM_INFINITY and hard < total:
        raise HolmesError(
            "open files",
            f"this process needs {total}: {needed} for the processes of the job, {OWN_FILES} "
            "for itself",
            found=f"a hard limit of {hard}",
            fix=f"raise it: ulimit -Hn {total}, LimitNOFILE={total} of a service, or "
            "/etc/security/limits.conf",
        )
    # Not without end: there are programs that close all that could be open.
    wanted = max(OPEN_FILES, total)
    if hard != resource.RLIM_INFINITY:
        wanted = min(hard, wanted)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Connection(Generic[R]):
    """One authenticated connection; sending is safe from several threads, receiving is not.

    Args:
      sock: its socket.
      hello: of the other end.
      is_relayed: whether it came by a relay, whose end looks here like that of the other end.
    """

    def __init__(self, sock: socket.socket, hello: R, *, is_relayed: bool = False):
        self.sock, self.hello, self.is_relayed = sock, hello, is_relayed
        self._lock = threading.Lock()

    def send(self, message: Mapping[str, Any]) -> None:
        """Raises OSError if the other end is gone or takes nothing for the socket's timeout."""
        data = pack(message)
        with self._lock:
            self.sock.sendall(data)

    def receive(self) -> Message:
        """Raises OSError if the other end is gone or says nothing for the socket's timeout."""
        return _receive(self.sock, MESSAGE_LIMIT_BYTES)

    def receive_bytes(self, num_bytes: int) -> bytes:
        """Bytes that are no message, and follow one. Raises as `receive`."""
        return _read(self.sock, num_bytes, None)

    def close(self) -> None:
        shut(self.sock)  # wakes a thread that receives
        self.sock.close()


class Reader:
    """Messages of a socket that does not block, as their bytes come.

    Nothing behind the message is read, so that the socket can be handed on after any of them.
    """

    def __init__(self, sock: socket.socket, limit_bytes: int):
        self._sock, self.limit_bytes = sock, limit_bytes
        self._data = bytearray()
        self._length: int | None = None  # of the message, once that is known

    def read(self) -> Message | None:
        """The next message; None if it is not all there yet.

        Raises OSError if the other end is gone, ValueError for what is no message.
        """
        while True:
            wanted = LENGTH.size if self._length is None else self._length
            while len(self._data) < wanted:
                try:
                    part = self._sock.recv(min(wanted - len(self._data), 65536))
                except BlockingIOError:
                    return None
                if not part:
                    raise ConnectionResetError(CLOSED)
                self._data += part
            data, self._data = self._data, bytearray()
            if self._length is not None:
                self._length = None
                return _decode(data)
            self._length = _length(data, self.limit_bytes)


def listen(address: str, port: int = 0) -> socket.socket:
    """Opens a listening socket on one address; port 0 takes any free port.

    Raises HolmesError if the address is not of this machine, or the port is taken.
    """
    sock = None
    try:
        family, place = next(addresses.resolve(address, port))
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(place)
        sock.listen(BACKLOG)  # refuses a port that another one has bound and does not listen at
    except OSError as error:
        if sock is not None:
            sock.close()
        found = error.strerror
        fix = "choose another port" if port else "name an address of this machine"
        where = addresses.show(address, port)
        raise HolmesError(where, "cannot listen here", found=found, fix=fix) from None
    return sock


def listen_in(address: str, ports: tuple[int, int] | None) -> socket.socket:
    """Opens a listening socket on the first free port of a range; None: on any free port.

    Raises HolmesError if the address is not of this machine, or all ports are taken.
    """
    if ports is None:
        return listen(address)
    for port in range(ports[0], ports[1] + 1):
        try:
            return listen(address, port)
        except HolmesError as error:
            refused = error
    if ports[0] < ports[1]:
        refused.where = f"{addresses.show(address, ports[0])} to {ports[1]}"
        refused.fix = "make distributed.ports wider, or end what listens there"
    raise refused


def keep_alive(sock: socket.socket) -> None:
    """Notices within minutes that the other end of an idle connection is gone."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):  # elsewhere than on Linux the system's two hours count
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)


def address_of(sock: socket.socket) -> tuple[str, int]:
    """Returns the address and the port of a listening socket."""
    return addresses.of(sock.getsockname())


def connect(
    address: str,
    port: int,
    *,
    key: bytes,
    hello: Record,
    expected: type[R],
    check: Check[R],
    where: str,
    timeout_s: float,
    source: str | None = None,
    encrypt: bool = True,
) -> Connection[R]:
    """Connects and proves the key; tries again until the other end listens and proves it too.

    Args:
      address, port: where the other end listens.
      key: the key of the job.
      hello: the hello of this end.
      expected: the kind of the other end's hello.
      check: looks at the other end's hello.
      where: the purpose of the connection, in errors.
      timeout_s: for all attempts together.
      source: address of this machine to connect from, where it matters which NIC is used.
      encrypt: whether all that follows the listener's first message goes through TLS.

    Raises:
      PeerError: nobody who holds the key answers within `timeout_s`.
      RefusedError: one of the two ends refuses the other, and both hold the key.
    """
    deadline_s = time.monotonic() + timeout_s
    place = addresses.show(address, port)
    stranger = heard = ""  # what was heard without the key, and what went wrong last
    for attempt in itertools.count():
        talk = handshake.call(key, hello, expected, check, where)
        try:
            return call(
                address,
                port,
                source=source,
                talk=talk,
                deadline_s=deadline_s,
                encrypt=key if encrypt else None,
            )
        except (OSError, ValueError, RecursionError) as error:
            if not (heard and isinstance(error, TimeoutError)):  # the last attempt has little time
                heard = str(error) or type(error).__name__
            if is_stranger := not isinstance(error, OSError):
                if not stranger:
                    text = f"{where}: {place} answers without the key of this job: {heard}"
                    warn(f"{text}; trying again for {timeout_s:g} s")
                stranger = heard
            if time.monotonic() >= deadline_s:
                raise _unanswered(where, place, timeout_s, heard, stranger) from None
            pause_s = STRANGER_PAUSE_S if is_stranger else pause_after(attempt)
            time.sleep(min(pause_s, max(deadline_s - time.monotonic(), 0.0)))
    raise AssertionError("the last call returns or raises")


def pause_after(attempt: int) -> float:
    """Returns the seconds before a call is repeated: twice as many each time, and partly random.

    A crowd that calls at once does not come again at once.
    """
    longest_s = min(PAUSE_S * 2.0 ** min(attempt, 30), MAX_PAUSE_S)
    return longest_s * random.uniform(0.5, 1.0)


def _unanswered(where: str, place: str, timeout_s: float, heard: str, stranger: str) -> PeerError:
    if not stranger:
        return PeerError(
            where,
            f"nobody answers at {place} for {timeout_s:g} s",
            found=heard,
            fix="see whether that process runs and that the network lets it be reached",
        )
    return PeerError(
        where,
        f"nobody who holds the key of this job answers at {place} for {timeout_s:g} s",
        found=f"something there answered without it: {stranger}",
        fix="see that both ends have the same key file and run folder, and that no other program "
        "listens there",
    )


def call(
    address: str,
    port: int,
    *,
    source: str | None = None,
    talk: Generator[Message, Message, R],
    deadline_s: float,
    encrypt: bytes | None,
) -> Connection[R]:
    """Makes one attempt to connect.

    Args:
      address, port: where the other end listens.
      source: address of this machine to connect from, where it matters which NIC is used.
      talk: `handshake.call`.
      deadline_s: of the monotonic clock.
      encrypt: the key of the job, for TLS; None: in the clear.

    Raises:
      ConnectionRefusedError: nobody listens there.
      OSError: nobody answers before the deadline.
      ValueError, RecursionError: it is a stranger.
      RefusedError: one of the two ends refuses the other, and both hold the key.
    """
    name, relayed, relay = address.rpartition(addresses.RELAYED)
    if relayed:
        assert encrypt is not None, "what goes through a relay is encrypted"
        sock = _through_relay(relay, port, name, encrypt, deadline_s)
    else:
        sock = _open(address, port, source, deadline_s)
    try:
        prepare(sock)
        within_s = min(deadline_s, time.monotonic() + LISTENER_TIMEOUT_S)
        challenge = _receive(sock, HELLO_LIMIT_BYTES, within_s)
        if encrypt is not None:
            sock = TlsSocket(sock, tls.context(encrypt, server_side=False), server_side=False)
            sock.shake_hands(min(deadline_s, time.monotonic() + LISTENER_TIMEOUT_S))
        return _introduce(sock, challenge, talk, deadline_s)
    except BaseException:
        sock.close()
        raise


def connect_relay(
    address: str, port: int, key: bytes, hello: RelayHello, within_s: float
) -> Connection[RelayWelcome]:
    """Connects with a relay, in the clear: the ends of what it joins encrypt by themselves.

    Args:
      address, port: of the relay.
      key: of the relay.
      hello: what this end wants.
      within_s: for all of it.

    Raises as `call`.
    """
    talk = handshake.call(key, hello, RelayWelcome, lambda _: None, "the relay")
    deadline_s = time.monotonic() + within_s
    return call(address, port, talk=talk, deadline_s=deadline_s, encrypt=None)


def _through_relay(
    address: str, port: int, name: str, key: bytes, deadline_s: float
) -> socket.socket:
    """Returns a connection with whoever has a name at a relay.

    Raises OSError where nobody there has it, or takes the call, and as `call`.
    """
    relay, within_s = f"the relay {addresses.show(address, port)}", deadline_s - time.monotonic()
    try:
        hello = RelayHello(role="call", name=name)
        connection = connect_relay(address, port, relay_key(key), hello, within_s)
    except ConnectionRefusedError:  # which tells nothing of who is called
        raise OSError(errno.EHOSTUNREACH, f"{relay} is not there") from None
    try:
        found = _receive(connection.sock, HELLO_LIMIT_BYTES, deadline_s)
        if problem := records.decode_as(found, JoinedCall).problem:
            raise OSError(errno.EHOSTUNREACH, f"{relay}: {problem}")
    except BaseException:
        connection.close()
        raise
    return connection.sock


def _open(address: str, port: int, source: str | None, deadline_s: float) -> socket.socket:
    """Connects with the first address behind a name that can be connected with."""
    problem: OSError = OSError(f"{address} has no address of the family of {source}")
    places = list(addresses.resolve(addresses.as_seen_from(address, source), port))
    own = list(addresses.resolve(source, 0)) if source is not None else []
    for tried, (family, place) in enumerate(places):
        if own and family != own[0][0]:
            continue
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            # A place that drops packets leaves time for those behind it.
            left_s = (deadline_s - time.monotonic()) / (len(places) - tried)
            sock.settimeout(max(left_s, 0.01))
            if own:
                sock.bind(own[0][1])
            sock.connect(place)
            if own:
                addresses.keep_on_nic(sock)
        except OSError as error:
            sock.close()
            problem = error
            continue
        return sock
    raise problem


def _introduce(
    sock: socket.socket,
    challenge: Message,
    talk: Generator[Message, Message, R],
    deadline_s: float,
) -> Connection[R]:
    next(talk)
    try:
        answer = talk.send(challenge)
        while True:
            _send(sock, answer)
            within_s = min(deadline_s, time.monotonic() + LISTENER_TIMEOUT_S)
            answer = talk.send(_receive(sock, HELLO_LIMIT_BYTES, within_s))
    except ConnectionAbortedError as error:  # of TLS: the other end, or somebody between
        raise ValueError(str(error)) from None
    except StopIteration as end:
        _send(sock, records.encode(handshake.Entered()))
        sock.settimeout(None)
        return Connection(sock, end.value)


def shortage(error: Exception) -> str:
    """Describes what this process or its host is short of, and what to do."""
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"{error.strerror}, the limit is {limit}; raise it (ulimit -Hn, or LimitNOFILE=)"
    return f"{error}; see what this host is short of"


def shut(sock: socket.socket) -> None:
    """Ends both directions, and wakes a thread that waits in one."""
    with contextlib.suppress(OSError):  # the other end was faster
        sock.shutdown(socket.SHUT_RDWR)


def prepare(sock: socket.socket) -> None:
    """Lets small messages go at once."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def pack(message: Mapping[str, Any]) -> bytes:
    """The bytes of a message: its length, then its text."""
    text = json.dumps(message).encode()
    assert len(text) <= MESSAGE_LIMIT_BYTES, f"a message of {len(text)} bytes"
    return LENGTH.pack(len(text)) + text


def _decode(text: bytes | bytearray) -> Message:
    try:
        message = json.loads(text)
    except RecursionError:
        raise ValueError("a message nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError(f"a message that is {type(message).__name__}")
    return message


def _length(head: bytes | bytearray, limit_bytes: int) -> int:
    (length,) = LENGTH.unpack(head)
    if length > limit_bytes:
        raise ValueError(f"a message of {length} bytes")
    return int(length)


def _send(sock: socket.socket, message: Mapping[str, Any]) -> None:
    sock.sendall(pack(message))


def _receive(sock: socket.socket, limit_bytes: int, deadline_s: float | None = None) -> Message:
    length = _length(_read(sock, LENGTH.size, deadline_s), limit_bytes)
    return _decode(_read(sock, length, deadline_s))


def _read(sock: socket.socket, num_bytes: int, deadline_s: float | None) -> bytes:
    """Reads exactly that many bytes before the deadline, however slowly they come."""
    data = bytearray()
    while len(data) < num_bytes:
        if deadline_s is not None:
            sock.settimeout(max(deadline_s - time.monotonic(), 0.001))
            if time.monotonic() >= deadline_s:
                raise TimeoutError("the hello took too long")
        part = sock.recv(min(num_bytes - len(data), 65536))
        if not part:
            raise ConnectionResetError(CLOSED)
        data += part
    return bytes(data)
