"""Standard output and error of a verb that supervises: no write of it waits, and none fails.

A pipe that nobody reads (Ctrl-S, a log shipper that hangs) would stop whoever writes to it, and a
reader that has gone would end it. So each of the two streams has a thread and a bounded queue. The
oldest text is dropped from a full queue, counted and said. A stream whose reader has gone is said
on the other one, and what it would have shown is dropped: a lost console is no end of a training.
"""

import contextlib
import errno
import io
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

MOST_CHARACTERS = 1 << 20  # that wait to be written
LACKING = "backslashreplace"  # what becomes of characters that an encoding does not have
DRAIN_S = 2.0  # for what waits, when a verb ends
GONE = (errno.EPIPE, errno.EIO, errno.EBADF)  # the reader of a pipe, or a terminal


class QueuedStream(io.TextIOBase):
    """A text stream whose thread writes to a descriptor.

    Args:
      descriptor: a file, a pipe or a terminal, which stays open.
      on_failure: told in words when nobody can read it any more, or it cannot be written now.
      encoding: of the bytes.
    """

    def __init__(
        self, descriptor: int, on_failure: Callable[[str], object], encoding: str = "utf-8"
    ):
        self._descriptor, self._on_failure = descriptor, on_failure
        self._encoding = encoding
        self._texts: deque[str] = deque()
        self._num_characters, self._num_dropped = 0, 0
        self._is_writing, self._is_lost, self._is_failing = False, False, False
        self._changed = threading.Condition()
        threading.Thread(target=self._write_all, name="output", daemon=True).start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def fileno(self) -> int:
        return self._descriptor

    def write(self, text: str) -> int:
        """Takes a text; what is oldest of a full queue is dropped."""
        with self._changed:
            if text and not self._is_lost:
                self._texts.append(text)
                self._num_characters += len(text)
                while self._num_characters > MOST_CHARACTERS and len(self._texts) > 1:
                    self._num_characters -= len(self._texts.popleft())
                    self._num_dropped += 1
                self._changed.notify_all()
        return len(text)

    def drain(self, timeout_s: float = DRAIN_S) -> None:
        """Waits until all is written, but not for longer than this."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while (self._texts or self._is_writing) and not self._is_lost:
                if not self._changed.wait(deadline_s - time.monotonic()):
                    return

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                while not self._texts:
                    self._changed.wait()
                text, num_dropped = "".join(self._texts), self._num_dropped
                num_texts = len(self._texts)
                self._texts.clear()
                self._num_characters, self._num_dropped = 0, 0
                self._is_writing = True
            if num_dropped:
                text = f"[{num_dropped} pieces of output were dropped: nobody took them]\n{text}"
            try:
                self._write_bytes(text.encode(self._encoding, LACKING))
            except OSError as error:
                if error.errno in GONE:
                    with self._changed:
                        self._is_lost = True
                        self._texts.clear()
                        self._changed.notify_all()
                    self._on_failure(f"is gone ({error.strerror}), and the run goes on without it")
                    return
                with self._changed:  # a full disk: what comes later may find room
                    self._num_dropped += num_dropped + num_texts
                if not self._is_failing:
                    self._on_failure(f"cannot be written now ({error.strerror})")
                self._is_failing = True
            else:
                self._is_failing = False

    def _write_bytes(self, content: bytes) -> None:
        while content:
            try:
                content = content[os.write(self._descriptor, content) :]
            except BlockingIOError:  # a descriptor that another process has made so
                time.sleep(0.05)


def accept_any_text() -> None:
    """Lets standard output and error show what their encoding lacks by its number.

    A terminal or a pipe of another encoding than UTF-8 would end a verb, and so would the name of
    a file that is no text.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=LACKING)


@contextlib.contextmanager
def queued() -> Iterator[None]:
    """Standard output and error as such streams, until the end of a `with`."""
    # Python has None for a descriptor that was closed before it started.
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  # for good
    before = sys.stdout, sys.stderr
    try:
        descriptors = [stream.fileno() for stream in before]
    except (OSError, ValueError, AttributeError):  # those of a test or a notebook
        yield
        return
    for stream in before:
        stream.flush()
    streams: list[QueuedStream] = []

    def say(other: int, name: str) -> Callable[[str], object]:
        return lambda problem: streams[other].write(f"warning: {name} {problem}\n")

    streams += [
        QueuedStream(descriptors[0], say(1, "standard output"), before[0].encoding),
        QueuedStream(descriptors[1], say(0, "standard error"), before[1].encoding),
    ]
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        for each_stream in streams:
            each_stream.drain()
        sys.stdout, sys.stderr = before
