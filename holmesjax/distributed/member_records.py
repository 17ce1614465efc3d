"""The controller's records of its members, and its ends of the links with them. No JAX.

A link may have several connections, one after the other (`member_link`). What is sent meanwhile is
kept for the next.
"""

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from holmesjax.distributed.messages import MemberHello
from holmesjax.plan.processes import Process
from holmesjax.runtime.step_timeout import Activity
from holmesjax.transport import connections
from holmesjax.transport.connection_loop import LoopConnection
from holmesjax.transport.connections import Connection
from holmesjax.transport.outbox import Outbox, Position
from holmesjax.transport.records import encode

# A member that hears of the end of its connection calls again within a round trip.
RETURN_S = 5.0


@dataclass(eq=False)
class Seat:
    """The controller's record of one member."""

    process: Process
    connection: LoopConnection | None = None  # the newest
    status: str = "had not come"
    work: Activity = "step"
    step: int = 0  # that it is at, or has validated or saved after
    num_begun: int = 0  # steps, batches of validation and checkpoints
    num_done: int = 0  # programs and layers, before the first step
    arrived: int = -1  # the newest round of islands by mailbox that it has
    addresses: dict[str, Any] | None = None
    unproven: str | None = None  # what the attention kernels lack on its host
    answered: int = 0  # the number of the last question that it has answered
    waits_in: str = ""  # the function of JAX in which its main thread waited then, if it did
    session: str = ""  # of its process
    received: int = 0  # messages
    attempt: int = 0  # the last call for a lost connection
    has_left: bool = False  # it said goodbye
    away_until_s: float | None = None  # for it to call again; None: it is connected
    is_back: bool = False  # and has not been sent a heartbeat since
    is_lost: bool = False  # it has not come back
    outbox: Outbox[None] = field(default_factory=Outbox)
    lock: threading.RLock = field(default_factory=threading.RLock)  # for the link

    def send(self, data: bytes) -> None:
        """Sends bytes of `connections.pack`, now or over the next connection, if it has come."""
        with self.lock:
            if self.connection is not None and not self.is_lost:
                self.outbox.add(None, [memoryview(data)])
                self.connection.send(data)

    @property
    def is_open(self) -> bool:
        """Whether it is connected."""
        return self.connection is not None and not self.connection.is_over

    @property
    def is_here(self) -> bool:
        """Whether it has come and may still be heard, over this connection or the next."""
        return self.is_open or self.is_away

    @property
    def is_away(self) -> bool:
        """Whether its connection has ended, and it has time to come back."""
        return self.away_until_s is not None

    def lose(self, connection: LoopConnection, error: Exception, timeout_s: float) -> bool:
        """Notes the end of a connection; returns whether the member is lost.

        The network is up if the end was heard of, so a member that lives comes back at once. But
        the end of a connection through a relay may be the relay's, which then has to start again.
        """
        with self.lock:
            if connection is not self.connection:
                return False  # it has another one
            if not isinstance(error, OSError) or self.has_left:
                self.is_lost = True
            elif isinstance(error, ConnectionError) and not connection.is_relayed:
                self.away_until_s = time.monotonic() + min(RETURN_S, timeout_s)
            else:
                self.away_until_s = connection.heard_s + timeout_s
            return self.is_lost

    def is_overdue(self) -> bool:
        """Notes whether its time to come back is up; true once."""
        with self.lock:
            if self.away_until_s is None or time.monotonic() < self.away_until_s:
                return False
            self.away_until_s, self.is_lost = None, True
            return True

    def refuses(self, hello: MemberHello, session: str) -> str | None:
        """Says why a member cannot go on with its link in this session of the controller."""
        assert hello.again is not None, "it comes back"
        if hello.again.session != session:
            return "it was a process of another start of the job"
        if hello.session != self.session:
            return f"it is another process than the one that was {self.process.name}"
        if self.is_lost:
            return "it has come back too late"
        return None

    def go_on(self, connection: Connection[MemberHello]) -> LoopConnection | None:
        """Goes on with a new connection; returns it, unless the call is an old one.

        Raises ValueError if the member cannot have received what it says.
        """
        again = connection.hello.again
        assert again is not None, "it comes back"
        with self.lock:
            if again.attempt <= self.attempt or self.is_lost:
                return None
            assert self.connection is not None, "it has come before"
            self.outbox.received(again.position.messages)
            rest = self.outbox.rest(again.position)
            connections.shut(self.connection.sock)  # if it has not ended yet
            self.attempt, self.away_until_s = again.attempt, None
            self.connection = LoopConnection(connection)
            position = Position(messages=self.received)
            self.connection.send(connections.pack(encode(position)))
            for message in rest:
                self.connection.send(b"".join(message))
            self.is_back = True
            return self.connection
