"""Lets callers in: one thread hears the hellos of all who call, and passes on who proves the key.

A caller costs a descriptor and a few hundred bytes until it has proved that it holds the key
(`connections`). A stranger may do that for `HELLO_TIMEOUT_S`. Where more wait than those who are
expected and some strangers, the oldest is sent away: a member proves the key within a round trip,
so the oldest is a stranger. Whoever has proved the key is never sent away for others.
"""

import contextlib
import errno
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from holmesjax.transport import connections
from holmesjax.transport.connections import Check, Connection, Message

STRANGERS = 1024  # that may wait beside those who are expected
BATCH = 256  # calls that are accepted before hellos are heard again


class _RefusedError(Exception):
    """The caller is told why, and sent away."""

    def __init__(self, answer: Message):
        self.answer = answer


@dataclass(eq=False)
class _Caller:
    """Somebody whose hello is not finished."""

    sock: socket.socket
    deadline_s: float
    reader: connections.Reader
    talk: Generator[Message, Message, Message]  # is sent what it says, and gives the answers
    hello: Message = field(default_factory=dict)  # once all is said


class Admission:
    """Lets in, on a listening socket, whoever holds the key; a context manager.

    Args:
      sock: from `listen`; closed with the admission.
      key: of the job.
      hello: what this end says of itself.
      check: looks at the caller's hello; a text refuses it.
      enter: takes each authenticated connection, on the admission's thread: it must not wait.
      expected: how many may call at once, where they are more than a few.
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
        expected: int = 0,
        warn: Callable[[str], object] = connections.warn,
    ):
        self._sock, self._key, self._hello = sock, key, hello
        self._check, self._enter, self._warn = check, enter, warn
        self._max_waiting = expected + STRANGERS
        self.trouble = ""  # why no call is accepted at present
        self._where = "{}:{}".format(*connections.address_of(sock))
        self._warned: set[str] = set()
        self._waiting: dict[_Caller, None] = {}  # the oldest first; has not proved the key
        self._entering: dict[_Caller, None] = {}  # has, and not said yet that it knows
        self._is_closing = False
        self._accepts_from_s = 0.0  # after trouble
        self._selector = selectors.DefaultSelector()
        self._wakers = socket.socketpair()
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ)
        self._selector.register(self._wakers[0], selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="admission", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Admission":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._is_closing = True
        with contextlib.suppress(OSError):  # it has been closed before
            self._wakers[1].send(b"x")
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._is_closing:
                for key, _ in self._selector.select(self._patience_s()):
                    if key.fileobj is self._sock:
                        self._accept()
                    elif key.data is not None:
                        self._hear(key.data)
                self._end_overdue()
        finally:
            for caller in [*self._waiting, *self._entering]:
                self._send_away(caller)
            self._selector.close()
            for sock in (self._sock, *self._wakers):
                sock.close()

    # ---- who calls -----------------------------------------------------------------------------

    def _accept(self) -> None:
        for _ in range(BATCH):
            try:
                sock, _ = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # A caller that has left before it was accepted is nobody's trouble.
                if error.errno != errno.ECONNABORTED:
                    self._pause(error)
                return
            self.trouble = ""
            self._greet(sock)

    def _pause(self, error: OSError) -> None:
        """Accepts nobody for a moment: strangers time out soon."""
        self.trouble = f"cannot accept calls at {self._where}: {connections.shortage(error)}"
        self._warn_once("accept", self.trouble)
        self._selector.unregister(self._sock)
        self._accepts_from_s = time.monotonic() + connections.PAUSE_S

    def _greet(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        connections.prepare(sock)
        deadline_s = time.monotonic() + connections.HELLO_TIMEOUT_S
        reader = connections.Reader(sock, connections.HELLO_LIMIT_BYTES)
        caller = _Caller(sock, deadline_s, reader, self._talk())
        self._waiting[caller] = None
        self._selector.register(sock, selectors.EVENT_READ, caller)
        try:
            sock.sendall(connections.encode(next(caller.talk)))
        except OSError:
            self._send_away(caller)
        if len(self._waiting) > self._max_waiting:
            self._send_away(next(iter(self._waiting)))

    def _talk(self) -> Generator[Message, Message, Message]:
        """The listener's part of a hello; ends with the caller's."""
        mine = secrets.token_hex(16)
        answer = yield {"nonce": mine}
        theirs, hello, mac = (connections.take(answer, name) for name in ("nonce", "hello", "mac"))
        if not connections.is_proof(
            connections.prove(self._key, "caller", mine, theirs, hello), mac
        ):
            raise _RefusedError({"refused": connections.WRONG_KEY})
        if reason := self._check(hello):
            mac = connections.prove(self._key, "refusal", theirs, mine, reason)
            raise _RefusedError({"refused": reason, "mac": mac})
        mac = connections.prove(self._key, "listener", theirs, mine, self._hello)
        connections.take((yield {"hello": self._hello, "mac": mac}), "entered")
        return hello

    # ---- what they say -------------------------------------------------------------------------

    def _hear(self, caller: _Caller) -> None:
        try:
            if self._talk_on(caller):
                self._let_go(caller)
                caller.sock.setblocking(True)
                self._enter(Connection(caller.sock, caller.hello))
        except _RefusedError as refused:
            self._refuse(caller, refused.answer)
        except Exception:  # whatever it says, it does not close the door for others
            self._send_away(caller)

    def _talk_on(self, caller: _Caller) -> bool:
        """Whether a caller has said all that it has to say."""
        if caller not in self._waiting and caller not in self._entering:
            return False  # sent away since the selector has seen it
        message = caller.reader.read()
        if message is None:
            return False
        try:
            answer = caller.talk.send(message)
        except StopIteration as end:
            caller.hello = end.value
            return True
        caller.sock.sendall(connections.encode(answer))
        self._forget(caller)
        self._entering[caller] = None
        caller.deadline_s = time.monotonic() + connections.HELLO_TIMEOUT_S
        return False

    def _refuse(self, caller: _Caller, answer: Message) -> None:
        with contextlib.suppress(OSError):
            caller.sock.sendall(connections.encode(answer))
            if "mac" not in answer:
                who = "{}:{}".format(*caller.sock.getpeername())
                self._warn_once("key", f"refused a call from {who}: {answer['refused']}")
        self._send_away(caller)

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            self._warn(text)

    # ---- who leaves ----------------------------------------------------------------------------

    def _patience_s(self) -> float | None:
        """Until somebody is overdue; callers of one kind are in the order of their deadlines."""
        ends_s = [next(iter(held)).deadline_s for held in (self._waiting, self._entering) if held]
        if self._accepts_from_s:
            ends_s.append(self._accepts_from_s)
        return max(min(ends_s) - time.monotonic(), 0.0) if ends_s else None

    def _end_overdue(self) -> None:
        now_s = time.monotonic()
        for held in (self._waiting, self._entering):
            while held and next(iter(held)).deadline_s <= now_s:
                self._send_away(next(iter(held)))
        if self._accepts_from_s and self._accepts_from_s <= now_s:
            self._accepts_from_s = 0.0
            self._selector.register(self._sock, selectors.EVENT_READ)

    def _let_go(self, caller: _Caller) -> None:
        self._forget(caller)
        self._selector.unregister(caller.sock)

    def _forget(self, caller: _Caller) -> None:
        if caller in self._entering:
            del self._entering[caller]
        else:
            del self._waiting[caller]

    def _send_away(self, caller: _Caller) -> None:
        if caller in self._waiting or caller in self._entering:
            self._let_go(caller)
        caller.sock.close()
