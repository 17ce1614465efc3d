"""Numbered binary frames on an authenticated connection. No JAX.

A frame is a fixed header; its payload follows a `DATA` header. The header has the number of the
frame in its direction and a CRC-32, so that a lost place in the stream is noticed at once. A frame
that does not fit ends the channel. The payload relies on TCP's checksum: a CRC of ours would cost
more than copying the bytes.

    PING   the sender is alive; sent where nothing else is for a while (`heartbeats`)
    PULL   asks for a piece
    DATA   a part of it, on whichever connection is free
    BYE    the sender wants and gives nothing more; answered by BYE, then the connection is closed

Each header also says how many frames its sender has received whole. What is not received is kept
(`outbox`). So a channel can lose its connection and go on with a new one, at the very byte.
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

from holmesjax.transport.connections import CLOSED, shut
from holmesjax.transport.heartbeats import Silence
from holmesjax.transport.outbox import Outbox, Position

MAGIC = b"HJX3"
# Magic, kind, crossing, number, frames received, then the rest of Frame.
HEADER = struct.Struct(">4sB3xIQQQIIQQ")
CRC = struct.Struct(">I")
# A connection that is free takes the next part of a piece. Smaller parts would cost as much in
# Python as in copying, larger ones would leave connections idle at the end.
MIN_PART_BYTES, MAX_PART_BYTES = 1 << 20, 4 << 20
# Of the frames that were sent and not received, in a channel. Ten gigabits a second over 60 ms are
# 75 MB on their way, over all channels of a link.
MAX_KEPT_BYTES = 64 << 20
MAX_UNTOLD = 64  # frames without payload that are received before the other end is told
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

    def delivered(self, channel: "Channel", frame: Frame) -> None:
        """The other end has received a DATA frame, whose memory is free."""

    def left(self, channel: "Channel") -> None:
        """The other end said goodbye."""

    def broken(self, channel: "Channel", error: Exception) -> None:
        """The channel ended without a goodbye.

        The error is a ViolationError, a TimeoutError for silence, an OSError, or an error of the
        handler.
        """


# Makes a new connection: is told how much has been received and how the old one was lost. Returns
# the socket, and how much the other end has received. Raises what ends the channel if there is
# none in time.
Reconnect = Callable[["Channel", Position, OSError], tuple[socket.socket, Position]]


class Channel:
    """A stream of frames after the hello: a thread that reads, and a thread that writes.

    Args:
      sock: authenticated; closed with the channel.
      handler: of what comes.
      silence_s: how long nothing at all may be heard.
      parts: data to send, shared by all channels to the same process: the free one takes the next.
      reconnect: called on the reading thread when the connection is lost. Without it, the channel
        ends with its connection.
      heard: called on the reading thread when bytes of a payload have come.
    """

    def __init__(
        self,
        sock: socket.socket,
        handler: Handler,
        silence_s: float,
        parts: deque[Packet],
        reconnect: Reconnect | None = None,
        heard: Callable[[], object] = lambda: None,
    ):
        self._handler, self._silence = handler, Silence(silence_s)
        self._reconnect, self._heard = reconnect, heard
        self._control: deque[Frame] = deque()  # sent before data, so that asking waits for nobody
        self._parts = parts
        self._outbox: Outbox[Frame] = Outbox()
        self._again: deque[list[memoryview]] = deque()  # what a new connection begins with
        self._received = self._told = 0  # frames; told: as far as the other end knows
        self._owes_word = False  # that more was received
        self._partial_bytes = 0  # of the next frame
        self._wakeup = threading.Condition()
        self._said_bye = self._bye_is_last = self._bye_is_out = self.is_closed = False
        self._is_idle = self._is_in_payload = False
        self._is_up = True  # whether the connection is of use
        self._is_sending = False  # a thread is in a system call with it
        self._loss: OSError | None = None  # of the connection, until there is a new one
        self._byes = 0  # that are out or in
        self.payload_s = self._silence.heard_s  # when bytes of a payload came last
        self.has_left = False  # the other end, orderly
        self.is_over = threading.Event()  # both ends have said goodbye, or it was closed
        self._use(sock)
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
            self._wakeup.notify_all()

    def take_part(self) -> bool:
        """Wakes the channel for a new part; returns False if the channel is busy."""
        with self._wakeup:
            if not (self._is_idle and self._is_up and self._has_room()):
                return False
            self._is_idle = False  # at once, or the next part would wake it too, and no other
            self._wakeup.notify_all()
            return True

    def leave(self) -> None:
        """Says goodbye, once."""
        with self._wakeup:
            if not self._said_bye:
                self._said_bye = True
                self._control.append(Frame(FrameKind.BYE))
                self._wakeup.notify_all()

    def close(self) -> None:
        """Ends the channel, orderly if both ends have said goodbye."""
        with self._wakeup:
            self.is_closed = True
            self.is_over.set()
            self._wakeup.notify_all()
            shut(self._sock)  # wakes the threads

    def join(self, timeout_s: float) -> None:
        """Waits for the threads, except the calling one."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout_s)
        self._sock.close()

    def drop(self, error: OSError) -> None:
        """Gives the connection up, as the other end has done: a new one follows."""
        with self._wakeup:
            self._give_up(error)

    @property
    def left_s(self) -> float:
        """Seconds until the other end has been silent for too long."""
        return self._silence.left_s

    def _use(self, sock: socket.socket) -> None:
        self._sock = sock
        # The kernel's own timeout: with Python's, every call would be two system calls.
        wait_s = self._silence.look_s
        timeout = struct.pack("ll", int(wait_s), int(wait_s % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)

    def _has_room(self) -> bool:
        return self._outbox.num_bytes < MAX_KEPT_BYTES

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
            if isinstance(error, OSError) and self._said_bye:
                self.is_over.set()  # neither end wants anything of the other
            if self.is_over.is_set() or (self.has_left and isinstance(error, OSError)):
                return
        self._handler.broken(self, error)

    # ---- a new connection ----------------------------------------------------------------------

    def _give_up(self, error: OSError) -> None:
        """Notes that the connection is lost, and wakes both threads; the first error counts."""
        self._is_up = False
        self._loss = self._loss or error
        shut(self._sock)
        self._wakeup.notify_all()

    def _mend(self, error: OSError) -> None:
        """Goes on with a new connection. Raises the loss of the old one where there is none."""
        with self._wakeup:
            if self._reconnect is None or self.has_left or self.is_closed:
                raise error
            self._give_up(error)
            self._wakeup.wait_for(lambda: not self._is_sending)
            loss = self._loss
            assert loss is not None
            self._sock.close()
        position = Position(messages=self._received, num_bytes=self._partial_bytes)
        sock, theirs = self._reconnect(self, position, loss)
        try:
            delivered = self._outbox_received(theirs.messages)
            with self._wakeup:
                self._again = deque(self._outbox.rest(theirs))
                self._use(sock)
                if self.is_closed:
                    raise loss
                self._is_up, self._loss = True, None
                self._owes_word = True  # so that both ends are heard at once
                self._wakeup.notify_all()
        except BaseException as fault:
            sock.close()
            if isinstance(fault, ValueError):
                raise ViolationError(str(fault)) from None
            raise
        self._deliver(delivered)

    def _outbox_received(self, count: int) -> list[Frame]:
        """Takes word of how many frames the other end has received; returns those of them."""
        with self._wakeup:
            frames = self._outbox.received(count)
            if frames:
                self._wakeup.notify_all()  # there may be room again
        return frames

    def _deliver(self, frames: Sequence[Frame]) -> None:
        for frame in frames:
            if frame.kind is FrameKind.DATA:
                self._handler.delivered(self, frame)

    # ---- reading -------------------------------------------------------------------------------

    def _read(self) -> None:
        header = bytearray(HEADER.size + CRC.size)
        while True:
            _move(self._hear, [memoryview(header)])
            frame, received = _decode(header, self._received)
            try:
                delivered = self._outbox_received(received)
            except ValueError as error:
                raise ViolationError(str(error)) from None
            self._deliver(delivered)
            if frame.kind is FrameKind.DATA:
                buffers = self._handler.landing(self, frame)
                self._is_in_payload = True
                _move(self._hear, buffers)
                self._is_in_payload = False
            self._count()
            if frame.kind is FrameKind.PULL:
                self._handler.pulled(self, frame)
            elif frame.kind is FrameKind.DATA:
                self._tell()
                self._handler.landed(self, frame)
            elif frame.kind is FrameKind.BYE:
                self.has_left = True
                self._handler.left(self)
                self.leave()
                self._count_bye()

    def _count(self) -> None:
        """Counts a frame as received."""
        self._received, self._partial_bytes = self._received + 1, 0
        if self._received - self._told >= MAX_UNTOLD:
            self._tell()

    def _tell(self) -> None:
        """Tells the other end what was received, with the next frame or a PING."""
        with self._wakeup:
            self._owes_word = True
            self._wakeup.notify_all()

    def _hear(self, buffers: Sequence[memoryview]) -> int:
        """Receives all bytes that fit, or those before the kernel's timeout; returns their number.

        A call that ended with each packet would take the GIL for each, on a slow link. A lost
        connection is mended meanwhile.
        """
        while True:
            try:
                received = self._sock.recvmsg_into(buffers, 0, socket.MSG_WAITALL)[0]
                if not received:
                    raise ConnectionResetError(CLOSED)
            except BlockingIOError:  # what the kernel's timeout looks like
                self._silence.check()
                if self._reconnect and self._silence.is_long and not self.has_left:
                    # The kernel may wait as long again until it sends what was lost.
                    self._mend(TimeoutError(f"silent for {self._silence.limit_s / 2:g} s"))
                continue
            except OSError as error:
                self._mend(error)
                continue
            self._silence.end()
            self._partial_bytes += received
            if self._is_in_payload:
                self.payload_s = self._silence.heard_s
                self._heard()
            return received

    # ---- writing -------------------------------------------------------------------------------

    def _write(self) -> None:
        while True:
            with self._wakeup:
                buffers = self._next()
                if buffers is None:
                    return
                sock, self._is_sending = self._sock, True
            lost: OSError | None = None
            try:
                _move(sock.sendmsg, buffers)
            except OSError as error:
                lost = error
            with self._wakeup:
                self._is_sending = False
                if lost is not None:
                    if self._reconnect is None or self.has_left:
                        raise lost
                    self._give_up(lost)
                elif self._bye_is_last and not self._again and not self._bye_is_out:
                    self._bye_is_out = True
                    self._count_bye()
                self._wakeup.notify_all()

    def _next(self) -> list[memoryview] | None:
        """Returns the next frame to send, a PING if there is nothing for a while; None: closed."""
        while True:
            self._is_idle = True  # before looking, so that nothing is put there unseen
            is_needed = self._wakeup.wait_for(self._has_work, self._silence.ping_s)
            self._is_idle = False
            if self.is_closed:
                return None
            if not self._is_up:
                continue
            if self._again:
                return self._again.popleft()
            if not self._bye_is_last and (packet := self._pick(is_needed)):
                return self._keep(*packet)

    def _has_work(self) -> bool:
        if self.is_closed or not self._is_up:
            return self.is_closed
        if self._bye_is_last:
            return bool(self._again)
        has_part = self._has_room() and self._parts
        return bool(
            self._again or self._control or self._owes_word or has_part or not self._is_idle
        )

    def _pick(self, is_needed: bool) -> Packet | None:
        if self._control:
            return self._control.popleft(), ()
        if self._has_room():
            with contextlib.suppress(IndexError):  # nothing, or another channel was faster
                return self._parts.popleft()
        return (Frame(FrameKind.PING), ()) if self._owes_word or not is_needed else None

    def _keep(self, frame: Frame, payload: Sequence[memoryview]) -> list[memoryview]:
        """Returns the bytes of a new frame, which are kept until they are received."""
        header = _encode(frame, self._outbox.number, self._received)
        self._told, self._owes_word = self._received, False
        buffers = [memoryview(header), *payload]
        self._outbox.add(frame, buffers)
        self._bye_is_last = frame.kind is FrameKind.BYE
        return buffers


def _encode(frame: Frame, number: int, received: int = 0) -> bytes:
    kind, crossing, *rest = frame
    header = HEADER.pack(MAGIC, kind, crossing, number, received, *rest)
    return header + CRC.pack(zlib.crc32(header))


def _decode(data: bytearray, expected_number: int) -> tuple[Frame, int]:
    """Returns a frame, and how many frames its sender has received."""
    magic, kind, crossing, number, received, *rest = HEADER.unpack_from(data)
    (crc,) = CRC.unpack_from(data, HEADER.size)
    if magic != MAGIC:
        raise ViolationError(f"a frame that begins with {magic!r}, not {MAGIC!r}")
    if crc != (expected := zlib.crc32(data[: HEADER.size])):
        raise ViolationError(f"a header with CRC {crc:08x}, not {expected:08x}")
    if number != expected_number:
        raise ViolationError(f"frame number {number}, not {expected_number}")
    if kind not in list(FrameKind):
        raise ViolationError(f"a frame of kind {kind}")
    return Frame(FrameKind(kind), crossing, *rest), received


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
