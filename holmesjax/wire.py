"""Authenticated connections between the processes of a job. No JAX, no pickle.

Whoever connects or listens must hold the job's key, 32 random bytes in a file that only its owner
can read. Both ends prove it before anything else is read, by a keyed hash over two fresh nonces:

    listener -> caller    {"nonce"}
    caller -> listener    {"nonce", "hello", "mac"}
    listener -> caller    {"hello", "mac"}, or {"refused", "mac"} with the reason
    caller -> listener    {"entered"}: it has read that

A caller believes a refusal only with its proof. Whatever else it hears comes from a stranger, or
from a listener with another key, which says {"refused"} without a proof; these look the same to it.
So it says at once what it heard, and calls again until its time is up: a stranger at the right
address delays a job, and cannot end it.

The listener lets nobody in before the last message. A caller that has lost the one before it has
no seat yet, and takes it when it calls again.

A message is JSON behind its length, four bytes, which is checked before memory is taken for it.
Traffic after the hello is neither encrypted nor signed: the key keeps strangers and other jobs out,
not someone who can read the network.
"""

import contextlib
import errno
import hmac
import json
import os
import resource
import secrets
import socket
import struct
import sys
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
NONCE_TIMEOUT_S = 30.0  # for a listener that nobody attends to yet; a lost one needs a new call
MAX_PENDING = 64  # connections whose hello is not finished
KEY_BYTES = 32
OPEN_FILES = 65_536  # sockets of some ten thousand processes
PAUSE_S = 0.1  # before a call that did not get through is repeated
STRANGER_PAUSE_S = 1.0  # the same after an answer without the key
WRONG_KEY = "it does not hold the key of this job"

Message = dict[str, Any]
Check = Callable[[Message], str | None]  # what is wrong with the other end's hello, if anything


def warn(text: str) -> None:
    """Says what goes on in spite of it."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


def raise_open_files() -> None:
    """Lets this process, and those that it starts, open as many files as the host allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Not without end: there are programs that close all that could be open.
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


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
      warn: told once of each kind of trouble: this process cannot accept calls, or one came with
        another key.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        key: bytes,
        hello: Message,
        check: Check,
        enter: Callable[[Connection], None],
        warn: Callable[[str], object] = warn,
    ):
        self._sock, self._key, self._hello = sock, key, hello
        self._check, self._enter, self._warn = check, enter, warn
        self.trouble = ""  # why no call is accepted at present
        self._where = "{}:{}".format(*address_of(sock))
        self._warned: set[str] = set()
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
                self._receive_caller(caller)
                self.trouble = ""
            except (OSError, RuntimeError) as error:  # the latter where no thread can start
                # A caller that has left before it was accepted is nobody's trouble.
                if not self._closing and getattr(error, "errno", 0) != errno.ECONNABORTED:
                    self.trouble = f"cannot accept calls at {self._where}: {_shortage(error)}"
                    self._warn_once("accept", self.trouble)
                    time.sleep(PAUSE_S)  # strangers time out soon

    def _receive_caller(self, caller: socket.socket) -> None:
        with self._lock:
            self._pending.append(caller)
            if len(self._pending) > MAX_PENDING:
                _shut(self._pending.popleft())  # wakes its thread, which closes it
        try:
            threading.Thread(target=self._greet, args=(caller,), name="greet", daemon=True).start()
        except RuntimeError:
            self._let_go(caller)
            caller.close()
            raise

    def _warn_once(self, kind: str, text: str) -> None:
        with self._lock:
            is_new = kind not in self._warned
            self._warned.add(kind)
        if is_new:
            self._warn(text)

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
            _send(caller, {"refused": WRONG_KEY})
            who = "{}:{}".format(*caller.getpeername())
            self._warn_once("key", f"refused a call from {who}: {WRONG_KEY}")
            raise ValueError("wrong key")
        self._let_go(caller)
        if reason := self._check(hello):
            mac = _mac(self._key, "refusal", theirs, mine, reason)
            _send(caller, {"refused": reason, "mac": mac})
            caller.close()
            return None
        _send(
            caller,
            {
                "hello": self._hello,
                "mac": _mac(self._key, "listener", theirs, mine, self._hello),
            },
        )
        _take(_receive(caller, HELLO_LIMIT_BYTES, deadline_s), "entered")
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
    """Connects and proves the key; tries again until the other end listens and proves it too.

    Args:
      where: what the connection is for, in errors.
      source: address of this machine to connect from, where it matters which NIC is used.

    Raises:
      PeerError: nobody who holds the key answers within `timeout_s`.
      RefusedError: one of the two ends refuses the other, and both hold the key.
    """
    deadline_s = time.monotonic() + timeout_s
    stranger = ""  # what was heard without the key
    while True:
        try:
            return _call(address, port, source, key, hello, check, where, deadline_s)
        except (OSError, ValueError, RecursionError) as error:
            heard = str(error) or type(error).__name__
            if is_stranger := not isinstance(error, OSError):
                if not stranger:
                    text = f"{where}: {address}:{port} answers without the key of this job: {heard}"
                    warn(f"{text}; trying again for {timeout_s:g} s")
                stranger = heard
            if time.monotonic() >= deadline_s:
                raise _unanswered(where, f"{address}:{port}", timeout_s, heard, stranger) from None
            pause_s = STRANGER_PAUSE_S if is_stranger else PAUSE_S
            time.sleep(min(pause_s, max(deadline_s - time.monotonic(), 0.0)))


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


def _call(
    address: str,
    port: int,
    source: str | None,
    key: bytes,
    hello: Message,
    check: Check,
    where: str,
    deadline_s: float,
) -> Connection:
    """One attempt. Raises OSError where nobody answers, ValueError where it is a stranger."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(deadline_s - time.monotonic(), 0.01))
        if source is not None:
            sock.bind((source, 0))
        sock.connect((address, port))
        return _introduce(sock, key, hello, check, where, deadline_s)
    except BaseException:
        sock.close()
        raise


def _introduce(
    sock: socket.socket, key: bytes, hello: Message, check: Check, where: str, deadline_s: float
) -> Connection:
    _prepare(sock)
    within = lambda timeout_s: min(deadline_s, time.monotonic() + timeout_s)
    theirs = _take(_receive(sock, HELLO_LIMIT_BYTES, within(NONCE_TIMEOUT_S)), "nonce")
    mine = secrets.token_hex(16)
    mac = _mac(key, "caller", theirs, mine, hello)
    _send(sock, {"nonce": mine, "hello": hello, "mac": mac})
    answer = _receive(sock, HELLO_LIMIT_BYTES, within(HELLO_TIMEOUT_S))
    reason = answer.get("refused")
    role, said = ("listener", _take(answer, "hello")) if reason is None else ("refusal", reason)
    if not _equal(_mac(key, role, mine, theirs, said), answer.get("mac")):
        raise ValueError("no proof" if reason is None else f"{str(reason)[:200]!r}, without proof")
    if reason is None:
        reason = check(said)
    if reason is not None:
        fix = "start all processes of a job from one run folder and one installation"
        raise RefusedError(where, "the other end was refused", found=reason, fix=fix)
    _send(sock, {"entered": True})
    sock.settimeout(None)
    return Connection(sock, said)


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


def _shortage(error: Exception) -> str:
    """What this process or its host is short of, and what to do."""
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"{error.strerror}, the limit is {limit}; raise it (ulimit -Hn, or LimitNOFILE=)"
    return f"{error}; see what this host is short of"


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
