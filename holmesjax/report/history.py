"""The numbers of all steps of a run in columns. No JAX.

A record of `metrics.jsonl` takes 4 KiB as Python's dicts, so a run of a million steps would fill
the memory of a launcher. Here a step takes 9 bytes for each of its numbers.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from holmesjax.checkpoints import commit_alarm, scrub
from holmesjax.report import expert_alarm, metrics

Record = Mapping[str, Any]
# The numbers that are kept, and the dicts of numbers: of those each entry has a column of its own.
NUMBERS = (
    *("step", "loss", "tokens_per_s", "mfu", "step_time_s", "input_wait_s", "bubble_share"),
    *("skipped", "spike", "val_loss", commit_alarm.FIELD, scrub.FIELD),
)
GROUPS = ("link_bytes", "val_losses")
# The names of a record that are HolmesJAX's. Any other number is of a callback or of layers.
TAKEN = frozenset(
    (
        *(*NUMBERS, *GROUPS, *metrics.MAPPINGS, *metrics.MAY_HAVE),
        *("grad_norm", "learning_rate", "time_left_s", "time_s"),
        *("link_losses", "link_lost_s", "nic_bytes", "round"),
        *(expert_alarm.LOADS, expert_alarm.STEPS, expert_alarm.FIELD),
        *(expert_alarm.COUNT, "expert_peaks"),
    )
)
MAX_ALARMS = 20  # of experts, the newest
MAX_OTHERS = 64  # other names that are kept: who makes a name for each step would fill the memory
CHUNK = 4096  # records that are dicts at a time
Name = str | tuple[str, str]  # of a number, or of a dict and an entry of it


class History:
    """The steps of a run in their order; of two records of one step, the later counts.

    Args:
      records: what `metrics` wrote, one after the other; they are looked at once.
    """

    def __init__(self, records: Iterable[Record]):
        self._columns: dict[Name, _Column] = {}
        self.first: Record = {}
        self.last: Record = {}
        self.last_validated: Record | None = None
        self.memory_bytes: dict[str, int] = {}  # the last peak of each device
        self.last_expert_loads: Record | None = None  # the last record that has them
        # The experts that raised an alarm, by step, and how many did that are not named.
        self.expert_alarms: dict[int, tuple[Mapping[str, float], int]] = {}
        count, found = 0, iter(records)
        while chunk := list(itertools.islice(found, CHUNK)):
            self._take(chunk, count)
            count += len(chunk)
        self._order = slice(None)
        for column in self._columns.values():
            column.end(count)
        if count:
            self._order = _order(self._columns["step"].values)
        self._count = len(self.of("step")) if count else 0

    def _take(self, chunk: Sequence[Record], before: int) -> None:
        """Takes the records that follow on as many `before`."""
        step = lambda record: record["step"]
        low, high = min(chunk, key=step), max(reversed(chunk), key=step)
        if not self.first or low["step"] <= self.first["step"]:
            self.first = metrics.with_nan(low)
        if not self.last or high["step"] >= self.last["step"]:
            self.last = metrics.with_nan(high)
        for record in reversed(chunk):
            if "val_loss" in record:
                self.last_validated = metrics.with_nan(record)
                break
        for record in chunk:
            if "memory_bytes" in record:
                self.memory_bytes |= record["memory_bytes"]
            if expert_alarm.LOADS in record:
                self.last_expert_loads = record
            if expert_alarm.FIELD in record:
                named = record[expert_alarm.FIELD]
                more = record.get(expert_alarm.COUNT, len(named)) - len(named)
                self.expert_alarms[record["step"]] = named, more
        self.expert_alarms = dict(sorted(self.expert_alarms.items())[-MAX_ALARMS:])
        for name in dict.fromkeys(itertools.chain.from_iterable(chunk)):
            if name in NUMBERS or (name not in TAKEN and self._keeps_other(name, chunk)):
                self._add(name, before, chunk)
        for group in GROUPS:
            dicts = [record.get(group) or {} for record in chunk]
            for entry in dict.fromkeys(itertools.chain.from_iterable(dicts)):
                self._add((group, entry), before, dicts)

    def _keeps_other(self, name: str, chunk: Sequence[Record]) -> bool:
        is_known = name in self._columns or len(self.others) < MAX_OTHERS
        return is_known and all(metrics.is_number(record.get(name)) for record in chunk)

    def _add(self, name: Name, before: int, dicts: Sequence[Record]) -> None:
        key = name if isinstance(name, str) else name[1]
        try:
            values, known = [record[key] for record in dicts], np.ones(len(dicts), bool)
        except KeyError:
            values = [record.get(key) for record in dicts]
            known = np.array([key in record for record in dicts])
        numbers = np.array(values, float)  # None becomes NaN
        self._columns.setdefault(name, _Column()).add(before, numbers, known)

    def __len__(self) -> int:
        return self._count

    def has(self, name: Name) -> np.ndarray:
        """Whether each step has a number: [steps] booleans."""
        if name not in self._columns:
            return np.zeros(len(self), bool)
        return self._columns[name].known[self._order]

    def of(self, name: Name) -> np.ndarray:
        """A number of each step: [steps], NaN where a step has none."""
        if name not in self._columns:
            return np.full(len(self), np.nan)
        return self._columns[name].values[self._order]

    def median(self, name: Name) -> float:
        """The median of a number over the steps that have a finite one; NaN where none has."""
        values = self.of(name)
        finite = values[np.isfinite(values)]
        return float(np.median(finite)) if len(finite) else math.nan

    def with_steps(self, name: Name) -> tuple[np.ndarray, np.ndarray]:
        """The steps that have a number, and their numbers: two of [found]."""
        where = self.has(name)
        return self.of("step")[where], self.of(name)[where]

    @property
    def others(self) -> list[str]:
        """The names of the numbers that are not HolmesJAX's, in the order of their first steps."""
        return [name for name in self._columns if isinstance(name, str) and name not in TAKEN]

    def entries(self, group: str) -> list[str]:
        """The names of the entries of a dict, in the order of their first steps."""
        return [name[1] for name in self._columns if isinstance(name, tuple) and name[0] == group]


