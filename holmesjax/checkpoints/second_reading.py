"""Another process reads a checkpoint that one process has found damaged.

One process may be unable to read what is whole: its node has lost the file server for a moment,
holds old bytes in its memory, or computes wrongly. So a checkpoint counts as damaged when two have
found it so. The second has only the file system in common with the first: it reads the files anew,
and adds up the arrays of the part in question with NumPy.
"""

import argparse
import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from holmesjax.checkpoints import manifest
from holmesjax.checkpoints.manifest import Checkpoint
from holmesjax.errors import DamagedError, PeerError
from holmesjax.hosts.process_environment import die_with
from holmesjax.liveness import helper_process

DAMAGED = 3  # the exit status where it finds so, too
LIMIT_S = 3600.0  # to read a part
TELL_S = 10.0  # between two lines that say how far it is


def confirm(
    checkpoint: Checkpoint,
    error: DamagedError,
    *,
    pause: Callable[[float], object] = time.sleep,
    say: Callable[[str], object] = lambda line: None,
) -> None:
    """Returns if another process finds the checkpoint damaged, too.

    Args:
      checkpoint: the checkpoint in question.
      error: what one process has found.
      pause: waits for some seconds; what it raises ends the other process, and passes through.
      say: takes lines that tell how far the other process is.

    Raises PeerError if that process can read it, or cannot tell.
    """
    arguments = [str(checkpoint.path)]
    if part := manifest.damaged_part(checkpoint, error):
        arguments += ["--part", part]
    found: object = error.found
    module = __spec__.name
    try:
        done = helper_process.run_module(module, arguments, limit_s=LIMIT_S, pause=pause, say=say)
    except OSError as problem:
        said, found = "and no other process could look", problem
    else:
        if done.status == DAMAGED:
            return
        said = "and another process has read it as it was written"
        if done.status is None:
            said, found = "and no other process could look", f"it took more than {LIMIT_S:g} s"
        elif done.status:
            said = "and no other process could look"
            found = done.last_line or f"status {done.status}"
    raise PeerError(
        error.where,
        f"{error.problem}, {said}",
        found=found,
        fix="start again with the same command; if that does not help, see whether the node that "
        "says so has the file system of the run folder, and whether its memory is sound",
    )


def _forget(folder: Path) -> None:
    """Makes the operating system read the files of a folder from the disk, or from its server."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)


class _Teller:
    """Says at times how many arrays were read."""

    def __init__(self, path: Path):
        self._path, self._told_s = path, time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._told_s < TELL_S:
            return
        self._told_s = time.monotonic()
        print(f"  {done} of {total} arrays of {self._path.name} are read again", flush=True)


def _look(path: Path, part: str | None) -> int:
    try:
        _forget(path)
        found = manifest.at(path)
        manifest.verify(found)
        if part:
            # Imported here: only arrays need JAX.
            arrays = importlib.import_module("holmesjax.checkpoints.restoring")
            arrays.verify_arrays(found, part, _Teller(path))
    except (DamagedError, OSError):
        return DAMAGED
    return 0


if __name__ == "__main__":
    die_with(os.environ.get("HOLMES_PARENT"))
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("--part")
    asked = parser.parse_args()
    sys.exit(_look(asked.path, asked.part))
