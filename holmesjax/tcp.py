"""A transport over TCP connections of our own, from host memory to host memory.

source: offer -> [copy to the host] -> wait for PULL -> DATA straight from the array's memory
target: expect -> PULL, a few arrays ahead -> memory that JAX takes over -> arrived -> fetch
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from holmesjax import compat
from holmesjax.crossings import Key
from holmesjax.frames import Channel, Frame, ViolationError
from holmesjax.host_memory import Pool, runs_of
from holmesjax.remote import Peer, Pull, RemoteTransport, Route, Where, shape_of
from holmesjax.routes import Box, within

# A piece is sent in parts, and each connection takes the next when it is free. Smaller parts would
# cost as much in Python as in copying, larger ones would leave connections idle at the end.
MIN_PART_BYTES, MAX_PART_BYTES = 1 << 20, 4 << 20


@dataclass(eq=False)
class _Landing:
    """Where a piece lands."""

    view: np.ndarray
    unseen: dict[int, int]  # offset and length of the parts that have not begun to come
    missing: int  # parts


class TcpTransport(RemoteTransport):
    """`streams` connections carry the bytes between two processes."""

    def __init__(self, *, about: Mapping[str, Any], **others: Any):
        self._pool = Pool()
        self._blocks: dict[Key, dict[Box, np.ndarray]] = {}  # of what is on its way here
        self._landings: dict[Where, _Landing] = {}
        super().__init__(about={**about, "transport": "tcp"}, **others)

    # ---- receiving -----------------------------------------------------------------------------

    def _prepare(self, pull: Pull) -> None:
        route, dtype = pull.route, np.dtype(pull.route.crossing.dtype)
        blocks = {box: self._pool.take(shape_of(box), dtype) for box in set(route.held.values())}
        self._blocks[pull.key] = blocks
        for i, piece in route.receives.items():
            outer = route.held[piece.devices[0]]
            view = blocks[outer][within(piece.box, outer)]
            parts = dict(_cut(view.nbytes, self._streams))
            self._landings[pull.where(i)] = _Landing(view, parts, len(parts))

    def landing(self, channel: Channel, frame: Frame) -> list[memoryview]:
        """Where the payload goes."""
        with self._changed:
            landing = self._landings.get(frame.where) if self._owes(channel, frame) else None
            if landing is None or landing.unseen.pop(frame.offset, None) != frame.length:
                raise ViolationError(f"data that was not asked for: {frame}")
        return runs_of(landing.view, frame.offset, frame.length)

    def landed(self, channel: Channel, frame: Frame) -> None:
        with self._changed:
            landing = self._landings[frame.where]
            landing.missing -= 1
            if landing.missing:
                return
            del self._landings[frame.where]
        self._arrive(channel, frame)

    def _assemble(self, pull: Pull) -> jax.Array:
        shape, blocks = pull.route.crossing.shape, self._blocks.pop(pull.key)

        def block(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            return blocks[tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))]

        # From here on the memory is JAX's, until it drops the array.
        return jax.make_array_from_callback(shape, pull.route.here, block)

    # ---- sending -------------------------------------------------------------------------------

    def _start(self, route: Route, shards: Mapping[int, jax.Array]) -> dict[int, jax.Array]:
        copies = {d: compat.start_copy_to_host(shards[d]) for d in set(route.senders.values())}
        return {i: copies[device] for i, device in route.senders.items()}

    def _finish(self, route: Route, piece: int, array: jax.Array) -> np.ndarray:
        held = route.held[route.senders[piece]]
        return np.asarray(array)[within(route.sends[piece].box, held)]

    def _give(self, peer: Peer, frame: Frame, part: np.ndarray) -> None:
        """Puts a piece, part by part, where the free channels take it from."""
        for offset, length in _cut(part.nbytes, self._streams):
            some = frame._replace(offset=offset, length=length)
            peer.parts.append((some, runs_of(part, offset, length)))
            any(channel.take_part() for channel in peer.channels.values())

    def sent(self, channel: Channel, frame: Frame) -> None:
        self._deliver(frame)

    def got(self, channel: Channel, frame: Frame) -> None:
        raise ViolationError(f"a receipt for what the connection itself delivers: {frame}")


def _cut(num_bytes: int, streams: int) -> Iterator[tuple[int, int]]:
    """Offset and length of the parts of a piece; the same at both ends."""
    part = min(max(-(-num_bytes // streams), MIN_PART_BYTES), MAX_PART_BYTES)
    for start in range(0, num_bytes, part):
        yield start, min(part, num_bytes - start)
