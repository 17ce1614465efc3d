"""Prints the memory that imports and exports add at their peaks, in MiB each.

The arguments are folders of weights, which are imported and exported, and a run, which is exported.
"""

import sys
import threading
from pathlib import Path

from launch.__main__ import main


def memory_mib() -> float:
    """The memory of this process now, without what is mapped of files: the kernel may drop that.

    The kernel decides how much of a file is mapped around a byte that is read.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("RssAnon")]
    return int(line.split()[1]) / 1024


def added_mib(*argv: str) -> float:
    """The memory that a verb adds at its peak; each array is held for many milliseconds."""
    before, found, has_ended = memory_mib(), [0.0], threading.Event()

    def watch() -> None:
        while not has_ended.wait(0.001):
            found[0] = max(found[0], memory_mib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        assert main(argv) == 0
    finally:
        has_ended.set()
        watcher.join()
    return found[0] - before


if __name__ == "__main__":
    *folders, trained = sys.argv[1:]
    for folder in folders:  # the first one has all modules imported and programs compiled
        run_dir, out = f"{folder}_run", f"{folder}_out"
        print("import", added_mib("import", folder, "--to", run_dir))
        print("export", added_mib("export", run_dir, "--out", out))
    print("export", added_mib("export", trained, "--out", f"{trained}_out"))
