"""Buffers of sockets that let a long link have enough bytes on their way. No JAX.

Linux lets the buffers of a connection grow by themselves up to `tcp_wmem` and `tcp_rmem`. A program
may ask for more, up to twice `wmem_max` and `rmem_max`; from then on they no longer grow. So it is
asked only where that gives more. Two thirds of a buffer that grows are on their way
(`windows.AHEAD`), and half of one that was asked for: its window stays what it was at first.
"""

import socket
from pathlib import Path
from typing import NamedTuple

from holmesjax.topology import windows

SYSCTL = Path("/proc/sys/net")
ASKED = 2  # a buffer that was asked for, over what of it is on its way


class Limits(NamedTuple):
    """The largest buffers of one direction, in bytes."""

    grown: int  # that the kernel makes by itself
    asked: int  # that a program gets when it asks for more

    @property
    def window_bytes(self) -> int:
        """The most that is on its way."""
        return max(windows.window_of(self.grown), self.asked // ASKED)


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

    Returns the bytes that the kernel grants, read back where they were asked for: those of the
    smaller buffer. None where the kernel does not say.
    """
    if (found := limits()) is None:
        return None
    granted = []
    for option, limit in zip((socket.SO_SNDBUF, socket.SO_RCVBUF), found, strict=True):
        grown = windows.window_of(limit.grown)
        if grown < min(window_bytes, limit.asked // ASKED):
            # The kernel doubles what it is asked for.
            sock.setsockopt(socket.SOL_SOCKET, option, ASKED * window_bytes // 2)
            granted.append(sock.getsockopt(socket.SOL_SOCKET, option) // ASKED)
        else:
            granted.append(grown)
    return min(granted)
