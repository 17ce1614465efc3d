"""Connections that fill a long link: each may have only so many bytes on their way. No JAX.

Bandwidth times round trip is the number of bytes that must be on their way.
"""

import math
from fractions import Fraction

# So much of a buffer is on its way: Linux wakes a sender only when a third of its buffer is free.
# Buffers for receiving were measured to be alike (docs/long_links.md).
AHEAD = Fraction(2, 3)
BUFFER_BYTES = 4 << 20  # that Linux gives one connection, unless net.ipv4.tcp_wmem is raised
WINDOW_BYTES = int(AHEAD * BUFFER_BYTES)
MAX_WINDOW_BYTES = 64 << 20  # that a connection is given where the kernel allows it
MAX_FILLING = 32  # connections of two processes because the way is long; each has two threads


def streams_that_fill(rate_bytes_per_s: float, round_trip_s: float) -> int:
    """Returns how many connections fill a link, `MAX_FILLING` at most.

    >>> [streams_that_fill(rate * 1e9 / 8, 0.06) for rate in (0.1, 1.0, 10.0, 100.0)]
    [1, 3, 27, 32]
    """
    return min(math.ceil(rate_bytes_per_s * round_trip_s / WINDOW_BYTES), MAX_FILLING)


def carried_bytes_per_s(
    rate_bytes_per_s: float, round_trip_s: float, streams: int, window_bytes: float
) -> float:
    """Returns what a link carries one way by some connections that have so much on their way.

    >>> round(8e-6 * carried_bytes_per_s(125e6, 0.05, 4, AHEAD * 2**20))  # Mb/s
    447
    """
    if round_trip_s == 0:
        return rate_bytes_per_s
    return min(rate_bytes_per_s, streams * float(window_bytes) / round_trip_s)


def window_of(buffer_bytes: int) -> int:
    """Returns how much of a buffer is on its way."""
    return int(AHEAD * buffer_bytes)


def buffer_bytes(window_bytes: float) -> int:
    """Returns the buffer of which so much is on its way."""
    return math.ceil(window_bytes / AHEAD)


def window_bytes(rate_bytes_per_s: float, round_trip_s: float, streams: int) -> int:
    """Returns what each of some connections must have on its way, `MAX_WINDOW_BYTES` at most.

    >>> [round(window_bytes(rate * 1e9 / 8, 0.06, 32) / 2**20, 1) for rate in (10.0, 100.0, 1e3)]
    [2.2, 22.4, 64.0]
    """
    return min(math.ceil(rate_bytes_per_s * round_trip_s / streams), MAX_WINDOW_BYTES)


def most_bytes_per_s(round_trip_s: float) -> float:
    """Returns what two processes can send one way, whatever the link can.

    >>> round(8e-9 * most_bytes_per_s(0.06), 1)  # Gb/s
    11.9
    """
    return MAX_FILLING * WINDOW_BYTES / round_trip_s if round_trip_s else math.inf
