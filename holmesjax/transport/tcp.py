"""Moves arrays between the processes of a plan, over TCP connections of our own.

    source: offer -> [copy to the host] -> wait for PULL -> DATA straight from the array's memory
    target: expect -> PULL, a few arrays ahead -> memory that JAX takes over -> arrived -> fetch

What a process sends of a crossing and what it receives is in `ends`, the connections are in
`frames`, who may connect in `connections`. Nothing here makes the executor wait but `wait`, a
`fetch` of what has not arrived, and `close`.
"""

import hashlib
import itertools
import json
import queue
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from holmesjax.boxes import Box, within
from holmesjax.errors import PeerError
from holmesjax.parallel import compat
from holmesjax.plan.plan import Plan
from holmesjax.plan.processes import Process
from holmesjax.topology.machines import Topology
from holmesjax.transport import connections
from holmesjax.transport.buffers import Pool, runs_of
from holmesjax.transport.crossings import Crossing, Key
from holmesjax.transport.ends import End, make_end, shape_of, size_of
from holmesjax.transport.frames import Channel, Frame, FrameKind, Packet, ViolationError, parts_of
from holmesjax.transport.rendezvous import Book, Ports, between, meet, num_streams

# Arrays asked for and not yet fetched: one that arrives while the one before is computed with. Each
# more would hold another boundary in memory and hide nothing longer than a task.
PREFETCH = 2
MAX_WAITING = 1 << 12  # arrays that others may have asked for and that are not yet offered

Where = tuple[int, int, int, int]  # crossing, step, microbatch and piece, as in a frame


@dataclass(eq=False)
class Offer:
    """An array that others have not all of yet."""

    end: End
    copies: dict[int, jax.Array]  # by device, on their way to the host
    unasked: set[int]  # pieces
    left: dict[int, int]  # bytes of each piece that are not delivered yet
    parts: dict[int, np.ndarray] | None = None  # by piece, once they are there


@dataclass(eq=False)
class Pull:
    """An array on its way here."""

    key: Key
    end: End
    blocks: dict[Box, np.ndarray]  # memory for what each device holds
    missing: int  # pieces
    array: jax.Array | None = None  # once all is here


@dataclass(eq=False)
class Landing:
    """Where a piece of it lands."""

    pull: Pull
    view: np.ndarray
    unseen: dict[int, int]  # offset and length of the parts that have not begun to come
    missing: int  # parts


@dataclass(eq=False)
class Peer:
    """A process that something is shared with."""

    process: Process
    num_streams: int
    channels: dict[int, Channel] = field(default_factory=dict)  # by stream
    parts: deque[Packet] = field(default_factory=deque)  # to send
    awaited: dict[Where, Landing] = field(default_factory=dict)  # the pieces it owes

    @property
    def has_left(self) -> bool:
        return any(channel.has_left for channel in self.channels.values())


