"""What all transports between processes share: who asks whom, for what, and how it fails.

    source: offer -> [made ready] -> wait for PULL -> give
    target: expect -> PULL, a few arrays ahead -> the pieces come -> arrived -> fetch

Who sends what is in `routes`, the connections are in `frames`, who may connect in `wire`; how the
bytes travel is in `tcp` and in `transfer`. Nothing here makes the executor wait but `wait`, a
`fetch` of what has not arrived, and `close`.
"""

import hashlib
import itertools
import json
import math
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from holmesjax import wire
from holmesjax.crossings import Crossing, Key
from holmesjax.errors import PeerError
from holmesjax.frames import Channel, Frame, Kind, Part, ViolationError
from holmesjax.neighbours import Book, Ports, between, meet
from holmesjax.plan import Plan
from holmesjax.processes import Process
from holmesjax.routes import Box, Piece, boxes, intersection, pieces, wire_spec
from holmesjax.sharding import from_axes
from holmesjax.topology import Topology

# Arrays asked for and not yet fetched: one that arrives while the one before is computed with. Each
# more would hold another boundary in memory and hide nothing longer than a task.
PREFETCH = 2
MAX_WAITING = 1 << 12  # arrays that others may have asked for and that are not yet offered

Where = tuple[int, int, int, int]  # crossing, step, microbatch and piece, as in a frame


@dataclass
class Route:
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
class Offer:
    """An array that others have not all of yet."""

    route: Route
    arrays: dict[int, jax.Array]  # by piece, on their way to where they are given from
    unasked: set[int]  # pieces
    left: dict[int, int]  # bytes of each piece that are not delivered yet
    parts: dict[int, Any] | None = None  # by piece, once they are there


@dataclass(eq=False)
class Pull:
    """An array on its way here."""

    key: Key
    route: Route
    missing: int  # pieces
    array: jax.Array | None = None  # once all is here

    def where(self, piece: int) -> Where:
        return self.route.index, self.key.step, self.key.microbatch, piece


@dataclass(eq=False)
class Peer:
    """A process that something is shared with."""

    process: Process
    channels: dict[int, Channel] = field(default_factory=dict)  # by stream
    parts: deque[Part] = field(default_factory=deque)  # to send
    awaited: dict[Where, Pull] = field(default_factory=dict)  # the pieces it owes

    @property
    def has_left(self) -> bool:
        return any(channel.has_left for channel in self.channels.values())


