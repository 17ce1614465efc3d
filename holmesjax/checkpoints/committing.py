"""Commits checkpoints that are whole, and gives up those that cannot be written. No JAX.

One place decides for all processes of a run and hears of them all: the launcher, or the process
itself where it is the only one.
"""

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from holmesjax import units
from holmesjax.checkpoints import island_states, manifest, skipped_data
from holmesjax.checkpoints.changed_settings import settings
from holmesjax.checkpoints.mirror import Mirror
from holmesjax.checkpoints.resume import Start
from holmesjax.checkpoints.retention import Retention
from holmesjax.errors import PeerError
from holmesjax.liveness.lease import Lease
from holmesjax.plan.meeting_steps import steps_of

RETRY_S = 30.0  # after a save that failed; twice as long after each further one
MAX_RETRY_S = 600.0
MOST_WAITING = 2  # checkpoints that wait for their commit, until the next save is put off


@dataclass
class _Told:
    """The state of a checkpoint that is being written, or waits for its commit."""

    tellers: list[str] = field(default_factory=list)  # that have told of it
    arrays: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: manifest.Files = field(default_factory=dict)


class _Failure(NamedTuple):
    """Why a save has failed, and when."""

    reason: str
    seconds: float  # of the clock


class Saves:
    """The checkpoints of a session: committed when whole, given up when a part cannot be written.

    Training goes on after a save that failed, and the next is tried after a pause, which grows. If
    saves have failed for too long, or if the last one fails, the run ends. Checkpoints that are
    committed stay as they are: what follows a commit cannot make it fail.

    Args:
      run_dir: the run folder.
      num_tellers: how many tell of each checkpoint, with `saved` or with `failed`.
      commit: makes a checkpoint of what all have told.
      retention: removes what need not stay.
      warn: takes a line about each save that failed, when it fails.
      committed: told of each step after which a checkpoint was committed.
      in_turn: does what follows when all have told of a save: one after the other, in another
        thread, say. Otherwise whoever tells last does it.
      limit_s: how long saves may fail; a failure after that, which is not the first, ends the run.
      clock: seconds that only grow.
    """

    def __init__(
        self,
        run_dir: Path,
        num_tellers: int,
        commit: Callable[[int, dict[str, dict[str, Any]], manifest.Files], None],
        retention: Retention,
        warn: Callable[[str], None],
        committed: Callable[[int], object] = lambda step: None,
        *,
        in_turn: Callable[[Callable[[], None]], object] = lambda end: end(),
        limit_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._limit_s, self._clock = limit_s, clock
        self._is_spent = self._is_full = False
        self._run_dir, self._num_tellers, self._committed = run_dir, num_tellers, committed
        self._commit, self._retention, self._warn = commit, retention, warn
        self._in_turn = in_turn
        self._told: dict[int, _Told] = {}
        self._failed: dict[int, str] = {}  # why each step has no checkpoint
        self._failures: dict[int, _Failure] = {}  # by step, since the last checkpoint

    def begun(self, step: int) -> None:
        """A checkpoint after this step is to be written; told from any thread."""
        self._told.setdefault(step, _Told())

    def outstanding(self) -> dict[int, list[str]]:
        """The steps of the saves that have not ended, and who has told of each."""
        return {step: told.tellers for step, told in sorted(self._told.copy().items())}

    def may_begin(self, step: int) -> bool:
        """Whether a save after this step may begin; from any thread.

        Not while `MOST_WAITING` checkpoints wait for their commits, which is said once: commits
        that take longer than an interval would otherwise pile up without end.
        """
        has_all_told = lambda tellers: len(tellers) >= self._num_tellers
        waiting = [of for of, tellers in self.outstanding().items() if has_all_told(tellers)]
        was_full, self._is_full = self._is_full, len(waiting) >= MOST_WAITING
        if self._is_full and not was_full:
            self._warn(
                f"warning: no checkpoint after step {step}: the commits of those after steps "
                f"{', '.join(map(str, waiting))} have not ended; the next save begins when one has"
            )
        return not self._is_full

    def saved(
        self,
        step: int,
        arrays: dict[str, dict[str, Any]],
        files: manifest.Files,
        teller: str = "",
    ) -> None:
        """Takes what a part holds, as `manifest.describe` does, and who tells it."""
        told = self._told.setdefault(step, _Told())
        told.arrays |= arrays
        told.files |= files
        self._count(step, told, teller)

    def failed(self, step: int, reason: str, teller: str = "", *, counts: bool = True) -> None:
        """Takes, in one line, why a part cannot be written.

        Args:
          reason: empty where another process of the stage tells it, perhaps later.
          teller: who tells it.
          counts: whether who tells is one of the `num_tellers`.
        """
        is_first = bool(reason) and not self._failed.get(step)
        self._failed[step] = self._failed.get(step) or reason
        if is_first:
            failure = self._failures[step] = _Failure(reason, self._clock())
            failures = list(self._failures.values())
            left_s = self._limit_s - (failure.seconds - failures[0].seconds)
            self._is_spent = len(failures) > 1 and left_s <= 0
            pause = units.duration(self._pause_s)  # unless one is due before
            end = "" if self._is_spent else f"; the next is tried in {pause} at the latest"
            if left_s > 0:
                end += f", and the run ends if saves fail for {units.duration(left_s)} more"
            self._warn(f"warning: no checkpoint after step {step}: {reason}{end}")
        if counts:
            self._count(step, self._told.setdefault(step, _Told()), teller)

    def check(self, *, at_end: bool = False) -> None:
        """Raises PeerError where saves have failed for too long; at the end after any failure."""
        failures = list(self._failures.values())  # another thread may have saved since
        if not failures or not (at_end or self._is_spent):
            return
        raise PeerError(  # a disk may have room again
            str(self._run_dir / manifest.FOLDER),
            "a checkpoint could not be written",
            found=failures[-1].reason,
            fix="free space or choose another run.dir, then resume from the last checkpoint",
        )

    @property
    def _pause_s(self) -> float:
        """Until the next save is tried: longer after each failure."""
        return min(RETRY_S * 2.0 ** (len(self._failures) - 1), MAX_RETRY_S)

    def is_retry_due(self) -> bool:
        """Whether it is time for another save after one that failed; from any thread."""
        failures = list(self._failures.values())
        has_ended = bool(failures) and not self._told
        return has_ended and self._clock() - failures[-1].seconds >= self._pause_s

    def _count(self, step: int, told: _Told, teller: str) -> None:
        told.tellers.append(teller)
        if len(told.tellers) == self._num_tellers:
            self._in_turn(functools.partial(self._end, step, told))

    def _end(self, step: int, told: _Told) -> None:
        """Commits the checkpoint that all have told of, or gives it up."""
        if step not in self._failed:
            try:
                self._commit(step, told.arrays, told.files)
            except OSError as error:
                self.failed(step, str(error), counts=False)
        if step in self._failed:
            self._retention.after_failure(step)
        else:
            # A later save may have failed by now. It is not mended by this checkpoint.
            for earlier in [failed for failed in list(self._failures) if failed < step]:
                del self._failures[earlier]
            self._is_spent = False
            self._retention.after_commit(step)
            self._committed(step)  # now: stores keep what they find kept here
        del self._told[step]  # last: until then nothing is tried again


def _settings(start: Start) -> dict[str, dict[str, Any]]:
    """The settings that a manifest keeps, and since when islands meet as they do."""
    job, kept = start.job, settings(start.job)
    if "parallel" in kept:
        clusters, parallel = island_states.clusters_of(job.plan), job.config.parallel
        kept["parallel"]["since"] = island_states.since(
            start.checkpoint,
            clusters,
            steps_of(parallel),
            parallel.outer_rule,
            job.plan.batch_shares,
        )
    return kept


def commit(
    start: Start,
    step: int,
    arrays: dict[str, dict[str, Any]],
    files: manifest.Files,
    *,
    data: Mapping[str, str],
    stores: Callable[[], Mapping[str, Mapping[str, str]]] = dict,
    owner: Lease | None = None,
    mirror: Mirror | None = None,
) -> None:
    """Makes a checkpoint of the parts that all stages have written after a step.

    Args:
      start: of the session that trains.
      step: optimizer steps done.
      arrays, files, data: for `manifest.describe`.
      stores: gives what `manifest.describe` takes.
      mirror: has the manifest before the run folder has it.
      owner: of the run; the commit is taken back where the run turns out to be another's.
    """
    job = start.job
    after = job.config.train.sequences_after
    left_out = skipped_data.sequences(start.skipped, start.step, step)
    text = manifest.describe(
        step,
        sequences=start.sequences + after(step) - after(start.step) + left_out,
        settings=_settings(start),
        data=data,
        plan_hash=job.plan.hash(),
        arrays=arrays,
        files=files,
        stores=stores(),
    )
    if mirror:  # not while the lease waits for it
        if owner:
            owner.check()
        mirror.commit(job.run_dir, step, text)
    write = functools.partial(manifest.commit, job.run_dir, step, text)
    if owner is None:
        write()
    else:
        owner.act(write, lambda: manifest.withdraw(job.run_dir, step))
