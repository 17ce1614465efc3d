"""Authenticated connections between the processes of a job. No JAX, no pickle.

Whoever connects or listens must hold the job's key, 32 random bytes in a file that only its owner
can read. Both ends prove it before anything else is read, by a keyed hash over two fresh nonces:

    listener -> caller    {"nonce"}
    caller -> listener    {"nonce", "hello", "mac"}
    listener -> caller    {"hello", "mac"}, or {"refused"} with the reason

A message is JSON behind its length, four bytes, which is checked before memory is taken for it.
Traffic after the hello is neither encrypted nor signed: the key keeps strangers and other jobs out,
not someone who can read the network.
"""

import contextlib
import hmac
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from holmesjax.errors import HolmesError, PeerError, RefusedError

HELLO_LIMIT_BYTES = 64 * 1024  # before the other end has proved that it holds the key
MESSAGE_LIMIT_BYTES = 64 * 1024 * 1024
HELLO_TIMEOUT_S = 5.0  # for a stranger who says nothing
MAX_PENDING = 64  # connections whose hello is not finished
KEY_BYTES = 32

Message = dict[str, Any]
Check = Callable[[Message], str | None]  # what is wrong with the other end's hello, if anything


def make_key_file(path: str | Path) -> bytes:
    """Writes a new key into a file of mode 0600; an old file is replaced."""
    key = secrets.token_bytes(KEY_BYTES)
    Path(path).unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key.hex())
    return key


def read_key_file(path: str | Path) -> bytes:
    """The job's key. Raises HolmesError for a file that others can read, or that holds no key."""
    fix = "start the job again, or copy its key file with mode 0600 to this machine"
    try:
        mode, text = Path(path).stat().st_mode & 0o777, Path(path).read_text()
        key = bytes.fromhex(text)
    except (OSError, ValueError) as error:
        raise HolmesError(str(path), "holds no key of a job", found=error, fix=fix) from None
    if mode & 0o077:
        problem = "the key of a job must be readable by its owner only"
        raise HolmesError(str(path), problem, found=f"mode {mode:04o}", fix=f"chmod 600 {path}")
    if len(key) != KEY_BYTES:
        found = f"{len(key)} bytes"
        raise HolmesError(str(path), f"must hold {KEY_BYTES} bytes in hex", found=found, fix=fix)
    return key


class Connection:
    """One authenticated connection; sending is safe from several threads, receiving is not."""

    def __init__(self, sock: socket.socket, hello: Message):
        self.sock = sock
        self.hello = hello  # of the other end
        self._lock = threading.Lock()

    def send(self, message: Mapping[str, Any]) -> None:
        """Raises OSError if the other end is gone or takes nothing for the socket's timeout."""
        with self._lock:
            _send(self.sock, message)

    def receive(self) -> Message:
        """Raises OSError if the other end is gone or says nothing for the socket's timeout."""
        return _receive(self.sock, MESSAGE_LIMIT_BYTES)

    def close(self) -> None:
        _shut(self.sock)  # wakes a thread that receives
        self.sock.close()


def listen(address: str, port: int = 0) -> socket.socket:
    """A listening socket on one named address; port 0 takes any free one.

    Raises HolmesError where the address is not of this machine, or the port is taken.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((address, port))
    except (OSError, OverflowError) as error:  # the latter for a port above 65,535
        sock.close()
        found = error.strerror if isinstance(error, OSError) else error
        fix = "choose another port" if port else "name an address of this machine"
        raise HolmesError(f"{address}:{port}", "cannot listen here", found=found, fix=fix) from None
    sock.listen(256)
    return sock


def address_of(sock: socket.socket) -> tuple[str, int]:
    """Where a listening socket can be reached."""
    address, port = sock.getsockname()
    return address, port


class Door:
    """Lets in, on a listening socket, whoever holds the key; a context manager.

    A stranger costs one waiting thread for `HELLO_TIMEOUT_S` and no memory. Of more than
    `MAX_PENDING` at once the oldest is sent away, so that strangers cannot keep the others out: a
    hello takes milliseconds, and `connect` tries again.

    Args:
      sock: from `listen`; closed with the door.
      key: of the job.
      hello: what this end says of itself.
      check: looks at the caller's hello; a text refuses it.
      enter: takes each authenticated connection, on a thread of its own.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        key: bytes,
        hello: Message,
        check: Check,
        enter: Callable[[Connection], None],
    ):
        self._sock, self._key, self._hello = sock, key, hello
        self._check, self._enter = check, enter
        self._pending: deque[socket.socket] = deque()  # whose hello is not finished
        self._lock = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="door", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Door":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._closing = True
        _shut(self._sock)  # wakes `accept`
        self._sock.close()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing:
            try:
                caller, _ = self._sock.accept()
            except OSError:
                if not self._closing:
                    time.sleep(0.1)  # out of file descriptors: strangers time out soon
                continue
            with self._lock:
                self._pending.append(caller)
                if len(self._pending) > MAX_PENDING:
                    _shut(self._pending.popleft())  # wakes its thread, which closes it
            threading.Thread(target=self._greet, args=(caller,), name="greet", daemon=True).start()

    def _greet(self, caller: socket.socket) -> None:
        try:
            connection = self._shake_hands(caller)
        except (OSError, ValueError, RecursionError):
            self._let_go(caller)
            caller.close()
            return
        if connection is not None:
            self._enter(connection)

    def _let_go(self, caller: socket.socket) -> None:
        with self._lock, contextlib.suppress(ValueError):  # it has been told before, or sent away
            self._pending.remove(caller)

    def _shake_hands(self, caller: socket.socket) -> Connection | None:
        deadline_s = time.monotonic() + HELLO_TIMEOUT_S
        _prepare(caller)
        mine = secrets.token_hex(16)
        _send(caller, {"nonce": mine})
        answer = _receive(caller, HELLO_LIMIT_BYTES, deadline_s)
        theirs, hello, mac = (_take(answer, name) for name in ("nonce", "hello", "mac"))
        if not _equal(_mac(self._key, "caller", mine, theirs, hello), mac):
            _send(caller, {"refused": "it does not hold the key of this job"})
            raise ValueError("wrong key")
        self._let_go(caller)
        if reason := self._check(hello):
            _send(caller, {"refused": reason})
            caller.close()
            return None
        _send(
            caller,
            {
                "hello": self._hello,
                "mac": _mac(self._key, "listener", theirs, mine, self._hello),
            },
        )
        caller.settimeout(None)
        return Connection(caller, hello)


