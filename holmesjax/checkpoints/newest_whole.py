"""The newest checkpoint of a run that is whole: where a run goes on, and what readers read. No JAX.

The owner of a run sets aside what two processes have found damaged, and refuses to go on from less
than was committed. Whoever only reads changes nothing.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from holmesjax.checkpoints import committed, manifest, setting_aside
from holmesjax.checkpoints.manifest import Checkpoint
from holmesjax.checkpoints.setting_aside import Move
from holmesjax.errors import CheckpointError, DamagedError, GoneError, raise_if_passing

Damaged = Mapping[Path, DamagedError]  # checkpoints whose arrays were found damaged, and how


def find(
    run_dir: str | Path,
    warn: Callable[[str], None],
    *,
    move: Move | None = None,
    known: Damaged = MappingProxyType({}),
    check: Callable[[], object] = lambda: None,
    confirm: Callable[[Checkpoint, DamagedError], None] = lambda checkpoint, error: None,
    pause: Callable[[float], object] = time.sleep,
    fetches: bool = False,
    has_partner: bool = False,
) -> Checkpoint | None:
    """The newest checkpoint that is whole, as far as is seen without reading arrays.

    Warns where a newer one is damaged.

    Args:
      known: what was found when arrays were read, and was confirmed.
      move: the owner of the run gives it, and nobody else. Damaged checkpoints are then renamed, so
        that they count no more, and the newest that is known must be there (`committed`).
      check: called before anything is written; raises where the run is another's by now.
      confirm: returns if another process finds damage, too (`second_reading`).
      pause: waits for some seconds; what it raises ends a wait of a minute.
      fetches: whether parts may be in other stores, which processes then fetch.
      has_partner: whether that may be the memory of a partner, so that only the damaged part of a
        checkpoint is set aside.

    Raises CheckpointError if all are damaged, or the newest is gone; nothing is renamed.
    """
    if move:
        _refuse_lost(run_dir, warn, pause)
    bad: list[tuple[Checkpoint, DamagedError]] = []
    left, mended = manifest.find(run_dir), set[Path]()
    while left:
        candidate = left[0]
        try:
            if candidate.path in known and candidate.path not in mended:
                raise known[candidate.path]
            manifest.verify(candidate)
            if not fetches:
                manifest.refuse_elsewhere(candidate)
        except DamagedError as error:
            if move and candidate.path not in known:
                warn(f"{error.where}: {error.problem}; another process reads it once more")
                confirm(candidate, error)
            part = manifest.damaged_part(candidate, error)
            may_be_there = has_partner and part in candidate.manifest.get("stores", {})
            if not (move and part and may_be_there) or isinstance(error, GoneError):
                bad.append((candidate, error))
                left.pop(0)
                continue
            setting_aside.set_part_aside(candidate, part, move)
            mended.add(candidate.path)  # and is looked at again: another part may be damaged, too
            warn(f"warning: {error.where}: {error.problem}; a partner may have it in memory")
            continue
        if move:
            check()
            _note(run_dir, candidate.step)
        for other, why in bad:
            lines = [f"warning: {why.where}: {why.problem}", f"  found: {why.found}"]
            if move:
                lines.append(f"  it is set aside as {setting_aside.set_aside(other.path, move)}")
            lines.append(f"  the checkpoint after step {candidate.step} is used instead")
            warn("\n".join(lines))
        return candidate
    if bad:
        why = bad[0][1]
        fix = f"{why.fix}; no other is whole: to begin anew, use another run.dir"
        raise CheckpointError(why.where, why.problem, found=why.found, fix=fix)
    return None


def _refuse_lost(
    run_dir: str | Path, warn: Callable[[str], None], pause: Callable[[float], object]
) -> None:
    """Raises CheckpointError if no checkpoint is as new as the newest that was committed."""
    step = committed.read(run_dir)
    with manifest.telling(run_dir):
        newest_step = max(dict(manifest.finished(run_dir)), default=-1)
        if step is None or newest_step >= step:
            return
        limit = f"up to {manifest.SEEN_S:g} s"
        warn(f"waiting {limit} for the checkpoint after step {step} to be seen here")
        if not manifest.appears(run_dir, step, pause):
            raise committed.lost(run_dir, step, newest_step if newest_step >= 0 else None)


def _note(run_dir: str | Path, step: int) -> None:
    """Writes down where the run goes on, before newer checkpoints are set aside."""
    try:
        if committed.read(run_dir) != step:
            committed.note(run_dir, step)
    except OSError as error:
        raise_if_passing(error)
        path = str(Path(run_dir) / committed.RECORD)
        fix = "make the run folder writable, or free its disk"
        raise CheckpointError(path, "cannot be written", found=error.strerror, fix=fix) from None
