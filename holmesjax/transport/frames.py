"""Numbered binary frames on an authenticated connection. No JAX.

A frame is a fixed header; its payload follows a `DATA` header. The header has the number of the
frame in its direction and a CRC-32, so that a lost place in the stream is noticed at once. A frame
that does not fit ends the connection. The payload relies on TCP's checksum: a CRC of ours would
cost more than copying the bytes.

    PING   the sender is alive; sent where nothing else is for a while (`heartbeats`)
    PULL   asks for a piece
    DATA   a part of it, on whichever connection is free
    BYE    the sender wants and gives nothing more; answered by BYE, then the connection is closed
"""

import contextlib
import enum
import os
import socket
import struct
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from holmesjax.transport.heartbeats import Silence

MAGIC = b"HJX1"
HEADER = struct.Struct(">4sBxHQQIIQQ")  # magic, kind, crossing, sequence, then the rest of Frame
CRC = struct.Struct(">I")
# A connection that is free takes the next part of a piece. Smaller parts would cost as much in
# Python as in copying, larger ones would leave connections idle at the end.
MIN_PART_BYTES, MAX_PART_BYTES = 1 << 20, 4 << 20
MAX_BUFFERS = os.sysconf("SC_IOV_MAX")  # that one system call takes


class FrameKind(enum.IntEnum):
    """The purpose of a frame."""

    PING = 1
    PULL = 2
    DATA = 3
    BYE = 4


class Frame(NamedTuple):
    """A header without its framing. All but the kind is 0 in PING and BYE."""

    kind: FrameKind
    crossing: int = 0  # its place among the crossings of the plan
    step: int = 0
    microbatch: int = 0
    piece: int = 0  # its place among the pieces of the crossing
    offset: int = 0  # in the bytes of the piece, row-major
    length: int = 0

    @property
    def where(self) -> tuple[int, int, int, int]:
        """The piece: crossing, step, microbatch and its place."""
        return self[1:5]


Packet = tuple[Frame, Sequence[memoryview]]


