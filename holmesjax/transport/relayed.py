"""A process that others call through a relay. No JAX."""

import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from holmesjax.errors import HolmesError
from holmesjax.transport import addresses, connections, records
from holmesjax.transport.connections import Connection
from holmesjax.transport.relay_messages import (
    RelayHello,
    RelayWelcome,
    Replaced,
    Role,
    Ticket,
    relay_key,
)

CALL_S = 10.0  # for the relay to answer
FROM_RELAY = records.by_kind(Ticket, Replaced)


class RelayPlace(NamedTuple):
    """The address and the port of a relay."""

    address: str
    port: int

    @classmethod
    def of_setting(cls, relay: str | None) -> "RelayPlace | None":
        """The place that `distributed.relay` names.

        >>> RelayPlace.of_setting("relay.example.org:7443").of("process 3")
        ('process 3@relay.example.org', 7443)
        """
        return None if relay is None else cls(*addresses.parse(relay))

    def of(self, name: str) -> tuple[str, int]:
        """The address and the port under which a process of this name is called."""
        return f"{name}{addresses.RELAYED}{self.address}", self.port


class RelayedPort:
    """Takes the calls that come through a relay, until it is closed; calls the relay again if lost.

    A process of this name that is younger ends it, too.

    Args:
      relay: where the relay is.
      name: the name under which this process is called.
      key: of the job.
      take: takes the socket of each call, as if it had come to a port here.
      warn: told when the relay cannot be reached, and when it is there again; and once where a call
        could not be taken.
    """

    def __init__(
        self,
        relay: RelayPlace,
        name: str,
        *,
        key: bytes,
        take: Callable[[socket.socket], object],
        warn: Callable[[str], object] = connections.warn,
    ):
        self._relay, self._name, self._key = relay, name, relay_key(key)
        self._take, self._warn = take, warn
        self._born_s, self._session = now_s(), secrets.token_hex(8)
        self._connection: Connection[RelayWelcome] | None = None
        self._closed, self._has_missed = threading.Event(), False
        threading.Thread(target=self._run, name="relayed port", daemon=True).start()

    def close(self) -> None:
        """Takes no more calls; the thread ends by itself, where it waits for a silent relay."""
        self._closed.set()
        if self._connection is not None:
            self._connection.close()

    def _run(self) -> None:
        place, attempt, warned = addresses.show(*self._relay), 0, False
        while not self._closed.is_set():
            try:
                self._connection = self._call("listen", self._name)
                with self._connection.sock:
                    connections.keep_alive(self._connection.sock)
                    if warned:
                        self._warn(f"the relay at {place} is there again")
                    attempt, warned = 0, False
                    self._listen(self._connection)
            except (OSError, ValueError, HolmesError) as error:
                if not (warned or self._closed.is_set()):
                    text = " ".join(str(error).split()) or type(error).__name__
                    self._warn(f"{self._name} cannot be called through the relay: {text}")
                    warned = True
            self._closed.wait(connections.pause_after(attempt))
            attempt += 1

    def _listen(self, connection: Connection[RelayWelcome]) -> None:
        while not self._closed.is_set():
            message = records.decode(connection.receive(), FROM_RELAY)
            if isinstance(message, Ticket):
                # Others that call meanwhile do not wait for this one.
                target, ticket = self._answer, message.ticket
                threading.Thread(target=target, args=(ticket,), daemon=True).start()
            else:
                self._warn(f"another process is called as {self._name} from now on")
                self._closed.set()

    def _answer(self, ticket: str) -> None:
        try:
            sock = self._call("take", ticket).sock
        except (OSError, ValueError, HolmesError) as error:
            if not self._has_missed:
                self._has_missed = True
                text = " ".join(str(error).split())
                self._warn(f"{self._name} could not take a call through the relay: {text}")
            return
        self._take(sock)

    def _call(self, role: Role, name: str) -> Connection[RelayWelcome]:
        age_s, session = now_s() - self._born_s, self._session
        hello = RelayHello(role=role, name=name, age_s=age_s, session=session)
        return connections.connect_relay(*self._relay, self._key, hello, CALL_S)


def now_s() -> float:
    """Seconds since this machine began, also while it slept, which `time.monotonic` leaves out."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
