"""A transport between processes: the target pulls what it needs, over TCP.

    source: offer -> [copy to the host] -> wait for PULL -> DATA straight from the array's memory
    target: expect -> PULL, a few arrays ahead -> memory that JAX takes over -> arrived -> fetch

Who sends what is in `routes`, how the bytes travel in `frames`, who may connect in `wire`. Nothing
here makes the executor wait but `wait`, a `fetch` of what has not arrived, and `close`.
"""

import hashlib
import itertools
import json
import math
import queue
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from socket import socket
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from holmesjax import compat
from holmesjax.crossings import Crossing, Key
from holmesjax.errors import PeerError
from holmesjax.frames import Channel, Frame, Kind, Part, ViolationError
from holmesjax.host_memory import Pool, runs_of
from holmesjax.neighbours import Book, Ports, between, meet
from holmesjax.plan import Plan
from holmesjax.processes import Process
from holmesjax.routes import Box, Piece, boxes, intersection, pieces, wire_spec, within
from holmesjax.sharding import from_axes
from holmesjax.topology import Topology

# Arrays asked for and not yet fetched: one that arrives while the one before is computed with. Each
# more would hold another boundary in host memory and hide nothing longer than a task.
PREFETCH = 2
# A piece is sent in parts, and each connection takes the next when it is free. Smaller parts would
# cost as much in Python as in copying, larger ones would leave connections idle at the end.
MIN_PART_BYTES, MAX_PART_BYTES = 1 << 20, 4 << 20
MAX_WAITING = 1 << 12  # arrays that others may have asked for and that are not yet offered


@dataclass
class _Route:
    """What one crossing means for this process."""

    index: int  # among the crossings of the plan
    crossing: Crossing
    sends: dict[int, Piece]  # by its place among the pieces of the crossing
    receives: dict[int, Piece]
    held: dict[int, Box]  # by device: what is offered, or what lands
    here: NamedSharding  # the same for JAX
    senders: dict[int, int] = field(default_factory=dict)  # piece -> the device that has it
    rebuild: Callable[[jax.Array], jax.Array] = lambda array: array  # to the target's layout


@dataclass(eq=False)
class _Offer:
    """An array that others have not all of yet."""

    route: _Route
    shards: dict[int, jax.Array]  # by device, on their way to the host
    unasked: set[int]  # pieces
    left: dict[int, int]  # bytes of each piece that are not out yet
    parts: dict[int, np.ndarray] | None = None  # by piece, once they are on the host


@dataclass(eq=False)
class _Pull:
    """An array on its way here."""

    key: Key
    route: _Route
    blocks: dict[Box, np.ndarray]
    missing: int  # pieces
    array: jax.Array | None = None  # once all is here

    def block(self, index: tuple[slice, ...] | None) -> np.ndarray:
        """What lies at an index of the array."""
        assert index is not None
        shape = self.route.crossing.shape
        return self.blocks[tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))]


@dataclass(eq=False)
class _Awaited:
    """A piece of it."""

    pull: _Pull
    view: np.ndarray  # where it lands
    unseen: dict[int, int]  # offset and length of the parts that have not begun to come
    missing: int  # parts


