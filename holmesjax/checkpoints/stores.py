"""Run folders that are not the launcher's: what is in them, and what may come and go. No JAX.

    store.json                    the identifier of this folder, made once; half of it is its run's
    store_owner.json              the start of the run that may write here
    checkpoints/step_00000100/part_1/             written here, or fetched
                              part_0.fetching/    a copy that is not whole yet
                              manifest.json       as the launcher has it

A store of its own (`is_own`) belongs to a process that does not see the launcher's run folder. The
names of files come from other machines, so each is checked before it becomes a path.
"""

import contextlib
import json
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holmesjax.checkpoints import manifest
from holmesjax.checkpoints.manifest import Checkpoint
from holmesjax.errors import HolmesError, LostLeaseError, raise_if_passing
from holmesjax.files import json_text, places, regular_files, whole_files
from holmesjax.files.whole_files import write_whole

RECORD, OWNER = "store.json", "store_owner.json"
DAMAGED_KEPT = 2  # folders; each may be as large as a checkpoint
SHOWN = 3  # of what cannot be removed, in a message
PIECE_BYTES = 4 << 20  # of a file, at most, in memory at a time
FETCHING = ".fetching"
# Of a run folder, what a process reads besides checkpoints. The folders are small.
RUN_FILES = ("config.yaml", "topology.yaml", "plan.yaml", "committed.json")
RUN_FOLDERS = ("tokenizer", "hugging_face")
_WORD = r"[A-Za-z0-9_][A-Za-z0-9._+=@~-]{0,254}"  # without a dot in front
_OF_CHECKPOINT = re.compile(rf"checkpoints/step_\d{{8,18}}/(?:{_WORD}/){{0,8}}{_WORD}")
_START = re.compile(r"(?P<home>.+)-(?P<epoch>\d+)-(?P<attempt>\d+)")  # of `start_name`
_OF_RUN = re.compile(rf"(?:{'|'.join(RUN_FOLDERS)})/(?:{_WORD}/){{0,3}}{_WORD}")


def identifier(folder: Path, run: str | None = None) -> str:
    """The identifier of a run folder, which is made if it has none. Raises OSError.

    Args:
      folder: the run folder.
      run: the run of a new store, as `run_of`; None: a new run.

    Raises HolmesError for a URL, which would become a folder here, and for a damaged record.
    """
    if places.is_url(folder):
        fix = "name a folder that this machine has; launch gather copies a checkpoint to a URL"
        raise HolmesError(str(folder), "is a URL, and no folder", found="a scheme", fix=fix)
    folder.mkdir(parents=True, exist_ok=True)
    if found := known_identifier(folder):
        return found
    with contextlib.suppress(FileExistsError):  # another process was faster
        made = (run or secrets.token_hex(8)) + secrets.token_hex(8)
        write_whole(folder / RECORD, json.dumps({"id": made}), replaces=False)
    found = known_identifier(folder)
    assert found, f"{folder / RECORD} was just written"
    return found


def run_of(store: str) -> str:
    """The run of a store, by its identifier."""
    return store[:16]


def join(folder: Path, home: str) -> str:
    """The identifier of a store of the run of `home`, which is made in a folder of no run.

    The launcher's files replace those of a store, so the folder of another run is none.

    Raises:
      HolmesError: the folder is that of another run.
    """
    names = [name for name in (*RUN_FILES, manifest.FOLDER) if (folder / name).exists()]
    found = known_identifier(folder)  # after them: others of this node may be joining
    if found is None and not names:
        return identifier(folder, run_of(home))
    if found is not None and run_of(found) == run_of(home):
        return found
    fix = "name an empty folder, or that of this run, with run_dir or as the argument of the worker"
    what = f"the identifier {found}, not {run_of(home)}..." if found else ", ".join(names)
    raise HolmesError(str(folder), "is the folder of another run", found=what, fix=fix)


def known_identifier(folder: Path) -> str | None:
    """The identifier of a run folder; None if it has none. Raises HolmesError for what is none."""
    if RECORD not in manifest.listed(folder):  # asks a file server, as a look-up may not
        return None
    try:
        found = json_text.read(folder / RECORD)["id"]
        if re.fullmatch("[0-9a-f]{32}", found):
            return str(found)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise_if_passing(error)
    fix = "remove it: a new one is made, and parts that are here are then fetched anew"
    raise HolmesError(str(folder / RECORD), "names no store", found="other content", fix=fix)