def parts_of(num_bytes: int, num_streams: int) -> Iterator[tuple[int, int]]:
    """Yields offset and length of the parts of a piece; the same at both ends.

    >>> list(parts_of(5 << 20, 2))
    [(0, 2621440), (2621440, 2621440)]
    """
    part = min(max(-(-num_bytes // num_streams), MIN_PART_BYTES), MAX_PART_BYTES)
    for start in range(0, num_bytes, part):
        yield start, min(part, num_bytes - start)


class ViolationError(Exception):
    """The other end sent what the protocol does not allow."""


class Handler(Protocol):
    """Takes what a channel hears; called on its threads."""

    def pulled(self, channel: "Channel", frame: Frame) -> None:
        """The other end asks for a piece. Raises ViolationError if it must not."""

    def landing(self, channel: "Channel", frame: Frame) -> Sequence[memoryview]:
        """Returns the memory for a payload. Raises ViolationError if nobody asked for it."""

    def landed(self, channel: "Channel", frame: Frame) -> None:
        """The payload is there."""

    def sent(self, channel: "Channel", frame: Frame) -> None:
        """A DATA frame is out, and its memory is free."""

    def left(self, channel: "Channel") -> None:
        """The other end said goodbye."""

    def broken(self, channel: "Channel", error: Exception) -> None:
        """The connection ended without a goodbye.

        The error is a ViolationError, a TimeoutError for silence, an OSError, or an error of the
        handler.
        """


class Channel:
    """One connection after its hello: a thread that reads, and a thread that writes.

    Args:
      sock: authenticated; closed with the channel.
      handler: of what comes.
      silence_s: how long nothing at all may be heard.
      parts: data to send, shared by all channels to the same process: the free one takes the next.
    """

    def __init__(
        self, sock: socket.socket, handler: Handler, silence_s: float, parts: deque[Packet]
    ):
        self._sock, self._handler, self._silence = sock, handler, Silence(silence_s)
        self._control: deque[Frame] = deque()  # sent before data, so that asking waits for nobody
        self._parts = parts
        self._wakeup = threading.Condition()
        self._said_bye = self._is_closed = self._is_idle = self._is_in_payload = False
        self._byes = 0  # that are out or in
        self.payload_s = self._silence.heard_s  # when bytes of a payload came last
        self.has_left = False  # the other end, orderly
        self.is_over = threading.Event()  # both ends have said goodbye, or it was closed
        # The kernel's own timeout: with Python's, every call would be two system calls.
        wait_s = self._silence.look_s
        timeout = struct.pack("ll", int(wait_s), int(wait_s % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        self._threads = [
            threading.Thread(target=self._guard, args=(run,), name=name, daemon=True)
            for run, name in ((self._read, "frames in"), (self._write, "frames out"))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def send(self, frame: Frame) -> None:
        """Sends a frame without payload, before all data; returns at once."""
        with self._wakeup:
            self._control.append(frame)
            self._wakeup.notify()

    def take_part(self) -> bool:
        """Wakes the channel for a new part; returns False if the channel is busy."""
        with self._wakeup:
            if not self._is_idle:
                return False
            self._is_idle = False  # at once, or the next part would wake it too, and no other
            self._wakeup.notify()
            return True

    def leave(self) -> None:
        """Says goodbye, once."""
        with self._wakeup:
            if not self._said_bye:
                self._said_bye = True
                self._control.append(Frame(FrameKind.BYE))
                self._wakeup.notify()

    def close(self) -> None:
        """Ends the connection, orderly if both ends have said goodbye."""
        with self._wakeup:
            self._is_closed = True
            self.is_over.set()
            self._wakeup.notify()
        with contextlib.suppress(OSError):  # wakes the thread that reads
            self._sock.shutdown(socket.SHUT_RDWR)

    def join(self, timeout_s: float) -> None:
        """Waits for the threads, except the calling one."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout_s)
        self._sock.close()

    def _count_bye(self) -> None:
        with self._wakeup:
            self._byes += 1
            if self._byes == 2:
                self.is_over.set()

    def _guard(self, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception as error:
            self._broken(error)

    def _broken(self, error: Exception) -> None:
        with self._wakeup:
            if self._is_closed or (self.has_left and isinstance(error, OSError)):
                return
        self._handler.broken(self, error)

    # ---- reading -------------------------------------------------------------------------------

    def _read(self) -> None:
        header = bytearray(HEADER.size + CRC.size)
        sequence = 0
        while True:
            _move(self._hear, [memoryview(header)])
            frame = _decode(header, sequence)
            sequence += 1
            if frame.kind is FrameKind.PULL:
                self._handler.pulled(self, frame)
            elif frame.kind is FrameKind.DATA:
                buffers = self._handler.landing(self, frame)
                self._is_in_payload = True
                _move(self._hear, buffers)
                self._is_in_payload = False
                self._handler.landed(self, frame)
            elif frame.kind is FrameKind.BYE:
                self.has_left = True
                self._handler.left(self)
                self.leave()
                self._count_bye()

    def _hear(self, buffers: Sequence[memoryview]) -> int:
        """Receives all bytes that fit, or those before the kernel's timeout; returns their number.

        A call that ended with each packet would take the GIL for each, on a slow link.
        """
        while True:
            try:
                received = self._sock.recvmsg_into(buffers, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:  # what the kernel's timeout looks like
                self._silence.check()
                continue
            if not received:
                raise ConnectionResetError("the other end closed the connection")
            self._silence.end()
            if self._is_in_payload:
                self.payload_s = self._silence.heard_s
            return received

    # ---- writing -------------------------------------------------------------------------------

    def _write(self) -> None:
        sequence = 0
        while True:
            frame, payload = self._next()
            if self._is_closed:
                return
            _move(self._sock.sendmsg, [memoryview(_encode(frame, sequence)), *payload])
            sequence += 1
            if frame.kind is FrameKind.DATA:
                self._handler.sent(self, frame)
            if frame.kind is FrameKind.BYE:
                self._count_bye()
                return

    def _next(self) -> Packet:
        """Returns what to send next; a ping if there is nothing for a while."""
        while True:
            with self._wakeup:
                self._is_idle = True  # before looking, so that nothing is put there unseen
                is_needed = self._wakeup.wait_for(
                    lambda: self._control or self._parts or self._is_closed or not self._is_idle,
                    self._silence.ping_s,
                )
                self._is_idle = False
                if self._control:
                    return self._control.popleft(), ()
            if self._is_closed or not is_needed:
                return Frame(FrameKind.PING), ()
            with contextlib.suppress(IndexError):  # another channel was faster
                return self._parts.popleft()


def _encode(frame: Frame, sequence: int) -> bytes:
    kind, crossing, *rest = frame
    header = HEADER.pack(MAGIC, kind, crossing, sequence, *rest)
    return header + CRC.pack(zlib.crc32(header))


def _decode(data: bytearray, sequence: int) -> Frame:
    magic, kind, crossing, number, *rest = HEADER.unpack_from(data)
    (crc,) = CRC.unpack_from(data, HEADER.size)
    if magic != MAGIC:
        raise ViolationError(f"a frame that begins with {magic!r}, not {MAGIC!r}")
    if crc != (expected := zlib.crc32(data[: HEADER.size])):
        raise ViolationError(f"a header with CRC {crc:08x}, not {expected:08x}")
    if number != sequence:
        raise ViolationError(f"frame number {number}, not {sequence}")
    if kind not in list(FrameKind):
        raise ViolationError(f"a frame of kind {kind}")
    return Frame(FrameKind(kind), crossing, *rest)


def _move(call: Callable[[Sequence[memoryview]], int], buffers: Sequence[memoryview]) -> None:
    """Calls `sendmsg` or its opposite until all buffers are done."""
    todo = deque(buffers)
    while todo:
        some = [todo[i] for i in range(min(len(todo), MAX_BUFFERS))]
        count = call(some)
        while todo and count >= len(todo[0]):
            count -= len(todo.popleft())
        if count:
            todo[0] = todo[0][count:]
