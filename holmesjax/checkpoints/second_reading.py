"""Another process reads a checkpoint that one process has found damaged.

One process may be unable to read what is whole: its node has lost the file server for a moment,
holds old bytes in its memory, or computes wrongly. So a checkpoint counts as damaged when two have
found it so. The second has only the file system in common with the first: it reads the files anew,
and adds up the arrays of the part in question with NumPy.
"""

import argparse
import importlib
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from holmesjax.checkpoints import fetching, manifest
from holmesjax.checkpoints.manifest import Checkpoint
from holmesjax.errors import DamagedError, HolmesError, PeerError
from holmesjax.hosts.process_environment import die_with
from holmesjax.liveness import helper_process
from holmesjax.liveness.helper_process import Ended

DAMAGED = 3  # the exit status where it finds so, too
LIMIT_S = 3600.0  # without a word of how far it is: a part may have TB
LOOK_S = 1e-3  # between two pieces that are fetched, for a signal
TELL_S = 10.0  # between two lines that say how far it is


def confirm(
    checkpoint: Checkpoint,
    error: DamagedError,
    *,
    pause: Callable[[float], object] = time.sleep,
    say: Callable[[str], object] = lambda line: None,
) -> None:
    """Returns if another process finds the checkpoint damaged, too.

    A part that is at a URL is fetched again first: what is damaged may be the copy of one machine.

    Args:
      checkpoint: the checkpoint in question.
      error: what one process has found.
      pause: waits for some seconds; what it raises ends the other process, and passes through.
      say: takes lines that tell how far the other process is.

    Raises PeerError if that process can read it, or cannot tell.
    """
    part = manifest.damaged_part(checkpoint, error)
    found: object = error.found
    if part in fetching.uploads_of(checkpoint):
        assert part is not None
        try:
            fetching.fetch_again(checkpoint, part, lambda: pause(LOOK_S), say)
        except DamagedError:
            return
    try:
        done = read_again(checkpoint, [part] if part else [], pause=pause, say=say)
    except OSError as problem:
        said, found = "and no other process could look", problem
    else:
        if done.status == DAMAGED:
            return
        said = "and another process has read it as it was written"
        if done.status is None:
            said, found = "and no other process could look", f"no array was read in {LIMIT_S:g} s"
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


def read_again(
    checkpoint: Checkpoint,
    parts: Sequence[str],
    *,
    mb_per_s: float | None = None,
    pause: Callable[[float], object] = time.sleep,
    say: Callable[[str], object] = lambda line: None,
) -> Ended:
    """The end of another process that reads files and the arrays of parts: DAMAGED, or 0.

    Args:
      checkpoint: which has them.
      parts: the names of those whose arrays are read.
      mb_per_s: how fast arrays are read, in MB/s, for as long as it takes; None: as fast as may be,
        as long as `LIMIT_S` does not pass without a word.
      pause, say: as in `confirm`.

    Raises OSError where no process can be started, and what `pause` raises.
    """
    arguments = [str(checkpoint.path), *(word for part in parts for word in ("--part", part))]
    arguments += [] if mb_per_s is None else ["--mb-per-s", str(mb_per_s)]
    silence_s = LIMIT_S if mb_per_s is None else math.inf
    module = __spec__.name
    return helper_process.run_module(module, arguments, silence_s=silence_s, pause=pause, say=say)


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


class _Brake:
    """Waits after each array of a part for as long as its bytes may take."""

    def __init__(self, found: Checkpoint, part: str, mb_per_s: float):
        itemsize = lambda name: importlib.import_module("jax.numpy").dtype(name).itemsize
        own = [x for x in found.manifest["arrays"].values() if x["part"] == part]
        sizes = (math.prod(x["shape"]) * itemsize(x["dtype"]) for x in own)
        self._due_s = [num_bytes / (1e6 * mb_per_s) for num_bytes in itertools.accumulate(sizes)]
        self._begin_s = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        time.sleep(max(0.0, self._begin_s + self._due_s[done - 1] - time.monotonic()))


def _look(path: Path, parts: Sequence[str], mb_per_s: float | None) -> int:
    try:
        found = manifest.at(path)
        _forget(path)
        manifest.verify(found)
        for part in parts:
            # Imported here: only arrays need JAX.
            arrays = importlib.import_module("holmesjax.checkpoints.reading")
            told = _Teller(path) if mb_per_s is None else _Brake(found, part, mb_per_s)
            arrays.verify_arrays(found, part, told)
    except (DamagedError, OSError) as error:
        if mb_per_s is not None and not manifest.has_manifest(path):
            return 0  # the run has taken it away in the meantime
        print(" ".join(str(error).split()), file=sys.stderr)
        is_withheld = isinstance(error, OSError) and error.errno in manifest.WITHHELD
        return PeerError.exit_status if is_withheld else DAMAGED
    except HolmesError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    die_with(os.environ.get("HOLMES_PARENT"))
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("--part", action="append", default=[])
    parser.add_argument("--mb-per-s", type=float)
    asked = parser.parse_args()
    if asked.mb_per_s is not None:
        os.nice(19)  # whoever trains comes first
    sys.exit(_look(asked.path, asked.part, asked.mb_per_s))
