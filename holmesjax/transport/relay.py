"""A relay: joins two connections of processes that cannot call each other, and passes bytes on.

Both processes call the relay, which stands where both can reach it. It holds a key that lets it
know its callers, and not the key of the job (`relay_messages`), so it cannot read what it passes
on, nor change it unseen. No JAX.
"""

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from holmesjax.transport import connections, records
from holmesjax.transport.admission import Admission
from holmesjax.transport.connections import Connection
from holmesjax.transport.relay_messages import (
    JoinedCall,
    RelayHello,
    RelayWelcome,
    Replaced,
    Ticket,
)

PIECE_BYTES = 1 << 18
TAKE_S = 15.0  # for a process to take a call
COME_S = 10.0  # that a hello is under way, at most
MAX_NAME = 200


@dataclass(eq=False)
class _Listener:
    """A process that can be called; it began up to COME_S before `born_s`, by the relay's clock."""

    connection: Connection[RelayHello]
    born_s: float

    def is_as_young_as(self, other: "_Listener | None") -> bool:
        """Whether it is not known to be older than another one of its name, or is the same."""
        return other is None or self.is_same(other) or self.born_s + COME_S > other.born_s

    def is_same(self, other: "_Listener") -> bool:
        """Whether it is the same process, which has called again."""
        return self.connection.hello.session == other.connection.hello.session


@dataclass(eq=False)
class _Call:
    """A caller that waits for the process that it wants."""

    caller: Connection[RelayHello]
    is_taken: threading.Event = field(default_factory=threading.Event)
    taker: Connection[RelayHello] | None = None


class Relay:
    """A relay of one job; a context manager.

    Args:
      address: of this machine, where it listens.
      port: 0: any.
      key: of the relay, not of the job.
      say: takes a line about each process that can be called, and each that cannot any more.

    Raises HolmesError if nobody can listen there.
    """

    def __init__(self, address: str, port: int, *, key: bytes, say: Callable[[str], object]):
        self._say = say
        self._listeners: dict[str, _Listener] = {}  # by name
        self._calls: dict[str, _Call] = {}  # by ticket
        self._joined: set[Connection[RelayHello]] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        sock = connections.listen(address, port)
        self.address = connections.address_of(sock)
        self._admission = Admission(
            sock,
            key=key,
            hello=RelayWelcome(),
            expected=RelayHello,
            check=lambda hello: "a name that is too long" if len(hello.name) > MAX_NAME else None,
            enter=self._enter,
            may_be_plain=lambda hello: True,  # the two ends encrypt what they send each other
        )

    def __enter__(self) -> "Relay":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all connections."""
        self._admission.close()
        with self._lock:
            self._is_closed = True
            calls = [end for call in self._calls.values() for end in (call.caller, call.taker)]
            listeners = [listener.connection for listener in self._listeners.values()]
            ends = [*listeners, *filter(None, calls), *self._joined]
        for end in ends:
            end.close()

    def _enter(self, connection: Connection[RelayHello]) -> None:
        connections.keep_alive(connection.sock)
        act = {"listen": self._keep, "call": self._bring, "take": self._take}
        target = act[connection.hello.role]
        threading.Thread(target=target, args=(connection,), daemon=True).start()

    def _keep(self, connection: Connection[RelayHello]) -> None:
        """Keeps a process that can be called, until it goes or a younger one of its name calls."""
        name = connection.hello.name
        listener = _Listener(connection, time.monotonic() - connection.hello.age_s)
        with self._lock:
            other = self._listeners.get(name)
            is_younger = listener.is_as_young_as(other)
            if is_younger:
                self._listeners[name] = listener
        if other is not None:
            replaced = other.connection if is_younger else connection
            with contextlib.suppress(OSError):
                if not listener.is_same(other):
                    replaced.send(records.encode(Replaced()))
            replaced.close()
        if not is_younger:
            return
        self._say(f"{name} can be called")
        with contextlib.suppress(OSError, ValueError):
            connection.receive()  # it says nothing: this waits for its end
        with self._lock:
            is_newest = self._listeners.get(name) is listener
            if is_newest:
                del self._listeners[name]
        connection.close()
        if is_newest and not self._is_closed:
            self._say(f"{name} has gone")

    def _bring(self, caller: Connection[RelayHello]) -> None:
        """Joins a caller with the process that it wants."""
        call, ticket = _Call(caller), secrets.token_hex(16)
        with self._lock:
            listener = self._listeners.get(caller.hello.name)
            self._calls[ticket] = call
        try:
            if listener is None:
                problem = f"{caller.hello.name} has not called this relay"
                caller.send(records.encode(JoinedCall(problem=problem)))
                return
            listener.connection.send(records.encode(Ticket(ticket=ticket)))
            call.is_taken.wait(TAKE_S)
            with self._lock:
                del self._calls[ticket]
                if call.taker is not None and not self._is_closed:
                    self._joined.update((caller, call.taker))
            if call.taker is None:
                problem = f"{caller.hello.name} does not take calls"
                caller.send(records.encode(JoinedCall(problem=problem)))
                return
            if self._is_closed:
                return
            caller.send(records.encode(JoinedCall()))
            self._join(caller, call.taker)
        except OSError:
            pass  # an end has gone, which the other one hears
        finally:
            ends = [end for end in (caller, call.taker) if end is not None]
            with self._lock:
                self._calls.pop(ticket, None)
                self._joined.difference_update(ends)
            for end in ends:
                end.close()

    def _take(self, taker: Connection[RelayHello]) -> None:
        with self._lock:
            call = self._calls.get(taker.hello.name)
            is_first = call is not None and call.taker is None
            if call is not None and is_first:
                call.taker = taker
        if call is None or not is_first:
            taker.close()  # too late
        else:
            call.is_taken.set()

    def _join(self, *ends: Connection[RelayHello]) -> None:
        """Passes bytes on in both directions, until both have ended."""
        there, back = (end.sock for end in ends)
        other_way = threading.Thread(target=_pass_on, args=(back, there), daemon=True)
        other_way.start()
        _pass_on(there, back)
        other_way.join()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    """Passes on what comes until it ends; then the target's end has come, too."""
    buffer = memoryview(bytearray(PIECE_BYTES))
    try:
        while count := source.recv_into(buffer):
            target.sendall(buffer[:count])
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for end in (source, target):
            connections.shut(end)
