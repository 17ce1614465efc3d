"""Buffers of sockets that let a long link have enough bytes on their way. No JAX.

Linux lets the buffers of a connection grow by themselves up to `tcp_wmem` and `tcp_rmem`. A program
may ask for more, up to twice `wmem_max` and `rmem_max`; from then on they no longer grow. So it is
asked only where that gives more. Two thirds of a buffer are on their way (`windows.AHEAD`).
"""

import socket
from pathlib import Path
from typing import NamedTuple

from holmesjax.topology import windows

SYSCTL = Path("/proc/sys/net")


class Limits(NamedTuple):
    """The largest buffers of one direction, in bytes."""

    grown: int  # that the kernel makes by itself
    asked: int  # that a program gets when it asks for more

    @property
    def most(self) -> int:
        return max(self)


def limits() -> tuple[Limits, Limits] | None:
    """The limits for what is sent and for what is received; None where the kernel does not say."""
    try:
        return _limits("wmem"), _limits("rmem")
    except (OSError, ValueError, IndexError):
        return None


def _limits(name: str) -> Limits:
    grown = int((SYSCTL / "ipv4" / f"tcp_{name}").read_text().split()[-1])
    try:
        asked = 2 * int((SYSCTL / "core" / f"{name}_max").read_text())
    except OSError:  # not shown in a network namespace
        asked = 0
    return Limits(grown, asked)


def widen(sock: socket.socket, window_bytes: int) -> int | None:
    """Lets a connection have so many bytes on their way, as far as the kernel allows.

    Returns the bytes that the kernel has granted, read back where they were asked for: those of the
    smaller buffer. None where the kernel does not say.
    """
    if (found := limits()) is None:
        return None
    granted = []
    for option, limit in zip((socket.SO_SNDBUF, socket.SO_RCVBUF), found, strict=True):
        needed = windows.buffer_bytes(window_bytes)
        if limit.grown < min(needed, limit.asked):
            sock.setsockopt(socket.SOL_SOCKET, option, -(-needed // 2))  # the kernel doubles it
            granted.append(sock.getsockopt(socket.SOL_SOCKET, option))
        else:
            granted.append(limit.grown)
    return windows.window_of(min(granted))
