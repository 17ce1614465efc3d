"""A transport over `jax.experimental.transfer`: JAX pulls from device to device.

    source: offer -> [slice on the device] -> wait for PULL -> hand to JAX's server -> DATA, empty
    target: expect -> PULL, a few arrays ahead -> DATA -> JAX pulls -> it is ready -> GOT -> fetch

A connection of ours to each process carries these frames and its heartbeat. JAX's part aborts the
process, hangs, or gives wrong data where the two ends differ or one of them is gone; so

  - both ends compare all that JAX does not, in the hello, before they connect through JAX;
  - nothing is pulled that has not been offered, and nothing is offered twice under one number;
  - what is offered is kept until the other end says that it has it;
  - nothing counts as arrived before it is ready: a thread waits for it, with our deadlines.

JAX's server asks nobody for a key. Who reaches its ports cannot ask for an array, because its
number is made with the key of the job, but can do harm: it is for networks that are trusted.
"""

import functools
import hmac
import json
import queue
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import transfer
from jax.sharding import Mesh, SingleDeviceSharding

from holmesjax import wire
from holmesjax.crossings import Crossing
from holmesjax.errors import PeerError
from holmesjax.frames import Channel, Frame, Kind, ViolationError
from holmesjax.neighbours import Book, between, nic
from holmesjax.processes import Process, fabric_between
from holmesjax.remote import Peer, Pull, RemoteTransport, Route, Where, shape_of
from holmesjax.routes import Box
from holmesjax.topology import Topology

# JAX sends in chunks of this size, from staging memory of as many chunks for each network.
CHUNK_BYTES, NUM_CHUNKS = 8 << 20, 8


