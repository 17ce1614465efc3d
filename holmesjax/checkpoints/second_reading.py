"""Another process reads a checkpoint that one process has found damaged.

One process may be unable to read what is whole: its node has lost the file server for a moment,
holds old bytes in its memory, or computes wrongly. So a checkpoint counts as damaged when two have
found it so. The second has only the file system in common with the first: it reads the files anew,
and adds up the arrays of the part in question with NumPy.
"""

import argparse
import importlib
import os
import subprocess
import sys
from pathlib import Path

from holmesjax.checkpoints import manifest
from holmesjax.checkpoints.manifest import Checkpoint
from holmesjax.errors import DamagedError, PeerError

DAMAGED = 3  # the exit status where it finds so, too
LIMIT_S = 3600.0  # to read a part


def confirm(checkpoint: Checkpoint, error: DamagedError) -> None:
    """Returns if another process finds the checkpoint damaged, too.

    Raises PeerError if that process can read it, or cannot tell.
    """
    command = [sys.executable, "-m", __spec__.name, str(checkpoint.path)]
    if part := _part(checkpoint, error):
        command += ["--part", part]
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    found: object = error.found
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        said, found = "and no other process could look", problem
    else:
        if done.returncode == DAMAGED:
            return
        said = "and another process has read it as it was written"
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
            said, found = "and no other process could look", lines[-1]
    raise PeerError(
        error.where,
        f"{error.problem}, {said}",
        found=found,
        fix="start again with the same command; if that does not help, see whether the node that "
        "says so has the file system of the run folder, and whether its memory is sound",
    )


def _part(checkpoint: Checkpoint, error: DamagedError) -> str | None:
    """The part in which something is wrong, if it is in one; a process may be named before it."""
    _, found, rest = error.where.rpartition(f"{checkpoint.path}/")
    name = rest.partition("/")[0]
    return name if found and name.startswith(manifest.PART) else None


def _forget(folder: Path) -> None:
    """Makes the operating system read the files of a folder from the disk, or from its server."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)


def _look(path: Path, part: str | None) -> int:
    try:
        _forget(path)
        found = manifest.at(path)
        manifest.verify(found)
        if part:
            # Imported here: only arrays need JAX.
            importlib.import_module("holmesjax.checkpoints.checkpoint").verify_arrays(found, part)
    except DamagedError as error:
        print(error)
        return DAMAGED
    except OSError as error:
        print(f"{path}: {error}")
        return DAMAGED
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("--part")
    asked = parser.parse_args()
    sys.exit(_look(asked.path, asked.part))
