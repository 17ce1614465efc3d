"""Many authenticated connections, heard and served by one thread.

No call waits for another end. Bytes that a connection does not take at once are sent later.
"""

import contextlib
import functools
import selectors
import socket
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from holmesjax.transport import connections
from holmesjax.transport.connections import Connection
from holmesjax.transport.records import Message

CLOSE_S = 1.0  # for the last words to go


class SilentError(Exception):
    """A connection has said or taken nothing for too long."""


class LoopConnection:
    """A connection of the loop."""

    def __init__(self, connection: Connection[Any]):
        self.sock, self.is_relayed = connection.sock, connection.is_relayed
        self._connection = connection
        self.heard_s = self.took_s = time.monotonic()  # when it said, and took, something last
        self.is_over = False
        self._note: Callable[[], object] = lambda: None  # to whoever serves it: look here
        self.sock.setblocking(False)
        self._reader = connections.Reader(self.sock, connections.MESSAGE_LIMIT_BYTES)
        self._rest = bytearray()  # that the connection has not taken yet
        self._lock = threading.Lock()

    def send(self, data: bytes) -> None:
        """Sends bytes of `connections.pack`, from any thread, unless the connection has ended."""
        with self._lock:
            if self.is_over:
                return
            if self._rest:
                self._rest += data
                return
            self.took_s = time.monotonic()
            with contextlib.suppress(BlockingIOError):
                data = data[self._put(data) :]
            if data:
                self._rest += data
                self._note()

    def serve_by(self, note: Callable[[], object]) -> None:
        """Calls `note` once now, and whenever bytes cannot be sent at once."""
        with self._lock:
            self._note = note
            note()

    def flush(self) -> bool:
        """Sends what the connection takes; returns whether everything has gone."""
        with self._lock:
            self._push()
            return not self._rest

    def close(self) -> None:
        with self._lock:
            self.is_over = True
            self._connection.close()

    @property
    def has_rest(self) -> bool:
        return bool(self._rest)

    def read(self) -> Message | None:
        """Reads one message, as `connections.Reader` does."""
        return self._reader.read()

    def _push(self) -> None:
        try:
            while self._rest:
                del self._rest[: self._put(self._rest)]
                self.took_s = time.monotonic()
        except BlockingIOError:
            pass

    def _put(self, data: bytes | bytearray) -> int:
        """Sends bytes; returns their number. A broken connection takes all: reading says why."""
        try:
            return self.sock.send(data)
        except BlockingIOError:
            raise
        except OSError:
            return len(data)


class ConnectionLoop:
    """Serves connections until it is closed.

    Args:
      hear: takes each message, on the thread of the loop.
      lose: told once, there, that a connection has ended, or is silent (a SilentError).
      silence_s: how long one may say nothing, or take nothing that is sent.
    """

    def __init__(
        self,
        hear: Callable[[LoopConnection, Message], object],
        lose: Callable[[LoopConnection, Exception], object],
        silence_s: float,
    ):
        self._hear, self._lose, self._silence_s = hear, lose, silence_s
        self._connections: dict[LoopConnection, None] = {}
        self._silent: dict[LoopConnection, None] = {}  # reported, and not heard any more
        self._noted: dict[
            LoopConnection, None
        ] = {}  # news for the thread: new, or with something to send
        self._lock = threading.Lock()
        self._is_closing = False
        self._selector = selectors.DefaultSelector()
        self._wakers = socket.socketpair()
        self._wakers[0].setblocking(False)
        self._wakers[1].setblocking(False)
        self._selector.register(self._wakers[0], selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="connections", daemon=True)
        self._thread.start()

    def add(self, connection: LoopConnection) -> None:
        """Serves a connection from now on."""
        connection.serve_by(functools.partial(self._take_note, connection))

    def _take_note(self, connection: LoopConnection) -> None:
        with self._lock:
            self._noted[connection] = None
        self._wake()

    def close(self) -> None:
        """Ends all connections, once they have taken what is sent, or a second later."""
        self._is_closing = True
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it has been woken often enough, or is closed
            self._wakers[1].send(b"x")

    def _run(self) -> None:
        looks_s = self._silence_s / 16
        next_s = time.monotonic() + looks_s
        while not self._is_closing:
            for key, events in self._selector.select(max(next_s - time.monotonic(), 0.0)):
                if key.data is None:
                    self._take_news()
                else:
                    self._serve(key.data, events)
            if time.monotonic() >= next_s:
                self._end_silent()
                next_s = time.monotonic() + looks_s
        self._end_all()

    def _take_news(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wakers[0].recv(4096)
        with self._lock:
            noted, self._noted = self._noted, {}
        for connection in noted:
            if connection.is_over or connection in self._silent:
                continue
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.has_rest else 0)
            if connection in self._connections:
                self._selector.modify(connection.sock, events, connection)
            else:
                self._connections[connection] = None
                self._selector.register(connection.sock, events, connection)
                # The system does not show what TLS has read already.
                self._serve(connection, selectors.EVENT_READ)

    def _serve(self, connection: LoopConnection, events: int) -> None:
        if events & selectors.EVENT_WRITE and connection.flush():
            self._selector.modify(connection.sock, selectors.EVENT_READ, connection)
        if events & selectors.EVENT_READ:
            try:
                while (message := connection.read()) is not None:
                    connection.heard_s = time.monotonic()
                    self._hear(connection, message)
            except Exception as error:  # what one end says ends no other
                if not isinstance(error, OSError | ValueError):
                    traceback.print_exception(error)
                self._forget(connection)
                connection.close()
                self._lose(connection, error)

    def _end_silent(self) -> None:
        now_s = time.monotonic()
        for connection in list(self._connections):
            since_s = (
                connection.heard_s
                if not connection.has_rest
                else min(connection.heard_s, connection.took_s)
            )
            if now_s - since_s > self._silence_s:
                self._forget(connection)
                self._silent[connection] = None  # it may still hear
                self._lose(connection, SilentError(f"silent for {self._silence_s:g} s"))

    def _forget(self, connection: LoopConnection) -> None:
        del self._connections[connection]
        self._selector.unregister(connection.sock)

    def _end_all(self) -> None:
        self._take_news()
        deadline_s = time.monotonic() + CLOSE_S
        waiting = [connection for connection in self._connections if connection.has_rest]
        while waiting and time.monotonic() < deadline_s:
            time.sleep(0.01)
            waiting = [connection for connection in waiting if not connection.flush()]
        for connection in (*self._connections, *self._silent):
            connection.close()
        self._selector.close()
        for sock in self._wakers:
            sock.close()