@dataclass(eq=False)
class _Peer:
    """A process that something is shared with."""

    process: Process
    channels: dict[int, Channel] = field(default_factory=dict)  # by stream
    parts: deque[Part] = field(default_factory=deque)  # to send
    awaited: dict[tuple[int, int, int, int], _Awaited] = field(default_factory=dict)

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
      book: where each process does, by its number.
      key: of the job.
      about: what must be equal at both ends of a connection, by name.
      streams: connections between two processes.
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
        book: Sequence[Book],
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
        self._routes: dict[str, _Route] = {}
        self._by_index: dict[int, _Route] = {}
        shared: dict[int, list[Any]] = defaultdict(list)  # by process: all that crosses between us
        for index, crossing in enumerate(crossings):
            route = _make_route(index, crossing, me, plan, processes, mesh)
            if route is None:
                continue  # between other stages
            self._routes[crossing.name] = self._by_index[index] = route
            for number, piece in (route.sends | route.receives).items():
                other = piece.target if piece.source == me.number else piece.source
                shared[other].append((index, asdict(crossing), number, piece))
        self._offers: dict[Key, _Offer] = {}
        self._early: dict[Key, dict[int, None]] = {}  # pieces asked for before the offer
        self._expected: deque[Key] = deque()
        self._pulls: dict[Key, _Pull] = {}
        self._bytes: Counter[str] = Counter()
        self._pool = Pool()
        self._error: Exception | None = None
        self._is_closing = False
        self._changed = threading.Condition()
        self._peers = {number: _Peer(processes[number]) for number in shared}
        self._peer_of: dict[Channel, _Peer] = {}
        self._turn, self._streams = itertools.count(), streams
        self._staging: queue.SimpleQueue[tuple[Key, _Offer] | None] = queue.SimpleQueue()
        self._stager = threading.Thread(target=self._stage, name="stager", daemon=True)
        self._stager.start()
        try:
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
                streams=streams,
                timeout_s=start_timeout_s,
                enter=self._enter,
            )
            self._raise_failure()
        except BaseException:
            self._end()
            raise

    def _enter(self, number: int, stream: int, sock: socket) -> None:
        """Takes a connection; from here on its heartbeat counts."""
        peer = self._peers[number]
        channel = Channel(sock, self, self._silence_s, peer.parts)
        with self._changed:
            if self._is_closing:
                sock.close()
                return
            peer.channels[stream] = channel
            self._peer_of[channel] = peer
            channel.start()

    # ---- the executor's calls ------------------------------------------------------------------

    def offer(self, key: Key, array: jax.Array) -> None:
        """Announces an array. It must not be donated before others have got all of it."""
        route = self._routes[key.crossing]
        crossing = route.crossing
        assert (array.shape, str(array.dtype)) == (crossing.shape, crossing.dtype), (
            f"{key}: {array.aval}"
        )
        assert route.here.is_equivalent_to(array.sharding, array.ndim), f"{key}: {array.sharding}"
        with self._changed:
            self._raise_failure()
            assert key not in self._offers, f"{key} is offered twice"
            if not route.sends:
                return  # other processes have the same bytes, and send them
            data = {shard.device: shard.data for shard in array.addressable_shards}
            shards = {
                device: compat.start_copy_to_host(data[self._devices[device]])
                for device in set(route.senders.values())
            }
            sizes = {i: _size(piece.box, crossing) for i, piece in route.sends.items()}
            self._offers[key] = offer = _Offer(route, shards, set(sizes), sizes)
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
        return pull.route.rebuild(pull.array)

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
            not self._peers[offer.route.sends[i].target].has_left
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
        route = self._routes[key.crossing]
        dtype = np.dtype(route.crossing.dtype)
        blocks = {box: self._pool.take(_shape(box), dtype) for box in set(route.held.values())}
        pull = self._pulls[key] = _Pull(key, route, blocks, len(route.receives))
        for i, piece in route.receives.items():
            outer, size = route.held[piece.devices[0]], _size(piece.box, route.crossing)
            view, parts = blocks[outer][within(piece.box, outer)], dict(_cut(size, self._streams))
            peer = self._peers[piece.source]
            where = (route.index, key.step, key.microbatch, i)
            peer.awaited[where] = _Awaited(pull, view, parts, len(parts))
            channel = peer.channels[next(self._turn) % len(peer.channels)]
            channel.send(Frame(Kind.PULL, *where, 0, size))
            self._check_presence(peer)

    def landing(self, channel: Channel, frame: Frame) -> list[memoryview]:
        """Where the payload goes."""
        with self._changed:
            awaited = self._peer_of[channel].awaited.get(frame[1:5])
            if awaited is None or awaited.unseen.pop(frame.offset, None) != frame.length:
                raise ViolationError(f"data that was not asked for: {frame}")
        return runs_of(awaited.view, frame.offset, frame.length)

    def landed(self, channel: Channel, frame: Frame) -> None:
        """Makes an array when its last part is here."""
        with self._changed:
            awaited = self._peer_of[channel].awaited[frame[1:5]]
            pull, route = awaited.pull, awaited.pull.route
            self._bytes[route.crossing.link] += frame.length
            awaited.missing -= 1
            if awaited.missing:
                return
            del self._peer_of[channel].awaited[frame[1:5]]
            pull.missing -= 1
            if pull.missing:
                return
        array = jax.make_array_from_callback(route.crossing.shape, route.here, pull.block)
        pull.blocks.clear()  # from here on the memory is JAX's, until it drops the array
        with self._changed:
            pull.array = array
            self._changed.notify_all()

    # ---- sending -------------------------------------------------------------------------------

    def _stage(self) -> None:
        """Waits for each offered array in turn, and answers who has asked for it."""
        for key, offer in iter(self._staging.get, None):
            route = offer.route
            try:
                hosts = {device: np.asarray(shard) for device, shard in offer.shards.items()}
            except Exception as error:  # of the computation
                self._fail(error)
                return
            with self._changed:
                offer.parts = {
                    i: hosts[device][within(route.sends[i].box, route.held[device])]
                    for i, device in route.senders.items()
                }
                asked = self._early.pop(key, {})
                offer.unasked -= asked.keys()
            for i in asked:
                self._answer(key, offer, i)

    def pulled(self, channel: Channel, frame: Frame) -> None:
        """Answers, or remembers what to answer when it is there."""
        route = self._by_index.get(frame.crossing)
        piece = route.sends.get(frame.piece) if route else None
        if (
            route is None
            or piece is None
            or self._peers.get(piece.target) != self._peer_of[channel]
        ):
            raise ViolationError(f"a wish for what is not sent from here to there: {frame}")
        size = _size(piece.box, route.crossing)
        if (frame.offset, frame.length) != (0, size):
            raise ViolationError(f"a wish for another range than the {size} bytes: {frame}")
        key = Key(route.crossing.name, frame.step, frame.microbatch)
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

    def _answer(self, key: Key, offer: _Offer, i: int) -> None:
        """Puts a piece, part by part, where the free channels take it from."""
        assert offer.parts is not None
        peer, view = self._peers[offer.route.sends[i].target], offer.parts[i]
        for offset, length in _cut(view.nbytes, self._streams):
            frame = Frame(Kind.DATA, offer.route.index, key.step, key.microbatch, i, offset, length)
            peer.parts.append((frame, runs_of(view, offset, length)))
            any(channel.take_part() for channel in peer.channels.values())

    def sent(self, channel: Channel, frame: Frame) -> None:
        """Drops an array when all of it is out."""
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

    def _check_presence(self, peer: _Peer) -> None:
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
        self, peer: _Peer, problem: str, found: object, fix: str | None = None
    ) -> PeerError:
        with self._changed:
            waiting = next((awaited.pull.key for awaited in peer.awaited.values()), None)
        during = f", while waiting for {waiting}" if waiting else ""
        fix = fix or f"see the log of {peer.process.name}"
        return PeerError(between(peer.process, self._me), problem + during, found=found, fix=fix)

    def _late(self, key: Key, start_s: float) -> float | PeerError:
        """How long a key may still take, or what to say if that is over. Any data is progress."""
        peers = [self._peers[p.source] for p in self._routes[key.crossing].receives.values()]
        channels = [channel for peer in peers for channel in peer.channels.values()]
        progress_s = max(start_s, *(channel.payload_s for channel in channels))
        left_s = progress_s + self._pull_timeout_s - time.monotonic()
        if left_s > 0:
            return left_s
        late = (p for p in peers for awaited in p.awaited.values() if awaited.pull.key == key)
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


