"""Lets callers in: one thread hears the hellos of all callers, and passes on who proves the key.

A caller that encrypts begins TLS after it has heard the challenge; a plain one answers at once. The
first byte tells them apart.

Until a caller has proved the key (`handshake`), it costs a descriptor and a few hundred bytes, for
`HELLO_TIMEOUT_S` at most. If more callers wait than are expected, and some strangers, the oldest is
sent away. A member proves the key within a round trip, so the oldest is a stranger. A caller that
has proved the key is never sent away for others. Time passes for callers only while the thread
waits for them: nobody is sent away because others took its time.
"""

import contextlib
import errno
import functools
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Generic

from holmesjax.transport import addresses, connections, handshake, records, tls
from holmesjax.transport.connections import Connection
from holmesjax.transport.handshake import Check, RejectedError, Rejection
from holmesjax.transport.records import Message, R, Record
from holmesjax.transport.tls import TlsSocket

STRANGERS = 1024  # that may wait beside those who are expected
PLAIN = "this end encrypts this connection (distributed.encrypt), and the call is in the clear"
BATCH = 256  # calls that are accepted before hellos are heard again


@dataclass(eq=False)
class _Caller:
    """A caller whose handshake is not finished."""

    sock: socket.socket  # a TlsSocket from the first byte of TLS on
    deadline_s: float
    reader: connections.Reader
    is_relayed: bool
    talk: Generator[Message, Message, Any] = field(init=False)  # is sent what it says, and answers
    has_begun: bool = False  # whether it is known to encrypt or not
    is_secure: bool = False  # whether TLS has made sure of it
    hello: Any = None  # once all is said


