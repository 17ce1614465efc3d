"""Whether islands agree after a meeting, and which of them does not. No JAX.

Owners have the global weights. An island whose weights have another digest than its owner's is the
one that differs. If several others differ alike, the owner does: what it holds is not what it sent.
In pairs, digests are of the arrays that crossed, and each name has one island that has received it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from holmesjax.errors import PeerError


class Digests(NamedTuple):
    """Digests after a meeting, by layer and name of the parameter."""

    weights: Mapping[str, str]  # of an island, or of one of its stages; of pairs: what has come
    owned: Mapping[str, str]  # of the global weights that it owns; of pairs: what it has sent


def compare(step: int, islands: Sequence[Digests]) -> None:
    """Raises PeerError where an island has other weights than the owners.

    Args:
      step: after which the meeting was.
      islands: the digests of each.
    """
    owned = {name: digest for island in islands for name, digest in island.owned.items()}
    owner = {name: k for k, island in enumerate(islands) for name in island.owned}
    for k, digests in enumerate(islands):
        unlike = [name for name, digest in digests.weights.items() if digest != owned[name]]
        if unlike:
            name = unlike[0]
            if name not in islands[owner[name]].weights:
                raise PeerError(
                    f"island {k}",
                    "has received other arrays than its partner sent in the meeting of step "
                    f"{step}",
                    found=f"{len(unlike)} differ: the digest of {name!r} is "
                    f"{digests.weights[name]}, and that of what was sent {owned[name]}",
                    fix="start again from the last checkpoint; look at the memory of its devices",
                )
            others = [x.weights[name] for n, x in enumerate(islands) if n != owner[name]]
            is_owner = len(others) > 1 and len(set(others)) == 1
            raise PeerError(
                f"island {owner[name] if is_owner else k}",
                f"has other weights than the {'others' if is_owner else 'owners'} after the "
                f"meeting of step {step}",
                found=f"{len(unlike)} of {len(owned)} parameters differ: the digest of {name} is "
                f"{digests.weights[name]} in island {k}, and {owned[name]} in what island "
                f"{owner[name]} owns",
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
        for number, of_stage in self._told.pop(step).items():
            k = self.island_of[number]
            weights, owned = islands[k]
            islands[k] = Digests({**weights, **of_stage.weights}, {**owned, **of_stage.owned})
        compare(step, islands)