def is_own(folder: Path, home: str | None) -> bool:
    """Whether a folder is another one than the launcher's, whose identifier is `home`."""
    return home is not None and known_identifier(folder) != home


def place_of(folder: Path, name: str) -> Path:
    """The path of a file that another machine names. Raises ValueError for what must not be named.

    >>> place_of(Path("/r"), "checkpoints/step_00000001/part_0/d/a1").name
    'a1'
    """
    path = folder / known_name(name)
    if not path.resolve().is_relative_to(folder.resolve()):  # by a symbolic link
        raise ValueError(f"{name[:200]!r} leads out of the run folder")
    return path


def known_name(name: str) -> str:
    """The name itself, of a file that may be asked for. Raises ValueError for any other."""
    if not (name in RUN_FILES or _OF_CHECKPOINT.fullmatch(name) or _OF_RUN.fullmatch(name)):
        raise ValueError(f"{name[:200]!r} is no file that may be asked for")
    return name


def name_in(step: int, file: str) -> str:
    """The name of a checkpoint's file, in its run folder."""
    return f"{manifest.FOLDER}/step_{step:08d}/{file}"


def step_and_part(name: str) -> tuple[int, str]:
    """The step and the part of a checkpoint's file, by its name in the run folder; else 0 and "".

    >>> step_and_part("checkpoints/step_00000100/part_1/d/a1"), step_and_part("plan.yaml")
    ((100, 'part_1'), (0, ''))
    """
    if not _OF_CHECKPOINT.fullmatch(name):
        return 0, ""
    _, folder, file = name.split("/", 2)
    return int(folder.removeprefix("step_")), manifest.part_of(file)


def name_at_url(step: int, file: str, start: str) -> str:
    """The name of a checkpoint's file at a URL, where each start writes into a folder of its own.

    So what a start that has lost the run still writes cannot replace what its successor has
    written. `start` is "" for what no start of a run has written, such as `launch gather`.

    Raises ValueError for a start whose name may not be that of a folder.

    >>> name_at_url(1, "part_0/d/a1", "x-3-0")
    'checkpoints/step_00000001/x-3-0/part_0/d/a1'
    """
    return known_name(name_in(step, f"{start}/{file}" if start else file))


def run_files(folder: Path) -> dict[str, int]:
    """The files that a process of another store needs, besides checkpoints, with their bytes."""
    found = [folder / name for name in RUN_FILES]
    for name in RUN_FOLDERS:
        found += sorted((folder / name).rglob("*"))
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in found
        if path.is_file() and not path.name.endswith(".tmp")
    }


def read_piece(folder: Path, name: str, first: int, count: int) -> bytes:
    """Bytes of a file from a place on. Raises OSError, and ValueError as `place_of`."""
    if not (first >= 0 and 0 <= count <= PIECE_BYTES):
        raise ValueError(f"a piece of {count} bytes from {first} on")
    with regular_files.open_file(place_of(folder, name)) as file:
        file.seek(first)
        return file.read(count)


def read_whole(folder: Path, name: str, num_bytes: int) -> bytes:
    """All bytes of a small file. Raises as `read_piece`."""
    pieces = range(0, num_bytes, PIECE_BYTES)
    return b"".join(read_piece(folder, name, first, PIECE_BYTES) for first in pieces)


def held(folder: Path, step: int, files: Mapping[str, Any]) -> list[str]:
    """The parts of a checkpoint that are here, with every file in its size.

    Args:
      folder: the run folder.
      step: of the checkpoint.
      files: of its manifest; the SHA-256 of small ones is compared where they are fetched or read.
    """
    of_part: dict[str, list[tuple[str, int]]] = {}
    for name, facts in files.items():
        of_part.setdefault(manifest.part_of(name), []).append((name, int(facts["bytes"])))
    is_here = lambda sizes: all(_has(folder, step, *size) for size in sizes)
    return [part for part, sizes in of_part.items() if is_here(sizes)]


def _has(folder: Path, step: int, file: str, num_bytes: int) -> bool:
    try:
        return place_of(folder, name_in(step, file)).stat().st_size == num_bytes
    except (OSError, ValueError):
        return False


def lost(folder: Path, checkpoint: Checkpoint) -> list[str]:
    """The parts of a checkpoint that were written to this folder and are not in it any more."""
    store = known_identifier(folder)
    return [
        part
        for part, where in manifest.elsewhere(checkpoint).items()
        if where["id"] == store and not places.is_url(where["folder"])
    ]


