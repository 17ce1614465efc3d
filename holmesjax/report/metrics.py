"""The measured numbers of a run: the file that holds them, and its reading.

`metrics.jsonl` in the run folder is the record: one JSON object a step. TensorBoard and Weights &
Biases get the same numbers when `log` of the run file asks for them; `console` prints them.

JSON has no NaN and no infinity: a number that is not finite is written as `null` and read as NaN.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from holmesjax.config import LogConfig
from holmesjax.errors import DataError, PeerError
from holmesjax.files import json_text, regular_files, run_folder
from holmesjax.files.whole_files import put_in_place, temporary_of
from holmesjax.liveness.lease import Lease
from holmesjax.report import expert_alarm
from holmesjax.report.metric_sinks import check_installed, close_sinks, start_sinks
from holmesjax.report.record_file import RecordFile

FILE = run_folder.METRICS
BLOCK_BYTES = 1 << 20  # of the file, read at once from its end
# What the record of every step has.
NUMBERS = ("loss", "tokens_per_s", "step_time_s", "bubble_share")
MAPPINGS = ("link_bytes",)
MAY_HAVE = ("busy_share", "wall_s", "memory_bytes", "validation_bytes")  # mappings of numbers, too
_MAPPINGS = frozenset((*MAPPINGS, *MAY_HAVE))

Record = dict[str, Any]


def read(run_dir: str | Path) -> list[dict[str, Any]]:
    """The records of a run in the order of their steps; of two with one step, the later wins.

    A last line that a crash has cut short is left out. A long run fills the memory: `history` reads
    the numbers alone.
    """
    records = {record["step"]: record for record in stream(run_dir)}
    return [records[step] for step in sorted(records)]


def stream(run_dir: str | Path, *, is_raw: bool = False) -> Iterator[dict[str, Any]]:
    """Yields the records of a run as they were written; a torn last line is left out.

    Args:
      run_dir: the run folder.
      is_raw: leaves None for numbers that are not finite, which takes half the time.

    Raises DataError for another line that is no record.
    """
    parse = _raw_record if is_raw else _record
    path = Path(run_dir) / FILE
    if not path.exists():
        return
    bad: tuple[int, bytes] | None = None
    with regular_files.open_file(path) as file:
        for number, line in enumerate(file, start=1):
            if bad:
                raise _no_record(f"line {bad[0]}", path, bad[1])
            try:
                record = parse(line)
            except ValueError:  # not JSON, or not UTF-8
                bad = number, line.rstrip(b"\n")
            else:
                yield record


def read_last(run_dir: str | Path, done_steps: int) -> tuple[Record | None, Record | None]:
    """The last record of a run, and the last of a step up to `done_steps`; None where none is.

    It reads only the end of the file, so a long run resumes as fast as a short one.
    """
    last = None
    for _, record in _from_end(Path(run_dir) / FILE):
        last = last or record
        if record["step"] <= done_steps:
            return last, record
    return last, None


def read_tail(run_dir: str | Path, num_bytes: int) -> list[dict[str, Any]]:
    """The last records of a run that goes on: those of the file's last bytes, in order.

    More bytes are read where no record is whole in so many, as that of many experts.
    """
    path = Path(run_dir) / FILE
    if not path.exists():
        return []
    with regular_files.open_file(path) as file:
        file.seek(0, os.SEEK_END)
        start = max(file.tell() - num_bytes, 0)
        file.seek(start)
        lines = file.read().splitlines()[bool(start) :]  # the first may be torn
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(_record(line))
        except ValueError:
            if number < len(lines):
                raise _no_record(f"line {number} of its end", path, line) from None
    return read_tail(run_dir, 4 * num_bytes) if start and not found else found


def check_whole(run_dir: str | Path, records: Sequence[Record]) -> None:
    """Raises DataError if a record lacks what that of every step has: for whoever shows a run."""
    for record in records:
        for name in (*NUMBERS, *MAPPINGS, "skipped"):
            if name not in record:
                raise lacks(run_dir, record["step"], name)


def lacks(run_dir: str | Path, step: int, name: str) -> DataError:
    """The error for the record of a step without something that all have."""
    return DataError(
        f"{Path(run_dir) / FILE}, step {step}",
        f"has no {name}",
        found="a record without it",
        fix="delete the line",
    )


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


class Metrics:
    """Writes one record a step; a context manager.

    Nothing here ends a run. A line that cannot be written is kept, and written with the next one.

    A run that resumes from step n passes `done_steps=n`: what an earlier attempt wrote about later
    steps is cut off, so the file keeps one object a step. Each line reaches the operating system
    before `write` returns, so a crash of the process costs no finished step.
    """

    def __init__(
        self,
        run_dir: str | Path,
        log: LogConfig,
        *,
        done_steps: int = 0,
        warn: Callable[[str], object] = _warn,
        owner: Lease | None = None,
    ):
        check_installed(log)
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        self._check = owner.check if owner else lambda: None
        _cut(run_dir / FILE, done_steps, self._check, anew=bool(owner and owner.is_taken_over))
        if owner:
            owner.settle()
        self._file = RecordFile(run_dir / FILE, warn)
        self._sinks = start_sinks(run_dir, log, done_steps, warn)

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends the record of one step: numbers, booleans, and dicts of them.

        Raises LostLeaseError where another process owns the run by now.
        """
        self._check()
        self._file.append(json.dumps(_finite(record), allow_nan=False).encode() + b"\n")
        scalars = _scalars(record)
        for sink in self._sinks:
            sink.write(record["step"], scalars)

    def close(self) -> None:
        self._file.close()
        close_sinks(self._sinks)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _finite(value: Any) -> Any:
    """The same value, with None for every number that JSON cannot hold."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """One flat name per number; lists of numbers, such as loads of experts, are left out.

    So are the experts in alarm, each of which would be a series of its own: their count is there.

    >>> _scalars({"step": 3, "loss": 2.5, "link_bytes": {"stage 0 -> stage 1": 8}})
    {'loss': 2.5, 'link_bytes/stage_0_to_stage_1': 8.0}
    """
    scalars = {}
    for name, value in record.items():
        if name == expert_alarm.FIELD:
            continue
        if isinstance(value, Mapping):
            for key, item in value.items():
                if not isinstance(item, Sequence):
                    scalars[f"{name}/{key.replace('->', 'to').replace(' ', '_')}"] = float(item)
        elif name != "step":
            scalars[name] = float(value)
    return scalars


def _from_end(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each record of the file and where its line ends, the last first; a torn last is left out."""
    is_last = True
    for start, line in _lines_from_end(path):
        try:
            record = _record(line)
        except ValueError:  # not JSON, or not UTF-8
            if not is_last:
                raise _no_record(f"the line at byte {start}", path, line) from None
        else:
            yield start + len(line), record
        is_last = False


