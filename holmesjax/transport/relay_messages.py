"""The messages between a relay and its callers, and the key that they share.

    a process -> the relay    RelayHello "listen": it can be called by this name
    the relay -> the process  Replaced: a younger one has this name, and it is to call no more
    a caller -> the relay     RelayHello "call": it wants the process of this name
    the relay -> the process  Ticket: somebody calls
    a process -> the relay    RelayHello "take": this connection is for the caller of a ticket
    the relay -> the caller   JoinedCall: what follows comes from the process

From there on the relay passes bytes on, of which it understands none: both ends verify each other
by the key of the job and encrypt, as on a connection without a relay. The relay has a key that is
derived from that of the job, from which that of the job cannot be found. No JAX.
"""

import hmac
from dataclasses import dataclass
from typing import Literal

from holmesjax.transport.records import Record

Role = Literal["listen", "call", "take"]


@dataclass(frozen=True, kw_only=True)
class RelayHello(Record):
    """The hello of a caller of the relay; it holds a name, or a ticket in order to take a call.

    The younger is called of two that listen by one name, such as a process and the one that follows
    it. `age_s` is for how long it has been there: the clocks of two hosts may be apart. One that
    calls again has the same `session`.
    """

    kind = "relay call"
    role: Role
    name: str
    age_s: float = 0.0
    session: str = ""


@dataclass(frozen=True, kw_only=True)
class RelayWelcome(Record):
    """The hello of the relay."""

    kind = "relay"


@dataclass(frozen=True, kw_only=True)
class Ticket(Record):
    """Tells a process that somebody calls it."""

    kind = "ticket"
    ticket: str


@dataclass(frozen=True, kw_only=True)
class Replaced(Record):
    """Tells a process that another one has its name."""

    kind = "replaced"


@dataclass(frozen=True, kw_only=True)
class JoinedCall(Record):
    """Tells a caller whether it is joined with the process that it wants, or why not."""

    kind = "joined"
    problem: str = ""


def relay_key(key: bytes) -> bytes:
    """The key of the relays of a job, from the key of the job."""
    return hmac.digest(key, b"key of the relay", "sha256")
