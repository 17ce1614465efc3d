"""Checks that all processes of a job have read the same data, and finds the first other file.

Each process reports the digests of its data when it has compiled. If they differ, one process of
the largest group and the first of another are asked for the digests of their files. Each message
has a piece of the list: it is small, however many files a corpus has.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from holmesjax.distributed.messages import AskFiles, Compiled, Files
from holmesjax.errors import DataError
from holmesjax.plan.processes import Process

PIECE = 10_000  # files of a message, about a megabyte
ANSWER_S = 30.0  # for a piece; the lists are in memory
MAX_NAMES = 4  # of processes in a message
SHOWN = 12  # digits of a digest in a message

FileDigests = Sequence[Sequence[str]]  # path and SHA-256 of each, sorted by path


class ReadData(NamedTuple):
    """The data that a process has read."""

    digests: Mapping[str, str]  # by what they are of
    source: str


@dataclass
class DataAgreement:
    """The comparison of all that the processes have reported so far.

    Args:
      processes: of the job.
      ask: sends a question to a process, by its number.
    """

    processes: Sequence[Process]
    ask: Callable[[int, AskFiles], None]
    _read: dict[int, ReadData] = field(default_factory=dict)
    _pair: list[int] = field(default_factory=list)  # who is asked for its files
    _first: int = 0  # place in the lists of the piece that is asked for
    _pieces: dict[int, FileDigests] = field(default_factory=dict)
    _deadline_s: float | None = None  # of `time.monotonic`, for the answers

    def take(self, number: int, message: Compiled | Files) -> dict[str, str] | None:
        """Takes a report; returns the digests once all processes have reported the same.

        Args:
          number: of the process.
          message: what it has read, or its answer to a question.

        Raises DataError once it is known in what they differ.
        """
        if isinstance(message, Compiled):
            self._read[number] = ReadData(message.digests, message.source)
            return self._compare() if len(self._read) == len(self.processes) else None
        self._pieces[number] = message.files
        if len(self._pieces) == len(self._pair):
            self._compare_files()
        return None

    def check(self) -> None:
        """Raises DataError if an answer is overdue."""
        if self._deadline_s is not None and time.monotonic() > self._deadline_s:
            silent = [self._name(n) for n in self._pair if n not in self._pieces]
            raise self._error(
                f"which file differs is not known: {' and '.join(silent)} did not answer "
                f"in {ANSWER_S:g} s"
            )

    def _compare(self) -> dict[str, str] | None:
        groups = self._groups()
        if len(groups) == 1:
            return dict(self._read[0].digests)
        self._pair = [groups[0][0], min(group[0] for group in groups[1:])]
        if set(self._differing()) == {"order"}:
            raise self._error("the data are the same, and read in another order")
        self._ask(0)
        return None

    def _groups(self) -> list[list[int]]:
        """Groups processes that reported the same; large groups and first processes come first."""
        groups: dict[tuple[tuple[str, str], ...], list[int]] = {}
        for number in sorted(self._read):
            groups.setdefault(tuple(sorted(self._read[number].digests.items())), []).append(number)
        return sorted(groups.values(), key=lambda group: -len(group))

    def _differing(self) -> list[str]:
        ours, theirs = (self._read[number].digests for number in self._pair)
        return [name for name in ours if theirs.get(name) != ours[name]]

    def _ask(self, first: int) -> None:
        self._first, self._pieces = first, {}
        self._deadline_s = time.monotonic() + ANSWER_S
        for number in self._pair:
            self.ask(number, AskFiles(first=first, count=PIECE))

    def _compare_files(self) -> None:
        ours, theirs = (self._pieces[number] for number in self._pair)
        if difference := first_difference(ours, theirs):
            name, *values = difference
            says = " and ".join(
                f"{f'SHA-256 {value[:SHOWN]}' if value else 'missing'} on {self._name(number)}"
                for value, number in zip(values, self._pair, strict=True)
            )
            raise self._error(f"the first file that differs is {name!r}: {says}")
        if len(ours) < PIECE:
            raise self._error("all files are the same: they are split in another way")
        self._ask(self._first + PIECE)

    def _error(self, cause: str) -> DataError:
        groups, differing = self._groups(), self._differing()
        others = sorted(number for group in groups[1:] for number in group)
        values = "; ".join(
            f"{self._names(group)} read {self._read[group[0]].source}: "
            + ", ".join(f"{d} {self._read[group[0]].digests.get(d, '')[:SHOWN]}" for d in differing)
            for group in groups[:MAX_NAMES]
        )
        return DataError(
            self._names(others),
            f"has other data than {self._name(self._pair[0])} ({', '.join(differing)})",
            found=f"{values}; {cause}",
            fix="give all processes the same files: copy one data.corpus to all hosts, or name a "
            "folder that they share (python-stdlib is the same for one patch release of Python)",
        )

    def _name(self, number: int) -> str:
        process = self.processes[number]
        return f"{process.name} (process {number})"

    def _names(self, numbers: Sequence[int]) -> str:
        more = len(numbers) - MAX_NAMES
        names = ", ".join(map(self._name, numbers[:MAX_NAMES]))
        return f"{names} and {more} more" if more > 0 else names


def first_difference(
    ours: FileDigests, theirs: FileDigests
) -> tuple[str, str | None, str | None] | None:
    """Returns the first file that two lists do not share, with both digests; None: it is missing.

    >>> first_difference([["a", "12"], ["c", "34"]], [["a", "12"], ["b", "56"], ["c", "34"]])
    ('b', None, '56')
    """
    a, b = ({path: digest for path, digest in files} for files in (ours, theirs))
    paths = sorted(path for path in a.keys() | b.keys() if a.get(path) != b.get(path))
    return (paths[0], a.get(paths[0]), b.get(paths[0])) if paths else None
