"""Connects a process with those that it shares something with.

The process with the lower number calls the other. The two open several connections, over the
network of their link, so that every NIC of both nodes carries some.
"""

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from socket import socket
from typing import Any

from holmesjax.errors import HolmesError, PeerError
from holmesjax.plan.processes import Process, fabric_between
from holmesjax.topology.machines import Topology
from holmesjax.transport import connections
from holmesjax.transport.admission import Admission
from holmesjax.transport.connections import Connection
from holmesjax.transport.records import Record

Book = Mapping[str, Sequence[tuple[str, int]]]  # fabric -> address and port of each NIC


@dataclass(frozen=True, kw_only=True)
class NeighbourHello(Record):
    """The hello of a process to another with which it shares arrays."""

    kind = "neighbour"
    process: int
    about: dict[str, Any]  # what must be equal at both ends, by name
    digests: dict[str, str]  # of what is shared with each process, by its number
    streams: dict[str, int]  # connections with each process, by its number
    stream: int | None = None  # the number of this connection; only the caller has one


class Ports:
    """Listening sockets. They are open before JAX is up, so that others can be told the ports."""

    def __init__(self, sockets: Mapping[str, Sequence[socket]]):
        self.sockets = sockets

    @classmethod
    def open(cls, addresses: Mapping[str, Sequence[str]]) -> "Ports":
        """Listens on a free port of each address: fabric -> addresses of this node's NICs.

        Raises HolmesError for an address that is not of this machine.
        """
        with ExitStack() as opened:
            sockets = {
                fabric: [opened.enter_context(connections.listen(address)) for address in found]
                for fabric, found in addresses.items()
            }
            opened.pop_all()
        return cls(sockets)

    @property
    def book(self) -> dict[str, list[tuple[str, int]]]:
        return {
            name: [connections.address_of(s) for s in found] for name, found in self.sockets.items()
        }

    def close(self) -> None:
        for sock in itertools.chain(*self.sockets.values()):
            sock.close()


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """The parties that a process may meet, and how it meets those that it shares something with."""

    me: Process  # this process, one of `processes`
    processes: Sequence[Process]
    topology: Topology
    ports: Ports  # where this process listens; closed once it has met all
    look_up: Callable[[Sequence[int]], Mapping[int, Book]]  # where some processes listen
    key: bytes  # of the job
    about: Mapping[str, Any]  # what must be equal at both ends of a connection, by name
    min_streams: int  # connections between two processes; there are more where nodes have more NICs
    timeout_s: float  # for all to come

    def num_streams(self, peer: Process, book: Mapping[int, Book]) -> int:
        """The number of connections with a process, over the network of their link.

        Args:
          peer: the other process.
          book: addresses of both processes, by their numbers.
        """
        fabric = fabric_between(self.topology, self.me, peer)
        nics = (len(_nics(book[end.number], end, fabric)) for end in (peer, self.me))
        return streams_over(self.min_streams, *nics)


def meet(
    rendezvous: Rendezvous,
    *,
    book: Mapping[int, Book],
    digests: Mapping[int, str],
    streams: Mapping[int, int],
    enter: Callable[[int, int, Connection[NeighbourHello]], None],
) -> None:
    """Connects with every process that has a digest; then nobody is let in any more.

    Args:
      rendezvous: the parties; its ports are closed at the end.
      book: where this process and those that it shares something with listen, by their numbers.
      digests: for each process that something is shared with, of what is shared.
      streams: connections with each of them; both ends must say the same.
      enter: takes a process number, the number of a stream, and the connection.

    Raises:
      PeerError: a process does not come.
      RefusedError: it does, and something differs; the message has both values.
    """
    _Meeting(rendezvous, digests, streams, enter).hold(book)


