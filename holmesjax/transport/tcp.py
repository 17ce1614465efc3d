"""Moves arrays between the processes of a plan, over TCP connections of our own.

    source: offer -> [copy to the host] -> wait for PULL -> DATA straight from the array's memory
    target: expect -> PULL, a few arrays ahead -> memory that JAX takes over -> arrived -> fetch

This module moves bytes: it has the memory, the threads and the failures. `pull` decides who asks
for which array when, `crossing_ends` what a process sends and receives of a crossing. `frames` has
the connections, `rendezvous` opens them. The executor waits only in `wait`, in `close`, and in a
`fetch` of an array that has not arrived.
"""

import functools
import hashlib
import itertools
import json
import queue
import socket
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from holmesjax.errors import PeerError
from holmesjax.layer_specs.array_boxes import Box, from_index, shape_of, within
from holmesjax.parallel import first_calls, platforms
from holmesjax.plan.plan import Plan
from holmesjax.plan.processes import Process
from holmesjax.transport import socket_buffers
from holmesjax.transport.buffers import BufferPool, runs_of
from holmesjax.transport.connections import Connection
from holmesjax.transport.crossing_ends import End, make_end, size_of
from holmesjax.transport.crossings import Crossing, Key
from holmesjax.transport.frames import Channel, Frame, Packet, ViolationError
from holmesjax.transport.outbox import Position
from holmesjax.transport.pull import Shared, Source, Target, Traffic
from holmesjax.transport.rendezvous import Meeting, NeighbourHello, Rendezvous, between
from holmesjax.units import show

LOST_THERE = "the other end has lost the connection"


@dataclass(eq=False)
class Sending:
    """The memory of an offered array."""

    end: End
    copies: dict[int, jax.Array]  # by device, on their way to the host
    pieces: dict[int, np.ndarray] | None = None  # by number, once they are there


@dataclass(eq=False)
class Receiving:
    """The memory of an array on its way here."""

    end: End
    blocks: dict[Box, np.ndarray]  # of each box that a device holds
    views: dict[int, np.ndarray]  # of each piece, by number
    array: jax.Array | None = None  # once all is here


@dataclass(eq=False)
class Peer:
    """A process with which this one shares pieces."""

    process: Process
    num_streams: int
    window_bytes: int  # that each connection must have on their way
    channels: dict[int, Channel] = field(default_factory=dict)  # by stream
    packets: deque[Packet] = field(default_factory=deque)  # to send
    lost: set[int] = field(default_factory=set)  # streams without a connection
    lost_from_s: float = 0.0  # when the first of them was lost
    num_mended: int = 0  # since then
    is_narrow: bool = False  # whether it was said that the kernel grants less

    @property
    def has_left(self) -> bool:
        return any(channel.has_left for channel in self.channels.values())


class LinkLoss(NamedTuple):
    """Connections of a link that were lost and made anew, as the receiving end counts them."""

    connections: int
    lost_s: float  # the longest time that one of them was lost


class Timeouts(NamedTuple):
    """How long a transport waits for others, in seconds."""

    silence_s: float  # for a connection on which nothing is heard, and for the last deliveries
    pull_s: float  # for an array, while its sender is alive and no data comes