def read(run_dir: str | Path) -> History:
    """The steps of a run folder. Raises DataError where `metrics.jsonl` is damaged."""
    steps = History(metrics.stream(run_dir, is_raw=True))
    for name in (*metrics.NUMBERS, "skipped"):
        if not (has := steps.has(name)).all():
            raise metrics.lacks(run_dir, int(steps.of("step")[np.argmin(has)]), name)
    return steps


def of(records: "History | Iterable[Record]") -> History:
    """The same as a history."""
    return records if isinstance(records, History) else History(records)


class _Column:
    """A number of each record, NaN where it has none, and which records have it."""

    def __init__(self) -> None:
        self._chunks: list[tuple[np.ndarray, np.ndarray]] = []
        self._count = 0

    def add(self, before: int, values: np.ndarray, known: np.ndarray) -> None:
        """Adds numbers that follow on as many `before`, of which it need not have any."""
        self._fill(before)
        self._chunks.append((values, known))
        self._count += len(values)

    def _fill(self, count: int) -> None:
        missing = count - self._count
        self._chunks.append((np.full(missing, np.nan), np.zeros(missing, bool)))
        self._count = count

    def end(self, count: int) -> None:
        """Makes it as long as there are records; from now on it has its arrays."""
        self._fill(count)
        values, known = zip(*self._chunks, strict=True)
        self._chunks.clear()
        self.values, self.known = np.concatenate(values), np.concatenate(known)


def _order(step: np.ndarray) -> Any:
    """Picks the records in the order of their steps; of two of one step, the later.

    >>> _order(np.array([1.0, 3.0, 2.0, 3.0])).tolist()
    [0, 2, 3]
    """
    if (np.diff(step) > 0).all():
        return slice(None)
    by_step = np.argsort(step, kind="stable")
    is_last = np.append(np.diff(step[by_step]) > 0, True)
    return by_step[is_last]