def connect(
    address: str,
    port: int,
    *,
    key: bytes,
    hello: Message,
    check: Check,
    where: str,
    timeout_s: float,
    source: str | None = None,
) -> Connection:
    """Connects and proves the key; tries again until the other end listens.

    Args:
      where: what the connection is for, in errors.
      source: address of this machine to connect from, where it matters which NIC is used.

    Raises:
      PeerError: nobody answers within `timeout_s`.
      RefusedError: one of the two ends refuses the other.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(deadline_s - time.monotonic(), 0.01))
            if source is not None:
                sock.bind((source, 0))
            sock.connect((address, port))
            return _introduce(sock, key, hello, check, where, deadline_s)
        except RefusedError:
            sock.close()
            raise
        except (OSError, ValueError, RecursionError) as error:
            sock.close()
            if time.monotonic() >= deadline_s:
                raise PeerError(
                    where,
                    f"nobody answers at {address}:{port} for {timeout_s:g} s",
                    found=str(error) or type(error).__name__,
                    fix="see whether that process runs and that the network lets it be reached",
                ) from None
            time.sleep(min(0.1, max(deadline_s - time.monotonic(), 0.0)))


def _introduce(
    sock: socket.socket, key: bytes, hello: Message, check: Check, where: str, deadline_s: float
) -> Connection:
    _prepare(sock)
    theirs = _take(_receive(sock, HELLO_LIMIT_BYTES, deadline_s), "nonce")
    mine = secrets.token_hex(16)
    mac = _mac(key, "caller", theirs, mine, hello)
    _send(sock, {"nonce": mine, "hello": hello, "mac": mac})
    answer = _receive(sock, HELLO_LIMIT_BYTES, deadline_s)
    reason = answer.get("refused")
    if reason is None:
        its_hello = _take(answer, "hello")
        expected = _mac(key, "listener", mine, theirs, its_hello)
        if not _equal(expected, answer.get("mac")):
            reason = "the other end does not hold the key of this job"
        else:
            reason = check(its_hello)
    if reason is not None:
        fix = "start all processes of a job from one run folder and one installation"
        raise RefusedError(where, "the other end was refused", found=reason, fix=fix)
    sock.settimeout(None)
    return Connection(sock, its_hello)


def _mac(key: bytes, role: str, *parts: Any) -> str:
    text = json.dumps([role, *parts], sort_keys=True)
    return hmac.digest(key, text.encode(), "sha256").hex()


def _equal(expected: str, found: object) -> bool:
    # As bytes: the comparison raises for text that is not ASCII.
    return hmac.compare_digest(expected.encode(), str(found).encode())


def _take(message: Message, name: str) -> Any:
    if name not in message:
        raise ValueError(f"no {name}")
    return message[name]


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other end was faster
        sock.shutdown(socket.SHUT_RDWR)


def _prepare(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _send(sock: socket.socket, message: Mapping[str, Any]) -> None:
    text = json.dumps(message).encode()
    assert len(text) <= MESSAGE_LIMIT_BYTES, f"a message of {len(text)} bytes"
    sock.sendall(struct.pack(">I", len(text)) + text)


def _receive(sock: socket.socket, limit_bytes: int, deadline_s: float | None = None) -> Message:
    (length,) = struct.unpack(">I", _read(sock, 4, deadline_s))
    if length > limit_bytes:
        raise ValueError(f"a message of {length} bytes")
    try:
        message = json.loads(_read(sock, length, deadline_s))
    except RecursionError:
        raise ValueError("a message nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError(f"a message that is {type(message).__name__}")
    return message


def _read(sock: socket.socket, num_bytes: int, deadline_s: float | None) -> bytes:
    """Exactly that many bytes; before the deadline, however slowly they trickle in."""
    data = bytearray()
    while len(data) < num_bytes:
        if deadline_s is not None:
            sock.settimeout(max(deadline_s - time.monotonic(), 0.001))
            if time.monotonic() >= deadline_s:
                raise TimeoutError("the hello took too long")
        part = sock.recv(min(num_bytes - len(data), 65536))
        if not part:
            raise ConnectionResetError("the other end closed the connection")
        data += part
    return bytes(data)