class Admission(Generic[R]):
    """Lets in, on a listening socket, whoever holds the key; a context manager.

    Args:
      sock: from `listen`; closed with the admission.
      key: of the job.
      hello: what this end says of itself.
      expected: the kind of the callers' hello.
      check: looks at the caller's hello; a text refuses it.
      may_be_plain: whether a caller with this hello may call without TLS.
      enter: takes each authenticated connection, on the admission's thread: it must not wait.
      num_callers: how many may call at once, where they are more than a few.
      warn: told once of each kind of trouble: this process cannot accept calls, or one came with
        another key.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        key: bytes,
        hello: Record,
        expected: type[R],
        check: Check[R],
        enter: Callable[[Connection[R]], None],
        may_be_plain: Callable[[R], bool] = lambda hello: False,
        num_callers: int = 0,
        warn: Callable[[str], object] = connections.warn,
    ):
        self._sock, self._enter, self._warn = sock, enter, warn
        self._key, self._hello, self._expected, self._check = key, hello, expected, check
        self._may_be_plain = may_be_plain
        self._max_waiting = num_callers + STRANGERS
        self.trouble = ""  # why no call is accepted at present
        self._where = addresses.show(*connections.address_of(sock))
        self._warned: set[str] = set()
        self._waiting: dict[_Caller, None] = {}  # the oldest first; has not proved the key
        self._entering: dict[_Caller, None] = {}  # has, and not said yet that it knows
        self._is_closing = False
        self._waited_s = 0.0  # for callers, since the beginning: the clock of all deadlines
        self._accepts_from_s = 0.0  # after trouble
        self._selector = selectors.DefaultSelector()
        self._wakers = socket.socketpair()
        self._brought: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ)
        self._selector.register(self._wakers[0], selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="admission", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Admission[R]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def bring(self, sock: socket.socket) -> None:
        """Takes a call that came by a relay; from any thread."""
        self._brought.put(sock)
        try:
            self._wakers[1].send(b"x")
        except OSError:  # it is closed
            self._forget_brought()

    def _forget_brought(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._brought.get_nowait().close()

    def close(self) -> None:
        self._is_closing = True
        with contextlib.suppress(OSError):  # it has been closed before
            self._wakers[1].send(b"x")
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._is_closing:
                for key, _ in self._select():
                    if key.fileobj is self._sock:
                        self._accept()
                    elif key.fileobj is self._wakers[0]:
                        self._wakers[0].recv(BATCH)
                        while not self._brought.empty():
                            self._greet(self._brought.get(), is_relayed=True)
                    elif key.data is not None:
                        self._hear(key.data)
                self._end_overdue()
        finally:
            for caller in [*self._waiting, *self._entering]:
                self._send_away(caller)
            self._selector.close()
            for sock in (self._sock, *self._wakers):
                sock.close()
            self._forget_brought()

    def _select(self) -> list[tuple[selectors.SelectorKey, int]]:
        """Returns what has come; nothing when a caller is overdue."""
        start_s = time.monotonic()
        ready = self._selector.select(self._patience_s())
        self._waited_s += time.monotonic() - start_s
        return ready

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
        """Accepts no calls for a moment: strangers time out soon."""
        self.trouble = f"cannot accept calls at {self._where}: {connections.shortage(error)}"
        self._warn_once("accept", self.trouble)
        self._selector.unregister(self._sock)
        self._accepts_from_s = self._waited_s + connections.PAUSE_S

    def _greet(self, sock: socket.socket, is_relayed: bool = False) -> None:
        sock.setblocking(False)
        connections.prepare(sock)
        deadline_s = self._waited_s + connections.HELLO_TIMEOUT_S
        reader = connections.Reader(sock, connections.HELLO_LIMIT_BYTES)
        caller = _Caller(sock, deadline_s, reader, is_relayed)
        judge = functools.partial(self._judge, caller)
        caller.talk = handshake.answer(self._key, self._hello, self._expected, judge)
        self._waiting[caller] = None
        self._selector.register(sock, selectors.EVENT_READ, caller)
        try:
            sock.sendall(connections.pack(next(caller.talk)))
        except OSError:
            self._send_away(caller)
        if len(self._waiting) > self._max_waiting:
            self._send_away(next(iter(self._waiting)))

    # ---- what they say -------------------------------------------------------------------------

    def _judge(self, caller: _Caller, hello: R) -> str | None:
        if not caller.is_secure and not self._may_be_plain(hello):
            return PLAIN
        return self._check(hello)

    def _hear(self, caller: _Caller) -> None:
        try:
            if not self._is_sure(caller):
                return
            if self._talk_on(caller):
                self._let_go(caller)
                caller.sock.setblocking(True)
                self._enter(Connection(caller.sock, caller.hello, is_relayed=caller.is_relayed))
        except RejectedError as error:
            self._reject(caller, error.rejection)
        except Exception:  # whatever it says, it does not close the door for others
            self._send_away(caller)

    def _is_sure(self, caller: _Caller) -> bool:
        """Whether a caller's messages can be heard: TLS is sure of it, or it does without."""
        if caller not in self._waiting and caller not in self._entering:
            return False  # sent away since the selector has seen it
        if not caller.has_begun:
            caller.has_begun = True
            if caller.sock.recv(1, socket.MSG_PEEK) != tls.FIRST_BYTE:
                return True
            context = tls.context(self._key, server_side=True)
            self._selector.unregister(caller.sock)
            caller.sock = TlsSocket(caller.sock, context, server_side=True)
            caller.reader = connections.Reader(caller.sock, connections.HELLO_LIMIT_BYTES)
            self._selector.register(caller.sock, selectors.EVENT_READ, caller)
        if isinstance(caller.sock, TlsSocket) and not caller.is_secure:
            try:
                caller.sock.shake_hands()
            except BlockingIOError:
                return False
            except ValueError as error:
                self._warn_of(caller, str(error))
                raise
            caller.is_secure = True
        return True

    def _talk_on(self, caller: _Caller) -> bool:
        """Whether a caller has said all that it has to say."""
        message = caller.reader.read()
        if message is None:
            return False
        try:
            answer = caller.talk.send(message)
        except StopIteration as end:
            caller.hello = end.value
            return True
        caller.sock.sendall(connections.pack(answer))
        self._forget(caller)
        self._entering[caller] = None
        caller.deadline_s = self._waited_s + connections.PROVEN_TIMEOUT_S
        return False

    def _reject(self, caller: _Caller, rejection: Rejection) -> None:
        with contextlib.suppress(OSError):
            caller.sock.sendall(connections.pack(records.encode(rejection)))
            if rejection.mac is None:
                self._warn_of(caller, rejection.reason)
        self._send_away(caller)

    def _warn_of(self, caller: _Caller, reason: str) -> None:
        with contextlib.suppress(OSError):  # it has gone
            where = addresses.show(*addresses.of(caller.sock.getpeername()))
            self._warn_once(reason, f"refused a call from {where}: {reason}")

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            self._warn(text)

    # ---- who leaves ----------------------------------------------------------------------------

    def _patience_s(self) -> float | None:
        """Returns the seconds until a caller is overdue; both groups are ordered by deadline."""
        ends_s = [next(iter(held)).deadline_s for held in (self._waiting, self._entering) if held]
        if self._accepts_from_s:
            ends_s.append(self._accepts_from_s)
        return max(min(ends_s) - self._waited_s, 0.0) if ends_s else None

    def _end_overdue(self) -> None:
        for held in (self._waiting, self._entering):
            while held and next(iter(held)).deadline_s <= self._waited_s:
                self._send_away(next(iter(held)))
        if self._accepts_from_s and self._accepts_from_s <= self._waited_s:
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
