"""The memory that a process holds."""

import resource
from pathlib import Path


def resident_bytes() -> int:
    """Returns the resident memory of this process, as Linux counts it."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
