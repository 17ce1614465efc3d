"""Manifests: they say which checkpoints of a run are whole. No JAX.

    checkpoints/step_00000100/part_0/     what stage 0 wrote
                              part_1/     what stage 1 wrote
                              manifest.json
                step_00000200.damaged/        found damaged by the owner of the run: set aside

The manifest says which part holds which array, with its dtype, shape and digest (`digests`), and
has the size of every file, and the SHA-256 of those that are not the arrays themselves. It is
written last: a folder without one is no checkpoint. Orbax restores a flipped payload bit without an
error. So a reader of arrays compares their digests (`checkpoint`). This module verifies all else.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from holmesjax.errors import CheckpointError, DamagedError
from holmesjax.whole_files import write_whole

FOLDER, MANIFEST, FORMAT = "checkpoints", "manifest.json", 6
PART = "part_"
STEP = re.compile(r"step_(\d+)")  # what is set aside has another name
DATA = "d"  # a folder of OCDBT, which has arrays, and trees of their chunks with checksums
SMALL_BYTES = 1 << 20  # a file of DATA up to this has a SHA-256, as all others have
SHOWN = {"bytes": "its size", "sha256": "its SHA-256"}
THREADS = 16  # that ask the file system, which may be far away

Files = dict[str, dict[str, Any]]  # name in the checkpoint -> its "bytes" and "sha256", or None
Damaged = Mapping[Path, DamagedError]  # checkpoints whose arrays were found damaged, and how


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One finished checkpoint on disk."""

    path: Path
    step: int  # optimizer steps done
    manifest: dict[str, Any]

    @property
    def sequences(self) -> int:
        """Consumed before it."""
        return int(self.manifest["sequences"])

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """The sections of the config that wrote it and that shape training (`resume.settings`)."""
        found: dict[str, dict[str, Any]] = self.manifest["settings"]
        return found


def find(run_dir: str | Path) -> list[Checkpoint]:
    """Finished checkpoints of a run, newest first."""
    found = []
    for step, path in _folders(run_dir):
        if not (path / MANIFEST).exists():
            continue
        try:
            content = json.loads((path / MANIFEST).read_text())
        except (OSError, ValueError):
            content = None
        manifest = content if isinstance(content, dict) else {}
        found.append(Checkpoint(path=path, step=step, manifest=manifest))
    return sorted(found, key=lambda checkpoint: -checkpoint.step)


def _folders(run_dir: str | Path) -> list[tuple[int, Path]]:
    """Folders of checkpoints, finished or not, with their steps."""
    folder = Path(run_dir).absolute() / FOLDER  # Orbax takes absolute paths only
    matches = [(STEP.fullmatch(path.name), path) for path in folder.glob("step_*")]
    return [(int(match[1]), path) for match, path in matches if match and path.is_dir()]


def verify(checkpoint: Checkpoint) -> None:
    """Raises DamagedError unless every file has its size, and each small file its SHA-256."""
    manifest = checkpoint.manifest
    if manifest.get("format") != FORMAT or manifest.get("sha256") != _manifest_sha256(manifest):
        raise damaged(
            checkpoint,
            MANIFEST,
            f"is damaged, or not of format {FORMAT}",
            f"format {manifest.get('format')!r}, SHA-256 {manifest.get('sha256')!r}",
        )
    if manifest["step"] != checkpoint.step:
        problem = f"is damaged: it is a checkpoint after step {manifest['step']}"
        raise damaged(checkpoint, "", problem, checkpoint.path.name)
    files: Files = manifest["files"]

    def check(name: str) -> DamagedError | None:
        try:
            found = _describe(checkpoint.path / name)
        except FileNotFoundError:
            return damaged(checkpoint, name, "is missing", "no such file")
        except OSError as error:
            return damaged(checkpoint, name, "is damaged: it cannot be read", error.strerror)
        if found == files[name]:
            return None
        what = "bytes" if found["bytes"] != files[name]["bytes"] else "sha256"
        problem = f"is damaged: {SHOWN[what]} should be {files[name][what]}"
        return damaged(checkpoint, name, problem, found[what])

    with ThreadPoolExecutor(THREADS) as pool:
        for error in filter(None, pool.map(check, files)):
            raise error


def damaged(checkpoint: Checkpoint, name: str, problem: str, found: object) -> DamagedError:
    """An error that says what is wrong with one file of a checkpoint, or all of it."""
    fix = f"copy {checkpoint.path} back from elsewhere"
    return DamagedError(str(checkpoint.path / name), problem, found=found, fix=fix)


