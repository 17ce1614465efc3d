"""Connections between other processes, which a test resets while both of their ends live."""

import contextlib
import ctypes
import os
import socket
from pathlib import Path

PIDFD_GETFD = 438  # the system call, which Python has no function for
AF_UNSPEC = bytes(16)  # connecting to it ends a connection with a reset
LIBC = ctypes.CDLL(None, use_errno=True)


def reset_connections(one: int, other: int) -> int:
    """Resets the connections over IPv4 between two processes; returns their number.

    Both are descendants of this process, which may look into no others.
    """
    with contextlib.ExitStack() as stack:
        ends = {(there, here) for _, here, there in _connections(other, stack)}
        found = [
            connection for connection, *places in _connections(one, stack) if tuple(places) in ends
        ]
        return sum(
            LIBC.connect(connection.fileno(), AF_UNSPEC, len(AF_UNSPEC)) == 0
            for connection in found
        )


def _connections(
    pid: int, stack: contextlib.ExitStack
) -> list[tuple[socket.socket, tuple[str, int], tuple[str, int]]]:
    """Returns the connections over IPv4 of another process, which `stack` closes here.

    With each come its own address and that of the other end.
    """
    process = os.pidfd_open(pid)
    stack.callback(os.close, process)
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile, or not connected
            if not os.readlink(link).startswith("socket:"):
                continue
            number = LIBC.syscall(PIDFD_GETFD, process, int(link.name), 0)
            if number < 0:
                raise OSError(ctypes.get_errno(), f"descriptor {link.name} of process {pid}")
            own = stack.enter_context(socket.socket(fileno=number))
            if own.family == socket.AF_INET:
                found.append((own, own.getsockname(), own.getpeername()))
    return found