class RemoteTransport(ABC):
    """Between the processes of a plan; a subclass moves the bytes of a piece.

    Args:
      me: this process, one of `processes`.
      plan, topology, crossings: the same in every process.
      mesh: of this process's stage.
      ports: where this process listens.
      book: where each process does, by its number.
      key: of the job.
      about: what must be equal at both ends of a connection, by name.
      tells: what else each end says of itself.
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
        tells: Mapping[str, Any] | None = None,
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
        self._routes: dict[str, Route] = {}
        self._by_index: dict[int, Route] = {}
        shared: dict[int, list[Any]] = defaultdict(list)  # by process: all that crosses between us
        for index, crossing in enumerate(crossings):
            route = _make_route(index, crossing, me, plan, processes, mesh)
            if route is None:
                continue  # between other stages
            self._routes[crossing.name] = self._by_index[index] = route
            for number, piece in (route.sends | route.receives).items():
                other = piece.target if piece.source == me.number else piece.source
                shared[other].append((index, asdict(crossing), number, piece))
        self._offers: dict[Key, Offer] = {}
        self._early: dict[Key, dict[int, None]] = {}  # pieces asked for before the offer
        self._expected: deque[Key] = deque()
        self._pulls: dict[Key, Pull] = {}
        self._bytes: Counter[str] = Counter()
        self._error: Exception | None = None
        self._is_closing = False
        self._changed = threading.Condition()
        self._peers = {number: Peer(processes[number]) for number in shared}
        self._peer_of: dict[Channel, Peer] = {}
        self._turn, self._streams = itertools.count(), streams
        self._staging: queue.SimpleQueue[tuple[Key, Offer] | None] = queue.SimpleQueue()
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
                tells=tells or {},
                digests={other: _digest(what) for other, what in shared.items()},
                streams=streams,
                timeout_s=start_timeout_s,
                enter=self._enter,
            )
            self._raise_failure()
        except BaseException:
            self._end()
            raise

    def _enter(self, number: int, stream: int, connection: wire.Connection) -> None:
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
        route = self._routes[key.crossing]
        crossing = route.crossing
        assert array.shape == crossing.shape, f"{key}: {array.aval}"
        assert array.dtype == np.dtype(crossing.dtype), f"{key}: {array.aval}"
        assert route.here.is_equivalent_to(array.sharding, array.ndim), f"{key}: {array.sharding}"
        with self._changed:
            self._raise_failure()
            assert key not in self._offers, f"{key} is offered twice"
            if not route.sends:
                return  # other processes have the same bytes, and send them
            data = {shard.device: shard.data for shard in array.addressable_shards}
            arrays = self._start(route, {d: data[self._devices[d]] for d in route.held})
            sizes = {i: size_of(piece.box, crossing) for i, piece in route.sends.items()}
            self._offers[key] = offer = Offer(route, arrays, set(sizes), sizes)
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
        pull = self._pulls[key] = Pull(key, route, len(route.receives))
        self._prepare(pull)
        for i, piece in route.receives.items():
            peer, where = self._peers[piece.source], pull.where(i)
            peer.awaited[where] = pull
            channel = peer.channels[next(self._turn) % len(peer.channels)]
            channel.send(Frame(Kind.PULL, *where, 0, size_of(piece.box, route.crossing)))
            self._check_presence(peer)

    @abstractmethod
    def _prepare(self, pull: Pull) -> None:
        """Makes ready for pieces that are about to be asked for."""

    def _owes(self, channel: Channel, frame: Frame) -> bool:
        """Whether the piece was asked for, at the other end of the channel."""
        return frame.where in self._peer_of[channel].awaited

    @abstractmethod
    def landing(self, channel: Channel, frame: Frame) -> list[memoryview]: ...

    @abstractmethod
    def landed(self, channel: Channel, frame: Frame) -> None: ...

    def _arrive(self, channel: Channel, frame: Frame) -> None:
        """A piece is here; makes an array when it was the last."""
        with self._changed:
            pull = self._peer_of[channel].awaited.pop(frame.where)
            crossing, piece = pull.route.crossing, pull.route.receives[frame.piece]
            self._bytes[crossing.link] += size_of(piece.box, crossing)
            pull.missing -= 1
            if pull.missing:
                return
        array = self._assemble(pull)
        with self._changed:
            pull.array = array
            self._changed.notify_all()

    @abstractmethod
    def _assemble(self, pull: Pull) -> jax.Array:
        """The array of pieces that are all here, as it is cut on the wire."""

    # ---- sending -------------------------------------------------------------------------------

    @abstractmethod
    def _start(self, route: Route, shards: Mapping[int, jax.Array]) -> dict[int, jax.Array]:
        """Each piece on its way, from the shards by their devices; returns at once."""

    @abstractmethod
    def _finish(self, route: Route, piece: int, array: jax.Array) -> Any:
        """What is given of a piece. Waits for it, and raises what made it fail."""

    def _stage(self) -> None:
        """Waits for each offered array in turn, and answers who has asked for it."""
        for key, offer in iter(self._staging.get, None):
            try:
                parts = {i: self._finish(offer.route, i, a) for i, a in offer.arrays.items()}
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
        route = self._by_index.get(frame.crossing)
        piece = route.sends.get(frame.piece) if route else None
        if (
            route is None
            or piece is None
            or self._peers.get(piece.target) != self._peer_of[channel]
        ):
            raise ViolationError(f"a wish for what is not sent from here to there: {frame}")
        size = size_of(piece.box, route.crossing)
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

    def _answer(self, key: Key, offer: Offer, i: int) -> None:
        assert offer.parts is not None
        piece = offer.route.sends[i]
        where = (offer.route.index, key.step, key.microbatch, i)
        frame = Frame(Kind.DATA, *where, 0, size_of(piece.box, offer.route.crossing))
        self._give(self._peers[piece.target], frame, offer.parts[i])

    @abstractmethod
    def _give(self, peer: Peer, frame: Frame, part: Any) -> None:
        """Lets another process have a whole piece."""

    @abstractmethod
    def sent(self, channel: Channel, frame: Frame) -> None: ...

    @abstractmethod
    def got(self, channel: Channel, frame: Frame) -> None: ...

    def _deliver(self, frame: Frame) -> None:
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
            waiting = next((pull.key for pull in peer.awaited.values()), None)
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
        late = (p for p in peers for pull in p.awaited.values() if pull.key == key)
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
) -> Route | None:
    """What a crossing means for one process; None between other stages."""
    if me.stage not in (crossing.source, crossing.target):
        return None
    is_source = crossing.source == me.stage
    spec = crossing.source_spec if is_source else wire_spec(crossing, plan, processes)
    held = boxes(crossing.shape, spec, plan.stages[me.stage])
    numbered = dict(enumerate(pieces(crossing, plan, processes)))
    route = Route(
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


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def size_of(box: Box, crossing: Crossing) -> int:
    return math.prod(shape_of(box)) * np.dtype(crossing.dtype).itemsize
