"""Connects a process with those that it shares something with, and connects them again.

The process with the lower number calls the other, unless only the other can call. The two open
several connections, over the network of their link, so that every NIC of both nodes carries some.

A connection that is lost while both processes live is made anew in the same way. The hello of such
a call names the session of the process that is called: a process that has started again is another
one. It also says how much the caller has received; the first message of the other end says the
same of itself. If the process that does not call has lost a connection, it asks to be called: it
calls, and hangs up. A port that refuses tells both that the other process has died.
"""

import contextlib
import itertools
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from socket import socket
from typing import Any

from holmesjax.config.sections import Encrypt
from holmesjax.errors import HolmesError, PeerError, RefusedError
from holmesjax.plan.processes import Process, fabric_between
from holmesjax.topology import windows
from holmesjax.topology.machines import Topology
from holmesjax.transport import addresses, connections, handshake, records
from holmesjax.transport.admission import Admission
from holmesjax.transport.connections import Connection
from holmesjax.transport.outbox import Again, Position, call_s
from holmesjax.transport.ports import Book, Ports, nic, nics_of, streams_over
from holmesjax.transport.records import Record
from holmesjax.transport.relayed import RelayedPort, RelayPlace


@dataclass(frozen=True, kw_only=True)
class NeighbourHello(Record):
    """The hello of a process to another with which it shares arrays.

    `again` in a hello of a process that is called asks for a call: its attempt is the last call
    that this process has heard.
    """

    kind = "neighbour"
    process: int
    about: dict[str, Any]  # what must be equal at both ends, by name
    digests: dict[str, str]  # of what is shared with each process, by its number
    streams: dict[str, int]  # connections with each process, by its number
    session: str  # of this process, until its end
    stream: int | None = None  # the number of this connection; only the caller has one
    again: Again | None = None  # where one is made anew


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
    min_streams: int  # connections between two processes; more where that would not fill the link
    timeout_s: float  # for all to come
    encrypt: Encrypt = "auto"  # which connections are encrypted
    calls_out: Collection[str] = ()  # clusters whose processes others cannot call
    relay: RelayPlace | None = None  # by which processes of two such clusters meet

    def calls(self, peer: Process) -> bool:
        """Whether this process calls a peer, which then does not call this one."""
        if self.can_call(peer) != self.can_be_called_by(peer):
            return self.can_call(peer)
        return self.me.number < peer.number

    def can_call(self, peer: Process) -> bool:
        """Whether the network lets this process call a peer."""
        return peer.cluster == self.me.cluster or peer.cluster not in self.calls_out

    def can_be_called_by(self, peer: Process) -> bool:
        """Whether the network lets a peer call this process."""
        return peer.cluster == self.me.cluster or self.me.cluster not in self.calls_out

    def meets_at_relay(self, peer: Process) -> bool:
        """Whether this process and a peer call each other through the relay."""
        is_cut_off = not (self.can_call(peer) or self.can_be_called_by(peer))
        return self.relay is not None and is_cut_off

    def encrypts(self, peer: Process, book: Mapping[int, Book]) -> bool:
        """Whether the connections with a process are encrypted; both ends find the same.

        `auto` means those between clusters, unless both processes are on this machine's loopback.

        Args:
          peer: the other process.
          book: addresses of both processes, by their numbers.
        """
        if self.meets_at_relay(peer):
            return True
        if self.encrypt != "auto":
            return self.encrypt == "always"
        if peer.cluster == self.me.cluster:
            return False
        fabric = fabric_between(self.topology, self.me, peer)
        ends = [nics_of(book[end.number], end, fabric) for end in (self.me, peer)]
        return not all(addresses.is_loopback(address) for end in ends for address, _ in end)

    def num_streams(self, peer: Process, book: Mapping[int, Book]) -> int:
        """The number of connections with a process, over the network of their link.

        Args:
          peer: the other process.
          book: addresses of both processes, by their numbers.
        """
        fabric = fabric_between(self.topology, self.me, peer)
        nics = (len(nics_of(book[end.number], end, fabric)) for end in (peer, self.me))
        filling = windows.streams_that_fill(*self._fill(peer))
        return streams_over(max(self.min_streams, filling), *nics)

    def window_bytes(self, peer: Process, streams: int) -> int:
        """Bytes that each connection with a process must have on their way."""
        return windows.window_bytes(*self._fill(peer), streams)

    def _fill(self, peer: Process) -> tuple[float, float]:
        """The rate and the round trip of the link with a process."""
        ends = self.me.node, peer.node
        ways = [self.topology.link(*ends), self.topology.link(*reversed(ends))]
        rate_bytes_per_s = max(way.bandwidth_bytes_per_s for way in ways)
        return rate_bytes_per_s, self.topology.round_trip_s(*ends)


