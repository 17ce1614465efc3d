"""The newest step of a run that is known to have a checkpoint. Does not import JAX.

    committed.json    in the run folder: the step of the newest checkpoint that was committed

Only the owner of the run writes it: after each commit, and before it sets a damaged checkpoint
aside for an older one. A start that finds no checkpoint of that step would do steps again that are
done, or begin anew, without a word; so it is refused. A run that ended before its first checkpoint
has no such file.
"""

import contextlib
import json
import os
from pathlib import Path

from holmesjax.errors import CheckpointError, raise_if_passing
from holmesjax.files import json_text, run_folder
from holmesjax.files.whole_files import write_whole

RECORD = "committed.json"


def note(run_dir: str | Path, step: int) -> None:
    """Writes down that the newest checkpoint is of `step`. Raises OSError."""
    write_whole(Path(run_dir) / RECORD, json.dumps({"step": step}) + "\n")


def read(run_dir: str | Path) -> int | None:
    """The step that was written down last; None if none was.

    Raises CheckpointError where it cannot be read.
    """
    path = Path(run_dir) / RECORD
    try:
        if RECORD not in os.listdir(path.parent):  # asks a file server, as a look-up may not
            return None
        step = json_text.read(path)["step"]
        if isinstance(step, int) and step >= 0:
            return step
        found: object = step
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise_if_passing(error)
        found = f"{type(error).__name__}: {error}"
    problem = "cannot be read, and it says which checkpoint the run must go on from"
    fix = f"copy it back from elsewhere, or remove {path} to go on from the newest checkpoint"
    raise CheckpointError(str(path), problem, found=found, fix=fix)


def adopt(run_dir: str | Path, step: int | None) -> None:
    """Notes what other records know, for a run of a version that had no such file.

    Args:
      run_dir: the run folder.
      step: after which the newest start of the job began.
    """
    if step and read(run_dir) is None:
        with contextlib.suppress(OSError):  # whoever starts a job soon writes, and tells
            note(run_dir, step)


def repair(run_dir: str | Path, step: int) -> None:
    """Writes the record anew where it cannot be read, for the launcher that has written it."""
    try:
        read(run_dir)
    except CheckpointError:
        with contextlib.suppress(OSError):  # whoever reads it says what is wrong
            note(run_dir, step)


def lost(run_dir: str | Path, step: int, newest: int | None) -> CheckpointError:
    """The error of a run whose checkpoint after `step` is gone; `newest` is the newest there is."""
    there = "no checkpoint" if newest is None else f"step {newest} is the newest checkpoint"
    path = Path(run_dir) / RECORD
    otherwise = "to begin anew" if newest is None else f"to go on from step {newest}"
    return CheckpointError(
        str(run_dir),
        f"had a checkpoint after step {step}, which is not there any more",
        found=there,
        fix=f"copy it back, or see that the right file system is mounted; {otherwise} and lose all "
        f"later steps, remove {path} and {run_folder.RESTARTS} beside it",
    )