def committed_steps(folder: Path) -> list[int]:
    """The steps whose manifest is in a store."""
    return [step for step, _ in manifest.finished(folder)]


# ---- what comes and goes -------------------------------------------------------------------------


def start_name(home: str, epoch: int, attempt: int = 0) -> str:
    """The name of a start of the run, which no other start has, and which is that of a folder, too.

    Args:
      home: the identifier of the launcher's run folder.
      epoch: of the owner of that folder.
      attempt: how often that owner has started the processes before.
    """
    return f"{home}-{epoch}-{attempt}"


def is_of(start: str, home: str | None) -> bool:
    """Whether a start is one of a launcher's run folder."""
    return home is not None and start.startswith(f"{home}-")


def begin(folder: Path, start: str, say: Callable[[str], object] = print) -> Callable[[], None]:
    """Makes a store that of one start of the run, by its name.

    The function that is returned raises LostLeaseError if another start has begun since. A store
    that has come back empty stays this start's, and `say` is told: what it had is gone, and else
    nothing would be saved there any more.

    Raises as `refuse_earlier`.
    """
    path, store = folder / OWNER, identifier(folder)
    refuse_earlier(str(folder), start, owner(folder))
    write_whole(path, owner_text(start))

    def check() -> None:
        try:
            found = json_text.read(path).get("start")
        except FileNotFoundError:
            found = _write_records_again(folder, store, start)
            if found == start:
                what = f"{folder} has come back without {OWNER}, empty or not mounted"
                say(f"warning: {what}; saves go on")
        if found != start:
            raise superseded(str(folder), found)

    return check