class TcpTransport:
    """A transport between the processes of a plan.

    Args:
      plan, crossings: the same in every process.
      mesh: of this process's stage.
      rendezvous: this process and the others, and how they meet.
      timeouts: how long it waits for others.
      on_failure: told of the first failure, on the thread that noticed it.
      advance: called when bytes of an array have come, on the threads that receive: an array may
        take longer over a slow link than a step may take without a sign of progress.

    Raises:
      PeerError: a neighbour does not come.
      RefusedError: it does, and is of another plan, version or job.
    """

    def __init__(
        self,
        plan: Plan,
        crossings: Sequence[Crossing],
        mesh: Mesh,
        *,
        rendezvous: Rendezvous,
        timeouts: Timeouts,
        on_failure: Callable[[Exception], object] = lambda error: None,
        advance: Callable[[], object] = lambda: None,
    ):
        self._me = me = rendezvous.me
        self._timeouts, self._on_failure, self._advance = timeouts, on_failure, advance
        processes = rendezvous.processes
        self._devices = dict(zip(plan.stages[me.stage].devices, mesh.devices.flat, strict=True))
        self._ends: dict[str, End] = {}
        self._by_index: dict[int, End] = {}
        shared: dict[int, list[Any]] = defaultdict(list)  # by process: all that crosses between us
        for index, crossing in enumerate(crossings):
            end = make_end(index, crossing, me, plan, processes, mesh)
            if end is None:
                continue  # between other stages
            self._ends[crossing.name] = self._by_index[index] = end
            for number, piece in (end.sends | end.receives).items():
                other = piece.target if piece.source == me.number else piece.source
                shared[other].append((index, asdict(crossing), number, piece))
        self._pool = BufferPool()
        self._sending: dict[Key, Sending] = {}
        self._receiving: dict[Key, Receiving] = {}
        self._bytes: Counter[str] = Counter()
        self._losses: dict[str, LinkLoss] = {}
        self._error: Exception | None = None
        self._has_finished = self._is_closing = False
        self._changed = threading.Condition()
        self._meeting: Meeting | None = None
        self._peers: dict[int, Peer] = {}
        self._peer_of: dict[Channel, Peer] = {}
        self._turn = itertools.count()
        self._staging: queue.SimpleQueue[tuple[Key, Sending] | None] = queue.SimpleQueue()
        self._stager = threading.Thread(target=self._stage, name="stager", daemon=True)
        self._stager.start()
        try:
            book = rendezvous.look_up([me.number, *sorted(shared)])
            for other in shared:
                count = rendezvous.num_streams(processes[other], book)
                window_bytes = rendezvous.window_bytes(processes[other], count)
                self._peers[other] = Peer(processes[other], count, window_bytes)
            traffic = [self._traffic(end) for end in self._by_index.values()]
            self._source, self._target = Source(traffic), Target(traffic)
            # Whoever is heard at other times than it promises would seem lost.
            about = {**rendezvous.about, "silence_s": timeouts.silence_s}
            self._meeting = Meeting(
                replace(rendezvous, about=about),
                book=book,
                digests={other: _digest(what) for other, what in shared.items()},
                streams={other: peer.num_streams for other, peer in self._peers.items()},
                enter=self._enter,
                drop=self._drop,
            )
            self._meeting.hold()
            self._raise_failure()
        except BaseException:
            self._end()
            rendezvous.ports.close()
            raise

    def _traffic(self, end: End) -> Traffic:
        size = lambda piece: size_of(piece.box, end.crossing)
        streams = lambda peer: self._peers[peer].num_streams
        return Traffic(
            index=end.index,
            name=end.crossing.name,
            sends={
                i: Shared(piece.target, size(piece), streams(piece.target))
                for i, piece in end.sends.items()
            },
            receives={
                i: Shared(piece.source, size(piece), streams(piece.source))
                for i, piece in end.receives.items()
            },
        )

    def _enter(self, number: int, stream: int, connection: Connection[NeighbourHello]) -> None:
        """Takes a connection, whose heartbeat counts from now on."""
        peer = self._peers[number]
        self._widen(peer, connection.sock)
        reconnect = functools.partial(self._reconnect, peer, stream)
        silence_s = self._timeouts.silence_s
        channel = Channel(connection.sock, self, silence_s, peer.packets, reconnect, self._advance)
        with self._changed:
            if self._is_closing:
                connection.close()
                return
            peer.channels[stream] = channel
            self._peer_of[channel] = peer
            channel.start()

    def _drop(self, number: int, stream: int) -> None:
        """Gives up a connection that its other end has lost."""
        self._peers[number].channels[stream].drop(ConnectionResetError(LOST_THERE))

    def _reconnect(
        self, peer: Peer, stream: int, channel: Channel, position: Position, loss: OSError
    ) -> tuple[socket.socket, Position]:
        """Makes a lost connection anew, and says so. Raises OSError if that cannot be."""
        assert self._meeting is not None, "it has made the connection"
        with self._changed:
            if not peer.lost:
                peer.lost_from_s, peer.num_mended = time.monotonic(), 0
            peer.lost.add(stream)
        left_s = lambda: 0.0 if channel.is_closed else channel.left_s
        try:
            sock, theirs = self._meeting.again(peer.process.number, stream, position, left_s)
        except OSError as error:
            if isinstance(loss, TimeoutError) and loss.errno is None:
                # The other end is silent, on all connections.
                raise TimeoutError(f"silent for {self._timeouts.silence_s:g} s") from None
            raise ConnectionError(f"{loss}; {error}") from None
        self._widen(peer, sock)
        with self._changed:
            lost_s = time.monotonic() - peer.lost_from_s
            peer.lost.remove(stream)
            peer.num_mended += 1
            for link in self._links_from(peer):
                known = self._losses.get(link, LinkLoss(0, 0.0))
                self._losses[link] = LinkLoss(known.connections + 1, max(known.lost_s, lost_s))
            is_last, count = not peer.lost, peer.num_mended
        if is_last:
            print(
                f"warning: {between(peer.process, self._me)}: {count} of {peer.num_streams} "
                f"connections were lost ({loss}), and go on after {lost_s:.1f} s",
                flush=True,
            )
        return sock, theirs

    def _widen(self, peer: Peer, sock: socket.socket) -> None:
        """Gives a connection the buffers that its link needs, or says once what limits them."""
        granted = socket_buffers.widen(sock, peer.window_bytes)
        if granted is None or granted >= peer.window_bytes or peer.is_narrow:
            return
        peer.is_narrow = True
        print(
            f"warning: {between(peer.process, self._me)}: the kernel lets each of "
            f"{peer.num_streams} connections have {show(granted, 'B')} on their way, and the link "
            f"needs {show(peer.window_bytes, 'B')}: see docs/long_links.md",
            flush=True,
        )

    def _links_from(self, peer: Peer) -> set[str]:
        number = peer.process.number
        return {
            end.crossing.link
            for end in self._by_index.values()
            if any(piece.source == number for piece in end.receives.values())
        }

    # ---- the executor's calls ------------------------------------------------------------------

    def offer(self, key: Key, array: jax.Array) -> None:
        """Announces an array. It must not be donated before others have received all of it."""
        end = self._ends[key.crossing]
        crossing = end.crossing
        assert array.shape == crossing.shape, f"{key}: {array.aval}"
        assert array.dtype == np.dtype(crossing.dtype), f"{key}: {array.aval}"
        assert end.here.is_equivalent_to(array.sharding, array.ndim), f"{key}: {array.sharding}"
        with self._changed:
            self._raise_failure()
            if not self._source.offer(key):
                return  # other processes have the same bytes, and send them
            data = {shard.device: shard.data for shard in array.addressable_shards}
            copies = {
                device: platforms.start_copy_to_host(data[self._devices[device]])
                for device in set(end.senders.values())
            }
            self._sending[key] = sending = Sending(end, copies)
        self._staging.put((key, sending))

    def expect(self, keys: Sequence[Key]) -> None:
        """Announces the next fetches, in their order."""
        with self._changed:
            self._ask(self._target.expect(keys))

    def ask(self, keys: Sequence[Key]) -> None:
        """Asks for arrays that are fetched some steps later; they come while steps go on."""
        with self._changed:
            self._ask(self._target.expect_later(keys))

    def arrived(self, key: Key) -> bool:
        """Whether a fetch would not wait."""
        return self._target.arrived(key)

    def wait(self, keys: Collection[Key]) -> None:
        """Returns when one of the arrays has arrived. Raises PeerError if none can."""
        start_s = time.monotonic()
        with self._changed:
            for key in keys:
                self._ask(self._target.hurry(key))
            while not any(map(self.arrived, keys)):
                self._raise_failure()
                late = self._late(next(iter(keys)), start_s)
                if isinstance(late, PeerError):
                    break
                self._changed.wait(late)
            else:
                return
        self._fail(late)
        raise self._error or late

    def fetch(self, key: Key) -> jax.Array:
        """Returns an array, laid out for its target; each key once. Waits if it has not arrived."""
        if not self.arrived(key):
            self.wait([key])
        with self._changed:
            receiving = self._receiving.pop(key)
            self._ask(self._target.take(key))
        assert receiving.array is not None
        return receiving.end.rebuild(receiving.array)

    def take_bytes(self) -> dict[str, int]:
        """Returns the bytes received over each link since the last call."""
        with self._changed:
            taken, self._bytes = dict(self._bytes), Counter()
        return taken

    def take_losses(self) -> dict[str, LinkLoss]:
        """Returns, for each link, what was lost and made anew since the last call."""
        with self._changed:
            taken, self._losses = self._losses, {}
        return taken

    def finish(self) -> None:
        """Nothing more is fetched here: who leaves from now on is not missed."""
        with self._changed:
            self._has_finished = True

    def close(self) -> None:
        """Returns when all offered arrays have been delivered, or nobody can ask for them.

        After `finish` all others must have finished, too: it waits for no delivery then.
        """
        deadline_s = time.monotonic() + self._timeouts.silence_s
        with self._changed:
            is_owing, self._has_finished = not self._has_finished, True
            if is_owing:
                self._changed.wait_for(
                    lambda: self._error or not self._undelivered(), deadline_s - time.monotonic()
                )
        if self._error is None:
            for channel in self._peer_of:
                channel.leave()
            for channel in self._peer_of:
                channel.is_over.wait(max(deadline_s - time.monotonic(), 0.0))
        self._end()

    def _undelivered(self) -> bool:
        return any(not self._peers[number].has_left for number in self._source.owed_to)

    def _end(self) -> None:
        with self._changed:
            self._is_closing = True
        if self._meeting is not None:
            self._meeting.close()
        self._staging.put(None)
        for channel in self._peer_of:
            channel.close()
        for channel in self._peer_of:
            channel.join(1.0)
        self._stager.join(1.0)

    # ---- receiving -----------------------------------------------------------------------------

    def _ask(self, keys: Sequence[Key]) -> None:
        """Asks for arrays, and makes memory for them."""
        for key in keys:
            if self._error is not None:
                return
            end = self._ends[key.crossing]
            dtype = np.dtype(end.crossing.dtype)
            blocks = {box: self._pool.take(shape_of(box), dtype) for box in set(end.held.values())}
            views = {}
            for i, piece in end.receives.items():
                outer = end.held[piece.devices[0]]
                views[i] = blocks[outer][within(piece.box, outer)]
            self._receiving[key] = Receiving(end, blocks, views)
            for number, frame in self._target.ask(key):
                self._channels(self._peers[number])[0].send(frame)
                self._check_presence(self._peers[number])

    def _channels(self, peer: Peer) -> list[Channel]:
        """Returns the channels to a process, in turns: NICs share small arrays too."""
        found = list(peer.channels.values())
        first = next(self._turn) % len(found)
        return found[first:] + found[:first]

    def landing(self, channel: Channel, frame: Frame) -> list[memoryview]:
        """Returns the memory for a payload."""
        with self._changed:
            key = self._target.landing(self._peer_of[channel].process.number, frame)
            view = self._receiving[key].views[frame.piece]
        return runs_of(view, frame.offset, frame.length)

    def landed(self, channel: Channel, frame: Frame) -> None:
        """Counts a payload; the last one of an array makes the array."""
        with self._changed:
            peer = self._peer_of[channel].process.number
            num_bytes, key = self._target.landed(peer, frame)
            crossing = self._by_index[frame.crossing].crossing
            if num_bytes and not crossing.is_whole:
                self._bytes[crossing.link] += num_bytes
            if key is None:
                return
            receiving = self._receiving[key]
        with first_calls.moving():
            array = self._assemble(receiving)
        with self._changed:
            receiving.array = array
            self._ask(self._target.arrive(key))
            self._changed.notify_all()

    def _assemble(self, receiving: Receiving) -> jax.Array:
        """Makes an array of its pieces, cut as on the wire."""
        shape, blocks = receiving.end.crossing.shape, receiving.blocks
        receiving.blocks, receiving.views = {}, {}

        def block(index: tuple[slice, ...] | None) -> np.ndarray:
            return blocks[from_index(index, shape)]

        # From here on the memory is JAX's, until it drops the array.
        return jax.make_array_from_callback(shape, receiving.end.here, block)

    # ---- sending -------------------------------------------------------------------------------

    def _stage(self) -> None:
        """Waits for each offered array in turn, and answers the PULLs for it."""
        for key, sending in iter(self._staging.get, None):
            try:
                jax.block_until_ready(sending.copies)
                with first_calls.moving():
                    pieces = {i: _piece(sending, i) for i in sending.end.sends}
            except Exception as error:  # of the computation
                self._fail(error)
                return
            with self._changed:
                sending.pieces = pieces
                asked = self._source.ready(key)
            for i in asked:
                self._answer(key, sending, i)

    def pulled(self, channel: Channel, frame: Frame) -> None:
        """Answers a PULL at once, unless the array is not computed yet."""
        with self._changed:
            key = self._source.pulled(self._peer_of[channel].process.number, frame)
            sending = self._sending[key] if key else None
        if key and sending:
            self._answer(key, sending, frame.piece)

    def _answer(self, key: Key, sending: Sending, i: int) -> None:
        """Queues the parts of a piece for the free channels."""
        assert sending.pieces is not None
        peer = self._peers[sending.end.sends[i].target]
        for frame in self._source.parts(key, i):
            peer.packets.append((frame, runs_of(sending.pieces[i], frame.offset, frame.length)))
            any(channel.take_part() for channel in self._channels(peer))

    def delivered(self, channel: Channel, frame: Frame) -> None:
        """Drops the array of a frame if all of it is delivered."""
        with self._changed:
            if key := self._source.delivered(frame):
                del self._sending[key]
                self._changed.notify_all()

    # ---- failing -------------------------------------------------------------------------------

    def left(self, channel: Channel) -> None:
        """Fails if this process waits for an array of a process that leaves."""
        with self._changed:
            self._changed.notify_all()
            self._check_presence(self._peer_of[channel])

    def _check_presence(self, peer: Peer) -> None:
        if self._has_finished:
            return
        is_awaited = self._target.awaited_from(peer.process.number)
        if is_awaited and all(channel.has_left for channel in peer.channels.values()):
            self._fail(self._peer_error(peer, "left the job", "it said goodbye"))

    def broken(self, channel: Channel, error: Exception) -> None:
        """Fails: a process or a link of the job is gone."""
        peer = self._peer_of[channel]
        name = peer.process.name
        if isinstance(error, ViolationError):
            problem, fix = "the other end broke the protocol", "start all processes of a job anew"
        elif isinstance(error, TimeoutError) and error.errno is None:  # not of the system
            problem = str(error)
            fix = f"see the log and the network of {name}; distributed.heartbeat_timeout_s sets "
            fix += "how long a link may be silent"
            error = TimeoutError("no data and no heartbeat")
        elif isinstance(error, OSError):
            problem, fix = "the connection was lost", f"see the log of {name}"
        else:  # a bug of ours, or JAX could not take the data
            self._fail(error)
            return
        self._fail(self._peer_error(peer, problem, error, fix))

    def _peer_error(
        self, peer: Peer, problem: str, found: object, fix: str | None = None
    ) -> PeerError:
        with self._changed:
            waiting = self._target.awaited_from(peer.process.number)
        during = f", while waiting for {waiting}" if waiting else ""
        fix = fix or f"see the log of {peer.process.name}"
        return PeerError(
            between(peer.process, self._me),
            problem + during,
            found=found,
            fix=fix,
            peer=peer.process.number,
        )

    def _late(self, key: Key, start_s: float) -> float | PeerError:
        """Returns how long an array may still take, or the error if it is late."""
        peers = [self._peers[number] for number in self._target.sources(key)]
        channels = [channel for peer in peers for channel in peer.channels.values()]
        progress_s = max(start_s, *(channel.payload_s for channel in channels))
        left_s = progress_s + self._timeouts.pull_s - time.monotonic()
        if left_s > 0:
            return left_s
        owing = self._target.owing(key) or self._target.sources(key)
        process = self._peers[owing[0]].process
        return PeerError(
            between(process, self._me),
            f"{key} did not come for {self._timeouts.pull_s:g} s",
            found="its heartbeat, but no data",
            fix=f"see in the log of {process.name} what it does; distributed.pull_timeout_s sets "
            "how long it may take",
            peer=process.number,
        )

    def _fail(self, error: Exception) -> None:
        with self._changed:
            if self._error is not None or self._is_closing:
                return
            self._error = error
            self._changed.notify_all()
        if self._meeting is not None:
            self._meeting.close()  # whoever misses this end is to know at once that it is in vain
        for channel in list(self._peer_of):
            channel.close()
        self._on_failure(error)

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise self._error


def _piece(sending: Sending, i: int) -> np.ndarray:
    """Returns a piece in the memory of its copy."""
    device, end = sending.end.senders[i], sending.end
    return np.asarray(sending.copies[device])[within(end.sends[i].box, end.held[device])]


def _digest(what: object) -> str:
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