def _make_route(
    index: int,
    crossing: Crossing,
    me: Process,
    plan: Plan,
    processes: Sequence[Process],
    mesh: Mesh,
) -> _Route | None:
    """What a crossing means for one process; None between other stages."""
    if me.stage not in (crossing.source, crossing.target):
        return None
    is_source = crossing.source == me.stage
    spec = crossing.source_spec if is_source else wire_spec(crossing, plan, processes)
    held = boxes(crossing.shape, spec, plan.stages[me.stage])
    numbered = dict(enumerate(pieces(crossing, plan, processes)))
    route = _Route(
        index=index,
        crossing=crossing,
        sends={i: piece for i, piece in numbered.items() if piece.source == me.number},
        receives={i: piece for i, piece in numbered.items() if piece.target == me.number},
        held={device: held[device] for device in me.devices},
        here=from_axes(mesh, spec),
    )
    for i, piece in route.sends.items():
        has_it = lambda box, piece=piece: intersection(box, piece.box) == piece.box
        route.senders[i] = next(d for d, box in route.held.items() if has_it(box))
    if not is_source and spec != crossing.target_spec:
        target = from_axes(mesh, crossing.target_spec)
        route.rebuild = jax.jit(lambda array: array, out_shardings=target)
    return route


def _digest(what: object) -> str:
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _size(box: Box, crossing: Crossing) -> int:
    return math.prod(_shape(box)) * np.dtype(crossing.dtype).itemsize


def _cut(num_bytes: int, streams: int) -> Iterator[tuple[int, int]]:
    """Offset and length of the parts of a piece; the same at both ends."""
    part = min(max(-(-num_bytes // streams), MIN_PART_BYTES), MAX_PART_BYTES)
    for start in range(0, num_bytes, part):
        yield start, min(part, num_bytes - start)
