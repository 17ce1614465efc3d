"""Connections that fill a long link: each may have only so many bytes on their way. No JAX.

Bandwidth times round trip is the number of bytes that must be on their way.
"""

import math

# Linux sends so much ahead of its acknowledgement on one connection, unless net.ipv4.tcp_wmem is
# raised.
WINDOW_BYTES = 4 << 20
MAX_WINDOW_BYTES = 64 << 20  # that a connection is given where the kernel allows it
MAX_FILLING = 32  # connections of two processes because the way is long; each has two threads


def streams_that_fill(rate_bytes_per_s: float, round_trip_s: float) -> int:
    """Returns how many connections fill a link, `MAX_FILLING` at most.

    >>> [streams_that_fill(rate * 1e9 / 8, 0.06) for rate in (0.1, 1.0, 10.0, 100.0)]
    [1, 2, 18, 32]
    """
    return min(math.ceil(rate_bytes_per_s * round_trip_s / WINDOW_BYTES), MAX_FILLING)


def window_bytes(rate_bytes_per_s: float, round_trip_s: float, streams: int) -> int:
    """Returns what each of some connections must have on its way, `MAX_WINDOW_BYTES` at most.

    >>> [round(window_bytes(rate * 1e9 / 8, 0.06, 32) / 2**20, 1) for rate in (10.0, 100.0, 1e3)]
    [2.2, 22.4, 64.0]
    """
    return min(math.ceil(rate_bytes_per_s * round_trip_s / streams), MAX_WINDOW_BYTES)


def most_bytes_per_s(round_trip_s: float) -> float:
    """Returns what two processes can send one way, whatever the link can.

    >>> round(8e-9 * most_bytes_per_s(0.06), 1)  # Gb/s
    17.9
    """
    return MAX_FILLING * WINDOW_BYTES / round_trip_s if round_trip_s else math.inf
