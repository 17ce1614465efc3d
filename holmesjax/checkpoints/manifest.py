"""Manifests: they say which checkpoints of a run are whole. No JAX.

    checkpoints/step_00000100/part_0/     what stage 0 wrote
                              part_1/     what stage 1 wrote
                              manifest.json

The manifest says which part holds which array, with its dtype, shape and digest (`digests`), and
which store has a part that is not in the launcher's folder (`stores`). It has the size of every
file, and the SHA-256 of those that are not the arrays themselves. It is written last: a folder
without one is no checkpoint. Orbax restores a flipped payload bit without an error. So a reader of
arrays compares their digests (`reading`). This module verifies all else.
"""

import contextlib
import errno
import functools
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

from pydantic import StrictInt, TypeAdapter, ValidationError

from holmesjax.errors import FINAL, CheckpointError, DamagedError, HolmesError, PeerError
from holmesjax.files import json_text, places, regular_files
from holmesjax.files.whole_files import write_whole

FOLDER, MANIFEST, FORMAT = "checkpoints", "manifest.json", 6
PART = "part_"
STEP = re.compile(r"step_(\d+)")  # what is set aside has another name
DATA = "d"  # a folder of OCDBT, which has arrays, and trees of their chunks with checksums
SMALL_BYTES = 1 << 20  # a file of DATA up to this has a SHA-256, as all others have
SHOWN = {"bytes": "its size", "sha256": "its SHA-256"}
THREADS = 16  # that ask the file system, which may be far away
# What keeps bytes from this process alone, or for now, is no damage of a checkpoint.
WITHHELD = (
    *(errno.EACCES, errno.EPERM, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),
)
# For a file of another host to be seen here: a client of NFS may believe for a minute that there is
# none (`acdirmax`).
SEEN_S = 75.0

Files = dict[str, dict[str, Any]]  # name in the checkpoint -> its "bytes" and "sha256", or None


@dataclass(frozen=True, kw_only=True)
class _File:
    bytes: StrictInt
    sha256: str | None


@dataclass(frozen=True, kw_only=True)
class _Form:
    """The form of what is read of a manifest, which may be another's; the rest may be anything."""

    step: StrictInt
    files: dict[str, _File]
    arrays: dict[str, dict[str, Any]] = field(default_factory=dict)
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    stores: dict[str, dict[str, str]] = field(default_factory=dict)


