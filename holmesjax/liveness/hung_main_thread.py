"""Threads that act for a process whose main thread hangs: hear, say why, end. No JAX.

Python runs a signal's handler only when its main thread comes back to the interpreter. One that
compiles, or waits in a collective, does not.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Collection
from typing import NoReturn

LAST_WORDS_S = 10.0  # for all that a process has to say before it ends
# Functions that return when other processes have come, by module; None: any of the module.
WAITS: dict[str, Collection[str] | None] = {
    "jax._src.distributed": None,
    "jax._src.array": ("_value", "block_until_ready"),
    "jax._src.api": ("block_until_ready",),
    "jax._src.interpreters.pxla": ("__call__",),
    "holmesjax.runtime.domain": ("__call__",),
}


def stop_signals() -> tuple[int, ...]:
    """Returns the signals that ask for a stop; SIGHUP only where `nohup` has not turned it off."""
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGINT, signal.SIGTERM, *hangup)


def hear_signals(numbers: Collection[int], heard: Callable[[int], object]) -> Callable[[], None]:
    """Starts a thread that calls `heard` with the number of each of these signals.

    A signal without a handler gets one that does nothing. The function that is returned ends the
    thread, and gives the signals back to the handlers before. Call both from the main thread.
    """
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    descriptor_before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}

    def listen(_: socket.socket) -> None:
        with reading:
            while came := reading.recv(64):
                for number in came:
                    if number in numbers:
                        heard(number)

    def give_back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(descriptor_before)
        writing.close()
        thread.join()

    # The thread keeps both ends open.
    thread = threading.Thread(target=listen, args=(writing,), name="signals", daemon=True)
    thread.start()
    return give_back


def write_stacks() -> None:
    """Writes where each thread is to standard error, the main one first.

    Around `sys.stderr` and its lock: the main thread may hang in writing to it.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    lines = ["the stacks of all threads:\n"]
    for ident, frame in frames:
        lines += [f"thread {names.get(ident, ident)}\n", *traceback.format_stack(frame)]
    with open(2, "w", closefd=False) as stream:
        stream.write("".join(lines))


def waits_in() -> str:
    """Returns the function in which the main thread waits for other processes; "" if it does not.

    A device that hangs by itself looks the same from here.
    """
    ident = threading.main_thread().ident
    assert ident is not None, "the main thread has begun"
    frame = sys._current_frames()[ident]
    module, name = str(frame.f_globals.get("__name__")), frame.f_code.co_name
    names = WAITS.get(module, ())
    return f"{module}.{name}" if names is None or name in names else ""


def end_within(limit_s: float, status: int) -> None:
    """Ends this process with a status if it has not ended by itself within a limit."""
    end = threading.Timer(limit_s, os._exit, (status,))
    end.daemon = True
    end.start()


def end_process(status: int, *last_words: Callable[[], object]) -> NoReturn:
    """Ends this process from any thread, whatever fails or hangs in its last words."""
    try:
        end_within(LAST_WORDS_S, status)
        # A stream with a queue has `drain`: its `flush` waits for nobody.
        flushes = [getattr(stream, "drain", stream.flush) for stream in (sys.stdout, sys.stderr)]
        for say in (*last_words, *flushes):
            with contextlib.suppress(Exception):  # a full disk, a closed pipe
                say()
    finally:
        os._exit(status)
