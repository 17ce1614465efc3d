"""The output of a job's processes: a log file of each, and what of it is noise."""

import contextlib
import re
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path

from holmesjax.errors import HolmesError, raise_if_passing
from holmesjax.files import regular_files
from holmesjax.plan.processes import Process
from launch.device_hangs import DeviceHang

LOGS = "logs"
LAST_LINES = 8  # of a process that failed, shown on the console
LIMIT_BYTES = 16 << 20  # of a file, which then replaces NAME.log.1

# The line that JAX's CPU collectives print when they connect. Two processes at once mix their
# pieces, and a process that dies leaves any part of it.
GLOO = "[Gloo] Rank # is connected to # peer ranks. Expected number of connected peer ranks is : #"
GLOO_PIECES = re.compile(
    r"(\[Gloo\] Rank|is connected to|peer ranks\.|"
    r"Expected number of connected peer ranks is :|\d|\s)+"
)


def is_noise(line: str) -> bool:
    """Whether a line of a process is for its log only.

    >>> is_noise("[Gloo] Rank 1 is connected to 1 pee"), is_noise("1"), is_noise("loss 1")
    (True, True, False)
    """
    text = re.sub(r"\d+", "#", line.strip())
    return bool(text) and (text in GLOO or GLOO_PIECES.fullmatch(line) is not None)


class ProcessLogs:
    """The log files of a job's processes, in the folder `logs` of its run folder.

    Args:
      run_dir: the run folder.
      processes: those of the job.
      move: renames a file that is full (`Lease.move`).
    """

    def __init__(
        self, run_dir: Path, processes: Sequence[Process], move: Callable[[Path, Path], None]
    ):
        self.folder, self._processes, self._move = run_dir / LOGS, processes, move
        self._last: dict[int, deque[str]] = {}  # by process
        self._hangs: defaultdict[int, DeviceHang] = defaultdict(DeviceHang)
        self._num_dropped: dict[int, int] = {}  # lines that found no room, by process
        try:
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise_if_passing(error)
            fix = "remove it, or make room"
            raise HolmesError(
                str(self.folder), "cannot be made", found=error.strerror, fix=fix
            ) from None

    def path(self, number: int) -> Path:
        return self.folder / f"{self._processes[number].file_name}.log"

    def told(self, number: int, what: str = "its output is") -> str:
        """Returns where the output of a process is, in words; "" if it has none here."""
        path = self.path(number)
        return f"; {what} in {path}" if path.exists() else ""

    def write(self, number: int, line: str) -> None:
        self._hangs[number].read(line)
        if line.strip() and not is_noise(line):
            self._last.setdefault(number, deque(maxlen=LAST_LINES)).append(line)
        path = self.path(number)
        try:
            with open(
                path, "a", encoding="utf-8", errors="backslashreplace", opener=regular_files.opener
            ) as file:
                if dropped := self._num_dropped.get(number, 0):
                    file.write(f"[{dropped} lines are missing: they could not be written]\n")
                file.write(line + "\n")
                is_full = file.tell() > LIMIT_BYTES
        except OSError:  # a full disk: a log ends no job
            self._num_dropped[number] = self._num_dropped.get(number, 0) + 1
            with contextlib.suppress(OSError):  # somebody has removed it: the next line finds it
                self.folder.mkdir(exist_ok=True)
            return
        self._num_dropped.pop(number, None)
        if is_full:
            with contextlib.suppress(OSError):  # then it grows until it can be renamed
                self._move(path, path.with_name(f"{path.name}.1"))

    def last_lines(self, number: int) -> tuple[str, ...]:
        """The last lines of a process that say something."""
        return tuple(self._last.get(number, ()))

    def hangs(self) -> dict[int, str]:
        """Returns what processes that XLA gave up hung in, in words."""
        return {number: str(hang) for number, hang in self._hangs.items() if str(hang)}