def _lines_from_end(path: Path) -> Iterator[tuple[int, bytes]]:
    """Each line that is not empty and where it starts, the last first."""
    if not path.exists():
        return
    with regular_files.open_file(path) as file:
        start, rest = file.seek(0, os.SEEK_END), b""
        while start:
            size = min(start, BLOCK_BYTES)
            start = file.seek(start - size)
            rest, *lines = (file.read(size) + rest).split(b"\n")
            end = start + len(rest) + sum(map(len, lines)) + len(lines)
            for line in reversed(lines):
                if line:
                    yield end - len(line), line
                end -= len(line) + 1
        if rest:
            yield 0, rest


def _no_record(line: str, path: Path, content: bytes) -> DataError:
    return DataError(
        f"{path}, {line}",
        "is not the record of a step",
        found=repr(content[:60].decode(errors="replace")),
        fix="delete the line; every step has its own",
    )


def _raw_record(line: bytes) -> dict[str, Any]:
    """Raises ValueError for what is no record: not JSON, not UTF-8, or of other values."""
    record = json_text.value_of(line)
    if not isinstance(record, dict) or not _is_step(record.get("step")):
        raise ValueError("no record of a step")
    numbers = [record[name] for name in NUMBERS if name in record]
    for name in _MAPPINGS & record.keys():
        numbers += record[name].values() if isinstance(record[name], dict) else [record]
    if not all(map(is_number, numbers)):
        raise ValueError("a number is none")
    return record


def _record(line: bytes) -> dict[str, Any]:
    """The same with NaN for null."""
    return with_nan(_raw_record(line))


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def with_nan(record: Mapping[str, Any]) -> dict[str, Any]:
    """The same record with NaN for None, which stands for a number that is not finite."""
    return {
        key: math.nan if value is None else with_nan(value) if isinstance(value, dict) else value
        for key, value in record.items()
    }


def _cut(path: Path, done_steps: int, check: Callable[[], object], *, anew: bool) -> None:
    """Drops the records after `done_steps` and what is torn: all of them are at the file's end.

    Args:
      path: the file.
      done_steps: steps that stay.
      check: raises where the run is another's by now.
      anew: whether an owner before this may have the file open, and wake up. What stays is then
        copied, so that whatever that owner cuts or appends is in no file of the run.
    """
    if not path.exists():
        return
    kept = next((end for end, record in _from_end(path) if record["step"] <= done_steps), 0)
    if anew:
        copy = temporary_of(path)
        try:
            with regular_files.open_file(path) as source, copy.open("wb") as target:
                left = kept
                while left and (part := source.read(min(left, BLOCK_BYTES))):
                    target.write(part)
                    left -= len(part)
                if left:
                    raise _shrinks(path)
                _end_line(target)
                target.flush()
                os.fsync(target.fileno())
            put_in_place(copy, path)
        finally:
            copy.unlink(missing_ok=True)
        return
    with regular_files.open_file(path, "r+b") as file:
        check()
        file.truncate(kept)
        file.seek(0, os.SEEK_END)
        _end_line(file)


def _end_line(file: IO[bytes]) -> None:
    """Ends the last of the whole lines that were kept, if there is one."""
    if file.tell():
        file.write(b"\n")


def _shrinks(path: Path) -> PeerError:
    return PeerError(
        str(path),
        "has become shorter while it was copied",
        found="an owner of the run that had stood still has woken up",
        fix="start again with the same command",
    )