class TcpTransport:
    """Between the processes of a plan.

    Args:
      me: this process, one of `processes`.
      plan, topology, crossings: the same in every process.
      mesh: of this process's stage.
      ports: where this process listens.
      look_up: tells where some processes do, by their numbers.
      key: of the job.
      about: what must be equal at both ends of a connection, by name.
      streams: connections between two processes, at least; more where nodes have more NICs.
      heartbeat_timeout_s: how long a connection may be silent.
      pull_timeout_s: how long `wait` waits for a process that is alive, while no data comes.
      start_timeout_s: how long the others may take to connect.
      on_failure: told of the first failure, on the thread that noticed it.

    Raises:
      PeerError: a neighbour does not come.
      RefusedError: it does, and is of another plan, version or job.
    """

    def __init__(
        self,
        *,
        me: Process,
        processes: Sequence[Process],
        plan: Plan,
        topology: Topology,
        crossings: Sequence[Crossing],
        mesh: Mesh,
        ports: Ports,
        look_up: Callable[[Sequence[int]], Mapping[int, Book]],
        key: bytes,
        about: Mapping[str, Any],
        streams: int,
        heartbeat_timeout_s: float,
        pull_timeout_s: float,
        start_timeout_s: float,
        on_failure: Callable[[Exception], object] = lambda error: None,
    ):
        self._me, self._plan = me, plan
        self._silence_s, self._pull_timeout_s = heartbeat_timeout_s, pull_timeout_s
        self._on_failure = on_failure
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
        self._pool = Pool()
        self._offers: dict[Key, Offer] = {}
        self._early: dict[Key, dict[int, None]] = {}  # pieces asked for before the offer
        self._expected: deque[Key] = deque()
        self._pulls: dict[Key, Pull] = {}
        self._bytes: Counter[str] = Counter()
        self._error: Exception | None = None
        self._is_closing = False
        self._changed = threading.Condition()
        self._peers: dict[int, Peer] = {}
        self._peer_of: dict[Channel, Peer] = {}
        self._turn = itertools.count()
        self._staging: queue.SimpleQueue[tuple[Key, Offer] | None] = queue.SimpleQueue()
        self._stager = threading.Thread(target=self._stage, name="stager", daemon=True)
        self._stager.start()
        try:
            book = look_up([me.number, *sorted(shared)])
            for other in shared:
                count = num_streams(topology, me, processes[other], book, streams)
                self._peers[other] = Peer(processes[other], count)
            meet(
                me=me,
                processes=processes,
                topology=topology,
                ports=ports,
                book=book,
                key=key,
                # Whoever is heard at other times than it promises would seem lost.
                about={**about, "heartbeat_timeout_s": heartbeat_timeout_s},
                digests={other: _digest(what) for other, what in shared.items()},
                streams={other: peer.num_streams for other, peer in self._peers.items()},
                timeout_s=start_timeout_s,
                enter=self._enter,
            )
            self._raise_failure()
        except BaseException:
            ports.close()
            self._end()
            raise

    def _enter(self, number: int, stream: int, connection: connections.Connection) -> None:
        """Takes a connection; from here on its heartbeat counts."""
        peer = self._peers[number]
        channel = Channel(connection.sock, self, self._silence_s, peer.parts)
        with self._changed:
            if self._is_closing:
                connection.close()
                return
            peer.channels[stream] = channel
            self._peer_of[channel] = peer
            channel.start()

    # ---- the executor's calls ------------------------------------------------------------------

    def offer(self, key: Key, array: jax.Array) -> None:
        """Announces an array. It must not be donated before others have got all of it."""
        end = self._ends[key.crossing]
        crossing = end.crossing
        assert array.shape == crossing.shape, f"{key}: {array.aval}"
        assert array.dtype == np.dtype(crossing.dtype), f"{key}: {array.aval}"
        assert end.here.is_equivalent_to(array.sharding, array.ndim), f"{key}: {array.sharding}"
        with self._changed:
            self._raise_failure()
            assert key not in self._offers, f"{key} is offered twice"
            if not end.sends:
                return  # other processes have the same bytes, and send them
            data = {shard.device: shard.data for shard in array.addressable_shards}
            copies = {
                device: compat.start_copy_to_host(data[self._devices[device]])
                for device in set(end.senders.values())
            }
            sizes = {i: size_of(piece.box, crossing) for i, piece in end.sends.items()}
            self._offers[key] = offer = Offer(end, copies, set(sizes), sizes)
        self._staging.put((key, offer))

    def expect(self, keys: Sequence[Key]) -> None:
        """Says what will be fetched next, in this order."""
        with self._changed:
            known = {*self._expected, *self._pulls}
            assert known.isdisjoint(keys), f"{known & set(keys)} are expected twice"
            self._expected += keys
            self._pull_ahead()

    def arrived(self, key: Key) -> bool:
        """Whether a fetch would not wait."""
        pull = self._pulls.get(key)
        return pull is not None and pull.array is not None

    def wait(self, keys: Collection[Key]) -> None:
        """Returns when one of them has arrived. Raises PeerError where that cannot be."""
        start_s = time.monotonic()
        with self._changed:
            for key in keys:
                self._hurry(key)
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
        """The array, laid out for its target; each key once. Waits if it has not arrived."""
        if not self.arrived(key):
            self.wait([key])
        with self._changed:
            pull = self._pulls.pop(key)
            self._pull_ahead()
        assert pull.array is not None
        return pull.end.rebuild(pull.array)

    def take_bytes(self) -> dict[str, int]:
        """Bytes received over each link since the last call."""
        with self._changed:
            taken, self._bytes = dict(self._bytes), Counter()
        return taken

    def close(self) -> None:
        """Returns when all that was offered has been delivered, or nobody asks for it any more."""
        deadline_s = time.monotonic() + self._silence_s
        with self._changed:
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
        return any(
            not self._peers[offer.end.sends[i].target].has_left
            for offer in self._offers.values()
            for i in offer.left
        )

    def _end(self) -> None:
        with self._changed:
            self._is_closing = True
        self._staging.put(None)
        for channel in self._peer_of:
            channel.close()
        for channel in self._peer_of:
            channel.join(1.0)
        self._stager.join(1.0)

    # ---- receiving -----------------------------------------------------------------------------

    def _pull_ahead(self) -> None:
        while self._expected and len(self._pulls) < PREFETCH and self._error is None:
            self._ask(self._expected.popleft())

    def _hurry(self, key: Key) -> None:
        """Asks for what is waited for, however far it is in the order."""
        if key not in self._pulls:
            assert key in self._expected, f"{key} was not expected, or has been fetched"
            self._expected.remove(key)
            self._ask(key)

    def _ask(self, key: Key) -> None:
        end = self._ends[key.crossing]
        dtype = np.dtype(end.crossing.dtype)
        blocks = {box: self._pool.take(shape_of(box), dtype) for box in set(end.held.values())}
        pull = self._pulls[key] = Pull(key, end, blocks, len(end.receives))
        for i, piece in end.receives.items():
            peer, where = self._peers[piece.source], (end.index, key.step, key.microbatch, i)
            outer = end.held[piece.devices[0]]
            view = blocks[outer][within(piece.box, outer)]
            parts = dict(parts_of(view.nbytes, peer.num_streams))
            peer.awaited[where] = Landing(pull, view, parts, len(parts))
            self._channels(peer)[0].send(Frame(FrameKind.PULL, *where, 0, view.nbytes))
            self._check_presence(peer)

    def _channels(self, peer: Peer) -> list[Channel]:
        """Those to a process, each time another one first, so that NICs share small arrays too."""
        found = list(peer.channels.values())
        first = next(self._turn) % len(found)
        return found[first:] + found[:first]

    def landing(self, channel: Channel, frame: Frame) -> list[memoryview]:
        """Where the payload goes."""
        with self._changed:
            landing = self._peer_of[channel].awaited.get(frame.where)
            if landing is None or landing.unseen.pop(frame.offset, None) != frame.length:
                raise ViolationError(f"data that was not asked for: {frame}")
        return runs_of(landing.view, frame.offset, frame.length)

    def landed(self, channel: Channel, frame: Frame) -> None:
        """Makes an array when it was the last part of the last piece."""
        awaited = self._peer_of[channel].awaited
        with self._changed:
            landing = awaited[frame.where]
            landing.missing -= 1
            if landing.missing:
                return
            del awaited[frame.where]
            pull = landing.pull
            if not pull.end.crossing.is_whole:
                self._bytes[pull.end.crossing.link] += landing.view.nbytes
            pull.missing -= 1
            if pull.missing:
                return
        array = self._assemble(pull)
        with self._changed:
            pull.array = array
            self._changed.notify_all()

    def _assemble(self, pull: Pull) -> jax.Array:
        """The array of pieces that are all here, as it is cut on the wire."""
        shape, blocks = pull.end.crossing.shape, pull.blocks
        pull.blocks = {}

        def block(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            return blocks[tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))]

        # From here on the memory is JAX's, until it drops the array.
        return jax.make_array_from_callback(shape, pull.end.here, block)

    # ---- sending -------------------------------------------------------------------------------

    def _stage(self) -> None:
        """Waits for each offered array in turn, and answers who has asked for it."""
        for key, offer in iter(self._staging.get, None):
            try:
                parts = {i: _part(offer, i) for i in offer.end.sends}
            except Exception as error:  # of the computation
                self._fail(error)
                return
            with self._changed:
                offer.parts = parts
                asked = self._early.pop(key, {})
                offer.unasked -= asked.keys()
            for i in asked:
                self._answer(key, offer, i)

    def pulled(self, channel: Channel, frame: Frame) -> None:
        """Answers, or remembers what to answer when it is there."""
        end = self._by_index.get(frame.crossing)
        piece = end.sends.get(frame.piece) if end else None
        if end is None or piece is None or self._peers.get(piece.target) != self._peer_of[channel]:
            raise ViolationError(f"a wish for what is not sent from here to there: {frame}")
        size = size_of(piece.box, end.crossing)
        if (frame.offset, frame.length) != (0, size):
            raise ViolationError(f"a wish for another range than the {size} bytes: {frame}")
        key = Key(end.crossing.name, frame.step, frame.microbatch)
        with self._changed:
            offer = self._offers.get(key)
            if offer is None or offer.parts is None:
                early = self._early.setdefault(key, {})
                if frame.piece in early or len(self._early) > MAX_WAITING:
                    raise ViolationError(f"a wish that is one too many: {frame}")
                early[frame.piece] = None
                return
            if frame.piece not in offer.unasked:
                raise ViolationError(f"a wish for what it has got: {frame}")
            offer.unasked.remove(frame.piece)
        self._answer(key, offer, frame.piece)

    def _answer(self, key: Key, offer: Offer, i: int) -> None:
        """Puts a piece, part by part, where the free channels take it from."""
        assert offer.parts is not None
        piece, part = offer.end.sends[i], offer.parts[i]
        peer, where = self._peers[piece.target], (offer.end.index, key.step, key.microbatch, i)
        for offset, length in parts_of(part.nbytes, peer.num_streams):
            frame = Frame(FrameKind.DATA, *where, offset, length)
            peer.parts.append((frame, runs_of(part, offset, length)))
            any(channel.take_part() for channel in self._channels(peer))

    def sent(self, channel: Channel, frame: Frame) -> None:
        """Drops an array when all of it is delivered, of which the frame is a part."""
        key = Key(self._by_index[frame.crossing].crossing.name, frame.step, frame.microbatch)
        with self._changed:
            left = self._offers[key].left
            left[frame.piece] -= frame.length
            if not left[frame.piece]:
                del left[frame.piece]
            if not left:
                del self._offers[key]
                self._changed.notify_all()

    # ---- failing -------------------------------------------------------------------------------

    def left(self, channel: Channel) -> None:
        """What a process that leaves has not given, it never will."""
        with self._changed:
            self._changed.notify_all()
            self._check_presence(self._peer_of[channel])

    def _check_presence(self, peer: Peer) -> None:
        if peer.awaited and all(channel.has_left for channel in peer.channels.values()):
            self._fail(self._peer_error(peer, "left the job", "it said goodbye"))

    def broken(self, channel: Channel, error: Exception) -> None:
        """The job is over: one of its processes or links is gone."""
        peer = self._peer_of[channel]
        name = peer.process.name
        if isinstance(error, ViolationError):
            problem, fix = "the other end broke the protocol", "start all processes of a job anew"
        elif isinstance(error, TimeoutError):
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
            waiting = next((landing.pull.key for landing in peer.awaited.values()), None)
        during = f", while waiting for {waiting}" if waiting else ""
        fix = fix or f"see the log of {peer.process.name}"
        return PeerError(between(peer.process, self._me), problem + during, found=found, fix=fix)

    def _late(self, key: Key, start_s: float) -> float | PeerError:
        """How long a key may still take, or what to say if that is over. Any data is progress."""
        peers = [self._peers[p.source] for p in self._ends[key.crossing].receives.values()]
        channels = [channel for peer in peers for channel in peer.channels.values()]
        progress_s = max(start_s, *(channel.payload_s for channel in channels))
        left_s = progress_s + self._pull_timeout_s - time.monotonic()
        if left_s > 0:
            return left_s
        late = (p for p in peers for landing in p.awaited.values() if landing.pull.key == key)
        process = next(late, peers[0]).process
        return PeerError(
            between(process, self._me),
            f"{key} did not come for {self._pull_timeout_s:g} s",
            found="its heartbeat, but no data",
            fix=f"see in the log of {process.name} what it does; distributed.pull_timeout_s sets "
            "how long it may take",
        )

    def _fail(self, error: Exception) -> None:
        with self._changed:
            if self._error is not None or self._is_closing:
                return
            self._error = error
            self._changed.notify_all()
        for channel in list(self._peer_of):
            channel.close()
        self._on_failure(error)

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise self._error


def _part(offer: Offer, i: int) -> np.ndarray:
    """A piece in the memory of its copy. Waits for that, and raises what made it fail."""
    device = offer.end.senders[i]
    return np.asarray(offer.copies[device])[within(offer.end.sends[i].box, offer.end.held[device])]


def _digest(what: object) -> str:
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
