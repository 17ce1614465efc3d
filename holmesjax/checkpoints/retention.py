"""Keeps some checkpoints of a run, and takes the others away. Does not import JAX.

The newest stay (`checkpoint.keep`), and the first of each period (`checkpoint.keep_every_hours`, by
the times in the manifests). Of what was set aside as damaged, the newest stay.

Nothing here can make a save fail: what cannot be removed is told, and tried again after the next
save. A folder is renamed before it is deleted, by way of the lease (`Lease.move`): a process that
has lost the run while it stood still takes nothing from its successor.

    step_00000100.removed        on its way to be deleted: half of it may be gone
"""

import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from holmesjax.checkpoints import committed, manifest, stores
from holmesjax.checkpoints.mirror import Mirror
from holmesjax.checkpoints.setting_aside import Move
from holmesjax.config import CheckpointConfig
from holmesjax.files import json_text

REMOVED = ".removed"
DAMAGED = re.compile(r"step_(\d+)(?:\.(\d+))?\.damaged")


class Retention:
    """Takes away what a run need not keep.

    Args:
      run_dir: the run folder.
      config: says what stays.
      move: renames what is taken away (`Lease.move`); its LostLeaseError passes through.
      warn: takes a line about what cannot be removed.
      check: called before a record is written (`Lease.check`).
      mirror: follows what is removed here.
    """

    def __init__(
        self,
        run_dir: str | Path,
        config: CheckpointConfig,
        move: Move,
        warn: Callable[[str], None],
        check: Callable[[], object] = lambda: None,
        mirror: Mirror | None = None,
    ):
        self._mirror = mirror
        self._run_dir, self._config = Path(run_dir).absolute(), config
        self._move, self._warn, self._check = move, warn, check
        self._times_s: dict[tuple[Path, float], float] = {}  # of files, which are read once

    def after_start(self) -> None:
        """Removes what a crash has left behind."""
        self._remove(lambda: self._unfinished(None))

    def after_failure(self, step: int) -> None:
        """Removes what a save that failed has left: its room is what the next one needs."""
        self._remove(lambda: self._unfinished(step))

    def after_commit(self, step: int) -> None:
        """Writes down that there is a checkpoint after `step`, and removes what it supersedes."""
        self._check()
        try:
            committed.note(self._run_dir, step)
        except OSError as error:
            path = self._run_dir / committed.RECORD
            self._warn(f"warning: {path} cannot be written: {error.strerror}")
        self._remove(lambda: [*self._unfinished(step), *self._superfluous(step), *self._damaged()])
        if self._mirror:
            self._mirror.follow(self._run_dir, stores.committed_steps(self._run_dir), step)

    def _remove(self, find: Callable[[], Iterable[Path]]) -> None:
        failed: list[str] = []
        try:
            for path in find():
                try:
                    self._remove_one(path)
                except OSError as error:
                    failed.append(f"{path}: {error.strerror}")
        except OSError as error:
            failed.append(str(error))
        if failed:
            self._warn(stores.unremoved(failed))

    def _remove_one(self, path: Path) -> None:
        """Renames a folder, whatever its name, and deletes it: the rename asks for the lease."""
        name, number = path.name.partition(".")[0], 1
        target = path.with_name(name + REMOVED)
        while target.exists():  # what could not be deleted before, or is this one
            number += 1
            target = path.with_name(f"{name}.{number}{REMOVED}")
        self._move(path, target)
        shutil.rmtree(target)

    def _unfinished(self, last: int | None) -> list[Path]:
        """Folders without a manifest, up to a step: later ones may be being written."""
        folder = self._run_dir / manifest.FOLDER
        names = manifest.listed(folder)
        return [folder / name for name in names if name.endswith(REMOVED)] + [
            path
            for step, path in manifest.folders(self._run_dir)
            if (last is None or step <= last) and not manifest.has_manifest(path)
        ]

    def _superfluous(self, last: int) -> list[Path]:
        found = [finished for finished in manifest.finished(self._run_dir) if finished[0] <= last]
        stay = {path for _, path in found[-self._config.keep :]}
        if hours := self._config.keep_every_hours:
            first_of: dict[float, Path] = {}
            for _, path in found:
                period = self._time_s(path) // (3600 * hours)
                first_of.setdefault(period, path)
            stay |= set(first_of.values())
        return [path for _, path in found if path not in stay]

    def _time_s(self, path: Path) -> float:
        """When a checkpoint was committed, in seconds since 1970. Raises OSError.

        A manifest of an earlier version does not say it: then it is the time of the file, which a
        copy of the run folder may have changed.
        """
        file = path / manifest.MANIFEST
        changed_s = file.stat().st_mtime
        if (file, changed_s) not in self._times_s:
            try:
                content = json_text.read(file)
            except ValueError:  # it is damaged
                content = None
            time_s = content.get("time_s") if isinstance(content, dict) else None
            known_s = float(time_s) if isinstance(time_s, int | float) else changed_s
            self._times_s[file, changed_s] = known_s
        return self._times_s[file, changed_s]

    def _damaged(self) -> list[Path]:
        folder = self._run_dir / manifest.FOLDER
        names = sorted(
            (int(match[1]), int(match[2] or 1), match[0]) for match in _damaged_in(self._run_dir)
        )
        return [folder / name for *_, name in names[: -stores.DAMAGED_KEPT]]


def _damaged_in(run_dir: Path) -> list[re.Match[str]]:
    names = manifest.listed(run_dir / manifest.FOLDER)
    return list(filter(None, map(DAMAGED.fullmatch, names)))


def set_aside(run_dir: Path) -> list[int]:
    """The steps whose checkpoint was found damaged, and not written again since."""
    damaged = {int(match[1]) for match in _damaged_in(run_dir)}
    return sorted(damaged - set(dict(manifest.finished(run_dir))))
