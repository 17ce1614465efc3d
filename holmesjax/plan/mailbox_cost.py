"""The cost of a round through a mailbox: bytes and requests. Does not import JAX."""

import math
from collections.abc import Mapping, Sequence

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

PIECE_BYTES = 64 << 20  # of an object, at most, in one request
RECORDS = 2  # objects of a stage in a round: its weights, and the record of them


@dataclass(frozen=True, kw_only=True, slots=True, config=ConfigDict(extra="forbid"))
class MailboxCost:
    """The bytes and the requests of one island in a round; records and looks are not in them.

    Weights are float32 in all. Who merges has the second three besides.
    """

    sent: float  # bytes
    received: float
    requests: int
    merge_sent: float
    merge_received: float
    merge_requests: int


def mailbox_cost(
    sizes: Mapping[str, int], num_islands: int, stages: Sequence[Sequence[str]]
) -> MailboxCost:
    """The cost of a round for an island.

    >>> mailbox_cost({"embed.a": 3, "head.b": 1}, 2, [["embed", "head"]])
    ... # doctest: +NORMALIZE_WHITESPACE
    MailboxCost(sent=16.0, received=16.0, requests=4, merge_sent=32.0, merge_received=64.0,
                merge_requests=11)

    Args:
      sizes: numbers of each parameter that trains, by layer and name.
      num_islands: of the run.
      stages: the layers of each stage of the island.
    """
    bytes_of = lambda layers: 4 * sum(n for x, n in sizes.items() if x.partition(".")[0] in layers)
    whole, pieces = 4.0 * sum(sizes.values()), lambda count: math.ceil(count / PIECE_BYTES)
    # A record is read before the weights of a round.
    requests = sum(RECORDS + 1 + max(1, pieces(bytes_of(layers))) for layers in stages)
    layers = {name.partition(".")[0] for name in sizes}
    reads = sum(max(1, pieces(bytes_of([layer]))) for layer in layers)
    return MailboxCost(
        sent=whole,
        received=whole,
        requests=requests,
        merge_sent=2 * whole,
        merge_received=(num_islands + 2) * whole,
        merge_requests=(num_islands + 2) * reads + 3,
    )
