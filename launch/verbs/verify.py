"""`launch verify`: reads every file of a run's checkpoint, and compares it with the manifest."""

import argparse
import importlib
import os
import sys
from pathlib import Path

from holmesjax import job as jobs, units
from holmesjax.checkpoints import manifest, stores
from holmesjax.checkpoints.manifest import Checkpoint
from holmesjax.errors import CheckpointError
from holmesjax.files import places


def run(args: argparse.Namespace) -> int:
    """Returns 0 where all that is here is as it was written.

    Raises DamagedError, and CheckpointError where nothing is here that could be read.
    """
    run_dir = Path(args.run_dir)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # arrays are added up in memory
    num_parts = [_verify(checkpoint) for checkpoint in chosen(run_dir, args.step)]
    if not any(num_parts):
        problem, found = "has nothing to verify", "no part of a checkpoint is here"
        fix = "verify it where the parts are, or bring them to a folder with launch gather"
        raise CheckpointError(str(run_dir), problem, found=found, fix=fix)
    return 0


def chosen(run_dir: Path, step: int | None) -> list[Checkpoint]:
    """The checkpoint after a step; without one, all of the run. Raises CheckpointError."""
    found = manifest.find(run_dir)
    if not found:
        jobs.load_config(run_dir)  # is it a run folder?
        fix = f"train it first: python -m launch train {run_dir}"
        raise CheckpointError(str(run_dir), "has no checkpoint", found="none", fix=fix)
    if step is None:
        return found
    if of_step := [one for one in found if one.step == step]:
        return of_step
    there = ", ".join(str(one.step) for one in reversed(found))
    fix = "name one of these steps, or none"
    raise CheckpointError(
        str(run_dir), f"has no checkpoint after step {step}", found=there, fix=fix
    )


def _verify(checkpoint: Checkpoint) -> int:
    """Returns the number of parts that are here and as they were written."""
    manifest.verify(checkpoint)
    for part in stores.lost(checkpoint.path.parent.parent, checkpoint):
        raise manifest.damaged(checkpoint, part, "is missing", "no such folder")
    away = manifest.elsewhere(checkpoint)
    # Imported here: only arrays need JAX.
    arrays = importlib.import_module("holmesjax.checkpoints.reading")
    step, files = checkpoint.step, checkpoint.manifest["files"]
    parts = dict.fromkeys(map(manifest.part_of, files))
    for part in parts:
        if part in away:
            where, how = manifest.place_of(away[part]), "verify it there"
            if places.is_url(where):
                how = "launch gather brings it to a folder, where it is verified"
            print(f"step {step}  {part}: not here, in {where}; {how}")
            continue
        arrays.verify_arrays(checkpoint, part)
        sizes = [x["bytes"] for file, x in files.items() if manifest.part_of(file) == part]
        num = sum(x["part"] == part for x in checkpoint.manifest["arrays"].values())
        size = units.show(sum(sizes), "B")
        print(f"step {step}  {part}: {num} arrays in {len(sizes)} files, {size}, as written")
        sys.stdout.flush()
    return sum(part not in away for part in parts)
