"""Whether islands agree after a meeting, and which of them does not. No JAX.

Owners have the global weights. An island whose weights have another digest than its owner's is the
one that differs, whichever it is: no majority is needed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from holmesjax.errors import PeerError


class Digests(NamedTuple):
    """Digests after a meeting, by layer and name of the parameter."""

    weights: Mapping[str, str]  # of an island, or of one of its stages
    owned: Mapping[str, str]  # of the global weights that it owns


def compare(step: int, islands: Sequence[Digests]) -> None:
    """Raises PeerError where an island has other weights than the owners.

    Args:
      step: after which the meeting was.
      islands: the digests of each.
    """
    owned = {name: digest for island in islands for name, digest in island.owned.items()}
    for k, island in enumerate(islands):
        unlike = [name for name, digest in island.weights.items() if digest != owned[name]]
        if unlike:
            name = unlike[0]
            raise PeerError(
                f"island {k}",
                f"has other weights than the owners after the meeting of step {step}",
                found=f"{len(unlike)} of {len(owned)} parameters differ: {name} has the digest "
                f"{island.weights[name]}, not {owned[name]}",
                fix="start again from the last checkpoint; look at the memory of its devices",
            )


@dataclass
class Agreement:
    """Compares what the stages of all islands tell of each meeting.

    Args:
      island_of: the island of each stage of the run.
    """

    island_of: Sequence[int]
    _told: dict[int, dict[int, Digests]] = field(default_factory=dict)  # step -> stage -> digests

    def take(self, step: int, stage: int, digests: Digests) -> None:
        """Takes the digests of a stage. Raises PeerError as `compare` once all have told."""
        told = self._told.setdefault(step, {})
        told[stage] = digests
        if len(told) < len(self.island_of):
            return
        islands = [Digests({}, {}) for _ in range(1 + max(self.island_of))]
        for number, own in self._told.pop(step).items():
            k = self.island_of[number]
            weights, owned = islands[k]
            islands[k] = Digests({**weights, **own.weights}, {**owned, **own.owned})
        compare(step, islands)
