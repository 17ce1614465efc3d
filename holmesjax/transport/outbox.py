"""Messages of a link, kept until the other end has received them: a lost connection loses nothing.

They are numbered in each direction, over all of its connections. An end that opens a
new connection says its `Position`: what it has received (`Again`). The other end says the same of
itself. Each sends what comes after that. No JAX, no I/O.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from holmesjax.transport import addresses
from holmesjax.transport.records import Record

CALL_S, RELAYED_CALL_S = 3.0, 10.0  # for one attempt to make a lost connection anew

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Position(Record):
    """How much of one direction of a link has been received."""

    kind = "position"
    messages: int = 0  # whole
    num_bytes: int = 0  # of the next message


@dataclass(frozen=True, kw_only=True)
class Again(Record):
    """The part of a hello that makes a lost connection anew."""

    kind = "again"
    session: str  # of the other end: a process that has started again has another one
    attempt: int  # counts the calls of this link
    position: Position  # how much this end has received


def call_s(address: str) -> float:
    """Seconds for one attempt to make a connection anew: a dozen round trips by way of a relay.

    >>> call_s("10.0.0.1"), call_s("process 3@relay.example.org")
    (3.0, 10.0)
    """
    return RELAYED_CALL_S if addresses.RELAYED in address else CALL_S


class Outbox(Generic[T]):
    """One direction of a link at its sender. A lock of the caller's guards it."""

    def __init__(self) -> None:
        self._kept: deque[tuple[T, Sequence[memoryview], int]] = deque()  # the last: its size
        self._first = 0  # number of the first message that is kept
        self.num_bytes = 0  # that are kept

    @property
    def number(self) -> int:
        """The number of the next message."""
        return self._first + len(self._kept)

    def add(self, what: T, buffers: Sequence[memoryview]) -> None:
        """Keeps a message: what it is, and its bytes, which must not change meanwhile."""
        size = _size(buffers)
        self._kept.append((what, buffers, size))
        self.num_bytes += size

    def received(self, count: int) -> list[T]:
        """Drops the messages before number `count`, and returns those that were kept till now.

        Raises ValueError if not so many were sent.
        """
        if count > self.number:
            raise ValueError(f"{count} messages were received, and {self.number} were sent")
        dropped = []
        while self._first < count:
            what, _, size = self._kept.popleft()
            self._first += 1
            self.num_bytes -= size
            dropped.append(what)
        return dropped

    def rest(self, position: Position) -> list[list[memoryview]]:
        """Returns the bytes of each message behind a position, for a new connection.

        Raises ValueError if the other end cannot have received so much, or so little.
        """
        first, num_bytes = position.messages, position.num_bytes
        rest = [list(buffers) for _, buffers, _ in self._kept]
        if not self._first <= first <= self.number or num_bytes < 0:
            raise ValueError(f"goes on at {position}, of messages {self._first} to {self.number}")
        del rest[: first - self._first]
        if num_bytes:
            if not rest or num_bytes >= _size(rest[0]):
                raise ValueError(f"goes on at {position}, behind the end of that message")
            rest[0] = skip(rest[0], num_bytes)
        return rest


def skip(buffers: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """Returns buffers without their first bytes, and without empty ones before the rest.

    >>> [bytes(rest) for rest in skip([memoryview(b"ab"), memoryview(b"cd")], 3)]
    [b'd']
    """
    index = 0
    while index < len(buffers) and num_bytes >= len(buffers[index]):
        num_bytes -= len(buffers[index])
        index += 1
    rest = list(buffers[index:])
    if num_bytes:
        rest[0] = rest[0][num_bytes:]
    return rest


def _size(buffers: Sequence[memoryview]) -> int:
    return sum(map(len, buffers))
