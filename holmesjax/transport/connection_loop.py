"""Many authenticated connections, heard and served by one thread.

No call waits for another end: what a connection does not take at once is sent when it does.
"""

import contextlib
import functools
import selectors
import socket
import threading
import time
import traceback
from collections.abc import Callable

from holmesjax.transport import connections
from holmesjax.transport.connections import Connection, Message

CLOSE_S = 1.0  # for the last words to go


class Line:
    """One connection."""

    def __init__(self, connection: Connection):
        self.connection = connection
        self.heard_s = self.took_s = time.monotonic()  # when it said, and took, something last
        self.is_over = False
        self._note: Callable[[], object] = lambda: None  # to whoever serves it: look here
        self._sock = connection.sock
        self._sock.setblocking(False)
        self._reader = connections.Reader(self._sock, connections.MESSAGE_LIMIT_BYTES)
        self._rest = bytearray()  # that the connection has not taken yet
        self._lock = threading.Lock()

    def send(self, data: bytes) -> None:
        """Sends bytes of `connections.encode`, from any thread, unless the connection has ended."""
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
        """Has what it cannot send noted; `note` is called once at the beginning."""
        with self._lock:
            self._note = note
            note()

    def flush(self) -> bool:
        """Whether all that was to be sent has gone."""
        with self._lock:
            self._push()
            return not self._rest

    def close(self) -> None:
        with self._lock:
            self.is_over = True
            self.connection.close()

    @property
    def has_rest(self) -> bool:
        return bool(self._rest)

    def read(self) -> Message | None:
        """As `connections.Reader`."""
        return self._reader.read()

    def _push(self) -> None:
        try:
            while self._rest:
                del self._rest[: self._put(self._rest)]
                self.took_s = time.monotonic()
        except BlockingIOError:
            pass

    def _put(self, data: bytes | bytearray) -> int:
        """How many bytes the connection takes; all of them where it is broken: reading says why."""
        try:
            return self._sock.send(data)
        except BlockingIOError:
            raise
        except OSError:
            return len(data)


class Lines:
    """All of them, until it is closed.

    Args:
      hear: takes each message, on the thread of the lines.
      lose: told once, there, that a connection has ended, or is silent (a TimeoutError).
      silence_s: how long one may say nothing, or take nothing that is sent.
    """

    def __init__(
        self,
        hear: Callable[[Line, Message], object],
        lose: Callable[[Line, Exception], object],
        silence_s: float,
    ):
        self._hear, self._lose, self._silence_s = hear, lose, silence_s
        self._lines: dict[Line, None] = {}
        self._silent: dict[Line, None] = {}  # told of, and not heard any more
        self._noted: dict[Line, None] = {}  # news for the thread: new, or with something to send
        self._lock = threading.Lock()
        self._is_closing = False
        self._selector = selectors.DefaultSelector()
        self._wakers = socket.socketpair()
        self._wakers[0].setblocking(False)
        self._wakers[1].setblocking(False)
        self._selector.register(self._wakers[0], selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="lines", daemon=True)
        self._thread.start()

    def add(self, line: Line) -> None:
        """Serves it from now on."""
        line.serve_by(functools.partial(self._take_note, line))

    def _take_note(self, line: Line) -> None:
        with self._lock:
            self._noted[line] = None
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
        for line in noted:
            if line.is_over or line in self._silent:
                continue
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.has_rest else 0)
            if line in self._lines:
                self._selector.modify(line.connection.sock, events, line)
            else:
                self._lines[line] = None
                self._selector.register(line.connection.sock, events, line)

    def _serve(self, line: Line, events: int) -> None:
        if events & selectors.EVENT_WRITE and line.flush():
            self._selector.modify(line.connection.sock, selectors.EVENT_READ, line)
        if events & selectors.EVENT_READ:
            try:
                while (message := line.read()) is not None:
                    line.heard_s = time.monotonic()
                    self._hear(line, message)
            except Exception as error:  # what one end says ends no other
                if not isinstance(error, OSError | ValueError):
                    traceback.print_exception(error)
                self._forget(line)
                line.close()
                self._lose(line, error)

    def _end_silent(self) -> None:
        now_s = time.monotonic()
        for line in list(self._lines):
            since_s = line.heard_s if not line.has_rest else min(line.heard_s, line.took_s)
            if now_s - since_s > self._silence_s:
                self._forget(line)
                self._silent[line] = None  # it may still hear
                self._lose(line, TimeoutError(f"silent for {self._silence_s:g} s"))

    def _forget(self, line: Line) -> None:
        del self._lines[line]
        self._selector.unregister(line.connection.sock)

    def _end_all(self) -> None:
        self._take_news()
        deadline_s = time.monotonic() + CLOSE_S
        waiting = [line for line in self._lines if line.has_rest]
        while waiting and time.monotonic() < deadline_s:
            time.sleep(0.01)
            waiting = [line for line in waiting if not line.flush()]
        for line in (*self._lines, *self._silent):
            line.close()
        self._selector.close()
        for sock in self._wakers:
            sock.close()