_FORM = TypeAdapter(_Form)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One finished checkpoint on disk."""

    path: Path
    step: int  # optimizer steps done
    manifest: dict[str, Any]  # empty if it cannot be read
    unread: str = ""  # why it cannot be read
    withheld: HolmesError | None = None  # where it may be sound, and is not to be read

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
    """Finished checkpoints of a run, newest first; `verify` tells of a manifest that is withheld.

    Raises CheckpointError if its folders may not be read, PeerError if they cannot be read now.
    """
    with telling(run_dir):
        return [_read(path) for _, path in reversed(finished(run_dir))]


@contextlib.contextmanager
def telling(run_dir: str | Path) -> Iterator[None]:
    """Tells what a file system gives: "no checkpoint" would begin the run anew."""
    try:
        yield
    except OSError as error:
        raise error_of(error, Path(run_dir) / FOLDER) from None


def error_of(error: OSError, path: Path) -> HolmesError:
    """The error of a file that cannot be read: CheckpointError, or PeerError where that may pass.

    The path is that of the error, or else the one that is given.
    """
    what = CheckpointError if error.errno in FINAL else PeerError
    fix = "make it readable" if what is CheckpointError else "start again with the same command"
    where = str(error.filename or path)
    return what(where, "cannot be read", found=error.strerror, fix=fix)


def at(path: Path) -> Checkpoint:
    """The checkpoint in a folder; one whose manifest is missing or damaged has an empty one.

    A manifest that is withheld raises CheckpointError, or PeerError where that may pass.
    """
    checkpoint = _read(path)
    if checkpoint.withheld:
        raise checkpoint.withheld
    return checkpoint


def _read(path: Path) -> Checkpoint:
    match = STEP.fullmatch(path.name)
    assert match, path
    step = int(match[1])
    try:
        content = json_text.read(path / MANIFEST)
    except OSError as error:
        if error.errno in WITHHELD:
            told = error_of(error, path / MANIFEST)
            return Checkpoint(path=path, step=step, manifest={}, withheld=told)
        return Checkpoint(path=path, step=step, manifest={}, unread=error.strerror or str(error))
    except ValueError as error:
        return Checkpoint(path=path, step=step, manifest={}, unread=str(error))
    if not isinstance(content, dict):
        return Checkpoint(path=path, step=step, manifest={}, unread="it is no object of JSON")
    return Checkpoint(path=path, step=step, manifest=content)


def wait_for(run_dir: str | Path, step: int) -> Checkpoint:
    """The checkpoint after a step that another process has seen.

    Raises PeerError where it is not to be seen here within `SEEN_S`.
    """
    path = folder_of(run_dir, step)
    with telling(run_dir):
        if appears(run_dir, step):
            return at(path)
        names = listed(path.parent)
    raise PeerError(
        str(path),
        f"is not to be seen from this host within {SEEN_S:g} s, and the launcher sees it",
        found=", ".join(names) or "an empty folder",
        fix="see that all hosts have the same run folder, and start again with the same command",
    )


def appears(run_dir: str | Path, step: int, pause: Callable[[float], object] = time.sleep) -> bool:
    """Whether the checkpoint after a step is there; waits for it up to `SEEN_S`."""
    deadline_s, pause_s = time.monotonic() + SEEN_S, 0.1
    while step not in dict(finished(run_dir)):
        if time.monotonic() > deadline_s:
            return False
        pause(pause_s)
        pause_s = min(2 * pause_s, 5.0)
    return True


def newest_step(run_dir: str | Path) -> int:
    """The step of the newest checkpoint, whole or not; 0 without one. Raises as `find` does."""
    with telling(run_dir):
        return max(dict(finished(run_dir)), default=0)


def finished(run_dir: str | Path) -> list[tuple[int, Path]]:
    """The steps and folders of finished checkpoints, the oldest first."""
    return [(step, path) for step, path in folders(run_dir) if has_manifest(path)]


def folders(run_dir: str | Path) -> list[tuple[int, Path]]:
    """The steps and folders of checkpoints, finished or not, the oldest first."""
    folder = Path(run_dir).absolute() / FOLDER  # Orbax takes absolute paths only
    matches = filter(None, map(STEP.fullmatch, listed(folder)))
    found = sorted((int(match[1]), folder / match[0]) for match in matches)
    return [(step, path) for step, path in found if path.is_dir()]


def has_manifest(path: Path) -> bool:
    """Whether a folder has a manifest."""
    return MANIFEST in listed(path)


def listed(folder: Path) -> list[str]:
    """The names in a folder; none if it is missing. Raises OSError.

    A client of NFS asks its server for these, whatever it remembers of a name that was not there.
    """
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def elsewhere(checkpoint: Checkpoint) -> dict[str, dict[str, str]]:
    """The parts that are in other stores and not here: each with the place where it was written."""
    known = checkpoint.manifest.get("stores", {})
    return {part: where for part, where in known.items() if not (checkpoint.path / part).exists()}


def place_of(where: Mapping[str, str]) -> str:
    """The place of a part, in words: the URL of its store, or a node with a folder."""
    folder = where["folder"]
    return folder if places.is_url(folder) else f"{where['node']}:{folder}"


def refuse_elsewhere(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError where parts are in other stores, for whoever fetches nothing."""
    if away := elsewhere(checkpoint):
        found = ", ".join(f"{part} in {place_of(x)}" for part, x in away.items())
        fix = "bring them together: python -m launch gather "
        fix += f"{places.shown(checkpoint.path.parent.parent)} --to FOLDER, and use that folder"
        raise CheckpointError(str(checkpoint.path), "has parts elsewhere", found=found, fix=fix)


def verify(checkpoint: Checkpoint) -> None:
    """Raises DamagedError unless every file has its size, and each small file its SHA-256.

    Parts that are `elsewhere` are not looked at. A file that is withheld raises as in `at`.
    """
    manifest = checkpoint.manifest
    if checkpoint.withheld:
        raise checkpoint.withheld
    if checkpoint.unread:
        problem = "is damaged: it cannot be read"
        raise damaged(checkpoint, MANIFEST, problem, checkpoint.unread)
    if not is_sound(manifest):
        raise damaged(
            checkpoint,
            MANIFEST,
            f"is damaged, or not of format {FORMAT}",
            f"format {manifest.get('format')!r}, SHA-256 {manifest.get('sha256')!r}",
        )
    if manifest["step"] != checkpoint.step:
        problem = f"is damaged: it is a checkpoint after step {manifest['step']}"
        raise damaged(checkpoint, "", problem, checkpoint.path.name)
    for name in manifest["files"]:
        if PurePosixPath(name).is_absolute() or {"..", "\0"} & {*PurePosixPath(name).parts, *name}:
            raise damaged(checkpoint, MANIFEST, "names a file outside its folder", repr(name[:80]))
    away = elsewhere(checkpoint)
    files: Files = {name: x for name, x in manifest["files"].items() if part_of(name) not in away}

    def check(name: str) -> DamagedError | None:
        try:
            found = _describe(checkpoint.path / name)
        except FileNotFoundError:
            return damaged(checkpoint, name, "is missing", "no such file")
        except OSError as error:
            if error.errno in WITHHELD:
                raise
            return damaged(checkpoint, name, "is damaged: it cannot be read", error.strerror)
        if found["sha256"] is None:  # its arrays have digests
            found["sha256"] = files[name]["sha256"]
        if found == files[name]:
            return None
        what = "bytes" if found["bytes"] != files[name]["bytes"] else "sha256"
        problem = f"is damaged: {SHOWN[what]} should be {files[name][what]}"
        return damaged(checkpoint, name, problem, found[what])

    with telling(checkpoint.path), ThreadPoolExecutor(THREADS) as pool:
        for error in filter(None, pool.map(check, files)):
            raise error


