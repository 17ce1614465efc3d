"""An alarm for experts that no token reaches, and for those that too many reach. No JAX."""

from collections.abc import Mapping, Sequence
from typing import Any

from holmesjax.config import ExpertsConfig

LOADS, STEPS = "expert_loads", "expert_load_steps"  # in the record of a step
FIELD = "experts_in_alarm"  # in the record of a step: loads over the mean, by "block_001/3"
COUNT = "num_experts_in_alarm"  # in each record with loads: of all, named or not
MAX_NAMED = 32  # experts in a record: the farthest from the mean
SHOWN = 4  # experts in a line

Record = Mapping[str, Any]


class ExpertAlarm:
    """Says which experts had no choice since the last record of loads, or too many.

    Args:
      settings: of the experts of the run's model; None: there are none.
      limit: the load over the mean of its layer above which an expert has too many. A smaller
        capacity counts in its place, beyond which choices are left out.
    """

    def __init__(self, settings: ExpertsConfig | None, limit: float):
        capacity = None if settings is None else settings.capacity_factor
        self._has_capacity = capacity is not None and capacity < limit
        self.limit = min(limit, capacity or limit)
        self._named: frozenset[str] = frozenset()  # in the last record that had loads

    def step(self, record: Record) -> tuple[dict[str, Any], str | None]:
        """Takes the record of a step: additions to it, and a line where other experts are named."""
        if LOADS not in record:
            return {}, None
        found = outliers(record[LOADS], self.limit)
        named, self._named = self._named, frozenset(found)
        addition: dict[str, Any] = {COUNT: len(found)}
        if found:
            farthest = sorted(found, key=lambda name: -abs(found[name] - 1))[:MAX_NAMED]
            addition[FIELD] = {name: load for name, load in found.items() if name in farthest}
        if self._named == named:
            return addition, None
        return addition, self._describe(record, found)

    def _describe(self, record: Record, found: Mapping[str, float]) -> str:
        when = f"in the {record[STEPS]} steps to step {record['step']}"
        if not found:
            return f"every expert has choices {when}, and none too many: the alarm is over"
        idle = [name for name, load in found.items() if not load]
        most = sorted((name for name in found if found[name]), key=found.__getitem__, reverse=True)
        above = "capacity" if self._has_capacity else "limit"
        texts = []
        if idle:
            texts.append(f"{_count(idle)} without a token: {_shown(idle)}")
        if most:
            loads = [f"{name} with {found[name]:.3g}" for name in most]
            text = f"{_count(most)} above the {above} of {self.limit:g} times the mean load"
            texts.append(f"{text}: {_shown(loads)}")
        return f"ALARM: {when}, {'; '.join(texts)}"


def outliers(loads: Mapping[str, Sequence[float]], limit: float) -> dict[str, float]:
    """The experts without a choice and those above the limit: loads over the mean, by name.

    >>> outliers({"block_001": [0, 9, 3, 0], "block_003": [1, 1, 1, 1]}, 2.5)
    {'block_001/0': 0.0, 'block_001/1': 3.0, 'block_001/3': 0.0}
    """
    found = {}
    for layer, choices in loads.items():
        mean = sum(choices) / len(choices)
        for expert, count in enumerate(choices):
            if mean and (not count or count > limit * mean):
                found[f"{layer}/{expert}"] = count / mean
    return found


def _count(names: Sequence[str]) -> str:
    return f"{len(names)} expert{'s' if len(names) != 1 else ''}"


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
