"""Prints the memory that imports and exports add at their peaks, in MiB each.

The arguments are folders of weights, which are imported and exported, and a run, which is exported.
"""

import sys
from pathlib import Path

from launch.__main__ import main


def memory_mib(name: str) -> float:
    """A line of /proc/self/status: VmRSS now, or VmHWM, the most since `forget`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(name)]
    return int(line.split()[1]) / 1024


def added_mib(*argv: str) -> float:
    Path("/proc/self/clear_refs").write_text("5")  # forget the most so far
    before = memory_mib("VmRSS")
    assert main(argv) == 0
    return memory_mib("VmHWM") - before


if __name__ == "__main__":
    *folders, trained = sys.argv[1:]
    for folder in folders:  # the first one has all modules imported and programs compiled
        run_dir, out = f"{folder}_run", f"{folder}_out"
        print("import", added_mib("import", folder, "--to", run_dir))
        print("export", added_mib("export", run_dir, "--out", out))
    print("export", added_mib("export", trained, "--out", f"{trained}_out"))
