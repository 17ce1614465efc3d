"""Times bytes that travel as boundaries do: in frames, over several streams. No JAX.

sender: DATA, part by part, on whichever stream is free -> waits for PULL
receiver: memory that it has held before -> PULL once all is there, as if for the next
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from socket import socket

import numpy as np

from holmesjax.transport.frames import Channel, Frame, FrameKind, Packet, ViolationError, parts_of

LEAVE_S = 2.0  # for the other end to say goodbye


class Sender:
    """Sends over connections that the other end has given to a `Receiver`.

    Args:
      socks: authenticated; closed at the end.
      silence_s: how long nothing at all may be heard, or move.
    """

    def __init__(self, socks: Sequence[socket], silence_s: float):
        self._silence_s, self._moved_s = silence_s, time.monotonic()
        self._parts: deque[Packet] = deque()
        self._channels = [Channel(sock, self, silence_s, self._parts) for sock in socks]
        self._is_over = threading.Event()  # what was sent has come, or never will
        self._error: Exception | None = None
        for channel in self._channels:
            channel.start()

    def seconds(self, number: int, block: np.ndarray) -> float:
        """Sends `block`, the array `number`; returns the seconds until the other end has all of it.

        Raises:
          OSError: the connection broke, or nothing moved.
        """
        self._is_over.clear()
        self._moved_s, start_s = time.monotonic(), time.perf_counter()
        memory = block.data
        for offset, length in parts_of(block.nbytes, len(self._channels)):
            frame = Frame(FrameKind.DATA, step=number, offset=offset, length=length)
            self._parts.append((frame, [memory[offset : offset + length]]))
            any(channel.take_part() for channel in self._channels)
        while self._error is None and not self._is_over.wait(self._silence_s / 4):
            if time.monotonic() - self._moved_s > self._silence_s:
                raise TimeoutError(f"nothing moved for {self._silence_s:g} s")
        if self._error is not None:
            raise OSError(str(self._error)) from self._error
        return time.perf_counter() - start_s

    def close(self) -> None:
        for channel in self._channels:
            channel.leave()
        for channel in self._channels:
            channel.is_over.wait(LEAVE_S)
            channel.close()
            channel.join(LEAVE_S)

    def pulled(self, channel: Channel, frame: Frame) -> None:
        self._is_over.set()

    def landing(self, channel: Channel, frame: Frame) -> Sequence[memoryview]:
        raise ViolationError(f"data that was not asked for: {frame}")

    def landed(self, channel: Channel, frame: Frame) -> None:
        raise AssertionError("nothing lands here")

    def delivered(self, channel: Channel, frame: Frame) -> None:
        self._moved_s = time.monotonic()

    def left(self, channel: Channel) -> None:
        pass

    def broken(self, channel: Channel, error: Exception) -> None:
        self._error = error
        self._is_over.set()


class Receiver:
    """Receives arrays of known sizes, in their order, and drops them.

    Args:
      sizes: in bytes; the last ones need not come.
      silence_s: how long nothing at all may be heard.
    """

    def __init__(self, sizes: Sequence[int], silence_s: float):
        self._sizes, self._silence_s = sizes, silence_s
        self._left, self._lock = dict(enumerate(sizes)), threading.Lock()
        self._memory = memoryview(b"")

    def receive(self, sock: socket) -> None:
        """Serves one of the connections until it ends, and closes it."""
        channel = Channel(sock, self, self._silence_s, deque())
        channel.start()
        channel.is_over.wait()  # at the latest when the other end is silent
        channel.close()
        channel.join(LEAVE_S)

    def pulled(self, channel: Channel, frame: Frame) -> None:
        raise ViolationError(f"a PULL, where nothing is sent from: {frame}")

    def landing(self, channel: Channel, frame: Frame) -> Sequence[memoryview]:
        stop = frame.offset + frame.length
        with self._lock:
            if self._left.get(frame.step, 0) < frame.length or stop > self._sizes[frame.step]:
                raise ViolationError(f"more than was agreed: {frame}")
            if len(self._memory) < self._sizes[frame.step]:
                self._memory = np.ones(self._sizes[frame.step], np.uint8).data  # touches the pages
            return [self._memory[frame.offset : stop]]

    def landed(self, channel: Channel, frame: Frame) -> None:
        with self._lock:
            self._left[frame.step] -= frame.length
            is_whole = not self._left[frame.step]
        if is_whole:
            channel.send(Frame(FrameKind.PULL, step=frame.step + 1))

    def delivered(self, channel: Channel, frame: Frame) -> None:
        pass

    def left(self, channel: Channel) -> None:
        pass

    def broken(self, channel: Channel, error: Exception) -> None:
        channel.close()
