"""The state of an island between meetings: float32, cut as masters.

Only meetings read and change it. Its trees have a dict for each layer of the chunk, also for one of
which they have nothing.
"""

from dataclasses import dataclass
from typing import Any

import jax

Tree = Any  # a nested dict of arrays, keyed by layer and parameter name


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class IslandArrays:
    """The arrays that an island has of all its parameters, where its rule needs them."""

    start: Tree | None = None  # weights with which it has begun the steps since the last meeting
    momentum: Tree | None = None  # of its own steps
    known: Tree | None = None  # the global weights that came last


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Outer:
    """The state of an island between meetings, of what it owns, and of its own."""

    # The global weights after the last meeting; of pairs, the mean of slow weights when it was
    # taken last.
    weights: Tree
    momentum: Tree | None  # none where islands meet through a mailbox, which has it
    before: Tree | None = None  # the global weights of the meeting before the last
    own: IslandArrays | None = None
    # In a checkpoint of an island that is a job of its own: by layer, the numbers of RoundStanding
    # (`islands.landing`).
    rounds: Tree | None = None