class _Meeting:
    """The state that calls and callers share."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        digests: Mapping[int, str],
        streams: Mapping[int, int],
        enter: Callable[[int, int, Connection[NeighbourHello]], None],
    ):
        self._rendezvous = rendezvous
        self._me, self._processes = rendezvous.me, rendezvous.processes
        self._digests, self._streams, self._enter_connection = digests, streams, enter
        self._present: set[tuple[int, int]] = set()  # process and stream
        self._refused: dict[int, str] = {}
        self._changed = threading.Condition()

    def hold(self, book: Mapping[int, Book]) -> None:
        me, rendezvous = self._me, self._rendezvous
        deadline_s = time.monotonic() + rendezvous.timeout_s
        hello = NeighbourHello(
            process=me.number,
            about=dict(rendezvous.about),
            digests={str(other): digest for other, digest in self._digests.items()},
            streams={str(other): count for other, count in self._streams.items()},
        )
        with ExitStack() as admissions:
            self._admissions = [
                admissions.enter_context(
                    Admission(
                        sock,
                        key=rendezvous.key,
                        hello=hello,
                        expected=NeighbourHello,
                        check=self._check,
                        enter=self._let_in,
                        num_callers=sum(self._streams.values()),
                    )
                )
                for sock in itertools.chain(*rendezvous.ports.sockets.values())
            ]
            above = [self._processes[other] for other in sorted(self._digests) if other > me.number]
            ways = [(peer, s) for peer in above for s in range(self._streams[peer.number])]
            for peer, stream in ways:
                fabric = fabric_between(rendezvous.topology, me, peer)
                address, port = nic(book[peer.number], peer, fabric, stream)
                try:
                    connection = connections.connect(
                        address,
                        port,
                        key=rendezvous.key,
                        hello=replace(hello, stream=stream),
                        expected=NeighbourHello,
                        check=self._check,
                        where=between(me, peer),
                        timeout_s=max(deadline_s - time.monotonic(), 0.0),
                        source=nic(book[me.number], me, fabric, stream)[0],
                    )
                except PeerError as error:
                    error.peer = peer.number
                    raise
                self._enter(peer.number, stream, connection)
            self._wait(deadline_s)

    def _check(self, hello: NeighbourHello) -> str | None:
        """Returns what is wrong with a process at the other end, if anything."""
        number, stream = hello.process, hello.stream
        if number not in self._digests:
            return f"{self._me.name} shares nothing with process {number}"
        name = self._processes[number].name
        to_me = str(self._me.number)
        theirs = {
            **hello.about,
            "crossings": hello.digests.get(to_me),
            "streams": hello.streams.get(to_me),
        }
        count = self._streams[number]
        mine = {**self._rendezvous.about, "crossings": self._digests[number], "streams": count}
        differences = [
            f"{what} is {mine.get(what)!r} in {self._me.name} and {theirs.get(what)!r} in {name}"
            for what in mine | theirs
            if mine.get(what) != theirs.get(what)
        ]
        if differences:
            self._refused[number] = "; ".join(differences)
            return self._refused[number]
        is_caller = number < self._me.number
        if is_caller and (stream not in range(count) or (number, stream) in self._present):
            return f"stream {stream} of {name} is none of {count}, or is there already"
        return None

    def _let_in(self, connection: Connection[NeighbourHello]) -> None:
        stream = connection.hello.stream
        assert stream is not None, "the check has let it in"
        self._enter(connection.hello.process, stream, connection)

    def _enter(self, number: int, stream: int, connection: Connection[NeighbourHello]) -> None:
        self._enter_connection(number, stream, connection)
        with self._changed:
            self._present.add((number, stream))
            self._changed.notify_all()

    def _wait(self, deadline_s: float) -> None:
        """Waits for the processes that call."""
        wanted = {(other, s) for other, count in self._streams.items() for s in range(count)}
        with self._changed:
            self._changed.wait_for(
                lambda: wanted <= self._present, max(deadline_s - time.monotonic(), 0.0)
            )
            missing = sorted({number for number, _ in wanted - self._present})
        if missing:
            names = ", ".join(self._processes[number].name for number in missing)
            reasons = [self._refused[number] for number in missing if number in self._refused]
            reasons += [
                f"{self._me.name} {admission.trouble}"
                for admission in self._admissions
                if admission.trouble
            ]
            raise PeerError(
                self._me.name,
                f"{names} did not connect for {self._rendezvous.timeout_s:g} s",
                found="; ".join(reasons) or "no call",
                fix="see the log of that process, and that the network lets it reach this one",
                peer=missing[0],
            )


def between(source: Process, target: Process) -> str:
    """Names the link from one process to another, for errors."""
    link = f"{source.cluster} -> {target.cluster}"
    return f"link {link}, from {source.name} to {target.name}"


def streams_over(at_least: int, *nics: int) -> int:
    """Returns a number of connections with which all NICs of both nodes carry some.

    The NICs of the node with more NICs carry equally many.

    >>> streams_over(4, 1, 1), streams_over(4, 8, 2), streams_over(4, 3, 1)
    (4, 8, 6)
    """
    return -(-at_least // max(nics)) * max(nics)


def nic(book: Book, process: Process, fabric: str, stream: int) -> tuple[str, int]:
    """Returns the NIC of a stream of a process, from the process's own book."""
    found = _nics(book, process, fabric)
    return found[stream % len(found)]


def _nics(book: Book, process: Process, fabric: str) -> Sequence[tuple[str, int]]:
    found = book.get(fabric)
    if not found:
        raise HolmesError(
            "HOLMES_ADDRESSES",
            f"has no address of {process.node} on {fabric}",
            found=dict(book),
            fix=f'add "{fabric}": ["..."]',
        )
    return found