def _write_records_again(folder: Path, store: str, start: str) -> str | None:
    """Writes those records of a store that are gone. Raises OSError.

    Returns the start that the store belongs to now, or the identifier of another store.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in ((RECORD, json.dumps({"id": store})), (OWNER, owner_text(start))):
        with contextlib.suppress(FileExistsError):
            write_whole(folder / name, text, replaces=False)
        if (known := known_identifier(folder)) != store:
            return known
    return owner(folder)


def owner_text(start: str) -> str:
    """The content of `OWNER`, which names the start that a store belongs to."""
    return json.dumps({"start": start})


def owner(folder: Path) -> str | None:
    """The start that a store belongs to, by its name; None if there is none."""
    with contextlib.suppress(FileNotFoundError, ValueError, AttributeError):  # or no record
        found = json_text.read(folder / OWNER).get("start")
        return found if isinstance(found, str) else None
    return None


def refuse_earlier(place: str, start: str, owner: str | None) -> None:
    """Raises LostLeaseError for a start that only wakes up when a later one has begun.

    Only starts of the same launcher's folder have an order.

    Args:
      place: the run folder, or its URL.
      start: which is to write there, by its name.
      owner: the start that wrote there last.
    """
    mine, last = _START.fullmatch(start), _START.fullmatch(owner or "")
    if not mine or not last or mine["home"] != last["home"]:
        return
    number = lambda match: (int(match["epoch"]), int(match["attempt"]))
    if number(last) > number(mine):
        raise superseded(place, owner)


def superseded(place: str, owner: str | None) -> LostLeaseError:
    """The error of a start where another one owns a run folder or a URL."""
    problem = "belongs to another start of the run by now, so nothing is written"
    fix = f"let the other start go on; if it has ended for good, remove {OWNER} there"
    return LostLeaseError(place, problem, found=owner, fix=fix)


def keep(
    folder: Path,
    steps: Collection[int],
    last: int,
    dropped: Collection[int],
    check: Callable[[], object] = lambda: None,
    say: Callable[[str], object] = lambda text: None,
) -> list[int]:
    """Takes away what the launcher has not kept; the steps that lack their manifest here.

    A checkpoint with a manifest goes only where the launcher has a newer one. What cannot be
    removed holds up no manifest of another step.

    Args:
      folder: the run folder.
      steps: the checkpoints that the launcher has.
      last: newer ones may be being written.
      dropped: checkpoints that it has set aside as damaged.
      check: raises where the folder is another start's by now; then all stays in its place.
      say: takes a line about what cannot be removed.
    """
    lacking: list[int] = []
    failed: list[str] = []
    check()
    for step, path in manifest.folders(folder):
        with _noting(path, failed):
            has_manifest = manifest.has_manifest(path)
            if step in steps:
                lacking += [] if has_manifest else [step]
            elif step in dropped and has_manifest:
                _move(path, "damaged", check)
            elif step <= last and (not has_manifest or step < max(steps, default=-1)):
                _move(path, "removed", check)
    checkpoints = folder / manifest.FOLDER
    for path in sorted(checkpoints.glob("step_*.damaged"), key=_step_of)[:-DAMAGED_KEPT]:
        with _noting(path, failed):
            _move(path, "removed", check)
    for path in checkpoints.glob("*.removed"):
        with _noting(path, failed):
            shutil.rmtree(path)
    if failed:
        say(unremoved(failed))
    return lacking


@contextlib.contextmanager
def _noting(path: Path, failed: list[str]) -> Iterator[None]:
    """Notes what cannot be done with a folder."""
    try:
        yield
    except OSError as error:
        failed.append(f"{path}: {error.strerror}")


def unremoved(failed: Sequence[str]) -> str:
    """The warning about what cannot be removed."""
    more = f"; and {len(failed) - SHOWN} more" if len(failed) > SHOWN else ""
    return (
        "warning: old files of checkpoints cannot be removed, which is tried again after the next "
        f"save: {'; '.join(failed[:SHOWN])}{more}"
    )


def _step_of(path: Path) -> int:
    """The step of a checkpoint that was set aside, by its name; 0 for what is none."""
    match = manifest.STEP.match(path.name)
    return int(match[1]) if match else 0


def _move(path: Path, why: str, check: Callable[[], object]) -> None:
    """Renames a checkpoint, and back where `check` raises: another start may write there."""
    target = path.with_name(f"{path.name}.{secrets.token_hex(4)}.{why}")
    path.rename(target)
    try:
        check()
    except BaseException:
        target.rename(path)
        raise


class ChangedError(ValueError):
    """A file that was fetched has another SHA-256 than in its manifest."""

    def __init__(self, file: str):
        super().__init__(f"{file} has not the SHA-256 of its manifest")
        self.file = file


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A part that is being fetched into a store.

    Args:
      folder: the run folder.
      step: of the checkpoint.
      part: the name of the part.
      files: of the manifest.
    """

    folder: Path
    step: int
    part: str
    files: Mapping[str, Any]

    @property
    def own_files(self) -> dict[str, Any]:
        """The files of the part, by their names in the checkpoint."""
        return {k: x for k, x in self.files.items() if k.startswith(f"{self.part}/")}

    @property
    def path(self) -> Path:
        """The folder of the part."""
        return manifest.folder_of(self.folder, self.step) / self.part

    @property
    def num_bytes(self) -> int:
        """All bytes of the part."""
        return sum(int(facts["bytes"]) for facts in self.own_files.values())

    def begun(self) -> int:
        """Bytes that are here of its files, as far as they have grown; changes nothing."""
        growing, total = self.path.with_name(self.part + FETCHING), 0
        for file, facts in self.own_files.items():
            with contextlib.suppress(OSError):
                size = (growing / file.partition("/")[2]).stat().st_size
                total += size if size <= facts["bytes"] else 0  # it is fetched anew
        return total

    def growing(self, file: str) -> Path:
        """The file that grows. Raises ValueError for a name that must not be."""
        place_of(self.folder, name_in(self.step, file))
        inside = file.partition("/")[2]
        path = self.path.with_name(self.part + FETCHING) / inside
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def missing(self, file: str) -> int | None:
        """From which byte on a file is to be fetched; None: it is all there."""
        path, wanted = self.growing(file), int(self.files[file]["bytes"])
        size = path.stat().st_size if path.exists() else 0
        if size > wanted:
            path.unlink()
            size = 0
        return None if size == wanted and path.exists() else size

    def finish(self) -> None:
        """Renames the copy, on the disk when this returns.

        Raises ChangedError if files are not what the manifest says; all these are then removed.
        """
        growing = self.path.with_name(self.part + FETCHING)
        changed = [
            file
            for file, facts in self.own_files.items()
            if facts["sha256"] and manifest.sha256_of(self.growing(file)) != facts["sha256"]
        ]
        for file in changed:
            self.growing(file).unlink()
        if changed:
            raise ChangedError(changed[0])
        whole_files.sync_below(growing)
        if self.path.exists():  # not whole: nothing is fetched that is
            self.path.rename(self.path.with_name(f"{self.part}.{secrets.token_hex(4)}.damaged"))
        growing.rename(self.path)
        whole_files.sync(self.path.parent)