def newest(
    run_dir: str | Path,
    warn: Callable[[str], None],
    *,
    set_aside: bool,
    known: Damaged = MappingProxyType({}),
) -> Checkpoint | None:
    """The newest checkpoint that is whole, as far as is seen without reading arrays.

    Warns where a newer one is damaged.

    Args:
      known: what was found when arrays were read.
      set_aside: whether to rename the damaged ones, so that they count no more; the run's owner
        does, and nobody else.

    Raises CheckpointError if all are damaged; nothing is renamed.
    """
    bad: list[tuple[Checkpoint, DamagedError]] = []
    for found in find(run_dir):
        try:
            if found.path in known:
                raise known[found.path]
            verify(found)
        except DamagedError as error:
            bad.append((found, error))
            continue
        for other, why in bad:
            lines = [f"warning: {why.where}: {why.problem}", f"  found: {why.found}"]
            if set_aside:
                lines.append(f"  it is set aside as {_set_aside(other.path)}")
            warn("\n".join([*lines, f"  the checkpoint after step {found.step} is used instead"]))
        return found
    if bad:
        why = bad[0][1]
        fix = f"{why.fix}; no other is whole: to begin anew, use another run.dir"
        raise CheckpointError(why.where, why.problem, found=why.found, fix=fix)
    return None


def _set_aside(path: Path) -> Path:
    """Renames the folder of a checkpoint so that `find` and `remove_unfinished` leave it alone."""
    number, target = 1, path.with_name(f"{path.name}.damaged")
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}.{number}.damaged")
    try:
        path.rename(target)
    except OSError as error:
        problem = "is damaged, and cannot be renamed to set it aside"
        fix = "make the run folder writable"
        raise CheckpointError(str(path), problem, found=error.strerror, fix=fix) from None
    return target


def folder_of(run_dir: str | Path, step: int) -> Path:
    """The folder of the checkpoint after `step` optimizer steps."""
    return Path(run_dir).absolute() / FOLDER / f"step_{step:08d}"  # Orbax takes absolute paths only


def part_name(stage: int) -> str:
    return f"{PART}{stage}"


def begin(run_dir: str | Path, step: int) -> Path:
    """Returns the folder for a new checkpoint, without an old manifest.

    Every process that writes a part calls this.
    """
    path = folder_of(run_dir, step)
    path.mkdir(parents=True, exist_ok=True)
    (path / MANIFEST).unlink(missing_ok=True)
    return path


def files_of(path: Path, stage: int) -> Files:
    """The facts of a part's files, by their names in the checkpoint; reads the small ones."""
    files = sorted(file for file in (path / part_name(stage)).rglob("*") if file.is_file())
    with ThreadPoolExecutor(THREADS) as pool:
        described = pool.map(_describe, files)
        return {
            file.relative_to(path).as_posix(): what
            for file, what in zip(files, described, strict=True)
        }


def _describe(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    has_arrays = path.parent.name == DATA and size > SMALL_BYTES
    return {"bytes": size, "sha256": None if has_arrays else _sha256(path)}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # a little at a time


def commit(
    run_dir: str | Path,
    step: int,
    *,
    sequences: int,
    settings: Mapping[str, Any],
    data: Mapping[str, str],
    plan_hash: str,
    keep: int,
    arrays: Mapping[str, Mapping[str, Any]],
    files: Files,
) -> None:
    """Makes a checkpoint of the parts that were written; removes older ones, so that `keep` stay.

    Args:
      sequences: consumed before it.
      settings: `Checkpoint.settings`.
      data: digests of each split and of the order of the data.
      arrays: array -> its dtype, shape and digest, and the name of the part that holds it.
      files: what `files_of` gave for each part.
    """
    path = folder_of(run_dir, step)
    for other in path.glob(PART + "*"):  # of another plan, which did not get this far
        if other.name not in {array["part"] for array in arrays.values()}:
            shutil.rmtree(other)
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "step": step,
        "sequences": sequences,
        "settings": settings,
        "data": data,
        "plan_hash": plan_hash,
        "arrays": arrays,
        "files": files,
    }
    manifest["sha256"] = _manifest_sha256(manifest)
    write_whole(path / MANIFEST, json.dumps(manifest, indent=1))
    for old in [found for found in find(run_dir) if found.step <= step][keep:]:
        (old.path / MANIFEST).unlink()  # first: a half-deleted folder is no checkpoint
        shutil.rmtree(old.path)


def remove_unfinished(run_dir: str | Path) -> None:
    """Removes what a crash has left behind."""
    for _, path in _folders(run_dir):
        if not (path / MANIFEST).exists():
            shutil.rmtree(path)


def _manifest_sha256(manifest: dict[str, Any]) -> str:
    content = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