class TransferTransport(RemoteTransport):
    """`streams` sockets of JAX carry the bytes between two processes, one for each address."""

    def __init__(
        self,
        *,
        me: Process,
        processes: Sequence[Process],
        topology: Topology,
        crossings: Sequence[Crossing],
        mesh: Mesh,
        book: Sequence[Book],
        key: bytes,
        about: Mapping[str, Any],
        streams: int,
        **others: Any,
    ):
        self._secret = hmac.digest(key, json.dumps(about, sort_keys=True).encode(), "sha256")
        self._fabrics = {
            other.number: fabric_between(topology, me, other)
            for other in processes
            if any({c.source, c.target} == {me.stage, other.stage} for c in crossings)
        }
        self._servers = {}
        for fabric in set(self._fabrics.values()):
            addresses = [f"{nic(book[me.number], me, fabric, i)[0]}:0" for i in range(streams)]
            self._servers[fabric] = transfer.start_transfer_server(
                mesh.local_devices[0].client,
                addresses[0],
                addresses,
                max_num_parallel_copies=NUM_CHUNKS,
                transfer_size=CHUNK_BYTES,
            )
        self._connections: dict[int, Any] = {}  # JAX's, by process
        self._pulled: dict[Where, jax.Array] = {}  # ready or not
        self._pending: dict[int, queue.SimpleQueue[Frame | None]] = {}  # pulls, by process
        self._given: set[tuple[Peer, Frame]] = set()  # what they do not have yet
        super().__init__(
            me=me,
            processes=processes,
            topology=topology,
            crossings=crossings,
            mesh=mesh,
            book=book,
            key=key,
            about={
                **about,
                "transport": "transfer",
                "sockets": streams,
                "chunk_bytes": CHUNK_BYTES,
            },
            tells={"servers": {name: server.address() for name, server in self._servers.items()}},
            streams=1,
            **others,
        )

    def _enter(self, number: int, stream: int, connection: wire.Connection) -> None:
        """Connects through JAX, which would wait for ever where nobody listens."""
        fabric, peer = self._fabrics[number], self._peers[number]
        address = connection.hello["servers"][fabric]
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), wire.HELLO_TIMEOUT_S).close()
        except OSError as error:
            where, problem = between(peer.process, self._me), f"nobody answers at {address}"
            fix = "see whether the network lets the ports of JAX's transfer server be reached"
            self._fail(PeerError(where, problem, found=error, fix=fix))
        else:
            self._connections[number] = self._servers[fabric].connect(address)
        self._pending[number] = queue.SimpleQueue()
        threading.Thread(target=self._wait, args=(peer,), name="pulls", daemon=True).start()
        super()._enter(number, stream, connection)

    # ---- receiving -----------------------------------------------------------------------------

    def _prepare(self, pull: Pull) -> None:
        pass  # JAX takes the memory when it pulls

    def landing(self, channel: Channel, frame: Frame) -> list[memoryview]:
        if not self._owes(channel, frame) or frame.where in self._pulled:
            raise ViolationError(f"data that was not asked for: {frame}")
        return []

    def landed(self, channel: Channel, frame: Frame) -> None:
        """Pulls what the other end has just offered."""
        peer = self._peer_of[channel]
        route = peer.awaited[frame.where].route
        piece = route.receives[frame.piece]
        array = jax.ShapeDtypeStruct(
            shape_of(piece.box),
            route.crossing.dtype,
            sharding=SingleDeviceSharding(self._devices[piece.devices[0]]),
        )
        connection = self._connections[peer.process.number]
        self._pulled[frame.where] = connection.pull(self._number(frame), array)
        self._pending[peer.process.number].put(frame)

    def _wait(self, peer: Peer) -> None:
        """Waits for what is pulled from one process, which may die meanwhile."""
        for frame in iter(self._pending[peer.process.number].get, None):
            [channel] = peer.channels.values()
            try:
                self._pulled[frame.where].block_until_ready()
                channel.payload_s = time.monotonic()
                channel.send(frame._replace(kind=Kind.GOT))
                self._arrive(channel, frame)
            except Exception as error:
                self._fail(self._peer_error(peer, "JAX could not pull", error))
                return

    def _assemble(self, pull: Pull) -> jax.Array:
        route = pull.route
        parts: dict[Box, dict[Box, jax.Array]] = {box: {} for box in route.held.values()}
        for i, piece in route.receives.items():
            parts[route.held[piece.devices[0]]][piece.box] = self._pulled.pop(pull.where(i))
        blocks = {box: _join(box, found) for box, found in parts.items()}
        shards = jax.device_put(
            [blocks[box] for box in route.held.values()],
            [self._devices[device] for device in route.held],
        )
        return jax.make_array_from_single_device_arrays(route.crossing.shape, route.here, shards)

    # ---- sending -------------------------------------------------------------------------------

    def _start(self, route: Route, shards: Mapping[int, jax.Array]) -> dict[int, jax.Array]:
        found = {}
        for i, device in route.senders.items():
            box, held = route.sends[i].box, route.held[device]
            found[i] = shards[device]
            if box != held:
                starts = _offset(box, held)
                stops = [start + size for start, size in zip(starts, shape_of(box), strict=True)]
                found[i] = jax.lax.slice(found[i], starts, stops)
        return found

    def _finish(self, route: Route, piece: int, array: jax.Array) -> jax.Array:
        return array.block_until_ready()

    def _give(self, peer: Peer, frame: Frame, part: jax.Array) -> None:
        server = self._servers[self._fabrics[peer.process.number]]
        server.await_pull(self._number(frame), part)
        self._given.add((peer, frame))
        peer.channels[0].send(frame)

    def sent(self, channel: Channel, frame: Frame) -> None:
        pass  # it is delivered when the other end says so

    def got(self, channel: Channel, frame: Frame) -> None:
        given = self._peer_of[channel], frame._replace(kind=Kind.DATA)
        if given not in self._given:
            raise ViolationError(f"a receipt for what it has not got: {frame}")
        self._given.remove(given)
        self._deliver(frame)

    def _number(self, frame: Frame) -> int:
        """What JAX knows a piece by, 64 bits of a hash: never used again, and not to be guessed."""
        digest = hmac.digest(self._secret, json.dumps(frame.where).encode(), "sha256")
        return int.from_bytes(digest[:8])

    def _end(self) -> None:
        for pending in self._pending.values():
            pending.put(None)
        super()._end()


def _offset(box: Box, outer: Box) -> tuple[int, ...]:
    """Where a box begins in an array that holds `outer`."""
    return tuple(start - origin for (start, _), (origin, _) in zip(box, outer, strict=True))


def _join(box: Box, parts: Mapping[Box, jax.Array]) -> jax.Array:
    """What lies in a box, from parts that tile it."""
    if box in parts:
        return parts[box]
    starts = tuple(_offset(part, box) for part in parts)
    return _put_together(tuple(parts.values()), starts, shape_of(box))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _put_together(
    parts: Sequence[jax.Array], starts: Sequence[tuple[int, ...]], shape: tuple[int, ...]
) -> jax.Array:
    whole = jnp.zeros(shape, parts[0].dtype)
    for part, start in zip(parts, starts, strict=True):
        whole = jax.lax.dynamic_update_slice(whole, part, start)
    return whole
