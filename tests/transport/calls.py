"""Calls between two processes that are both here."""

from dataclasses import dataclass

from holmesjax.transport import connections
from holmesjax.transport.records import Record

KEY = bytes(range(32))


@dataclass(frozen=True, kw_only=True)
class Named(Record):
    kind = "named"
    name: str
    number: int = 0


GUEST = Named(name="guest")


DEADLINE_S = 60.0  # for what must come: a hang guard


def call_at(
    address,
    key=KEY,
    check=lambda hello: None,
    hello=GUEST,
    timeout_s=DEADLINE_S,
    source=None,
    encrypt=True,
):
    return connections.connect(
        *address,
        key=key,
        hello=hello,
        expected=Named,
        check=check,
        where="a to b",
        timeout_s=timeout_s,
        source=source,
        encrypt=encrypt,
    )
