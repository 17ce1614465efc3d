"""Tells what a process hung in on its GPU, from what XLA writes before it ends the process.

XLA ends a process whose program does not end (`xla_flags.for_hangs`). It writes first which one,
and which of its kernels and collectives, which it calls thunks, have begun and not ended.
"""

import re

# The messages of XLA's `hang_watchdog.cc`: the second form is that of its first months.
LATE = re.compile(r"\] (?:\[\d+\] )?(?P<what>.+) (?:failed to|didn't) finish in (?P<time>\S+)\.")
# Those of its `gpu_executable.cc`: a title, and a line for each.
LIST = re.compile(r"\] (?:\[\d+\] )?(?P<title>.* thunks): size=\d+$")
THUNK = re.compile(r"thunk\[\d+/\d+\] (?P<kind>\S+): (?P<name>.+?) at \d{4}-")


class DeviceHang:
    """The lines that a process writes, and what they say of a hang.

    >>> hang = DeviceHang()
    >>> hang.read("E1126 14:05:07.1 99 hang_watchdog.cc:68] [0] XLA GPU execution `jit_step` "
    ...           "failed to finish in 1m5s.")
    >>> hang.read("E1126 14:05:07.1 99 gpu_executable.cc:9] [0] First pending thunks: size=1")
    >>> hang.read("E1126 14:05:07.1 99 gpu_executable.cc:9]   - exec[7] thunk[7/12] "
    ...           "kAllReduceStart: all-reduce-start.1 at 2026-11-26 14:04:02.000001")
    >>> str(hang)
    'hung for 1m5s in all-reduce-start.1 (kAllReduceStart) of XLA GPU execution `jit_step`'
    """

    def __init__(self) -> None:
        self._what = self._time = self._title = self._thunk = ""

    def read(self, line: str) -> None:
        """Takes the next line."""
        if not self._what:
            if "hang_watchdog.cc:" in line and (late := LATE.search(line)):
                self._what, self._time = late["what"], late["time"]
        elif found := LIST.search(line):
            self._title = found["title"]
        elif self._title == "First pending thunks" and (thunk := THUNK.search(line)):
            self._title, self._thunk = "", f"{thunk['name']} ({thunk['kind']}) of "

    def __str__(self) -> str:
        """The hang in words; empty if there is none."""
        return f"hung for {self._time} in {self._thunk}{self._what}" if self._what else ""
