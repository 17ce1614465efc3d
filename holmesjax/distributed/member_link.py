"""A member's end of its link with the controller, over as many connections as that takes. No JAX.

If the connection is lost, the member calls again at once, and goes on until the controller has been
silent for too long. A port that refuses means that the controller has ended. What either end has
not received is sent again (`transport.outbox`).
"""

import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Mapping
from typing import Any

from holmesjax.distributed.messages import TAKEN, ControllerHello, MemberHello
from holmesjax.errors import RefusedError, may_pass
from holmesjax.transport import connections, handshake, records
from holmesjax.transport.connections import Connection
from holmesjax.transport.outbox import Again, Outbox, Position, call_s
from holmesjax.transport.records import Message

TAKEN_S = 5.0  # until the controller is asked again for the place of a process


class MemberLink:
    """A link; connects when it is made.

    Args:
      address, port: of the controller.
      key: of the job.
      hello: of the member.
      where: what is connected with what, for errors.
      timeout_s: how long the controller may be silent.
      start_timeout_s: how long it may take to come.

    Raises PeerError and RefusedError as `connections.connect` does.
    """

    def __init__(
        self,
        address: str,
        port: int,
        *,
        key: bytes,
        hello: MemberHello,
        where: str,
        timeout_s: float,
        start_timeout_s: float,
    ):
        self._address, self._port, self._key, self._hello = address, port, key, hello
        self._where, self._timeout_s = where, timeout_s
        self._outbox: Outbox[None] = Outbox()
        self._received = self._attempts = 0
        self._lock = threading.Lock()
        self._is_up, self._is_closed = True, False
        self._connection = self._joined(time.monotonic() + start_timeout_s)
        self.session = self._connection.hello.session  # of the controller: a start of the job
        self._use(self._connection)
        self._heard_s = time.monotonic()

    def _joined(self, deadline_s: float) -> Connection[ControllerHello]:
        """The first connection. It waits where the controller has not missed its predecessor yet.

        Whoever starts processes may replace one that has ended before the controller knows why.
        """
        while True:
            try:
                return connections.connect(
                    self._address,
                    self._port,
                    key=self._key,
                    hello=self._hello,
                    expected=ControllerHello,
                    check=lambda hello: None,
                    where=self._where,
                    timeout_s=max(deadline_s - time.monotonic(), 0.0),
                )
            except RefusedError as error:
                if not str(error.found).endswith(TAKEN):
                    raise
                if time.monotonic() + TAKEN_S > deadline_s:
                    raise may_pass(error) from None
            time.sleep(TAKEN_S)

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message, once there is a connection. Raises OSError if there will be none."""
        with self._lock:
            if self._is_closed:
                raise ConnectionError(connections.CLOSED)
            data = connections.pack({**message, "received": self._received})
            self._outbox.add(None, [memoryview(data)])
            if self._is_up:
                self._put(data)

    def receive(self) -> Message:
        """Returns the next message; from one thread.

        Raises OSError if the controller has ended or is silent, ValueError for what is no message.
        """
        while True:
            try:
                message = self._connection.receive()
            except OSError as error:
                try:
                    self._call_again(error)
                except OSError:
                    self._is_closed = True
                    raise
                continue
            self._heard_s = time.monotonic()
            with self._lock:
                self._received += 1
            return message

    def delivered(self, count: int) -> None:
        """Takes word of how many messages the controller has received."""
        with self._lock:
            self._outbox.received(count)

    def close(self) -> None:
        self._is_closed = True
        self._connection.close()

    def _use(self, connection: Connection[ControllerHello]) -> None:
        self._connection = connection
        # Half: the system may notice the end of a cut much later than a new call does.
        connection.sock.settimeout(self._timeout_s / 2)

    def _put(self, data: bytes | memoryview) -> None:
        """Sends bytes; a connection that takes them no more is for the receiving thread to mend."""
        try:
            self._connection.sock.sendall(data)
        except OSError:
            self._is_up = False
            connections.shut(self._connection.sock)

    def _call_again(self, error: OSError) -> None:
        """Makes the connection anew. Raises OSError if that cannot be."""
        connections.shut(self._connection.sock)  # wakes a thread that sends
        with self._lock:
            self._is_up = False
            self._connection.close()
        began_s = time.monotonic()
        for attempt in itertools.count():
            left_s = self._heard_s + self._timeout_s - time.monotonic()
            if left_s <= 0:
                is_silence = isinstance(error, TimeoutError) and error.errno is None
                raise TimeoutError(f"silent for {self._timeout_s:g} s") if is_silence else error
            if self._is_closed:
                raise error
            try:
                self._go_on(min(left_s, call_s(self._address)))
            except ConnectionRefusedError:
                raise ConnectionError(f"{error}; nobody listens there any more") from None
            except RefusedError as refused:
                raise ConnectionError(f"{error}; {refused.found}") from None
            except (OSError, ValueError, RecursionError):
                time.sleep(min(connections.pause_after(attempt), left_s))
            else:
                lost_s = time.monotonic() - began_s
                what = f"{self._where}: the connection was lost ({error})"
                connections.warn(f"{what}, and goes on after {lost_s:.1f} s")
                return

    def _go_on(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        self._attempts += 1
        again = Again(
            session=self.session,
            attempt=self._attempts,
            position=Position(messages=self._received),
        )
        hello = dataclasses.replace(self._hello, again=again)
        talk = handshake.call(self._key, hello, ControllerHello, self._check, self._where)
        connection = connections.call(
            self._address, self._port, talk=talk, deadline_s=deadline_s, encrypt=self._key
        )
        with contextlib.ExitStack() as stack:
            stack.callback(connection.close)
            connection.sock.settimeout(timeout_s)
            position = records.decode_as(connection.receive(), Position)
            with self._lock:
                if self._is_closed:
                    raise ConnectionError(connections.CLOSED)
                self._outbox.received(position.messages)
                rest = self._outbox.rest(position)
                self._use(connection)
                self._is_up = True
                for data in itertools.chain(*rest):
                    self._put(data)
            stack.pop_all()

    def _check(self, hello: ControllerHello) -> str | None:
        if hello.session != self.session:
            return "it is another start of the job"
        return None