def is_sound(manifest: Mapping[str, Any]) -> bool:
    """Whether a manifest is of this format, and as it was written."""
    is_written = manifest.get("sha256") == _manifest_sha256(manifest)
    try:
        _FORM.validate_python(manifest)
    except ValidationError:
        return False
    return is_written and manifest.get("format") == FORMAT


def damaged(checkpoint: Checkpoint, name: str, problem: str, found: object) -> DamagedError:
    """An error that says what is wrong with one file of a checkpoint, or all of it."""
    fix = f"copy {checkpoint.path} back from elsewhere"
    return DamagedError(str(checkpoint.path / name), problem, found=found, fix=fix)


def folder_of(run_dir: str | Path, step: int) -> Path:
    """The folder of the checkpoint after `step` optimizer steps."""
    return Path(run_dir).absolute() / FOLDER / f"step_{step:08d}"  # Orbax takes absolute paths only


def part_name(stage: int) -> str:
    return f"{PART}{stage}"


def part_of(file: str) -> str:
    """The part of a file, by its name in a checkpoint."""
    return file.partition("/")[0]


def damaged_part(checkpoint: Checkpoint, error: DamagedError) -> str | None:
    """The part in which something is wrong, if it is in one.

    A process may be named before it, and the run folder may be that of another machine.
    """
    _, found, rest = error.where.rpartition(f"/{FOLDER}/{checkpoint.path.name}/")
    name = part_of(rest)
    return name if found and name.startswith(PART) else None


def begin(run_dir: str | Path, step: int) -> Path:
    """Returns the folder for a new checkpoint.

    Every process that writes a part calls this. Raises FileExistsError where a checkpoint has been
    committed: another job has come as far, and this one may only just not know.
    """
    path = folder_of(run_dir, step)
    path.mkdir(parents=True, exist_ok=True)
    if has_manifest(path):
        raise FileExistsError(errno.EEXIST, "a checkpoint is there", str(path / MANIFEST))
    return path


def files_of(path: Path, stage: int, *, reads_all: bool = False) -> Files:
    """The facts of a part's files, by their names in the checkpoint.

    Only small files are read, and have a SHA-256, unless `reads_all`.
    """
    files = sorted(file for file in (path / part_name(stage)).rglob("*") if file.is_file())
    with ThreadPoolExecutor(THREADS) as pool:
        described = pool.map(functools.partial(_describe, reads_all=reads_all), files)
        return {
            file.relative_to(path).as_posix(): what
            for file, what in zip(files, described, strict=True)
        }


def _describe(path: Path, *, reads_all: bool = False) -> dict[str, Any]:
    size = path.stat().st_size
    has_arrays = path.parent.name == DATA and size > SMALL_BYTES
    is_read = reads_all or not has_arrays
    return {"bytes": size, "sha256": sha256_of(path) if is_read else None}


def sha256_of(path: Path) -> str:
    with open(path, "rb", opener=regular_files.opener) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # a little at a time


def describe(
    step: int,
    *,
    sequences: int,
    settings: Mapping[str, Any],
    data: Mapping[str, str],
    plan_hash: str,
    arrays: Mapping[str, Mapping[str, Any]],
    files: Files,
    stores: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
) -> str:
    """The text of the manifest of parts that were written after a step, with the time now.

    Args:
      sequences: consumed before it.
      settings: `Checkpoint.settings`.
      data: digests of each split and of the order of the data.
      arrays: array -> its dtype, shape and digest, and the name of the part that holds it.
      files: what `files_of` gave for each part.
      stores: part -> identifier, node and folder of its store; empty: all parts are here.
    """
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "step": step,
        "time_s": round(time.time(), 3),
        "sequences": sequences,
        "settings": settings,
        "data": data,
        "plan_hash": plan_hash,
        "arrays": arrays,
        "files": files,
        **({"stores": stores} if stores else {}),
    }
    return text_of(manifest)


def commit(run_dir: str | Path, step: int, text: str) -> None:
    """Makes a checkpoint of parts that were written, by its manifest; done when this returns.

    Raises OSError; FileExistsError if there is a manifest.
    """
    path = folder_of(run_dir, step)
    path.mkdir(parents=True, exist_ok=True)  # where no part is in this folder
    write_whole(path / MANIFEST, text, replaces=False)


def text_of(manifest: Mapping[str, Any]) -> str:
    """The text of a manifest's file, with a new SHA-256 of its content."""
    content = dict(manifest)
    return json.dumps({**content, "sha256": _manifest_sha256(content)}, indent=1)


def withdraw(run_dir: str | Path, step: int) -> None:
    """Takes a commit back, where the run turns out to be another's."""
    (folder_of(run_dir, step) / MANIFEST).unlink(missing_ok=True)


def _manifest_sha256(manifest: Mapping[str, Any]) -> str:
    content = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