class Meeting:
    """The connections with every process that has a digest, until it is closed.

    Args:
      rendezvous: the parties; its ports are closed with the meeting.
      book: where this process and those that it shares something with listen, by their numbers.
      digests: for each process that something is shared with, of what is shared.
      streams: connections with each of them; both ends must say the same.
      enter: takes a process number, the number of a stream, and the connection.
      drop: told which connection of its own the other end has lost.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        *,
        book: Mapping[int, Book],
        digests: Mapping[int, str],
        streams: Mapping[int, int],
        enter: Callable[[int, int, Connection[NeighbourHello]], None],
        drop: Callable[[int, int], None],
    ):
        self._rendezvous, self._book = rendezvous, book
        self._me, self._processes = rendezvous.me, rendezvous.processes
        self._digests, self._streams = digests, streams
        self._plain = {
            other for other in digests if not rendezvous.encrypts(self._processes[other], book)
        }
        self._enter_connection, self._drop = enter, drop
        self._present: set[tuple[int, int]] = set()  # process and stream
        self._sessions: dict[int, str] = {}  # of the others
        self._attempts: Counter[tuple[int, int]] = Counter()  # the last call of a stream
        self._calls: dict[tuple[int, int], Connection[NeighbourHello]] = {}  # that nobody took yet
        self._refused: dict[int, str] = {}
        self._is_closed = False
        self._changed = threading.Condition()
        self._admissions: list[Admission[NeighbourHello]] = []
        self._relayed: RelayedPort | None = None
        self._hello = NeighbourHello(
            process=self._me.number,
            about=dict(rendezvous.about),
            digests={str(other): digest for other, digest in digests.items()},
            streams={str(other): count for other, count in streams.items()},
            session=secrets.token_hex(8),
        )

    def hold(self) -> None:
        """Connects with all.

        Raises:
          HolmesError: neither of two processes can call the other.
          PeerError: a process does not come.
          RefusedError: it does, and something differs; the message has both values.
        """
        me, rendezvous = self._me, self._rendezvous
        for other in self._digests:
            peer = self._processes[other]
            reaches = rendezvous.can_call(peer) or rendezvous.meets_at_relay(peer)
            if not (reaches or rendezvous.can_be_called_by(peer)):
                raise HolmesError(
                    "distributed.calls_out",
                    "two clusters that send to each other can both not be called",
                    found=f"{me.cluster}, {peer.cluster}",
                    fix="open a range of ports (distributed.ports) into one of them, or start a "
                    "relay where both can call it (distributed.relay)",
                )
        deadline_s = time.monotonic() + rendezvous.timeout_s
        for sock in itertools.chain(*rendezvous.ports.sockets.values()):
            admission = Admission(
                sock,
                key=rendezvous.key,
                hello=self._hello,
                expected=NeighbourHello,
                check=self._check_caller,
                enter=self._let_in,
                may_be_plain=lambda hello: hello.process in self._plain,
                num_callers=sum(self._streams.values()),
            )
            self._admissions.append(admission)
        peers = [self._processes[other] for other in sorted(self._digests)]
        if rendezvous.relay and any(map(rendezvous.meets_at_relay, peers)):
            self._relayed = RelayedPort(
                rendezvous.relay, name_at_relay(me), key=rendezvous.key, take=admission.bring
            )
        for peer in filter(rendezvous.calls, peers):
            for stream in range(self._streams[peer.number]):
                address, port, source = self._way(peer.number, stream)
                try:
                    connection = connections.connect(
                        address,
                        port,
                        key=rendezvous.key,
                        hello=replace(self._hello, stream=stream),
                        expected=NeighbourHello,
                        check=self._check,
                        where=between(me, peer),
                        timeout_s=max(deadline_s - time.monotonic(), 0.0),
                        source=source,
                        encrypt=peer.number not in self._plain,
                    )
                except PeerError as error:
                    error.peer = peer.number
                    raise
                self._enter(stream, connection)
        self._wait(deadline_s)

    def close(self) -> None:
        """Lets nobody in any more: whoever has lost a connection is refused."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._relayed is not None:
            self._relayed.close()
        for admission in self._admissions:
            admission.close()
        self._rendezvous.ports.close()
        with self._changed:
            for connection in self._calls.values():
                connection.close()

    def _is_to_call(self, number: int) -> bool:
        return self._rendezvous.calls(self._processes[number])

    def _way(self, number: int, stream: int) -> tuple[str, int, str | None]:
        """Returns address and port of a stream at a process, and the address here, if it counts."""
        peer = self._processes[number]
        if self._rendezvous.relay and self._rendezvous.meets_at_relay(peer):
            return *self._rendezvous.relay.of(name_at_relay(peer)), None
        fabric = fabric_between(self._rendezvous.topology, self._me, peer)
        address, port = nic(self._book[number], peer, fabric, stream)
        return address, port, nic(self._rendezvous.ports.local, self._me, fabric, stream)[0]

    def _check(self, hello: NeighbourHello) -> str | None:
        """Returns what is wrong with a process at the other end, if anything."""
        number = hello.process
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
        if hello.session != self._sessions.get(number, hello.session):
            return f"{name} is another process than the one that came first"
        return None

    def _check_caller(self, hello: NeighbourHello) -> str | None:
        """Returns what is wrong with a process that calls, if anything."""
        if (reason := self._check(hello)) is not None:
            return reason
        way, name = (hello.process, hello.stream), self._processes[hello.process].name
        if hello.again is None:
            is_due = not self._is_to_call(hello.process) and way not in self._present
            if not is_due or hello.stream not in range(self._streams[hello.process]):
                count = self._streams[hello.process]
                return f"stream {hello.stream} of {name} is none of {count}, or is there already"
        elif hello.again.session != self._hello.session:
            return f"{name} had its connection with another process than {self._me.name} is now"
        elif way not in self._present:
            return f"stream {hello.stream} of {name} was never there"
        return None

    def _let_in(self, connection: Connection[NeighbourHello]) -> None:
        with contextlib.suppress(OSError):  # a loss is heard of where it is read
            addresses.keep_on_nic(connection.sock)
        if connection.hello.again is not None:
            self._let_in_again(connection)
            return
        assert connection.hello.stream is not None, "the check has let it in"
        self._enter(connection.hello.stream, connection)

    def _enter(self, stream: int, connection: Connection[NeighbourHello]) -> None:
        number = connection.hello.process
        self._sessions[number] = connection.hello.session
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

    # ---- a connection is lost ------------------------------------------------------------------

    def again(
        self, number: int, stream: int, position: Position, left_s: Callable[[], float]
    ) -> tuple[socket, Position]:
        """Makes a lost connection anew; returns it, and how much the other end has received.

        Args:
          number: of the other process.
          stream: the connection.
          position: how much this end has received.
          left_s: asked again and again for the seconds that are left; negative: none.

        Raises:
          ConnectionRefusedError: the other process has died, or is another one.
          OSError: there is none in time.
        """
        problem: Exception = TimeoutError("no call")
        for attempt in itertools.count():
            if left_s() <= 0 or self._is_closed:
                raise ConnectionError(f"in vain called again: {problem}")
            try:
                if self._is_to_call(number):
                    return self._call_again(number, stream, position, left_s())
                peer = self._processes[number]
                if self._rendezvous.can_call(peer) or self._rendezvous.meets_at_relay(peer):
                    self._call(number, stream, position, left_s()).close()  # asks for a call
            except ConnectionRefusedError:
                raise
            except (OSError, ValueError, RecursionError) as error:
                problem = error
            except RefusedError as error:
                raise ConnectionRefusedError(error.found) from None
            pause_s = min(connections.pause_after(attempt), max(left_s(), 0.0))
            with self._changed:
                is_there = lambda: self._is_closed or (number, stream) in self._calls
                self._changed.wait_for(is_there, pause_s)
                connection = self._calls.pop((number, stream), None)
            if connection is not None:
                try:
                    connection.send(records.encode(position))
                except OSError as error:
                    problem = error
                    connection.close()
                    continue
                assert connection.hello.again is not None, "the check has let it in"
                return connection.sock, connection.hello.again.position
        raise AssertionError("the last call returns or raises")

    def _call(
        self, number: int, stream: int, position: Position, left_s: float
    ) -> Connection[NeighbourHello]:
        address, port, source = self._way(number, stream)
        again = Again(
            session=self._sessions[number],
            attempt=self._attempts[number, stream],
            position=position,
        )
        talk = handshake.call(
            self._rendezvous.key,
            replace(self._hello, stream=stream, again=again),
            NeighbourHello,
            self._check,
            between(self._me, self._processes[number]),
        )
        # No attempt takes long: the first packets of a connection are sent again ever later.
        deadline_s = time.monotonic() + min(left_s, call_s(address))
        return connections.call(
            address,
            port,
            source=source,
            talk=talk,
            deadline_s=deadline_s,
            encrypt=None if number in self._plain else self._rendezvous.key,
        )

    def _call_again(
        self, number: int, stream: int, position: Position, left_s: float
    ) -> tuple[socket, Position]:
        self._attempts[number, stream] += 1
        connection = self._call(number, stream, position, left_s)
        try:
            connection.sock.settimeout(call_s(self._way(number, stream)[0]))
            theirs = records.decode_as(connection.receive(), Position)
            connection.sock.settimeout(None)
        except BaseException:
            connection.close()
            raise
        return connection.sock, theirs

    def _let_in_again(self, connection: Connection[NeighbourHello]) -> None:
        """Takes a call for a connection that was lost, or asks for it to be called again."""
        hello = connection.hello
        assert hello.again is not None, "that is why it comes here"
        assert hello.stream is not None, "the check has let it in"
        way, attempt = (hello.process, hello.stream), hello.again.attempt
        if self._is_to_call(hello.process):  # asks for a call
            connection.close()
            if attempt >= self._attempts[way]:  # the newest connection is the one that it lost
                self._drop(*way)
            return
        if attempt <= self._attempts[way]:
            connection.close()  # an old call, which has been on its way for long
            return
        self._attempts[way] = attempt
        self._drop(*way)
        with self._changed:
            if (older := self._calls.pop(way, None)) is not None:
                older.close()
            self._calls[way] = connection
            self._changed.notify_all()


def name_at_relay(process: Process) -> str:
    """The name under which a process is called through a relay."""
    return f"process {process.number}"


def between(source: Process, target: Process) -> str:
    """Names the link from one process to another, for errors."""
    link = f"{source.cluster} -> {target.cluster}"
    return f"link {link}, from {source.name} to {target.name}"
