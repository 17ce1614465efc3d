"""The speed of one way from node to node, as `launch probe` has measured it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Seconds = Mapping[int, Mapping[int, Sequence[float]]]  # streams -> bytes -> of each round


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeSpeed:
    """Latency and bandwidth of one way, and the times that they are made of."""

    fabric: str
    latency_s: float  # one way
    bandwidth_bytes_per_s: float
    seconds: Seconds
