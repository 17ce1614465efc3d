"""Finds the processes that one shares something with: where all listen, and who calls whom.

Of two processes the one with the lower number calls. They open several connections, over the
network of their link, so many that every NIC of both nodes carries some.
"""

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from socket import socket
from typing import Any

from holmesjax.errors import HolmesError, PeerError
from holmesjax.plan.processes import Process, fabric_between
from holmesjax.topology.machines import Topology
from holmesjax.transport import connections
from holmesjax.transport.admission import Admission

Book = Mapping[str, Sequence[tuple[str, int]]]  # fabric -> address and port of each NIC


class Ports:
    """Listening sockets on some addresses, so that others can be told where before JAX is up."""

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


def meet(
    *,
    me: Process,
    processes: Sequence[Process],
    topology: Topology,
    ports: Ports,
    book: Mapping[int, Book],
    key: bytes,
    about: Mapping[str, Any],
    digests: Mapping[int, str],
    streams: Mapping[int, int],
    timeout_s: float,
    enter: Callable[[int, int, connections.Connection], None],
) -> None:
    """Connects with every process that has a digest; then nobody is let in any more.

    Args:
      me: this process, one of `processes`.
      ports: where it listens; closed at the end.
      book: where it and those that it shares something with do, by their numbers.
      key: of the job.
      about: what must be equal everywhere, by name.
      digests: for each process that something is shared with, of what is shared.
      streams: connections with each of them; both ends must say the same.
      timeout_s: for all of it.
      enter: takes a process number, the number of a stream, and the connection.

    Raises:
      PeerError: a process does not come.
      RefusedError: it does, and something differs; the message has both values.
    """
    _Meeting(me, processes, about, digests, streams, enter).hold(
        topology, ports, book, key, timeout_s
    )


class _Meeting:
    """What the two ways to be connected, to call and to be called, have in common."""

    def __init__(
        self,
        me: Process,
        processes: Sequence[Process],
        about: Mapping[str, Any],
        digests: Mapping[int, str],
        streams: Mapping[int, int],
        enter: Callable[[int, int, connections.Connection], None],
    ):
        self._me, self._processes, self._digests = me, processes, digests
        self._about, self._streams, self._enter_connection = about, streams, enter
        self._present: set[tuple[int, int]] = set()  # process and stream
        self._refused: dict[int, str] = {}
        self._changed = threading.Condition()

    def hold(
        self,
        topology: Topology,
        ports: Ports,
        book: Mapping[int, Book],
        key: bytes,
        timeout_s: float,
    ) -> None:
        me, deadline_s = self._me, time.monotonic() + timeout_s
        hello = {
            "process": me.number,
            "about": self._about,
            "digests": {str(other): digest for other, digest in self._digests.items()},
            "streams": {str(other): count for other, count in self._streams.items()},
        }
        with ExitStack() as admissions:
            self._admissions = [
                admissions.enter_context(
                    Admission(
                        sock,
                        key=key,
                        hello=hello,
                        check=self._check,
                        enter=self._let_in,
                        expected=sum(self._streams.values()),
                    )
                )
                for sock in itertools.chain(*ports.sockets.values())
            ]
            above = [self._processes[other] for other in sorted(self._digests) if other > me.number]
            ways = [(peer, s) for peer in above for s in range(self._streams[peer.number])]
            for peer, stream in ways:
                fabric = fabric_between(topology, me, peer)
                address, port = nic(book[peer.number], peer, fabric, stream)
                connection = connections.connect(
                    address,
                    port,
                    key=key,
                    hello={**hello, "stream": stream},
                    check=self._check,
                    where=between(me, peer),
                    timeout_s=max(deadline_s - time.monotonic(), 0.0),
                    source=nic(book[me.number], me, fabric, stream)[0],
                )
                self._enter(peer.number, stream, connection)
            self._wait(deadline_s, timeout_s)

    def _check(self, hello: connections.Message) -> str | None:
        """What is wrong with a process at the other end."""
        number, stream = int(hello["process"]), hello.get("stream")
        if number not in self._digests:
            return f"{self._me.name} shares nothing with process {number}"
        name = self._processes[number].name
        to_me = str(self._me.number)
        theirs = {
            **hello["about"],
            "crossings": hello["digests"].get(to_me),
            "streams": hello["streams"].get(to_me),
        }
        count = self._streams[number]
        mine = {**self._about, "crossings": self._digests[number], "streams": count}
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

    def _let_in(self, connection: connections.Connection) -> None:
        self._enter(connection.hello["process"], connection.hello["stream"], connection)

    def _enter(self, number: int, stream: int, connection: connections.Connection) -> None:
        self._enter_connection(number, stream, connection)
        with self._changed:
            self._present.add((number, stream))
            self._changed.notify_all()

    def _wait(self, deadline_s: float, timeout_s: float) -> None:
        """For those that call."""
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
                f"{names} did not connect for {timeout_s:g} s",
                found="; ".join(reasons) or "no call",
                fix="see the log of that process, and that the network lets it reach this one",
            )


def between(source: Process, target: Process) -> str:
    """The link from one process to another, as errors name it."""
    link = f"{source.cluster} -> {target.cluster}"
    return f"link {link}, from {source.name} to {target.name}"


def num_streams(
    topology: Topology, me: Process, peer: Process, book: Mapping[int, Book], at_least: int
) -> int:
    """The number of connections between two processes, over the network of their link.

    Args:
      topology: source of the fabric between the two.
      me, peer: the two processes.
      book: addresses of each process, by its number.
      at_least: the fewest connections, however few NICs there are.
    """
    fabric = fabric_between(topology, me, peer)
    nics = (len(_nics(book[end.number], end, fabric)) for end in (peer, me))
    return streams_over(at_least, *nics)


def streams_over(at_least: int, *nics: int) -> int:
    """So many connections that all NICs of both nodes carry some.

    Those of the node that has more of them carry equally many.

    >>> streams_over(4, 1, 1), streams_over(4, 8, 2), streams_over(4, 3, 1)
    (4, 8, 6)
    """
    return -(-at_least // max(nics)) * max(nics)


def nic(book: Book, process: Process, fabric: str, stream: int) -> tuple[str, int]:
    """Where a stream of a process begins or ends; the book is its own."""
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
